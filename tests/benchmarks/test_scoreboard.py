"""The scoreboard: facts are sound, a fixed part of them is met within a stated margin, and other people's rows never
break it."""

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.accuracy import fit, report, summary
from benchmarks.accuracy.cases import MEASURED, Case, Malformed, Models, case_of, read_cases, release_of
from benchmarks.accuracy.fit import Point, fitted
from benchmarks.accuracy.scoring import GIVEN, Refused, Score, Scored, score_case
from benchmarks.accuracy.summary import Board, quantile
from benchmarks.scoreboard import FACTS, main, scoreboard
from kvplan.core.errors import InvalidInputError
from kvplan.models import catalog
from tests.support.oracle_data import DATA, needs_oracle_data

# --- the facts ----------------------------------------------------------------------------------------------------


def facts() -> Iterator[dict[str, str]]:
    with FACTS.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def test_every_fact_can_be_read_and_names_its_source() -> None:
    rows = list(facts())
    assert len(rows) >= 150
    assert len({row["id"] for row in rows}) == len(rows)
    assert not [row for row in read_cases(FACTS) if isinstance(row, Malformed)]
    assert all(row["source"] and row["thread"] and row["confidence"] in ("high", "medium", "low") for row in rows)
    assert all(any(row[f"measured.{name}"] for name in row_names(row)) for row in rows)


def row_names(row: dict[str, str]) -> list[str]:
    return [name.removeprefix("measured.") for name in row if name.startswith("measured.")]


def test_facts_are_numbers_and_flags_and_no_text_of_others() -> None:
    for row in facts():
        assert all(len(row[name]) <= 160 for name in row), row["id"]
        for name in row_names(row):
            assert row[f"measured.{name}"] == "" or math.isfinite(float(row[f"measured.{name}"]))


# --- a fixed part, re-scored --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def board() -> Board:
    return scoreboard(FACTS, Models())


@pytest.fixture(scope="module")
def scored() -> dict[str, Scored]:
    results = fit.scored_only([row for row in read_cases(FACTS) if isinstance(row, Case)], Models())
    return {result.case.id: result for result in results}


def line(board: Board, part: str) -> summary.Line:
    return next(row for row in board.validated if row.part == part)


def test_weights_are_within_half_a_percent_and_two_for_nine_in_ten(board: Board) -> None:
    standing = line(board, "weights")
    assert standing.n >= 60
    assert standing.median <= 0.001  # 0.03% when this was written
    assert standing.p90 <= 0.02


def test_the_pool_follows_from_the_logged_bytes_for_95_in_100(board: Board) -> None:
    parts = [row for row in board.validated if row.part in GIVEN]
    total = sum(row.n for row in parts)
    met = sum((row.exact or 0) + (row.explained or 0) for row in parts)
    exact = sum(row.exact or 0 for row in parts)
    assert total >= 130
    assert met / total >= 0.95
    assert exact / total >= 0.85  # most of the rest are recurrent states, whose caching a log does not tell


def test_the_pool_from_the_inputs_alone_is_within_two_percent_by_the_median(board: Board) -> None:
    line = next(row for row in board.validated if row.part == "available_kv")
    assert line.n >= 50
    assert line.median <= 0.02  # 1.4% when this was written


def test_the_pool_of_releases_never_fitted_is_within_five_percent_by_the_median(board: Board) -> None:
    standing = next(row for row in board.standings[summary.NOT_FITTED] if row.part == "available_kv")
    assert standing.n >= 3  # few: a sampler and non-torch memory over PCIe were set from logs of 0.27
    assert standing.median <= 0.05  # 2.7% when this was written


def test_most_scorable_cases_are_predicted(board: Board) -> None:
    assert board.coverage.cases >= 180
    assert board.coverage.share >= 0.88  # the rest have no GPU, no split or no scheme of their weights


# Logs with all flags that matter, of eight threads: none may drift by more than 0.5% of the pool.
KV_CASES = {
    "142": 50.28, "144": 32.00, "145": 51.38, "146": 64.45, "149": 34.49, "213": 33.37, "216": 10.63,
    "279": 15.52,
}  # fmt: skip


@pytest.mark.parametrize(("case", "logged"), KV_CASES.items())
def test_a_pool_that_was_met_stays_met(scored: dict[str, Scored], case: str, logged: float) -> None:
    pool = next(score for score in scored[case].scores if score.part == "available_kv")
    assert pool.logged == logged
    assert pool.predicted == pytest.approx(logged, rel=0.005)


