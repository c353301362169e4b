"""Random cases of vLLM's flags over many configs, and what kvplan says of the rows that vLLM's own code answers.

    python -m benchmarks.random_cases write DIR --models FOLDER ... [--seed 1] [--count 150] [--variants 0.3]
    python -m benchmarks.random_cases compare DIR [--all]

`write` fills DIR/models (links to configs, and changed copies of some) and DIR/cases.jsonl. The oracle answers
them into DIR/rows.jsonl; `compare` prints each fault and counts rows by kind: equal, refused by both, refused by
kvplan, not within the oracle's reach; and the faults: different, answered where vLLM refuses, crashed. Exits 1 if there
is a fault.
"""

import argparse
import json
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvplan.core.errors import KvplanError
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.vllm.server import drafter, settings
from tests.oracles import case_request, draft_differences, result_differences, weight_differences

GIB = 2**30
BOTH, OURS, UNREACHED = "refused by both", "refused by kvplan", "not within the oracle's reach"
FAULTS = DIFFERENT, ANSWERED, CRASHED = "different", "answered where vLLM refuses", "crashed"
# What a row says when the oracle, not the server, could not go on.
OUT_OF_REACH = ("AttributeError", "ImportError", "ModuleNotFoundError", "stubbed kernel", "compiled op",
                "the child died", "OSError", "KeyError", "TypeError", "huggingface.co",
                "Transformers does not recognize")  # fmt: skip

Case = dict[str, Any]
Draw = random.Random


# --- cases -----------------------------------------------------------------------------------------------------------


def case(draw: Draw, model: str, config: Case) -> Case:
    """Flags that people use more often are drawn more often; some of them do not go together."""
    drawn: Case = {"model": model}
    options: Case = {}
    for chance, key, values in CHOICES:
        if draw.random() < chance:
            drawn[key] = draw.choice(values)
    longest = text_config(config).get("max_position_embeddings")
    if isinstance(longest, int) and drawn.get("max_model_len", 0) > longest and draw.random() < 0.9:
        drawn["max_model_len"] = longest
    for chance, key, values in OPTIONS:
        if draw.random() < chance:
            options[key] = draw.choice(values)
    if draw.random() < 0.06:
        options |= {"enable_lora": True, "max_loras": draw.choice([1, 2, 4]), "max_lora_rank": draw.choice([8, 16, 64])}
    if options:
        drawn["engine_args"] = options
    drawn["available_memory"] = [draw.randrange(1, 20) * GIB + draw.randrange(GIB), draw.randrange(20, 120) * GIB]
    return drawn


