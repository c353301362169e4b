"""The pool as a film: its blocks are those that the scheduler's own counters count, frame by frame."""

import base64
import gzip
import json
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from engine.scheduler import Batch
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.report.film_html import film_html
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.arrivals import Open
from kvplan.simulate.film import CACHED, EMPTY, FIRST, FREE, MOST_STEPS, SHARED, Film, Frame, filmed
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.loop import Simulation
from kvplan.simulate.setup import Setup
from kvplan.simulate.source import Source
from kvplan.simulate.steptime import step_time
from kvplan.workloads.trace import TraceRequest
from tests.support.browser import SCHEMES, SIZES, colors, complaints, contrast, is_dark, measured, needs_browser
from tests.support.browser import Open as OpenPage
from tests.support.browser import open_page as open_page
from tests.support.cli import Run
from tests.support.cli import run as run
from tests.support.parts import first_pair

WORDS = (
    "simulate", "llama-3.1-8b", "--gpu", "rtx-4090", "--ctx", "8k", "--prompt-tokens", "1500", "--output-tokens", "90",
    "--users", "40", "--num-requests", "80", "--shared-prefix", "512", "--baseline", "contiguous",
    "--num-gpu-blocks-override", "1500", "-q",
)  # fmt: skip


def setup(num_blocks: int, **args: Any) -> Setup:
    the_plan = plan(
        Request(
            spec=catalog.load("qwen3-0.6b"),
            gpu=gpu("l40s"),
            args=EngineArgs(max_model_len=512, num_gpu_blocks_override=num_blocks, **args),
        )
    )
    return Setup(the_plan, step_time(the_plan, Shares()))


def source(*requests: TraceRequest) -> Source:
    return Source("by hand", len(requests), None, lambda _: iter(requests), run_len=16)


def counted(cells: list[int]) -> Counter[str]:
    names = {FREE: "free", CACHED: "cached", SHARED: "shared", EMPTY: "empty"}
    return Counter(names.get(cell, "own") for cell in cells)


def replayed(film: Film) -> list[list[int]]:
    """The whole pool at each frame."""
    cells, pools = [FREE] * film.num_blocks, []
    for step in film.changes:
        for block, owner in step:
            cells[block - 1] = owner
        pools.append(list(cells))
    return pools


def test_a_request_of_twenty_tokens_takes_two_blocks_of_sixteen() -> None:
    """20 prompt tokens and 14 of an answer: a third block once the 33rd token is computed; then all are free again,
    the two full ones in the prefix cache."""
    requests = [TraceRequest(0.0, 20, 14), TraceRequest(100.0, 4, 1)]
    film = filmed([("paged", setup(40))], source(*requests), lambda: Open(iter(requests)))["paged"]
    counts = [counted(cells) for cells in replayed(film)]
    assert film.num_blocks == 39  # the null block is nobody's
    assert counts[0] == {"own": 2, "free": 37}
    assert max(count["own"] for count in counts) == 3
    assert replayed(film)[0].count(FIRST + 1) == 2
    last = counts[-1]
    assert last["cached"] == 2  # 34 tokens fill two blocks
    assert len(film.frames) == len(film.changes)


@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
def test_blocks_of_every_frame_are_those_that_the_manager_counts(allocator: Any) -> None:
    """Under pressure, with a shared prefix and preemptions; the counters are the manager's own, of another run."""
    draw = random.Random(3)
    requests = [
        TraceRequest(i * 0.002, 48 + draw.randrange(100), 1 + draw.randrange(120), prefix_ids=(7, 8, 9))
        for i in range(60)
    ]
    server = replace(setup(64), allocator=allocator)
    film = filmed([("x", server)], source(*requests), lambda: Open(iter(requests)))["x"]
    seen: list[tuple[int, int, int, int]] = []

    def count(simulation: Simulation, batch: Batch) -> None:
        blocks = simulation.scheduler.blocks
        used = blocks.num_usable_blocks - blocks.num_free_blocks
        seen.append((used, len(simulation.scheduler.running), simulation.num_preemptions, blocks.num_cached_blocks))

    other = server.simulation(Open(iter(requests)), 16)
    other.jump, other.on_step = False, count
    other.run()
    assert len(film.frames) == min(MOST_STEPS, len(seen))
    seen = seen[:MOST_STEPS]
    for cells, frame, (used, running, preemptions, _) in zip(replayed(film), film.frames, seen, strict=True):
        counts = counted(cells)
        assert counts["own"] + counts["shared"] + counts["empty"] == used
        assert (frame.running, frame.preemptions) == (running, preemptions)
    totals = sum((counted(cells) for cells in replayed(film)), Counter[str]())
    if allocator == "paged":
        assert totals["shared"] > 0
        assert totals["empty"] == 0
        assert seen[-1][2] > 0  # preemptions
    else:
        assert totals["empty"] > totals["own"]
        assert totals["shared"] == totals["cached"] == 0


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kvplan.cli.main import main

    path = tmp_path_factory.mktemp("film") / "pool.html"
    assert main([*WORDS, "--film", str(path)]) == 0
    return path


def embedded(page: Path) -> dict[str, Any]:
    match = re.search(r'id="film">([^<]*)<', page.read_text(encoding="utf-8"))
    assert match
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(match[1])))
    return data


