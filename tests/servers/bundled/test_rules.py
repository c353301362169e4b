"""The planner's formulas for the bundled engine against the tensors that the engine makes, at the models' real sizes.

The engine is built on torch's meta device: every tensor has its shape and dtype, and no memory.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, kernels
from engine.kv_cache import KVCache, group_layers
from engine.loader import NoWeights
from engine.memory import nbytes
from engine.models import Model
from engine.tp import TensorParallel
from kvplan.core.errors import UnsupportedModelError
from kvplan.models import catalog
from kvplan.models.hf_config import load_spec
from kvplan.models.spec import ModelSpec
from kvplan.servers.bundled.rules import EngineInputs, group_sizes, pool_block_bytes, predict
from tests.support.cli import LLAMA

SMALL_TENSORS = 0.003  # of a peak: a sum of squares for each token and the like, which the planner leaves out
MODELS = (
    "llama-3.1-8b", "llama-3.2-1b", "mistral-7b-v0.1", "qwen2.5-7b", "qwen3-0.6b", "qwen3-30b-a3b", "mixtral-8x7b",
    "gemma-2-9b", "gemma-3-12b", "gpt-oss-20b", "deepseek-v2-lite", "deepseek-v3", "smollm2-135m",
)  # fmt: skip
META = torch.device("meta")
INPUTS = EngineInputs(
    total=80 * 2**30, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=16, max_model_len=4096,
    max_num_seqs=64, max_num_batched_tokens=2048, gpu_memory_utilization=0.9, num_blocks=100,
)  # fmt: skip


def plain(name: str) -> ModelSpec:
    """The model with weights in its own dtype, whatever its checkpoint is quantised to."""
    return replace(catalog.load(name), quantization=None)


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_tables_are_as_large_as_the_engine_makes_them(name: str) -> None:
    spec = plain(name)
    model = Model(spec, NoWeights(), kernels.load("torch", "cpu"), TensorParallel(), torch.bfloat16, META, 4096)
    predicted = predict(spec, INPUTS)
    assert nbytes(model.weights) == predicted.weights
    assert nbytes(list(model.buffers.values())) == predicted.buffers


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen2.5-7b", "mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b"])
def test_a_rank_of_two_holds_what_is_predicted(name: str, rank: int) -> None:
    spec, tp = plain(name), TensorParallel(rank, 2)
    model = Model(spec, NoWeights(), kernels.load("torch", "cpu"), tp, torch.bfloat16, META, 4096)
    inputs = replace(INPUTS, tensor_parallel_size=2)
    assert nbytes(model.weights) == predict(spec, inputs).weights
    pool = KVCache(spec, group_layers(spec, 16), 100, 16, torch.bfloat16, META, tp)
    assert pool.num_bytes == predict(spec, inputs).kv_cache


@pytest.mark.parametrize(("kv_dtype", "torch_dtype"), [("bfloat16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)])
@pytest.mark.parametrize("name", MODELS)
def test_a_block_is_as_large_as_the_engine_makes_it(name: str, kv_dtype: str, torch_dtype: torch.dtype) -> None:
    spec = plain(name)
    if kv_dtype == "fp8" and "deepseek" in name:
        with pytest.raises(UnsupportedModelError, match="no latents in fp8"):
            KVCache(spec, group_layers(spec, 16), 1, 16, torch_dtype, META, TensorParallel())
        return
    pool = KVCache(spec, group_layers(spec, 16), 7, 16, torch_dtype, META, TensorParallel())
    assert pool.num_bytes == 7 * pool_block_bytes(spec, replace(INPUTS, kv_cache_dtype=kv_dtype))


@pytest.mark.parametrize(
    ("family", "dtype", "bytes_each"),
    [
        # 16 bits: both streams and their sum 3 * 2, the sum and its norm wide 2 * 4, the result and the product 2 * 2
        ("llama", "bfloat16", 18),
        ("llama", "float16", 18),
        ("gemma2", "bfloat16", 20),  # times 1 + weight: the product is wide too, 3 * 2 + 3 * 4 + 2
        ("llama", "float32", 20),  # both streams, their sum, its norm and the product
        ("gemma2", "float32", 20),
    ],
)
@pytest.mark.parametrize("hidden", [256, 1024])
def test_a_stream_wider_than_the_mlp_peaks_in_its_norm(
    family: str, dtype: str, bytes_each: int, hidden: int, tmp_path: Path
) -> None:
    """On a CPU; with tensor parallelism most models are such."""
    narrow = {
        "model_type": family, "architectures": [f"{family.capitalize()}ForCausalLM"], "vocab_size": 256,
        "hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "sliding_window": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | narrow))
    limits: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 512}
    config = EngineConfig(device="cpu", dtype=dtype, num_blocks=64, load_format="dummy", **limits)
    spec = load_spec(tmp_path)
    measured = Engine(spec, config).memory_report().activations
    inputs = replace(INPUTS, backend="torch", dtype=dtype, kv_cache_dtype=dtype, **limits)
    planned = predict(spec, inputs).activations
    assert planned == 512 * hidden * bytes_each
    assert planned <= measured <= (1 + SMALL_TENSORS) * planned


def test_hybrid_models_are_grouped_by_hand_count() -> None:
    # Gemma 3 12B: 48 layers, every sixth full: 8 full, 40 in windows; groups of 8: one full, five windowed.
    assert group_sizes(plain("gemma-3-12b")) == [8, 8, 8, 8, 8, 8]
    # gpt-oss-20b: 24 layers, every second in a window.
    assert group_sizes(plain("gpt-oss-20b")) == [12, 12]
    # Llama 3.1 8B: 32 layers alike; a block of 16 tokens holds 16 * 32 * 2 * 8 * 128 * 2 bytes.
    assert pool_block_bytes(plain("llama-3.1-8b"), INPUTS) == 2_097_152


def test_a_layer_kind_the_engine_lacks_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="model_type 'mamba' is not one the engine can run"):
        predict(catalog.load("mamba-2.8b"), INPUTS)
