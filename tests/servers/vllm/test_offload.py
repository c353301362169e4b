"""Weights on the host, sleep mode, split KV caches and KV dtypes against vLLM 0.33's own code."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog, hf_config
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Plan, Request, host_rows, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.vllm import offload
from kvplan.servers.words.arguments import EngineArgs
from tests import oracles
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.oracle_data import DATA, needs_oracle_data

GIB = 2**30
FACTS = Path(__file__).parents[2] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "offload.jsonl").read_text().splitlines()]
NOT_SIZED = ("cpu_offload_params", "kv_cache_dtype_skip_layers")  # refused by name
# Where vLLM's classes make a layer's small parameters in another order, the last one offloaded is another.
NEAR = {"qwen3-vl-8b": 0.011, "qwen3-next-80b-a3b": 0.000002}


def name_of(row: dict[str, Any]) -> str:
    words = ("gpu", "tp", "pp", "kv_cache_dtype", "engine_args")
    return f"{row['inputs']['model']} {json.dumps([row['inputs'][word] for word in words if word in row['inputs']])}"[
        :150
    ]


def spec_of(name: str) -> ModelSpec:
    return catalog.load(name) if "__" not in name else hf_config.load_spec(DATA / "models" / name)


def is_ours(row: dict[str, Any]) -> bool:
    return "__" not in row["inputs"]["model"]


def check(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles, "spec_in", lambda folder: spec_of(folder.name))
    outcome, why = oracles.compare_case(row, Path())
    if "failed" not in row and any(word in json.dumps(row["inputs"]) for word in NOT_SIZED):
        assert outcome == oracles.REFUSED
        return
    assert (outcome, why) == (oracles.EQUAL, [])
    for stage, expected in enumerate(row.get("offloaded", ())):
        moved = offload.offloaded(oracles.case_request(row, Path()), stage)
        assert moved is not None
        near = NEAR.get(row["inputs"]["model"], 0)
        assert moved.size == pytest.approx(expected["host"], rel=near, abs=0)
        assert moved.buffers == expected["buffers"]


@pytest.mark.parametrize("row", [row for row in ROWS if is_ours(row)], ids=name_of)
def test_answers_what_vllm_answers(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool of each stated size, the weights, and what its own offloaders keep on the host; or its refusal."""
    check(row, monkeypatch)


