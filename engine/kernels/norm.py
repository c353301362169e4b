"""Root-mean-square normalization, with the residual addition before it where there is one."""
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
    need_one_device,
    need_rows,
    need_shape,
    once_per_layout,
    strides,
)
from engine.kernels.integers import cdiv, next_power_of_2
from engine.kernels.numerics import cast


@triton.jit
def times_weight(normed, weight, UNIT_OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """A normalized row times its weight, float32; Llama rounds it to DTYPE before, Gemma only afterwards."""
    return normed * (1 + weight) if UNIT_OFFSET else cast(normed, DTYPE).to(tl.float32) * weight


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    y_ptr,
    sum_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    eps,
    num_rows,
    heads,
    stride_x_token,
    stride_x_head,
    stride_residual_token,
    stride_residual_head,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """Grid (cdiv(num_rows, BLOCK_ROWS),): BLOCK_ROWS rows, a row being one head of one token; y and sum contiguous."""
    rows = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK_WIDTH)[None, :]
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)
    token = rows // heads
    head = rows % heads
    out = rows[:, None] * WIDTH + columns

    x = tl.load(x_ptr + (token * stride_x_token + head * stride_x_head)[:, None] + columns, mask=mask, other=0.0)
    x = x.to(tl.float32)
    if residual_ptr is not None:
        residual_rows = residual_ptr + (token * stride_residual_token + head * stride_residual_head)[:, None]
        x += tl.load(residual_rows + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = cast(x, sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + out, rounded, mask=mask)
        x = rounded.to(tl.float32)  # what is normalized is the sum that the next layer adds to
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    normed = times_weight(normed, weight, UNIT_OFFSET, y_ptr.dtype.element_ty)
    tl.store(y_ptr + out, cast(normed, y_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    unit_offset: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) * weight over the last dimension, in float32; with a residual, of s = x + residual, and s as well.

    x            [num_tokens, hidden] or [num_tokens, heads, head_dim]; strided, last dimension contiguous
    weight       [hidden] or [head_dim]
    residual     as x
    unit_offset  False: the normalized value is rounded to x's dtype, then multiplied with weight (Llama);
                 True: it is multiplied with 1 + weight, then rounded (Gemma)
    returns      y, or (y, s) with a residual; shape and dtype of x
    """
    args = _launch_args(x, weight, residual, unit_offset)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    added = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows = x.numel() // x.shape[-1]
    if num_rows > 0:
        rms_norm_kernel[(cdiv(num_rows, args["BLOCK_ROWS"]),)](y, added, x, residual, weight, eps, num_rows, **args)
    return y if added is None else (y, added)


@once_per_layout
def _launch_args(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, unit_offset: bool) -> LaunchArgs:
    """Check the arguments of rms_norm; what its kernel takes beside."""
    need("x", x.dim() in (2, 3), "of 2 or 3 dimensions", x.shape)
    need_rows("x", x, x.dim(), FLOATS)
    need_shape("weight", weight, (x.shape[-1],))
    if residual is not None:
        need_rows("residual", residual, x.dim(), (x.dtype,))
        need("residual", residual.shape == x.shape, "of shape {} like x", residual.shape, x.shape)
    need_one_device(x=x, weight=weight, residual=residual)
    block_width = next_power_of_2(x.shape[-1])
    block_rows = max(1, configs.ROW_ELEMENTS // block_width)
    return {
        "heads": x.shape[1] if x.dim() == 3 else 1,
        **_row_strides("x", x),
        **_row_strides("residual", x if residual is None else residual),
        "WIDTH": x.shape[-1],
        "BLOCK_ROWS": block_rows,
        "BLOCK_WIDTH": block_width,
        "UNIT_OFFSET": unit_offset,
        "num_warps": configs.row_warps(block_rows * block_width),
    }


def _row_strides(name: str, x: torch.Tensor) -> LaunchArgs:
    """Strides of a token and of a head; a matrix has one head."""
    return {**strides(name, x, "token"), f"stride_{name}_head": x.stride(1) if x.dim() == 3 else 0}
