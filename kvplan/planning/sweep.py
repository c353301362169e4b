"""Every combination of models, GPUs and flags as rows: the numbers of plan(), or why a combination is impossible.

A combination can be rebuilt from its number: a Pareto front or the best rows are kept as numbers, and memory does not
grow with the size of the sweep. Worker processes share sweeps above some thousands of combinations.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields, replace
from functools import cached_property
from math import gcd, prod
from typing import Any, NamedTuple

from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.core.processes import Jobs, cores, in_order, is_shared
from kvplan.core.records import Count, Number, Size, dataclass
from kvplan.models.spec import Decoder, ModelSpec
from kvplan.planning.plan import Plan, Request, lack_text, plan
from kvplan.planning.users import num_gpus
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import EngineArgs, option_words

MOST_COMBINATIONS = 2_000_000
WORTH_PROCESSES = 4_000  # combinations below which starting processes takes longer than it saves: 0.3 s
CHUNK = 1_000
MOST_KEPT = 20_000  # cached engine arguments, some 10 MB
SLOW_CHUNK = 4  # with a distribution of lengths a plan takes up to a second


class SweepRow(NamedTuple):
    """One combination. Bytes are per rank, users over all replicas, or None if a combination is impossible or the value
    was not requested.

    max_model_len      the context in effect, also if fitted
    users              requests served at once by the requested measure (lengths, mean length, full context): what the
                       pool holds decoding with one chunk of prefill in flight, at most max_num_seqs for each replica;
                       users_low and users_high its range
    pool_users         the same for one replica, regardless of max_num_seqs
    concurrency        the server's own figure for one replica
    file_type          of the file, in a server that loads one; gpu_layers of num_layers are on GPUs there, and the
                       experts of host_experts of them on the host
    refused_by         what stops a server whose KV cache would fit: free_memory, state_blocks, ...; see `reason`
    """

    model: str
    gpu: str
    engine: str
    num_gpus: Size
    tensor_parallel_size: Size
    pipeline_parallel_size: Size
    data_parallel_size: Size
    max_model_len: Size | None
    mean_tokens: Size | None
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    gpu_memory_utilization: Number | None
    max_num_seqs: Size | None
    block_size: Size | None
    fits: bool
    reason: str | None
    deficit: Count | None = None
    kv_dtype: str | None = None
    weights: Count | None = None
    kv_cache: Count | None = None
    kv_bytes_per_token: Count | None = None
    bytes_per_request: Count | None = None
    num_blocks: Count | None = None
    tokens: Count | None = None
    concurrency: Number | None = None
    concurrency_low: Number | None = None
    concurrency_high: Number | None = None
    pool_users: Count | None = None
    users: Count | None = None
    users_low: Count | None = None
    users_high: Count | None = None
    users_per_gpu: Number | None = None
    price_per_hour: Number | None = None
    users_per_dollar: Number | None = None
    refused_by: str | None = None
    prefill_context_parallel_size: Size = 1
    decode_context_parallel_size: Size = 1
    max_num_batched_tokens: Size | None = None
    num_speculative_tokens: Count = 0
    file_type: str | None = None
    gpu_layers: Count | None = None
    num_layers: Count | None = None
    host_experts: Count | None = None

    @property
    def is_possible(self) -> bool:
        """True if a plan can be made, whether it fits or not."""
        return self.deficit is not None


@dataclass(frozen=True)
class Grid:
    """The combinations: every request with every release, mean length and engine argument.

    requests   models x GPUs x contexts, in that nesting; `shape` their three counts
    releases   of the server; empty: each request's own
    means      mean tokens of a request, None: as long as the context; empty: each request's own
    arguments  fields of EngineArgs and their values; fields that have the same one stand together ("a,b")
    prices     dollars per hour of a GPU, by name
    copies     the requests of each quantization in `arguments`: a quantized checkpoint may stand for the model
    """

    requests: tuple[Request, ...]
    shape: tuple[int, int, int]
    releases: tuple[Version, ...] = ()
    means: tuple[int | None, ...] = ()
    arguments: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    prices: Mapping[str, float] = field(default_factory=dict)
    copies: Mapping[str | None, tuple[Request, ...]] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of values on each axis, the outermost first: model, GPU, release, arguments, context, mean length."""
        models, gpus, contexts = self.shape
        arguments = (len(values) for values in self.arguments.values())
        return (models, gpus, len(self.releases) or 1, *arguments, contexts, len(self.means) or 1)

    @property
    def count(self) -> int:
        return prod(self.sizes)

    def digits(self, number: int) -> list[int]:
        """Index on each axis of a combination."""
        numbers = []
        for size in self._inward:
            number, digit = divmod(number, size)
            numbers.append(digit)
        return numbers[::-1]

    @cached_property
    def _inward(self) -> tuple[int, ...]:
        return self.sizes[::-1]

    def request(self, number: int) -> Request:
        model, gpu, release, *picks, context, mean = self.digits(number)
        _, gpus, contexts = self.shape
        index = (model * gpus + gpu) * contexts + context
        args = self._args(index, tuple(picks))
        base = self.copies.get(args.quantization, self.requests)[index]
        return Request(  # spelled out: replace() would take a fifth of the plan's time
            spec=base.spec,
            gpu=base.gpu,
            args=args,
            release=self.releases[release] if self.releases else base.release,
            load=replace(base.load, mean_tokens=self.means[mean]) if self.means else base.load,
            weights_bytes=base.weights_bytes,
            checkpoint=base.checkpoint,
            draft=base.draft,
            draft_checkpoint=base.draft_checkpoint,
            memory_in_use=base.memory_in_use,
            host_bandwidth=base.host_bandwidth,
            measured=base.measured,
            repeated=base.repeated,
        )

    def _args(self, index: int, picks: tuple[int, ...]) -> EngineArgs:
        """A request's arguments with the selected values; cached, because other models and GPUs have the same."""
        if not picks:
            return self.requests[index].args
        key = (self._alike[index], picks)
        args = self._made.get(key)
        if args is None:
            picked = zip(self.arguments.items(), picks, strict=True)
            values = {name: values[pick] for (names, values), pick in picked for name in names.split(",")}
            args = replace(self.requests[index].args, **values)
            if len(self._made) < MOST_KEPT:
                self._made[key] = args
        return args

    @cached_property
    def _alike(self) -> list[int]:
        """For each request, the index of the first one with the same arguments."""
        first: dict[EngineArgs, int] = {}
        return [first.setdefault(request.args, index) for index, request in enumerate(self.requests)]

    @cached_property
    def _made(self) -> dict[tuple[int, tuple[int, ...]], EngineArgs]:
        return {}

    def row(self, number: int) -> SweepRow:
        request = self.request(number)
        return row_of(request, self.prices.get(request.gpu.name))

    def rows(self, start: int, stop: int) -> list[SweepRow]:
        return [self.row(number) for number in range(start, min(stop, self.count))]


