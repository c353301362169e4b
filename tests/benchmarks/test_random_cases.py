"""The random cases that both servers' own code answers: what they cover, and how their rows are judged."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import random_cases
from benchmarks.random_configs import WHOLE, changed
from benchmarks.random_quantizations import HF_QUANT, text_config
from kvplan.models import catalog
from tests import oracles

MODELS = ("llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "gemma-3-27b", "qwen3-next-80b-a3b",
          "nemotron-nano-9b-v2", "deepseek-v3", "mistral-7b-v0.1")  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the catalog's own configs."""
    folder = tmp_path_factory.mktemp("sources")
    for name in MODELS:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(catalog.expand(catalog.facts(name)["config"])))
    return folder


def drawn(server: str, directory: Path, sources: Path, *, count: int = 400) -> list[dict[str, Any]]:
    random_cases.write(directory, [sources], server=server, seed=7, count=count, variants=0.7)
    return [json.loads(line) for line in (directory / "cases.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_the_same_seed_draws_the_same_cases_and_configs(server: str, tmp_path: Path, sources: Path) -> None:
    first, second = (drawn(server, tmp_path / name, sources, count=60) for name in ("a", "b"))
    assert first == second
    for config in sorted((tmp_path / "a" / "models").glob("*/*.json")):
        assert config.read_text() == (tmp_path / "b" / "models" / config.parent.name / config.name).read_text()


def test_every_case_names_a_model_and_a_draft_that_lie_beside_it(tmp_path: Path, sources: Path) -> None:
    for case in drawn("vllm", tmp_path, sources):
        names = [case["model"], case.get("engine_args", {}).get("speculative_config", {}).get("model")]
        assert all((tmp_path / "models" / name / "config.json").is_file() for name in names if name)


def test_configs_are_drawn_in_every_quantization_and_with_side_files(tmp_path: Path, sources: Path) -> None:
    drawn("vllm", tmp_path, sources)
    configs = [json.loads(path.read_text()) for path in (tmp_path / "models").glob("*/config.json")]
    methods = {(config.get("quantization_config") or {}).get("quant_method") for config in configs}
    assert methods >= {"awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "modelopt"}
    assert list((tmp_path / "models").glob(f"*/{HF_QUANT}"))


def test_every_change_applies_to_some_model_and_keeps_it_well_formed() -> None:
    """KV heads divide heads, and lists by layer are as long as there are layers."""
    configs = [catalog.expand(catalog.facts(name)["config"]) for name in MODELS]
    for _, change in WHOLE:
        copies = [json.loads(json.dumps(config)) for config in configs]
        assert any(change(random.Random(seed), copy) for seed in range(8) for copy in copies), change
    for seed in range(300):
        text = text_config(changed(random.Random(seed), configs[seed % len(configs)]))
        assert text["num_attention_heads"] % text.get("num_key_value_heads", 1) == 0
        kinds = text.get("layer_types")
        assert kinds is None or len(kinds) == text["num_hidden_layers"]


# --- judging ---------------------------------------------------------------------------------------------------------


def row(**others: Any) -> dict[str, Any]:
    return {"vllm_version": "0.33.0", "inputs": {"model": "qwen3-8b", "available_memory": [2**34]}} | others


@pytest.mark.parametrize(
    ("failed", "kind"),
    [
        ("KeyError: 'rope_theta'", random_cases.ANSWERED),  # the server stops, kvplan plans
        ("AssertionError: ", random_cases.ANSWERED),
        ("ImportError: stubbed", oracles.NOT_ASKED),
        ("ValueError: No model architectures are specified", oracles.NOT_ASKED),  # the oracle's fault
    ],
)
def test_an_error_that_a_config_leads_to_is_a_refusal(failed: str, kind: str, sources: Path) -> None:
    assert random_cases.judged(row(failed=failed), sources)[0] == kind


def test_a_planted_difference_is_seen(sources: Path) -> None:
    """Qwen3-8B: 36 layers x 2 x 8 x 128 x 2 B x 16 tokens = 2,359,296 B a block, 7,281 blocks in 16 GiB."""
    inputs = {"model": "qwen3-8b", "available_memory": [2**34], "max_model_len": 8192}
    result = {"available_memory": 2**34, "num_gpu_blocks": 7282, "kv_cache_size_tokens": 116_512,
              "max_concurrency": 116_512 / 8192, "final_block_size": 16}  # fmt: skip
    resolved = {"max_num_batched_tokens": 8192, "max_num_seqs": 256, "gpu_memory_utilization": 0.92,
                "enable_prefix_caching": True, "dtype": "bfloat16", "max_concurrent_batches": 2,
                "use_v2_model_runner": True}  # fmt: skip
    # 8,190,735,360 parameters in bfloat16, as Qwen3-8B's card counts them
    answered = row(results=[result], resolved=resolved, weights={"param_bytes_per_rank": 2 * 8_190_735_360})
    kind, why = random_cases.judged(answered | {"inputs": inputs}, sources)
    assert kind == random_cases.DIFFERENT
    assert any("num_gpu_blocks 7281 for 7282" in text for text in why)
