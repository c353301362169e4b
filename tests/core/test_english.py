"""Texts that a user sees use the field's words: those that a reader with fresh eyes stopped at do not come back."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplan.core.errors import sentence

ROOT = Path(__file__).resolve().parents[2]
# What must not come back -> what to write.
BANNED = {
    r"\bbeside\b": "with, next to, in addition to, compared with",
    r"\bleave (it|one|one of them) out\b": "remove it, use only one",
    r"\bmend it\b": "fix it",
    r"\bname them apart\b": "give each a unique name",
    r"\b(sent|sends) back\b": "preempted",
    r"\b(given|gives) back\b": "freed",
    r"\b(keeps|kept) back\b": "reserves",
    r"\btargets of time\b": "latency targets",
    r"\border of work\b": "scheduler",
    r"\bas a film\b": "animation",
    r"\bfolk\b": "rule of thumb",
    r"\bwants --": "requires --",
    r"\bis none of\b": "is not supported by",
    r"\bpromises\b": "targets",
    r"\boutside budget\b": "outside --gpu-memory-utilization",
    r"\bnothing tried\b": "no setting, no placement",
    r"\bGPUs of AMD\b": "AMD GPUs",
    r"\bplain digits: 8\b": "a range",
}
FOUND = re.compile("|".join(BANNED))
# Of the plan's JSON Schema and code that is written, not of sentences.
FREE = {"kvplan/documents", "kvplan/servers/plans/calibration.py", "kvplan/hardware/gpu.py"}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is no docstring; a formatted one without what is put in."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body
        if isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_no_text_has_a_word_that_stops_a_reader() -> None:
    wrong = [
        f"{name}:{number}: {match.group()!r} in {text.strip()[:80]!r}"
        for room in ("kvplan", "engine")
        for path in sorted((ROOT / room).rglob("*.py"))
        if not (name := str(path.relative_to(ROOT))).startswith(tuple(FREE))
        for number, text in texts(path)
        if " " in text and (match := FOUND.search(text))
    ]
    assert not wrong, "\n".join([*wrong, "write instead:", *(f"  {old}: {new}" for old, new in BANNED.items())])


@pytest.mark.parametrize(
    ("subject", "problem", "text"),
    [
        ("--tp", "must be at least 1", "--tp must be at least 1"),
        ("--rate", "is missing: SERVER has none", "--rate is missing: SERVER has none"),
        ("gpu 'a200'", "not in the catalog", "gpu 'a200': not in the catalog"),
        ("", "no model matches", "no model matches"),
        ("--ctx", "names", "--ctx names"),
        ("p.yaml", "names: a list", "p.yaml: names: a list"),
    ],
)
def test_a_problem_that_begins_with_its_verb_follows_its_subject(subject: str, problem: str, text: str) -> None:
    assert sentence(subject, problem) == text
