"""SGLang's own flags for the arguments of kvplan's table. Source: SGLang 0.5.23 srt/server_args.py."""

from collections.abc import Mapping
from typing import Final

from kvplan.servers.words.arguments import Flag

FLAGS: Final[Mapping[str, Flag]] = {
    "max_model_len": Flag(("context_length",)),
    "tensor_parallel_size": Flag(("tp_size", "tensor_parallel_size", "tp")),
    "pipeline_parallel_size": Flag(("pp_size", "pipeline_parallel_size", "pp")),
    "pp_layer_partition": Flag(("pp_layer_partition",), printed=False),
    "data_parallel_size": Flag(("dp_size", "data_parallel_size", "dp")),
    # a number of ranks: servers/sglang/command.py
    "enable_expert_parallel": Flag(("ep_size", "expert_parallel_size", "ep")),
    "enable_eplb": Flag(("enable_eplb",), on=True),
    "num_redundant_experts": Flag(("ep_num_redundant_experts",), off="0"),
    "all2all_backend": Flag(("moe_a2a_backend",)),
    "deepep_mode": Flag(("deepep_mode",)),
    "enable_dp_attention": Flag(("enable_dp_attention",), on=True),
    "enable_dp_lm_head": Flag(("enable_dp_lm_head",), on=True),
    "moe_dense_tp_size": Flag(("moe_dense_tp_size",)),
    "mem_fraction_static": Flag(("mem_fraction_static",)),
    "max_num_seqs": Flag(("max_running_requests",)),
    "max_num_batched_tokens": Flag(("chunked_prefill_size",)),
    "max_total_tokens": Flag(("max_total_tokens",)),
    "dtype": Flag(("dtype",)),
    "quantization": Flag(("quantization",)),
    "kv_cache_dtype": Flag(("kv_cache_dtype",), values={"bf16": "bfloat16"}),
    "mamba_ssm_cache_dtype": Flag(("mamba_ssm_dtype",)),
    "block_size": Flag(("page_size",)),
    "cpu_offload_gb": Flag(("cpu_offload_gb",), off="0"),
    "offload_group_size": Flag(("offload_group_size",), off="-1"),
    "offload_num_in_group": Flag(("offload_num_in_group",)),
    "offload_prefetch_step": Flag(("offload_prefetch_step",)),
    "enable_prefix_caching": Flag(("disable_radix_cache",), on=False),
    "disable_hybrid_kv_cache_manager": Flag(("disable_hybrid_swa_memory",), on=True),
    "async_scheduling": Flag(("disable_overlap_schedule",), on=False),
    "enforce_eager": Flag(("disable_cuda_graph",), on=True),
    "hf_overrides": Flag(("json_model_override_args",)),
    "mm_encoder_tp_mode": Flag(("mm_enable_dp_encoder",), on="data"),
    "max_loras": Flag(("max_loras_per_batch",), beside="enable_lora"),
    "max_lora_rank": Flag(("max_lora_rank",)),
    "lora_target_modules": Flag(("lora_target_modules",)),
    "max_cpu_loras": Flag(("max_loaded_loras",)),
    "enable_moe_shared_loras": Flag(("experts_shared_outer_loras",), on=True),
    "num_speculative_tokens": Flag(("speculative_num_steps",)),
    "speculative_method": Flag(("speculative_algorithm",), printed=False),  # its names: servers/sglang/drafts.py
    "swa_full_tokens_ratio": Flag(("swa_full_tokens_ratio",)),
    "mamba_full_memory_ratio": Flag(("mamba_full_memory_ratio",)),
    "cuda_graph_max_bs": Flag(("cuda_graph_max_bs_decode",), since="decode_graph_flag", earlier="cuda_graph_max_bs"),
    "cuda_graph_max_bs_prefill": Flag(("cuda_graph_max_bs_prefill",)),
    "cuda_graph_backend_decode": Flag(("cuda_graph_backend_decode",)),
    "cuda_graph_backend_prefill": Flag(("cuda_graph_backend_prefill",)),
    "prefill_attention_backend": Flag(("prefill_attention_backend",)),
    "decode_attention_backend": Flag(("decode_attention_backend",)),
    "max_mamba_cache_size": Flag(("max_mamba_cache_size",)),
    "mamba_radix_cache_strategy": Flag(
        ("mamba_radix_cache_strategy",), since="decode_graph_flag", earlier="mamba_scheduler_strategy"
    ),
    "disable_prefill_cuda_graph": Flag(("disable_prefill_cuda_graph",), on=True),
    "speculative_eagle_topk": Flag(("speculative_eagle_topk",)),
    "speculative_num_draft_tokens": Flag(("speculative_num_draft_tokens",)),
    "enable_hierarchical_cache": Flag(("enable_hierarchical_cache", "enable_hicache"), on=True),
    "hicache_ratio": Flag(("hicache_ratio",)),
    "hicache_size": Flag(("hicache_size",), off="0"),
    "disaggregation_mode": Flag(("disaggregation_mode",), off="null"),
    "enable_multimodal": Flag(("enable_multimodal",), on=True),
}
