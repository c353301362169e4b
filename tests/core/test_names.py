"""Names are nouns: what a binding stands for, not that it was found, told or asked for.

httpx and memray have no binding of these names. Rooms that still have some are counted below: a count may only fall.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
BANNED = {"found", "told", "said", "asked", "one", "it", "at", "held", "shown", "wanted", "kept"}
VAGUE = {"each", "most", "rest"}  # allowed where nothing is more to the point; not more of them

LEFT: dict[str, int] = {}
VAGUE_LEFT = 361


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
    """(room, file and line, name) of every binding of these names."""
    bound = []
    files = (file for folder in ("kvplan", "benchmarks", "engine") for file in (ROOT / folder).rglob("*.py"))
    for file in sorted(files):
        path = file.relative_to(ROOT)
        room = "benchmarks" if path.parts[0] == "benchmarks" else "/".join(path.parts[:2])
        for name, line in bindings(ast.parse(file.read_text(encoding="utf-8"))):
            if name in BANNED | VAGUE:
                bound.append((room, f"{path}:{line}", name))
    return bound


def test_no_binding_is_called_found_or_told() -> None:
    by_room: dict[str, list[str]] = {}
    for room, place, name in places():
        if name in BANNED:
            by_room.setdefault(room, []).append(f"{place} {name}")
    more = {room: bound for room, bound in by_room.items() if len(bound) > LEFT.get(room, 0)}
    assert not more, f"name what it is: {more}"


def test_vague_names_become_no_more() -> None:
    count = sum(name in VAGUE for _, _, name in places())
    assert count <= VAGUE_LEFT, f"{count} bindings are called each, most or rest; name what they are"
