"""SGLang's order of work, step by step as its own scheduler and radix tree decide it."""

from array import array
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from engine.drafting import DraftStep
from engine.scheduler import Batch
from engine.sequence import Sequence
from kvplan.simulate.prompts_first import Limits, PromptsFirst
from kvplan.simulate.radix import Radix
from tests.oracles import read_lines
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

# Recorded from SGLang 0.5.23's own Scheduler, SchedulePolicy, PrefillAdder, ScheduleBatch and UnifiedRadixCache (its
# Rust core), run on a CPU with made-up tokens in place of a model (benchmarks/schedules_sglang.py). A step: kind (p:
# prefill, d: decode, -: none), requests ("=": those of the step before), tokens and prefix of each prompt, who ended,
# who was retracted, free and evictable tokens and new_token_ratio after it.
TRACES = read_lines(Path(__file__).parents[1] / "facts" / "sglang_schedules.jsonl")


def limits(row: dict[str, Any]) -> Limits:
    names = ("num_tokens", "max_running", "chunk", "max_prefill_tokens", "conservativeness", "overlap", "radix")
    drafts = {name: row[name] for name in ("verified", "reserve") if name in row}
    paged = row.get("page_size", 1)
    return Limits(**{name: row[name] for name in names}, page_size=paged, context_len=131_072, **drafts)


def tokens(number: int, prompt_len: int, shared: int, prefix: int) -> "array[int]":
    own = range(10**8 * (number + 1), 10**8 * (number + 1) + prompt_len - shared)
    return array("q", [*range(10**6 * (prefix + 1), 10**6 * (prefix + 1) + shared), *own])


