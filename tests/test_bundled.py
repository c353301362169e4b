"""The planner's formulas for the bundled engine against the tensors that the engine makes, at the models' real sizes.

The engine is built on torch's meta device: every tensor has its shape and dtype, and no memory.
"""

from dataclasses import replace

import pytest
import torch

from engine import kernels
from engine.kv_cache import KVCache, group_layers
from engine.loader import NoWeights
from engine.memory import nbytes
from engine.models import Model
from engine.tp import TensorParallel
from kvplan import catalog
from kvplan.errors import UnsupportedModelError
from kvplan.rules.bundled import EngineInputs, group_sizes, pool_block_bytes, predict
from kvplan.spec import ModelSpec

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


def test_hybrid_models_are_grouped_by_hand_count() -> None:
    # Gemma 3 12B: 48 layers, every sixth full: 8 full, 40 in windows; groups of 8: one full, five windowed.
    assert group_sizes(plain("gemma-3-12b")) == [8, 8, 8, 8, 8, 8]
    # gpt-oss-20b: 24 layers, every second in a window.
    assert group_sizes(plain("gpt-oss-20b")) == [12, 12]
    # Llama 3.1 8B: 32 layers alike; a block of 16 tokens holds 16 * 32 * 2 * 8 * 128 * 2 bytes.
    assert pool_block_bytes(plain("llama-3.1-8b"), INPUTS) == 2_097_152


def test_a_layer_kind_the_engine_lacks_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="does not run layers with RecurrentState"):
        predict(catalog.load("mamba-2.8b"), INPUTS)
