"""Every error that kvplan raises on purpose, with its exit code."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Self


class Mark(NamedTuple):
    """A position in a file, line and column from 1; as text `file:line:column`."""

    where: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.where}:{self.line}:{self.column}"


class KvplanError(Exception):
    """An error that the user can act on: one line, `<subject>: <problem>; <remedy>`.

    The colon is omitted if the problem begins with its verb: "--tp must be at least 1".

    subject  what the error is about: a flag with its value, a file, a model
    problem  what is wrong with it, with the value
    remedy   the next step
    public   the problem without quoted file content, for public logs; None: it quotes no file
    mark     its position in a file, if it has one
    others   further errors in the same command line or file
    keys     names of the arguments it concerns, the likeliest first; default: the first name in the subject
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
        self.others: tuple[KvplanError, ...] = ()
        self.keys = keys or (subject.partition(" ")[0].strip("-:").replace("-", "_"),)

    def __str__(self) -> str:
        return self._line(self.message)

    @property
    def message(self) -> str:
        """The line without the position in a file."""
        return self._message(self.problem)

    @property
    def unquoted(self) -> str:
        """The line without quoted file content."""
        return self._line(self._message(self.problem if self.public is None else self.public))

    def _line(self, message: str) -> str:
        return message if self.mark is None else f"{self.mark}: {message}"

    def _message(self, problem: str) -> str:
        return sentence(self.subject, problem) + (f"; {self.remedy}" if self.remedy else "")

    def changed(self, **fields: object) -> Self:
        """Copy the error with other fields."""
        error = type(self).__new__(type(self), self.subject, self.problem, self.remedy)
        error.__dict__.update({**self.__dict__, **fields})
        return error

    @property
    def all(self) -> "tuple[KvplanError, ...]":
        """The error and its others."""
        return (self, *self.others)

    def map_all(self, change: "Callable[[KvplanError], KvplanError]") -> "KvplanError":
        """The error and its others, all changed alike."""
        return together([change(error.changed(others=())) for error in self.all])

    def in_words(self, words: Mapping[str, str]) -> "KvplanError":
        """The same error with arguments named as the user can type them.

        The planner names an argument by its field, an identifier: tensor_parallel_size; in quotes or before an equals
        sign it is someone else's key. A name without an underscore is also a word, so it counts only as the subject.

        words  the name of each argument
        """
        first, space, after = self.subject.partition(" ")
        subject = f"{words.get(first, first)}{space}{renamed_arguments(after, words)}"
        problem, remedy = (renamed_arguments(text, words) for text in (self.problem, self.remedy))
        return self.changed(subject=subject, problem=problem, remedy=remedy)

    def within(self, whole: str, mark: Mark | None = None) -> Self:
        """The error as part of something larger, `target a: <subject>: ...`, suitable for public logs."""
        place = "" if self.mark is None else f"{self.mark}"
        subject = ": ".join(filter(None, (whole, place, self.subject)))
        problem = self.problem if self.public is None else self.public
        return self.changed(subject=subject, problem=problem, public=None, mark=mark)

    def renamed(self, old: str, new: str) -> Self:
        """The error with its subject, or the subject's first part, renamed."""
        first, _, rest = self.subject.partition(old)
        if first or (rest and rest[0] not in ": "):
            return self
        if new.endswith(":"):
            rest = f" {rest.lstrip(': ')}"
        return self.changed(subject=f"{new}{rest}".strip(": "))


def renamed_arguments(text: str, words: Mapping[str, str]) -> str:
    """Replace names of arguments in a text; other identifiers, and those that are quoted or set, stay."""
    pattern = r"(?<![\w'\"./-])[a-z0-9]+(?:_[a-z0-9]+)+(?![\w'\"=])"
    return re.sub(pattern, lambda match: words.get(match[0], match[0]), text)


def together(errors: "Sequence[KvplanError]") -> KvplanError:
    """The first error, with the rest of them as its others."""
    first, *others = errors
    first.others = tuple(others)
    return first


