"""Random commands that ask for plans, half of them with a word changed: what other attacks put their questions to."""

import random
from collections.abc import Sequence

from kvplan.models import catalog

GPUS = (
    "l40s", "h100-80g", "a100-80g", "h200", "b200", "mi300x", "rtx-4090", "8xh100-80g", "4xh200", "2xl40s",
    "8xb200", "8xmi300x",
)  # fmt: skip
# (share of the commands that have one, the choices)
FLAGS: tuple[tuple[float, tuple[str, ...]], ...] = (
    (0.8, ("--ctx 1k", "--ctx 4k", "--ctx 8k", "--ctx 32k", "--ctx auto")),
    (0.25, ("--engine sglang", "--engine vllm@0.11", "--engine vllm@0.20", "--engine sglang@0.5")),
    (0.2, ("--kv-cache-dtype fp8",)),
    (0.15, ("--max-num-seqs 64", "--max-num-seqs 8")),
    (0.15, ("--max-num-batched-tokens 4096",)),
    (0.15, ("--gpu-memory-utilization 0.8", "--gpu-memory-utilization 0.95")),
    (0.1, ("--enforce-eager", "--enable-expert-parallel")),
    (0.1, ("--dp 2", "--pp 2")),
    (0.1, ("--no-enable-prefix-caching", "--text-only")),
    (0.1, ("--cpu-offload-gb 4", "--kv-offloading-size 10")),
    (0.08, ("--speculative-method ngram --num-speculative-tokens 3",)),
    (0.08, ("--max-loras 2 --max-lora-rank 16",)),
    (0.1, ("--exit-code",)),
)
LENGTHS = ("--mean-tokens 800", "--lengths uniform:100-900")
HOSTILE = (
    "",
    "nan",
    "inf",
    "-1",
    "1e999",
    "\x1b[31m",
    "--",
    "--x",
    "é" * 50,
    "9" * 400,
    "8,192",
    "None",
    "=",
    "@/etc/passwd",
    "$(id)",
)


def options(rng: random.Random) -> list[str]:
    chosen = [rng.choice(choices) for share, choices in FLAGS if rng.random() < share]
    return [word for choice in chosen for word in choice.split()]


def load(rng: random.Random) -> list[str]:
    """A small load of a simulation."""
    rate = rng.choice(("--rate 2", "--rate inf", "--users 4"))
    prompt, output = rng.choice(("200", "1k", "uniform:50-900")), rng.choice(("10", "60"))
    return ["--prompt-tokens", prompt, "--output-tokens", output, *rate.split(), "--num-requests", "12"]


def drawn(rng: random.Random, models: Sequence[str] = tuple(catalog.model_names())) -> list[str]:
    """A command that is well formed; its model may not fit, and a server may not run it."""
    model, gpu, other = rng.choice(models), rng.choice(GPUS), rng.choice(models)
    (kind,) = rng.choices(
        ("estimate", "sweep", "recommend", "simulate", "diff", "upgrade", "tune", "pack"), (8, 3, 2, 3, 2, 1, 0.6, 1)
    )
    match kind:
        case "estimate":
            lengths = rng.choice(LENGTHS).split() if rng.random() < 0.3 else []
            return [kind, model, "--gpu", gpu, *options(rng), *lengths]
        case "sweep":
            return [kind, model, "--gpu", ",".join(rng.sample(GPUS, 2)), *options(rng)]
        case "recommend":
            alone = gpu.partition("x")[2] if gpu[0].isdigit() else gpu
            return [kind, model, "--gpu", alone, *options(rng), "--users", rng.choice(("4", "40", "300"))]
        case "simulate":
            return [kind, model, "--gpu", gpu, *options(rng), *load(rng)]
        case "diff":
            return [kind, model, other, "--gpu", gpu, *options(rng)]
        case "upgrade":
            return [kind, model, "--gpu", gpu, "--ctx", "4k", "--from", "vllm@0.11", "--to", "vllm@0.33"]
        case "tune":
            fixed = "--slo ttft=2s,tpot=100ms --max-num-seqs 64 --max-num-batched-tokens 8192 --no-fp8"
            return [kind, model, "--gpu", gpu, "--ctx", "4k", *load(rng), *fixed.split()]
        case _:
            return [kind, "--gpu", gpu, "--server", f"{model} --max-model-len 4096", "--server", f"{other} --users 4"]


def mutated(rng: random.Random, words: Sequence[str]) -> list[str]:
    """The command with a word replaced, lost or twice."""
    place = rng.randrange(1, len(words))
    middle = rng.choice(([rng.choice(HOSTILE)], [], [words[place]] * 2))
    return [*words[:place], *middle, *words[place + 1 :]]
