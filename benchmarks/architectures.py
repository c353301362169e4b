"""Make tests/facts/architectures.jsonl of the answers of vLLM's own code.

    python -m benchmarks.architectures ORACLE KIND=FOLDER:ROWS.jsonl...

ORACLE is a folder with the server's code (`vllm-src`), as for benchmarks/registries.py. ROWS answer, on one GPU and on
two, cases about configs in FOLDER, each in a folder named after its class, or for KIND `published` after an entry of
the catalog. A class has the first of the kinds, published before defaults before pieces, that the server answers; one
without a new answer keeps its row. Prints what has none, and why.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvplan.models import catalog
from tests.oracles import OUT_OF_REACH
from tests.support.architectures import FACTS, outcome

SECTIONS = {
    "_TEXT_GENERATION_MODELS": "text", "_MULTIMODAL_MODELS": "multimodal", "_EMBEDDING_MODELS": "pooling",
    "_LATE_INTERACTION_MODELS": "pooling", "_REWARD_MODELS": "pooling", "_TOKEN_CLASSIFICATION_MODELS": "pooling",
    "_SEQUENCE_CLASSIFICATION_MODELS": "pooling", "_SPECULATIVE_DECODING_MODELS": "draft",
    "_TRANSFORMERS_SUPPORTED_MODELS": "transformers", "_TRANSFORMERS_BACKEND_MODELS": "backend",
}  # fmt: skip
# Keys of every config of transformers that say nothing about sizes.
IRRELEVANT = re.compile(
    r"_name_or_path|.*dropout|.*_token_id|.*_token_index|id2label|label2id|output_(attentions|hidden_states|router_logits)|problem_type|"
    r"return_dict|use_cache|"
    r"initializer_\w+|chunk_size_feed_forward|is_encoder_decoder|transformers_version|.*_act|.*_aux_loss_coef|"
    r"\w*norm_eps|layer_norm_epsilon|layerdrop|.*_multiplier|.*_coef|logits?_scal\w+|time_step_\w+|.*_init(ializer)?_\w+"
)
KINDS = ("published", "defaults", "pieces")
OUTCOMES = ("refused", "different")
UNKNOWN = "no config: its class of config lies in the checkpoint's own code"
KEPT = ("mm_", "activation_function")


def registry(home: Path) -> dict[str, str]:
    """Architecture -> its section of vLLM's registry; the first that names it."""
    source = (home / "vllm-src/vllm/model_executor/models/registry.py").read_text(encoding="utf-8")
    tables = {
        node.targets[0].id: node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)
    }
    sections: dict[str, str] = {}
    for table in sorted(SECTIONS, key=lambda name: SECTIONS[name] not in ("text", "multimodal")):
        for key in tables[table].keys if table in tables else ():
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                sections.setdefault(key.value, SECTIONS[table])
    return sections


def reduced(values: dict[str, Any]) -> dict[str, Any]:
    """A config without what is null or says nothing about sizes; a null window is none, a missing one the class's."""
    relevant = {k: v for k, v in values.items() if v is not None or k == "sliding_window"}
    relevant = {k: v for k, v in relevant.items() if k.startswith(KEPT) or not IRRELEVANT.fullmatch(k)}
    return {k: reduced(v) if isinstance(v, dict) else v for k, v in relevant.items()}


def figures(row: dict[str, Any]) -> dict[str, Any]:
    if "failed" in row:
        return {"failed": row["failed"].splitlines()[0][:120]}
    tables = {"tables": row["weights"]["tables"]} if "tables" in row["weights"] else {}
    names = ("available_memory", "num_gpu_blocks", "kv_cache_size_tokens", "max_concurrency", "error")
    results = [{name: result[name] for name in names if name in result} for result in row.get("results", ())]
    for result in results:
        if "error" in result:
            result["error"] = result["error"][:60]
    groups = [[group["kind"], group["num_layers"], group["page_size_bytes"]] for group in row.get("groups", ())]
    return {"weights": row["weights"]["param_bytes_per_rank"], **tables, "groups": groups, "blocks": results}


def answers(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(architecture, row) of each model that the server answers; (architecture, {"why"}) of the others."""
    kind, _, places = source.partition("=")
    folder, _, file = places.partition(":")
    by_model: dict[str, dict[int, dict[str, Any]]] = {}
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_model.setdefault(row["inputs"]["model"], {})[int(row["inputs"].get("tp", 1))] = row
    for model, by_ranks in by_model.items():
        both = [by_ranks[ranks] for ranks in sorted(by_ranks)]
        config = json.loads((Path(folder) / model / "config.json").read_text(encoding="utf-8"))
        architecture = config["architectures"][0]
        failure = both[0].get("failed", "")
        if failure or len(both) < 2:
            reach = "the oracle does not reach it" if any(text in failure for text in OUT_OF_REACH) else "refused"
            yield architecture, {"why": f"{kind}: {reach}: {failure.splitlines()[0][:100] if failure else 'one rank'}"}
            continue
        entry = catalog.find(model.replace("__", "/")) if kind == "published" else None
        own = entry is not None and catalog.load(entry).architecture == architecture
        stored: dict[str, Any] = {"model": entry} if own else {"config": reduced(config)}
        if flags := both[0]["inputs"].get("engine_args"):
            stored["flags"] = {k: json.dumps(v) if isinstance(v, dict) else v for k, v in flags.items()}
        yield architecture, {"config_kind": kind, **stored, "results": [figures(row) for row in both]}


def better(row: dict[str, Any], known: dict[str, Any]) -> bool:
    """True for the first row that is answered, the first that is on two GPUs, and one of a better kind."""
    if "results" not in known or "results" not in row:
        return "results" not in known
    failed, was = ("failed" in answer["results"][-1] for answer in (row, known))
    return failed < was or (failed == was and KINDS.index(row["config_kind"]) < KINDS.index(known["config_kind"]))


def main(home: Path, sources: list[str]) -> int:
    stored = map(json.loads, FACTS.read_text(encoding="utf-8").splitlines())
    answered = {row["architecture"]: {k: v for k, v in row.items() if k not in OUTCOMES} for row in stored}
    for source in sources:
        for architecture, row in answers(source):
            if better(row, answered.get(architecture, {})):
                answered[architecture] = row
    lines = []
    for architecture, section in registry(home).items():
        row = answered.get(architecture, {"why": UNKNOWN})
        row = {"architecture": architecture, "section": section, **row}
        if "results" in row:
            verdict, why = outcome(row)
            if verdict != "equal":
                print(f"{architecture}: {verdict}: {why[:160]}")
                row |= {"refused": True} if verdict == "refused by name" else {"different": why[:200]}
        lines.append(json.dumps(row))
    FACTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
