"""llama-server's logs, and Ollama's with the same lines: what they say, compared with the plan buffer by buffer.

tests/facts/llamacpp_logs.jsonl has the sizes of public logs in MiB, by buffer (weights, caches, compute), what the server
was started with, and which of them the plan has to the last digit that was logged. Breakdowns have whole MiB, cut.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FACTS = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "facts" / "llamacpp_logs.jsonl").read_text("utf-8").splitlines()
]
LINES = ("load_tensors: {:>12} model buffer size = {:8.2f} MiB", "llama_kv_cache: {:>10} KV buffer size = {:8.2f} MiB",
         "sched_reserve: {:>10} compute buffer size = {:8.2f} MiB")  # fmt: skip


def log_of(fact: dict[str, Any]) -> str:
    """A log with these figures, in llama.cpp's own format (its printf strings)."""
    lines = [f"llama-server -m /m/{fact['model']}-{fact['type']}.gguf {fact['command']}"]
    if fact["outputs"] is not None:
        lines.append(f"llama_context: n_outputs_max         = {fact['outputs']}")
    if fact["whole_mib"]:
        lines.append("common_memory_breakdown_print: | memory breakdown [MiB] | total free self model context compute |")
    for device, sizes in fact["mib"].items():
        weights, caches, compute = (size or 0 for size in sizes)
        if not fact["whole_mib"]:
            pairs = zip(LINES, sizes, strict=True)
            lines += [line.format(device, size) for line, size in pairs if size is not None]
            continue
        total, parts = weights + caches + compute, f"{weights:>6} + {caches:>6} + {compute:>6}"
        if device == "Host":
            lines.append(f"common_memory_breakdown_print: |   - Host               |       {total:>8} = {parts}       |")
        else:
            gpu = f"24124 = 23860 + ({total:>6} = {parts}) + {-total:>8}"
            lines.append(f"common_memory_breakdown_print: |   - {device} (a GPU)   | {gpu} |")
    return "\n".join([*lines, ""])


def compared(run: Run, tmp_path: Path, fact: dict[str, Any]) -> dict[str, bool]:
    log = tmp_path / "server.log"
    log.write_text(log_of(fact), encoding="utf-8")
    rows = run("reconcile", "--log", log, "--model", fact["model"], "--gpu", "h200", "--format", "json", "-q").json["rows"]
    return {row["name"]: bool(row["exact"]) for row in rows if row["logged"] and row["unit"] == "bytes"}


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact["log"])
def test_each_buffer_of_a_public_log_is_what_the_facts_say_of_it(run: Run, tmp_path: Path, fact: dict[str, Any]) -> None:
    rows = compared(run, tmp_path, fact)
    names = {f"{place} {kind}" for place, kind in places(fact)}
    assert rows.keys() == names
    assert sorted(name for name, is_equal in rows.items() if is_equal) == fact["equal"]


def places(fact: dict[str, Any]) -> list[tuple[str, str]]:
    """(place, kind) of each size in a fact."""
    kinds = ("weights", "caches", "compute")
    named = {device: "host" if device.startswith(("CPU", "Host")) or device.endswith("_Host") else f"GPU {device[-1]}"
             for device in fact["mib"]}  # fmt: skip
    return [(named[device], kind) for device, sizes in fact["mib"].items()
            for kind, size in zip(kinds, sizes, strict=True) if size]  # fmt: skip


def test_the_score_by_buffer() -> None:
    """Of all logs: caches to the last digit, weights where llama-quantize made the file, compute of few builds."""
    sizes, equal = Counter[str](), Counter[str]()
    for fact in FACTS:
        sizes.update(kind for _, kind in places(fact))
        equal.update(name.rpartition(" ")[2] for name in fact["equal"])
    assert {kind: (equal[kind], count) for kind, count in sorted(sizes.items())} == SCORE


SCORE: dict[str, tuple[int, int]] = {}