# --- logs that nobody fitted ---------------------------------------------------------------------------------------

UNSEEN = FACTS.with_name("server_cases_unseen.csv")


@pytest.fixture(scope="module")
def unseen() -> Board:
    return scoreboard(UNSEEN, Models())


def test_whole_logs_that_nobody_fitted_are_met_and_lie_in_the_printed_range(unseen: Board) -> None:
    """Starts of 22 repositories, 0.6 to 0.27. At the first look: a median of 0.6%, 27 of 29 in the range."""
    pool = next(row for row in unseen.lines if row.part == "available_kv")
    assert pool.n >= 25
    assert pool.median <= 0.012
    assert (pool.covered or 0) >= 0.85
    assert 0 < (pool.width or 0) <= 0.15


# Experts under 0.10.2 and 0.12: their workspace is freed before the sampler runs, so that it takes nothing of the pool.
@pytest.mark.parametrize(("case", "logged"), [("c001", 18.15), ("c035", 41.68), ("c128", 8.68)])
def test_a_freed_workspace_of_experts_takes_nothing_of_the_pool(case: str, logged: float) -> None:
    rows = [row for row in read_cases(UNSEEN) if isinstance(row, Case) and row.id == case]
    (result,) = fit.scored_only(rows, Models())
    pool = next(score for score in result.scores if score.part == "available_kv")
    assert pool.logged == logged
    assert pool.predicted == pytest.approx(logged, rel=0.01)


# --- data it has never seen ---------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "id": 7, "thread": "a", "source": "somewhere", "engine": "vllm", "engine_version": "0.11.0", "confidence": "high",
    "model": "Qwen/Qwen3-8B", "gpu": "NVIDIA H100 80GB HBM3", "tp": 1, "max_model_len": 16000,
    "measured": {"weights_gib": 15.27, "available_kv_gib": 50.0},
}  # fmt: skip
BROKEN = [
    "not JSON at all",
    "[1, 2, 3]",
    "17",
    '{"measured": 3}',
    '{"id": 1, "engine": "vllm", "tp": "two"}',
    '{"id": 1, "engine": "vllm", "tp": -1}',
    '{"id": 1, "engine": "vllm", "pp": 1000000000}',
    '{"id": 1, "engine": "vllm", "measured": {"weights_gib": NaN}}',
    '{"id": 1, "engine": "vllm", "measured": {"weights_gib": 1e400}}',
    '{"id": 1, "engine": "vllm", "measured": {"weights_gib": true}}',
    '{"id": {}, "engine": "vllm"}',
    '{"model": ["a"]}',
    '{"enforce_eager": "perhaps"}',
    "[" * 100_000,
    '{"id": "\\u001b[31m\\u0000", "engine": 5e9, "max_model_len": 1.5}',
]


def test_each_row_that_cannot_be_read_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join([*BROKEN[:7], json.dumps(GOOD), "", *BROKEN[7:]]) + "\n", encoding="utf-8")
    assert main([str(data)]) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert len(lines) == len(BROKEN)
    assert all(text.endswith("; skipped") and text.isprintable() for text in lines)
    assert "line 8: " not in err  # the good row's
    assert "1 cases, 1 scorable, 1 predicted (100%)" in out


