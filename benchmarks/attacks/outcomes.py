"""What the attacks share: a command run in this process, what breaks it, and the lines that they print."""

import contextlib
import io
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unicodedata import category

from kvplan.cli.main import main

LIMIT_S = 900  # a busy machine does not reach it; what waits for ever does
LIMIT_KIB = 1 << 20
CODES = (0, 1, 2, 3)


class NoEnd(BaseException):
    """A command that did not end; not an Exception, so that the command's own handlers let it pass."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command answered, and by how much it raised the peak of this process's memory."""

    code: int | None  # None: it did not end
    out: str
    err: str
    grown_kib: int = 0

    @property
    def is_refused(self) -> bool:
        return self.code in (2, 3)

    def fault(self) -> str | None:
        """What no command may do; None for an answer, and for a refusal with a line for each fault."""
        if self.code is None:
            return "did not end"
        if self.code not in CODES or "Traceback" in self.err or "internal error" in self.err:
            return f"exit code {self.code}: {self.err[-300:]}"
        if self.grown_kib > LIMIT_KIB:
            return f"took {self.grown_kib >> 10:,} MiB more"
        if any(category(sign).startswith("C") and sign != "\n" for sign in set(self.out + self.err)):
            return "printed a control character"
        lines = [line for line in self.err.splitlines() if line.startswith("kvplan: error: ")]
        if self.is_refused and (not lines or len(set(lines)) < len(lines)):
            return f"exit code {self.code} with {len(lines)} lines of error, {len(set(lines))} of them different"
        return None


@dataclass
class Tally:
    """Cases by kind and how many were refused, and a line for each that broke something."""

    counts: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def judge(self, kind: str, name: str, outcome: Outcome, problem: str | None = None) -> None:
        """Count a case; a valid one must be answered."""
        self.counts[kind] += 1
        self.counts["refused"] += outcome.is_refused
        problem = problem or outcome.fault()
        if problem is None and kind == "valid" and outcome.is_refused:
            problem = f"refused: {outcome.err[-300:]}"
        if problem is not None:
            self.broken.append(f"{kind}, {name}: {problem}")

    def closing(self) -> int:
        """Print the counts and the first lines of what broke, and return the exit code."""
        kinds = {kind: count for kind, count in self.counts.items() if kind != "refused"}
        listed = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        refused = self.counts["refused"]
        print(f"{sum(kinds.values()):,} tried ({listed}), {refused:,} refused, {len(self.broken)} broke")
        print("\n".join(self.broken[:25]), end="\n" if self.broken else "")
        return int(bool(self.broken))


def command(*words: str) -> Outcome:
    """Run `kvplan WORDS` in this process."""
    out, err = io.StringIO(), io.StringIO()
    before = peak_kib()
    code: int | None = None
    with contextlib.suppress(NoEnd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limited():
        code = main(list(words))
    return Outcome(code, out.getvalue(), err.getvalue(), peak_kib() - before)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise NoEnd in what takes too long; for the main thread."""

    def stop(*_: object) -> None:
        raise NoEnd

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    """Make something else of a file or of an empty folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    make(path)


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
