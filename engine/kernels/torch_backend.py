"""The kernels on any device in plain torch, as fast as that goes: what the engine runs on a CPU.

Shapes, dtypes and meanings are those of the Triton launchers of the same names. The slow and obvious version of both,
which tests compare them with, is tests/support/kernel_reference.py.

Two findings on CPUs shape the attention: gathering blocks into one contiguous tensor beats walking them, and torch
2.13's scaled_dot_product_attention is fused, two to seven times faster, only for four dimensions and a V as wide as K.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F

from engine.kernels.dequantize import fp8_block_linear as fp8_block_linear  # a backend has it
from engine.kernels.dequantize import fp8_linear as fp8_linear
from engine.kernels.dequantize import int4_linear as int4_linear
from engine.kernels.dequantize import mxfp4_linear
from engine.kernels.dequantize import nvfp4_linear as nvfp4_linear
from engine.kernels.lora_rows import LoraRows
from engine.kernels.matrices import Fp8BlockMatrix, Matrix, Mxfp4Matrix, Nvfp4Matrix, shape_of

FP8_MAX = 448.0  # largest float8_e4m3fn
IS_PLANNED = False  # nothing is planned on the host
LORA_WALKS_ON_HOST = True  # slot after slot, which the host must know
PART_ELEMENTS = 1 << 22  # logits that are scaled, sorted or summed at once
GATHER_BYTES = 4 << 20  # stays in a core's caches until it is read, and keeps short contexts from being padded to long


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


# --- attention over the paged cache ---------------------------------------------------------------------------------


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write each token's K and V [num_tokens, num_kv_heads, head_dim] into its slot; a negative slot is skipped."""
    slots, written = _slots(slot_mapping)
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        _write(cache, slots, x if written is None else x[written], scale)


