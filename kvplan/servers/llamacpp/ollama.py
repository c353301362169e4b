"""Ollama's settings as the llama-server that it starts.

Source: ollama/ollama at fb30760 (2026-08-21), whose releases from 0.30 on run every GGUF file in an upstream
llama-server with `--fit`: its choice of num_ctx by memory, of the batch by context, and of the slots.
"""

from typing import Final, Literal, NamedTuple

from kvplan.servers.llamacpp.settings import Settings

GIB: Final = 1 << 30
# Video memory of all GPUs -> num_ctx if neither the model nor OLLAMA_CONTEXT_LENGTH states one.
CONTEXTS: Final = ((47 * GIB, 262_144), (23 * GIB, 32_768), (0, 4_096))
# Context of a slot -> both batches, unless the model states num_batch.
BATCHES: Final = ((32_768, 2_048), (4_096, 1_024), (0, 512))
# Architectures that Ollama serves one request at a time.
ONE_SLOT: Final = frozenset({
    "qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen2vl", "qwen3vl",
    "qwen3vlmoe", "mllama",
})  # fmt: skip
FLASH: Final[dict[bool | None, Literal["auto", "on", "off"]]] = {None: "auto", True: "on", False: "off"}


class Ollama(NamedTuple):
    """What a user sets in Ollama; None is not set.

    num_ctx, num_batch, num_gpu  parameters of the model or of a request
    num_parallel, kv_cache_type, flash_attention  OLLAMA_NUM_PARALLEL, OLLAMA_KV_CACHE_TYPE, OLLAMA_FLASH_ATTENTION
    """

    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_parallel: int | None = None
    kv_cache_type: str | None = None
    flash_attention: bool | None = None


def default_context(video_memory: int, trained: int) -> int:
    """num_ctx that Ollama takes with so many bytes of video memory."""
    stated = next(ctx for least, ctx in CONTEXTS if video_memory >= least)
    return min(stated, trained)


def default_batch(context: int) -> int:
    """The batch that Ollama takes for a context; it takes less where it predicts little room, which is not planned."""
    return next(batch for above, batch in BATCHES if context > above)


def settings(chosen: Ollama, architecture: str, trained: int, video_memory: int) -> Settings:
    """The llama-server that Ollama starts. Its slots share nothing: each has num_ctx of its own."""
    context = chosen.num_ctx or default_context(video_memory, trained)
    slots = 1 if architecture in ONE_SLOT else chosen.num_parallel or 1
    batch = chosen.num_batch or default_batch(context)
    kind = (chosen.kv_cache_type or "f16").upper()
    return Settings(
        ctx=context * slots, slots=slots, unified=False, batch=batch, ubatch=batch, gpu_layers=chosen.num_gpu,
        flash=FLASH[chosen.flash_attention], cache_k=kind, cache_v=kind,
    )  # fmt: skip
