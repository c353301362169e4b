"""A pasted piece of Python that builds an engine, `LLM(model=..., ...)` or `sgl.Engine(...)`, as a server's words.

Nothing is run: the text is parsed, and a value is a literal, arithmetic on numbers, or a name or attribute that is
assigned once: also the default of an argument of argparse, of a parameter, of a variable of the environment.
Sources: vLLM 0.33 entrypoints/llm.py (other keywords go to EngineArgs); SGLang 0.5.23 srt/entrypoints/engine.py
(keywords are those of ServerArgs).
"""

import ast
import json
import operator
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kvplan.asked import ray
from kvplan.core.errors import Faults, KvplanError, UsageError
from kvplan.core.files import printable
from kvplan.servers.base import SERVERS, server_of
from kvplan.servers.releases import DEFAULT
from kvplan.servers.words.arguments import flags_of

_CALL: Final = re.compile(r"(?<![\w.])(?:(?P<module>\w+)\.)?(?P<name>[A-Z]\w*)\s*\(")
_OPERATORS: Final[Mapping[type[ast.operator], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow,
}  # fmt: skip
MOST: Final = 2**63
MOST_ENDS: Final = 200  # closing parentheses tried as the end of a call
Names = Mapping[str, ast.expr]


class Call(NamedTuple):
    """A call that builds a server's engine.

    words        those of its command line
    args         arguments implied by the call
    notes        values of names
    accelerator  the GPU that a configuration of Ray Serve names
    """

    server: str
    words: list[str]
    args: Mapping[str, Any]
    notes: list[str]
    accelerator: str | None = None


def is_snippet(text: str) -> bool:
    """True if a pasted text builds an engine in Python."""
    return any(_server_of(match) for match in _CALL.finditer(text))


def _server_of(match: "re.Match[str]") -> str | None:
    """Server whose engine a call builds."""
    if match["name"] == ray.CLASS:
        return DEFAULT
    for server in SERVERS:
        starts = server_of(server).pasted().starts
        name, modules = starts.call
        if match["name"] == name and match["module"] in modules:
            return server
        if match["name"] in starts.classes and match["module"] in (None, *modules):
            return server
    return None


def call_in(text: str, options: Collection[str] = ()) -> Call:
    """The only call that builds an engine. Raise UsageError if it cannot be read without running it: one error names
    every value that is neither a literal nor stated by `options`.
    """
    from kvplan.asked.left import gathered

    text = re.sub(r"^(?:>>>|\.\.\.) ?", "", textwrap.dedent(text).strip(), flags=re.MULTILINE)
    calls, names = _calls(text)
    if len(calls) != 1:
        count = "no whole call of LLM(...)" if not calls else f"{len(calls)} engines"
        raise UsageError("--from-command", f"contains {count}", "paste the one call, up to its last parenthesis")
    server, call = calls[0]
    values, faults = _Values(names), Faults()
    words: list[str] = []
    for index, argument in enumerate(call.args):
        if index or not server_of(server).pasted().starts.takes_model:
            raise UsageError("--from-command", f"{_source(argument)!r} is a positional argument", "name it")
        call.keywords.insert(0, ast.keyword("model", argument))
    is_config = ast.unparse(call.func).rpartition(".")[2] == ray.CLASS
    if is_config:
        server = ray.server_of({str(keyword.arg): _source(keyword.value) for keyword in call.keywords})
    stated: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise UsageError("--from-command", f"**{_source(keyword.value)} is not unpacked", "write the values out")
        if is_config and keyword.arg not in ray.KEYS:
            continue
        with faults.part():
            stated[keyword.arg] = values.of(keyword.arg, keyword.value, options)
    try:
        faults.refuse()
    except KvplanError as error:
        raise gathered(error) from error
    accelerator = stated.get(ray.ACCELERATOR)
    for name, value in (ray.arguments_of(stated) if is_config else stated).items():
        words += flag_words(name, value, server)
    starts = server_of(server).pasted().starts
    args = starts.call_args if ast.unparse(call.func).rpartition(".")[2] == starts.call[0] else {}
    return Call(server, words, args, values.notes, accelerator if is_config else None)


class _Values:
    """Values of the arguments of a call, with a note of each name that stands for one."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.notes: list[str] = []

    def of(self, name: str, node: ast.expr, options: Collection[str]) -> Any:
        """The value of an argument; None if an option states one that the text leaves open, `code` if none does."""
        from kvplan.asked.left import key_of
        from kvplan.servers.words.command import code

        try:
            value = _evaluated(node, self.names)
        except (_NotLiteral, ArithmeticError, TypeError, ValueError, RecursionError):
            if key_of(f"--{name}") in options:
                return None
            return code(_source(node))  # the server's reader says whether it matters
        if not isinstance(node, ast.Constant) and isinstance(node, ast.Name | ast.Attribute):
            self.notes.append(f"{_source(node)} is {printable(str(value), 80)} in the text")
        return value


def _calls(text: str) -> tuple[list[tuple[str, ast.Call]], Names]:
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
    """Map each name, and each attribute of `self` or of argparse's result, to its value, unless it has two."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        for name, value in _bindings(node):
            values.setdefault(name, []).append(value)
    return {name: bound[0] for name, bound in values.items() if len({ast.dump(value) for value in bound}) == 1}


_UNKNOWN: Final = ast.Name("...", ast.Load())


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of what a node assigns: a name without a known value has one that nothing evaluates."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Name | ast.Attribute):
                    yield ast.unparse(target), value
                else:
                    yield from ((part.id, _UNKNOWN) for part in ast.walk(target) if isinstance(part, ast.Name))
        case ast.AnnAssign(target=ast.Name() | ast.Attribute() as target, value=ast.expr() as value):
            yield ast.unparse(target), value
        case ast.AugAssign(target=target) | ast.For(target=target) | ast.comprehension(target=target):
            yield from ((part.id, _UNKNOWN) for part in ast.walk(target) if isinstance(part, ast.Name))
        case ast.arguments():
            named = [*node.posonlyargs, *node.args]
            padding: list[ast.expr | None] = [None] * (len(named) - len(node.defaults))
            defaults = [*padding, *node.defaults, *node.kw_defaults]
            for argument, default in zip([*named, *node.kwonlyargs], defaults, strict=True):
                yield argument.arg, default or _UNKNOWN
        case ast.Call(func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=str(flag)), *others]):
            longs = [str(text.value) for text in others if isinstance(text, ast.Constant)]
            own = next((text for text in (flag, *longs) if text.startswith("--")), flag)
            keys = {keyword.arg: keyword.value for keyword in node.keywords}
            dest = keys.get("dest")
            name = str(dest.value) if isinstance(dest, ast.Constant) else own.lstrip("-").replace("-", "_")
            yield f"args.{name}", keys.get("default", _UNKNOWN)


