"""The console blocks of a Markdown text: run each command, compare or rewrite what it printed.

In a ```console block a line beginning with `$ ` is a command and the lines under it, up to the next command or the end
of the block, are what it prints. A line ending in a backslash goes on in the next. Only `kvplan` commands are run;
set-up lines for a shell belong in ```sh blocks, which are not run. A paragraph `...` stands for any number of printed
paragraphs; the paragraphs shown beside it are identified by their first lines, in order.
"""

import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LOOKS_LIKE_A_BLOCK = re.compile(r"^[ \t>]*(?:```+|~~~+) *console.*$", re.MULTILINE)
_TIMEOUT_S = 900
_PROGRESS = re.compile(r"^kvplan: note: simulated [\d,]+ of .*\n", re.MULTILINE)  # said on a slow machine only
_BUG = 70  # the exit code of a bug in kvplan

ROOT = Path(__file__).resolve().parents[2]

Runner = Callable[[list[str]], str]


class BlockError(Exception):
    """A console block that cannot be run as it stands."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a console block with the output printed under it."""

    line: int  # in the text, from 1
    source: str  # as written, "$ " and continuation lines included
    argv: tuple[str, ...]
    output: str  # each line with its newline


def commands(text: str) -> list[Command]:
    """Every command of the text's console blocks, in order."""
    _refuse_unreadable_blocks(text)
    return [command for match in _BLOCK.finditer(text) for command in _commands_of(match, text)]


def _refuse_unreadable_blocks(text: str) -> None:
    """A console block that is indented, quoted or never closed would go unchecked."""
    read = {match.start() for match in _BLOCK.finditer(text)}
    for fence in _LOOKS_LIKE_A_BLOCK.finditer(text):
        if fence.start() not in read:
            line = text.count("\n", 0, fence.start()) + 1
            raise BlockError(f"line {line}: a console block is fenced by ```console and ``` alone in the first column")


def _commands_of(match: re.Match[str], text: str) -> list[Command]:
    first_line = text.count("\n", 0, match.start(1)) + 1
    lines = match.group(1).splitlines(keepends=True)
    starts = _command_starts(lines)
    if not starts or starts[0] != 0:
        raise BlockError(f"line {first_line}: a console block begins with a command, `$ kvplan ...`")
    ends = [*starts[1:], len(lines)]
    return [_command(lines[a:b], first_line + a) for a, b in zip(starts, ends, strict=True)]


def _command_starts(lines: list[str]) -> list[int]:
    return [number for number, line in enumerate(lines) if line.startswith("$ ")]


def _command(lines: list[str], line: int) -> Command:
    length = next(n for n, text in enumerate(lines, 1) if not text.endswith("\\\n") or n == len(lines))
    source = "".join(lines[:length])
    argv = tuple(shlex.split(source.removeprefix("$ ").replace("\\\n", " ")))
    if not argv or argv[0] != "kvplan":
        raise BlockError(f"line {line}: only kvplan commands run in a console block ({source.strip()}); use a sh block")
    if any(word in ("|", ">", ">>", "<", "&&", "||", ";", "&") for word in argv):
        raise BlockError(f"line {line}: no shell runs it, so no pipes or redirections ({source.strip()})")
    return Command(line, source, argv, "".join(lines[length:]))


def copy_named_files(text: str, folder: Path) -> None:
    """Put a copy of every file or folder of the checkout that a command names where the commands run."""
    for word in {word for command in commands(text) for word in command.argv[1:]}:
        source = ROOT / word
        if Path(word).is_absolute() or ".." in Path(word).parts or not word.strip("./") or not source.exists():
            continue
        target = folder / word
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)


def differences(checked: Iterable[Command], run: Runner) -> list[str]:
    """One diff for each command that does not print what the text shows."""
    return [diff for command in checked if (diff := _difference(command, _printed(run, command)))]


def _difference(command: Command, printed: str) -> str:
    printed = elided(printed, command.output)
    if printed == command.output:
        return ""
    diff = difflib.unified_diff(command.output.splitlines(), printed.splitlines(), "shown", "printed", lineterm="", n=1)
    return "\n".join([f"line {command.line}: {command.source.strip()}", *diff])


def rewritten(text: str, run: Runner) -> str:
    """The text with what each command prints now in place of what it showed."""

    def block(match: re.Match[str]) -> str:
        body = "".join(
            command.source + elided(_printed(run, command), command.output) for command in _commands_of(match, text)
        )
        return f"```console\n{body}```"

    _refuse_unreadable_blocks(text)
    return _BLOCK.sub(block, text)


def elided(printed: str, excerpt: str) -> str:
    """The printed paragraphs that `excerpt` keeps, with `...` where it leaves some out.

    A paragraph that `excerpt` has and that is not printed is left out, which the caller's comparison reports.
    """
    paragraphs_shown = excerpt.rstrip("\n").split("\n\n")
    if "..." not in paragraphs_shown:
        return printed
    paragraphs = printed.rstrip("\n").split("\n\n")
    blocks: list[str] = []
    position, skipping = 0, False
    for paragraph in paragraphs_shown:
        if paragraph == "...":
            blocks, skipping = [*blocks, paragraph], True
            continue
        heading = paragraph.partition("\n")[0]
        end = len(paragraphs) if skipping else position + 1
        matches = (n for n, text in enumerate(paragraphs[:end]) if n >= position and text.partition("\n")[0] == heading)
        if (match := next(matches, None)) is not None:
            blocks, position, skipping = [*blocks, paragraphs[match]], match + 1, False
    return "\n\n".join(blocks + ([] if skipping else paragraphs[position:])) + "\n"


def _printed(run: Runner, command: Command) -> str:
    """The command's output as a block shows it: no blanks at the ends of lines, no empty lines at its end."""
    lines = [line.rstrip() for line in run(list(command.argv)).rstrip().splitlines()]
    if any(line.startswith(("```", "$ ")) for line in lines):
        raise BlockError(f"line {command.line}: what it prints would end the block or read as a command")
    return "".join(f"{line}\n" for line in lines)


def run_kvplan(folder: Path) -> Runner:
    """A runner for this checkout's kvplan in `folder`: 100 columns, no color, standard error after standard output.

    The exit code is not compared, as a block that shows an error shows its text; a crash is never an expected output.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KVPLAN_", "FORCE_COLOR"))}
    env |= {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"PYTHONPATH": str(ROOT)}

    def run(argv: list[str]) -> str:
        entry = "import sys; sys.argv[0] = 'kvplan'; from kvplan.cli.main import run; run()"
        done = subprocess.run(
            [sys.executable, "-c", entry, *argv[1:]],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode == _BUG or done.returncode < 0 or "Traceback (most recent call last)" in done.stderr:
            raise BlockError(f"{shlex.join(argv)} crashed with code {done.returncode}:\n{done.stderr}")
        return done.stdout + _PROGRESS.sub("", done.stderr)

    return run
