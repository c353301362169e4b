"""Lookups that mypy cannot check: `document["memory"]` and `document[name]` where document is a dict[str, Any], and
`dict(document)` or a cast, which take a document's type away.

mypy says the types: it reads copies of the files in which every mapping that is looked into is wrapped in
`reveal_type`.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mypy import api

# Other people's packages, which are most of the work and none of the answer.
CONFIG = """[mypy]
python_version = 3.11
namespace_packages = true
ignore_missing_imports = true

[mypy-torch.*,triton.*,transformers.*,matplotlib.*,pandas.*,numpy.*,safetensors.*,tokenizers.*,huggingface_hub.*,jinja2.*,psutil.*,prometheus_client.*]
follow_imports = skip
"""
REVEALED = re.compile(r'^(.+?):(\d+): note: Revealed type is "(.+)"$', re.MULTILINE)
MAPPING = r"([\w.]+\.)?(dict|Mapping|MutableMapping)"
UNTYPED = re.compile(rf"Any|{MAPPING}\[[^|]+, (Any|(builtins\.)?object)\](\s*\|\s*None)?")
MADE_LOOSE = re.compile(r"tuple\[TypedDict\(.*")  # a document in `loosened`


class Revealed(ast.NodeTransformer):
    """Wrap every mapping that is looked into; formatted text becomes a tuple of what is in it."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.slice, ast.Slice | ast.Tuple) and not is_number(node.slice):
            node.value = revealed(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(attr="get") as method, args=[_, *_]):
                method.value = revealed(method.value)
            case ast.Call(func=ast.Name(id="dict"), args=[record]):
                node.args = [ast.Starred(loosened(record), ast.Load())]
            case ast.Call(func=ast.Name(id="cast"), args=[_, record]):
                node.args[1] = loosened(record)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)
        parts = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        return ast.Call(ast.Name("str", ast.Load()), [ast.Tuple(parts, ast.Load())], [])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return node


def is_number(key: ast.expr) -> bool:
    """Of an item of a sequence."""
    return isinstance(key, ast.UnaryOp) or (isinstance(key, ast.Constant) and isinstance(key.value, int))


def revealed(mapping: ast.expr) -> ast.expr:
    if isinstance(mapping, ast.Name) and mapping.id in ("Literal", "Annotated", "list", "Sequence"):
        return mapping  # a type
    return ast.Call(ast.Name("reveal_type", ast.Load()), [mapping], [])


def loosened(record: ast.expr) -> ast.expr:
    """What `dict` or `cast` is given, told from lookups by a tuple around it."""
    return revealed(ast.Tuple([record], ast.Load()))


@dataclass(frozen=True)
class Lookup:
    """Where mypy does not check a key: file, function, statement."""

    file: str
    function: str
    statement: str


def function_at(tree: ast.Module, line: int) -> str:
    """The innermost function that a line is in."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
    return max(around, key=lambda node: node.lineno).name if around else ""


def untyped_lookups(files: Sequence[Path], root: Path, work: Path) -> Iterator[Lookup]:
    """Each lookup in Any or in a mapping of Any or object, and each document that `dict` or `cast` makes one of.

    root  of the packages that the files belong to; `work` is a folder for copies and mypy's cache
    """
    config = work / "mypy.ini"
    config.write_text(CONFIG, encoding="utf-8")
    shadows, texts = [], {}
    for number, file in enumerate(files):
        tree = Revealed().visit(ast.parse(file.read_text(encoding="utf-8")))
        texts[str(file.relative_to(root))] = text = ast.unparse(ast.fix_missing_locations(tree)).splitlines()
        copy = work / f"{number}.py"
        copy.write_text("\n".join(text) + "\n", encoding="utf-8")
        shadows += ["--shadow-file", str(file), str(copy)]
    names = [str(file) for file in files]
    options = (
        "--config-file",
        str(config),
        "--cache-dir",
        str(work / "cache"),
        "--no-error-summary",
        "--show-absolute-path",
    )
    output, problem, _ = api.run([*options, "--explicit-package-bases", *shadows, *names])
    if problem:
        raise RuntimeError(problem)
    trees = {name: ast.parse("\n".join(text)) for name, text in texts.items()}
    for path, line, kind in REVEALED.findall(output):
        name = str(Path(path).relative_to(root))
        statement = texts[name][int(line) - 1].strip()
        if UNTYPED.fullmatch(kind) or MADE_LOOSE.fullmatch(kind):
            yield Lookup(name, function_at(trees[name], int(line)), statement)
