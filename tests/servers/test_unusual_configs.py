"""Configs and flags of rare kinds that random draws found (benchmarks/random_cases.py), against the servers' answers.

Numbers are those of vLLM 0.33's and SGLang 0.5.23's own planning code for the same configs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.hf_config import load_spec
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.base import parse_engine
from kvplan.sizing.layout import token_bytes

GB20 = 20_000_000_000


def planned(spec: Any, card: str = "h100-80g", engine: str = "vllm", **args: Any) -> Plan:
    return plan(Request(spec, gpu(card), EngineArgs(**{"max_model_len": 2048} | args), release=parse_engine(engine)))


def written(folder: Path, model: str, **changes: Any) -> Path:
    """A folder with a catalog model's config and changed keys; None removes one, an object changes a part."""
    config = dict(catalog.load(model).config)
    for key, value in changes.items():
        old = config.get(key)
        config[key] = {**old, **value} if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


# --- positions and caches --------------------------------------------------------------------------------------------


def test_a_familys_default_counts_beside_a_key_that_its_class_does_not_read(tmp_path: Path) -> None:
    # n_positions is GPT-2's name; Mistral's class has 131,072 positions by default, the smaller one.
    spec = load_spec(written(tmp_path, "mistral-nemo-12b", max_position_embeddings=None, n_positions=256_000))
    assert spec.max_model_len == 131_072


@pytest.mark.parametrize(
    ("card", "dtype", "blocks"),
    [
        ("h100-80g", "fp8_e5m2", 5086), ("h100-80g", "fp8_per_token_head", 4932), ("a100-80g", "fp8", 5086),
        ("l40s", "fp8", 5086), ("b200", "fp8", 5086), ("h100-80g", "fp8", None), ("h200", "fp8_e4m3", None),
    ],
)  # fmt: skip
def test_fp8_caches_of_alibi_models_are_refused_where_flash_attention_would_run(
    card: str, dtype: str, blocks: int | None
) -> None:
    """BLOOM-7B1 on Hopper: FlashAttention 2 computes ALiBi, and has no fp8 KV cache."""
    answer = planned(catalog.load("bloom-7b1"), card, kv_cache_dtype=dtype, kv_cache_memory_bytes=GB20)
    if blocks is None:
        assert answer.refusal is not None
        assert "FLASH_ATTN keeps no KV cache of fp8" in answer.refusal.text
    else:
        assert answer.refusal is None
        assert answer.capacity.num_blocks == blocks


@pytest.mark.parametrize(
    ("card", "dtype", "block", "blocks"),
    [
        ("h100-80g", "fp8_per_token_head", 16, 60_096), ("b200", "fp8_per_token_head", 16, 60_096),
        ("b200", "int8_per_token_head", 16, 60_096), ("h100-80g", "fp8", 64, 15_258), ("b200", "fp8", 64, 15_258),
    ],
)  # fmt: skip
def test_caches_with_a_scale_per_token_have_tritons_blocks(card: str, dtype: str, block: int, blocks: int) -> None:
    answer = planned(catalog.load("gemma-4-26b-a4b"), card, kv_cache_dtype=dtype, kv_cache_memory_bytes=GB20)
    assert (answer.pool.block_size, answer.capacity.num_blocks) == (block, blocks)


def test_layers_that_all_read_anothers_cache_are_refused(tmp_path: Path) -> None:
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 2
    folder = written(tmp_path, "gemma-4-e4b", text_config={"num_hidden_layers": 12, "layer_types": kinds})
    with pytest.raises(KvplanError, match="num_kv_shared_layers leaves none of 12 layers a cache"):
        load_spec(folder)


def test_yarn_is_not_what_phi_3s_class_reads(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    with pytest.raises(KvplanError, match="names yarn, which Phi-3's class reads as longrope"):
        load_spec(written(tmp_path, "phi-3-mini-4k", rope_scaling=yarn))


# --- pooling, flags --------------------------------------------------------------------------------------------------


def test_token_classifiers_are_pooled_and_their_scores_quantized_as_linear_layers(tmp_path: Path) -> None:
    """Qwen3-1.7B: a classifier of two labels in float32 in place of its (tied) head, 2 x 2,048 x 4 bytes; one of five
    in fp8 has a byte for each weight and a float32 scale.
    """
    labels = {str(label): f"L{label}" for label in range(5)}
    tokens = written(tmp_path, "qwen3-1.7b", architectures=["Qwen3ForTokenClassification"],
                     id2label={key: labels[key] for key in "01"})  # fmt: skip
    assert planned(load_spec(tokens)).memory.weights == 3_441_166_336
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    texts = written(tmp_path, "qwen3-1.7b", architectures=["Qwen3ForSequenceClassification"], id2label=labels,
                    quantization_config=fp8)  # fmt: skip
    assert planned(load_spec(texts)).memory.weights == 2_031_875_060


@pytest.mark.parametrize(
    ("model", "method"),
    [("glm-5.1-nvfp4", "mxfp8"), ("deepseek-v4-flash", "fp8_per_block"), ("gpt-oss-20b", "fp8")],
)
def test_a_method_that_vllm_reads_in_the_config_is_not_changed_by_the_flag(model: str, method: str) -> None:
    spec = catalog.load(model)
    with_flag, without = (planned(spec, "b200", tensor_parallel_size=8, quantization=name) for name in (method, None))
    assert with_flag.memory.weights == without.memory.weights
    assert any(f"--quantization {method} is ignored" in note for note in with_flag.notes)
    with pytest.raises(KvplanError, match="is stored as fp8; remove the flag"):
        planned(catalog.load("qwen3-8b-fp8"), quantization="mxfp8")


def test_a_modelopt_config_with_its_algorithm_outside_is_not_read_by_vllm(tmp_path: Path) -> None:
    """Of {"quant_algo": ..., "producer": ...} vLLM tells no method: its layers are built in bfloat16."""
    flat = {"quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.31"}}
    answer = planned(load_spec(written(tmp_path, "qwen3-1.7b", quantization_config=flat)))
    assert answer.memory.weights == 3_441_149_952
    assert any("names no quant_method" in note for note in answer.notes)


# --- SGLang ----------------------------------------------------------------------------------------------------------


def test_sglang_computes_gpt_oss_in_bfloat16_whatever_the_dtype_is() -> None:
    answer = planned(catalog.load("gpt-oss-20b"), engine="sglang", dtype="float16")
    assert (answer.settings.dtype, answer.settings.kv_dtype) == ("bfloat16", "bfloat16")


def test_sglang_reads_no_text_config_that_an_override_adds() -> None:
    override = json.dumps({"text_config": {"max_position_embeddings": 65_536}})
    with pytest.raises(KvplanError, match="adds a text_config"):
        planned(catalog.load("qwen3-next-80b-a3b"), engine="sglang", hf_overrides=override)


@pytest.mark.parametrize(("tp", "dtype", "cell"), [(1, "bfloat16", 137_472), (4, "bfloat16", 45_312),
                                                   (2, "fp8_e5m2", 45_312)])  # fmt: skip
def test_sglang_keeps_minimax_m3s_index_keys_beside_its_kv(tp: int, dtype: str, cell: int) -> None:
    """SGLang's _cell_size: 60 layers of K and V, and 57 index keys of 128 in the model's dtype."""
    layers = catalog.load("minimax-m3").layers
    assert sum(token_bytes(cache, dtype, tp) for caches in layers for cache in caches) == cell
