"""Seconds of single kernels of a server on a GPU: what was measured, on that GPU or on the most similar one."""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import log
from typing import Any, Final

from kvplan.core.records import dataclass
from kvplan.hardware.gpu import GpuSpec
from kvplan.hardware.gpu import gpu as gpu_named
from kvplan.simulate.kernels import roof
from kvplan.simulate.kernels.choice import INSTEAD, LINKS, MEASURED, others, parts_of, source_of
from kvplan.simulate.kernels.roof import Experts, Heads
from kvplan.simulate.kernels.tables import Part, Surface, system


@dataclass(frozen=True, slots=True)
class Shares:
    """User-stated fractions of data-sheet bandwidth and FLOP/s that are achieved; None: what was measured."""

    weights: float | None = None
    kv: float | None = None
    flops: float | None = None


PCIE_4: Final = 64 * 10**9  # bytes/s for a GPU with unknown interconnect
NEAR: Final = 0.05  # distance up to which a measured shape is the same one
LARGE: Final = (8192, 8192)  # a linear layer that shows the measured shares of bandwidth and FLOP/s
HEADS_WEIGHTS: Final = (1.0, 2.0, 4.0, 2.0)
NO_SURFACE: Final = Surface(((0.0,),), array("h", [0]))


class Kernels:
    """Kernels of one server on one GPU; borrowed: what stands for a kernel that was not measured, as text."""

    def __init__(self, gpu: GpuSpec, server: str, shares: Shares) -> None:
        self.gpu, self.server, self.shares = gpu, server, shares
        self.source = source_of(gpu)
        self.base = self.source.base
        self.system = system(self.source.system)
        linked = LINKS.get(self.base.name, ()) if not self.source.is_own else ()
        self.linked = (self.base, *map(gpu_named, linked))
        self.borrowed: Counter[str] = Counter()
        self._known: dict[tuple[object, ...], Surface] = {}
        self._known_timed: dict[object, tuple[Surface, GpuSpec]] = {}
        self.stated: GpuSpec | None = None  # as fast as the stated shares of the data sheet
        if shares.weights is not None or shares.flops is not None:
            measured = {
                name: 1 / self.gemm("bfloat16", tokens, *LARGE) for name, tokens in (("weights", 1), ("flops", 8192))
            }
            times = {
                name: roof.gemm(gpu, "bfloat16", tokens, *LARGE) for name, tokens in (("weights", 1), ("flops", 8192))
            }
            own = {name: measured[name] * times[name] for name in times}
            self.stated = slower(gpu, shares.weights or own["weights"], shares.flops or own["flops"])

    def __reduce__(self) -> tuple[object, ...]:
        return Kernels, (self.gpu, self.server, self.shares)

    def _surface(self, key: tuple[object, ...], make: Callable[[], Surface]) -> Surface:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = make()
        return known

    def _part(self, kind: str, form: str, law: str = "", of: GpuSpec | None = None) -> Part | None:
        measured = self.system if of is None else system(MEASURED[of.name])
        for name in parts_of(kind, form, self.server, of or self.base, law):
            part = measured.part(name)
            if part is not None:
                return part
        return None

    # --- linear layers

    def gemm(self, form: str, tokens: float, outputs: float, inputs: float) -> float:
        def make() -> Surface:
            for other in (form, *INSTEAD.get(form, ()), "bfloat16"):
                part = self._part("gemm", other)
                if part is not None:
                    if other != form:
                        self.borrowed[f"{form} linear layers as in {other}"] += 1
                    return part.surface(0)
            raise AssertionError("every system has linear layers in 16 bits")

        surface = self._surface(("gemm", form), make)
        if self.stated is not None:
            return roof.gemm(self.stated, form, tokens, outputs, inputs)
        return surface(tokens, outputs, inputs) * roof.gemm(self.gpu, form, tokens, outputs, inputs)

    # --- experts

    def experts(self, form: str, tokens: float, shape: Experts, law: str = "1.2") -> float:
        if form == roof.IN_BLOCKS:
            return self._experts_in_blocks(tokens, shape)
        surface = self._surface(("moe", form, shape, law), lambda: self._experts(form, shape, law))
        if self.stated is not None:
            return roof.experts(self.stated, form, tokens, shape)
        return surface(tokens) * roof.experts(self.gpu, form, tokens, shape)

    def _experts_in_blocks(self, tokens: float, shape: Experts) -> float:
        """Experts as linear layers of one kernel, whose rows the host makes enough for a block of each expert that is
        not full; no kernel skips rows without a token, and those between them do not know of them either.

        Source: vLLM 0.12 fused_moe/deep_gemm_moe.py (DeepGemmExperts.apply), deep_gemm_utils.py (compute_aligned_M).
        """
        hidden, width, topk = shape.hidden, shape.inter / shape.tp, shape.topk
        rows = tokens * topk + shape.experts / shape.ep * (roof.BLOCK - 1)
        both = self.gemm("fp8_block", rows, 2 * width, hidden) + self.gemm("fp8_block", rows, hidden, width)
        least = roof.experts(self.gpu, "fp8_block", tokens, shape)  # of reading weights, which one layer has no more of
        between = self.small(rows, 3 * width) + self.small(rows, 1.5 * width)  # activation; its result in 8 bits
        around = self.small(tokens, 1.5 * hidden) + self.small(tokens, (1 + topk) / 2 * hidden)  # 8 bits; to its rows
        around += self.small(tokens, (1 + topk) * hidden) + 3 * self.small(tokens, 1)  # the sum; counts and places
        return max(both, least) + between + around

    def _experts(self, form: str, shape: Experts, law: str) -> Surface:
        best: tuple[float, str, Surface, Experts] | None = None
        for rank, other in enumerate((form, *INSTEAD.get(form, ()), "bfloat16")):
            part = self._part("moe", other, law) or self._part("moe", other, "1.2")
            if part is None:
                continue
            index, away = nearest_experts(part, shape)
            if best is None or away + rank < best[0]:
                best = away + rank, other, part.surface(index), Experts(*map(int, part.shapes[index]))
        if best is None:
            self.borrowed["experts at their least time"] += 1
            return NO_SURFACE
        away, other, surface, near = best
        if other != form:
            self.borrowed[f"{form} experts as in {other}"] += 1
        if away % 1 > NEAR:
            self.borrowed[f"experts of {near.hidden} x {near.inter}, {near.topk} of {near.experts}"] += 1
        return surface

    # --- attention

    def decode(self, count: float, context: float, shape: Heads, queries: float = 1.0) -> float:
        """queries: tokens of a sequence, whose heads are so many more rows over the same keys, as kernels pack them."""
        rows = shape if queries == 1.0 else shape._replace(heads=queries * shape.heads)  # type: ignore[arg-type]
        if self.shares.kv is not None:
            return roof.decode(slower(self.gpu, self.shares.kv, 1.0), count, context, rows)
        factor = self._surface(("decode", shape), lambda: self._attention("decode", shape))(count, context)
        return factor * roof.decode(self.gpu, count, context, rows)

    def prefill(self, tokens: float, pairs: float, shape: Heads) -> float:
        factor = self._surface(("prefill", shape), lambda: self._attention("prefill", shape))(tokens)
        return factor * roof.prefill(self.gpu, tokens, pairs, shape)

    def _attention(self, phase: str, shape: Heads) -> Surface:
        for form in ("fp8", "bf16") if shape.kv_bytes == 1 else ("bf16",):
            part = self._part(phase, form)
            if part is not None:
                index, away = part.nearest(tuple(shape)[:4], HEADS_WEIGHTS)
                if away > NEAR:
                    self.borrowed[f"attention of {shape.heads} heads of {shape.dim} as {self._named(part, index)}"] += 1
                return part.surface(index)
        raise AssertionError("every system has attention in 16 bits")

    @staticmethod
    def _named(part: Part, index: int) -> str:
        heads, kv_heads, dim, window = part.shapes[index]
        return f"{heads:g} over {kv_heads:g} of {dim:g}{f' in {window:g} tokens' if window else ''}"

    def latent_decode(self, count: float, context: float, heads: int, kv_bytes: int, queries: float = 1.0) -> float:
        def make() -> Surface:
            for form in ("fp8", "bf16") if kv_bytes == 1 else ("bf16",):
                part = self._part("latent_decode", form)
                if part is not None:
                    return part.surface(part.nearest((heads,), (1.0,))[0])
            self.borrowed["latent attention as heads over one of 512"] += 1
            return self._attention("decode", Heads(heads, 1, 512, 0, kv_bytes))

        factor = self._surface(("latent", heads, kv_bytes), make)(count, context)
        return factor * roof.latent_decode(self.gpu, count, context, queries * heads, kv_bytes)

    def latent_prefill(self, tokens: float, pairs: float, heads: int) -> float:
        """Prompts are attended to with decompressed keys and values, as by heads without groups."""
        shape = Heads(heads, heads, 192)
        factor = self._surface(("prefill", shape), lambda: self._attention("prefill", shape))(tokens)
        return factor * roof.latent_prefill(self.gpu, tokens, pairs, heads)

    # --- ranks, and kernels that were measured in seconds

    def all_reduce(self, ranks: int, elements: float, *, graph: bool = True) -> float:
        """An all-reduce of 16-bit numbers among ranks of one server."""
        if ranks == 1:
            return 0.0
        return min(self._all_reduce(of, ranks, elements, graph=graph) for of in self.linked)

    def _all_reduce(self, of: GpuSpec, ranks: int, elements: float, *, graph: bool) -> float:
        """As on a machine of such GPUs, whose time is that of its links."""
        part = self._part("allreduce", "graph" if graph else "eager", of=of)
        mine, theirs = (gpu.interconnect_bandwidth or PCIE_4 for gpu in (self.gpu, of))
        if part is None:
            return 20e-6 + elements * 4 * (ranks - 1) / ranks / (0.4 * mine)
        index, _ = part.nearest((ranks,), (1.0,))
        largest = 2.0**29  # measured
        seconds = 1e-6 * part.surface(index)(min(elements, largest)) * max(1.0, elements / largest)
        return seconds if mine == theirs else seconds * max(1.0, theirs / mine)

    def timed(self, kind: str, shape: tuple[float, ...], *place: float) -> float:
        """Seconds of a kernel by the kind and shape it was measured for; on other GPUs by their bandwidth."""
        return self.timed_first([(kind,)], shape, *place)

    def timed_first(self, kinds: Sequence[tuple[str, ...]], shape: tuple[float, ...], *place: float) -> float:
        """Seconds of the first of these kinds that was measured, under one of its names; of the nearest system's, where
        this one has none.
        """
        surface, base = self._timed(tuple(kinds), shape)
        return 1e-6 * surface(*place) * (base.memory_bandwidth or 1) / (self.gpu.memory_bandwidth or 1)

    def _timed(self, kinds: tuple[tuple[str, ...], ...], shape: tuple[float, ...]) -> tuple[Surface, GpuSpec]:
        known = self._known_timed.get((kinds, shape))
        if known is not None:
            return known
        for base, name in ((self.base, self.system.name), *others(self.base)):
            for names in kinds:
                for server, kind in product((self.server, "sglang", "vllm"), names):
                    part = system(name).part(f"{kind}/{server}")
                    if part is not None:
                        if base is not self.base:
                            self.borrowed[f"{kind.partition('/')[0]} of {base.name}"] += 1
                        index, _ = part.nearest(shape, (1.0,) * len(shape))
                        answer = self._known_timed[kinds, shape] = part.surface(index), base
                        return answer
        raise AssertionError(f"{kinds[0][0]} was measured on no GPU")

    def small(self, tokens: float, width: float) -> float:
        """A norm, a rotation, an activation: one kernel that reads and writes `width` elements of each token."""
        return roof.roof(self.gpu, roof.ELEMENT * tokens * width, 0.0)

    @property
    def text(self) -> str:
        """Where the kernels were measured."""
        if self.source.is_own:
            return f"kernels measured on {self.gpu.name}"
        return f"kernels as efficient as measured on {self.base.name}"


