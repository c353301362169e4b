"""Search for the flags with the highest throughput on given GPUs under latency targets.

Every setting of a grid is planned and rated in closed form. The simulator then finds the largest load of a short list:
the best of each split and precision and the server's defaults, then settings one step away from the best. A setting
with more flags is preferred only if it serves more by MARGIN. If a rate is given, the defaults win if even the low end
of their range reaches it; a less precise KV cache wins only if nothing else does.
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
PRECISION: Final = 0.03  # relative precision of a searched rate
WORTH_FP8: Final = 1.05  # how much more a less precise KV cache must serve to be chosen
NEAR: Final = 0.8  # simulate splits rated at least this share of the best rating
MOST_SPLITS: Final = 3  # most splits to simulate per precision
PROMISING: Final = 0.75  # simulate neighbors rated at least this share of the best's rating
WORTH_PROCESSES: Final = 1000  # fewest settings for which rating in several processes pays off
ROUNDS: Final = 3  # rounds of simulating the best's neighbors


# --- the simulator ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """One server's figures and targets at its share of a load."""

    result: Result
    targets: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A setting to simulate.

    start    first rate of the search, in requests per second of all servers
    highest  rate above which requests only wait
    least    rate that it must reach to be searched further
    end      end of the throughput range: "low" assumes a server slower than likely
    """

    setting: Setting
    start: float
    highest: float
    least: float = 0.0
    end: Literal["low", "likely", "high"] = "likely"


@dataclass(frozen=True, slots=True)
class Tried:
    """Highest rate of all servers of a setting within the targets; 0 without a run: none, or less than `least`.

    is_limit  False if no higher rate was tried: the rate is where the search ends, not a limit of the server
    """

    setting: Setting
    rate: float
    run: Run | None
    least: float = 0.0
    is_limit: bool = True


def tried(shared: tuple[Request, Demand], task: Task) -> Tried:
    base, demand = shared
    the_plan = plan(task.setting.request(base))
    server = Server(the_plan, demand, task.setting, task.end)
    if demand.how != "rate":
        run = server.run(None)
        rate = 0.0 if run is None else run.result.requests_per_s * server.replicas
        return Tried(task.setting, rate, run, task.least)
    return replace(server.search(task), setting=task.setting, least=task.least)


class Server:
    """One of a setting's servers, each with an equal share of the load."""

    def __init__(self, the_plan: Plan, demand: Demand, setting: Setting, end: Literal["low", "likely", "high"]) -> None:
        self.demand = demand
        self.replicas = setting.replicas * the_plan.request.args.data_parallel_size  # each rank has its own scheduler
        self.spans, tiers = demand.ranges(the_plan), demand.tiers(setting)
        times, factors = demand.times(the_plan), dict.fromkeys(self.spans.times, 1.0)
        if end != "likely":
            factors = {name: span[end == "low"] for name, span in self.spans.times.items()}
            times = Scaled(times, factors["tpot"])
        self.factor = factors["tpot"]
        self.limits = tuple(limited(promise, factors) for promise in demand.promises)
        self.setup = Setup(the_plan, times, tiers)

    def run(self, rate: float | None) -> Run | None:
        """Simulate the server at its share; return None if it misses a target or its queue keeps growing."""
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
        """Return (one server's arrivals, number of requests that are not judged, number of requests)."""
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
        """Search up or down from `start` for the largest rate within the targets; 0 if `least` misses them."""
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
        if best is None:
            return Tried(task.setting, 0.0, None)
        return Tried(task.setting, *best, is_limit=high < inf)

    def outcomes(self, rate: float | None) -> tuple[Kept, ...]:
        """Simulate the server at its share to the end, whether or not it meets the targets."""
        arrivals, skipped, _ = self.arrivals(rate)
        simulation = self.setup.run(arrivals, self.demand.run_len)
        simulation.run()
        return slo.outcomes(self.demand.promises, simulation, skipped, self.spans)


STEP: Final = 1.15
SLACK: Final = 1.1  # how much more than the closed form's rate a server may serve
TRIES: Final = 12  # reaches from a start down to a twentieth, or up to five times as much


def limited(promise: Promise, factors: Mapping[str, float]) -> Promise:
    """Return a target with its limit scaled by the TPOT factor over its own metric's factor."""
    if promise.metric is None:
        return promise
    return replace(promise, limit=promise.limit * factors["tpot"] / factors[promise.metric])


def at_once(rows: Sequence[TraceRequest]) -> Iterator[TraceRequest]:
    return (replace(row, arrival_s=0.0) for row in rows)


