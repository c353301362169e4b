"""How many commands and manifests, as people publish them, are planned, and why the others are refused.

    python -m benchmarks.pasted ../shared/data/corpus_commands.jsonl [--part train|held] [--field text] [--rows]
    python -m benchmarks.pasted ../shared/data/corpus_manifests.jsonl

Reads rows of {"id", "text"}; plans each offline on one kind of GPU if its text names none. A row is planned if kvplan
has an answer, also "does not fit". Every third row (2, 5, 8, ...) is held out: mechanisms are made from the others.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvplan.core.errors import KvplanError

GPU = "h100-80g"
# What a message is about -> the class of its refusal, tried in order.
REASONS = {
    "does not name a model": r"^MODEL: missing",
    "a variable without a value": r"variable|which kvplan does not run|not in the text",
    "model not in the catalog": r"not in the Hub cache|not in the catalog|no such file or directory",
    "no server in it": r"contains no server|no container in it runs|not a server",
    "template": r"template",
    "flag not modeled": r"not modeled|not sized",
    "GPU not named": r"--gpu",
}


class Outcome(NamedTuple):
    """What became of a row: "planned", "refused" or "crash", and why."""

    kind: str
    reason: str = ""
    message: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--part", choices=("train", "held", "all"), default="all")
    parser.add_argument("--field", default="text", help="the row's key that is pasted")
    parser.add_argument("--rows", action="store_true", help="print every row that is not planned")
    options = parser.parse_args()
    outcomes = [(row, outcome(str(row.get(options.field) or row["text"]))) for row in rows(options.file, options.part)]
    if options.rows:
        for row, result in outcomes:
            if result.kind != "planned":
                print(f"{row['id']}  {result.kind}  {result.message}")
    print(summary([result for _, result in outcomes]))


def rows(file: Path, part: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
        if part == "all" or (part == "held") == (number % 3 == 2):
            yield json.loads(line)


def outcome(text: str) -> Outcome:
    """Plan a pasted text as `kvplan estimate --from-command` does."""
    from kvplan.asked.call import form_of
    from kvplan.asked.form import read_form
    from kvplan.asked.question import requests
    from kvplan.planning.plan import plan

    try:
        for request in requests(read_form(form_of({"offline": True}, from_command=text, gpu=GPU))).requests:
            plan(request)
    except KvplanError as error:
        messages = [str(each) for each in error.all]
        return Outcome("refused", reason(messages), " | ".join(messages)[:600])
    except Exception as error:
        return Outcome("crash", type(error).__name__, f"{type(error).__name__}: {error}"[:300])
    return Outcome("planned")


def reason(messages: list[str]) -> str:
    """The class of the first reason that has one."""
    classes = (name for name, pattern in REASONS.items() if any(re.search(pattern, text) for text in messages))
    return next(classes, "other")


def summary(outcomes: list[Outcome]) -> str:
    counts = Counter(result.kind for result in outcomes)
    reasons = Counter(result.reason for result in outcomes if result.kind == "refused")
    unknown = reasons["model not in the catalog"] + reasons["does not name a model"]
    lines = [f"{counts['planned']} of {len(outcomes)} are planned, {counts['crash']} crash"]
    lines += [f"{count:5}  {name}" for name, count in reasons.most_common()]
    named = len(outcomes) - unknown
    return "\n".join([*lines, f"{counts['planned']} of the {named} that are not refused for their model"])


if __name__ == "__main__":
    main()
