"""Step time: a roofline with server overhead, or coefficients measured in a run.

One rank, all times in seconds (constants and their sources: kvplan/simulate/constants.py):

    matmuls    hypot(weights read / bandwidth, 2 x parameters x tokens / FLOP rate), at the achieved fractions
    attention  max(KV read / bandwidth, FLOPs of (query, key) pairs / FLOP rate)
    layers     a cost per layer; in prefill steps kernel launches are a floor
    ranks      2 all-reduces per layer: a cost per doubling of ranks, and the bytes over their link
    server     a cost per step, and per sequence in it

The FLOP rate is that of the number format multiplied: for a linear layer the format of its scheme if the GPU supports
it; for attention and everything unquantized 16 bits (`number_format`).

Not modeled: the vision tower, sampling with penalties.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import hypot, log2
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
from kvplan.simulate.constants import SMALL_BYTES, Constants, constants_of, scaled
from kvplan.simulate.work import Reach, StepWork
from kvplan.sizing.layout import token_bytes
from kvplan.sizing.weights import num_params, scheme_for


class StepTime(Protocol):
    """Seconds of a step, and a text for the user that explains the model."""

    @property
    def text(self) -> str: ...

    def seconds(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class Shares:
    """User-stated fractions of data-sheet bandwidth and FLOP/s that are achieved; None: the fitted value."""

    weights: float | None = None
    kv: float | None = None
    flops: float | None = None


# --- work of a model's layers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attention:
    """All layers of one reach on one rank: KV bytes per token read, FLOPs per (query, key) pair."""

    reach: Reach
    token_bytes: int
    pair_flops: int


def attention_kinds(plan: Plan) -> tuple[Attention, ...]:
    """Return a rank's attention layers by reach, in model order, without recurrent states.

    Scores and values cost 2 x heads x (key + value width) FLOPs per pair; latents are used without decompression.
    """
    spec, tp = plan.request.spec, plan.request.args.tensor_parallel_size
    dtype = plan.settings.kv_dtype
    kinds: dict[int | None, tuple[int, int]] = {}
    for caches in spec.layers:
        for cache in caches:
            reach = _reach(cache, spec.name)
            if reach is None:
                continue
            size, flops = token_bytes(cache, dtype, tp), 2 * spec.num_heads * _width(cache) // tp
            before = kinds.get(reach.tokens, (0, 0))
            kinds[reach.tokens] = before[0] + size, before[1] + flops
    return tuple(Attention(Reach(tokens), size, flops) for tokens, (size, flops) in kinds.items())


UNTIMED: Final[Mapping[type, str]] = {
    LatentAttention: "sparse (indexed) attention",
    SparseIndexer: "sparse (indexed) attention",
    KeyIndex: "attention over indexed keys",
    WindowLatent: "compressed latents",
    CompressedLatent: "compressed latents",
    CrossAttention: "an encoder",
}


def _reach(cache: LayerCache, name: str) -> Reach | None:
    """Return how far back a layer reads, or None for recurrent states, whose size is constant."""
    match cache:
        case FullAttention() | LatentAttention(sparse=False):
            return Reach(None)
        case SlidingWindow(window=window):
            return Reach(window)
        case ChunkedAttention(chunk=chunk):
            return Reach(chunk)  # upper bound: a query early in a chunk reads less
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
    """Return the key plus value elements per token that one head's query is multiplied with."""
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

    dense_bytes, expert_bytes    bytes read in every step; bytes of all experts, read if tokens are routed to them
    dense_params, active_params  elements per token outside the experts, and in the experts it is routed to
    num_experts, experts_per_token  0 without experts
    narrow                       of these elements, those multiplied in less than 16 bits: (format, elements)
    """

    dense_bytes: int
    expert_bytes: int
    dense_params: int
    active_params: int
    num_experts: int
    experts_per_token: int
    narrow: tuple[tuple[str, int], ...] = ()


LOOKED_UP = ("embedding", "vision_audio")  # read one row per token, or not used in a text step


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
    """Return the number format in which a layer of this scheme is multiplied (fp8, int8, fp4), or None for 16 bits.

    Source: vLLM 0.33's kernels. Weight-only 4-bit layers are dequantized first (Marlin), as is every format that the
    GPU lacks. Block scales of 16 or 32 numbers (nvfp4, mxfp4, mxfp8) need a GPU with fp4 arithmetic. In models with
    fp8 layers (DeepSeek-V4) mxfp4 weights get mxfp8 inputs, at fp8's rate; in models without (gpt-oss) inputs stay in
    bfloat16 (fused_moe/oracle/mxfp4.py prefers those kernels).
    """
    if scheme is None or scheme.variant == WEIGHT_ONLY:
        return None
    match scheme.kind:
        case "fp8_tensor" | "fp8_channel" | "fp8_block":
            return "fp8" if gpu.fp8_flops is not None else None
        case "int8_channel" | "int8_tensor":
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
    """Return the weight elements per token that are multiplied in fewer than 16 bits, by format, over all ranks."""
    spec, online = plan.request.spec, weight_layout(plan.request, 0).online
    narrow_inputs = spec.quantization is not None and spec.quantization.default is not None
    counts: Counter[str] = Counter()
    placed: list[tuple[int | None, Weight]] = [(None, weight) for weight in spec.other_weights]
    placed += [(index, weight) for index, weights in enumerate(spec.layer_weights) for weight in weights]
    for layer, weight in placed:
        if weight.group in LOOKED_UP or online == "experts_int8":  # experts_int8 dequantizes its weights
            continue
        name = number_format(scheme_for(spec, weight, layer, online), plan.request.gpu, narrow_inputs=narrow_inputs)
        if name is not None:
            of_all = spec.experts_per_token if weight.experts else 1
            counts[name] += weight.num_params * of_all // max(1, weight.experts)
    return counts


# --- the roofline ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline step time plus server overhead; see the module's docstring.

    dense, expert        seconds to read the weights used in every step, and all experts
    missed               share of the experts that one token does not use, if it picks them at random
    token                seconds of arithmetic per token
    kv_byte, pairs       seconds per byte of KV, and per (query, key) pair of each kind of layers
    state_bytes          bytes of a sequence's recurrent states, both read and written
    layers               seconds of overhead of all layers
    step, sequence       seconds per step, including the latency of its all-reduces, and per sequence
    floor                minimum seconds of the layers in a prefill step
    link                 seconds per token between ranks, for up to `small` tokens; large: for each token beyond
    narrow               (elements per token, FLOP/s) of weights multiplied in fewer than 16 bits
    request_s, crowd_s, prompt_token_s  seconds of a request outside of the steps: fixed, per other running request,
                         and per prompt token
    """

    dense: float
    expert: float
    missed: float
    token: float
    kinds: tuple[Attention, ...]
    kv_byte: float
    pairs: tuple[float, ...]
    state_bytes: int
    layers: float
    floor: float
    step: float
    sequence: float
    link: float
    text: str
    narrow: tuple[tuple[int, int], ...] = ()
    small: int = 1 << 60
    large: float = 0.0
    request_s: float = 0.0
    crowd_s: float = 0.0
    prompt_token_s: float = 0.0

    def seconds(self, work: StepWork) -> float:
        tokens = work.num_tokens
        kv, pairs = 2 * self.state_bytes * work.num_seqs, 0.0
        for kind, pair_s, read, pair in zip(self.kinds, self.pairs, work.read, work.pairs, strict=True):
            kv += kind.token_bytes * read
            pairs += pair_s * pair
        total = max(kv * self.kv_byte, pairs)
        if tokens:
            weights = self.dense + self.expert * (1 - self.missed**tokens)
            total += hypot(weights, tokens * self.token) + self.layers
            if tokens > work.num_samples and total < self.floor:
                total = self.floor
            total += self.step + self.sequence * work.num_seqs + self.link * min(tokens, self.small)
            if tokens > self.small:
                total += self.large * (tokens - self.small)
        return total

    def decode_terms(self, count: int) -> tuple[float, float, float]:
        """Return the terms that `seconds` adds, in this order, to the attention of `count` decoding sequences."""
        weights = self.dense + self.expert * (1 - self.missed**count)
        server = self.step + self.sequence * count + self.link * min(count, self.small)
        return hypot(weights, count * self.token) + self.layers, server, self.large * max(0, count - self.small)


