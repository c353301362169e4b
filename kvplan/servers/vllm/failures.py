"""vLLM's messages when it did not start, ran out of memory or stopped, by release, and the start-up phase of its
functions.

Compared with the source of 26 releases, 0.6.6 to 0.33 (tests/measure/test_failure_wordings.py).
"""

from typing import Final

from kvplan.core.units import MIB
from kvplan.servers.logs.failures import TOLD_BY_FRAMES, TORCH_FIGURES, Cause, Failures, Order, Phase, Size, Wording

_POOL: Final = "v1/core/kv_cache_utils.py"
_WORKER: Final = "v1/worker/gpu_worker.py"

_FREE: Final = (
    r"\(<free_bytes>/<total_bytes>\) on startup",
    r"GPU memory utilization \(<utilization>, <budget_bytes>\)",
)


def _row(
    cause: Cause, phrase: str, releases: str, source: str, phase: Phase | None = None, *figures: str, needs: str = ""
) -> Wording:
    return Wording(cause, phrase, releases, f"vLLM {source}", figures, needs=needs, phase=phase)


WORDINGS: Final[tuple[Wording, ...]] = (
    # the pool
    _row(
        "kv_too_small_for_max_len", "To serve at least one request with the model", "0.7-0.33 (V1)", _POOL, "pool",
        r"max seq len \(<context>\)",
        r"\(<needed_bytes> KV cache is needed",
        r"available KV cache memory \(<available_bytes>\)",
        r"estimated maximum model length is <estimated_max_len>",
    ),
    _row(
        "kv_too_small_for_max_len", "number of tokens that can be stored in KV cache", "0.2-0.10 (V0)",
        "worker/worker.py", "pool", r"can be stored in KV cache \(<kv_tokens>\)", r"max seq len \(<context>\)",
    ),
    _row("no_kv_memory", "No available memory for the cache blocks", "0.2-0.33", _POOL, "pool"),
    Wording(  # followed by the error in both cases
        "no_kv_memory", "blocks: 0, # CPU blocks", "0.2-0.10 (V0)", "vllm#13882", phase="pool", strength="hint"
    ),
    Wording(
        "no_kv_memory", "Available KV cache memory: -", "0.9-0.33", "vLLM, of a size below zero", phase="pool",
        strength="hint",
    ),
    _row("no_kv_memory", "Cannot auto-fit max_model_len: not enough", "0.14-0.33", _POOL, "pool"),
    _row(
        "mamba_blocks_below_max_num_seqs", "exceeds available Mamba cache blocks", "0.20-0.33",
        "config/compilation.py", "capture",
        r"max_num_seqs \(<max_num_seqs>\) exceeds", r"Mamba cache blocks \(<blocks>\)",
    ),
    # free memory before anything is loaded
    _row(
        "free_memory_below_utilization", "is less than desired GPU memory utilization", "0.9-0.33", _WORKER, "load",
        *_FREE,
    ),
    _row(
        "free_memory_below_utilization", "less than the engine's budget after excluding external process's weights",
        "0.32-0.33", _WORKER, "load",
    ),
    _row("free_memory_below_utilization", "exceed the desired GPU memory utilization", "0.32-0.33", _WORKER, "load"),
    _row(
        "free_memory_below_utilization", "Error in memory profiling", "0.6-0.33", _WORKER, "profile",
        r"Initial free memory <initial_free_bytes>", r"current free memory <current_free_bytes>",
    ),
    # torch's out of memory, with the start-up phase in the message
    _row(
        "oom_loading_weights", "Failed to load model - not enough GPU memory", "0.14-0.33",
        "v1/worker/gpu_model_runner.py", "load", *TORCH_FIGURES,
    ),
    _row(
        "oom_runtime", "Error in model execution (input dumped", "0.6 (V0)", "worker/model_runner_base.py", "serving",
        *TORCH_FIGURES, needs="allocated in private pools",
    ),
    _row(
        "oom_sampler_warmup", "occurred when warming up sampler", "0.8-0.33", "v1/worker/gpu_model_runner.py",
        "warmup", r"warming up sampler with <dummy_requests>dummy", *TORCH_FIGURES,
    ),
    _row(
        "oom_sampler_warmup", "occurred when warming up pooler", "0.9-0.33", "v1/worker/gpu_model_runner.py",
        "warmup", r"with <dummy_requests>dummy", *TORCH_FIGURES,
    ),
    # functions with a single reason to raise, for pastes that end before the message
    Wording(
        "free_memory_below_utilization", "ValueError: Free memory on device", "0.9-0.33", "vLLM, cut", _FREE,
        phase="load",
    ),
    Wording(
        "free_memory_below_utilization", "in request_memory", "0.14-0.33", "vLLM's code of these releases",
        needs="in request_memory raise ValueError", phase="load",
    ),
    Wording(
        "oom_sampler_warmup", "in _dummy_sampler_run", "0.8-0.33", "vLLM's code of these releases",
        needs="in _dummy_sampler_run raise RuntimeError", phase="warmup",
    ),
    # the encoder
    _row(
        "encoder_cache_too_small", "Chunked MM input disabled but max_tokens_per_mm_item", "0.8-0.33",
        "v1/core/encoder_cache_manager.py", "pool",
        r"max_tokens_per_mm_item \(<item_tokens>\)", r"max_num_batched_tokens \(<max_num_batched_tokens>\)",
    ),
    _row(
        "encoder_cache_too_small", "exceeds the pre-allocated encoder cache size", "0.16-0.33",
        "v1/engine/input_processor.py", "serving",
        r"(?:item with length|item with) <item_tokens>(?:,|embedding)", r"encoder cache size <encoder_cache_tokens>",
    ),
    # arguments
    _row(
        "max_len_above_model", "User-specified max_model_len", "0.2-0.33", "config/model.py",
        "arguments", r"User-specified max_model_len \(<context>\)",
        r"derived max_model_len \([A-Za-z_]{0,40}=?<derived_max_len>",
    ),
    _row(
        "heads_not_divisible_by_tp", "Total number of attention heads", "0.2-0.33", "config/model.py",
        "arguments", r"attention heads \(<heads>\)", r"tensor parallel size \(<tensor_parallel_size>\)",
    ),
    _row("heads_not_divisible_by_tp", "must be divisible by ep_size", "0.23-0.33", "model_executor/layers/fused_moe"),
    _row(
        "quantization_mismatch", "Consider reducing tensor_parallel_size or running with", "0.4-0.33",
        "model_executor/layers/quantization",
    ),
    _row(
        "too_few_gpus", "to less than max local gpu count", "0.6-0.10", "executor/mp_distributed_executor.py",
        "arguments", r"set tensor_parallel_size \(<world_size>\)", r"max local gpu count \(<gpus>\)",
    ),
    _row(
        "too_few_gpus", "is less than than max local gpu count", "0.6-0.10", "executor/mp_distributed_executor.py",
        "arguments", r"world_size \(<world_size>\)", r"max local gpu count \(<gpus>\)",
    ),
    _row(
        "too_few_gpus", "is larger than the number of available GPUs", "0.14-0.33", "config/parallel.py",
        "arguments", r"World size \(<world_size>\)", r"available GPUs \(<gpus>\)",
    ),
    _row(
        "too_few_gpus", "must be less than or equal to the number of visible devices", "0.14-0.30", _WORKER,
        "arguments", r"local_world_size \(<world_size>\)", r"visible devices \(<gpus>\)",
    ),
    _row("too_few_gpus", "exceeds the total number of available", "0.2-0.33", "executor/ray_utils.py", "arguments"),
    _row(
        "too_few_gpus", "Current node has no", "0.6-0.32", "executor/ray_utils.py", "arguments",
        needs="Current node has no [A-Z]{1,8} available",
    ),
    _row(
        "too_few_gpus", "Ray does not allocate any GPUs on the driver node", "0.6-0.11", "executor/ray_executor.py",
        "arguments",
    ),
    _row(
        "too_few_gpus", "You don't have enough GPUs available in a current node", "0.6-0.32", "executor/ray_utils.py",
        "arguments",
    ),
    _row("too_few_gpus", "is out of bounds", "0.14-0.33", _WORKER, "arguments", needs="local_?rank [0-9]{1,4} is out"),
    _row("too_few_gpus", "Cannot provide a placement group of", "0.6-0.33", "executor/ray_utils.py", "arguments"),
    Wording(
        "too_few_gpus", "No available node types can fulfill resource request", "any", "ray autoscaler",
        phase="arguments", strength="hint",
    ),
    Wording(
        "too_few_gpus", "Waiting for creating a placement group of specs", "0.6-0.33", "vLLM executor/ray_utils.py",
        phase="arguments", strength="hint",
    ),
    Wording(
        "too_few_gpus", "exceeds available GPUs", "0.14-0.33", "vLLM executor/ray_utils.py",
        (r"parallel size \(<world_size>\)", r"available GPUs \(<gpus>\)"), phase="arguments", strength="hint",
    ),
    _row(
        "dtype_or_capability", "is only supported on GPUs with compute", "0.2-0.33",
        "platforms/cuda.py", "arguments",
        "<dtype> is only supported on GPUs",
        r"of at least <required_capability>\. Your", r"GPU has compute capability <capability>\. You",
    ),
    _row(
        "dtype_or_capability", "is not supported for the current GPU", "0.2-0.33", "config/vllm.py", "arguments",
        "The quantization method <quantization> is not supported for the current",
        r"(?:Minimum|Min|Required) capability: <required_capability>\.(?: |C)",
        r"Current capability: <capability>(?:\.|$|[^0-9])",
    ),
    _row(
        "dtype_or_capability", "Quantization scheme is not supported", "0.6-0.33",
        "model_executor/layers/quantization/compressed_tensors/compressed_tensors.py", "load",
        r"(?:Min|Required) capability: <required_capability>\.[ ,]{0,3}C",
        r"Current capability: <capability>(?:\.|$|[^0-9])",
    ),
    _row("dtype_or_capability", "is not supported for quantization method", "0.3-0.33", "config/vllm.py", "arguments"),
    _row("dtype_or_capability", "No compiled cutlass_scaled_mm for", "0.7-0.33", "csrc/quantization/cutlass_w8a8"),
    _row("dtype_or_capability", "does not support float16. Reason", "0.9-0.33", "config/model.py", "arguments"),
    _row(
        "kv_dtype_unsupported", "FP8 KV cache is not supported by", "0.24-0.33", "v1/attention/backends/triton_attn.py",
        "load",
    ),
    _row("kv_dtype_unsupported", "kv_cache_dtype not supported", "0.14-0.33", "platforms/cuda.py", "load"),
    _row("kv_dtype_unsupported", "kv-cache on this device", "0.8-0.33", "v1/attention/backends/flash_attn.py", "load"),
    _row("kv_dtype_unsupported", "kv-cache is not supported with", "0.6-0.33", "attention/layer.py", "load"),
    _row(
        "kv_dtype_unsupported", "VLLM_USE_V1=1 is not supported with", "0.8-0.11", "engine/arg_utils.py", "load",
        needs="with --kv-cache-dtype",
    ),
    _row("kv_dtype_unsupported", "with FP8 KV cache no", "0.8-0.33", "v1/attention/backends/mla", "load"),
    _row("kv_dtype_unsupported", "Unknown kv cache dtype", "0.3-0.11", "config.py", "arguments"),
    _row("kv_dtype_unsupported", "Invalid kv cache dtype", "0.4-0.33", "utils/torch_utils.py", "arguments"),
    _row("kv_dtype_unsupported", "Unrecognized FP8 dtype", "0.6-0.33", "v1/attention/backends", "load"),
    _row("kv_dtype_unsupported", "KV cache is not supported with", "0.21-0.33", "config/vllm.py", "arguments"),
    _row(
        "kv_dtype_unsupported", "requires the SM100 trtllm-gen FlashInfer path", "0.25-0.33",
        "v1/attention/backends/flashinfer.py", "load",
    ),
    _row("kv_dtype_unsupported", "argument --kv-cache-dtype: invalid choice", "0.4-0.33", "argparse"),
    Wording(  # followed by each backend's reason: the KV cache dtype is one
        "dtype_or_capability", "No valid attention backend found for", "0.14-0.33", "vLLM platforms/cuda.py",
        phase="load", strength="general",
    ),
    _row("quantization_mismatch", "Unknown quantization method", "0.2-0.33", "config/model.py", "arguments"),
    _row("quantization_mismatch", "Found unknown quantization", "0.10-0.33", "transformers_utils/configs/mistral.py"),
    _row("quantization_mismatch", "Cannot find the config file for", "0.2-0.33", "model_executor/model_loader"),
    # running: the pool is full and requests wait
    Wording(
        None, "because there is not enough KV cache space", "0.4-0.10 (V0)", "vLLM core/scheduler.py",
        (r"total_num_cumulative_preemption=<preemptions>",), needs="preempted", phase="serving", strength="hint",
        fatal=False,
    ),
    Wording(
        None, "Preemptions: ", "0.14-0.33", "vLLM v1/metrics/loggers.py",
        (r"Preemptions: <preemptions>", r"Running: <running> reqs"), phase="serving", strength="hint", fatal=False,
    ),
)  # fmt: skip

