"""Which queries each program of prefill works on: planned once per step on the host, for all layers."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """rows [num_tiles, 2] int32: a sequence, and the first of its queries that the tile holds; queries: of one tile."""

    rows: torch.Tensor
    queries: int


def cut_queries(query_lens: Ints, context_lens: Ints, queries: int) -> Ints:
    """[num_tiles, 2]: every query of every sequence once, those that see most keys first.

    A grid over the longest sequence would begin as many programs for each of the others, to end at once.
    """
    counts = -(-query_lens // queries)
    seqs = np.repeat(np.arange(len(query_lens)), counts)
    first = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
    seen = (context_lens - query_lens)[seqs] + first
    rows: Ints = np.stack([seqs, first], 1)[np.argsort(-seen, kind="stable")].astype(np.int32)
    return rows


def all_tiles(num_seqs: int, max_query_len: int, queries: int, device: torch.device) -> QueryTiles:
    """For lengths that only the device knows: each sequence is cut as the longest, and surplus tiles end at once."""
    first = torch.arange(-(-max_query_len // queries) - 1, -1, -1, device=device) * queries
    seqs = torch.arange(num_seqs, device=device)
    return QueryTiles(torch.stack([seqs.repeat(len(first)), first.repeat_interleave(num_seqs)], 1).int(), queries)
