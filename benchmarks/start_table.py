"""Write the table of quantized layers that a server creates, from the cells that start_quantization.py asked.

    python -m benchmarks.start_table CELLS.jsonl ... -o kvplan/servers/vllm/quantized.txt

Later cells replace earlier ones of the same scheme, layer, GPU and dtype. A grid that no conditions explain is printed
and left out: the plan then does not refuse such layers.
"""

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.start_quantization import ACTIVATIONS, GPUS, Json, Shape
from kvplan.servers.plans.quantized import LISTS, Divisors

MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
UNREACHED = ("ImportError", "ModuleNotFoundError", "stubbed kernel", "compiled op")  # the oracle's own limits
CUTS = (
    " for layer_name=", " Must be one of", ", weight_quant=", " Available methods", ": num_bits=", " Found num_bits",
    " Please use ", " Reasons:", " Use a checkpoint", " but got format", " and bits:", ". Use ", ". Please check",
    " For 8-bit", ". Supported dtypes",
)  # fmt: skip


CRASHES = ("AttributeError", "IndexError", "KeyError", "TypeError", "ZeroDivisionError")


def candidates() -> list[Divisors]:
    """Conditions that may explain a grid, simple ones first."""
    plain = [Divisors(item, 1, total, k) for item, total, k in itertools.product(MULTIPLES, repeat=3)]
    front = [Divisors(front=n, inputs=k) for n, k in itertools.product(MULTIPLES[1:], MULTIPLES)]
    small = [Divisors(item, 1, total, 1, limit) for item, total in itertools.product(MULTIPLES, repeat=2)
             for limit in (32, 64, 128)]  # fmt: skip
    product = [(entry.parts * entry.front * entry.sum * entry.inputs, entry) for entry in (*plain, *front, *small)]
    return [entry for _, entry in sorted(product, key=lambda pair: (pair[1].most, pair[0]))]


def alternatives(layer: str, answers: tuple[tuple[Shape, bool], ...]) -> list[Divisors]:
    """Fewest conditions that hold for exactly the shapes that start. Raise ValueError if none explain them."""
    started = {shape for shape, starts in answers if starts}
    refused = {shape for shape, starts in answers if not starts}
    covers = {}
    for divisors in candidates():
        if not any(holds(divisors, layer, shape) for shape in refused):
            covers[divisors] = {shape for shape in started if holds(divisors, layer, shape)}
    chosen: list[Divisors] = []
    while started:
        best = max(covers, key=lambda divisors: len(covers[divisors] & started), default=Divisors())
        gained = covers.get(best, set()) & started
        if not gained:
            raise ValueError(f"no condition explains why {sorted(started)[:4]} start and {sorted(refused)[:4]} do not")
        chosen.append(best)
        started -= gained
    return chosen


def holds(divisors: Divisors, layer: str, shape: Shape) -> bool:
    """Whether a shape of two ranks suits; of rows the whole inputs are twice those of a rank."""
    return divisors.suit(*shape, shape[1] * (2 if layer == "rows" else 1))


def explained(layer: str, answers: tuple[tuple[Shape, bool], ...]) -> tuple[list[Divisors], Divisors | None]:
    """(conditions, those which a rank's shape must meet if the whole shape does)."""
    try:
        return alternatives(layer, answers), None
    except ValueError:
        if layer not in ("columns", "fuseds", "rows"):
            raise
    for total, k in itertools.product((64, 128), (1, 64, 128)):
        whole = Divisors(sum=total, inputs=k)
        uncovered = tuple((shape, starts) for shape, starts in answers if not whole.suit(*unsharded(layer, shape)))
        others = [(shape, starts) for shape, starts in answers if whole.suit(*unsharded(layer, shape))]
        if uncovered and all(starts == whole.suit(*shape) for shape, starts in others):
            return alternatives(layer, uncovered), whole
    return alternatives(layer, answers), None  # raises


def unsharded(layer: str, shape: Shape) -> Shape:
    parts, k = shape
    return (parts, 2 * k) if layer == "rows" else (tuple(2 * n for n in parts), k)


