"""How decode graphs are made, with a recorder in place of the GPU's: what replaying them gives is tested elsewhere."""

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import cuda_graphs
from engine.batch import BatchArrays
from engine.cuda_graphs import DecodeGraphs
from engine.kernels.work_list import SplitPlanner
from engine.staging import UploadRing
from engine.step import StepTensors
from tests.support.small_engines import engine_for

HIDDEN, MAX_BLOCKS = 8, 5
LOADED, RECORDED, TENSORS = 1000, 7, 5  # bytes: a library's kernels at its first run of a size, a graph, its tensors


class Device:
    """What was run and recorded, and what that left free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.free = 10**6
        self.collects: list[bool] = []
        self.fails_at: int | None = None
        monkeypatch.setattr(cuda_graphs, "capture", self.capture)
        monkeypatch.setattr(cuda_graphs, "device_memory", lambda device: (self.free, 10**6))
        monkeypatch.setattr(cuda_graphs, "reserved", lambda device: TENSORS * len(self.collects))

    def forward(self, step: StepTensors) -> torch.Tensor:
        size = len(step.token_ids)
        if f"run {size}" not in self.events:
            self.free -= LOADED
        self.events.append(f"run {size}")
        return torch.ones(size, HIDDEN)

    def capture(self, run: Callable[[], None], pool: object) -> Callable[[], None]:
        self.collects.append(gc.isenabled())
        run()
        self.events[-1] = self.events[-1].replace("run", "record")
        self.free -= RECORDED
        if len(self.collects) == self.fails_at:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return run

    def graphs(self, planners: tuple[SplitPlanner, ...] = ()) -> DecodeGraphs:
        uploads = UploadRing(torch.device("cpu"))
        groups = len(planners) or 1
        return DecodeGraphs(self.forward, (1, 2, 4), groups, MAX_BLOCKS, torch.zeros(4, HIDDEN), uploads, planners)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What other tests left is looked through once, not at each recording: in a long run that took a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_every_size_has_run_before_the_first_is_recorded(device: Device) -> None:
    device.graphs()
    assert device.events == ["run 4", "run 2", "run 1", "record 4", "record 2", "record 1"]


def test_kernels_that_a_first_run_loads_are_no_graphs(device: Device) -> None:
    assert device.graphs().num_bytes == {4: RECORDED, 2: RECORDED, 1: RECORDED}


def test_the_report_has_what_was_recorded_and_the_tensors_that_graphs_share(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "SIZES", (1, 2, 4))
    runner = engine_for("llama", max_num_seqs=4, block_size=4, max_model_len=20).runner
    monkeypatch.setattr(runner, "_hidden", lambda step: device.forward(step)[:, :1])
    runner._capture_graphs()
    # Of 4 rows: three times 8 bytes (token, position, last token), 4 (length), 8 (slot), five blocks, the hidden state.
    shared = 4 * (3 * 8 + 4 + 8 + 5 * 4 + 4 * runner.spec.hidden_size) + 4  # and where prefills would begin
    assert runner.memory.cuda_graphs == shared + 3 * RECORDED
    assert runner.memory.graph_tensors == shared + 3 * TENSORS


def test_a_work_list_is_shared_too(device: Device) -> None:
    planner = SplitPlanner(heads=2, num_programs=8, block_n=16)
    rows = planner.capacity(4).num_rows
    assert device.graphs((planner,)).shared_bytes - device.graphs().shared_bytes == 16 * rows


def test_nothing_is_collected_while_graphs_are_recorded(device: Device) -> None:
    device.graphs()
    assert device.collects == [False, False, False]
    assert gc.isenabled()


def test_a_recording_that_fails_leaves_collection_on(device: Device) -> None:
    device.fails_at = 2
    with pytest.raises(RuntimeError, match="stream is capturing"):
        device.graphs()
    assert gc.isenabled()


def test_collection_that_was_off_stays_off(device: Device) -> None:
    gc.disable()
    try:
        device.graphs()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_garbage_already_is_collected_first(device: Device) -> None:
    class Cycle:
        pass

    freed: list[str] = []
    cycle: Any = Cycle()
    cycle.itself = cycle
    cycle.end = Farewell(freed, device.events)
    del cycle
    gc.disable()  # so that nobody else collects it
    try:
        device.graphs()
    finally:
        gc.enable()
    assert freed == ["run 1"]  # after the last run, before the first recording


class Farewell:
    """Notes the last event when it is freed."""

    def __init__(self, freed: list[str], events: list[str]) -> None:
        self.freed, self.events = freed, events

    def __del__(self) -> None:
        self.freed.append(self.events[-1])


class Operators(TorchDispatchMode):
    """The operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def test_a_replayed_step_makes_nothing_that_never_changes(device: Device) -> None:
    graphs = device.graphs()
    with Operators() as seen:
        step = graphs._step(2)
    assert seen.counts.keys() <= {"aten.slice", "aten.view", "aten.detach"}  # a kernel would run again at every replay
    assert (step.last_tokens.tolist(), step.query_start.tolist()) == ([0, 1], [0])


