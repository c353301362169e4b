"""config.json -> facts: what is derived, what wins, what is refused."""

import json
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import InvalidInputError, KvplanError, UnsupportedModelError
from kvplan.models import catalog
from kvplan.models.hf_config import MODULES, load_spec, read_config
from kvplan.models.spec import FullAttention, LatentAttention, ModelSpec, RecurrentState, SlidingWindow, SparseIndexer

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL = LLAMA | {"model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768}


def read(**changes: Any) -> ModelSpec:
    values = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    return read_config(values, "config.json", "x")


def params(spec: ModelSpec) -> int:
    return sum(weight.num_params for weight in spec.weights)


def test_llama_has_its_published_parameters() -> None:
    assert params(read()) == 8_030_261_248


@pytest.mark.parametrize("head_dim", [..., None, 0])
def test_a_missing_head_dim_is_derived(head_dim: object) -> None:
    assert read(head_dim=head_dim).layers[0] == (FullAttention(8, 128, 128),)


def test_a_derived_head_dim_is_said() -> None:
    assert "head_dim is derived: hidden_size 4096 / 32 heads = 128" in read().notes


def test_a_declared_head_dim_wins() -> None:
    assert read(head_dim=160).layers[0] == (FullAttention(8, 160, 160),)


def test_the_old_key_for_a_head_is_read() -> None:
    assert read(hidden_size_per_head=96).layers[0] == (FullAttention(8, 96, 96),)


def test_a_head_that_does_not_come_out_whole_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidInputError, match=r"config\.json: head_dim is missing and .* is not whole \(4100 / 32\)"):
        read(hidden_size=4100)


@pytest.mark.parametrize("heads", [..., None])
def test_missing_kv_heads_mean_mha_and_are_said(heads: object) -> None:
    spec = read(num_key_value_heads=heads)
    assert spec.layers[0] == (FullAttention(32, 128, 128),)
    assert any("MHA" in note for note in spec.notes)


def test_the_order_of_keys_and_unknown_keys_change_nothing() -> None:
    shuffled = list((LLAMA | {"some_future_key": {"a": [1, 2]}, "another": None}).items())
    random.Random(0).shuffle(shuffled)
    spec = read_config(dict(shuffled), "config.json", "x")
    assert (spec.layers, spec.weights, spec.max_model_len) == (read().layers, read().weights, read().max_model_len)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 4096),  # Mistral's class default when the key is absent
        ({"sliding_window": None}, None),
        ({"sliding_window": 1024}, 1024),
    ],
)
def test_mistral_slides_unless_told_not_to(changes: dict[str, object], expected: int | None) -> None:
    cache = read_config(MISTRAL | changes, "config.json", "x").layers[0][0]
    assert isinstance(cache, SlidingWindow if expected else FullAttention)
    assert getattr(cache, "window", None) == expected


def test_qwen_keeps_everything_although_the_key_holds_a_number() -> None:
    spec = read(model_type="qwen2", sliding_window=4096, use_sliding_window=False)
    assert {type(cache) for caches in spec.layers for cache in caches} == {FullAttention}


def test_layer_types_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="layer_types has 2 entries for 32 layers"):
        read(model_type="gemma2", sliding_window=4096, layer_types=["full_attention", "sliding_attention"])


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen2", "qwen3", "phi3", "granite", "glm4", "cohere"])
def test_an_unknown_layer_type_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(InvalidInputError, match="layer_types: layer 0 is 'mystery'"):
        read(model_type=model_type, sliding_window=4096, layer_types=["mystery"] * 32)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "granite"])
def test_layer_types_that_the_other_keys_contradict_are_refused(model_type: str) -> None:
    with pytest.raises(InvalidInputError, match="layer 0 is 'sliding_attention', but its other keys"):
        read(model_type=model_type, sliding_window=1024, layer_types=["sliding_attention"] * 32)


@pytest.mark.parametrize("key", ["kv_lora_rank", "mamba_d_state", "num_experts", "cross_attention_layers"])
def test_what_says_it_is_not_dense_is_not_assumed_to_be(key: str) -> None:
    values = LLAMA | {"model_type": "brand_new", key: 8}
    with pytest.raises(UnsupportedModelError, match=f"{key} says this is not a plain dense transformer"):
        read_config(values, "config.json", "x", assume_dense=True)


@pytest.mark.parametrize("nest", ["text_config", "llm_config", "thinker_config"])
def test_nested_configs_are_descended_into(nest: str) -> None:
    spec = read_config({"model_type": "some_wrapper", nest: LLAMA}, "config.json", "x")
    assert params(spec) == 8_030_261_248


