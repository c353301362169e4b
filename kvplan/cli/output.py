"""Destinations of answers: standard output, standard error, report files; none is left half-written."""

import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from kvplan.core import files
from kvplan.core.errors import EnvironmentProblem, KvplanError, KvplanWarning, UsageError
from kvplan.core.files import printable
from kvplan.report.formats import FORMS, SUFFIXES, CommandAnswer, Format, rendered

if TYPE_CHECKING:
    from rich.console import Console

    from kvplan.asked.question import Inputs
    from kvplan.report.lines import Part

_answered = False  # True if standard output has received machine-format text
_line: Sequence[str] = ()  # the command line, shown at the foot of a page
_is_reading = False  # True if the line stands for the one that was typed
_answer: TextIO | None = None  # standard output while `answers_only` holds


def start_command(line: Sequence[str] = (), reading: bool = False) -> None:
    """Start a command.

    reading  the line stands for another one that was typed: a note says so as soon as it is parsed
    """
    global _answered, _line, _is_reading
    _answered, _line, _is_reading = False, line, reading


def say_reading() -> None:
    """Say which line stands for the one that was typed."""
    if _is_reading and not {"-q", "--quiet"} & set(_line):
        tell("note", f"read as: kvplan {printable(shlex.join(_line), 300)}")


def command_line() -> Sequence[str]:
    """The words of the command that runs."""
    return _line


def with_command(page: str) -> str:
    """Insert the command line that wrote a page into it."""
    from kvplan.report.page import COMMAND

    if COMMAND not in page:
        return page
    from html import escape

    words = escape(printable(shlex.join(["kvplan", *_line]), 2000))
    return page.replace(COMMAND, f"<p>Command: <code>{words}</code></p>")


def tell(kind: str, text: str) -> None:
    """Print one line on standard error: `kvplan: KIND: text`. Control characters of untrusted names are escaped."""
    line = f"kvplan: {kind}: {printable(text, 4000)}"
    with suppress(OSError, ValueError):  # the stream is closed
        print(line, file=sys.stderr, flush=True)


def notes_of(options: "MayBeQuiet") -> Callable[[str, str], None]:
    """Prints a command's notes, unless it is to be quiet."""
    return (lambda kind, text: None) if options.quiet else tell


def say(inputs: "Inputs", *, quiet: bool) -> None:
    """Print the warnings of a question, and unless quiet its notes and hints."""
    for text in dict.fromkeys(inputs.warnings):
        tell("warning", text)
    if not quiet:
        for text in dict.fromkeys(inputs.notes):
            tell("note", text)
        for text in dict.fromkeys(inputs.hints):
            tell("hint", text)


@contextmanager
def showing_warnings() -> Iterator[None]:
    """Print every warning of the engine as kvplan's warnings, every time; leave others to Python."""
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, KvplanWarning):
                tell("warning", str(message))
            else:
                usual(message, category, *where, **more)

        warnings.simplefilter("always", KvplanWarning)
        warnings.showwarning = show
        yield


def prepare_streams() -> None:
    """Make printing safe: unencodable characters become `?`, a closed stream discards output, and a terminal that
    reports 0 columns, on which rich would print nothing, has unknown width.
    """
    if not os.environ.get("COLUMNS", "1").strip("0"):
        del os.environ["COLUMNS"]
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 -- lives as long as the process
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace" if name == "stdout" else "backslashreplace")


def stdout() -> TextIO:
    """Standard output, for answers."""
    return sys.stdout if _answer is None else _answer


@contextmanager
def answers_only() -> Iterator[None]:
    """Keep standard output for answers: what a library, its threads and its processes print goes to standard error."""
    global _answer
    usual, sys.stdout = sys.stdout, sys.stderr
    usual.flush()
    _answer = usual
    with ExitStack() as stack:
        with suppress(OSError, ValueError):  # not a file, or one that is closed
            if usual.fileno() == 1:
                own = os.dup(1)
                _answer = stack.enter_context(open(own, "w", encoding=usual.encoding, errors=usual.errors))  # noqa: PTH123 -- a number
                os.dup2(2, 1)
                stack.callback(os.dup2, own, 1)
        try:
            yield
            with standard_output():
                pass  # what is still buffered
        finally:
            _answer, sys.stdout = None, usual


