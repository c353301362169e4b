"""Simulation of a load generator's run, with the figures that the generator prints."""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass
from kvplan.planning.plan import Plan
from kvplan.simulate.arrivals import Arrivals, Closed, Open
from kvplan.simulate.records import Records, percentile
from kvplan.simulate.setup import Setup
from kvplan.simulate.steptime import StepTime
from kvplan.workloads.trace import TraceRequest

WAVES: Final = 3  # requests per user: the first, which all users send at once, and two more
DRIFT: Final = 0.1  # spread of response lengths that desynchronizes users who started together
MOST: Final = 100_000  # simulated requests of a run: half a minute of processor time


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """The load that a generator sends.

    users, rate  exactly one is set; an infinite rate sends all requests at once
    num_prompts  number of requests that the generator sent
    requests     makes the given number of requests, with arrivals at the rate
    run_len      tokens per prefix id of a request
    """

    users: int | None
    rate: float | None
    num_prompts: int
    requests: Callable[[int], Iterator[TraceRequest]]
    run_len: int | None = None

    @property
    def simulated(self) -> tuple[int, int]:
        """Return (number of simulated requests, size of the first wave if it is left out of the figures, else 0).

        Of users who wait, three waves stand for all later ones; of an open loop every request that was sent is
        simulated: where requests queue, times to the first token grow with their number. Raise UsageError for too many.
        """
        number, skipped, sent = self.num_prompts, 0, f"sent {self.num_prompts:,} requests"
        if self.users is not None:
            users = min(self.users, self.num_prompts)
            waves = min(WAVES, max(1, round(self.num_prompts / users)))
            number, skipped = max(users * waves, min(3, self.num_prompts)), users if waves == WAVES else 0
            sent = f"had {users:,} users at once, {waves} requests of each are simulated"
        if number > MOST:
            raise UsageError("the benchmark", f"{sent}; a simulation takes at most {MOST:,}", "name a shorter run")
        return number, skipped


@dataclass(frozen=True, slots=True)
class Figures:
    """Times in milliseconds by metric and statistic ("ttft_p50"), and output tokens per second of the whole server;
    waits: whether requests wait for others for most of their time to the first token.
    """

    times: Mapping[str, float]
    output_tokens_per_s: float
    waits: bool = False


def steady(
    prompt: float, output: float, rate: float | None, *, is_constant: bool, keeps_step: bool = False
) -> Callable[[int], Iterator[TraceRequest]]:
    """Return a factory of requests of one length, at constant gaps or in a Poisson process.

    Response lengths of closed-loop users vary by DRIFT, as users drift apart over many waves; not with `keeps_step`:
    under prefill-first scheduling all users wait for each other's prefills.
    """

    def requests(number: int) -> Iterator[TraceRequest]:
        rng, spread = random.Random(1), 0.0 if keeps_step or rate is not None else DRIFT
        answers = (max(1, round(output * rng.uniform(1 - spread, 1 + spread))) for _ in range(number))
        return timed(((max(1, round(prompt)), answer) for answer in answers), rate, is_constant=is_constant)

    return requests


def listed(
    lengths: tuple[tuple[int, int], ...], rate: float | None, *, is_constant: bool
) -> Callable[[int], Iterator[TraceRequest]]:
    """Return a factory of requests that cycle through the given (prompt, output) lengths."""

    def requests(number: int) -> Iterator[TraceRequest]:
        return timed((lengths[index % len(lengths)] for index in range(number)), rate, is_constant=is_constant)

    return requests


def timed(lengths: Iterator[tuple[int, int]], rate: float | None, *, is_constant: bool) -> Iterator[TraceRequest]:
    rng, arrival = random.Random(0), 0.0
    for prompt, output in lengths:
        yield TraceRequest(arrival, prompt, output)
        if rate is not None and rate != math.inf:
            arrival += 1 / rate if is_constant else rng.expovariate(rate)


def figures(plan: Plan, step_time: StepTime, load: BenchLoad) -> Figures:
    """Simulate the load and return its figures; raise UsageError if no request is served."""
    number, skipped = load.simulated
    stream = load.requests(number)
    arrivals: Arrivals = Open(stream) if load.users is None else Closed(stream, min(load.users, load.num_prompts))
    simulation = Setup(plan, step_time).run(arrivals, load.run_len)
    simulation.run()
    records = simulation.records
    if not any(position > skipped for position in records.number):
        later = " after the first of each user" if skipped and len(records) else ""
        raise UsageError("simulate", f"no request{later} is served", "raise --ctx, or the memory")
    times: dict[str, float] = {}
    for metric in ("ttft", "tpot", "latency"):
        judged = records.times(metric, skipped)
        if judged:
            times[f"{metric}_mean"] = 1000 * mean_of(records.times(metric), judged, skipped, load.num_prompts)
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
                times[f"{metric}_{name}"] = 1000 * (percentile(judged, share) or 0.0)
    return Figures(times, tokens_per_s(records, times, skipped, simulation.clock), records.waits(skipped))


def mean_of(every: list[float], judged: list[float], skipped: int, num_prompts: int) -> float:
    """Return the mean over all prompts, the first wave weighted by its share of the prompts sent, not simulated."""
    later = sum(judged) / len(judged)
    if not skipped or skipped >= num_prompts or len(every) <= len(judged):
        return later
    first = (sum(every) - sum(judged)) / (len(every) - len(judged))
    share = skipped / num_prompts
    return share * first + (1 - share) * later


def tokens_per_s(records: Records, times: Mapping[str, float], skipped: int, clock: float) -> float:
    """Return output tokens per second: by Little's law if a first wave is skipped (constant concurrency)."""
    if not skipped:
        return sum(records.output) / clock
    judged = [output for number, output in zip(records.number, records.output, strict=True) if number > skipped]
    return skipped * sum(judged) / len(judged) / (times["latency_mean"] / 1000)
