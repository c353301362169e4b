"""What kinds of cache a model keeps is a fact of the model, whatever server runs it."""

import pytest

from kvplan.models import catalog
from kvplan.models.spec import FullAttention, LatentAttention, RecurrentState, SlidingWindow


@pytest.mark.parametrize(
    ("model", "kinds", "heads"),
    [
        ("llama-3.1-8b", {FullAttention}, 8),  # num_key_value_heads 8
        ("gpt-oss-20b", {FullAttention, SlidingWindow}, 8),
        ("deepseek-v3", {LatentAttention}, 0),  # one latent, whole on every rank
        ("qwen3-next-80b-a3b", {FullAttention, RecurrentState}, 2),
    ],
)
def test_the_kinds_of_cache_of_a_model(model: str, kinds: set[type], heads: int) -> None:
    spec = catalog.load(model)
    assert spec.cache_kinds == kinds
    assert spec.is_mla == (LatentAttention in kinds)
    assert spec.has_states == (RecurrentState in kinds)
    assert spec.has_attention
    assert spec.most_kv_heads == heads


def test_sparse_attention_is_that_of_an_indexer() -> None:
    assert catalog.load("deepseek-v3.2").is_sparse_mla
    assert not catalog.load("deepseek-v3").is_sparse_mla
    assert not catalog.load("deepseek-v3.2").is_pooled  # one key per token
