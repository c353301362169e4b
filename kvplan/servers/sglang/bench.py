"""`sglang.bench_serving`.

Source: sglang/benchmark/serving.py of 0.5.23; docs/developer_guide/bench_serving.md (--output-file).
"""

from typing import Final

from kvplan.servers.logs.bench import Generator


def below(tokens: int, ratio: float) -> tuple[int, int]:
    """Range from this fraction of the length to the length, sampled uniformly."""
    return max(1, int(tokens * ratio)), max(1, tokens)


GENERATOR: Final = Generator(
    "sglang.bench_serving", r"\bsglang\.bench_serving\b|\bbench_serving\.py\b|\bsglang\s+bench\b", "sharegpt",
    1024, below, whole="e2e_latency", marks=("mean_e2e_latency_ms", "total_output_tokens_retokenized"),
)  # fmt: skip