def widens_experts(plan: Plan) -> bool:
    """True if experts are stored in fewer bits than this GPU multiplies and must be dequantized first."""
    spec, online = plan.request.spec, weight_layout(plan.request, 0).online
    for index, weights in enumerate(spec.layer_weights):
        for weight in weights:
            if weight.experts:
                scheme = scheme_for(spec, weight, index, online)
                if scheme is None:
                    return False
                if scheme.kind == "mxfp4":  # GPUs with fp4 have kernels for it whatever the inputs' format
                    return plan.request.gpu.fp4_flops is None
                return number_format(scheme, plan.request.gpu, narrow_inputs=True) is None
    return False


RANKS: Final = {"nvlink": "NVLink", "infinity-fabric": "Infinity Fabric", "pcie": "PCIe"}


def roofline(plan: Plan, shares: Shares, constants: Constants | None = None) -> Roofline:
    """Return a plan's roofline.

    Raise UsageError for a GPU with unknown bandwidth or FLOP/s, UnsupportedModelError for layers that are not modeled.
    """
    gpu, spec = plan.request.gpu, plan.request.spec
    flops = gpu.fp16_flops if plan.settings.dtype == "float16" else gpu.bf16_flops
    if gpu.memory_bandwidth is None or flops is None:
        raise UsageError(
            f"--gpu {gpu.name}",
            "its bandwidth or FLOP/s are not known, so a step's time is not",
            "name a GPU of `kvplan gpus` or give --calibration",
        )
    own = constants_of(plan) if constants is None else constants
    weights, kv, reached = shares.weights or own.weights, shares.kv or own.kv, shares.flops or own.flops
    experts = shares.weights or (own.widened if widens_experts(plan) else own.experts)
    used, kinds, bandwidth = matmuls(plan), attention_kinds(plan), gpu.memory_bandwidth
    rates = {"fp8": gpu.fp8_flops, "int8": gpu.int8_flops, "fp4": gpu.fp4_flops}
    narrow = tuple((name, count, rate) for name, count in used.narrow if (rate := rates[name]) is not None)
    params = used.dense_params + used.active_params - sum(count for _, count, _ in narrow)
    at_full_rate = params / flops + sum(count / rate for _, count, rate in narrow)
    latency, link, ranks = link_of(plan, own)
    arithmetic = "".join(f"{rate / 1e12:,.0f} TFLOP/s in {name} and " for name, _, rate in narrow)
    text = (
        f"roofline of {gpu.name}: weights at {weights:.0%} and KV at {kv:.0%} of "
        f"{bandwidth / 1e9:,.0f} GB/s, arithmetic at {reached:.0%} of {arithmetic}"
        f"{flops / 1e12:,.0f} TFLOP/s{' in 16 bits' if narrow else ''}, {own.layer * 1e6:.0f} us a layer, "
        f"{own.step * 1e3:.2g} ms a step{ranks}"
    )
    return Roofline(
        dense=used.dense_bytes / (bandwidth * weights),
        expert=used.expert_bytes / (bandwidth * experts),
        missed=1 - used.experts_per_token / used.num_experts if used.num_experts else 0.0,
        token=2 * at_full_rate / reached,
        kinds=kinds,
        kv_byte=1 / (bandwidth * kv),
        pairs=tuple(kind.pair_flops / (flops * own.attention) for kind in kinds),
        state_bytes=plan.state_bytes,
        layers=spec.num_layers * own.layer,
        floor=spec.num_layers * own.prefill_layer,
        step=own.step + latency,
        sequence=own.sequence,
        link=link,
        text=text,
        narrow=tuple((count, rate) for _, count, rate in narrow),
        small=SMALL_BYTES // (BYTES_16_BIT * spec.hidden_size),
        large=link * (own.switch / own.switch_large if is_switched(gpu) else 1.0),
        request_s=own.request,
        crowd_s=own.crowd,
        prompt_token_s=own.prompt_token,
    )


