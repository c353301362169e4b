"""Pools that an SGLang server logged: bytes of K and V, of recurrent states, and tokens, per rank."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from kvplan.core.units import GIB
from kvplan.servers.logs.log import Reading, ServerLog

LOADING: Final = ("free_before_load", "free_after_load", "weights")


@dataclass(frozen=True, slots=True)
class KVPool:
    """K and V of a model on one rank, summed over its pools.

    size, rounding  bytes, and half of the last logged digits
    tokens          of the full-attention pool, or None if they are not logged
    missing         why the size does not cover all pools
    """

    size: int
    rounding: int
    tokens: int | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class _Buffers:
    """One K and V allocation as logged."""

    sizes: tuple[Reading, ...]
    tokens: int | None

    @property
    def size(self) -> int:
        return total(self.sizes)

    @property
    def rounding(self) -> int:
        return sum(reading.rounding for reading in self.sizes)


def kv_pool(log: ServerLog, rank: str, *, windows: bool | None) -> KVPool | None:
    """The model's own pool on a rank. windows: whether some layers use sliding windows; None: not known."""
    if log.called == "page":  # it has one figure for all pools
        whole = log.first("available_kv")
        return None if whole is None else KVPool(whole.size, whole.rounding, None)
    lines = _buffers(log, rank)
    if not lines:
        return None
    first, *others = lines
    other = next((line for line in others if first.tokens and line.tokens and line.tokens != first.tokens), None)
    if windows and other is None and others:
        other = others[0]  # equal tokens in both
    if windows is False or (windows is None and other is None):
        return KVPool(first.size, first.rounding, first.tokens)
    if other is None:
        return KVPool(first.size, first.rounding, None, "the log gives one of the two pools")
    # The window pool is never larger than the full pool. Source: sglang 0.5.23 srt/server_args.py
    # (swa_full_tokens_ratio).
    tokens = max((buffers.tokens for buffers in (first, other) if buffers.tokens is not None), default=None)
    both = _Buffers((*first.sizes, *other.sizes), tokens)
    return KVPool(both.size, both.rounding, tokens)


def _buffers(log: ServerLog, rank: str) -> list[_Buffers]:
    """Allocations before a draft's weights were loaded: the draft's pool follows."""
    buffers: list[_Buffers] = []
    tokens: int | None = None
    for reading in (figure for figure in log.readings if figure.rank == rank):
        if buffers and reading.fact in LOADING:
            break
        if reading.fact == "pool_tokens":
            tokens = reading.count
        elif reading.fact == "key_size":
            buffers.append(_Buffers((reading,), tokens))
            tokens = None
        elif reading.fact == "value_size" and buffers:
            keys = buffers.pop()
            buffers.append(_Buffers((*keys.sizes, reading), keys.tokens))
    return buffers


def total(sizes: Iterable[Reading]) -> int:
    """Bytes of several figures in GiB, rounded once."""
    return round(sum(Decimal(reading.text) for reading in sizes) * GIB)


def smallest_pool(log: ServerLog, ranks: Iterable[str], *, windows: bool | None) -> KVPool | None:
    pools = [kv_pool(log, rank, windows=windows) for rank in ranks]
    return min((pool for pool in pools if pool is not None), key=lambda pool: pool.size, default=None)


def pool_tokens(log: ServerLog, *, windows: bool | None) -> int | None:
    """Tokens of the full-attention pool, on the rank with the fewest."""
    counted = log.least("kv_tokens") or log.least("full_tokens")
    if counted is not None:
        return counted.count
    pools = [kv_pool(log, rank, windows=windows) for rank in log.ranks]
    return min((pool.tokens for pool in pools if pool is not None and pool.tokens is not None), default=None)


def states(log: ServerLog, ranks: Iterable[str]) -> tuple[int, int] | None:
    """(bytes, rounding) of the recurrent states on the first of these ranks that logs them."""
    convs, ssms = log.by_rank("conv_state"), log.by_rank("ssm_state")
    for rank in ranks:
        if rank in convs and rank in ssms:
            return total((convs[rank], ssms[rank])), convs[rank].rounding + ssms[rank].rounding
    return None


def stage_of(rank: str) -> int | None:
    """Pipeline stage in a rank's name: `PP1 TP0`."""
    match = re.search(r"(?<![A-Z])PP([0-9]{1,3})(?![0-9])", rank)
    return int(match[1]) if match else None


def ranks_by_stage(log: ServerLog, num_stages: int) -> dict[int, tuple[str, ...]]:
    """Ranks of each pipeline stage in the log; if names have no stage, the first rank is assigned to stage 0."""
    ranks = log.ranks or tuple(dict.fromkeys(reading.rank for reading in log.readings))
    if num_stages == 1:
        return {0: ranks}
    by_stage: dict[int, list[str]] = {}
    for rank in ranks:
        stage = stage_of(rank)
        if stage is not None and stage < num_stages:
            by_stage.setdefault(stage, []).append(rank)
    return {stage: tuple(by_stage[stage]) for stage in sorted(by_stage)} or {0: ranks[:1]}


def first_of(log: ServerLog, fact: str, ranks: Iterable[str]) -> Reading | None:
    """The first figure of these ranks."""
    by_rank = log.by_rank(fact)
    return next((by_rank[rank] for rank in ranks if rank in by_rank), None)
