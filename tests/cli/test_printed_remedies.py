"""Remedies as they are printed, run: none fails the way that the command did which it is for."""

import re
import shlex
from pathlib import Path

import pytest

from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.parts import some
from tests.support.remedies import CASES, LLAMA, PRICES, Case

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


LONG = re.compile("(tune|models|explore) |.* --jobs ")
SHORT_RUNS = [case for case in CASES if not LONG.match(case.command)]


@pytest.mark.parametrize("case", some(CASES, SHORT_RUNS), ids=lambda case: case.command)
def test_a_printed_remedy_works(
    run: Run, case: Case, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("remedy"))
    Path("prices.yaml").write_text(PRICES, "utf-8")
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
    "estimate llama-3.1-70b --gpu a100-80g --ctx 32k",
    "estimate Qwen/Qwen3-8B --gpu rtx-4090",
    "estimate qwen3-32b --gpu 2xrtx-3090 --engine sglang",
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
    "estimate llama-3.1-70b --gpu a100-40g --ctx 8k",
    "estimate llama-3.1-70b --gpu 1xl40s --ctx 32k --engine sglang",
    "estimate qwen3-32b --gpu rtx-4090 --ctx 32k",
    "estimate qwen3-14b --gpu rtx-3060 --ctx 8k",
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


def test_a_quantized_checkpoint_saves_gpus_where_it_is_not_enough_alone(run: Run) -> None:
    # On the Hub the AWQ checkpoint has 39.77 GB of weights, the original 141.1 GB; 0.92 of 42.3 GB are 38.9 GB.
    words = ("estimate", "llama-3.1-70b", "--gpu", "a100-40g", "--ctx", "8k", "-q", "--format", "json")
    fixes = run(*words).json["fixes"]
    assert fixes[0]["flag"] == "--quantization awq --tensor-parallel-size 2"
    assert fixes[0]["model"] == "llama-3.1-70b-awq"
    assert min(fix["num_gpus"] for fix in fixes if (fix["gpu"], fix["model"]) == ("a100-40g", "llama-3.1-70b")) > 3
