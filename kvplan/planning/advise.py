"""Find changes that make a plan meet its requirements: single changes first, combined ones if those fail or cost more.

Every fix is a plan that was computed and meets the requirements. Knobs are ordered by their cost to the user: one fix
is better than another if its most costly change is smaller.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import combinations, count, islice
from typing import Any, Final, Literal

from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import GpuSpec, gpu, offered_names
from kvplan.models import catalog
from kvplan.models.spec import ChunkedAttention, FullAttention, ModelSpec, SlidingWindow
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import abilities_of, server_of, terms_of
from kvplan.servers.plans.plan import Refusal
from kvplan.servers.words.arguments import EngineArgs

TP_SIZES = (1, 2, 4, 8, 16)
RANKS = {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
CONTEXT_STEP = 256  # of the shorter contexts to propose, in tokens
MOST_SHORTENED = 8  # a context shortened by more than this factor is named after all other fixes

Holds = Callable[[Plan], bool]
Knobs = Callable[[Plan], Iterable["Knob"]]  # the changes that may improve a plan


@dataclass(frozen=True, slots=True)
class FlagChange:
    """One flag, and the change it makes to a request.

    spec  another checkpoint of the model, which the flag stands for
    """

    flag: str
    args: Mapping[str, Any] = field(default_factory=dict)
    gpu: GpuSpec | None = None
    spec: ModelSpec | None = None

    def flag_of(self, server: str) -> str:
        """The flag as this server calls it."""
        name, _, value = self.flag.partition(" ")
        terms = terms_of(server)
        own = next((terms.own_flags[argument] for argument in self.args if argument in terms.own_flags), name)
        return f"{own} {terms.own_value(next(iter(self.args), ''), value)}".strip()

    def applied(self, request: Request) -> Request:
        args = replace(request.args, **self.args)
        return replace(request, args=args, gpu=self.gpu or request.gpu, spec=self.spec or request.spec)


@dataclass(frozen=True, slots=True)
class Knob:
    """Changes of one kind, the smallest first.

    switch  a single change that can be combined with those of all other knobs
    steps   tried one after another, on their own and with switches
    range   each achieves whatever an earlier one does: bisected, also with the steps of the knob before it
    """

    changes: Sequence[FlagChange]
    kind: Literal["switch", "steps", "range"] = "steps"


Levels = tuple[int, ...]  # of each knob: 0 is unchanged, n its n-th change


@dataclass(frozen=True, slots=True)
class FlagCure:
    """Changes that are sufficient together, and the resulting plan."""

    changes: tuple[FlagChange, ...]
    levels: Levels
    plan: Plan

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(change.flag for change in self.changes)

    @property
    def flag(self) -> str:
        """The flags to add to the user's line, where a number stated with the GPU's name changes, too."""
        request, flags = self.plan.request, " ".join(self.flags)
        has_moved = any(change.gpu is not None or change.args.keys() & RANKS for change in self.changes)
        if request.gpu_count == "ranks" or not has_moved:
            return flags
        replaced = ("--gpu ", "--tensor-parallel-size ") if request.gpu_count == "name" else ("--gpu ",)
        others = [flag for flag in re.split(" (?=--)", flags) if not flag.startswith(replaced)]
        return " ".join([f"--gpu {request.args.num_gpus}x{request.gpu.name}", *others])

    @property
    def server_flags(self) -> tuple[str, ...]:
        """The flags as the plan's server calls them; `flags` are kvplan's own."""
        return tuple(change.flag_of(self.plan.request.release.engine) for change in self.changes)

    @property
    def size(self) -> tuple[int, int]:
        """GPUs, and the context below zero: what is smaller is better."""
        return self.plan.request.args.num_gpus, -self.plan.settings.max_model_len

    @property
    def cost(self) -> Levels:
        """Levels with the most costly knob first: the sort key of fixes."""
        return self.levels[::-1]


@dataclass(slots=True)
class Search:
    """Search for fixes of a request over some knobs, the cheapest knobs first; no fix dominates another.

    plans  computed before, by their flags: successive searches may share them
    """

    request: Request
    knobs: Sequence[Knob]
    holds: Holds
    plans: dict[str, Plan | None] = field(default_factory=dict)
    cures: list[FlagCure] = field(default_factory=list)

    def results(self) -> Iterator[FlagCure]:
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

    def best(self, candidates: Sequence[Levels]) -> Iterator[FlagCure]:
        """Yield the candidates that are sufficient, in order, skipping those dominated by an earlier fix."""
        for levels in candidates:
            if not self.is_dominated(levels):
                cure = self.cure(levels)
                if cure is not None:
                    self.cures.append(cure)
                    yield cure

    def along(self, number: int) -> Iterator[FlagCure]:
        """Yield the smallest change of a range with every subset of the switches, and with the fewest steps of the knob
        before it that make the change smaller.
        """
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

    def nearest(self, base: Levels, number: int) -> FlagCure | None:
        """Return the smallest sufficient change of one knob on top of `base`, unless a known fix has one as small."""
        rivals = [cure.levels for cure in self.cures if is_within(cure.levels, set_level(base, {number: 10**9}))]
        max_level = min([len(self.knobs[number].changes), *(levels[number] - 1 for levels in rivals)])
        if max_level < 1:
            return None
        cure = self.cure(set_level(base, {number: max_level}))
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

    def cure(self, levels: Levels) -> FlagCure | None:
        changes = tuple(knob.changes[level - 1] for knob, level in zip(self.knobs, levels, strict=True) if level)
        key = " ".join(change.flag for change in changes)
        if key not in self.plans:
            self.plans[key] = changed_plan(self.request, changes)
        answer = self.plans[key]
        return FlagCure(changes, levels, answer) if answer is not None and self.holds(answer) else None


def set_level(levels: Levels, changed: Mapping[int, int]) -> Levels:
    return tuple(changed.get(number, level) for number, level in enumerate(levels))


def is_within(levels: Levels, others: Levels) -> bool:
    return all(level <= other for level, other in zip(levels, others, strict=True))


def is_better(cure: FlagCure, other: FlagCure) -> bool:
    return cure.levels != other.levels and is_within(cure.levels, other.levels)


def changed_plan(request: Request, changes: Sequence[FlagChange]) -> Plan | None:
    """Return the plan of a request with some changes, or None if it cannot be made or does not run."""
    changed = request
    for change in changes:
        changed = change.applied(changed)
    dtype = changed.args.kv_cache_dtype
    if dtype.startswith("fp8") and dtype != request.args.kv_cache_dtype and not reads_fp8(changed):
        return None
    try:
        return plan(changed)
    except KvplanError:
        return None


# --- knobs ------------------------------------------------------------------------------------------------------------


def fp8_cache(args: EngineArgs) -> Knob:
    is_free = args.kv_cache_dtype == "auto"
    return Knob([FlagChange("--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8"})] if is_free else [], "switch")


STORED: Final = ("compressed-tensors", "modelopt", "awq", "gptq")  # methods of checkpoints, those of 8 bits first


def quantized_weights(request: Request) -> Knob:
    """Smaller weights: quantized while loading, or a checkpoint of the catalog, which --quantization names."""
    spec = request.spec
    if spec.quantization is not None or request.args.quantization or request.weights_bytes or request.checkpoint:
        return Knob([])
    own = catalog.find(spec.name)
    names = {} if own is None else {method: catalog.quantized(own, method) for method in STORED}
    siblings = {method: catalog.load(name) for method, name in names.items() if name is not None}
    return Knob(
        [
            FlagChange("--quantization fp8", {"quantization": "fp8"}),
            *(FlagChange(f"--quantization {method}", {"quantization": method}, spec=other)
              for method, other in siblings.items()),
        ]
    )  # fmt: skip


def more_ranks(request: Request) -> Knob:
    """More tensor ranks; none where a machine has one GPU, so that each more would be another machine."""
    return Knob(
        [
            FlagChange(f"--tensor-parallel-size {tp}", {"tensor_parallel_size": tp})
            for tp in TP_SIZES
            if tp > request.args.tensor_parallel_size and request.gpu.node_gpus > 1
        ]
    )


def more_gpus(request: Request) -> Knob:
    """More GPUs of a server that places layers on them, as --gpu counts them."""
    if request.gpu.name == "custom" or request.gpu.node_gpus < 2:
        return more_ranks(request)
    sizes = [count for count in TP_SIZES if count > request.args.tensor_parallel_size]
    return Knob([FlagChange(f"--gpu {size}x{request.gpu.name}", {"tensor_parallel_size": size}) for size in sizes])


def more_sharing_ranks(args: EngineArgs) -> Knob:
    """More data-parallel ranks of a server that spreads its experts over them: each then holds fewer."""
    is_shared = args.data_parallel_size > 1 and args.enable_expert_parallel and not args.enable_dp_attention
    sizes = [args.data_parallel_size * factor for factor in (2, 4, 8)] if is_shared else []
    return Knob([FlagChange(f"--data-parallel-size {size}", {"data_parallel_size": size}) for size in sizes])


@dataclass(frozen=True, slots=True)
class Contexts(Sequence[FlagChange]):
    """Contexts below a given one, in steps, the longest first."""

    below: int
    step: int

    def __len__(self) -> int:
        return (self.below - 1) // self.step

    def __getitem__(self, number: Any) -> Any:
        context = (len(self) - number) * self.step
        return FlagChange(f"--max-model-len {context}", {"max_model_len": context})


def shorter_context(context: int, step: int = CONTEXT_STEP) -> Knob:
    return Knob(Contexts(context, step), "range")


def larger_gpu(request: Request) -> Knob:
    return Knob([FlagChange(f"--gpu {bigger.name}", gpu=bigger) for bigger in larger_gpus(request)])


def larger_gpus(request: Request) -> list[GpuSpec]:
    """GPUs on offer of the same vendor with more memory, the smallest first; none that shares memory with the CPU."""
    makes = [gpu(name) for name in offered_names()]
    larger = [
        candidate for candidate in makes if candidate.total_memory > request.gpu.total_memory and not candidate.unified
    ]
    make = request.gpu.vendor if request.gpu.vendor != "unknown" else "nvidia"
    return sorted(
        (candidate for candidate in larger if candidate.vendor == make and candidate.sm >= min(80, request.gpu.sm)),
        key=lambda candidate: candidate.total_memory,
    )


FP8_KV_FROM = 89  # compute capability from which every backend supports an fp8 KV cache
FLASHINFER_FROM = 80
FLASHINFER_HEADS = (64, 128, 256)


def reads_fp8(request: Request) -> bool:
    """True if a server on this GPU is known to have an attention backend for an fp8 KV cache.

    Triton needs compute capability 8.9 (vllm-project/vllm#45829); from 8.0 FlashInfer supports it (#24577), but there
    without MLA and without attention sinks, which gpt-oss has.
    """
    spec, sm = request.spec, request.gpu.sm
    if sm == 0 or sm >= FP8_KV_FROM:  # 0: AMD, or a GPU of which only the memory is known
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
    """Changes that cost neither hardware nor precision: fewer sequences at once, no CUDA graphs, higher utilization."""
    changes = []
    if args.max_num_seqs is None or args.max_num_seqs > 64:
        changes.append(FlagChange("--max-num-seqs 64", {"max_num_seqs": 64}))
    if not args.enforce_eager:
        changes.append(FlagChange("--enforce-eager", {"enforce_eager": True}))
    if args.gpu_memory_utilization is None or args.gpu_memory_utilization < 0.95:
        changes.append(FlagChange("--gpu-memory-utilization 0.95", {"gpu_memory_utilization": 0.95}))
    return Knob(changes)


def start_knobs(short: Plan, *, is_sure: bool = False) -> Iterator[Knob]:
    """Changes that let a server start whose KV cache fits: likely values, then a certain one; `is_sure`: only that.

    If it refuses the combination itself, changes after which it does not, to combine with those that free memory.
    """
    if not is_supported(short):
        changes = supported_changes(short)
        flag = " ".join(change.flag for change in changes)
        args = {name: value for change in changes for name, value in change.args.items()}
        yield Knob([FlagChange(flag, args)] if changes else [], "switch")
    elif short.refusal is not None:
        changes = refusal_changes(short.refusal)
        yield Knob(changes[-1:] if is_sure else changes)


def refusal_changes(refusal: Refusal) -> list[FlagChange]:
    """The refusal's own remedies, in order."""
    values = zip(refusal.flags, refusal.values, strict=True)
    return [FlagChange(flag, {refusal.argument: value}) for flag, value in values]


def supported_changes(short: Plan, most: int = 3) -> list[FlagChange]:
    """At most so many changes after which the server no longer refuses the combination; empty if there are none."""
    if short.refusal is None or not most:
        return []
    plans = [(change, changed_plan(short.request, [change])) for change in refusal_changes(short.refusal)]
    known = [(change, answer) for change, answer in plans if answer is not None]
    for change, answer in known:
        if is_supported(answer):
            return [change]
    for change, answer in known:  # something else is refused, too
        if others := supported_changes(answer, most - 1):
            return [*(first for first in [change] if first.args.keys() != others[0].args.keys()), *others]
    return []


def is_supported(answer: Plan) -> bool:
    """True unless the server refuses the combination itself: memory may still be missing."""
    return answer.refusal is None or answer.refusal.by != "unsupported"


def fit_knobs(short: Plan, *, is_new: bool = False) -> Iterator[Knob]:
    """Yield changes that may make a plan fit, the cheapest first.

    is_new  nothing is deployed yet: another checkpoint or a shorter context cost less than more hardware
    """
    request = short.request
    args = request.args
    yield from start_knobs(short)
    if args.num_gpu_blocks_override is not None:
        needed = short.capacity.blocks_per_request + 1  # the null block
        if args.num_gpu_blocks_override < needed <= short.available // short.capacity.bytes_per_block:
            yield Knob([FlagChange(f"--num-gpu-blocks-override {needed}", {"num_gpu_blocks_override": needed})])
    if args.max_total_tokens is not None:
        context = short.settings.max_model_len
        yield Knob([FlagChange(f"--max-total-tokens {context}", {"max_total_tokens": context})])
    is_free = args.max_model_len != "auto"  # "auto" already is the longest context that fits
    contexts = [shorter_context(short.settings.max_model_len)] if is_free else []
    if short.slots is not None:
        own = server_of(request.release.engine).remedies(short)
        yield from (Knob([FlagChange(flag, args)]) for flag, args in own)
        yield more_gpus(request)
        yield larger_gpu(request)
        return
    if is_new:
        yield quantized_weights(request)
        yield from contexts
        yield fp8_cache(args)
    if not abilities_of(request.release.engine).keeps_share:
        yield smaller_needs(args)
    if not is_new:
        yield fp8_cache(args)
    yield more_ranks(request)
    if not is_new:
        yield from contexts
    yield larger_gpu(request)


def is_sure(answer: Plan) -> bool:
    """True if it also fits with all estimates at their worst."""
    if answer.slots is not None and answer.slots.left < answer.estimates["non_torch"].likely:
        return False
    return answer.fits and answer.concurrency.low >= 1


def both(first: Holds, second: Holds) -> Holds:
    return lambda answer: first(answer) and second(answer)


def fixes(
    short: Plan,
    most: int | None = None,
    plans: dict[str, Plan | None] | None = None,
    also: Holds = lambda answer: True,
    knobs: Iterable[Knob] | None = None,
) -> list[FlagCure]:
    """Find changes that make a plan fit, best first: those certain to work, or if there are none, the likely ones.

    most   maximum number of fixes; None: all
    plans  computed before, by the flags that change the request
    also   further requirement
    knobs  allowed changes; None: all that may help
    """
    plans = {} if plans is None else plans
    knobs = list(fit_knobs(short) if knobs is None else knobs)
    for holds in (is_sure, lambda answer: answer.fits):
        results = Search(short.request, knobs, both(holds, also), plans).results()
        cures = list(islice(results, most))
        if cures:
            return sorted(cures, key=lambda cure: cure.cost)
    return []


def new_fixes(short: Plan) -> list[FlagCure]:
    """Fixes of a server that is not deployed yet, best first; those that shorten the context by much come last."""
    least = short.settings.max_model_len // MOST_SHORTENED
    knobs = list(fit_knobs(short, is_new=True))
    cures = fixes(short, knobs=knobs)
    cures += (cure for cure in quantized_fixes(short, knobs, cures) if cure.plan.settings.max_model_len >= least)
    return sorted(cures, key=lambda cure: (cure.plan.settings.max_model_len < least, cure.cost))


def quantized_fixes(short: Plan, knobs: Sequence[Knob], others: Sequence[FlagCure]) -> list[FlagCure]:
    """Smaller weights that are not enough alone, with what else they take: for each number of GPUs the longest context,
    if no other fix has it on as few.
    """
    candidates = []
    for change in quantized_weights(short.request).changes:
        base = changed_plan(short.request, [change])
        if base is not None and not base.fits and base.slots is None:
            for cure in fixes(base, knobs=quantized_knobs(base)):
                changes = (change, *cure.changes)
                candidates.append(FlagCure(changes, levels_of(changes, knobs), cure.plan))
    rivals = [other for other in others if other.plan.request.gpu == short.request.gpu]
    for cure in sorted(candidates, key=lambda cure: (cure.size, cure.cost)):
        if not any(reaches(other, cure) for other in rivals):
            rivals.append(cure)
    return [cure for cure in rivals if cure not in others]


def quantized_knobs(short: Plan) -> Iterator[Knob]:
    """What a quantized checkpoint may lack on the same kind of GPU; a shorter context with fewer sequences, too."""
    args = short.request.args
    yield from start_knobs(short)
    yield Knob([]) if abilities_of(short.request.release.engine).keeps_share else smaller_needs(args)
    if args.max_model_len != "auto":
        yield shorter_context(short.settings.max_model_len)
    yield fp8_cache(args)
    yield more_ranks(short.request)


def levels_of(changes: Iterable[FlagChange], knobs: Sequence[Knob]) -> Levels:
    """The level of each knob after some changes."""
    flags = {change.flag for change in changes}
    return tuple(next((n for n in range(1, len(k.changes) + 1) if k.changes[n - 1].flag in flags), 0) for k in knobs)


def reaches(cure: FlagCure, other: FlagCure) -> bool:
    """True if it has as long a context as another fix, on no more GPUs."""
    return all(own <= limit for own, limit in zip(cure.size, other.size, strict=True))


# --- meeting several needs at once ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Need:
    """A requirement on a plan: the check, and the changes that may meet it."""

    holds: Holds
    knobs: Knobs


# Flags from the cheapest for the user to the most costly; the order of all knobs follows it.
DEARNESS = (
    "--max-num-seqs", "--enforce-eager", "--fully-sharded-loras", "--num-gpu-blocks-override", "--max-total-tokens",
    "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--kv-cache-dtype", "--max-loras", "--max-lora-rank",
    "--tensor-parallel-size", "--data-parallel-size", "--quantization", "--max-model-len", "--gpu",
)  # fmt: skip
MORE_IS_DEARER = ("--max-num-seqs", "--tensor-parallel-size", "--data-parallel-size")
MOST_STATES = 24  # sets of changes to examine, each for some dozens of plans
MOST_STEPS = 4  # fixes of one need to follow up


def dearness(change: FlagChange) -> tuple[int, float]:
    """Sort key of a change by its cost: the flag, and how far it is changed."""
    name, _, value = change.flag.partition(" ")
    rank = DEARNESS.index(name) if name in DEARNESS else -1
    if change.gpu is not None:
        return rank, change.gpu.total_memory
    try:
        amount = float(value)
    except ValueError:  # a word: on or off
        return rank, 0
    return rank, amount if name in MORE_IS_DEARER else -amount


def cost_of(changes: Iterable[FlagChange]) -> list[tuple[int, float]]:
    """Sort key of a set of changes: the most costly first."""
    return sorted(map(dearness, changes), reverse=True)


def together(short: Plan, needs: Sequence[Need], most_states: int = MOST_STATES) -> FlagCure | None:
    """Find the cheapest changes whose plan meets every need, by fixing one need after another.

    None of the changes can be omitted.
    """
    order = count()
    queue: list[tuple[list[tuple[int, float]], int, tuple[FlagChange, ...], Plan]] = [([], next(order), (), short)]
    known: set[str] = set()
    while queue and most_states:
        most_states -= 1
        _, _, changes, answer = heappop(queue)
        need = next((need for need in needs if not need.holds(answer)), None)
        if need is None:
            return without_idle(short.request, FlagCure(changes, (), answer), needs)
        for cure in islice(Search(answer.request, list(need.knobs(answer)), need.holds).results(), MOST_STEPS):
            merged = in_order({change.flag.split()[0]: change for change in (*changes, *cure.changes)}.values())
            key = " ".join(change.flag for change in merged)
            if key in known:
                continue
            known.add(key)
            candidate = changed_plan(short.request, merged)
            if candidate is not None:
                heappush(queue, (cost_of(merged), next(order), merged, candidate))
    return None


def in_order(changes: Iterable[FlagChange]) -> tuple[FlagChange, ...]:
    return tuple(sorted(changes, key=dearness))


def without_idle(request: Request, cure: FlagCure, needs: Sequence[Need]) -> FlagCure:
    """Drop changes that later ones made unnecessary, the most costly first."""
    for change in cure.changes[::-1]:
        fewer = tuple(other for other in cure.changes if other is not change)
        answer = changed_plan(request, fewer)
        if answer is not None and all(need.holds(answer) for need in needs):
            cure = FlagCure(fewer, (), answer)
    return cure
