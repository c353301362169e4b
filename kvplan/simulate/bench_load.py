"""A load generator's load, simulated, with the figures that the generator prints."""

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

WAVES: Final = 3  # of users: the first, where all send at once, and two in which they follow one another
DRIFT: Final = 0.1  # share of an answer by which users of one length come apart, who all began together
MOST_BY_CLOCK: Final = 1500  # requests simulated of a load by the clock


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """What is sent.

    users, rate  one of them; a rate of infinity is all requests at once
    num_prompts  that the generator sent
    requests     so many of them, with arrivals at the rate
    run_len      tokens that one prefix id of a request stands for
    """

    users: int | None
    rate: float | None
    num_prompts: int
    requests: Callable[[int], Iterator[TraceRequest]]
    run_len: int | None = None

    def simulated(self, max_num_seqs: int) -> tuple[int, int]:
        """(requests that are simulated, the first wave of them, which is not judged where it was a small part)."""
        if self.users is not None:
            users = min(self.users, self.num_prompts)
            waves = min(WAVES, max(1, round(self.num_prompts / users)))
            return max(users * waves, min(3, self.num_prompts)), users if waves == WAVES else 0
        if self.rate == math.inf:  # more than so many only make it longer
            at_once = min(self.num_prompts, max_num_seqs)
            return min(self.num_prompts, WAVES * at_once), 0
        return min(self.num_prompts, MOST_BY_CLOCK), 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds by metric and statistic ("ttft_p50"), and output tokens per second of the whole server."""

    times: Mapping[str, float]
    output_tokens_per_s: float


def steady(
    prompt: float, output: float, rate: float | None, *, is_constant: bool
) -> Callable[[int], Iterator[TraceRequest]]:
    """Requests of one length, evenly or in a Poisson process; answers to users drift apart, as over many waves."""

    def requests(number: int) -> Iterator[TraceRequest]:
        rng, spread = random.Random(1), DRIFT if rate is None else 0.0
        answers = (max(1, round(output * rng.uniform(1 - spread, 1 + spread))) for _ in range(number))
        return timed(((max(1, round(prompt)), answer) for answer in answers), rate, is_constant=is_constant)

    return requests


def listed(
    lengths: tuple[tuple[int, int], ...], rate: float | None, *, is_constant: bool
) -> Callable[[int], Iterator[TraceRequest]]:
    """Requests of the stated lengths, over and over."""

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
    """The run's figures; UsageError where nothing of it is served."""
    number, skipped = load.simulated(plan.settings.max_num_seqs)
    stream = load.requests(number)
    arrivals: Arrivals = Open(stream) if load.users is None else Closed(stream, min(load.users, load.num_prompts))
    simulation = Setup(plan, step_time).run(arrivals, load.run_len)
    simulation.run()
    records = simulation.records
    if not len(records):
        raise UsageError("simulate", "no request is served", "raise --ctx, or the memory")
    times: dict[str, float] = {}
    for metric in ("ttft", "tpot", "latency"):
        judged = records.times(metric, skipped)
        if judged:
            times[f"{metric}_mean"] = 1000 * mean_of(records.times(metric), judged, skipped, load.num_prompts)
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
                times[f"{metric}_{name}"] = 1000 * (percentile(judged, share) or 0.0)
    return Figures(times, tokens_per_s(records, times, skipped, simulation.clock))


def mean_of(every: list[float], judged: list[float], skipped: int, num_prompts: int) -> float:
    """The mean over all prompts: the first wave counts as often as it was sent, not as often as it was simulated."""
    later = sum(judged) / len(judged)
    if not skipped or skipped >= num_prompts or len(every) <= len(judged):
        return later
    first = (sum(every) - sum(judged)) / (len(every) - len(judged))
    share = skipped / num_prompts
    return share * first + (1 - share) * later


def tokens_per_s(records: Records, times: Mapping[str, float], skipped: int, clock: float) -> float:
    """Where users follow one another, by Little's law: so many are inside all the time."""
    if not skipped:
        return sum(records.output) / clock
    judged = [output for number, output in zip(records.number, records.output, strict=True) if number > skipped]
    return skipped * sum(judged) / len(judged) / (times["latency_mean"] / 1000)