def check_size(count: int) -> None:
    if count > MOST_COMBINATIONS:
        raise UsageError(
            "sweep",
            f"{count:,} combinations are more than {MOST_COMBINATIONS:,}",
            "name fewer values, or sweep in parts",
        )


# --- one row ----------------------------------------------------------------------------------------------------------


def row_of(request: Request, price: float | None = None) -> SweepRow:
    """Row of one combination; `price` is of one GPU, in dollars per hour."""
    try:
        return _planned(plan(request), price)
    except KvplanError as error:
        return _impossible(request, str(error.in_words(option_words())))


def _planned(the_plan: Plan, price: float | None) -> SweepRow:
    request, answer, capacity, fits = the_plan.request, the_plan.concurrency, the_plan.capacity, the_plan.fits
    cache = the_plan.slots
    args, gpus, replicas, most = request.args, num_gpus(the_plan), answer.replicas, the_plan.settings.max_num_seqs
    low, likely, high = answer.all_users
    cost = None if price is None else price * gpus
    return SweepRow(
        request.spec.name, request.gpu.name, request.release.label, gpus,
        args.tensor_parallel_size, args.pipeline_parallel_size, replicas, capacity.max_model_len,
        request.load.mean_tokens, args.dtype, args.quantization, args.kv_cache_dtype,
        the_plan.settings.gpu_memory_utilization, most, the_plan.pool.block_size,
        fits, None if fits else lack_text(the_plan), the_plan.deficit, the_plan.settings.kv_dtype,
        the_plan.memory.weights, the_plan.memory.kv_cache, the_plan.bytes_per_token, the_plan.bytes_per_request,
        capacity.num_blocks if fits else 0, capacity.tokens if fits else 0,
        answer.max, answer.low, answer.high, answer.pool.users,
        likely, low, high, likely / gpus, cost, likely / cost if cost else None,
        None if the_plan.refusal is None else the_plan.refusal.by,
        args.prefill_context_parallel_size, args.decode_context_parallel_size,
        the_plan.settings.max_num_batched_tokens, args.num_speculative_tokens,
        *(() if cache is None else (cache.file_type, cache.gpu_layers, cache.num_layers, cache.host_experts)),
    )  # fmt: skip


