"""The share of the copy bandwidth by bytes of KV, drawn."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kernel_bench.contenders import OWN
from benchmarks.kernel_bench.timings import Rates, Timing


def draw(path: Path, timings: Sequence[Timing], rates: Rates, device: str) -> bool:
    """Share of the copy bandwidth by bytes of KV, a line per kernel and contender; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    lines = lines_of(timings, rates)
    kernels, whos = (list(dict.fromkeys(names)) for names in zip(*lines, strict=True)) if lines else ([], [])
    for (kernel, who), points in lines.items():
        style: dict[str, Any] = {
            "color": f"C{whos.index(who)}",
            "linestyle": ("-", "--", ":", "-.")[kernels.index(kernel) % 4],
            "linewidth": 2 if who == OWN else 1,
        }
        axes.plot([x for x, _ in points], [median(shares) for _, shares in points], label=f"{kernel}, {who}", **style)
        spread = [(x, share) for x, shares in points for share in shares]
        axes.plot(*zip(*spread, strict=True), color=style["color"], marker="o", markersize=3, linestyle="")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("MiB of keys and values read (line: median of the shapes that read as much)")
    axes.set_ylabel(f"share of the copy bandwidth ({rates.copy.value / 1e12:.2f} TB/s)")
    axes.set_title(f"Attention of one new token per sequence, {device}")
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize=8)
    figure.savefig(path)
    return True


def lines_of(timings: Sequence[Timing], rates: Rates) -> dict[tuple[str, str], list[tuple[float, list[float]]]]:
    """(kernel, contender) -> (MiB read, share of each shape that reads as much) in order; plain attention only."""
    by_line: dict[tuple[str, str], dict[float, list[float]]] = {}
    for timing in timings:
        case = timing.case
        if not case.is_plain or (case.kind != "latent" and (case.kind, case.block_size) != ("decode", 16)):
            continue  # told in the CSV
        kernel = f"{case.kind} {case.heads.model} {str(case.stored).removeprefix('torch.')}"
        line = by_line.setdefault((kernel, timing.who), {})
        line.setdefault(case.moved_bytes / 2**20, []).append(timing.bandwidth(rates))
    return {names: sorted(line.items()) for names, line in by_line.items()}
