"""docs/invariants.md numbers its lines, and each names a test that is there."""

import ast
import re
from pathlib import Path

from tests.core.test_import_direction import ROOT

PAGE = ROOT / "docs" / "invariants.md"
LINE = re.compile(r"^(\d+)\. (.+(?:\n {3,}.+)*)", re.MULTILINE)
TEST = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")


def names_in(file: Path) -> set[str]:
    """The names of a file's test functions."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_the_lines_are_numbered_from_1() -> None:
    numbers = [int(number) for number, _ in LINE.findall(PAGE.read_text(encoding="utf-8"))]
    assert numbers == list(range(1, len(numbers) + 1))
    assert numbers


def test_each_line_names_tests_that_are_there() -> None:
    for number, text in LINE.findall(PAGE.read_text(encoding="utf-8")):
        proofs = TEST.findall(text)
        assert proofs, f"line {number} names no test"
        assert [name for name, file in proofs if name not in names_in(ROOT / file)] == [], f"line {number}"
