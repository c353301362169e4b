"""A run's figures as inline SVG, each drawn twice: for a wide page and for a phone."""

import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from kvplan.core.table import text, words
from kvplan.core.units import format_size
from kvplan.measure.run_types import Sample
from kvplan.report.run_data import ReportData, RunData
from kvplan.report.run_record import Stage, having, memory_key, num_groups, number, numbers, reading, usable_blocks
from kvplan.report.sheets import (
    HEX,
    NARROW,
    SETTINGS,
    TEXT,
    WIDE,
    Sheet,
    count_axis,
    legend,
    new_figure,
    panel_title,
    svg,
)
from kvplan.servers.logs.measurement import ComponentRow

# Stacked from the bottom in this order, each from the stage in which it is allocated.
ALLOCATED_IN = {"context": "", "weights": "weights", "buffers": "weights", "kv_cache": "pool", "cuda_graphs": "graphs"}
REST = "activations and the rest"
LETTER = 0.6 * TEXT  # pixels, about


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure for the page: (sheet's name, SVG) for each available width, and what it shows."""

    name: str
    title: str
    finding: str
    svgs: tuple[tuple[str, str], ...]


def run_drawings(data: RunData, prefix: str) -> dict[str, Drawing]:
    """Figures that the run has data for, by name; `prefix` keeps ids of several runs distinct."""
    drawn = {
        "memory": ("Predicted and measured, by component", draw_memory),
        "over_time": ("Memory over time", draw_over_time),
        "kv": ("KV blocks and requests over time", draw_kv),
        "throughput": ("Tokens per second", draw_throughput),
        "gpu": ("Power, clock and utilization of the GPU", draw_gpu),
    }
    built = {name: drawing(name, title, data.findings, draw, data, prefix) for name, (title, draw) in drawn.items()}
    return {name: drawing for name, drawing in built.items() if drawing is not None}


def comparison_drawing(data: ReportData) -> Drawing | None:
    """Measured memory of all runs, one bar each, or None for a single run."""
    if sum(run.memory is not None for run in data.runs) < 2:
        return None
    title = "Measured memory of each run, by component"
    finding = {"comparison": "Each bar is the sum of the measured rows; the label is what the device reported."}
    return drawing("comparison", title, finding, draw_comparison, data, "all")


def drawing(
    name: str, title: str, findings: dict[str, str], draw: Callable[[Any, Sheet], Figure | None], data: Any, prefix: str
) -> Drawing | None:
    """Draw the figure on each sheet that it has data for, or return None if there is none."""
    svgs = []
    with mpl.rc_context(SETTINGS), warnings.catch_warnings():
        # Characters missing from the measuring font: the page's own fonts draw them.
        warnings.filterwarnings("ignore", r"Glyph \d+ ", UserWarning)
        for sheet in (WIDE, NARROW):
            figure = draw(data, sheet)
            if figure is not None:
                svgs.append((sheet.name, svg(figure, f"{prefix}-{name}-{sheet.name}", title)))
    return Drawing(name, title, findings.get(name, ""), tuple(svgs)) if svgs else None


# --- axes -------------------------------------------------------------------------------------------------------------


def byte_axis(axis: Any, longest: float, steps: int) -> None:
    """Set ticks at round binary sizes: 0, 256, 512 MiB."""
    step = 1 << max(0, math.ceil(math.log2(max(longest, 1) / steps)))
    axis.set_major_locator(FixedLocator([step * i for i in range(steps + 2) if step * i <= longest * 1.05]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_size(round(value)) if value else "0"))


def bars_frame(ax: Axes, sheet: Sheet, longest: int) -> None:
    """Format a panel of horizontal bars: sizes below, a grid across, the color legend above."""
    byte_axis(ax.xaxis, longest, 2 if sheet.is_narrow else 4)
    ax.grid(visible=False, axis="y")
    ax.grid(visible=True, axis="x", color=HEX["grid"], linewidth=1)
    ax.spines["bottom"].set_visible(False)
    legend(ax, sheet)


def time_axis(axes: Sequence[Axes], data: RunData, sheet: Sheet, start: float) -> None:
    """Set the axis from `start` to the last sample, in seconds since the run began, with stages behind all panels."""
    ax, end = axes[-1], data.samples[-1]["t"]
    ax.set_xlim(start, end if end > start else start + 1)
    ax.xaxis.set_major_locator(MaxNLocator(5 if sheet.is_narrow else 8, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g} s"))
    stage_bands(axes, data, sheet)


def stage_bands(axes: Sequence[Axes], data: RunData, sheet: Sheet) -> None:
    """Shade every second stage; names above the first panel if they fit."""
    left, right = axes[0].get_xlim()
    for i, stage in enumerate(merged(data.stages)):
        start, end = max(stage.start, left), min(stage.end, right)
        for ax in axes if i % 2 and end > start else ():
            ax.axvspan(start, end, color=HEX["band"], linewidth=0, zorder=0)
        room = (end - start) / (right - left) * sheet.width
        if name := in_lines(text(stage.name.replace("_", " "), "text"), room):
            axes[0].text(
                (start + end) / 2, 0.99, name,
                transform=axes[0].get_xaxis_transform(), ha="center", va="top", fontsize=TEXT, color=HEX["muted"],
            )  # fmt: skip


def in_lines(name: str, pixels: float) -> str:
    """Wrap a name into at most two lines of this many pixels; "" if it does not fit."""
    letters = int(pixels / LETTER)
    lines = textwrap.wrap(name, letters, break_long_words=False) if letters > 0 else []
    return "\n".join(lines) if len(lines) <= 2 and all(len(line) <= letters for line in lines) else ""


def merged(stages: Iterable[Stage]) -> list[Stage]:
    """Merge alternating prefill and decode into one band, and neighbors of the same name."""
    bands: list[Stage] = []
    serving = ("prefill", "decode")
    stages = list(stages)
    turns = sum(stage.name == "prefill" for stage in stages)
    for stage in stages:
        name = "prefill and decode" if turns > 1 and stage.name in serving else stage.name
        if bands and bands[-1].name == name:
            bands[-1] = Stage(name, bands[-1].start, stage.end)
        else:
            bands.append(Stage(name, stage.start, stage.end))
    return bands


def thinned(samples: Sequence[Sample], key: str, points: int) -> list[Sample]:
    """About `points` samples at most, in order: from each interval the one with the largest `key`, and both ends."""
    have = having(samples, key)
    if len(have) <= points:
        return have
    start, span = have[0]["t"], have[-1]["t"] - have[0]["t"] or 1
    peaks: dict[int, Sample] = {}
    for sample in have[1:-1]:
        bin = int((sample["t"] - start) / span * points)
        if bin not in peaks or reading(sample, key) > reading(peaks[bin], key):
            peaks[bin] = sample
    return [have[0], *peaks.values(), have[-1]]


def is_drawable(samples: Sequence[Sample], key: str) -> bool:
    """True if there are two points in time to draw a line between."""
    return len({sample["t"] for sample in having(samples, key)}) > 1


# --- memory -----------------------------------------------------------------------------------------------------------


def draw_memory(data: RunData, sheet: Sheet) -> Figure | None:
    """Pairs of bars, predicted above measured, with sizes as text; components without bytes are omitted."""
    if data.memory is None:
        return None
    rows = [row for row in data.memory.rows if row.predicted or row.measured]
    if not rows:
        return None
    figure, (ax,) = new_figure(sheet, 34 + len(rows) * (58 if sheet.is_narrow else 44))
    longest = max(max(int(row.predicted or 0), row.size) for row in rows)
    for i, row in enumerate(rows):
        sizes = ("predicted", row.predicted), ("measured", row.size)
        for side, (kind, size) in zip((-0.19, 0.19), sizes, strict=True):
            style = (
                {"facecolor": HEX["paper"], "edgecolor": HEX["accent"], "linewidth": 1.2}
                if kind == "predicted"
                else {"color": HEX["accent"]}
            )
            ax.barh(i + side, max(size or 0, 0) or math.nan, height=0.3, label=kind if i == 0 else None, **style)
            label = "no prediction" if size is None else text(size, "bytes")
            ax.text(max(size or 0, 0) + longest * 0.012, i + side, label, va="center", color=HEX["ink"], fontsize=TEXT)
    ax.set_yticks(range(len(rows)), [words(row.component) for row in rows], color=HEX["ink"])
    ax.set_ylim(len(rows) - 0.45, -0.55)
    ax.set_xlim(0, longest * (1.42 if sheet.is_narrow else 1.16))
    bars_frame(ax, sheet, longest)
    return figure


def draw_over_time(data: RunData, sheet: Sheet) -> Figure | None:
    key = memory_key(data.run)
    if not is_drawable(data.samples, key):
        return None
    samples = thinned(data.samples, key, sheet.points)
    times, layers = stacked(data, samples, key)
    figure, (ax,) = new_figure(sheet, 300)
    names = list(layers)
    colors = [HEX[f"c-{name}" if name in ALLOCATED_IN else "c-rest"] for name in names]
    ax.stackplot(times, *layers.values(), colors=colors, labels=[words(name) for name in names], linewidth=0)
    for name, style in (("torch_reserved", (0, (4, 2))), ("torch_allocated", (0, (1, 1.2)))):
        if is_drawable(samples, name):
            points = [(sample["t"], reading(sample, name)) for sample in having(samples, name)]
            ax.plot(*zip(*points, strict=True), color=HEX["ink"], linewidth=1.3, linestyle=style, label=words(name))
    highest = max(sum(values) for values in zip(*layers.values(), strict=True))
    ax.set_ylim(0, highest * (1.24 if sheet.is_narrow else 1.12))
    byte_axis(ax.yaxis, highest, 4)
    time_axis([ax], data, sheet, data.samples[0]["t"])
    legend(ax, sheet)
    return figure


def stacked(data: RunData, samples: Sequence[Sample], key: str) -> tuple[list[float], dict[str, list[float]]]:
    """(times, bytes by component at each): measured memory, filled from the bottom with the components' own sizes.

    A component takes its measured size once the stage that allocates it has begun, up to the total; the remainder is
    activations, the allocator's slack and unattributed memory. The layers add up to the measured total.
    """
    sizes = {} if data.memory is None else {row.component: row.size for row in data.memory.rows}
    before = 0 if key == "rss" else data.run.peaks.get("before", {}).get(key, 0)
    starts = {stage.name: stage.start for stage in reversed(data.stages)}
    layers: dict[str, list[float]] = {name: [] for name in ALLOCATED_IN if sizes.get(name, 0) > 0}
    remainder: list[float] = []
    for sample in samples:
        left = max(0, reading(sample, key) - before)
        for name, values in layers.items():
            stage = ALLOCATED_IN[name]
            has_begun = not stage or sample["t"] >= starts.get(stage, math.inf)
            values.append(min(left, sizes[name]) if has_begun else 0)
            left -= values[-1]
        remainder.append(left)
    return [sample["t"] for sample in samples], {**layers, REST if layers else key: remainder}


def draw_comparison(data: ReportData, sheet: Sheet) -> Figure | None:
    runs = [run for run in data.runs if run.memory is not None]
    figure, (ax,) = new_figure(sheet, 70 + 44 * len(runs) + (40 if sheet.is_narrow else 0))
    shares = [measured_parts(run.memory.rows) for run in runs if run.memory is not None]
    present = [name for name in shares[0] if any(sizes[name] for sizes in shares)]
    longest = max(sum(sizes.values()) for sizes in shares)
    for i, (run, sizes) in enumerate(zip(runs, shares, strict=True)):
        left = 0
        for name in present:
            label = words(name) if i == 0 else None
            ax.barh(i, sizes[name], left=left, height=0.55, color=HEX[f"c-{name}"], label=label)
            left += sizes[name]
        reported = "" if run.memory is None else text(run.memory.reported, "bytes")
        ax.text(left + longest * 0.012, i, reported, va="center", color=HEX["ink"], fontsize=TEXT)
    ax.set_yticks(range(len(runs)), [shortened(run.label, sheet) for run in runs], color=HEX["ink"])
    ax.set_ylim(len(runs) - 0.4, -0.6)
    ax.set_xlim(0, longest * (1.35 if sheet.is_narrow else 1.14))
    bars_frame(ax, sheet, longest)
    return figure


def measured_parts(rows: Iterable[ComponentRow]) -> dict[str, int]:
    """Measured bytes of the components with their own color, and of all others together."""
    sizes = {row.component: max(0, row.size) for row in rows}
    parts = {name: sizes.pop(name, 0) for name in ("weights", "kv_cache", "context", "cuda_graphs")}
    return {**parts, "other": sum(sizes.values())}


def shortened(label: str, sheet: Sheet) -> str:
    limit = 12 if sheet.is_narrow else 28
    clean = text(label, "text")
    return clean if len(clean) <= limit else f"{clean[: limit - 1]}…"


# --- serving ----------------------------------------------------------------------------------------------------------


def draw_kv(data: RunData, sheet: Sheet) -> Figure | None:
    """Allocated blocks and the blocks' worth of tokens in them; below, running and waiting requests."""
    if not is_drawable(data.samples, "num_used_blocks"):
        return None
    figure, (blocks, requests) = new_figure(sheet, 360, (1.5, 1))
    used = thinned(data.samples, "num_used_blocks", sheet.points)
    times = [sample["t"] for sample in used]
    blocks.fill_between(
        times, [sample["num_used_blocks"] for sample in used], step="post", color=HEX["c-kv_cache"], alpha=0.45,
        linewidth=0, label="allocated",
    )  # fmt: skip
    key = filled_key(data)
    if key is not None:
        block_size = data.run.manifest["inputs"]["block_size"]
        filled = [(number(sample, key) or 0) / block_size for sample in used]
        blocks.fill_between(
            times, filled, step="post", color=HEX["c-kv_cache"], linewidth=0, label="filled with tokens"
        )
    usable = usable_blocks(data.run)
    blocks.axhline(usable, color=HEX["ink"], linewidth=1, linestyle=(0, (4, 2)), label=f"pool: {usable:,} blocks")
    blocks.set_ylim(0, usable * (1.3 if sheet.is_narrow else 1.15) or 1)
    count_axis(blocks.yaxis)
    draw_requests(data, requests, sheet)
    time_axis([blocks, requests], data, sheet, serving_start(data))
    legend(blocks, sheet)
    legend(requests, sheet)
    return figure


def filled_key(data: RunData) -> str | None:
    """Sample key of the number of slots with a token, or None for an older run whose tokens may share slots."""
    if any("num_filled_slots" in sample for sample in data.samples):
        return "num_filled_slots"
    is_shared = any(numbers(data.samples, "prefix_cache_hits")) or num_groups(data.run) > 1
    return None if is_shared else "num_kv_tokens"


def draw_requests(data: RunData, ax: Axes, sheet: Sheet) -> None:
    """Draw running requests, waiting ones if there are any, and a mark at each preemption."""
    highest = 0.0
    for key, color, style in (("num_requests_running", "accent", "-"), ("num_requests_waiting", "ink", (0, (3, 2)))):
        points = [(sample["t"], reading(sample, key)) for sample in thinned(data.samples, key, sheet.points)]
        if any(count for _, count in points):
            ax.step(*zip(*points, strict=True), where="post", color=HEX[color], linestyle=style, label=words(key))
            highest = max(highest, *(count for _, count in points))
    marks = preempted_at(data.samples, sheet.points)
    if marks:
        ax.vlines(marks, 0, 0.16, HEX["ink"], linewidth=1.2, label="preemption", transform=ax.get_xaxis_transform())
    ax.set_ylim(0, highest * 1.25 or 1)
    count_axis(ax.yaxis, 3)


def preempted_at(samples: Sequence[Sample], points: int) -> list[float]:
    """Times at which the preemption count had grown; of times too close to distinguish, the last."""
    have = having(samples, "num_preemptions")
    none: Sample = {"num_preemptions": 0}
    times = [b["t"] for a, b in pairwise([none, *have]) if b["num_preemptions"] > a["num_preemptions"]]
    span = (samples[-1]["t"] - samples[0]["t"]) or 1
    return list({int(t / span * points): t for t in times}.values())


def serving_start(data: RunData) -> float:
    """Time at which the first step began, as far as the samples show."""
    return min((start for start, _ in servings(data.samples, "num_used_blocks")), default=0.0)


def draw_throughput(data: RunData, sheet: Sheet) -> Figure | None:
    """Prefill and output tokens per second, each on its own scale."""
    kinds = {"prompt_tokens": "prefill tokens/s", "generation_tokens": "output tokens/s"}
    series = {label: rates(data, key, sheet.points // 2) for key, label in kinds.items()}
    series = {label: steps for label, steps in series.items() if steps}
    if not series or not is_drawable(data.samples, "generation_tokens"):
        return None
    figure, axes = new_figure(sheet, 70 + 130 * len(series), [1] * len(series))
    for ax, (label, parts) in zip(axes, series.items(), strict=True):
        for edges, values in parts:
            ax.stairs(values, edges, fill=True, color=HEX["accent"], alpha=0.25, linewidth=0)
            ax.stairs(values, edges, baseline=None, color=HEX["accent"], linewidth=1.6)
        ax.set_ylim(0, max(max(values) for _, values in parts) * 1.25 or 1)
        count_axis(ax.yaxis)
        panel_title(ax, label)
    time_axis(axes, data, sheet, serving_start(data))
    return figure


@dataclass(frozen=True, slots=True)
class Counted:
    """Tokens of one or several steps, spread over the time from `begin` to `end`, in seconds since the run began."""

    begin: float
    end: float
    tokens: float


def rates(data: RunData, key: str, points: int) -> list[tuple[list[float], list[float]]]:
    """Per serving (n + 1 times, n tokens per second): a step's tokens are spread over that step only.

    Times are at least a `points`-th of the run apart, except in a shorter serving.
    """
    least = (data.samples[-1]["t"] - data.samples[0]["t"]) / points if data.samples else 0.0
    pieces = (
        bars(counted(samples, key, start), start, max(least, 1e-9)) for start, samples in servings(data.samples, key)
    )
    return [(edges, values) for edges, values in pieces if values]


def counted(samples: Sequence[Sample], key: str, start: float) -> list[Counted]:
    """Increments of a counter and their times: since the last step known to have finished, without idle time."""
    intervals: list[Counted] = []
    count, begun, busy_s, num_steps = 0.0, start, 0.0, number(samples[0], "num_steps")
    for sample in samples:
        value, now, steps = float(reading(sample, key)), float(sample["t"]), number(sample, "num_steps")
        busy = number(sample, "busy_s")
        if value > count:
            worked = math.inf if busy is None else max(0.0, busy - busy_s)
            intervals.append(Counted(max(begun, now - worked), now, value - count))
            count = value
        elif num_steps is not None and steps in (num_steps, None):  # no step is known to have finished since
            continue
        begun, busy_s, num_steps = now, busy_s if busy is None else float(busy), steps
    return intervals


def bars(parts: Iterable[Counted], start: float, least: float) -> tuple[list[float], list[float]]:
    """(n + 1 times, n tokens per second): bars at least this many seconds wide, with every token in one of them."""
    edges, values, remainder = (
        [start],
        [],
        0.0,
    )  # `remainder` has no bar yet; all of it came within `least` of the last edge

    def add(end: float, tokens: float) -> None:
        values.append(tokens / (end - edges[-1]))
        edges.append(end)

    end = start
    for part in parts:
        end = part.end
        if remainder and part.begin - edges[-1] >= least:
            add(edges[-1] + least, remainder)
            remainder = 0.0
        if part.begin - edges[-1] >= least:  # until then other steps ran, or none
            add(part.begin, 0.0)
        remainder += part.tokens
        if part.end - edges[-1] >= least:
            add(part.end, remainder)
            remainder = 0.0
    if remainder and values:  # the run ended before its last bar was wide enough: replace or extend the previous one
        begin, last = edges[-2], values.pop() * (edges[-1] - edges[-2])
        edges.pop()
        if not last and end - least - begin >= least:
            add(end - least, 0.0)
        remainder += last
    if remainder and end > edges[-1]:
        add(end, remainder)
    return edges, values


def servings(samples: Sequence[Sample], key: str) -> list[tuple[float, list[Sample]]]:
    """(start of the first step, samples) of each engine that served: a second one (the baseline) restarts at 0."""
    parts: list[list[Sample]] = [[]]
    last = 0.0  # finished steps at the last sample
    for sample in having(samples, key):
        num_steps = number(sample, "num_steps")
        if num_steps is not None and num_steps < last:
            parts.append([])
        last = last if num_steps is None else num_steps
        parts[-1].append(sample)
    return [(part[0]["t"] - (number(part[0], "busy_s") or 0.0), part) for part in parts if part]


def draw_gpu(data: RunData, sheet: Sheet) -> Figure | None:
    kinds = {
        "power_w": ("power, W", 1),
        "sm_clock_mhz": ("SM clock, MHz", 1),
        "memory_clock_mhz": ("memory clock, MHz", 1),
        "gpu_utilization": ("utilization, %", 100),
    }
    have = {key: label for key, label in kinds.items() if is_drawable(data.samples, key)}
    if not have:
        return None
    figure, axes = new_figure(sheet, 60 + 105 * len(have), [1] * len(have))
    for ax, (key, (label, factor)) in zip(axes, have.items(), strict=True):
        points = [(sample["t"], reading(sample, key) * factor) for sample in thinned(data.samples, key, sheet.points)]
        ax.plot(*zip(*points, strict=True), color=HEX["accent"], linewidth=1.4)
        ax.set_ylim(0, max(value for _, value in points) * 1.25 or 1)
        count_axis(ax.yaxis, 3)
        panel_title(ax, label)
    time_axis(axes, data, sheet, data.samples[0]["t"])
    return figure
