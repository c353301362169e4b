"""Log-probabilities of prompts: of each prompt token after the first, from the pass that computes its KV."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import BatchArrays, Longs
from engine.config import SamplingParams
from engine.kernels.torch_backend import parts_of
from engine.sampler import TokenLogprobs, logprobs_part
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Tokens of a step behind which a known prompt token comes, of sequences that want its log-probability.

    tokens   [num_rows] which token of the step
    targets  [num_rows] the prompt token behind it
    owners   each row's sequence; places: of the target in its prompt; nums: how many of the most likely tokens
    """

    tokens: Longs
    targets: Longs
    owners: list[Sequence]
    places: list[int]
    nums: list[int]

    @classmethod
    def of(cls, arrays: BatchArrays, params: list[SamplingParams]) -> "PromptRows | None":
        """Those of a step; None where nobody wants any."""
        wanting = [row for row, own in enumerate(params) if own.prompt_logprobs is not None]
        if not wanting:
            return None
        rows = cls(np.zeros(0, np.int64), np.zeros(0, np.int64), [], [], [])
        tokens, targets = list[int](), list[int]()
        for row in wanting:
            seq, first = arrays.seqs[row], int(arrays.last_tokens[row - 1]) + 1 if row else 0
            for token in range(first, int(arrays.last_tokens[row]) + 1):
                place = int(arrays.positions[token]) + 1
                if place < seq.num_prompt_tokens:
                    tokens.append(token)
                    targets.append(seq.token_ids[place])
                    rows.owners.append(seq)
                    rows.places.append(place)
                    rows.nums.append(params[row].prompt_logprobs or 0)
        if not tokens:
            return None
        return cls(np.array(tokens), np.array(targets), rows.owners, rows.places, rows.nums)

    def score(
        self, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], vocab_size: int, most_rows: int
    ) -> "PromptScores":
        """Launch the head and the softmax, at most so many rows at a time: no more memory than sampling takes.

        hidden [num_tokens, hidden_size]
        """
        tokens, targets = (torch.from_numpy(column).to(hidden.device) for column in (self.tokens, self.targets))
        num_top = min(max(self.nums), vocab_size)
        parts = [
            logprobs_part(logits_of(hidden[tokens[part]]).float(), targets[part, None], num_top)
            for whole in parts_of(len(self.owners), vocab_size)
            for part in _cut(whole, most_rows)
        ]
        return PromptScores(self, *(torch.cat(column) for column in zip(*parts, strict=True)))


def _cut(whole: slice, most_rows: int) -> Iterator[slice]:
    for start in range(whole.start, whole.stop, most_rows):
        yield slice(start, min(start + most_rows, whole.stop))


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What a step says of prompts, on the device.

    chosen [num_rows] float32; top_ids [num_rows, n] int32 and top [num_rows, n] float32
    """

    rows: PromptRows
    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    def words(self) -> list[Tensor]:
        """All of it as words of int32, for other ranks: see of_words."""
        return [self.chosen.view(torch.int32), self.top_ids.flatten(), self.top.flatten().view(torch.int32)]

    @classmethod
    def of_words(cls, rows: PromptRows, words: Tensor, num_top: int) -> "PromptScores":
        """Views of such words, joined."""
        count = len(rows.owners)
        chosen, top_ids, top = words.split([count, count * num_top, count * num_top])
        top_ids, top = top_ids.view(count, num_top), top.view(torch.float32).view(count, num_top)
        return cls(rows, chosen.view(torch.float32), top_ids, top)

    def wait(self) -> "Iterable[tuple[Sequence, int, TokenLogprobs]]":
        """(sequence, place in its prompt, log-probabilities), in the order of the prompts."""
        columns = self.chosen.tolist(), self.top_ids.tolist(), self.top.tolist()
        rows = zip(self.rows.owners, self.rows.places, self.rows.nums, *columns, strict=True)
        for seq, place, num, chosen, ids, values in rows:
            yield seq, place, TokenLogprobs(chosen, tuple(zip(ids[:num], values[:num], strict=True)))
