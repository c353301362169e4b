"""The llama-server that Ollama starts for a request, as a request for it.

Source: Ollama at fb30760 (2026-08-21), llm/llama_server.go and its scheduler: num_ctx by memory, the batch by context.
"""

from dataclasses import replace
from typing import Final, Literal

from kvplan.core.units import GIB
from kvplan.models.gguf_names import architecture_of
from kvplan.servers.llamacpp.changes import RELEASES
from kvplan.servers.plans.plan import Request
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import EngineArgs

# Video memory of all GPUs -> num_ctx if neither the model nor OLLAMA_CONTEXT_LENGTH states one.
CONTEXTS: Final = ((47 * GIB, 262_144), (23 * GIB, 32_768), (0, 4_096))
# Context of a slot -> both batches, unless the model states num_batch.
BATCHES: Final = ((32_768, 2_048), (4_096, 1_024), (0, 512))
# Architectures that Ollama serves one request at a time.
ONE_SLOT: Final = frozenset({
    "qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen2vl", "qwen3vl",
    "qwen3vlmoe", "mllama",
})  # fmt: skip


def default_context(video_memory: int, trained: int) -> int:
    """num_ctx that Ollama takes with so many bytes of video memory."""
    return min(next(context for least, context in CONTEXTS if video_memory >= least), trained)


def default_batch(context: int) -> int:
    """The batch that Ollama takes for a context; it takes less where it predicts little room, which is not planned."""
    return next(batch for above, batch in BATCHES if context > above)


def as_started(args: EngineArgs, architecture: str, trained: int, video_memory: int) -> EngineArgs:
    """llama-server's arguments. Its slots share nothing: each has num_ctx of its own."""
    stated = args.max_model_len
    context = min(stated, trained) if isinstance(stated, int) else default_context(video_memory, trained)
    slots = 1 if architecture in ONE_SLOT else args.max_num_seqs or 1
    batch = args.max_num_batched_tokens or default_batch(context)
    flash: dict[str, Literal["auto", "on", "off"]] = {"1": "on", "true": "on", "0": "off", "false": "off"}
    return EngineArgs(
        max_model_len=context * slots, max_num_seqs=slots, kv_unified=False, max_num_batched_tokens=batch,
        micro_batch_size=batch, gpu_layers=args.gpu_layers, cache_type_k=args.cache_type_k,
        cache_type_v=args.cache_type_k, flash_attn=flash.get(str(args.flash_attn), args.flash_attn),
        split_mode=None if args.main_gpu is None else "none", main_gpu=args.main_gpu, quantization=args.quantization,
        tensor_parallel_size=args.tensor_parallel_size,
    )  # fmt: skip


def started(request: Request) -> Request:
    """The request of the llama-server that Ollama starts."""
    stored, args = request.checkpoint, request.args
    is_file = stored is not None and stored.format == "gguf"
    own = stored.metadata.get("general.architecture") if stored is not None and is_file else None
    memory = request.gpu.total_memory * args.num_gpus
    architecture = architecture_of(request.spec) if own is None else str(own)
    changed = as_started(args, architecture, request.spec.context_limit, memory)
    return replace(request, args=changed, release=Version(RELEASES.newest, "llamacpp"))
