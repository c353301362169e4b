"""The transient peak of vLLM's profile run: a forward pass of `max_num_batched_tokens`, or the sampling after it.

From the release on whose own classes were run on tensors without data, the rules below say what is live at the peak: as
written (eager), and in the pieces that inductor compiles, whose wrapper code allocates, reuses and frees the buffers.
They have no fitted factor; tests/facts/peak.jsonl has answers to compare them with. Older releases keep a factor that
is fitted to logs, except for plain models that run eagerly.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

from kvplan.core.records import dataclass
from kvplan.core.units import DTYPE_BITS, MIB
from kvplan.hardware.gpu import GpuSpec
from kvplan.models.spec import (
    ChunkedAttention,
    FullAttention,
    LatentAttention,
    LayerCache,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
    SparseIndexer,
    Weight,
    interned,
)
from kvplan.servers.plans.plan import Estimate
from kvplan.servers.releases import Version
from kvplan.servers.vllm.overheads import (
    EVIDENCE,
    Sampler,
    blas_workspace,
    expert_room,
    indexer_logits,
    kept_states,
    pools,
    sampler_of,
    widths,
)
from kvplan.servers.vllm.rules import takes_items
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.weights import local_shape, scheme_for

# Ratio of a forward pass to 2 B x tokens x (2 hidden + widest part of a layer): 1.08-1.25, median 1.19, n = 8 logs of 4
# threads in which it sets the peak: Llama-3.1-8B with 20,000 and 29,000 tokens unchunked (vllm-project/vllm#10517),
# Qwen2.5-7B on V100, Qwen2.5-3B of Unsloth, and in the accuracy report CodeLlama-7B, granite-3.1-8b and both pipeline
# rows.
FORWARD_RANGE = (1.0, 1.2, 1.4)
FORWARD_SOURCE = f"vLLM profile run; vllm#10517, llm-d-planner v0.19.0; {EVIDENCE}forward"
MLA_ROWS = 65_536  # most rows of the dummy tensor for MLA's prefill workspace
LIVE_SOURCE = f"vLLM 0.33 model classes on tensors without data; {EVIDENCE}forward"
# Model types whose classes were run on tensors without data. The rows of others stay fitted, with the range of what
# those keep on 1 and 8 GPUs that did not follow the rules (phi-1.5, phi-2, OLMo 2, StarCoder2, GPT-2, BLOOM, OPT,
# Laguna, Gemma 3n: 1.1 to 2.8).
NOT_READ_HIGH = 2.9
READ_TYPES: Final = frozenset({
    "chatglm", "cohere", "cohere2", "dbrx", "deepseek_v2", "deepseek_v3", "falcon", "falcon_h1", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granite", "granitemoehybrid",
    "internlm2", "jamba", "kimi_k2", "llama", "llama4_text", "mamba", "mimo", "mimo_v2_flash", "minimax_m2",
    "ministral3", "mistral", "mixtral", "nemotron_h", "nemotron-nas", "phi3", "qwen2", "qwen2_5_vl", "qwen3",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "qwen3_vl_text",
})  # fmt: skip
READ_STATES: Final = ("mamba1", "mamba2", "gated_delta_net")
READ_CACHES: Final = (FullAttention, SlidingWindow, ChunkedAttention, LatentAttention, SparseIndexer, RecurrentState)

Live = Mapping[str, int]  # what is live -> elements per token; the words of a formula

# Classes whose MLP overwrites its variable of gate and up, so that they are freed before the down projection. Source:
# vLLM 0.33 model_executor/models (LlamaMLP and its users).
FREES_GATE = ("llama", "mistral", "ministral3", "phi3", "glm", "chatglm", "nemotron-nas", "jamba", "falcon", "mixtral")
# Hidden states in 16 bits that are live in a norm computed in float32 with plain tensors, if it is not compiled.
# Source: layers/layernorm.py (GemmaRMSNorm), models/commandr.py (LayerNorm).
WIDE_NORMS = {"gemma": 11, "gemma2": 11, "gemma3": 11, "qwen3_next": 11, "qwen3_5": 11, "cohere": 8}
# Layers that keep more hidden states beside their MLP than the residual, the last output, the input and the output:
# the residual's copy in a norm, or a second branch.
KEEPS_MORE = ("gemma", "qwen3_5", "cohere", "falcon_h1")
SINGLE = "nemotron_h"  # a layer is a mixer or an MLP, so one hidden state fewer is kept


def activations(
    spec: ModelSpec,
    settings: Settings,
    args: EngineArgs,
    release: Version,
    gpu: GpuSpec,
    *,
    stage: int | None = None,
    sampler: Sampler | None = None,
) -> Estimate:
    """Transient peak of the profiling run: the larger of a forward pass of `max_num_batched_tokens`, and the hidden
    states kept while `max_num_seqs` rows are sampled. Only the last pipeline stage samples; `stage` None: the stage
    with the most. `sampler` overrides the release's own.

    Source: vLLM 0.33 v1/worker/gpu/model_runner.py (profile_run).
    """
    element, tokens, seqs = DTYPE_BITS[settings.dtype] // 8, settings.max_num_batched_tokens, settings.max_num_seqs
    if settings.first_engine and takes_items(spec, args, release):
        from kvplan.servers.vllm import encoder  # of a multimodal model

        seqs = encoder.first_engine_seqs(spec, settings, args, release)
    passing = forward(spec, settings, args, release, gpu, seqs)
    # In the code the logits of sparse attention belong to the forward pass; one log shows them together with the
    # sampler.
    logits = indexer_logits(spec, settings)
    samples = (stage is None or stage == args.pipeline_parallel_size - 1) and not pools(spec, args)
    sampler, rows = sampler or sampler_of(settings, gpu), min(seqs, tokens) if samples else 0
    wider, entries = element - 2, rows * spec.vocab_size
    states = kept_states(settings, rows)
    hidden = element * states * spec.hidden_size
    low = hidden + int(entries * (sampler.low + wider))
    sampling = hidden + int(entries * (sampler.likely + wider))
    high = hidden + int(entries * (sampler.high + wider))
    formula, source, kind = passing.formula, passing.source, passing.kind
    if sampling >= passing.likely:
        formula = (
            f"{rows:,} seqs x {spec.vocab_size:,} vocab x {sampler.likely + wider:g} B"
            f" ({element} logits + {sampler.rest}) + {states:,} x {spec.hidden_size:,} hidden x {element} B"
        )
        source, kind = sampler.source, sampler.kind
    if logits:
        formula += f" + {logits // MIB:,} MiB indexer logits"
    likely = max(passing.likely, sampling) + logits
    own = Estimate(max(passing.low + logits, low), likely, max(passing.high, high) + logits, formula, source, kind)
    if not profiles_items(spec, settings, args, release) or (stage or 0) > 0:
        return own
    from kvplan.servers.vllm import encoder_peak  # of a multimodal model

    experts = (0, 0, 0)
    if release.has("kept_expert_workspace"):
        experts, _ = expert_room(spec, settings, args, gpu.sm, shared=True)
    return encoder_peak.with_encoder(own, spec, settings, args, release, experts)


def profiles_items(spec: ModelSpec, settings: Settings, args: EngineArgs, release: Version) -> bool:
    """True if the profile run has a batch of images, videos or audio."""
    takes = takes_items(spec, args, release) and not args.skip_mm_profiling
    return takes and (not settings.runner_v2 or release.has("runner_v2_encoder"))


# --- a forward pass -----------------------------------------------------------------------------------------------


def forward(
    spec: ModelSpec, settings: Settings, args: EngineArgs, release: Version, gpu: GpuSpec, seqs: int
) -> Estimate:
    """Peak of a forward pass, by the release."""
    element, tokens, hidden = DTYPE_BITS[settings.dtype] // 8, settings.max_num_batched_tokens, spec.hidden_size
    sent_on = 2 * element * tokens * hidden if args.pipeline_parallel_size > 1 else 0  # to the next stage
    width = widths(spec, args.tensor_parallel_size, 1)
    given = spec.multimodal and takes_items(spec, args, release)
    rows = min(max(8 * settings.max_model_len, 64 * seqs), MLA_ROWS)
    latents = element * rows * width.latent
    eager = args.enforce_eager or settings.first_engine
    if is_read(spec) and not other_experts(spec, args, gpu) and (release.is_compared or (eager and is_plain(spec))):
        tp, token = args.tensor_parallel_size, element * tokens
        live, beside, before = most(spec, tp, latents, 0, token, eager=eager, given=given)
        if before:
            (_, room, _), _ = expert_room(spec, settings, args, gpu.sm, shared=True)
            live, beside, _ = most(spec, tp, latents, room, token, eager=eager, given=given)
        return by_tensors(live, beside, spec, sent_on, element, tokens)
    size = element * tokens * (2 * hidden + width.layer)
    low, likely, high = (latents + sent_on + int(size * factor) for factor in FORWARD_RANGE)
    workspace = blas_workspace(sampler_of(settings, gpu), gpu)
    low, likely = max(0, low - workspace), max(0, likely - workspace)  # the fitted factor includes it
    if release.has("consumed_memory") and not release.has("profiled_without_splits"):
        high += size
    if release.is_compared and not is_read(spec):  # inputs of all layers are not divided
        whole = widths(spec, 1, 1).layer if inputs_by_layer(spec) else width.layer
        high = max(high, latents + sent_on + int(element * tokens * (2 * hidden + whole) * NOT_READ_HIGH))
    text = f" + {latents + sent_on:,} B kept" if latents + sent_on else ""
    if not release.has("kept_expert_workspace"):
        (least, usual, largest), experts = expert_room(spec, settings, args, gpu.sm)
        low, likely, high, text = low + least, likely + usual, high + largest, text + experts
    formula = (
        f"{tokens:,} tokens x (2 x {hidden:,} hidden + {width.layer:,} widest) x {element} B"
        f" x {FORWARD_RANGE[1]} (temporaries, fitted){text}"
    )
    return Estimate(low, likely, high, formula, FORWARD_SOURCE, "calibrated")


@lru_cache(maxsize=1024)
def is_read(spec: ModelSpec) -> bool:
    """True if the classes that run the model are among those whose tensors were read."""
    caches = {cache for layer in spec.layers for cache in layer}
    states = all(cache.kind in READ_STATES for cache in caches if isinstance(cache, RecurrentState))
    return states and spec.model_type in READ_TYPES and all(isinstance(cache, READ_CACHES) for cache in caches)


@lru_cache(maxsize=1024)
def inputs_by_layer(spec: ModelSpec) -> int:
    """Elements per token of the inputs that a model computes for all its layers before the first (Gemma 3n, 4 E)."""
    name = "model.per_layer_model_projection"
    return next((weight.outputs for weight in spec.other_weights if weight.name == name), 0)


def other_experts(spec: ModelSpec, args: EngineArgs, gpu: GpuSpec) -> bool:
    """True if experts run in a way that was not read: on the tokens of all replicas, or in MXFP4 by other kernels than
    Hopper's.
    """
    if not spec.experts_per_token:
        return False
    is_mxfp4 = spec.quantization is not None and spec.quantization.method == "mxfp4"
    return args.data_parallel_size > 1 or (is_mxfp4 and gpu.sm != 90)


@lru_cache(maxsize=1024)
def is_plain(spec: ModelSpec) -> bool:
    """True without experts, latents, states, an encoder, and norms that earlier releases compiled by themselves."""
    special = any(layer.parts.router or layer.mixes for layer in layers_of(spec, 1))
    return not special and not spec.multimodal and wide_norm(spec) is None


@lru_cache(maxsize=4096)
def most(
    spec: ModelSpec, tp: int, latents: int, room: int, token: int, *, eager: bool, given: bool
) -> tuple[tuple[tuple[str, int], ...], int, bool]:
    """What is live at the peak, the bytes beside it, and whether it is before the first experts.

    Beside it is the stand-in for MLA's workspace, less the `room` bytes of the experts' workspace before it is there.
    token  bytes of an element for all tokens of a step
    given  the embeddings of the tokens are in a buffer of the runner, as for a model that sees or hears
    """
    points = [
        (
            live,
            (latents if "latents" in live else 0) - (room if layer.is_before_experts else 0),
            layer.is_before_experts,
        )
        for layer in layers_of(spec, tp)
        for live in live_in(spec, layer, tp, eager=eager, given=given)
    ]
    points.append(({"hidden": 3 * spec.hidden_size}, 0, False))  # the least: residual, input and output of any layer
    live, beside, before = max(points, key=lambda point: (token * sum(point[0].values()) + point[1], not point[2]))
    live = {**live, "inputs of layers": inputs_by_layer(spec)}
    return tuple(live.items()), beside, before


@lru_cache(maxsize=4096)
def terms_of(live: tuple[tuple[str, int], ...], hidden: int) -> str:
    """What is live, in the words of a formula."""
    return " + ".join(
        f"{width // hidden} x {hidden:,} hidden" if name == "hidden" else f"{width:,} {name}"
        for name, width in live
        if width
    )


def by_tensors(
    live: tuple[tuple[str, int], ...], beside: int, spec: ModelSpec, sent_on: int, element: int, tokens: int
) -> Estimate:
    size = element * tokens * sum(dict(live).values()) + beside + sent_on
    formula = f"{tokens:,} tokens x ({terms_of(live, spec.hidden_size)}) x {element} B"
    if beside > 0:
        formula += f" + {beside // MIB:,} MiB of MLA's stand-in"
    if beside < 0:
        formula += f" - {-beside // MIB:,} MiB of experts' workspace"
    if sent_on:
        formula += f" + {sent_on:,} B sent on"
    return Estimate(size, size, size, formula, LIVE_SOURCE, "formula")


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
    pairs = list(zip(interned(spec.layer_weights), interned(spec.layers), strict=True))
    experts = [index for index, (weights, _) in enumerate(pairs) if any(weight.experts for weight in weights)]
    last = {(id(weights), id(caches)): index for index, (weights, caches) in enumerate(pairs)}
    first = {place: pairs[index] for place, index in last.items()}
    return tuple(
        Layer(parts_of(spec, weights, last[place], tp), caches, weights, bool(experts) and last[place] < experts[0])
        for place, (weights, caches) in first.items()
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


def live_in(spec: ModelSpec, layer: Layer, tp: int, *, eager: bool, given: bool) -> Iterator[Live]:
    """What is live at the points of a layer where most is."""
    parts = layer.parts
    if eager:
        yield from as_written(spec, parts, tp, given=given)
    elif parts.inner or parts.qkv:
        yield from compiled(spec, parts, tp)
    if not parts.router and not layer.mixes:
        return
    from kvplan.servers.vllm import live_mixers  # of models with experts, latents or states

    yield from live_mixers.live(spec, layer, tp, eager=eager, given=given)


def compiled(spec: ModelSpec, parts: Parts, tp: int) -> Iterator[Live]:
    """What is live in a compiled piece: it reaches from one attention to the next, and its caller keeps its inputs,
    the attention's output and the residual. An all-reduce writes a new tensor, which is not divided.
    """
    hidden = spec.hidden_size
    if parts.inner:
        inputs = 3 if spec.model_type.startswith("cohere") else 2  # attention and MLP have the same input
        inner = {"gate and up": parts.gate_up, "inner": parts.inner}
        yield {"attention": parts.attention, "hidden": inputs * hidden, **inner}
        copies = (5 if tp > 1 else 4) + (2 if tp > 1 and wide_norm(spec) == 11 else 0) - (spec.model_type == "chatglm")
        yield {"attention": parts.attention, "hidden": copies * hidden}
    if parts.qkv and parts.attention and not spec.is_mla:
        rotated = parts.attention + parts.keys
        yield {"attention": 2 * parts.attention, "hidden": 2 * hidden, "qkv": parts.qkv, "rotated": rotated}


def stays(spec: ModelSpec, *, given: bool) -> bool:
    """True if the residual stays in the runner's buffer of embeddings: the norm adds to it in place."""
    return given and wide_norm(spec) is None and not spec.model_type.startswith("llama4")


