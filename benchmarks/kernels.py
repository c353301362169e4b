"""Kernels beside torch's and other libraries': time, and bytes over time as a share of the device's copy bandwidth.

    python -m benchmarks.kernels OUT [--budget 600] [--device cuda:0] [--kinds decode,latent]

Decode, prefill, writes of KV (alone and after RoPE) and MLA decode, with the shapes first that the goals ask for, then
block sizes, dtypes, window, softcap and sinks, then a grid of 1-256 sequences of 512-131,072 tokens as far as memory
and the budget go. OUT gets kernels.csv, kernels.svg and goals.md; the goals' table is printed.

Each answer is first held against float64: a wrong one has no time. Decode reads every key and value it sees once: their
bytes over its time are held against the measured copy bandwidth; so are a write's bytes. Prefill computes: 4 * head_dim
operations per head and visible pair of tokens, against the measured matrix rate. The peers are torch's attention on
keys and values that lie in one piece, and flashinfer, xformers and flash_attn where they are installed.

With --device cpu the shapes are tiny and the numbers say nothing about a GPU.

Exit codes: 0 done, 1 one of our kernels failed or was wrong, 2 usage, 3 no GPU.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks import goals
from benchmarks.gpu import machine
from benchmarks.gpu_stages.evidence import write_whole
from benchmarks.gpu_stages.runner import Machine, Result, write_rows
from benchmarks.gpu_stages.stage import Task
from benchmarks.kernel_bench.cases import cases
from benchmarks.kernel_bench.figure import draw
from benchmarks.kernel_bench.problems import Case
from benchmarks.kernel_bench.timings import Findings, begin, measure
from kvplan.core.errors import EnvironmentProblem, KvplanError, UsageError

INTERRUPTED, TERMINATED = 130, 143


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("out", type=Path, metavar="OUT", help="folder for the CSV, the figure and the goals")
    own.add_argument("--budget", type=float, default=600, metavar="SECONDS", help="for all of it (%(default)s)")
    own.add_argument("--device", default="cuda:0", help="cuda:N or cpu (%(default)s)")
    own.add_argument("--kinds", metavar="KIND,...", help="of decode, prefill, store, rope+store, latent")
    own.add_argument("--commit", help="of the code, where there is no repository to ask")
    return own


def chosen(every: Sequence[Case], kinds: str | None) -> list[Case]:
    names = {case.kind for case in every} if kinds is None else set(kinds.split(","))
    unknown = sorted(names - {case.kind for case in every})
    if unknown:
        raise UsageError(f"--kinds: {unknown[0]!r} is none; there are decode, prefill, store, rope+store and latent")
    return [case for case in every if case.kind in names]


def run(options: argparse.Namespace, started_s: float) -> int:
    if not options.budget > 0:
        raise UsageError(f"--budget: must be above 0 ({options.budget:g})")
    device = _device(options.device)
    chosen_cases = chosen(cases(device), options.kinds)
    where = machine(options.device, options.commit)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentProblem(f"{options.out}: cannot be made ({error.strerror}); name another folder") from error
    findings = begin(device)
    try:
        measure(Task(options.out, device, options), chosen_cases, started_s + options.budget, findings)
    finally:  # Ctrl-C, SIGTERM: what is known is kept
        keep(options.out, findings, where)
    return int(bool(findings.failures))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device: {name!r} is none; use cuda:N or cpu") from error
    if device.type not in ("cuda", "cpu"):
        raise UsageError(f"--device: {name!r} is neither a CUDA device nor cpu; use cuda:N or cpu")
    return device


def keep(out: Path, findings: Findings, where: Machine) -> None:
    """Write the CSV, the figure and the goals, and print the goals."""
    utc = datetime.now(UTC).isoformat(timespec="seconds")
    rows = [asdict(line) for line in findings.rows]
    write_rows(out / "kernels.csv", Result("kernels", "", "ok", rows=rows, commit=where.commit, utc=utc), where)
    if not draw(out / "kernels.svg", findings.timings, findings.rates, where.device):
        print("kernels.svg: matplotlib is not installed; the CSV holds the numbers", file=sys.stderr)
    on_gpu = where.device != "cpu"
    table = goals.table(findings.numbers["goals"] if on_gpu else {}, where.device if on_gpu else None)
    write_whole(out / "goals.md", f"{table}\n".encode())
    print(f"\n{findings.headline}\n\n{table}")
    if not on_gpu:
        print("these are a CPU's times: they try the script and say nothing about a GPU", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    started_s = time.monotonic()
    try:
        return run(parser().parse_args(argv), started_s)
    except KvplanError as error:
        print(f"kernels.py: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    sys.exit(main())
