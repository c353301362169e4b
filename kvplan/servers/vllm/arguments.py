"""vLLM's flags that are not in kvplan's table of arguments, including old ones: their effect on GPU memory.

Sources: vLLM 0.33 engine/arg_utils.py, config/*.py, entrypoints/common/cli_args.py; older releases' documentation.
"""

from collections.abc import Mapping
from typing import Final

from kvplan.servers.vllm import scheduling
from kvplan.servers.words.command import Other
from kvplan.servers.words.standing import others

READ: Final = {  # by kvplan.servers.vllm.command
    "the model that is sized": "model model_tag revision",
    "whether the model generates text, as --runner and --convert of later releases": "task",
    "adapter slots, with --max-loras and --max-lora-rank": "enable_lora",
    "spare copies of experts and the steps whose loads are kept; its other keys move no memory": "eplb_config",
    "spare copies of experts, as a key of --eplb-config": "num_redundant_experts",
    "its backend, as --attention-backend, and its kernels; other keys are rejected by name": "attention_config",
    "consecutive tokens of a request on one rank, as --cp-kv-cache-interleave-size": "dcp_kv_cache_interleave_size",
    "speculative decoding; parts that kvplan cannot size are rejected by name": """
        speculative_config spec_method spec_model spec_tokens speculative_model
    """,
    "which CUDA graphs are captured, as keys of --compilation-config; the pool's range is wider with other than the "
    "default ones": "optimization_level cudagraph_mode O cudagraph_capture_sizes cuda_graph_sizes",
}
NO_EFFECT: Final = {
    "the HTTP server": """
        host port grpc! grpc_port uds root_path middleware api_key api_server_count headless! backend
        allow_credentials! allowed_origins allowed_methods allowed_headers ssl_keyfile ssl_certfile ssl_ca_certs
        ssl_cert_reqs ssl_ciphers enable_ssl_refresh! disable_fastapi_docs! enable_offline_docs!
        enable_request_id_headers! h11_max_header_count h11_max_incomplete_event_size sse_keep_alive_interval
        disable_frontend_multiprocessing! enable_server_load_tracking! enable_tokenizer_info_endpoint!
        enable_flash_late_interaction! enable_scale_out! data_parallel_supervisor_port dp_supervisor_probe_interval_s
        dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold fingerprint_mode fingerprint_value
        shutdown_timeout tokens_only! _api_process_count _api_process_rank
    """,
    "requests and responses": """
        served_model_name response_role chat_template chat_template_content_format default_chat_template_kwargs
        trust_request_chat_template! trust_request_mm_kwargs! reasoning_effort_map return_tokens_as_token_ids!
        enable_auto_tool_choice! exclude_tools_when_tool_choice_none! tool_call_parser tool_parser_plugin
        tool_strict_level tool_server enable_prompt_tokens_details! enable_force_include_usage! enable_reasoning!
        reasoning_parser reasoning_parser_plugin reasoning_config cohere_is_reasoning_model! cohere_format
        anthropic_disabled_thinking_effort generation_config override_generation_config generation_config_only!
        guided_decoding_backend structured_outputs_config max_logprobs logprobs_mode stream_interval
        interleave_mm_strings! allowed_local_media_path allowed_media_domains media_io_kwargs io_processor_plugin
    """,
    "logs, metrics and traces": """
        uvicorn_log_level disable_uvicorn_access_log! disable_access_log_for_endpoints disable_log_requests!
        enable_log_requests! disable_log_stats! aggregate_engine_logging! max_log_len log_outputs! enable_log_outputs!
        enable_log_deltas! log_error_stack! enable_logging_iteration_details! logging_config log_level log_config_file
        show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces enable_per_request_metrics!
        per_request_spec_decode_metrics kv_cache_metrics! kv_cache_metrics_sample custom_histogram_buckets
        cudagraph_metrics! enable_mfu_metrics! enable_layerwise_nvtx_tracing! enable_mm_processor_stats!
        jit_monitor_mode jit_monitor_verbose! profiler_config kv_events_config ray_workers_use_nsight!
    """,
    "the tokenizer and the model's files": """
        tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init! trust_remote_code! code_revision hf_token
        hf_config_path config_format model_weights download_dir ignore_patterns use_tqdm_on_load! model_impl
        model_loader_extra_config max_parallel_loading_workers safetensors_load_strategy
        safetensors_prefetch_num_threads safetensors_prefetch_block_size pt_load_map_location enable_ep_weight_filter!
        quantization_param_path pooler_config
    """,
    "scheduling order; the pool is the same": """
        scheduling_policy scheduler_cls long_prefill_token_threshold long_prefill_token_threshold_adaptive!
        max_long_partial_prefills max_num_partial_prefills max_num_queued_reqs max_num_queued_tokens
        scheduler_reserve_full_isl! prefill_schedule_interval prefix_caching_hash_algo
        prefix_cache_retention_interval use_v2_block_manager! additional_config
        max_num_scheduled_tokens
    """,
    "processes and nodes": """
        distributed_executor_backend worker_cls worker_extension_cls nnodes node_rank master_addr master_port
        data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address
        data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb! data_parallel_external_lb!
        data_parallel_multi_port_external_lb! device_ids device distributed_timeout_seconds
        cpu_distributed_timeout_seconds dp_sync_interval disable_nccl_for_dp_synchronization! numa_bind!
        numa_bind_nodes numa_bind_cpus watchdog_config fail_on_environ_validation! dcp_comm_backend
    """,
    "host memory": """
        swap_space lora_modules default_mm_loras disable_mm_preprocessor_cache!
        mm_hasher_algorithm mm_shm_cache_max_object_size_mb renderer_num_workers
        enable_shm_tensor_arena! mm_tensor_ipc
    """,
    "kernels: weights, states and KV are as large; their workspaces lie in the estimated rows": """
        linear_backend sparse_indexer_topk_backend kernel_config ir_op_priority monokernel!
        enable_flashinfer_autotune! disable_cascade_attn! disable_custom_all_reduce! mamba_backend mamba_ssu_algorithm
        enable_mamba_cache_stochastic_rounding! mamba_cache_philox_rounds gdn_prefill_backend kda_prefill_backend
        kda_decode_backend mm_encoder_attn_backend expert_placement_strategy logits_processors enable_mm_embeds!
        max_seq_len_to_capture calculate_kv_scales! enable_cumem_allocator! mamba_config kv_sharing_fast_prefill!
    """,
    "has an effect only with a flag that is not supported": """
        dbo_decode_token_threshold dbo_prefill_token_threshold
        elastic_ep_max_dp_size mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
        mm_encoder_fp8_scale_save_margin video_pruning_method
        sleep_preserve_parameter_names replayssm_buffer_len fault_tolerance_config
        enable_mamba_shared_prefix_checkpoint!
    """,
    "is read by models that kvplan does not support alone": "swa_bounded_replay! enable_hc_sp!",
    "of `vllm bench`": """
        batch_size dataset dataset_name dataset_path input_len output_len num_iters num_iters_warmup num_prompts seed
    """,
}
REFUSED: Final = {
    "is a file of more flags; write them out": "config",
    "chooses which parameters move to host memory, which is not modeled; remove it": """
        cpu_offload_params offload_params
    """,
    "replaces the model's class; remove it": """
        model_class_overrides
    """,
    "repeats query projections, whose weights are not modeled, on ranks that share a cache; remove it": """
        dcp_q_replicate!
    """,
    "belongs to models that kvplan does not support; remove it": "diffusion_config",
    "may move the checkpoints of states, and with them the block size, which is not modeled; remove it": """
        prefix_match_unit
    """,
    "lets the remaining ranks take over from failed ones, and their memory then is not modeled; remove it": """
        enable_fault_tolerance!
    """,
    "runs the encoder alone, without the language model that is sized here; remove it": "mm_encoder_only!",
    "moves encoder outputs through buffers or a cache whose size is not modeled; remove it": """
        ec_transfer_config ec_manager_config
    """,
    "captures CUDA graphs for numbers of adapters, which is not modeled; remove it": "specialize_active_lora!",
    "reserves buffers for exchanging tokens between experts' ranks, which is not modeled; remove it": """
        enable_dbo! ubatch_size=0|1 enable_elastic_ep!
    """,
    "releases and reclaims GPU memory at run time, which is not modeled; remove it": """
        enable_nccl_comm_suspend! sleep_mode_backend=cumem sleep_mode_offload_cudagraph!
    """,
    "may store other weights than the checkpoint's, which is not modeled; name a quantized checkpoint": """
        load_format=auto|safetensors|pt|npcache|dummy|mistral|hf|runai_streamer|fastsafetensors|instanttensor|bitsandbytes
        quantization_config
    """,
    "keeps some layers' KV in another dtype, which is not modeled; remove it": "kv_cache_dtype_skip_layers",
    "changes the states' blocks, which is not modeled; remove it": """
        mamba_cache_mode=align|all|none use_replayssm!
    """,
    "changes how many tokens an image or video takes, which is not modeled; remove it, or take --text-only": """
        video_pruning_rate
    """,
    "keeps images' tensors in GPU memory, which is not modeled; remove it": """
        mm_ipc_gpu_memory_gb=0 mm_processor_device=auto|cpu mm_device_do_normalize! mm_encoder_attn_dtype
    """,
    "keeps buffers of its own in GPU memory, which are not modeled; remove it": """
        enable_prompt_embeds! enable_return_routed_experts! return_sampling_mask! aux_output_config
        enable_trace_replay! use_fp64_gumbel! enable_batch_sharded_sampling! watermark_config weight_transfer_config
    """,
    "keeps blocks of the pool free, which is not modeled; remove it": "watermark=0|0.0",
    "limits the running requests in addition to --max-num-seqs, which is not modeled; use "
    "--max-num-seqs": "max_num_active_seqs",
    "changes the size of adapter slots, which is not modeled; remove it": """
        enable_lora_bias! max_lora_cls_labels lora_extra_vocab_size
    """,
}
# Not repeated by printed commands: secrets, flags of `vllm bench`, and flags that 0.33 no longer takes.
OMITTED: Final = """
    api_key hf_token mamba_config
    batch_size dataset dataset_name dataset_path input_len output_len num_iters num_iters_warmup
    num_prompts backend _api_process_count _api_process_rank calculate_kv_scales device
    disable_frontend_multiprocessing disable_mm_preprocessor_cache enable_mm_processor_stats enable_reasoning
    generation_config_only guided_decoding_backend log_outputs max_long_partial_prefills max_num_partial_prefills
    max_seq_len_to_capture model_weights quantization_param_path swap_space use_v2_block_manager
"""
OTHERS: Final[Mapping[str, Other]] = others("vllm", NO_EFFECT, REFUSED, scheduling.REFUSED, OMITTED)
