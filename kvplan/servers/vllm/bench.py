"""`vllm bench serve`, and benchmark_serving.py before it.

Source: vllm/benchmarks/serve.py and datasets/ of 0.33.0.
"""

import math
from typing import Final

from kvplan.servers.logs.bench import Generator


def around(tokens: int, ratio: float) -> tuple[int, int]:
    """Range of the length plus or minus this fraction, sampled uniformly."""
    return max(1, math.floor(tokens * (1 - ratio))), max(1, math.ceil(tokens * (1 + ratio)))


GENERATOR: Final = Generator(
    "vllm bench serve", r"\bvllm\s+bench\s+serve\b|\bbenchmark_serving\.py\b", "random", 128, around
)
