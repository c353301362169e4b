"""Patterns of a quantization_config over module names, matched in time linear in the name's length.

A config's patterns are untrusted, and Python's `re` can run forever on thirty characters. RE2 does not backtrack: all
patterns of a list are compiled to one automaton, which reads a name once. It lacks features that need backtracking.
Lookaheads at the start of a pattern, as used in checkpoints, are compiled to separate expressions that must or must not
match; a lookahead at the end is treated as plain text; the rest is rejected by name.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import MIB, printable
from kvplan.core.records import dataclass

# Limit on the states of all expressions of a list. The largest list in 298 published configs has 284.
MAX_STATES = 20_000

_TOKEN = re.compile(
    r"(?P<escape>\\.?)"
    r"|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z))"  # to the end if not closed
    r"|(?P<look>\(\?[=!])"
    r"|(?P<open>\(\?[^)]?|\()"
    r"|(?P<close>\))"
    r"|(?P<repeat>\{\d*,?\d*\})"
    r"|.",
    re.DOTALL,
)
_SETS = re.compile(r"\[!?+(?:\][^\]]*|[^\]]+)\]|.", re.DOTALL)  # in a glob
_FLAGS = re.compile(r"\(\?[ims]+\)")  # for the whole expression: at its very start
_GROUP = re.compile(r"\(\?(?:P<\w+>|[ims]*(?:-[ims]+)?:)")
_MAX_REPEAT = 1000  # RE2's limit
_ESCAPES = frozenset("AbBdDsSwWZafnrtv")  # letters that Python and RE2 treat alike, except `\Z`
_HEX = re.compile(r"\\x[0-9a-fA-F]{2}")
_LACKING = {
    "(?<": "a lookbehind",
    "(?P": "a backreference",
    "(?>": "an atomic group",
    "(?(": "a condition",
    "(?#": "a comment",
}


class _Refused(Exception):
    """An expression's feature that is not modeled."""


@dataclass(frozen=True, slots=True)
class _Branch:
    """One alternative of a pattern: expressions that must match from the start of a name, and that must not."""

    needed: tuple[str, ...]
    barred: tuple[str, ...] = ()


class Patterns:
    """Patterns in list order: `re:` matches from the start of a name like `re.match`, globs match all of it."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Compile the patterns. Raise UnsupportedModelError naming the first that cannot be matched."""
        self._numbers: dict[str, int] = {}  # expression -> its number in the automaton
        self._plain: dict[int, list[int]] = {}  # expression number -> the patterns that consist only of it
        self._rules: dict[int, list[tuple[frozenset[int], frozenset[int]]]] = {}  # the others by index
        self.states = 0
        if patterns:
            self._set, self._options = _automaton()
            self._always = self._set.Add("")  # matches every name: otherwise RE2 does not report running out of memory
            for place, pattern in enumerate(patterns):
                self._add(place, pattern)
            self._set.Compile()

    def matching(self, name: str) -> frozenset[int]:
        """Indexes of the patterns in the list that match a name."""
        if not self._numbers:
            return frozenset()
        numbers = set(self._set.Match(name) or ())
        if self._always not in numbers:
            raise UnsupportedModelError("quantization_config", "its patterns are too complex to match", "not modeled")
        if len(numbers) == 1 and not self._rules:
            return frozenset()
        plain = (place for number in numbers for place in self._plain.get(number, ()))
        ruled = (
            place
            for place, branches in self._rules.items()
            if any(needed <= numbers and not barred & numbers for needed, barred in branches)
        )
        return frozenset(plain) | frozenset(ruled)

    def _add(self, place: int, pattern: str) -> None:
        import re2

        try:
            branches = _branches(pattern[3:]) if pattern.startswith("re:") else [_Branch((_glob(pattern),))]
            rules = [
                (frozenset(map(self._number, branch.needed)), frozenset(map(self._number, branch.barred)))
                for branch in branches
            ]
        except re2.error as error:
            reason = error.args[0] if error.args else "not modeled"
            reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
            raise UnsupportedModelError(
                "quantization_config", f"{printable(pattern, 60)!r} is not a regular expression ({printable(reason)})"
            ) from None
        except _Refused as refused:
            raise UnsupportedModelError(
                "quantization_config", f"{printable(pattern, 60)!r} uses {refused}", "not modeled"
            ) from None
        match rules:
            case [(needed, barred)] if len(needed) == 1 and not barred:
                self._plain.setdefault(next(iter(needed)), []).append(place)
            case _:
                self._rules[place] = rules
        if self.states > MAX_STATES:
            raise UnsupportedModelError(
                "quantization_config",
                f"its patterns up to {printable(pattern, 60)!r} are too large together (more than {MAX_STATES:,} "
                "states)",
                "not modeled",
            )

    def _number(self, expression: str) -> int:
        import re2

        if expression not in self._numbers:
            self.states += re2.compile(expression, self._options).programsize
            self._numbers[expression] = self._set.Add(expression)
        return self._numbers[expression]


