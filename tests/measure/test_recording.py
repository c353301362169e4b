"""A profile run's film and trace: what they show is what the engine's own block manager counts, step by step."""

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.contiguous import ContiguousManager
from engine.scheduler import Batch, Scheduler
from kvplan.cli.main import main
from kvplan.measure.rundir import load_run
from kvplan.simulate.film import MOST_STEPS
from tests.measure.test_profile import model_directory
from tests.simulate.test_film import READ, TURN, counted, embedded, pools
from tests.simulate.test_trace_events import COUNTERS, FAULTS, FIGURES, SLICES
from tests.support.browser import SCHEMES, SIZES, complaints, measured, needs_browser
from tests.support.browser import Open as OpenPage
from tests.support.browser import open_page as open_page
from tests.support.cli import Run, refused
from tests.support.cli import run as run
from tests.support.parts import first_pair
from tests.support.trace_processor import answers, needs_trace_processor

PEAKS = ("num_used_blocks", "num_requests_running", "num_requests_waiting", "num_batched_tokens")
Count = tuple[int, int, int, int, int]  # blocks used, running, waiting, preemptions, tokens of the step
LOAD = (
    "--device", "cpu", "--dtype", "float32", "--num-seqs", "14", "--lengths", "uniform:20-90", "--output-tokens", "20",
    "--shared-prefix", "16", "--block-size", "4", "--num-blocks", "64", "--max-num-batched-tokens", "64",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Filmed:
    """A profile run: its page and directory; `counts`, by allocator, what the block manager and the queues count right
    after each batch is scheduled."""

    page: Path
    trace: Path
    directory: Path
    counts: dict[str, list[Count]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model_directory(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def filmed(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Filmed:
    """Two servings of 14 requests in a pool that is too small for them."""
    folder, schedule, counts = tmp_path_factory.mktemp("filmed"), Scheduler.schedule, dict[str, list[Count]]()

    def counting(self: Scheduler) -> Batch:
        batch = schedule(self)
        used = self.blocks.num_usable_blocks - self.blocks.num_free_blocks
        row = (used, len(self.running), len(self.waiting), self.num_preemptions, sum(batch.num_tokens.values()))
        allocator = "contiguous" if isinstance(self.blocks, ContiguousManager) else "paged"
        counts.setdefault(allocator, []).append(row)
        return batch

    ran = Filmed(folder / "pool.html", folder / "run.pftrace", folder / "run", counts)
    files = ("--film", str(ran.page), "--trace-events", str(ran.trace), "-o", str(ran.directory))
    options = ("--baseline", "contiguous", "-q", *files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "schedule", counting)
        assert main(["profile", tiny, *LOAD, *options]) == 0
    return ran


def rows(film: dict[str, Any]) -> list[Count]:
    """The same of a page's film, its cells counted one by one."""
    used = [sum(counted(cells)[kind] for kind in ("own", "shared", "empty")) for cells in pools(film)]
    return list(zip(used, film["running"], film["waiting"], film["preemptions"], film["tokens"], strict=True))


def test_blocks_at_every_step_are_those_that_the_engine_counts(filmed: Filmed) -> None:
    """With preemptions, a shared prefix, and regions of which a part is never filled."""
    page, counts = filmed.page, filmed.counts
    films = {film["name"]: film for film in embedded(page)["films"]}
    assert list(films) == ["paged", "contiguous"]
    for name, film in films.items():
        assert film["blocks"] == 63  # block 0 is nobody's
        assert rows(film) == [row for row in counts[name] if row[4]]
        assert film["seconds"] == sorted(film["seconds"])
    totals = {name: sum((counted(cells) for cells in pools(film)), Counter[str]()) for name, film in films.items()}
    assert totals["paged"]["shared"] > 0
    assert totals["paged"]["empty"] == 0
    assert totals["contiguous"]["empty"] > 0
    assert totals["contiguous"]["shared"] == totals["contiguous"]["cached"] == 0
    results = json.loads((filmed.directory / "run.json").read_text())["results"]
    assert films["paged"]["preemptions"][-1] == results["stats"]["num_preemptions"] > 0
    assert max(films["paged"]["running"]) >= results["most_running"] > max(films["contiguous"]["running"])
    assert "seconds are measured" in page.read_text("utf-8")


@needs_trace_processor
def test_perfetto_reads_the_requests_the_preemptions_and_the_peak(filmed: Filmed) -> None:
    """Counted by the block manager, by the engine's own figures and by the samples, none of which knows of a trace."""
    slices, counters, figures, faults = answers(filmed.trace.read_bytes(), SLICES, COUNTERS, FIGURES, FAULTS)
    assert faults == []
    run = load_run(filmed.directory)
    for server, results in (("paged", run.results), ("contiguous", run.results["baseline"])):
        own = [row for row in slices if row["server"] == server]
        stats = results["stats"]
        assert Counter(row["name"] for row in own)["preempted"] == stats["num_preemptions"]
        whole = [row for row in own if row["depth"] == 0]
        assert sorted(row["name"] for row in whole) == sorted(f"request {n}" for n in range(1, 15))
        tokens = {row["arg_set_id"]: row["value"] for row in figures if row["key"].endswith("output_tokens")}
        assert sum(tokens[row["arg_set_id"]] for row in whole) == stats["generation_tokens"]
        peak = dict.fromkeys(PEAKS, 0)
        for row in counters:
            if row["server"] == server and row["name"] in PEAKS:
                peak[row["name"]] = max(peak[row["name"]], row["value"])
        used, running, waiting, _, tokens_of_step = zip(*filmed.counts[server], strict=True)
        assert list(peak.values()) == [max(used), max(running), max(waiting), max(tokens_of_step)]
        served = max(row["ts"] + row["dur"] for row in own) - min(row["ts"] for row in own)
        assert served <= results["seconds"] * 1e9
    stages = [row for row in slices if row["track"] == "stages"]
    assert [row["name"] for row in stages] == [event["stage"] for event in run.events if event["event"] == "stage"]
    rss = [row["value"] for row in counters if row["name"] == "rss"]
    assert rss == [sample["rss"] for sample in run.samples]


@needs_browser
@pytest.mark.parametrize(("size", "scheme"), first_pair(SIZES, SCHEMES))
def test_the_page_of_a_run_shows_what_was_counted(size: str, scheme: str, filmed: Filmed, open_page: OpenPage) -> None:
    opened, counts = open_page(filmed.page, size, scheme), filmed.counts
    opened.wait_for_selector("html[data-ready]")
    longest = max(map(len, counts.values()))
    draw = random.Random(size)
    for step in draw.sample(range(longest), 50):
        opened.evaluate(TURN, step)
        for name, facts in zip(counts, opened.evaluate(READ), strict=True):
            used, running, waiting, preemptions, tokens = counts[name][min(step, len(counts[name]) - 1)]
            row = {
                "blocks used": used, "running": running, "waiting": waiting, "preemptions": preemptions,
                "tokens this step": tokens,
            }  # fmt: skip
            assert {figure: int(facts[figure].replace(",", "")) for figure in row} == row
    assert complaints(opened) == []
    assert measured(opened)["width"] == SIZES[size][0]


def test_a_run_without_a_baseline_has_one_pool(tiny: str, run: Run, tmp_path: Path) -> None:
    page = tmp_path / "pool.html"
    assert run("profile", tiny, *LOAD, "--film", page, "-q", "-o", tmp_path / "run").code == 0
    assert [film["name"] for film in embedded(page)["films"]] == ["paged"]


def test_a_film_in_the_run_directory_is_refused(tiny: str, run: Run, tmp_path: Path) -> None:
    inside = run("profile", tiny, *LOAD, "--film", tmp_path / "run" / "pool.html", "-q", "-o", tmp_path / "run")
    assert "is inside the run directory, which must not exist yet; use a path outside it" in refused(inside)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_ends_early_keeps_the_film_of_what_it_did(tiny: str, run: Run, tmp_path: Path) -> None:
    page = tmp_path / "pool.html"
    ran = run("profile", tiny, *LOAD, "--timeout", "1ms", "--film", page, "-q", "-o", tmp_path / "run")
    assert ran.code == 4, ran
    (film,) = embedded(page)["films"]
    assert len(film["seconds"]) < MOST_STEPS
