"""Paged attention over MLA latents: one row per token is key and value of every head (the absorbed form)."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels import configs
from engine.kernels.checks import (
    FLOATS,
    LaunchArgs,
    need,
    need_cache,
    need_one_device,
    need_rows,
    need_table,
    once_per_layout,
    strides,
)
from engine.kernels.integers import cdiv, next_power_of_2
from engine.kernels.numerics import LOG2_E, dot, dot_dtype
from engine.kernels.paging import UNSPECIALIZED, load_pages, load_rows, slot_offsets
from engine.kernels.softmax import add_tile, finish_rows, start_rows
from engine.kernels.split_kv import load_item, merge, need_work, own_work_list, scratch, store_item
from engine.kernels.work_list import SplitPlanner, WorkList


@triton.jit(do_not_specialize=UNSPECIALIZED)
def latent_decode_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    q_ptr,
    cache_ptr,
    block_tables_ptr,
    items_ptr,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DOT: tl.constexpr,
):
    """Grid (cdiv(num_heads, BLOCK_M), num_items): BLOCK_M heads over one item of the work list.

    Programs that read the same rows are neighbors in the grid, so that all but the first find them in L2.
    """
    seq, first_token, end_token, slot = load_item(items_ptr, tl.program_id(1))
    if seq < 0:
        return

    heads = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = heads < num_heads
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
    first_tile = first_token // BLOCK_N
    pages = load_pages(table_ptr, first_tile * BLOCK_N + in_tile, end_token, BLOCK_SIZE)
    for tile in range(first_tile, tl.cdiv(end_token, BLOCK_N)):
        tokens = tile * BLOCK_N + in_tile
        # Page ids one tile ahead: waiting for them here would leave no row in flight.
        next_pages = load_pages(table_ptr, tokens + BLOCK_N, end_token, BLOCK_SIZE)
        rows = slot_offsets(pages, tokens, stride_block, stride_slot, BLOCK_SIZE)
        latent = load_rows(cache_ptr, rows, columns, LATENT_DIM, BLOCK_L)
        rope = load_rows(cache_ptr + LATENT_DIM, rows, rope_columns, ROPE_DIM, BLOCK_R)
        scores = (dot(q, tl.trans(latent), DOT) + dot(q_rope, tl.trans(rope), DOT)) * (scale * LOG2_E)
        visible = (tokens >= first_token) & (tokens < end_token)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        top, total, acc = add_tile(scores, latent, top, total, acc, DOT)
        pages = next_pages

    store_item(
        out_ptr,
        partial_ptr,
        lse_ptr,
        finish_rows(total, acc),
        top,
        total,
        seq,
        slot,
        num_heads,
        heads,
        is_head,
        columns,
        LATENT_DIM,
    )


def latent_planner(num_heads: int, cache: torch.Tensor) -> SplitPlanner:
    """What plans the work of latent_decode on this cache."""
    tile = _tile(num_heads, cache)
    num_programs = configs.num_processors(cache.device) * tile.programs
    return SplitPlanner(cdiv(num_heads, tile.block_m), num_programs, tile.block_n)


def _tile(num_heads: int, cache: torch.Tensor) -> configs.AttentionTile:
    _, block_size, width = cache.shape
    return configs.latent_tile(configs.arch(), num_heads, cache.dtype, width=width, block_size=block_size)


def latent_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    latent_dim: int,
    work: WorkList | None = None,
) -> torch.Tensor:
    """Attend one query token per row over paged latents; its own row is stored already.

    q             [num_seqs, num_heads, width] float32, float16 or bfloat16: absorbed queries, latent_dim of them for
                  the latent and the rest for the rotary key; strided, last dimension contiguous
    cache         [num_blocks, block_size, width], dtype of q; strided, last dimension contiguous; every slot finite,
                  those of block 0 (the null block) too
    block_tables  [num_seqs, max_blocks] int32; entries past a sequence's last block are never read
    context_lens  [num_seqs] int32, this token included; 0 for a row that only pads a CUDA graph: zeros come out
    work          what latent_planner() planned from these lengths, which are then not read; None: planned here, which
                  waits for the device
    returns       [num_seqs, num_heads, latent_dim], dtype of q: still to be multiplied with each head's value matrix
    """
    args = _launch_args(q, cache, block_tables, context_lens, latent_dim)
    num_seqs, num_heads, _ = q.shape
    out = torch.empty((num_seqs, num_heads, latent_dim), dtype=q.dtype, device=q.device)
    if num_seqs == 0:
        return out
    if work is None:
        work = own_work_list(latent_planner(num_heads, cache), context_lens)
    need_work(work, num_seqs, None, q.device)
    partial, lse = scratch(work, num_heads, latent_dim, q.device)
    latent_decode_kernel[(cdiv(num_heads, args["BLOCK_M"]), work.sizes.num_items)](
        out, partial, lse, q, cache, block_tables, work.items, scale, **args
    )
    merge(out, partial, lse, work)
    return out


@once_per_layout
def _launch_args(
    q: torch.Tensor, cache: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor, latent_dim: int
) -> LaunchArgs:
    """Check the arguments of latent_decode; what its kernel takes beside."""
    need_rows("q", q, 3, FLOATS)
    need_cache("cache", cache, 3, configs.arch())
    num_seqs, num_heads, width = q.shape
    need("cache", cache.shape[2] == width, "of width {} like q", cache.shape[2], width)
    need("cache", cache.dtype == q.dtype, "{} like q", cache.dtype, q.dtype)
    need("latent_dim", 0 < latent_dim < width, "above 0 and below the width, {}", latent_dim, width)
    need_table(block_tables, context_lens)
    need("block_tables", block_tables.shape[0] == num_seqs, "of {} rows like q", block_tables.shape[0], num_seqs)
    need_one_device(q=q, cache=cache, block_tables=block_tables, context_lens=context_lens)
    tile = _tile(num_heads, cache)
    return {
        "num_heads": num_heads,
        **strides("q", q, "seq", "head"),
        "stride_block": cache.stride(0),
        "stride_slot": cache.stride(1),
        "stride_table": block_tables.stride(0),
        "BLOCK_SIZE": cache.shape[1],
        "LATENT_DIM": latent_dim,
        "ROPE_DIM": width - latent_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_L": max(16, next_power_of_2(latent_dim)),
        "BLOCK_R": max(16, next_power_of_2(width - latent_dim)),
        "DOT": dot_dtype(q.dtype, cache.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
