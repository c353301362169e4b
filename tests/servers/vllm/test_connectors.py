"""KV connectors against vLLM 0.33's own code: the pool beside each, and the host memory that its own classes take."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.pasted import read_command
from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog, hf_config
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Plan, Request, host_rows, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from tests import oracles
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.oracle_data import DATA, needs_oracle_data

GIB = 2**30
FACTS = Path(__file__).parents[2] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "connectors.jsonl").read_text().splitlines()]
NOT_SIZED = ("FlexKV", "HF3FS", "use_layerwise", "HiSparse", "HiddenStates")  # refused by name


def name_of(row: dict[str, Any]) -> str:
    words = ("gpu", "tp", "pp", "engine_args", "enable_prefix_caching", "disable_hybrid_kv_cache_manager")
    text = json.dumps([row["inputs"][word] for word in words if word in row["inputs"]])
    return f"{row['inputs']['model']} {text}".replace("kv_connector", "").replace("_config", "")[:150]


def spec_of(name: str) -> ModelSpec:
    return catalog.load(name) if "__" not in name else hf_config.load_spec(DATA / "models" / name)


def is_ours(row: dict[str, Any]) -> bool:
    return "__" not in row["inputs"]["model"]


def is_sized(row: dict[str, Any]) -> bool:
    return not any(word in json.dumps(row["inputs"]) for word in NOT_SIZED)


def refuses(row: dict[str, Any]) -> bool:
    """Whether it is the connector that refuses, after the pool is planned."""
    return any("refused" in result for result in row.get("results", ()))


def check(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles, "spec_in", lambda folder: spec_of(folder.name))
    outcome, why = oracles.compare_case(row, Path())
    if refuses(row) or not is_sized(row):
        assert outcome == (oracles.EQUAL if "failed" in row else oracles.REFUSED)
        return
    assert (outcome, why) == (oracles.EQUAL, [])
    for result in row.get("results", ()):
        if "tiers" in result:
            request = oracles.case_request(row, Path())
            arguments = replace(request.args, kv_cache_memory_bytes=result["available_memory"])
            check_tiers(plan(replace(request, args=arguments)), result)


def check_tiers(answer: Plan, result: dict[str, Any]) -> None:
    ranks = answer.request.args.tensor_parallel_size * answer.request.args.pipeline_parallel_size
    rows = [row for row in host_rows(answer) if row.name == "kv_offloading"]
    stated = [tier for tier in result["tiers"] if tier.get("bytes") or tier.get("bytes_per_rank")]
    assert len(rows) == len(stated)
    for row, tier in zip(rows, stated, strict=True):
        assert row.size == tier.get("bytes", tier.get("bytes_per_rank", 0) * ranks)
        assert row.tokens == tier.get("tokens", row.tokens)


@pytest.mark.parametrize("row", [row for row in ROWS if is_ours(row)], ids=name_of)
def test_answers_what_vllm_answers(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, tokens and concurrency of each stated pool; chunks and tokens of the host's; or its refusal."""
    check(row, monkeypatch)


