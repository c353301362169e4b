"""Models of public logs that the catalog lacks, and the share it has: `python benchmarks/coverage.py LOGS.jsonl...`;
and what is sized of the servers' registries: `python benchmarks/coverage.py --registry`.

A row's `model` counts once, however often it occurs and however it is spelled. A name is public where it is a Hub id or
the bare name of a model; descriptions ("(32B bf16: not named)", "Qwen2.5-7B class") and names of a family or a folder
name no checkpoint: those are listed with why and count for nothing. What stands in brackets behind a name is a remark,
and what stands after `@` a revision. A model is covered where the catalog has it by name, id or alias; a bare name may
be any publisher's, a Hub id is its own publisher's. Where the catalog has another checkpoint of the same model (another
precision, base or instruct), that one is named, and the model counts as not covered.

--registry prints a line for every architecture of vLLM 0.33's and SGLang 0.5.23's registries: `compared` (kvplan gives
what the server's own code gives for a config, on one GPU and on two: vLLM weights per rank, blocks, tokens and
concurrency, SGLang settings, pools and requests) with whose config it was, `refused` and why, or `not compared` and
why. The rows are tests/facts/architectures.jsonl and architectures_sglang.jsonl.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvplan.models import catalog

DESCRIPTION = re.compile(r"^\(|\?|\(\.\d\)|\bclass\b| \+ ", re.IGNORECASE)
REMARK = re.compile(r"\s*\([^)]*\)\s*$|@[0-9a-z.]+$")
FOLDER = re.compile(r"^(?:\.{0,2}/|~/|[a-z]:\\)|/.*/", re.IGNORECASE)
VARIANT = re.compile(
    r"[-_.]?(?:unsloth|bnb|4bit|int[48]|int8|awq|gptq|autoround|quantized\.w\d+a\d+|w\d+a\d+|nvfp4|mxfp4|fp8|dynamic|bf16|"
    r"mtp|instruct|chat|it|thinking|hf|\d{4})(?=[-_.]|$)",
    re.IGNORECASE,
)
# Names of the logs at hand that are those of no one checkpoint, as they stand less their remarks.
NO_CHECKPOINT = {
    "gemma 4": "a family of five models",
    "qwen2.5": "a family of models",
    "mistralai/mistral-7b-instruct": "no such id: v0.1, v0.2 or v0.3 is not said",
    "deepseek-v4": "a family: V4-Flash or V4-Pro is not said",
    "gemma 3 27b 4 bit": "whose upload and which method is not said",
    "qwen 35b-a3b": "Qwen3.5 or Qwen3.6 is not said, nor which method",
    "qwen3.6-27b-autoround": "the folder of a deployment: several publishers have such an upload",
    "qwen3.6-27b-autoround-int4": "the folder of a deployment: several publishers have such an upload",
}


def models(paths: Iterable[Path]) -> Iterator[str]:
    """What the rows call their model, less remarks and revisions."""
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            model = json.loads(line).get("model")
            if isinstance(model, str) and model.strip():
                yield model if DESCRIPTION.search(model) else REMARK.sub("", model).strip()


def why_not_public(name: str) -> str | None:
    """Why a name is that of no public checkpoint; None where it is one."""
    if DESCRIPTION.search(name):
        return "a description"
    if FOLDER.search(name) and entry(name) is None:
        return "a folder of its own machine"
    return NO_CHECKPOINT.get(name.lower())


def names(paths: Iterable[Path]) -> list[str]:
    """The public models that the rows name, each once; of two spellings a Hub id rather than a bare name."""
    seen: dict[str, str] = {}
    public = [name for name in models(paths) if why_not_public(name) is None]
    ids = {plain(name): name for name in reversed(public) if "/" in name}
    for name in public:
        whole = ids.get(plain(name), name) if "/" not in name or FOLDER.search(name) else name
        seen.setdefault(entry(whole) or spelled(whole), whole)
    return list(seen.values())


def plain(name: str) -> str:
    """A name's last part, in lower case, with dashes."""
    return spelled(re.split(r"[/\\]", name.rstrip("/\\"))[-1])


def spelled(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.lower())


def entry(name: str) -> str | None:
    """The catalog's entry of a model; a bare name, or a folder's, may be any publisher's."""
    known = catalog.find(name)
    if known is not None or ("/" in name and not FOLDER.search(name)):
        return known
    return catalog.find(plain(name)) or by_last_part().get(plain(name))


@cache
def by_last_part() -> dict[str, str]:
    """Entries by the names of their checkpoints without the publishers; the model's own id first."""
    parts: dict[str, str] = {}
    every = [(name, catalog.facts(name)) for name in catalog.model_names()]
    for name, facts in every:
        parts.setdefault(plain(facts["id"]), name)
    for name, facts in every:
        for alias in facts.get("aliases", ()):
            parts.setdefault(plain(alias), name)
    return parts


