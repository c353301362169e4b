"""Damaged and hostile files for every reader: what each refuses, and whether one breaks.

    python -m benchmarks.random_files [--count 2000] [--seed 1]

A third of the files are valid, a third differ in a value, and a third in a few bytes. A reader answers or raises
KvplanError; anything else broke it. Prints the counts: tried, read, refused, broke.
"""

import argparse
import json
import random
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.adapter_config import read_config
from kvplan.core.errors import KvplanError
from kvplan.core.strict_yaml import read as read_yaml
from kvplan.measure.bench_results import read_results
from kvplan.models.checkpoint import index_files
from kvplan.models.hf_config import load_spec
from kvplan.models.safetensors_header import safetensors_tensors
from kvplan.workloads.trace import read as read_trace

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 256, "torch_dtype": "bfloat16",
}  # fmt: skip
ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 2}, "bias": "none"}
RESULT = {
    "backend": "vllm", "endpoint_type": "vllm", "model_id": "m", "tokenizer_id": "m", "num_prompts": 10,
    "completed": 10, "max_concurrency": 2, "duration": 5.0,
    "request_rate": "inf", "total_input_tokens": 1000, "total_output_tokens": 100, "median_ttft_ms": 20.0,
    "mean_ttft_ms": 20.0, "median_tpot_ms": 9.0, "mean_tpot_ms": 9.0, "output_throughput": 20.0,
}  # fmt: skip
HEADER = {"a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}}
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 10**29, 1e300, "", "x" * 500, "\x1b[31m", "\u202e", "../../etc/passwd", [], {}, [[1]],
)  # fmt: skip


def with_header(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data + bytes(12)


# Reader -> (name of its file, content, its JSON if it has one, a function that writes the JSON, the reader).
READERS: dict[str, tuple[str, dict[str, Any] | bytes, Callable[[str], bytes], Callable[[Path], object]]] = {
    "config": ("config.json", CONFIG, str.encode, load_spec),
    "adapter": ("adapter_config.json", ADAPTER, str.encode, lambda path: read_config(path.parent)),
    "index": ("model.safetensors.index.json", {"weight_map": {"a": "b"}}, str.encode, index_files),
    "benchmark": ("result.json", RESULT, str.encode, read_results),
    "safetensors": ("model.safetensors", HEADER, with_header, lambda path: list(safetensors_tensors(path))),
    "trace": ("t.csv", b"arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,5,5\n", str.encode, read_trace),
    "yaml": ("p.yaml", b"version: 1\ntargets:\n- {id: a, model: m, gpu: l40s}\n", str.encode, read_yaml),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="files for each reader")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    broken: list[str] = []
    for name in READERS:
        counts, faults = attack(name, options.count, options.seed)
        broken += faults
        print(
            f"{name}: {options.count} tried, {', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))}"
        )
    print(*broken[:20], sep="\n")
    return len(broken) > 0


def attack(name: str, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """(files by what became of them, what broke: the seed of the file and the exception)."""
    file_name, valid, encode, read = READERS[name]
    counts, faults = Counter[str](), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file_name)
        for number in range(count):
            rng = random.Random(f"{name} {seed} {number}")
            path.write_bytes(damaged(rng, valid, encode))
            try:
                read(path)
                counts["read"] += 1
            except KvplanError as error:
                counts["refused" if str(error).isprintable() else "broke"] += 1
                if not str(error).isprintable():
                    faults.append(f"{name} {number}: a message with control characters: {error!s:.80}")
            except Exception as error:
                counts["broke"] += 1
                faults.append(f"{name} {number}: {type(error).__name__}: {error!s:.80}")
    return counts, faults


def damaged(rng: random.Random, valid: dict[str, Any] | bytes, encode: Callable[[str], bytes]) -> bytes:
    """A valid file, or one that differs in a value or in a few bytes."""
    kind = rng.choice(("valid", "value", "bytes"))
    if isinstance(valid, dict) and kind == "value":
        return encode(json.dumps(valid | {rng.choice(list(valid)): rng.choice(VALUES)}))
    data = bytearray(valid if isinstance(valid, bytes) else encode(json.dumps(valid)))
    for _ in range(0) if kind == "valid" else range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        data[place : place + rng.randint(0, 3)] = rng.choice((b"", b"\0", b"\xff", b"9" * 40, b"[" * 200, b'"', b"-"))
    return bytes(data) or b" "


if __name__ == "__main__":
    sys.exit(main())
