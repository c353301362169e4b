"""GPU selection under latency targets: the fewest servers of each placement, cheapest first.

A placement's rate is first bounded in closed form; the cheapest by that bound are then simulated. Servers share the
load evenly: each gets an equal share of the rate, as with random routing, or of the users.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, inf
from typing import Any, Final

from kvplan.core.errors import KvplanError
from kvplan.planning.plan import Plan, Request, plan
from kvplan.planning.recommend import Question, precisions, splits
from kvplan.planning.users import num_gpus
from kvplan.simulate import ranges, slo
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.load import default_requests
from kvplan.simulate.result import Result, result
from kvplan.simulate.runs import Run
from kvplan.simulate.setup import Setup, check
from kvplan.simulate.slo import Kept, Promise
from kvplan.simulate.source import Source
from kvplan.simulate.steptime import StepTime, attention_kinds, step_time
from kvplan.simulate.work import StepWork

SAMPLE: Final = 500  # requests whose mean lengths represent the load in the closed form
SHORT_LIST: Final = 4  # number of placements to simulate
MOST_SERVERS: Final = 4096
MOST_NAMED: Final = 3  # GPUs in a line on the closed form
ALONE: Final = "with a single request a token takes longer than the target"


@dataclass(frozen=True, slots=True)
class Demand:
    """The load on all servers together, and its targets.

    rate     requests per second; None: `users` who each wait for a response, think, and join over `ramp_s`
    spare    servers in addition to those that the load needs
    strict   whether the whole range of a time must meet its target, not only the likely value
    is_sized a number of requests was stated, or a trace: every server gets all of them; else as many as `simulate`
             gives by default to its share of the users
    """

    source: Source
    rate: float | None
    users: int | None
    promises: tuple[Promise, ...]
    spare: int = 0
    strict: bool = True
    is_sized: bool = True
    calibration: str | None = None
    think_s: float = 0.0
    ramp_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Means:
    """Mean token counts per request."""

    prompt: float
    output: float

    @property
    def cached_tokens(self) -> float:
        """Mean number of tokens in the KV cache while a request decodes."""
        return self.prompt + self.output / 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kind of server, and the minimum number of servers by the closed form."""

    plan: Plan
    step_time: StepTime
    changes: tuple[str, ...]
    servers: int
    price_per_hour: float | None

    @property
    def gpu(self) -> str:
        return self.plan.request.gpu.name

    def gpus(self, servers: int) -> int:
        return servers * num_gpus(self.plan)

    def cost(self, servers: int) -> tuple[Any, ...]:
        """Sort key of the cost: dollars per hour if priced, then GPUs, their memory and the number of changes."""
        gpus = self.gpus(servers)
        price = inf if self.price_per_hour is None else self.price_per_hour * gpus
        return price, gpus, gpus * self.plan.request.gpu.total_memory, len(self.changes)


@dataclass(frozen=True, slots=True)
class Timed:
    """A simulated candidate: its servers (without spares), and one server's figures at its share of the load."""

    candidate: Candidate
    servers: int
    result: Result
    outcomes: tuple[Kept, ...]
    ranges: ranges.Ranges


@dataclass(frozen=True, slots=True)
class Missed:
    """The reason why no number of servers of a kind meets the targets."""

    gpu: str
    num_gpus: int
    reason: str


@dataclass(frozen=True, slots=True)
class Placed:
    """Simulated candidates, cheapest first; candidates with only a bound; placements that do not work."""

    timed: tuple[Timed, ...]
    bounded: tuple[Candidate, ...]
    missed: tuple[Missed, ...]


def placed(
    question: Question, requests: Iterable[Request], demand: Demand, tell: Callable[[str], None] = lambda text: None
) -> Placed:
    """Return the cheapest placements that meet the targets, among the GPUs and splits that pass the closed form.

    tell  takes a line on the closed form, before any simulation, and one on each placement that was simulated
    """
    means = means_of(demand.source)
    candidates: list[Candidate] = []
    missed: list[Missed] = []
    for request in requests:
        for changes, changed in precisions(question, request):
            for split in splits(question, changed):
                outcome = candidate(question, split, changes, demand, means)
                if isinstance(outcome, Candidate):
                    candidates.append(outcome)
                elif not changes:
                    missed.append(outcome)
    candidates.sort(key=lambda option: option.cost(option.servers))
    if candidates:
        tell(f"by the closed form at least {bounds_text(candidates)}; simulating them, the cheapest first")
    timed: list[Timed] = []
    bounded: list[Candidate] = []
    for option in candidates:
        best = min((choice.candidate.cost(choice.servers) for choice in timed), default=None)
        if len(timed) >= SHORT_LIST or (best is not None and dearer(option, best, timed)):
            bounded.append(option)
            continue
        timed_or_missed = fewest_servers(option, demand)
        if isinstance(timed_or_missed, Timed):
            timed.append(timed_or_missed)
            servers, ranks = timed_or_missed.servers, option.plan.request.args.tensor_parallel_size
            kind = ", ".join((f"{servers} x TP {ranks}", *option.changes))
            tell(f"{gpus_text(option, servers)} meet the targets as {kind}")
        else:
            missed.append(timed_or_missed)
            tell(f"{option.gpu}: {timed_or_missed.reason}")
    timed.sort(key=lambda choice: choice.candidate.cost(choice.servers))
    return Placed(tuple(timed), tuple(bounded), tuple(missed))


