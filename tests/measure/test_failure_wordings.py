"""The tables of failures are the servers' own words: compared with the source of 26 releases of vLLM and 9 of SGLang.

tests/facts/failure_wordings.jsonl says of each phrase in which of these releases no Python file holds it (white space,
quotes and the seams of adjacent literals aside), and of each function in how many a file defines it.
"""

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvplan.servers.logs.failures import OUT_OF_MEMORY, SYSTEM, Wording, compiled
from kvplan.servers.sglang import failures as sglang
from kvplan.servers.vllm import failures as vllm

FACTS = Path(__file__).resolve().parents[1] / "facts"
LINES = [json.loads(line) for line in (FACTS / "failure_wordings.jsonl").read_text("utf-8").splitlines()]
TABLES: dict[str, ModuleType] = {"vllm": vllm, "sglang": sglang}
READ: dict[str, list[str]] = {line["server"]: line["read"] for line in LINES if "read" in line}
PHRASES = {(line["server"], line["phrase"]): line["not_in"] for line in LINES if "phrase" in line}
FUNCTIONS = {(line["server"], line["function"]): line["in"] for line in LINES if "function" in line}
OF_TORCH = {"capture_begin", "capture_end", "pin_memory"}
OF_OLD_RELEASES = {"allocate_cpu_cache"}  # vLLM 0.1 to 0.5

ROWS = [(server, wording) for server, table in TABLES.items() for wording in table.WORDINGS]


def number(release: str, digits: int) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", release)[:digits])


def is_within(release: str, span: str) -> bool:
    low, _, high = span.split(" ")[0].partition("-")
    high = high or low
    return number(low, 3) <= number(release, low.count(".") + 1) and (
        number(release, high.count(".") + 1) <= number(high, 3)
    )


@pytest.mark.parametrize(("server", "wording"), ROWS, ids=[f"{server}: {row.phrase}" for server, row in ROWS])
def test_the_releases_of_a_phrase_are_those_whose_source_holds_it(server: str, wording: Wording) -> None:
    missing = PHRASES[server, wording.phrase]
    present = [release for release in READ[server] if release not in missing]
    if not present:  # of ray, of C++ code, of argparse
        assert ".py" not in wording.source
        return
    stated = [release for release in READ[server] if is_within(release, wording.releases)]
    assert (present[0], present[-1]) == (stated[0], stated[-1])


@pytest.mark.parametrize("server", TABLES)
def test_the_functions_of_a_trace_are_the_server_s_or_torch_s(server: str) -> None:
    functions = {name for _, names in TABLES[server].FRAMES for name in names}
    unknown = {name for name in functions if not FUNCTIONS[server, name]}
    assert unknown <= OF_TORCH | OF_OLD_RELEASES


@pytest.mark.parametrize("server", TABLES)
def test_the_healthy_lines_that_mark_start_up_are_the_server_s(server: str) -> None:
    marks = [phrase for phrase, _ in TABLES[server].MARKS]
    assert [mark for mark in marks if len(PHRASES[server, mark]) == len(READ[server])] in ([], ["# cuda blocks:"])


@pytest.mark.parametrize("server", TABLES)
def test_a_function_belongs_to_one_part_of_start_up(server: str) -> None:
    rows: dict[str, Any] = {}
    for part, names in TABLES[server].FRAMES:
        for name in names:
            assert rows.setdefault(name, part) == part, name


def test_every_pattern_is_of_bounded_repetitions() -> None:
    for wording in (*vllm.WORDINGS, *sglang.WORDINGS, *SYSTEM, *OUT_OF_MEMORY):
        for pattern in (*wording.figures, wording.needs, wording.unless, wording.anywhere):
            assert not re.search(r"(?<!\\)[*+](?!\?)", pattern), (wording.phrase, pattern)
            compiled(pattern)


RELEASE_WORDS = [json.loads(line) for line in (FACTS / "release_words.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("server", TABLES)
def test_words_that_tell_a_release_are_those_of_the_wheels_that_hold_them(server: str) -> None:
    read = next(line["read"] for line in RELEASE_WORDS if line["server"] == server and "read" in line)
    releases = {line["pattern"]: line["in"] for line in RELEASE_WORDS if line["server"] == server and "pattern" in line}
    for pattern, span in TABLES[server].FAILURES.of_releases:
        assert [release for release in read if is_within(release, span)] == releases[pattern], pattern
