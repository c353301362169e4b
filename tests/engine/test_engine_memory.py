"""What the engine measures of a GPU's memory, with torch.cuda's answers in place of a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import memory
from engine.memory import PeakMeter
from kvplan.core.errors import EnvironmentProblem
from tests.support.small_engines import engine_for

MIB = 2**20
CUDA = torch.device("cuda", 0)


class Allocator:
    """torch's CUDA allocator as its statistics show it: blocks are rounded up to 2 MiB, what was asked for is not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.peak = 0
        self.reserved = self.free = 0
        self.total = 10**9
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: self.stats())
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: self.rounded(self.current))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: self.rounded(self.peak))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: self.reserved)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (self.free, self.total))

    def rounded(self, size: int) -> int:
        return -(-size // (2 * MIB)) * 2 * MIB

    def stats(self) -> dict[str, int]:
        return {
            "requested_bytes.all.current": self.current,
            "requested_bytes.all.peak": self.peak,
            "allocated_bytes.all.current": self.rounded(self.current),
            "allocated_bytes.all.peak": self.rounded(self.peak),
        }

    def reset(self, device: Any = None) -> None:
        self.peak = self.current

    def take(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    return Allocator(monkeypatch)


def test_a_peak_on_a_gpu_is_what_was_asked_for_to_the_byte(allocator: Allocator) -> None:
    allocator.take(5 * MIB + 3)
    allocator.take(90 * MIB)
    allocator.take(-90 * MIB)  # an older peak
    with PeakMeter(CUDA) as meter:
        for size in (1000, MIB + 1, -1000, 24):
            allocator.take(size)
    assert meter.peak == 1000 + MIB + 1


def test_a_peak_on_a_cpu_counts_the_same_bytes() -> None:
    with PeakMeter(torch.device("cpu")) as meter:
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(MIB + 1, dtype=torch.uint8)
        del first
        third = torch.empty(24, dtype=torch.uint8)
        del second, third
    assert meter.peak == 1000 + MIB + 1


def test_torch_knows_the_statistics_by_these_names() -> None:
    """Of its documentation, which is all that a build without CUDA has of them."""
    assert "requested_bytes.{all,large_pool,small_pool}.{current,peak,allocated,freed}" in str(
        torch.cuda.memory_stats.__doc__
    )


def test_what_libraries_hold_in_torchs_pool_counts_as_not_torchs(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine_for("llama", num_blocks=None, memory_limit=10**9, max_num_seqs=4).runner
    weights, buffers = runner.memory.weights, runner.memory.buffers
    assert (runner.memory.workspaces, runner.memory.non_torch) == (0, 0)  # on a CPU
    zeros, linear, biases = torch.zeros, torch.nn.functional.linear, list[bool]()

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        allocator.take(32 * MIB if bias is None else 3 * MIB)
        biases.append(bias is not None)
        return linear(x, weight, bias)

    def square(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == CUDA
        allocator.take(16 * 16 * 4)
        return zeros(*shape, dtype=dtype)

    monkeypatch.setattr(runner, "device", CUDA)
    monkeypatch.setattr(torch, "zeros", square)
    monkeypatch.setattr(torch.nn.functional, "linear", product)
    allocator.current = weights + buffers
    assert runner._make_workspaces() == 35 * MIB
    assert biases == [False, True]


def test_other_tensors_of_the_process_are_no_workspaces_and_no_room(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines in one process: what the first holds in torch's pool is neither the second's nor free."""
    runner = engine_for("llama", num_blocks=None, memory_limit=10**9, max_num_seqs=4).runner
    monkeypatch.setattr(runner, "device", CUDA)
    monkeypatch.setattr(runner, "_others", 200 * MIB)
    allocator.reserved, allocator.free = 300 * MIB, 10**9 - 700 * MIB
    report = runner._size_pool(activations=10 * MIB, workspaces=35 * MIB)
    assert (report.non_torch, report.workspaces) == (635 * MIB, 35 * MIB)


def test_the_pool_leaves_room_for_them_and_for_what_is_outside_torch(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine_for("llama", num_blocks=None, memory_limit=10**9, max_num_seqs=4).runner
    monkeypatch.setattr(runner, "device", CUDA)
    allocator.reserved, allocator.free = 100 * MIB, 10**9 - 500 * MIB  # so 400 MiB are others': contexts, libraries
    report = runner._size_pool(activations=10 * MIB, workspaces=35 * MIB)
    assert (report.non_torch, report.workspaces) == (435 * MIB, 35 * MIB)
    taken = report.weights + report.buffers + 10 * MIB + 435 * MIB
    assert 0 <= report.budget - taken - report.kv_cache < report.block_bytes


# --- a CPU, whose memory is everybody's -----------------------------------------------------------------------------

BLOCK = 3 * 4 * 2 * 2 * 16 * 4  # layers, tokens, keys and values, heads, their dimensions, float32


def host_with(available: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host of 1 GB, of which so many bytes are free."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {10**6} kB\nMemAvailable: {available // 1024} kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)


def test_a_pool_takes_half_of_what_is_free_on_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It took all: 1 + 64 x 24 blocks can be used, 1,000 KiB hold 333."""
    host_with(2000 * 1024, monkeypatch, tmp_path)
    assert engine_for("llama", num_blocks=None, max_num_seqs=64).memory_report().num_blocks == 1000 * 1024 // BLOCK
    host_with(2**30, monkeypatch, tmp_path)
    assert engine_for("llama", num_blocks=None, max_num_seqs=64).memory_report().num_blocks == 1 + 64 * 24


def test_a_pool_of_more_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host_with(2000 * 1024, monkeypatch, tmp_path)
    num_blocks = 2000 * 1024 // BLOCK
    assert engine_for("llama", num_blocks=num_blocks).memory_report().num_blocks == num_blocks
    with pytest.raises(
        EnvironmentProblem, match=rf"cpu: a KV pool of {num_blocks + 1} blocks did not fit: 2,048,000 of "
    ):
        engine_for("llama", num_blocks=num_blocks + 1)
