"""Keywords of Python's calls by type, for editors and type checkers.

Written from the argument table by `pytest --update tests/cli/test_keywords.py`.
"""

from collections.abc import Iterable
from os import PathLike
from typing import Any, Literal, TypedDict

Value = str | int | float | bool | dict[str, Any] | None


class PlanKeywords(TypedDict, total=False):
    """Of the server, in every call."""

    host_bandwidth: str | int | None
    memory_in_use: str | int | None
    max_model_len: str | int | Iterable[str | int] | None
    tensor_parallel_size: str | int | None
    pipeline_parallel_size: str | int | None
    pp_layer_partition: str | None
    data_parallel_size: str | int | None
    decode_context_parallel_size: str | int | None
    prefill_context_parallel_size: str | int | None
    cp_kv_cache_interleave_size: str | int | None
    enable_expert_parallel: bool | None
    enable_eplb: bool | None
    num_redundant_experts: str | int | None
    eplb_window_size: str | int | None
    all2all_backend: str | None
    enable_dp_attention: bool | None
    enable_dp_lm_head: bool | None
    moe_dense_tp_size: str | int | None
    gpu_memory_utilization: str | float | None
    mem_fraction_static: str | float | None
    max_num_seqs: str | int | None
    max_num_batched_tokens: str | int | None
    max_total_tokens: str | int | None
    dtype: str | None
    quantization: str | None
    kv_cache_dtype: str | None
    mamba_cache_dtype: str | None
    mamba_ssm_cache_dtype: str | None
    block_size: str | int | None
    mamba_block_size: str | int | None
    attention_backend: str | None
    moe_backend: str | None
    kv_cache_memory_bytes: str | int | None
    num_gpu_blocks_override: str | int | None
    performance_mode: Literal["balanced", "interactivity", "throughput"] | None
    kv_offloading_size: str | float | None
    cpu_offload_gb: str | float | None
    offload_backend: Literal["auto", "uva", "prefetch"] | None
    offload_group_size: str | int | None
    offload_num_in_group: str | int | None
    offload_prefetch_step: str | int | None
    enable_sleep_mode: bool | None
    kv_offloading_backend: Literal["native", "lmcache"] | None
    kv_transfer_config: str | dict[str, Any] | None
    engram_config: str | dict[str, Any] | None
    lmcache_max_local_cpu_size: str | float | None
    enable_prefix_caching: bool | None
    allow_deprecated_quantization: bool | None
    enable_chunked_prefill: bool | None
    disable_hybrid_kv_cache_manager: bool | None
    disable_sliding_window: bool | None
    async_scheduling: bool | None
    enforce_eager: bool | None
    max_cudagraph_capture_size: str | int | None
    compilation_config: str | dict[str, Any] | None
    hf_overrides: str | dict[str, Any] | None
    language_model_only: bool | None
    runner: Literal["auto", "generate", "pooling"] | None
    convert: Literal["auto", "none", "embed", "classify"] | None
    limit_mm_per_prompt: str | int | None
    mm_processor_kwargs: str | dict[str, Any] | None
    mm_processor_cache_gb: str | float | None
    mm_processor_cache_type: Literal["lru", "shm"] | None
    disable_chunked_mm_input: bool | None
    skip_mm_profiling: bool | None
    mm_encoder_tp_mode: Literal["weights", "data"] | None
    max_loras: str | int | None
    max_lora_rank: str | int | None
    fully_sharded_loras: bool | None
    lora_dtype: str | None
    lora_target_modules: str | Iterable[str] | None
    max_cpu_loras: str | int | None
    enable_tower_connector_lora: bool | None
    enable_mixed_moe_lora_format: bool | None
    enable_moe_shared_loras: bool | None
    num_speculative_tokens: str | int | None
    speculative_method: (
        Literal["draft_model", "mtp", "eagle", "eagle3", "dflash", "dspark", "ngram", "ngram_gpu", "suffix"] | None
    )
    usage: Literal["server", "offline"] | None
    swa_full_tokens_ratio: str | float | None
    mamba_full_memory_ratio: str | float | None
    cuda_graph_max_bs: str | int | None
    cuda_graph_max_bs_prefill: str | int | None
    cuda_graph_backend_decode: Literal["full", "breakable", "disabled"] | None
    cuda_graph_backend_prefill: Literal["full", "breakable", "disabled"] | None
    prefill_attention_backend: str | None
    decode_attention_backend: str | None
    max_mamba_cache_size: str | int | None
    mamba_radix_cache_strategy: str | None
    disable_prefill_cuda_graph: bool | None
    speculative_eagle_topk: str | int | None
    speculative_num_draft_tokens: str | int | None
    enable_hierarchical_cache: bool | None
    hicache_ratio: str | float | None
    hicache_size: str | int | None
    disaggregation_mode: Literal["prefill", "decode"] | None
    enable_multimodal: bool | None
    micro_batch_size: str | int | None
    gpu_layers: str | int | None
    n_cpu_moe: str | int | None
    cpu_moe: bool | None
    override_tensor: str | int | None
    tensor_split: str | int | None
    split_mode: Literal["layer", "none", "row", "tensor"] | None
    main_gpu: str | int | None
    kv_offload: bool | None
    op_offload: bool | None
    cache_type_k: str | None
    cache_type_v: str | None
    kv_unified: bool | None
    swa_full: bool | None
    flash_attn: Literal["auto", "on", "off"] | None
    fit: Literal["on", "off"] | None
    fit_target: str | int | None
    fit_ctx: str | int | None
    lora: str | int | None
    mmproj: str | int | None
    mmproj_offload: bool | None
    draft_gpu_layers: str | int | None
    draft_quant: str | None
    weights_bytes: str | int | None
    calibration: str | PathLike[str] | None
    enable_lora: bool | None
    draft_model: str | PathLike[str] | None
    speculative_config: str | dict[str, Any] | None
    engine: str | None
    engine_arg: str | Iterable[str] | None
    assume_dense: bool | None
    text_only: bool | None
    reader: str | int | None
    revision: str | None
    offline: bool | None


