"""`kvplan report`: one run or several in four formats that say the same, also where a run was killed or never began."""

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.table import Table, text
from kvplan.documents.reconciliation import document as reconciliation_document
from kvplan.measure import reconcile
from kvplan.measure.run_types import Sample
from kvplan.measure.rundir import load_run
from kvplan.report import run_sentences
from kvplan.report.formats import as_csv, as_json, as_markdown
from kvplan.report.run_contexts import blocks_per_request, contexts
from kvplan.report.run_data import ReportData, RunData, report_data, run_data
from kvplan.report.run_figures import rates, run_drawings, stacked, thinned
from kvplan.report.run_html import report_html
from kvplan.report.run_record import memory_key, reading
from kvplan.report.run_text import shapes
from kvplan.servers.logs.measurement import ComponentRow
from tests.support.cli import Run, refused, run
from tests.support.parts import some
from tests.support.recorded_runs import (
    CPU_INPUTS,
    CPU_MEMORY,
    MIB,
    TINY,
    cpu_run,
    cpu_samples,
    failed_run,
    gpu_run,
    killed_run,
    manifest,
    rewritten,
    served,
    write_run,
)

__all__ = ["run"]

NUMBER = re.compile(r"[-+]?[\d,]+(?:\.\d+)?")
FACTORS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "%": 0.01}


def report_json(data: ReportData) -> str:
    return as_json(shapes(data))


def report_csv(data: ReportData) -> str:
    return as_csv(shapes(data))


def report_markdown(data: ReportData) -> str:
    return as_markdown(shapes(data))


def data_of(path: Path) -> RunData:
    return run_data(load_run(path), path.name)


class Page(HTMLParser):
    """The page's tables: by id, rows of (text, the number behind it or None); and every tag with its attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[tuple[str, str | None]]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._cell: list[str] | None = None
        self._value: str | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag == "table":
            self._rows = self.tables.setdefault(str(attributes["id"]), [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._cell, self._value = [], None
        elif tag == "data":
            self._value = attributes["value"]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell is not None:
            self._rows[-1].append(("".join(self._cell).strip().replace("\xa0", " "), self._value))
            self._cell = None

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._cell is not None:
            self._cell.append(data)


def markdown_tables(markdown: str) -> list[list[list[str]]]:
    """The rows of every table, header first, in order; escapes undone."""
    tables: list[list[list[str]]] = []
    for block in markdown.split("\n\n"):
        lines = block.splitlines()
        if lines and lines[0].startswith("| "):
            rows = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in (lines[0], *lines[2:])]
            tables.append([[re.sub(r"\\(.)", r"\1", cell) for cell in row] for row in rows])
    return tables


def read(figure: str) -> tuple[float, float]:
    """(value, half of its last place) of a number as readers see it: "513.13 MiB", "-31.48%", "3,328 tokens"."""
    match = NUMBER.match(figure)
    assert match, figure
    unit = figure[match.end() :].strip().split(" ")[0]
    decimals = len(match[0].partition(".")[2])
    factor = FACTORS.get(unit, 1)
    return float(match[0].replace(",", "")) * factor, 0.5000001 * 10**-decimals * factor


RUNS: dict[str, Callable[[Path], Path]] = {
    "cpu": cpu_run,
    "gpu": gpu_run,
    "killed": killed_run,
    "failed": failed_run,
}


# --- the four formats agree -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=some(RUNS, ("gpu", "failed")))
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ReportData, str]:
    """A run's data and its page, which takes a second to draw."""
    data = report_data([load_run(RUNS[request.param](tmp_path_factory.mktemp("report") / request.param))])
    return data, report_html(data)


