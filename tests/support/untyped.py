"""Lookups in mappings whose values have no type: `document["memory"]` where document is a dict[str, Any].

mypy says the types: it reads copies of the files in which every mapping that is looked into by a literal key is
wrapped in `reveal_type`.
"""

import ast
import re
from collections.abc import Iterator, Sequence
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
UNTYPED = re.compile(r"Any|([\w.]+\.)?(dict|Mapping|MutableMapping)\[[^|]+, Any\](\s*\|\s*None)?")


class Revealed(ast.NodeTransformer):
    """Wrap every mapping that is looked into by a literal key; formatted text becomes a tuple of what is in it."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            node.value = revealed(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(attr="get") as method, args=[ast.Constant(value=str()), *_]):
                method.value = revealed(method.value)
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


def revealed(mapping: ast.expr) -> ast.expr:
    if isinstance(mapping, ast.Name) and mapping.id in ("Literal", "Annotated", "list", "Sequence"):
        return mapping  # a type
    return ast.Call(ast.Name("reveal_type", ast.Load()), [mapping], [])


def untyped_lookups(files: Sequence[Path], root: Path, work: Path) -> Iterator[str]:
    """Each lookup of a literal key in Any or in a mapping of Any, as `file: statement`.

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
    found, problem, _ = api.run([*options, "--explicit-package-bases", *shadows, *names])
    if problem:
        raise RuntimeError(problem)
    for path, line, kind in REVEALED.findall(found):
        if UNTYPED.fullmatch(kind):
            name = str(Path(path).relative_to(root))
            yield f"{name}: {texts[name][int(line) - 1].strip()}"
