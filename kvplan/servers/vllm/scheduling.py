"""Effects of vLLM's arguments on scheduling in a simulation.

Sources: vLLM 0.33 config/scheduler.py and config/cache.py, and their use in v1/core/sched/ and
v1/core/kv_cache_manager.py.
"""

from typing import Final

MODELED: Final = {
    "requests that run at once": "max_num_seqs",
    "tokens of a step": "max_num_batched_tokens performance_mode",
    "the pool, which bounds who is admitted": """
        gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override block_size max_model_len
        disable_hybrid_kv_cache_manager kv_cache_dtype
    """,
    "prompts that share a beginning": "enable_prefix_caching",
    "parts of prompts with decoding requests; off, a step must hold a whole prompt": "enable_chunked_prefill",
    "the next batch is scheduled before the last one's tokens are known": "async_scheduling",
    "adapters in a batch": "max_loras",
}
NO_EFFECT: Final = {
    "has an effect only with a flag that is not supported": """
        long_prefill_token_threshold_adaptive max_long_partial_prefills num_speculative_tokens
        cp_kv_cache_interleave_size swa_bounded_replay replayssm_buffer_len enable_mamba_shared_prefix_checkpoint
        elastic_ep_max_dp_size
    """,
    "how blocks are named": "prefix_caching_hash_algo",
    "is overruled, or refused with the plan": "mamba_block_size",
    "of another engine than vLLM's second, or of other hardware": "use_v2_block_manager additional_config",
    "of images, videos and sounds, which simulated requests do not have": "disable_chunked_mm_input",
    "of data-parallel ranks, each of which schedules alone": """
        data_parallel_size dp_sync_interval data_parallel_rank data_parallel_external_lb
    """,
    "when tokens are sent, not when they are computed": "stream_interval",
    "how long a step takes, not who runs in it": "tensor_parallel_size eplb_config numa_bind",
    "is metrics": "enable_mfu_metrics enable_logging_iteration_details",
}
ORDER: Final = "changes the scheduling order, which is not simulated; remove it"
REFUSED: Final = {
    ORDER: """
        scheduling_policy=fcfs scheduler_cls long_prefill_token_threshold=0 max_num_partial_prefills=1
        prefill_schedule_interval=1 scheduler_reserve_full_isl=true
        prefix_cache_retention_interval=0 max_num_scheduled_tokens
    """,
    "rejects requests, which is not simulated; remove it": "max_num_queued_reqs max_num_queued_tokens",
    "splits the server, which is not simulated; use --tensor-parallel-size": """
        pipeline_parallel_size=1 decode_context_parallel_size=1 prefill_context_parallel_size=1
    """,
}
