"""A server is a folder and one line of servers/base.py: the rooms above ask it, and say no server's name."""

import re
from pathlib import Path

import pytest

from kvplan.servers import base
from kvplan.servers.base import parse_engine

KVPLAN = Path(__file__).resolve().parents[2] / "kvplan"
# Files that may say `sglang`, and how many of their lines do: only ever fewer.
NAMED = {
    "cli/calibrate_options.py": 1,  # sglang.bench_serving, which writes results that calibrate reads
    "cli/load_options.py": 1,  # a pasted command of sglang.bench_serving
    "cli/run_options.py": 1,  # likewise
    "report/templates.py": 1,  # an example
    "simulate/prompts_first.py": 6,  # the scheduler's source, and the variables its constants are
    "simulate/radix.py": 2,  # its source
    "sizing/weights.py": 1,  # a source
}


def named_lines() -> dict[str, int]:
    """Lines that say `sglang`, by file, outside the room that owns the name."""
    lines = {}
    for path in sorted(KVPLAN.rglob("*.py")):
        name = path.relative_to(KVPLAN).as_posix()
        if name.startswith("servers/"):
            continue
        if count := sum("sglang" in line.lower() for line in path.read_text(encoding="utf-8").splitlines()):
            lines[name] = count
    return lines


def test_no_other_room_says_the_name_of_a_server() -> None:
    assert named_lines() == NAMED


def test_views_judges_and_documents_compare_no_name() -> None:
    pattern = re.compile(r"""(==|!=|startswith\() *["'](sglang|vllm)""")
    found = [
        path.name
        for room in ("report", "policy", "documents", "planning")
        for path in (KVPLAN / room).rglob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("name", list(base.SERVERS))
def test_what_completion_offers_is_an_engine(name: str) -> None:
    server = base.server_of(name)
    assert server.name == name
    assert [parse_engine(label).engine for label in server.labels()] == [name] * len(server.labels())
