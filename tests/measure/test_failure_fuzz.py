"""Whatever is pasted, a log is read to a Failure: cut, shuffled, doubled, of foreign letters, or written to be slow."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvplan.measure.failure import Failure, read_failure

FACTS = Path(__file__).resolve().parents[1] / "facts"
TEXTS = ["\n".join(json.loads(line)["text"]) for line in (FACTS / "failures.jsonl").read_text("utf-8").splitlines()]
LOGS = [path.read_text("utf-8") for path in sorted((FACTS / "logs").glob("*.csv"))]
ODD = (
    "\0",
    "\x1b[0;36m",
    "\u200b",
    "\ud800",
    "�",
    "（",
    "`" * 40,
    "(" * 80,
    "9" * 400,
    "[",
    "|",
    "> ",
    '{"log":"',
    "\\",
    "\r",
)


def cut(text: str, rng: random.Random) -> str:
    start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return text[start:end]


def wrap(text: str, rng: random.Random) -> str:
    width = rng.randint(5, 200)
    return "\n".join(text[start : start + width] for start in range(0, len(text), width))


def shuffle(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    rng.shuffle(lines)
    return rng.choice(["\n", " ", "", "\r\n"]).join(lines)


def sow(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 12)):
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice(ODD) + text[place:]
    return text


def repeat(text: str, rng: random.Random) -> str:
    return text * rng.randint(2, 20)


def join(text: str, rng: random.Random) -> str:
    return text + rng.choice(["\n", " ", ""]) + rng.choice(TEXTS)


MUTATIONS: tuple[Callable[[str, random.Random], str], ...] = (cut, wrap, shuffle, sow, repeat, join)


def mutated(seed: int) -> str:
    rng = random.Random(seed)
    text = rng.choice(TEXTS)
    for _ in range(rng.randint(1, 4)):
        text = rng.choice(MUTATIONS)(text, rng)[:40_000]
    return text


def check(text: str) -> None:
    failure = read_failure(text.splitlines())
    assert isinstance(failure, Failure)
    if failure.cause is not None:
        assert failure.evidence
        assert not failure.needs
        assert failure.memory_question is not None
    for line in failure.evidence:
        assert 1 <= line.line <= len(text.splitlines())
        assert line.text.isprintable()


@pytest.mark.parametrize("seed", range(300))
def test_mutated_logs_are_read(seed: int) -> None:
    check(mutated(seed))


@pytest.mark.full
def test_20_000_mutated_logs_are_read() -> None:
    for seed in range(300, 20_300):
        check(mutated(seed))


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000,
        "_" * 100_000 + "(",
        ". a_" * 30_000,
        "Error: " * 20_000,
        "A" * 100_000 + "Error: x",
        "CUDA out of memory. " * 20_000,
        "\n".join(f'  File "a.py", line {n}, in profile_run' for n in range(30_000)) + "\nCUDA out of memory.",
        "oom " * 300_000,
        "\n".join(["during " * 200] * 3_000),
        "> " * 50_000,
        '{"log":"' * 5_000,
        "\n" * 200_000,
        "retract request " * 20_000,
        "\x1b[" + "0;" * 50_000,
        "KV cache " + "1" * 100_000,
    ],
    ids=range(15),
)
def test_text_that_is_written_to_be_slow_is_read(text: str) -> None:
    check(text)


def test_an_empty_text_shows_nothing() -> None:
    failure = read_failure([])
    assert (failure.server, failure.outcome, failure.cause) == (None, "unknown", None)
    assert failure.needs


def test_of_a_long_log_the_beginning_and_the_end_are_read() -> None:
    stats = ["INFO 02-11 10:00:00 [loggers.py:127] Engine 000: Avg prompt throughput: 9.0 tokens/s"] * 70_000
    last = TEXTS[0].split("\n")
    failure = read_failure([*stats, *last])
    assert failure.cause == "kv_too_small_for_max_len"
    assert failure.evidence[0].line == 70_001
