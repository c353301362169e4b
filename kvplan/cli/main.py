"""The entry point. It imports next to nothing itself, so that an interrupt finds a handler from the first moment on."""

import sys

from kvplan.errors import INTERRUPTED, TERMINATED


def main(argv: list[str] | None = None) -> int:
    """Run a command line and return its exit code; an interrupt counts while the commands are still being loaded."""
    try:
        from kvplan.cli import app

        return app.main(argv)
    except KeyboardInterrupt:
        return INTERRUPTED


def run() -> None:
    """`kvplan` as a program."""
    code = INTERRUPTED
    try:
        import signal

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that temporary files are removed
        code = main()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer is out: nothing is left to interrupt
    except KeyboardInterrupt:
        pass
    sys.exit(code)