class EstimateKeywords(PlanKeywords, total=False):
    """Also of the requests' lengths."""

    mean_tokens: str | int | None
    prompt_tokens: str | int | None
    output_tokens: str | int | None
    lengths: str | PathLike[str] | None
    overflow: str | float | None
    shared_prefix: str | int | None


class RecommendKeywords(EstimateKeywords, total=False):
    """Also, with latency targets, of which requests arrive, and how often."""

    rate: str | int | float | None
    profile: str | None
    trace: str | PathLike[str] | None
    num_requests: str | int | float | None
    seed: str | int | float | None


class LoadKeywords(PlanKeywords, total=False):
    """Also of a load, in place of lengths: which requests, and how they arrive."""

    trace: str | PathLike[str] | None
    profile: str | None
    prompt_tokens: str | int | float | None
    output_tokens: str | int | float | None
    shared_prefix: str | int | float | None
    num_requests: str | int | float | None
    seed: str | int | float | None
    rate: str | int | float | None
    arrivals: str | None
    max_concurrency: str | int | float | None
    users: str | int | float | None
    think: str | int | float | None
    ramp: str | int | float | None


class SweepKeywords(TypedDict, total=False):
    """Of a sweep: a list where several values are tried."""

    prices: str | PathLike[str] | None
    gpu: Value | Iterable[Value]
    gpu_memory: Value | Iterable[Value]
    host_bandwidth: Value | Iterable[Value]
    memory_in_use: Value | Iterable[Value]
    max_model_len: Value | Iterable[Value]
    tensor_parallel_size: Value | Iterable[Value]
    pipeline_parallel_size: Value | Iterable[Value]
    pp_layer_partition: Value | Iterable[Value]
    data_parallel_size: Value | Iterable[Value]
    decode_context_parallel_size: Value | Iterable[Value]
    prefill_context_parallel_size: Value | Iterable[Value]
    cp_kv_cache_interleave_size: Value | Iterable[Value]
    enable_expert_parallel: Value | Iterable[Value]
    enable_eplb: Value | Iterable[Value]
    num_redundant_experts: Value | Iterable[Value]
    eplb_window_size: Value | Iterable[Value]
    all2all_backend: Value | Iterable[Value]
    enable_dp_attention: Value | Iterable[Value]
    enable_dp_lm_head: Value | Iterable[Value]
    moe_dense_tp_size: Value | Iterable[Value]
    gpu_memory_utilization: Value | Iterable[Value]
    mem_fraction_static: Value | Iterable[Value]
    max_num_seqs: Value | Iterable[Value]
    max_num_batched_tokens: Value | Iterable[Value]
    max_total_tokens: Value | Iterable[Value]
    dtype: Value | Iterable[Value]
    quantization: Value | Iterable[Value]
    kv_cache_dtype: Value | Iterable[Value]
    mamba_cache_dtype: Value | Iterable[Value]
    mamba_ssm_cache_dtype: Value | Iterable[Value]
    block_size: Value | Iterable[Value]
    mamba_block_size: Value | Iterable[Value]
    attention_backend: Value | Iterable[Value]
    moe_backend: Value | Iterable[Value]
    kv_cache_memory_bytes: Value | Iterable[Value]
    num_gpu_blocks_override: Value | Iterable[Value]
    performance_mode: Value | Iterable[Value]
    kv_offloading_size: Value | Iterable[Value]
    cpu_offload_gb: Value | Iterable[Value]
    offload_backend: Value | Iterable[Value]
    offload_group_size: Value | Iterable[Value]
    offload_num_in_group: Value | Iterable[Value]
    offload_prefetch_step: Value | Iterable[Value]
    enable_sleep_mode: Value | Iterable[Value]
    kv_offloading_backend: Value | Iterable[Value]
    kv_transfer_config: Value | Iterable[Value]
    engram_config: Value | Iterable[Value]
    lmcache_max_local_cpu_size: Value | Iterable[Value]
    enable_prefix_caching: Value | Iterable[Value]
    allow_deprecated_quantization: Value | Iterable[Value]
    enable_chunked_prefill: Value | Iterable[Value]
    disable_hybrid_kv_cache_manager: Value | Iterable[Value]
    disable_sliding_window: Value | Iterable[Value]
    async_scheduling: Value | Iterable[Value]
    enforce_eager: Value | Iterable[Value]
    max_cudagraph_capture_size: Value | Iterable[Value]
    compilation_config: Value | Iterable[Value]
    hf_overrides: Value | Iterable[Value]
    language_model_only: Value | Iterable[Value]
    runner: Value | Iterable[Value]
    convert: Value | Iterable[Value]
    limit_mm_per_prompt: Value | Iterable[Value]
    mm_processor_kwargs: Value | Iterable[Value]
    mm_processor_cache_gb: Value | Iterable[Value]
    mm_processor_cache_type: Value | Iterable[Value]
    disable_chunked_mm_input: Value | Iterable[Value]
    skip_mm_profiling: Value | Iterable[Value]
    mm_encoder_tp_mode: Value | Iterable[Value]
    max_loras: Value | Iterable[Value]
    max_lora_rank: Value | Iterable[Value]
    fully_sharded_loras: Value | Iterable[Value]
    lora_dtype: Value | Iterable[Value]
    lora_target_modules: Value | Iterable[Value]
    max_cpu_loras: Value | Iterable[Value]
    enable_tower_connector_lora: Value | Iterable[Value]
    enable_mixed_moe_lora_format: Value | Iterable[Value]
    enable_moe_shared_loras: Value | Iterable[Value]
    num_speculative_tokens: Value | Iterable[Value]
    speculative_method: Value | Iterable[Value]
    usage: Value | Iterable[Value]
    swa_full_tokens_ratio: Value | Iterable[Value]
    mamba_full_memory_ratio: Value | Iterable[Value]
    cuda_graph_max_bs: Value | Iterable[Value]
    cuda_graph_max_bs_prefill: Value | Iterable[Value]
    cuda_graph_backend_decode: Value | Iterable[Value]
    cuda_graph_backend_prefill: Value | Iterable[Value]
    prefill_attention_backend: Value | Iterable[Value]
    decode_attention_backend: Value | Iterable[Value]
    max_mamba_cache_size: Value | Iterable[Value]
    mamba_radix_cache_strategy: Value | Iterable[Value]
    disable_prefill_cuda_graph: Value | Iterable[Value]
    speculative_eagle_topk: Value | Iterable[Value]
    speculative_num_draft_tokens: Value | Iterable[Value]
    enable_hierarchical_cache: Value | Iterable[Value]
    hicache_ratio: Value | Iterable[Value]
    hicache_size: Value | Iterable[Value]
    disaggregation_mode: Value | Iterable[Value]
    enable_multimodal: Value | Iterable[Value]
    micro_batch_size: Value | Iterable[Value]
    gpu_layers: Value | Iterable[Value]
    n_cpu_moe: Value | Iterable[Value]
    cpu_moe: Value | Iterable[Value]
    override_tensor: Value | Iterable[Value]
    tensor_split: Value | Iterable[Value]
    split_mode: Value | Iterable[Value]
    main_gpu: Value | Iterable[Value]
    kv_offload: Value | Iterable[Value]
    op_offload: Value | Iterable[Value]
    cache_type_k: Value | Iterable[Value]
    cache_type_v: Value | Iterable[Value]
    kv_unified: Value | Iterable[Value]
    swa_full: Value | Iterable[Value]
    flash_attn: Value | Iterable[Value]
    fit: Value | Iterable[Value]
    fit_target: Value | Iterable[Value]
    fit_ctx: Value | Iterable[Value]
    lora: Value | Iterable[Value]
    mmproj: Value | Iterable[Value]
    mmproj_offload: Value | Iterable[Value]
    draft_gpu_layers: Value | Iterable[Value]
    draft_quant: Value | Iterable[Value]
    weights_bytes: Value | Iterable[Value]
    calibration: Value | Iterable[Value]
    enable_lora: Value | Iterable[Value]
    draft_model: Value | Iterable[Value]
    speculative_config: Value | Iterable[Value]
    engine: Value | Iterable[Value]
    engine_arg: Value | Iterable[Value]
    assume_dense: Value | Iterable[Value]
    text_only: Value | Iterable[Value]
    reader: Value | Iterable[Value]
    revision: Value | Iterable[Value]
    offline: Value | Iterable[Value]
    mean_tokens: Value | Iterable[Value]
    prompt_tokens: Value | Iterable[Value]
    output_tokens: Value | Iterable[Value]
    lengths: Value | Iterable[Value]
    overflow: Value | Iterable[Value]
    shared_prefix: Value | Iterable[Value]