class Driven:
    """The scheduler in SGLang's loop: with overlap a batch's tokens are taken in after the next one is scheduled."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row, self.scheduler = row, PromptsFirst(limits(row))
        self.in_flight: deque[Batch] = deque()
        self.names: list[int] = []
        self.num_checks: dict[str, int] = {}

    def sampled(self, batch: Batch) -> dict[str, tuple[int, ...]]:
        """Tokens of a decode step that verifies drafts: as many as the row accepts in turn, and one."""
        tokens, pattern = {}, self.row.get("accept", ())
        for name in (seq.request_id for seq in batch.num_tokens):
            if DraftStep in batch.extras:
                turn = self.num_checks[name] = self.num_checks.get(name, -1) + 1
                tokens[name] = (0,) * (1 + pattern[(int(name) + turn) % len(pattern)])
            else:
                tokens[name] = (0,)
        return tokens

    def step(self, number: int) -> list[Any]:
        for name, (arrival, prompt_len, max_tokens, shared, prefix) in enumerate(self.row["requests"]):
            if arrival == number:
                seq = Sequence(str(name), [0] * prompt_len, max_tokens)
                self.scheduler.add(seq, tokens(name, prompt_len, shared, prefix))
        had_one = bool(self.in_flight)
        batch = self.scheduler.schedule()
        if batch.num_tokens:
            self.in_flight.append(batch)
        takes = had_one if self.row["overlap"] else bool(self.in_flight)
        done = list[Sequence]()
        if takes:
            ran = self.in_flight.popleft()
            done = self.scheduler.update(ran, self.sampled(ran))
        names = [int(seq.request_id) for seq in batch.num_tokens]
        is_prefill = self.scheduler.is_prefill
        kind = "-" if not names else "p" if is_prefill else "d"
        same = kind == "d" and names == self.names
        self.names = names
        lengths = list(batch.num_tokens.values()) if kind == "p" else []
        starts = [seq.num_computed_tokens - n for seq, n in batch.num_tokens.items()] if kind == "p" else []
        pool = self.scheduler.blocks
        return [
            kind, "=" if same else names, lengths, starts, [int(seq.request_id) for seq in done],
            [int(seq.request_id) for seq in batch.preempted], pool.free, pool.tree.num_evictable,
            round(self.scheduler.ratio, 6),
        ]  # fmt: skip


@pytest.mark.parametrize("row", TRACES, ids=lambda row: str(row["name"]))
def test_every_step_is_sglangs(row: dict[str, Any]) -> None:
    driven = Driven(row)
    for number, step in enumerate(row["steps"]):
        assert driven.step(number) == step, number


def test_the_traces_cover_what_the_scheduler_does() -> None:
    steps = [step for row in TRACES for step in row["steps"]]
    assert len(TRACES) >= 20
    assert sum(len(step[5]) for step in steps) >= 10  # retractions
    assert any(any(start > 0 for start in step[3]) for step in steps)  # a hit, or a chunk that goes on
    assert {row["overlap"] for row in TRACES} == {row["radix"] for row in TRACES} == {True, False}
    assert None in {row["chunk"] for row in TRACES}
    drafted = [row for row in TRACES if "verified" in row]
    assert sum(len(step[5]) for row in drafted for step in row["steps"]) >= 5
    assert {row["overlap"] for row in drafted} == {True, False}
    paged = [row for row in TRACES if "page_size" in row]
    assert {row["page_size"] for row in paged} == {4, 8, 16, 32, 64, 128}
    assert sum(len(step[5]) for row in paged for step in row["steps"]) >= 10
    assert any(start > 0 for row in paged for step in row["steps"] for start in step[3])


def test_a_leaf_longest_unused_is_evicted_first_and_a_locked_one_never() -> None:
    tree = Radix()
    for name in (1, 2, 3):
        _, node = tree.insert(array("q", [9, 9, name, name]))
        if name == 1:
            tree.lock(node)
    assert tree.num_evictable == 4  # 9, 9 is locked with the first
    assert tree.match(array("q", [9, 9, 2, 2, 5]))[0] == 4
    assert tree.evict(1) == 2
    assert [tree.match(array("q", [9, 9, name, name]))[0] for name in (1, 2, 3)] == [4, 4, 2]


ASKED = ("simulate", "llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k", "-q", "--format", "json")
LOAD = ("--prompt-tokens", "uniform:500-1500", "--output-tokens", "50", "--num-requests", "40")


def test_simulate_answers_with_sglangs_order(run: Run) -> None:
    [ours] = run(*ASKED, *LOAD, "--rate", "20", "--engine", "sglang").json["variants"]
    [other] = run(*ASKED, *LOAD, "--rate", "20").json["variants"]
    assert ours["requests"]["finished"] == 40
    assert ours["running"]["peak"] > 0
    assert ours["times"] != other["times"]
    shared = run(*ASKED, *LOAD, "--rate", "20", "--engine", "sglang", "--shared-prefix", "400").json["variants"][0]
    assert shared["times"] != ours["times"]
    fleet = run(*ASKED, *LOAD, "--rate", "20", "--engine", "sglang", "--replicas", "2", "--router", "random")
    assert fleet.code == 0


@pytest.mark.parametrize(
    ("place", "hits"),
    [
        # The first of 40 prompts of 400 + 600 tokens finds none; the 39 others whole pages of the prefix they share.
        (("--gpu", "h100-80g", "--block-size", "1"), 400),
        (("--gpu", "h100-80g", "--block-size", "64"), 384),
        (("--gpu", "b200"), 384),  # pages of 64 tokens by default
    ],
)
def test_pages_of_several_tokens_are_simulated(run: Run, place: tuple[str, ...], hits: int) -> None:
    load = ("--prompt-tokens", "1000", "--output-tokens", "20", "--num-requests", "40", "--shared-prefix", "400")
    words = ("simulate", "llama-3.1-8b", "--ctx", "8k", "-q", "--format", "json", "--engine", "sglang", "--rate", "2")
    [answer] = run(*words, *place, *load).json["variants"]
    assert answer["prefix_cache"]["hit_tokens"] == 39 * hits


def test_recommend_with_targets_simulates_sglangs_order(run: Run) -> None:
    command = ("recommend", "llama-3.1-8b", "--gpu", "h100-80g", "--tensor-parallel-size", "1", "--ctx", "8k", "-q")
    load = ("--prompt-tokens", "1000", "--output-tokens", "50", "--num-requests", "60", "--slo", "ttft.p90=2s")
    answer = run(*command, *load, "--rate", "6", "--engine", "sglang", "--format", "json")
    assert answer.code == 0
    assert "sglang.launch_server" in answer.out


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--engine", "sglang@0.5.9"), "SGLang's scheduler is that of 0.5.23"),
        (("--engine", "sglang", "--baseline", "contiguous"), "--baseline needs vLLM's scheduler"),
        (("--engine", "sglang", "--film", "pool.html"), "--film draws vLLM's blocks only"),
        (("--engine", "sglang", "--tier", "host=4GiB@20GB/s"), "--tier needs vLLM's scheduler"),
    ],
)
def test_what_was_not_compared_is_refused(run: Run, options: tuple[str, ...], part: str) -> None:
    assert part in refused(run(*ASKED, *LOAD, "--rate", "2", *options))


@pytest.mark.parametrize("model", ["gemma-3-4b", "qwen3-next-80b-a3b"])
def test_pools_of_windows_and_states_are_answered(run: Run, model: str) -> None:
    command = ("simulate", model, "--gpu", "b300", "--ctx", "8k", "-q", "--engine", "sglang", "--rate", "2")
    [variant] = run(*command, *LOAD, "--format", "json").json["variants"]
    assert variant["requests"]["finished"] == 40


def test_pages_hold_what_their_tokens_do(run: Run) -> None:
    """40 requests that come one after another: a page of 64 tokens instead of one changes no time, only the pool."""
    command = (*ASKED, "--prompt-tokens", "640", "--output-tokens", "64", "--num-requests", "40", "--engine", "sglang")
    [single] = run(*command, "--rate", "1").json["variants"]
    [paged] = run(*command, "--rate", "1", "--block-size", "64").json["variants"]
    assert paged["times"] == single["times"]
    assert paged["kv_usage"]["peak"] >= single["kv_usage"]["peak"]


def test_a_model_whose_prompts_pause_is_refused(run: Run) -> None:
    """SGLang 0.5.23 sets --prefill-decode-interval 22 for Qwen3-VL on large Hopper GPUs, and on no others."""
    command = ("simulate", "qwen3-vl-8b", "--ctx", "8k", "-q", "--engine", "sglang", "--rate", "2")
    assert "pauses between its prompts" in refused(run(*command, *LOAD, "--gpu", "h100-80g"))
    assert run(*command, *LOAD, "--gpu", "a100-80g").code == 0


def test_a_flag_that_sglang_never_reads_changes_nothing(run: Run) -> None:
    """--num-continuous-decode-steps is declared in SGLang 0.4.9 to 0.5.23 and read by nothing there."""
    words = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --num-continuous-decode-steps 8"
    command = ("simulate", "--gpu", "h100-80g", "--ctx", "8k", "-q", "--format", "json", "--rate", "20", *LOAD)
    with_it = run(*command, "--from-command", words).json
    assert with_it["variants"] == run(*command, "llama-3.1-8b", "--engine", "sglang").json["variants"]


FLAGS = ["--schedule-policy lpm", "--enable-mixed-chunk", "--schedule-conservativeness 0.3", "--max-prefill-tokens 9"]


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_of_the_order_is_refused_by_name(run: Run, flag: str) -> None:
    command = f"python3 -m sglang.launch_server --model-path llama-3.1-8b {flag}"
    argv = ("simulate", "--gpu", "h100-80g", "--ctx", "8k", "-q", "--rate", "2", "--from-command", command)
    assert flag.split()[0] in refused(run(*argv, *LOAD))
