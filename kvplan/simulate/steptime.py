"""Step time: measured kernels and a host (kvplan/simulate/kernels/), or coefficients measured in a run.

Not modeled: the vision tower, sampling with penalties.
"""

from collections.abc import Mapping
from typing import Protocol, assert_never

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.records import dataclass
from kvplan.models.spec import (
    ChunkedAttention,
    CompressedLatent,
    CrossAttention,
    FullAttention,
    KeyIndex,
    LatentAttention,
    LayerCache,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
    SparseIndexer,
    WindowLatent,
)
from kvplan.servers.plans.plan import Plan
from kvplan.simulate.host import Host
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.kernels.line import Line
from kvplan.simulate.kernels.step import kernel_step
from kvplan.simulate.work import Reach, StepWork
from kvplan.sizing.layout import token_bytes


class StepTime(Protocol):
    """Seconds of a step, and a text for the user that explains the model."""

    @property
    def text(self) -> str: ...

    @property
    def host(self) -> Host | None:
        """Return the server's host, or None where the steps were measured with it."""

    def seconds(self, work: StepWork) -> float: ...

    def line(self, count: int, read: int) -> Line | None:
        """Return the seconds of a step in which `count` sequences decode, around so many tokens read, where all layers
        read all tokens: `seconds` of such a step is exactly this line's value. None: not a line.
        """


@dataclass(frozen=True, slots=True)
class Attention:
    """All layers of one reach on one rank: KV bytes per token read."""

    reach: Reach
    token_bytes: int


def attention_kinds(plan: Plan, draft: ModelSpec | None = None) -> tuple[Attention, ...]:
    """Return attention layers of a rank, or of its draft, by reach, in model order, without recurrent states."""
    spec, tp = draft or plan.request.spec, plan.request.args.tensor_parallel_size
    dtype = plan.settings.kv_dtype
    kinds: dict[int | None, int] = {}
    for caches in spec.layers:
        for cache in caches:
            reach = _reach(cache, spec.name)
            if reach is not None:
                kinds[reach.tokens] = kinds.get(reach.tokens, 0) + token_bytes(cache, dtype, tp)
    return tuple(Attention(Reach(tokens), size) for tokens, size in kinds.items())


def _reach(cache: LayerCache, name: str) -> Reach | None:
    """Return how far back a layer reads, or None for recurrent states, whose size is constant, and for caches beside
    another one of their layer.
    """
    match cache:
        case FullAttention() | LatentAttention() | CompressedLatent():
            return Reach(None)
        case SlidingWindow(window=window) | WindowLatent(window=window):
            return Reach(window)
        case ChunkedAttention(chunk=chunk):
            return Reach(chunk)  # upper bound: a query early in a chunk reads less
        case RecurrentState() | SparseIndexer() | KeyIndex():
            return None
        case CrossAttention():
            raise UnsupportedModelError(
                f"simulate: {name}",
                "the time of an encoder is not modeled",
                "`kvplan estimate` says how many requests fit",
            )
        case _:
            assert_never(cache)


def line_seconds(line: Line, read: int) -> float:
    """Seconds of a step by its line."""
    seconds = line.base + line.slope * read
    return seconds if seconds >= line.least else line.least


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Another step time, with a minimum per step."""

    base: StepTime
    least_s: float

    @property
    def text(self) -> str:
        return f"{self.base.text}; at least {self.least_s * 1000:g} ms, as stated"

    @property
    def host(self) -> Host | None:
        return self.base.host

    def seconds(self, work: StepWork) -> float:
        return max(self.least_s, self.base.seconds(work))

    def line(self, count: int, read: int) -> Line | None:
        line = self.base.line(count, read)
        return None if line is None else line._replace(least=max(line.least, self.least_s))


@dataclass(frozen=True, slots=True)
class Scaled:
    """Another step time, scaled by a factor."""

    base: StepTime
    factor: float

    @property
    def text(self) -> str:
        return f"{self.base.text}; times {self.factor:g}"

    @property
    def host(self) -> Host | None:
        return self.base.host

    def seconds(self, work: StepWork) -> float:
        if not work.prompt_tokens and len(work.read) == 1 and work.num_tokens == work.num_seqs:
            line = self.line(work.num_seqs, work.read[0])
            if line is not None:
                return line_seconds(line, work.read[0])
        return self.factor * self.base.seconds(work)

    def line(self, count: int, read: int) -> Line | None:
        line = self.base.line(count, read)
        if line is None:
            return None
        return Line(self.factor * line.base, self.factor * line.slope, line.until, self.factor * line.least)


@dataclass(frozen=True, slots=True)
class Told:
    """Another step time with a text of its own."""

    base: StepTime
    text: str

    @property
    def host(self) -> Host | None:
        return self.base.host

    def seconds(self, work: StepWork) -> float:
        return self.base.seconds(work)

    def line(self, count: int, read: int) -> Line | None:
        return self.base.line(count, read)


@dataclass(frozen=True, slots=True)
class Measured:
    """Step time as a linear function fitted to a run's steps (kvplan.servers.plans.calibration.TERMS)."""

    coefficients: Mapping[str, float]
    kinds: tuple[Attention, ...]
    text: str
    host: Host | None = None

    def seconds(self, work: StepWork) -> float:
        kv = 0
        for kind, read in zip(self.kinds, work.read, strict=True):
            kv += kind.token_bytes * read
        seconds_per = self.coefficients
        total = seconds_per["step"] + seconds_per["output_token"] * work.num_samples + seconds_per["kv_byte"] * kv
        total += seconds_per["prompt_token"] * max(0, work.num_tokens - work.num_samples)
        return total

    def line(self, count: int, read: int) -> Line | None:
        return None


def borrowed_kernels(plan: Plan) -> tuple[str, ...]:
    """Return what stands for kernels of a plan that were not measured, as text."""
    return kernel_step(plan, tuple(kind.reach for kind in attention_kinds(plan)), Shares()).borrowed


def step_time(plan: Plan, shares: Shares, calibration: str | None = None) -> StepTime:
    """Return the step time of measured kernels, or what --calibration measured on such a GPU with such a model.

    Raise UsageError for a GPU with unknown bandwidth or FLOP/s, UnsupportedModelError for layers that are not modeled.
    """
    reaches = tuple(kind.reach for kind in attention_kinds(plan))
    if calibration is None:
        return kernel_step(plan, reaches, shares)
    from pathlib import Path

    from kvplan.servers.plans.calibration import read, step_seconds

    measured = read(Path(calibration))
    steps = step_seconds(measured, plan.request.gpu, plan.request.spec.name)
    if steps.factors:
        factors = ", ".join(f"{name} x {value:.2f}" for name, value in steps.factors.items())
        step = kernel_step(plan, reaches, shares, steps.factors)
        return Told(step, f"{step.text}; fitted to {steps.runs} runs in {measured.origin} ({factors})")
    return Measured(steps.seconds, attention_kinds(plan), f"measured: {measured.origin}")
