"""benchmarks/engine.py: limits are physics, workloads are the published ones, a part that fails costs its own rows."""

import csv
import json
import os
import random
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engine as script
from benchmarks import goals, gpu
from benchmarks.gpu_stages import allocators, generate, nano_vllm, overhead, prefix, serving
from benchmarks.gpu_stages.allocators import Served, Slots
from benchmarks.gpu_stages.overhead import Times
from benchmarks.gpu_stages.roofline import Limits, limits_of
from benchmarks.gpu_stages.runner import Machine, Stage
from benchmarks.gpu_stages.stage import Task
from benchmarks.throughput import BenchRequest, Run, figures, run_transformers, run_warm_up
from engine import Engine, SamplingParams
from kvplan.workloads.profiles import profile

pytestmark = pytest.mark.full  # a script for GPUs: what it measures needs one, what it writes is checked here
ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
# Llama-3.1-8B in bfloat16 at 4.3 TB/s and three quarters of 989 TFLOP/s: 7.505e9 parameters without the embedding.
LLAMA = Limits(15_010_000_000, 7_505_000_000, 131_072, 4.3e12, 0.75 * 989e12)
# Qwen3-0.6B: 596,049,920 parameters with the embedding, which is the head too; 28 layers * 2 * 8 * 128 * 2 bytes.
QWEN = Limits(2 * 596_049_920, 596_049_920, 114_688, 4.3e12, 0.75 * 989e12)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def task(folder: Path, **options: Any) -> Task:
    return Task(folder, CPU, Namespace(model="llama-3.1-8b", **options))


