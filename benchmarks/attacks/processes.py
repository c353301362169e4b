"""Processes that `kvplan check --init --from-pid` reads: servers as they are started, and command lines that attack.

    python -m benchmarks.attacks.processes [--count 100] [--seed 5]

Each process is stopped at its start with the command line under test, and runs nothing of it. A valid one breaks when
it is refused, or when `check` refuses the policy written from it; a hostile one, when its policy has another number of
targets than one, or a secret; any, when it ends in a traceback. Needs Linux.
"""

import argparse
import ctypes
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from benchmarks.attacks.outcomes import Outcome, Tally, command

SERVE = ("vllm", "serve", "Qwen/Qwen3-0.6B")
SECRET = "hf_topsecret"
MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-8B-Instruct", "openai/gpt-oss-20b")
SETTINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "vllm": (
        ("--max-model-len", "4096"), ("--max-model-len=16k",), ("-tp", "2"), ("--gpu-memory-utilization", "0.85"),
        ("--kv-cache-dtype", "fp8"), ("--max-num-seqs", "64"), ("--enforce-eager",), ("--api-key", SECRET),
        ("--served-model-name", "a", "b"), ("--no-enable-prefix-caching",), ("--port", "8001"),
        ("--max-log-len", "100"),
    ),
    "sglang": (
        ("--context-length", "4096"), ("--tp", "2"), ("--mem-fraction-static", "0.8"), ("--page-size", "16"),
        ("--kv-cache-dtype", "fp8_e5m2"), ("--disable-radix-cache",), ("--api-key", SECRET), ("--port", "30001"),
    ),
}  # fmt: skip
WORDS = (
    ("--served-model-name", "x\ntargets: []\nrules: {}"), ("--max-model-len", "4096\n  rules: {}"),
    ("--dtype", "\x1b[31mred"), ("--served-model-name", "$(touch ran)"), ("--served-model-name", "`touch ran`"),
    ("--config", "/etc/passwd"), ("--config", "/dev/zero"), ("--api-key", SECRET, "--hf-token", SECRET),
    ("--served-model-name", *["a" * 1000] * 100), ("--served-model-name", "b" * 130_000),
    ("--served-model-name", *["a"] * 30_000), ("", "", "--max-model-len", "4096"),
    ("--speculative-config", "[" * 5000), ("--hf-overrides", '{"a":' * 5000),
    ("--enable-lora", "--lora-modules", "x=../../y"),
    ("--served-model-name", "a # b: c"), ("--served-model-name", "\u0085\u2028x"), ("--max-model-len", "9" * 5000),
    ("--served-model-name", "!!python/object/apply:os.system [touch ran]"), ("--served-model-name", "&a [*a,*a]"),
    ("--load-format", "&a"), ("--model", "Qwen/Qwen3-32B"), ("--", "--max-model-len", "4096"), ("@/etc/passwd",),
)  # fmt: skip
COMMANDS = (
    ("vllm", "serve", "../../../../etc/passwd"), ("vllm", "serve", "/etc"), ("vllm",), ("vllm", "serve"), ("", ""),
    ("vllm", "serve", "Qwen/Qwen3-0.6B\n"), ("sh", "-c", "vllm serve Qwen/Qwen3-0.6B; touch ran"),
    ("VLLM::EngineCore",), ("vllm", "bench", "serve"), ("vllm", "serve", "--", "-x"),
    ("python", "-m", "vllm.entrypoints.openai.api_server", "--model"),
)  # fmt: skip
IDS = (
    "0", "-1", "99999999", "4194304", "self", "1/../2", "２", "1 2", "0x1", "9" * 24, "1", "../1", "1\n2",
    "\x1b[31m", "",
)  # fmt: skip


def valid(rng: random.Random) -> list[str]:
    """A server's command line, as its start script leaves it."""
    server, model = rng.choice(tuple(SETTINGS)), rng.choice(MODELS)
    starts = {
        "vllm": (["vllm", "serve", model], ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", model]),
        "sglang": (["python3", "-m", "sglang.launch_server", "--model-path", model],),
    }
    return [
        *rng.choice(starts[server]),
        *(word for words in rng.sample(SETTINGS[server], rng.randint(0, 4)) for word in words),
    ]


@contextmanager
def stopped(words: Sequence[str], environment: dict[str, str]) -> Iterator[int]:
    """The id of a process with this command line, which the kernel stops before its first instruction (ptrace(2))."""
    traced = ctypes.CDLL(None).ptrace
    process = subprocess.Popen(
        [os.fsencode(word) for word in words],
        executable="/bin/true",
        env=environment,
        preexec_fn=lambda: traced(0, 0, None, None),  # PTRACE_TRACEME
    )
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def policy_of(pid: str, path: Path) -> Outcome:
    path.unlink(missing_ok=True)
    return command("check", "--init", "--gpu", "h200", "--from-pid", pid, "-o", str(path))


def fault_of(path: Path) -> str | None:
    """What is wrong with a policy that was written."""
    text = path.read_text(encoding="utf-8")
    if SECRET in text:
        return "a secret is in the policy"
    targets = yaml.safe_load(text)["targets"]
    if len(targets) != 1:
        return f"{len(targets)} targets in the policy"
    checked = command("check", str(path))
    return checked.fault() or (f"check: {checked.err[-300:]}" if checked.is_refused else None)


def hostile() -> list[tuple[list[str], str]]:
    """(command line, what --from-pid names; empty: the process that has it)."""
    lines = [[*SERVE, *words] for words in WORDS] + [list(words) for words in COMMANDS]
    return [(line, "") for line in lines] + [(list(SERVE), pid) for pid in IDS]


def attack(count: int, seed: int) -> Tally:
    """Every second command line is valid; the hostile ones are in random order."""
    rng, tally = random.Random(seed), Tally()
    attacks = hostile()
    rng.shuffle(attacks)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.yaml"
        for number in range(count):
            words, named = attacks[number // 2 % len(attacks)] if number % 2 else (valid(rng), "")
            with stopped(words, {"HF_TOKEN": SECRET, "VLLM_USE_V1": "1"}) as pid:
                outcome = policy_of(named or str(pid), path)
            problem = fault_of(path) if path.exists() else None
            tally.judge("hostile" if number % 2 else "valid", repr((words, named))[:200], outcome, problem)
    if Path("ran").exists():
        tally.broken.append("a command of a process ran")
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2 * len(hostile()))
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args(argv)
    return attack(options.count, options.seed).closing()


if __name__ == "__main__":
    sys.exit(main())
