"""Bytes per token, by KV dtype and kind of layer: numbers worked by hand, and laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.errors import UsageError
from kvplan.models.spec import (
    FullAttention,
    KeyIndex,
    LatentAttention,
    Part,
    RecurrentState,
    Sharing,
    SlidingWindow,
    SparseIndexer,
)
from kvplan.sizing.layout import KV_DTYPES, cell_bytes, latent_bytes, local_kv_heads, state_bytes, token_bytes

# One KV head of 128: vLLM 0.33's own page sizes divided by block size and heads (v1/kv_cache_interface.py).
HEAD_OF_128 = {
    "bfloat16": 512,
    "float16": 512,
    "float32": 1024,
    "fp8": 256,
    "fp8_e4m3": 256,
    "fp8_e5m2": 256,
    "fp8_per_token_head": 264,
    "int8_per_token_head": 264,
    "int4_per_token_head": 136,
    "nvfp4": 144,
    "nvfp4_4over6": 144,
    "turboquant_k8v4": 196,
    "turboquant_4bit_nc": 134,
    "turboquant_k3v4_nc": 118,
    "turboquant_3bit_nc": 102,
}


@pytest.mark.parametrize(("dtype", "expected"), HEAD_OF_128.items())
def test_a_head_of_128_costs_what_the_server_pages_say(dtype: str, expected: int) -> None:
    assert cell_bytes(dtype, 128, 128) == expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", 1152),  # (512 + 64) * 2
        ("fp8", 576),
        ("fp8_ds_mla", 656),  # 512 fp8 + 4 fp32 scales + 64 bf16
        ("nvfp4_ds_mla", 352),  # 256 + 32 + 64
    ],
)
def test_a_latent_of_deepseek(dtype: str, expected: int) -> None:
    assert latent_bytes(dtype, 512, 64) == expected


def test_a_latent_is_whole_on_every_rank() -> None:
    assert {token_bytes(LatentAttention(512, 64), "bfloat16", tp) for tp in (1, 2, 8, 16)} == {1152}


def test_indexer_keys_are_fp8_with_a_scale_per_128() -> None:
    assert token_bytes(SparseIndexer(128), "bfloat16", 8) == 132
    assert token_bytes(KeyIndex(128), "fp8", 8) == 256


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_kv_heads_are_split_then_repeated(tp: int, heads: int) -> None:
    assert local_kv_heads(8, tp) == heads


def test_heads_that_neither_split_nor_repeat_are_refused() -> None:
    with pytest.raises(UsageError, match="6 KV heads can neither be split nor repeated"):
        local_kv_heads(6, 4)


@pytest.mark.parametrize(
    ("state", "dtype", "tp", "expected"),
    [
        # Nemotron-H-8B: 3 x 10,240 bf16 + 128 x 64 x 128 fp32
        (
            RecurrentState(
                "mamba2", 4, (Part(128, 64), *(Part(8, 128, Sharing.GROUPS),) * 2), 128, (64, 128), "float32"
            ),
            "bfloat16",
            1,
            3 * 10_240 * 2 + 128 * 64 * 128 * 4,
        ),
        # Qwen3-Next on 4 ranks: 3 x 2,048 bf16 + 8 x 128 x 128 bf16
        (
            RecurrentState("gated_delta_net", 4, (Part(16, 128), Part(16, 128), Part(32, 128)), 32, (128, 128)),
            "bfloat16",
            4,
            3 * 2_048 * 2 + 8 * 128 * 128 * 2,
        ),
        # Jamba on 2 ranks: 3 x 4,096 + 4,096 x 16, bf16
        (RecurrentState("mamba1", 4, (Part(8192),), 8192, (16, 1)), "bfloat16", 2, (3 * 4_096 + 4_096 * 16) * 2),
    ],
)
def test_state_bytes_match_the_shapes_a_server_logs(state: RecurrentState, dtype: str, tp: int, expected: int) -> None:
    assert state_bytes(state, dtype, tp) == expected


def test_a_single_group_is_repeated_on_every_rank() -> None:
    state = RecurrentState("mamba2", 4, (Part(1, 128, Sharing.GROUPS),), 0, (1, 1))
    assert {state_bytes(state, "bfloat16", tp) for tp in (1, 2, 4)} == {3 * 128 * 2}


heads = st.sampled_from([1, 2, 4, 8, 16, 32])
widths = st.sampled_from([64, 128, 256])
dtypes = st.sampled_from([name for name in KV_DTYPES if name in HEAD_OF_128])


@given(heads, widths, dtypes, heads)
def test_more_ranks_never_take_more_per_rank(kv_heads: int, width: int, dtype: str, tp: int) -> None:
    cache = FullAttention(kv_heads, width, width)
    assert token_bytes(cache, dtype, 2 * tp) <= token_bytes(cache, dtype, tp)


@given(heads, widths, heads)
def test_fewer_bits_never_take_more(kv_heads: int, width: int, tp: int) -> None:
    cache = SlidingWindow(kv_heads, width, width, 4096)
    sizes = [token_bytes(cache, dtype, tp) for dtype in ("float32", "bfloat16", "fp8", "int4_per_token_head")]
    assert sizes == sorted(sizes, reverse=True)


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="kv_cache_dtype 'int3'"):
        cell_bytes("int3", 128, 128)


def test_drafts_take_no_columns_of_mamba_1() -> None:
    """vLLM 0.33's shapes of Jamba mini with five n-gram drafts: (3, 8192) and (8192, 16), in bfloat16."""
    state = RecurrentState("mamba1", 4, (Part(8192),), 8192, (16, 1))
    assert state_bytes(state, "bfloat16", 1, spec_tokens=5) == (3 * 8_192 + 8_192 * 16) * 2