def store_latent(latent: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write each token's latent [num_tokens, width] into its slot of cache [num_blocks, block_size, width]."""
    slots, written = _slots(slot_mapping)
    _write(cache, slots, latent if written is None else latent[written], 1.0)


def _slots(slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The slots to write, and which tokens they belong to (None: all)."""
    written = slot_mapping >= 0
    return (slot_mapping, None) if bool(written.all()) else (slot_mapping[written], written)


def _write(cache: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, scale: float) -> None:
    flat = cache.view(-1, *cache.shape[2:])
    if cache.dtype == torch.float8_e4m3fn:
        x = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)
        flat.view(torch.uint8)[slots] = x.to(cache.dtype).view(torch.uint8)  # torch cannot index-write fp8 on a CPU
    else:
        flat[slots] = x.to(cache.dtype)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    work: object = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend one query token per sequence over its paged KV; work is the Triton kernel's and changes nothing.

    q             [num_seqs, num_heads, head_dim]
    k_cache       [num_blocks, block_size, num_kv_heads, head_dim]; v_cache alike, head_dim_v wide
    block_tables  [num_seqs, max_blocks] int32
    context_lens  [num_seqs] int32, this token included; 0 marks a padded row, whose output is 0
    out           where the result is written, of its shape and dtype; None: a new tensor
    returns       [num_seqs, num_heads, head_dim_v], dtype of q
    """
    out = q.new_empty(*q.shape[:2], v_cache.shape[3]) if out is None else out
    for rows in _slices(context_lens, k_cache[0].nbytes + v_cache[0].nbytes, k_cache.shape[1], window):
        out[rows] = _decode_rows(
            q[rows], k_cache, v_cache, block_tables[rows], context_lens[rows], scale, window, softcap, sinks,
            k_scale, v_scale,
        )  # fmt: skip
    return out


def _decode_rows(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """Some sequences of paged_decode, their blocks gathered side by side."""
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, head_dim_v = v_cache.shape[2:]
    positions, seen = _seen_blocks(block_tables, context_lens, k_cache.shape[1], window)
    k = _gather(k_cache, seen, q.dtype, k_scale).transpose(1, 2)
    v = _gather(v_cache, seen, q.dtype, v_scale).transpose(1, 2)
    mask = positions < context_lens[:, None]
    if window is not None:
        mask &= positions >= context_lens[:, None] - window
    grouped = q.reshape(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)  # a group shares K and V
    sinks = None if sinks is None else sinks.view(1, num_kv_heads, -1, 1)
    out = _attend(grouped, k, v, mask[:, None, None], scale, softcap, sinks).reshape(num_seqs, num_heads, head_dim_v)
    return out.masked_fill_((context_lens == 0)[:, None, None], 0)


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    max_query_len: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    tiles: object = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each sequence's last query_len tokens over its paged KV, causally; their own KV is stored already.

    q            [num_tokens, num_heads, head_dim], sequence after sequence
    query_start  [num_seqs + 1] int32: sequence i's tokens are query_start[i]:query_start[i + 1]
    tiles        is for kernels that are planned
    out          where the result is written, of its shape and dtype; None: a new tensor
    returns      [num_tokens, num_heads, head_dim_v], dtype of q
    """
    num_heads, (num_kv_heads, head_dim_v) = q.shape[1], v_cache.shape[2:]
    block_size, group = k_cache.shape[1], num_heads // num_kv_heads
    sinks = None if sinks is None else sinks.view(num_kv_heads, group, 1, 1)
    out = q.new_empty(*q.shape[:2], head_dim_v) if out is None else out
    starts, lens = query_start.tolist(), context_lens.tolist()
    for i, context_len in enumerate(lens):
        rows = slice(starts[i], starts[i + 1])
        query_len = starts[i + 1] - starts[i]
        first = 0 if window is None else max(0, context_len - query_len - window + 1) // block_size
        blocks = block_tables[i : i + 1, first : cdiv(context_len, block_size)]
        keys = slice(0, context_len - first * block_size)
        k, v = (  # [num_kv_heads, group, num_keys, head_dim], one copy for the group
            _gather(cache, blocks, q.dtype, s)[0, keys].transpose(0, 1)[:, None].expand(-1, group, -1, -1)
            for cache, s in ((k_cache, k_scale), (v_cache, v_scale))
        )
        mask = _causal(query_len, context_len, first * block_size, window, q.device)
        grouped = q[rows].transpose(0, 1).unflatten(0, (num_kv_heads, group))
        out[rows] = _attend(grouped, k, v, mask, scale, softcap, sinks).flatten(0, 1).transpose(0, 1)
    return out


def latent_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    latent_dim: int,
    work: object = None,
) -> torch.Tensor:
    """MLA, absorbed: attend one query per sequence over cached latents; K is a whole row, V its first latent_dim.

    q        [num_seqs, num_heads, width]
    cache    [num_blocks, block_size, width]
    returns  [num_seqs, num_heads, latent_dim]
    """
    out = q.new_empty(*q.shape[:2], latent_dim)
    for rows in _slices(context_lens, cache[0].nbytes, cache.shape[1], None):
        positions, seen = _seen_blocks(block_tables[rows], context_lens[rows], cache.shape[1], None)
        k = _gather(cache, seen, q.dtype, 1.0)[:, None]
        mask = (positions < context_lens[rows, None])[:, None, None]
        attended = _attend(q[rows, None], k, k, mask, scale, None, None)[:, 0, :, :latent_dim]
        out[rows] = attended.masked_fill((context_lens[rows] == 0)[:, None, None], 0)
    return out


def _slices(
    context_lens: torch.Tensor, block_bytes: int, block_size: int, window: int | None
) -> list[torch.Tensor | slice]:
    """Sequences of like length together, each slice's gathered KV at most GATHER_BYTES (but one sequence at least)."""
    lens = [min(n, n if window is None else window) for n in context_lens.tolist()]
    if cdiv(max(lens), block_size) * block_bytes * len(lens) <= GATHER_BYTES:
        return [slice(None)]
    order = sorted(range(len(lens)), key=lens.__getitem__, reverse=True)
    slices: list[torch.Tensor | slice] = []
    while order:
        count = max(1, GATHER_BYTES // max(1, cdiv(lens[order[0]], block_size) * block_bytes))
        slices.append(torch.tensor(order[:count], device=context_lens.device))
        order = order[count:]
    return slices


def _seen_blocks(
    block_tables: torch.Tensor, context_lens: torch.Tensor, block_size: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions [num_keys], block ids [num_seqs, n]) of the columns that any sequence of the batch reads."""
    shortest, longest = int(context_lens.min()), int(context_lens.max())
    first = 0 if window is None else max(0, shortest - window) // block_size
    last = max(first + 1, cdiv(longest, block_size))
    positions = torch.arange(first * block_size, last * block_size, device=block_tables.device)
    return positions, block_tables[:, first:last]


def _gather(cache: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """The named blocks side by side: [num_seqs, n * block_size, ...] in dtype."""
    is_fp8 = cache.dtype == torch.float8_e4m3fn
    stored = cache.view(torch.uint8) if is_fp8 else cache
    rows = stored.index_select(0, blocks.reshape(-1))
    if is_fp8:
        rows = rows.view(cache.dtype).to(dtype) * scale
    return rows.to(dtype).view(blocks.shape[0], -1, *cache.shape[2:])


def _causal(
    query_len: int, context_len: int, first: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Which keys, from position `first` on, each of the last query_len positions sees; None: the plain triangle."""
    if query_len == context_len and window is None:
        return None
    queries = torch.arange(context_len - query_len, context_len, device=device)[:, None]
    keys = torch.arange(first, context_len, device=device)
    mask = keys <= queries
    return mask if window is None else mask & (keys > queries - window)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(mask(q k^T)) v over the last two of four dimensions; no mask: the lower triangle of equal lengths."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    if mask is None:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1).to(v.dtype) @ v
    with_sink = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], -1)
    return with_sink.softmax(-1)[..., :-1].to(v.dtype) @ v


# --- the rest of a layer --------------------------------------------------------------------------------------------


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    unit_offset: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) over the last dimension, times weight (1 + weight with unit_offset), computed in float32.

    With a residual: (norm(x + residual), x + residual).
    """
    total = x if residual is None else x + residual
    wide = total.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # in one pass; F.rms_norm makes the squares a tensor
    y = wide * torch.rsqrt(norm * norm / wide.shape[-1] + eps)
    y = (y * (1 + weight.float())).to(x.dtype) if unit_offset else y.to(x.dtype) * weight
    return y if residual is None else (y, total)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k with the first rotary_dim elements of each head turned by their position's angles.

    q          [num_tokens, num_heads, head_dim]; k likewise
    cos_sin    [num_positions, rotary_dim] float32: cos of each pair, then sin
    positions  [num_tokens] int64
    interleaved  pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
    """
    cos, sin = cos_sin[positions][:, None].chunk(2, -1)
    return _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    dim = 2 * cos.shape[-1]
    turned = x[..., :dim].float()
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pairs = (a * cos - b * sin, b * cos + a * sin)
    y = (torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)).to(x.dtype)
    return y if dim == x.shape[-1] else torch.cat([y, x[..., dim:]], -1)


