"""Prompts handed from one server to another, step by step as vLLM 0.33's scheduler with its NIXL connector.

tests/facts/handover.jsonl: twelve runs of vLLM's own scheduler and pull-mode connector, a producer and a consumer, with
and without asynchronous scheduling, with a full pool and an abort, with windows. In place of NIXL, a pull was over
`delay` steps after the step that ordered it; a consumer had read a producer's blocks `read_after` steps after the step
that said so.
"""

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from engine.block_manager import FullGroup, WindowGroup
from engine.scheduler import Batch
from engine.sequence import Sequence
from kvplan.simulate.handover import Handover, Link
from kvplan.simulate.scheduling import SimulatedConfig, simulated_scheduler

NEVER = 10**9
FACTS = Path(__file__).parents[1] / "facts" / "handover.jsonl"
RUNS = [json.loads(line) for line in FACTS.read_text().splitlines()]


def prompt(row: dict[str, Any]) -> list[int]:
    """The first `shared` tokens are those of every request with this prefix_id; the others occur in no other prompt."""
    shared, number = row.get("shared", 0), int(row["id"][1:])
    tokens = [1000 + row.get("prefix_id", 0) * 7 + i % 5000 for i in range(shared)]
    return tokens + [20000 + (number * 131 + i) % 90000 for i in range(row["prompt_len"] - shared)]


class Played:
    """Our scheduler on a run's requests, with transfers that take as many steps as in the run."""

    def __init__(self, run: dict[str, Any]) -> None:
        self.run = run
        size, window = run["block_size"], run.get("window")
        groups = (FullGroup(size) if window is None else WindowGroup(size, window),)
        self.handover = Handover(groups, defers=run["role"] == "kv_consumer")
        config = SimulatedConfig(
            max_num_batched_tokens=run["max_num_batched_tokens"], max_num_seqs=run["max_num_seqs"],
            max_model_len=run["max_model_len"], batch_queue_depth=run["depth"],
        )  # fmt: skip
        self.scheduler = simulated_scheduler(config, run["num_blocks"], groups, self.handover)
        self.steps: list[dict[str, Any]] = []
        self.pulls: list[list[Any]] = []
        self.answers: dict[str, tuple[list[list[int]], int]] = {}
        self._coming: dict[int, int] = {}  # job -> step in which it is done
        self._read: dict[str, int] = {}  # kept request -> step in which it has been read
        self._flights: deque[tuple[Batch, list[int], list[str], dict[str, Any]]] = deque()

    def add(self, row: dict[str, Any]) -> None:
        seq = Sequence(row["id"], prompt(row), row["max_tokens"])
        if row.get("transfer") == "decode elsewhere":
            self.handover.keep(seq)
        elif row.get("transfer") == "prefilled elsewhere":
            self.handover.remote.sources[seq] = "there"
        self.scheduler.add(seq)

    def step(self, number: int) -> None:
        ended = set(self.handover.pinned) - self._read.keys()
        batch = self.scheduler.schedule()
        for pull in self.handover.remote.pulls:
            self.pulls.append([number, pull.seq.request_id, pull.num_blocks])
            if pull.number is not None:
                self._coming[pull.number] = number + self.run["delay"]
        self.handover.remote.pulls.clear()
        self._read |= dict.fromkeys(sorted(ended), number + (self.run["read_after"] or 0))
        done = [job for job, step in self._coming.items() if step <= number]
        read = [name for name, step in self._read.items() if step <= number]
        for job in done:
            del self._coming[job]
        self._read |= dict.fromkeys(read, NEVER)
        record = {
            "scheduled": {seq.request_id: n for seq, n in batch.num_tokens.items()},
            "computed": {seq.request_id: batch.hits[seq] for seq in batch.new},
            "waiting_for_kv": sorted(seq.request_id for seq in self.handover.loading),
            "free": self.scheduler.blocks.num_free_blocks,
        }
        self.steps.append(record)
        self._flights.append((batch, done, read, record))
        if len(self._flights) < self.run["depth"] and (batch.num_tokens or self.scheduler.has_unfinished):
            return
        self.apply()

    def apply(self) -> None:
        batch, done, read, record = self._flights.popleft()
        ended = self.scheduler.update(batch, {seq.request_id: [5] for seq in batch.samples})
        for seq in ended:
            if seq.request_id in self.handover.pinned:
                self.answers[seq.request_id] = (self.handover.block_ids(seq), seq.num_computed_tokens)
        self.handover.complete(done)
        for name in read:
            assert self.handover.release(name)
        self.scheduler.check_invariants()
        record["free_after"] = self.scheduler.blocks.num_free_blocks

    def play(self) -> None:
        arrivals = deque(self.run["requests"])
        for number in range(len(self.run["steps"])):
            while arrivals and arrivals[0]["arrive_step"] <= number:
                self.add(arrivals.popleft())
            for name, step in self.run["aborts"].items():
                if step == number:
                    self.scheduler.abort(name)
            self.step(number)
        while self._flights:
            self.apply()


@pytest.mark.parametrize("run", RUNS, ids=[run["case"] for run in RUNS])
def test_steps_are_those_of_the_servers_own_scheduler(run: dict[str, Any]) -> None:
    played = Played(run)
    played.play()
    keys = ("scheduled", "computed", "waiting_for_kv", "free", "free_after")
    for number, (ours, theirs) in enumerate(zip(played.steps, run["steps"], strict=True)):
        assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}, f"step {number}"
    assert played.pulls == run["pulls"]
    stats = played.handover.external_cache_stats
    assert [stats.queries, stats.hits] == run["lookups"]


@pytest.mark.parametrize("run", RUNS, ids=[run["case"] for run in RUNS])
def test_what_is_kept_is_what_the_server_states(run: dict[str, Any]) -> None:
    played = Played(run)
    played.play()
    stated = {name: (len(row["remote_block_ids"][0]), row["remote_num_tokens"]) for name, row in run["answers"].items()}
    assert {name: (len(ids[0]), tokens) for name, (ids, tokens) in played.answers.items()} == stated


def test_a_link_sends_one_prompt_after_the_other() -> None:
    link = Link(bandwidth=10e9, latency=0.002)
    free_at, first = link.send(0.0, 1.0, 5_000_000_000)
    assert (free_at, first) == (1.5, 1.502)
    assert link.send(free_at, 1.1, 10_000_000_000) == (2.5, 2.502)
