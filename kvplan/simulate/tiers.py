"""KV kept beyond the GPU: host memory and disks that hold prompts by chunks, written through, least recently used out.

As LMCache does by default: whole chunks of 256 tokens, prompts only, every tier holds what it has room for of
everything (inclusive), the fastest that has a chunk serves it. Source: LMCache's documentation (chunk_size,
save_unfull_chunk, save_decode_cache, local_cpu).

A chunk that is loaded passes through the step like one that is computed, but at its tier's speed and without
arithmetic: a real server loads beside its steps, so this is on the slow side.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from engine.sequence import Sequence
from kvplan.simulate.requests import Content

CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier: its name, its bytes over all ranks, the bytes per second at which a replica reads from it."""

    name: str
    capacity: int
    bandwidth: int


@dataclass(slots=True)
class Tier:
    """The chunks a tier holds, least recently used first.

    hit_tokens  tokens it served
    """

    spec: TierSpec
    num_chunks: int
    chunks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    hit_tokens: int = 0

    def keep(self, key: int) -> None:
        if key in self.chunks:
            self.chunks.move_to_end(key)
        elif self.num_chunks:
            self.chunks[key] = None
            if len(self.chunks) > self.num_chunks:
                self.chunks.popitem(last=False)


@dataclass(slots=True)
class Tiers:
    """All tiers, fastest first, and what each running sequence is being given by them.

    token_bytes  of one token on all ranks
    """

    tiers: tuple[Tier, ...]
    chunk_tokens: int
    token_bytes: int
    looked_up: int = 0
    _loading: dict[Sequence, list[int]] = field(
        default_factory=dict
    )  # tier of each chunk, from the first not on the GPU
    _starts: dict[Sequence, int] = field(default_factory=dict)  # token at which that begins

    def admit(self, seq: Sequence, content: Content, hit_tokens: int) -> int:
        """Find what comes after the GPU's own hit; returns the tokens that will be loaded.

        The last token is always computed.
        """
        self.looked_up += seq.num_tokens
        size = self.chunk_tokens
        first, last = hit_tokens // size, (min(seq.num_prompt_tokens, seq.num_tokens - 1)) // size
        tiers: list[int] = []
        for index in range(first, last):
            key = content.block_key(index, size)
            tier = next((t for t, each in enumerate(self.tiers) if key in each.chunks), None)
            if tier is None:
                break
            tiers.append(tier)
        tokens = max(0, (first + len(tiers)) * size - hit_tokens)
        if tokens:
            self._loading[seq], self._starts[seq] = tiers, first * size
            for index, tier in enumerate(tiers, first):
                served = min((index + 1) * size - hit_tokens, size)
                self.tiers[tier].hit_tokens += served
        return tokens

    def split(self, seq: Sequence, start: int, end: int) -> tuple[int, list[int]]:
        """Of the tokens start..end of a step, (how many are loaded, bytes from each tier); they come first."""
        chunks = self._loading.get(seq)
        from_tier = [0] * len(self.tiers)
        if chunks is None:
            return 0, from_tier
        first, loaded = self._starts[seq], 0
        for index, tier in enumerate(chunks):
            low, high = first + index * self.chunk_tokens, first + (index + 1) * self.chunk_tokens
            tokens = max(0, min(end, high) - max(start, low))
            from_tier[tier] += tokens * self.token_bytes
            loaded += tokens
        return loaded, from_tier

    def store(self, seq: Sequence, content: Content) -> None:
        """A prompt is whole: keep its chunks in every tier, its beginning last so that it goes out last."""
        self._loading.pop(seq, None)
        self._starts.pop(seq, None)
        for index in reversed(range(seq.num_prompt_tokens // self.chunk_tokens)):
            key = content.block_key(index, self.chunk_tokens)
            for tier in self.tiers:
                tier.keep(key)

    def drop(self, seq: Sequence) -> None:
        """A sequence lost its blocks, or has ended."""
        self._loading.pop(seq, None)
        self._starts.pop(seq, None)


def tiers(specs: tuple[TierSpec, ...], chunk_tokens: int, token_bytes: int) -> Tiers:
    """Empty tiers; of each, whole chunks: floor(capacity / chunk bytes)."""
    made = tuple(Tier(spec, spec.capacity // (chunk_tokens * token_bytes)) for spec in specs)
    return Tiers(made, chunk_tokens, token_bytes)
