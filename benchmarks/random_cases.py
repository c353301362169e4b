"""Random configs and flags for both servers, and what kvplan says of the rows that a server's own code answers.

    python -m benchmarks.random_cases write SERVER DIR --models FOLDER ... [--seed 1] [--count 150] [--variants 0.6]
    python -m benchmarks.random_cases compare DIR [--all]

SERVER is vllm or sglang. `write` fills DIR/models (links to configs, drafts, and changed copies) and DIR/cases.jsonl,
the same for the same seed and folders. The oracle answers them into DIR/rows.jsonl (SGLang's from within DIR/models,
where it finds the drafts); `compare` prints each fault and
counts rows by kind: equal, refused by both, refused by kvplan, not within the oracle's reach; and the faults:
different, answered where the server refuses, crashed. Exits 1 if there is a fault.
"""

import argparse
import json
import random
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.random_configs import changed, keeps_shape
from benchmarks.random_flags import sglang_case, vllm_case
from benchmarks.random_quantizations import HF_QUANT
from kvplan.planning.plan import plan
from kvplan.servers.vllm.server import drafter, settings
from tests import oracles

Case = dict[str, Any]
BOTH, OURS = "refused by both", "refused by kvplan"
FAULTS = DIFFERENT, ANSWERED, CRASHED = "different", "answered where the server refuses", "crashed"
# What marks a row, in its inputs or its failure, where the oracle and not the server is at fault, and why.
ARTEFACTS = {
    "gemma-4-26b-a4b-assistant": "the speculator shares the target's KV cache once built; the oracle asks before",
    "No model architectures are specified": "the oracle's copy of the config loses the architecture",
    '"--pp-size"': "sglang/ask.py plays one stage unless its own `pp` says otherwise",
    "moonshotai__Kimi-Linear": "the stored config is a class's defaults, not the model's",
    "'FLASHINFER_CUTEDSL' does not support": "its kernels are in a part of FlashInfer that the oracle's Python lacks",
}
# Classes of transformers that vLLM runs (transformers/base.py, init_parameters): on the oracle's meta device it gives
# compressed-tensors' scales of K and V the model's dtype, too, which on a GPU stay float32.
ON_META = re.compile(r'"(Cwm|Glm|GPTBigCode|GPTNeoX|Olmo[23]?|Phi|SeedOss|SmolLM3|Starcoder2)ForCausalLM"')
# Methods of which vLLM takes the quantized modules from the stored tensors (maybe_update_config), and their lists,
# without which it does: the oracle's folders have no tensors, and towers are stored in 16 bits.
FROM_TENSORS = {"gptq": "modules_in_block_to_quantize", "awq": "modules_to_not_convert"}
# SGLang computes in float16 on these (load_model_utils.py, maybe_downgrade_dtype_for_legacy_gpu); its oracle does not
# call that function. The pool is as large.
LEGACY_GPUS, LEGACY_DTYPE = ("T4", "V100"), "kv_cache_dtype float16 for bfloat16"
# Refusals of kvplan's for what SGLang stops at once it loads the model, which the oracle does not play.
BEYOND = {
    "it needs compute capability 7.5": "it stops on older GPUs (load_model_utils.py)",
    "rule of thumb leaves nothing": "its default of --mem-fraction-static is negative; the oracle is told the room",
    "FlashAttention v3 Backend requires": "the attention backend stops on this GPU; the oracle does not make one",
    "can only be used with MLA": "the attention backend stops for this model; the oracle does not make one",
    "Cannot find the config file": "its quantization's config cannot be read (kvplan/servers/sglang/quantized.txt)",
    "needs compute capability 9.0": "sparse MLA has no kernels before Hopper (layers/attention/dsa)",
    "does not divide the": "ranks divide the heads (models/llama.py and others assert it)",
    "is not supported for the current GPU": "its quantization's config is refused once it is loaded (loader.py)",
    "only supports regular FP8": "its quantization's config is refused once it is loaded (modelopt_quant.py)",
    "drafts over pipeline stages": "its check of all arguments refuses them (validation_hook.py), which is not called",
    "its kernels": "layers of these shapes cannot be created (kvplan/servers/sglang/quantized.txt)",
    "cannot be created": "layers of this scheme cannot be created (kvplan/servers/sglang/quantized.txt)",
    "leaves none of": "all layers would read another's cache, which its class refuses (models/gemma4_causal.py)",
    "eagle-command-a: its head": "SGLang has no class of its architecture",
    "pairs of rotated values": "its rotary table cannot be made (layers/rotary_embedding); the oracle makes none",
    "has a vocabulary of": "its worker asks for the target's vocabulary (speculative/standalone_worker_v2.py)",
    "names no layers of multi-token prediction": "there is no head to load (models/deepseek_nextn.py and others)",
}
CASES = {"vllm": vllm_case, "sglang": sglang_case}


# --- cases -----------------------------------------------------------------------------------------------------------


def link(models: Path, source: Path) -> None:
    if not (models / source.name).exists():
        (models / source.name).symlink_to(source.resolve())


def drafts_of(case: Case, sources: dict[str, Path]) -> list[Path]:
    """The folders of the drafts that a case names."""
    names = {(case.get("engine_args") or {}).get("speculative_config", {}).get("model"), *case.get("argv", ())}
    return [folder for name, folder in sources.items() if name in names]