def bounds_text(candidates: Sequence[Candidate]) -> str:
    """The cheapest few GPUs with their least number: "3 x b200 or 6 x h200"."""
    least: dict[str, Candidate] = {}
    for option in candidates:
        least.setdefault(option.gpu, option)
    *others, last = [gpus_text(option, option.servers) for option in islice(least.values(), MOST_NAMED)]
    return f"{', '.join(others)} or {last}" if others else last


def gpus_text(option: Candidate, servers: int) -> str:
    """ "8 x h200 ($30.40 per hour)"."""
    count = option.gpus(servers)
    price = "" if option.price_per_hour is None else f" (${count * option.price_per_hour:,.2f} per hour)"
    return f"{count:,} x {option.gpu}{price}"


def dearer(option: Candidate, best: tuple[Any, ...], timed: Sequence[Timed]) -> bool:
    """True if even its lower bound costs more than the best so far, on a GPU that is already in the list."""
    return option.cost(option.servers) > best and any(choice.candidate.gpu == option.gpu for choice in timed)


def means_of(source: Source) -> Means:
    sample = list(islice(source.requests(1.0), min(SAMPLE, source.num_requests)))
    return Means(
        sum(request.prompt_tokens for request in sample) / len(sample),
        sum(request.output_tokens for request in sample) / len(sample),
    )


def candidate(
    question: Question, request: Request, changes: tuple[str, ...], demand: Demand, means: Means
) -> Candidate | Missed:
    """Return a kind of server with its minimum number of servers, or the reason why it does not work."""
    ranks = request.args.world_size
    try:
        the_plan = plan(replace(request, load=replace(request.load, lengths=None)))
        check(the_plan)
        times = step_time(the_plan, Shares(), demand.calibration)
    except KvplanError as error:
        return Missed(request.gpu.name, ranks, error.problem)
    steady = steady_rate(
        the_plan, times, means, demand.promises, ranges_of(the_plan, demand).decided if demand.strict else {}
    )
    if steady.rate <= 0:
        return Missed(request.gpu.name, ranks, steady.why)
    needed = steady.users if demand.rate is None else steady.rate
    servers = max(1, ceil((demand.users or 0 if demand.rate is None else demand.rate) / needed - 1e-9))
    price = (question.prices or {}).get(request.gpu.name)
    return Candidate(the_plan, times, changes, servers, price)


def ranges_of(the_plan: Plan, demand: Demand) -> ranges.Ranges:
    return ranges.modeled(the_plan) if demand.calibration is None else ranges.calibrated()


# --- the closed form --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Steady:
    """Maximum of one server: requests per second, and requests in progress; why: the reason if the rate is 0."""

    rate: float
    users: float = 0.0
    why: str = ""