def small_engine(folder: Path, model: str = "llama-3.1-8b", **options: Any) -> Engine:
    return serving.start(
        task(folder), model,
        **{"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 40, **options},
    )  # fmt: skip


def result(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return content


# --- the limit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_seqs", "length", "milliseconds"),
    [
        (1, 512, 3.51),  # 15.01e9 / 4.3e12 = 3.491, and 512 * 131072 / 4.3e12 = 0.016
        (64, 2048, 7.49),  # 3.491 + 64 * 2048 * 131072 / 4.3e12 = 3.995
        (32, 8192, 11.48),
        (1, 131_072, 7.49),
        (256, 512, 9.18),  # 2 * 7.505e9 * 256 / 741.75e12 = 5.180 of products, longer than reading; and 3.995 of KV
    ],
)
def test_a_decode_step_takes_at_least_its_bytes_or_its_products(
    num_seqs: int, length: int, milliseconds: float
) -> None:
    assert LLAMA.step_s(num_seqs, length) * 1000 == pytest.approx(milliseconds, abs=0.006)


def test_the_limit_of_the_public_workload_is_35600_tokens_per_second() -> None:
    """The figure that the goal of 25,000 stands beside."""
    mix = [(len(request.prompt), request.output_len) for request in nano_vllm.workload()]
    assert 133_966 / QWEN.batch_s(mix) == pytest.approx(35_600, rel=0.001)


def test_the_limit_follows_the_measured_bandwidth() -> None:
    """At 3.0 TB/s instead of 4.3 reading takes 1.433 times as long, and products, in prompts and large steps, as long.

    So it lies above 35,600 / 1.433, and not far: reading is most of it.
    """
    mix = [(len(request.prompt), request.output_len) for request in nano_vllm.workload()]
    limit = 133_966 / replace(QWEN, bandwidth=3.0e12).batch_s(mix)
    assert 35_600 * 3.0 / 4.3 < limit < 1.05 * 35_600 * 3.0 / 4.3


def test_a_batch_takes_its_prompts_and_a_step_for_every_further_token() -> None:
    """3 + 5 prompt tokens of 2 * 10 operations; then both decode at 4 and 6 tokens, then the second alone at 7."""
    limits = Limits(weights=20, parameters=10, kv_per_token=2, bandwidth=10, matmul=100)
    prompts = (3 + 5) * 2 * 10 / 100
    both, last = max(2.0, 2 * 10 * 2 / 100) + (4 + 6) * 2 / 10, 2.0 + 7 * 2 / 10
    assert limits.batch_s([(3, 2), (5, 3)]) == pytest.approx(prompts + both + last)
    assert limits.batch_s([(3, 1)]) == pytest.approx(3 * 2 * 10 / 100)


def test_a_prompt_meets_the_vocabulary_once_and_each_pair_of_tokens_once() -> None:
    """2 sequences of 4 tokens: (10 - 3) * 2 operations per token, 3 * 2 for the last, 5 for each of 4 * 5 / 2 pairs."""
    limits = Limits(20, 10, 2, bandwidth=10, matmul=100, head=3, per_pair=5)
    assert limits.prefill_s(2, 4) == pytest.approx(2 * (4 * 14 + 6 + 10 * 5) / 100)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-0.6b"])
def test_limits_are_those_of_the_models_shape(tmp_path: Path, model: str) -> None:
    """Two layers of 64 hidden, 96 intermediate, 4 heads, 2 KV heads; a vocabulary of 512; bfloat16.

    Llama has heads of 16 and a head matrix of its own; Qwen3 has heads of 32 with a norm each for queries and keys, and
    its embedding is its head: of either one table takes part.
    """
    limits = limits_of(small_engine(tmp_path, model))
    dim = 16 if model.startswith("llama") else 32
    per_layer = 2 * 64 * 4 * dim + 2 * 64 * 2 * dim + 3 * 64 * 96 + 2 * 64 + (0 if dim == 16 else 2 * dim)
    assert limits.parameters == 2 * per_layer + 64 + 512 * 64
    assert limits.weights == 2 * limits.parameters
    assert limits.kv_per_token == 2 * 2 * 2 * dim * 2  # layers, K and V, heads, bytes
    assert limits.head == 512 * 64
    assert limits.per_pair == 2 * 4 * 4 * dim  # layers; a score and a value, each 2 operations per head and dimension
    assert limits.bandwidth > 0
    assert limits.matmul > 0


# --- workloads --------------------------------------------------------------------------------------------------------


def test_the_public_workload_is_the_published_one() -> None:
    mix = nano_vllm.workload()
    assert len(mix) == 256
    assert sum(len(request.prompt) for request in mix) == 142_827
    assert sum(request.output_len for request in mix) == 133_966
    assert {100 <= len(request.prompt) <= 1024 and 100 <= request.output_len <= 1024 for request in mix} == {True}
    assert max(token for request in mix for token in request.prompt) == 10_000


def test_another_draw_is_not_taken_for_the_public_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nano_vllm, "SEED", 1)
    with pytest.raises(AssertionError, match=r"nano-vllm: .* tokens in and out"):
        nano_vllm.workload()


def test_conversations_are_those_of_the_trace_that_fit() -> None:
    """The goal asks for requests of 600 tokens or more on average; those of the trace have 1,155 + 211."""
    lens = allocators.lengths(allocators.FULL, 5000)
    drawn = [(r.prompt_tokens, r.output_tokens) for r in islice(profile("azure-2023-conv").requests(rate=1), 6000)]
    assert lens == [pair for pair in drawn if sum(pair) < 8192][:5000]
    assert sum(map(sum, lens)) / len(lens) == pytest.approx(1155 + 211, rel=0.05)
    for num_regions, num_requests in allocators.FULL.pools:
        chosen = allocators.lengths(allocators.FULL, num_requests)
        assert sum(map(sum, chosen)) / num_requests >= 600
        assert num_requests > num_regions  # or else all would run at once either way


