"""Paged attention over MLA latents: one row per token is key and value of every head (the absorbed form)."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels import configs
from engine.kernels.checks import FLOATS, need, need_cache, need_one_device, need_rows, need_table
from engine.kernels.numerics import LOG2_E, cast, dot, dot_dtype
from engine.kernels.paging import UNSPECIALIZED, load_pages, load_rows, slot_offsets
from engine.kernels.softmax import add_tile, finish_rows, start_rows
from engine.kernels.split_kv import choose_num_splits, reduce_splits, scratch


@triton.jit(do_not_specialize=UNSPECIALIZED)
def latent_decode_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    scale,
    num_heads,
    stride_q_seq,
    stride_q_head,
    stride_block,
    stride_slot,
    stride_table,
    BLOCK_SIZE: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT: tl.constexpr,
):
    """Grid (cdiv(num_heads, BLOCK_M), NUM_SPLITS, num_seqs): BLOCK_M heads over one part of one context.

    Programs that read the same rows are neighbours in the grid, so that all but the first find them in L2.
    """
    split = tl.program_id(1)
    seq = tl.program_id(2)

    context_len = tl.load(context_lens_ptr + seq)
    num_tiles = tl.cdiv(context_len, BLOCK_N)
    tiles_per_split = tl.cdiv(num_tiles, NUM_SPLITS)
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, num_tiles)

    heads = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = heads < num_heads
    out_rows = ((seq * num_heads + heads) * NUM_SPLITS + split).to(tl.int64)
    if NUM_SPLITS > 1 and first_tile >= last_tile:
        tl.store(lse_ptr + out_rows, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_head)
        return

    columns = tl.arange(0, BLOCK_L)
    rope_columns = tl.arange(0, BLOCK_R)
    in_tile = tl.arange(0, BLOCK_N)
    q_rows = q_ptr + seq.to(tl.int64) * stride_q_seq + heads[:, None] * stride_q_head
    q = tl.load(q_rows + columns[None, :], mask=is_head[:, None] & (columns < LATENT_DIM)[None, :], other=0.0)
    q_rope = tl.load(
        q_rows + LATENT_DIM + rope_columns[None, :],
        mask=is_head[:, None] & (rope_columns < ROPE_DIM)[None, :],
        other=0.0,
    )
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table

    top, total, acc = start_rows(None, heads, is_head, False, BLOCK_M, BLOCK_L)
    pages = load_pages(table_ptr, first_tile * BLOCK_N + in_tile, context_len, BLOCK_SIZE)
    for tile in range(first_tile, last_tile):
        tokens = tile * BLOCK_N + in_tile
        # Page ids one tile ahead: waiting for them here would leave no row in flight.
        next_pages = load_pages(table_ptr, tokens + BLOCK_N, context_len, BLOCK_SIZE)
        rows = slot_offsets(pages, tokens, stride_block, stride_slot, BLOCK_SIZE)
        latent = load_rows(cache_ptr, rows, columns, LATENT_DIM, BLOCK_L)
        rope = load_rows(cache_ptr + LATENT_DIM, rows, rope_columns, ROPE_DIM, BLOCK_R)
        scores = (dot(q, tl.trans(latent), DOT) + dot(q_rope, tl.trans(rope), DOT)) * (scale * LOG2_E)
        scores = tl.where((tokens < context_len)[None, :], scores, float("-inf"))
        top, total, acc = add_tile(scores, latent, top, total, acc, DOT)
        pages = next_pages

    out_mask = is_head[:, None] & (columns < LATENT_DIM)[None, :]
    out_offsets = out_rows[:, None] * LATENT_DIM + columns[None, :]
    tl.store(out_ptr + out_offsets, cast(finish_rows(total, acc), out_ptr.dtype.element_ty), mask=out_mask)
    if NUM_SPLITS > 1:
        tl.store(lse_ptr + out_rows, top + tl.log2(total), mask=is_head)


def latent_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    latent_dim: int,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attend one query token per row over paged latents; its own row is stored already.

    q             [num_seqs, num_heads, width] float32, float16 or bfloat16: absorbed queries, latent_dim of them for
                  the latent and the rest for the rotary key; strided, last dimension contiguous
    cache         [num_blocks, block_size, width], dtype of q; strided, last dimension contiguous; every slot finite,
                  those of block 0 (the null block) too
    block_tables  [num_seqs, max_blocks] int32; entries past a sequence's last block are never read
    context_lens  [num_seqs] int32, this token included; 0 for a row that only pads a CUDA graph: zeros come out
    num_splits    parts of each context that are read in parallel; None: as many as fill the device
    returns       [num_seqs, num_heads, latent_dim], dtype of q: still to be multiplied with each head's value matrix
    """
    arch = configs.arch()
    need_rows("q", q, 3, FLOATS)
    need_cache("cache", cache, 3, arch)
    num_seqs, num_heads, width = q.shape
    block_size = cache.shape[1]
    need("cache", cache.shape[2] == width, "of width {} like q", cache.shape[2], width)
    need("cache", cache.dtype == q.dtype, "{} like q", cache.dtype, q.dtype)
    need("latent_dim", 0 < latent_dim < width, "above 0 and below the width, {}", latent_dim, width)
    need_table(block_tables, context_lens)
    need("block_tables", block_tables.shape[0] == num_seqs, "of {} rows like q", block_tables.shape[0], num_seqs)
    need_one_device(q=q, cache=cache, block_tables=block_tables, context_lens=context_lens)
    tile = configs.latent_tile(arch, num_heads, q.dtype)
    head_tiles = triton.cdiv(num_heads, tile.block_m)
    if num_splits is None:
        num_splits = choose_num_splits(num_seqs * head_tiles, block_tables.shape[1] * block_size, q.device)
    need("num_splits", num_splits >= 1, "at least 1", num_splits)

    out = torch.empty((num_seqs, num_heads, latent_dim), dtype=q.dtype, device=q.device)
    if num_seqs == 0:
        return out
    partial, lse = (out, out) if num_splits == 1 else scratch(num_seqs, num_heads, num_splits, latent_dim, out)
    latent_decode_kernel[(head_tiles, num_splits, num_seqs)](
        partial,
        lse,
        q,
        cache,
        block_tables,
        context_lens,
        scale,
        num_heads,
        *q.stride()[:2],
        *cache.stride()[:2],
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        LATENT_DIM=latent_dim,
        ROPE_DIM=width - latent_dim,
        NUM_SPLITS=num_splits,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_L=max(16, triton.next_power_of_2(latent_dim)),
        BLOCK_R=max(16, triton.next_power_of_2(width - latent_dim)),
        DOT=dot_dtype(q.dtype, cache.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        reduce_splits(out, partial, lse)
    return out
