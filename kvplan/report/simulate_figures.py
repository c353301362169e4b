"""A simulation as a picture: requests and the KV pool over time, and the fraction of requests answered by time."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from kvplan.report.sheets import HEX, NARROW, TEXT, WIDER, Sheet, count_axis, legend, new_figure, panel_title, svg
from kvplan.report.sheets import SETTINGS as PAGE_SETTINGS
from kvplan.report.simulate_text import title
from kvplan.simulate.outcome import SimulationAnswer, Variant
from kvplan.simulate.timeline import LEVELS

SETTINGS: Any = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "kvplan", "font.size": 11}
COLORS = ("#0072b2", "#d55e00", "#009e73")  # Okabe and Ito's color-blind safe colors
ROLES = ("accent", "c-cuda_graphs", "c-rest")  # the same on a page, whose style sheet defines the colors
INK, MUTED, GRID = "#1a1a1a", "#666666", "#dddddd"


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its name, and (x, y) points."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; fractions are shown in percent, a logarithmic scale is on the x axis; `span` is the range of x, as
    fractions of it.
    """

    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    is_share: bool = False
    is_log: bool = False
    span: tuple[float, float] | None = None


def panels(answer: SimulationAnswer) -> tuple[Panel, ...]:
    variants = answer.variants
    both = tuple(
        Series(f"{variant.name}, {what}", level(variant, what))
        for variant in variants
        for what in ("running", "waiting")
    )
    pool = tuple(Series(variant.name, pool_usage(variant)) for variant in variants)
    first = tuple(Series(variant.name, by_time(variant)) for variant in variants)
    span = answer.ranges.time("ttft", 1.0)
    return (
        Panel("Requests", "seconds", "requests", both),
        Panel("KV pool in use", "seconds", "of the blocks", pool, is_share=True),
        Panel(
            "First token by", "seconds after arrival", "of the requests", first, is_share=True, is_log=True, span=span
        ),
    )


def level(variant: Variant, name: str) -> tuple[tuple[float, float], ...]:
    """Averages over the timeline's intervals, at their beginnings."""
    timeline, index = variant.simulation.timeline, LEVELS.index(name)
    return tuple(
        (number * timeline.width_s, bucket.sums[index] / bucket.seconds)
        for number, bucket in enumerate(timeline.buckets)
        if bucket.seconds
    )


def pool_usage(variant: Variant) -> tuple[tuple[float, float], ...]:
    usable = variant.simulation.num_usable_blocks
    return tuple((seconds, used / usable) for seconds, used in level(variant, "used_blocks"))


def by_time(variant: Variant) -> tuple[tuple[float, float], ...]:
    """(seconds, fraction of the requests whose first token came within them)."""
    waits = sorted(variant.simulation.records.times("ttft"))
    return tuple((wait, (rank + 1) / len(waits)) for rank, wait in enumerate(waits))


def drawn(answer: SimulationAnswer, format: str) -> bytes:
    """Render the picture as a PNG or SVG file."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(10.5, 10.5), layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        figure.suptitle(title(answer), fontsize=11, color=INK, wrap=True)
        for ax, panel in zip(figure.subplots(3, 1), panels(answer), strict=True):
            draw(ax, panel)
        buffer = io.BytesIO()
        metadata = {"Date": None, "Title": "kvplan"} if format == "svg" else {"Software": "kvplan"}
        figure.savefig(buffer, format=format, dpi=150, metadata=metadata)
    return buffer.getvalue()


def sheets(answer: SimulationAnswer) -> tuple[tuple[str, str], ...]:
    """(sheet's name, SVG) of the picture for a wide page and a phone, in the page's own colors and font."""
    drawn_sheets = []
    with mpl.rc_context(PAGE_SETTINGS):
        for sheet in (WIDER, NARROW):
            figure, axes = new_figure(sheet, 720 if sheet.is_narrow else 780, (1, 1, 1), share_times=False)
            for ax, panel in zip(axes, panels(answer), strict=True):
                draw_on_page(ax, panel, sheet)
            drawn_sheets.append(
                (sheet.name, svg(figure, f"over-time-{sheet.name}", "Requests and the KV pool over time"))
            )
    return tuple(drawn_sheets)


def draw_on_page(ax: Axes, panel: Panel, sheet: Sheet) -> None:
    for series, color, dashes in styled(panel, [HEX[role] for role in ROLES]):
        draw_series(ax, panel, series, color, dashes)
    title = panel.title if panel.y in panel.title.lower() else f"{panel.title}, {panel.y}"
    if sum(bool(series.points) for series in panel.series) > 1:
        legend(ax, sheet, title)
    else:
        panel_title(ax, title)
    ax.set_ylim(bottom=0)
    ax.set_xlabel(panel.x, color=HEX["muted"], fontsize=TEXT)
    if panel.is_share:
        ax.yaxis.set_major_locator(MaxNLocator(4))
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    else:
        count_axis(ax.yaxis)
    if panel.is_log:
        logarithmic(ax, panel, (1, 3) if sheet.is_narrow else (1, 2, 5))


def styled(panel: Panel, colors: Sequence[str]) -> Iterator[tuple[Series, str, str]]:
    """Yield each line that has points, with its color and dashes: a color per server, dashes for waiting requests."""
    per_variant = 2 if panel.title == "Requests" else 1
    for place, series in enumerate(panel.series):
        if series.points:
            yield series, colors[place // per_variant % len(colors)], "--" if place % per_variant else "-"


def draw_series(ax: Axes, panel: Panel, series: Series, color: str, dashes: str) -> None:
    xs, ys = zip(*series.points, strict=True)
    ax.plot(xs, ys, color=color, linestyle=dashes, linewidth=1.6, label=series.name)
    if panel.span is not None:
        low, high = ([x * part for x in xs] for part in panel.span)
        ax.fill_betweenx(ys, low, high, color=color, alpha=0.15, linewidth=0)


def logarithmic(ax: Axes, panel: Panel, digits: Sequence[int]) -> None:
    if any(x > 0 for series in panel.series for x, _ in series.points):
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(base=10, subs=digits))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())


def draw(ax: Axes, panel: Panel) -> None:
    for series, color, dashes in styled(panel, COLORS):
        draw_series(ax, panel, series, color, dashes)
    ax.set_title(panel.title, loc="left", fontsize=12, color=INK)
    ax.set_xlabel(panel.x, color=MUTED)
    ax.set_ylabel(panel.y, color=MUTED)
    ax.set_ylim(bottom=0)
    if panel.is_share:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    if panel.is_log:
        logarithmic(ax, panel, (1, 2, 5))
    ax.grid(color=GRID, linewidth=0.6)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    if len([series for series in panel.series if series.points]) > 1:
        ax.legend(frameon=False, fontsize=10, loc="upper left", bbox_to_anchor=(1.0, 1.0))
