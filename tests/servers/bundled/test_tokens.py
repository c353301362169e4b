"""Tokens that the bundled engine logs for its pool, beside what vLLM 0.33 logs for a pool of as many blocks.

vLLM keeps one more state per request on GPUs whose kernels checkpoint a prompt, and keeps states in the pool without
prefix caching, too: models with states are compared where it does neither, as the engine.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.kv_cache import group_layers
from kvplan.core.errors import UnsupportedModelError
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec
from kvplan.serve.real import charged
from kvplan.servers.bundled.log_rows import num_tokens
from kvplan.servers.bundled.rules import EngineInputs
from tests.support.oracle_data import DATA, needs_oracle_data, spec_named

FACTS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "facts" / "engine_pool_tokens.jsonl").read_text().splitlines()
]


def tokens(spec: ModelSpec, row: dict[str, Any]) -> tuple[int, int]:
    """(what the planner expects, what the engine logs)."""
    block_size, context, in_flight = row["block_size"], row["max_model_len"], row["max_in_flight_tokens"]
    inputs = EngineInputs(
        total=1, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=block_size, max_model_len=context,
        max_num_seqs=1, max_num_batched_tokens=in_flight, gpu_memory_utilization=0.9, states_in_blocks=spec.has_states,
    )  # fmt: skip
    num_blocks = row["num_gpu_blocks"]
    rules = [group.rule for group in group_layers(spec, block_size, with_states=spec.has_states)]
    own = sum(charged(rule, context, in_flight) for rule in rules)
    return num_tokens(spec, inputs, num_blocks), int(num_blocks / own * context)


@pytest.mark.parametrize("row", FACTS, ids=lambda row: f"{row['model']}-{row['max_model_len']}")
def test_a_pool_has_the_tokens_that_vllm_logs(row: dict[str, Any]) -> None:
    assert tokens(catalog.load(row["model"]), row) == (row["kv_cache_size_tokens"],) * 2


def test_steps_in_flight_widen_what_a_window_is_charged() -> None:
    """gpt-oss-20b in capacity_cases_real.jsonl: 16,384 tokens in flight with two steps of 8,192."""
    row = next(row for row in FACTS if row["model"] == "gpt-oss-20b" and row["max_model_len"] == 131072)
    spec = catalog.load(row["model"])
    inputs = EngineInputs(
        total=1, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=16, max_model_len=131072, max_num_seqs=1,
        max_num_batched_tokens=row["max_in_flight_tokens"] // 2, gpu_memory_utilization=0.9,
    )  # fmt: skip
    two = num_tokens(spec, replace(inputs, batches_in_flight=2), row["num_gpu_blocks"])
    assert two == row["kv_cache_size_tokens"] < num_tokens(spec, inputs, row["num_gpu_blocks"])


@needs_oracle_data
@pytest.mark.parametrize("name", ["capacity_cases_real.jsonl", "capacity_cases_flags.jsonl"])
def test_every_pool_of_a_model_that_the_engine_runs_has_vllms_tokens(name: str) -> None:
    compared, different = 0, []
    for line in (DATA / name).read_text().splitlines():
        case = json.loads(line)
        inputs, resolved = case["inputs"], case.get("resolved", {})
        arguments = inputs.get("engine_args", {})
        has_more = {"speculative_config", "decode_context_parallel_size"} & arguments.keys()
        if has_more or inputs.get("disable_hybrid_kv_cache_manager"):
            continue
        spec = spec_named(inputs["model"])
        if spec.has_states and (resolved.get("mamba_cache_mode"), inputs.get("gpu")) != ("align", "A100"):
            continue
        for result in case.get("results", ()):
            if "num_gpu_blocks" not in result:
                continue
            row = {
                **{field: result[field] for field in ("num_gpu_blocks", "kv_cache_size_tokens", "max_model_len")},
                "block_size": resolved["block_size_after_backend"],
                "max_in_flight_tokens": resolved["max_in_flight_tokens"],
            }
            try:
                both = tokens(spec, row)
            except UnsupportedModelError:  # not a model of the engine
                break
            compared += 1
            if both != (row["kv_cache_size_tokens"],) * 2:
                different.append((inputs["model"], row, both))
    assert (different, compared > 150) == ([], True)
