"""Does anything run at all: versions, the device, one kernel against float64, an engine with a 2-layer model."""

import platform
import time
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu_stages.stage import Task, parser, spec_of, task
from engine import Engine, EngineConfig, SamplingParams, kernels
from tests.support import kernel_reference as reference

NUM_TOKENS = 8


def device_facts(device: torch.device) -> dict[str, Any]:
    """What torch says about the device."""
    if device.type == "cpu":
        return {"name": platform.processor() or platform.machine()}
    facts = torch.cuda.get_device_properties(device)
    return {
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "memory": facts.total_memory,
        "processors": facts.multi_processor_count,
        "l2": facts.L2_cache_size,
    }


def kernel_error(device: torch.device) -> float:
    """The largest error of a small gated activation against float64."""
    x = torch.randn(3, 256, device=device)
    got = kernels.load("auto", device.type).gated_activation(x, "silu")
    return float((got.double() - reference.gated_activation(x.double(), "silu")).abs().max())


def run(stage: Task) -> None:
    begin = time.perf_counter()
    numbers: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    numbers["device"] = facts = device_facts(stage.device)
    stage.save(str(facts["name"]), numbers)
    numbers["kernel_error"] = error = kernel_error(stage.device)
    numbers["kernel_s"] = time.perf_counter() - begin
    stage.save(f"{facts['name']}, a kernel runs", numbers)
    if not error < 1e-5:  # values of about 1 in float32
        raise SystemExit(f"gated_activation: differs from float64 by {error:.1e}")
    config = EngineConfig(
        device=str(stage.device), load_format="dummy", num_blocks=64, max_model_len=128, max_num_seqs=4,
        max_num_batched_tokens=64,
    )  # fmt: skip
    begin = time.perf_counter()
    engine = Engine(spec_of("llama-3.1-8b", is_small=True), config)
    stage.fallbacks.update(engine.memory_report().fallbacks)
    outputs = engine.generate([[5, 6, 7], list(range(30))], SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    numbers["engine_s"] = time.perf_counter() - begin
    numbers["memory"] = asdict(engine.memory_report())
    if [len(output.token_ids) for output in outputs] != [NUM_TOKENS] * 2:
        raise SystemExit(f"engine: it ended early ({[output.error for output in outputs]})")
    stage.save(f"{facts['name']}, torch {torch.__version__}: kernel and engine run", numbers)


if __name__ == "__main__":
    run(task(parser(__doc__)))
