"""A shell line as commands, each a list of words: nothing is expanded or run."""

import re
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.servers.base import SERVERS
from kvplan.servers.words.environment import given

# Plain strings, compiled on first use: most commands need none of them.
_ENDS: Final = r"\|\|?|&&?|;"  # separators between two commands
_REDIRECTS: Final = r"(?:\d?>|&>|<)"
_COMMENT: Final = r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?:(?<=\s)|^)#[^\n]*"""  # a quoted part, or a comment
_IMAGE: Final = r"(?:[\w.:-]+/)*[\w.-]*(?:{servers})[\w.-]*(?::[\w.-]+)?(?:@sha256:[0-9a-f]+)?"
_SCRIPT: Final = r"-[a-z]*c"
SHELLS: Final = ("sh", "bash", "dash", "ash", "zsh")
MOST_SHELLS: Final = 4  # nested shells


MAX_COMMAND_CHARS = 16 * 1024  # enough for every flag of vLLM at once


def too_long(text: str) -> str:
    return f"is longer than {MAX_COMMAND_CHARS:,} characters ({len(text):,}); paste only the server's command"


def split(text: str, depth: int = 0) -> list[list[str]]:
    """Split a shell line into commands, each a list of words; remove comments, join lines, expand and run nothing.

    A command that passes a script to a shell (`docker run IMAGE bash -c '...'`) yields the script's commands.
    """
    import shlex

    uncommented = re.sub(_COMMENT, lambda match: match.group(1) or "", text.strip())
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", uncommented))
    except ValueError as error:
        raise UsageError(
            "--from-command", f"the quotes do not match ({str(error).lower()})", "paste the whole command"
        ) from None
    commands: list[list[str]] = [[]]
    for word in words:
        if re.fullmatch(_ENDS, word):
            commands.append([])
        elif word.endswith(";"):
            commands[-1].append(word.removesuffix(";"))
            commands.append([])
        else:
            commands[-1].append(word)
    return [each for command in commands for each in scripted(until_redirect(command), depth)]


def scripted(words: list[str], depth: int) -> list[list[str]]:
    """Commands of the script that the words pass to a shell, after an export of their variables; otherwise the
    words.
    """
    flag = script_flag(words)
    if flag is None or depth == MOST_SHELLS:
        return [words]
    front = words[:flag]
    variables = [name if value is None else f"{name}={value}" for name, value in given([], front).items()]
    images = [word for word in front if re.fullmatch(_IMAGE.format(servers="|".join(SERVERS)), word)]
    script = words[flag + 1]
    if parameters := words[flag + 3 :]:  # `bash -c SCRIPT NAME "$@"`
        import shlex  # as in `split`

        script = re.sub(r'"\$@"|\$@', lambda _: shlex.join(parameters), script)
    commands = [
        [*images, *each] if names_server(each) else each for each in split(script, depth + 1)
    ]  # the image implies the release
    return [["export", *variables], *commands] if variables else commands


def script_flag(words: list[str]) -> int | None:
    """Index of the flag whose value is a shell script: `bash -lc SCRIPT`, `--entrypoint bash IMAGE -c SCRIPT`."""
    shell = next((index for index, word in enumerate(words) if is_shell(word)), len(words))
    flags = (index for index in range(shell + 1, len(words) - 1) if re.fullmatch(_SCRIPT, words[index]))
    return next(flags, None)


def is_shell(word: str) -> bool:
    return word.removeprefix("--entrypoint=").rpartition("/")[2] in SHELLS


def names_server(words: list[str]) -> bool:
    """True if the words start a server themselves rather than being arguments for an image's entrypoint."""
    pairs = zip(words, [*words, ""][1:], strict=True)
    return any(
        (word.rpartition("/")[2] in SERVERS and following in ("serve", "bench"))
        or (word == "-m" and following.partition(".")[0] in SERVERS)
        for word, following in pairs
    )


def until_redirect(words: list[str]) -> list[str]:
    for end, word in enumerate(words):
        if re.match(_REDIRECTS, word):
            return words[:end]
    return words
