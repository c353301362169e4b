"""A server's log -> what happened: whether it started, failed or died, why, and the figures that say so.

A wrong cause is worse than none: what the text does not show is asked for (`needs`), never guessed.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvplan.core.errors import KvplanError
from kvplan.core.files import printable
from kvplan.measure.serverlog.log import ServerLog, parse_log
from kvplan.servers.failures import (
    LEAD,
    MEMORY_CAUSES,
    NAMES,
    REACH,
    Cause,
    Figures,
    Phase,
    Wording,
    compiled,
    figure,
    squeezed,
)
from kvplan.servers.sglang import failures as sglang
from kvplan.servers.vllm import failures as vllm

Outcome = Literal["started", "failed", "died", "unknown"]
ServerName = Literal["vllm", "sglang"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line that shows the cause; its number counts from 1."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Failure:
    """What a log shows of how a server came to its end.

    cause            None where the text does not show it
    memory_question  whether memory and the flags that divide it have to do with it; None: it cannot be told
    phase            the part of start-up, or serving, in which it happened
    ranks            the workers that wrote a line of the cause, as their prefixes name them
    needs            what is missing where the cause cannot be told
    log              what the start-up lines say: model, arguments, weights, GPU; None where there is none
    """

    server: ServerName | None
    version: str | None
    outcome: Outcome
    cause: Cause | None
    memory_question: bool | None
    phase: Phase | None
    evidence: tuple[Evidence, ...]
    figures: Figures
    ranks: tuple[str, ...]
    needs: tuple[str, ...]
    log: ServerLog | None


@dataclass(frozen=True, slots=True)
class _Hit:
    wording: Wording
    start: int  # in the squeezed text
    line: int
    server: ServerName | None


MOST_HITS: Final = 200  # of one wording that are looked at


def read_failure(lines: Iterable[str]) -> Failure:
    """What happened to the server that wrote these lines."""
    raw = list(lines)
    text, starts = _squeezed_log(raw)
    hits = _hits(text, starts)
    log = _start_up(raw)
    if not hits:
        return Failure(
            log.engine if log else None, log.text("version") if log else None, "unknown", None, None, None, (),
            Figures(), (), ("the lines above the end of the log, from the server's first line on",), log,
        )  # fmt: skip
    hit = hits[0]
    cause = hit.wording.cause
    return Failure(
        hit.server or (log.engine if log else None),
        log.text("version") if log else None,
        "failed",
        cause,
        None if cause is None else cause in MEMORY_CAUSES,
        hit.wording.phase,
        (Evidence(hit.line + 1, printable(raw[hit.line].strip(), 600)),),
        _figures(text, hit),
        (),
        (),
        log,
    )


def _start_up(lines: list[str]) -> ServerLog | None:
    try:
        return parse_log("\n".join(lines))
    except KvplanError:
        return None


def _squeezed_log(lines: list[str]) -> tuple[str, list[int]]:
    """The lines as one text without white space, and where each line starts in it."""
    parts = [squeezed(line) for line in lines]
    starts, end = list[int](), 0
    for part in parts:
        starts.append(end)
        end += len(part)
    return "".join(parts), starts


def _hits(text: str, starts: list[int]) -> list[_Hit]:
    """Every message that the tables know, in the order of the log."""
    hits = list[_Hit]()
    tables: tuple[tuple[ServerName, tuple[Wording, ...]], ...] = (
        ("vllm", vllm.WORDINGS),
        ("sglang", sglang.WORDINGS),
    )
    for server, wordings in tables:
        for wording in wordings:
            phrase = squeezed(wording.phrase)
            start = text.find(phrase)
            for _ in range(MOST_HITS):
                if start < 0:
                    break
                if _applies(wording, text[start : start + REACH]):
                    hits.append(_Hit(wording, start, bisect_right(starts, start) - 1, server))
                start = text.find(phrase, start + len(phrase))
    return sorted(hits, key=lambda hit: hit.start)


def _applies(wording: Wording, after: str) -> bool:
    if wording.unless and compiled(wording.unless).search(after):
        return False
    return not wording.needs or compiled(wording.needs).search(after) is not None


def _figures(text: str, hit: _Hit) -> Figures:
    """What the message states around its phrase."""
    around = text[max(0, hit.start - LEAD) : hit.start + REACH]
    values: dict[str, Any] = {}
    for pattern in hit.wording.figures:
        match = compiled(pattern).search(around)
        for name, written in (match.groupdict() if match else {}).items():
            if name in NAMES and name not in values:
                values[name] = figure(name, written)
    return Figures(**values)
