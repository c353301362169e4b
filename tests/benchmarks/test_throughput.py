"""`python -m benchmarks.throughput` counts what happened, gives every backend the same mix, and refuses in one line."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks import throughput
from benchmarks.throughput import (
    BenchRequest,
    LengthRange,
    Run,
    figures,
    main,
    random_mix,
    run_engine,
    run_transformers,
)
from engine import Engine, EngineConfig
from kvplan.core.errors import KvplanError, UsageError
from kvplan.models import catalog
from tests.support.small_models import load_reference, save_small_model

SMALL = ("--num-prompts", "6", "--input-len", "4-20", "--output-len", "3-9", "--max-model-len", "32", "--device", "cpu",
         "--dtype", "float32", "--num-blocks", "17", "--block-size", "4", "--max-num-batched-tokens", "64")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str


RunBench = Callable[..., Ran]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunBench:
    monkeypatch.delenv("KVPLAN_DEBUG", raising=False)

    def run_bench(*argv: str | Path) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run_bench


def small_engine(folder: Path, **options: Any) -> Engine:
    defaults = {"max_model_len": 64, "num_blocks": 100, "block_size": 4, "max_num_batched_tokens": 64}
    return Engine(folder, EngineConfig(device="cpu", dtype="float32", **{**defaults, **options}))


# --- the mix ----------------------------------------------------------------------------------------------------


def test_a_mix_follows_from_its_seed_and_keeps_to_its_ranges() -> None:
    ranges = (LengthRange(3, 5), LengthRange(7, 7))
    mix = random_mix(200, *ranges, vocab_size=11, seed=4)
    assert mix == random_mix(200, *ranges, vocab_size=11, seed=4)
    assert mix != random_mix(200, *ranges, vocab_size=11, seed=5)
    assert {len(request.prompt) for request in mix} == {3, 4, 5}
    assert {request.output_len for request in mix} == {7}
    assert {token for request in mix for token in request.prompt} == set(range(11))


@pytest.mark.parametrize(
    ("text", "expected"), [("128", LengthRange(128, 128)), ("16-256", LengthRange(16, 256)), ("1", LengthRange(1, 1))]
)
def test_a_length_is_a_number_or_a_range(text: str, expected: LengthRange) -> None:
    assert LengthRange.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize("text", ["", "0", "-5", "9-3", "a", "1-b", "1.5", "3-"])
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither a number of tokens nor a range"):
        LengthRange.parse(text)


# --- figures ----------------------------------------------------------------------------------------------------


def test_figures_of_a_run_worked_by_hand() -> None:
    mix = [BenchRequest([1] * 10, 3), BenchRequest([1] * 30, 2), BenchRequest([1] * 5, 1)]
    run = Run(2.0, [[0.1, 0.2, 0.5], [0.4, 2.0], [0.7]], [1, 2, 3, 2], num_preemptions=4, num_blocks=9)
    result = figures(mix, run)
    assert result.requests_per_second == 1.5  # 3 in 2 s
    assert result.output_tokens_per_second == 3.0  # 6 in 2 s
    assert result.total_tokens_per_second == 25.5  # 45 + 6 in 2 s
    assert result.mean_ttft_ms == pytest.approx(400)  # (100 + 400 + 700) / 3
    assert result.p50_ttft_ms == pytest.approx(400)
    assert result.p99_ttft_ms == pytest.approx(694)  # 0.98 of the way from the 2nd to the 3rd
    assert result.mean_itl_ms == pytest.approx(2000 / 3)  # gaps of 100, 300 and 1,600
    assert result.p50_itl_ms == pytest.approx(300)
    assert result.p99_itl_ms == pytest.approx(1574)  # 300 + 0.98 * 1,300
    assert (result.max_running, result.mean_running) == (3, 2.0)
    assert (result.num_preemptions, result.num_blocks) == (4, 9)


def test_single_tokens_have_no_latency_between_them() -> None:
    result = figures([BenchRequest([1], 1)], Run(1.0, [[1.0]], [1]))
    assert (result.mean_itl_ms, result.p50_itl_ms, result.p99_itl_ms) == (None, None, None)


# --- what runs --------------------------------------------------------------------------------------------------


def test_the_engine_run_has_a_time_for_every_token(llama: Path) -> None:
    mix = random_mix(7, LengthRange(4, 20), LengthRange(1, 9), vocab_size=256, seed=0)
    run = run_engine(small_engine(llama, max_num_seqs=3), mix)
    assert [len(times) for times in run.token_times_s] == [request.output_len for request in mix]
    assert all(times == sorted(times) for times in run.token_times_s)
    assert 0 < max(max(times) for times in run.token_times_s) <= run.elapsed_s
    assert max(run.num_running) == 3


def test_paged_memory_admits_more_than_reservations_in_the_same_pool(llama: Path) -> None:
    mix = random_mix(12, LengthRange(4, 7), LengthRange(4, 4), vocab_size=256, seed=0)
    runs = {
        allocator: run_engine(small_engine(llama, num_blocks=1 + 2 * 16, allocator=allocator), mix)
        for allocator in ("paged", "contiguous")
    }
    assert max(runs["contiguous"].num_running) == 2  # 64 tokens are 16 blocks, and the pool has 32
    assert max(runs["paged"].num_running) == 12  # at most 11 tokens are 3 blocks each, 36 in all; prompts take 2


def test_preemptions_are_those_of_the_run(llama: Path) -> None:
    engine = small_engine(llama, num_blocks=11)
    mix = [BenchRequest([5 + i] * 8, 20) for i in range(3)]  # 7 blocks each at their end, and the pool has 10
    first, second = run_engine(engine, mix), run_engine(engine, mix)
    assert first.num_preemptions > 0
    assert engine.stats().num_preemptions == first.num_preemptions + second.num_preemptions


def test_a_static_batch_generates_what_each_request_generates_alone(llama: Path) -> None:
    """Left padding changes nothing, so both ways of running transformers do the same work per request."""
    model = load_reference(llama)
    seen: list[torch.Tensor] = []
    generate = model.generate
    model.generate = lambda **inputs: seen.append(generate(**inputs))
    mix = random_mix(3, LengthRange(4, 20), LengthRange(4, 9), vocab_size=256, seed=0)
    together = run_transformers(model, mix, batch_size=3)
    alone = run_transformers(model, mix)
    for run in (together, alone):
        assert [len(times) for times in run.token_times_s] == [request.output_len for request in mix]
    longest = max(len(request.prompt) for request in mix)
    for row, request, single in zip(seen[0], mix, seen[1:], strict=True):
        assert single[0, len(request.prompt) :].tolist() == row[longest : longest + request.output_len].tolist()


def test_a_request_longer_than_the_model_is_refused_before_anything_runs(llama: Path) -> None:
    engine = small_engine(llama)
    with pytest.raises(UsageError, match=r"^mix: a request has 65 tokens, max_model_len is 64; raise it$"):
        run_engine(engine, [BenchRequest([1] * 60, 5)])
    assert not engine.has_unfinished


def test_a_pool_smaller_than_a_request_is_an_error_and_no_figure(llama: Path) -> None:
    with pytest.raises(KvplanError, match="the pool has 3"):
        run_engine(small_engine(llama, num_blocks=4), [BenchRequest([1] * 30, 5)])


# --- the command ------------------------------------------------------------------------------------------------


def test_the_command_runs_every_backend_on_one_mix(run: RunBench, llama: Path, tmp_path: Path) -> None:
    ran = run("--model", llama, *SMALL, "--output-json", tmp_path / "out.json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.split()[:3] == ["paged", "contiguous", "transformers"]
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["schema"] == "kvplan/engine-bench@1"
    backends = written["backends"]
    requests = {name: f["requests_per_second"] * f["elapsed_s"] for name, f in backends.items()}
    assert requests == pytest.approx({"paged": 6, "contiguous": 6, "transformers": 6})
    tokens = {round(f["total_tokens_per_second"] * f["elapsed_s"]) for f in backends.values()}
    assert len(tokens) == 1
    assert backends["contiguous"]["max_running"] == 2  # 16 blocks hold two reservations of 32 tokens
    assert backends["transformers"]["max_running"] == 1
    assert {name: f["num_blocks"] for name, f in backends.items()} == {
        "paged": 17, "contiguous": 17, "transformers": None,
    }  # fmt: skip


def test_the_table_shows_the_figures_of_the_json(run: RunBench, llama: Path, tmp_path: Path) -> None:
    ran = run("--model", llama, *SMALL, "--backends", "paged", "--output-json", tmp_path / "out.json")
    result = json.loads((tmp_path / "out.json").read_text())["backends"]["paged"]
    figures = {line.split("  ")[0]: line.split()[-1] for line in ran.out.splitlines()}
    assert figures["requests"] == f"{result['requests_per_second']:,.2f}"
    assert figures["time to first token, mean"] == f"{result['mean_ttft_ms']:,.2f}"
    assert figures["requests running, most"] == str(result["max_running"])
    assert len(ran.out.splitlines()) == 1 + len(result)


def test_a_catalog_name_runs_with_random_weights(
    run: RunBench, llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A small entry stands in for a real one, which is too large for a test."""
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"tiny-llama": {"source": "a test", "config": config}}))
    monkeypatch.setattr(catalog, "path", lambda: tmp_path / "models.yaml")
    ran = run("--model", "tiny-llama", *SMALL, "--backends", "paged,transformers")
    assert (ran.code, ran.err) == (0, "")