# --- the search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """A simulated setting, with the low and high rate of its range, or None if they were not simulated.

    is_best   True if Pareto-optimal
    """

    tried: Tried
    rated: Rated
    ends: tuple[float, float] | None = None
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Tuned:
    """Result of a search.

    usual          the server's defaults
    is_light_load  True if too few requests arrive to show a limit of the defaults, which are kept
    nearest        if nothing meets the targets: the simulated setting that comes nearest
    """

    num_settings: int
    num_simulated: int
    refused: tuple[Refused, ...]
    choices: tuple[Choice, ...]
    best: Choice | None
    usual: Choice | None
    is_light_load: bool = False
    nearest: "Nearest | None" = None


@dataclass(frozen=True, slots=True)
class Nearest:
    """A setting that misses the targets, and its outcomes; rate: of all servers, None for users or all at once."""

    setting: Setting
    rate: float | None
    outcomes: tuple[Kept, ...]

    @property
    def excess(self) -> float:
        """The largest ratio of a value to its limit."""
        return max(
            (inf if end.value is None else end.value / end.promise.limit if end.promise.limit else end.value)
            for end in self.outcomes
        )


def tune(base: Request, demand: Demand, where: Space, jobs: Jobs = 1, sought: float | None = None) -> Tuned:
    """Return the setting that serves most, or if `sought` is given the plainest one whose low end reaches that rate.

    The result does not depend on the number of processes.
    """
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
    return answer_of(search, len(settings), refused, usual, sought)


def usual_setting(where: Space, ratings: Mapping[Setting, Rated]) -> Setting | None:
    """Return the server's defaults on the fewest ranks on which it starts, or None if it starts on none."""
    bare = (Setting(tp, replicas) for tp, replicas in where.splits)
    return next((setting for setting in bare if setting in ratings), None)


class Search:
    """Simulated settings and the best among them."""

    def __init__(self, base: Request, demand: Demand, ratings: Mapping[Setting, Rated], jobs: Jobs) -> None:
        self.base, self.demand, self.ratings, self.jobs = base, demand, ratings, jobs
        self.tried: dict[Setting, Tried] = {}

    def simulate(self, settings: Iterable[Setting], *, must_beat: bool = False) -> bool:
        """Simulate the settings that were not simulated yet; return True if a precision has a new best one."""
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
        """Return the plainest of the settings that serve about the most with this KV cache dtype, or None."""
        return plainest(
            [done for done in self.tried.values() if done.setting.kv_cache_dtype == precision and done.rate]
        )


PRECISIONS: Final = (None, "fp8")
FULL: Final = 0.9  # peak pool usage from which on the pool's size may matter


def plainest(tried: Sequence[Tried]) -> Tried | None:
    """Return the setting with the fewest flags among those within MARGIN of the highest rate, or None."""
    highest = max((done.rate for done in tried), default=0.0)
    near = [done for done in tried if done.rate * MARGIN >= highest]
    return min(near, key=lambda done: (len(done.setting.changes), -done.rate), default=None)


def first_list(ratings: Mapping[Setting, Rated], usual: Setting | None) -> list[Setting]:
    """Return the best splits of each precision by the closed form, each with its best and with default flags."""
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
    """Return the same split and precision with the server's default flags."""
    return Setting(setting.tensor_parallel_size, setting.replicas, setting.kv_cache_dtype)


def is_better(rating: Rated, other: Rated) -> bool:
    """True if a rating is higher by more than MARGIN, or about equal with fewer flags."""
    if rating.rate > other.rate * MARGIN or other.rate > rating.rate * MARGIN:
        return rating.rate > other.rate
    return (len(rating.setting.changes), -rating.rate) < (len(other.setting.changes), -other.rate)


def near_best(where: Space, search: Search) -> Iterator[Setting]:
    """Yield settings one flag away from the best of each precision, if the flag can make a difference."""
    for precision in PRECISIONS:
        best = search.best(precision)
        if best is not None and best.run is not None:
            least = PROMISING * search.ratings[best.setting].rate
            for setting in where.near(best.setting):
                rating = search.ratings.get(setting)
                if rating is not None and rating.rate >= least and matters(best.setting, setting, best.run.result):
                    yield setting


def matters(best: Setting, other: Setting, figures: Result) -> bool:
    """Return False for a change of pool size if the pool was never full, or of a sequence limit never reached."""
    pools = ("gpu_memory_utilization", "mem_fraction_static", "block_size")
    if any(getattr(other, name) != getattr(best, name) for name in pools):
        return figures.kv_usage_peak >= FULL or figures.preemptions > 0
    if other.max_num_seqs != best.max_num_seqs:
        return min(other.max_num_seqs or inf, best.max_num_seqs or inf) <= figures.running_peak
    return True


