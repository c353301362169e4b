"""A page's layout as figures that survive another machine's fonts: where its parts are, and what color each is."""

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from PIL import Image, ImageStat

if TYPE_CHECKING:
    from playwright.sync_api import Page

PARTS: Final = (
    "h1", ".answer", ".top", "form", ".bar", ".legend", "figure svg", "canvas", "table", "pre", "details", "footer",
)  # fmt: skip
# Of each visible part its box, in the order of the page. A part that scrolls has the box that is seen.
READ: Final = """(parts) => {
  const kind = (e) => parts.find((name) => e.matches(name));
  const box = (e) => {
    const own = e.getBoundingClientRect(), scroller = e.closest(".table");
    const right = scroller ? Math.min(own.right, scroller.getBoundingClientRect().right) : own.right;
    return [own.left, own.top + scrollY, right - own.left, own.height].map(Math.round);
  };
  const shown = (e) => e.checkVisibility() && e.getBoundingClientRect().width > 0; // not what is folded
  const all = [...document.querySelectorAll("main *")];
  return {
    parts: all.filter((e) => kind(e) && shown(e)).map((e) => [kind(e), ...box(e)]),
    width: document.documentElement.scrollWidth, window: innerWidth,
    clipped: all.filter((e) => shown(e) && getComputedStyle(e).overflowX === "hidden")
      .filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent),
    svg_text: [...document.querySelectorAll("svg text")].filter(shown).map((e) => {
      const m = e.getScreenCTM();
      return parseFloat(getComputedStyle(e).fontSize) * Math.hypot(m.a, m.b);
    }),
    sticking: [...document.querySelectorAll("svg text")].filter(shown)
      .filter((e) => { const b = e.getBoundingClientRect(); return b.right > innerWidth + 1 || b.left < -1; })
      .map((e) => e.textContent),
  };
}"""
SMALLEST: Final = 13  # pixels of the text in a figure
ASIDE: Final = 8  # pixels of a left edge, and what follows the words before it:
AFTER: Final = 0.08  # of it
TALLEST: Final = 3000  # pixels: what of a long page is photographed
SIZE: Final = 0.45  # of a width or height, which follow the font: words wrap elsewhere
LEAST: Final = 60  # pixels: two lines of text
COLOR: Final = 26  # of 255, mean over a part

Layout = Mapping[str, Any]


def photograph(page: "Page", file: Path) -> Layout:
    """The page as a picture in a file, and its layout: each part with its box and its mean color."""
    file.parent.mkdir(parents=True, exist_ok=True)
    layout: dict[str, Any] = page.evaluate(READ, list(PARTS))
    height = min(page.evaluate("() => document.documentElement.scrollHeight"), TALLEST)
    clip: Any = {"x": 0, "y": 0, "width": layout["window"], "height": height}
    picture = page.screenshot(path=file, full_page=True, clip=clip)
    with Image.open(io.BytesIO(picture)) as opened:
        pixels = opened.convert("RGB")
    layout["parts"] = [[*part, *mean_color(pixels, *part[1:])] for part in layout["parts"]]
    layout["paper"] = list(pixels.getpixel((2, 2)))  # type: ignore[arg-type]
    return layout


def mean_color(pixels: Image.Image, left: int, top: int, width: int, height: int) -> list[int]:
    box = (max(left, 0), max(top, 0), min(left + max(width, 1), pixels.width), min(top + max(height, 1), pixels.height))
    return (
        [round(value) for value in ImageStat.Stat(pixels.crop(box)).mean]
        if box[0] < box[2] and box[1] < box[3]
        else [0, 0, 0]
    )


def faults(layout: Layout) -> list[str]:
    """What is wrong with a page by itself, in any font."""
    texts = [f"{layout['width']} pixels wide in a window of {layout['window']}"] * (layout["width"] > layout["window"])
    texts += [f"cut off: {text!r}" for text in layout["clipped"]]
    texts += [f"a figure's text sticks out: {text!r}" for text in layout["sticking"]]
    if layout["svg_text"] and min(layout["svg_text"]) < SMALLEST - 0.01:
        texts.append(f"a figure's text of {min(layout['svg_text']):.1f} pixels")
    return texts + list(overlaps(layout["parts"]))


def overlaps(parts: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Parts that cover one another, where neither lies in the other."""
    for place, first in enumerate(parts):
        for second in parts[place + 1 :]:
            (x, y, w, h), (u, v, m, n) = first[1:5], second[1:5]
            across, down = min(x + w, u + m) - max(x, u), min(y + h, v + n) - max(y, v)
            is_inside = (across >= m - 2 and down >= n - 10) or (across >= w - 2 and down >= h - 10)
            if across > 2 and down > 2 and not is_inside:
                yield f"{first[0]} and {second[0]} overlap by {across} x {down} pixels"


def differences(reference: Layout, layout: Layout) -> list[str]:
    """Where a page is not laid out as it was, beyond what another font does."""
    names, expected = [part[0] for part in layout["parts"]], [part[0] for part in reference["parts"]]
    if names != expected:
        return [f"parts {names}, not {expected}"]
    texts = [f"paper {layout['paper']}, not {reference['paper']}"] * (far(layout["paper"], reference["paper"]))
    for now, before in zip(layout["parts"], reference["parts"], strict=True):
        if abs(now[1] - before[1]) > ASIDE + AFTER * before[1]:
            texts.append(f"{now[0]} begins at {now[1]}, not {before[1]}")
        for place, word in ((3, "wide"), (4, "high")):
            if abs(now[place] - before[place]) > max(LEAST, SIZE * before[place]):
                texts.append(f"{now[0]} is {now[place]} pixels {word}, not {before[place]}")
        if far(now[5:], before[5:]):
            texts.append(f"{now[0]} is {now[5:]} in the mean, not {before[5:]}")
    return texts


def far(first: Sequence[int], second: Sequence[int]) -> bool:
    return any(abs(a - b) > COLOR for a, b in zip(first, second, strict=True))
