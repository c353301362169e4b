"""Every difference between releases that an answer knows of: what changed, with which release, and who says so.

Where logs are the source, tests/test_versions.py and reports/accuracy hold the rules against them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Number = tuple[int, int]
SGLANG_SOURCE = "sglang 0.5.23 srt/mem_cache/kv_cache_configurator.py and srt/arg_groups/memory_hook.py"


@dataclass(frozen=True, slots=True)
class Change:
    """`since` this release of vLLM."""

    since: Number
    what: str
    source: str


CHANGES = {
    "latent_cache": Change(
        (0, 7), "the pool holds MLA's latents, in entries of a multiple of 256 bytes until V1; before, full heads",
        "vLLM 0.7 worker/cache_engine.py; a log of DeepSeek-R1 on 0.7",
    ),
    "plain_projections": Change(
        (0, 8), "MLA keeps its projections apart; 0.7 kept them multiplied out beside the weights",
        "vLLM 0.7.3 attention/backends/mla; DeepSeek-R1 on 8 H200 and on 3 x 8 L20",
    ),
    "v1": Change(
        (0, 8), "the second engine by default from Ampere on: chunked prefill of 2,048 or 8,192 tokens a step, by the "
        "GPU; sampling with FlashInfer where it is installed", "release notes of 0.8; logs of 0.8 to 0.10",
    ),
    "hybrid_groups": Change(
        (0, 9), "windows keep no more than the window where a model mixes them with full attention",
        "vLLM 0.9.1 (hybrid KV cache manager)",
    ),
    "no_float16": Change(
        (0, 9), "Gemma 2, Gemma 3 and GLM-4 are refused in float16", "vllm-project/vllm#15766 ran one on 0.8",
    ),
    "v1_only": Change(
        (0, 11), "the second engine on every GPU; sampling sorts again: 38 bytes a sequence and vocabulary entry",
        "release notes of 0.11; llm-d-benchmark on H100",
    ),
    "auto_context": Change((0, 14), "--max-model-len auto", "vllm-project/vllm#29431"),
    "lean_sampler": Change(
        (0, 17), "sampling takes 15 bytes a sequence and vocabulary entry, not 38",
        "llm-d-planner: Qwen3-14B 5.64 GiB in 0.16, 2.23 in 0.17",
    ),
    "all_reduce_buffers": Change(
        (0, 18), "buffers for all-reduce over NVLink: about 2 GiB a rank", "llm-d-planner v0.19.0 accuracy report",
    ),
    "utilization_092": Change((0, 19), "gpu_memory_utilization 0.92 by default, 0.90 before", "logs of 0.19 and 0.20"),
    "graphs_in_budget": Change(
        (0, 21), "an estimate of the CUDA graphs is taken off the budget; before, graphs came on top of it",
        "the log line that says so; logs of 0.19 to 0.24",
    ),
    "async_scheduling": Change(
        (0, 21), "one more batch in flight, which windows are charged for", "vLLM 0.21 config; logs of hybrid models",
    ),
    "tokens_by_concurrency": Change(
        (0, 21), '"GPU KV cache size" is concurrency x context; before, one group\'s blocks', "vllm-project/vllm#40691",
    ),
    "cached_states": Change(
        (0, 21), "recurrent states are cached at block ends: attention blocks cover them, requests hold several",
        "vllm-project/vllm#40691 and a log of 0.14 have one block per state and request",
    ),
    "override_before_fit": Change(
        (0, 21), "--num-gpu-blocks-override replaces the memory before auto-fit and the check that one request fits; "
        "before, it only replaced the pool of a server that had passed them",
        "vLLM 0.8.5 to 0.33 v1/core/kv_cache_utils.py (get_kv_cache_configs): 0.20 and 0.21 were read",
    ),
    "runner_v2": Change(
        (0, 25), "model runner V2 by default: a table for penalties set aside, a smaller sampling peak",
        "vllm-project/vllm#44443",
    ),
    "graphs_in_peak": Change(
        (0, 27), 'a log\'s "peak activation" includes the graph estimate', "vllm-project/vllm#57936",
    ),
    "large_graphs": Change(
        (0, 27), "graphs of up to 1,024 sequences on compute capability 10.x", "vllm-project/vllm#49390",
    ),
    "null_block": Change(
        (0, 29), "the pool's null block is not counted as room for a request when one is checked for",
        "vLLM 0.28 and 0.29 v1/core/kv_cache_utils.py (get_kv_cache_configs) were read",
    ),
}  # fmt: skip


def since(name: str) -> Number:
    """The release that a change came with."""
    return CHANGES[name].since


@dataclass(frozen=True, slots=True)
class Version:
    """A release of a server; what differs between vLLM's follows from CHANGES.

    patch            the third field of a number, where it matters
    estimates_graphs False: the estimate of CUDA graphs is switched off (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0)
    """

    number: Number
    engine: Literal["vllm", "sglang"] = "vllm"
    patch: int | None = None
    estimates_graphs: bool = True

    @property
    def label(self) -> str:
        return f"{self.engine}@{self.number[0]}.{self.number[1]}" + ("" if self.patch is None else f".{self.patch}")

    def has(self, change: str) -> bool:
        """Whether a change of vLLM came with this release or an earlier one; never so for another server."""
        return self.engine == "vllm" and self.number >= since(change)

    @property
    def utilization(self) -> float:
        """Default gpu_memory_utilization."""
        return 0.92 if self.has("utilization_092") else 0.90

    @property
    def graphs_in_budget(self) -> bool:
        """The CUDA-graph estimate is subtracted before the KV pool is sized."""
        return self.estimates_graphs and self.has("graphs_in_budget")

    def lacks(self) -> Iterator[Change]:
        """The changes that came later, oldest first; none for another server."""
        if self.engine == "vllm":
            yield from (change for change in CHANGES.values() if self.number < change.since)
