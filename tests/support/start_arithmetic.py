"""How servers start, written down from their own code: what each looks at, and the bytes that its KV pool gets.

Facts go in (bytes of weights, of a profile run, of a CUDA context); nothing here is kvplan's arithmetic.
"""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class Facts:
    """What a process takes on one GPU, in bytes.

    context    before its first look at the free memory
    loaded     weights, buffers and what loading leaves behind
    transient  peak of the profile run above that
    graphs     the estimate of CUDA graphs
    reserve    what an SGLang server needs beside its pool
    """

    context: int
    loaded: int
    transient: int
    graphs: int
    reserve: int = 0


class NotStarted(Exception):
    """The server's own check of free memory failed."""


def vllm_pool(total: int, others: int, share: float, facts: Facts) -> int:
    """vLLM 0.33: v1/worker/utils.py (request_memory), v1/worker/gpu_worker.py (determine_available_memory)."""
    free = total - others - facts.context
    requested = ceil(total * share)
    if free < requested:
        raise NotStarted(f"{free} free of {requested}")
    return requested - facts.loaded - facts.transient - facts.graphs


def sglang_pool(total: int, others: int, share: float, facts: Facts) -> int:
    """SGLang 0.5.23: srt/mem_cache/kv_cache_configurator.py (_profile_available_bytes)."""
    before_load = total - others - facts.context
    after_load = before_load - facts.loaded
    return int(after_load - before_load * (1 - share))
