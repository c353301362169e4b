"""Work of a step (tokens computed, KV read), in integers, so that single steps and jumps give equal sums.

A model's layers are grouped by reach: those that read every token and those that read the last `reach`. For each
group a step has `read` (tokens whose KV it loads) and `pairs` ((query, key) pairs).
"""

from typing import NamedTuple

from engine.drafting import DraftStep
from engine.scheduler import Batch
from engine.sequence import Sequence
from kvplan.core.records import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """Reach of a layer: the last `tokens` tokens, including the query; None: all tokens."""

    tokens: int | None

    def read(self, context_len: int) -> int:
        """Return the number of tokens whose KV the last query of a context reads."""
        return context_len if self.tokens is None else min(context_len, self.tokens)

    def span(self, context_len: int, query_len: int) -> int:
        """Return the number of tokens whose KV the last `query_len` queries read in total, each token once."""
        return context_len if self.tokens is None else min(context_len, self.tokens - 1 + query_len)

    def pairs(self, context_len: int, query_len: int) -> int:
        """Return the (query, key) pairs of the last `query_len` queries: the sum of read(c) over their contexts c."""
        first = context_len - query_len + 1
        if self.tokens is None or context_len <= self.tokens:
            return (first + context_len) * query_len // 2
        if first >= self.tokens:
            return self.tokens * query_len
        growing = self.tokens - first + 1
        return (first + self.tokens) * growing // 2 + self.tokens * (query_len - growing)


class StepWork(NamedTuple):
    """Work of one step.

    num_tokens    tokens computed
    num_samples   sequences that get a token
    num_seqs      sequences in the step
    read, pairs   tokens read and (query, key) pairs, by kind of reach
    num_prompts, prompt_tokens, prompt_pairs  of these, the sequences that compute their prompt, their tokens and pairs
    more          seconds of what else is done in it: a drafter's passes, adapters
    """

    num_tokens: int = 0
    num_samples: int = 0
    num_seqs: int = 0
    read: tuple[int, ...] = ()
    pairs: tuple[int, ...] = ()
    num_prompts: int = 0
    prompt_tokens: int = 0
    prompt_pairs: tuple[int, ...] = ()
    more: float = 0.0


def batch_work(batch: Batch, reaches: tuple[Reach, ...]) -> StepWork:
    """Return a batch's work; num_computed_tokens must already include its tokens."""
    drafts = batch.extra(DraftStep).drafts if batch.extras else {}
    decodes: list[int] = []  # contexts of the sequences that compute one token, which they have decoded
    spans: list[tuple[int, int]] = []
    prompts: list[tuple[int, int]] = []
    for seq, n in batch.num_tokens.items():
        end = seq.num_computed_tokens
        if n == 1 and end > seq.num_prompt_tokens:
            decodes.append(end)
            continue
        spans.append((end, n))
        if is_prompt(seq, n - len(drafts.get(seq, ()))):
            prompts.append((end, n))
    reads = [
        sum(decodes) if reach.tokens is None else sum([min(end, reach.tokens) for end in decodes]) for reach in reaches
    ]
    if not spans and not drafts:
        read = tuple(reads)
        return StepWork(len(decodes), len(batch.samples), len(decodes), read, read, 0, 0, (0,) * len(read))
    rows = list(zip(reads, reaches, strict=True))
    return StepWork(
        num_tokens=len(decodes) + sum(n for _, n in spans),
        num_samples=len(batch.samples) + sum(map(len, drafts.values())),
        num_seqs=len(batch.num_tokens),
        read=tuple(read + sum(reach.span(end, n) for end, n in spans) for read, reach in rows),
        pairs=tuple(read + sum(reach.pairs(end, n) for end, n in spans) for read, reach in rows),
        num_prompts=len(prompts),
        prompt_tokens=sum(n for _, n in prompts),
        prompt_pairs=tuple(sum(reach.pairs(end, n) for end, n in prompts) for reach in reaches),
    )


def is_prompt(seq: Sequence, num_tokens: int) -> bool:
    """Whether a sequence computes tokens that it knew, not the one it decodes; num_computed_tokens includes them."""
    return num_tokens > 1 or seq.num_computed_tokens <= seq.num_prompt_tokens
