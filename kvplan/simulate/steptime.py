"""How long a step takes: a roofline over the GPU's figures, or coefficients that a run measured.

Roofline of one rank, all times in seconds:

    matmuls    max(weights read / bandwidth, 2 x parameters x tokens / FLOP rate)
    attention  max(KV read / bandwidth, FLOPs of (query, key) pairs / FLOP rate)
    tiers      bytes / that tier's bandwidth, one after another

The shares of the data sheet's figures that are reached:

    weights  0.70  vLLM 0.19.1 on one H100, Llama-3.1-8B, one request: 6.44 ms per token for 15.0 GB (vLLM's blog,
                   2026-04-22); what the host adds to a step is in it
    KV       0.90  the same: 4.37e-5 ms per token of context, 131,072 bytes each, of 3.35 TB/s
    FLOPs    0.60  assumed: published prefill kernels reach 50 to 75 % of the dense rate

FLOPs are those of the numbers that are multiplied. A linear layer's weights and inputs are as its scheme stores them,
where the GPU has such arithmetic; attention and everything that is not quantised is in 16 bits (`number_format`).

What is not in it: communication between ranks, the vision tower, sampling with penalties.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.hardware.gpu import GpuSpec
from kvplan.models.quant import WEIGHT_ONLY
from kvplan.models.spec import (
    ChunkedAttention,
    CompressedLatent,
    CrossAttention,
    FullAttention,
    KeyIndex,
    LatentAttention,
    LayerCache,
    RecurrentState,
    Scheme,
    SlidingWindow,
    SparseIndexer,
    Weight,
    WindowLatent,
)
from kvplan.servers.plans import Plan
from kvplan.servers.weights import weight_layout
from kvplan.simulate.work import Reach, StepWork
from kvplan.sizing.layout import token_bytes
from kvplan.sizing.weights import num_params, scheme_for


class StepTime(Protocol):
    """What a step costs, and how that was found, for the reader."""

    @property
    def text(self) -> str: ...

    def seconds(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of the data sheet's bandwidth and FLOP/s that are reached."""

    weights: float = 0.70
    kv: float = 0.90
    flops: float = 0.60


# --- what a model's layers ask of a step ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attention:
    """Layers of one reach on one rank: KV bytes per token read, FLOPs per (query, key) pair."""

    reach: Reach
    token_bytes: int
    pair_flops: int


def attention_kinds(plan: Plan) -> tuple[Attention, ...]:
    """A rank's attention layers by reach, in the order of the model; states read and write their bytes per token.

    Scores and values cost 2 x heads x (key + value width) FLOPs per pair; latents are attended to as they lie.
    """
    spec, tp = plan.request.spec, plan.request.args.tensor_parallel_size
    dtype = plan.settings.kv_dtype
    found: dict[int | None, tuple[int, int]] = {}
    for caches in spec.layers:
        for cache in caches:
            reach = _reach(cache, spec.name)
            if reach is None:
                continue
            size, flops = token_bytes(cache, dtype, tp), 2 * spec.num_heads * _width(cache) // tp
            before = found.get(reach.tokens, (0, 0))
            found[reach.tokens] = before[0] + size, before[1] + flops
    return tuple(Attention(Reach(tokens), size, flops) for tokens, (size, flops) in found.items())


UNTIMED: Final[Mapping[type, str]] = {
    LatentAttention: "sparse (indexed) attention",
    SparseIndexer: "sparse (indexed) attention",
    KeyIndex: "attention over indexed keys",
    WindowLatent: "compressed latents",
    CompressedLatent: "compressed latents",
    CrossAttention: "an encoder",
}


def _reach(cache: LayerCache, name: str) -> Reach | None:
    """How far back a layer reads; None for states, whose bytes do not grow."""
    match cache:
        case FullAttention() | LatentAttention(sparse=False):
            return Reach(None)
        case SlidingWindow(window=window):
            return Reach(window)
        case ChunkedAttention(chunk=chunk):
            return Reach(chunk)  # at most: a query at a chunk's beginning reads less
        case RecurrentState():
            return None
        case LatentAttention() | SparseIndexer() | KeyIndex() | WindowLatent() | CompressedLatent() | CrossAttention():
            raise UnsupportedModelError(
                f"simulate: {name}",
                f"the time of {UNTIMED[type(cache)]} is not modeled",
                "`kvplan estimate` says how many requests fit",
            )
        case _:
            assert_never(cache)


def _width(cache: LayerCache) -> int:
    """Key and value elements that one head's query meets per token."""
    match cache:
        case (
            FullAttention(head_dim=k, head_dim_v=v)
            | SlidingWindow(head_dim=k, head_dim_v=v)
            | ChunkedAttention(head_dim=k, head_dim_v=v)
        ):
            return k + v
        case LatentAttention(kv_lora_rank=rank, qk_rope_head_dim=rope):
            return 2 * rank + rope
        case _:
            raise AssertionError(f"{cache} has no reach")


