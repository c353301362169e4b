"""Products with quantized weights in plain torch: a few rows at a time in full, multiplied, and forgotten.

What is held stays quantized. Weights are widened in float32 and rounded once, to the dtype of the activations; these
are not quantized.
"""

import torch

from engine.kernels.matrices import nibble_run

# Weights that are wide at once: on a CPU they stay in its caches, a GPU wants larger products.
WIDE_BYTES = {"cpu": 4 << 20}
WIDE_BYTES_ELSEWHERE = 64 << 20
NIBBLES = 8


def fp8_linear(
    x: torch.Tensor, values: torch.Tensor, row_scales: torch.Tensor, *, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ (values * scales).T.

    x            [num_tokens, inputs] float32, float16 or bfloat16
    values       [outputs, inputs] float8_e4m3fn; row_scales [outputs] float32
    input_scale  what a GPU's product of fp8 with fp8 divides activations by; of no use here
    returns      [num_tokens, outputs], dtype of x
    """
    y = x.new_empty(x.shape[0], values.shape[0])
    for rows in _slices(values.shape, x):
        weight = values[rows].float().mul_(row_scales[rows, None]).to(x.dtype)
        torch.mm(x, weight.T, out=y[:, rows])
    return y


def fp8_block_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]
) -> torch.Tensor:
    """x @ (values * scales).T with one scale for each block of (rows, columns).

    scales  [ceil(outputs / rows), ceil(inputs / columns)] float32; the rest as in fp8_linear
    """
    y = x.new_empty(x.shape[0], values.shape[0])
    row_blocks = torch.arange(values.shape[0], device=x.device) // block[0]
    wide = scales.repeat_interleave(block[1], 1)[:, : values.shape[1]]
    for rows in _slices(values.shape, x):
        weight = values[rows].float().mul_(wide[row_blocks[rows]]).to(x.dtype)
        torch.mm(x, weight.T, out=y[:, rows])
    return y


def int4_linear(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """x @ ((values - zeros) * scales).

    x        [num_tokens, inputs] float32, float16 or bfloat16
    words    [inputs / 8, outputs] int32, in Int4Matrix's order
    scales   [groups, outputs] float16 or bfloat16; a group is inputs / groups neighbors
    zeros    [groups, outputs / 8] int32: bits 4j to 4j + 3 of column c are output 8c + j's
    returns  [num_tokens, outputs], dtype of x
    """
    y = x.new_empty(x.shape[0], words.shape[1])
    shifts = torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32, device=x.device)
    runs = words.unflatten(0, (-1, 1, nibble_run(words.shape[0], x.shape[1] // scales.shape[0])))
    for columns in _slices((words.shape[1], NIBBLES * words.shape[0]), x, NIBBLES):
        values = (runs[..., columns] >> shifts[:, None, None]).bitwise_and_(15)
        packed = zeros[:, columns.start // NIBBLES : columns.stop // NIBBLES]
        points = ((packed[:, :, None] >> shifts) & 15).flatten(1)
        grouped = values.flatten(0, 2).unflatten(0, (scales.shape[0], -1)).sub_(points[:, None])
        weight = grouped.float().mul_(scales[:, None, columns]).to(x.dtype)
        torch.mm(x, weight.flatten(0, 1), out=y[:, columns])
    return y


def mxfp4_linear(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x @ (values * scales).T.

    x        [num_tokens, inputs] float32, float16 or bfloat16
    values   [outputs, inputs / 2] uint8, e2m1: the lower four bits of byte i are input 2i, the upper ones input 2i + 1
    scales   [outputs, groups] uint8, e8m0; a group is inputs / groups neighbors
    returns  [num_tokens, outputs], dtype of x
    """
    y = x.new_empty(x.shape[0], values.shape[0])
    for rows in _slices((values.shape[0], 2 * values.shape[1]), x):
        powers = scales[rows].view(torch.float8_e8m0fnu).float()
        torch.mm(x, scaled_e2m1(values[rows], powers, x.dtype).T, out=y[:, rows])
    return y


def nvfp4_linear(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, part_scales: torch.Tensor, parts: tuple[int, ...]
) -> torch.Tensor:
    """x @ (values * scales * part_scales).T; activations stay as they are.

    x            [num_tokens, inputs] float32, float16 or bfloat16
    values       [outputs, inputs / 2] uint8, as mxfp4_linear's
    scales       [outputs, groups] float8_e4m3fn
    part_scales  [number of parts] float32; parts: rows of each
    returns      [num_tokens, outputs], dtype of x
    """
    y = x.new_empty(x.shape[0], values.shape[0])
    starts = [sum(parts[:i]) for i in range(len(parts))]
    for start, size, part_scale in zip(starts, parts, part_scales.split(1), strict=True):
        for rows in _slices((size, 2 * values.shape[1]), x):
            outputs = slice(start + rows.start, start + rows.stop)
            part = scales[outputs].float().mul_(part_scale)
            torch.mm(x, scaled_e2m1(values[outputs], part, x.dtype).T, out=y[:, outputs])
    return y


def scaled_e2m1(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes [n, m] uint8 and scales [n, groups] float32 -> [n, 2m] in dtype; nothing outlives the call."""
    wide: torch.Tensor = e2m1(codes).unflatten(1, (scales.shape[1], -1)).mul_(scales[:, :, None])
    return wide.flatten(1).to(dtype)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """[n, m] uint8 -> [n, 2m] float32: two 4-bit values of each byte, the lower one first.

    A sign, two bits of exponent, one of mantissa: as the bits of a float16 they mean 2^-14 of it.
    """
    nibbles = torch.stack([codes & 15, codes >> 4], 2).flatten(1).to(torch.int16)
    bits = ((nibbles & 7) << 9) | ((nibbles & 8) << 12)
    return bits.view(torch.float16).float().mul_(2.0**14)


def _slices(shape: tuple[int, ...], x: torch.Tensor, multiple: int = 1) -> list[slice]:
    """Outputs of a matrix [outputs, inputs], so many at a time that they are wide together."""
    outputs, inputs = shape
    limit = WIDE_BYTES.get(x.device.type, WIDE_BYTES_ELSEWHERE)
    size = max(multiple, limit // (4 * inputs) // multiple * multiple)
    return [slice(start, min(start + size, outputs)) for start in range(0, outputs, size)]
