"""Prefill context parallelism of vLLM: ranks that divide a prompt, each with the weights and the whole KV cache.

tests/facts/prefill_context.jsonl: flags, and what vLLM 0.33's own capacity code and parameters answer to them.
"""

from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from tests import oracles
from tests.core.test_facts import write_configs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

CASES = oracles.read_lines(Path(__file__).parents[2] / "facts" / "prefill_context.jsonl")


def planned(model: str, engine: str = "vllm", card: str = "h200", **args: Any) -> Plan:
    engine_args = EngineArgs(**{"max_model_len": 8192, "prefill_context_parallel_size": 2, **args})
    return plan(Request(catalog.load(model), gpu(card), engine_args, parse_engine(engine)))


def test_weights_pools_and_concurrency_equal_vllms_own_code(tmp_path: Path) -> None:
    folder = write_configs(tmp_path / "configs", {case["inputs"]["model"] for case in CASES})
    assert len(CASES) >= 10
    for case in CASES:
        assert oracles.compare_case(case, folder) == (oracles.EQUAL, []), case["inputs"]


def test_experts_are_divided_and_the_pool_is_repeated() -> None:
    """Of DeepSeek-V3 on 4 x 2 ranks: the experts of 8 ranks, attention and pool per block of 4."""
    both = planned("deepseek-v3", tensor_parallel_size=4)
    four = planned("deepseek-v3", tensor_parallel_size=4, prefill_context_parallel_size=1)
    eight = planned("deepseek-v3", tensor_parallel_size=8, prefill_context_parallel_size=1)
    assert both.request.args.num_gpus == 8
    assert both.weight_groups["experts"] == eight.weight_groups["experts"]
    assert both.weight_groups["attention"] == four.weight_groups["attention"]
    assert both.capacity.bytes_per_block == four.capacity.bytes_per_block
    assert any("prefill context parallelism: 2 times the GPUs" in note for note in both.notes)


@pytest.mark.parametrize(
    ("model", "args", "problem"),
    [
        ("llama-3.1-8b", {}, "for MLA models only"),
        ("kimi-k2.5", {"tensor_parallel_size": 8}, "for text only"),
        ("deepseek-v3", {"tensor_parallel_size": 8, "max_loras": 1}, "does not support adapters"),
        ("deepseek-v3", {"tensor_parallel_size": 8, "decode_context_parallel_size": 2}, "sparse attention only"),
        ("deepseek-v3", {"tensor_parallel_size": 8, "kv_offloading_size": 2**30}, "is not modeled with"),
        ("deepseek-v3", {"tensor_parallel_size": 8, "engine": "vllm@0.32"}, r"is modeled for vllm@0\.33"),
        ("deepseek-v4-flash", {"tensor_parallel_size": 4}, "was not compared"),
        ("kimi-linear-48b-a3b", {"tensor_parallel_size": 4}, "was not compared"),
    ],
)
def test_what_vllm_refuses_with_it_is_refused(model: str, args: dict[str, Any], problem: str) -> None:
    """vLLM 0.33 v1/worker/gpu/pcp_manager.py, validate_config: "MRV2 PCP currently supports MLA models only" and so on;
    what was not compared is refused by name."""
    with pytest.raises(KvplanError, match=problem):
        planned(model, **args)


def test_a_pasted_command_is_planned_and_printed_again(run: Run) -> None:
    words = "vllm serve deepseek-ai/DeepSeek-V3 -tp 4 -pcp 2 --max-model-len 8192"
    ran = run("estimate", "--from-command", words, "--gpu", "8xh200")
    assert ran.out.startswith("deepseek-v3 on 8 x h200: ")
    assert "--tensor-parallel-size 4 --prefill-context-parallel-size 2" in ran.out
