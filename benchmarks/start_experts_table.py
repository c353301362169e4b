"""Write the table of experts' kernels that vLLM creates, from the cells that start_experts.py asked.

    python -m benchmarks.start_experts_table CELLS.jsonl ... -o kvplan/servers/vllm/moe_backends.txt

Shapes that no condition explains are printed, and taken not to matter: the plan then does not refuse them.
"""

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.start_attention import boxes
from benchmarks.start_experts import ACTIVATIONS, FLAGS, Kind, Shape, kinds
from benchmarks.start_quantization import Json

MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ONE = (1, 1, 1)
MOST_ALTERNATIVES = 2


def holds(condition: Shape, shape: Shape, *, spread: bool) -> bool:
    """True if the condition's numbers divide an expert's width on a rank, the hidden width, its width on all ranks."""
    width, hidden, ranks = shape
    sizes = (width, hidden, width * (1 if spread else ranks))
    return all(size % number == 0 for size, number in zip(sizes, condition, strict=True))


def condition_text(condition: Shape) -> str:
    words = (f"{name}:{n}" for name, n in zip(("width", "hidden", "whole"), condition, strict=True) if n > 1)
    return " ".join(words)


def fitted(answers: list[tuple[Shape, bool]], *, spread: bool) -> str:
    """The condition for which shapes start, in the table's words: one of several, or one but not another.

    Raise ValueError if none explains them.
    """
    refused = {shape for shape, starts in answers if not starts}
    started = {shape for shape, starts in answers if starts}
    numbers = sorted(itertools.product(MULTIPLES, MULTIPLES, (1,) if spread else MULTIPLES), key=prod)
    met = {sizes: {shape for shape in refused | started if holds(sizes, shape, spread=spread)} for sizes in numbers}
    chosen, missing = list[Shape](), set(started)
    while missing:
        safe = (sizes for sizes in met if not met[sizes] & refused)
        best = max(safe, key=lambda sizes: len(met[sizes] & missing), default=ONE)
        if not met[best] & missing or met[best] & refused:
            break
        chosen.append(best)
        missing -= met[best]
    if not missing and len(chosen) <= MOST_ALTERNATIVES:
        return " or ".join(condition_text(sizes) for sizes in chosen)
    for sizes in (sizes for sizes in met if met[sizes] >= started):
        if other := next((other for other in met if met[sizes] - met[other] == started), None):
            return f"{condition_text(sizes)} not {condition_text(other)}".strip()
    raise ValueError(f"no condition explains why {sorted(started)[:4]} start and {sorted(refused)[:4]} do not")


def facts(row: Json) -> dict[str, dict[Kind, str]]:
    """Of each backend: what each kind takes and how it is padded, as the end of a table's line."""
    conditions: dict[tuple[str, frozenset[str]], str] = {}
    for cell in row["cells"]:
        if "shapes" in cell and cell["backend"] != "auto":  # whose shapes quantized.txt has
            answers = [(tuple(shape), starts) for shape, starts in cell["shapes"]]
            try:
                text = fitted(answers, spread="spread" in cell["flags"])
            except ValueError as error:
                print(f"{row['key']}, {row['sm']}, {cell['backend']} {cell['flags']}: {error}", file=sys.stderr)
                text = ""
            conditions[cell["backend"], frozenset(cell["flags"])] = text
    answers_of: dict[str, dict[Kind, str]] = defaultdict(dict)
    for cell in row["cells"]:
        if cell["backend"] == "auto" and cell.get("units") == [1, 1] and "mxfp4" not in row["key"]:
            continue  # nothing to look up
        for kind in cell.get("kinds", ()):
            width, hidden = cell["units"]
            condition = conditions.get((cell["backend"], frozenset(kind[1:]) - {"plain"}), "")
            answers_of[cell["backend"]][tuple(kind)] = f"{condition} | {width}x{hidden}"
    for (backend, flags), text in conditions.items():
        if backend not in answers_of:  # no well aligned shape: those that another layout of the scheme takes
            answers_of[backend] = dict.fromkeys(
                (kind for kind in kinds() if not set(kind[1:]) - {"plain"} ^ flags), f"{text} | 1x1"
            )
    return answers_of


def spelled(answers: dict[Kind, str]) -> Iterator[tuple[str, str]]:
    """(kinds, what these take) of a backend."""
    cells_of: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    for (activation, *flags), text in answers.items():
        cells_of[text].add((activation, *(name in flags for name in FLAGS)))
    for text, places in sorted(cells_of.items()):
        for activations, *ranges in boxes(places):
            words = ["any"] if len(activations) == len(ACTIVATIONS) else [*map(str, activations)]
            words += [f"{'+' if values[0] else '-'}{name}" for name, values in zip(FLAGS, ranges, strict=True)
                      if len(values) == 1]  # fmt: skip
            yield " ".join(words), text


def spans(sms: Iterable[int], every: set[int]) -> str:
    return "all" if set(sms) == every else ",".join(map(str, sorted(sms)))


def table(rows: Iterable[Json]) -> Iterator[str]:
    """Lines of the table: schemes with the same answers, then backends, capabilities, kinds, condition, padding."""
    by_key: dict[str, dict[tuple[str, str, str], list[int]]] = {}
    capabilities: set[int] = set()
    for row in rows:
        capabilities.add(row["sm"])
        lines = by_key.setdefault(row["key"], defaultdict(list))
        for backend, answers in facts(row).items() if "cells" in row else ():
            for names, text in spelled(answers):
                lines[backend, names, text].append(row["sm"])
    blocks: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for key, lines in by_key.items():
        merged: dict[tuple[str, str, str], list[str]] = defaultdict(list)
        for (backend, names, text), sms in sorted(lines.items()):
            merged[spans(sms, capabilities), names, text].append(backend)
        block = sorted(f"  {' '.join(backends)} | {sms} | {names} | {text}"
                       for (sms, names, text), backends in merged.items())  # fmt: skip
        blocks[tuple(block)].append(key)
    yield f"capabilities | {' '.join(map(str, sorted(capabilities)))}"
    for texts, keys in sorted(blocks.items(), key=lambda item: item[1]):
        yield "; ".join(sorted(keys))
        yield from texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path, nargs="+")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    rows = (json.loads(line) for path in args.cells for line in path.read_text().splitlines())
    args.out.write_text("".join(f"{line}\n" for line in table(rows)))


if __name__ == "__main__":
    main()