def decodes(*lens: int, num_groups: int = 2) -> BatchArrays:
    """A step of these contexts, in blocks of 4 tokens."""
    context_lens = np.array(lens, np.int32)
    tables = 1 + np.arange(len(lens) * 3, dtype=np.int32).reshape(-1, 3)
    positions = context_lens.astype(np.int64) - 1
    return BatchArrays(
        seqs=[], num_decodes=len(lens), token_ids=100 + positions, positions=positions, context_lens=context_lens,
        query_start=np.zeros(1, np.int32), last_tokens=np.arange(len(lens)),
        block_tables=tuple(tables + 50 * g for g in range(num_groups)),
        slot_mapping=tuple(10 * positions + g for g in range(num_groups)),
    )  # fmt: skip


def test_a_step_is_what_the_graph_of_its_size_reads_whatever_ran_before(device: Device) -> None:
    planner = SplitPlanner(heads=2, num_programs=8, block_n=16)
    graphs = device.graphs((planner, planner))
    for lens in ((9, 12, 3, 5), (7, 2, 11), (10,)):
        size = {4: 4, 3: 4, 1: 1}[len(lens)]
        arrays, missing = decodes(*lens), size - len(lens)
        with Operators() as seen:
            assert graphs(arrays) is not None
        assert seen.counts["aten.copy_"] == 3 + 1  # all numbers at once, two tables; what the run leaves
        step = graphs._step(size)
        assert step.token_ids.tolist() == [99 + n for n in lens] + [0] * missing
        assert step.positions.tolist() == [n - 1 for n in lens] + [0] * missing
        assert step.context_lens.tolist() == [*lens] + [0] * missing
        for g, group in enumerate(step.groups):
            assert group.slot_mapping.tolist() == [10 * (n - 1) + g for n in lens] + [-1] * missing
            assert group.block_tables[: len(lens), :3].tolist() == arrays.block_tables[g].tolist()
            assert group.work is not None
            plan = planner.padded_plan(np.array([*lens] + [0] * missing, np.int32), size)
            assert (group.work.rows.tolist(), group.work.sizes) == (plan.rows.tolist(), plan.sizes)
        every = [step.token_ids, step.context_lens, *(x for group in step.groups for x in (group.slot_mapping,))]
        assert all(tensor.data_ptr() % 16 == 0 for tensor in every)  # what kernels were compiled for


def test_a_step_that_prefills_or_is_too_large_has_no_graph(device: Device) -> None:
    graphs = device.graphs()
    assert graphs(decodes(3, 4, 5, 6, 7, num_groups=1)) is None
    assert graphs(replace(decodes(3, 4, num_groups=1), num_decodes=1)) is None
