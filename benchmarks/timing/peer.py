"""What aiconfigurator says of published results: `PYTHON -m benchmarks.timing.peer FACTS.jsonl OUT.jsonl [--every N]`.

PYTHON is that of an environment with aiconfigurator 0.12; nothing of kvplan is imported. FACTS.jsonl is written by
`benchmarks.timing.silicon`; closed loops of vLLM and SGLang are estimated from the same inputs as kvplan's: the
concurrency as the batch, ranks, lengths, and the number format of the weights. OUT.jsonl gets the id and the times of
each in milliseconds, or why there are none. `timeboard.py --peer OUT.jsonl` sets them beside kvplan's.
"""

import argparse
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

SYSTEMS = {"h100-80g": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm", "gb200": "gb200"}
FP8 = {"gemm_quant_mode": "fp8"}
MODELS: dict[str, tuple[str, dict[str, str]]] = {  # kvplan's name: aiconfigurator's, and formats that its config lacks
    "deepseek-r1": ("deepseek-ai/DeepSeek-R1", {}),
    "llama-3.1-70b-fp8": ("meta-llama/Meta-Llama-3.1-70B", FP8),
    "qwen3-32b": ("Qwen/Qwen3-32B", {}),
    "qwen3-32b-fp8": ("Qwen/Qwen3-32B-FP8", {}),
    "llama-3.1-8b": ("meta-llama/Meta-Llama-3.1-8B", {}),
    "llama-3.1-8b-fp8": ("meta-llama/Meta-Llama-3.1-8B", FP8),
    "gpt-oss-120b": ("openai/gpt-oss-120b", {}),
    "qwen3-235b-a22b-fp8": ("Qwen/Qwen3-235B-A22B-FP8", {}),
    "kimi-k2.5": ("moonshotai/Kimi-K2.5", {}),
    "models/nvidia--DeepSeek-V3.1-NVFP4": ("nvidia/DeepSeek-V3.1-NVFP4", {}),
    "models/meta-llama--Meta-Llama-3.1-70B": ("meta-llama/Meta-Llama-3.1-70B", {"gemm_quant_mode": "nvfp4"}),
    "models/nvidia--Kimi-K2.5-NVFP4": ("nvidia/Kimi-K2.5-NVFP4", {}),
}


def estimated(estimate: Callable[..., Any], fact: dict[str, Any]) -> dict[str, Any]:
    """The times of one result, or the reason why there are none."""
    model, formats = MODELS[fact["model"]]
    tp, ep, dp = fact["tp"], fact["ep"], fact["dp"]
    try:
        answer = estimate(
            model, SYSTEMS[fact["gpu"]], backend_name=fact["engine"], isl=fact["input_len"], osl=fact["output_len"],
            batch_size=max(1, fact["load"]["users"] // dp), tp_size=tp, attention_dp_size=dp,
            moe_tp_size=tp * dp // ep, moe_ep_size=ep, **formats,
        )  # fmt: skip
    except Exception as error:  # whatever it raises is its answer
        return {"id": fact["id"], "why": f"{type(error).__name__}: {error}"[:200]}
    return {"id": fact["id"], "ttft": answer.ttft, "tpot": answer.tpot}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    from aiconfigurator.cli.api import cli_estimate

    rows = [json.loads(line) for line in options.facts.read_text(encoding="utf-8").splitlines()]
    chosen = [row for row in rows if row["model"] in MODELS and row["engine"] in ("vllm", "sglang")][:: options.every]
    chosen.sort(key=lambda row: (row["gpu"], row["engine"], row["model"]))  # one set of tables at a time
    with options.out.open("w", encoding="utf-8") as lines:
        for row in chosen:
            lines.write(json.dumps(estimated(cli_estimate, row)) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
