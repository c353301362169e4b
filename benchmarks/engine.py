"""The engine's speed beside what the device allows, and beside other ways to serve: each figure a ratio in one run.

    python -m benchmarks.engine OUT [--budget 480] [--device cuda:0] [--parts decode,nano-vllm]

Each part is a stage of benchmarks/gpu.py and a process of its own; one that fails costs its own rows. Seconds are what
an H200 is expected to take, the start of an engine (10 to 20 s) included; nobody has measured them:

    decode       45  Llama-3.1-8B by batch and length, beside the memory's and the matrix units' limit
    prefill      25  prompt tokens/s beside the matrix rate
    nano-vllm    45  nano-vllm's 256 requests on Qwen3-0.6B, with and without overlap scheduling, beside the same limit
    allocators   75  paged against contiguous in the same pool: requests/s, admitted, held and empty
    generate     60  64 requests of 512 + 128 tokens against transformers, one by one and in static batches
    overhead     30  what the host adds to a step of 256 sequences, with and without overlap scheduling
    prefix       35  time to first token, first and later requests of a 900-token prefix

OUT gets, after each part, summary.json (which `python -m benchmarks.goals` reads), engine.csv, goals.md and the logs;
at the end engine.svg. With --device cpu the models are tiny and the numbers say nothing about a GPU.

Exit codes: 0 all parts are ok, 1 one failed, 2 usage, 3 no GPU, 4 the budget ended first.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import goals
from benchmarks.gpu import INTERRUPTED, STAGES, TERMINATED, exit_code, machine
from benchmarks.gpu_stages.evidence import write_whole
from benchmarks.gpu_stages.runner import SUMMARY, Result, Session, Stage, run_stages, table, write_rows
from kvplan.core.errors import EnvironmentProblem, KvplanError, UsageError
from kvplan.core.files import path_text, printable

PARTS = ("decode", "prefill", "nano-vllm", "allocators", "generate", "overhead", "prefix")
OWN_GOALS = (
    "decode-roofline", "nano-vllm", "transformers-single", "transformers-batch", "paged-contiguous", "paged-waste",
    "contiguous-waste", "prefix", "prefix-bound", "prefix-short", "prefix-short-bound", "nano-vllm-share",
)  # fmt: skip
DRAWN = ("tokens/s", "requests/s", "ms")  # units: of each part the first that it has is in the figure


# --- what is kept -----------------------------------------------------------------------------------------------------


def keep(session: Session) -> None:
    """Write the CSV and the goals of all parts so far."""
    results = list(session.results.values())
    rows = [line for result in results for line in result.rows]
    if rows:
        whole = replace(results[-1], rows=rows, commit=session.machine.commit)
        write_rows(session.out / "engine.csv", whole, session.machine)
    write_whole(session.out / "goals.md", f"{goals_of(session)}\n".encode())


def goals_of(session: Session) -> str:
    """The table of the goals; one that nothing was measured for is that of an H200."""
    gpu = session.machine.device
    return goal_table(goal_values(session), None if gpu == "cpu" else gpu)


def goal_values(session: Session) -> dict[str, float]:
    """What the parts say of the goals; a CPU says nothing of them."""
    if session.machine.device == "cpu":
        return {}
    values: dict[str, float] = {}
    for result in session.results.values():
        values |= goals.numbers_of(asdict(result))
    return values


def goal_table(values: dict[str, float], gpu: str | None) -> str:
    """Those of benchmarks/goals.py that this script measures."""
    own = [
        cells
        for goal, cells in zip(goals.GOALS, goals.cells(values, gpu), strict=True)
        if any(need.name in OWN_GOALS for need in goal.needs)
    ]
    rows = [("what", "goal", "measured", "met"), ("---",) * 4, *own]
    return "\n".join("| " + " | ".join(cell or " " for cell in row) + " |" for row in rows)


# --- the figure -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars of one part, in one unit: (name, value, 20th and 80th percentile)."""

    title: str
    unit: str
    bars: tuple[tuple[str, float, float, float], ...]


