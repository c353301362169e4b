"""Environment variables of a server: which of them change its memory, how, and in which releases.

One table per server, in servers/<name>/variables.py. A variable sets a known property of how the server was started (a
field of Version) or an engine argument, or it does something that is not modeled and is rejected if it concerns the
model. All others are named in one note, without their values, which may be secrets.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.core.units import GIB
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import SERVERS, server_of
from kvplan.servers.releases import AS_INSTALLED, SIZES_MIB, Version
from kvplan.servers.words.arguments import DEFAULTS, EngineArgs
from kvplan.servers.words.command import Environment, Variable

_ASSIGNMENT: Final = r"[A-Za-z_][A-Za-z0-9_]*=.*"
_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*"
CONTAINERS: Final = ("docker", "podman", "nerdctl")
EXPORTS: Final = ("export", "ENV", "set")
DECLARES: Final = ("local", "readonly", "declare", "typeset", "ARG")
ENV_FILE: Final = "--env-file"  # stands for the variables of a file, which is not read


def variables() -> dict[str, Variable]:
    """Return the variables of all servers, by name."""
    return {name: variable for server in SERVERS for name, variable in server_of(server).pasted().variables.items()}


# --- what a command line gives ----------------------------------------------------------------------------------------


def given(earlier: Iterable[list[str]], before: list[str]) -> Environment:
    """Environment of a server's process: exported by the commands before its own, or assigned in front of it.

    before  the words before the server in its own command: assignments, wrappers, or `docker run` and its options
    """
    values = assigned(earlier, before)
    known = variables() if values else {}  # of every server: most commands assign nothing
    return {name: value if name in known else None for name, value in values.items()}


def exports(words: list[str]) -> bool:
    """True if words are the start of a command that exports or declares variables."""
    return words[:1] != [] and words[0] in (*EXPORTS, *DECLARES)


def assigned(earlier: Iterable[list[str]], before: list[str]) -> Environment:
    """Every variable of a server's process, with its value, as in `given`."""
    container = next((index for index, word in enumerate(before) if word.rpartition("/")[2] in CONTAINERS), None)
    if container is not None:
        return dict(_passed(before[container + 1 :]))
    shell: dict[str, str] = {}
    variables: Environment = {}
    for words in earlier:
        is_export = words[:1] != [] and words[0] in EXPORTS
        for word in words[1:] if exports(words) else words:
            name, _, value = word.partition("=")
            if re.fullmatch(_ASSIGNMENT, word, re.DOTALL):
                shell[name] = value
            elif not is_export:
                break
            if is_export and (re.fullmatch(_NAME, name) or name == ENV_FILE):
                variables[name] = shell.get(name)  # a bare name that was never assigned: the shell's previous value
    variables |= {name: value for name, value in shell.items() if name in variables}
    for word in before:
        if re.fullmatch(_ASSIGNMENT, word, re.DOTALL):
            variables[word.partition("=")[0]] = word.partition("=")[2]
    return variables


def _passed(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """Variables that `docker run -e NAME=value --env NAME` sets; a bare name takes the host's value.

    A variable file is represented by its flag: its content is not known.
    """
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in ("-e", "--env"):
            text = following
        elif word.startswith("--env="):
            text = word.removeprefix("--env=")
        elif word.startswith("-e") and re.match(_ASSIGNMENT, word[2:].removeprefix("=")):
            text = word[2:].removeprefix("=")
        elif word.partition("=")[0] == ENV_FILE:
            yield ENV_FILE, None
            continue
        else:
            continue
        name, equals, value = text.partition("=")
        if re.fullmatch(_NAME, name):
            yield name, value if equals else None


# --- what it changes --------------------------------------------------------------------------------------------------


def applied(
    environment: Environment, release: Version, args: EngineArgs, spec: ModelSpec
) -> tuple[Version, EngineArgs, str | None]:
    """Apply the environment to a request's release and arguments, and return a note of all other variables.

    Explicit choices (`--engine vllm@0.9+v0`, a flag) win, as a flag does over SGLang's variables.
    """
    others: list[str] = []
    known = variables() if environment else {}
    for name, text in environment.items():
        variable = known.get(name)
        if variable is None or not variable.is_read_by(release):
            others.append(name)
        elif variable.sets:
            value = _value(variable, name, text)
            if variable.sets in AS_INSTALLED:
                release = _with(release, variable.sets, value, AS_INSTALLED)
            else:
                args = _with(args, variable.sets, value, DEFAULTS)
        elif text not in variable.usual and variable.concerns and variable.concerns(spec, args):
            raise UnsupportedModelError(name, f"{variable.effect}, which is not modeled for {spec.name}", "remove it")
    if not others:
        return release, args, None
    names = ", ".join(printable(name, 80) for name in dict.fromkeys(others))
    return release, args, f"environment: not modeled for {release.label}, so ignored: {names}"


_Record = TypeVar("_Record", Version, EngineArgs)


def _with(record: _Record, name: str, value: object, defaults: Mapping[str, object]) -> _Record:
    """Return the record with a field set, unless it was set before."""
    changes: dict[str, Any] = {name: value}
    return replace(record, **changes) if getattr(record, name) == defaults[name] else record


def _value(variable: Variable, name: str, text: str | None) -> bool | int | str:
    """Parse the value as the server reads it. The text itself is not shown: it may be a secret in the wrong
    place.
    """
    if text is None or re.search(r"\$[A-Za-z_{(]|`", text):
        raise UsageError(name, "its value is not in the command", "write it there")
    if variable.kind == "text":
        return text
    if variable.kind == "gib":
        if not re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,9})?", text.strip()):
            raise UsageError(name, f"is not a number of GiB, as {variable.server} requires", "write one, or remove it")
        return int(float(text) * GIB)
    if not re.fullmatch(r"-?[0-9]{1,9}", text.strip()):
        raise UsageError(name, f"is not a whole number, as {variable.server} requires", "write 0 or 1, or remove it")
    number = int(text)
    if variable.kind == "size" and number not in SIZES_MIB:
        unit = " MiB" if name.endswith("_MB") else ""
        raise UsageError(name, f"is not a size from 1 to {SIZES_MIB[-1]:,}{unit}", "write one, or remove it")
    return number if variable.kind == "size" else (number != 0) == (variable.kind == "on")
