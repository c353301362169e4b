"""The same numbers in every format: random commands as JSON, CSV, text, Markdown and HTML.

    python -m benchmarks.attacks.answers [--count 200] [--seed 1]

Draws until `count` commands are answered, and prints how many cells were compared. A command breaks when a figure of
its CSV or text is not the JSON's (to the digits that the text shows), when a format has another exit code, or shows a
NaN, None or undefined.
"""

import argparse
import csv
import io
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.attacks.commands import drawn
from benchmarks.attacks.documents import read, schema_fault
from benchmarks.attacks.outcomes import Tally, command

UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}
ROWS = {  # as the text names them -> keys of `memory`
    "weights": "weights", "buffers": "buffers", "activations": "activations", "CUDA graphs": "cuda_graphs",
    "non-torch": "non_torch", "KV cache": "kv_cache", "unused": "unused", "total": "total",
}  # fmt: skip
PAGES_EVERY = 4  # commands: they take longer than the other formats together
SHOWN_DIGITS = 0.0051  # of a figure with two decimals
NO_FIGURE = re.compile(r"\bnan\b|\bInfinity\b(?! Fabric)|undefined|\bNone\b")


def cells(document: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of everything in a document but what is in lists."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from cells(value, f"{place}.{key}" if place else key)
    else:
        yield place, document


def is_same(text: str, value: Any) -> bool:
    match value:
        case None:
            return text == ""
        case bool():
            return text == str(value).lower()
        case int() | float():
            return bool(re.fullmatch(r"[-+.\de]+", text)) and float(text) == float(value)
        case list() | dict():
            return True
    return text == str(value)


def records(document: Mapping[str, Any], num_rows: int) -> list[dict[str, Any]]:
    """The part of a document that its CSV is made of: a plan, plans, or the list of as many rows."""
    if document["schema"] == "kvplan/plan@1":
        return [dict(cells(document))]
    lists = [value for value in document.values() if isinstance(value, list) and value and isinstance(value[0], dict)]
    for rows in lists:
        if len(rows) == num_rows:
            return [dict(cells(row)) for row in rows]
    return []


def of_csv(document: Mapping[str, Any], text: str) -> Iterator[tuple[str, str, Any]]:
    """(name, CSV's text, JSON's value) of each cell that both have."""
    rows = list(csv.DictReader(io.StringIO(text)))
    if document["schema"] == "kvplan/simulation@1":
        variants = {variant["name"]: dict(cells(variant)) for variant in document["variants"]}
        for row in rows:
            variant = variants.get(row["variant"], {})
            if row["metric"] in variant:
                yield row["metric"], row["value"], variant[row["metric"]]
        return
    for row, record in zip(rows, records(document, len(rows)), strict=False):
        yield from ((key, cell, record[key]) for key, cell in row.items() if key in record)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def of_text(document: Mapping[str, Any], text: str) -> Iterator[tuple[str, float, float, float]]:
    """(line, the text's figure, JSON's, by how much they may differ) of a plan or a simulation."""
    lines = text.splitlines()
    if document["schema"] == "kvplan/simulation@1":
        first = document["variants"][0]
        for words, value in (
            ("output tokens per second", first["throughput"]["output_tokens_per_s"]),
            ("preemptions", first["preemptions"]),
        ):  # fmt: skip
            if match := re.search(rf"{words} +([\d,]+)", text):
                yield match[0], number(match[1]), value, 0.51
    if document["schema"] != "kvplan/plan@1":
        return
    memory, kv, concurrency = document["memory"], document["kv"], document["concurrency"]
    start = next((place for place, line in enumerate(lines) if line.startswith("Where the memory goes")), len(lines))
    for line in lines[start : next((n for n in range(start, len(lines)) if not lines[n].strip()), len(lines))]:
        match = re.match(rf"  ({'|'.join(ROWS)}) +(-?[\d,.]+) (GiB|MiB)", line)
        if match and memory.get(ROWS[match[1]]) is not None:
            yield line, number(match[2]), memory[ROWS[match[1]]] / UNITS[match[3]], SHOWN_DIGITS
    patterns = (
        (r"  pool +([\d,]+) blocks", kv["num_blocks"], 0), (r"  pool .* ([\d,]+) tokens", kv["tokens"], 0),
        (r"  concurrent +([\d,]+) ", concurrency["users"], 0),
        (r"  in the log +([\d,.]+) ", concurrency["max"], SHOWN_DIGITS),
    )  # fmt: skip
    for line in lines:
        for pattern, value, slack in patterns:
            if match := re.match(pattern, line):
                yield line, number(match[1]), value, slack
    if match := re.match(r".*: ([\d,]+) users? at ", lines[0]):
        yield lines[0], number(match[1]), concurrency["users"], 0


def differences(
    words: Sequence[str], document: Mapping[str, Any], code: int | None, pages: Sequence[str], tally: Tally
) -> Iterator[str]:
    """What the other formats say otherwise; of pages, whether they show what is no figure."""
    others = {"text": command(*words)} | {name: command(*words, "--format", name) for name in ("csv", *pages)}
    for name, other in others.items():
        if problem := other.fault():
            yield f"{name}: {problem}"
        if other.code != code:
            yield f"{name}: exit code {other.code}, JSON's is {code}"
        if match := NO_FIGURE.search(other.out):
            yield f"{name}: {other.out[max(0, match.start() - 30) : match.end() + 20]!r}"
    for key, cell, value in of_csv(document, others["csv"].out):
        tally.counts["CSV cells"] += 1
        if not is_same(cell, value):
            yield f"CSV: {key} is {cell!r}, JSON's {value!r}"
    for line, figure, value, slack in of_text(document, others["text"].out):
        tally.counts["figures of text"] += 1
        if abs(figure - value) > slack:
            yield f"text: {line!r}, JSON has {value!r}"


def attack(count: int, seed: int) -> tuple[Tally, Tally]:
    """(commands, cells that were compared); a command that is refused is drawn again."""
    rng, tally, compared = random.Random(seed), Tally(), Tally()
    while tally.counts["answered"] < count:
        words = drawn(rng)
        outcome = command(*words, "--format", "json")
        if outcome.fault() is None and outcome.is_refused:
            tally.counts["refused"] += 1
            continue
        problems = [outcome.fault() or schema_fault(outcome)]
        if problems == [None]:
            pages = ("markdown", "html") if tally.counts["answered"] % PAGES_EVERY == 0 else ()
            problems = [*differences(words, read(outcome), outcome.code, pages, compared)] or [None]
        tally.judge("answered", " ".join(words), outcome, problems[0])
    return tally, compared


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    tally, compared = attack(options.count, options.seed)
    print(", ".join(f"{count:,} {kind}" for kind, count in compared.counts.items()), "compared")
    return tally.closing()


if __name__ == "__main__":
    sys.exit(main())
