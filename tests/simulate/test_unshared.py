"""Requests that share nothing: run by what changes, they take the steps of the engine's own scheduler."""

from dataclasses import dataclass, fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.block_manager import FullGroup, Group
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.arrivals import Arrivals, Closed, Open
from kvplan.simulate.host import Host, Intake
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.loop import Simulation
from kvplan.simulate.records import Records
from kvplan.simulate.scheduling import SimulatedConfig
from kvplan.simulate.setup import Setup
from kvplan.simulate.source import from_profile
from kvplan.simulate.steptime import StepTime, step_time
from kvplan.simulate.tiers import TierSpec
from kvplan.simulate.unshared import Unshared
from kvplan.simulate.work import Reach
from kvplan.workloads.profiles import profile
from kvplan.workloads.trace import TraceRequest
from tests.support.step_times import Constant, Odd

REACHES = (Reach(None),)
ODD = Odd()


@dataclass(frozen=True, slots=True)
class Case:
    """All that a run is made of."""

    config: SimulatedConfig
    num_blocks: int
    groups: tuple[Group, ...]
    step_time: StepTime
    requests: tuple[TraceRequest, ...]
    users: int = 0  # 0: they come by the clock
    think_s: float = 0.0
    host: Host | None = None  # None: no front end

    def arrivals(self) -> Arrivals:
        requests = iter(self.requests)
        arrivals = Closed(requests, self.users, self.think_s) if self.users else Open(requests)
        return arrivals if self.host is None else Intake(arrivals, self.host)

    def by_scheduler(self) -> Simulation:
        return Simulation(
            self.config, self.num_blocks, self.groups, REACHES, self.step_time, self.arrivals(), jump=False
        )

    def by_change(self) -> Unshared:
        return Unshared(self.config, self.num_blocks, self.groups, self.step_time, self.arrivals())


def outcome(run: Simulation | Unshared) -> dict[str, Any]:
    """All that a reader of a run sees, to the last bit."""
    line = run.timeline
    return {
        "clock": run.clock,
        "records": {field.name: list(getattr(run.records, field.name)) for field in fields(Records)},
        "counts": {
            field.name: getattr(run.counts, field.name) for field in fields(run.counts) if field.name != "jumped"
        },
        "prefix cache": str(run.prefix_cache_stats),
        "preemptions": run.num_preemptions,
        "timeline": (
            line.width_s,
            [(bucket.seconds, bucket.sums, bucket.peaks, bucket.tokens) for bucket in line.buckets],
        ),
    }


def difference(case: Case, *, pieces: tuple[float, ...] = ()) -> str | None:
    mine, theirs = case.by_change(), case.by_scheduler()
    for until in pieces:
        mine.run(until)
    mine.run()
    theirs.run()
    for (name, value), expected in zip(outcome(mine).items(), outcome(theirs).values(), strict=True):
        if value != expected:
            return f"{name}: {value}, by the scheduler {expected}"
    return None


@st.composite
def requests(draw: st.DrawFn) -> tuple[TraceRequest, ...]:
    arrival_s, drawn = 0.0, []
    for _ in range(draw(st.integers(1, 16))):
        arrival_s += draw(st.sampled_from((0.0, 0.0, 0.02, 0.25, 1.0, 3.0, 40.0)))
        drawn.append(TraceRequest(arrival_s, draw(st.integers(1, 40)), draw(st.integers(1, 50))))
    return tuple(drawn)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_seqs = draw(st.integers(1, 6))
    config = SimulatedConfig(
        max_num_batched_tokens=draw(st.sampled_from((num_seqs, num_seqs + 1, 8, 16, 64))),
        max_num_seqs=num_seqs,
        max_model_len=draw(st.integers(8, 64)),
        enable_prefix_caching=draw(st.booleans()),
        watermark=draw(st.sampled_from((0.0, 0.0, 0.1))),
        batch_queue_depth=draw(st.sampled_from((1, 2))),
    )
    step_times: tuple[StepTime, ...] = (Constant(1.0), Constant(0.1), ODD)
    return Case(
        config, draw(st.integers(2, 60)), (FullGroup(draw(st.sampled_from((1, 2, 4, 8)))),),
        draw(st.sampled_from(step_times)), draw(requests()),
        users=draw(st.sampled_from((0, 0, 1, 3, 5))), think_s=draw(st.sampled_from((0.0, 0.3, 30.0))),
        host=draw(st.sampled_from((None, Host(request=0.3, prompt_token=0.001)))),
    )  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(cases())
