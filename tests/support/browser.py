"""Pages in a real browser: Chromium without a window, driven by Playwright; a phone and a desktop, light and dark."""

import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
SCHEMES = ("light", "dark")
# Loads are seen in the browser's own list of them.
MEASURE = """() => {
  const root = document.documentElement, shown = (e) => e.getClientRects().length > 0;
  const texts = [...document.querySelectorAll("main *:not(svg *)")].filter((e) => shown(e) && e.textContent.trim());
  return {
    width: root.scrollWidth, window: innerWidth, loads: performance.getEntriesByType("resource").map((e) => e.name),
    texts: texts.map((e) => parseFloat(getComputedStyle(e).fontSize)),
    drawn: [...document.querySelectorAll("svg text")].filter(shown).map((e) => {
      const m = e.getScreenCTM();
      return parseFloat(getComputedStyle(e).fontSize) * Math.hypot(m.a, m.b);
    }),
    labels: [...document.querySelectorAll("input, select")].map((e) => e.labels.length),
  };
}"""
COLORS = """(selectors) => selectors.map((s) => [
  getComputedStyle(document.querySelector(s)).color, getComputedStyle(document.body).backgroundColor])"""

needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """One browser for the tests of a module; each page has a context of its own. tests/conftest.py hands it out."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: "Browser") -> Iterator[Open]:
    """`open_page(path, "phone", "dark")`: the page, and in `page.complaints` what the console said of it."""
    pages: list[Page] = []
    yield partial(opened, browser, pages)
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def open_shared(browser: "Browser") -> Open:
    """The same for fixtures of a module; who opens a page closes it."""
    return partial(opened, browser, [])


def opened(
    browser: "Browser", pages: "list[Page]", path: Path, size: str = "desktop", scheme: str = "light", address: str = ""
) -> "Page":
    width, height = SIZES[size]
    page: Page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    pages.append(page)
    lines: list[str] = []
    page.complaints = lines  # type: ignore[attr-defined]
    page.on("console", lambda message: lines.append(message.text))
    page.on("pageerror", lambda error: lines.append(str(error)))
    page.goto(path.as_uri() + address)
    return page


def complaints(page: "Page") -> list[str]:
    """What the browser's console said since the page was opened."""
    lines: list[str] = page.complaints  # type: ignore[attr-defined]
    return lines


def colors(page: "Page", *selectors: str) -> list[tuple[str, str]]:
    """(text, background) of each element."""
    return [(text, behind) for text, behind in page.evaluate(COLORS, list(selectors))]


def contrast(first: str, second: str) -> float:
    """Of two CSS colors, as WCAG 2.2 defines it: from 1 to 21."""
    lights = []
    for color in (first, second):
        channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    low, high = sorted(lights)
    return (high + 0.05) / (low + 0.05)


def is_dark(pair: tuple[str, str]) -> bool:
    """Whether light text stands on a dark page."""
    text, behind = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in pair)
    return behind < text


def measured(page: "Page", script: str = MEASURE) -> dict[str, Any]:
    layout: dict[str, Any] = page.evaluate(script)
    return layout