class Faults:
    """Errors of parts that are read independently, so that all are reported at once."""

    def __init__(self) -> None:
        self.errors: list[KvplanError] = []

    @contextmanager
    def part(self) -> Iterator[None]:
        """Keep an error of this part for `refuse`; problems of the machine or the network are raised."""
        try:
            yield
        except KvplanError as error:
            if error.exit_code != KvplanError.exit_code:
                raise
            lines = {str(wrong) for wrong in self.errors}
            self.errors += [wrong.changed(others=()) for wrong in error.all if str(wrong) not in lines]

    def refuse(self) -> None:
        """Raise the first error, with the others, if there is any."""
        if self.errors:
            raise together(self.errors)


# If a problem begins with one of these, it continues the sentence that its subject starts.
VERBS = {
    "accepts", "adds", "already", "applies", "are", "asks", "belongs", "can", "cannot", "changes", "checks", "compares",
    "conflict", "conflicts", "contains", "contradicts", "counts", "describes", "does", "draws", "exists", "follows",
    "generates", "has", "have", "helps", "holds", "is", "keeps", "lacks", "leaves", "lies", "looks", "mixes", "must",
    "names", "needs", "points", "requires", "runs", "says", "scales", "starts", "states", "supports", "takes",
    "unpacks", "was", "were", "works", "writes",
}  # fmt: skip


def sentence(subject: str, problem: str) -> str:
    """Join subject and problem: "--tp must be at least 1", "gpu 'a200': not in the catalog"."""
    if not subject:
        return problem
    return f"{subject} {problem}" if problem.partition(" ")[0].rstrip(",") in VERBS else f"{subject}: {problem}"


def fields_of(message: str) -> tuple[str, str, str]:
    """Split a one-piece message into (subject, problem, remedy). The only place that parses sentences: some parsers
    report text before the subject is known.
    """
    subject, colon, rest = message.partition(": ")
    if not colon:
        subject, rest = "", message
    problem, _, remedy = rest.rpartition("; ")
    return (subject, problem, remedy) if problem and remedy else (subject, rest, "")


class UsageError(KvplanError):
    """A flag or argument that cannot be parsed, or that contradicts another one."""


class SettingError(UsageError):
    """An invalid setting of a Python object, on its own or in combination, with all settings by name.

    owner    the object; empty: none
    names    of the settings, the one to blame first
    problem  text after the first one's name; {1} stands for the second name, and so on
    remedy   likewise
    both     True if the problem concerns two settings equally, and follows both names
    off      True if the remedy is to turn the first one off: replaces `remedy`
    """

    def __init__(
        self, owner: str, names: tuple[str, ...], problem: str, remedy: str = "", *, both: bool = False,
        off: bool = False,
    ) -> None:  # fmt: skip
        remedy = "set it to False" if off else remedy
        self.owner, self.names, self.templates, self.both, self.off = owner, names, (problem, remedy), both, off
        problem, remedy = (text.format(*names) for text in self.templates)
        super().__init__(owner, f"{self._subject(names)} {problem}", remedy, keys=names)

    def _subject(self, names: Sequence[str]) -> str:
        return " and ".join(names[: 2 if self.both else 1])

    def in_words(self, words: Mapping[str, str]) -> UsageError:
        """The same error with other names for the settings; an owner with its own name is mentioned.

        words  the name of each setting, and under no_NAME the one that turns it off
        """
        names = [words.get(name, name) for name in self.names]
        problem, remedy = (text.format(*names) for text in self.templates)
        if self.off and (switch := words.get(f"no_{self.names[0]}")):
            remedy = f"use {switch}"
        subject = f"{words[self.owner]}: {self.names[0]}" if self.owner in words else self._subject(names)
        return UsageError(subject, problem, remedy, keys=self.names)


class UnknownNameError(UsageError):
    """A model or GPU that is not in the catalog."""


class NoServerError(UsageError):
    """A command that starts no server; its words may contain secrets."""


class InvalidInputError(KvplanError):
    """A file (config.json, weights, policy, trace) that is unreadable, malformed or inconsistent."""


class UnsupportedModelError(KvplanError):
    """A model, layer kind, dtype or quantization that kvplan cannot size and will not guess."""


class EnvironmentProblem(KvplanError):
    """A problem of the machine or the network: no GPU, driver, permission, Hub access, disk."""

    exit_code = 3


BUG = 70  # exit code of an unexpected exception
INTERRUPTED, TERMINATED = 130, 143  # exit codes after SIGINT and SIGTERM, as shells count them


class KvplanWarning(UserWarning):
    """A problem that costs time or a copy but does not change results; commands show it as `kvplan: warning: ...`."""
