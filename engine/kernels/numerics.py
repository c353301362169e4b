"""Arithmetic that every kernel shares: casts, products, tanh; the same on a GPU and in the interpreter."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# A Triton kernel's parameters have no Python types.

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
FP8_MAX = tl.constexpr(448.0)  # the largest finite float8_e4m3fn

TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def dot_dtype(compute: torch.dtype, stored: torch.dtype) -> tl.dtype:
    """The dtype that values of dtype `compute` are multiplied in with stored ones.

    fp8 goes to fp16, which holds every e4m3 value: Hopper converts the pair in one instruction but has none for bf16.
    The interpreter multiplies bf16 bit patterns as integers, so there everything is float32.
    """
    if INTERPRETED or compute == torch.float32:
        return tl.float32
    return tl.float16 if stored == torch.float8_e4m3fn else TRITON_DTYPES[compute]


@triton.jit
def dot(a, b, DTYPE: tl.constexpr):
    """a [M, K] @ b [K, N] in DTYPE, summed in float32; float32 operands are not cut to TF32."""
    return tl.dot(a.to(DTYPE), b.to(DTYPE), input_precision="ieee")


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """float32 x as DTYPE, to nearest, ties to even; float8 saturates, and NaN stays one.

    The interpreter's own casts do not round.
    """
    if DTYPE.is_fp8():  # without being told to, a GPU's minimum makes a number of NaN
        x = tl.maximum(x, -FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED and DTYPE.is_bf16():
        y = _bfloat16_bits(x).to(DTYPE, bitcast=True)
    elif INTERPRETED and DTYPE.is_fp8():
        y = _float8_bits(x).to(DTYPE, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def _bfloat16_bits(x):
    """The upper half of a float32's bits, after rounding at the lower half."""
    bits = x.to(tl.uint32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16).to(tl.uint16)


@triton.jit
def _float8_bits(x):
    """The e4m3fn bits of a float32 of at most 448, or of NaN: 1 sign, 4 exponent (bias 7), 3 mantissa."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 31) << 7
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6 the step is 2^-9, which is also the step of float32 at 2^14: the sum rounds there.
    subnormal = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    rounded = tl.where(tl.abs(x) < 0.015625, subnormal, normal)
    return (tl.where(x == x, rounded, 0x7F) | sign).to(tl.uint8)


@triton.jit
def tanh(x):
    """tanh of float32, to about its last bit: (1 - e^-2x) / (1 + e^-2x), and a series where 1 - e^-2x would cancel."""
    size = tl.abs(x)
    shrunk = tl.exp2(size * (-2 * LOG2_E))
    square = x * x
    series = 1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * (62 / 2835))))
    y = tl.where(size < 0.25, size * series, (1 - shrunk) / (1 + shrunk))
    return tl.where(x < 0, -y, y)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) of float32."""
    return 1 / (1 + tl.exp2(-x * LOG2_E))


@triton.jit
def ordered(x):
    """An int32 for each float32, larger for a larger one: 0 and -0 are equal, NaN is above all; float_of goes back."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x == x, bits, 0x7FC00000)
    bits = tl.where(x == 0, 0, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(image):
    """The float32 that `ordered` made this of."""
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