def rule_of(row: Json, fitted: dict[Any, str]) -> str | None:
    """A layer's rule in the table's words: `any`, divisors, or why none starts; None: out of the oracle's reach."""
    answers = [((tuple(parts), k), text) for (parts, k), text in row["answers"]]
    if any(word in text for _, text in answers for word in UNREACHED):
        return None
    if not any(text for _, text in answers):
        return "any"
    if all(text for _, text in answers):
        return f"no: {words_of(answers[-1][1])}"  # of the best aligned shape
    starts, layer = tuple((shape, not text) for shape, text in answers), layer_name(row)
    if (layer, starts) not in fitted:
        conditions, whole = explained(layer, starts)
        text = " or ".join(map(str, conditions))
        fitted[layer, starts] = f"{text} if-whole {whole}" if whole else text
    return fitted[layer, starts]


def words_of(text: str) -> str:
    """A refusal without its class, the played layer's names and the lists behind it."""
    kind, _, words = text.partition(": ")
    for cut in CUTS:
        words = words.partition(cut)[0]
    crashed = kind in CRASHES or not words or words.startswith("Trying to create tensor")
    words = words.strip().rstrip(".,")
    if not crashed:
        return words[:160]
    return f"its code fails ({kind}{f': {words}' if words else ''})"[:160]


def layer_name(row: Json) -> str:
    """Name of a row's kind of layer in the table: sharded ones have an `s`."""
    if row["layer"].startswith("experts"):
        return "/".join(row["layer"].split())
    return f"{row['layer']}{'s' if row['ranks'] > 1 else ''}"


def shortened(names: list[str]) -> str:
    """Kinds of layers in a line: all of the experts are `experts`."""
    experts = [name for name in names if name.startswith("experts")]
    if len(experts) == 2 * len(ACTIVATIONS):
        names = [*(name for name in names if name not in experts), "experts"]
    return " ".join(names)


def spans(numbers: Iterable[int]) -> str:
    answers, needed = sorted(GPUS.values()), sorted(set(numbers))
    return "all" if needed == answers else ",".join(map(str, needed))


def table(rows: Iterable[Json]) -> Iterator[str]:
    """Lines of the table: a scheme, then what each kind of layer takes on which capabilities, but for `any`."""
    fitted: dict[Any, str] = {}
    rules: dict[str, dict[tuple[str, int, str], str]] = defaultdict(dict)  # key -> layer, capability, dtype -> rule
    for row in rows:
        if (names := next((name for name in LISTS if name in row), None)) is not None:
            yield f"{names} | {' '.join(row[names])}"
            continue
        key, where = row["key"], (row["sm"], row["dtype"])
        if "refused" in row:
            rules[key]["config", *where] = f"no: {words_of(row['refused'])}"
            continue
        rules[key].setdefault(("config", *where), "any")
        try:
            rule = rule_of(row, fitted)
        except ValueError as error:
            print(f"{key}, {layer_name(row)}, {where}: {error}", file=sys.stderr)
            continue
        if rule is not None:
            rules[key][layer_name(row), *where] = rule
    for key, cells_of in rules.items():
        answers = spans(sm for layer, sm, _ in cells_of if layer == "config")
        yield f"{key} | {answers}"
        merged: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for (layer, sm, dtype), rule in cells_of.items():
            other = "float16" if dtype == "bfloat16" else "bfloat16"
            alone = cells_of.get((layer, sm, other), rule) != rule
            if rule != "any":
                merged[rule, dtype if alone else ""][layer].append(sm)
        for (rule, dtype), layers in merged.items():
            by_span: dict[str, list[str]] = defaultdict(list)
            for layer, numbers in layers.items():
                by_span[spans(numbers)].append(layer)
            for span, names in by_span.items():
                yield " | ".join(("  " + shortened(names), span, dtype or "any dtype", rule))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path, nargs="+")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    rows = (json.loads(line) for path in args.cells for line in path.read_text().splitlines())
    args.out.write_text("".join(f"{line}\n" for line in table(rows)))


if __name__ == "__main__":
    main()