def slower(gpu: GpuSpec, bandwidth: float, flops: float) -> GpuSpec:
    """A GPU with these shares of another's bandwidth and FLOP/s."""
    rates = ("bf16_flops", "fp16_flops", "fp8_flops", "int8_flops", "fp4_flops")
    changed: dict[str, Any] = {
        name: None if (rate := getattr(gpu, name)) is None else max(1, int(flops * rate)) for name in rates
    }
    assert gpu.memory_bandwidth is not None
    return replace(gpu, memory_bandwidth=max(1, int(bandwidth * gpu.memory_bandwidth)), **changed)


def nearest_experts(part: Part, shape: Experts) -> tuple[int, float]:
    """(index, distance) of the measured experts most like a rank's own."""
    mine, best, least = local(shape), 0, float("inf")
    for index, other in enumerate(part.shapes):
        away = 0.0
        for value, own, weight in zip(local(Experts(*map(int, other))), mine, (1.0, 1.0, 1.0, 1.0, 0.5), strict=True):
            away += weight * abs(value - own)
        if away < least:
            best, least = index, away
    return best, least


def local(shape: Experts) -> tuple[float, ...]:
    """Logarithms of what decides an expert kernel's time on a rank."""
    width, share, own = shape.inter / shape.tp, shape.topk / shape.experts, shape.experts / shape.ep
    return log(shape.hidden), log(width), log(share), log(own), log(shape.ep)
