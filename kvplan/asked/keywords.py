"""Keywords of Python's calls by type; `Several`: what a sweep takes in addition.

Written from the argument table by `pytest --update tests/cli/test_keywords.py`.
"""

from collections.abc import Iterable
from os import PathLike
from typing import Any, Generic, Literal, Never, TypedDict, TypeVar

Value = str | int | float | bool | dict[str, Any] | None
Several = TypeVar("Several")


class PlanKeywords(TypedDict, Generic[Several], total=False):
    """Of the server, in every call."""

    host_bandwidth: str | int | Several | None
    memory_in_use: str | int | Several | None
    max_model_len: str | int | Iterable[str | int] | Several | None
    tensor_parallel_size: str | int | Several | None
    pipeline_parallel_size: str | int | Several | None
    pp_layer_partition: str | Several | None
    data_parallel_size: str | int | Several | None
    decode_context_parallel_size: str | int | Several | None
    prefill_context_parallel_size: str | int | Several | None
    cp_kv_cache_interleave_size: str | int | Several | None
    enable_expert_parallel: bool | Several | None
    enable_eplb: bool | Several | None
    num_redundant_experts: str | int | Several | None
    eplb_window_size: str | int | Several | None
    all2all_backend: str | Several | None
    deepep_mode: Literal["auto", "normal", "low_latency"] | Several | None
    enable_dp_attention: bool | Several | None
    enable_dp_lm_head: bool | Several | None
    moe_dense_tp_size: str | int | Several | None
    gpu_memory_utilization: str | float | Several | None
    mem_fraction_static: str | float | Several | None
    max_num_seqs: str | int | Several | None
    max_num_batched_tokens: str | int | Several | None
    max_total_tokens: str | int | Several | None
    dtype: str | Several | None
    quantization: str | Several | None
    kv_cache_dtype: str | Several | None
    mamba_cache_dtype: str | Several | None
    mamba_ssm_cache_dtype: str | Several | None
    block_size: str | int | Several | None
    mamba_block_size: str | int | Several | None
    attention_backend: str | Several | None
    moe_backend: str | Several | None
    kv_cache_memory_bytes: str | int | Several | None
    num_gpu_blocks_override: str | int | Several | None
    performance_mode: Literal["balanced", "interactivity", "throughput"] | Several | None
    kv_offloading_size: str | float | Several | None
    cpu_offload_gb: str | float | Several | None
    offload_backend: Literal["auto", "uva", "prefetch"] | Several | None
    offload_group_size: str | int | Several | None
    offload_num_in_group: str | int | Several | None
    offload_prefetch_step: str | int | Several | None
    enable_sleep_mode: bool | Several | None
    kv_offloading_backend: Literal["native", "lmcache"] | Several | None
    kv_transfer_config: str | dict[str, Any] | Several | None
    engram_config: str | dict[str, Any] | Several | None
    lmcache_max_local_cpu_size: str | float | Several | None
    enable_prefix_caching: bool | Several | None
    allow_deprecated_quantization: bool | Several | None
    enable_chunked_prefill: bool | Several | None
    disable_hybrid_kv_cache_manager: bool | Several | None
    disable_sliding_window: bool | Several | None
    async_scheduling: bool | Several | None
    enforce_eager: bool | Several | None
    max_cudagraph_capture_size: str | int | Several | None
    compilation_config: str | dict[str, Any] | Several | None
    hf_overrides: str | dict[str, Any] | Several | None
    language_model_only: bool | Several | None
    runner: Literal["auto", "generate", "pooling"] | Several | None
    convert: Literal["auto", "none", "embed", "classify"] | Several | None
    limit_mm_per_prompt: str | int | Several | None
    mm_processor_kwargs: str | dict[str, Any] | Several | None
    mm_processor_cache_gb: str | float | Several | None
    mm_processor_cache_type: Literal["lru", "shm"] | Several | None
    disable_chunked_mm_input: bool | Several | None
    skip_mm_profiling: bool | Several | None
    mm_encoder_tp_mode: Literal["weights", "data"] | Several | None
    max_loras: str | int | Several | None
    max_lora_rank: str | int | Several | None
    fully_sharded_loras: bool | Several | None
    lora_dtype: str | Several | None
    lora_target_modules: str | Iterable[str] | Several | None
    max_cpu_loras: str | int | Several | None
    enable_tower_connector_lora: bool | Several | None
    enable_mixed_moe_lora_format: bool | Several | None
    enable_moe_shared_loras: bool | Several | None
    num_speculative_tokens: str | int | Several | None
    speculative_method: (
        Literal["draft_model", "mtp", "eagle", "eagle3", "dflash", "dspark", "ngram", "ngram_gpu", "suffix"]
        | Several
        | None
    )
    usage: Literal["server", "offline"] | Several | None
    swa_full_tokens_ratio: str | float | Several | None
    mamba_full_memory_ratio: str | float | Several | None
    cuda_graph_max_bs: str | int | Several | None
    cuda_graph_max_bs_prefill: str | int | Several | None
    cuda_graph_backend_decode: Literal["full", "breakable", "disabled"] | Several | None
    cuda_graph_backend_prefill: Literal["full", "breakable", "disabled"] | Several | None
    prefill_attention_backend: str | Several | None
    decode_attention_backend: str | Several | None
    max_mamba_cache_size: str | int | Several | None
    mamba_radix_cache_strategy: str | Several | None
    disable_prefill_cuda_graph: bool | Several | None
    speculative_eagle_topk: str | int | Several | None
    speculative_num_draft_tokens: str | int | Several | None
    enable_hierarchical_cache: bool | Several | None
    hicache_ratio: str | float | Several | None
    hicache_size: str | int | Several | None
    disaggregation_mode: Literal["prefill", "decode"] | Several | None
    enable_multimodal: bool | Several | None
    micro_batch_size: str | int | Several | None
    gpu_layers: str | int | Several | None
    n_cpu_moe: str | int | Several | None
    cpu_moe: bool | Several | None
    override_tensor: str | int | Several | None
    tensor_split: str | int | Several | None
    split_mode: Literal["layer", "none", "row", "tensor"] | Several | None
    main_gpu: str | int | Several | None
    kv_offload: bool | Several | None
    op_offload: bool | Several | None
    cache_type_k: str | Several | None
    cache_type_v: str | Several | None
    kv_unified: bool | Several | None
    swa_full: bool | Several | None
    flash_attn: Literal["auto", "on", "off"] | Several | None
    fit: Literal["on", "off"] | Several | None
    fit_target: str | int | Several | None
    fit_ctx: str | int | Several | None
    lora: str | int | Several | None
    mmproj: str | int | Several | None
    mmproj_offload: bool | Several | None
    draft_gpu_layers: str | int | Several | None
    draft_quant: str | Several | None
    weights_bytes: str | int | Several | None
    calibration: str | PathLike[str] | Several | None
    enable_lora: bool | Several | None
    draft_model: str | PathLike[str] | Several | None
    speculative_config: str | dict[str, Any] | Several | None
    engine: str | Several | None
    engine_arg: str | Iterable[str] | Several | None
    assume_dense: bool | Several | None
    text_only: bool | Several | None
    reader: str | int | Several | None
    revision: str | Several | None
    offline: bool | Several | None


class EstimateKeywords(PlanKeywords[Several], Generic[Several], total=False):
    """Also of the requests' lengths."""

    mean_tokens: str | int | Several | None
    prompt_tokens: str | int | Several | None
    output_tokens: str | int | Several | None
    lengths: str | PathLike[str] | Several | None
    overflow: str | float | Several | None
    shared_prefix: str | int | Several | None


class RecommendKeywords(EstimateKeywords[Never], total=False):
    """Also, with latency targets, of which requests arrive, and how often."""

    rate: str | int | float | None
    profile: str | None
    trace: str | PathLike[str] | None
    num_requests: str | int | float | None
    seed: str | int | float | None


class LoadKeywords(PlanKeywords[Never], total=False):
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


class SweepKeywords(EstimateKeywords[Iterable[Value]], total=False):
    """Of a sweep: a list where several values are tried."""

    prices: str | PathLike[str] | None
    gpu: Value | Iterable[Value]
    gpu_memory: Value | Iterable[Value]