def test_the_notes_begin_with_900_tokens_and_are_as_long_as_the_workload_has_them(tmp_path: Path) -> None:
    shape = prefix.shape_of(replace(task(tmp_path), device=torch.device("meta")))  # as on a GPU
    drawn = profile("clinical-notes").requests(rate=1, seed=0)
    assert shape.notes == tuple(request.prompt_tokens for request in islice(drawn, 12))
    assert (shape.prefix, shape.own, shape.cached) == (900, 300, 896)  # 56 blocks of 16
    assert min(shape.notes) > 900


# --- before the clock starts ------------------------------------------------------------------------------------------


def chunks_of(engine: Engine, mix: list[BenchRequest], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The tokens of every sequence in each step of the warm-up that takes in prompts."""
    steps: list[tuple[int, ...]] = []
    run = engine.runner.run

    def noted(arrays: Any, params: Any) -> Any:
        steps.append(tuple(int(n) for n in arrays.prefill_lens))
        return run(arrays, params)

    monkeypatch.setattr(engine.runner, "run", noted)
    run_warm_up(engine, mix)
    return [step for step in steps if step]


def test_a_warm_up_has_a_step_of_8_and_one_of_600_tokens_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the mix's own prompts, of which more than one share a step."""
    engine = small_engine(tmp_path, max_model_len=1024, num_blocks=200, max_num_batched_tokens=1024)
    mix = [BenchRequest([1] * 100, 9), BenchRequest([2] * 120, 9)]
    assert chunks_of(engine, mix, monkeypatch) == [(100, 120), (8,), (600,)]


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({"max_model_len": 128}, 126),  # two tokens follow
        ({"max_model_len": 128, "num_blocks": 6}, 78),  # 5 blocks of 16
        ({"max_model_len": 4}, 2),
        ({"max_model_len": 2}, 1),
    ],
)
def test_a_warm_up_is_clipped_to_what_the_engine_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], longest: int
) -> None:
    more: dict[str, Any] = {"max_num_batched_tokens": 256, **options}
    engine = small_engine(tmp_path, **more)
    chunks = chunks_of(engine, [BenchRequest([1], 1)], monkeypatch)
    assert max((max(step) for step in chunks), default=1) == longest


# --- another scheduler over the same engine ---------------------------------------------------------------------------


def tokens_of(engine: Engine) -> list[list[int]]:
    source = random.Random(7)
    prompts = [serving.random_tokens(n, engine.spec.vocab_size, source) for n in (5, 40, 17, 90, 33)]
    outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_queue_depth": 2},
        {"allocator": "contiguous"},
        {"allocator": "contiguous", "batch_queue_depth": 2},
        {"num_blocks": 12},
        {},
    ],
    ids=["overlap", "contiguous", "contiguous with overlap", "a small pool", "as it was"],
)
def test_whoever_schedules_the_tokens_are_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    engine = small_engine(tmp_path, dtype="float32", enable_prefix_caching=False, async_scheduling=True)
    expected = tokens_of(engine)
    serving.reschedule(engine, batch_queue_depth=2, allocator="contiguous")  # and back from anything
    tokens_of(engine)
    serving.reschedule(engine, **{"batch_queue_depth": 1, "allocator": "paged", **changes})
    assert tokens_of(engine) == expected
    assert engine.scheduler.blocks.num_usable_blocks == changes.get("num_blocks", 40) - 1


def test_a_busy_engine_and_a_pool_that_is_not_there_are_refused(tmp_path: Path) -> None:
    engine = small_engine(tmp_path)
    for num_blocks in (41, 1):
        with pytest.raises(ValueError, match=f"has no {num_blocks} blocks"):
            serving.reschedule(engine, num_blocks)
    engine.add_request([5, 6, 7])
    with pytest.raises(ValueError, match="is busy"):
        serving.reschedule(engine)


def test_a_noted_step_is_the_engines_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    engine = small_engine(tmp_path)
    prompts = [[5, 6, 7], [8, 9]]
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    run = engine.runner.run
    arrays, params = overhead.noted_step(engine)
    assert sorted(arrays.token_ids.tolist()) == [5, 6, 7, 8, 9]
    assert [sampling.max_tokens for sampling in params] == [4, 4]
    assert engine.runner.run == run
    assert engine.stats().generation_tokens == 2


