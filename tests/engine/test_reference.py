"""The reference kernels against torch and transformers, on contiguous keys and values, in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama
from transformers.models.mixtral import modeling_mixtral as mixtral

from tests.support import kernel_reference as reference

BLOCK_SIZE = 16
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64 sums of at most some hundred terms
SINGLE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}  # where transformers itself goes through float32


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def paged(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(cache, block_tables, context_lens) of contiguous sequences [context_len, ...]; NaN where there is no token."""
    needed = [-(-len(x) // BLOCK_SIZE) for x in rows]
    cache = torch.full((sum(needed) + 1, BLOCK_SIZE, *rows[0].shape[1:]), float("nan"), dtype=torch.float64)
    order = torch.arange(sum(needed), 0, -1).split(needed)
    tables = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    for x, table, blocks in zip(rows, tables, order, strict=True):
        table[: len(blocks)] = blocks
        for part, block in zip(x.split(BLOCK_SIZE), blocks, strict=True):
            cache[block, : len(part)] = part
    return cache, tables, torch.tensor([len(x) for x in rows], dtype=torch.int32)


def visible(query_len: int, context_len: int, window: int | None = None) -> torch.Tensor:
    """[query_len, context_len]: which keys the last query_len tokens see."""
    distance = torch.arange(context_len - query_len, context_len)[:, None] - torch.arange(context_len)
    return (distance >= 0) & (distance < (window or context_len))


def prefill(q: list[torch.Tensor], k: list[torch.Tensor], v: list[torch.Tensor], **more: Any) -> list[torch.Tensor]:
    """paged_prefill of each sequence's queries [query_len, num_heads, head_dim] over its keys and values."""
    k_cache, tables, lens = paged(k)
    v_cache, _, _ = paged(v)
    starts = torch.tensor([0, *map(len, q)]).cumsum(0).int()
    longest = max(map(len, q))
    scale = q[0].shape[-1] ** -0.5
    out = reference.paged_prefill(
        torch.cat(q), k_cache, v_cache, tables, starts, lens, scale, max_query_len=longest, **more
    )
    return list(out.split([len(x) for x in q]))


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] -> [1, heads, tokens, dim]."""
    return x.transpose(0, 1)[None]


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
    """torch's attention of [tokens, heads, dim] tensors, in that shape."""
    out = F.scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v), **more)
    return out[0].transpose(0, 1)


QUERIES = [(1, 1), (16, 16), (17, 17), (5, 37), (1, 50)]  # (queries, context)


@pytest.mark.parametrize("window", [None, 1, 12])
def test_attention_is_torchs_on_contiguous_keys(window: int | None) -> None:
    q = [randn(queries, 6, 32) for queries, _ in QUERIES]
    k, v = ([randn(context, 2, dim) for _, context in QUERIES] for dim in (32, 24))
    outs = prefill(q, k, v, window=window)
    for out, one_q, one_k, one_v in zip(outs, q, k, v, strict=True):
        mask = visible(len(one_q), len(one_k), window)
        torch.testing.assert_close(out, torchs(one_q, one_k, one_v, attn_mask=mask, enable_gqa=True), **CLOSE)


def test_decode_is_the_last_row_of_prefill_and_a_padded_row_is_zero() -> None:
    q, k, v = randn(3, 4, 32), [randn(n, 2, 32) for n in (1, 33)], [randn(n, 2, 32) for n in (1, 33)]
    k_cache, tables, lens = paged(k)
    v_cache, _, _ = paged(v)
    tables, lens = torch.cat([tables, tables[:1]]), torch.cat([lens, torch.zeros(1, dtype=torch.int32)])
    out = reference.paged_decode(q, k_cache, v_cache, tables, lens, 32**-0.5)
    for i in range(2):
        expected = torchs(q[i : i + 1], k[i], v[i], enable_gqa=True)
        torch.testing.assert_close(out[i : i + 1], expected, **CLOSE)
    assert out[2].abs().max() == 0


def theirs(model: Any, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **caps: Any) -> Any:
    """A transformers model's own attention of [tokens, heads, dim] tensors, in that shape."""
    heads = (heads_first(x) for x in (q, k, v))
    out, _ = model.eager_attention_forward(module, *heads, *more, scaling=q.shape[-1] ** -0.5, **caps)
    return out[0]


def test_softcap_is_gemma2s() -> None:
    q, k, v = randn(5, 4, 32), randn(37, 2, 32), randn(37, 2, 32)
    mask = torch.zeros(5, 37, dtype=torch.float64).masked_fill(~visible(5, 37), float("-inf"))
    module = SimpleNamespace(num_key_value_groups=2, training=False)
    expected = theirs(gemma2, module, q, k, v, mask, softcap=2.0)
    torch.testing.assert_close(prefill([q], [k], [v], softcap=2.0)[0], expected, **SINGLE)


def test_sinks_are_gpt_oss() -> None:
    q, k, v, sinks = randn(5, 4, 32), randn(37, 2, 32), randn(37, 2, 32), randn(4)
    mask = torch.zeros(5, 37, dtype=torch.float64).masked_fill(~visible(5, 37, 12), float("-inf"))
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
    expected = theirs(gpt_oss, module, q, k, v, mask)
    torch.testing.assert_close(prefill([q], [k], [v], sinks=sinks, window=12)[0], expected, **CLOSE)