def test_json_csv_html_and_markdown_hold_the_same_numbers(report: tuple[ReportData, str]) -> None:
    data, html = report
    document = json.loads(report_json(data))
    tables = {**document["runs"][0]["tables"], **document["tables"]}
    cells = list(csv.DictReader(io.StringIO(report_csv(data))))
    page = Page(html)
    written = markdown_tables(report_markdown(data))
    assert len(written) == len(tables) == len(page.tables)
    num_numbers = 0
    for (table_name, rows), markdown_rows in zip(tables.items(), written, strict=True):
        prefix = "all" if table_name in document["tables"] else "run-1"
        html_rows = page.tables[f"{prefix}-{table_name}"]
        assert [[words for words, _ in row] for row in html_rows] == markdown_rows
        for i, row in enumerate(rows, 1):
            in_csv = {c["column"]: c["value"] for c in cells if c["table"] == table_name and c["row"] == str(i)}
            visible = [value for key, value in row.items() if key != "unit"]
            for value, (cell, behind) in zip(visible, html_rows[i], strict=True):
                if isinstance(value, int | float):
                    assert behind is not None
                    assert float(behind) == value
                    number, tolerance = read(cell) if not cell.startswith("under") else (0.0, 0.0005)
                    assert number == pytest.approx(value, abs=tolerance, rel=0)
                    num_numbers += 1
            as_csv = {key: "" if value is None else str(value) for key, value in row.items()}
            assert {key: value.removeprefix("'") for key, value in in_csv.items()} == as_csv
    assert num_numbers > 40


def test_the_answer_and_what_to_know_first_are_in_every_format(report: tuple[ReportData, str]) -> None:
    data, html = report
    sentences = [data.runs[0].answer, *([data.runs[0].banner] if data.runs[0].banner else [])]
    page = " ".join(Page(html).words).replace("\xa0", " ")
    plain = re.sub(r"\\(.)", r"\1", report_markdown(data))
    (document,) = json.loads(report_json(data))["runs"]
    cells = [row["value"] for row in csv.DictReader(io.StringIO(report_csv(data)))]
    for sentence in sentences:
        assert sentence in page
        assert sentence in plain
        assert sentence in (document["answer"], document["banner"])
        assert sentence in cells


def test_the_memory_rows_are_those_of_reconcile(tmp_path: Path) -> None:
    path = cpu_run(tmp_path / "cpu")
    expected = reconciliation_document(reconcile.reconcile_run(load_run(path)))
    (document,) = json.loads(report_json(report_data([load_run(path)])))["runs"]
    rows = document["tables"]["memory"]
    assert rows[:-1] == [
        {key: row[key] for key in ("component", "predicted", "measured", "relative", "error")}
        for row in (*expected["rows"], expected["total"])
    ]
    assert rows[-1]["measured"] == expected["reported"]
    assert document["tables"]["pool"] == expected["capacity"]


@pytest.mark.full
def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    path = cpu_run(tmp_path / "cpu")
    first, second = (report_html(report_data([load_run(path)])) for _ in range(2))
    assert first == second


@pytest.mark.full
def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    paths = [cpu_run(tmp_path / "a" / "one"), gpu_run(tmp_path / "two"), cpu_run(tmp_path / "b" / "one")]
    data = report_data([load_run(path) for path in paths], "Three runs")
    assert [side.label for side in data.runs] == ["one (1)", "two", "one (2)"]
    rows = json.loads(report_json(data))["tables"]["comparison"]
    assert [(row["run"], row["num_blocks"], row["kv_cache"]) for row in rows] == [
        ("one (1)", 129, 129 * 8192),
        ("two", 28_000, 28_000 * 2 * MIB),
        ("one (2)", 129, 129 * 8192),
    ]
    page = Page(report_html(data))
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert markdown_tables(report_markdown(data))[0] == [
        [words for words, _ in row] for row in page.tables["all-comparison"]
    ]


def test_the_answer_says_what_fits_and_how_far_the_prediction_was_off(tmp_path: Path) -> None:
    data = data_of(cpu_run(tmp_path / "cpu"))
    assert data.answer.startswith(
        "tiny on the CPU: the KV pool of 1.01 MiB holds 42 requests of 41 tokens; predicted against measured, "
        "the weights are exact, the KV cache is exact, and the predicted rows together are "
    )
    total = reconcile.reconcile_run(data.run).total
    assert total.error is not None
    assert total.predicted is not None
    assert total.predicted < total.size  # this run's plan leaves out what nothing explains
    assert data.answer.endswith(f"{-total.error / 1024:.2f} KiB ({-100 * total.error / total.size:.1f}%) below.")


