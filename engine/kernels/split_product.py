"""Products of few tokens, whose inputs are split among programs so that enough loads are under way."""

from typing import NamedTuple

import torch

from engine.kernels import configs
from engine.kernels.configs import GemmTile
from engine.kernels.integers import cdiv

FEW_TOKENS = 64  # up to which one row of programs does, and the inputs are split
PROGRAMS_PER_PROCESSOR = 2  # that a product of few tokens is split into


class Split(NamedTuple):
    """The grid (rows, columns, splits) of a product, and how many tiles of inputs each split has."""

    grid: tuple[int, int, int]
    tiles: int


def split_of(x: torch.Tensor, num_outputs: int, depth: int, tile: GemmTile, num_splits: int | None) -> Split:
    """How x [num_tokens, inputs] times a matrix is split.

    depth       what a kernel walks along, block_k at a time: inputs, or words of them
    num_splits  parts that are summed apart, at most one per tile; None: as many as fill the GPU
    """
    num_tokens = x.shape[0]
    rows, columns = cdiv(num_tokens, tile.block_m), cdiv(num_outputs, tile.block_n)
    num_tiles = cdiv(depth, tile.block_k)
    tiles_per_split = cdiv(num_tiles, min(num_splits or _splits(num_tokens, columns, x.device), num_tiles))
    return Split((rows, columns, cdiv(num_tiles, tiles_per_split)), tiles_per_split)


def empty_parts(x: torch.Tensor, num_outputs: int, splits: int) -> torch.Tensor:
    """Where a kernel writes its splits' sums, [splits, num_tokens, num_outputs]: float32 where they are several."""
    dtype = x.dtype if splits == 1 else torch.float32
    return torch.empty((splits, x.shape[0], num_outputs), dtype=dtype, device=x.device)


def sum_parts(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product [num_tokens, num_outputs] in dtype; the sums of the splits are added up in float32."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(0).to(dtype)


def _splits(num_tokens: int, num_columns: int, device: torch.device) -> int:
    """The same for all numbers of tokens that share a tile: another would be another kernel, compiled meanwhile."""
    if num_tokens > FEW_TOKENS:
        return 1
    return max(1, PROGRAMS_PER_PROCESSOR * configs.num_processors(device) // num_columns)
