"""Changed configs and overrides are read as the servers read them.

tests/facts/config_reading.jsonl: what vLLM 0.33.0's and SGLang 0.5.23's own code answers, on an H100 with 20 GB for
the KV cache, for a catalog model with changed keys in its config (null removes one), or with overrides.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.pasted import read_command
from kvplan.core.errors import UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.hf_config import load_spec, read_config
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine, server_of
from kvplan.servers.plans.weights import embedded, weight_layout
from kvplan.servers.sglang import pool as sglang_pool
from kvplan.servers.sglang import rules as sglang
from kvplan.servers.words.arguments import EngineArgs
from kvplan.servers.words.command import Repeated
from kvplan.sizing.weights import total_weights
from tests.support.refusals import reason_of

BUDGET = 20_000_000_000
ROWS = [json.loads(line) for line in Path("tests/facts/config_reading.jsonl").read_text().splitlines()]


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(config)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and key.endswith("_config") and key in result:
            result[key] = changed(result[key], value)
        else:
            result[key] = value
    return result


def request_of(row: dict[str, Any]) -> Request:
    config = changed(catalog.load(row["model"]).config, row.get("config", {}))
    args = EngineArgs(
        hf_overrides=json.dumps(row["overrides"]) if "overrides" in row else None,
        max_model_len=row.get("max_model_len"),
    )
    return Request(read_config(config, row["model"], row["model"]), gpu("h100-80g"), args, parse_engine(row["server"]))


def answer_of_vllm(request: Request) -> dict[str, int]:
    answer = plan(replace(request, args=replace(request.args, kv_cache_memory_bytes=BUDGET)))
    loaded = embedded(answer.request)
    got = {
        "context": answer.settings.max_model_len,
        "weights": total_weights(loaded.spec, weight_layout(loaded, 0, online=False)),
    }
    return got | ({"tokens": answer.capacity.tokens} if answer.capacity.fits else {"refused_pool": True})


def answer_of_sglang(request: Request) -> dict[str, int]:
    request, _ = server_of("sglang").drafter(request)
    settings = sglang.resolve(request.spec, request.gpu, request.args, request.release)
    pool = sglang_pool.pool(request.spec, settings, request.args, request.gpu.sm, request.draft)
    images = sglang.image_reservation(request.spec, request.gpu, request.args, request.release)
    pages, _, _ = sglang_pool.pages_in(pool, request.args, [BUDGET - images])
    return {"context": settings.max_model_len, "tokens": pages * pool.block_size}


def name_of(row: dict[str, Any]) -> str:
    return f"{row['server']}-{row['model']}-{json.dumps(row.get('overrides', row.get('config')))[:60]}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_changed_config_is_planned_as_its_server_reads_it(row: dict[str, Any]) -> None:
    request = request_of(row)
    if "refused" in row:
        with pytest.raises(UsageError):
            plan(request)
        return
    answer = {"vllm": answer_of_vllm, "sglang": answer_of_sglang}[row["server"]](request)
    assert answer == {key: row[key] for key in answer.keys() | {"context", "tokens", "weights"} if key in row}


YARN = {"rope_type": "yarn", "rope_theta": 1000000, "factor": 4.0, "original_max_position_embeddings": 32768}
LONGER = json.dumps({"rope_parameters": YARN, "max_position_embeddings": 131072})


@pytest.mark.parametrize(
    "command",
    [
        f"vllm serve Qwen/Qwen3-8B --max-model-len 131072 --hf-overrides '{LONGER}'",
        f"python -m sglang.launch_server --model-path Qwen/Qwen3-8B --json-model-override-args '{LONGER}'",
    ],
)
def test_a_printed_command_with_overrides_is_the_same_plan(command: str) -> None:
    answer = planned(command)
    assert answer.capacity.max_model_len == 131_072
    printed = shlex.join(server_of(answer.request.release.engine).launch().words(answer))
    assert planned(printed).capacity == answer.capacity


def planned(command: str) -> Plan:
    pasted = read_command(command)
    args = EngineArgs(**pasted.args)
    return plan(Request(catalog.load("qwen3-8b"), gpu("h100-80g"), args, parse_engine(pasted.engine or "vllm")))


def test_rope_flags_of_earlier_releases_are_overrides() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    flags = f"--rope-scaling '{json.dumps(scaling)}' --rope-theta 1e6"
    pasted = read_command(f"vllm serve Qwen/Qwen3-8B {flags}")
    assert json.loads(pasted.args["hf_overrides"]) == {"rope_scaling": scaling, "rope_theta": 1e6}
    assert planned(f"vllm serve Qwen/Qwen3-8B {flags}").settings.max_model_len == 2 * 40_960


def test_releases_before_0_33_multiply_the_original_length_with_yarn() -> None:
    """vllm-project/vllm#56446. Qwen3's card: `--rope-scaling '{...}' --max-model-len 131072`, until 0.11."""
    flags = f"--rope-scaling '{json.dumps(YARN)}' --max-model-len 131072"
    earlier = read_command(f"vllm serve Qwen/Qwen3-8B {flags}")
    request = Request(catalog.load("qwen3-8b"), gpu("h100-80g"), EngineArgs(**earlier.args), parse_engine("vllm@0.10"))
    assert plan(request).settings.max_model_len == 131_072
    with pytest.raises(UsageError, match="supports up to 40,960 tokens"):
        plan(replace(request, release=parse_engine("vllm")))