def test_nothing_to_score_is_one_line_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("a.jsonl", "junk\n"), ("b.jsonl", ""), ("c.csv", "id,engine\n1,vllm\n")):
        data = tmp_path / name
        data.write_text(content, encoding="utf-8")
        assert main([str(data)]) == 2
        assert capsys.readouterr().err.splitlines()[-1].endswith("no case in it can be scored")
    assert main([str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl" in capsys.readouterr().err
    assert main([str(tmp_path / "a.jsonl"), "--models", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.endswith("is not a directory; name the folder of org__name folders\n")


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    changes_by_reason: dict[str, dict[str, Any]] = {
        "engine trt is not one that is scored": {"engine": "trt"},
        "its confidence is low": {"confidence": "low"},
        "no model is named": {"model": None},
        "its model is neither in the catalog nor among the configs given": {"model": "nobody/nothing-3b"},
        "no release is named": {"engine_version": None},
        "its version names no release": {"engine_version": "the newest"},
    }
    for why, changes in changes_by_reason.items():
        row = case_of(1, {**GOOD, **changes})
        assert isinstance(row, Case)
        outcome = score_case(row, Models())
        assert isinstance(outcome, Refused)
        assert outcome.why == why
        assert not outcome.scorable


def test_what_is_not_stated_beside_model_and_release_counts_as_scorable_and_refused() -> None:
    changes_by_reason: dict[str, dict[str, Any]] = {
        "12 GiB of its weights lie in the CPU's memory": {"other_flags": "--cpu-offload-gb 12"},
        "its draft model is not named": {"other_flags": "EAGLE"},
        "how its GPUs share the model is not stated": {"tp": None, "n_gpus": 4},
    }
    for why, changes in changes_by_reason.items():
        row = case_of(1, {**GOOD, **changes})
        assert isinstance(row, Case)
        outcome = score_case(row, Models())
        assert isinstance(outcome, Refused)
        assert (outcome.why, outcome.scorable) == (why, True)


def test_a_case_kvplan_refuses_counts_as_scorable() -> None:
    row = case_of(1, {**GOOD, "tp": 7})  # 7 does not divide 32 heads
    assert isinstance(row, Case)
    outcome = score_case(row, Models())
    assert isinstance(outcome, Scored)
    assert not outcome.scores
    cover = summary.coverage([outcome], [])
    assert (cover.scorable, cover.predicted) == (1, 0)
    assert cover.refused


def test_a_context_that_was_stretched_is_taken() -> None:
    for flags, refused in (("", True), ("YaRN by hf-overrides", False)):
        row = case_of(1, {**GOOD, "max_model_len": 131_072, "other_flags": flags})
        assert isinstance(row, Case)
        result = score_case(row, Models())
        assert isinstance(result, Scored)
        assert ("supports up to 40,960" in str(result.refused)) is refused


@pytest.mark.parametrize(
    ("version", "source", "notes", "number"),
    [
        ("0.11.0", "", "", (0, 11)),
        ("v0.8.5.post1", "", "", (0, 8)),
        ("0.8.0rc3.dev5+g5eeabc2a.d20250318", "", "", (0, 8)),
        ("0.1.dev3896+ga491d6f.d20250103", "", "", (0, 6)),  # a build without a tag, by its date
        ("~0.10.2", "", "", (0, 10)),
        ("0.20-0.21", "", "", (0, 21)),
        ("0.7.x (V0)", "", "", (0, 7)),
        ("container (2026-04)", "", "", (0, 19)),
        (None, "llm-d-planner docs/empirical-vllm-memory-results.md", "", (0, 11)),
        (None, "", "the container was vLLM 0.9.2", (0, 9)),
    ],
)
def test_words_for_a_release(version: str | None, source: str, notes: str, number: tuple[int, int]) -> None:
    row = case_of(1, {**GOOD, "engine_version": version, "source": source, "notes": notes})
    assert isinstance(row, Case)
    assert release_of(row) == number


def test_sglang_pools_hold_what_their_sizes_say() -> None:
    # sgl-project/sglang#6753: Llama-3-8B, K and V of 53.18 GB hold 871,371 tokens: 106.36 GiB / 131,072 B, within 0.01
    measured = {"sgl_k_gb": 53.18, "sgl_v_gb": 53.18, "kv_cache_tokens": 871_371, "sgl_weight_mem_gb": 14.98}
    stated = {"engine": "sglang", "engine_version": "0.4.7", "model": "meta-llama/Meta-Llama-3-8B-Instruct",
              "max_model_len": None}  # fmt: skip
    row = case_of(1, {**GOOD, **stated, "measured": measured})
    assert isinstance(row, Case)
    outcome = score_case(row, Models())
    assert isinstance(outcome, Scored)
    by_part = {score.part: score for score in outcome.scores}
    assert by_part["tokens given KV"].exact
    assert by_part["weights"].predicted == pytest.approx(14.98, abs=0.005)  # parameters and tables alone are 14.96
    wrong = case_of(1, {**GOOD, **stated, "measured": {**measured, "kv_cache_tokens": 881_371}})
    assert isinstance(wrong, Case)
    again = score_case(wrong, Models())
    assert isinstance(again, Scored)
    assert not next(score for score in again.scores if score.part == "tokens given KV").exact


def test_a_log_with_keys_and_values_of_a_model_without_any_is_not_scored_by_them() -> None:
    stated = {"engine": "sglang", "engine_version": "0.5.9", "model": "BAAI/bge-m3", "max_model_len": None}
    measured = {"sgl_k_gb": 53.18, "sgl_v_gb": 53.18, "kv_cache_tokens": 871_371}
    row = case_of(1, {**GOOD, **stated, "measured": measured})
    assert isinstance(row, Case)
    scored = score_case(row, Models())
    assert not isinstance(scored, Scored) or all(score.part != "tokens given KV" for score in scored.scores)


@pytest.mark.parametrize(
    ("version", "fork"),
    [
        ("0.20.2rc1.dev249+glmkimirebase20260514", True),
        ("0.26.1rc0+infernal.invocation.cu133.r21", True),
        ("somebody/vllm:stack-20260424", True),
        ("2026-09 (somebody image)", True),
        ("2026-09 (official image)", False),
        ("0.9.1.dev148+gfba064270.d20250526", False),
        ("vllm/vllm-openai:latest (2026-08)", False),
        ("0.11.0", False),
        ("0.11.0+cu128", False),
    ],
)
def test_a_fork_is_not_asked_at_all(version: str, fork: bool) -> None:
    row = case_of(1, {**GOOD, "engine_version": version})
    assert isinstance(row, Case)
    result = score_case(row, Models())
    assert isinstance(result, Refused) is fork
    cover = summary.coverage([result] if isinstance(result, Scored) else [], [result] if fork else [])  # type: ignore[list-item]
    assert (cover.scorable, sum(cover.own_builds.values())) == ((0, 1) if fork else (1, 0))


def test_a_build_that_a_collector_calls_a_fork_is_not_asked() -> None:
    for notes, is_scored in (("fork build with a draft", False), ("image v0.11.0 in its section", True)):
        row = case_of(1, {**GOOD, "notes": notes})
        assert isinstance(row, Case)
        assert isinstance(score_case(row, Models()), Scored) is is_scored


# vLLM allocates adapter slots while loading: for Qwen3-8B (36 layers, hidden 4096, 32 and 8 heads of 128, intermediate
# 12288), rank 32 and bf16, A and B of qkv, o, gate_up and down of every layer; a slot is
# 36 * 2 * 32 * ((3 * 4096 + 4096 + 2 * 1024) + (4096 + 4096) + (2 * 4096 + 2 * 12288) + (12288 + 4096)) B,
# and of the embedding and the output head 2 * 2 * 32 * (151936 + 4096) B. Beside the slots stand the mappings of a
# step's tokens to them, less than a MiB.
SLOT_GIB = (36 * 2 * 32 * (18432 + 8192 + 32768 + 16384) + 2 * 2 * 32 * (151936 + 4096)) / 2**30


@pytest.mark.parametrize(
    ("flags", "slots"),
    [
        ("", 0),
        ("--enable-lora; --max-lora-rank=32", 1),
        ("--enable-lora --max-loras 4 --max-lora-rank 32", 4),
        ("non_default_args: {'enable_lora': True, 'max_loras': 2, 'max_lora_rank': 32}", 2),
        ("--max-loras=4 --max-lora-rank=32", 0),  # without --enable-lora nothing is reserved
        ("non_default_args: {'enable_lora': False, 'max_loras': 2, 'max_lora_rank': 32}", 0),
    ],
)
def test_adapters_that_a_record_states_are_in_the_weights(flags: str, slots: int) -> None:
    weights = [
        next(score.predicted for score in result.scores if score.part == "weights")
        for row in (case_of(1, GOOD), case_of(1, {**GOOD, "other_flags": flags}))
        if isinstance(row, Case) and isinstance(result := score_case(row, Models()), Scored)
    ]
    assert weights[1] - weights[0] == pytest.approx(slots * SLOT_GIB, abs=0 if slots == 0 else 1 / 1024)


def test_a_checkpoints_own_config_goes_before_the_catalog(tmp_path: Path) -> None:
    config = {**catalog.expand(catalog.facts("qwen3-8b")["config"]), "num_hidden_layers": 18}
    (tmp_path / "Qwen__Qwen3-8B").mkdir()
    (tmp_path / "Qwen__Qwen3-8B" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert Models().spec("Qwen/Qwen3-8B").num_layers == 36
    assert Models(tmp_path).spec("Qwen/Qwen3-8B").num_layers == 18


# --- SGLang's free memory -----------------------------------------------------------------------------------------

# A public start of SGLang 0.5 on an RTX 4090 with --mem-fraction-static 0.85: weights of 8.62 GiB, 14.47 free after
# loading, 3.40 after the pool. Of the 14.47 + 8.62 free before it keeps back 0.15, and sets 100 MiB aside for images:
# 14.47 - 0.15 * 23.09 - 100 / 1024 = 10.9088.
FREE_MEMORY: dict[str, Any] = {
    "engine": "sglang", "engine_version": "0.5", "model": "Qwen/Qwen3.5-4B", "gpu": "RTX 4090", "max_model_len": 4096,
    "other_flags": "mem-fraction-static=0.85",
    "measured": {"sgl_weight_mem_gb": 8.62, "sgl_avail_after_load_gb": 14.47, "sgl_avail_after_pool_gb": 3.40},
}  # fmt: skip


def test_sglangs_pool_follows_from_the_memory_it_found_free() -> None:
    row = case_of(1, {**GOOD, **FREE_MEMORY})
    assert isinstance(row, Case)
    result = score_case(row, Models())
    assert isinstance(result, Scored)
    by_part = {score.part: score for score in result.scores}
    assert by_part["pool given free memory"].predicted == pytest.approx(10.9088, abs=0.01)
    assert by_part["pool given free memory"].logged == pytest.approx(14.47 - 3.40)
    assert by_part["free_after_load"].logged == 14.47
    assert by_part["free_after_pool"].predicted == pytest.approx(3.40, rel=0.05)


def test_sglang_needs_no_release_where_it_was_told_its_share() -> None:
    for version in ("2026-02", "0.2.13", None):
        row = case_of(1, {**GOOD, **FREE_MEMORY, "engine_version": version})
        assert isinstance(row, Case)
        result = score_case(row, Models())
        assert isinstance(result, Scored)
        assert "pool given free memory" in [score.part for score in result.scores]
        untold = case_of(1, {**GOOD, **FREE_MEMORY, "engine_version": version, "other_flags": ""})
        assert isinstance(untold, Case)
        again = score_case(untold, Models())
        if version is None:
            assert isinstance(again, Refused)
            assert again.why == "no release is named"
        else:
            assert isinstance(again, Scored)
            assert "its default share of the memory" in dict(again.refused)["budget"]


# --- releases that the constants were never fitted on ----------------------------------------------------------------


def test_releases_without_a_fitted_log_stand_apart(board: Board) -> None:
    rows = {row["id"]: row for row in facts()}
    assert {row["fitted"] for row in rows.values()} == {"true", "false"}
    assert list(board.standings) == [summary.FITTED, summary.NOT_FITTED, summary.SGLANG]
    for part in ("weights", "available_kv"):
        apart = [standing.n for lines in board.standings.values() for standing in lines if standing.part == part]
        assert sum(apart) == line(board, part).n
    assert {"0.11", "0.10"} <= set(board.fitted_on)
    assert not {"0.23", "0.28", "0.29"} & set(board.fitted_on)
    never = [row for row in board.predictions if row.standing == summary.NOT_FITTED]
    assert not {row.version for row in never} & set(board.fitted_on)


def test_constants_come_from_logs_marked_as_fitted_alone(tmp_path: Path, board: Board) -> None:
    text = FACTS.read_text(encoding="utf-8")
    names = text.splitlines()[0].split(",")
    odd = {"id": "odd", "thread": "odd", "fitted": "false", "measured.non_torch_gib": "70", "tp": "1"}
    odd |= {name: str(GOOD[name]) for name in ("engine", "engine_version", "confidence", "model", "gpu")}
    data = tmp_path / "facts.csv"
    data.write_text(text + ",".join(odd.get(name, "") for name in names) + "\n", encoding="utf-8")
    assert scoreboard(data, Models(), data).constants == board.constants


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 2**40),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=2),
)
FIELDS = (
    *GOOD, "pp", "dp", "ep", "quantization", "kv_cache_dtype", "dtype", "block_size", "max_num_seqs", "notes",
    "max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager", "other_flags",
)  # fmt: skip
ROWS = st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=6)


@given(ROWS, st.dictionaries(st.sampled_from(MEASURED), ANY, max_size=5))
def test_no_row_raises(changes: dict[str, Any], measured: dict[str, Any]) -> None:
    row = case_of(1, {**GOOD, **changes, "measured": {**GOOD["measured"], **measured}})
    if isinstance(row, Case):
        outcome = score_case(row, Models())
        if isinstance(outcome, Scored):
            assert all(math.isfinite(score.predicted) for score in outcome.scores)


def test_csv_and_json_lines_say_the_same(tmp_path: Path, scored: dict[str, Scored]) -> None:
    rows = []
    for row in facts():
        plain = {name: value or None for name, value in row.items() if not name.startswith("measured.")}
        figures = {name: float(row[f"measured.{name}"]) for name in MEASURED if row[f"measured.{name}"]}
        rows.append({**plain, "measured": figures})
    data = tmp_path / "facts.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    again = fit.scored_only([row for row in read_cases(data) if isinstance(row, Case)], Models())
    assert {result.case.id: result.scores for result in again} == {
        name: result.scores for name, result in scored.items()
    }


def test_the_json_holds_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "one.jsonl", tmp_path / "out.json"
    data.write_text(json.dumps(GOOD) + "\n", encoding="utf-8")
    assert main([str(data), "--json", str(out)]) == 0
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["schema"] == "kvplan/scoreboard@1"
    output = capsys.readouterr().out
    for part_row in written["validated"]:
        assert f"{part_row['part'].replace('_', '-')} " in output
        assert part_row["n"] == 1
    assert main([str(data), "--json", str(tmp_path)]) != 0  # a directory
    assert "Traceback" not in capsys.readouterr().err


# --- the arithmetic of errors -------------------------------------------------------------------------------------


def test_errors_by_hand() -> None:
    assert Score("weights", 11.0, 10.0).relative == pytest.approx(0.1)
    assert Score("available_kv", -1.0, -2.0).relative == pytest.approx(0.5)
    assert [quantile([3.0, 1.0, 2.0, 4.0], share) for share in (0.5, 0.75, 0.9)] == [2.0, 3.0, 4.0]
    standing = summary.line_of("weights", [Score("weights", 10.0 + error, 10.0) for error in (0.1, 0.2, 0.9)])
    assert (standing.n, round(standing.median, 9), round(standing.max, 9), standing.exact) == (3, 0.02, 0.09, None)


def test_a_thread_of_many_logs_counts_once() -> None:
    points = [Point("k", "one", 10.0)] * 9 + [Point("k", "two", 2.0), Point("k", "three", 3.0)]
    constant = fitted(points)["k"]
    assert (constant.value, constant.low, constant.high, constant.logs, constant.threads) == (3.0, 2.0, 10.0, 11, 3)


def test_a_case_is_predicted_without_its_own_thread(scored: dict[str, Scored]) -> None:
    # Thread 132 has most of H100's logs. Validated, its non-torch memory comes from the others alone.
    result = scored["145"]
    others = [other for other in scored.values() if other.case.thread != result.case.thread]
    constants = fitted(point for other in others for point in fit.points_of(other))
    validated = fit.cross_validated([result], list(scored.values()))[0]
    predicted = {score.part: score.predicted for score in validated.scores}
    assert predicted["non_torch"] == pytest.approx(constants["non-torch one"].value, abs=1e-6)
    shipped = {score.part: score.predicted for score in result.scores}
    moved = sum(predicted[part] - shipped[part] for part in ("activation", "non_torch"))
    assert predicted["available_kv"] == pytest.approx(shipped["available_kv"] - moved, abs=1e-6)


def test_what_samples_is_fitted_only_where_nobody_said_what_is_installed(scored: dict[str, Scored]) -> None:
    # 0.11 on H100 (llm-d-benchmark) sorts, whose bytes are derived; of 0.10 some logs sort, some do not, none says so
    points = {name: fit.points_of(scored[name]) for name in ("145", "148", "123", "195")}
    kinds = {name: [point for point in rows if point.kind.startswith("sampler")] for name, rows in points.items()}
    assert kinds["145"] == kinds["148"] == []
    for name in ("123", "195"):
        [point] = kinds[name]
        assert point.kind == "sampler of 0.8 to 0.10, not told"
        assert point.value < 16


@pytest.mark.parametrize("page", ["README.md", "reports/accuracy/README.md"])
def test_the_pages_say_what_the_scoreboard_says(board: Board, page: str) -> None:
    path = FACTS.parents[2] / page
    section = report.readme_section(board) if page == "README.md" else report.page_section(board)
    text = path.read_text(encoding="utf-8")
    assert report.replaced(text, section, path) == text, f"`{report.COMMAND}` rewrites it"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="has no marks to write between"):
        report.replaced("# A page\n", "content", Path("page.md"))


@needs_oracle_data
def test_other_peoples_cases_score_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(DATA / "server_logs.jsonl"), "--models", str(DATA / "models")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "170 cases" in out.splitlines()[0]
