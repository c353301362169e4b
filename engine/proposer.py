"""The seam to drafting: a Proposer drafts tokens for each sequence; the n-gram proposer takes them from the text."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.batch import BatchArrays
from engine.scheduler import Batch
from engine.sequence import Sequence


class Proposer(Protocol):
    """Drafts the next tokens. A draft is one token, not a distribution."""

    def propose(
        self, batch: Batch, arrays: BatchArrays, wanting: list[Sequence], num_drafts: int
    ) -> dict[Sequence, list[int]]:
        """Up to num_drafts draft tokens for each sequence that takes some.

        batch    was run, its tokens are the sequences'; arrays: what it was given to the device as
        wanting  those of it that go on and whose drafts will be looked at
        """


class NgramProposer:
    """Drafts what followed the first match of the last n tokens (vLLM 0.33, `spec_decode/ngram_proposer.py`)."""

    def __init__(self, min_n: int, max_n: int, max_model_len: int) -> None:
        self.min_n, self.max_n, self.max_model_len = min_n, max_n, max_model_len

    def propose(
        self, batch: Batch, arrays: BatchArrays, wanting: list[Sequence], num_drafts: int
    ) -> dict[Sequence, list[int]]:
        return {seq: self.follow(seq.token_ids, num_drafts) for seq in wanting}

    def follow(self, token_ids: list[int], num_drafts: int) -> list[int]:
        """Up to num_drafts tokens after the first earlier occurrence of the longest suffix of min_n to max_n tokens."""
        num_drafts = min(num_drafts, self.max_model_len - len(token_ids))
        if num_drafts <= 0 or len(token_ids) <= self.min_n:
            return []
        end = longest_match(np.array(token_ids, np.int64), self.max_n, self.min_n)
        return token_ids[end : end + num_drafts] if end else []


def longest_match(text: NDArray[np.int64], max_n: int, min_n: int) -> int:
    """End position of the first earlier occurrence of the longest repeated suffix; 0 if there is none.

    Only endings of min_n to max_n tokens count; an occurrence may overlap the ending.
    """
    ends = np.arange(1, len(text))  # an occurrence of n tokens ends before text[end]
    best = 0
    for n in range(1, min(max_n, len(text) - 1) + 1):
        ends = ends[ends >= n]
        ends = ends[text[ends - n] == text[len(text) - n]]
        if not len(ends):
            break
        if n >= min_n:
            best = int(ends[0])
    return best