def _automaton() -> tuple[Any, Any]:
    import re2  # takes 4 ms, and most configs have no patterns

    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = 64 * MIB
    return re2.Set.MatchSet(options), options


def _glob(pattern: str) -> str:
    """Translate a glob to an expression with the semantics of `fnmatch`."""
    end = pattern.rfind("]") + 1  # after it every bracket is literal
    parts = [_glob_part(part) for part in _SETS.findall(pattern[:end])]
    parts += [".*" if sign == "*" else "." if sign == "?" else re.escape(sign) for sign in pattern[end:]]
    return "(?s)" + "".join(parts) + r"\z"


def _glob_part(part: str) -> str:
    match part:
        case "*":
            return ".*"
        case "?":
            return "."
        case _ if len(part) > 1:
            negated = part[1] == "!"
            inside = part[1 + negated : -1].replace("\\", r"\\").replace("[", r"\[").replace("^", r"\^")
            return f"[{'^' if negated else ''}{inside}]"
        case _:
            return re.escape(part)


def _branches(expression: str) -> list[_Branch]:
    """Alternatives of an expression; only one if it has no lookahead."""
    flags = match.group() if (match := _FLAGS.match(expression)) else ""
    body = expression[len(flags) :]
    if "(?=" not in body and "(?!" not in body:
        return [_Branch((flags + _translated(body),))]
    return [_branch(part, flags) for part in _alternatives(body)]


def _alternatives(expression: str) -> Iterator[str]:
    """Split at each `|` outside groups."""
    begin = depth = 0
    for token in _TOKEN.finditer(expression):
        depth += _depth(token)
        if token.group() == "|" and depth == 0:
            yield expression[begin : token.start()]
            begin = token.end()
    yield expression[begin:]


def _branch(text: str, flags: str) -> _Branch:
    """Parse one alternative: its leading lookaheads, then the rest."""
    needed: list[str] = []
    barred: list[str] = []
    start = 0
    while True:
        while text.startswith(("^", r"\A"), start):
            start += 1 if text[start] == "^" else 2
        if not text.startswith(("(?=", "(?!"), start):
            return _Branch((*needed, flags + _translated(text[start:])), tuple(barred))
        end = _end_of_group(text, start)
        (barred if text[start + 2] == "!" else needed).append(flags + _translated(text[start + 3 : end - 1]))
        start = end


def _end_of_group(text: str, start: int) -> int:
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += _depth(token)
        if depth == 0:
            return token.end()
    raise _Refused("a group without an end")


def _depth(token: re.Match[str]) -> int:
    return {"open": 1, "look": 1, "close": -1}.get(token.lastgroup or "", 0)


def _translated(expression: str) -> str:
    """Translate an expression to RE2's syntax. Raise _Refused for what RE2 lacks or treats differently than Python."""
    return "".join(_spelled(token, expression) for token in _TOKEN.finditer(expression))


def _spelled(token: re.Match[str], expression: str) -> str:
    text = token.group()
    match token.lastgroup:
        case "escape":
            return _escape(text, expression, token.start())
        case "set":
            return "[" + re.sub(r"\\.|\[", _in_set, text[1:], flags=re.DOTALL)
        case "look":
            if text == "(?=" and _end_of_group(expression, token.start()) == len(expression):
                return "(?:"  # nothing follows, so it does not matter whether it is consumed
            raise _Refused("a lookahead that does not stand at the beginning")
        case "open" if len(text) > 1 and not _GROUP.match(expression, token.start()):
            raise _Refused(_LACKING.get(text, f"the group {printable(text)}"))
        case "repeat":
            if any(int(count[:9]) > _MAX_REPEAT for count in re.findall(r"\d+", text)):
                raise _Refused(f"more than {_MAX_REPEAT:,} repetitions")
            return text.replace("{,", "{0,")
    return text


def _in_set(token: re.Match[str]) -> str:
    return _escape(token.group(), token.string, token.start()) if token.group()[0] == "\\" else r"\["


def _escape(text: str, expression: str, start: int) -> str:
    letter = text[1:]
    if letter == "Z":
        return r"\z"
    if letter.isdecimal() and letter != "0":
        raise _Refused("a backreference")
    known = letter in _ESCAPES or not (letter.isascii() and letter.isalpha())
    if not (known or _HEX.match(expression, start)):
        raise _Refused(f"the escape {printable(text)}")
    return text
