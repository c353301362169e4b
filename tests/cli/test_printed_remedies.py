"""Remedies as they are printed, run: none fails the way that the command did which it is for."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.parts import some

LLAMA = "llama-3.1-8b --gpu h100-80g"
LOAD = "--prompt-tokens 300 --output-tokens 20 --num-requests 10 --rate 2"
SIMULATE = f"simulate {LLAMA} --ctx 8k {LOAD}"


class Case(NamedTuple):
    """A command that fails, its printed remedy, and the options that follow each part of it: "-" removes one."""

    command: str
    remedy: str
    options: tuple[str, ...]


CASES = [
    # numbers and forms
    Case(
        f"estimate {LLAMA} --ctx 8,192",
        "write 8192; for several, put a space after each comma: '8, 192'",
        ("--ctx 8192", "--ctx '8, 192'"),
    ),
    Case(f"simulate {LLAMA} --ctx 8,192 {LOAD}", "write 8192", ("--ctx 8192",)),
    Case(f"upgrade {LLAMA} --ctx 8,192 --from vllm@0.20", "write 8192", ("--ctx 8192",)),
    Case(f"recommend {LLAMA} --ctx 8,192 --users 10", "write 8192", ("--ctx 8192",)),
    Case(
        f"estimate {LLAMA} --ctx lots",
        "write a number such as 32768, 32k (32,768) or 1M (1,048,576), or auto (or -1) for the longest that fits",
        ("--ctx 32768", "--ctx 32k", "--ctx auto", "--ctx -1"),
    ),
    Case(f"estimate {LLAMA} --ctx 200k", "lower it", ("--ctx 128k",)),
    Case(f"estimate {LLAMA} --tp 3", "use a divisor", ("--tp 2",)),
    Case(f"estimate {LLAMA} --tp 0", "write a whole number from 1 to 1,024", ("--tp 1",)),
    Case(
        f"estimate {LLAMA} --block-size 17",
        "use 16, 32, 64 or 128",
        tuple(f"--block-size {n}" for n in (16, 32, 64, 128)),
    ),
    Case(
        f"estimate {LLAMA} --gpu-memory 80",
        "write the unit, for example 24GiB",
        ("--gpu-memory 24GiB", "--gpu-memory 80GiB"),
    ),
    Case(
        f"estimate {LLAMA} --gpu-memory 80Gb",
        "write a size such as 24GiB, 512MiB, 80GB or 25769803776 (bytes)",
        ("--gpu-memory 24GiB", "--gpu-memory 80GB", "--gpu-memory 25769803776"),
    ),
    Case(
        f"estimate {LLAMA} --gpu-memory-utilization 92",
        "write a fraction or a percentage, such as 0.92 or 92%",
        ("--gpu-memory-utilization 0.92", "--gpu-memory-utilization 92%"),
    ),
    Case(f"estimate {LLAMA} --mean-tokens 200k", "lower it", ("--mean-tokens 100k",)),
    Case(
        f"estimate {LLAMA} --ctx 8k --mean-tokens 100k", "lower it, or raise --ctx", ("--mean-tokens 8k", "--ctx 128k")
    ),
    Case(
        f"estimate {LLAMA} --engine-arg max_num_seqs",
        "write key=value, for example block_size=32",
        ("--engine-arg block_size=32", "--engine-arg max_num_seqs=8"),
    ),
    Case(f"simulate {LLAMA} --ctx 8k,16k {LOAD}", "name one --gpu and one --ctx", ("--ctx 16k",)),
    Case(
        f"{SIMULATE} --slo ttft=x",
        "write a number with ms, s, m or h: 250ms, 1s, 2m",
        ("--slo ttft=250ms", "--slo ttft=1s", "--slo ttft=2m"),
    ),
    # names
    Case("estimate llama-3.1-9b --gpu h100-80g", "did you mean llama-3.1-8b, llama-3.1-70b, llama-3.1-405b?", ()),
    Case(
        f"estimate {LLAMA} --engine vllm@0.99", "use one of these releases", ("--engine vllm@0.6", "--engine vllm@0.33")
    ),
    Case(
        f"estimate {LLAMA} --engine sglang@9",
        "write sglang@0.5 or sglang@0.4.3",
        ("--engine sglang@0.5", "--engine sglang@0.4.3"),
    ),
    Case(
        f"estimate {LLAMA} --engine tgi",
        "use vllm, vllm@VERSION or sglang",
        ("--engine vllm", "--engine vllm@0.33", "--engine sglang"),
    ),
    Case(
        f"estimate {LLAMA} --dtype int8",
        "use auto, bfloat16, float16, float32",
        ("--dtype auto", "--dtype bfloat16", "--dtype float16", "--dtype float32"),
    ),
    Case(
        f"estimate {LLAMA} --engine sglang --kv-cache-dtype nvfp4",
        "use auto, bfloat16, bf16, float16, fp8, fp8_e4m3, fp8_e5m2",
        tuple(
            f"--kv-cache-dtype {name}"
            for name in ("auto", "bfloat16", "bf16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
        ),
    ),
    Case("gpus nosuch", "`kvplan gpus` lists the known ones", ("gpus",)),
    Case("models nosuch", "`kvplan models` lists the known ones", ("models",)),
    # options that go together
    Case(
        f"estimate {LLAMA} --engine sglang --gpu-memory-utilization 0.9",
        "give that",
        ("-gpu-memory-utilization --mem-fraction-static 0.9",),
    ),
    Case(
        f"estimate {LLAMA} --engine sglang --kv-cache-memory-bytes 8GiB",
        "--engine-arg max_total_tokens=N sets its pool",
        ("-kv-cache-memory-bytes --engine-arg max_total_tokens=200000",),
    ),
    Case(
        "estimate qwen3-8b --gpu h100-80g --engine sglang --tp 2 --engine-arg enable_dp_attention=true",
        "change --dp-size",
        ("--dp 2",),
    ),
    Case(
        f"estimate {LLAMA} --num-speculative-tokens 3",
        "add --draft-model or --speculative-method",
        ("--draft-model llama-3.2-1b", "--speculative-method ngram"),
    ),
    # simulations
    Case(
        f"simulate {LLAMA} --ctx 8k --rate 2",
        "give one of --trace, --profile, --prompt-tokens",
        ("--profile sharegpt", "--prompt-tokens 300 --output-tokens 20"),
    ),
    Case(f"{SIMULATE} --engine sglang@0.5.9", "use --engine sglang@0.5.23", ("--engine sglang@0.5.23",)),
    Case(
        f"{SIMULATE} --engine sglang --tier host=4GiB@20GB/s",
        "use --engine vllm, or remove it",
        ("--engine vllm", "-tier"),
    ),
    Case(
        f"{SIMULATE} --engine sglang --baseline contiguous",
        "use --engine vllm, or remove it",
        ("--engine vllm", "-baseline"),
    ),
    Case(f"{SIMULATE} --engine sglang --film film.html", "use --engine vllm", ("--engine vllm",)),
    Case(
        f"simulate gemma-3-4b --gpu h100-80g --ctx 8k {LOAD} --engine sglang", "use --engine vllm", ("--engine vllm",)
    ),
    Case(
        f"simulate qwen3-vl-8b --gpu h100-80g --ctx 8k {LOAD} --engine sglang",
        "use --engine vllm, or another GPU",
        ("--engine vllm", "--gpu b200", "--gpu a100-80g"),
    ),
    Case(f"{SIMULATE} --engine sglang --enable-hierarchical-cache", "remove it", ("-enable-hierarchical-cache",)),
    Case(f"{SIMULATE} --pp 2", "use --tp", ("-pp --tp 2",)),
    Case(
        f"{SIMULATE} --dp 2",
        "replace it with --replicas 2 --router least-loaded: each rank is a replica",
        ("-dp --replicas 2 --router least-loaded",),
    ),
    Case(
        f"{SIMULATE} --cpu-offload-gb 2",
        "remove it: the time to fetch weights from the host is not modeled",
        ("-cpu-offload-gb",),
    ),
    Case(
        f"simulate bge-m3 --gpu h100-80g --ctx 8k {LOAD}",
        "`kvplan estimate` sizes it",
        ("estimate bge-m3 --gpu h100-80g --ctx 8k",),
    ),
    Case(
        f"simulate llama-3.1-70b --gpu h100-80g --ctx 8k {LOAD}",
        "see what would fit with `kvplan estimate`",
        ("estimate llama-3.1-70b --gpu h100-80g --ctx 8k",),
    ),
    Case(
        f"simulate {LLAMA} --ctx 8k --prompt-tokens 300 --output-tokens 20 --num-requests 10",
        "add --rate N or --users N",
        ("--rate 2", "--users 4"),
    ),
    Case(f"tune {LLAMA} --ctx 8k {LOAD}", "add --slo ttft.p90=2s,tpot=50ms", ("--slo ttft.p90=2s,tpot=50ms",)),
    Case(f"recommend {LLAMA} --ctx 8k", "add the number of concurrent users, e.g. --users 200", ("--users 200",)),
]


SHORT_NAMES = {"--max-model-len": "--ctx", "--tensor-parallel-size": "--tp"}


def followed(command: str, options: str) -> list[str]:
    """The command with options set or removed ("-name" removes one); or another command."""
    words, changes = shlex.split(command), shlex.split(options)
    if not changes[0].startswith("-"):
        return changes
    while changes:
        name = changes.pop(0)
        flag = name if name.startswith("--") else f"-{name}"
        for stated in {flag, SHORT_NAMES.get(flag, flag)} & {*words}:
            start = words.index(stated)
            has_value = len(words) > start + 1 and not words[start + 1].startswith("--")
            del words[start : start + 1 + has_value]
        if name.startswith("--"):
            words += [flag, *([changes.pop(0)] if changes and not re.match("--?[a-z]", changes[0]) else [])]
    return words


SHORT_RUNS = [case for case in CASES if not case.command.startswith(("tune", "models"))]


@pytest.mark.parametrize("case", some(CASES, SHORT_RUNS), ids=lambda case: case.command)
def test_a_printed_remedy_works(
    run: Run, case: Case, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("remedy"))
    ran = run(*shlex.split(case.command))
    (line,) = ran.errors
    assert (ran.code, line.endswith(f"; {case.remedy}")) == (2, True), line
    for options in case.options:
        words = followed(case.command, options)
        assert run(*words).code == 0, words


def test_servers_of_two_kinds_are_compared_by_the_named_command(run: Run, tmp_path: Path) -> None:
    (line,) = run(*f"upgrade {LLAMA} --ctx 8k --from vllm@0.20 --to sglang".split()).errors
    assert line.endswith("; `kvplan diff` compares those")
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    for file, engine in zip(files, ("vllm@0.20", "sglang"), strict=True):
        file.write_text(run(*f"estimate {LLAMA} --ctx 8k --format json --engine {engine}".split()).out, "utf-8")
    assert run("diff", *files).code == 0


# --- what would make it fit -------------------------------------------------------------------------------------------

SHORT = [
    "estimate llama-3.2-3b --gpu-memory 16GB",
    "estimate llama-3.1-70b --gpu-memory 16GB --tp 2",
    "estimate llama-3.1-8b --gpu l4 --ctx 64k",
    "estimate llama-3.1-70b --gpu h100-80g --ctx 8k",
    "estimate llama-3.1-70b --gpu h100-80g --gpu-memory 70GiB --ctx 8k",
    "estimate llama-3.1-70b --gpu h100-80g --tp 2 --engine sglang",
    "estimate gemma-3-27b --gpu a100-40g --ctx 32k --engine vllm@0.10",
    "estimate qwen3-30b-a3b --gpu l40s --ctx 16k",
    "estimate llama-3.1-8b --gpu h100-80g --num-gpu-blocks-override 100",
    "estimate llama-3.1-8b --gpu h100-80g --kv-cache-memory-bytes 1GiB",
    "estimate qwen3-8b --gpu a10g --engine sglang --ctx 40k",
    "estimate llama-3.1-70b --gpu 2xl40s --ctx 8k",
    "estimate llama-3.1-70b --gpu 2xl40s --tp 2 --ctx 8k",
    "estimate llama-3.1-70b --gpu 4xl40s --pp 2 --ctx 128k",
    "estimate llama-3.1-70b --gpu 4xl40s --dp 2 --ctx 8k",
    "estimate llama-3.1-70b --gpu 2xl40s --gpu-memory 40GiB --ctx 8k",
    "estimate llama-3.1-70b --gpu 1xh100-80g --ctx 8k --engine sglang",
    "estimate deepseek-v3 --gpu 8xl40s --dp 8 --tp 8 --engine-arg enable_dp_attention=true --engine sglang --ctx 8k",
]
FIX = re.compile(r"  (--.+?)  +[\d,]+ (?:to [\d,]+ )?users? at")


@pytest.mark.parametrize("command", SHORT)
def test_what_would_make_it_fit_does(run: Run, command: str) -> None:
    wide = run(*command.split(), "-q", "--format", "markdown")
    fixes = re.findall(r"^- `(--.+)`: (.+)$", wide.out, re.MULTILINE)
    assert fixes, wide
    assert len(fixes) == len(re.findall(FIX, run(*command.split(), "-q").out))
    for flags, text in fixes:
        without = re.findall(r" without -(-[\w-]+)", text)
        answer = run(*followed(command, " ".join([*without, flags])), "-q", "--format", "json").json
        assert answer["fits"], flags
        assert f"{answer['concurrency']['users']:,} user" in text
