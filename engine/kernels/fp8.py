"""A product of fp8 weights with activations rounded to fp8, on GPUs that multiply fp8: sm_89 and newer."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

from functools import cache

import torch
import triton
import triton.language as tl

from engine.kernels import configs, dequantize
from engine.kernels.checks import (
    FIRST_FP8_ARCH,
    FLOATS,
    LaunchArgs,
    need,
    need_one_device,
    need_rows,
    need_shape,
    need_supported,
    once_per_layout,
)
from engine.kernels.integers import next_power_of_2
from engine.kernels.numerics import FP8_MAX, cast

FP8 = torch.float8_e4m3fn
ALIGNMENT = 16  # bytes: cuBLAS multiplies fp8 matrices whose widths are multiples of it
BLOCK = 2048


@triton.jit
def fp8_rows_kernel(values_ptr, scales_ptr, x_ptr, given_ptr, width, stride_x, BLOCK: tl.constexpr):
    """values[row] = x[row] / scales[row]; the scale is the given one, or what brings the row's largest to 448.

    Of NaN comes NaN, so that what was broken before the product is broken after it. Grid (num_rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    if given_ptr is None:
        # Sizes are compared as bits, which order them alike and NaN above all: tl.max of floats drops it.
        most = tl.zeros([BLOCK], tl.int32)
        for start in range(0, width, BLOCK):
            x = tl.load(x_ptr + row * stride_x + start + columns, mask=start + columns < width, other=0.0)
            most = tl.maximum(most, tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True))
        largest = tl.max(most, 0).to(tl.float32, bitcast=True)
        # A row of zeros is not divided by 0.
        scale = tl.div_rn(tl.maximum(largest, 1e-10, propagate_nan=tl.PropagateNan.ALL), FP8_MAX)
    else:
        scale = tl.load(given_ptr)
    tl.store(scales_ptr + row, scale)
    for start in range(0, width, BLOCK):
        mask = start + columns < width
        x = tl.load(x_ptr + row * stride_x + start + columns, mask=mask, other=0.0).to(tl.float32)
        scaled = tl.div_rn(x, scale)  # `/` is an approximation on a GPU, and rounds some to the neighboring fp8 value
        tl.store(values_ptr + row * width + start + columns, cast(scaled, values_ptr.dtype.element_ty), mask=mask)


def fp8_rows(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x rounded to fp8, and what each was divided by.

    x        [num_rows, width] float32, float16 or bfloat16; strided, last dimension contiguous
    scale    one float32 for all; None: each row's largest becomes 448
    returns  [num_rows, width] float8_e4m3fn, contiguous, and [num_rows, 1] float32
    """
    args = _launch_args(x, scale)
    num_rows, width = x.shape
    values = torch.empty((num_rows, width), dtype=FP8, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if values.numel() > 0:
        fp8_rows_kernel[(num_rows,)](values, scales, x, scale, **args)
    return values, scales


@once_per_layout
def _launch_args(x: torch.Tensor, scale: torch.Tensor | None) -> LaunchArgs:
    """Check the arguments of fp8_rows; what its kernel takes beside."""
    need_rows("x", x, 2, FLOATS)
    need_supported("values", FP8, configs.arch())
    if scale is not None:
        need("scale", scale.numel() == 1 and scale.dtype == torch.float32, "one float32", scale)
    width = x.shape[1]
    block = min(BLOCK, next_power_of_2(max(1, width)))
    return {"width": width, "stride_x": x.stride(0), "BLOCK": block, "num_warps": configs.row_warps(block)}


def fp8_linear(
    x: torch.Tensor, values: torch.Tensor, row_scales: torch.Tensor, *, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ (values * scales).T, with x rounded to fp8 where the GPU multiplies fp8, and weights widened elsewhere.

    x            [num_tokens, inputs] float32, float16 or bfloat16; strided, last dimension contiguous
    values       [outputs, inputs] float8_e4m3fn; row_scales [outputs] float32
    input_scale  what x is divided by, one float32; None: each token's own largest over 448
    returns      [num_tokens, outputs], dtype of x
    """
    _check(x, values, row_scales, input_scale)
    num_outputs, num_inputs = values.shape
    if configs.arch() < FIRST_FP8_ARCH or num_outputs % ALIGNMENT or num_inputs % ALIGNMENT:
        return dequantize.fp8_linear(x, values, row_scales)
    return scaled_product(*fp8_rows(x, input_scale), values, row_scales, x.dtype)


@once_per_layout
def _check(x: torch.Tensor, values: torch.Tensor, row_scales: torch.Tensor, input_scale: torch.Tensor | None) -> None:
    """Check the arguments of fp8_linear."""
    need_rows("x", x, 2, FLOATS)
    num_outputs = len(values)
    need_shape("values", values, (num_outputs, x.shape[1]))
    need("values", values.dtype == FP8, "float8_e4m3fn", values.dtype)
    need_shape("row_scales", row_scales, (num_outputs,))
    need("row_scales", row_scales.dtype == torch.float32, "float32", row_scales.dtype)
    need_one_device(x=x, values=values, row_scales=row_scales, input_scale=input_scale)


def scaled_product(
    x: torch.Tensor, x_scales: torch.Tensor, values: torch.Tensor, row_scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(x * x_scales) @ (values * row_scales).T, summed in float32, in dtype.

    x       [num_tokens, inputs] fp8; x_scales [num_tokens, 1] float32
    values  [outputs, inputs] fp8; row_scales [outputs] float32
    """
    if dtype == torch.bfloat16 and scales_rows(x.device.type):
        return torch._scaled_mm(x, values.T, scale_a=x_scales, scale_b=row_scales[None], out_dtype=dtype)
    unit = torch.ones((), device=x.device)
    y = torch._scaled_mm(x, values.T, scale_a=unit, scale_b=unit, out_dtype=torch.float32)
    return (y * x_scales * row_scales).to(dtype)


@cache
def scales_rows(device_type: str) -> bool:
    """Whether torch scales rows inside a product in bfloat16: on GPUs always, on a CPU not in torch 2.11.

    bfloat16 is the one dtype for which every GPU does.
    """
    if device_type != "cpu":
        return True
    x = torch.zeros((ALIGNMENT, ALIGNMENT), device="cpu").to(FP8)
    scales = torch.ones((ALIGNMENT, 1), device="cpu")
    try:
        torch._scaled_mm(x, x.T, scale_a=scales, scale_b=scales.T, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True