def panels(results: Sequence[Result]) -> list[Panel]:
    """One for each part that has something to show."""
    drawn = []
    for result in results:
        unit = next((unit for unit in DRAWN if any(line["unit"] == unit for line in result.rows)), None)
        lines = [line for line in result.rows if line["unit"] == unit]
        if unit is not None:
            bars = tuple((line["metric"], line["value"], line["p20"], line["p80"]) for line in lines)
            drawn.append(Panel(f"{result.name} ({', '.join(sorted({line['model'] for line in lines}))})", unit, bars))
    return drawn


def draw(path: Path, panels: Sequence[Panel], device: str) -> bool:
    """A panel below the other, a limit in grey; False without matplotlib or anything to show."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path.name}: matplotlib is not installed; the CSV holds the numbers", file=sys.stderr)
        return False
    if not panels:
        return False
    heights = [len(panel.bars) + 2 for panel in panels]
    figure = Figure(figsize=(10, 0.22 * sum(heights) + 0.6), layout="constrained")
    figure.suptitle(f"The engine on {device}")
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        names, values, lows, highs = zip(*panel.bars, strict=True)
        colors = ["0.75" if name.endswith(": limit") else "C0" for name in names]
        errors = [[max(0.0, v - p) for v, p in zip(values, lows, strict=True)],
                  [max(0.0, p - v) for v, p in zip(values, highs, strict=True)]]  # fmt: skip
        bars = axes.barh(range(len(names)), values, xerr=errors, color=colors)
        axes.bar_label(
            bars,
            labels=[f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values],
            padding=3,
            fontsize=7,
        )
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(f"{panel.title}, {panel.unit}", fontsize=9, loc="left")
    figure.savefig(path)
    return True


# --- the command ------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("out", type=Path, metavar="OUT", help="folder for the CSV, the figure, the goals and the logs")
    own.add_argument("--budget", type=float, default=480, metavar="SECONDS", help="for all of it (%(default)s)")
    own.add_argument("--device", default="cuda:0", help="cuda:N or cpu (%(default)s)")
    own.add_argument("--parts", metavar="PART,...", help="these alone, of " + ", ".join(PARTS))
    own.add_argument("--commit", help="of the code, where there is no repository to ask")
    return own


def chosen(stages: Sequence[Stage], parts: str | None) -> list[Stage]:
    """The stages of the parts asked for, in the stated order; raises UsageError for one that is none."""
    names = PARTS if parts is None else tuple(parts.split(","))
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise UsageError(f"--parts: {printable(repr(unknown[0]), 40)} is none; there are {', '.join(PARTS)}")
    by_name = {stage.name: stage for stage in stages}
    return [by_name[name] for name in PARTS if name in names]


def run(options: argparse.Namespace, stages: Sequence[Stage], started_s: float) -> int:
    if not options.budget > 0:
        raise UsageError(f"--budget: must be above 0 ({options.budget:g})")
    selected = chosen(stages, options.parts)
    if (options.out / SUMMARY).exists():
        raise UsageError(f"{path_text(options.out)}: holds an earlier call's results; name another folder")
    where = machine(options.device, options.commit)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(
            f"{path_text(options.out)}: cannot be made ({error.strerror}); name another folder"
        ) from error
    with TemporaryDirectory(prefix="kvplan-engine-") as work:
        session = Session(options.out, Path(work), options.device, where, options.budget, started_s)
        try:
            for stage in selected:
                run_stages([stage], session)
                keep(session)
        finally:  # Ctrl-C, SIGTERM: what is known is kept
            keep(session)
            draw(session.out / "engine.svg", panels(list(session.results.values())), where.device)
            tell(session)
    return exit_code(session, selected)


def tell(session: Session) -> None:
    """What was found, and the goals beside it."""
    print(f"\n{session.machine.device}, commit {session.machine.commit}; {path_text(session.out)}:")
    print(f"{table(list(session.results.values()))}\n\n{goals_of(session)}", flush=True)
    if session.machine.device == "cpu":
        print("these are a CPU's times: they try the script and say nothing about a GPU", file=sys.stderr)


def main(argv: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    """Run a command line; what went wrong is one line on standard error."""
    started_s = time.monotonic()
    try:
        return run(parser().parse_args(argv), stages, started_s)
    except KvplanError as error:
        print(f"engine.py: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that the part is ended and its results kept
    sys.exit(main())
