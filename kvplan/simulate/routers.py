"""Routing policies of a fleet."""

import random
from collections import OrderedDict
from typing import Final, Literal, assert_never

from kvplan.simulate.fleet import Replica, Router
from kvplan.workloads.trace import TraceRequest

RouterName = Literal["round-robin", "least-loaded", "prefix", "random"]
# A cache-aware router picks the replica that caches most of the prompt, unless loads differ too much.
# Source: the defaults of the gateway SMG, docs/getting-started/load-balancing.md.
CACHE_THRESHOLD: Final = 0.3
BALANCE_ABS: Final = 64
BALANCE_REL: Final = 1.5
MOST_PREFIXES: Final = 1 << 20  # prefixes that the router remembers


class RoundRobin:
    """Each replica in turn."""

    looks = False

    def __init__(self) -> None:
        self._count = 0

    def choose(self, replicas: list[Replica], request: TraceRequest) -> Replica:
        self._count += 1
        return replicas[(self._count - 1) % len(replicas)]


class Random:
    """A uniformly random replica."""

    looks = False

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"router {seed}")

    def choose(self, replicas: list[Replica], request: TraceRequest) -> Replica:
        return self._rng.choice(replicas)


class LeastLoaded:
    """The replica with the fewest unfinished requests; ties go to the one least recently chosen."""

    looks = True

    def __init__(self) -> None:
        self._count = 0
        self._last: dict[int, int] = {}

    def choose(self, replicas: list[Replica], request: TraceRequest) -> Replica:
        self._count += 1
        last = self._last
        chosen = min(replicas, key=lambda replica: (replica.load, last.get(replica.index, 0)))
        last[chosen.index] = self._count
        return chosen


class Prefix:
    """The replica that was sent the longest prefix of the prompt, as far as the router remembers; the least loaded
    one if that prefix is short or loads differ too much.
    """

    looks = True

    def __init__(self, run_len: int | None) -> None:
        self._run_len = run_len or 1
        self._least = LeastLoaded()
        self._chains: OrderedDict[tuple[int, int], int] = OrderedDict()  # LRU set of (replica, chain)
        self._numbers: dict[tuple[int, int], int] = {}

    def choose(self, replicas: list[Replica], request: TraceRequest) -> Replica:
        chain = self._chain(request)
        chosen = self._by_prefix(replicas, request, chain) or self._least.choose(replicas, request)
        for link in chain:
            self._chains[chosen.index, link] = 0
            self._chains.move_to_end((chosen.index, link))
        while len(self._chains) > MOST_PREFIXES:
            self._chains.popitem(last=False)
        return chosen

    def _by_prefix(self, replicas: list[Replica], request: TraceRequest, chain: list[int]) -> Replica | None:
        loads = [replica.load for replica in replicas]
        if max(loads) - min(loads) > BALANCE_ABS and max(loads) > BALANCE_REL * min(loads):
            return None
        best, longest = None, 0
        for replica in replicas:
            length = 0
            for link in chain:
                if (replica.index, link) not in self._chains:
                    break
                length += 1
            if length > longest:
                best, longest = replica, length
        return best if longest * self._run_len > CACHE_THRESHOLD * request.prompt_tokens else None

    def _chain(self, request: TraceRequest) -> list[int]:
        chain, parent = [], 0
        for prefix in request.prefix_ids:
            parent = self._numbers.setdefault((parent, prefix), len(self._numbers) + 1)
            chain.append(parent)
        return chain


def router(name: RouterName, seed: int, run_len: int | None) -> Router:
    match name:
        case "round-robin":
            return RoundRobin()
        case "least-loaded":
            return LeastLoaded()
        case "prefix":
            return Prefix(run_len)
        case "random":
            return Random(seed)
        case _:
            assert_never(name)