def answer_of(
    search: Search, num_settings: int, refused: tuple[Refused, ...], usual: Setting | None, sought: float | None
) -> Tuned:
    simulated = [done for done in search.tried.values() if done.run is not None]
    precise, narrow = search.best(None), search.best("fp8")
    best = precise
    if narrow is not None and (best is None or narrow.rate >= WORTH_FP8 * best.rate):
        best = narrow
    if best is None:
        return Tuned(num_settings, len(search.tried), refused, (), None, None, nearest=nearest(search))
    bare = search.tried.get(usual) if usual is not None else None
    is_light_load = sought is None and bare is not None and is_too_short(bare, search.demand)
    if bare is not None and is_light_load:
        best = bare
    plainer = [done for done in (bare, precise) if done is not None and done.rate and done is not best]
    if sought is None:
        plainer = [done for done in plainer if done is bare]
    ends = with_ends(search, list({done.setting: done for done in (best, *plainer)}.values()))
    if sought is not None:
        best = next((done for done in plainer if ends[done.setting][0] >= sought), best)
    simulated = distinct(search.base, simulated, best)
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
        is_light_load,
    )


TURNS: Final = 10  # requests of a run per concurrent request: with fewer, it ends before a queue has grown


def is_too_short(answer: Tried, demand: Demand) -> bool:
    """True if the run ended before its requests could show a limit of the server."""
    if demand.how != "rate" or answer.run is None or answer.is_limit:
        return False
    return len(demand.rows) < TURNS * answer.run.result.running_peak


def distinct(base: Request, answers: Sequence[Tried], best: Tried) -> list[Tried]:
    """Return one answer for settings that start the same server: the best, or the one with the fewest flags."""
    by_server: dict[object, Tried] = {}
    for answer in sorted(answers, key=lambda done: (done is not best, len(done.setting.changes))):
        setting, the_plan = answer.setting, plan(answer.setting.request(base))
        split = (setting.tensor_parallel_size, setting.replicas, setting.kv_offloading_size)
        by_server.setdefault((split, the_plan.settings, the_plan.pool, the_plan.capacity.num_blocks), answer)
    kept_answers = list(by_server.values())
    return [answer for answer in answers if answer in kept_answers]


def nearest(search: Search) -> Nearest | None:
    """Return the setting that misses the targets least, of the defaults of each split at hardly any load."""
    demand, rated_settings = search.demand, search.ratings
    splits = [setting for setting in rated_settings if not setting.changes][:MOST_SPLITS]
    misses: list[Nearest] = []
    for setting in splits if demand.promises else ():
        rate = rated_settings[setting].capacity / LIGHT if demand.how == "rate" else None
        server = Server(plan(setting.request(search.base)), demand, setting, "likely")
        misses.append(Nearest(setting, rate, server.outcomes(rate)))
    return min(misses, key=lambda miss: miss.excess, default=None)


LIGHT: Final = 20  # a rate of a twentieth of the capacity: requests hardly meet


def with_ends(search: Search, answers: Sequence[Tried]) -> dict[Setting, tuple[float, float]]:
    """Return each setting's low and high rate: on a server slower and faster than likely."""
    tasks = [
        Task(done.setting, done.rate * part, SLACK * search.ratings[done.setting].capacity, 0.0, end)
        for done in answers
        for end, part in ENDS.items()
    ]
    rates = [done.rate for done in search.run(tasks)]
    return {done.setting: (rates[2 * place], rates[2 * place + 1]) for place, done in enumerate(answers)}


# Start of the search for each end, relative to the likely rate: a guess that saves runs.
ENDS: Final[Mapping[Literal["low", "high"], float]] = {"low": 0.6, "high": 1.6}


def front_of(simulated: Sequence[Tried]) -> list[Tried]:
    """Return the Pareto-optimal settings by rate, latencies and KV cache precision."""
    return [done for done in simulated if not any(beats(other, done) for other in simulated)]


def beats(answer: Tried, other: Tried) -> bool:
    """True if an answer is better in some respect and worse in none, or equal with fewer flags."""
    mine, theirs = respects(answer), respects(other)
    if mine == theirs:
        return len(answer.setting.changes) < len(other.setting.changes)
    return all(a <= b for a, b in zip(mine, theirs, strict=True))


def respects(answer: Tried) -> tuple[float, ...]:
    assert answer.run is not None
    times = (inf if target.value is None else target.value for target in answer.run.targets)
    return (-answer.rate, float(answer.setting.kv_cache_dtype is not None), *times)


def refuse_unless_some(tuned: Tuned) -> None:
    """Raise UsageError with the first setting's reason if no setting can start."""
    if len(tuned.refused) == tuned.num_settings:
        raise UsageError("tune", tuned.refused[0].reason, "see what would fit with `kvplan recommend`")
