"""A pasted piece of Python that builds an engine, `LLM(model=..., ...)` or `sgl.Engine(...)`, as a server's words.

Nothing is run: the text is parsed, and a value is a literal, arithmetic on numbers, or a name assigned once. Sources:
vLLM 0.33 entrypoints/llm.py (other keywords go to EngineArgs); SGLang 0.5.23 srt/entrypoints/engine.py (keywords are
those of ServerArgs).
"""

import ast
import json
import operator
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.servers.base import SERVERS, server_of
from kvplan.servers.words.arguments import flags_of

_CALL: Final = re.compile(r"(?<![\w.])(?:(?P<module>\w+)\.)?(?P<name>[A-Z]\w*)\s*\(")
_OPERATORS: Final[Mapping[type[ast.operator], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
}  # fmt: skip
MOST: Final = 2**63
MOST_ENDS: Final = 200  # closing parentheses tried as the end of a call
Server = tuple[str, list[str]]  # its name, and the words after it


def is_snippet(text: str) -> bool:
    """True if a pasted text builds an engine in Python."""
    return any(_server_of(match) for match in _CALL.finditer(text))


def _server_of(match: "re.Match[str]") -> str | None:
    """Server whose engine a call builds."""
    for server in SERVERS:
        name, modules = server_of(server).pasted().starts.call
        if match["name"] == name and match["module"] in modules:
            return server
    return None


def words_of(text: str) -> Server:
    """(server, words of its command line) of the only such call. Raise UsageError if it cannot be read without
    running it.
    """
    text = re.sub(r"^(?:>>>|\.\.\.) ?", "", textwrap.dedent(text).strip(), flags=re.MULTILINE)
    calls, names = _calls(text)
    if len(calls) != 1:
        count = "no whole call of LLM(...)" if not calls else f"{len(calls)} engines"
        raise UsageError("--from-command", f"contains {count}", "paste the one call, up to its last parenthesis")
    server, call = calls[0]
    words: list[str] = []
    for index, argument in enumerate(call.args):
        if index or not server_of(server).pasted().starts.takes_model:
            raise UsageError("--from-command", f"{_source(argument)!r} is a positional argument", "name it")
        words += ["--model", _text("model", _value("model", argument, names))]
    for keyword in call.keywords:
        if keyword.arg is None:
            raise UsageError("--from-command", f"**{_source(keyword.value)} is not unpacked", "write the values out")
        words += _flag(keyword.arg, _value(keyword.arg, keyword.value, names), server)
    return server, words


def _calls(text: str) -> tuple[list[tuple[str, ast.Call]], dict[str, ast.expr]]:
    """(calls that build an engine, value of each name in the text); a single call if the text is not valid Python as a
    whole.
    """
    tree = _parsed(text)
    if tree is not None:
        matches = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                match = _CALL.fullmatch(_source(node.func) + "(")
                server = None if match is None else _server_of(match)
                if server is not None:
                    matches.append((server, node))
        return matches, _names(tree)
    calls = []
    for match in _CALL.finditer(text):
        server = _server_of(match)
        call = None if server is None else _first_call(text[match.start() :])
        if server is not None and call is not None:
            calls.append((server, call))
    return calls, {}


def _first_call(text: str) -> ast.Call | None:
    """Parse the call that a text begins with, up to its closing parenthesis."""
    ends = [match.end() for match in re.finditer(r"\)", text)]
    for end in ends[:MOST_ENDS]:
        tree = _parsed(text[:end])
        if tree is not None and len(tree.body) == 1:
            line = tree.body[0]
            if isinstance(line, ast.Expr) and isinstance(line.value, ast.Call):
                return line.value
    return None


def _parsed(text: str) -> ast.Module | None:
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about literals in the text
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _names(tree: ast.Module) -> dict[str, ast.expr]:
    """Map each name to its assigned value, except names assigned twice."""
    names: dict[str, ast.expr] = {}
    twice = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id in names:
                twice.add(node.id)
            names.setdefault(node.id, ast.Constant(...))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = node.value
    return {name: value for name, value in names.items() if name not in twice}


class _NotLiteral(Exception):
    pass


def _value(name: str, node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    if isinstance(node, ast.Name) and node.id in names:
        node = names[node.id]
    try:
        return _evaluated(node)
    except (_NotLiteral, ArithmeticError, TypeError, ValueError, RecursionError):
        raise UsageError(
            f"--from-command {printable(name, 60)}",
            f"is Python code, which kvplan does not run ({_source(node)!r})",
            "write its value",
        ) from None


def _source(node: ast.expr) -> str:
    try:
        return printable(ast.unparse(node), 60)
    except RecursionError:
        return "..."


def _evaluated(node: ast.expr) -> Any:
    match node:
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
            first, second = _evaluated(left), _evaluated(right)
            if not all(isinstance(number, int | float) and abs(number) < MOST for number in (first, second)):
                raise _NotLiteral
            if isinstance(operation, ast.Pow) and abs(second) > 64:
                raise _NotLiteral
            return _OPERATORS[type(operation)](first, second)
        case ast.Constant(value=value) if isinstance(value, str | int | float | None):
            return value
        case _:
            return ast.literal_eval(node)


def _flag(name: str, value: Any, server: str) -> Iterator[str]:
    """Return the flag equivalent to a keyword; None is the default, and so is False except for vLLM's own switches."""
    dashed = name.replace("_", "-")
    match value:
        case None:
            return
        case True:
            yield f"--{dashed}"
        case False:
            flag = flags_of(server).get(name)
            if flag is not None and flag.on is None:
                yield f"--no-{dashed}"
        case dict() | list():
            yield f"--{dashed}={json.dumps(value)}"
        case _:
            yield f"--{dashed}={_text(name, value)}"


def _text(name: str, value: Any) -> str:
    if isinstance(value, str | int | float):
        return str(value)
    text = printable(repr(value), 60)
    raise UsageError(f"--from-command {printable(name, 60)}", f"is not a text or number ({text})", "write one of them")
