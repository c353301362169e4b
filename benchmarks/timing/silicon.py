"""Published results in the wheel aiconfigurator-core 0.12, as facts: `python -m benchmarks.timing.silicon FOLDER`.

Its silicon_sample.csv (Apache-2.0, NVIDIA) has 3,619 aggregated results, most of them InferenceX's. FOLDER gets
facts.jsonl and the models' configs. Every time is a mean (InferenceX publishes the same rows with their statistics).
Several snapshots of one configuration and release are one result, the newest.
"""

import argparse
import csv
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GPUS = {"h100_sxm": "h100-80g", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300", "gb200": "gb200"}
CATALOG = {
    ("deepseek-ai/DeepSeek-R1", "fp8"): "deepseek-r1",
    ("meta-llama/Llama-3.1-70B", "fp8"): "llama-3.1-70b-fp8",
    ("Qwen/Qwen3-32B", ""): "qwen3-32b",
    ("Qwen/Qwen3-32B", "fp8"): "qwen3-32b-fp8",
    ("meta-llama/Llama-3.1-8B-Instruct", ""): "llama-3.1-8b",
    ("meta-llama/Llama-3.1-8B-Instruct", "fp8"): "llama-3.1-8b-fp8",
    ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8"): "llama-3.1-8b-fp8",
    ("openai/gpt-oss-120b", "fp4"): "gpt-oss-120b",
    ("openai/gpt-oss-120b", "fp8"): "gpt-oss-120b",
    ("Qwen/Qwen3-235B-A22B-FP8", "fp8"): "qwen3-235b-a22b-fp8",
    ("MiniMaxAI/MiniMax-M2.5", "fp8"): "minimax-m2.5",
    ("moonshotai/Kimi-K2.5", "int4"): "kimi-k2.5",
    ("Qwen/Qwen3.5-397B-A17B", "bf16"): "qwen3.5-397b-a17b",
}
CONFIGS = {  # models that the catalog lacks: their configs are in the wheel, by the name of a model of the same layers
    ("deepseek-ai/DeepSeek-R1", "fp4"): "nvidia--DeepSeek-V3.1-NVFP4",
    ("meta-llama/Llama-3.1-70B", "fp4"): "meta-llama--Meta-Llama-3.1-70B",
    ("MiniMaxAI/MiniMax-M2.5", "fp4"): "nvidia--MiniMax-M2.5-NVFP4",
    ("moonshotai/Kimi-K2.5", "fp4"): "nvidia--Kimi-K2.5-NVFP4",
    ("Qwen/Qwen3.5-397B-A17B", "fp4"): "nvidia--Qwen3.5-397B-A17B-NVFP4",
    ("Qwen/Qwen3.5-397B-A17B", "fp8"): "Qwen--Qwen3.5-397B-A17B",
    ("zhipuai/GLM-5", "fp8"): "zai-org--GLM-5-FP8",
    ("zhipuai/GLM-5", "fp4"): "nvidia--GLM-5-NVFP4",
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
STATE_GATES = [  # too narrow for blocks; three of four layers are linear attention
    f"model.language_model.layers.{layer}.linear_attn.in_proj_{gate}"
    for layer in range(60)
    if layer % 4 != 3
    for gate in "ab"
]
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
ADDED = {  # quantizations of configs that stand there without one: as nvidia/Llama-3.3-70B-Instruct-FP4, Qwen's own FP8
    "meta-llama--Meta-Llama-3.1-70B": NVFP4,
    "Qwen--Qwen3.5-397B-A17B": BLOCKS | {"modules_to_not_convert": ["lm_head", "mtp", "visual", *STATE_GATES]},
}


INFERENCEX = {  # models by server that InferenceX measured; other rows are sweeps whose flags nobody states
    "vllm": ("Llama-3.1-70B", "gpt-oss-120b", "Kimi-K2.5", "MiniMax-M2.5"),
    "sglang": ("DeepSeek-R1", "Qwen3.5-397B-A17B", "GLM-5"),
}


def ranks(row: Mapping[str, str], users: int) -> tuple[int, int, int]:
    """(tensor-parallel, expert-parallel, attention's data-parallel ranks).

    Some snapshots multiply what InferenceX's recipes state: TP 4 with EP 4 stands as tp 16, moe_tp 4, moe_ep 4, or as
    tp 4, attention_dp 4, moe_ep 16. Its scripts for Kimi never pass the EP; only those for MiniMax in nvfp4 replicate
    attention, from 256 users on.
    """
    tp, dp, moe_tp, ep = (int(float(row[name] or 0) or 1) for name in WIDTHS)
    if moe_tp == ep > 1 and tp == moe_tp * ep:
        return moe_tp, ep, 1
    if "Kimi" in row["model_path"]:
        return tp, 1, 1
    if dp > 1 and ep == tp * dp:
        replicated = row["precision"] == "fp4" and users >= 256 and row["isl"] == "1024"
        return (1, tp, tp) if replicated else (tp, tp, 1)
    return tp, ep, max(dp, moe_tp * ep // tp)


WIDTHS = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")


def facts(table: Path) -> Iterator[dict[str, Any]]:
    """Every result of a single node, in the file's order."""
    with table.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if row["mode"] != "agg" or row["system"] not in GPUS:
                continue
            made = fact(row, GPUS[row["system"]])
            if max(made["tp"] * made["dp"], made["ep"]) <= 8:
                yield made


def fact(row: Mapping[str, str], gpu: str) -> dict[str, Any]:
    source, model = row["silicon_data_source"], row["model_path"].replace("DeepSeek-V3", "DeepSeek-R1")
    row = {**row, "model_path": model}
    model = model.replace("nvidia/Qwen3-32B-NVFP4", "Qwen/Qwen3-32B")
    key = model, row["precision"]
    users = (
        int(match[1]) if (match := re.search(r"silicon_concurrency=(\d+)", source)) else int(float(row["batch_size"]))
    )
    tp, ep, dp = ranks(row, users)
    is_recipe = model.rpartition("/")[2] in INFERENCEX.get(row["backend"], ())
    measured = re.search(r"measured=(\d{4}-\d{2}-\d{2})", source)
    return {
        "id": row["id"],
        "src": "inferencex" if is_recipe else "aic-sweep",
        "source": "silicon_sample.csv of aiconfigurator-core 0.12",
        "url": "https://pypi.org/project/aiconfigurator-core/0.12.0/",
        "engine": row["backend"],
        "version": row["backend_version"],
        "date": measured[1] if measured else "",
        "model": CATALOG.get(key) or (f"models/{CONFIGS[key]}" if key in CONFIGS else " ".join(key)),
        "gpu": gpu,
        "tp": tp,
        "ep": ep,
        "dp": dp,
        "dtype": "bfloat16",
        "kv_dtype": "auto",
        "load": {"users": users},
        "num_prompts": 10 * users,
        "input_len": int(row["isl"]),
        "output_len": int(row["osl"]),
        "range": 0.8 if is_recipe else 0.0,
        "measured": {"ttft_mean": float(row["silicon_ttft_ms"]), "tpot_mean": float(row["silicon_tpot_ms"])},
        "notes": "a recipe of InferenceX" if is_recipe else "flags not stated",
    }  # fmt: skip


SAME = ("engine", "version", "model", "gpu", "tp", "ep", "dp", "input_len", "output_len")


def newest(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result of each configuration and release: the last measured.

    DeepSeek-R1 under SGLang was measured with and without speculation, and no row says which: the slower is without.
    """
    by_key: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = (*(row[name] for name in SAME), row["load"]["users"])
        other = by_key.get(key)
        if other is None or (is_slower(row, other) if row["model"] == "deepseek-r1" else row["date"] >= other["date"]):
            by_key[key] = row
    return list(by_key.values())


def is_slower(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(row["measured"]["tpot_mean"] >= other["measured"]["tpot_mean"])


def copy_configs(rows: list[dict[str, Any]], configs: Path, folder: Path) -> None:
    for name in {row["model"].removeprefix("models/") for row in rows if row["model"].startswith("models/")}:
        to = folder / "models" / name
        to.mkdir(parents=True, exist_ok=True)
        content = json.loads((configs / f"{name}_config.json").read_text(encoding="utf-8"))
        if name in ADDED:
            content["quantization_config"] = ADDED[name]
        (to / "config.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        side = configs / f"{name}_hf_quant_config.json"
        if side.exists():
            shutil.copy(side, to / "hf_quant_config.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", type=Path, help="the folder aiconfigurator_core, if it is not installed here")
    options = parser.parse_args()
    wheel = options.wheel
    if wheel is None:
        spec = find_spec("aiconfigurator_core")
        if spec is None or spec.origin is None:
            print("silicon: error: aiconfigurator-core is not installed; give --wheel", file=sys.stderr)
            return 2
        wheel = Path(spec.origin).parent
    rows = newest(facts(wheel / "systems" / "silicon_sample.csv"))
    options.folder.mkdir(parents=True, exist_ok=True)
    copy_configs(rows, wheel / "model_configs", options.folder)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (options.folder / "facts.jsonl").write_text(text, encoding="utf-8")
    print(f"{len(rows)} results in {options.folder / 'facts.jsonl'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