def as_written(spec: ModelSpec, parts: Parts, tp: int, *, given: bool) -> Iterator[Live]:
    """What is live while a layer runs eagerly: residual, the last layer's output and the normalized input, beside what
    the variables of its code keep.
    """
    hidden, kind, reduced = spec.hidden_size, spec.model_type, 1 if tp > 1 else 0
    base = (2 if kind == SINGLE else 3) - stays(spec, given=given)
    if parts.inner:
        keeps = not kind.startswith(FREES_GATE) and parts.gate_up > parts.inner
        branches = 1 if kind.startswith(KEEPS_MORE) else 2 if kind == "chatglm" else 0
        inner = {"gate and up": parts.gate_up, "inner": parts.inner}
        yield {"hidden": (base + branches + (keeps or branches == 1)) * hidden, **inner}
        if parts.packed:
            yield {"hidden": (base + 1) * hidden, **inner, "in fp8": parts.packed}
        inner["gate and up"] *= keeps
        last = base + branches + 1 + (0 if kind.startswith("cohere") else reduced)
        yield {"hidden": last * hidden, **inner}
    if parts.qkv and parts.attention and not spec.is_mla:
        yield {"hidden": (base + reduced) * hidden, "qkv": parts.qkv, **attended(spec, parts, tp)}
        if (wide := in_float32(spec, parts, tp)) is not None:
            yield wide
    if (copies := wide_norm(spec)) is not None:
        yield {"hidden": copies * hidden}