@needs_oracle_data
@pytest.mark.parametrize("row", [row for row in ROWS if not is_ours(row)], ids=name_of)
def test_answers_what_vllm_answers_for_other_configs(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(row, monkeypatch)


def test_many_offloads_are_compared() -> None:
    assert len([row for row in ROWS if "offloaded" in row]) >= 25


def planned(model: str, engine: str = "vllm", machine: str = "h100-80g", **args: Any) -> Plan:
    return plan(
        Request(catalog.load(model), gpu(machine), EngineArgs(max_model_len=8192, **args), parse_engine(engine))
    )


def test_offloaded_weights_leave_room_for_the_cache() -> None:
    """70 B parameters in 16 bits do not fit one H100; 80 GiB of them on the host do."""
    plain, moved = planned("llama-3.1-70b"), planned("llama-3.1-70b", cpu_offload_gb=80 * GIB)
    assert (plain.fits, moved.fits) == (False, True)
    host = next(row for row in host_rows(moved) if row.name == "weights")
    size = plain.memory.weights - moved.memory.weights
    assert 80 * GIB <= size < 81 * GIB
    # 160, 128, 896 and 448 MiB of a layer are pinned in 256, 128, 1,024 and 512
    assert host.size / size == pytest.approx(1920 / 1632, rel=0.02)
    assert (host.per, "own offloaders" in host.compared) == ("rank", True)


def test_buffers_that_layers_are_fetched_into_are_a_row() -> None:
    # vLLM 0.33: 8 of 32 layers of 436,224,000 B, one at a time.
    plain = planned("llama-3.1-8b")
    moved = planned("llama-3.1-8b", offload_group_size=4)
    assert plain.memory.weights - moved.memory.weights == 8 * 436_224_000
    assert moved.memory.buffers - plain.memory.buffers == 436_224_000


def test_a_group_of_no_layers_offloads_nothing(run: Run) -> None:
    ran = run("estimate", "--from-command", "vllm serve llama-3.1-8b --offload-group-size 0", "--gpu", "h100-80g")
    assert ran.code == 0
    assert "kept on the host" not in ran.err


def test_an_older_release_does_not_fetch_weights() -> None:
    with pytest.raises(UsageError, match=r"vllm@0\.16 does not support it"):
        planned("llama-3.1-8b", "vllm@0.16", offload_group_size=4)


def test_stated_weights_cannot_be_offloaded_in_part() -> None:
    request = Request(
        catalog.load("llama-3.1-8b"), gpu("h100-80g"), EngineArgs(cpu_offload_gb=GIB), weights_bytes=16 * GIB
    )
    with pytest.raises(UnsupportedModelError, match="layers are not told apart"):
        plan(request)


def test_a_sleeping_server_keeps_its_weights_on_the_host() -> None:
    plain, sleeping = planned("llama-3.1-8b"), planned("llama-3.1-8b", enable_sleep_mode=True)
    assert sleeping.capacity == plain.capacity
    host = next(row for row in host_rows(sleeping) if row.name == "weights")
    assert host.size > plain.memory.weights  # whole segments, pinned in powers of two (tests/sizing/test_pinned.py)
    assert host.compared == ""
    assert any(note.startswith("sleep mode: ") for note in sleeping.notes)


@pytest.mark.parametrize("name", ["MooncakeStoreConnector", "NixlPushConnector"])
def test_a_connector_that_does_not_sleep_is_refused(name: str) -> None:
    # vLLM 0.33: "MooncakeStoreConnector does not support sleep mode."
    config = json.dumps({"kv_connector": name, "kv_role": "kv_both"})
    with pytest.raises(UsageError, match=f"{name} does not support sleep mode"):
        planned("llama-3.1-8b", enable_sleep_mode=True, kv_transfer_config=config)


def test_an_interleave_divides_the_block() -> None:
    # vLLM 0.33 config/vllm.py (validate_block_size)
    common: dict[str, Any] = {"tensor_parallel_size": 4, "decode_context_parallel_size": 4}
    usual = planned("deepseek-v2-lite", **common)
    assert planned("deepseek-v2-lite", cp_kv_cache_interleave_size=16, **common).capacity == usual.capacity
    with pytest.raises(UsageError, match=r"Block_size\(16\) should be"):
        planned("deepseek-v2-lite", cp_kv_cache_interleave_size=32, **common)


def test_flags_are_read_and_printed(run: Run) -> None:
    command = "vllm serve llama-3.1-8b --max-model-len 8192 --cpu-offload-gb 4.5 --enable-sleep-mode"
    ran = run("estimate", "--from-command", command, "--gpu", "h100-80g")
    assert ran.code == 0
    assert "--cpu-offload-gb 4.5" in ran.out
    assert "kept on the host and read over the bus" in ran.err
    ran = run("estimate", "llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k", "--offload-group-size", "8", "--explain")
    assert "weights: " in ran.out
    assert "to fetch offloaded weights into" in ran.out


def test_what_sglang_lacks_is_refused_by_name() -> None:
    with pytest.raises(KvplanError):
        planned("llama-3.1-8b", "sglang", offload_backend="uva")


def test_a_group_that_offloads_all_its_layers_is_the_whole_model() -> None:
    moved = planned("qwen3-0.6b", offload_group_size=28, offload_num_in_group=28)
    outside = replace(moved.request, args=EngineArgs(max_model_len=8192))
    assert moved.memory.weights < plan(outside).memory.weights / 2
