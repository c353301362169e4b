"""Effects of SGLang's arguments on scheduling in a simulation.

Sources: SGLang 0.5.23 srt/arg_groups/fields/schedule.py and memory.py, and their use in srt/managers/scheduler.py,
schedule_policy.py, schedule_batch.py, prefill_delayer.py and scheduler_components/.
"""

from typing import Final

MODELED: Final = {
    "requests that run at once": "max_running_requests",
    "tokens of a prompt in a step": "chunked_prefill_size",
    "the pages, which the pool gives out whole": "page_size",
    "the pool, which bounds who is admitted": "mem_fraction_static max_total_tokens context_length",
    "prompts that share a beginning": "disable_radix_cache",
    "the next batch is chosen before the last one's tokens are known": "disable_overlap_schedule",
}
NO_EFFECT: Final = {
    "read by nothing in SGLang 0.4.9 to 0.5.23": "num_continuous_decode_steps",
    "has an effect only with a flag that is not supported": """
        prefill_decode_interval_min_bs disable_priority_preemption default_priority_value
        abort_on_priority_when_disabled schedule_low_priority_values_first priority_scheduling_preemption_threshold
        prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark
        prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms radix_eviction_policy_config _radix_eviction_policy_explicitly_set
        disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_polling_interval disaggregation_decode_allocation_policy
        disaggregation_enable_kv_checksum num_reserved_decode_tokens optimistic_prefill_attempts
        speculative_draft_model_path speculative_draft_model_revision speculative_moe_a2a_backend
        speculative_num_steps speculative_num_draft_tokens hicache_storage_prefetch_retry_max_attempts
        encoder_transfer_backend
    """,
    "of pools of windows and states, which are refused": """
        swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set disable_hybrid_swa_memory
        max_mamba_cache_size mamba_full_memory_ratio uses_mamba_radix_cache mamba_track_interval
    """,
    "of data-parallel ranks, each of which schedules alone": """
        dp_size enable_dp_attention load_balance_method enable_dp_attention_local_control_broadcast
    """,
    "how a chunk's attention is computed": "disable_chunked_prefix_cache",
    "how memory is allocated": "enable_memory_saver",
    "of sessions, which simulated requests have not": "enable_streaming_session enable_session_radix_cache",
    "of requests longer than the context, which are turned away": "allow_auto_truncate",
    "of adapters, which simulated requests do not use": """
        enable_lora lora_paths max_loras_per_batch lora_drain_wait_threshold enable_lora_overlap_loading
    """,
    "what is sampled, not who runs": "random_seed sampling_mask_max_tokens skip_tokenizer_init mlx_enable_sampling",
    "when tokens are sent, not when they are computed": "stream_interval",
    "how long a step takes, not who runs in it": "tp_size moe_a2a_backend sampling_backend",
    "names, logs, processes and the tokenizer": """
        model_path revision served_model_name weight_version tokenizer_path tokenizer_mode tokenizer_backend
        trust_remote_code decode_log_interval enable_metrics enable_metrics_for_all_schedulers enable_mfu_metrics
        enable_request_time_stats_logging enable_forward_pass_metrics forward_pass_metrics_ipc_name
        forward_pass_metrics_worker_id enable_trace trace_modules otlp_service_name otlp_traces_endpoint
        kv_events_config load_publish_endpoint load_snapshot_publish_interval grpc_mode grpc_port smg_grpc_mode
        base_gpu_id device sleep_on_idle watchdog_timeout soft_watchdog_timeout enable_broadcast_mm_inputs_process
        ep_join_mode
    """,
}
ORDER: Final = "changes the scheduling order, which is not simulated; remove it"
REFUSED: Final = {
    ORDER: """
        schedule_policy=fcfs schedule_conservativeness=1|1.0 enable_mixed_chunk! max_prefill_tokens=16384
        prefill_max_requests prefill_decode_interval=0 enable_priority_scheduling! retraction_policy=length
        enable_prefill_delayer! min_free_slots_delay=1 radix_eviction_policy=lru strip_thinking_cache!
        enable_deterministic_inference! enable_hierarchical_cache disaggregation_mode
        speculative_algorithm
    """,
    "admits requests later than they arrive, which is not simulated; remove it": "scheduler_recv_interval=0|1",
    "rejects requests, which is not simulated; remove it": "max_queued_requests",
    "splits the server, which is not simulated; use --tp-size": "pp_size=1",
}
