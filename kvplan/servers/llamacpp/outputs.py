"""What llama.cpp prints: its log, how it says that memory is short and which flags help, its metrics."""

from typing import Final

from kvplan.servers.llamacpp.log import LOGS as logs
from kvplan.servers.llamacpp.metrics import METRICS as metrics
from kvplan.servers.logs.failures import Cause, Failures, Help, Phase, Wording

__all__ = ["bench", "failures", "logs", "metrics"]
SOURCE: Final = "llama.cpp 0c1e57098 src/llama-model.cpp, llama-kv-cache.cpp, llama-context.cpp, ggml-alloc.c"
TRIED: Final = (r"buffer of size <tried_bytes>[a-z]", r"allocating <tried_bytes> on device")


def _row(cause: Cause, phrase: str, phase: Phase, unless: str = "", needs: str = "") -> Wording:
    return Wording(cause, phrase, "b1-0.5.0", SOURCE, TRIED, needs=needs, unless=unless, phase=phase)


# Errors of loading that have rows of their own, here and in logs/obstacles.py.
SAID_APART: Final = (
    "unable to allocate|model architecture|missing tensor|not found|wrong (?:number|shape|array)|file bounds|"
    "tokenizer|split|corrupted"
)
LAYERS: Final = Help("gpu_layers", "-ngl", "lower", "layers that stay on the host are slower")
EXPERTS: Final = Help(
    "n_cpu_moe", "--n-cpu-moe", "raise", "in a mixture of experts: those of the first layers stay on the host"
)
CONTEXT: Final = Help("max_model_len", "-c", "lower", "the cache is allocated whole at the start")
CACHE: Final = Help("cache_type_k", "-ctk q8_0 -ctv q8_0", "change", "half of the cache; prompts copy a layer's to f16")
BATCH: Final = Help("micro_batch_size", "-ub", "lower", "the graph of fewer tokens takes less memory")
TYPE: Final = Help("quantization", "a smaller file type", "change", "its weights are smaller")
FLASH: Final = Help("flash_attn", "-fa on", "change", "a quantized cache of V needs flash attention")
PLAIN_CACHE: Final = Help("cache_type_k", "-ctk f16 -ctv f16", "change", "a cache that every model takes")
failures: Final = Failures(
    wordings=(
        _row("oom_loading_weights", "error loading model: unable to allocate", "load"),
        _row("oom_kv_cache", "failed to allocate buffer for kv cache", "pool"),
        _row("oom_kv_cache", "failed to allocate buffer for rs cache", "pool"),
        _row("oom_kv_cache", "llama_kv_cache_init() failed for self-attention cache", "pool"),
        _row("kv_dtype_unsupported", "V cache was requested, but this requires Flash Attention", "arguments"),
        _row("kv_dtype_unsupported", "V cache requires flash_attn", "arguments"),
        _row("kv_dtype_unsupported", "V cache quantization requires flash_attn", "arguments"),
        _row("kv_dtype_unsupported", "cache type ", "arguments", needs="does not divide n_embd_head"),
        _row("oom_compute_buffers", "failed to allocate compute", "profile", unless="retrying without pipeline"),
        _row("not_memory", "error loading model: ", "load", unless=SAID_APART),
        *(
            Wording("not_memory", f"failed to load {kind} model", "b1-0.5.0", SOURCE, phase="load", strength="general")
            for kind in ("multimodal", "draft")
        ),
        _row("oom_runtime", "cuMemCreate(&handle", "serving"),  # the pool that kernels work in
        _row("oom_runtime", "kIOGPUCommandBufferCallbackErrorOutOfMemory", "serving"),
    ),
    frames=(),
    marks=(
        ("llama_model_loader: loaded meta data", "load"),
        ("llama_context: constructing llama_context", "pool"),
        ("sched_reserve: reserving", "profile"),
    ),
    ready=(
        "server is listening on",
        "load_model: initializing, n_slots",
        "llama-server started in",
        "llama runner started in",
    ),
    starts=("llama_model_loader: loaded meta data",),
    parts={"serving": ("oom_runtime", "serving")},
    files=(
        "llama-server",
        "llama.cpp",
        "ggml_backend_",
        "ggml_cuda_init",
        "llama_init_from_model",
        "llama_model_load",
        "llama_kv_cache",
        "llm_load_tensors",
        "llama_new_context_with_model",
    ),
    own_marks=True,
    helps={
        "oom_loading_weights": (EXPERTS, TYPE, LAYERS),
        "oom_kv_cache": (CACHE, CONTEXT, LAYERS),
        "oom_compute_buffers": (BATCH, CONTEXT, EXPERTS, LAYERS),
        "oom_runtime": (CONTEXT, LAYERS),
        "kv_dtype_unsupported": (FLASH, PLAIN_CACHE),
    },
)
bench = None
