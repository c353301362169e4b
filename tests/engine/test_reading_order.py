"""engine/README.md leads a reader through files and calls that are there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "engine"
README = (ENGINE / "README.md").read_text(encoding="utf-8")
ORDER = re.findall(r"^\d+\. `([^`]+)`: ", README, re.MULTILINE)


def test_the_hour_is_fifteen_files_each_listed_once() -> None:
    assert len(ORDER) == 15
    assert len(set(ORDER)) == 15
    assert [name for name in ORDER if not (ENGINE / name).is_file()] == []


def test_every_file_named_is_there() -> None:
    named = re.findall(r"`([\w/]+\.py)`", README)
    assert len(named) > len(ORDER)
    assert [name for name in named if not (ENGINE / name).is_file() and not (ROOT / name).is_file()] == []


def test_every_file_beside_the_kernels_is_named() -> None:
    files = {path.name for path in ENGINE.glob("*.py")} - {"__init__.py"}
    assert [name for name in sorted(files) if f"`{name}`" not in README] == []


def test_the_classes_and_calls_drawn_are_those_of_the_code() -> None:
    drawn = README.split("```")[1]
    known: dict[str, set[str]] = {}
    for path in ENGINE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = re.findall(r"\b(?:def |self\.)(\w+)", ast.unparse(node))
                known[node.name] = set(names)
    calls = re.findall(r"\b([A-Z]\w+)\.(\w+)", drawn)
    assert len(calls) > 8
    assert [f"{owner}.{name}" for owner, name in calls if name not in known.get(owner, set())] == []


def test_a_step_fits_one_screen() -> None:
    """Schedule, run and postprocess are calls of `_step`, which `step` and `generate` share."""
    source = (ENGINE / "engine.py").read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    calls = re.findall(r"self\._(schedule|run|postprocess)\(", ast.unparse(functions["_step"]))
    assert list(dict.fromkeys(calls[1:])) == ["schedule", "run", "postprocess"]  # the first drops what nobody wants
    own = [functions[name] for name in ("_step", "_schedule", "_run", "_postprocess")]
    assert sum((node.end_lineno or 0) - node.lineno + 1 for node in own) <= 60