@pytest.mark.parametrize(
    ("predicted", "measured", "words"),
    [
        (990, 1000, "10 B (1.0%) below"),  # the tables' error of such a row is -1.0%
        (1010, 1000, "10 B (1.0%) above"),
        (1000, 1000, "exact"),
        (None, 1000, "not comparable"),
    ],
)
def test_a_deviation_has_the_sign_of_the_tables_error(predicted: int | None, measured: int, words: str) -> None:
    assert run_sentences.deviation(ComponentRow("weights", "bytes", predicted, measured)) == words


# --- what the numbers are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "windows", "in_flight", "blocks"),
    [
        (41, [0], 64, 3),  # 16 + 16 + 9
        (48, [0], 64, 3),
        (49, [0], 64, 4),
        (160, [0, 0], 64, 20),  # two groups share no block
        (1024, [0, 128], 64, 64 + 13),  # the window: 127 + 64 tokens span 12 blocks, one more as it starts anywhere
        (32, [128], 64, 2),  # shorter than the window: no more than all of it
        (1024, [], 64, 0),
    ],
)
def test_blocks_of_one_request_by_hand(tokens: int, windows: list[int], in_flight: int, blocks: int) -> None:
    assert blocks_per_request(tokens, windows, 16, in_flight) == blocks


def test_contexts_go_as_far_as_one_request_fits() -> None:
    def blocks(tokens: int) -> int:
        return -(-tokens // 16)

    assert contexts(blocks, 208, 16, 193, 8192) == [193, 1024, 2048, 3328]  # 208 * 16 = 3,328 tokens
    assert contexts(blocks, 12, 16, 41, 8192) == [41, 192]
    assert contexts(blocks, 10_000, 16, 8192, 4096) == [1024, 2048, 4096]  # no longer than the model was made for
    assert contexts(blocks, 0, 16, 41, 8192) == []


def test_the_capacity_table_counts_the_blocks_of_the_run(tmp_path: Path) -> None:
    table = data_of(cpu_run(tmp_path / "cpu")).tables["contexts"]
    # 129 blocks less the one that stands for none; a block is 16 * 512 bytes.
    assert table.rows == ((41, 3, 3 * 8192, 42), (1024, 64, 64 * 8192, 2), (2048, 128, 128 * 8192, 1))


def test_paged_stands_beside_contiguous(tmp_path: Path) -> None:
    table = data_of(cpu_run(tmp_path / "cpu")).tables["allocators"]
    assert table.rows == (
        ("paged", 4, 16.0, 1 - 180 / (12 * 16), 1, 4, 2.0),
        ("contiguous", 3, 6.4, 1 - 100 / (9 * 16), 0, 3, 5.0),
    )


def test_the_layers_of_the_stack_add_up_to_what_was_measured(tmp_path: Path) -> None:
    for build in (cpu_run, gpu_run, killed_run, failed_run):
        data = data_of(build(tmp_path / build.__name__))
        key = memory_key(data.run)
        peaks = data.run.manifest.get("peaks") or {}
        before = peaks.get("before", {}).get(key, 0)
        _, layers = stacked(data, data.samples, key)
        sums = [sum(values) for values in zip(*layers.values(), strict=True)]
        assert sums == [reading(sample, key) - before for sample in data.samples]


def test_a_component_appears_with_the_stage_that_allocates_it(tmp_path: Path) -> None:
    data = data_of(cpu_run(tmp_path / "cpu"))
    times, layers = stacked(data, data.samples, "rss")
    by_time = dict(zip(times, layers["kv_cache"], strict=True))
    assert by_time[2.9] == 0  # the pool comes at 3 s
    assert by_time[5.5] == CPU_MEMORY["kv_cache"]


def test_thinning_keeps_the_peak_and_both_ends() -> None:
    samples: list[Sample] = [{"t": i / 100, "rss": 5000 if i == 777 else i % 7} for i in range(1000)]
    thinned_samples = thinned(samples, "rss", 50)
    assert len(thinned_samples) <= 53
    assert (thinned_samples[0], thinned_samples[-1]) == (samples[0], samples[-1])
    assert samples[777] in thinned_samples
    assert [sample["t"] for sample in thinned_samples] == sorted(sample["t"] for sample in thinned_samples)


def test_tokens_per_second_begin_with_the_first_step_and_anew_with_the_second_engine(tmp_path: Path) -> None:
    samples = [
        {"t": 12.0, "generation_tokens": 10, "num_steps": 1, "busy_s": 2.0},
        {"t": 13.0, "generation_tokens": 30, "num_steps": 2, "busy_s": 3.0},
        {"t": 20.0, "generation_tokens": 30, "num_steps": 2, "busy_s": 3.0},
        {"t": 21.0, "generation_tokens": 4, "num_steps": 1, "busy_s": 0.5},
        {"t": 23.0, "generation_tokens": 8, "num_steps": 2, "busy_s": 2.5},
    ]
    path = write_run(tmp_path / "run", manifest(TINY, "cpu", CPU_INPUTS, "tiny"), samples)
    # 10 tokens in the 2 s before the first sample, 20 in the next second; the second engine: 4 in 0.5 s, 4 in 2 s.
    assert rates(data_of(path), "generation_tokens", 100) == [
        ([10.0, 12.0, 13.0], [5, 20]),
        ([20.5, 21.0, 23.0], [8, 2]),
    ]


def test_a_steps_tokens_are_spread_over_the_step_that_computed_them(tmp_path: Path) -> None:
    """Ten seconds of decoding steps, a step of 2 s that computes a prompt of 400 tokens, and more decoding."""
    samples = [{"t": float(t), "prompt_tokens": 100, "num_steps": 1 + t, "busy_s": float(t)} for t in range(1, 11)]
    samples += [{"t": 10.0 + t, "prompt_tokens": 100, "num_steps": 11, "busy_s": 10.0} for t in (0.5, 1.0, 1.5)]
    samples += [{"t": 12.0 + t, "prompt_tokens": 500, "num_steps": 12 + t, "busy_s": 12.0 + t} for t in range(5)]
    path = write_run(tmp_path / "run", manifest(TINY, "cpu", CPU_INPUTS, "tiny"), samples)
    # 100 tokens in the first second, none until 10 s, 400 in the 2 s of their step.
    assert rates(data_of(path), "prompt_tokens", 100) == [([0.0, 1.0, 10.0, 12.0], [100, 0, 200])]


def test_rows_that_exceed_the_device_are_no_bytes_without_a_row(tmp_path: Path) -> None:
    """The device reported 50 MiB at most, 1 MiB less than the rows: what the profile run held is not held again."""
    peaks = {"context": {"rss": 49 * MIB}, "decode": {"rss": 50 * MIB}}
    data = data_of(cpu_run(tmp_path / "cpu", peaks=peaks))
    assert data.memory is not None
    rows = sum(CPU_MEMORY[name] for name in ("weights", "buffers", "activations", "kv_cache"))
    assert data.memory.unreached == min(CPU_MEMORY["activations"], 49 * MIB + rows - 50 * MIB) > 0
    assert "of peak activations not reached again while serving" in data.findings["sums"]
    assert "belong to no row" not in data.findings["memory"]


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (538_060_032, "bytes", "513.13 MiB"),
        (0, "error", "0 B"),
        (-21_682_176, "error", "-21,682,176 B"),
        (-0.31482, "relative", "-31.48%"),
        (0.00003, "relative", "+0.003%"),
        (0.0, "relative", "0%"),
        (0.0001, "share", "under 0.1%"),
        (1.0, "share", "100.0%"),
        (3328, "tokens", "3,328 tokens"),
        (1, "times", "1 time"),
        (34.3598, "tokens/s", "34.4 tokens/s"),
        (None, "bytes", "–"),
    ],
)
def test_numbers_are_written_for_readers(value: Any, unit: str, expected: str) -> None:
    assert text(value, unit) == expected


