"""GGUF files alone: their tensors, the types that llama-quantize gives them, and the model that a header states."""

import json
from math import prod
from pathlib import Path
from typing import Any

import gguf
import pytest

from kvplan.core.errors import InvalidInputError, KvplanError, UnsupportedModelError, UsageError
from kvplan.models import catalog
from kvplan.models.ggml_types import TYPES, tensor_bytes
from kvplan.models.gguf_keys import metadata_of
from kvplan.models.gguf_model import gguf_of, read_gguf
from kvplan.models.spec import FullAttention, ModelSpec
from tests.support.gguf_files import saved, write

# What llama.cpp (commit 0c1e57098) says of files made with its own tensor names, shapes and llama_quant_compute_types:
# bytes and parameters, by model and file type. No file was quantized with an importance matrix.
FILES = [
    json.loads(line) for line in (Path(__file__).parent.parent / "facts/llamacpp_files.jsonl").read_text().splitlines()
]
MODELS = sorted({row["model"] for row in FILES})


def spec_of(model: str) -> ModelSpec:
    own = catalog.find(model)
    assert own is not None
    return catalog.load(own)


def test_every_type_is_as_wide_as_the_librarys() -> None:
    theirs = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {number: TYPES.get(number) for number in theirs} == theirs


@pytest.mark.parametrize("row", FILES, ids=lambda row: f"{row['model']} {row['file_type']}")
def test_a_file_weighs_what_llama_quantize_makes_it(row: dict[str, Any]) -> None:
    model = gguf_of(spec_of(row["model"]), row["file_type"])
    assert model.total_bytes == row["tensor_bytes"]
    assert sum(prod(tensor.shape) for tensor in model.tensors) == row["parameters"]


def test_a_layer_for_drafts_is_marked() -> None:
    """The file that was asked about has it in F16: llama.cpp's loader, which chose the types, leaves it out."""
    quantized, wide = (gguf_of(spec_of("zai-org/GLM-4.5-Air"), kind) for kind in ("Q4_K_M", "F16"))
    loaded = sum(tensor.nbytes for tensor in quantized.tensors if not quantized.is_nextn(tensor))
    drafts = sum(tensor.nbytes for tensor in wide.tensors if wide.is_nextn(tensor))
    assert (quantized.num_layers, quantized.num_nextn) == (47, 1)
    assert loaded + drafts == 75_190_090_752
    assert sum(prod(tensor.shape) for tensor in quantized.tensors) == 109_227_310_848


def test_a_model_of_short_convolutions_weighs_what_llama_quantize_makes_it() -> None:
    """The file that was asked about has one more matrix, which llama.cpp takes for a ColBERT head."""
    head = tensor_bytes("Q4_K", (2048, 2048))
    assert gguf_of(spec_of("LiquidAI/LFM2-1.2B"), "Q4_K_M").total_bytes + head == 730_868_736


FIELDS = (
    "layers", "layer_weights", "other_weights", "tied", "hidden_size", "num_heads", "vocab_size", "context_limit",
    "max_model_len", "experts_per_token", "widest_mlp", "ropes",
)  # fmt: skip


def facts_of(spec: ModelSpec) -> dict[str, object]:
    """What sizing needs of a model, without its tower, which is a file of its own."""
    weights = tuple(weight for weight in spec.other_weights if weight.group != "vision_audio")
    return {name: getattr(spec, name) for name in FIELDS} | {"other_weights": weights}


@pytest.mark.parametrize("model", [*MODELS, "zai-org/GLM-4.5-Air", "LiquidAI/LFM2-1.2B"])
def test_a_header_states_the_model_of_its_config(model: str, tmp_path: Path) -> None:
    spec = spec_of(model)
    from_file = read_gguf(saved(tmp_path / "model.gguf", gguf_of(spec)))
    expected = facts_of(spec)
    if spec.model_type == "starcoder2":  # its window is not in a file, and llama.cpp keeps every token
        expected["layers"] = tuple((FullAttention(2, 128, 128),) for _ in spec.layers)
    assert facts_of(from_file.spec) == expected
    assert from_file.total_bytes == gguf_of(spec).total_bytes
    assert (from_file.mixed_by, from_file.metadata) == ("file", {**metadata_of(spec), "general.file_type": 15})


def small(architecture: str = "llama", **keys: Any) -> dict[str, Any]:
    """Metadata of a tiny model; a key given as None is left out."""
    values = {
        "block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 128,
        "attention.head_count": 2, "attention.head_count_kv": 1, **keys,
    }  # fmt: skip
    named = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    return {"general.architecture": architecture, **named}


EMBEDDING = ("token_embd.weight", (64, 32), "F16")


def refusal(path: Path) -> KvplanError:
    with pytest.raises((InvalidInputError, UnsupportedModelError)) as caught:
        read_gguf(path)
    return caught.value


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"general.architecture": "clip"}, [("v.blk.0.attn_q.weight", (64, 64), "F16")], "the tower of a model"),
        (small() | {"general.type": "adapter"}, [EMBEDDING], "a LoRA adapter"),
        (small(), [("blk.0.attn_q.weight", (64, 64), "F16")], "has no token_embd.weight"),
        (small("rwkv7"), [EMBEDDING], "architecture 'rwkv7' is not one that kvplan reads"),
        (small(block_count=None), [EMBEDDING], "llama.block_count is missing"),
        (small(block_count="many"), [EMBEDDING], "llama.block_count is not a whole number ('many')"),
        (small("nemotron_h", **{"attention.head_count_kv": [1, 1]}, block_count=3), [EMBEDDING], "a list of 3 numbers"),
    ],
)
def test_a_file_that_is_not_a_language_models_is_named(
    tmp_path: Path, metadata: dict[str, Any], tensors: list[Any], message: str
) -> None:
    assert message in str(refusal(write(tmp_path / "model.gguf", metadata, tensors)))


def test_a_vocabulary_alone_is_named(tmp_path: Path) -> None:
    assert "holds no tensors" in str(refusal(write(tmp_path / "vocab.gguf", small(), [])))


def test_a_split_file_is_one_model_whichever_part_is_named(tmp_path: Path) -> None:
    whole = gguf_of(spec_of("Qwen/Qwen3-4B"))
    tensors = [(tensor.name, tensor.shape, tensor.kind) for tensor in whole.tensors]
    first = write(tmp_path / "m-00001-of-00002.gguf", whole.metadata, tensors[:100])
    second = write(tmp_path / "m-00002-of-00002.gguf", {"general.architecture": "qwen3"}, tensors[100:])
    for part in (first, second):
        assert read_gguf(part).total_bytes == whole.total_bytes
    second.unlink()
    assert "shard 'm-00002-of-00002.gguf' is missing" in str(refusal(first))


def test_an_unknown_file_type_is_refused() -> None:
    with pytest.raises(UsageError, match="--quant Q4_K_XL: not a file type of llama-quantize"):
        gguf_of(spec_of("Qwen/Qwen3-8B"), "Q4_K_XL")


def test_an_architecture_without_names_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="how model_type 'llama4_text' is laid out in a GGUF file"):
        gguf_of(spec_of("meta-llama/Llama-4-Scout-17B-16E-Instruct"))
