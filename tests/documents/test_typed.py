"""Reports and commands look into typed documents only: mypy knows the type behind every literal key."""

from pathlib import Path

import pytest

from tests.support.untyped import untyped_lookups

ROOT = Path(__file__).resolve().parents[2]
PLANTED = """from collections.abc import Mapping
from typing import Any, TypedDict

class Memory(TypedDict):
    total: int

class Doc(TypedDict):
    memory: Memory

def f(doc: Doc, loose: dict[str, Any], mapping: Mapping[str, Any], sizes: dict[str, int], any: Any) -> None:
    print(doc["memory"]["total"], sizes["total"], f"{doc['memory']['total']:,}")
    print(loose["total"])
    print(f"{mapping['memory']['total']:,}")
    print(any.get("total"))
    loose["total"] = 1
    print(any.total, loose.get(str(doc["memory"]["total"])), loose)
"""


def test_a_lookup_in_an_untyped_mapping_is_found(tmp_path: Path) -> None:
    """`mapping['memory']` is untyped, and so is what it gives."""
    file = tmp_path / "planted.py"
    file.write_text(PLANTED, encoding="utf-8")
    work = tmp_path / "work"
    work.mkdir()
    assert [where.partition(": ")[2] for where in untyped_lookups([file], tmp_path, work)] == [
        "print(reveal_type(loose)['total'])",
        "print(str((reveal_type(reveal_type(mapping)['memory'])['total'],)))",
        "print(str((reveal_type(reveal_type(mapping)['memory'])['total'],)))",
        "print(reveal_type(any).get('total'))",
        "reveal_type(loose)['total'] = 1",
    ]


@pytest.mark.full
def test_reports_and_commands_index_no_untyped_mapping(tmp_path: Path) -> None:
    """By mypy, which reads all of kvplan for it: half a minute."""
    files = [file for room in ("report", "cli") for file in sorted((ROOT / "kvplan" / room).glob("*.py"))]
    places = list(untyped_lookups(files, ROOT, tmp_path))
    assert places == []