# --- runs that are not whole ------------------------------------------------------------------------------------------


def test_a_killed_run_is_recovered_and_says_so(tmp_path: Path) -> None:
    data = data_of(killed_run(tmp_path / "killed"))
    assert data.banner == (
        "Recovered: this run did not end by itself; the report shows what it had measured. "
        "The last sample was taken 5.90 s after it began."
    )
    assert "the last line of samples.jsonl is cut off; it is left out" in data.notes
    assert data.tables["memory"].rows[0][2] == CPU_MEMORY["weights"]
    assert set(run_drawings(data, "x")) == {"memory", "over_time", "kv", "throughput"}


def test_a_run_that_failed_to_start_has_a_report_without_a_comparison(tmp_path: Path) -> None:
    data = data_of(failed_run(tmp_path / "failed"))
    assert data.banner is not None
    assert data.banner.startswith("This run failed to start: CUDA out of memory.")
    assert data.answer.endswith("failed to start: there is nothing to compare.")
    assert not {"memory", "pool", "contexts"} & set(data.tables)
    assert set(run_drawings(data, "x")) == {"over_time", "gpu"}


@pytest.mark.parametrize("num", [0, 1])
def test_a_run_with_hardly_a_sample_has_a_report(num: int, tmp_path: Path) -> None:
    path = write_run(
        tmp_path / "run", manifest(TINY, "cpu", CPU_INPUTS, "tiny"), cpu_samples()[:num], "partial", "interrupted",
        memory=CPU_MEMORY, results=served(2.0, 32, 4, 12, 180),
    )  # fmt: skip
    data = report_data([load_run(path)])
    (only_run,) = data.runs
    assert set(run_drawings(only_run, "x")) == {"memory"}
    rows = {row[0]: row[2] for row in only_run.tables["memory"].rows}
    assert (rows["weights"], rows["kv_cache"]) == (CPU_MEMORY["weights"], CPU_MEMORY["kv_cache"])
    assert ("unattributed" in rows) == bool(num)  # nobody knows what the device reported
    assert "Too few samples to draw anything over time." in report_html(data)
    assert all(write(data) for write in (report_json, report_csv, report_markdown))