def test_a_run_by_changes_is_the_schedulers(case: Case) -> None:
    assert difference(case) is None


@pytest.mark.full
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(cases(), st.lists(st.floats(0.0, 60.0), max_size=6).map(sorted))
def test_a_run_in_pieces_is_the_run(case: Case, pieces: list[float]) -> None:
    assert difference(case, pieces=tuple(pieces)) is None


@pytest.mark.parametrize(
    ("model", "gpu_name", "args", "rate"),
    [
        ("llama-3.1-8b", "l40s", {"num_gpu_blocks_override": 1_500}, 6.0),  # preempts
        ("llama-3.1-8b", "h100-80g", {"async_scheduling": False, "max_num_seqs": 8}, 9.0),  # waits
        ("mixtral-8x7b", "h200", {"enable_prefix_caching": False}, 3.0),
        ("llama-3.1-8b", "a100-80g", {}, 0.3),  # alone, most of the time
    ],
)
def test_real_models_run_by_changes_as_by_the_scheduler(
    model: str, gpu_name: str, args: dict[str, Any], rate: float
) -> None:
    the_plan = plan(Request(catalog.load(model), gpu(gpu_name), EngineArgs(max_model_len=16_384, **args)))
    setup, source = (
        Setup(the_plan, step_time(the_plan, Shares())),
        from_profile(profile("azure-2023-conv"), 150, 0, None),
    )
    mine = setup.run(source.open(rate), source.run_len)
    assert isinstance(mine, Unshared)
    theirs = setup.simulation(source.open(rate), source.run_len)
    theirs.jump = False
    mine.run()
    theirs.run()
    assert outcome(mine) == outcome(theirs)
    assert mine.counts.jumped > 0


def test_what_may_be_shared_is_run_over_the_scheduler() -> None:
    """A prefix, windows and tiers are the block manager's to decide."""

    def is_by_change(model: str, run_len: int | None, tiers: tuple[TierSpec, ...] = ()) -> bool:
        the_plan = plan(Request(catalog.load(model), gpu("h100-80g"), EngineArgs(max_model_len=16_384)))
        run = Setup(the_plan, step_time(the_plan, Shares()), tiers).run(Open(iter(())), run_len)
        return isinstance(run, Unshared)

    assert is_by_change("llama-3.1-8b", None)
    assert not is_by_change("llama-3.1-8b", 512)
    assert not is_by_change("gpt-oss-20b", None)
    assert not is_by_change("llama-3.1-8b", None, (TierSpec("cpu", 10**9, 10**9),))


@pytest.mark.parametrize(
    ("model", "args", "rate"),
    [
        ("gpt-oss-20b", {}, 6.0),
        ("gpt-oss-20b", {"async_scheduling": False, "max_num_seqs": 8}, 9.0),  # waits
        ("gemma-3-4b", {}, 3.0),
        ("llama-4-scout", {"tensor_parallel_size": 4}, 2.0),  # chunks
    ],
)
def test_windows_whose_blocks_are_not_followed_run_the_same_steps(model: str, args: dict[str, Any], rate: float) -> None:
    """Requests that share no prefix find nothing in the cache, as long as none comes back from a preemption."""
    the_plan = plan(Request(catalog.load(model), gpu("h100-80g"), EngineArgs(max_model_len=16_384, **args)))
    setup, source = (
        Setup(the_plan, step_time(the_plan, Shares())),
        from_profile(profile("azure-2023-conv"), 150, 0, None),
    )
    mine, theirs = (setup.run(source.open(rate), None, caches=caches) for caches in (False, True))
    mine.run()
    theirs.run()
    assert not mine.config.enable_prefix_caching
    assert theirs.config.enable_prefix_caching
    assert mine.num_preemptions == 0
    seen, expected = outcome(mine), outcome(theirs)
    del seen["prefix cache"], expected["prefix cache"]
    assert seen == expected
