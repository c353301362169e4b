"""A report of samples that are few, odd or late: what it draws and says is what was measured, or nothing."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from kvplan.core.table import cell_text
from kvplan.measure.rundir import load_run
from kvplan.report.formats import as_csv, as_json, as_markdown
from kvplan.report.run_data import ReportData, RunData, report_data, run_data
from kvplan.report.run_figures import Counted, bars, drawing, rates
from kvplan.report.run_html import report_html
from kvplan.report.run_record import number
from kvplan.report.run_sentences import words_in
from kvplan.report.run_tables import run_table
from kvplan.report.run_text import shapes
from kvplan.report.sheets import Sheet, new_figure
from tests.support.parts import some
from tests.support.recorded_runs import (
    CPU_INPUTS,
    CPU_MEMORY,
    MIB,
    TINY,
    cpu_run,
    cpu_samples,
    gpu_run,
    manifest,
    rewritten,
    served,
    write_run,
)


def report_json(data: ReportData) -> str:
    return as_json(shapes(data))


def report_csv(data: ReportData) -> str:
    return as_csv(shapes(data))


def report_markdown(data: ReportData) -> str:
    return as_markdown(shapes(data))


def data_of(path: Path) -> RunData:
    return run_data(load_run(path), path.name)


def run_of(path: Path, samples: Sequence[dict[str, Any]], **entries: Any) -> RunData:
    """A complete run on a CPU with these samples."""
    start = manifest(TINY, "cpu", CPU_INPUTS, "tiny")
    return data_of(write_run(path, start, samples, memory=CPU_MEMORY, **entries))


def drawn_tokens(parts: Sequence[tuple[list[float], list[float]]]) -> float:
    """The area under the bars."""
    return sum(
        value * (end - begin)
        for edges, values in parts
        for value, (begin, end) in zip(values, pairwise(edges), strict=True)
    )


# --- tokens per second ------------------------------------------------------------------------------------------------


def test_a_step_after_idle_time_is_spread_over_the_step_alone(tmp_path: Path) -> None:
    """A step of 1 s, 8 s without a request, and a step of 1 s: the engine was busy for 2 s."""
    samples = [{"t": 1.0, "generation_tokens": 10, "num_steps": 1, "busy_s": 1.0}]
    samples += [{"t": float(t), "generation_tokens": 10, "num_steps": 1, "busy_s": 1.0} for t in range(2, 10)]
    samples += [{"t": 10.0, "generation_tokens": 40, "num_steps": 2, "busy_s": 2.0}]
    data = run_of(tmp_path / "run", samples)
    assert rates(data, "generation_tokens", 100) == [([0.0, 1.0, 9.0, 10.0], [10, 0, 30])]


def test_without_busy_seconds_a_step_begins_where_the_last_one_ended(tmp_path: Path) -> None:
    samples = [{"t": float(t), "generation_tokens": 10 * t, "num_steps": t} for t in (1, 2, 4)]
    data = run_of(tmp_path / "run", samples)
    assert rates(data, "generation_tokens", 100) == [([1.0, 2.0, 4.0], [20, 10])]


@pytest.mark.parametrize("points", [1, 3, 7, 50, 140])
def test_every_token_is_drawn_also_those_of_the_runs_end(points: int, tmp_path: Path) -> None:
    """1,024 tokens in 64 steps of 16, 10 ms each, that come in bursts with pauses between them."""
    samples, t = [], 0.0
    for step in range(1, 65):
        t += 0.01 + (0.5 if step % 10 == 0 else 0)
        samples.append({"t": t, "generation_tokens": 16 * step, "num_steps": step, "busy_s": 0.01 * step})
    data = run_of(tmp_path / "run", samples)
    parts = rates(data, "generation_tokens", points)
    assert drawn_tokens(parts) == pytest.approx(1024, rel=1e-9)
    ((edges, _),) = parts
    assert edges == sorted(set(edges))
    assert edges[-1] == pytest.approx(t)


def test_the_last_tokens_are_drawn_with_the_last_bar(tmp_path: Path) -> None:
    """The last step ends 0.1 s after the one before it, where bars are at least 1 s wide: 110 tokens in 10.1 s."""
    samples = [
        {"t": 10.0, "generation_tokens": 100, "num_steps": 1, "busy_s": 10.0},
        {"t": 10.1, "generation_tokens": 110, "num_steps": 2, "busy_s": 10.1},
    ]
    samples += [{"t": 0.1 * i, "rss": MIB} for i in range(99)]
    ((edges, values),) = rates(run_of(tmp_path / "run", samples), "generation_tokens", 10)
    assert edges == [0.0, 10.1]
    assert values == [pytest.approx(110 / 10.1)]


def test_tokens_after_a_long_pause_are_not_spread_over_the_pause(tmp_path: Path) -> None:
    """The run's last step takes 0.1 s where bars are at least 1 s wide: a bar of its own, as narrow as bars may be."""
    samples = [
        {"t": 1.0, "generation_tokens": 100, "num_steps": 1, "busy_s": 1.0},
        {"t": 11.0, "generation_tokens": 110, "num_steps": 2, "busy_s": 1.1},
    ]
    ((edges, values),) = rates(run_of(tmp_path / "run", samples), "generation_tokens", 10)
    assert edges == pytest.approx([0, 1, 10, 11])
    assert values == pytest.approx([100, 0, 10])