def test_a_scaled_cache_stands_for_scaled_keys_and_values() -> None:
    q, k, v = randn(3, 2, 32), randn(20, 2, 32), randn(20, 2, 32)
    scaled = prefill([q], [k], [v], k_scale=0.5, v_scale=3.0)[0]
    torch.testing.assert_close(scaled, prefill([q], [k * 0.5], [v * 3.0])[0], **CLOSE)


def test_latents_are_every_heads_keys_and_values_before_their_projections() -> None:
    """q through each head's key matrix and the output through its value matrix, or keys and values written out."""
    heads, latent_dim, rope_dim, nope_dim, value_dim, context = 3, 24, 8, 16, 20, 37
    latent, k_rope = randn(context, latent_dim), randn(context, rope_dim)
    key_up, value_up = randn(heads, nope_dim, latent_dim), randn(heads, value_dim, latent_dim)
    q_nope, q_rope = randn(1, heads, nope_dim), randn(1, heads, rope_dim)
    k = torch.cat([torch.einsum("cl,hnl->chn", latent, key_up), k_rope[:, None].expand(-1, heads, -1)], -1)
    v = torch.einsum("cl,hvl->chv", latent, value_up)
    q = torch.cat([q_nope, q_rope], -1)
    expected = torchs(q, k, v, scale=0.2)

    cache, tables, lens = paged([torch.cat([latent, k_rope], -1)])
    absorbed = torch.cat([torch.einsum("thn,hnl->thl", q_nope, key_up), q_rope], -1)
    out = reference.latent_decode(absorbed, cache, tables, lens, 0.2, latent_dim=latent_dim)
    torch.testing.assert_close(torch.einsum("thl,hvl->thv", out, value_up), expected, **CLOSE)


def test_tokens_go_to_their_slots_and_no_others() -> None:
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 6)
    k_cache, v_cache = torch.zeros(3, 16, 2, 4), torch.zeros(3, 16, 2, 6)
    reference.store_kv(k, v, k_cache, v_cache, torch.tensor([17, -1, 47]))
    for x, cache in ((k, k_cache), (v, v_cache)):
        assert torch.equal(cache[1, 1], x[0])
        assert torch.equal(cache[2, 15], x[2])
        assert cache.count_nonzero() == x[[0, 2]].count_nonzero()


