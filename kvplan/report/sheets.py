"""Drawing area of every figure on a page: sheets for a wide page and a phone, inline SVG, and colors as roles of the
style sheet, so that one drawing works on a light and a dark page.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

# Colors are roles of the page's style sheet; matplotlib needs numbers, so each role has a placeholder color.
ROLES = (
    "ink", "muted", "grid", "accent", "band", "paper", "c-context", "c-weights", "c-buffers", "c-kv_cache",
    "c-cuda_graphs", "c-rest", "c-other",
)  # fmt: skip
HEX = {role: f"#0a1b{i:02x}" for i, role in enumerate(ROLES)}
TEXT: Final = 13  # pixels: the size of all text in a figure
MOST_IN_A_LINE = 6  # entries of a wide legend

# Text of unknown origin is never parsed as a formula; fixed ids make the output of a run reproducible.
SETTINGS: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "kvplan", "font.size": TEXT}


@dataclass(frozen=True, slots=True)
class Sheet:
    """Width of a figure in pixels of the page; `points` is its resolution in time."""

    name: str
    width: int
    points: int
    is_narrow: bool


# The column widths of a run's page, of an answer's, and of a phone: text is TEXT pixels on screen.
WIDE, WIDER, NARROW = Sheet("wide", 800, 280, False), Sheet("wide", 984, 400, False), Sheet("narrow", 350, 160, True)


def new_figure(
    sheet: Sheet, height: int, panels: Sequence[float] = (1,), *, share_times: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure of sheet.width x height pixels with stacked panels that share the time axis."""
    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.05)
    figure = Figure(figsize=(sheet.width / 72, height / 72), dpi=72, layout=layout, facecolor="none")
    FigureCanvasSVG(figure)
    axes = figure.subplots(len(panels), 1, sharex=share_times, squeeze=False, height_ratios=list(panels))[:, 0]
    for ax in axes:
        ax.set_facecolor("none")
        for side, spine in ax.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(HEX["grid"])
        ax.tick_params(colors=HEX["muted"], length=0, labelsize=TEXT)
        ax.tick_params(axis="x", pad=7)
        ax.grid(visible=True, axis="y", color=HEX["grid"], linewidth=1)
        ax.set_axisbelow(True)
    return figure, list(axes)


def svg(figure: Figure, slug: str, title: str) -> str:
    """The figure as an <svg> element for a page: colors by role, the page's font, unique ids."""
    buffer = io.StringIO()
    none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=none)
    whole = buffer.getvalue()
    body = whole[whole.index(">", whole.index("<svg")) + 1 : whole.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r"#0a1b([0-9a-f]{2})", lambda match: f"var(--{ROLES[int(match[1], 16)]})", body)
    body = re.sub(r"(font(?:-family)?: )([^;\"]*?)'DejaVu Sans'[^;\"]*", r"\1\2var(--font)", body)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{slug}-\1"', body)
    body = re.sub(r'(href="|url\()#', rf"\1#{slug}-", body)
    body = re.sub(r"(\d+\.\d\d)\d+", r"\1", body)
    width, height = (round(inches * 72) for inches in figure.get_size_inches())
    head = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img"'
    return f'{head} aria-label="{title}" viewBox="0 0 {width} {height}">{body.strip()}</svg>'


def legend(ax: Axes, sheet: Sheet, title: str = "") -> None:
    """Draw the legend above the panel, under its title, without a frame.

    Entries that do not fit on one line are divided evenly, on a phone into two columns.
    """
    num = len(ax.get_legend_handles_labels()[0])
    if not num:
        return
    columns = 2 if sheet.is_narrow else math.ceil(num / math.ceil(num / MOST_IN_A_LINE))
    box = ax.legend(
        title=title or None,
        title_fontsize=TEXT,
        alignment="left",
        loc="lower left",
        bbox_to_anchor=(0, 1.01),
        ncols=columns,
        frameon=False,
        borderaxespad=0,
        borderpad=0.2,
        handlelength=1,
        handleheight=1,
        columnspacing=1.4,
        labelcolor=HEX["ink"],
        fontsize=TEXT,
    )
    box.get_title().set_color(HEX["ink"])


def panel_title(ax: Axes, words: str) -> None:
    ax.set_title(words, loc="left", fontsize=TEXT, color=HEX["ink"], pad=6)


def count_axis(axis: Any, steps: int = 4) -> None:
    axis.set_major_locator(MaxNLocator(steps, integer=True))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