@contextmanager
def standard_output() -> Iterator[None]:
    """Flush everything written inside to standard output; handle a closed pipe and a full disk."""
    try:
        yield
        stdout().flush()
    except BrokenPipeError:
        mute_stdout()
    except OSError as error:
        mute_stdout()
        raise EnvironmentProblem(
            "standard output", f"cannot be written ({error.strerror or type(error).__name__})", "check the disk"
        ) from error


def mute_stdout() -> None:
    """Discard still buffered output, so that the interpreter's last flush does not fail."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stdout().fileno())
        os.close(null)


def write(text: str) -> None:
    """Write a whole answer in a machine format, like `put`."""
    with standard_output():
        put(text if text.endswith("\n") else text + "\n")


def answer_error(error: KvplanError, code: int) -> None:
    """Write an error as a document (kvplan/error@1), if nothing was written yet."""
    import json

    if _answered:
        return
    from kvplan.documents.error import error_document

    with suppress(KvplanError):  # standard output may be the cause
        write(json.dumps(error_document(error, code), indent=2))


def put(text: str) -> None:
    """Write text in a machine format: UTF-8 to a file or a pipe regardless of the locale, matching its own header and
    report files; in a terminal's encoding to a terminal. Call it inside `standard_output`.
    """
    global _answered
    _answered = True
    stream = stdout()
    buffer = getattr(stream, "buffer", None)
    if buffer is None or stream.isatty():
        stream.write(text)
        stream.flush()
        return
    stream.flush()  # earlier output comes first
    buffer.write(text.encode("utf-8", errors="replace"))
    buffer.flush()


def console(color: str) -> "Console | TextIO":
    """Choose where tables are printed: as plain text to a pipe or without colors; rich is imported for terminals only.

    NO_COLOR disables all escapes (rich itself would keep bold and dim); an explicit --color always overrides it.
    """
    if color == "never" or (color == "auto" and os.environ.get("NO_COLOR")):
        return stdout()
    if color == "always":
        from rich.console import Console

        return Console(file=stdout(), markup=False, emoji=False, highlight=False, force_terminal=True)
    from kvplan.report.lines import open_console

    return open_console(stdout())


def show(parts: "Iterable[Part]", color: str) -> None:
    """Print lines and tables on standard output."""
    from kvplan.report.lines import write as write_parts

    with standard_output():
        write_parts(parts, console(color))


def answer(response: CommandAnswer, format: Format, color: str, reports: "Sequence[ReportFile]" = ()) -> None:
    """Write a command's answer to its report files, and to standard output in the requested format."""
    for report in reports:
        report.save(rendered(response, report.format))
    if format != "table":
        check_libraries(format, f"--format {format}")
        write(with_command(rendered(response, format)))
        return
    from kvplan.report.lines import takes_blocks
    from kvplan.report.lines import write as write_parts

    with standard_output():
        target = console(color)
        write_parts(response.screen(takes_blocks(target)), target)


def check_libraries(format: str, subject: str) -> None:
    """Refuse a format whose libraries are not installed, before the work starts."""
    needs = FORMS[format].needs if format in FORMS else ()
    if needs:
        from kvplan.cli.drawing import require_libraries

        require_libraries(subject, *needs)


class MayBeQuiet(Protocol):
    @property
    def quiet(self) -> bool: ...


