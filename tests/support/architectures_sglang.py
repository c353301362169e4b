"""Rows of tests/facts/architectures_sglang.jsonl: what SGLang 0.5.23's own planning makes of a config of each class.

The config is that of vLLM's row of the class (tests/facts/architectures.jsonl), or of the class that `of` names, with
the keys in `changes` (null: without it), or the row's own `config`. `ranks` has the settings and pools on one H100
and on two, those of two without the settings that are equal, both without those that are null or 0; or the server's
`failed`. `weights` are the bytes of a rank's parameters in its class on torch's meta device, before anything is loaded
or converted; without it the oracle cannot build the class. `why` says why there are no ranks: the oracle plays no part
of the server that they need.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kvplan.models import catalog
from kvplan.models.hf_config import read_config
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans.weights import rank_weights
from kvplan.servers.sglang.spread import spread
from tests import oracles
from tests.support import architectures

FACTS = Path(__file__).parents[1] / "facts" / "architectures_sglang.jsonl"
BUDGET = 20_000_000_000
SETTINGS = (
    "context_len", "mem_fraction_static", "page_size", "kv_cache_dtype", "decode_max_bs", "prefill_graphs",
    "prefill_backend", "attention_backend", "mamba_ratio", "mamba_bytes_per_req", "mm_reservation_gb",
)  # fmt: skip
ANSWERS = ("max_total_num_tokens", "full", "swa", "max_running_requests", "max_mamba_cache_size", "error")
ZERO = ("prefill_graphs", "mm_reservation_gb")  # else None
Row = dict[str, Any]


@cache
def rows() -> list[Row]:
    return [json.loads(line) for line in FACTS.read_text(encoding="utf-8").splitlines()]


@cache
def others() -> dict[str, Row]:
    return {row["architecture"]: row for row in architectures.rows()}


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with changed keys, also of its parts; null removes one."""
    parts = {k: merged(config[k], v) if isinstance(v, dict) and isinstance(config.get(k), dict) else v
             for k, v in changes.items()}  # fmt: skip
    return {key: value for key, value in {**config, **parts}.items() if key not in parts or value is not None}


def config_of(row: Row) -> dict[str, Any]:
    """The config that both are asked about. Raise KeyError if there is none."""
    if "config" in row:
        return {"architectures": [row["architecture"]], **row["config"]}
    other = others()[str(row.get("of", row["architecture"]))]
    config = catalog.load(other["model"]).config if "model" in other else other["config"]
    named = (
        config
        if row["architecture"] in config.get("architectures", ())
        else {**config, "architectures": [row["architecture"]]}
    )
    return merged(named, row.get("changes", {}))


def spec_of(row: Row) -> ModelSpec:
    return read_config(config_of(row), "config.json", row["architecture"])


def answer_of(row: Row, ranks: int) -> Row:
    """The answer on so many GPUs as SGLang's oracle wrote it."""
    stored, inputs = row["ranks"][ranks - 1], {"model": row["architecture"], "tp": ranks}
    if "failed" in stored:
        return {"inputs": inputs, "failed": stored["failed"]}
    settings = {**row["ranks"][0].get("resolved", {}), **stored["resolved"]}
    resolved = {name: settings.get(name, 0 if name in ZERO else None) for name in SETTINGS}
    results = dict.fromkeys(ANSWERS[:-1]) | stored["results"] | {"available_memory": BUDGET}
    return {"inputs": inputs, "resolved": resolved, "results": [results]}


def stored(answers: list[Row]) -> list[Row]:
    """The answers on one GPU and on two as the file has them."""
    answered: list[Row] = []
    for answer in answers:
        if "failed" in answer or "quant_error" in answer:
            answered.append({"failed": str(answer.get("failed") or answer["quant_error"]).splitlines()[0][:120]})
            continue
        resolved = {name: answer["resolved"][name] for name in SETTINGS if answer["resolved"][name]}
        first = answered[0].get("resolved", {}) if answered else {}
        resolved = {k: v for k, v in resolved.items() if first.get(k) != v}
        resolved |= {name: 0 if name in ZERO else None for name in first if not answer["resolved"][name]}
        result = answer["results"][0]
        results = {name: result[name] for name in ANSWERS if result.get(name) is not None}
        weights = {"weights": answer["weights"]["params"]} if "params" in answer["weights"] else {}
        answered.append({"resolved": resolved, "results": results, **weights})
    return answered


def weights_of(row: Row) -> list[tuple[int, int]]:
    """(own bytes, the server's) of one rank, on one GPU and on two, where the server's are known."""
    spec, pairs = spec_of(row), []
    for ranks, answer in enumerate(row["ranks"], 1):
        if "weights" in answer:
            request = spread(oracles.sglang_request({"tp": ranks}, spec))
            pairs.append((sum(rank_weights(request, 0).values()), answer["weights"]))
    return pairs


def outcome(row: Row) -> tuple[str, str]:
    """equal, refused by name or different, and why."""
    both = [oracles.compare_sglang(answer_of(row, ranks), lambda _: spec_of(row)) for ranks in (1, 2)]
    for state in (oracles.NOT_ASKED, oracles.DIFFERENT, oracles.REFUSED):
        for own, reasons in both:
            if own == state:
                return state, "; ".join(reasons)
    return oracles.EQUAL, ""
