"""What a step computes and reads, counted in integers, so that both ways of stepping add up to the same.

A model's layers are merged into kinds of equal reach: those that read every token and those that read the last
`reach`. Of each kind a step has `read` tokens (whose keys and values it loads) and `pairs` (query, key).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """Layers that see the last `tokens` tokens, the query included; None: all of them."""

    tokens: int | None

    def read(self, context_len: int) -> int:
        """Tokens whose KV the last query of a context reads."""
        return context_len if self.tokens is None else min(context_len, self.tokens)

    def span(self, context_len: int, query_len: int) -> int:
        """Tokens whose KV the last `query_len` queries read between them."""
        return context_len if self.tokens is None else min(context_len, self.tokens - 1 + query_len)

    def pairs(self, context_len: int, query_len: int) -> int:
        """(query, key) pairs of the last `query_len` queries: sum of read(c) for c in the contexts they end."""
        first = context_len - query_len + 1
        if self.tokens is None or context_len <= self.tokens:
            return (first + context_len) * query_len // 2
        if first >= self.tokens:
            return self.tokens * query_len
        growing = self.tokens - first + 1
        return (first + self.tokens) * growing // 2 + self.tokens * (query_len - growing)


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step.

    num_tokens   tokens that are computed
    num_samples  sequences that get a token
    num_seqs     sequences in the step
    read, pairs  by kind of reach
    loaded       bytes that come from each tier in place of being computed
    """

    num_tokens: int = 0
    num_samples: int = 0
    num_seqs: int = 0
    read: tuple[int, ...] = ()
    pairs: tuple[int, ...] = ()
    loaded: tuple[int, ...] = ()