def test_the_inner_level_wins_and_the_difference_is_said() -> None:
    spec = read_config({"model_type": "some_wrapper", "num_hidden_layers": 2, "text_config": LLAMA}, "c", "x")
    assert spec.num_layers == 32
    assert any("num_hidden_layers differs" in note and "text_config wins" in note for note in spec.notes)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("num_hidden_layers", "32", " must be an integer"),
        ("num_hidden_layers", True, " must be an integer"),
        ("hidden_size", 4096.5, " must be an integer"),
        ("num_hidden_layers", 0, " must be between 1 and 4096"),
        ("num_hidden_layers", -1, " must be between 1 and 4096"),
        ("vocab_size", 2**31 + 1, " must be between 1 and 2147483648"),
        ("hidden_size", ..., ": missing"),
        ("tie_word_embeddings", "yes", " must be true or false"),
        ("layer_types", "full", " must be a list"),
        ("torch_dtype", "int7", ": 'int7' is not a dtype"),
    ],
)
def test_bad_values_are_refused_with_key_value_and_file(key: str, value: object, says: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"config\.json: {key}{says}"):
        read(model_type="gemma2", sliding_window=1, **{key: value})


def test_a_float_that_is_whole_is_taken_with_a_note() -> None:
    spec = read(num_hidden_layers=32.0)
    assert spec.num_layers == 32
    assert "num_hidden_layers is written 32.0; read as 32" in spec.notes


def test_dimensions_beyond_any_machine_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"more than 2\^63"):
        read(hidden_size=2**31, num_attention_heads=2**20, num_key_value_heads=2**20, intermediate_size=2**31)


def test_an_unknown_type_is_refused_by_name_and_opted_into() -> None:
    values = LLAMA | {"model_type": "brand_new"}
    with pytest.raises(UnsupportedModelError, match="'brand_new'"):
        read_config(values, "config.json", "x")
    assert params(read_config(values, "config.json", "x", assume_dense=True)) == 8_030_261_248


def test_float32_checkpoints_are_served_in_bfloat16() -> None:
    assert read(torch_dtype="float32").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "default", "limit"),
    [
        ({}, 131072, 131072),
        ({"model_max_length": 8192}, 8192, 8192),
        ({"model_max_length": 262144}, 262144, 262144),
        ({"seq_length": 8192}, 8192, 8192),
        ({"seq_length": 8192, "model_max_length": 16384}, 16384, 16384),
        (
            {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096},
            4096, 131072,
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 262144, 262144),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131072, 131072),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072, 131072),
        ({"max_position_embeddings": ...}, 2048, 2048),
    ],
)  # fmt: skip
def test_the_default_context_by_rope(changes: dict[str, Any], default: int, limit: int) -> None:
    spec = read(**changes)
    assert (spec.max_model_len, spec.context_limit) == (default, limit)


def test_sparse_latent_layers_keep_index_keys() -> None:
    assert catalog.load("deepseek-v3.2").layers[0] == (LatentAttention(512, 64, sparse=True), SparseIndexer(128))


def test_a_layer_may_keep_two_caches() -> None:
    attention, state = catalog.load("falcon-h1-1.5b").layers[0]
    assert isinstance(attention, FullAttention)
    assert isinstance(state, RecurrentState)


def test_a_directory_and_its_file_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_spec(tmp_path).layers == load_spec(tmp_path / "config.json").layers


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ({"quant_method": "gptq", "bits": 3}, "3-bit"),
        ({"quant_method": "quark"}, "quark"),
        ({"quant_method": "modelopt", "quant_algo": "W2A2"}, "W2A2"),
    ],
)
def test_an_unknown_quantisation_still_sizes_the_cache(method: dict[str, Any], text: str) -> None:
    spec = read(quantization_config=method)
    assert spec.quantization is not None
    assert not spec.quantization.known
    assert text in spec.quantization.problem


def test_a_broken_quantisation_is_refused() -> None:
    with pytest.raises(KvplanError, match="weight_block_size"):
        read(quantization_config={"quant_method": "fp8", "weight_block_size": [128]})


def test_the_registry_names_what_each_module_reads() -> None:
    for module, types in MODULES.items():
        assert set(import_module(f"kvplan.models.families.{module}").READERS) == set(types), module


def test_gemma_4s_last_layer_is_global_whatever_its_type() -> None:
    """transformers' Gemma4TextConfig turns a last layer that slides into a global one, under every server."""
    config = catalog.expand(catalog.facts("gemma-4-31b")["config"])
    text = config["text_config"]
    text |= {"num_hidden_layers": 31, "layer_types": text["layer_types"][:31]}
    assert text["layer_types"][-1] == "sliding_attention"
    spec = read_config(config, "config.json", "gemma-4-31b")
    assert [i for i, (part,) in enumerate(spec.layers) if isinstance(part, FullAttention)] == [5, 11, 17, 23, 29, 30]
