"""Tensors that are live at once in a forward pass of vLLM 0.33, in elements per token on one rank.

vLLM's own model classes, run on tensors without data, say what is live at the peak: as written (eager), and in the
pieces that inductor compiles, whose wrapper code allocates, reuses and frees the buffers. The rules have no fitted
factor; tests/facts/peak.jsonl has answers to compare them with.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache

from kvplan.core.records import dataclass
from kvplan.models.spec import LatentAttention, LayerCache, ModelSpec, RecurrentState, Weight
from kvplan.sizing.weights import local_shape, scheme_for

Live = Mapping[str, int]  # what is live -> elements per token; the words of a formula

# Classes whose MLP overwrites its variable of gate and up, so that they are freed before the down projection. Source:
# vLLM 0.33 model_executor/models (LlamaMLP and its users).
FREES_GATE = ("llama", "mistral", "phi3", "glm", "chatglm", "nemotron-nas", "jamba", "falcon", "mixtral")
# Hidden states in 16 bits that are live in a norm computed in float32 with plain tensors, if it is not compiled.
# Source: layers/layernorm.py (GemmaRMSNorm), models/commandr.py (LayerNorm).
WIDE_NORMS = {"gemma": 11, "gemma2": 11, "gemma3": 11, "qwen3_next": 11, "qwen3_5": 11, "cohere": 8}
# Layers that keep more hidden states beside their MLP than the residual, the last output, the input and the output:
# the residual's copy in a norm, or a second branch.
KEEPS_MORE = ("gemma", "qwen3_5", "cohere", "falcon_h1")
SINGLE = "nemotron_h"  # a layer is a mixer or an MLP, so one hidden state fewer is kept


@dataclass(frozen=True, slots=True)
class Parts:
    """Widths of a layer's tensors on a rank, in elements per token.

    attention  outputs of attention, which o_proj reads
    qkv, keys  the fused projection of queries, keys and values; keys among them
    has_norms  queries and keys are normalized, into new tensors
    gate_up    output of the first matrix of a dense MLP, gated or not
    inner      input of its last matrix
    packed     the same in blocks of fp8, with their scales; packed_attention: those of attention
    router     outputs of a router; 0 without experts
    shared     shared experts run beside the others
    """

    attention: int = 0
    qkv: int = 0
    keys: int = 0
    has_norms: bool = False
    gate_up: int = 0
    inner: int = 0
    packed: int = 0
    packed_attention: int = 0
    router: int = 0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """A distinct layer: its widths, what it caches, its weights, and whether all like it precede the first experts."""

    parts: Parts
    caches: tuple[LayerCache, ...]
    weights: tuple[Weight, ...]
    is_before_experts: bool

    @property
    def mixes(self) -> bool:
        """True if the layer has something other than attention over keys and values."""
        return any(isinstance(cache, LatentAttention | RecurrentState) for cache in self.caches)


@lru_cache(maxsize=1024)
def layers_of(spec: ModelSpec, tp: int) -> tuple[Layer, ...]:
    """The distinct layers of a model, in the order of their first occurrence."""
    pairs = list(zip(spec.layer_weights, spec.layers, strict=True))
    experts = [index for index, (weights, _) in enumerate(pairs) if any(weight.experts for weight in weights)]
    last = {pair: index for index, pair in enumerate(pairs)}
    return tuple(
        Layer(parts_of(spec, weights, last[weights, caches], tp), caches, weights, last[weights, caches] < experts[0])
        if experts
        else Layer(parts_of(spec, weights, last[weights, caches], tp), caches, weights, is_before_experts=False)
        for weights, caches in dict.fromkeys(pairs)
    )


def parts_of(spec: ModelSpec, weights: tuple[Weight, ...], layer: int, tp: int) -> Parts:
    widths: dict[str, int] = {}
    for weight in weights:
        if weight.group not in ("attention", "mlp") or weight.inputs == 1 or weight.split == "none":
            continue
        columns, rows = local_shape(weight, tp)
        if weight.split == "outputs":
            widths[weight.group] = widths.get(weight.group, 0) + sum(rows)
            if weight.group == "attention" and len(rows) > 1:
                widths["keys"] = rows[1]
            continue
        widths[f"{weight.group} inputs"] = columns
        scheme = scheme_for(spec, weight, layer, None)
        if scheme is not None and scheme.kind == "fp8_block":
            widths[f"{weight.group} packed"] = columns // 2 + columns // 64  # a byte for each, 4 bytes for 128
    return Parts(
        attention=widths.get("attention inputs", 0),
        qkv=widths.get("attention", 0),
        keys=widths.get("keys", 0),
        has_norms=any(weight.name.endswith("q_norm") for weight in weights),
        gate_up=widths.get("mlp", 0),
        inner=widths.get("mlp inputs", 0),
        packed=widths.get("mlp packed", 0),
        packed_attention=widths.get("attention packed", 0),
        router=max((weight.outputs for weight in weights if weight.group == "router" and weight.inputs > 1), default=0),
        shared=any(weight.group == "shared_expert" for weight in weights),
    )


def live(spec: ModelSpec, layer: Layer, tp: int, *, eager: bool) -> Iterator[Live]:
    """What is live at the points of a layer where most is."""
    parts = layer.parts
    if eager:
        yield from as_written(spec, parts, tp)
    elif parts.inner or parts.qkv:
        yield from compiled(spec, parts, tp)
    if not parts.router and not layer.mixes:
        return
    from kvplan.servers.vllm import live_mixers  # of models with experts, latents or states

    yield from live_mixers.live(spec, layer, tp, eager=eager)


def compiled(spec: ModelSpec, parts: Parts, tp: int) -> Iterator[Live]:
    """What is live in a compiled piece: it reaches from one attention to the next, and its caller keeps its inputs,
    the attention's output and the residual. An all-reduce writes a new tensor, which is not divided.
    """
    hidden = spec.hidden_size
    if parts.inner:
        kept = {"attention": parts.attention, "hidden": 2 * hidden}
        yield {**kept, "gate and up": parts.gate_up, "inner": parts.inner}
        copies = 5 if tp > 1 else 4
        copies += 2 if tp > 1 and wide_norm(spec) == 11 else 0
        yield {"attention": parts.attention, "hidden": copies * hidden}
    if parts.qkv and parts.attention and not spec.is_mla:
        rotated = parts.attention + parts.keys
        yield {"attention": 2 * parts.attention, "hidden": 2 * hidden, "qkv": parts.qkv, "rotated": rotated}


def as_written(spec: ModelSpec, parts: Parts, tp: int) -> Iterator[Live]:
    """What is live while a layer runs eagerly: residual, the last layer's output and the normalized input, beside what
    the variables of its code keep.
    """
    hidden, kind, reduced = spec.hidden_size, spec.model_type, 1 if tp > 1 else 0
    base = 2 if kind == SINGLE else 3
    if parts.inner:
        keeps = not kind.startswith(FREES_GATE) and parts.gate_up > parts.inner
        gate_up = parts.gate_up if keeps else 0
        copies = 5 if kind.startswith(KEEPS_MORE) else base + keeps
        yield {"hidden": copies * hidden, "gate and up": parts.gate_up, "inner": parts.inner}
        yield {
            "hidden": (base + 1 + reduced) * hidden, "gate and up": gate_up, "inner": parts.inner,
            "in fp8": 0 if reduced else parts.packed,
        }  # fmt: skip
    if parts.qkv and parts.attention and not spec.is_mla:
        yield {"hidden": (base + reduced) * hidden, "qkv": parts.qkv, **attended(spec, parts, tp)}
        if (wide := in_float32(spec, parts)) is not None:
            yield wide
    if (copies := wide_norm(spec)) is not None:
        yield {"hidden": copies * hidden}


def attended(spec: ModelSpec, parts: Parts, tp: int) -> Live:
    """Outputs of attention, with the normalized queries and keys, or in blocks of fp8, where the code makes new ones."""
    if spec.model_type.startswith(("qwen3_next", "qwen3_5")):  # a gate of the queries, its sigmoid, their product
        return {"attention": 5 * parts.attention, "keys": parts.keys, "hidden copy": spec.hidden_size}
    normed = parts.attention + parts.keys if parts.has_norms and spec.model_type != "minimax_m2" else 0
    packed = 0 if tp > 1 else parts.packed_attention
    return {"attention": parts.attention, "normalized": normed, "in fp8": packed}


def in_float32(spec: ModelSpec, parts: Parts) -> Live | None:
    """What lives where a class normalizes queries and keys in float32. Source: models/minimax_m2.py, llama4.py."""
    match spec.model_type:
        case "minimax_m2":  # the values, their squares and products
            return {"hidden": 2 * spec.hidden_size, "qkv": parts.qkv, "normalized": 6 * parts.attention + 2 * parts.keys}
        case "llama4_text" | "llama4":  # queries before and after
            return {"hidden": spec.hidden_size, "qkv": parts.qkv, "normalized": 5 * parts.attention}
    return None


def wide_norm(spec: ModelSpec) -> int | None:
    """Hidden states that a norm in float32 keeps, or None."""
    kind = spec.model_type.removesuffix("_text").removesuffix("_moe")
    return WIDE_NORMS.get("cohere" if kind.startswith("cohere") else kind)
