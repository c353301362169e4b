"""Operating limits held against simulated days: how early an alert comes, and how often it comes for nothing.

    python -P benchmarks/alerts.py [CASE ...]     # all: about 20 minutes on one core

Every case is a server with a published workload. A day's rate follows a cosine with its peak at 15:00, in parts of the
rate at which the server first falls behind ("edge", by a search in steps of 25 %); on a day with spikes it rises within
five minutes to 1.4 of it for 20 minutes, twice. Metrics are sampled every 15 s, and KVCacheNearlyFull is computed from
them as Prometheus would. A storm is ten preemptions within a minute after 20 quiet minutes. An alert is false if no
request is preempted from a minute before it until 20 minutes after it.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from kvplan.measure.check import policy_at
from kvplan.planning.plan import Plan
from kvplan.policy.limits import Limits, limits_of
from kvplan.policy.targets import planned
from kvplan.report.operations import AHEAD_S, SCRAPE_S
from kvplan.simulate.arrivals import Open, Process, Stages
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.setup import Setup
from kvplan.simulate.source import Source, from_profile
from kvplan.simulate.steptime import step_time
from kvplan.simulate.unshared import Unshared
from kvplan.workloads.profiles import profile

DAY_S: Final = 86_400
STAGE_S: Final = 900.0
MINUTE: Final = 60 // SCRAPE_S  # samples
KEPT: Final = 30 * MINUTE  # keep_firing_for
QUIET: Final = 20 * MINUTE
STORM: Final = 10  # preemptions within a minute
DAYS: Final = {"calm": 0.6, "busy": 0.85, "full": 1.0, "storm": 1.25, "spikes": 0.6}  # peak, in parts of the edge
POLICY: Final = """version: 1
targets:
  - {{id: case, model: {model}, gpu: {gpu}, max_model_len: {context}, workload: {{profile: {profile}}},
     rules: {{fits: true}}}}
