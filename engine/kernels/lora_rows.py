"""Which tokens of a step have which adapter, as kernels walk them: sorted by adapter, in tiles of one adapter each."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int32]

FEW_TOKENS = 512  # as many as a step of decodes alone has; up to so many, tiles are as low as tensor cores take
LOW_TILE, HIGH_TILE = 16, 64
NOBODY = -1  # a tile that no adapter needs; a place of a tile that no token has


def tile_rows(num_tokens: int) -> int:
    """Rows of a tile in a step of so many tokens."""
    return LOW_TILE if num_tokens <= FEW_TOKENS else HIGH_TILE


def most_tiles(num_tokens: int, num_slots: int) -> int:
    """Tiles that a step of so many tokens can need: each adapter's last may be filled in part."""
    return num_tokens // tile_rows(num_tokens) + min(num_slots, num_tokens)


@dataclass(slots=True)
class LoraRows:
    """A step's tiles, in tensors that stay where they are: a CUDA graph reads what the next step writes there.

    rows        int32: token numbers, tile after tile of tile_rows(num_tokens)
    tile_slots  int32: the adapter's slot of each tile; NOBODY behind the last
    ranks       [num_slots] int32: of the adapter in each slot; past it, matrices are 0
    by_slot     the same for who walks it on the host: (slot, its tokens' numbers)
    """

    rows: torch.Tensor
    tile_slots: torch.Tensor
    ranks: torch.Tensor
    by_slot: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def empty(cls, max_num_tokens: int, num_slots: int, device: torch.device) -> "LoraRows":
        """For steps of up to max_num_tokens tokens, and for any CUDA graph, whose rows may be more."""
        sizes = {FEW_TOKENS, max_num_tokens}
        num_places = max(most_tiles(size, num_slots) * tile_rows(size) for size in sizes)
        num_tiles = max(most_tiles(size, num_slots) for size in sizes)
        rows = torch.full((num_places,), NOBODY, dtype=torch.int32, device=device)
        tile_slots = torch.full((num_tiles,), NOBODY, dtype=torch.int32, device=device)
        return cls(rows, tile_slots, torch.zeros(num_slots, dtype=torch.int32, device=device))

    @property
    def num_slots(self) -> int:
        return len(self.ranks)

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + self.tile_slots.nbytes + self.ranks.nbytes

    def num_tiles(self, num_tokens: int) -> int:
        """Tiles that kernels of a step walk; the last may be nobody's."""
        return most_tiles(num_tokens, self.num_slots)


def tiles_of(slots: Ints, max_tiles: int) -> tuple[Ints, Ints, list[tuple[int, Ints]]]:
    """(rows, tile_slots [max_tiles], (slot, rows) of each adapter) of a step.

    slots  [num_tokens]: each token's slot, or NOBODY
    """
    block = tile_rows(len(slots))
    by_slot = [(int(slot), np.flatnonzero(slots == slot).astype(np.int32)) for slot in np.unique(slots[slots >= 0])]
    counts = [-(-len(rows) // block) for _, rows in by_slot]
    placed = np.full(sum(counts) * block, NOBODY, np.int32)
    tile_slots = np.full(max_tiles, NOBODY, np.int32)
    tile = 0
    for (slot, rows), count in zip(by_slot, counts, strict=True):
        placed[tile * block : tile * block + len(rows)] = rows
        tile_slots[tile : tile + count] = slot
        tile += count
    return placed, tile_slots, by_slot
