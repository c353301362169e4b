"""Ollama's defaults, as its source states them (fb30760)."""

import pytest

from kvplan.servers.llamacpp.ollama import Ollama, settings

GIB = 1 << 30


@pytest.mark.parametrize(
    ("chosen", "memory_gib", "context", "batch", "slots"),
    [
        (Ollama(), 24, 32_768, 1_024, 1),
        (Ollama(), 12, 4_096, 512, 1),
        (Ollama(), 80, 131_072, 2_048, 1),  # 262,144, but never above what the model was trained for
        (Ollama(num_ctx=8_192), 12, 8_192, 1_024, 1),
        (Ollama(num_ctx=8_192, num_parallel=4), 12, 8_192, 1_024, 4),
        (Ollama(num_batch=256), 24, 32_768, 256, 1),
    ],
)
def test_memory_decides_the_context_and_the_context_the_batch(
    chosen: Ollama, memory_gib: int, context: int, batch: int, slots: int
) -> None:
    own = settings(chosen, "llama", 131_072, memory_gib * GIB)
    assert (own.ctx, own.batch, own.ubatch, own.slots) == (context * slots, batch, batch, slots)
    assert not own.is_unified


def test_models_with_states_have_one_slot() -> None:
    assert settings(Ollama(num_parallel=4), "qwen35moe", 262_144, 24 * GIB).slots == 1


def test_cache_type_and_flash_attention_are_passed_on() -> None:
    own = settings(Ollama(kv_cache_type="q8_0", flash_attention=True, num_gpu=20), "llama", 8_192, 24 * GIB)
    assert (own.cache_k, own.cache_v, own.flash, own.gpu_layers) == ("Q8_0", "Q8_0", "on", 20)
