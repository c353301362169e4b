"""The kernels in plain torch, slow and obvious: what each of them is meant to compute.

Names, shapes, dtypes and meanings are those of the Triton launchers. Everything is computed in float64 and rounded
only where the launcher's docstring says so; with float64 arguments nothing is rounded at all.
"""

from math import exp, fsum

import torch
import torch.nn.functional as F

from kvplan.models.spec import Activation

FP8_MAX = 448.0  # the largest finite float8_e4m3fn


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write k [num_tokens, num_kv_heads, head_dim] and v alike into their slots; a negative slot is skipped."""
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = _stored(x[token], cache.dtype, scale)


def _stored(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(dtype)


def store_latent(latent: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write latent [num_tokens, width] into its slots of cache [num_blocks, block_size, width]."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = latent[token].to(cache.dtype)


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
) -> torch.Tensor:
    """One query token per sequence: q [num_seqs, num_heads, head_dim] -> [num_seqs, num_heads, head_dim_v].

    work changes how a GPU works, not what comes out.
    """
    query_start = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    return paged_prefill(
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start,
        context_lens,
        scale,
        max_query_len=1,
        window=window,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )


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
) -> torch.Tensor:
    """Each sequence's last tokens over its context: q [num_tokens, num_heads, head_dim] -> [..., head_dim_v]."""
    out = q.new_zeros((*q.shape[:2], v_cache.shape[3]))
    starts = query_start.tolist()
    for seq, context_len in enumerate(context_lens.tolist()):
        queries = slice(starts[seq], starts[seq + 1])
        if context_len > 0 and queries.start < queries.stop:
            k = _rows(k_cache, block_tables[seq], context_len) * k_scale
            v = _rows(v_cache, block_tables[seq], context_len) * v_scale
            out[queries] = _attend(q[queries].double(), k, v, scale, window, softcap, sinks).to(q.dtype)
    return out