"""


@dataclass(frozen=True, slots=True)
class Sample:
    usage: float
    running: int
    waiting: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Server:
    """A planned server, its limits, and the requests that it gets."""

    plan: Plan
    limits: Limits
    profile: str

    def samples(self, stages: Stages, seconds: float, seed: int) -> Iterator[Sample]:
        """What its metrics say every SCRAPE_S."""
        source: Source = from_profile(profile(self.profile), 10**8, seed=seed, shared_prefix=None)
        setup = Setup(self.plan, step_time(self.plan, Shares()))
        run = setup.run(Open(source.timed(stages, Process(), seed)), source.run_len)
        now = 0.0
        while now < seconds:
            now += SCRAPE_S
            run.run(until=now)
            if isinstance(run, Unshared):
                free, running = run._pool.free, run.num_running
            else:
                free, running = run.scheduler.blocks.num_free_blocks, len(run.scheduler.running)
            waiting = run.num_waiting if isinstance(run, Unshared) else run.scheduler.num_waiting
            yield Sample(1 - free / run.num_usable_blocks, running, waiting, run.num_preemptions)

    def edge(self, first: float) -> float:
        """The first rate of those tried that preempts, or leaves 50 requests waiting, within 20 minutes."""
        rate = first
        while True:
            *_, last = self.samples(((rate, 1200.0),), 1200.0, seed=1)
            if last.preemptions or last.waiting > 50:
                return rate
            rate *= 1.25


CASES: Final = {  # model, GPU, context, workload
    "chat": ("llama-3.1-8b", "l40s", "16k", "azure-2023-conv"),
    "reasoning": ("llama-3.1-8b", "a100-80g", "64k", "reasoning"),
    "experts": ("qwen3-30b-a3b", "h100-80g", "32k", "azure-2023-conv"),
    "long": ("llama-3.1-70b-awq", "h200", "128k", "mooncake-conv"),
}


def server(name: str) -> Server:
    model, gpu, context, load = CASES[name]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kvplan.policy.yaml"
        path.write_text(POLICY.format(model=model, gpu=gpu, context=context, profile=load))
        policy = policy_at(path)
        case = planned(policy.targets[0], policy, offline=True)
        limits = limits_of(case)
    assert not isinstance(limits, str), limits
    return Server(case.plan, limits, load)


def stages_of(day: str, edge: float) -> Stages:
    """The rates of a day; with spikes, two of them in the afternoon."""
    peak, stages = DAYS[day], []
    for quarter in range(96):
        wave = 0.5 - 0.5 * math.cos(2 * math.pi * (quarter / 4 - 3) / 24)
        share = 0.3 + (peak - 0.3) * wave if day == "spikes" else 0.15 + (peak - 0.15) * wave
        if day == "spikes" and quarter in (40, 60):
            stages += [(0.8 * edge, 100.0), (1.1 * edge, 100.0), (1.4 * edge, 700.0)]
        elif day == "spikes" and quarter in (41, 61):
            stages += [(1.4 * edge, 300.0), (share * edge, 600.0)]
        else:
            stages.append((share * edge, STAGE_S))
    return tuple(stages)


def nearly_full(samples: Sequence[Sample], level: float) -> list[bool]:
    """KVCacheNearlyFull at each sample."""
    usage = [sample.usage for sample in samples]
    on = []
    for end in range(1, len(usage) + 1):
        minute = usage[max(0, end - MINUTE) : end]
        mean = sum(minute) / len(minute)
        window = usage[max(0, end - 2 * MINUTE) : end]
        on.append(mean > level or (predicted(window) > 1 and mean > level / 2))
    return on


def predicted(window: Sequence[float]) -> float:
    """predict_linear: least squares, AHEAD_S after the last sample."""
    times = [SCRAPE_S * (place - len(window) + 1) for place in range(len(window))]
    middle, mean = sum(times) / len(times), sum(window) / len(window)
    spread = sum((time - middle) ** 2 for time in times)
    if not spread:
        return mean
    slope = sum((time - middle) * (value - mean) for time, value in zip(times, window, strict=True)) / spread
    return mean + slope * (AHEAD_S - middle)


def episodes(on: Sequence[bool]) -> list[tuple[int, int]]:
    """First and last sample of each alert, which is kept for KEPT samples."""
    spans: list[tuple[int, int]] = []
    for place, is_on in enumerate(on):
        if not is_on:
            continue
        if spans and place - spans[-1][1] <= KEPT:
            spans[-1] = spans[-1][0], place
        else:
            spans.append((place, place))
    return [(begin, end + KEPT) for begin, end in spans]


def storms(events: Sequence[int]) -> list[int]:
    """Samples at which a storm begins; events: preemptions since the sample before."""
    begun, last = [], -QUIET - 1
    for place in range(len(events)):
        if sum(events[max(0, place - MINUTE + 1) : place + 1]) >= STORM:
            if place - last > QUIET:
                begun.append(place)
            last = place
    return begun


def row(case: Server, day: str, edge: float) -> str:
    samples = list(case.samples(stages_of(day, edge), DAY_S, seed=2 + list(DAYS).index(day)))
    events = [
        after.preemptions - before.preemptions
        for before, after in pairwise([replace(samples[0], preemptions=0), *samples])
    ]
    assert case.limits.usage is not None
    alerts = episodes(nearly_full(samples, case.limits.usage))
    leads = []
    for storm in storms(events):
        ahead = [SCRAPE_S * (storm - begin) for begin, end in alerts if begin <= storm <= end]
        leads.append(f"{ahead[-1]:,} s" if ahead else "missed")
    false = sum(not any(events[max(0, begin - MINUTE) : end + QUIET]) for begin, end in alerts)
    peak = max(sample.usage for sample in samples)
    return (
        f"{day:7} {peak:6.0%} {sum(events):11,} {len(leads):7} {', '.join(leads) or '-':>24} {len(alerts):7} {false:6}"
    )


def main(names: Sequence[str]) -> None:
    for name in names or CASES:
        case = server(name)
        edge = case.edge(0.05)
        print(f"{name}: {case.limits.title}, {case.profile}; limit {case.limits.usage:.1%}, edge {edge:.2f} requests/s")
        print(
            f"{'day':7} {'peak':>6} {'preemptions':>11} {'storms':>7} {'alert before the storm':>24} {'alerts':>7} "
            f"{'false':>6}"
        )
        for day in DAYS:
            print(row(case, day, edge), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
