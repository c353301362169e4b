"""Progress view of a running profile: bars on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvplan.cli import output
from kvplan.core.units import format_gib

if TYPE_CHECKING:
    from rich.console import Group

    from kvplan.measure.run_types import Progress

LINE_EVERY_S = 10.0
REDRAW_EVERY_S = 0.25
Watch = Callable[["Progress"], None]


@contextmanager
def live_view(*, quiet: bool) -> Iterator[Watch]:
    """Yield a function that receives each sample; all output goes to standard error, which carries no results."""
    if quiet:
        yield lambda values: None
    elif sys.stderr.isatty():
        with _drawn() as watch:
            yield watch
    else:
        yield _lines()


def _lines() -> Watch:
    last = time.monotonic()

    def watch(values: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            output.tell("progress", ", ".join(described(values)))

    return watch


def described(values: Progress) -> list[str]:
    """A sample in words: stage, memory, engine activity."""
    words = [f"{values['t']:.0f} s", str(values["stage"]).replace("_", " ")]
    used = values.get("device_used")
    words.append(f"{format_gib(used)} of the GPU used" if used is not None else f"{format_gib(values['rss'])} resident")
    if "num_steps" in values:
        words.append(f"KV {values['kv_cache_usage_perc']:.0%}")
        words.append(f"{values['num_requests_running']} running, {values['num_requests_waiting']} waiting")
        rate = values["generation_tokens"] / values["busy_s"] if values["busy_s"] else 0.0
        words.append(f"{rate:,.0f} tokens/s")
    return words + progress_words(values)


def progress_words(values: Progress) -> list[str]:
    """Number of finished requests and, if known, the remaining time; empty before serving starts."""
    if "num_finished" not in values:
        return []
    total, left = values["num_requests"], values["eta_s"]
    words = [f"{values['num_finished']} requests done" if total is None else f"{values['num_finished']}/{total} done"]
    if left is not None:
        minutes, seconds = divmod(round(left), 60)
        words.append(f"{minutes}:{seconds:02} left")
    return words


@contextmanager
def _drawn() -> Iterator[Watch]:
    from rich.console import Console
    from rich.live import Live

    last = 0.0
    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:

        def watch(values: Progress) -> None:
            nonlocal last
            if time.monotonic() - last >= REDRAW_EVERY_S:
                last = time.monotonic()
                live.update(_picture(values), refresh=True)

        yield watch


def _picture(values: Progress) -> Group:
    """Bars for memory and KV, and a line of figures."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    used, total = values.get("device_used"), values.get("device_total")
    if used is not None and total:
        table.add_row("GPU memory", ProgressBar(total, used, width=40), f"{format_gib(used)} of {format_gib(total)}")
    else:
        table.add_row("resident", "", format_gib(values["rss"]))
    if "num_steps" in values:
        usage = values["kv_cache_usage_perc"]
        table.add_row("KV pool", ProgressBar(1.0, usage, width=40), f"{usage:.0%}")
    if values.get("num_requests"):
        total, done = values["num_requests"], values["num_finished"]
        table.add_row("requests", ProgressBar(total, done, width=40), f"{done}/{total}")
    return Group(table, ", ".join(described(values)))
