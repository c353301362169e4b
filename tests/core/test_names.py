"""Names are nouns: what a binding stands for, not that it was found, told or asked for.

httpx and memray have no binding of these names, and neither has kvplan, its tests included. Vaguer names are counted by
folder: a count may only fall.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
BANNED = {"found", "told", "said", "asked", "one", "it", "at", "held", "shown", "wanted", "kept"}
VAGUE = {"each", "most", "rest", "made", "given"}  # allowed where nothing is more to the point; not more of them
VAGUE_LEFT = {"kvplan": 132, "engine": 5, "benchmarks": 30, "tests": 1}  # a parameter that is a key of workloads.yaml


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of what a module binds; the keys of a TypedDict are those of a document, not ours to name."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("TypedDict") for base in node.bases):
            continue
        nodes += ast.iter_child_nodes(node)
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno
            case ast.alias(asname=str(name)):
                yield name, node.lineno


@cache
def places() -> list[tuple[str, str, str]]:
    """(folder, file and line, name) of every binding of these names."""
    bound = []
    for folder in VAGUE_LEFT:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for name, line in bindings(ast.parse(file.read_text(encoding="utf-8"))):
                if name in BANNED | VAGUE:
                    bound.append((folder, f"{file.relative_to(ROOT)}:{line}", name))
    return bound


def test_no_binding_is_called_found_or_told() -> None:
    bound = [f"{place} {name}" for _, place, name in places() if name in BANNED]
    assert not bound, f"name what it is: {bound}"


def test_vague_names_become_no_more() -> None:
    for folder in VAGUE_LEFT:
        bound = [f"{place} {name}" for room, place, name in places() if room == folder and name in VAGUE]
        assert len(bound) <= VAGUE_LEFT[folder], f"{len(bound)} in {folder}; name what they are: {bound}"
