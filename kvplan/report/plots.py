"""Charts of an answer drawn with matplotlib, for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvplan.core.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvplan.report.drawing import Bars, Figure

# Colors of the pages, by the name of a bar's segment.
COLORS: Final = {
    "weights": "#7db2dd", "draft": "#7fc4e8", "buffers": "#7fc4e8", "activations": "#9ed8c8", "cuda_graphs": "#d9a6c6",
    "non_torch": "#b9c1c6", "lora": "#c7b6e6", "kv_cache": "#edb84d", "unused": "#eeeeee",
}  # fmt: skip
OTHER: Final = "#d0c8b8"


def plotted(figures: Sequence[Figure], ax: Axes | None = None) -> Axes:
    """Draw the first bars of these figures. Raises EnvironmentProblem where matplotlib is not installed."""
    from kvplan.report.drawing import Bars

    bars = next((figure for figure in figures if isinstance(figure, Bars)), None)
    if bars is None:
        raise UsageError("plot", "the answer has no chart", "print it")
    ax = ax or new_axes((8, 1.2 + 0.5 * len(bars.bars)))
    draw(ax, bars)
    return ax


def new_axes(size: tuple[float, float]) -> Axes:
    """The axes of a new figure of so many inches. Raises EnvironmentProblem where matplotlib is not installed."""
    try:
        from matplotlib import pyplot
    except ImportError:
        remedy = "pip install '.[report]' in kvplan's sources"
        raise EnvironmentProblem("plot", "matplotlib is not installed", remedy) from None

    return pyplot.subplots(figsize=size, layout="constrained")[1]


def draw(ax: Axes, bars: Bars) -> None:
    """Draw the bars from the top, their segments in order, and the line that their note explains."""
    for place, bar in enumerate(bars.bars):
        start = 0.0
        for part in bar.parts:
            ax.barh(place, part.size, left=start, color=COLORS.get(part.name, OTHER), edgecolor="white")
            start += part.size
        ax.annotate(f" {bar.text}", (start, place), va="center")
        if bar.mark is not None:
            ax.plot([bar.mark, bar.mark], [place - 0.45, place + 0.45], color="#1a1a1a", linestyle="--", linewidth=1)
    ax.set_yticks(range(len(bars.bars)), [bar.label for bar in bars.bars])
    ax.invert_yaxis()
    ax.set_xticks([])
    ax.set_xlim(0, bars.scale * 1.2)
    ax.spines[:].set_visible(False)
    ax.set_title(bars.title, loc="left")
    labels = bars.legend
    if labels:
        patches = [ax.bar(0, 0, color=COLORS.get(name, OTHER), label=label) for name, label in labels.items()]
        ax.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4, frameon=False)
