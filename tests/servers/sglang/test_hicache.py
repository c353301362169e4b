"""SGLang's hierarchical cache against SGLang 0.5.23's own code: its GPU pools and the sizes of its host pools."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog, hf_config
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Plan, Request, host_rows, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.sglang import hicache
from kvplan.servers.sglang import pool as sglang_pool
from kvplan.servers.sglang import rules as sglang
from kvplan.servers.words.arguments import EngineArgs
from tests import oracles
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.oracle_data import DATA, needs_oracle_data

FACTS = Path(__file__).parents[2] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "hicache.jsonl").read_text().splitlines()]
NOT_SIZED = ("Step-3.7", "qwen3.5-27b", "deepseek-v3.2", "--offload-group-size")  # refused by name


def name_of(row: dict[str, Any]) -> str:
    inputs = row["inputs"]
    return f"{inputs['model']} {inputs.get('tp', 1)} {inputs.get('gpu', 'H100')} {' '.join(inputs['argv'])}"


def spec_of(name: str) -> ModelSpec:
    return catalog.load(name) if "__" not in name else hf_config.load_spec(DATA / "models" / name)


def is_ours(row: dict[str, Any]) -> bool:
    return "__" not in row["inputs"]["model"]


def check(row: dict[str, Any]) -> None:
    outcome, why = oracles.compare_sglang(row, spec_of)
    if "failed" not in row and any(word in json.dumps(row["inputs"]) for word in NOT_SIZED):
        with pytest.raises(KvplanError):  # of some the pool on the GPU is equal, and the host's is not sized
            plan(oracles.sglang_request(row["inputs"], spec_of(row["inputs"]["model"])))
        assert outcome != oracles.DIFFERENT
        return
    assert (outcome, why) == (oracles.EQUAL, [])
    if "failed" in row or "--enable-hierarchical-cache" not in row["inputs"]["argv"]:
        return
    request = oracles.sglang_request(row["inputs"], spec_of(row["inputs"]["model"]))
    settings = sglang.resolve(request.spec, request.gpu, request.args, request.release)
    layout = sglang_pool.pool(request.spec, settings, request.args, request.gpu.sm)
    images = sglang.image_reservation(request.spec, request.gpu, request.args, request.release)
    for result in row["results"]:
        pages = sglang_pool.pages_in(layout, request.args, [result["available_memory"] - images])[0]
        pools = hicache.host_pools(layout, request.args, request.release, pages)
        assert [{"tokens": pool.tokens, "bytes": pool.size} for pool in pools] == result["host"]


@pytest.mark.parametrize("row", [row for row in ROWS if is_ours(row)], ids=name_of)
def test_answers_what_sglang_answers(row: dict[str, Any]) -> None:
    check(row)


@needs_oracle_data
@pytest.mark.parametrize("row", [row for row in ROWS if not is_ours(row)], ids=name_of)
def test_answers_what_sglang_answers_for_other_configs(row: dict[str, Any]) -> None:
    check(row)


def test_many_pools_are_compared() -> None:
    assert len([result for row in ROWS for result in row.get("results", ()) if "host" in result]) >= 40


def planned(model: str, engine: str = "sglang", **args: Any) -> Plan:
    arguments = EngineArgs(enable_hierarchical_cache=True, **args)
    return plan(Request(catalog.load(model), gpu("h100-80g"), arguments, parse_engine(engine)))


def test_a_ratio_is_taken_of_the_tokens_on_the_gpu() -> None:
    answer = planned("llama-3.1-8b", hicache_ratio=3.0)
    row = next(row for row in host_rows(answer) if row.name == "kv_offloading")
    assert row.tokens == 3 * answer.capacity.tokens + 1
    assert (row.size, row.per) == (row.tokens * 131_072, "rank")  # 32 layers x 8 heads x 128 x 2 x 2 B
    assert "equal" in row.compared


def test_an_older_release_has_no_page_more() -> None:
    # sglang 0.5.2 memory_pool_host.py: self.size - (self.size % self.page_size)
    answer = planned("llama-3.1-8b", "sglang@0.5.2", hicache_ratio=3.0)
    assert next(row for row in host_rows(answer) if row.name == "kv_offloading").tokens == 3 * answer.capacity.tokens


def test_a_default_is_said_to_be_the_most_it_takes(run: Run) -> None:
    ran = run("estimate", "llama-3.1-8b", "--engine", "sglang", "--gpu", "h100-80g", "--enable-hierarchical-cache")
    assert ran.code == 0
    assert "2 x the GPU's at most" in ran.err
    assert "--enable-hierarchical-cache" in ran.out


@pytest.mark.parametrize(
    ("model", "args", "error", "match"),
    [
        ("llama-3.1-8b", {"enable_prefix_caching": False}, UsageError, "mutually exclusive"),
        ("qwen3.5-27b", {}, UnsupportedModelError, "recurrent states"),
        ("deepseek-v3.2", {"tensor_parallel_size": 8}, KvplanError, "sparse index"),
    ],
)
def test_what_is_not_sized_is_refused_by_name(
    model: str, args: dict[str, Any], error: type[KvplanError], match: str
) -> None:
    with pytest.raises(error, match=match):
        planned(model, **args)


def test_vllm_has_none() -> None:
    with pytest.raises(UsageError, match="flag of SGLang"):
        planned("llama-3.1-8b", "vllm")