TOKENS = [-1, 7, 999, 2048, 4096, 8192, 10_001, 16_384, 32_768, 40_000, 65_536, 131_072, 262_144]
CHOICES: list[tuple[float, str, list[Any]]] = [
    (0.5, "gpu", ["A10G", "L40S", "RTX4090", "RTX5090", "A100", "H200", "B200", "B200", "H200"]),
    (0.5, "tp", [2, 2, 2, 4, 4, 4, 8, 8, 3]),
    (0.12, "pp", [2, 3, 4]),
    (0.6, "max_model_len", TOKENS),
    (0.12, "block_size", [16, 32, 64, 128, 256, 48]),
    (0.3, "kv_cache_dtype", ["fp8", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "nvfp4", "int8_per_token_head",
                             "fp8_per_token_head", "fp8_ds_mla", "turboquant_4bit_nc", "int4_per_token_head",
                             "float16"]),
    (0.2, "max_num_batched_tokens", [512, 2048, 4096, 8192, 16_384, 32_768, 1000]),
    (0.2, "max_num_seqs", [1, 8, 64, 128, 256, 512, 2000]),
    (0.15, "gpu_memory_utilization", [0.5, 0.85, 0.9, 0.95]),
    (0.25, "enable_prefix_caching", [False, False, True]),
    (0.08, "disable_hybrid_kv_cache_manager", [True]),
    (0.1, "usage_context", ["LLM_CLASS"]),
]  # fmt: skip
OPTIONS: list[tuple[float, str, list[Any]]] = [
    (0.1, "enable_expert_parallel", [True]),
    (0.05, "decode_context_parallel_size", [2, 4]),
    (0.01, "prefill_context_parallel_size", [2]),
    (0.12, "speculative_config", [
        {"method": "ngram", "num_speculative_tokens": 3}, {"method": "ngram", "num_speculative_tokens": 5},
        {"method": "mtp", "num_speculative_tokens": 1}, {"method": "mtp", "num_speculative_tokens": 2},
        {"method": "mtp", "num_speculative_tokens": 3}, {"method": "suffix", "num_speculative_tokens": 8},
    ]),
    (0.05, "quantization", ["fp8", "fp8", "awq"]),
    (0.05, "limit_mm_per_prompt", [
        {"image": 0}, {"image": 1}, {"image": 4, "video": 0}, {"image": 0, "video": 0, "audio": 0},
    ]),
    (0.03, "cpu_offload_gb", [4]),
    (0.04, "kv_offloading_size", [16, 64]),
    (0.05, "mamba_cache_mode", ["all", "align", "none"]),
    (0.03, "mamba_cache_dtype", ["float32", "float16"]),
    (0.04, "mamba_ssm_cache_dtype", ["float32", "float16", "bfloat16"]),
    (0.03, "mamba_block_size", [128, 512]),
    (0.08, "enforce_eager", [True]),
    (0.06, "async_scheduling", [True, False]),
    (0.04, "dtype", ["float16", "bfloat16", "half", "float32"]),
    (0.04, "enable_chunked_prefill", [False, True]),
    (0.03, "performance_mode", ["throughput", "interactivity", "balanced"]),
    (0.04, "language_model_only", [True]),
    (0.03, "num_gpu_blocks_override", [1000, 20_000]),
    (0.03, "attention_backend", ["FLASHINFER", "TRITON_ATTN", "FLASH_ATTN", "FLEX_ATTENTION"]),
    (0.02, "kv_transfer_config", [{"kv_connector": "NixlConnector", "kv_role": "kv_both"},
                                  {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
                                   "kv_connector_extra_config": {"cpu_bytes_to_use": 10**9}}]),
    (0.03, "runner", ["pooling", "generate"]),
    (0.02, "mm_encoder_tp_mode", ["data"]),
    (0.02, "optimization_level", [0, 2]),
    (0.02, "calculate_kv_scales", [True]),
]  # fmt: skip


# --- changed configs -------------------------------------------------------------------------------------------------


def text_config(config: Case) -> Case:
    for name in ("text_config", "language_config", "llm_config"):
        if isinstance(config.get(name), dict):
            return config[name]  # type: ignore[no-any-return]
    return config


def scaled(key: str, factors: list[float]) -> Callable[[Draw, Case], None]:
    def change(draw: Draw, config: Case) -> None:
        text = text_config(config)
        if isinstance(text.get(key), int) and text[key] > 1:
            text[key] = max(1, int(text[key] * draw.choice(factors)))

    return change


def fewer_layers(draw: Draw, config: Case) -> None:
    text = text_config(config)
    layers = text.get("num_hidden_layers")
    if not isinstance(layers, int):
        return
    text["num_hidden_layers"] = count = max(1, int(layers * draw.choice([0.3, 0.5, 0.8])))
    for key, value in text.items():
        if isinstance(value, list) and len(value) == layers:
            text[key] = value[:count]


def tied(_: Draw, config: Case) -> None:
    text, key = text_config(config), "tie_word_embeddings"
    if not any("expert" in name for name in text):
        text[key] = not text.get(key, False)
        if text is not config and key in config:
            config[key] = text[key]