def write(directory: Path, folders: list[Path], *, server: str, seed: int, count: int, variants: float) -> None:
    draw = random.Random(seed)
    sources = {path.parent.name: path.parent for folder in folders for path in sorted(folder.glob("*/config.json"))}
    heads = {path.parent.name: path.parent for path in oracles.HEADS.glob("*/config.json")}
    models = directory / "models"
    models.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        source = draw.choice(sorted(sources))
        name, config, paired = source, json.loads((sources[source] / "config.json").read_text()), source
        if draw.random() < variants:
            name, original = f"{source}--{seed}-{number}", config
            config = changed(draw, original)
            paired = source if keeps_shape(config, original) else ""
            (models / name).mkdir(exist_ok=True)
            files = {HF_QUANT: config.pop(HF_QUANT)} if HF_QUANT in config else {}
            for file, content in {"config.json": config, **files}.items():
                (models / name / file).write_text(json.dumps(content, indent=1))
        else:
            link(models, sources[source])
        case = CASES[server](draw, name, paired, config)
        for folder in drafts_of(case, sources | heads):
            link(models, folder)
        rows.append(json.dumps(case))
    (directory / "cases.jsonl").write_text("\n".join(rows) + "\n")


# --- comparison ------------------------------------------------------------------------------------------------------


def setting_differences(row: Case, models: Path) -> Iterator[str]:
    """What differs in the settings that vLLM resolves."""
    request = oracles.case_request(row, models)
    mine, theirs = settings(drafter(request)[0]), row["resolved"]
    pairs = [
        ("max_num_batched_tokens", mine.max_num_batched_tokens), ("max_num_seqs", mine.max_num_seqs),
        ("gpu_memory_utilization", mine.gpu_memory_utilization), ("enable_prefix_caching", mine.prefix_caching),
        ("dtype", mine.dtype), ("max_concurrent_batches", mine.batches), ("use_v2_model_runner", mine.runner_v2),
    ]  # fmt: skip
    for name, value in pairs:
        if value != theirs[name]:
            yield f"setting {name} {value} for {theirs[name]}"
    result = next((answered for answered in row.get("results", ()) if "error" not in answered), None)
    if result is not None and (size := plan(request).pool.block_size) != result["final_block_size"]:
        yield f"setting block_size {size} for {result['final_block_size']}"


def is_read_from_tensors(config: Case) -> bool:
    stated = config.get("quantization_config") or {}
    listed = FROM_TENSORS.get(str(stated.get("quant_method")))
    return listed is not None and not stated.get(listed) and "vision_config" in config


def judged(row: Case, models: Path) -> tuple[str, list[str]]:
    """The kind of a row, and why."""
    text = json.dumps(row["inputs"]) + row.get("failed", "")
    if reason := next((reason for mark, reason in ARTEFACTS.items() if mark in text), None):
        return oracles.NOT_ASKED, [reason]
    config = (models / row["inputs"]["model"] / "config.json").read_text(encoding="utf-8")
    if "vllm_version" in row and is_read_from_tensors(json.loads(config)):
        return oracles.NOT_ASKED, ["which modules are quantized is read from tensors, which its folder lacks"]
    if "vllm_version" in row and ON_META.search(config) and "compressed-tensors" in config:
        return oracles.NOT_ASKED, ["its scales of K and V have another dtype on the meta device"]
    is_vllm, refuses = "vllm_version" in row, oracles.refuses(row)
    try:
        outcome, why = (oracles.compare_case if is_vllm else oracles.compare_sglang_in)(row, models)
        if is_vllm and not refuses and outcome in (oracles.EQUAL, oracles.DIFFERENT):
            why = [*why, *setting_differences(row, models)]
            outcome = oracles.DIFFERENT if why else outcome
    except Exception:
        return CRASHED, [traceback.format_exc().strip()[-600:]]
    if not is_vllm and not refuses and row["inputs"].get("gpu") in LEGACY_GPUS and LEGACY_DTYPE in why:
        why = [text for text in why if text != LEGACY_DTYPE]
        outcome = outcome if why else oracles.EQUAL
    if outcome == oracles.REFUSED:
        beyond = next((reason for mark, reason in BEYOND.items() if not is_vllm and mark in why[0]), None)
        return (OURS, why) if beyond is None else (oracles.NOT_ASKED, [*why, beyond])
    if outcome == oracles.DIFFERENT and refuses:
        return ANSWERED, why
    return (BOTH if refuses and outcome == oracles.EQUAL else outcome), why


def compare(directory: Path, *, show_all: bool) -> int:
    counts: Counter[str] = Counter()
    for line, row in enumerate(oracles.read_lines(directory / "rows.jsonl"), 1):
        kind, why = judged(row, directory / "models")
        counts[kind] += 1
        if kind in FAULTS or (show_all and why):
            inputs = {key: value for key, value in row["inputs"].items() if key != "available_memory"}
            print(f"{line}: {kind}: {json.dumps(inputs)}", *why, sep="\n    ")
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    return 1 if any(counts[kind] for kind in FAULTS) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writer = commands.add_parser("write")
    writer.add_argument("server", choices=sorted(CASES))
    writer.add_argument("directory", type=Path)
    writer.add_argument("--models", type=Path, action="append", required=True, metavar="FOLDER")
    writer.add_argument("--seed", type=int, default=1)
    writer.add_argument("--count", type=int, default=150)
    writer.add_argument("--variants", type=float, default=0.6, help="share of cases with a changed config")
    comparer = commands.add_parser("compare")
    comparer.add_argument("directory", type=Path)
    comparer.add_argument("--all", action="store_true", help="print refusals too")
    options = parser.parse_args()
    if options.command == "compare":
        return compare(options.directory, show_all=options.all)
    write(options.directory, options.models, server=options.server, seed=options.seed, count=options.count,
          variants=options.variants)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
