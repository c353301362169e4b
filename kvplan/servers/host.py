"""What a server takes of the host's memory: rows with their source, and what each was compared with."""

from typing import Literal

from kvplan.core.records import dataclass


@dataclass(frozen=True, slots=True)
class HostRow:
    """Bytes of host memory.

    per       of each rank, or once of each replica
    compared  with what somebody else's server said of it; empty: with nothing, it is modeled
    tokens    whose KV it keeps for later, of requests of the full context; 0: none
    """

    name: Literal["swap_space", "kv_offloading", "kv_transfer", "weights", "shared_memory", "checkpoint", "adapters"]
    size: int
    per: Literal["rank", "replica"]
    formula: str
    source: str
    compared: str
    tokens: int = 0
