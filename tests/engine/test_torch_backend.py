"""The torch backend against the slow reference in float64, function by function."""

from typing import Any

import pytest
import torch

from engine.kernels import torch_backend
from tests.support import kernel_reference as reference

BLOCK_SIZE, NUM_BLOCKS = 4, 30
ROUNDING = 2e-6  # float32 sums of some dozens of terms of size 1


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def paged(lens: list[int], kv_heads: int, head_dim: int) -> dict[str, Any]:
    """Random pools, and tables that name each sequence's blocks; blocks that nobody holds are nan."""
    source = torch.Generator().manual_seed(sum(lens))
    order = (1 + torch.randperm(NUM_BLOCKS - 1, generator=source)).tolist()
    width = max(-(-n // BLOCK_SIZE) for n in lens)
    tables, used = torch.zeros(len(lens), width, dtype=torch.int32), 0
    for row, n in enumerate(lens):
        blocks = -(-n // BLOCK_SIZE)
        tables[row, :blocks] = torch.tensor(order[used : used + blocks])
        used += blocks
    shape = (NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim)
    pools = [torch.randn(shape, generator=source) for _ in range(2)]
    for pool in pools:
        pool[order[used:]] = torch.nan
        pool[0] = 0
    return {
        "k_cache": pools[0],
        "v_cache": pools[1],
        "block_tables": tables,
        "context_lens": torch.tensor(lens, dtype=torch.int32),
    }


FEATURES: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"softcap": 1.5},
    {"sinks": True},
    {"window": 3, "softcap": 2.0, "sinks": True},
]


def options(features: dict[str, Any], num_heads: int) -> dict[str, Any]:
    return {**features, "sinks": torch.linspace(-1, 1, num_heads) if features.get("sinks") else None}


def near(tensor: Any, expected: Any) -> bool:
    return bool((tensor.double() - expected.double()).abs().max() < ROUNDING * max(1, expected.abs().max()))


@pytest.mark.parametrize("features", FEATURES, ids=["plain", "window", "softcap", "sinks", "all"])
@pytest.mark.parametrize(("num_heads", "kv_heads"), [(4, 4), (6, 2), (7, 1)])
def test_decode(features: dict[str, Any], num_heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = [1, 3, 4, 5, 13, 22]
    pages, q = paged(lens, kv_heads, 8), torch.randn(len(lens), num_heads, 8)
    expected = reference.paged_decode(q, **pages, scale=0.3, **options(features, num_heads))
    for gather_bytes in (torch_backend.GATHER_BYTES, 1):  # all at once, and one sequence at a time
        monkeypatch.setattr(torch_backend, "GATHER_BYTES", gather_bytes)
        assert near(torch_backend.paged_decode(q, **pages, scale=0.3, **options(features, num_heads)), expected)


@pytest.mark.parametrize("features", FEATURES, ids=["plain", "window", "softcap", "sinks", "all"])
def test_prefill_of_whole_prompts_and_of_parts(features: dict[str, Any]) -> None:
    lens, query_lens = [1, 4, 9, 17], [1, 4, 2, 13]
    pages, q = paged(lens, 2, 8), torch.randn(sum(query_lens), 6, 8)
    starts = torch.tensor([0, 1, 5, 7, 20], dtype=torch.int32)
    inputs = {**pages, "query_start": starts, "scale": 0.3, "max_query_len": 13, **options(features, 6)}
    assert near(torch_backend.paged_prefill(q, **inputs), reference.paged_prefill(q, **inputs))


def test_latent_decode_and_a_row_that_is_not_there() -> None:
    lens = [3, 0, 9]
    pages = paged(lens, 1, 12)
    cache, q = pages["k_cache"][:, :, 0], torch.randn(3, 5, 12)
    inputs: Any = (q, cache, pages["block_tables"], pages["context_lens"], 0.2)
    output = torch_backend.latent_decode(*inputs, latent_dim=8)
    assert near(output, reference.latent_decode(*inputs, latent_dim=8))
    assert not output[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_stored(dtype: torch.dtype) -> None:
    k, v = torch.randn(5, 2, 8) * 300, torch.randn(5, 2, 8)
    slots = torch.tensor([3, -1, 40, 7, 0])
    pools = [[torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 8, dtype=dtype) for _ in range(2)] for _ in range(2)]
    scale = 2.0 if dtype == torch.float8_e4m3fn else 1.0
    for module, (k_cache, v_cache) in zip((torch_backend, reference), pools, strict=True):
        module.store_kv(k, v, k_cache, v_cache, slots, scale, scale)
    for pool, expected in zip(*pools, strict=True):
        assert torch.equal(pool.float(), expected.float())


@pytest.mark.parametrize("unit_offset", [False, True])
def test_norm_and_rotation(unit_offset: bool) -> None:
    x, residual, weight = torch.randn(6, 16), torch.randn(6, 16), torch.randn(16)
    alone: dict[str, Any] = {"unit_offset": unit_offset}
    assert near(torch_backend.rms_norm(x, weight, 1e-6, **alone), reference.rms_norm(x, weight, 1e-6, **alone))
    added: dict[str, Any] = {"residual": residual, **alone}
    outputs = torch_backend.rms_norm(x, weight, 1e-6, **added)
    expected = reference.rms_norm(x, weight, 1e-6, **added)
    assert all(near(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))
    q, k, table = torch.randn(6, 3, 12), torch.randn(6, 1, 12), torch.randn(40, 8)
    for interleaved in (False, True):
        inputs: Any = (q, k, table, torch.tensor([0, 5, 39, 1, 1, 7]))
        outputs = torch_backend.rotate(*inputs, interleaved=interleaved)
        expected = reference.rotate(*inputs, interleaved=interleaved)
        assert all(near(a, b) for a, b in zip(outputs, expected, strict=True))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_rotation_and_storing_in_one_call(dtype: torch.dtype, normed: bool) -> None:
    q, k, v, table = torch.randn(4, 6, 12), torch.randn(4, 2, 12), torch.randn(4, 2, 8), torch.randn(40, 8)
    positions, slots = torch.tensor([0, 5, 39, 1]), torch.tensor([3, -1, 40, 7])
    scales = {"k_scale": 2.0, "v_scale": 0.5} if dtype == torch.float8_e4m3fn else {}
    weights = {"q_norm": torch.randn(12), "k_norm": torch.randn(12), "norm_eps": 1e-6} if normed else {}
    results = []
    for module in (torch_backend, reference):
        caches = [torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, width).to(dtype) for width in (12, 8)]
        options: dict[str, Any] = {**scales, **weights, "interleaved": True}
        turned = module.rotate_and_store(q.clone(), k.clone(), v, table, positions, *caches, slots, **options)
        results.append((turned, *(cache.float() for cache in caches)))
    (ours, our_k, our_v), (theirs, their_k, their_v) = results
    assert near(ours, theirs)
    assert torch.equal(our_v, their_v)
    if dtype == torch.float32:
        assert near(our_k, their_k)
    else:  # a value between two of fp8's may go either way
        assert ((our_k - their_k).abs() <= their_k.abs() / 8 + 2**-9).all()


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "clamped_swiglu"])
def test_activations_and_experts(kind: Any) -> None:
    limits: dict[str, Any] = {"limit": 1.0, "alpha": 1.7} if kind == "clamped_swiglu" else {}
    x = torch.randn(5, 12)
    assert near(torch_backend.gated_activation(x, kind, **limits), reference.gated_activation(x, kind, **limits))
    ids, weights = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [0, 1]]), torch.rand(5, 2)
    inputs: dict[str, Any] = {
        "x": torch.randn(5, 8), "w13": torch.randn(4, 12, 8), "w2": torch.randn(4, 8, 6), "expert_ids": ids,
        "expert_weights": weights, "kind": kind, "b13": torch.randn(4, 12), "b2": torch.randn(4, 8), **limits,
    }  # fmt: skip
    assert near(torch_backend.moe_mlp(**inputs), reference.moe_mlp(**inputs))


@pytest.mark.parametrize(
    "how",
    [
        {"top_k": 3, "scoring": "softmax"},
        {"top_k": 3, "scoring": "softmax", "groups": 4, "top_groups": 2, "scale": 16.0},
        {"top_k": 4, "scoring": "sigmoid", "groups": 4, "top_groups": 2, "renormalize": True, "scale": 2.5},
    ],
    ids=str,
)
def test_tokens_go_to_their_best_experts(how: dict[str, Any]) -> None:
    logits = torch.randn(9, 24)
    correction = torch.randn(24) if how["scoring"] == "sigmoid" else None
    ids, weights = torch_backend.route(logits, correction, **how)
    expected_ids, expected = reference.route(logits, correction, **how)
    assert torch.equal(ids, expected_ids)
    assert near(weights, expected.float())