@pytest.mark.full
def test_a_film_of_two_thousand_steps_is_small(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "pool.html"
    ran = run(*WORDS, "--film", path, "--output-tokens", "2500")
    assert ran.code == 0, ran
    assert [len(film["seconds"]) for film in embedded(path)["films"]] == [MOST_STEPS, MOST_STEPS]
    assert path.stat().st_size < 5_000_000


def pools(film: dict[str, Any]) -> list[list[int]]:
    """The whole pool at each step of a page's film."""
    changes = [list(zip(accumulate(step[::2]), step[1::2], strict=True)) for step in film["changes"]]
    return replayed(Film(film["blocks"], film["block_size"], changes=changes))


@pytest.mark.full
def test_a_film_of_a_large_pool_that_changes_hands_fast_is_small() -> None:
    """A fifth of one, of a fifth of 5 MB: steps of 8,000 tokens take 500 of 65,000 blocks, and as many come back."""
    draw = random.Random(1)
    changes, free, taken = [], list(range(1, 65_000)), []
    draw.shuffle(free)
    for request in range(MOST_STEPS // 5):
        blocks, free = free[:500], free[500:]
        taken.append(blocks)
        back = taken.pop(0) if len(taken) > 100 else []
        free += back
        changes.append(sorted([(block, FIRST + request) for block in blocks] + [(block, FREE) for block in back]))
    frames = [Frame(float(step), 1, 1, 8192, 0) for step in range(MOST_STEPS // 5)]
    page = film_html({"paged": Film(65_000, 16, frames, changes)}, "a film", "planned")
    assert sum(map(len, changes)) > 340_000
    assert len(page.encode()) < 5_000_000 // 5


TURN = "(n) => { const s = document.getElementById('step'); s.value = n; s.dispatchEvent(new Event('input')); }"
READ = """() => [...document.querySelectorAll("#pools section")].map((section) =>
  Object.fromEntries([...section.querySelectorAll("[data-fact]")].map((e) => [e.dataset.fact, e.textContent])))"""


@needs_browser
@pytest.mark.parametrize("steps", [6, pytest.param(50, marks=pytest.mark.full)])
def test_counts_on_the_page_are_those_of_the_run(steps: int, page: Path, open_page: OpenPage) -> None:
    data = embedded(page)
    opened = open_page(page)
    opened.wait_for_selector("html[data-ready]")
    longest = max(len(film["seconds"]) for film in data["films"])
    draw = random.Random(steps)
    for step in [0, longest - 1, *(draw.randrange(longest) for _ in range(steps))]:
        opened.evaluate(TURN, step)
        for film, facts in zip(data["films"], opened.evaluate(READ), strict=True):
            index = min(step, len(film["seconds"]) - 1)
            counts = counted(pools(film)[index])
            expected = {
                "running": film["running"][index], "waiting": film["waiting"][index], "shared": counts["shared"],
                "blocks used": counts["own"] + counts["shared"] + counts["empty"], "prefix cache": counts["cached"],
                "preemptions": film["preemptions"][index], "reserved, empty": counts["empty"], "free": counts["free"],
            }  # fmt: skip
            assert {name: int(facts[name].replace(",", "")) for name in expected} == expected


@needs_browser
@pytest.mark.parametrize(("size", "scheme"), first_pair(SIZES, SCHEMES))
def test_the_film_fits_a_phone_and_a_desktop_and_plays(size: str, scheme: str, page: Path, open_page: OpenPage) -> None:
    opened = open_page(page, size, scheme)
    opened.wait_for_selector("html[data-ready]")
    seen = measured(opened)
    assert complaints(opened) == []
    assert seen["loads"] == []
    assert seen["width"] == seen["window"] == SIZES[size][0]
    assert set(seen["labels"]) == {1}
    pairs = colors(opened, "body", "h1", "dt")
    assert min(contrast(*pair) for pair in pairs) >= 4.5  # WCAG AA for text
    assert is_dark(pairs[0]) == (scheme == "dark")
    opened.click("#play")
    while int(opened.input_value("#step")) < 3:
        opened.wait_for_timeout(20)
    opened.click("#play")
    assert opened.get_attribute("#play", "aria-pressed") == "false"


@needs_browser
def test_a_large_pool_has_several_blocks_to_a_cell_and_opens_where_it_is_fullest(
    run: Run, tmp_path: Path, open_page: OpenPage
) -> None:
    page = tmp_path / "pool.html"
    ran = run(
        "simulate", "qwen3-0.6b", "--gpu", "b200", "--ctx", "8k", "--prompt-tokens", "100", "--output-tokens", "10",
        "--rate", "1", "--num-requests", "3", "-q", "--film", page,
    )  # fmt: skip
    assert ran.code == 0, ran
    [film] = embedded(page)["films"]
    assert film["blocks"] > 65_536
    used = [sum(owner > 1 for owner in cells) for cells in pools(film)]
    opened = open_page(page)
    opened.wait_for_selector("html[data-ready]")
    assert int(opened.input_value("#step")) == used.index(max(used))
    assert f"{-(-film['blocks'] // 65_536)} to a cell" in opened.inner_text("h2")
    assert int(opened.inner_text("[data-fact='blocks used']")) == max(used)