def rotate_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    unit_offset: bool = False,
) -> torch.Tensor:
    """rms_norm of q and k where they have weights, rotate, store_kv, one after the other; returns q."""
    if q_norm is not None:
        q = _norm(q, q_norm, norm_eps, unit_offset)
    if k_norm is not None:
        k = _norm(k, k_norm, norm_eps, unit_offset)
    q, k = rotate(q, k, cos_sin, positions, interleaved=interleaved)
    store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return q


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    """rms_norm without a residual."""
    y = rms_norm(x, weight, eps, unit_offset=unit_offset)
    assert isinstance(y, torch.Tensor)
    return y


def gated_activation(x: torch.Tensor, kind: str, *, limit: float = 0.0, alpha: float = 0.0) -> torch.Tensor:
    """activation(gate) * up from x [num_tokens, 2 * inner] = gate beside up."""
    gate, up = x.chunk(2, -1)
    match kind:
        case "silu":
            return F.silu(gate).mul_(up)
        case "gelu_tanh":
            return F.gelu(gate, approximate="tanh").mul_(up)
        case "gelu":
            return F.gelu(gate).mul_(up)
        case "clamped_swiglu":
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (up + 1) * gate * torch.sigmoid(alpha * gate)
        case _:
            raise ValueError(f"gated_activation: kind {kind!r} is not known")