def test_bars_lose_no_token_and_are_never_narrower_than_asked_for() -> None:
    source = random.Random(0)
    for _ in range(5000):
        least, t = source.choice([1e-9, 0.05, 0.5, 1.0, 3.0]), 0.0
        parts = []
        for _ in range(source.randrange(1, 8)):
            begin = t + source.choice([0, 0.01, 0.3, 5]) * source.random()
            t = begin + source.choice([0.001, 0.01, 0.5, 2]) * (0.1 + source.random())
            parts.append(Counted(begin, t, source.randrange(1, 100)))
        edges, values = bars(parts, 0.0, least)
        assert drawn_tokens([(edges, values)]) == pytest.approx(sum(part.tokens for part in parts))
        assert edges[0] == 0
        assert edges[-1] == pytest.approx(t)
        widths = [end - begin for begin, end in pairwise(edges)]
        assert min(widths) >= (least * (1 - 1e-6) if len(widths) > 1 else 0)


def test_a_figure_that_one_page_has_no_room_for_is_drawn_for_the_other(tmp_path: Path) -> None:
    def draw(data: RunData, sheet: Sheet) -> Figure | None:
        return None if sheet.is_narrow else new_figure(sheet, 100)[0]

    def draw_none(data: RunData, sheet: Sheet) -> Figure | None:
        return None

    data = data_of(cpu_run(tmp_path / "cpu"))
    figure = drawing("kv", "A title", {}, draw, data, "x")
    assert figure is not None
    assert [name for name, _ in figure.svgs] == ["wide"]
    assert drawing("kv", "A title", {}, draw_none, data, "x") is None