class _NotLiteral(Exception):
    pass


def _source(node: ast.expr) -> str:
    try:
        return printable(ast.unparse(node), 60)
    except RecursionError:
        return "..."


MOST_NAMES: Final = 8  # names that stand for names


def _evaluated(node: ast.expr, names: Names, depth: int = 0) -> Any:
    if depth > MOST_NAMES:
        raise _NotLiteral
    match node:
        case ast.Name() | ast.Attribute() if (name := ast.unparse(node)) in names:
            return _evaluated(names[name], names, depth + 1)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATORS:
            first, second = _evaluated(left, names, depth), _evaluated(right, names, depth)
            if not all(isinstance(number, int | float) and abs(number) < MOST for number in (first, second)):
                raise _NotLiteral
            if isinstance(operation, ast.Pow) and abs(second) > 64:
                raise _NotLiteral
            return _OPERATORS[type(operation)](first, second)
        case ast.BoolOp(op=ast.Or(), values=values):
            return next(filter(None, (_evaluated(value, names, depth + 1) for value in values)), None)
        case ast.Constant(value=value) if isinstance(value, str | int | float | None):
            return value
        case ast.Call(func=ast.Name(id="int" | "str" | "float") as kind, args=[ast.Call() as inner], keywords=[]) if (
            _default_of(inner) is not None
        ):
            return {"int": int, "str": str, "float": float}[kind.id](_evaluated(inner, names, depth))
        case ast.Call() if (default := _default_of(node)) is not None:
            return _evaluated(default, names, depth + 1)
        case ast.Call(func=ast.Name(id="dict"), args=[], keywords=keywords):
            return {keyword.arg: _evaluated(keyword.value, names, depth + 1) for keyword in keywords if keyword.arg}
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = ([key, value] for key, value in zip(keys, values, strict=True) if key is not None)
            return dict([_evaluated(part, names, depth + 1) for part in pair] for pair in pairs)
        case ast.List(elts=items):
            return [_evaluated(item, names, depth + 1) for item in items]
        case ast.JoinedStr(values=values):
            return "".join(str(_evaluated(_plain(part), names, depth + 1)) for part in values)
        case _:
            return ast.literal_eval(node)


def _plain(node: ast.expr) -> ast.expr:
    """A part of an f-string without a format of its own."""
    if isinstance(node, ast.FormattedValue):
        if node.format_spec is not None or node.conversion != -1:
            raise _NotLiteral
        return node.value
    return node


def _default_of(node: ast.Call) -> ast.expr | None:
    """The default of a variable of the environment."""
    match node:
        case ast.Call(args=[ast.Constant(), default]) if ast.unparse(node.func) in (
            "os.environ.get", "os.getenv", "environ.get", "getenv",
        ):  # fmt: skip
            return default
    return None


def flag_words(name: str, value: Any, server: str) -> Iterator[str]:
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
