"""Speed from bytes and bandwidth, against published llama-bench results.

Constants are made of two thirds of the machines (`held_out` false in tests/facts/llama_bench.jsonl, by a hash of the
machine's name); what is printed under an answer is measured on the others.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvplan.hardware.gpu import GpuSpec, gpu, split_count
from kvplan.models import catalog
from kvplan.models.gguf_model import GGUFModel, gguf_of
from kvplan.servers.llamacpp import asked, pace
from kvplan.servers.llamacpp.fit import Fit
from kvplan.servers.llamacpp.measure import Measured, Server
from kvplan.servers.llamacpp.placement import place
from kvplan.servers.llamacpp.settings import Device, context_of
from kvplan.servers.llamacpp.size import Started
from kvplan.servers.plans.plan import Rate
from kvplan.servers.words.arguments import EngineArgs

FACTS = Path(__file__).parents[2] / "facts" / "llama_bench.jsonl"
ROWS = [json.loads(text) for text in FACTS.read_text().splitlines()]
LARGE = 10**13  # bytes of a device on which everything fits
FLAGS = {
    "--gpu-layers": ("gpu_layers", int), "--n-cpu-moe": ("n_cpu_moe", int), "-ctk": ("cache_type_k", str),
    "-ctv": ("cache_type_v", str),
}  # fmt: skip


class Case(NamedTuple):
    row: dict[str, Any]
    run: Started
    machine: GpuSpec | None
    count: int

    @property
    def tokens(self) -> int:
        """Tokens in the cache half way through the run."""
        return int(self.row["depth"] + self.row["tokens"] // 2)

    @property
    def vendor(self) -> str:
        return "" if self.machine is None else self.machine.vendor

    @property
    def decoding(self) -> Rate:
        bandwidth = None if self.machine is None else self.machine.memory_bandwidth
        host = self.row["host_gb_per_s"]
        return pace.decoding(self.run, self.vendor, bandwidth, host and int(host * 1e9), self.tokens)


@cache
def file_of(model: str, file_type: str) -> GGUFModel:
    return gguf_of(catalog.load(model), file_type)


def case_of(row: dict[str, Any]) -> Case:
    count, name = (None, "") if row["gpu"] is None else split_count(row["gpu"])
    machine = gpu(name) if name else None
    devices = [Device(LARGE, LARGE)] * (0 if machine is None else count or 1)
    words = row["flags"].split()
    stated = {FLAGS[flag][0]: FLAGS[flag][1](value) for flag, value in zip(words[::2], words[1::2], strict=True)}
    own = asked.settings(EngineArgs(max_model_len=40960, max_num_seqs=1, **stated), len(devices))
    server = Server(file_of(row["model"], row["file_type"]), devices)
    where = place(server.model, server.shape, own, devices)
    measured = Measured({}, where, context_of(server.shape, own), True, 1)
    return Case(row, Started(server.model, server, own, Fit(own, False), measured, None), machine, len(devices))


@cache
def cases() -> tuple[Case, ...]:
    return tuple(map(case_of, ROWS))


def on_gpus(*vendors: str) -> dict[str, list[Case]]:
    """Results with everything on GPUs, by machine."""
    by_machine = defaultdict[str, list[Case]](list)
    for case in cases():
        if case.vendor in vendors and not case.row["flags"]:
            by_machine[case.row["machine"]].append(case)
    return by_machine


def at(weighted: list[tuple[float, float]], share: float) -> float:
    """The value below which this share of the weights lies."""
    reached, total = 0.0, sum(weight for _, weight in weighted)
    for value, weight in sorted(weighted):
        reached += weight
        if reached >= share * total:
            return value
    raise AssertionError


def ratios(machines: dict[str, list[Case]]) -> list[tuple[float, float]]:
    """Measured over computed speed of every result; each machine weighs the same."""
    return [(case.row["decode"] / case.decoding.likely, 1 / len(some)) for some in machines.values() for case in some]


def prompt_cases(held_out: bool) -> Iterator[tuple[float, Rate]]:
    for case in cases():
        if case.machine is not None and case.row["prompt"] and case.row["held_out"] == held_out:
            computed = pace.prompts(case.run, case.machine)
            if computed is not None:
                yield case.row["prompt"], computed


def share_within(pairs: list[tuple[float, Rate]]) -> float:
    return sum(rate.low <= measured <= rate.high for measured, rate in pairs) / len(pairs)


def test_ranges_are_those_of_the_results() -> None:
    low, high = pace.RANGE
    weighted = ratios(on_gpus("nvidia", "apple", "amd"))
    assert (round(at(weighted, 0.05), 2), round(at(weighted, 0.95), 2)) == (low, high)


def test_a_machines_results_lie_in_the_range_of_other_machines_as_often_as_printed() -> None:
    machines = on_gpus("nvidia", "apple", "amd")
    within = 0
    for name, own in machines.items():
        others = ratios({other: some for other, some in machines.items() if other != name})
        low, high = at(others, 0.05), at(others, 0.95)
        within += sum(low <= case.row["decode"] / case.decoding.likely <= high for case in own)
    total = sum(map(len, machines.values()))
    assert f"for {within / total:.0%} of {total} llama-bench results" in pace.HOW


@pytest.mark.parametrize("vendor", ["nvidia", "apple", "amd"])
def test_a_layers_time_is_the_one_with_the_least_error_on_two_thirds_of_the_machines(
    vendor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = {name: some for name, some in on_gpus(vendor).items() if not some[0].row["held_out"]}

    def error(layer: float) -> float:
        monkeypatch.setitem(pace.LAYER, vendor, layer)
        return sum(weight * abs(log(ratio)) for ratio, weight in ratios(machines)) / len(machines)

    best = min((step * 10e-6 for step in range(25)), key=error)
    monkeypatch.undo()
    assert abs(best - pace.LAYER[vendor]) < 11e-6


def test_layers_on_the_host_are_as_fast_as_on_machines_that_no_constant_has_seen() -> None:
    held_out = [case for case in cases() if case.row["host_gb_per_s"] and case.row["held_out"]]
    assert len(held_out) == 8
    assert share_within([(case.row["decode"], case.decoding) for case in held_out]) == 1


def test_prompts_on_machines_that_no_constant_has_seen_are_in_the_range_as_often_as_printed() -> None:
    pairs = list(prompt_cases(held_out=True))
    assert f"of prompts for {share_within(pairs):.0%} of {len(pairs)}" in pace.HOW