def attended(spec: ModelSpec, parts: Parts, tp: int) -> Live:
    """Outputs of attention, also in blocks of fp8, and normalized queries and keys, where the code makes new ones."""
    if spec.model_type.startswith(("qwen3_next", "qwen3_5")):  # a gate of the queries, its sigmoid, their product
        return {"attention": 5 * parts.attention, "keys": parts.keys, "hidden copy": spec.hidden_size}
    if spec.model_type == "gemma4_text":  # values are normalized too
        normed = parts.attention + 2 * parts.keys
        return {"attention": parts.attention, "normalized": normed, "hidden copy": spec.hidden_size}
    normed = parts.attention + parts.keys if parts.has_norms and (tp > 1 or spec.model_type != "minimax_m2") else 0
    packed = 0 if tp > 1 else parts.packed_attention
    return {"attention": parts.attention, "normalized": normed, "in fp8": packed}


def in_float32(spec: ModelSpec, parts: Parts, tp: int) -> Live | None:
    """What lives where a class normalizes queries and keys in float32. Source: models/minimax_m2.py, llama4.py."""
    match spec.model_type:
        case "minimax_m2" if tp == 1:  # the values, their squares and products
            return {
                "hidden": 2 * spec.hidden_size,
                "qkv": parts.qkv,
                "normalized": 6 * parts.attention + 2 * parts.keys,
            }
        case "llama4_text" | "llama4":  # queries before and after
            return {"hidden": spec.hidden_size, "qkv": parts.qkv, "normalized": 5 * parts.attention}
    return None


def wide_norm(spec: ModelSpec) -> int | None:
    """Hidden states that a norm in float32 keeps, or None."""
    kind = spec.model_type.removesuffix("_text").removesuffix("_moe")
    return WIDE_NORMS.get("cohere" if kind.startswith("cohere") else kind)
