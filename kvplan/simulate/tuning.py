"""Which flags serve the most on given GPUs within targets of time.

Every setting of a grid is planned and rated in closed form. The simulator then finds the largest load of a short list:
the best of each split and precision and what the server takes by itself, then whatever is one step away from the best.
A setting with more flags is preferred only where it serves more by MARGIN.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Final, Literal

from kvplan.core.errors import UsageError
from kvplan.core.processes import Jobs, at_most, in_order
from kvplan.planning.plan import Plan, Request, plan
from kvplan.planning.sweep import portable_requests
from kvplan.simulate import slo
from kvplan.simulate.arrivals import Arrivals, Closed, Open
from kvplan.simulate.result import Result, result
from kvplan.simulate.settings import Setting, Space
from kvplan.simulate.setup import Setup
from kvplan.simulate.slo import Kept, Promise
from kvplan.simulate.steady import Demand, Rated, Refused, means_of, rated
from kvplan.simulate.steptime import Scaled
from kvplan.workloads.trace import TraceRequest

MARGIN: Final = 1.02  # how much more a setting with more flags must serve
PRECISION: Final = 0.03  # of the largest rate that a search finds
WORTH_FP8: Final = 1.05  # how much more a less precise KV cache must serve to be the answer
NEAR: Final = 0.8  # of the best closed form: splits that are simulated
MOST_SPLITS: Final = 3  # of them, for each precision
PROMISING: Final = 0.75  # of the best's closed form: neighbors of it that are simulated
WORTH_PROCESSES: Final = 1000  # settings below which rating them in other processes costs more than it saves
ROUNDS: Final = 3  # of settings one step away from the best


# --- the simulator ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """One server's figures at its share of a load."""

    result: Result
    targets: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A setting to be simulated.

    start    requests per second of all servers where the search of a rate begins
    highest  beyond which requests only wait
    least    what it must serve to be looked at closer
    end      of the range of times: "low" is a server that is slower than likely
    """

    setting: Setting
    start: float
    highest: float
    least: float = 0.0
    end: Literal["low", "likely", "high"] = "likely"


@dataclass(frozen=True, slots=True)
class Tried:
    """The most that all servers of a setting serve within the promises; 0: nothing, or not `least`, without a run."""

    setting: Setting
    rate: float
    run: Run | None
    least: float = 0.0


def tried(shared: tuple[Request, Demand], task: Task) -> Tried:
    base, demand = shared
    made = plan(task.setting.request(base))
    server = Server(made, demand, task.setting, task.end)
    if demand.how != "rate":
        run = server.run(None)
        rate = 0.0 if run is None else run.result.requests_per_s * task.setting.replicas
        return Tried(task.setting, rate, run, task.least)
    return replace(server.search(task), setting=task.setting, least=task.least)


class Server:
    """One of the servers of a setting, which get the load in equal parts."""

    def __init__(self, made: Plan, demand: Demand, setting: Setting, end: Literal["low", "likely", "high"]) -> None:
        self.demand, self.replicas = demand, setting.replicas
        self.spans, tiers = demand.ranges(made), demand.tiers(setting)
        times, factors = demand.times(made, tiers), dict.fromkeys(self.spans.times, 1.0)
        if end != "likely":
            factors = {name: span[end == "low"] for name, span in self.spans.times.items()}
            times = Scaled(times, factors["tpot"])
        self.factor = factors["tpot"]
        self.limits = tuple(limited(promise, factors) for promise in demand.promises)
        self.setup = Setup(made, times, tiers)

    def run(self, rate: float | None) -> Run | None:
        """Its run at its share; None where it breaks a promise, or where its queue grows without end."""
        demand = self.demand
        arrivals, skipped, number = self.arrivals(rate)
        simulation = self.setup.run(arrivals, demand.run_len)
        broken = slo.Broken(self.limits, number, skipped)
        simulation.stop = broken
        simulation.run()
        if broken(simulation) or not len(simulation.records):
            return None
        if not all(target.is_kept for target in slo.outcomes(self.limits, simulation, skipped)):
            return None
        figures = result(simulation, skipped, by_clock=demand.how == "rate")
        if figures.queue_grows:
            return None
        return Run(figures, slo.outcomes(demand.promises, simulation, skipped, self.spans))

    def arrivals(self, rate: float | None) -> tuple[Arrivals, int, int]:
        """(requests as they come to one server, those that are not judged, how many)."""
        demand = self.demand
        if demand.how == "users":
            users = max(1, ceil(demand.users / self.replicas))
            rows = demand.rows[: max(users + 1, len(demand.rows) // self.replicas)]
            skipped = 0 if demand.first_counts else min(users, len(rows) - 1)
            return Closed(iter(at_once(rows)), users, demand.think_s, demand.ramp_s), skipped, len(rows)
        if rate is None:
            rows = demand.rows[:: self.replicas]
            return Open(iter(at_once(rows))), 0, len(rows)
        return Open(iter(demand.rows), rate / self.replicas), 0, len(demand.rows)

    def search(self, task: Task) -> Tried:
        """The largest rate that keeps the promises, from a start up or down; 0 where `least` does not."""
        best: tuple[float, Run] | None = None

        def keeps(rate: float) -> bool:
            nonlocal best
            run = self.run(rate)
            if run is not None and (best is None or rate > best[0]):
                best = rate, run
            return run is not None

        highest = task.highest / self.factor
        if task.least and (task.least > highest or not keeps(task.least)):
            return Tried(task.setting, 0.0, None)
        low, high, rate = task.least, inf, min(highest, max(task.start, task.least * STEP))
        for _ in range(TRIES):
            if keeps(rate):
                if rate >= highest:
                    break
                low, rate = rate, min(highest, rate * STEP)
            else:
                high, rate = rate, rate / STEP**2
            if low and high < inf:
                break
        while low and low * (1 + PRECISION) < high < inf:
            middle = (low + high) / 2
            low, high = (middle, high) if keeps(middle) else (low, middle)
        return Tried(task.setting, *best) if best is not None else Tried(task.setting, 0.0, None)


STEP: Final = 1.15
SLACK: Final = 1.1  # by which a server may do more than the closed form says
TRIES: Final = 12  # from a start down to a twentieth, or up to five times as much


def limited(promise: Promise, factors: Mapping[str, float]) -> Promise:
    """A promise, its limit changed by what its time is less certain by than a token's."""
    if promise.metric is None:
        return promise
    return replace(promise, limit=promise.limit * factors["tpot"] / factors[promise.metric])