def _impossible(request: Request, reason: str) -> SweepRow:
    args = request.args
    context = args.max_model_len if isinstance(args.max_model_len, int) else None
    tp, pp, dp = args.tensor_parallel_size, args.pipeline_parallel_size, args.data_parallel_size
    return SweepRow(
        request.spec.name, request.gpu.name, request.release.label, args.num_gpus, tp, pp, dp, context,
        request.load.mean_tokens, args.dtype, args.quantization, args.kv_cache_dtype, args.gpu_memory_utilization,
        args.max_num_seqs, args.block_size, False, reason,
        prefill_context_parallel_size=args.prefill_context_parallel_size,
        decode_context_parallel_size=args.decode_context_parallel_size,
        max_num_batched_tokens=args.max_num_batched_tokens, num_speculative_tokens=args.num_speculative_tokens,
    )  # fmt: skip


# --- all rows ---------------------------------------------------------------------------------------------------------


def all_rows(grid: Grid, jobs: Jobs | None = None, chunk: int | None = None) -> Iterator[list[SweepRow]]:
    """Yield every row in numerical order, chunk by chunk, using `jobs` processes; a small sweep runs in this process
    unless a cluster is named.

    Closing the iterator, or an interrupt, ends the processes.
    """
    jobs = cores() if jobs is None else jobs
    slow = any(request.load.lengths is not None for request in grid.requests)
    chunk = chunk or (SLOW_CHUNK if slow else CHUNK)
    parts = ((start, start + chunk) for start in range(0, grid.count, chunk))
    is_small = isinstance(jobs, int) and grid.count <= (SLOW_CHUNK if slow else WORTH_PROCESSES)
    if is_small or not is_shared(jobs):
        return in_order(_rows, grid, parts, 1, name="sweep")
    return in_order(_rows, portable(grid), parts, jobs, name="sweep")


def _rows(grid: Grid, part: tuple[int, int]) -> list[SweepRow]:
    return grid.rows(*part)


def _no_decoder() -> Decoder:
    raise UnsupportedModelError("sweep", "a worker has the model's sizes only")


def portable(grid: Grid) -> Grid:
    """Copy the grid for another process."""
    copies = {method: portable_requests(rows) for method, rows in grid.copies.items()}
    return replace(grid, requests=portable_requests(grid.requests), copies=copies)


def portable_requests(requests: Iterable[Request]) -> tuple[Request, ...]:
    """Copy requests for another process: a spec's decoder reader cannot be pickled and is not needed."""
    specs: dict[int, ModelSpec] = {}

    def sent(spec: ModelSpec) -> ModelSpec:
        return specs.setdefault(id(spec), replace(spec, read_decoder=_no_decoder))

    return tuple(
        replace(request, spec=sent(request.spec), draft=None if request.draft is None else sent(request.draft))
        for request in requests
    )


# --- values that no combination can use -------------------------------------------------------------------------------


def unusable(grid: Grid) -> list[KvplanError]:
    """Errors for each axis value with which every combination is impossible; empty if all can be used.

    What a model or its server does not support is no mistake: if another value of the axis can be used, the
    combinations are rows with their reason. Those of a value are tried in scattered order, to find a success soon.
    """
    reasons = list[KvplanError]()
    for axis, size in enumerate(grid.sizes):
        refused = [reason for value in range(size) if (reason := _unusable(grid, axis, value)) is not None]
        if len(refused) < size:
            refused = [reason for reason in refused if not isinstance(reason, UnsupportedModelError)]
        reasons += refused
    return list({str(reason): reason for reason in reasons}.values())


def _unusable(grid: Grid, axis: int, value: int) -> KvplanError | None:
    inner = prod(grid.sizes[axis + 1 :])
    others = grid.count // grid.sizes[axis]
    first = None
    for other in _scattered(others):
        high, low = divmod(other, inner)
        request = grid.request((high * grid.sizes[axis] + value) * inner + low)
        try:
            plan(replace(request, load=replace(request.load, lengths=None)))
        except KvplanError as error:
            first = first or error
        else:
            return None
    return first


def _scattered(count: int) -> Iterable[int]:
    """Yield 0 to count - 1, each once, with neighbors far apart."""
    step = max(1, int(count * 0.618))
    while gcd(step, count) > 1:
        step += 1
    return ((i * step) % count for i in range(count))


# --- the best of them -------------------------------------------------------------------------------------------------


Point = tuple[int, float, float]  # context, users per GPU, users per dollar and hour (0 without prices)