# Functions of vLLM in a traceback -> their start-up phase; the first row found in a trace decides.
FRAMES: Final[tuple[tuple[str, frozenset[str]], ...]] = (
    ("host_memory_or_shm", frozenset({"allocate_cpu_cache", "pin_memory"})),
    ("oom_sampler_warmup", frozenset({"_dummy_sampler_run", "_dummy_pooler_run", "_dummy_pooler_run_task"})),
    (
        "lora_memory",
        frozenset(
            {
                "create_lora_manager", "load_lora_model", "_create_lora_modules", "create_lora_weights", "add_lora",
                "add_adapter", "_load_adapter", "from_local_checkpoint", "from_lora_tensors", "create_dummy_lora",
                "load_lora_adapter", "add_dummy_lora", "activate_adapter",
            }
        ),
    ),
    (
        "capture",
        frozenset(
            {
                "capture_model", "_capture_cudagraphs", "capture_graph", "capture", "capture_end", "capture_begin",
                "profile_cudagraph_memory", "capture_graphs", "_capture_full_graph", "_capture_piecewise_graph",
                "_warmup_and_capture", "capture_inner_cudagraphs",
            }
        ),
    ),
    ("profile", frozenset({"profile_run", "determine_num_available_blocks", "determine_available_memory",
                           "profile_encoder_cache"})),
    (
        "load",
        frozenset(
            {
                "load_model", "create_weights", "process_weights_after_loading", "initialize_model",
                "_initialize_model", "get_model", "make_layers", "load_weights", "_process_weights_after_loading",
            }
        ),
    ),
    ("pool", frozenset({"initialize_kv_cache", "_allocate_kv_cache", "_allocate_kv_cache_tensors",
                        "initialize_kv_cache_tensors", "initialize_from_config", "initialize_cache"})),
    (
        "serving",
        frozenset(
            {
                "run_busy_loop", "_process_engine_step", "step_with_batch_queue", "step_async",
                "run_engine_loop", "engine_step", "_run_engine", "execute_model_async", "sample_tokens",
                "_log_task_completion", "execute_dummy_batch", "step",
            }
        ),
    ),
    ("warmup", frozenset({"compile_or_warm_up_model", "kernel_warmup", "flashinfer_autotune"})),
    ("executing", frozenset({"execute_model"})),  # also in the first engine's profile run
)  # fmt: skip

