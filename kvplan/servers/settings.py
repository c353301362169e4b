"""What a server runs with, once everything that was left open is decided."""

from kvplan.core.records import dataclass
from kvplan.servers.releases import Version


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings a server runs with: the user's, and its own where none were given.

    batches           batches scheduled at once; in_flight_tokens are what windows are charged for
    first_engine      it is vLLM's V0 that runs
    runner_v2         it is model runner V2 that runs
    backend           the attention backend that was asked for, by its plain name; None: the server's choice
    graphs_in_budget  an estimate of the CUDA graphs is subtracted before the KV pool is sized
    prefix_caching    finished blocks are kept for requests that begin alike
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
