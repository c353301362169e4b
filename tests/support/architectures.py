"""Rows of tests/facts/architectures.jsonl: what vLLM 0.33 makes of a config of each class in its registry.

A row with `results` has, for one GPU and for two, bytes of parameters per rank, groups of layers of the KV cache (kind,
layers, bytes of a page), and blocks, tokens and concurrency for two sizes of it; or the server's `failed`. Its kind
says whose the config is: "published" (of the catalog's entry, or of the checkpoint that `source` names), "defaults"
(transformers' class's) or "pieces" (from the keys that vLLM's class reads, where the checkpoint's own code has the
config class). `why` says why there are none, `flags` what the server was started with (it builds the class with no
other), `tables` a result's bytes of positions that the class makes, which the server counts as buffers and not as
parameters. Tables of n-grams that lie in host memory are left out.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.hf_config import read_config
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Request
from kvplan.servers.words.arguments import EngineArgs, left_out
from kvplan.servers.words.command import Repeated
from tests import oracles

FACTS = Path(__file__).parents[1] / "facts" / "architectures.jsonl"
Row = dict[str, Any]


@cache
def rows() -> list[Row]:
    return [json.loads(line) for line in FACTS.read_text(encoding="utf-8").splitlines()]


def spec_of(row: Row) -> ModelSpec:
    if "model" in row:
        return catalog.load(row["model"])
    return read_config(row["config"], "config.json", row["architecture"])


def request_of(row: Row, ranks: int) -> Request:
    args = EngineArgs(**left_out("vllm") | {"tensor_parallel_size": ranks, "usage": "server"} | row.get("flags", {}))
    return Request(spec_of(row), gpu("h100-80g"), args, repeated=Repeated("vllm"))


def refusal_of(request: Request) -> str | None:
    try:
        return oracles.not_started(request)
    except KvplanError as error:
        return str(error)


def differences(row: Row) -> list[str]:
    """What differs from the server on one GPU and on two. Raise KvplanError if kvplan refuses the config by name."""
    wrong: list[str] = []
    for ranks, answer in enumerate(row["results"], 1):
        request = request_of(row, ranks)
        refusal = refusal_of(request) if "failed" in answer else oracles.not_started(request)
        if "failed" in answer:
            wrong += [] if refusal else [f"tp {ranks}: planned, and the server refuses: {answer['failed']}"]
            continue
        if refusal:
            wrong.append(f"tp {ranks}: refused ({refusal})")
            continue
        weights = answer["weights"] + answer.get("tables", 0)
        wrong += oracles.weight_differences(request, {"param_bytes_per_rank": weights})
        wrong += [text for result in answer["blocks"] for text in oracles.result_differences(request, result)]
    return wrong


def outcome(row: Row) -> tuple[str, str]:
    """equal, refused by name or different, and why."""
    try:
        wrong = differences(row)
    except KvplanError as error:
        return oracles.REFUSED, str(error)
    return (oracles.DIFFERENT, "; ".join(wrong)) if wrong else (oracles.EQUAL, "")
