"""Products of few tokens, whose inputs are split among programs so that enough loads are under way."""

from collections.abc import Callable

import torch

from engine.kernels import configs
from engine.kernels.configs import GemmTile
from engine.kernels.integers import cdiv

FEW_TOKENS = 64  # up to which one row of programs does, and the inputs are split
PROGRAMS_PER_PROCESSOR = 2  # that a product of few tokens is split into

# Launch a kernel: where it writes [splits, num_tokens, num_outputs], its grid, and tiles of inputs in a split.
Launch = Callable[[torch.Tensor, tuple[int, int, int], int], object]


def split_product(
    x: torch.Tensor, num_outputs: int, depth: int, tile: GemmTile, num_splits: int | None, launch: Launch
) -> torch.Tensor:
    """x times a matrix, the sums of the splits added up in float32: [num_tokens, num_outputs], dtype of x.

    x           [num_tokens, inputs]
    depth       what a kernel walks along, block_k at a time: inputs, or words of them
    num_splits  parts that are summed apart, at most one per tile; None: as many as fill the GPU
    """
    num_tokens = x.shape[0]
    rows, columns = cdiv(num_tokens, tile.block_m), cdiv(num_outputs, tile.block_n)
    num_tiles = cdiv(depth, tile.block_k)
    tiles_per_split = cdiv(num_tiles, min(num_splits or _splits(num_tokens, columns, x.device), num_tiles))
    splits = cdiv(num_tiles, tiles_per_split)
    y = torch.empty((splits, num_tokens, num_outputs), dtype=x.dtype if splits == 1 else torch.float32, device=x.device)
    launch(y, (rows, columns, splits), tiles_per_split)
    return y[0] if splits == 1 else y.sum(0).to(x.dtype)


def _splits(num_tokens: int, num_columns: int, device: torch.device) -> int:
    """The same for all numbers of tokens that share a tile: another would be another kernel, compiled meanwhile."""
    if num_tokens > FEW_TOKENS:
        return 1
    return max(1, PROGRAMS_PER_PROCESSOR * configs.num_processors(device) // num_columns)
