"""The gate of a gated MLP: activation(gate) * up."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

from typing import get_args

import torch
import triton
import triton.language as tl

from engine.kernels.checks import FLOATS, need, need_rows, once_per_layout
from engine.kernels.integers import cdiv
from engine.kernels.numerics import cast, sigmoid, tanh
from kvplan.models.spec import Activation

ACTIVATIONS = get_args(Activation)
BLOCK = 1024


@triton.jit
def _gated(gate, up, limit, alpha, KIND: tl.constexpr):
    if KIND == "silu":
        y = gate * sigmoid(gate) * up
    elif KIND == "gelu_tanh":
        y = 0.5 * gate * (1 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate))) * up  # sqrt(2 / pi)
    elif KIND == "gelu":
        y = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * up  # 1 / sqrt(2)
    else:
        tl.static_assert(KIND == "clamped_swiglu")
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        y = (up + 1) * gate * sigmoid(alpha * gate)
    return y


@triton.jit
def gated_activation_kernel(y_ptr, x_ptr, limit, alpha, inner, stride_x, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (num_tokens, cdiv(inner, BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inner
    row = x_ptr + token * stride_x
    gate = tl.load(row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + inner + columns, mask=mask, other=0.0).to(tl.float32)
    y = _gated(gate, up, limit, alpha, KIND)
    tl.store(y_ptr + token * inner + columns, cast(y, y_ptr.dtype.element_ty), mask=mask)


def gated_activation(x: torch.Tensor, kind: Activation, *, limit: float = 0.0, alpha: float = 0.0) -> torch.Tensor:
    """activation(gate) * up, in float32.

    x             [num_tokens, 2 * inner]: gate, then up; strided, last dimension contiguous
    kind          "silu"; "gelu_tanh"; "gelu" (exact); "clamped_swiglu" (gpt-oss): gate is cut at limit, up at +-limit,
                  and the result is (up + 1) * gate * sigmoid(alpha * gate)
    limit, alpha  of clamped_swiglu
    returns       [num_tokens, inner], dtype of x
    """
    _check(x, kind)
    num_tokens, inner = x.shape[0], x.shape[1] // 2
    y = torch.empty((num_tokens, inner), dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        gated_activation_kernel[(num_tokens, cdiv(inner, BLOCK))](
            y, x, float(limit), float(alpha), inner, x.stride(0), KIND=kind, BLOCK=BLOCK, num_warps=4
        )
    return y


@once_per_layout
def _check(x: torch.Tensor, kind: Activation) -> None:
    """Check the arguments of gated_activation."""
    need_rows("x", x, 2, FLOATS)
    need("x", x.shape[1] % 2 == 0, "of an even width", x.shape[1])
    need("kind", kind in ACTIVATIONS, "one of {}", kind, ACTIVATIONS)
