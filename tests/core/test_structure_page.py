"""docs/structure.md has a line for every room of kvplan, in the order of imports."""

import re

from tests.core.test_import_direction import ORDER, ROOT

PAGE = ROOT / "docs" / "structure.md"


def rooms() -> list[str]:
    """The packages of kvplan, by name."""
    return sorted(path.parent.name for path in (ROOT / "kvplan").glob("*/__init__.py"))


def test_every_room_has_its_line_in_the_order_of_imports() -> None:
    lines = re.findall(r"^\| `kvplan/(\w+)/` \| .+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(lines) == rooms()
    assert lines == [room for room in ORDER if room in lines]


def test_every_folder_of_the_tree_has_its_line() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in ("kvplan", "engine", "tests", "benchmarks", "reports", "docs", "examples"):
        assert (ROOT / name).is_dir()
        assert f"| `{name}/` |" in text
