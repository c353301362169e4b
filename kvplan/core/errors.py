"""Every error kvplan raises on purpose, each with the exit code the command line answers."""

from typing import NamedTuple


class Mark(NamedTuple):
    """A place in a file, line and column from 1; as text `file:line:column`."""

    where: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.where}:{self.line}:{self.column}"


class KvplanError(Exception):
    """Something the user can act on: the message is one line, `<object>: <what is wrong> (<value>); <next step>`.

    problem   the message without its place
    mark      its place in a file, where it has one
    unquoted  the message without what stands in a file, for a log that strangers read
    """

    exit_code = 2

    def __init__(self, problem: str, mark: Mark | None = None, unquoted: str | None = None) -> None:
        place = "" if mark is None else f"{mark}: "
        super().__init__(f"{place}{problem}")
        self.problem, self.mark, self.unquoted = problem, mark, f"{place}{unquoted or problem}"


class UsageError(KvplanError):
    """A flag or argument that cannot be read or does not go with another one."""


class InvalidInputError(KvplanError):
    """A file (config.json, weights, policy, trace) that is unreadable, malformed or contradicts itself."""


def bad_value(fault: str, value: str, cure: str) -> InvalidInputError:
    """The error for a value that a file holds."""
    return InvalidInputError(f"{fault} ({value}); {cure}", unquoted=f"{fault}; {cure}")


class UnsupportedModelError(KvplanError):
    """A model, layer kind, dtype or quantisation that kvplan cannot size and will not guess."""


class EnvironmentProblem(KvplanError):
    """The machine or the network is at fault: no GPU, driver, permission, Hub access, disk."""

    exit_code = 3


BUG = 70  # exit code of an exception that nobody raised on purpose
INTERRUPTED, TERMINATED = 130, 143  # exit codes after SIGINT and SIGTERM, as shells count them