def link_of(plan: Plan, constants: Constants) -> tuple[float, float, str]:
    """Return (latency of a step's all-reduces in seconds, seconds per token for their bytes, description)."""
    ranks, gpu, spec = plan.request.args.tensor_parallel_size, plan.request.gpu, plan.request.spec
    if ranks == 1:
        return 0.0, 0.0, ""
    if is_switched(gpu):
        share, latency = constants.switch, constants.switch_s
    elif gpu.lacks_peer_access:
        share, latency = constants.host, constants.host_s
    else:
        share, latency = constants.pcie, constants.pcie_s
    bandwidth = gpu.interconnect_bandwidth or PCIE_4
    count = 2 * spec.num_layers
    size = spec.hidden_size * BYTES_16_BIT * 2 * (ranks - 1) / ranks  # bytes one rank sends: reduce, then gather
    name = RANKS.get(gpu.interconnect or "", "PCIe") + (" through the host" if gpu.lacks_peer_access else "")
    text = f"; {ranks} ranks over {name} at {share:.0%} of {bandwidth / 1e9:,.0f} GB/s"
    return count * latency * log2(ranks), count * size / (share * bandwidth), text


def is_switched(gpu: GpuSpec) -> bool:
    """True if GPUs communicate over NVLink or Infinity Fabric."""
    return gpu.interconnect in ("nvlink", "infinity-fabric")