def route(
    logits: torch.Tensor,
    correction: torch.Tensor | None = None,
    *,
    top_k: int,
    scoring: str,
    groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = False,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts: logits [num_tokens, num_experts] -> (ids [num_tokens, top_k], weights alike, float32)."""
    scores = logits.float().softmax(-1) if scoring == "softmax" else logits.float().sigmoid()
    choice = scores if correction is None else scores + correction
    if groups > 1:
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.amax(-1) if correction is None else grouped.topk(2, -1).values.sum(-1)
        is_open = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(top_groups, -1).indices, True)
        choice = grouped.masked_fill(~is_open[..., None], float("-inf")).flatten(-2)
    ids = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale


def moe_mlp(
    x: torch.Tensor,
    w13: Matrix,
    w2: Matrix,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    kind: str,
    *,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    limit: float = 0.0,
    alpha: float = 0.0,
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    x               [num_tokens, hidden]
    w13             [num_experts, 2 * inner, hidden] gate above up; w2 [num_experts, hidden, inner]; b13, b2 biases.
                    In the dtype of x, or as a checkpoint stores it (matrices.py)
    expert_ids      [num_tokens, top_k]; expert_weights alike, float32
    returns         [num_tokens, hidden], dtype of x
    """
    top_k = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)
    counts = expert_ids.flatten().bincount(minlength=shape_of(w13)[0]).tolist()
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs) == 0:
            continue
        tokens = pairs // top_k
        inner = expert_linear(x[tokens], w13, b13, expert)
        inner = gated_activation(inner, kind, limit=limit, alpha=alpha)
        y = expert_linear(inner, w2, b2, expert)
        out.index_add_(0, tokens, y.float() * expert_weights.flatten()[pairs, None])
    return out.to(x.dtype)


