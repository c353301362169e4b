"""What a plan costs: the command's start-up against a bare interpreter, and plans per second in one process.

    python benchmarks/planner.py [--runs 20] [--csv FILE]

Run it where kvplan is installed as a wheel: an editable install may compile its sources anew each time.
"""

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.words.arguments import EngineArgs

ESTIMATE = ["estimate", "llama-3.1-8b", "--ctx", "32k", "--gpu", "a100-80g"]
PLANS = 10_000


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def command(argv: list[str]) -> Callable[[], object]:
    return lambda: subprocess.run(argv, check=True, capture_output=True)


def start_up(runs: int) -> list[tuple[str, str, float, float, float, int]]:
    """Medians of both commands, run in turn so that the machine's mood hits both; and their ratio."""
    commands = {
        "python -c pass": command([sys.executable, "-c", "pass"]),
        "kvplan estimate": command([str(Path(sys.executable).with_name("kvplan")), *ESTIMATE]),
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for run in commands.values():
        run()  # warm the page cache
    for _ in range(runs):
        for name, run in commands.items():
            times[name].append(seconds(run) * 1000)
    rows = [(name, "ms", *spread(values), runs) for name, values in times.items()]
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    return [*rows, ("start-up ratio", "x", *spread(ratios), runs)]


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    cuts = statistics.quantiles(values, n=5)
    return statistics.median(values), cuts[0], cuts[3]


def plans_per_second(runs: int) -> tuple[str, str, float, float, float, int]:
    """Seconds for 10,000 plans over models, GPUs and contexts."""
    requests = [
        Request(catalog.load(model), gpu(name), EngineArgs(tensor_parallel_size=tp))
        for model in ("llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b-a3b")
        for name in ("a100-80g", "h100-80g", "h200", "l40s")
        for tp in (1, 2)
    ]

    def many() -> None:
        for i in range(PLANS):
            request = requests[i % len(requests)]
            plan(replace(request, args=replace(request.args, max_model_len=1024 + 7 * (i % 1000))))

    return (f"{PLANS:,} plans", "s", *spread([seconds(many) for _ in range(max(2, runs // 4))]), runs)


def sweep_seconds(runs: int) -> tuple[str, str, float, float, float, int]:
    """Seconds for `kvplan sweep` over 100,000 combinations as CSV, start-up included, on all cores."""
    axes = {
        "--gpu": "a100-80g,h100-80g,h200,l40s,b200",
        "--tp": "1,2",
        "--kv-cache-dtype": "auto,fp8",
        "--gpu-memory-utilization": "0.85,0.9,0.92,0.95,0.97",
        "--max-num-seqs": "32,64,128,256",
        "--ctx": ",".join(str(1024 + 640 * i) for i in range(50)),
    }
    models = ["llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b-a3b"]
    words = ["sweep", *models, *(word for axis in axes.items() for word in axis), "--format", "csv", "-q"]
    sweep = command([str(Path(sys.executable).with_name("kvplan")), *words])
    count = max(3, runs // 6)
    return ("100,000 combinations", "s", *spread([seconds(sweep) for _ in range(count)]), count)


CHECKED = 100


def check_seconds(runs: int) -> tuple[str, str, float, float, float, int]:
    """Seconds for `kvplan check` of 100 targets, each another model, start-up and cures of what fails included."""
    models = [name for name in catalog.model_names() if catalog.load(name).max_model_len >= 4096][:CHECKED]
    rules = "{fits: true, min_headroom: 5%, min_concurrency: 100, min_kv_tokens: 100k, max_weights: 100GiB}"
    targets = [f"- {{id: t{i}, model: {model}, gpu: h200, max_model_len: 4k}}" for i, model in enumerate(models)]
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "kvplan.policy.yaml"
        lines = ["version: 1", f"defaults: {{rules: {rules}}}", "targets:", *targets]
        policy.write_text("\n".join(lines), encoding="utf-8")
        argv = [str(Path(sys.executable).with_name("kvplan")), "check", str(policy)]

        def check() -> None:
            code = subprocess.run(argv, check=False, capture_output=True).returncode
            assert code == 1, code  # the largest models do not fit

        check()
        count = max(3, runs // 2)
        return (f"check, {CHECKED} targets", "s", *spread([seconds(check) for _ in range(count)]), count)


HEADER = (
    "metric", "unit", "value", "p20", "p80", "n", "model", "gpu", "driver", "torch", "kvplan", "commit", "utc",
)  # fmt: skip


def measured_with() -> tuple[str, ...]:
    """What the columns after the figures say; no model, GPU, driver or torch takes part."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    utc = datetime.now(UTC).isoformat(timespec="seconds")
    return "", "", "", "", version("kvplan"), git.stdout.strip(), utc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    rows = [*start_up(options.runs), plans_per_second(options.runs), sweep_seconds(options.runs)]
    rows.append(check_seconds(options.runs))
    for metric, unit, value, p20, p80, n in rows:
        print(f"{metric:<20} {value:8.2f} {unit:<3} (20-80%: {p20:.2f}-{p80:.2f}, n={n})")
    if options.csv:
        with options.csv.open("w", newline="") as file:
            csv.writer(file).writerows([HEADER, *((*row, *measured_with()) for row in rows)])


if __name__ == "__main__":
    main()