# Healthy lines -> the start-up phase that follows them.
MARKS: Final[tuple[tuple[str, Phase], ...]] = (
    ("Starting to load model", "load"),
    ("Loading model weights took", "profile"),
    ("Model loading took", "profile"),
    ("Starting profile run", "profile"),
    ("Available KV cache memory:", "pool"),
    ("GPU KV cache size", "pool"),
    ("# GPU blocks:", "pool"),
    ("# cuda blocks:", "pool"),  # the device's name is filled in
    ("Capturing CUDA graph", "capture"),
    ("Capturing cudagraphs for decoding", "capture"),
    ("Graph capturing finished in", "warmup"),
    ("init engine (profile, create kv cache, warmup model) took", "warmup"),
)
READY: Final = (
    "Application startup complete",
    "Uvicorn running on",
    "Starting vLLM API server on",
    "Starting vLLM server on http",
    "Avg prompt throughput",
)
PROCESSES: Final = (  # prefixes of their lines, and how they refer to each other
    r"\((?:[A-Za-z]{0,20}EngineCore\w{0,40}|APIServer\w{0,20}|ApiServer\w{0,20}|Worker(?:_\w{1,40})?) pid=[0-9]",
    r"Engine core initialization failed|WorkerProc (?:initialization failed|failed to start)|"
    r"EngineCore failed to start",
)
STARTS: Final = ("vLLM API server version", "█ version")

