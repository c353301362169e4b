"""Entries made from a sibling, against vLLM 0.33's own parameters and what servers logged of the checkpoint itself.

tests/facts/catalog_weights.jsonl: bytes of the parameters that vLLM makes of the entry's config on one H100; `buffers`
are routing biases, which it keeps beside its parameters. tests/facts/logged_weights.jsonl: what public logs say that
loading the published checkpoint took. tests/facts/tower_weights.jsonl: models with towers, on one and two GPUs.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.base import parse_engine

FACTS = Path(__file__).parents[1] / "facts"
GIB = 2**30


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FACTS / name).read_text(encoding="utf-8").splitlines()]


def weights(model: str, device: str = "h100-80g", engine: str = "vllm@0.33", **args: Any) -> int:
    flags = EngineArgs(**{"max_model_len": 1024, "max_num_seqs": 8, **args})
    return plan(Request(catalog.load(model), gpu(device), flags, parse_engine(engine))).memory.weights


@pytest.mark.parametrize("row", rows("catalog_weights.jsonl"), ids=lambda row: str(row["model"]))
def test_weights_are_the_bytes_of_the_servers_parameters(row: dict[str, Any]) -> None:
    assert weights(row["model"]) == row["param_bytes_per_rank"] + row.get("buffers", 0)


@pytest.mark.parametrize("row", rows("tower_weights.jsonl"), ids=lambda row: f"{row['model']} tp {row['tp']}")
def test_a_model_with_a_tower_weighs_what_the_server_holds_on_a_rank(row: dict[str, Any]) -> None:
    assert weights(row["model"], tensor_parallel_size=row["tp"]) == row["param_bytes_per_rank"]


# What a load takes beside the parameters: workspaces and buffers of adapters, and two decimals of a GiB. They show
# in checkpoints below a GiB.
BESIDE = 0.045
ENGINES = {"vllm": "vllm@0.33", "sglang": "sglang@0.5.9"}


@pytest.mark.parametrize("row", rows("logged_weights.jsonl"), ids=lambda row: f"{row['model']} {row['server']}")
def test_weights_are_what_public_logs_say_of_the_published_checkpoint(row: dict[str, Any]) -> None:
    args = {"tensor_parallel_size": row["tp"], "max_model_len": row.get("max_model_len", 1024), **row.get("args", {})}
    sized = weights(row["model"], row.get("gpu", "h200"), ENGINES[row["server"]], **args)
    logged = row["logged_gib"] * GIB
    assert abs(sized - logged) <= max(0.0106 * logged, BESIDE * GIB)


def test_gptq_in_8_bits_stores_a_byte_a_weight_with_scales_and_zeros_per_group() -> None:
    """vLLM 0.33 makes 8,858,881,024 bytes of parameters of Qwen2-7B-Instruct-GPTQ-Int8."""
    assert weights("qwen2-7b-gptq-int8") == 8_858_881_024
    assert weights("qwen2-7b-gptq-int8") > weights("qwen2-7b-instruct") / 2
