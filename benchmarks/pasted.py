"""How many commands and manifests, as people publish them, are planned, and why the others are refused.

    python -m benchmarks.pasted ../shared/data/corpus_commands.jsonl [--part train|held] [--field text] [--rows]
    python -m benchmarks.pasted ../shared/data/corpus_manifests.jsonl

Reads rows of {"id", "text"}; plans each offline on one kind of GPU if its text names none. A row is planned if kvplan
has an answer, also "does not fit". A manifest of several servers counts
once for each. Every third row (2, 5, 8, ...) is held out: mechanisms are made from the others.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kvplan.core.errors import KvplanError

GPU = "h100-80g"
# What a user would state for a value that the text leaves open, by key.
STATED: dict[str, str | bool] = {
    "model": "qwen3-8b", "max_model_len": "8192", "tensor_parallel_size": "1", "pipeline_parallel_size": "1",
    "gpu_memory_utilization": "0.9", "dtype": "bfloat16", "max_lora_rank": "16", "max_num_seqs": "64",
    "quantization": "fp8", "mem_fraction_static": "0.85", "kv_cache_dtype": "auto", "max_num_batched_tokens": "8192",
    "data_parallel_size": "1", "enforce_eager": True,
}  # fmt: skip
NO_MODEL = (
    "model not in the catalog", "does not name a model", "leaves the model open", "is not served", "template",
    "no server in it",
)  # fmt: skip
# What a message is about -> the class of its refusal, tried in order.
REASONS = {
    "does not name a model": r"^MODEL: missing|is a file of more flags",
    "leaves the model open": r"no value in the text for .*\(MODEL\)|the model may be in",
    "leaves other values open": r"no value in the text|variable",
    "is not served": r"by its name; kvplan sizes",
    "model not in the catalog": r"Hub cache|catalog|no such file or directory|not a Hub id",
    "no server in it": r"contains no server|no container in it runs|not a server|loads no model",
    "template": r"template",
    "flag not modeled": r"not modeled|not sized",
    "GPU not named": r"--gpu",
}


class Outcome(NamedTuple):
    """What became of a row: "planned", "refused" or "crash", and why."""

    kind: str
    reason: str = ""
    message: str = ""
    is_answered: bool = False  # planned once the values that it asks for are stated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--part", choices=("train", "held", "all"), default="all")
    parser.add_argument("--field", default="text", help="the row's key that is pasted")
    parser.add_argument("--rows", action="store_true", help="print every row that is not planned")
    options = parser.parse_args()
    outcomes = [
        (row, outcome(text))
        for row in rows(options.file, options.part)
        for text in parts(str(row.get(options.field) or row["text"]))
    ]
    if options.rows:
        for row, result in outcomes:
            if result.kind != "planned":
                print(f"{row['id']}  {result.kind}  {result.message}")
    print(summary([result for _, result in outcomes]))


def rows(file: Path, part: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
        if part == "all" or (part == "held") == (number % 3 == 2):
            yield json.loads(line)


def parts(text: str) -> list[str]:
    """The commands of a manifest with several servers, else the text itself."""
    from kvplan.asked import manifest

    try:
        containers = manifest.served(text, "manifest") if manifest.is_manifest_file(text) else []
    except KvplanError:
        return [text]
    return [container.command for container in containers] if len(containers) > 1 else [text]


def outcome(text: str, stated: Mapping[str, str | bool] = MappingProxyType({})) -> Outcome:
    """Plan a pasted text as `kvplan estimate --from-command` does."""
    from kvplan.asked.call import form_of
    from kvplan.asked.form import read_form
    from kvplan.asked.question import requests
    from kvplan.planning.plan import plan

    others = {key: value for key, value in stated.items() if key != "model"}
    form = form_of({"offline": True, **others}, model=stated.get("model"), from_command=text, gpu=GPU)
    try:
        for request in requests(read_form(form)).requests:
            plan(request)
    except KvplanError as error:
        messages = [str(fault) for fault in error.all]
        open_keys = [key for fault in error.all if "no value in the text" in str(fault) for key in fault.keys]
        answers = {key: STATED[key] for key in open_keys if key in STATED}
        is_answered = bool(open_keys) and not stated and outcome(text, answers).kind == "planned"
        return Outcome("refused", reason(messages), " | ".join(messages)[:600], is_answered)
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
    named = len(outcomes) - sum(reasons[name] for name in NO_MODEL)
    answered = sum(result.is_answered for result in outcomes)
    lines = [f"{counts['planned']} of {len(outcomes)} are planned, {counts['crash']} crash"]
    lines += [f"{count:5}  {name}" for name, count in reasons.most_common()]
    lines.append(f"{counts['planned']} of the {named} that name a model of the catalog are planned")
    return "\n".join([*lines, f"{answered} more are planned once the values that they leave open are stated"])


if __name__ == "__main__":
    main()