def test_a_model_without_a_config_takes_no_overrides() -> None:
    spec = replace(catalog.load("qwen3-8b"), config={})
    with pytest.raises(UsageError, match=r"has no config\.json to change"):
        plan(Request(spec, gpu("h100-80g"), EngineArgs(hf_overrides=LONGER), parse_engine("vllm")))


def test_windows_for_some_layers_of_qwen2_do_not_start_on_vllm() -> None:
    """`Sliding window for some but all layers is not supported`: vLLM 0.33 model_executor/models/qwen2.py."""
    keys = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    reason = reason_of(plan(request_of({"server": "vllm", "model": "qwen3-8b", "config": keys})))
    assert "windows for some but all layers are not supported" in reason
    assert plan(request_of({"server": "sglang", "model": "qwen3-8b", "config": keys})).fits


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(("context", "factor"), [(50_000, 2.0), (131_072, 4.0)])
def test_a_context_beyond_qwen3s_names_the_yarn_settings_of_its_card(engine: str, context: int, factor: float) -> None:
    with pytest.raises(UsageError) as refused:
        estimated(engine, context)
    remedy = shlex.split(refused.value.remedy.partition("describes: ")[2])
    assert remedy[0] == {"vllm": "--hf-overrides", "sglang": "--json-model-override-args"}[engine]
    assert json.loads(remedy[1])["rope_parameters"]["factor"] == factor
    assert estimated(engine, context, remedy[1]).capacity.max_model_len == context


@pytest.mark.parametrize(("model", "context"), [("qwen3-8b", 131_073), ("qwen3-0.6b", 65_536), ("llama-3.1-8b", 2**18)])
def test_no_other_context_is_extended(model: str, context: int) -> None:
    with pytest.raises(UsageError) as refused:
        estimated("vllm", context, model=model)
    assert refused.value.remedy == "lower it"


def estimated(engine: str, context: int, overrides: str | None = None, model: str = "qwen3-8b") -> Plan:
    args = EngineArgs(max_model_len=context, hf_overrides=overrides)
    return plan(Request(catalog.load(model), gpu("h100-80g"), args, parse_engine(engine)))


def stated_draft(row: dict[str, Any]) -> Request:
    """A row's target and draft, as its command states them."""
    pasted = read_command(f"vllm serve m --speculative-config {shlex.quote(json.dumps(row['speculative']))}")
    args = EngineArgs(**pasted.args, max_model_len=row.get("max_model_len"))
    draft = None if pasted.draft_model is None else catalog.load(pasted.draft_model)
    repeated = Repeated("vllm", speculative=pasted.speculative)
    target = catalog.load(row["model"])
    return Request(target, gpu("h100-80g"), args, parse_engine("vllm"), draft=draft, repeated=repeated)


DRAFTS = [json.loads(line) for line in Path("tests/facts/draft_contexts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", DRAFTS, ids=lambda row: f"{row['speculative']} {row.get('max_model_len', '')}")
def test_a_drafts_length_bounds_the_context(row: dict[str, Any]) -> None:
    """What vLLM 0.33.0's own code answers, on an H100 with 20 GB for the KV cache."""
    request = stated_draft(row)
    if "refused" in row:
        with pytest.raises(UsageError, match="max_model_len"):
            plan(request)
        return
    answer = plan(replace(request, args=replace(request.args, kv_cache_memory_bytes=BUDGET)))
    assert (answer.settings.max_model_len, answer.capacity.max_concurrency) == (row["context"], row["max_concurrency"])


def test_a_head_whose_name_says_no_method_needs_one() -> None:
    """vLLM goes by `eagle3`, `dflash` and `eagle-` in the draft's name: config/speculative.py (__post_init__)."""
    head = replace(
        load_spec(Path("tests/facts/heads/eagle3-qwen3-8b")), name="draft", source="models/draft/config.json"
    )
    request = Request(catalog.load("qwen3-8b"), gpu("h100-80g"), EngineArgs(num_speculative_tokens=3), draft=head)
    with pytest.raises(UsageError, match="add --speculative-method eagle3"):
        plan(request)
    assert plan(replace(request, args=replace(request.args, speculative_method="eagle3"))).fits
