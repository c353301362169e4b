"""The report in a real browser, on a phone and a desktop, light and dark: it fits, it is legible, it loads nothing."""

from pathlib import Path

import pytest

from kvplan.measure.rundir import load_run
from kvplan.report.run_data import report_data
from kvplan.report.run_html import report_html
from tests.support.browser import (
    SCHEMES,
    SIZES,
    Open,
    colors,
    complaints,
    contrast,
    is_dark,
    measured,
    needs_browser,
)
from tests.support.browser import open_page as open_page
from tests.support.parts import first_pair
from tests.support.recorded_runs import cpu_run, failed_run, gpu_run, killed_run

MEASURE = """() => {
  const root = document.documentElement, shown = (e) => e.getClientRects().length > 0;
  const figures = [...document.querySelectorAll("figure svg")].filter(shown);
  return {
    width: root.scrollWidth, window: innerWidth, loads: performance.getEntriesByType("resource").map((e) => e.name),
    figures: figures.map((e) => e.getBoundingClientRect().right), all: document.querySelectorAll("figure").length,
    texts: figures.flatMap((e) => [...e.querySelectorAll("text")].map((t) => parseFloat(getComputedStyle(t).fontSize)
      * e.getBoundingClientRect().width / e.viewBox.baseVal.width)),
    sticking: [...document.querySelectorAll("figure svg text")].filter(shown)
      .filter((t) => t.getBoundingClientRect().right > innerWidth).map((t) => t.textContent),
  };
}"""

pytestmark = needs_browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of four runs: whole on a CPU and on a GPU, killed, failed."""
    folder = tmp_path_factory.mktemp("report")
    builds = (cpu_run, gpu_run, killed_run, failed_run)
    data = report_data([load_run(build(folder / build.__name__)) for build in builds])
    path = folder / "report.html"
    path.write_text(report_html(data), encoding="utf-8")
    return path


@pytest.mark.full
@pytest.mark.parametrize(("size", "scheme"), first_pair(SIZES, SCHEMES))
def test_the_page_fits_its_window_and_can_be_read(size: str, scheme: str, page: Path, open_page: Open) -> None:
    width, _ = SIZES[size]
    opened = open_page(page, size, scheme)
    seen = measured(opened, MEASURE)
    assert complaints(opened) == []
    assert seen["loads"] == []
    assert seen["width"] == seen["window"] == width
    assert len(seen["figures"]) == seen["all"] > 10
    assert max(seen["figures"]) <= width
    assert seen["sticking"] == []
    assert min(seen["texts"]) > 12.99  # pixels
    pairs = colors(opened, "body", "h1", "figcaption:not(.over)", "summary")
    assert min(contrast(*pair) for pair in pairs) >= 4.5  # WCAG AA for text
    assert is_dark(pairs[0]) == (scheme == "dark")


def test_a_page_that_does_load_or_stick_out_is_seen(tmp_path: Path, open_page: Open) -> None:
    """The measuring itself works: a planted fault of each kind is found."""
    planted = tmp_path / "planted.html"
    planted.write_text(
        "<!DOCTYPE html><body><h1>x</h1><div style='width: 2000px'>x</div>"
        "<img src='http://127.0.0.1:9/missing.png'><script>console.error('planted')</script></body>"
    )
    opened = open_page(planted, "phone")
    seen = measured(opened, MEASURE)
    assert seen["width"] > seen["window"] == 390
    assert any("missing.png" in name for name in seen["loads"])
    assert "planted" in complaints(opened)
