"""The load to tune for, and a setting's throughput in closed form."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, inf
from typing import Final, Literal

from kvplan.core.errors import KvplanError
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import abilities_of
from kvplan.simulate import ranges
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.settings import Setting
from kvplan.simulate.setup import check
from kvplan.simulate.slo import Promise
from kvplan.simulate.steptime import StepTime, attention_kinds, step_time
from kvplan.simulate.tiers import TierSpec
from kvplan.simulate.work import StepWork
from kvplan.workloads.trace import TraceRequest

SAMPLE: Final = 500  # requests whose mean lengths represent the load in the closed form
How = Literal["rate", "users", "at once"]


@dataclass(frozen=True, slots=True)
class Demand:
    """Requests and their arrivals, for all servers together.

    rows       requests in order, with arrivals at one request per second
    how        "rate": the largest rate is searched; "users": closed loop of `users`; "at once": all at time 0
    users      with think_s and ramp_s, for "users"; first_counts: whether each user's first request is judged
    tier       host memory that a setting may use to offload KV
    run_len    tokens per prefix id of a request
    """

    rows: tuple[TraceRequest, ...]
    how: How
    promises: tuple[Promise, ...]
    users: int = 0
    think_s: float = 0.0
    ramp_s: float = 0.0
    first_counts: bool = True
    run_len: int | None = None
    tier: TierSpec | None = None
    calibration: str | None = None

    def tiers(self, setting: Setting) -> tuple[TierSpec, ...]:
        return () if self.tier is None or setting.kv_offloading_size is None else (self.tier,)

    def times(self, the_plan: Plan) -> StepTime:
        return step_time(the_plan, Shares(), self.calibration)

    def ranges(self, the_plan: Plan) -> ranges.Ranges:
        return ranges.modeled(the_plan) if self.calibration is None else ranges.calibrated()


# --- the closed form --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Means:
    """Mean tokens per request; computed: prompt tokens not found in the prefix cache."""

    prompt: float
    output: float
    computed: float


def means_of(rows: Sequence[TraceRequest], run_len: int | None) -> Means:
    """Return the means of the first requests; a prefix seen before counts as cached."""
    sample = list(islice(rows, SAMPLE))
    prompt = sum(row.prompt_tokens for row in sample) / len(sample)
    output = sum(row.output_tokens for row in sample) / len(sample)
    seen: set[tuple[int, ...]] = set()
    cached = 0
    for row in sample:
        known = max((n for n in range(1, len(row.prefix_ids) + 1) if row.prefix_ids[:n] in seen), default=0)
        cached += min(known * (run_len or 0), row.prompt_tokens - 1)
        seen.update(row.prefix_ids[:n] for n in range(1, len(row.prefix_ids) + 1))
    return Means(prompt, output, prompt - cached / len(sample))


@dataclass(frozen=True, slots=True)
class Rated:
    """A setting rated in closed form: requests/s of all servers, sequences decoding on one server, seconds per token.

    capacity  requests per second regardless of the targets: any more only wait
    """

    setting: Setting
    rate: float
    running: float
    tpot: float
    capacity: float = 0.0


@dataclass(frozen=True, slots=True)
class Refused:
    """An impossible setting, with the reason."""

    setting: Setting
    reason: str


def rated(shared: tuple[Request, Demand, Means], setting: Setting) -> Rated | Refused:
    """Plan and rate one setting; the rate is 0 if it misses a target however few requests arrive."""
    base, demand, means = shared
    try:
        the_plan = plan(setting.request(base))
        check(the_plan, demand.tiers(setting), ranks=True)
        times = demand.times(the_plan)
    except KvplanError as error:
        return Refused(setting, error.problem)
    return steady(setting, the_plan, times, demand, means)


def steady(setting: Setting, the_plan: Plan, times: StepTime, demand: Demand, means: Means) -> Rated:
    """Rate a setting by steps in which a constant number of requests decode, some with a prefill chunk in addition.

    For users, or all at once, that number is the highest possible; for a rate, the one with the highest rate within
    the targets.
    """
    settings, replicas = the_plan.settings, setting.replicas * the_plan.request.args.data_parallel_size
    blocks = the_plan.pool.allocated_blocks(max(1, round(means.prompt + means.output / 2)))
    highest = max(1.0, min(settings.max_num_seqs, the_plan.capacity.num_blocks / max(1, blocks)))
    computed = means.computed if settings.prefix_caching else means.prompt
    limits = {
        name: min((promise.limit for promise in demand.promises if promise.metric == name), default=inf)
        for name in LIMITED
    }
    best = Rated(setting, 0.0, 0.0, inf)
    if demand.how == "users":
        highest = min(highest, max(1.0, demand.users / replicas))
    if not is_prompts_first(the_plan):
        # Prefill and decode share a step's token budget: no more than this decode while prompts always wait.
        highest = max(1.0, min(highest, settings.max_num_batched_tokens / (1 + computed / max(1.0, means.output))))
    capacity, is_within = 0.0, True
    for count in (highest,) if demand.how != "rate" else up_to(highest):
        mean = step(the_plan, times, means, count, computed)
        rate = replicas * min(count / (max(1.0, means.output) * mean.tpot), most_taken_in(times, means))
        capacity = max(capacity, rate)
        is_within = is_within and mean.tpot <= limits["tpot"]
        is_within = is_within and (demand.how != "rate" or mean.first <= limits["ttft"])
        if is_within and rate > best.rate:
            best = Rated(setting, rate, count, mean.tpot)
    return replace(best, capacity=capacity)


LIMITED: Final = ("tpot", "ttft")


def up_to(highest: float) -> Iterator[float]:
    count = 1.0
    while count < highest:
        yield count
        count = count * 1.1 if count >= 10 else count + 1
    yield highest


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Seconds per output token, and to the first token without queueing."""

    tpot: float
    first: float


