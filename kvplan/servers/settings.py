"""A server's settings after everything left open is decided."""

from kvplan.core.records import dataclass
from kvplan.servers.releases import Version


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings a server runs with: the user's, or its defaults.

    batches           batches scheduled at once; windows are charged for in_flight_tokens
    first_engine      vLLM's V0 engine runs
    runner_v2         model runner V2 runs
    backend           the requested attention backend, without its suffix; None: the server's choice
    graphs_in_budget  a CUDA graph estimate is subtracted before the KV pool is sized
    prefix_caching    finished blocks are kept for requests with the same prefix
    """

    version: Version
    max_model_len: int
    auto_fit: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    in_flight_tokens: int
    gpu_memory_utilization: float
    kv_dtype: str
    dtype: str
    backend: str | None = None
    batches: int = 1
    first_engine: bool = False
    runner_v2: bool = False
    graphs_in_budget: bool = False
    prefix_caching: bool = True