# --- what is made of a run --------------------------------------------------------------------------------------------


def served(requests_per_s: float, empty: float) -> Served:
    mix = [BenchRequest([1], 1)]
    return Served(figures(mix, Run(1 / requests_per_s, [[0.1]], [1, 3, 2])), empty)


def test_paged_against_contiguous_is_a_ratio_of_requests_per_second() -> None:
    by_allocator: dict[allocators.Allocator, Served] = {"paged": served(7.0, 0.01), "contiguous": served(2.0, 0.75)}
    assert allocators.goals_of(by_allocator) == {
        "paged-waste": 0.01, "contiguous-waste": 0.75, "paged-contiguous": pytest.approx(3.5),
    }  # fmt: skip
    rows = {line.metric: line.value for line in allocators.rows_of("pool", by_allocator, "m")}
    assert rows["pool, paged : contiguous"] == pytest.approx(3.5)
    assert rows["pool, paged: admitted, most"] == 3
    assert rows["pool, paged: admitted, mean of the steps"] == 2
    assert allocators.goals_of({"paged": served(7.0, 0.01)}) == {"paged-waste": 0.01}  # cut off before the second


def test_slots_that_are_held_and_empty_are_counted_over_all_steps(tmp_path: Path) -> None:
    """10 blocks with 100 tokens, then 20 with 300: of 480 slots 400 are full."""
    stats = small_engine(tmp_path).stats()
    slots = Slots()
    for blocks, tokens in ((10, 100), (20, 300)):
        slots.count(replace(stats, num_used_blocks=blocks, num_kv_tokens=tokens))
    assert slots.empty == pytest.approx(1 / 6)


def test_contiguous_admits_what_its_reservations_hold(tmp_path: Path) -> None:
    """17 blocks hold two reservations of 128 tokens; a paged pool gives each request the one or two blocks it needs."""
    engine = small_engine(tmp_path, max_num_seqs=8, enable_prefix_caching=False)
    mix = serving.requests_of([(10, 6)] * 8, engine.spec.vocab_size, random.Random(0))
    by_allocator = {name: allocators.serve(engine, mix, name, 1 + 2 * 8) for name in allocators.ALLOCATORS}
    assert {name: outcome.figures.max_running for name, outcome in by_allocator.items()} == {
        "paged": 8,
        "contiguous": 2,
    }
    assert by_allocator["paged"].empty <= 6 / 16 < 1 - 16 / 128 <= by_allocator["contiguous"].empty
    assert engine.on_step is None


def test_the_engine_against_transformers_is_told_by_medians_and_the_best_batch() -> None:
    speeds = {
        "engine": [20.0, 24.0, 30.0],
        generate.SINGLE: [0.5, 1.0, 4.0],
        "transformers, static batch of 64": [12.0],
        "transformers, static batch of 32": [8.0],
    }
    assert generate.goals_of(speeds) == {"transformers-single": 24.0, "transformers-batch": 2.0}
    assert generate.goals_of({"engine": [20.0]}) == {}
    ratios = {line.metric: line.value for line in generate.rows_of(speeds) if line.unit == "x requests/s"}
    assert ratios["engine : transformers, one by one"] == 24
    assert ratios["engine : transformers, static batch of 32"] == 3


def test_what_the_host_adds_is_the_median_step_less_the_devices() -> None:
    times = Times(steps=[4.0, 5.5, 9.0], device=[5.0, 5.2], launch=[1.0])
    assert times.added == pytest.approx(5.5 - 5.1)
    assert overhead.headline({"overlap": times}) == (
        "overlap: 0.40 ms a step beyond the device's 5.10 (goal: at most 0.5)"
    )
    slow = Times(steps=[6.0], device=[5.0], launch=[1.0])
    assert overhead.headline({"overlap": times, "no overlap": slow}) == (
        "overlap: 0.40 ms a step beyond the device's 5.10 (goal: at most 0.5); "
        "no overlap: 1.00 ms a step beyond the device's 5.00"
    )
    bound = Times([6.0], [5.0], [5.0])
    assert "(the host bounds both)" in overhead.headline({"overlap": bound})