def step(the_plan: Plan, times: StepTime, means: Means, count: float, computed: float) -> TokenTimes:
    """Return the mean step times while `count` requests decode."""
    if is_prompts_first(the_plan):
        return alternating(the_plan, times, means, count, computed)
    room = max(1.0, the_plan.settings.max_num_batched_tokens - count)
    per_step = computed * count / max(1.0, means.output)  # prompt tokens per decode step
    chunks = ceil(computed / room)
    share = min(1.0, chunks * count / max(1.0, means.output))  # fraction of steps with a prefill chunk
    mixed = times.seconds(work(the_plan, means, count, max(computed / chunks, per_step), computed))
    plain = times.seconds(work(the_plan, means, count, 0.0, computed)) if share < 1.0 else 0.0
    first = chunks * mixed + taken_in(times, means) + delay(times)
    return TokenTimes(share * mixed + (1 - share) * plain, first)


def taken_in(times: StepTime, means: Means) -> float:
    """Seconds of the front end for a request, without its delay."""
    return 0.0 if times.host is None else times.host.request + times.host.prompt_token * means.prompt


def delay(times: StepTime) -> float:
    return 0.0 if times.host is None else times.host.delay


def most_taken_in(times: StepTime, means: Means) -> float:
    """Requests per second that the front end takes in."""
    seconds = taken_in(times, means)
    return 1 / seconds if seconds else inf


def is_prompts_first(the_plan: Plan) -> bool:
    return abilities_of(the_plan.request.release.engine).prompts_first is not None


def alternating(the_plan: Plan, times: StepTime, means: Means, count: float, computed: float) -> TokenTimes:
    """Return the mean step times if prefill has full steps of its own, in which no request decodes."""
    chunk = float(the_plan.settings.max_num_batched_tokens)
    prefill = times.seconds(work(the_plan, means, 0.0, chunk, computed))
    per_step = computed * count / max(1.0, means.output)  # prompt tokens per decode step
    plain = times.seconds(work(the_plan, means, count, 0.0, computed))
    first = max(1.0, computed / chunk) * times.seconds(work(the_plan, means, 0.0, min(chunk, computed), computed))
    first += taken_in(times, means) + delay(times)
    return TokenTimes(plain + prefill * per_step / chunk, first)


def work(the_plan: Plan, means: Means, count: float, prompt: float, computed: float) -> StepWork:
    kinds = attention_kinds(the_plan)
    context, half = max(1, round(means.prompt + means.output / 2)), max(1, round(means.prompt - computed / 2))
    read = tuple(round(count * kind.reach.read(context)) for kind in kinds)
    own = tuple(round(prompt * kind.reach.read(half)) for kind in kinds)
    pairs = tuple(a + b for a, b in zip(read, own, strict=True))
    number, new, prompts = max(1, round(count)) if count else 0, round(prompt), int(prompt > 0)
    return StepWork(number + new, number, number + prompts, read, pairs, prompts, new, own)