def point_of(row: SweepRow) -> Point:
    assert row.max_model_len is not None
    return row.max_model_len, row.users_per_gpu or 0.0, row.users_per_dollar or 0.0


def dominates(point: Point, other: Point) -> bool:
    """True if it is at least as good in everything, and better in something."""
    return point != other and point[0] >= other[0] and point[1] >= other[1] and point[2] >= other[2]


# Fields that distinguish offers; other differences do not affect the users.
_OFFER = ("model", "gpu", "engine", "num_gpus", "max_model_len", "mean_tokens", "users")
Offer = tuple[object, ...]


@dataclass(slots=True)
class Front:
    """Pareto-optimal combinations, by their numbers; models and mean lengths are kept apart."""

    points: dict[tuple[str, int | None], dict[Point, dict[Offer, list[int]]]] = field(default_factory=dict)

    def offer(self, number: int, row: SweepRow) -> None:
        if not row.users:
            return
        points, mine = self.points.setdefault((row.model, row.mean_tokens), {}), point_of(row)
        if mine not in points:
            if any(dominates(other, mine) for other in points):
                return
            for other in [other for other in points if dominates(mine, other)]:
                del points[other]
        offer = tuple(getattr(row, name) for name in _OFFER)
        points.setdefault(mine, {}).setdefault(offer, []).append(number)

    @property
    def ties(self) -> list[list[int]]:
        """Groups of numbers that are the same offer."""
        return sorted(
            tie for points in self.points.values() for by_point in points.values() for tie in by_point.values()
        )


def plainest(grid: Grid, ties: Iterable[list[int]]) -> list[tuple[SweepRow, int]]:
    """For each tie, the combination with the fewest departures from the server's defaults (the first of equals), and
    how many others there are.
    """
    rows = []
    for numbers in ties:
        simplest = numbers[0]
        if len(numbers) > 1:
            usual: dict[EngineArgs, Mapping[str, object]] = {}  # they differ only in arguments
            simplest = min(numbers, key=lambda number: (departures(grid.request(number), usual), number))
        rows.append((simplest, len(numbers) - 1))
    return [(grid.row(number), others) for number, others in sorted(rows)]


def departures(request: Request, known: dict[EngineArgs, Mapping[str, object]]) -> int:
    """Number of engine arguments that differ from the server's defaults, stated or not.

    known  cache of the defaults, for requests that differ only in arguments
    """
    bare = replace(
        request.args, gpu_memory_utilization=None, max_num_seqs=None, max_num_batched_tokens=None, block_size=None
    )
    if bare not in known:
        known[bare] = usual_settings(replace(request, args=bare))
    usual = known[bare]
    plain = EngineArgs(max_model_len=request.args.max_model_len)
    given = [name for name in _ARGUMENTS if getattr(request.args, name) != getattr(plain, name)]
    return sum(name not in usual or getattr(request.args, name) != usual[name] for name in given)


def usual_settings(request: Request) -> Mapping[str, object]:
    """Defaults that the server resolves; empty if it cannot run with them."""
    try:
        the_plan = plan(replace(request, load=replace(request.load, lengths=None)))
    except KvplanError:
        return {}
    return {
        "gpu_memory_utilization": the_plan.settings.gpu_memory_utilization,
        "max_num_seqs": the_plan.settings.max_num_seqs,
        "max_num_batched_tokens": the_plan.settings.max_num_batched_tokens,
        "block_size": the_plan.pool.block_size,
    }


_ARGUMENTS = tuple(each.name for each in fields(EngineArgs))


@dataclass(slots=True)
class Curves:
    """The most users per GPU, and per dollar, of each model and GPU at each context, over all other flags."""

    per_gpu: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    per_dollar: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)

    def offer(self, row: SweepRow) -> None:
        if not row.users or row.max_model_len is None:
            return
        for curves, value in ((self.per_gpu, row.users_per_gpu), (self.per_dollar, row.users_per_dollar)):
            if value is not None:
                curve = curves.setdefault((row.model, row.gpu), {})
                curve[row.max_model_len] = max(value, curve.get(row.max_model_len, 0.0))


def front_of(curves: Sequence[Mapping[int, float]]) -> list[tuple[int, float]]:
    """Pareto front of (context, most users) over all curves, contexts ascending."""
    best: dict[int, float] = {}
    for curve in curves:
        for context, value in curve.items():
            best[context] = max(value, best.get(context, 0.0))
    front: list[tuple[int, float]] = []
    for context in sorted(best, reverse=True):
        if not front or best[context] > front[-1][1]:
            front.append((context, best[context]))
    return front[::-1]