def steady_rate(
    the_plan: Plan, times: StepTime, means: Means, promises: Sequence[Promise], spans: Mapping[str, ranges.Bounds]
) -> Steady:
    """Return an upper bound of one server's rate: a constant number of requests decode while new prompts are
    prefilled at the rate at which requests end. The TPOT target, the pool and --max-num-seqs limit that number.
    """
    kinds = attention_kinds(the_plan)
    blocks = the_plan.pool.allocated_blocks(max(1, round(means.cached_tokens)))
    max_count = min(the_plan.settings.max_num_seqs, the_plan.capacity.num_blocks / max(1, blocks))
    limit = min((promise.limit for promise in promises if promise.metric == "tpot"), default=inf)
    high = spans["tpot"][1] if "tpot" in spans else 1.0
    best = Steady(0.0, why=ALONE if high == 1.0 else f"{ALONE}, at the high end of its range")
    count = 1.0
    while count <= max(1.0, max_count):
        prompt = count * means.prompt / max(1.0, means.output)
        context = max(1, round(means.cached_tokens))
        read = tuple(round(count * kind.reach.read(context)) for kind in kinds)
        own = tuple(round(prompt * kind.reach.read(max(1, round(means.prompt / 2)))) for kind in kinds)
        pairs = tuple(a + b for a, b in zip(read, own, strict=True))
        number, new = max(1, round(count)), round(prompt)
        seconds = times.seconds(StepWork(number + new, number, number + (new > 0), read, pairs, int(new > 0), new, own))
        if seconds * high > limit:
            break
        rate = count / (max(1.0, means.output) * seconds)
        if rate > best.rate:
            best = Steady(rate, count)
        count = count * 1.1 if count >= 10 else count + 1
    return best


# --- the simulator ----------------------------------------------------------------------------------------------------


def fewest_servers(option: Candidate, demand: Demand) -> Timed | Missed:
    """Return the fewest servers that meet all targets: doubling steps from the closed form's number, then bisection."""
    tried: dict[int, Timed | None] = {}

    def keeps(servers: int) -> bool:
        if servers not in tried:
            tried[servers] = simulated(option, demand, servers)
        return tried[servers] is not None

    low, servers, step = option.servers - 1, option.servers, 1
    max_servers = demand.users if demand.users is not None else MOST_SERVERS
    while not keeps(servers):
        low = servers
        if servers >= min(max_servers, 8 * option.servers + 8):
            alone = tried[servers]
            assert alone is None
            where = f"one of {servers:,} servers" if servers > 1 else "the server"
            return Missed(option.gpu, num_gpus(option.plan), f"{where} misses the targets at its share of the load")
        servers, step = min(max_servers, servers + step), 2 * step
    while servers - low > 1:
        middle = (low + servers) // 2
        low, servers = (low, middle) if keeps(middle) else (middle, servers)
    answer = tried[servers]
    assert answer is not None
    return answer


def simulated(option: Candidate, demand: Demand, servers: int) -> Timed | None:
    """Simulate one server at its share of the load; return None if it misses a target."""
    source, skipped = demand.source, 0
    spans = ranges_of(option.plan, demand)
    if demand.rate is None:
        users = ceil((demand.users or 1) / servers)
        if not demand.is_sized:
            source = replace(source, num_requests=min(source.num_requests, default_requests(users)))
        skipped = min(users, source.num_requests - 1)

    def arrivals() -> Arrivals:
        if demand.rate is not None:
            return source.open(demand.rate / servers)
        return source.closed(skipped, demand.think_s, demand.ramp_s)

    strict = (
        tuple(replace(promise, limit=promise.limit / high(promise, spans)) for promise in demand.promises)
        if demand.strict
        else ()
    )
    promises = strict or demand.promises
    simulation = served(Setup(option.plan, option.step_time), arrivals, source, promises, skipped)
    if slo.Broken(promises, source.num_requests, skipped)(simulation) or not len(simulation.records):
        return None
    outcomes = slo.outcomes(demand.promises, simulation, skipped, spans)
    if not all(outcome.verdict == "kept" if demand.strict else outcome.is_kept for outcome in outcomes):
        return None
    figures = result(simulation, skipped, by_clock=demand.rate is not None)
    return (
        None
        if figures.queue_grows
        else Timed(option, servers, figures, outcomes, spans.of(waits=simulation.records.waits(skipped)))
    )


def served(
    setup: Setup, arrivals: Callable[[], Arrivals], source: Source, promises: tuple[Promise, ...], skipped: int
) -> Run:
    """The run of one server, until it is over or a target cannot be met any more.

    Nothing is found in a cache of blocks that no two requests share until one is preempted and comes back, so the
    blocks' contents are followed only if that happens.
    """
    for caches in (False, True):
        simulation = setup.run(arrivals(), source.run_len, caches=caches)
        broken = slo.Broken(promises, source.num_requests, skipped)
        is_same = caches or simulation.config.enable_prefix_caching or not setup.plan.settings.prefix_caching
        simulation.stop = broken if is_same else lambda run, broken=broken: run.num_preemptions > 0 or broken(run)
        simulation.run()
        if is_same or not simulation.num_preemptions:
            break
    return simulation


def high(promise: Promise, spans: ranges.Ranges) -> float:
    return 1.0 if promise.metric is None else spans.target(promise.metric, 1.0)[1]
