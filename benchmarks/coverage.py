"""Models of public logs that the catalog lacks, and the share it has: `python benchmarks/coverage.py LOGS.jsonl...`.

A row's `model` counts once, however often it occurs. A name is public where it is a Hub id or the bare name of a model;
descriptions ("(32B bf16: not named)", "Qwen2.5-7B class") and paths name none. What stands in brackets behind a name is
a remark. A model is covered where the catalog has it by name, alias or id; where it has another checkpoint of the same
model (another precision, base or instruct), that one is named, and the model counts as not covered.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvplan.models import catalog

DESCRIPTION = re.compile(r"^\(|^/|\?|\(\.\d\)|\bclass\b|^(?:gemma 4|qwen2\.5|qwen 35b-a3b)$| \+ ", re.IGNORECASE)
REMARK = re.compile(r"\s*\([^)]*\)\s*$")
VARIANT = re.compile(
    r"[-_.]?(?:unsloth|bnb|4bit|int[48]|int8|awq|gptq|autoround|quantized\.w\d+a\d+|w\d+a\d+|nvfp4|mxfp4|fp8|dynamic|bf16|"
    r"mtp|instruct|chat|it|thinking|hf|\d{4})(?=[-_.]|$)",
    re.IGNORECASE,
)


def names(paths: Iterable[Path]) -> list[str]:
    """The public models that the rows name, each once."""
    seen: dict[str, str] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            model = json.loads(line).get("model")
            if isinstance(model, str) and not DESCRIPTION.search(model):
                name = REMARK.sub("", model).strip()
                seen.setdefault(catalog.find(name) or plain(name), name)
    return list(seen.values())


def plain(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.rpartition("/")[2].lower())


def entry(name: str) -> str | None:
    """The catalog's entry of a model; a bare name may be any publisher's."""
    return catalog.find(name) or catalog.find(plain(name)) or by_last_part().get(plain(name))


@cache
def by_last_part() -> dict[str, str]:
    return {plain(str(catalog.facts(name)["id"])): name for name in catalog.model_names()}


def siblings(name: str) -> Iterator[str]:
    """Entries of the same model at another precision or training."""
    stem = VARIANT.sub("", plain(name))
    for own, known in by_last_part().items():
        if VARIANT.sub("", own) == stem:
            yield known


def main(paths: list[Path]) -> int:
    every = names(paths)
    missing = [name for name in every if entry(name) is None]
    for name in sorted(missing, key=str.lower):
        near = sorted(siblings(name))
        print(f"not covered: {name}" + (f" (of the same model: {', '.join(near[:3])})" if near else ""))
    covered = len(every) - len(missing)
    others = sum(1 for name in missing if any(siblings(name)))
    share = 100 * covered / max(len(every), 1)
    print(
        f"{covered} of {len(every)} distinct public models in the catalog ({share:.0f} %), {others} by a sibling alone"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