# --- the parts, tiny --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name.replace("-", "_") for name in script.PARTS])
def test_a_part_measures_what_it_says_and_reports_known_goals(tmp_path: Path, name: str) -> None:
    import_module(f"benchmarks.gpu_stages.{name}").run(task(tmp_path))
    document = result(tmp_path)
    rows = {line["metric"]: line for line in document["rows"]}
    assert len(rows) == len(document["rows"]) > 0
    assert document["headline"]
    assert set(document["numbers"].get("goals", {})) <= set(script.OWN_GOALS)
    shares = [metric for metric in rows if metric.endswith(": of the limit")]
    assert bool(shares) == (name in ("decode", "nano_vllm", "prefill"))
    for metric in shares:
        what = metric.removesuffix(": of the limit")
        speed = rows[f"{what}: {'prompt' if name == 'prefill' else 'output'}"]["value"]
        assert rows[metric]["value"] == pytest.approx(speed / rows[f"{what}: limit"]["value"], rel=1e-6)


def test_the_goals_and_the_parts_that_report_them_are_the_same(tmp_path: Path) -> None:
    """Every goal that is not the kernels' has a part here."""
    kernels = {name for name in goals.NAMES if name.startswith(("decode-", "prefill-")) and name != "decode-roofline"}
    assert set(script.OWN_GOALS) == set(goals.NAMES) - kernels


def test_without_transformers_its_part_says_so_and_keeps_the_engines_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "find_spec", lambda name: None)
    generate.run(task(tmp_path))
    document = result(tmp_path)
    assert [line["metric"] for line in document["rows"]] == ["engine: served"]
    assert document["numbers"]["missing"] == {
        "transformers": "transformers is not installed, so there is nothing to compare with"
    }
    assert "transformers is not installed" in document["headline"]
    assert document["numbers"]["goals"] == {}


def test_a_batch_that_does_not_fit_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crowded(model: Any, mix: list[BenchRequest], batch_size: int = 1) -> Run:
        if batch_size == 6:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")
        return run_transformers(model, mix, batch_size)

    monkeypatch.setattr(generate, "run_transformers", crowded)
    generate.run(task(tmp_path))
    numbers = result(tmp_path)["numbers"]
    assert numbers["missing"] == {"transformers, static batch of 6": "OutOfMemoryError: CUDA out of memory."}
    assert "transformers, static batch of 3" in numbers["requests_per_s"]


def test_a_prefix_that_was_not_found_is_no_figure(tmp_path: Path) -> None:
    engine = small_engine(tmp_path)
    with pytest.raises(SystemExit, match="prefix: 0 tokens of a prompt were cached, expected 32"):
        prefix.one_token(engine, list(range(40)), 32)
    assert prefix.one_token(engine, list(range(40)), 32) > 0  # it is there now


def test_a_failed_request_of_the_public_workload_is_no_figure(tmp_path: Path) -> None:
    """Five blocks hold no request of 100 tokens."""
    with pytest.raises(SystemExit, match="nano-vllm: request-1: "):
        nano_vllm.serve(small_engine(tmp_path, num_blocks=5), [BenchRequest([5] * 90, 10)])


# --- the command ------------------------------------------------------------------------------------------------------