def _rows(cache: torch.Tensor, block_table: torch.Tensor, context_len: int) -> torch.Tensor:
    """[context_len, ...] float64: a sequence's slots, in order."""
    block_size = cache.shape[1]
    blocks = block_table[: -(-context_len // block_size)].tolist()
    return torch.cat([cache[block].double() for block in blocks])[:context_len]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [query_len, num_heads, head_dim], the last tokens of k [context_len, num_kv_heads, head_dim] and v."""
    query_len, context_len = len(q), len(k)
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(context_len - query_len, context_len, device=q.device)[:, None]
    key = torch.arange(context_len, device=q.device)[None, :]
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, query_len, 1)], -1)
    weights = scores.softmax(-1)[..., :context_len]
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1))


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
    """q [num_seqs, num_heads, width] over cache [num_blocks, block_size, width] -> [num_seqs, num_heads, latent_dim].

    The whole row is the one key that all heads share, its first latent_dim elements are the value.
    """
    keys = cache[:, :, None, :]
    return paged_decode(q, keys, keys[..., :latent_dim], block_tables, context_lens, scale)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    unit_offset: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) * weight over the last dimension; with a residual (norm(s), s) of s = x + residual."""
    s = x if residual is None else (x.double() + residual.double()).to(x.dtype)
    exact = s.double() * torch.rsqrt(s.double().square().mean(-1, keepdim=True) + eps)
    y = exact * (1 + weight.double()) if unit_offset else exact.to(x.dtype).double() * weight.double()
    return y.to(x.dtype) if residual is None else (y.to(x.dtype), s)


def rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs of each head's first rotary_dim elements by their position's angles; q and k stay as they are."""
    cos, sin = cos_sin[positions.long()].double()[:, None, :].chunk(2, -1)
    return _rotated(q, cos, sin, interleaved), _rotated(k, cos, sin, interleaved)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = cos.shape[-1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first].double(), x[..., second].double()
    y = x.clone()
    y[..., first] = (a * cos - b * sin).to(x.dtype)
    y[..., second] = (b * cos + a * sin).to(x.dtype)
    return y


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
    """rms_norm of q and k where they have weights, rotate, store_kv; returns the q that comes out."""
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


def gated_activation(x: torch.Tensor, kind: Activation, *, limit: float = 0.0, alpha: float = 0.0) -> torch.Tensor:
    """activation(gate) * up of x [num_tokens, 2 * inner] = gate || up."""
    gate, up = x.double().chunk(2, -1)
    match kind:
        case "silu":
            y = F.silu(gate) * up
        case "gelu_tanh":
            y = F.gelu(gate, approximate="tanh") * up
        case "gelu":
            y = F.gelu(gate) * up
        case "clamped_swiglu":
            gate = gate.clamp(max=limit)
            y = (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)
    return y.to(x.dtype)


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
    """Each token's experts, of equal ones the first, and their weights: [num_tokens, top_k] int64, float64 alike."""
    scores = logits.double().softmax(-1) if scoring == "softmax" else logits.double().sigmoid()
    choice = scores if correction is None else scores + correction.double()
    ids = torch.tensor([_chosen(row, top_k, groups, top_groups, correction is not None) for row in choice.tolist()])
    weights = scores.gather(1, ids.to(scores.device))
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return ids.to(logits.device), weights * scale


def _chosen(scores: list[float], top_k: int, groups: int, top_groups: int, is_corrected: bool) -> list[int]:
    width = len(scores) // groups
    ranks = [sum(sorted(scores[g * width : (g + 1) * width])[-2 if is_corrected else -1 :]) for g in range(groups)]
    best_groups = sorted(range(groups), key=lambda g: -ranks[g])[:top_groups]
    experts = [e for e in range(len(scores)) if e // width in best_groups]
    return sorted(experts, key=lambda e: -scores[e])[:top_k]


def moe_mlp(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    kind: Activation,
    *,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    limit: float = 0.0,
    alpha: float = 0.0,
) -> torch.Tensor:
    """The weighted sum of each token's experts' gated MLPs: x [num_tokens, hidden] -> the same shape."""
    out = torch.zeros_like(x)
    for token, experts in enumerate(expert_ids.tolist()):
        total = x.new_zeros(x.shape[1], dtype=torch.float64)
        for expert, weight in zip(experts, expert_weights[token].double(), strict=True):
            gate_up = _linear(x[token], w13[expert], None if b13 is None else b13[expert]).to(x.dtype)
            activated = gated_activation(gate_up[None], kind, limit=limit, alpha=alpha)[0]
            y = _linear(activated, w2[expert], None if b2 is None else b2[expert])
            total += (y * weight).to(x.dtype).double()
        out[token] = total.to(x.dtype)
    return out


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [inputs] through weight [outputs, inputs], in float64."""
    y = weight.double() @ x.double()
    return y if bias is None else y + bias.double()


# --- products with quantised weights ----------------------------------------------------------------------------------


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP microscaling formats 1.0, table 5


def e2m1(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] uint8 -> [..., 2n] float64: the lower four bits first; the highest of four is the sign."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
    return torch.tensor(E2M1, dtype=torch.float64)[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)


def mxfp4(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """values [..., inputs / 2] and scales [..., inputs / 32], both bytes -> [..., inputs] float64."""
    powers = torch.exp2(scales.double() - 127)
    wide: torch.Tensor = e2m1(values).unflatten(-1, (-1, 32)) * powers[..., None]
    return wide.flatten(-2)


def nvfp4(
    values: torch.Tensor, scales: torch.Tensor, part_scales: torch.Tensor, parts: tuple[int, ...]
) -> torch.Tensor:
    """values [..., rows, inputs / 2] bytes, scales [..., rows, inputs / 16], part_scales [..., parts] -> float64."""
    wide: torch.Tensor = e2m1(values).unflatten(-1, (-1, 16)) * scales.double()[..., None]
    row_scales = part_scales.double().repeat_interleave(torch.tensor(parts), -1)
    return wide.flatten(-2) * row_scales[..., None]


def int4_linear(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, *, num_splits: int | None = None
) -> torch.Tensor:
    """x [num_tokens, inputs] @ ((values - zeros) * scales) [inputs, outputs]; the weights are not rounded.

    A nibble holds 64 neighboring inputs, or 32 or 16 where no more divide words and groups; else an eighth of all.
    """
    num_inputs, num_groups = 8 * words.shape[0], scales.shape[0]
    fits = [n for n in (64, 32, 16) if len(words) % n == 0 and num_inputs // num_groups % n == 0]
    n = fits[0] if fits else len(words)
    values = torch.cat([part.long() >> (4 * j) & 15 for part in words.split(n) for j in range(8)])
    points = torch.stack([zeros[:, n // 8].long() >> (4 * (n % 8)) & 15 for n in range(words.shape[1])], 1)
    group = torch.arange(num_inputs) // (num_inputs // num_groups)
    return (x.double() @ ((values - points[group]).double() * scales.double()[group])).to(x.dtype)


def fp8_rows(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_rows, width] over a scale for each row, in float32 and rounded to fp8; and the scales [num_rows, 1]."""
    largest = x.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / FP8_MAX
    scales = largest if scale is None else scale.view(1, 1).repeat(x.shape[0], 1)
    return (x.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


def fp8_linear(
    x: torch.Tensor, values: torch.Tensor, row_scales: torch.Tensor, *, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """x, rounded to fp8, @ (values * scales).T; float64."""
    rounded, x_scales = fp8_rows(x, input_scale)
    return (rounded.double() * x_scales.double()) @ (values.double() * row_scales.double()[:, None]).T


def fp8_block_linear(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    *,
    num_splits: int | None = None,
) -> torch.Tensor:
    """x [num_tokens, inputs] @ (values * scales).T, a scale for each block; the weights are not rounded."""
    rows, columns = (torch.arange(size) // side for size, side in zip(values.shape, block, strict=True))
    return (x.double() @ (values.double() * scales.double()[rows][:, columns]).T).to(x.dtype)


# --- sampling ---------------------------------------------------------------------------------------------------------


def running_sums(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    floors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of the probabilities of each row's tokens, in their order: [num_rows, vocab_size] float64, to 1."""
    scaled = (logits - logits.amax(1, keepdim=True)) / temperature  # in float32, as it is held against the floors
    if floors is not None:
        scaled = scaled.masked_fill(scaled < floors, -torch.inf)
    return scaled.double().softmax(1).cumsum(1)


def nucleus_floors(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """The smallest (logit - best) / temperature [num_rows, 1] of the top_k largest with less than top_p above it.

    -inf of a row that top_k and top_p leave whole.
    """
    floors = []
    for i, row in enumerate(logits):
        if top_k[i] >= len(row) and top_p[i] >= 1:
            floors.append([-torch.inf])
            continue
        scaled = (row.float() - best[i]) / temperature[i]  # in float32, as tokens are held against the floor
        values = sorted(scaled.tolist(), reverse=True)[: int(top_k[i])]
        target, above, floor = float(top_p[i]) * fsum(map(exp, values)), 0.0, values[0]
        for value in values:
            if above >= target:
                break
            floor, above = value, above + exp(value)
        floors.append([floor])
    return torch.tensor(floors, dtype=torch.float32, device=logits.device)