def test_without_transformers_its_column_is_skipped_by_name(
    run: RunBench, llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(throughput, "find_spec", lambda name: None)
    ran = run("--model", llama, *SMALL, "--backends", "paged,transformers", "--output-json", tmp_path / "out.json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[-1] == "transformers: skipped, transformers is not installed; pip install transformers"
    skipped = json.loads((tmp_path / "out.json").read_text())["backends"]["transformers"]
    assert skipped == {"skipped": "transformers is not installed; pip install transformers"}


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        pytest.param([], 2, "the following arguments are required: --model", id="no model"),
        pytest.param(["--model", "no-such-model"], 2, "no-such-model", id="unknown model"),
        pytest.param(["--model", "DIR", "--backends", "vllm"], 2, "--backends: 'vllm' is not known", id="backend"),
        pytest.param(["--model", "DIR", "--num-prompts", "0"], 2, "--num-prompts must be at least 1 (0)", id="none"),
        pytest.param(["--model", "DIR", "--num-prompts", "x"], 2, "argument --num-prompts: invalid int", id="letter"),
        pytest.param(["--model", "DIR", "--input-len", "9-3"], 2, "length: '9-3' is neither", id="range"),
        pytest.param(["--model", "DIR", "--dtype", "int8"], 2, "argument --dtype: invalid choice", id="dtype"),
        pytest.param(["--model", "DIR", "--block-size", "0"], 2, "block_size must be", id="block size"),
        pytest.param(["--model", "DIR", "--device", "tpu"], 2, "device: 'tpu' is not a device", id="device"),
        pytest.param(["--model", "DIR", "--input-len", "40"], 2, "max_model_len is 32", id="too long"),
        pytest.param(["--model", "DIR", "--num-blocks", "5"], 2, "does not fit", id="pool"),
        pytest.param(["--model", "DIR", "--output-json", "/no/such/f"], 3, "cannot be written", id="output"),
    ],
)
def test_a_refusal_is_one_line_with_its_exit_code(
    run: RunBench, llama: Path, argv: list[str], code: int, says: str
) -> None:
    words = [str(llama) if word == "DIR" else word for word in argv]
    defaults = SMALL if "--model" in argv else ()
    ran = run(*defaults, "--backends", "paged", *words)
    assert ran.code == code
    assert says in ran.err
    assert ran.err.startswith("benchmarks.throughput: error: ")
    assert len(ran.err.splitlines()) == 1


def test_a_bug_is_no_refusal(run: RunBench, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(throughput, "bench", crash)
    ran = run("--model", llama)
    assert (ran.code, ran.out) == (70, "")
    assert "ZeroDivisionError('planted')" in ran.err


def test_an_interrupt_has_its_own_code(run: RunBench, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(throughput, "bench", interrupt)
    assert run("--model", llama) == Ran(130, "", "")