DUMMY_REQUESTS: Final = (1024, 256)  # in the sampler's warm-up: V1's default sequences on large and small GPUs
SORTS: Final = frozenset({"apply_top_k_top_p", "apply_top_k_top_p_pytorch"})  # frames of the sampler's sort
# Of widely served families: Qwen 2 to 3.5, Llama 3, DeepSeek V3, Gemma 2 to 4, gpt-oss, Mistral, Phi 3.
VOCABULARIES: Final = (
    152_064, 151_936, 248_320, 128_256, 129_280, 256_000, 262_144, 262_208, 201_088, 131_072, 32_768, 32_064, 32_000
)  # fmt: skip


def is_sampler_sort(tried: Size | None, is_traced: bool) -> bool:
    """True if a size is that of the top-k/top-p sort in the warm-up: float32 logits, int64 indices, or both.

    Without a trace through the sort only the least ambiguous size is accepted: both, for the most requests. torch
    rounds its driver allocations up to 2 MiB.
    """
    if tried is None:
        return False
    kinds = [(rows, width) for rows in DUMMY_REQUESTS for width in (4, 8, 12)] if is_traced else [(1024, 12)]
    elements = [(rows * vocabulary, width) for rows, width in kinds for vocabulary in VOCABULARIES]
    sizes = (-(-count * width // (2 * MIB)) * 2 * MIB for count, width in elements)
    return any(tried.low <= size <= tried.high for size in sizes)


def part_of_size(tried: Size | None, captured: bool, functions: frozenset[str]) -> str | None:
    """The sampler's warm-up after graph capture, recognized by the size of its sort."""
    return "oom_sampler_warmup" if captured and is_sampler_sort(tried, bool(functions & SORTS)) else None


FAILURES: Final = Failures(
    WORDINGS,
    FRAMES,
    MARKS,
    READY,
    STARTS,
    # Running out of memory while the pool is allocated or kernels are warmed up has no cause in the list.
    parts={
        "load": ("oom_loading_weights", "load"),
        "profile": ("oom_profile_run", "profile"),
        "pool": (None, "pool"),
        "capture": ("oom_cuda_graph_capture", "capture"),
        "warmup": (None, "warmup"),
        "prefill": ("oom_runtime", "serving"),
        "serving": ("oom_runtime", "serving"),
        "executing": ("oom_runtime", "serving"),
        **TOLD_BY_FRAMES,
    },
    last_part={"warmup": "oom_sampler_warmup"},
    of_size=part_of_size,
    processes=PROCESSES,
    of_releases=(
        ("with the models's max seq len", "0.8-0.21"),
        ("with the model's max seq len", "0.22-0.33"),
        ("also controls CPU memory", "0.22-0.33"),
        ("configuration/conserving_memory", "0.14-0.33"),
        (r"Free memory on device \([0-9./]{3,20} GiB\) on startup is less", "0.9-0.11"),
        (r"Free memory on device [a-z]{1,8}:[0-9]", "0.14-0.33"),
    ),
    kinds={"no_kv_memory": r"(?:increas|rais)\w{1,3}.{0,12}gpu_memory_utilization"},
    settings=(("KV Cache as specified by kv_cache_memory_bytes", "kv_cache_memory_bytes"),),  # v1/worker/gpu_worker.py
    engines=("Initializing a V1 LLM engine", "Initializing a V0 LLM engine", "Initializing an LLM engine"),
    alive=(*READY[:-1], MARKS[-1][0], "Processed prompts: "),
    deaths=("EngineDeadError", "died unexpectedly", "MQEngineDeadError", "AsyncEngineDeadError"),
    orders=(
        Order("[shutdown] API server: shutdown triggered"),  # 0.24-0.33 entrypoints/launcher.py
        Order("Shutting down FastAPI HTTP server"),  # 0.6-0.33 entrypoints/launcher.py
    ),
    finished=("Processed prompts: 100%", "Shutdown initiated (timeout="),  # entrypoints/llm.py, v1/engine/core.py
    frontend=("[serving_", "[serving.py", "[api_server.py", "[protocol.py", "[preprocess.py", "[launcher.py"),
    modules=("/vllm/",),
)
