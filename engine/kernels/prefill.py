"""Paged causal attention of many new tokens per sequence, after whatever part of its context is stored already."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels import configs
from engine.kernels.checks import LaunchArgs, need, need_attention, need_out, need_shape, once_per_layout, strides
from engine.kernels.integers import next_power_of_2
from engine.kernels.numerics import cast, dot_dtype
from engine.kernels.paging import UNSPECIALIZED, load_columns, load_pages, load_rows, slot_offsets
from engine.kernels.query_tiles import QueryTiles, all_tiles
from engine.kernels.softmax import add_tile, attention_scores, finish_rows, start_rows

FIRST_TMA_ARCH = 90


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "query_start_ptr", "tiles_ptr"])
def prefill_kernel(
    out_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    query_start_ptr,
    context_lens_ptr,
    tiles_ptr,
    sinks_ptr,
    scale,
    v_scale,
    stride_q_token,
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
    MASK_ALL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TMA: tl.constexpr,
    DOT: tl.constexpr,
):
    """Grid (tiles of queries, num_kv_heads): BLOCK_M // GROUP queries of one sequence and KV head.

    The rows of a tile are queries times the GROUP heads that share a KV head, so that each key is loaded once for
    all of them. The list has the tiles that see most keys first: what is long begins early.

    TMA  the caches are tensor descriptors, from which a tile of tokens, all in one page, comes in a single copy
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    tile_ptr = tiles_ptr + 2 * tl.program_id(0)
    seq = tl.load(tile_ptr)
    first_query = tl.load(tile_ptr + 1)
    kv_head = tl.program_id(1)

    query_start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_start
    if first_query >= query_len:
        return
    context_len = tl.load(context_lens_ptr + seq)
    first_position = context_len - query_len + first_query

    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < QUERIES * GROUP) & (first_query + rows // GROUP < query_len)
    tokens_q = (query_start + first_query + rows // GROUP).to(tl.int64)
    positions = first_position + rows // GROUP

    columns = tl.arange(0, BLOCK_D)
    columns_v = tl.arange(0, BLOCK_DV)
    in_tile = tl.arange(0, BLOCK_N)
    q = tl.load(
        q_ptr + tokens_q[:, None] * stride_q_token + heads[:, None] * stride_q_head + columns[None, :],
        mask=is_row[:, None] & (columns < HEAD_DIM)[None, :],
        other=0.0,
    )
    in_page = 0 if TMA else in_tile  # the tokens of a tile whose pages are looked up
    if not TMA:
        k_base = k_cache_ptr + kv_head * stride_k_head
        v_base = v_cache_ptr + kv_head * stride_v_head
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table

    # Tiles up to the first query are seen whole by every row, unless a window hides their start from some.
    end_tile = tl.cdiv(tl.minimum(first_position + QUERIES, context_len), BLOCK_N)
    first_tile = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N if WINDOW > 0 else 0
    mask_from = first_tile if MASK_ALL or WINDOW > 0 else (first_position + 1) // BLOCK_N

    top, total, acc = start_rows(sinks_ptr, heads, is_row, True, BLOCK_M, BLOCK_DV)
    pages = load_pages(table_ptr, first_tile * BLOCK_N + in_page, context_len, BLOCK_SIZE)
    for is_masked in tl.static_range(2):
        for tile in range(mask_from if is_masked else first_tile, end_tile if is_masked else mask_from):
            tokens = tile * BLOCK_N + in_tile
            # Page ids one tile ahead: waiting for them here would leave no key or value in flight.
            next_pages = load_pages(table_ptr, tile * BLOCK_N + in_page + BLOCK_N, context_len, BLOCK_SIZE)
            if TMA:
                slot = tile * BLOCK_N % BLOCK_SIZE
                k = tl.trans(tl.reshape(k_cache_ptr.load([pages, slot, kv_head, 0]), [BLOCK_N, BLOCK_D]))
                v = tl.reshape(v_cache_ptr.load([pages, slot, kv_head, 0]), [BLOCK_N, BLOCK_DV])
            else:
                k_rows = slot_offsets(pages, tokens, stride_k_block, stride_k_slot, BLOCK_SIZE)
                v_rows = slot_offsets(pages, tokens, stride_v_block, stride_v_slot, BLOCK_SIZE)
                k = load_columns(k_base, k_rows, columns, HEAD_DIM, BLOCK_D)
                v = load_rows(v_base, v_rows, columns_v, HEAD_DIM_V, BLOCK_DV)
            scores = attention_scores(q, k, scale, SOFTCAP, DOT)
            if is_masked:
                visible = tokens[None, :] <= positions[:, None]
                if WINDOW > 0:
                    visible = visible & (tokens[None, :] > positions[:, None] - WINDOW)
                scores = tl.where(visible, scores, float("-inf"))
            top, total, acc = add_tile(scores, v, top, total, acc, DOT)
            pages = next_pages

    out = finish_rows(total, acc) * v_scale
    out_rows = tokens_q * (tl.num_programs(1) * GROUP) + heads
    out_mask = is_row[:, None] & (columns_v < HEAD_DIM_V)[None, :]
    tl.store(
        out_ptr + out_rows[:, None] * HEAD_DIM_V + columns_v[None, :],
        cast(out, out_ptr.dtype.element_ty),
        mask=out_mask,
    )


def queries_of_tile(
    num_heads: int, k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype, max_query_len: int
) -> int:
    """Queries that one program works on, where no sequence has more than max_query_len."""
    return _tile(num_heads, k_cache, v_cache, dtype, max_query_len).block_m // (num_heads // k_cache.shape[2])


def _tile(
    num_heads: int, k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype, max_query_len: int
) -> configs.AttentionTile:
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    group = num_heads // num_kv_heads
    return configs.prefill_tile(
        configs.arch(), max(head_dim, v_cache.shape[3]), k_cache.dtype, dtype, max_query_len * group, group=group,
        block_size=block_size,
    )  # fmt: skip


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
    tiles: QueryTiles | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend each sequence's last tokens over its paged KV, causally; their own keys and values are stored already.

    q              [num_tokens, num_heads, head_dim] float32, float16 or bfloat16, sequence after sequence; strided,
                   last dimension contiguous
    k_cache        [num_blocks, block_size, num_kv_heads, head_dim], q's dtype or float8_e4m3fn; strided, last
                   dimension contiguous; every slot finite, those of block 0 (the null block) too
    v_cache        alike with head_dim_v
    block_tables   [num_seqs, max_blocks] int32; entries past a sequence's last block are never read
    query_start    [num_seqs + 1] int32, from 0: sequence i's queries are q[query_start[i] : query_start[i + 1]]
    context_lens   [num_seqs] int32, these queries included: they are the last ones of the context
    scale          of the scores, before softcap * tanh(score / softcap)
    max_query_len  no sequence has more queries
    window         a token sees itself and the window - 1 before it
    sinks          [num_heads] one more logit per head, without a value
    k_scale        float8 caches only: key = stored * k_scale; v_scale alike
    tiles          the queries cut into pieces of queries_of_tile(); None, or of another size: cut here, for the longest
    out            contiguous, of the shape and dtype of what is returned: it is written there; None: a new tensor
    returns        [num_tokens, num_heads, head_dim_v], dtype of q; rows from query_start[-1] on are not set
    """
    args = _launch_args(
        q, k_cache, v_cache, block_tables, query_start, context_lens, sinks, out, max_query_len, window, softcap,
        k_scale, v_scale,
    )  # fmt: skip
    num_tokens, num_heads, _ = q.shape
    _, _, num_kv_heads, head_dim_v = v_cache.shape
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim_v), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    queries = args["BLOCK_M"] // args["GROUP"]
    if tiles is None or tiles.queries != queries:
        tiles = all_tiles(len(block_tables), max_query_len, queries, q.device)
    need("tiles", tiles.rows.device == q.device, "on {} like q", tiles.rows.device, q.device)
    num_tiles = tiles.rows.shape[0]
    if num_tiles == 0:
        return out
    caches = (k_cache, v_cache)
    prefill_kernel[(num_tiles, num_kv_heads)](
        out,
        q,
        *(_described(cache, args["BLOCK_N"]) for cache in caches) if args["TMA"] else caches,
        block_tables,
        query_start,
        context_lens,
        tiles.rows,
        sinks,
        scale * k_scale,
        v_scale,
        **args,
    )
    return out


def _has_tma(cache: torch.Tensor) -> bool:
    """Whether the rows are whole tiles and lie as the tensor memory accelerator asks: 16 bytes apart, or multiples."""
    width = cache.shape[3]
    return width >= 16 and width & (width - 1) == 0 and all(n * cache.itemsize % 16 == 0 for n in cache.stride()[:3])


def _described(cache: torch.Tensor, tokens: int) -> TensorDescriptor:
    """A cache, of which so many tokens of one page and head are copied at once."""
    return TensorDescriptor(cache, [*cache.shape], [*cache.stride()], [1, tokens, 1, cache.shape[3]])


@once_per_layout
def _launch_args(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    max_query_len: int,
    window: int | None,
    softcap: float | None,
    k_scale: float,
    v_scale: float,
) -> LaunchArgs:
    """Check the arguments of paged_prefill; what its kernel takes beside."""
    arch = configs.arch()
    group = need_attention(q, k_cache, v_cache, block_tables, context_lens, sinks, window, k_scale, v_scale, arch)
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, _, head_dim_v = v_cache.shape
    need_shape("query_start", query_start, (block_tables.shape[0] + 1,))
    need("query_start", query_start.dtype == torch.int32, "int32", query_start.dtype)
    need("query_start", query_start.device == q.device, "on {} like q", query_start.device, q.device)
    need("max_query_len", max_query_len >= 1, "at least 1", max_query_len)
    need_out(out, (num_tokens, num_heads, head_dim_v), q)
    tile = _tile(num_heads, k_cache, v_cache, q.dtype, max_query_len)
    # Without a pipeline, in float32, it would take three times the registers and wait for each copy as before.
    is_tma = arch >= FIRST_TMA_ARCH and tile.num_stages > 1 and block_size >= tile.block_n
    need("q", group <= tile.block_m, "of at most {} heads per KV head", group, tile.block_m)
    return {
        **strides("q", q, "token", "head"),
        **strides("k", k_cache, "block", "slot", "head"),
        **strides("v", v_cache, "block", "slot", "head"),
        "stride_table": block_tables.stride(0),
        "BLOCK_SIZE": block_size,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "WINDOW": window or 0,
        "SOFTCAP": softcap or 0.0,
        "MASK_ALL": tile.mask_all,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "BLOCK_DV": max(16, next_power_of_2(head_dim_v)),
        "TMA": is_tma and _has_tma(k_cache) and _has_tma(v_cache),
        "DOT": dot_dtype(q.dtype, k_cache.dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