@needs_oracle_data
@pytest.mark.parametrize("row", [row for row in ROWS if not is_ours(row)], ids=name_of)
def test_answers_what_vllm_answers_for_other_configs(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(row, monkeypatch)


@needs_oracle_data
def test_no_row_of_the_oracles_data_with_a_connector_differs() -> None:
    rows = [json.loads(line) for line in (DATA / "capacity_cases_flags.jsonl").read_text().splitlines()]
    names = ("kv_transfer_config", "kv_offloading_size")
    connected = [row for row in rows if set(names) & set(row["inputs"].get("engine_args") or {})]
    assert len(connected) >= 5
    assert {oracles.compare_case(row, DATA / "models")[0] for row in connected} == {oracles.EQUAL}


def test_many_cases_are_compared() -> None:
    assert len([row for row in ROWS if is_sized(row)]) >= 60
    assert len([row for row in ROWS for result in row.get("results", ()) if "tiers" in result]) >= 60


# --- what it changes --------------------------------------------------------------------------------------------------


def connected(model: str, connector: str, engine: str = "vllm", role: str = "kv_both", **args: Any) -> Plan:
    config = json.dumps({"kv_connector": connector, "kv_role": role})
    arguments = EngineArgs(max_model_len=16384, kv_transfer_config=config, **args)
    return plan(Request(catalog.load(model), gpu("h100-80g"), arguments, parse_engine(engine)))


def test_lmcache_keeps_windows_in_full_and_nixl_does_not() -> None:
    """gpt-oss-20b: 24 layers of 8 KV heads of 64, 16 tokens a block; half of them have windows of their own."""
    full = 24 * 2 * 8 * 64 * 2 * 16
    assert connected("gpt-oss-20b", "LMCacheConnectorV1").capacity.bytes_per_block == full
    assert connected("gpt-oss-20b", "NixlConnector").capacity.bytes_per_block == full // 2
    notes = connected("gpt-oss-20b", "LMCacheConnectorV1").notes
    assert any("turns the hybrid KV cache manager off" in note for note in notes)


@pytest.mark.parametrize(("engine", "groups"), [("vllm@0.21", 1), ("vllm@0.22", 2)])
def test_before_0_22_every_connector_turned_the_hybrid_manager_off(engine: str, groups: int) -> None:
    # vLLM 0.21 and 0.22 config/vllm.py, read in the wheels
    assert len(connected("gpt-oss-20b", "NixlConnector", engine).pool.groups) == groups


def test_a_wish_keeps_groups_from_0_14_on() -> None:
    hybrid = connected("gpt-oss-20b", "NixlConnector", "vllm@0.19", disable_hybrid_kv_cache_manager=False)
    off = connected("gpt-oss-20b", "NixlConnector", "vllm@0.11", disable_hybrid_kv_cache_manager=False)
    assert (len(hybrid.pool.groups), len(off.pool.groups)) == (2, 1)


def test_a_wish_for_groups_that_a_connector_has_not_is_refused() -> None:
    # factory.py (create_connector): "Connector LMCacheConnectorV1 does not support HMA but HMA is enabled."
    with pytest.raises(UsageError, match="LMCacheConnectorV1 does not support the hybrid KV cache manager"):
        connected("gpt-oss-20b", "LMCacheConnectorV1", disable_hybrid_kv_cache_manager=False)


def test_recurrent_states_do_not_run_beside_lmcache() -> None:
    with pytest.raises(UsageError, match="Failed to promote local KV cache specs"):
        connected("qwen3.5-27b", "LMCacheConnectorV1")


def test_lmcache_takes_its_buffer_in_every_rank() -> None:
    """LMCache/LMCache#2901: max_local_cpu_size 50 and one rank of Llama-3.1-8B hold 409,600 tokens."""
    answer = connected("llama-3.1-8b", "LMCacheConnectorV1", lmcache_max_local_cpu_size=50 * GIB)
    row = next(row for row in host_rows(answer) if row.name == "kv_offloading")
    assert (row.size, row.tokens, row.compared) == (50 * GIB, 409_600, "")
    four = connected("llama-3.1-8b", "LMCacheConnectorV1", tensor_parallel_size=4)
    assert next(row for row in host_rows(four) if row.name == "kv_offloading").size == 4 * 5 * GIB


def test_nixl_on_the_host_has_a_copy_of_the_pool() -> None:
    config = '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu"}'
    arguments = EngineArgs(max_model_len=16384, kv_transfer_config=config)
    answer = plan(Request(catalog.load("llama-3.1-8b"), gpu("h100-80g"), arguments))
    row = next(row for row in host_rows(answer) if row.name == "kv_transfer")
    assert (row.size, row.per) == (answer.memory.kv_cache, "rank")


# --- how it is asked for ----------------------------------------------------------------------------------------------

NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


@pytest.mark.parametrize(
    "flags",
    [
        f"--kv-transfer-config '{NIXL}'",
        "--kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role kv_both",
    ],
)
def test_a_command_is_read(flags: str) -> None:
    command = read_command(f"vllm serve m {flags}")
    assert (command.args, command.unknown, command.refused) == ({"kv_transfer_config": NIXL}, [], {})


def test_a_command_is_printed_as_it_is_read(run: Run) -> None:
    ran = run("estimate", "llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "16k", "--kv-transfer-config", NIXL)
    assert f"--kv-transfer-config '{NIXL}'" in ran.out


def test_a_variable_says_how_much_lmcache_takes(run: Run) -> None:
    config = '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'
    command = f"vllm serve llama-3.1-8b --max-model-len 16384 --kv-transfer-config '{config}'"
    ran = run("estimate", "--from-command", f"LMCACHE_MAX_LOCAL_CPU_SIZE=50 {command}", "--gpu", "h100-80g")
    assert ran.code == 0
    assert "LMCACHE_MAX_LOCAL_CPU_SIZE=50 vllm serve" in ran.out
    assert re.search(r"Host memory\n  KV cache +50\.00 GiB", ran.out)


@pytest.mark.parametrize(
    ("config", "error", "match"),
    [
        ('{"kv_connector": "NixlConnector"}', UsageError, "Please specify kv_role"),
        ('{"kv_role": "kv_both"}', UsageError, "Connector name is not set"),
        ('{"kv_connector": "NixlConnector", "kv_role": "sender"}', UsageError, "Unsupported kv_role"),
        ('{"kv_connector": "Mine", "kv_role": "kv_both"}', UsageError, "Unsupported connector type: Mine"),
        ('{"kv_connector": 7, "kv_role": "kv_both"}', UsageError, "Unsupported connector type: 7"),
        ('{"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}', UsageError, "Unsupported connector type"),
        ('{"kv_connector": "HiSparseConnector", "kv_role": "kv_both"}', UnsupportedModelError, "sparse model's pool"),
        (
            '{"kv_connector": "X", "kv_role": "kv_both", "kv_connector_module_path": "a.b"}', UnsupportedModelError,
            "is not one of vLLM's connectors",
        ),
        (
            '{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
            '{"connectors": [7]}}', UsageError, "not a JSON object",
        ),
        (
            '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": '
            '{"cpu_bytes_to_use": "much"}}', UsageError, "not a whole number",
        ),
    ],
)  # fmt: skip
def test_what_is_not_sized_is_refused_by_name(config: str, error: type[KvplanError], match: str) -> None:
    with pytest.raises(error, match=match):
        plan(Request(catalog.load("llama-3.1-8b"), gpu("h100-80g"), EngineArgs(kv_transfer_config=config)))


@pytest.mark.parametrize("text", ["[1]", "{", "NixlConnector", "[" * 50_000])
def test_what_is_no_object_is_refused(run: Run, text: str) -> None:
    ran = run("estimate", "llama-3.1-8b", "--gpu", "h100-80g", "--kv-transfer-config", text)
    assert ran.code == 2
    assert "is not a JSON object" in ran.err