def test_a_figure_of_one_width_is_seen_on_every_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pair, the page hides one; what stands alone has no class that is hidden."""
    monkeypatch.setattr(
        "kvplan.report.run_figures.draw_kv",
        lambda data, sheet: None if sheet.is_narrow else new_figure(sheet, 100)[0],
    )
    html = report_html(report_data([load_run(cpu_run(tmp_path / "cpu"))]))
    before = html.partition('aria-label="KV blocks and requests over time"')[0].rpartition("<div")[2]
    assert "sheet wide" not in before
    assert html.count('<div class="sheet wide"><svg') == html.count('<div class="sheet narrow"><svg') > 0


# --- samples from elsewhere -------------------------------------------------------------------------------------------

ODD = [None, "12", [1], {"a": 1}, True, 1e308, -1e308, 10**400, float("nan"), float("inf")]


@pytest.mark.parametrize("odd", some(ODD, [ODD[0], ODD[5], ODD[8]]), ids=lambda odd: f"{odd!r:.12}")
def test_odd_figures_in_samples_are_left_out(odd: Any, tmp_path: Path) -> None:
    path = cpu_run(tmp_path / "cpu")
    lines = (path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    keys = ("num_steps", "busy_s", "generation_tokens", "prompt_tokens", "num_used_blocks", "num_filled_slots", "rss")
    for i, key in enumerate(keys, 44):
        samples[i][key] = samples[i + 7][key] = odd
    (path / "samples.jsonl").write_text("".join(f"{json.dumps(sample)}\n" for sample in samples), encoding="utf-8")
    data = report_data([load_run(path)])
    page, *texts = (write(data) for write in (report_html, report_json, report_csv, report_markdown))
    assert "Tokens per second" in page
    assert not [text for text in (page, *texts) if "000,000,000,000" in text or "00000000000000" in text]


@pytest.mark.parametrize("odd", [None, "many", [3]])
def test_a_step_count_that_is_none_does_not_begin_a_second_engine(odd: Any, tmp_path: Path) -> None:
    samples = [
        {"t": float(t), "generation_tokens": 10 * t, "num_steps": odd if t == 3 else t, "busy_s": float(t)}
        for t in range(1, 6)
    ]
    ((edges, values),) = rates(run_of(tmp_path / "run", samples), "generation_tokens", 100)
    assert edges == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert values == [10.0] * 5


def test_no_measured_figure_is_as_large_as_some_floats() -> None:
    values = {"exabytes": 2**60, "float": 1e308, "int": 10**400, "below": -1e308, "truth": True, "none": None}
    assert {key: number(values, key) for key in values if number(values, key) is not None} == {"exabytes": 2**60}


@pytest.mark.parametrize("cause", [[], {}, ["a"], {"a": 1}, 5, False, 1.5])
def test_a_cause_that_is_no_text_is_written_as_it_stands(cause: Any, tmp_path: Path) -> None:
    """Should one come so far: the manifest's own check may refuse it before."""
    run = load_run(cpu_run(tmp_path / "cpu"))
    odd = replace(run, cause=cause, manifest=run.manifest | {"started_utc": cause})
    table = run_table(odd, "tiny", "the CPU")
    cells = {row[0]: cell_text(table, row, 1) for row in table.rows}
    assert (cells["cause"], cells["started"]) == (str(cause), str(cause))


# --- what is said -----------------------------------------------------------------------------------------------------


def test_the_most_blocks_are_those_of_the_densest_step_where_no_sample_saw_it(tmp_path: Path) -> None:
    """Samples saw 12 blocks and one preemption; the engine counted 42 of 128 after a step, and 3 preemptions."""
    results = served(2.0, 32, 4, 42, 600, num_preemptions=3)
    data = data_of(cpu_run(tmp_path / "cpu", results=results))
    assert data.findings["kv"] == "At most 42 blocks of 128 (32.8%) were in use; requests were preempted 3 times."
    sampled = data_of(cpu_run(tmp_path / "sampled", results=served(2.0, 32, 4, 7, 100)))
    assert sampled.findings["kv"].startswith("At most 12 blocks of 128 (9.4%) were in use; ")