PCIE_4: Final = 64 * 10**9  # bytes/s for a GPU with unknown interconnect
BYTES_16_BIT: Final = 2


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Another step time, with a minimum per step."""

    base: StepTime
    least_s: float

    @property
    def text(self) -> str:
        return f"{self.base.text}; at least {self.least_s * 1000:g} ms, as stated"

    def seconds(self, work: StepWork) -> float:
        return max(self.least_s, self.base.seconds(work))


@dataclass(frozen=True, slots=True)
class Scaled:
    """Another step time, scaled by a factor."""

    base: StepTime
    factor: float

    @property
    def text(self) -> str:
        return f"{self.base.text}; times {self.factor:g}"

    def seconds(self, work: StepWork) -> float:
        return self.factor * self.base.seconds(work)


def outside(step_time: StepTime) -> tuple[float, float, float]:
    """Return a request's seconds outside of the steps (fixed, per other running request, per prompt token); zeros for
    measured steps.
    """
    match step_time:
        case Roofline(request_s=request_s, crowd_s=crowd_s, prompt_token_s=prompt_token_s):
            return request_s, crowd_s, prompt_token_s
        case AtLeast(base=base) | Scaled(base=base):
            return outside(base)
        case _:
            return 0.0, 0.0, 0.0


# --- measured -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """Step time as a linear function fitted to a run's steps (kvplan.servers.calibration.TERMS)."""

    coefficients: Mapping[str, float]
    kinds: tuple[Attention, ...]
    text: str

    def seconds(self, work: StepWork) -> float:
        kv = 0
        for kind, read in zip(self.kinds, work.read, strict=True):
            kv += kind.token_bytes * read
        each = self.coefficients
        total = each["step"] + each["output_token"] * work.num_samples + each["kv_byte"] * kv
        total += each["prompt_token"] * max(0, work.num_tokens - work.num_samples)
        return total


def step_time(plan: Plan, shares: Shares, calibration: str | None) -> StepTime:
    """Return the roofline, or the step time that --calibration measured on such a GPU with such a model."""
    if calibration is None:
        return roofline(plan, shares)
    from pathlib import Path

    from kvplan.servers.calibration import read, step_seconds

    measured = read(Path(calibration))
    steps = step_seconds(measured, plan.request.gpu, plan.request.spec.name)
    if steps.factors:
        line = roofline(plan, shares, scaled(constants_of(plan), steps.factors))
        factors = ", ".join(f"{name} x {value:.2f}" for name, value in steps.factors.items())
        return replace(line, text=f"{line.text}; fitted to {steps.runs} runs in {measured.origin} ({factors})")
    return Measured(steps.seconds, attention_kinds(plan), f"measured: {measured.origin}")
