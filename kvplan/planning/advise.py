"""What makes a plan satisfy what it does not: single changes, and combined ones where those do not do or cost more.

Every cure is a plan that was made and that satisfies what is wanted. Knobs come in the order of what they cost the
user: a cure is better than another one where its dearest change is smaller.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import combinations, count, islice
from typing import Any, Literal

from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import GpuSpec, gpu, gpu_names
from kvplan.models.spec import ChunkedAttention, FullAttention, SlidingWindow
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.base import terms_of

TP_SIZES = (1, 2, 4, 8, 16)
CONTEXT_STEP = 256  # of a shorter context that is offered, in tokens

Holds = Callable[[Plan], bool]
Knobs = Callable[[Plan], Iterable["Knob"]]  # what may change a plan for the better


@dataclass(frozen=True, slots=True)
class Change:
    """One flag, and what it changes of a request."""

    flag: str
    args: Mapping[str, Any] = field(default_factory=dict)
    gpu: GpuSpec | None = None

    def applied(self, request: Request) -> Request:
        return replace(request, args=replace(request.args, **self.args), gpu=self.gpu or request.gpu)


@dataclass(frozen=True, slots=True)
class Knob:
    """Changes of one kind, the nearest first.

    switch  its one change goes with those of all other knobs
    steps   tried one after another, alone and with switches
    range   each does whatever an earlier one does: searched by halving, also with the steps of the knob before it
    """

    changes: Sequence[Change]
    kind: Literal["switch", "steps", "range"] = "steps"


Levels = tuple[int, ...]  # of each knob: 0 is unchanged, n its n-th change


@dataclass(frozen=True, slots=True)
class Cure:
    """Changes that do together, and the plan that they give."""

    changes: tuple[Change, ...]
    levels: Levels
    plan: Plan

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(change.flag for change in self.changes)

    @property
    def flag(self) -> str:
        return " ".join(self.flags)

    @property
    def cost(self) -> Levels:
        """The levels of the dearest knob first: what orders cures."""
        return self.levels[::-1]


@dataclass(slots=True)
class Search:
    """Cures of a request over some knobs, those of the cheapest knobs first; none of them dominates another one.

    plans  made before, by their flags: a search that follows may share them
    """

    request: Request
    knobs: Sequence[Knob]
    holds: Holds
    plans: dict[str, Plan | None] = field(default_factory=dict)
    cures: list[Cure] = field(default_factory=list)

    def results(self) -> Iterator[Cure]:
        unchanged = (0,) * len(self.knobs)
        yield from self.best([set_level(unchanged, switched) for switched in self.switches() if switched])
        for number, knob in enumerate(self.knobs):
            match knob.kind:
                case "switch":
                    pass
                case "steps":
                    levels = range(1, len(knob.changes) + 1)
                    yield from self.best(
                        [
                            set_level(unchanged, {**switched, number: level})
                            for level in levels
                            for switched in self.switches()
                        ]
                    )
                case "range":
                    yield from self.along(number)

    def switches(self) -> list[dict[int, int]]:
        """Every subset of the switches, the smallest first, as levels by knob."""
        numbers = [number for number, knob in enumerate(self.knobs) if knob.kind == "switch" and knob.changes]
        return [dict.fromkeys(subset, 1) for size in range(len(numbers) + 1) for subset in combinations(numbers, size)]

    def best(self, candidates: Sequence[Levels]) -> Iterator[Cure]:
        """Those candidates that do, in their order; what an earlier cure dominates is not tried."""
        for levels in candidates:
            if not self.is_dominated(levels):
                cure = self.cure(levels)
                if cure is not None:
                    self.cures.append(cure)
                    yield cure

    def along(self, number: int) -> Iterator[Cure]:
        """The nearest change of a range with every subset of the switches, and with the fewest steps of the knob
        before it that make the change smaller."""
        unchanged = (0,) * len(self.knobs)
        before = number - 1 if number and self.knobs[number - 1].kind == "steps" else None
        nearest = []
        for switched in self.switches():
            for level in range(len(self.knobs[before].changes) + 1 if before is not None else 1):
                steps = {} if before is None else {before: level}
                cure = self.nearest(set_level(unchanged, {**switched, **steps}), number)
                if cure is not None:
                    self.cures.append(cure)
                    nearest.append(cure)
                    if level:
                        break
        best = [cure for cure in nearest if not any(is_better(other, cure) for other in nearest)]
        self.cures = [cure for cure in self.cures if cure not in nearest or cure in best]
        yield from sorted(best, key=lambda cure: cure.cost)

    def nearest(self, base: Levels, number: int) -> Cure | None:
        """The smallest change of one knob that does beside others, where none known is as small."""
        rivals = [cure.levels for cure in self.cures if is_within(cure.levels, set_level(base, {number: 10**9}))]
        most = min([len(self.knobs[number].changes), *(levels[number] - 1 for levels in rivals)])
        if most < 1:
            return None
        cure = self.cure(set_level(base, {number: most}))
        fails = 0
        while cure is not None and cure.levels[number] - fails > 1:
            middle = (fails + cure.levels[number]) // 2
            nearer = self.cure(set_level(base, {number: middle}))
            if nearer is None:
                fails = middle
            else:
                cure = nearer
        return cure

    def is_dominated(self, levels: Levels) -> bool:
        return any(is_within(cure.levels, levels) for cure in self.cures)

    def cure(self, levels: Levels) -> Cure | None:
        changes = tuple(knob.changes[level - 1] for knob, level in zip(self.knobs, levels, strict=True) if level)
        key = " ".join(change.flag for change in changes)
        if key not in self.plans:
            self.plans[key] = changed_plan(self.request, changes)
        answer = self.plans[key]
        return Cure(changes, levels, answer) if answer is not None and self.holds(answer) else None


def set_level(levels: Levels, changed: Mapping[int, int]) -> Levels:
    return tuple(changed.get(number, level) for number, level in enumerate(levels))


def is_within(levels: Levels, others: Levels) -> bool:
    return all(level <= other for level, other in zip(levels, others, strict=True))


def is_better(cure: Cure, other: Cure) -> bool:
    return cure.levels != other.levels and is_within(cure.levels, other.levels)


def changed_plan(request: Request, changes: Sequence[Change]) -> Plan | None:
    """The plan of a request with some changes when it can be made, and runs."""
    changed = request
    for change in changes:
        changed = change.applied(changed)
    if changed.args.kv_cache_dtype != request.args.kv_cache_dtype and not reads_fp8(changed):
        return None
    try:
        return plan(changed)
    except KvplanError:
        return None


# --- knobs ------------------------------------------------------------------------------------------------------------


def fp8_cache(args: EngineArgs) -> Knob:
    is_free = args.kv_cache_dtype == "auto"
    return Knob([Change("--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"})] if is_free else [], "switch")


def more_ranks(args: EngineArgs) -> Knob:
    return Knob(
        [
            Change(f"--tensor-parallel-size {tp}", {"tensor_parallel_size": tp})
            for tp in TP_SIZES
            if tp > args.tensor_parallel_size
        ]
    )


@dataclass(frozen=True, slots=True)
class Contexts(Sequence[Change]):
    """Contexts below one, in steps, the longest first."""

    below: int
    step: int

    def __len__(self) -> int:
        return (self.below - 1) // self.step

    def __getitem__(self, number: Any) -> Any:
        context = (len(self) - number) * self.step
        return Change(f"--max-model-len {context}", {"max_model_len": context})


def shorter_context(context: int, step: int = CONTEXT_STEP) -> Knob:
    return Knob(Contexts(context, step), "range")


def larger_gpu(request: Request) -> Knob:
    return Knob([Change(f"--gpu {bigger.name}", gpu=bigger) for bigger in larger_gpus(request)])


def larger_gpus(request: Request) -> list[GpuSpec]:
    """GPUs of the same make with more memory, the nearest first; those that share memory with the CPU left out."""
    makes = [gpu(name) for name in gpu_names()]
    larger = [each for each in makes if each.total_memory > request.gpu.total_memory and not each.unified]
    make = request.gpu.vendor if request.gpu.vendor != "unknown" else "nvidia"
    return sorted(
        (each for each in larger if each.vendor == make and each.sm >= min(80, request.gpu.sm)),
        key=lambda each: each.total_memory,
    )


FP8_KV_FROM = 89  # compute capability from which every backend reads an fp8 cache
FLASHINFER_FROM = 80
FLASHINFER_HEADS = (64, 128, 256)


def reads_fp8(request: Request) -> bool:
    """Whether a server on this GPU surely has an attention backend for an fp8 KV cache.

    Triton needs compute capability 8.9 (vllm-project/vllm#45829); from 8.0 FlashInfer reads it (#24577), which has
    neither MLA there nor attention sinks, as gpt-oss has.
    """
    spec, sm = request.spec, request.gpu.sm
    if sm == 0 or sm >= FP8_KV_FROM:  # 0: AMD, or a GPU of which only the memory is stated
        return True
    plain = not spec.is_mla and not spec.model_type.startswith("gpt_oss")
    heads = {
        cache.head_dim
        for caches in spec.layers
        for cache in caches
        if isinstance(cache, FullAttention | SlidingWindow | ChunkedAttention)
    }
    return sm >= FLASHINFER_FROM and plain and heads <= set(FLASHINFER_HEADS)


# --- what makes a plan fit --------------------------------------------------------------------------------------------


def smaller_needs(args: EngineArgs) -> Knob:
    """Changes that cost no hardware and no precision: fewer sequences at once, no CUDA graphs, more of the GPU."""
    changes = []
    if args.max_num_seqs is None or args.max_num_seqs > 64:
        changes.append(Change("--max-num-seqs 64", {"max_num_seqs": 64}))
    if not args.enforce_eager:
        changes.append(Change("--enforce-eager", {"enforce_eager": True}))
    if args.gpu_memory_utilization is None or args.gpu_memory_utilization < 0.95:
        changes.append(Change("--gpu-memory-utilization 0.95", {"gpu_memory_utilization": 0.95}))
    return Knob(changes)


def start_knobs(short: Plan, *, is_sure: bool = False) -> Iterator[Knob]:
    """What makes a server start whose KV cache has room: what likely does, then what surely does, or that alone."""
    refusal = short.refusal
    if refusal is not None:
        flag = f"--{refusal.argument.replace('_', '-')}"
        values = refusal.values[-1:] if is_sure else refusal.values
        yield Knob([Change(f"{flag} {value}", {refusal.argument: value}) for value in values])


def fit_knobs(short: Plan) -> Iterator[Knob]:
    """What may make a plan fit, from what costs least to what costs most."""
    request = short.request
    args = request.args
    yield from start_knobs(short)
    if args.num_gpu_blocks_override is not None:
        needed = short.capacity.blocks_per_request + 1  # the null block
        if args.num_gpu_blocks_override < needed <= short.available // short.capacity.bytes_per_block:
            yield Knob([Change(f"--num-gpu-blocks-override {needed}", {"num_gpu_blocks_override": needed})])
    if args.max_total_tokens is not None:
        context = short.settings.max_model_len
        yield Knob([Change(f"--max-total-tokens {context}", {"max_total_tokens": context})])
    if not terms_of(request.release.engine).keeps_share:
        yield smaller_needs(args)
    yield fp8_cache(args)
    yield more_ranks(args)
    if args.max_model_len != "auto":  # which is the longest that there is
        yield shorter_context(short.settings.max_model_len)
    yield larger_gpu(request)


def is_sure(answer: Plan) -> bool:
    """Whether it also fits where what is estimated is at its worst."""
    return answer.fits and answer.concurrency.low >= 1


def both(first: Holds, second: Holds) -> Holds:
    return lambda answer: first(answer) and second(answer)


def fixes(
    short: Plan,
    most: int | None = None,
    plans: dict[str, Plan | None] | None = None,
    also: Holds = lambda answer: True,
    knobs: Iterable[Knob] | None = None,
) -> list[Cure]:
    """What makes a plan fit that does not, the best first: what surely does, or without that what likely does.

    most   how many are wanted; None: all
    plans  made before, by the flags that change the request
    also   what is wanted besides
    knobs  what may be changed; None: all that may help
    """
    plans = {} if plans is None else plans
    knobs = list(fit_knobs(short) if knobs is None else knobs)
    for holds in (is_sure, lambda answer: answer.fits):
        results = Search(short.request, knobs, both(holds, also), plans).results()
        cures = list(islice(results, most))
        if cures:
            return sorted(cures, key=lambda cure: cure.cost)
    return []


# --- what satisfies several needs at once -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Need:
    """Something wanted of a plan: whether a plan has it, and what may give it to one that has not."""

    holds: Holds
    knobs: Knobs


# Flags from what costs the user least to what costs most, in one order that those of all knobs follow.
DEARNESS = (
    "--max-num-seqs", "--enforce-eager", "--fully-sharded-loras", "--num-gpu-blocks-override", "--max-total-tokens",
    "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--kv-cache-dtype", "--max-loras", "--max-lora-rank",
    "--tensor-parallel-size", "--quantization", "--max-model-len", "--gpu",
)  # fmt: skip
MORE_IS_DEARER = ("--max-num-seqs", "--tensor-parallel-size")
MOST_STATES = 24  # sets of changes that are looked at, each for some dozens of plans
MOST_STEPS = 4  # cures of one need that are followed


def dearness(change: Change) -> tuple[int, float]:
    """What orders changes by what they cost: the flag, and how far it is turned."""
    name, _, value = change.flag.partition(" ")
    rank = DEARNESS.index(name) if name in DEARNESS else -1
    if change.gpu is not None:
        return rank, change.gpu.total_memory
    try:
        amount = float(value)
    except ValueError:  # a word: on or off
        return rank, 0
    return rank, amount if name in MORE_IS_DEARER else -amount


def cost_of(changes: Iterable[Change]) -> list[tuple[int, float]]:
    """The dearest change first: what orders sets of changes."""
    return sorted(map(dearness, changes), reverse=True)


def together(short: Plan, needs: Sequence[Need], most_states: int = MOST_STATES) -> Cure | None:
    """The cheapest changes whose plan satisfies every need, of those that curing one need after the other leads to.

    None of them can be left out.
    """
    order = count()
    queue: list[tuple[list[tuple[int, float]], int, tuple[Change, ...], Plan]] = [([], next(order), (), short)]
    known: set[str] = set()
    while queue and most_states:
        most_states -= 1
        _, _, changes, answer = heappop(queue)
        need = next((need for need in needs if not need.holds(answer)), None)
        if need is None:
            return without_idle(short.request, Cure(changes, (), answer), needs)
        for cure in islice(Search(answer.request, list(need.knobs(answer)), need.holds).results(), MOST_STEPS):
            merged = in_order({change.flag.split()[0]: change for change in (*changes, *cure.changes)}.values())
            key = " ".join(change.flag for change in merged)
            if key in known:
                continue
            known.add(key)
            made = changed_plan(short.request, merged)
            if made is not None:
                heappush(queue, (cost_of(merged), next(order), merged, made))
    return None


def in_order(changes: Iterable[Change]) -> tuple[Change, ...]:
    return tuple(sorted(changes, key=dearness))


def without_idle(request: Request, cure: Cure, needs: Sequence[Need]) -> Cure:
    """The cure less what later changes have made needless, the dearest first."""
    for change in cure.changes[::-1]:
        fewer = tuple(other for other in cure.changes if other is not change)
        answer = changed_plan(request, fewer)
        if answer is not None and all(need.holds(answer) for need in needs):
            cure = Cure(fewer, (), answer)
    return cure
