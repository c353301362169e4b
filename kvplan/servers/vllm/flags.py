"""vLLM's own flags for the arguments of kvplan's table. Source: vLLM 0.33 engine/arg_utils.py, and older releases'."""

from collections.abc import Mapping
from typing import Final

from kvplan.servers.words.arguments import Flag

# Arguments whose flag is their own name, without anything else.
OWN: Final = (
    "max_model_len", "cp_kv_cache_interleave_size", "enable_eplb", "all2all_backend", "gpu_memory_utilization",
    "max_num_seqs", "max_num_batched_tokens", "dtype", "kv_cache_dtype", "mamba_cache_dtype",
    "mamba_ssm_cache_dtype", "block_size", "mamba_block_size", "moe_backend", "kv_cache_memory_bytes",
    "num_gpu_blocks_override", "performance_mode", "kv_offloading_size", "cpu_offload_gb", "offload_backend",
    "offload_group_size", "offload_num_in_group", "offload_prefetch_step", "enable_sleep_mode",
    "kv_offloading_backend", "kv_transfer_config", "engram_config", "enable_prefix_caching",
    "allow_deprecated_quantization",
    "enable_chunked_prefill", "disable_hybrid_kv_cache_manager", "disable_sliding_window", "async_scheduling",
    "enforce_eager", "hf_overrides", "language_model_only", "limit_mm_per_prompt", "mm_processor_kwargs",
    "disable_chunked_mm_input", "skip_mm_profiling", "mm_encoder_tp_mode", "max_lora_rank",
    "fully_sharded_loras", "lora_dtype", "lora_target_modules", "max_cpu_loras", "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format", "enable_moe_shared_loras",
)  # fmt: skip

FLAGS: Final[Mapping[str, Flag]] = {
    **{name: Flag() for name in OWN},
    "tensor_parallel_size": Flag(short=("tp",)),
    "pipeline_parallel_size": Flag(short=("pp",)),
    # set by an environment variable in both servers
    "pp_layer_partition": Flag(("pp_layer_partition",), printed=False),
    "data_parallel_size": Flag(short=("dp",)),
    "decode_context_parallel_size": Flag(short=("dcp",)),
    "prefill_context_parallel_size": Flag(short=("pcp",)),
    "enable_expert_parallel": Flag(short=("ep",)),
    # part of --eplb-config; a flag until 0.11
    "num_redundant_experts": Flag(("num_redundant_experts",), printed=False),
    "eplb_window_size": Flag(("eplb_window_size",), printed=False),  # part of --eplb-config
    "quantization": Flag(short=("q",)),
    "attention_backend": Flag(since="attention_backend_flag"),
    # set by an environment variable
    "lmcache_max_local_cpu_size": Flag(("lmcache_max_local_cpu_size",), printed=False),
    "max_cudagraph_capture_size": Flag(since="graph_size_flag"),
    "compilation_config": Flag(short=("cc",)),
    "runner": Flag(since="runner_flag"),  # before, --task: servers/vllm/server.py
    "convert": Flag(since="runner_flag"),
    "mm_processor_cache_gb": Flag(since="processor_cache"),
    "mm_processor_cache_type": Flag(since="processor_cache"),
    "max_loras": Flag(beside="enable_lora"),
    "num_speculative_tokens": Flag(printed=False),  # part of --speculative-config
    "speculative_method": Flag(printed=False),  # part of --speculative-config
    "usage": Flag(printed=False),  # which program it is
}
