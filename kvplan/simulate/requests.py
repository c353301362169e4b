"""Requests as scheduler sequences without token ids, whose blocks have names instead of hashes."""

from collections.abc import Sequence as Many
from typing import Any, cast, overload

from engine.sequence import Sequence
from kvplan.core.records import dataclass
from kvplan.workloads.trace import TraceRequest

INDEX_BITS = 40  # low bits of a name: the block's index in its sequence; high bits: the chain or request


class TokenCount:
    """Stand-in for a list of token ids of which only the length matters."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def append(self, token_id: int) -> None:
        self.count += 1


class Prefixes:
    """Numbering of chains of prefix ids: equal numbers mean equal tokens up to the chain's end."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def chains(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of each leading part of `ids`."""
        chains, parent = [], 0
        for run_id in ids:
            parent = self._numbers.setdefault((parent, run_id), len(self._numbers) + 1)
            chains.append(parent)
        return tuple(chains)


@dataclass(frozen=True, slots=True)
class Content:
    """Identity of one request's tokens, sufficient to compare requests.

    number       number of the request; identifies the tokens that it shares with none
    chains       chain numbers of the prompt's leading runs of `run_len` tokens
    shared_len   tokens that those runs cover
    """

    number: int
    chains: tuple[int, ...]
    run_len: int
    shared_len: int

    def block_key(self, index: int, block_size: int, lookahead: int = 0) -> int:
        """Return the name of a full block; two names are equal if and only if all tokens up to the block's end are, and
        so many after it.
        """
        last = (index + 1) * block_size - 1 + lookahead
        if last < self.shared_len:
            return (self.chains[last // self.run_len] << INDEX_BITS | index) << 1
        return (self.number << INDEX_BITS | index) << 1 | 1


class BlockKeys(Many[int]):
    """Lazily computed names of a sequence's blocks, up to its maximum length."""

    __slots__ = ("_block_size", "_content", "_count", "_lookahead")

    def __init__(self, content: Content, block_size: int, count: int, lookahead: int = 0) -> None:
        self._content, self._block_size, self._count, self._lookahead = content, block_size, count, lookahead

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Many[int]: ...
    def __getitem__(self, index: int | slice) -> int | Many[int]:
        if isinstance(index, slice):
            raise TypeError("block names are asked for one by one")
        place = index if index >= 0 else self._count + index
        return self._content.block_key(place, self._block_size, self._lookahead)


def sequence(
    request: TraceRequest, number: int, content: Content, block_sizes: set[int], lookahead: int = 0
) -> Sequence:
    """Return a sequence with a request's lengths and `number` as its id; lookahead: of the blocks' names."""
    seq = Sequence(
        str(number), cast("list[int]", TokenCount(request.prompt_tokens)), request.output_tokens
    )  # the scheduler only counts them
    num_tokens = request.prompt_tokens + request.output_tokens
    names: dict[int, Any] = {size: BlockKeys(content, size, num_tokens // size, lookahead) for size in block_sizes}
    seq.block_hashes = names
    return seq


def content_of(request: TraceRequest, number: int, prefixes: Prefixes, run_len: int | None) -> Content:
    if not run_len or not request.prefix_ids:
        return Content(number, (), 1, 0)
    covered = min(len(request.prefix_ids) * run_len, request.prompt_tokens)
    return Content(number, prefixes.chains(request.prefix_ids), run_len, covered)
