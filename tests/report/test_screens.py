"""Every page photographed in a real browser, on a phone and a desktop, light and dark, and compared with its layout.

The pictures are left in build/screens, which git ignores: look at them. The layouts stand in tests/golden/screens.json;
`pytest --update -m full tests/report/test_screens.py` writes them anew.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvplan.cli.main import main
from tests.support.browser import SCHEMES, SIZES, Open, complaints, needs_browser
from tests.support.browser import open_shared as open_shared
from tests.support.screens import differences, faults, photograph

ROOT = Path(__file__).parents[2]
SCREENS = ROOT / "build" / "screens"
LAYOUTS = ROOT / "tests" / "golden" / "screens.json"
LOAD = "--ctx 8k --profile azure-2023-conv"
# Each page and the words that write it; the last is followed by its file.
PAGES = {
    "explore": "explore llama-3.1-8b --gpu l40s,h100-80g --tp 1,2 --ctx 8k,32k --prices examples/prices.yaml -o",
    "estimate": "estimate llama-3.1-8b --ctx 32k --gpu a100-80g --report",
    "several": "estimate llama-3.1-8b --ctx 32k --gpu rtx-4090,l40s,a100-80g --report",
    "sweep": "sweep qwen3-8b --gpu l40s,h100-80g --ctx 8k,32k --prices examples/prices.yaml --report",
    "recommend": "recommend qwen3-8b --users 100 --ctx 8k --gpus l40s,h100-80g --prices examples/prices.yaml --report",
    "timed": f"recommend qwen3-8b --rate 6 {LOAD} --slo ttft.p90=2s --gpus l40s,h100-80g --prices examples/prices.yaml "
    "--num-requests 40 --report",
    "simulate": f"simulate qwen3-8b --gpu l40s {LOAD} --rate 2 --num-requests 80 --baseline contiguous --report",
    "tune": "tune qwen3-8b --gpu h100-80g --ctx 8k --prompt-tokens 2k --output-tokens 60 --slo ttft.p90=1s --no-fp8 "
    "--num-requests 30 --jobs 1 --report",
    "diff": "diff qwen3-8b qwen3-8b-fp8 --gpu l40s --ctx 8k --report",
    "check": "check examples/kvplan.policy.yaml --today 2026-11-22 --report",
    "why": "why examples/vllm-did-not-start.log --gpu a100-80g --report",
    "reconcile": "reconcile reports/cpu-2core --report",
    "log": "reconcile --log examples/vllm-0.10.log --gpu a100-80g --report",
    "film": f"simulate qwen3-8b --gpu rtx-4090 {LOAD} --rate 2 --num-requests 20 --film",
    "profile": "report reports/cpu-2core -o",
}  # fmt: skip

pytestmark = [pytest.mark.full, needs_browser]


@pytest.fixture(scope="module")
def layouts(update: bool) -> Any:
    known = json.loads(LAYOUTS.read_text(encoding="utf-8")) if LAYOUTS.exists() else {}
    yield known
    if update:
        lines = [f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known)]
        LAYOUTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, mine = tmp_path_factory.mktemp("pages"), pytest.MonkeyPatch()
    mine.chdir(ROOT)

    def page(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            assert main([*PAGES[name].split(), str(path)]) in (0, 1)
        return path

    yield page
    mine.undo()


@pytest.fixture
def screen(written: Any, open_shared: Open) -> Any:
    """A page in the browser, with what its script shows."""
    pages = []

    def screen(name: str, size: str, scheme: str = "light") -> Any:
        path = written(name)
        page = open_shared(path, size, scheme)
        pages.append(page)
        if "<script>" in path.read_text(encoding="utf-8"):
            page.wait_for_selector("html[data-ready]")
        return page

    yield screen
    for page in pages:
        page.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_looks_as_it_did(name: str, screen: Any, layouts: Any, update: bool) -> None:
    for size, scheme in product(SIZES, SCHEMES):
        page = screen(name, size, scheme)
        layout = photograph(page, SCREENS / f"{name}-{SIZES[size][0]}-{scheme}.png")
        assert complaints(page) == []
        assert faults(layout) == [], (size, scheme)
        key = f"{name}, {size}, {scheme}"
        layout_parts = {part: layout[part] for part in ("paper", "parts")}
        if update:
            layouts[key] = layout_parts
        assert differences(layouts[key], layout_parts) == [], key


@pytest.mark.parametrize("font", ["DejaVu Serif", "DejaVu Sans Condensed"])  # wider, narrower
def test_another_font_is_no_fault(font: str, screen: Any, layouts: Any, tmp_path: Path) -> None:
    for name, size in (("explore", "phone"), ("sweep", "desktop"), ("simulate", "phone"), ("check", "desktop")):
        page = screen(name, size)
        page.add_style_tag(content=f":root {{ --font: '{font}'; }}")
        layout = photograph(page, tmp_path / "font.png")
        assert faults(layout) == [], (name, size)
        assert differences(layouts[f"{name}, {size}, light"], layout) == [], (name, size)


# A fault, the page that it is planted in, and what is said of it.
PLANTED = {
    "main { max-width: none; padding: 0; }": ("estimate", "begins at"),
    ".bars, #bar { display: none !important; }": ("estimate", "parts ["),
    ".bar i { background: none !important; }": ("estimate", "in the mean"),
    "table { width: 3000px !important; } .table { overflow: visible !important; }": ("estimate", "in a window of"),
    "figure { margin-bottom: -24rem !important; }": ("estimate", "overlap"),
    ":root { --paper: #999; }": ("estimate", "in the mean"),
    "pre { white-space: pre !important; overflow: hidden; }": ("estimate", "cut off"),
    ".sheet { width: 50%; }": ("simulate", "a figure's text of 6.5 pixels"),
    "svg { transform: translateX(40%); }": ("simulate", "sticks out"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_broken_layout_is_seen(fault: str, screen: Any, layouts: Any, tmp_path: Path) -> None:
    name, words = PLANTED[fault]
    for size in SIZES:
        page = screen(name, size)
        page.add_style_tag(content=fault)
        layout = photograph(page, tmp_path / "broken.png")
        texts = faults(layout) + differences(layouts[f"{name}, {size}, light"], layout)
        assert words in " | ".join(texts), size


@pytest.mark.parametrize("name", ["estimate", "explore", "check"])
def test_a_page_without_its_style_is_seen(name: str, screen: Any, layouts: Any, tmp_path: Path) -> None:
    for size in SIZES:
        page = screen(name, size)
        page.evaluate("() => document.querySelectorAll('style').forEach((e) => e.remove())")
        layout = photograph(page, tmp_path / "bare.png")
        assert differences(layouts[f"{name}, {size}, light"], layout) != []
