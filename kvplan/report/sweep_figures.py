"""A sweep as a picture: users per GPU, and per dollar, against context, with a curve per GPU and the Pareto front."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kvplan.core.units import KIB
from kvplan.planning.sweep import Curves, front_of

SETTINGS: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "kvplan", "font.size": 11}
MOST_CURVES = 12  # more can be neither told apart nor listed
# Okabe and Ito's color-blind safe colors: six, then again with dashes.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, MUTED, GRID = "#1a1a1a", "#666666", "#dddddd"
INCHES = (9.0, 4.8)  # per panel


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: (context, value) points of each labeled curve and the Pareto front, and how many curves are hidden."""

    title: str
    unit: str
    curves: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
    front: tuple[tuple[int, float], ...]
    left_out: int


def panels(curves: Curves) -> list[Panel]:
    """Users per GPU and, if prices are known, users per dollar."""
    drawn = [panel("Users per GPU", "users per GPU", curves.per_gpu)]
    if curves.per_dollar:
        drawn.append(panel("Users per dollar and hour", "users per $/h", curves.per_dollar))
    return drawn


def panel(title: str, unit: str, curves: Mapping[tuple[str, str], Mapping[int, float]]) -> Panel:
    several = len({model for model, _ in curves}) > 1
    named = [
        (f"{model}, {gpu}" if several else gpu, tuple(sorted(points.items())))
        for (model, gpu), points in curves.items()
    ]
    named.sort(key=lambda curve: -max(value for _, value in curve[1]))
    # No front over several models: more users of a smaller model are not better.
    front = () if several else tuple(front_of(list(curves.values())))
    return Panel(title, unit, tuple(named[:MOST_CURVES]), front, max(0, len(named) - MOST_CURVES))


def picture(curves: Curves, format: str) -> bytes:
    """Render the figure as a PNG or SVG file."""
    with mpl.rc_context(SETTINGS):
        figure = draw(panels(curves))
        buffer = io.BytesIO()
        metadata = {"Date": None, "Title": "kvplan"} if format == "svg" else {"Software": "kvplan"}
        figure.savefig(buffer, format=format, dpi=150, metadata=metadata)
    return buffer.getvalue()


def draw(panels: Sequence[Panel]) -> Figure:
    figure = Figure(figsize=(INCHES[0], INCHES[1] * len(panels)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    labels = list(dict.fromkeys(label for panel in panels for label, _ in panel.curves))
    for ax, panel in zip(axes, panels, strict=True):
        draw_panel(ax, panel, labels)
    return figure


def style_of(place: int) -> tuple[str, str]:
    """(color, dashes) of the curve at a position in the legend: the same in every panel."""
    return COLORS[place % len(COLORS)], ("-", "--", ":")[place // len(COLORS) % 3]


def draw_panel(ax: Axes, panel: Panel, labels: Sequence[str]) -> None:
    if panel.front:
        contexts, values = zip(*panel.front, strict=True)
        ax.plot(contexts, values, color=GRID, linewidth=7, solid_capstyle="round", label="Pareto-optimal", zorder=1)
    for label, points in panel.curves:
        contexts, values = zip(*points, strict=True)
        color, style = style_of(labels.index(label))
        ax.plot(contexts, values, style, color=color, marker="o", markersize=4, linewidth=1.6, label=label, zorder=2)
    more = f" ({panel.left_out} more not shown)" if panel.left_out else ""
    ax.set_title(f"{panel.title}, the best flags of each{more}", loc="left", color=INK, fontsize=12)
    ax.set_ylabel(panel.unit, color=MUTED)
    ax.set_xlabel("context in tokens", color=MUTED)
    ax.grid(visible=True, color=GRID, linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(colors=MUTED, which="both", length=0)
    for side, spine in ax.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
    if panel.curves:
        scale(ax, panel)
        ax.legend(frameon=False, labelcolor=INK, fontsize=10, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        ax.set_xticks([])
        ax.set_yticks([])
        ax.text(0.5, 0.5, "no combination fits", transform=ax.transAxes, ha="center", color=MUTED)


def scale(ax: Axes, panel: Panel) -> None:
    """Scale contexts by powers of 2 and users by powers of 10."""
    contexts = sorted({context for _, points in panel.curves for context, _ in points})
    values = [value for _, points in panel.curves for _, value in points]
    if len(contexts) > 1:
        ax.set_xscale("log", base=2)
    step = -(-len(contexts) // 12)
    ax.set_xticks(contexts[::step])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens_text(round(value))))
    if max(values) > 10 * min(values):
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def tokens_text(tokens: int) -> str:
    """Format a context: 32k, 1M, else its digits."""
    for size, sign in ((KIB * KIB, "M"), (KIB, "k")):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{sign}"
    return f"{tokens:,}"
