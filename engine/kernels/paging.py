"""How kernels reach paged keys and values: a token's page comes from the block table, its place from the strides."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import triton
import triton.language as tl

# Parameters that differ from step to step: slices of the batch's tensors begin at any 4 bytes, and tables have any
# width. Triton would compile another kernel, in the middle of serving, for each that is a multiple of 16, or 1.
UNSPECIALIZED = ("block_tables_ptr", "context_lens_ptr", "stride_table")


@triton.jit
def load_pages(table_ptr, tokens, context_len, BLOCK_SIZE: tl.constexpr):
    """The block id of each token; 0, the null block, past the end of the context, where the table is not read."""
    return tl.load(table_ptr + tokens // BLOCK_SIZE, mask=tokens < context_len, other=0)


@triton.jit
def slot_offsets(pages, tokens, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr):
    """int64 offsets of the tokens' rows in a cache: a pool may hold more than 2^31 elements."""
    return pages.to(tl.int64) * stride_block + (tokens % BLOCK_SIZE) * stride_slot


@triton.jit
def load_columns(ptr, rows, columns, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """[PADDED, len(rows)]: rows of the cache as columns. No mask on the rows: every slot of the pool is finite."""
    if WIDTH == PADDED:
        tile = tl.load(ptr + rows[None, :] + columns[:, None])
    else:
        tile = tl.load(ptr + rows[None, :] + columns[:, None], mask=columns[:, None] < WIDTH, other=0.0)
    return tile


@triton.jit
def load_rows(ptr, rows, columns, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """[len(rows), PADDED]: rows of the cache. No mask on the rows: every slot of the pool is finite."""
    if WIDTH == PADDED:
        tile = tl.load(ptr + rows[:, None] + columns[None, :])
    else:
        tile = tl.load(ptr + rows[:, None] + columns[None, :], mask=columns[None, :] < WIDTH, other=0.0)
    return tile
