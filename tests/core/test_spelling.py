"""Texts are spelled as the flags are, in American English: utilization, quantized, modeled."""

import ast
import re
from pathlib import Path

KVPLAN = Path(__file__).resolve().parents[2] / "kvplan"
BRITISH = re.compile(
    r"\w*(?:utilis|quantis|modelled|behaviour|colour|neighbour|organis|normalis|initialis|honour|judgement|labelled)\w*",
    re.IGNORECASE,
)


def docstrings(tree: ast.AST) -> set[int]:
    """Ids of the constants that are documentation, which no user sees."""
    owners = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
    return {
        id(node.body[0].value) for node in owners if node.body and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip


def test_no_text_is_spelled_the_british_way() -> None:
    wrong = []
    for path in sorted(KVPLAN.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        left_out = docstrings(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
                wrong += [f"{path.name}:{node.lineno}: {word}" for word in BRITISH.findall(node.value)]
    assert not wrong, wrong
