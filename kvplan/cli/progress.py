"""Progress of a simulation: a bar on a terminal, else a line now and then; and its early end on an interrupt."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvplan.cli import output
from kvplan.simulate.question import Onlooker

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from kvplan.simulate.load import Load

LINE_S: Final = 10.0  # between lines
BAR_AFTER_S: Final = 1.0
CALLS: Final = 256  # between looks at the clock, unless as many requests finished


class Interruption(Onlooker):
    """State of interrupts: the first one requests an early end, the second one ends the process as usual.

    quiet  True to print no progress and no notes
    """

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__()
        self.quiet = quiet
        self._progress: Progress | None = None

    def __call__(self, number: int, frame: object) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True

    def tell(self, kind: str, text: str) -> None:
        if not self.quiet:
            output.tell(kind, text)

    def begin(self, load: "Load") -> None:
        self._progress = Progress(load.source.num_requests, load.how, quiet=self.quiet)

    def is_over(self, finished: int) -> bool:
        if self._progress is not None:
            self._progress.show(finished)
        return self.is_asked

    def end(self) -> None:
        if self._progress is not None:
            self._progress.close()


@contextmanager
def interruptible(*, quiet: bool = False) -> Iterator[Interruption]:
    """Let SIGINT end a simulation between two steps, with partial results."""
    interruption = Interruption(quiet=quiet)
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = signal.signal(signal.SIGINT, interruption)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)


class Progress:
    """Number of finished requests, of all."""

    def __init__(self, total: int, how: str, *, quiet: bool = False) -> None:
        self._total, self._how, self._quiet = total, how, quiet
        self._calls = self._seen = 0
        self._began = self._last = time.monotonic()
        self._bar: Bar | None = None
        self._task: Any = None

    def show(self, done: int) -> None:
        """Show progress; called after each step or so."""
        self._calls += 1
        if self._calls % CALLS and done - self._seen < CALLS:
            return
        self._seen = done
        now = time.monotonic()
        if sys.stderr.isatty() and not self._quiet:
            if now - self._began > BAR_AFTER_S:
                self._draw(done)
        elif not self._quiet and now - self._last >= LINE_S:
            self._last = now
            output.tell("note", f"simulated {done:,} of {self._total:,} requests at {self._how}")

    def _draw(self, done: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._how, total=self._total)
            self._bar.start()
        self._bar.update(self._task, completed=done)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
