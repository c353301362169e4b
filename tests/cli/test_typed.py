"""Errors name options as they are on the command line, and several wrong values are told at once.

The words come from the command lines themselves: each message begins with a piece of the line that it is about.
"""

from pathlib import Path

import pytest

from kvplan.cli.serve_options import ServeOptions
from kvplan.cli.typed import option_words
from tests.support.cli import Ran, Run
from tests.support.cli import run as run  # the fixture

FIT = ("estimate", "--gpu", "l40s", "-q")
LLAMA = (*FIT, "llama-3.1-8b")  # 32 attention heads, 32 layers, 131,072 tokens


def errors(ran: Ran) -> list[str]:
    assert ran.code == 2
    return [line.removeprefix("kvplan: error: ") for line in ran.errors]


@pytest.mark.parametrize(
    ("words", "start"),
    [
        ((*LLAMA, "--tp", "3"), "--tp 3 does not divide the 32"),
        ((*LLAMA, "--tensor-parallel-size=3"), "--tensor-parallel-size 3 does not divide the 32"),
        ((*LLAMA, "--pp", "40"), "--pp 40: llama-3.1-8b has only 32 layers"),
        ((*LLAMA, "--dcp", "3"), "--dcp 3 must divide --tp 1"),
        ((*LLAMA, "--ctx", "1m"), "--ctx 1,048,576: llama-3.1-8b supports up to 131,072"),
        ((*LLAMA, "--max-model-len", "1m"), "--max-model-len 1,048,576: llama-3.1-8b supports"),
        ((*LLAMA, "--max-model-len", "5z"), "--max-model-len: not a token count ('5z')"),
        ((*LLAMA, "--engine", "sglang", "--ctx", "1m"), "--ctx 1,048,576: llama-3.1-8b supports"),
        ((*LLAMA, "--engine-arg", "tp=3"), "--engine-arg tp 3 does not divide the 32"),
        ((*LLAMA, "--max-num-seqs", "3000", "--max-num-batched-tokens", "2048"),
         "--max-num-seqs 3,000 is more than --max-num-batched-tokens, 2,048"),
        ((*FIT, "--from-command", "vllm serve llama-3.1-8b -tp 3"), "--from-command -tp 3 does not divide the 32"),
        ((*FIT, "--from-command", "vllm serve llama-3.1-8b --tensor-parallel-size=3"),
         "--from-command --tensor-parallel-size 3 does not divide the 32"),
        ((*FIT, "--from-command", "python -m sglang.launch_server --model-path llama-3.1-8b --context-length 200000"),
         "--from-command --context-length 200,000: llama-3.1-8b supports up to 131,072"),
        ((*FIT, "--from-command", "LLM(model='llama-3.1-8b', tensor_parallel_size=3)"),
         "--from-command tensor_parallel_size 3 does not divide the 32"),
        (("estimate", "llama-3.1-8b", "--gpu", "3xl40s", "-q"), "--gpu 3xl40s: --tp 3 does not divide the 32"),
        (("upgrade", "vllm serve llama-3.1-8b --max-num-seqs x", "--gpu", "l40s", "--from", "vllm@0.24"),
         "SERVER --max-num-seqs: not a whole number ('x')"),
        (("sweep", "llama-3.1-8b", "--gpu", "l40s", "--tp", "1,3"), "--tp 3 does not divide the 32"),
    ],
)  # fmt: skip
def test_an_error_of_a_plan_names_the_option_that_was_typed(run: Run, words: tuple[str, ...], start: str) -> None:
    assert errors(run(*words))[0].startswith(start)


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        (
            (*FIT, "--from-command", "vllm serve llama-3.1-8b -tp x --max-modell-len 5 --gpu-memory-utilization 2"),
            ["--from-command -tp: ", "--from-command --max-modell-len ", "--from-command --gpu-memory-utilization "],
        ),
        (
            (*FIT, "--from-command",
             "sglang serve --model-path llama-3.1-8b --tp x --max-model-len 5 --context-length -4"),
            ["--from-command --tp ", "--from-command --max-model-len ", "--from-command --context-length "],
        ),
        ((*LLAMA, "--gpu-memory-utilisation", "0.9", "--max-modl-len=3"), ["--gpu-memory-utilisation: ", "--max-mod"]),
        (
            (*FIT[:1], "nosuch", "--gpu", "foo", "--from-command", "vllm serve m --max-num-seqs x"),
            ["--from-command --max-num-seqs: ", "model 'nosuch'", "gpu 'foo'"],
        ),
        (
            ("upgrade", "llama-3.1-8b", "--gpu", "l40s", "--from", "vllm@0.1", "--to", "vllm@9"),
            ["--from vllm@0.1: ", "--to 'vllm@9' "],
        ),
        (
            ("tune", "llama-3.1-8b", "--gpu", "l40s", "--slo", "foo=2s,tpot=xx"),
            ["workload: missing", "--slo: unknown metric 'foo'", "--slo tpot: not a duration ('xx')"],
        ),
    ],
)  # fmt: skip
def test_several_wrong_values_are_told_at_once(run: Run, words: tuple[str, ...], starts: list[str]) -> None:
    lines = errors(run(*words))
    assert len(lines) == len(starts), lines
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True)), lines


