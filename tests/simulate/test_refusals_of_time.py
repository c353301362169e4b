"""What a simulation does not model is refused by name, in every command that simulates: no time without its cost."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run, refused, run

__all__ = ["run"]  # a fixture
LOAD = ("--rate", "2", "--prompt-tokens", "2k", "--output-tokens", "256", "--num-requests", "20")
SGLANG = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --context-length 16384"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("command", ["simulate", "recommend"])
def test_weights_on_the_host_have_no_step_time(run: Run, command: str, engine: str) -> None:
    where = ("--gpu", "h100-80g") if command == "simulate" else ("--gpus", "h100-80g", "--slo", "ttft=2s")
    words = (*where, "--ctx", "16k", "--engine", engine, "--cpu-offload-gb", "4", *LOAD)
    assert "--cpu-offload-gb cannot be simulated" in refused(run(command, "llama-3.1-8b", *words))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--engine", "sglang@0.4"), "other releases' were not compared"),
        (("--speculative-method", "ngram", "--num-speculative-tokens", "3"), "takes a stated acceptance"),
    ],
)
def test_what_no_placement_could_answer_is_no_answer(run: Run, more: tuple[str, ...], message: str) -> None:
    words = ("recommend", "llama-3.1-8b", "--ctx", "16k", "--gpus", "h100-80g", "--slo", "ttft=2s", *LOAD)
    assert message in refused(run(*words, *more))


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [("--enable-mixed-chunk", True), ("--schedule-policy lof", True), ("--schedule-policy fcfs", False)],
)
def test_flags_that_change_the_order_are_refused_but_for_their_default(run: Run, flags: str, is_refused: bool) -> None:
    ran = run("simulate", "--from-command", f"{SGLANG} {flags}", "--gpu", "h100-80g", *LOAD)
    assert ran.code == (2 if is_refused else 0), ran.err
    words = ("--from-command", f"{SGLANG} {flags}", "--gpus", "h100-80g", "--slo", "ttft=2s", *LOAD)
    if is_refused:
        ran = run("recommend", *words)
        assert (ran.code, "changes the scheduling order" in ran.err) == (2, True)


def test_ranks_of_dp_attention_lie_within_the_tensor_ranks(run: Run) -> None:
    command = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 --enable-dp-attention"
    ran = run("estimate", "--from-command", command, "--gpu", "8xh200", "--ctx", "16k", "--format", "json")
    assert ran.code == 0, ran.err
    assert EngineArgs(tensor_parallel_size=8, data_parallel_size=8, enable_dp_attention=True).num_gpus == 8


def test_a_policy_of_a_server_that_keeps_memory_back_is_one_it_keeps(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    words = shlex.split("check --init llama-3.1-8b --engine sglang --gpu l40s --ctx 16k")
    assert run(*words, "-o", path).code == 0
    (target,) = yaml.safe_load(path.read_text())["targets"]
    assert "min_headroom" not in target["rules"]
    assert run("check", path).code == 0


def test_data_parallel_ranks_that_share_nothing_are_the_replicas_that_they_are(run: Run) -> None:
    words = ("simulate", "llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "16k", "--format", "json", *LOAD)
    ranks = json.loads(run(*words, "--data-parallel-size", "4").out)
    servers = json.loads(run(*words, "--replicas", "4", "--router", "least-loaded").out)
    assert ranks["fleet"] == servers["fleet"]


def test_ranks_that_share_experts_take_the_time_of_their_exchange(run: Run) -> None:
    words = ("simulate", "deepseek-v2-lite", "--gpu", "h200", "--ctx", "4k", *LOAD)
    ran = run(*words, "--data-parallel-size", "2", "--enable-expert-parallel")
    assert ran.code == 0, ran.err
    assert "experts shared with 1 rank as busy as this one" in ran.out
    assert "exchange of tokens as all-reduces)" in ran.out  # borrowed
    assert "--film supports only one server" in refused(run(*words, "--data-parallel-size", "2", "--film", "x.html"))
    scaled = run(*words, "--data-parallel-size", "2", "--autoscale", "max=4,target=8")
    assert "--autoscale scales whole servers" in refused(scaled)


def test_ranks_that_share_experts_are_said_to_be_left_out(run: Run) -> None:
    words = ("recommend", "--ctx", "4k", "--gpus", "h200", "--slo", "ttft=20s", "--no-fp8", *LOAD)
    assert "Not tried: data-parallel ranks that share experts" in run(*words, "deepseek-v2-lite").out
    assert "Not tried: data-parallel ranks" not in run(*words, "deepseek-v2-lite", "--tp", "1").out
    assert "Not tried: data-parallel ranks" not in run(*words, "llama-3.1-8b").out
