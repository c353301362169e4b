"""SGLang's flags that are not in kvplan's table of arguments: their effect on GPU memory.

Sources: SGLang 0.5.23 srt/server_args.py and srt/arg_groups/; the pool follows from --mem-fraction-static, so other
allocations (graphs, workspaces) change its tokens only if the default fraction accounts for them.
"""

from collections.abc import Mapping
from typing import Final

from kvplan.servers.sglang import scheduling
from kvplan.servers.words.command import Other
from kvplan.servers.words.standing import others

READ: Final = {  # by kvplan.servers.sglang.command
    "the model that is sized": "model_path model revision",
    "--prefill-attention-backend and --decode-attention-backend, where they are not given": "attention_backend",
    "the largest of the graphs, or that there are none": """
        cuda_graph_bs cuda_graph_bs_decode disable_decode_cuda_graph
    """,
    "slots for LoRA adapters; their rank and modules must be stated": "enable_lora lora_paths",
    "speculative decoding; parts that kvplan cannot size are rejected by name": """
        speculative_algorithm speculative_draft_model_path speculative_draft_model speculative_dflash_block_size
        speculative_dspark_block_size
    """,
}
NO_EFFECT: Final = {
    "the HTTP and gRPC servers": """
        host port api_key admin_api_key served_model_name fastapi_root_path skip_server_warmup! warmups smg_grpc_mode!
        grpc_mode! grpc_port grpc_worker_threads grpc_response_timeout_secs smg_http_sidecar_port
        grpc_http_sidecar_port sidecar sidecar_args enable_http2! http2_max_concurrent_streams
        http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
        enable_ssl_refresh! enable_http_worker_reuseport! gated_launch_port weight_version
        stream_response_default_include_usage! incremental_streaming_output! stream_interval batch_notify_size
        enable_response_store! engine_info_bootstrap_port file_storage_path custom_sigquit_handler
    """,
    "requests and responses": """
        chat_template hf_chat_template_name completion_template trust_request_chat_template!
        default_chat_template_kwargs return_input_ids! return_output_ids! reasoning_parser tool_call_parser tool_server
        enable_strict_thinking! sampling_defaults preferred_sampling_params allow_auto_truncate! enable_cache_report!
        asr_max_buffer_seconds asr_max_concurrent_sessions grammar_backend constrained_json_whitespace_pattern
        constrained_json_disable_any_whitespace! constrained_json_max_whitespace_cnt disable_outlines_disk_cache!
        enable_custom_logit_processor! allowed_media_domains media_url_max_file_size_mb
    """,
    "logs, metrics and traces": """
        log_level log_level_http log_requests! log_requests_level log_requests_format log_requests_target
        uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost! enable_metrics! enable_mfu_metrics!
        enable_metrics_for_all_schedulers! load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets
        gc_warning_threshold_secs decode_log_interval enable_request_time_stats_logging! kv_events_config
        load_publish_endpoint enable_forward_pass_metrics! forward_pass_metrics_worker_id
        forward_pass_metrics_ipc_name enable_trace! trace_modules otlp_traces_endpoint otlp_service_name
        export_metrics_to_file! export_metrics_to_file_dir stat_loggers enable_layerwise_nvtx_marker!
        enable_profile_cuda_graph! expert_balancedness_report_mode spec_trace_dir
    """,
    "the tokenizer and the model's files": """
        tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num detokenizer_worker_num
        skip_tokenizer_init! trust_remote_code! model_config_parser model_impl model_loader_extra_config
        quantization_param_path download_dir weight_loader_disable_mmap! weight_loader_prefetch_checkpoints!
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load! model_checksum
        delete_ckpt_after_loading! decrypted_config_file decrypted_draft_config_file startup_weight_load_mode
        enable_dynamic_batch_tokenizer! dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
        enable_tokenizer_batch_encode! disable_tokenizer_batch_decode! modelexpress_config
    """,
    "scheduling order; the pool is the same": """
        schedule_policy schedule_conservativeness max_queued_requests prefill_decode_interval
        prefill_decode_interval_min_bs prefill_max_requests enable_priority_scheduling! disable_priority_preemption!
        default_priority_value abort_on_priority_when_disabled! schedule_low_priority_values_first!
        priority_scheduling_preemption_threshold retraction_policy radix_eviction_policy radix_eviction_policy_config
        _radix_eviction_policy_explicitly_set _swa_full_tokens_ratio_explicitly_set disable_chunked_prefix_cache!
        scheduler_recv_interval num_continuous_decode_steps enable_mixed_chunk! strip_thinking_cache!
        enable_streaming_session! enable_session_radix_cache! enable_prefill_delayer! prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms
        min_free_slots_delay random_seed load_balance_method uses_mamba_radix_cache mamba_track_interval
    """,
    "how one server hands its requests to another; the pools are the same": """
        disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_polling_interval disaggregation_decode_allocation_policy
        disaggregation_enable_kv_checksum! num_reserved_decode_tokens optimistic_prefill_attempts
    """,
    "processes and nodes": """
        device base_gpu_id gpu_id_step nnodes node_rank dist_init_addr nccl_init_addr nccl_port dist_timeout
        watchdog_timeout soft_watchdog_timeout sleep_on_idle! use_ray! numa_node gc_threshold pre_warm_nccl!
        enable_p2p_check! enable_dp_attention_local_control_broadcast! mlx_enable_sampling!
    """,
    "drafts: how they are looked up and accepted; SGLang allocates the same": """
        speculative_draft_model_revision speculative_attention_mode speculative_accept_threshold_single
        speculative_accept_threshold_acc speculative_moe_runner_backend
        speculative_moe_a2a_backend speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth
        speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity
        speculative_use_rejection_sampling! speculative_use_block_verification! speculative_dsa_topk_backend
        speculative_draft_load_format speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path
        speculative_dspark_align_verify_tokens_to_graph_tier!
    """,
    "images, videos and sounds of a request: no memory is reserved by their size": """
        limit_mm_data_per_request mm_process_config disable_fast_image_processor!
    """,
    "which adapter stays, and how its weights come; the slots are the same": """
        lora_eviction_policy lora_strict_loading! lora_drain_wait_threshold enable_lora_overlap_loading!
    """,
    "how memory is allocated: the pool is as large until the server is told to sleep": "enable_memory_saver!",
    "host memory": """
        mm_processor_worker_num mm_io_worker_num mm_preprocess_cache_size_mb trust_mm_content_hashes!
        enable_broadcast_mm_inputs_process! enable_adaptive_dispatch_to_encoder!
        enable_weights_cpu_backup! enable_draft_weights_cpu_backup! hicache_write_policy hicache_io_backend
        hicache_mem_layout hicache_storage_prefetch_policy hicache_storage_backend_extra_config
        hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
    """,
    "kernels: weights, states and KV are as large, and their workspaces lie outside the pool": """
        lora_backend max_lora_chunk_size lora_use_virtual_experts!
        sampling_backend moe_runner_backend mm_attention_backend fp8_gemm_runner_backend fp8_gemm_backend
        fp4_gemm_runner_backend fp4_gemm_backend bf16_gemm_backend dsa_paged_mqa_logits_backend dsa_topk_backend
        dsa_triton_union enable_dsa_fused_indexer! enable_lean_attention! disable_flashinfer_autotune!
        flashinfer_autotune_skip_ops mamba_backend linear_attn_backend linear_attn_decode_backend
        linear_attn_prefill_backend linear_attn_verify_backend enable_mamba_cache_stochastic_rounding!
        mamba_cache_philox_rounds disable_custom_all_reduce! enable_nccl_nvls! enable_mscclpp!
        flashinfer_allreduce_fusion_backend enable_flashinfer_allreduce_fusion!
        enforce_disable_flashinfer_allreduce_fusion! enable_aiter_allreduce_fusion!
        disable_aiter_allreduce_fusion_in_prefill! disable_aiter_allreduce_fusion_in_decode!
        enable_quant_communications! boundary_reduction enable_fused_moe_sum_all_reduce! enable_fused_qk_norm_rope!
        enable_precise_embedding_interpolation! triton_attention_reduce_in_fp32! triton_attention_num_kv_splits
        triton_attention_split_tile_size flashinfer_mla_disable_ragged! enable_tf32_matmul! enable_scattered_sconv!
        flashinfer_mxfp4_moe_precision disable_flashinfer_cutlass_moe_fp4_allgather!
        enable_amd_monokernel! monokernel_backend disable_cuda_graph_padding! enable_cudagraph_gc! enable_mla!
        enable_flashinfer_mla! enable_flashmla! enable_nan_detection!
    """,
    "counts of each expert's tokens, in buffers outside the pool": "expert_distribution_recorder_mode",
    "shared experts apart from the routed ones: each rank has the same share of them, as planned": """
        disable_shared_experts_fusion!
    """,
    "backends whose results do not depend on the batch: the same pool before Blackwell, where it is refused": """
        enable_deterministic_inference!
    """,
    "CUDA graphs, which are captured after the pool is sized": """
        enable_torch_compile! torch_compile_max_bs enable_torch_compile_debug_mode!
    """,
    "tokens of a step's prompts; without chunks, where SGLang reserves for them, read as max_num_batched_tokens": """
        max_prefill_tokens
    """,
    "what a request returns; weights and the pool are the same": "is_embedding!",
    "has an effect only with a flag that is not supported": """
        unified_cache_external_linker_backend
        unified_cache_external_linker_config enable_linker_mla_dedup! lmcache_config_file flexkv_config_file
        hisparse_config hierarchical_sparse_attention_extra_config
        kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token
        dllm_algorithm_config dllm_fdfo! encoder_transfer_backend encoder_urls
        encoder_bootstrap_port encoder_register_urls pdmux_config_path sm_group_num
        remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
        eplb_min_rebalancing_utilization_threshold ep_dispatch_algorithm deepep_v2_mode
        deepep_dispatcher_output_dtype fuseep_mode flashinfer_a2a_dispatch_type mooncake_ib_device ep_join_mode
        elastic_ep_join_mode ep_join_rank_offset elastic_ep_join_rank_offset elastic_ep_initial_size
        elastic_ep_scale_timeout tbo_token_distribution_threshold
        int8_mamba_ckpt_size linear_replayssm_cache_len mm_global_cache_backend paged_experts_num_resident
        cp_strategy dcp_comm_backend kv_canary_real_data kv_canary_sweep_interval prefill_kv_cache_dequant_dtype
        modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path weight_cache_socket
        weight_cache_timeout ple_offload_backend ple_offload_dir watermark_key watermark_key_b
        watermark_context_window watermark_mixing_probability watermark_max_probability watermark_default_enabled
        watermark_enforce_all watermark_config sampling_mask_max_tokens aux_hidden_state_capture
        return_aux_hidden_state_layer_ids expert_distribution_recorder_buffer_size rl_quant_profile
        decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank
        _speculative_draft_quantization_explicitly_set debug_tensor_dump_layers
    """,
}
DP_ATTENTION: Final = "divides attention over data-parallel ranks inside --tp-size, which is not modeled; use vllm"
DRAFTS: Final = "changes drafts in a way that is not modeled; remove it"
REFUSED: Final = {
    DP_ATTENTION: """
        attn_dp_size=1 attention_data_parallel_size=1
        enable_dense_mlp_attn_tp! enable_shared_experts_attn_tp!
    """,
    DRAFTS: """
        speculative_token_map speculative_draft_kv_cache_dtype speculative_draft_window_size
        speculative_enable_w4a4_mxfp4_megamoe! speculative_draft_model_quantization speculative_adaptive!
        speculative_adaptive_config speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget
        speculative_ngram_external_corpus_max_tokens speculative_domino_candidate_pool_size
        speculative_boundary_reduction speculative_draft_sink_size
        enable_multi_layer_eagle! uno_lora_path decoupled_spec_role=null enable_linear_replayssm_spec!
    """,
    "may choose pages of another size, which is not modeled; remove it": """
        speculative_draft_attention_backend=fa3|fa4|flashinfer|triton
    """,
    "moves weights to host memory, which is not modeled; remove it": """
        offload_mode=cpu ple_offload_embedding! kt_weight_path enable_paged_experts!
    """,
    "is a file of more flags; write them out": "config",
    "changes the reserved memory, which is not modeled; remove it": """
        enable_pdmux! enable_pd_role_switch! disaggregation_decode_enable_radix_cache! disaggregation_decode_extra_slots
        disaggregation_decode_enable_offload_kvcache! disaggregation_decode_retraction_backup
        disaggregation_decode_host_receive_threshold=1
    """,
    "is not modeled; remove it": """
        dcp_size=1 decode_context_parallel_size=1 attn_cp_size=1 attention_context_parallel_size=1 moe_dp_size=1
        moe_data_parallel_size=1 dwdp_size=1 shared_experts_tp_size enable_prefill_cp!
        enable_dsa_cache_layer_split! enable_cp_decode_attn_tp! enable_kv_cache_sharding! dcp_replicate_q_proj!
        enable_tp_lm_head_all_to_all! enable_attn_tp_input_scattered! enable_layernorm_sp! disable_attn_tp_gather!
        enable_megamoe_for_layernorm_sp! enable_cp_tp_group_sharing pp_max_micro_batch_size pp_async_batch_depth
        enable_dynamic_chunking! enable_two_batch_overlap! enable_single_batch_overlap! dllm_algorithm encoder_only!
        enable_mis! forward_hooks msprobe_dump_config rl_on_policy_target enable_waterfill!
        custom_weight_loader checkpoint_engine_wait_weights_before_ready!
        remote_instance_weight_loader_start_seed_via_transfer_engine! enforce_shared_experts_fusion!
        debug_tensor_dump_output_folder debug_tensor_dump_input_file
        enable_nvidia_megakernel! radix_cache_backend
    """,
    "skips the encoder; kvplan's --text-only sizes that": "language_model_only! language_only!",
    "keeps images' tensors in GPU memory, which is not modeled; remove it": """
        enable_prefix_mm_cache! enable_mm_global_cache! mm_feature_transport=cpu
        image_processor_backend=auto|pil
    """,
    "changes which CUDA graphs are captured, which is not modeled; use --cuda-graph-max-bs-decode instead": """
        cuda_graph_bs_prefill cuda_graph_config cuda_graph_prefill_max_context context_bucket
        cuda_graph_max_seq_len_prefill debug_cuda_graph!
    """,
    "changes how the pool is stored, which is not modeled; remove it": """
        c128_page_size prefill_only_disable_kv_cache! enable_page_major_kv_layout! enable_unified_memory!
        enable_hisparse! enable_deepseek_v4_fp4_indexer! qsa_indexer_dtype swa_prefix_tails
        enable_encoder_swa_bounded_replay! enable_decoder_swa_bounded_replay! kv_canary=none
        dsa_decode_backend dsa_prefill_backend nsa_decode_backend nsa_prefill_backend
        dsv4_prefill_backend=auto dsv4_attn_backend=auto
    """,
    "connects the KV cache to other memory, whose buffers are not modeled; remove it": """
        enable_unified_cache_external_linker! enable_lmcache!
        enable_flexkv!
    """,
    "bounds the host's pools, which is not modeled; use --hicache-ratio or --hicache-size": """
        hicache_host_memory_mode=cache hicache_host_memory_fraction
    """,
    "keeps KV in a store of its own, whose host memory is not modeled; remove it": "hicache_storage_backend=file",
    "changes the states' slots, which is not modeled; remove it": """
        mamba_max_states_per_path=-1 enable_int8_mamba_checkpoint! enable_linear_replayssm!
    """,
    "releases or shares GPU memory at run time, which is not modeled; remove it": """
        enable_symm_mem! enable_torch_symm_mem! weight_cache_mode=off
    """,
    "may store other weights than the checkpoint's, which is not modeled; name a quantized checkpoint": """
        load_format=auto|safetensors|pt|npcache|dummy|mistral|runai_streamer|fastsafetensors|remote|remote_instance|sharded_state|layered
        modelopt_quant quantize_and_serve! enable_fp32_lm_head! enable_w4a4_mxfp4_megamoe!
    """,
    "reserves buffers for exchanging tokens between experts' ranks, which is not modeled; remove it": """
        elastic_ep_backend=none max_ep_size enable_elastic_expert_backup!
    """,
    "keeps spare copies of experts, which is not modeled; remove it": """
        init_expert_location=trivial
    """,
    "keeps buffers of its own in GPU memory, which are not modeled; remove it": """
        deepep_config
        enable_return_hidden_states! return_hidden_states_mode enable_return_routed_experts!
        enable_return_indexer_topk! enable_return_aux_hidden_states! enable_watermark!
    """,
}
# Not repeated by printed commands: secrets, and names that 0.5.23 takes as no flags.
OMITTED: Final = """
    api_key admin_api_key ssl_keyfile_password _radix_eviction_policy_explicitly_set
    _speculative_draft_quantization_explicitly_set _swa_full_tokens_ratio_explicitly_set aux_hidden_state_capture
    custom_sigquit_handler enable_flashinfer_mla enable_flashmla enable_mla enable_nan_detection ep_join_mode
    ep_join_rank_offset fp4_gemm_runner_backend fp8_gemm_runner_backend grpc_worker_threads stat_loggers
    uses_mamba_radix_cache watermark_context_window watermark_default_enabled watermark_enforce_all watermark_key
    watermark_key_b watermark_max_probability watermark_mixing_probability
"""
OTHERS: Final[Mapping[str, Other]] = others("sglang", NO_EFFECT, REFUSED, scheduling.REFUSED, OMITTED)
