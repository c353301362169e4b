"""Why vLLM does not start for want of an attention backend: what each layer of a model asks of one, and who runs it."""

from collections.abc import Iterator

from kvplan.models.spec import ChunkedAttention, FullAttention, LatentAttention, LayerCache, ModelSpec, SlidingWindow
from kvplan.servers.plans.plan import Refusal, Request, unsupported
from kvplan.servers.plans.pool import plain_layers
from kvplan.servers.vllm import attention_table as table
from kvplan.servers.vllm import backends, rules
from kvplan.servers.vllm.classes import type_of
from kvplan.servers.words.arguments import Settings

OWN_ATTENTION = ("minimax_m3", "step5", "hy_v4")  # model types whose class brings a backend of its own
FLASH = "FLASH_ATTN"  # version 2 of it with ALiBi, which has no fp8 (v1/attention/backends/fa_utils.py)
UNEVEN = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")  # a model of uneven heads ignores requests for others
TRITON = "TRITON_ATTN"
FLASH_4 = (9, 10, 11)  # major capabilities with version 4 (vllm_flash_attn/flash_attn_interface.py)


def refusal(request: Request, settings: Settings, kv: str) -> Refusal | None:
    """Return a refusal of the requested backend, or of layers that no backend runs, or of backends without a common
    layout of the KV cache.

    kv  KV dtype by which vLLM chooses
    """
    is_uneven = rules.has_uneven_heads(request.spec)
    stated = settings.backend if not is_uneven or settings.backend in UNEVEN else None
    answers = stated or backend_of_class(request)
    known, rows = backends.names(request.release), list[table.Answers]()
    for layer in sorted(set(layers(request, settings, kv)), key=repr):
        if answers is not None:
            row = table.answers(answers, request.gpu.sm)
            if row is not None and (problems := list(row.reasons(layer))):
                return without_backend(request, kv) if stated is None else invalid(request, answers, problems)
        else:
            row = (for_uneven if is_uneven else table.chosen)(layer, request.gpu.sm, known)
            if row is None:
                return without_backend(request, kv)
        if row is not None and row.backend == FLASH and kv.startswith("fp8") and has_alibi(request.spec):
            text = f"{FLASH} keeps no KV cache of {kv} with the ALiBi positions of {request.spec.name}"
            return unsupported(text, "kv_cache_dtype", others(request))
        rows += [row] if row is not None else []
    if request.release.has("one_kv_layout") and not table.share_layout(rows):
        return without_layout(request, sorted({row.backend for row in rows}), kv)
    return None


def backend_of_class(request: Request) -> str | None:
    """The backend that Gemma 4's class takes for heads of two widths where FlashAttention has no version 4.

    Source: vLLM 0.33 model_executor/models/config.py (Gemma4Config).
    """
    spec = request.spec
    widths = {shape(cache)[0] for caches in spec.layers for cache in caches}
    is_mixed = spec.model_type == "gemma4_text" and len(widths) > 1
    return TRITON if is_mixed and request.gpu.sm // 10 not in FLASH_4 else None


def has_alibi(spec: ModelSpec) -> bool:
    return type_of(spec).alibi or spec.config.get("alibi") is True


def for_uneven(layer: table.Layer, sm: int, known: frozenset[str]) -> table.Answers | None:
    """The backend of heads whose keys are wider than their values: FlashAttention's where it has them, else Triton's.

    Source: vLLM 0.33 model_executor/models/mimo_v2.py.
    """
    flash, triton = (table.answers(name, sm) for name in UNEVEN)
    row = flash if flash is not None and flash.uneven["sinks" in layer.flags] else triton
    return row if row is not None and not any(row.reasons(layer)) else None


def layers(request: Request, settings: Settings, kv: str) -> Iterator[table.Layer]:
    """What each attention layer of a model asks of its backend; none for layers whose class brings its own."""
    spec, args = request.spec, request.args
    if spec.model_type.startswith(OWN_ATTENTION):
        return
    ahead = rules.sees_ahead(spec, args, request.release)
    by_head = spec.quantization is not None and spec.quantization.kv_by_head
    flags = {"ahead": ahead, "dcp": args.decode_context_parallel_size > 1, "by_head": by_head}
    every = frozenset(flag for flag, on in flags.items() if on)
    block = args.block_size if request.release.has("backend_checks_blocks") else None
    unchanged = plain_layers(spec) if kv.startswith("turboquant") else ()
    for i, caches in enumerate(spec.layers):
        sinks = ("sinks",) if any("sink" in weight.name for weight in spec.layer_weights[i]) else ()
        for cache in caches:
            width, window = shape(cache)
            if width:
                yield table.Layer(
                    kv="auto" if i in unchanged else kv,
                    width=width,
                    dtype=settings.dtype,
                    block=block,
                    latent=isinstance(cache, LatentAttention),
                    sparse=isinstance(cache, LatentAttention) and cache.sparse,
                    flags=every.union(sinks, ("window",) if window else ()),
                    encodes=spec.is_encoder,
                )


def shape(cache: LayerCache) -> tuple[int, bool]:
    """(width that a backend computes, whether it slides); 0 if the cache has no backend of its own to choose."""
    match cache:
        case FullAttention(_, width) | ChunkedAttention(_, width):
            return width, False
        case SlidingWindow(_, width):
            return width, True
        case LatentAttention(latent, rope):
            return latent + rope, False
        case _:
            return 0, False


# --- in words ---------------------------------------------------------------------------------------------------------


def invalid(request: Request, backend: str, problems: list[str]) -> Refusal:
    where = f"is not valid for {request.spec.name} on {capability(request)}"
    return unsupported(f"attention_backend {backend} {where}: {', '.join(problems)}", "attention_backend", ("auto",))


def without_backend(request: Request, kv: str) -> Refusal:
    """The refusal of layers that no backend runs, with what to change."""
    args, where = request.args, f"{request.spec.name} on {capability(request)}"
    if kv == "auto":
        dcp = args.decode_context_parallel_size
        text = f"no attention backend runs {where}" + (f" with decode_context_parallel_size {dcp}" if dcp > 1 else "")
        if dcp > 1:
            return unsupported(text, "decode_context_parallel_size", (1,))
        return unsupported(text, "dtype", ("auto",) if args.dtype != "auto" else ())
    return unsupported(f"no attention backend keeps a KV cache of {kv} for {where}", "kv_cache_dtype", others(request))


def without_layout(request: Request, names: list[str], kv: str) -> Refusal:
    text = f"no layout of a KV cache of {kv} suits all its attention backends ({', '.join(names)})"
    return unsupported(f"{text} on {capability(request)}", "kv_cache_dtype", others(request))


def others(request: Request) -> tuple[str, ...]:
    """KV dtypes to propose in place of one that is refused: fp8, then the model's."""
    stated = request.args.kv_cache_dtype
    return tuple(dtype for dtype in ("fp8", "auto", "bfloat16", "float16") if dtype != stated)


def capability(request: Request) -> str:
    return f"compute capability {request.gpu.sm / 10:.1f}"