def expert_linear(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    """x [num_rows, inputs] through the matrix of one expert of all, and its bias -> [num_rows, outputs]."""
    offset = None if bias is None else bias[expert]
    match matrix:
        case torch.Tensor():
            return F.linear(x, matrix[expert], offset)
        case Fp8BlockMatrix():
            y = fp8_block_linear(x, matrix.values[expert], matrix.scales[expert], matrix.block)
        case Mxfp4Matrix():
            y = mxfp4_linear(x, matrix.values[expert], matrix.scales[expert])
        case Nvfp4Matrix(parts=parts):
            y = nvfp4_linear(x, matrix.values[expert], matrix.scales[expert], matrix.part_scales[expert], parts)
        case _:
            raise TypeError(f"experts are not run in {type(matrix).__name__}")
    return y if offset is None else y.add_(offset)


# --- sampling -------------------------------------------------------------------------------------------------------


def for_sampling(logits: torch.Tensor) -> torch.Tensor:
    """The head's logits in a dtype that the functions below read, and compute in: float32."""
    return logits.float()


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    best, tokens = logits.max(dim=-1)
    return best, tokens, ~best.isfinite()


def scaled_logits(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - best) / temperature of [m, vocab_size], [m] and [m, 1]; the largest of each row is 0.

    The best is subtracted first: no temperature, however small, makes an inf of the rest.
    """
    return (logits - best[:, None]).div_(temperature)


def parts_of(num_rows: int, width: int) -> Iterator[slice]:
    """Slices of rows that hold PART_ELEMENTS together, of one row at least."""
    step = max(1, PART_ELEMENTS // width)
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    uniforms: torch.Tensor,
    floors: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device) if out is None else out
    is_drawn, on_cpu = temperature[:, 0] > 0, logits.device.type == "cpu"
    for part in _parts_with(is_drawn, logits.shape[1]):
        drawn = _draw_part(
            logits[part], best[part], temperature[part], uniforms[part], None if floors is None else floors[part]
        )
        tokens[part] = drawn if on_cpu else torch.where(is_drawn[part], drawn, tokens[part])
    return tokens


def nucleus_floors(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    *,
    num_sorted: int,
) -> torch.Tensor:
    floors = torch.full_like(temperature, -torch.inf)
    is_cut, on_cpu = (top_k < logits.shape[1]) | (top_p < 1), logits.device.type == "cpu"
    for part in _parts_with(is_cut[:, 0], logits.shape[1]):
        scaled = scaled_logits(logits[part], best[part], temperature[part])
        cut = _nucleus_floors_part(scaled, top_k[part], top_p[part], num_sorted)
        floors[part] = cut if on_cpu else torch.where(is_cut[part], cut, -torch.inf)
    return floors


def _parts_with(chosen: torch.Tensor, width: int) -> Iterator[slice | torch.Tensor]:
    """Rows, as many at a time as PART_ELEMENTS hold: those wanted on a CPU; all on a GPU, which would be waited for."""
    if chosen.device.type != "cpu" or bool(chosen.all()):
        yield from parts_of(len(chosen), width)
    else:
        rows = chosen.nonzero()[:, 0]
        for part in parts_of(len(rows), width):
            yield rows[part]


def _nucleus_floors_part(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, num_sorted: int
) -> torch.Tensor:
    values = scaled.topk(num_sorted, dim=-1).values
    is_top_k = torch.arange(num_sorted, device=values.device) < top_k
    # float64: how many others are sorted along (num_sorted) must not show in a row's sums.
    probs = values.double().masked_fill_(~is_top_k, -torch.inf).softmax(dim=-1)
    before = probs.cumsum(dim=-1).sub_(probs)
    num_kept = ((before < top_p) & is_top_k).sum(dim=-1, keepdim=True)
    return values.gather(1, (num_kept - 1).clamp_(min=0))


def _draw_part(
    logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor,
    floors: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    scaled = scaled_logits(logits, best, temperature)
    if floors is not None:
        scaled.masked_fill_(scaled < floors, -torch.inf)
    # float64: in float32 a tail of many tokens below 6e-8 would vanish.
    sums = scaled.exp_().cumsum(dim=-1, dtype=torch.float64)
    # u < 1, so u * total < total even rounded, and the first larger sum belongs to a token that adds to it.
    tokens = torch.searchsorted(sums, uniforms * sums[:, -1:], right=True)
    return tokens.squeeze(1).clamp_(max=scaled.shape[1] - 1)  # only nan gets past the end


# --- adapters -------------------------------------------------------------------------------------------------------

ADAPTED_AT_ONCE = 256  # tokens


def lora_shrink(x: torch.Tensor, a: torch.Tensor, rows: LoraRows, *, first_rank: int = 0) -> torch.Tensor:
    """A x of each token's own adapter, in float32; not set for tokens without one.

    x           [num_tokens, inputs] float32, float16 or bfloat16; strided, last dimension contiguous
    a           [num_slots, layers, rank or this device's share of it, inputs], dtype of x; contiguous
    first_rank  the row of A that is the first in a: rows past an adapter's own rank are 0, and may be left out
    returns     [num_tokens, layers, rank as in a] float32
    """
    small = torch.zeros((len(x), *a.shape[1:3]), dtype=torch.float32, device=x.device)
    for slot, tokens in rows.by_slot:
        matrix = a[slot].flatten(0, 1).float()
        for some in tokens.split(ADAPTED_AT_ONCE):
            small[some] = F.linear(x[some].float(), matrix).view(-1, *a.shape[1:3])
    return small


def lora_expand(
    y: torch.Tensor, small: torch.Tensor, b: torch.Tensor, starts: torch.Tensor, max_outputs: int, rows: LoraRows
) -> None:
    """y += B small of each token's own adapter, in float32, rounded once to y's dtype.

    y            [num_tokens, outputs] float32, float16 or bfloat16, changed in place; last dimension contiguous
    small        [num_tokens, layers, rank] float32, contiguous
    b            [num_slots, outputs, rank], dtype of y; contiguous: the layers' outputs one after the other
    starts       [layers + 1] int32: the first output of each; max_outputs: of the largest layer
    """
    bounds = starts.tolist()
    for slot, tokens in rows.by_slot:
        for layer, (start, stop) in enumerate(pairwise(bounds)):
            matrix = b[slot, start:stop].float()
            for some in tokens.split(ADAPTED_AT_ONCE):
                part = y[some, start:stop].float()  # a copy
                y[some, start:stop] = part.addmm_(small[some, layer], matrix.T).to(y.dtype)
