"""Paged attention of one new token per sequence."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

from engine.kernels import configs
from engine.kernels.checks import LaunchArgs, need, need_attention, need_out, once_per_layout, strides
from engine.kernels.integers import next_power_of_2
from engine.kernels.numerics import dot_dtype
from engine.kernels.paging import UNSPECIALIZED, load_columns, load_pages, load_rows, slot_offsets
from engine.kernels.softmax import add_pairs, add_tile, attention_scores, finish_rows, start_rows
from engine.kernels.split_kv import load_item, merge, need_work, own_work_list, scratch, store_item
from engine.kernels.work_list import SplitPlanner, WorkList


@triton.jit(do_not_specialize=UNSPECIALIZED)
def decode_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    items_ptr,
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
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAIRS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Grid (num_kv_heads, num_items): the GROUP query heads of one KV head over one item of the work list.

    A program knows neither context lengths nor windows, only the tokens of its item: one kernel serves all of them.
    """
    kv_head = tl.program_id(0)
    seq, first_token, end_token, slot = load_item(items_ptr, tl.program_id(1))
    if seq < 0:
        return

    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + rows
    is_head = rows < GROUP
    columns = tl.arange(0, BLOCK_D)
    PER_WORD: tl.constexpr = 2 if PAIRS else 1  # values that are loaded as one
    WORDS_V: tl.constexpr = BLOCK_DV // PER_WORD
    words_v = tl.arange(0, WORDS_V)
    in_tile = tl.arange(0, BLOCK_N)
    q = tl.load(
        q_ptr + seq.to(tl.int64) * stride_q_seq + heads[:, None] * stride_q_head + columns[None, :],
        mask=is_head[:, None] & (columns < HEAD_DIM)[None, :],
        other=0.0,
    )
    k_base = k_cache_ptr + kv_head * stride_k_head
    v_base = v_cache_ptr + kv_head * stride_v_head
    if PAIRS:
        v_base = v_base.to(tl.pointer_type(tl.uint16))
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table

    # A sink counts once: here where the item is the whole of its sequence, else where the parts are merged.
    top, total, acc = start_rows(sinks_ptr, heads, is_head, slot < 0, BLOCK_M, WORDS_V)
    acc_odd = acc
    first_tile = first_token // BLOCK_N
    pages = load_pages(table_ptr, first_tile * BLOCK_N + in_tile, end_token, BLOCK_SIZE)
    for tile in range(first_tile, tl.cdiv(end_token, BLOCK_N)):
        tokens = tile * BLOCK_N + in_tile
        # Page ids one tile ahead: waiting for them here would leave no key or value in flight.
        next_pages = load_pages(table_ptr, tokens + BLOCK_N, end_token, BLOCK_SIZE)
        k_rows = slot_offsets(pages, tokens, stride_k_block, stride_k_slot, BLOCK_SIZE)
        v_rows = slot_offsets(pages, tokens, stride_v_block, stride_v_slot, BLOCK_SIZE)
        k = load_columns(k_base, k_rows, columns, HEAD_DIM, BLOCK_D)
        v = load_rows(v_base, v_rows // PER_WORD, words_v, HEAD_DIM_V // PER_WORD, WORDS_V)
        scores = attention_scores(q, k, scale, SOFTCAP, DOT)
        visible = (tokens >= first_token) & (tokens < end_token)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        if PAIRS:
            top, total, acc, acc_odd = add_pairs(scores, v, top, total, acc, acc_odd, DOT)
        else:
            top, total, acc = add_tile(scores, v, top, total, acc, DOT)
        pages = next_pages

    if PAIRS:
        acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, BLOCK_DV])
    store_item(
        out_ptr,
        partial_ptr,
        lse_ptr,
        finish_rows(total, acc) * v_scale,
        top,
        total,
        seq,
        slot,
        tl.num_programs(0) * GROUP,
        heads,
        is_head,
        tl.arange(0, BLOCK_DV),
        HEAD_DIM_V,
    )


def decode_planner(
    num_heads: int, k_cache: torch.Tensor, v_cache: torch.Tensor, compute: torch.dtype, window: int | None
) -> SplitPlanner:
    """What plans the work of paged_decode on these caches, for num_heads queries of dtype `compute`."""
    tile, num_kv_heads = _tile(num_heads, k_cache, v_cache, compute), k_cache.shape[2]
    num_programs = configs.num_processors(k_cache.device) * tile.programs
    return SplitPlanner(num_kv_heads, num_programs, tile.block_n, window)


def _tile(num_heads: int, k_cache: torch.Tensor, v_cache: torch.Tensor, compute: torch.dtype) -> configs.AttentionTile:
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    widest, group = max(head_dim, v_cache.shape[3]), num_heads // num_kv_heads
    return configs.decode_tile(configs.arch(), widest, k_cache.dtype, compute, group=group, block_size=block_size)


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
    work: WorkList | None = None,
    out: torch.Tensor | None = None,
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
    work          what decode_planner() planned from these lengths, which are then not read; None: planned here, which
                  waits for the device
    out           contiguous, of the shape and dtype of what is returned: it is written there; None: a new tensor
    returns       [num_seqs, num_heads, head_dim_v], dtype of q
    """
    args = _launch_args(q, k_cache, v_cache, block_tables, context_lens, sinks, out, window, softcap, k_scale, v_scale)
    num_seqs, num_heads, _ = q.shape
    _, _, num_kv_heads, head_dim_v = v_cache.shape
    if out is None:
        out = torch.empty((num_seqs, num_heads, head_dim_v), dtype=q.dtype, device=q.device)
    if num_seqs == 0:
        return out
    if work is None:
        work = own_work_list(decode_planner(num_heads, k_cache, v_cache, q.dtype, window), context_lens)
    need_work(work, num_seqs, window, q.device)
    partial, lse = scratch(work, num_heads, head_dim_v, q.device)
    decode_kernel[(num_kv_heads, work.sizes.num_items)](
        out, partial, lse, q, k_cache, v_cache, block_tables, work.items, sinks, scale * k_scale, v_scale, **args
    )
    merge(out, partial, lse, work, sinks)
    return out


@once_per_layout
def _launch_args(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    window: int | None,
    softcap: float | None,
    k_scale: float,
    v_scale: float,
) -> LaunchArgs:
    """Check the arguments of paged_decode; what its kernel takes beside."""
    arch = configs.arch()
    group = need_attention(q, k_cache, v_cache, block_tables, context_lens, sinks, window, k_scale, v_scale, arch)
    num_seqs, num_heads, head_dim = q.shape
    _, block_size, _, head_dim_v = v_cache.shape
    need("block_tables", block_tables.shape[0] == num_seqs, "of {} rows like q", block_tables.shape[0], num_seqs)
    need_out(out, (num_seqs, num_heads, head_dim_v), q)
    tile = _tile(num_heads, k_cache, v_cache, q.dtype)
    pairs = v_cache.element_size() == 1 and all(number % 2 == 0 for number in (head_dim_v, *v_cache.stride()[:3]))
    return {
        **strides("q", q, "seq", "head"),
        **strides("k", k_cache, "block", "slot", "head"),
        **strides("v", v_cache, "block", "slot", "head"),
        "stride_table": block_tables.stride(0),
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "SOFTCAP": softcap or 0.0,
        "BLOCK_M": max(16, next_power_of_2(group)),
        "BLOCK_N": tile.block_n,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "BLOCK_DV": max(32 if pairs else 16, next_power_of_2(head_dim_v)),
        "PAIRS": pairs,
        "DOT": dot_dtype(q.dtype, k_cache.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