SAVE = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index('--folder') + 1])
row = {{'metric': {metric!r}, 'unit': {unit!r}, 'value': 3.0, 'p20': 2.0, 'p80': 4.0, 'n': 5, 'model': 'm'}}
values = {{'headline': 'done', 'numbers': {{'goals': {goals!r}}}, 'rows': [row]}}
(folder / 'result.json').write_text(json.dumps(values))
"""


def fake(name: str, code: str = "", *, metric: str = "speed", unit: str = "tokens/s", **more: Any) -> Stage:
    """A part that saves one row and then runs the code."""
    text = SAVE.format(metric=metric, unit=unit, goals=more.get("goals", {})) + code
    return Stage(name, "engine", "fake", ("-S", "-c", text), more.get("minimum_s", 0), 30)


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """(exit code, stdout, stderr) of the script on fake parts; those not named are there and quick."""

    def run(stages: list[Stage], *arguments: str) -> tuple[int, str, str]:
        names = {stage.name for stage in stages}
        whole = [*stages, *(fake(name) for name in script.PARTS if name not in names)]
        code = script.main([str(tmp_path / "out"), "--device", "cpu", "--commit", "c0ffee", *arguments], whole)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "engine.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_part_that_fails_costs_its_own_rows(call: Call, tmp_path: Path) -> None:
    bad = Stage("nano-vllm", "engine", "fake", ("-S", "-c", "raise RuntimeError('CUDA out of memory')"), 0, 30)
    code, out, err = call([fake("decode", metric="fast"), bad, fake("prefix", metric="late", unit="ms")])
    assert code == 1
    assert "exit code 1: RuntimeError: CUDA out of memory" in out
    rows = rows_of(tmp_path / "out")
    assert [row["metric"] for row in rows] == ["fast", "speed", "speed", "speed", "speed", "late"]
    assert {(row["gpu"], row["commit"], row["n"]) for row in rows} == {("cpu", "c0ffee", "5")}
    assert err == "these are a CPU's times: they try the script and say nothing about a GPU\n"
    text = (tmp_path / "out" / "engine.svg").read_text()
    assert all(word in text for word in ("fast", "late", "decode (m), tokens/s", "prefix (m), ms"))


def test_what_a_part_saved_before_it_failed_is_kept(call: Call, tmp_path: Path) -> None:
    code, _, _ = call([fake("decode", "sys.exit('lost')", metric="half")], "--parts", "decode")
    assert code == 1
    assert [row["metric"] for row in rows_of(tmp_path / "out")] == ["half"]


def test_every_part_is_on_disk_before_the_next_begins(call: Call, tmp_path: Path) -> None:
    look = f"sys.exit(len(open({str(tmp_path / 'out' / 'engine.csv')!r}).readlines()) != 2)"
    assert call([fake("nano-vllm", look)], "--parts", "nano-vllm,decode")[0] == 0


def test_the_budget_ends_it(call: Call) -> None:
    code, out, _ = call([fake("decode", minimum_s=100)], "--budget", "60", "--parts", "decode,prefix")
    assert code == 4
    assert "it needs 100 s" in out


def test_a_gpus_numbers_stand_beside_their_goals(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "machine", lambda device, commit: Machine("NVIDIA H200", "580", commit, {}))
    parts = [
        fake("decode", metric="decode B=64 L=2048: of the limit", unit="share"),
        fake("nano-vllm", goals={"nano-vllm": 24_000.0, "nano-vllm-share": 0.67}),
        fake("allocators", goals={"paged-waste": 0.02}),
    ]
    code, out, err = call(parts, "--parts", "decode,nano-vllm,allocators")
    assert (code, err) == (0, "")
    table = (tmp_path / "out" / "goals.md").read_text()
    assert table.rstrip() in out
    lines = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[2:] for line in table.splitlines()}
    assert len(lines) == 2 + 6  # the heads, and the goals that are not the kernels'
    assert lines["decode, Llama-3.1-8B, 64 sequences of 2048"] == ["300%", "yes |"]
    assert lines["nano-vllm's workload, Qwen3-0.6B"] == ["24,000 tokens/s; 67% of the measured bound", "no |"]
    (waste,) = (cells for what, cells in lines.items() if what.startswith("paged against contiguous"))
    assert waste[1] == "in part |"
    # the summary is what `python -m benchmarks.goals` reads
    summary = goals.read_summary(tmp_path / "out" / "summary.json", {})
    assert summary["NVIDIA H200"].values == {
        "decode-roofline": 3.0, "nano-vllm": 24_000.0, "nano-vllm-share": 0.67, "paged-waste": 0.02,
    }  # fmt: skip


def test_a_cpus_numbers_meet_no_goal(call: Call, tmp_path: Path) -> None:
    call([fake("nano-vllm", goals={"nano-vllm": 99_000.0})], "--parts", "nano-vllm")
    assert "99,000" not in (tmp_path / "out" / "goals.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["{tmp}/new", "--parts", "decode,nonsense"], 2, "--parts: 'nonsense' is none; there are decode, prefill, "),
        (["{tmp}/new", "--parts", ""], 2, "--parts: '' is none"),
        (["{tmp}/new", "--budget", "0"], 2, "--budget must be above 0 (0)"),
        (["{tmp}/new", "--budget", "nan"], 2, "--budget must be above 0 (nan)"),
        (["{tmp}/old"], 2, "{tmp}/old holds an earlier call's results; name another folder"),
        (["{tmp}/file/new"], 3, "{tmp}/file/new cannot be made (Not a directory); name another folder"),
    ],
    ids=["no part", "an empty one", "no time", "no number", "a used folder", "no folder"],
)
def test_a_wrong_call_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, error: str
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "summary.json").touch()
    (tmp_path / "file").touch()
    argv = [argument.format(tmp=tmp_path) for argument in arguments]
    assert script.main([*argv, "--device", "cpu"], [fake(name) for name in script.PARTS]) == code
    err = capsys.readouterr().err
    assert err.startswith(f"engine.py: error: {error.format(tmp=tmp_path)}")
    assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_every_part_is_a_stage_of_the_gpu_script_in_its_order() -> None:
    names = [stage.name for stage in gpu.STAGES]
    places = [names.index(name) for name in script.PARTS]
    assert places == sorted(places)


def test_what_the_parts_are_expected_to_take_fits_their_limits_and_six_minutes() -> None:
    """The seconds that --help tells."""
    lines = [line.split() for line in (script.__doc__ or "").splitlines() if line.startswith("    ")]
    seconds = {words[0]: int(words[1]) for words in lines if words[0] in script.PARTS}
    assert list(seconds) == list(script.PARTS)
    assert sum(seconds.values()) <= 360
    assert all(seconds[stage.name] < stage.timeout_s for stage in gpu.STAGES if stage.name in seconds)


@pytest.mark.parametrize("name", ["engine", "simulate"])
def test_a_benchmark_called_engine_hides_the_engine_from_none(name: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["simulate", "scheduler", "engine_cpu"])
def test_a_benchmark_that_is_run_by_its_path_finds_the_engine_too(name: str, tmp_path: Path) -> None:
    """Its own folder, where engine.py is, comes first in what Python searches then."""
    argv = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--help"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_transformers_turns_by_the_same_scaled_angles(tmp_path: Path) -> None:
    stage = task(tmp_path)
    model = generate.causal_lm(stage, small_engine(tmp_path))
    assert model.config.rope_scaling["rope_type"] == "llama3"
    assert model.config.rope_scaling["factor"] == 8.0


@pytest.mark.full
def test_the_whole_script_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([str(tmp_path / "out"), "--device", "cpu"]) == 0, capsys.readouterr().out
    metrics = {line["metric"] for line in rows_of(tmp_path / "out")}
    assert {"nano-vllm: output", "engine: served", "decode B=2 L=32: of the limit"} <= metrics
    assert all(name in (tmp_path / "out" / "engine.svg").read_text() for name in script.PARTS)
