"""The report in a real browser, on a phone and a desktop, light and dark: it fits, it is legible, it loads nothing."""

import json
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvplan.measure.rundir import load_run
from kvplan.report.run_data import report_data
from kvplan.report.run_html import report_html
from tests.support.parts import paired
from tests.support.recorded_runs import cpu_run, failed_run, gpu_run, killed_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
DARK = {"light": "1", "dark": "0"}  # blink's names of prefers-color-scheme
# Windows narrower than 500 pixels exist for screenshots only: the page is measured in a frame as wide as asked for.
FRAME = """<!DOCTYPE html><meta name="color-scheme" content="light dark"><pre id="measured"></pre>
<script>addEventListener("message", (m) => {{ document.getElementById("measured").textContent = m.data; }});</script>
<iframe src="{url}" style="border: 0; width: {width}px; height: {height}px"></iframe>"""
# Goes into a copy of the page, for the report carries no script. Loads are seen in the browser's own list of them.
MEASURE = """
<script>addEventListener("load", () => {
  const root = document.documentElement, shown = (e) => e.getClientRects().length > 0;
  const figures = [...document.querySelectorAll("figure svg")].filter(shown);
  const style = (selector) => getComputedStyle(document.querySelector(selector));
  parent.postMessage(JSON.stringify({
    width: root.scrollWidth, window: innerWidth, height: root.scrollHeight,
    loads: performance.getEntriesByType("resource").map((e) => e.name),
    figures: figures.map((e) => e.getBoundingClientRect().right), all: document.querySelectorAll("figure").length,
    texts: figures.flatMap((e) => [...e.querySelectorAll("text")].map((t) => parseFloat(getComputedStyle(t).fontSize)
      * e.getBoundingClientRect().width / e.viewBox.baseVal.width)),
    sticking: [...document.querySelectorAll("figure svg text")].filter(shown)
      .filter((t) => t.getBoundingClientRect().right > innerWidth).map((t) => t.textContent),
    colors: ["body", "h1", "figcaption:not(.over)", "summary"]
      .map((s) => [style(s).color, style("body").backgroundColor]),
  }), "*");
});</script>
"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of four runs: whole on a CPU and on a GPU, killed, failed."""
    folder = tmp_path_factory.mktemp("report")
    builds = (cpu_run, gpu_run, killed_run, failed_run)
    data = report_data([load_run(build(folder / build.__name__)) for build in builds])
    path = folder / "report.html"
    path.write_text(report_html(data), encoding="utf-8")
    return path


def chromium(
    page: Path, profile: Path, width: int, height: int, scheme: str, *flags: str
) -> "subprocess.CompletedProcess[str]":
    """Open the page in a window of that size and leave again."""
    assert BROWSER is not None
    return subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
            f"--user-data-dir={profile}", f"--window-size={width},{height}", "--enable-logging=stderr", "--v=0",
            f"--blink-settings=preferredColorScheme={DARK[scheme]}", *flags, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=900, check=True,
    )  # fmt: skip


def measured(html: str, folder: Path, width: int, height: int, scheme: str) -> tuple[dict[str, Any], str]:
    """(what MEASURE found, what the browser said) of a page in a frame of that size."""
    inner, outer = folder / "inner.html", folder / "outer.html"
    inner.write_text(html.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    outer.write_text(FRAME.format(url=inner.as_uri(), width=width, height=height), encoding="utf-8")
    done = chromium(outer, folder / "profile", 1400, 1000, scheme, "--dump-dom")
    found = re.search(r'<pre id="measured">(\{.*?\})</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(found[1]), done.stderr


def contrast(one: str, other: str) -> float:
    """Of two CSS colours, as WCAG 2.2 defines it: from 1 to 21."""
    lights = []
    for color in (one, other):
        channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    low, high = sorted(lights)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("size", "scheme"), paired(SIZES, DARK))
def test_the_page_fits_its_window_and_can_be_read(size: str, scheme: str, page: Path, tmp_path: Path) -> None:
    width, height = SIZES[size]
    html = page.read_text(encoding="utf-8")
    allowing = html.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    seen, said = measured(allowing, tmp_path, width, height, scheme)
    assert "CONSOLE" not in said
    assert seen["loads"] == []
    assert seen["width"] == seen["window"] == width
    assert len(seen["figures"]) == seen["all"] > 10
    assert max(seen["figures"]) <= width
    assert seen["sticking"] == []
    assert min(seen["texts"]) >= 8  # pixels
    assert min(contrast(*pair) for pair in seen["colors"]) >= 4.5  # WCAG AA for text
    (body, background), *_ = seen["colors"]
    is_dark = sum(map(int, re.findall(r"\d+", background)[:3])) < sum(map(int, re.findall(r"\d+", body)[:3]))
    assert is_dark == (scheme == "dark")


@pytest.mark.parametrize(("size", "scheme"), paired(SIZES, DARK))
def test_the_page_as_it_is_written_opens_without_a_complaint(
    size: str, scheme: str, page: Path, tmp_path: Path
) -> None:
    width, height = SIZES[size]
    picture = tmp_path / f"{size}-{scheme}.png"
    done = chromium(page, tmp_path / "profile", width, height, scheme, f"--screenshot={picture}")
    assert "CONSOLE" not in done.stderr
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (width, height)
    assert len(content) > 10_000  # a blank page of this size takes a tenth of it


def test_a_page_that_does_load_or_stick_out_is_seen(tmp_path: Path) -> None:
    """The measuring itself works: a planted fault of each kind is found."""
    html = (
        "<!DOCTYPE html><body><h1>x</h1><figcaption>x</figcaption><summary>x</summary>"
        "<div style='width: 2000px'>x</div><img src='http://127.0.0.1:9/missing.png'>"
        "<script>console.error('planted')</script></body>"
    )
    seen, said = measured(html, tmp_path, 390, 844, "light")
    assert seen["width"] > seen["window"] == 390
    assert any("missing.png" in name for name in seen["loads"])
    assert "CONSOLE" in said
    assert "planted" in said