def test_latents_go_to_their_slots_and_no_others() -> None:
    latent, cache = torch.randn(2, 4), torch.zeros(2, 16, 4)
    reference.store_latent(latent, cache, torch.tensor([-1, 16]))
    assert torch.equal(cache[1, 0], latent[1])
    assert cache.count_nonzero() == 4


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (1.0, 0.5),  # divided by the scale, 2
        (34.0, 16.0),  # 17 lies between 16 and 18: to the even mantissa
        (38.0, 20.0),  # 19 between 18 and 20
        (2000.0, 448.0),  # the largest
        (-1e9, -448.0),
        (2 * 2.0**-10, 0.0),  # half the smallest step, 2^-9: to even
        (2 * 3 * 2.0**-10, 2.0**-8),  # 1.5 steps
    ],
)
def test_float8_is_the_nearest_value_to_even_and_saturates(value: float, stored: float) -> None:
    k_cache, v_cache = (torch.zeros(1, 16, 1, 1, dtype=torch.float8_e4m3fn) for _ in range(2))
    x = torch.full((1, 1, 1), value)
    reference.store_kv(x, x, k_cache, v_cache, torch.tensor([3]), 2.0, 2.0)
    assert k_cache[0, 3, 0, 0].item() == stored
    assert v_cache[0, 3, 0, 0].item() == stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_llamas(dtype: torch.dtype) -> None:
    norm = llama.LlamaRMSNorm(48, 1e-5)
    norm.weight.data = torch.randn(48, dtype=dtype)
    x, residual = torch.randn(5, 48, dtype=dtype), torch.randn(5, 48, dtype=dtype)
    torch.testing.assert_close(reference.rms_norm(x, norm.weight, 1e-5), norm(x))
    y, total = reference.rms_norm(x, norm.weight, 1e-5, residual=residual)
    torch.testing.assert_close(y, norm(x + residual))
    assert torch.equal(total, x + residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_with_unit_offset_is_gemmas(dtype: torch.dtype) -> None:
    norm = gemma2.Gemma2RMSNorm(48, 1e-6)
    norm.weight.data = torch.randn(48, dtype=dtype)
    x = torch.randn(5, 3, 48, dtype=dtype)
    torch.testing.assert_close(reference.rms_norm(x, norm.weight, 1e-6, unit_offset=True), norm(x))


def angles(positions: torch.Tensor, half: int) -> torch.Tensor:
    return positions[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)


def test_rotation_by_halves_is_llamas() -> None:
    q, k, positions = randn(4, 3, 32), randn(4, 2, 32), torch.tensor([0, 7, 2, 2])
    table = torch.cat([f(angles(torch.arange(8), 16)) for f in (torch.cos, torch.sin)], 1)
    both = angles(positions, 16).repeat(1, 2)[None]
    expected = llama.apply_rotary_pos_emb(heads_first(q), heads_first(k), both.cos(), both.sin())
    for got, want in zip(reference.rotate(q, k, table, positions), expected, strict=True):
        torch.testing.assert_close(heads_first(got), want, **CLOSE)


def test_rotation_by_neighbours_is_a_complex_product_and_the_rest_of_a_head_stays() -> None:
    q, k, positions = randn(4, 3, 32), randn(4, 2, 32), torch.tensor([0, 7, 2, 2])
    table = torch.cat([f(angles(torch.arange(8), 6)) for f in (torch.cos, torch.sin)], 1)
    turn = torch.polar(torch.ones(4, 6, dtype=torch.float64), angles(positions, 6))[:, None]
    for got, x in zip(reference.rotate(q, k, table, positions, interleaved=True), (q, k), strict=True):
        pairs = torch.view_as_complex(x[..., :12].unflatten(-1, (6, 2)).contiguous())
        torch.testing.assert_close(got[..., :12], torch.view_as_real(pairs * turn).flatten(-2), **CLOSE)
        assert torch.equal(got[..., 12:], x[..., 12:])


def test_keys_are_normed_then_turned_then_stored() -> None:
    """As in transformers' models that norm q and k: the norm is of each head, before its rotation."""
    q, k, v, positions = randn(3, 4, 32), randn(3, 2, 32), randn(3, 2, 24), torch.tensor([0, 7, 2])
    norms = [llama.LlamaRMSNorm(32, 1e-5).double() for _ in range(2)]
    for norm in norms:
        norm.weight.data = randn(32)
    table = torch.cat([f(angles(torch.arange(8), 16)) for f in (torch.cos, torch.sin)], 1)
    both = angles(positions, 16).repeat(1, 2)[None]
    normed = (heads_first(norm(x)) for norm, x in zip(norms, (q, k), strict=True))
    q_turned, k_turned = llama.apply_rotary_pos_emb(*normed, both.cos(), both.sin())

    k_cache, v_cache = randn(2, 16, 2, 32) * 0, randn(2, 16, 2, 24) * 0
    weights: dict[str, Any] = {"q_norm": norms[0].weight.data, "k_norm": norms[1].weight.data, "norm_eps": 1e-5}
    slots = torch.tensor([17, -1, 0])
    got = reference.rotate_and_store(q, k, v, table, positions, k_cache, v_cache, slots, **weights)
    torch.testing.assert_close(heads_first(got), q_turned, **SINGLE)  # their norm goes through float32
    torch.testing.assert_close(k_cache[[1, 0], [1, 0]], k_turned[0].transpose(0, 1)[[0, 2]], **SINGLE)
    assert torch.equal(v_cache[[1, 0], [1, 0]], v[[0, 2]])
    assert v_cache.count_nonzero() == 2 * 2 * 24


def test_gates_are_torchs() -> None:
    x = randn(3, 40)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(reference.gated_activation(x, "silu"), F.silu(gate) * up, **CLOSE)
    torch.testing.assert_close(reference.gated_activation(x, "gelu"), F.gelu(gate) * up, **CLOSE)
    tanh = F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(reference.gated_activation(x, "gelu_tanh"), tanh * up, **CLOSE)


def choices(tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float64, ids) [tokens, top_k]."""
    weights, ids = torch.rand(tokens, experts, dtype=torch.float64).topk(top_k)
    return weights, ids


def test_experts_are_mixtrals() -> None:
    config = MixtralConfig(hidden_size=24, intermediate_size=20, num_local_experts=5)
    experts = mixtral.MixtralExperts(config).double()
    experts.gate_up_proj.data, experts.down_proj.data = randn(5, 40, 24), randn(5, 24, 20)
    x, (weights, ids) = randn(7, 24), choices(7, 5, 2)
    got = reference.moe_mlp(x, experts.gate_up_proj.data, experts.down_proj.data, ids, weights, "silu")
    torch.testing.assert_close(got, experts(x, ids, weights).detach(), **CLOSE)


def test_clamped_experts_with_biases_are_gpt_oss() -> None:
    config = GptOssConfig(hidden_size=24, intermediate_size=20, num_local_experts=5)
    experts = gpt_oss.GptOssExperts(config).double()
    for parameter in experts.parameters():
        parameter.data = randn(*parameter.shape)
    x, (weights, ids) = randn(7, 24), choices(7, 5, 2)
    apart = torch.cat([torch.arange(0, 40, 2), torch.arange(1, 40, 2)])  # there gate and up alternate
    got = reference.moe_mlp(
        x,
        experts.gate_up_proj.data[..., apart].mT,
        experts.down_proj.data.mT,
        ids,
        weights,
        "clamped_swiglu",
        b13=experts.gate_up_proj_bias.data[:, apart],
        b2=experts.down_proj_bias.data,
        limit=experts.limit,
        alpha=experts.alpha,
    )
    torch.testing.assert_close(got, experts(x, ids, weights).detach(), **CLOSE)