def test_a_run_without_samples_file_says_so(tmp_path: Path) -> None:
    path = cpu_run(tmp_path / "cpu")
    (path / "samples.jsonl").unlink()
    data = data_of(path)
    assert "samples.jsonl is missing" in data.notes
    assert "timeline" not in data.tables
    assert [row[0] for row in data.tables["stages"].rows][:2] == ["context", "weights"]


@pytest.mark.full
def test_samples_with_odd_values_are_drawn_as_far_as_they_go(tmp_path: Path) -> None:
    path = cpu_run(tmp_path / "cpu")
    odd = [{"t": None, "rss": 1}, {"t": True}, {"rss": 5}, {"t": 1.05, "rss": "much"}, {"t": 1.06, "rss": None}]
    with (path / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(sample)}\n" for sample in odd)
    data = data_of(path)
    assert [sample["t"] for sample in data.samples] == sorted(sample["t"] for sample in data.samples)
    assert "over_time" in run_drawings(data, "x")


# --- what comes from elsewhere is never trusted -----------------------------------------------------------------------

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)> $\\frac{ | [x](http://evil) \x1b[31m"


def evil_run(folder: Path) -> Path:
    path = cpu_run(folder / "<b>bold | *label*", name=EVIL)
    start = json.loads((path / "run.json").read_text(encoding="utf-8"))
    start["environment"] |= {"gpu": EVIL, "platform": "=1+1", "packages": {EVIL: EVIL}, "argv": [EVIL]}
    with (path / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"t": 9.0 + i, "stage": EVIL, "rss": 1 << 28}) + "\n" for i in range(5))
    with (path / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"t": 9.0, "event": "stage", "stage": EVIL}) + "\n")
    return rewritten(path, environment=start["environment"], status="partial", cause=EVIL)


