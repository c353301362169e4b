"""Every error kvplan raises on purpose, each with the exit code the command line answers."""

from typing import NamedTuple, Self


class Mark(NamedTuple):
    """A place in a file, line and column from 1; as text `file:line:column`."""

    where: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.where}:{self.line}:{self.column}"


class KvplanError(Exception):
    """Something the user can act on: one line, `<subject>: <problem>; <remedy>`.

    subject  what the error is about: a flag with its value, a file, a model
    problem  what is wrong with it, with the value
    remedy   the next step
    public   the problem without what stands in a file, for a log that strangers read; None: it quotes no file
    mark     its place in a file, where it has one
    keys     names of the arguments it is about, the likeliest first; without, the name that the subject begins with
    """

    exit_code = 2

    def __init__(
        self,
        subject: str,
        problem: str | None = None,
        remedy: str = "",
        *,
        public: str | None = None,
        mark: Mark | None = None,
        keys: tuple[str, ...] = (),
    ) -> None:
        if problem is None:
            subject, problem, remedy = fields_of(subject)
        super().__init__(subject, problem, remedy)
        self.subject, self.problem, self.remedy, self.public, self.mark = subject, problem, remedy, public, mark
        self.keys = keys or (subject.partition(" ")[0].strip("-:").replace("-", "_"),)

    def __str__(self) -> str:
        return self._line(self.message)

    @property
    def message(self) -> str:
        """The line without the place in a file."""
        return self._message(self.problem)

    @property
    def unquoted(self) -> str:
        """The line without what stands in a file."""
        return self._line(self._message(self.problem if self.public is None else self.public))

    def _line(self, message: str) -> str:
        return message if self.mark is None else f"{self.mark}: {message}"

    def _message(self, problem: str) -> str:
        subject = f"{self.subject}: " if self.subject else ""
        return f"{subject}{problem}" + (f"; {self.remedy}" if self.remedy else "")

    def changed(self, **fields: object) -> Self:
        """The same error with other fields."""
        error = type(self).__new__(type(self), self.subject, self.problem, self.remedy)
        error.__dict__.update({**self.__dict__, **fields})
        return error

    def within(self, whole: str, mark: Mark | None = None) -> Self:
        """The error as a part of something larger, `target a: <subject>: ...`, fit for a log that strangers read."""
        place = "" if self.mark is None else f"{self.mark}"
        subject = ": ".join(filter(None, (whole, place, self.subject)))
        problem = self.problem if self.public is None else self.public
        return self.changed(subject=subject, problem=problem, public=None, mark=mark)

    def renamed(self, old: str, new: str) -> Self:
        """The error in the words of a reader who knows the subject, or its first part, by another name."""
        first, _, rest = self.subject.partition(old)
        if first or (rest and rest[0] not in ": "):
            return self
        if new.endswith(":"):
            rest = f" {rest.lstrip(': ')}"
        return self.changed(subject=f"{new}{rest}".strip(": "))


def fields_of(message: str) -> tuple[str, str, str]:
    """(subject, problem, remedy) of a message that comes in one piece, the one place where a sentence is taken apart:
    some readers of values say theirs as text, before what they are about is known."""
    subject, colon, rest = message.partition(": ")
    if not colon:
        subject, rest = "", message
    problem, _, remedy = rest.rpartition("; ")
    return (subject, problem, remedy) if problem and remedy else (subject, rest, "")


class UsageError(KvplanError):
    """A flag or argument that cannot be read or does not go with another one."""


class UnknownNameError(UsageError):
    """A model or GPU that is not in the catalog."""


class NoServerError(UsageError):
    """A command that starts no server; whatever it is, its words may hold secrets."""


class InvalidInputError(KvplanError):
    """A file (config.json, weights, policy, trace) that is unreadable, malformed or contradicts itself."""


class UnsupportedModelError(KvplanError):
    """A model, layer kind, dtype or quantization that kvplan cannot size and will not guess."""


class EnvironmentProblem(KvplanError):
    """The machine or the network is at fault: no GPU, driver, permission, Hub access, disk."""

    exit_code = 3


ERROR = "kvplan/error@1"  # an error as a document, for whoever reads JSON
BUG = 70  # exit code of an exception that nobody raised on purpose
INTERRUPTED, TERMINATED = 130, 143  # exit codes after SIGINT and SIGTERM, as shells count them
