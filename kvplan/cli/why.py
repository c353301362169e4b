"""`kvplan why`: find the cause in a failed server's log, and fixes planned with the log's own figures."""

import shlex
import subprocess
import sys
from collections import deque
from typing import Final

from kvplan.cli import output
from kvplan.cli.options import form_of
from kvplan.cli.why_options import WhyOptions
from kvplan.core.errors import EnvironmentProblem, InvalidInputError, UsageError
from kvplan.core.files import exists, printable
from kvplan.measure.serverlog.log import MAX_BYTES, read_text
from kvplan.measure.why import diagnose
from kvplan.report.formats import CommandAnswer, rendered

COMMAND_SECONDS: Final = 120
FIRST_LINES: Final = 20_000  # of a followed log: its start-up, and its end
LAST_LINES: Final = 20_000


def why(options: WhyOptions) -> int:
    """Diagnose and return the exit code: 0, or with --exit-code 1 if the log shows a failure."""
    with output.report_files(options.report or [], force=options.force) as reports:
        lines = followed(options) if options.follow else text_of(options).splitlines()
        if not options.follow and not any(line.strip() for line in lines):
            raise InvalidInputError("LOG", "is empty", "give the server's log from its first line")
        diagnosis = diagnose(form_of(options), lines)
        failed = diagnosis.failure.outcome in ("failed", "died")
        if not options.follow or failed:
            from kvplan.report.why_text import shapes

            response = shapes(diagnosis)
            for report in reports:
                report.save(rendered(response, report.format))
            show(response, options)
    return int(options.exit_code and failed)


# --- reading ----------------------------------------------------------------------------------------------------------


def text_of(options: WhyOptions) -> str:
    sources = [source for source in (options.log, options.command) if source is not None]
    if len(sources) != 1:
        problem = "missing" if not sources else "and --command say two logs"
        raise UsageError("LOG", problem, 'name a file, - for standard input, or --command "docker logs NAME"')
    if options.log is None:
        return output_of(str(options.command))
    if ": " in options.log and not exists(options.log):
        output.tell("note", "LOG: no file has this name: it is read as lines of a log")
        return options.log
    return read_text(options.log)


def output_of(command: str) -> str:
    """Output of a command, including errors; it is run without a shell."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError("--command", f"is not a command line ({error})", "quote it once") from error
    if not words:
        raise UsageError("--command", "is empty", 'write "docker logs NAME"')
    try:
        result = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMMAND_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        program = printable(words[0], 100)
        reason = "gave no answer in time" if isinstance(error, subprocess.TimeoutExpired) else "cannot be run"
        raise EnvironmentProblem(f"--command {program}", reason, "save what it prints, and name the file") from error
    if result.returncode and not result.stdout.strip():
        raise EnvironmentProblem(
            f"--command {printable(words[0], 100)}", "failed and printed nothing", "run it by itself"
        )
    return result.stdout[-MAX_BYTES:].decode("utf-8", "replace")


def followed(options: WhyOptions) -> list[str]:
    """Lines of standard input, each echoed as it arrives; of a long log, only the first and the last are kept."""
    if options.log not in (None, "-") or options.command is not None:
        raise UsageError("--follow", "follows standard input", "pipe the server into `kvplan why --follow -`")
    first, last = list[str](), deque[str](maxlen=LAST_LINES)
    source, sink = getattr(sys.stdin, "buffer", None), getattr(sys.stdout, "buffer", None)
    if source is None or sink is None:
        raise InvalidInputError("--follow", "standard input is closed", "pipe the server into it")
    try:
        with output.standard_output():
            for line in iter(source.readline, b""):
                sink.write(line)
                sink.flush()
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                (first if len(first) < FIRST_LINES else last).append(text)
    except KeyboardInterrupt:  # of the whole pipe: explain the output so far
        pass
    return [*first, *last]


# --- showing ----------------------------------------------------------------------------------------------------------


def show(response: CommandAnswer, options: WhyOptions) -> None:
    """Print the answer on standard output; for a followed log, whose lines go there, on standard error."""
    if not options.follow:
        output.answer(response, options.format, options.color)
    elif options.format != "table":
        print(rendered(response, options.format), file=sys.stderr, end="")
    else:
        from kvplan.report.lines import open_console, takes_blocks, write

        console = open_console(sys.stderr)
        write(response.screen(takes_blocks(console)), console)