@pytest.mark.full
def test_markup_in_names_stays_text_in_html(tmp_path: Path) -> None:
    run_dir = load_run(evil_run(tmp_path))
    html = report_html(report_data([run_dir, run_dir], EVIL))
    page = Page(html)
    assert not {"script", "img", "b", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    links = {
        value
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("href", "src", "xlink:href")
    }
    assert all(value is not None and value.startswith(("#", "data:,")) for value in links)
    assert "<script>alert(1)</script>" in "".join(page.words)
    assert not re.search("[\x00-\x08\x0b-\x1f]", html)


def test_markup_in_names_stays_text_in_markdown_and_csv(tmp_path: Path) -> None:
    data = report_data([load_run(evil_run(tmp_path))], EVIL)
    markdown = report_markdown(data)
    assert not re.search(r"(?<!\\)<(?!/?details>|/?summary>)", markdown)
    assert not re.search(r"(?<!\\)\[", markdown)
    for rows in markdown_tables(markdown):
        assert {len(row) for row in rows} == {len(rows[0])}
    values = [row["value"] for row in csv.DictReader(io.StringIO(report_csv(data)))]
    assert "'=1+1" in values


# --- the command ------------------------------------------------------------------------------------------------------


def test_without_a_file_the_answer_is_markdown(run: Run, tmp_path: Path) -> None:
    path = cpu_run(tmp_path / "cpu")
    ran = run("report", path)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == report_markdown(report_data([load_run(path)]))


def test_every_format_is_written_in_one_go_and_files_are_replaced(run: Run, tmp_path: Path) -> None:
    path = cpu_run(tmp_path / "cpu")
    (tmp_path / "r.md").write_text("old\n<!-- kvplan -->\n", encoding="utf-8")
    outputs = [word for name in ("r.html", "r.md", "r.json", "r.csv") for word in ("-o", tmp_path / name)]
    ran = run("report", path, *outputs, "--title", "A title")
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert (tmp_path / "r.md").read_text(encoding="utf-8").startswith("# A title\n")
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["schema"] == "kvplan/report@1"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cpu", "r.csv", "r.html", "r.json", "r.md"]


@pytest.mark.parametrize(
    ("output", "fault"),
    [
        ("r.pdf", "unknown file type ('.pdf'); use .html, .md, .json, .csv"),
        ("missing/r.md", "there is no such directory; make it first"),
        (".", "unknown file type (''); use .html, .md, .json, .csv"),
    ],
)
def test_a_bad_output_is_refused_before_anything_is_read(output: str, fault: str, run: Run, tmp_path: Path) -> None:
    message = refused(run("report", tmp_path / "no-run", "-o", tmp_path / "good.md", "-o", tmp_path / output))
    assert message.startswith("--output ")
    assert message.endswith(fault)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_run_is_refused(run: Run, tmp_path: Path) -> None:
    assert "is not a run directory" in refused(run("report", tmp_path / "nothing"))


@pytest.mark.parametrize(
    "entries",
    [
        {"memory": {"num_blocks": "many"}},
        {"memory": {}},
        {"results": [1, 2]},
        {"environment": "a laptop"},
        {"cause": []},
        {"cause": {"a": 1}, "memory": None},
        {"workload": [1], "memory": None},
        {"inputs": {"block_size": 0}},
        {"peaks": [1]},
    ],
    ids=lambda entries: "-".join(map(str, entries)),
)
def test_a_damaged_manifest_is_one_line(entries: dict[str, Any], run: Run, tmp_path: Path) -> None:
    path = rewritten(cpu_run(tmp_path / "cpu"), **entries)
    assert "run.json" in refused(run("report", path))


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_html_without_its_libraries_says_how_to_get_them(
    missing: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cpu_run(tmp_path / "cpu")
    monkeypatch.setitem(sys.modules, missing, None)
    message = refused(run("report", path, "-o", tmp_path / "r.html"), code=3)
    assert message.endswith(f": {missing} is not installed; pip install '.[report]' in kvplan's sources")
    assert run("report", path, "-o", tmp_path / "r.md").code == 0


def test_markdown_loads_neither_matplotlib_nor_jinja2(tmp_path: Path) -> None:
    code = (
        "import sys; from kvplan.cli.main import main; main(sys.argv[1:]);"
        "print(*sorted({'matplotlib', 'jinja2', 'numpy', 'torch'} & set(sys.modules)), file=sys.stderr)"
    )
    argv = [sys.executable, "-c", code, "report", str(cpu_run(tmp_path / "cpu"))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900, check=False)
    assert done.stderr.strip() == ""
    assert done.stdout.startswith("# ")


def test_a_table_names_the_unit_of_every_cell(tmp_path: Path) -> None:
    tables: list[Table] = [
        table for build in RUNS.values() for table in data_of(build(tmp_path / build.__name__)).tables.values()
    ]
    units = {table.unit(row, i) for table in tables for row in table.rows for i in range(len(table.columns))}
    assert units <= {
        "text", "bytes", "error", "relative", "share", "count", "s", "tokens", "requests", "blocks", "times",
        "tokens/s", "W", "MHz",
    }  # fmt: skip
