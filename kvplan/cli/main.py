"""The entry point. It imports almost nothing itself, so that interrupts are handled from the start."""

import gc
import sys

from kvplan.core.errors import INTERRUPTED, TERMINATED

GARBAGE = 50_000  # objects between two searches for cycles, of which there are few: the usual 700 cost 5 to 8% of a run


def main(argv: list[str] | None = None) -> int:
    """Run a command line and return its exit code; handles interrupts even during imports."""
    try:
        from kvplan.cli import app

        return app.main(argv)
    except KeyboardInterrupt:
        return INTERRUPTED


def run() -> None:
    """Run `kvplan` as a program."""
    code = INTERRUPTED
    gc.set_threshold(GARBAGE)
    try:
        import signal

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that temporary files are removed
        code = main()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer is printed: nothing is left to interrupt
    except KeyboardInterrupt:
        pass
    end(code)


def end(code: int) -> None:
    """Exit. One of several ranks exits without tearing torch down: its threads aborted one in ten processes at Python's
    exit (SIGABRT after the answer, torch 2.13 with gloo on a busy machine).
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        sys.exit(code)
    import os
    from contextlib import suppress

    with suppress(Exception):  # the other ranks may have exited
        distributed.destroy_process_group()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
