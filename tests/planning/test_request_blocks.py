"""What a request takes before its first token and per token, against vLLM's own groups and scheduler.

tests/facts/request_blocks.jsonl: blocks of each of vLLM 0.33's KV groups for one request of max_model_len tokens
(max_memory_usage_bytes), and runs of its scheduler with requests of one token: the most that ran at once.
"""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.units import GIB
from kvplan.documents.artifact import plan_document
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Plan, Request, plan
from kvplan.planning.users import request_blocks
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

ROWS: list[dict[str, Any]] = [
    json.loads(row) for row in (Path(__file__).parents[1] / "facts" / "request_blocks.jsonl").read_text().splitlines()
]
CHARGES = [row for row in ROWS if "groups" in row]
MOST = [row for row in ROWS if "most" in row]
GROWING, WINDOWS = (
    ("full_attention", "mla_attention"),
    ("sliding_window", "sliding_window_mla", "chunked_local_attention"),
)


# An H100 on which every model fits: blocks depend on its kernels, not on its memory.
H100 = replace(gpu("h100-80g"), total_memory=4096 * GIB, total_memory_low=4096 * GIB, total_memory_high=4096 * GIB)


def planned(model: str, engine: str = "vllm@0.33", **args: Any) -> Plan:
    return plan(Request(catalog.load(model), H100, EngineArgs(**args), release=parse_engine(engine)))


@pytest.mark.parametrize("row", CHARGES, ids=[f"{row['model']}-{row['args']['max_model_len']}" for row in CHARGES])
def test_a_request_takes_what_vllm_charges_it(row: dict[str, Any]) -> None:
    taken = request_blocks(planned(row["model"], **row["args"]))
    groups = row["groups"]
    if all(kind in GROWING for kind, _, _ in groups):
        assert taken is None  # the log line's tokens are the whole truth
        return
    assert taken is not None
    assert taken.windows == sum(blocks for kind, _, blocks in groups if kind in WINDOWS)
    assert taken.fixed == sum(blocks for kind, _, blocks in groups if kind not in WINDOWS + GROWING)
    assert taken.growth == sum(Fraction(1, size) for kind, size, _ in groups if kind in GROWING)


@pytest.mark.parametrize("row", MOST, ids=[row["model"] for row in MOST])
def test_no_more_requests_run_than_the_pool_holds_of_the_shortest(row: dict[str, Any]) -> None:
    # A server with states refuses more sequences than blocks; the scheduler alone was run with 1,024.
    args = {**row["args"], "num_gpu_blocks_override": row["num_blocks"], "max_num_seqs": 64}
    taken = request_blocks(planned(row["model"], **args))
    assert taken is not None
    assert taken.most_requests == row["most"]


def test_the_answer_says_what_a_request_takes_beside_the_log_line(run: Run) -> None:
    # 36 states in 3 groups of 12, each 3 blocks before the first token and 1 after it; 12 layers grow: 1,200 blocks
    # less the null block hold 1,199 // (3 + 1) requests of one token.
    args = "--tp 4 --ctx 32k --num-gpu-blocks-override 1200 --max-num-seqs 256 --gpu h100-80g --offline"
    out = run("estimate", "qwen3-next-80b-a3b", *args.split()).out
    assert "  request     9 blocks before its first token (0.75% of the pool; 3 while decoding), then 1 block" in out
    assert "at most 299 requests at once, however short (--max-num-seqs allows 256)" in out


def test_windows_are_a_maximum_and_a_window_pool_is_not_named() -> None:
    gpt = plan_document(planned("gpt-oss-20b", max_model_len=131072, max_num_batched_tokens=8192))["kv"]["request"]
    # ceil((128 - 1 + 2 x 8,192) / 16) + 1, and ceil(127 / 16) + 1 once it decodes
    assert gpt is not None
    assert (gpt["fixed"], gpt["windows"], gpt["decoding"]) == (0, 1033, 9)
    assert plan_document(planned("gpt-oss-20b", "sglang@0.5", max_model_len=131072))["kv"]["request"] is None
    assert plan_document(planned("llama-3.1-8b", max_model_len=8192))["kv"]["request"] is None


def test_slots_of_states_bound_the_requests_where_they_lie_beside_the_blocks() -> None:
    answer = planned("falcon-h1-7b", "sglang@0.5", max_model_len=32768, max_mamba_cache_size=182)
    request = plan_document(answer)["kv"]["request"]
    assert request is not None
    assert (request["slots"], request["num_slots"], request["most_requests"]) == (5, 182, 36)  # 182 // 5


def test_a_plan_that_does_not_fit_says_nothing_of_requests() -> None:
    answer = plan(Request(catalog.load("qwen3-next-80b-a3b"), gpu("l4"), EngineArgs(max_model_len=8192)))
    assert plan_document(answer)["kv"]["request"] is None
