"""Run directories as a profile leaves them, written by hand: nothing is run, every number is known."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvplan.measure.rundir import RunWriter
from tests.support.cli import LLAMA

MIB = 1 << 20
GIB = 1 << 30
# A Llama of two layers: 2 * 2 heads * 16 * 4 bytes * 2 layers = 512 bytes of KV per token in float32. Its parameters:
# 256 * 64 embedded, per layer 2 * 64 * 64 + 2 * 64 * 32 in attention, 3 * 64 * 128 in the MLP and 2 * 64 in norms, and
# a norm of 64: 90,432 of 4 bytes.
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
STATS = {
    "kv_cache_usage_perc": 0.0, "num_used_blocks": 0, "num_kv_tokens": 0, "num_requests_running": 0,
    "num_requests_waiting": 0, "num_preemptions": 0, "num_cached_tokens": 0, "prefix_cache_queries": 0,
    "prefix_cache_hits": 0, "num_steps": 0, "prompt_tokens": 0, "generation_tokens": 0, "busy_s": 0.0,
}  # fmt: skip
CPU_INPUTS = {
    "total": 8 * GIB, "dtype": "float32", "kv_cache_dtype": "float32", "block_size": 16, "max_model_len": 41,
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.9, "tensor_parallel_size": 1,
    "num_blocks": 129, "max_blocks": None, "backend": "torch",
}  # fmt: skip
CPU_MEMORY = {
    "weights": 361_728, "buffers": 2624, "activations": 262_144, "kv_cache": 129 * 8192, "cuda_graphs": 0,
    "non_torch": 0, "total": 8 * GIB, "budget": 7 * GIB, "num_blocks": 129, "block_bytes": 8192,
}  # fmt: skip
GPU_INPUTS = {
    "total": 80 * GIB, "dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "block_size": 16, "max_model_len": 8192,
    "max_num_seqs": 64, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.9, "tensor_parallel_size": 1,
    "num_blocks": None, "max_blocks": None, "backend": "triton",
}  # fmt: skip
GPU_MEMORY = {
    "weights": 16_060_522_496, "buffers": 4_194_304, "activations": 1_280_000_000, "kv_cache": 28_000 * 2 * MIB,
    "cuda_graphs": 310_000_000, "non_torch": 900_000_000, "total": 80 * GIB, "budget": 72 * GIB, "num_blocks": 28_000,
    "block_bytes": 2 * MIB,
}  # fmt: skip


def served(seconds: float, tokens: int, running: int, used: int, tokens_stored: int, **stats: Any) -> dict[str, Any]:
    """What serving a workload left in the manifest."""
    return {
        "seconds": seconds, "num_finished": running, "num_failed": 0, "failures": [], "most_running": running,
        "densest": {**STATS, "num_used_blocks": used, "num_kv_tokens": tokens_stored},
        "output_tokens_per_s": tokens / seconds, "stats": {**STATS, "generation_tokens": tokens, **stats},
    }  # fmt: skip


def manifest(config: Mapping[str, Any], device: str, inputs: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {
        "model": {"name": name, "source": "written by hand", "config": dict(config)},
        "device": device,
        "inputs": dict(inputs),
        "engine": {"allocator": "paged", "load_format": "dummy", "seed": 0},
        "workload": {
            "num_requests": 4, "prompt_tokens": 128, "output_tokens": 32, "longest": 40, "shared_prefix": 0,
            "duration_s": None,
        },
        "groups": 1,
        "environment": {
            "kvplan": "0.1.0", "python": "3.12.1", "platform": "Linux", "packages": {"torch": "2.11.0", "triton": None},
            "cuda": "12.8" if device == "cuda" else None, "driver": "570.86.10" if device == "cuda" else None,
            "gpu": "NVIDIA H100 80GB HBM3" if device == "cuda" else None, "cpu_cores": 8, "torch_threads": 8,
            "host_memory": 64 * GIB, "commit": "0123456789abcdef0123456789abcdef01234567",
            "argv": ["profile", "tiny", "-o", "runs/tiny"],
        },
    }  # fmt: skip


def cpu_samples(num: int = 60, second_engine: bool = True) -> list[dict[str, Any]]:
    """A run of 6 s (and 3 s of a second engine), a sample every 0.1 s."""
    samples: list[dict[str, Any]] = []
    for i in range(num):
        t = i / 10
        stage = ("context", "weights", "profile_run", "pool", "prefill", "decode")[min(5, i // 10)]
        rss = 200 * MIB + (0, 300_000, 600_000, 1_700_000, 1_800_000, 1_900_000)[min(5, i // 10)]
        sample: dict[str, Any] = {"t": t, "stage": stage, "rss": rss}
        if stage in ("prefill", "decode"):
            step = i - 39
            sample |= STATS | {
                "num_used_blocks": min(12, 4 + step // 2), "num_kv_tokens": min(180, 64 + 5 * step),
                "num_requests_running": min(4, 1 + step // 4), "num_requests_waiting": max(0, 3 - step // 4),
                "num_preemptions": step // 12, "num_steps": step, "prompt_tokens": min(128, 32 * step),
                "generation_tokens": 2 * step, "busy_s": 0.1 * step,
            }  # fmt: skip
        samples.append(sample)
    if second_engine:
        for i in range(30):
            counters = STATS | {"num_steps": i + 1, "prompt_tokens": 128, "generation_tokens": i + 1, "busy_s": i / 10}
            samples.append({"t": 6 + i / 10, "stage": "baseline", "rss": 201 * MIB, **counters, "num_used_blocks": 12})
    return samples


def gpu_samples() -> list[dict[str, Any]]:
    """Ninety seconds on a GPU, a sample every 0.25 s; readings that NVML did not give are None."""
    stages = ((2, "before"), (4, "context"), (12, "weights"), (16, "profile_run"), (18, "pool"), (26, "graphs"))
    used = {"before": 0.5, "context": 1.0, "weights": 16.0, "profile_run": 17.4, "pool": 71.9, "graphs": 72.2}
    samples = []
    for i in range(360):
        t = i / 4
        stage = next((name for end, name in stages if t < end), "prefill" if i % 40 < 6 else "decode")
        device = int(used.get(stage, 72.4) * GIB)
        sample: dict[str, Any] = {
            "t": t, "stage": stage, "rss": 3 * GIB, "device_total": 80 * GIB, "device_used": device,
            "device_free": 80 * GIB - device, "process_used": None, "torch_allocated": max(0, device - int(1.1 * GIB)),
            "torch_reserved": max(0, device - GIB), "gpu_utilization": 0.97 if stage == "decode" else 0.4,
            "power_w": 92.5 if t < 26 else 540.0 + (i % 17) * 8, "memory_clock_mhz": None,
            "sm_clock_mhz": 1980 if t < 40 else 1755 + (i % 5) * 15,
        }  # fmt: skip
        if t >= 26:
            step = i - 103
            sample |= STATS | {
                "num_used_blocks": min(27_900, 400 * step), "num_kv_tokens": min(441_000, 6_200 * step),
                "num_requests_running": min(64, step), "num_requests_waiting": max(0, 40 - step // 6),
                "num_preemptions": step // 60, "num_steps": 10 * step, "prompt_tokens": 9000 * step,
                "generation_tokens": 640 * step, "busy_s": 0.24 * step,
            }  # fmt: skip
        samples.append(sample)
    return samples


def write_run(
    path: Path, start: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], status: str = "complete",
    cause: str | None = None, **results: Any,
) -> Path:  # fmt: skip
    """A run directory with the events its samples tell of; `results` are further entries of the manifest."""
    writer = RunWriter(path, start)
    stage = "before"
    for sample in samples:
        if sample.get("stage", stage) != stage:
            stage = str(sample["stage"])
            writer.event(sample["t"], "stage", stage=stage)
        writer.sample(sample)
    if results:
        writer.update(**results)
    writer.finish(status, cause)  # type: ignore[arg-type] # one of the four
    return path


def cpu_run(path: Path, name: str = "tiny", **changes: Any) -> Path:
    """A complete run on a CPU that served the workload with both allocators."""
    baseline = {"allocator": "contiguous", **served(5.0, 32, 3, 9, 100)}
    results = served(2.0, 32, 4, 12, 180, num_preemptions=1) | {"baseline": baseline}
    defaults = {
        "memory": CPU_MEMORY,
        "results": results,
        "peaks": {"context": {"rss": 200 * MIB}, "decode": {"rss": 202 * MIB}},
    }
    return write_run(path, manifest(TINY, "cpu", CPU_INPUTS, name), cpu_samples(), **(defaults | changes))


def gpu_run(path: Path) -> Path:
    """A complete run on a GPU; its peaks are those of the samples."""
    return write_run(
        path, manifest(LLAMA, "cuda", GPU_INPUTS, "llama-3.1-8b"), gpu_samples(), memory=GPU_MEMORY,
        results=served(64.0, 163_840, 64, 27_900, 441_000, num_preemptions=4),
    )  # fmt: skip


def killed_run(path: Path) -> Path:
    """Killed while it served: no results, no peaks, the last line of samples.jsonl cut off."""
    write_run(path, manifest(TINY, "cpu", CPU_INPUTS, "tiny"), cpu_samples(second_engine=False), memory=CPU_MEMORY)
    rewritten(path, status="running", finished_utc=None, pid=2**22 + 1)  # above the largest pid that Linux gives
    with (path / "samples.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"t": 6.05, "stage": "dec')
    return path


def failed_run(path: Path) -> Path:
    """Out of memory while the weights were loaded."""
    return write_run(
        path, manifest(LLAMA, "cuda", GPU_INPUTS, "llama-3.1-8b"), gpu_samples()[:30], "failed", "CUDA out of memory"
    )


def rewritten(path: Path, **entries: Any) -> Path:
    """The run with entries of its manifest replaced."""
    file = path / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **entries}), encoding="utf-8")
    return path