QUANTIZED = [
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    {"quant_method": "fp8", "activation_scheme": "static"},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": True},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
     "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None,
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}}}},
    {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
     "config_groups": {"group_0": {"targets": ["Linear"],
        "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}}}},
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "config_groups": {"group_0": {
        "targets": ["Linear"],
        "input_activations": {"num_bits": 4, "type": "float", "dynamic": False, "group_size": 16},
        "weights": {"num_bits": 4, "type": "float", "dynamic": False, "group_size": 16}}}},
    {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"],
     "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
]  # fmt: skip


def quantized(draw: Draw, config: Case) -> None:
    config["quantization_config"] = draw.choice(QUANTIZED)


def windowed(draw: Draw, config: Case) -> None:
    text = text_config(config)
    if text.get("sliding_window"):
        text["sliding_window"] = draw.choice([100, 512, 4096])


CHANGES: list[Callable[[Draw, Case], None]] = [
    fewer_layers, quantized, quantized, windowed, tied,
    scaled("vocab_size", [0.5, 1.001, 2]), scaled("num_key_value_heads", [0.5, 2]),
    scaled("intermediate_size", [0.5, 2]),
    scaled("num_experts", [0.5, 2]), scaled("n_routed_experts", [0.5, 2]), scaled("max_position_embeddings", [0.25, 2]),
    scaled("moe_intermediate_size", [0.5, 2]), scaled("head_dim", [0.5, 2]),
]  # fmt: skip


def changed(draw: Draw, config: Case) -> Case:
    copy: Case = json.loads(json.dumps(config))
    for change in draw.sample(CHANGES, draw.choice([1, 2, 3])):
        change(draw, copy)
    return copy


def write(directory: Path, folders: list[Path], *, seed: int, count: int, variants: float) -> None:
    draw = Draw(seed)
    sources = sorted(path.parent for folder in folders for path in folder.glob("*/config.json"))
    models = directory / "models"
    models.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        source = draw.choice(sources)
        name, config = source.name, json.loads((source / "config.json").read_text())
        if draw.random() < variants:
            name = f"{source.name}--{seed}-{number}"
            (models / name).mkdir(exist_ok=True)
            config = changed(draw, config)
            (models / name / "config.json").write_text(json.dumps(config, indent=1))
        elif not (models / name).exists():
            (models / name).symlink_to(source.resolve())
        rows.append(json.dumps(case(draw, name, config)))
    (directory / "cases.jsonl").write_text("\n".join(rows) + "\n")


# --- comparison ------------------------------------------------------------------------------------------------------


def setting_differences(request: Request, answer: Plan, row: Case) -> Iterator[str]:
    mine, theirs = settings(drafter(request)[0]), row["resolved"]
    pairs = [
        ("max_num_batched_tokens", mine.max_num_batched_tokens), ("max_num_seqs", mine.max_num_seqs),
        ("gpu_memory_utilization", mine.gpu_memory_utilization), ("enable_prefix_caching", mine.prefix_caching),
        ("dtype", mine.dtype), ("max_concurrent_batches", mine.batches), ("use_v2_model_runner", mine.runner_v2),
    ]  # fmt: skip
    for name, value in pairs:
        if value != theirs[name]:
            yield f"setting {name} {value} for {theirs[name]}"
    result = next((answered for answered in row["results"] if "error" not in answered), None)
    if result is not None and answer.pool.block_size != result["final_block_size"]:
        yield f"setting block_size {answer.pool.block_size} for {result['final_block_size']}"


def judged(row: Case, models: Path) -> tuple[str, list[str]]:
    refusal = row.get("failed")
    if refusal is not None and any(text in refusal for text in OUT_OF_REACH):
        return UNREACHED, [refusal[:200]]
    try:
        request = case_request(row, models)
        answer = plan(request)
        if refusal is not None:
            return ANSWERED, [refusal[:300]]
        if row.get("result") == "no kv cache":
            wrong = [] if not answer.capacity.num_blocks else ["kvplan has blocks where vLLM has no KV cache"]
        else:
            wrong = [text for expected in row["results"] for text in result_differences(request, expected)]
            wrong += setting_differences(request, answer, row)
        wrong += weight_differences(request, row["weights"])
        wrong += draft_differences(request, row.get("draft_weights"))
    except KvplanError as error:
        return (BOTH if refusal is not None else OURS), [str(error)[:300]]
    except Exception:
        return CRASHED, [traceback.format_exc().strip()[-600:]]
    return (DIFFERENT if wrong else "equal"), wrong


def compare(directory: Path, *, show_all: bool) -> int:
    counts: Counter[str] = Counter()
    for line in (directory / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        kind, why = judged(row, directory / "models")
        counts[kind] += 1
        if kind in FAULTS or (show_all and why):
            inputs = {key: value for key, value in row["inputs"].items() if key != "available_memory"}
            print(f"{kind}: {json.dumps(inputs)}", *why, sep="\n    ")
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    return 1 if any(counts[kind] for kind in FAULTS) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--models", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--variants", type=float, default=0.3, help="share of cases with a changed config")
    parser.add_argument("--all", action="store_true", help="print refusals too")
    options = parser.parse_args()
    if options.what == "compare":
        return compare(options.directory, show_all=options.all)
    write(options.directory, options.models, seed=options.seed, count=options.count, variants=options.variants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