def siblings(name: str) -> Iterator[str]:
    """Entries of the same model at another precision or training."""
    stem = VARIANT.sub("", plain(name))
    for own, known in by_last_part().items():
        if VARIANT.sub("", own) == stem:
            yield known


# What a draft's classes were compared by: its target's rows, not configs of their own.
DRAFTS = "a draft: sized with its target (tests/facts/draft_architectures.jsonl, speculation.jsonl)"


def verdict(row: dict[str, Any]) -> tuple[str, str, str]:
    """(state, whose config, why) of a class."""
    from tests.support.architectures import outcome

    if "results" not in row:
        return "not compared", "-", DRAFTS if row["section"] == "draft" else row["why"]
    state, why = outcome(row)
    name = {"equal": "compared", "refused by name": "refused", "different": "different"}[state]
    return name, row["config_kind"], why.replace("config.json: ", "")


def of_sglang() -> Iterator[tuple[str, tuple[str, str, str]]]:
    """(class, (state, whose config, why)) of each of SGLang's with a row of its own answers."""
    from tests.support import architectures_sglang as own

    for row in own.rows():
        state, why = own.outcome(row) if "ranks" in row else ("", row.get("why", "not asked"))
        name = {"equal": "compared", "refused by name": "refused", "different": "different"}.get(state, "not compared")
        starts = all("failed" not in answer for answer in row.get("ranks", ()))
        name = "refuses it" if name == "compared" and not starts else name
        yield row["architecture"], (name, row.get("kind", "-"), why.replace("config.json: ", ""))


def registry() -> int:
    """Print the state of every class of both registries, and count them by section and by whose config it was."""
    from tests.support.architectures import rows

    counts: Counter[tuple[str, str, str]] = Counter()
    states: dict[str, str] = {}
    for row in rows():
        state, kind, why = verdict(row)
        counts[row["section"], state, kind] += 1
        states[row["architecture"]] = state
        print(f"vllm    {row['section']:12s} {row['architecture']:50s} {state:12s} {kind:10s} {why[:150]}".rstrip())
    names = SGLANG.read_text(encoding="utf-8").splitlines()
    own = dict(of_sglang())
    for name, _, words in (line.partition(" ") for line in names):
        state, kind, why = own.get(name, ("not compared", "-", ""))
        if words.startswith("compared") and state != "compared":
            state, why = "compared", "by another row"
        counts["sglang", state, kind] += 1
        print(f"sglang  {'-':12s} {name:50s} {state:12s} {kind:10s} {why[:150]}".rstrip())
    for section in dict.fromkeys(section for section, _, _ in counts if section != "sglang"):
        parts = {(state, kind): n for (own, state, kind), n in counts.items() if own == section}
        kinds = ", ".join(f"{n} {state}" + (f" ({kind})" if kind != "-" else "") for (state, kind), n in parts.items())
        print(f"vllm {section}: {sum(parts.values())}: {kinds}")
    both = [key for key in counts if key[0] in ("text", "multimodal")]
    equal = {kind: sum(counts[key] for key in both if key[1:] == ("compared", kind)) for kind in KINDS}
    total = sum(counts[key] for key in both)
    print(f"vllm text and multimodal: {sum(equal.values())} of {total} sized and compared: {equal}")
    words = Counter(state for section, state, _ in counts.elements() if section == "sglang")
    print(f"sglang: {words['compared']} of {len(names)} compared with SGLang's own code: {dict(words)}")
    return int(any(state == "different" for _, state, _ in counts))


KINDS = ("published", "defaults", "pieces")
SGLANG = Path(__file__).parents[1] / "kvplan" / "servers" / "sglang" / "registry.txt"


def main(paths: list[Path]) -> int:
    every = names(paths)
    missing = [name for name in every if entry(name) is None]
    unnamed = {name: why for name in models(paths) if (why := why_not_public(name)) is not None and why[0] == "a"}
    unnamed |= {name: NO_CHECKPOINT[name.lower()] for name in models(paths) if name.lower() in NO_CHECKPOINT}
    for name in sorted(missing, key=str.lower):
        near = sorted(set(siblings(name)))
        print(f"not covered: {name}" + (f" (of the same model: {', '.join(near[:3])})" if near else ""))
    for name in sorted(unnamed, key=str.lower):
        print(f"no checkpoint: {name} ({unnamed[name]})")
    covered = len(every) - len(missing)
    others = sum(1 for name in missing if any(siblings(name)))
    share = 100 * covered / max(len(every), 1)
    print(
        f"{covered} of {len(every)} distinct public models in the catalog ({share:.1f}%), {others} by a sibling alone"
    )
    return 0


if __name__ == "__main__":
    sys.exit(registry() if sys.argv[1:] == ["--registry"] else main([Path(name) for name in sys.argv[1:]]))
