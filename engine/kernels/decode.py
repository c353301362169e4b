"""Paged attention of one new token per sequence."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels import configs
from engine.kernels.checks import need, need_attention
from engine.kernels.numerics import cast, dot_dtype
from engine.kernels.paging import UNSPECIALIZED, load_columns, load_pages, load_rows, slot_offsets
from engine.kernels.softmax import add_tile, attention_scores, finish_rows, start_rows
from engine.kernels.split_kv import choose_num_splits, reduce_splits, scratch


@triton.jit(do_not_specialize=UNSPECIALIZED)
def decode_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    sinks_ptr,
    scale,
    v_scale,
    stride_q_seq,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DOT: tl.constexpr,
):
    """Grid (num_kv_heads, NUM_SPLITS, num_seqs): the GROUP query heads of one KV head over one part of one context.

    The parts follow from the context length in here, so that one grid serves every length (CUDA graphs). With one
    part the output is final; else it and its log-sum-exp wait for reduce_splits_kernel.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2)
    num_kv_heads = tl.num_programs(0)

    context_len = tl.load(context_lens_ptr + seq)
    first_token = tl.maximum(context_len - WINDOW, 0) if WINDOW > 0 else 0
    first_tile = first_token // BLOCK_N
    num_tiles = tl.cdiv(context_len, BLOCK_N) - first_tile
    tiles_per_split = tl.cdiv(num_tiles, NUM_SPLITS)
    first_tile += split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tl.cdiv(context_len, BLOCK_N))

    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + rows
    is_head = rows < GROUP
    out_rows = ((seq * num_kv_heads * GROUP + heads) * NUM_SPLITS + split).to(tl.int64)
    if NUM_SPLITS > 1 and first_tile >= last_tile:
        tl.store(lse_ptr + out_rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_head)
        return

    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    in_tile = tl.arange(0, BLOCK_N)
    q = tl.load(
        q_ptr + seq.to(tl.int64) * stride_q_seq + heads[:, None] * stride_q_head + columns[None, :],
        mask=is_head[:, None] & (columns < HEAD_DIM)[None, :],
        other=0.0,
    )
    k_base = k_cache_ptr + kv_head * stride_k_head
    v_base = v_cache_ptr + kv_head * stride_v_head
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table

    top, total, acc = start_rows(sinks_ptr, heads, is_head, split == 0, BLOCK_M, BLOCK_DV)
    pages = load_pages(table_ptr, first_tile * BLOCK_N + in_tile, context_len, BLOCK_SIZE)
    for tile in range(first_tile, last_tile):
        tokens = tile * BLOCK_N + in_tile
        # Page ids one tile ahead: waiting for them here would leave no key or value in flight.
        next_pages = load_pages(table_ptr, tokens + BLOCK_N, context_len, BLOCK_SIZE)
        k_rows = slot_offsets(pages, tokens, stride_k_block, stride_k_slot, BLOCK_SIZE)
        v_rows = slot_offsets(pages, tokens, stride_v_block, stride_v_slot, BLOCK_SIZE)
        k = load_columns(k_base, k_rows, columns, HEAD_DIM, BLOCK_D)
        v = load_rows(v_base, v_rows, columns_v, HEAD_DIM_V, BLOCK_DV)
        scores = attention_scores(q, k, scale, SOFTCAP, DOT)
        visible = (tokens >= first_token) & (tokens < context_len)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        top, total, acc = add_tile(scores, v, top, total, acc, DOT)
        pages = next_pages

    out = finish_rows(total, acc) * v_scale
    out_mask = is_head[:, None] & (columns_v < HEAD_DIM_V)[None, :]
    out_offsets = out_rows[:, None] * HEAD_DIM_V + columns_v[None, :]
    tl.store(out_ptr + out_offsets, cast(out, out_ptr.dtype.element_ty), mask=out_mask)
    if NUM_SPLITS > 1:
        tl.store(lse_ptr + out_rows, top + tl.log2(total), mask=is_head)


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
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attend one query token per sequence over its paged KV, that token's own included.

    q             [num_seqs, num_heads, head_dim] float32, float16 or bfloat16; strided, last dimension contiguous
    k_cache       [num_blocks, block_size, num_kv_heads, head_dim], q's dtype or float8_e4m3fn; strided, last
                  dimension contiguous; every slot finite, those of block 0 (the null block) too
    v_cache       alike with head_dim_v
    block_tables  [num_seqs, max_blocks] int32; entries past a sequence's last block are never read
    context_lens  [num_seqs] int32, this token included; 0 for a row that only pads a CUDA graph: zeros come out
    scale         of the scores, before softcap * tanh(score / softcap)
    window        the last so many tokens are seen, this one included
    sinks         [num_heads] one more logit per head, without a value
    k_scale       float8 caches only: key = stored * k_scale; v_scale alike
    num_splits    parts of each context that are read in parallel; None: as many as fill the device
    returns       [num_seqs, num_heads, head_dim_v], dtype of q
    """
    arch = configs.arch()
    group = need_attention(q, k_cache, v_cache, block_tables, context_lens, sinks, window, k_scale, v_scale, arch)
    num_seqs, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, head_dim_v = v_cache.shape
    need("block_tables", block_tables.shape[0] == num_seqs, "of {} rows like q", block_tables.shape[0], num_seqs)
    if num_splits is None:
        max_context_len = block_tables.shape[1] * block_size
        max_seen = max_context_len if window is None else min(window, max_context_len)
        num_splits = choose_num_splits(num_seqs * num_kv_heads, max_seen, q.device)
    need("num_splits", num_splits >= 1, "at least 1", num_splits)

    out = torch.empty((num_seqs, num_heads, head_dim_v), dtype=q.dtype, device=q.device)
    if num_seqs == 0:
        return out
    partial, lse = (out, out) if num_splits == 1 else scratch(num_seqs, num_heads, num_splits, head_dim_v, out)
    tile = configs.decode_tile(arch, max(head_dim, head_dim_v), k_cache.dtype, q.dtype)
    decode_kernel[(num_kv_heads, num_splits, num_seqs)](
        partial,
        lse,
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        sinks,
        scale * k_scale,
        v_scale,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim_v,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        NUM_SPLITS=num_splits,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        BLOCK_N=tile.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_DV=max(16, triton.next_power_of_2(head_dim_v)),
        DOT=dot_dtype(q.dtype, k_cache.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        reduce_splits(out, partial, lse)
    return out