def test_a_stage_without_a_steps_end_has_no_figures_of_the_engine(tmp_path: Path) -> None:
    """A prompt of one step: all that its stage saw of the engine is what there was before it."""
    figures = {"num_used_blocks": 0, "num_requests_running": 0, "num_steps": 0, "rss": 5 * MIB}
    samples = [{"t": 0.1 * i, "stage": "prefill", **figures} for i in range(1, 4)]
    samples += [
        {"t": 0.4 + 0.1 * i, "stage": "decode", "rss": 6 * MIB, "num_used_blocks": 7, "num_requests_running": 2,
         "num_steps": 1 + i}
        for i in range(3)
    ]  # fmt: skip
    table = run_of(tmp_path / "run", samples).tables["stages"]
    names = [column.name for column in table.columns]
    rows = {row[0]: dict(zip(names, row, strict=True)) for row in table.rows}
    assert (rows["prefill"]["most_num_used_blocks"], rows["prefill"]["most_num_requests_running"]) == (None, None)
    assert (rows["decode"]["most_num_used_blocks"], rows["decode"]["most_num_requests_running"]) == (7, 2)
    assert (rows["prefill"]["most_rss"], rows["decode"]["most_rss"]) == (5 * MIB, 6 * MIB)


@pytest.mark.parametrize("missing", ["own", "other", "both"])
def test_a_share_that_is_not_known_is_not_spoken_of(missing: str, tmp_path: Path) -> None:
    own, other = served(2.0, 32, 4, 12, 180), {"allocator": "contiguous", **served(5.0, 32, 3, 9, 100)}
    for results, name in ((own, "own"), (other, "other")):
        if missing in (name, "both"):
            results["densest"] = None
    data = data_of(cpu_run(tmp_path / "cpu", results=own | {"baseline": other}))
    shares = [row[3] for row in data.tables["allocators"].rows]
    assert shares.count(None) == (2 if missing == "both" else 1)
    assert data.findings["allocators"] == "In the same pool, paged blocks ran 4 requests at once and contiguous ones 3."
    whole = data_of(cpu_run(tmp_path / "whole")).findings["allocators"]
    assert whole.endswith(" 3; 6.2% and 30.6% of the allocated slots were empty.")  # 12 of 192 and 44 of 144


@pytest.mark.parametrize(("size", "answer"), [(1, "tiny on the CPU: the"), (2, "tiny on the CPU, rank 0 of 2: the")])
def test_the_answer_of_one_rank_says_so(size: int, answer: str, tmp_path: Path) -> None:
    path = rewritten(cpu_run(tmp_path / "cpu"), inputs=CPU_INPUTS | {"tensor_parallel_size": size})
    assert data_of(path).answer.startswith(answer)


def test_a_rank_that_failed_to_start_says_so_too(tmp_path: Path) -> None:
    start = manifest(TINY, "cpu", CPU_INPUTS | {"tensor_parallel_size": 4}, "tiny")
    data = data_of(write_run(tmp_path / "run", start, cpu_samples()[:5], "failed", "no memory"))
    assert data.answer == "tiny on the CPU, rank 0 of 4 failed to start: there is nothing to compare."


def test_a_peak_of_the_baseline_is_told_from_the_figure_that_is_compared(tmp_path: Path) -> None:
    samples = cpu_samples()
    samples[70]["rss"] = 500 * MIB
    data = run_of(tmp_path / "run", samples, results=served(2.0, 32, 4, 12, 180))
    peak = max(sample["rss"] for sample in samples if sample["stage"] != "baseline")
    assert peak == 200 * MIB + 1_900_000  # 201.81 MiB
    assert data.findings["over_time"] == (
        "Most resident memory: 500 MiB, 7.00 s after the start, in the stage baseline; the figure compared with "
        "the plan excludes that stage: 201.81 MiB."
    )
    assert "leaves" not in data_of(gpu_run(tmp_path / "gpu")).findings["over_time"]


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("without non_torch, kv_cache.", "without non-torch, KV cache."),
        ("(cuda_graphs) and num_blocks: 3", "(CUDA graphs) and blocks: 3"),
        ("power_w, sm_clock_mhz.", "power, SM clock."),
        ("nothing, 1.5 MiB.", "nothing, 1.5 MiB."),
    ],
)
def test_names_in_sentences_read_as_in_tables(sentence: str, expected: str) -> None:
    assert words_in(sentence) == expected