def test_why_tells_all_wrong_values(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "INFO 08-01 10:00:00 [api_server.py:1711] vLLM API server version 0.10.0\n"
        "INFO 08-01 10:00:00 [utils.py:326] non-default args: {'model': 'llama-3.1-8b'}\n"
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.\n",
        encoding="utf-8",
    )
    assert [line.partition(":")[0] for line in errors(run("why", str(log), "--gpu", "foo", "--model", "bar"))] == [
        "gpu 'foo'", "model 'bar'",
    ]  # fmt: skip


POLICY = """version: 2
defaults: {gpu: l40s, tp: 2}
targets:
- id: a
  max_model_len: 5z
  max_num_seqs: 0
  rules: {fits: maybe, min_user: 4}
severity: {fits: bad}
waivers: [{rule: nope, reason: x, expires: 2027-01-01}]
"""
TARGETS = """version: 1
defaults: {gpu: l40s}
targets:
- id: a
  command: vllm serve llama-3.1-8b --tensor-parallel-size 3 --max-model-len 8k
- id: b
  model: nosuch
  gpu: foo
- id: c
  command: vllm serve llama-3.1-8b --max-num-seqs x --max-model-len y
"""


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        (POLICY, ["1:10: version is '2'", "2:23: defaults has no key 'tp'", "5:18: target a: max_model_len: not",
                  "6:17: target a: max_num_seqs must be at least 1", "7:17: target a: fits is 'maybe'",
                  "7:24: target a: rules has no key 'min_user'", "8:18: severity: fits is 'bad'",
                  "9:18: waiver: rule is 'nope'"]),
        (TARGETS, ["5:12: target a: --tensor-parallel-size 3 does not divide", "7:10: target b: model 'nosuch'",
                   "8:8: target b: gpu 'foo'", "10:12: target c: command: --max-num-seqs: not a whole",
                   "10:12: target c: command: --max-model-len is not a number"]),
    ],
    ids=["the file", "its targets"],
)  # fmt: skip
def test_check_tells_all_that_is_wrong_with_a_policy(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, starts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(text, encoding="utf-8")
    lines = [line.removeprefix("p.yaml:") for line in errors(run("check", "p.yaml"))]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    annotated = run("check", "p.yaml", "--format", "github").out.splitlines()
    assert len(annotated) == len(starts)


def test_a_setting_is_named_by_its_option_as_typed() -> None:
    words = option_words(ServeOptions, ["m", "--ctx", "8k", "--no-enable-lora"])
    assert (words["max_model_len"], words["device"]) == ("--ctx", "--device")
    assert words["no_enable_lora"] == "--no-enable-lora"
    assert "model" not in words  # an argument has no name
