"""Weights as a checkpoint stores them: what a product takes in a plain tensor's place.

Each holds a linear layer's matrix, w [outputs, inputs]; or the matrices of all experts of a layer, and then every
tensor has one axis more, the first.
"""

import math
from dataclasses import dataclass
from typing import Final, assert_never

import torch

SHORTEST_RUN: Final = 16
LONGEST_RUN: Final = 64


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """values [outputs, inputs] fp8, and their scales as a product takes them: nothing is made of them at each step.

    row_scales   [outputs] float32
    input_scale  one float32, what activations were divided by when it was calibrated; None: their own largest
    """

    values: torch.Tensor
    row_scales: torch.Tensor
    input_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Fp8BlockMatrix:
    """values [outputs, inputs] fp8; scales float32, one for each block of (rows, columns), the last ones cut off."""

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """4-bit values, whatever the checkpoint's own order of them.

    words   [inputs / 8, outputs] int32: of each 8n neighboring inputs, n being nibble_run(), bits 4j to 4j + 3 of the
            r-th row hold input jn + r, so that each nibble of a tile of words is a tile of the matrix
    scales  [groups, outputs] float16 or bfloat16
    zeros   [groups, outputs / 8] int32: bits 4j to 4j + 3 of column c hold output 8c + j
    order   [inputs] int32: which input of the layer each of these is, where groups are no neighbors of it; None: itself
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor | None = None


def nibble_run(num_words: int, group_size: int) -> int:
    """Neighboring inputs that one nibble of neighboring rows of words holds, all with one scale where there can be any.

    64 inputs of 16 bits for 16 tokens are a copy of 16 bytes for each of 128 threads; a tile of fewer than 16 is none
    for tensor cores, and then each nibble holds an eighth of all inputs.
    """
    run = math.gcd(LONGEST_RUN, num_words, group_size)
    return run if run >= SHORTEST_RUN else num_words


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """MXFP4 of the OCP's microscaling formats: e2m1 values, each 32 neighbors of a row with one power of two.

    values  [outputs, inputs / 2] uint8: the lower four bits of byte i are input 2i, the upper ones input 2i + 1
    scales  [outputs, inputs / 32] uint8, e8m0: 2 to the power of the byte less 127
    """

    values: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class Nvfp4Matrix:
    """NVFP4: e2m1 values, each 16 neighbors of a row with a scale in fp8, and a scale for each fused part of the rows.

    values        [outputs, inputs / 2] uint8, as Mxfp4Matrix's
    scales        [outputs, inputs / 16] float8_e4m3fn
    part_scales   [parts] float32
    input_scales  [parts] float32, for activations in 4 bits: held as a checkpoint has them, and of no use here
    parts         rows of each part
    """

    values: torch.Tensor
    scales: torch.Tensor
    part_scales: torch.Tensor
    input_scales: torch.Tensor | None
    parts: tuple[int, ...]


Matrix = torch.Tensor | Fp8Matrix | Fp8BlockMatrix | Int4Matrix | Mxfp4Matrix | Nvfp4Matrix


def shape_of(matrix: Matrix) -> tuple[int, ...]:
    """[outputs, inputs] of a linear layer's matrix; [experts, outputs, inputs] of all experts'."""
    match matrix:
        case torch.Tensor():
            return matrix.shape
        case Fp8Matrix() | Fp8BlockMatrix():
            return matrix.values.shape
        case Int4Matrix(words=words):
            return *words.shape[:-2], words.shape[-1], 8 * words.shape[-2]
        case Mxfp4Matrix(values=values) | Nvfp4Matrix(values=values):
            return *values.shape[:-1], 2 * values.shape[-1]
        case _:
            assert_never(matrix)
