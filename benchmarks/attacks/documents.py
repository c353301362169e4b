"""Every JSON document against its schema: random commands, half of them with a word changed, and every catalog model.

    python -m benchmarks.attacks.documents [--count 230] [--seed 5] [--no-catalog]

A command breaks when its JSON is not JSON (NaN is none), not what `kvplan schema` says, or, for a refusal, no error
document with the exit code; or when it ends in a traceback.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from benchmarks.attacks.commands import drawn, mutated
from benchmarks.attacks.outcomes import Outcome, Tally, command
from kvplan.documents.schema import document_schema
from kvplan.models import catalog


@cache
def validator(name: str) -> Any:
    return Draft202012Validator(document_schema(name))


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def read(outcome: Outcome) -> dict[str, Any]:
    """The document that a command printed; ValueError for what is none."""
    document: dict[str, Any] = json.loads(outcome.out, parse_constant=refuse)
    return document


def schema_fault(outcome: Outcome) -> str | None:
    """What its schema says against a document."""
    try:
        document = read(outcome)
        name = document["schema"].removeprefix("kvplan/").partition("@")[0]
    except (ValueError, TypeError, KeyError) as error:
        return f"no document ({error}): {outcome.out[:100]!r}"
    for fault in validator(name).iter_errors(document):
        return f"{fault.json_path}: {fault.message[:150]}"
    if outcome.is_refused and (name, document.get("exit_code")) != ("error", outcome.code):
        return f"exit code {outcome.code} with {name}, exit_code {document.get('exit_code')}"
    return None


def judge(tally: Tally, kind: str, words: Sequence[str]) -> None:
    outcome = command(*words, "--format", "json")
    tally.judge(kind, " ".join(words)[:300], outcome, outcome.fault() or schema_fault(outcome))


def attack(count: int, seed: int, models: Sequence[str] = ()) -> Tally:
    """Random commands, then a plan of each model for either server."""
    rng, tally = random.Random(seed), Tally()
    for number in range(count):
        words = drawn(rng)
        judge(tally, "mutated" if number % 2 else "drawn", mutated(rng, words) if number % 2 else words)
    for model in models:
        for engine in ("vllm", "sglang"):
            judge(tally, "of the catalog", ["estimate", model, "--gpu", "8xh200", "--ctx", "auto", "--engine", engine])
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=230)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--no-catalog", action="store_true")
    options = parser.parse_args(argv)
    return attack(options.count, options.seed, () if options.no_catalog else catalog.model_names()).closing()


if __name__ == "__main__":
    sys.exit(main())