class ReportFile:
    """A file that is written completely or not at all. Created before the work starts: a bad path fails early."""

    def __init__(
        self, path: str, flag: str = "--report", suffixes: Mapping[str, str] = SUFFIXES, *, force: bool = False
    ) -> None:
        """flag: option that names the file; suffixes: allowed ones, and the format of each; force: replace any file."""
        self.flag, self.suffixes, self.force = flag, suffixes, force
        self.label = printable(path, 400)
        self.format = self._format(path)
        try:
            self.target = Path(path).resolve()
            self._check()
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a link cycle in Python 3.11
            reason = getattr(error, "strerror", None) or str(error)
            raise self._refusal(f"cannot be written ({reason})", "name another path") from error
        self._temporary = self.target.parent / f".{self.target.name[:80]}.{os.urandom(6).hex()}.tmp"

    def create(self) -> None:
        """Create the temporary file. Its name is set before, so that discard() finds it after any interrupt."""
        try:
            os.close(os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise self._refusal(f"cannot be written ({reason})", "name another path") from error

    def _format(self, path: str) -> str:
        suffix = Path(path).suffix.lower()
        if suffix not in self.suffixes:
            from kvplan.measure.rundir import refuse_run_files

            refuse_run_files(path, self.flag)
            known = ", ".join(self.suffixes)
            raise self._refusal(f"unknown file type ({suffix!r})", f"use {known}")
        return self.suffixes[suffix]

    def _check(self) -> None:
        if self.target.is_dir():
            raise self._refusal("is a directory", "name a file in it")
        if self.target.exists() and not self.target.is_file():
            raise self._refusal("is not a regular file", "name another path")
        if not self.target.parent.is_dir():
            raise self._refusal("there is no such directory", "make it first")
        if self.target.exists() and not os.access(self.target, os.W_OK):
            raise self._refusal("is read-only", "make it writable or name another path")
        if self.target.exists() and not self.force:
            self._refuse_foreign()

    def _refuse_foreign(self) -> None:
        """Refuse to overwrite an input of the command, a file of a run, or a file that kvplan did not write."""
        from kvplan.cli.own import is_own
        from kvplan.measure.rundir import refuse_run_files

        refuse_run_files(str(self.target), self.flag)
        if not is_own(self.target):
            cure = "name another file, or replace it with --force"
            raise self._refusal("already exists and was not written by kvplan", cure)
        self._refuse_input()

    def _refuse_input(self) -> None:
        files.announce_output(self.target, self._refusal("is an input of this command", "name another file"))

    def _refusal(self, problem: str, remedy: str) -> UsageError:
        return UsageError(f"{self.flag} {self.label}", problem, remedy)

    def save(self, content: str | bytes | Iterable[bytes]) -> None:
        """Replace the file with `content`; on failure the old file is unchanged."""
        if self.target.exists() and not self.force:
            self._refuse_input()
        if self.format == "html":
            whole = content if isinstance(content, str | bytes) else b"".join(content)
            content = with_command(whole if isinstance(whole, str) else whole.decode())
        if isinstance(content, str | bytes):
            content = (content.encode("utf-8") if isinstance(content, str) else content,)
        if self.format in FORMS and (mark := FORMS[self.format].mark):
            from kvplan.cli.own import COMMENT

            parts = tuple(content)
            content = parts if parts[0].startswith(COMMENT) else (*parts, f"{mark}\n".encode())
        try:
            with self._temporary.open("wb") as file:
                file.writelines(content)
                file.flush()
                os.fsync(file.fileno())
            self._temporary.chmod(self._mode())
            os.replace(self._temporary, self.target)  # noqa: PTH105 -- the one call that is atomic by contract
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise EnvironmentProblem(
                f"{self.flag} {self.label}", f"cannot be written ({reason})", "check the disk"
            ) from error

    def _mode(self) -> int:
        """Permissions of the replaced file, else those that the umask allows."""
        if self.target.exists():
            return self.target.stat().st_mode & 0o777
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask

    def discard(self) -> None:
        files.forget_output(self.target)
        with suppress(OSError):
            self._temporary.unlink(missing_ok=True)


@contextmanager
def report_files(
    paths: Iterable[str], flag: str = "--report", suffixes: Mapping[str, str] = SUFFIXES, *, force: bool = False
) -> Iterator[list[ReportFile]]:
    """Yield all report files, each checked before the work starts; temporary files are always removed."""
    reports: list[ReportFile] = []
    try:
        for path in paths:
            report = ReportFile(path, flag, suffixes, force=force)
            check_libraries(report.format, f"{flag} {report.label}")
            reports.append(report)
            report.create()  # one by one, so that earlier ones are removed after a bad one
        yield reports
    finally:
        for report in reports:
            report.discard()