@dataclass(frozen=True, slots=True)
class Matmuls:
    """A rank's weights as a step uses them.

    dense_bytes, expert_bytes    read by every step; read where a token is sent there
    dense_params, active_params  elements per token outside the experts, and of the experts it is sent to
    num_experts, experts_per_token  0 of none
    narrow                       of these elements, those multiplied in less than 16 bits: (format, elements)
    """

    dense_bytes: int
    expert_bytes: int
    dense_params: int
    active_params: int
    num_experts: int
    experts_per_token: int
    narrow: tuple[tuple[str, int], ...] = ()

    def bytes_read(self, num_tokens: int) -> float:
        """Of all experts, those expected to get a token when each token picks at random."""
        if not self.num_experts:
            return float(self.dense_bytes)
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.dense_bytes + self.expert_bytes * (1 - missed)


LOOKED_UP = ("embedding", "vision_audio")  # a row per token, or not in a text step at all


def matmuls(plan: Plan) -> Matmuls:
    spec, args = plan.request.spec, plan.request.args
    if "stated" in plan.weight_groups:
        raise UsageError("simulate", "--weights-bytes does not say what a step reads", "name the checkpoint's config")
    groups = {name: size for name, size in plan.weight_groups.items() if name not in LOOKED_UP}
    if spec.tied:  # the head reads the embedding
        groups["lm_head"] = groups.get("lm_head", 0) or plan.weight_groups.get("embedding", 0)
    experts = groups.pop("experts", 0)
    params = dict(num_params(spec))
    num_experts = max((weight.experts for weight in spec.weights), default=0)
    expert_params = params.pop("experts", 0)
    head = params.get("lm_head", 0) or (params.get("embedding", 0) if spec.tied else 0)
    dense = sum(count for name, count in params.items() if name not in (*LOOKED_UP, "lm_head")) + head
    picked = expert_params * spec.experts_per_token // num_experts if num_experts else 0
    tp = args.tensor_parallel_size
    narrow = tuple((name, count // tp) for name, count in narrow_params(plan).items())
    return Matmuls(
        sum(groups.values()), experts, dense // tp, picked // tp, num_experts, spec.experts_per_token, narrow
    )


def number_format(scheme: Scheme | None, gpu: GpuSpec, *, narrow_inputs: bool) -> str | None:
    """What a layer of this scheme is multiplied in: fp8, int8 or fp4; None for 16 bits.

    Source: vLLM 0.33's kernels. Weights alone in 4 bits are widened first (Marlin), as is everything on a GPU that
    lacks the format. Scales of 16 or 32 numbers (nvfp4, mxfp4, mxfp8) came with the arithmetic in fp4. Beside layers in
    fp8 (DeepSeek-V4) mxfp4 meets inputs in mxfp8, at fp8's rate; alone (gpt-oss) its inputs stay in bfloat16
    (fused_moe/oracle/mxfp4.py prefers those kernels).
    """
    if scheme is None or scheme.variant == WEIGHT_ONLY:
        return None
    match scheme.kind:
        case "fp8_tensor" | "fp8_channel" | "fp8_block":
            return "fp8" if gpu.fp8_flops is not None else None
        case "int8_channel":
            return "int8" if gpu.int8_flops is not None else None
        case "nvfp4":
            return "fp4" if gpu.fp4_flops is not None and gpu.vendor == "nvidia" else None
        case "mxfp8":
            return "fp8" if gpu.fp4_flops is not None else None
        case "mxfp4":
            return "fp8" if gpu.fp4_flops is not None and narrow_inputs else None
        case _:
            return None


def narrow_params(plan: Plan) -> Counter[str]:
    """Elements that a token is multiplied with in fewer than 16 bits, by format, over all ranks."""
    spec, online = plan.request.spec, weight_layout(plan.request, 0).online
    narrow_inputs = spec.quantization is not None and spec.quantization.default is not None
    counts: Counter[str] = Counter()
    placed: list[tuple[int | None, Weight]] = [(None, weight) for weight in spec.other_weights]
    placed += [(index, weight) for index, weights in enumerate(spec.layer_weights) for weight in weights]
    for layer, weight in placed:
        if weight.group in LOOKED_UP or online == "experts_int8":  # experts_int8 widens its weights
            continue
        name = number_format(scheme_for(spec, weight, layer, online), plan.request.gpu, narrow_inputs=narrow_inputs)
        if name is not None:
            of_all = spec.experts_per_token if weight.experts else 1
            counts[name] += weight.num_params * of_all // max(1, weight.experts)
    return counts


# --- the roofline ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds by the slower of memory and arithmetic; see the module's text.

    bandwidth, flops  of the data sheet, in 16 bits; tier_bandwidths in bytes per second
    narrow            elements per token in fewer bits, and the data sheet's FLOP/s for them
    """

    matmuls: Matmuls
    kinds: tuple[Attention, ...]
    state_bytes: int
    bandwidth: int
    flops: int
    shares: Shares
    tier_bandwidths: tuple[int, ...]
    text: str
    narrow: tuple[tuple[int, int], ...] = ()

    def seconds(self, work: StepWork) -> float:
        weights = self.matmuls.bytes_read(work.num_tokens) / (self.bandwidth * self.shares.weights)
        params = self.matmuls.dense_params + self.matmuls.active_params - sum(count for count, _ in self.narrow)
        at_full_rate = params / self.flops + sum(count / rate for count, rate in self.narrow)
        arithmetic = 2 * work.num_tokens * at_full_rate / self.shares.flops
        kv = 2 * self.state_bytes * work.num_seqs
        pairs = 0
        for kind, read, pair in zip(self.kinds, work.read, work.pairs, strict=True):
            kv += kind.token_bytes * read
            pairs += kind.pair_flops * pair
        attention = max(kv / (self.bandwidth * self.shares.kv), pairs / (self.flops * self.shares.flops))
        total = (max(weights, arithmetic) if work.num_tokens else 0.0) + attention
        for size, bandwidth in zip(work.loaded, self.tier_bandwidths, strict=False):
            total += size / bandwidth
        return total


def roofline(plan: Plan, shares: Shares, tier_bandwidths: tuple[int, ...] = ()) -> Roofline:
    """Raises UsageError for a GPU whose figures nobody states, UnsupportedModelError for layers without a model."""
    gpu = plan.request.gpu
    flops = gpu.fp16_flops if plan.settings.dtype == "float16" else gpu.bf16_flops
    if gpu.memory_bandwidth is None or flops is None:
        raise UsageError(
            f"--gpu {gpu.name}",
            "its bandwidth or FLOP/s are not known, so a step's time is not",
            "name a GPU of `kvplan gpus` or give --calibration",
        )
    used = matmuls(plan)
    rates = {"fp8": gpu.fp8_flops, "int8": gpu.int8_flops, "fp4": gpu.fp4_flops}
    narrow = tuple((name, count, rate) for name, count in used.narrow if (rate := rates[name]) is not None)
    arithmetic = "".join(f"{rate / 1e12:,.0f} TFLOP/s in {name} and " for name, _, rate in narrow)
    text = (
        f"roofline of {gpu.name}: weights at {shares.weights:.0%} and KV at {shares.kv:.0%} of "
        f"{gpu.memory_bandwidth / 1e9:,.0f} GB/s, arithmetic at {shares.flops:.0%} of {arithmetic}"
        f"{flops / 1e12:,.0f} TFLOP/s{' in 16 bits' if narrow else ''}"
    )
    if plan.request.args.tensor_parallel_size > 1:
        text += "; communication between ranks is not in it"
    return Roofline(
        used,
        attention_kinds(plan),
        plan.state_bytes,
        gpu.memory_bandwidth,
        flops,
        shares,
        tier_bandwidths,
        text,
        tuple((count, rate) for _, count, rate in narrow),
    )


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Another step time, and no step shorter than what a token is said to take."""

    base: StepTime
    least_s: float

    @property
    def text(self) -> str:
        return f"{self.base.text}; at least {self.least_s * 1000:g} ms, as stated"

    def seconds(self, work: StepWork) -> float:
        return max(self.least_s, self.base.seconds(work))


# --- measured -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """A step's seconds as a sum of what was fitted to a run's steps (kvplan.servers.calibration.TERMS)."""

    coefficients: Mapping[str, float]
    kinds: tuple[Attention, ...]
    tier_bandwidths: tuple[int, ...]
    text: str

    def seconds(self, work: StepWork) -> float:
        kv = 0
        for kind, read in zip(self.kinds, work.read, strict=True):
            kv += kind.token_bytes * read
        each = self.coefficients
        total = each["step"] + each["output_token"] * work.num_samples + each["kv_byte"] * kv
        total += each["prompt_token"] * max(0, work.num_tokens - work.num_samples)
        for size, bandwidth in zip(work.loaded, self.tier_bandwidths, strict=False):
            total += size / bandwidth
        return total


def step_time(plan: Plan, shares: Shares, calibration: str | None, tier_bandwidths: tuple[int, ...] = ()) -> StepTime:
    """The roofline, or what --calibration measured on such a GPU with such a model."""
    if calibration is None:
        return roofline(plan, shares, tier_bandwidths)
    from pathlib import Path

    from kvplan.servers.calibration import read, step_seconds

    found = read(Path(calibration))
    coefficients = step_seconds(found, plan.request.gpu, plan.request.spec.name)
    text = f"measured: {found.origin}"
    return Measured(coefficients, attention_kinds(plan), tier_bandwidths, text)