def at_once(rows: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
    return (replace(row, arrival_s=0.0) for row in rows)


# --- the search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting that was simulated, with the ends of its range, None where they were not looked for.

    is_best   of what nothing beats in every respect
    """

    tried: Tried
    rated: Rated
    ends: tuple[float, float] | None = None
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was looked at, and what serves most; `usual` is what the server takes by itself."""

    num_settings: int
    num_simulated: int
    refused: tuple[Refused, ...]
    choices: tuple[Choice, ...]
    best: Choice | None
    usual: Choice | None


def tune(base: Request, demand: Demand, where: Space, jobs: Jobs = 1) -> Tuned:
    """The setting that serves most; the same whatever the number of processes."""
    [base] = portable_requests([base])
    settings = list(where.settings)
    means = means_of(demand.rows, demand.run_len)
    raters = jobs if len(settings) >= WORTH_PROCESSES or not isinstance(jobs, int) else 1
    answers = list(in_order(rated, (base, demand, means), settings, raters, name="tune"))
    ratings = {answer.setting: answer for answer in answers if isinstance(answer, Rated)}
    refused = tuple(answer for answer in answers if isinstance(answer, Refused))
    usual = usual_setting(where, ratings)
    search = Search(base, demand, ratings, jobs)
    search.simulate(first_list(ratings, usual))
    for _ in range(ROUNDS):
        if not search.simulate(near_best(where, search), must_beat=True):
            break
    return answer_of(search, len(settings), refused, usual)


def usual_setting(where: Space, ratings: Mapping[Setting, Rated]) -> Setting | None:
    """What the server takes by itself on the fewest ranks on which it starts."""
    bare = (Setting(tp, replicas) for tp, replicas in where.splits)
    return next((setting for setting in bare if setting in ratings), None)


class Search:
    """Settings that were simulated, by what they are."""

    def __init__(self, base: Request, demand: Demand, ratings: Mapping[Setting, Rated], jobs: Jobs) -> None:
        self.base, self.demand, self.ratings, self.jobs = base, demand, ratings, jobs
        self.tried: dict[Setting, Tried] = {}

    def simulate(self, settings: Iterable[Setting], *, must_beat: bool = False) -> bool:
        """Each that was not yet; returns whether one of them is the best of its precision now."""
        new = [setting for setting in dict.fromkeys(settings) if setting not in self.tried and setting in self.ratings]
        before = {precision: self.best(precision) for precision in PRECISIONS}
        tasks = [self.task(setting, self.least(setting) if must_beat else 0.0) for setting in new]
        for answer in self.run(tasks):
            self.tried[answer.setting] = answer
        return any(self.best(precision) != before[precision] for precision in PRECISIONS)

    def run(self, tasks: Sequence[Task]) -> list[Tried]:
        jobs = at_most(self.jobs, len(tasks))
        return list(in_order(tried, (self.base, self.demand), tasks, jobs, name="tune"))

    def task(self, setting: Setting, least: float) -> Task:
        rating = self.ratings[setting]
        return Task(setting, rating.rate or rating.capacity / 2, SLACK * rating.capacity, least)

    def least(self, setting: Setting) -> float:
        best = self.best(setting.kv_cache_dtype)
        return 0.0 if best is None else best.rate * MARGIN

    def best(self, precision: str | None) -> Tried | None:
        """What serves most with such a KV cache, the plainest of what serves about as much."""
        return plainest(
            [done for done in self.tried.values() if done.setting.kv_cache_dtype == precision and done.rate]
        )


PRECISIONS: Final = (None, "fp8")
FULL: Final = 0.9  # of the pool in use at its peak, from which on its size may matter


def plainest(tried: Sequence[Tried]) -> Tried | None:
    """The one with the fewest flags of those that serve about as much as the most."""
    highest = max((done.rate for done in tried), default=0.0)
    near = [done for done in tried if done.rate * MARGIN >= highest]
    return min(near, key=lambda done: (len(done.setting.changes), -done.rate), default=None)


def first_list(ratings: Mapping[Setting, Rated], usual: Setting | None) -> list[Setting]:
    """The best split or splits of each precision by the closed form, each with the flags it rates highest."""
    settings = [usual] if usual is not None else []
    for precision in PRECISIONS:
        best: dict[int, Rated] = {}
        for rating in ratings.values():
            if rating.setting.kv_cache_dtype == precision and rating.rate:
                tp = rating.setting.tensor_parallel_size
                if tp not in best or is_better(rating, best[tp]):
                    best[tp] = rating
        ranked = sorted(best.values(), key=lambda rating: -rating.rate)[:MOST_SPLITS]
        for rating in ranked:
            if rating.rate >= NEAR * ranked[0].rate:
                settings += [rating.setting, plain(rating.setting)]
    return settings


def plain(setting: Setting) -> Setting:
    """The same split and precision with the flags that the server takes by itself."""
    return Setting(setting.tensor_parallel_size, setting.replicas, setting.kv_cache_dtype)


def is_better(rating: Rated, other: Rated) -> bool:
    """More by more than MARGIN, or fewer flags at about as much."""
    if rating.rate > other.rate * MARGIN or other.rate > rating.rate * MARGIN:
        return rating.rate > other.rate
    return (len(rating.setting.changes), -rating.rate) < (len(other.setting.changes), -other.rate)


def near_best(where: Space, search: Search) -> Iterator[Setting]:
    """Settings one flag away from the best of each precision, where the flag can change anything."""
    for precision in PRECISIONS:
        best = search.best(precision)
        if best is not None and best.run is not None:
            least = PROMISING * search.ratings[best.setting].rate
            for setting in where.near(best.setting):
                rating = search.ratings.get(setting)
                if rating is not None and rating.rate >= least and matters(best.setting, setting, best.run.result):
                    yield setting


def matters(best: Setting, other: Setting, figures: Result) -> bool:
    """Not a larger pool where the pool was never full, nor a limit of sequences that were never as many."""
    if other.gpu_memory_utilization != best.gpu_memory_utilization or other.block_size != best.block_size:
        return figures.kv_usage_peak >= FULL or figures.preemptions > 0
    if other.max_num_seqs != best.max_num_seqs:
        return min(other.max_num_seqs or inf, best.max_num_seqs or inf) <= figures.running_peak
    return True


def answer_of(search: Search, num_settings: int, refused: tuple[Refused, ...], usual: Setting | None) -> Tuned:
    simulated = [done for done in search.tried.values() if done.run is not None]
    best = search.best(None)
    narrow = search.best("fp8")
    if narrow is not None and (best is None or narrow.rate >= WORTH_FP8 * best.rate):
        best = narrow
    if best is None:
        return Tuned(num_settings, len(search.tried), refused, (), None, None)
    bare = search.tried.get(usual) if usual is not None and usual != best.setting else None
    ends = with_ends(search, [best, *([] if bare is None or not bare.rate else [bare])])
    front = front_of(simulated)
    choices = [
        Choice(done, search.ratings[done.setting], ends.get(done.setting), is_best=done in front)
        for done in sorted(simulated, key=lambda done: (done is not best, -done.rate))
    ]
    return Tuned(
        num_settings,
        len(search.tried),
        refused,
        tuple(choices),
        choices[0],
        next((choice for choice in choices if choice.tried.setting == usual), None),
    )


def with_ends(search: Search, answers: Sequence[Tried]) -> dict[Setting, tuple[float, float]]:
    """Low and high of what a setting serves: on a server that is slower, and faster, than likely."""
    tasks = [
        Task(done.setting, done.rate * part, SLACK * search.ratings[done.setting].capacity, 0.0, end)
        for done in answers
        for end, part in ENDS.items()
    ]
    rates = [done.rate for done in search.run(tasks)]
    return {done.setting: (rates[2 * place], rates[2 * place + 1]) for place, done in enumerate(answers)}


# Where the search of an end begins, as a part of the likely rate: a guess that saves runs.
ENDS: Final[Mapping[Literal["low", "high"], float]] = {"low": 0.6, "high": 1.6}


def front_of(simulated: Sequence[Tried]) -> list[Tried]:
    """Those that no other one beats: as many requests, in no longer times, at no less precision."""
    return [done for done in simulated if not any(beats(other, done) for other in simulated)]


def beats(answer: Tried, other: Tried) -> bool:
    mine, theirs = respects(answer), respects(other)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def respects(answer: Tried) -> tuple[float, ...]:
    assert answer.run is not None
    times = (inf if target.value is None else target.value for target in answer.run.targets)
    return (-answer.rate, float(answer.setting.kv_cache_dtype is not None), *times)


def refuse_unless_some(tuned: Tuned) -> None:
    """Nothing can be started: the reason of the first setting."""
    if len(tuned.refused) == tuned.num_settings:
        raise UsageError("tune", tuned.refused[0].reason, "see what would fit with `kvplan recommend`")
