"""Rollout engines of frameworks that train: what is read of their settings, and their memory in turn with a trainer.

Settings and their meaning are the frameworks' own code's, named in facts/rollouts.jsonl; what sleeping servers still
held was posted by their users (facts/asleep.jsonl).
"""

import json
from pathlib import Path
from typing import Any

import pytest

import kvplan
from kvplan.asked.pasted import parse, read_command
from kvplan.core.errors import KvplanError, UsageError
from kvplan.core.units import GIB
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FACTS = Path(__file__).parents[1] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "rollouts.jsonl").read_text().splitlines()]
ASLEEP = [json.loads(line) for line in (FACTS / "asleep.jsonl").read_text().splitlines()]
VERL = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct "
    "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6 "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.actor.optim.lr=1e-6 "
    "actor_rollout_ref.rollout.n=5"
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['framework']} {row['source'][:40]}")
def test_settings_are_the_engines_arguments(row: dict[str, Any]) -> None:
    command = parse(row["text"])
    assert (command.engine, command.model) == (row["engine"], row["model"])
    assert row["args"].items() <= command.args.items()
    assert (command.colocated and command.colocated.level) == row["level"]


def test_every_setting_is_named_in_a_note() -> None:
    texts = " ".join(note.text for note in parse(VERL).notes)
    for name in (
        "model.path",
        "rollout.gpu_memory_utilization",
        "max_num_seqs 256",
        "ignored:",
        "1 of actor_rollout_ref.actor.optim",
    ):
        assert name in texts


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("GRPOConfig(use_vllm=True, vllm_mode='server')", "vllm_mode is server"),
        ("GRPOConfig(use_vllm=False)", "without vLLM"),
        ("GRPOConfig(use_vllm=True", "no whole call"),
        (f"{VERL} actor_rollout_ref.rollout.name=hf", "'hf' is not sized"),
        ("FastLanguageModel.from_pretrained('m', fast_inference=True", "no whole call"),
        ("policy.model_name=m policy.generation.backend=megatron", "'megatron' is not sized"),
        ("python3 -m openrlhf.cli.train_ppo_ray --vllm_num_engines 2 --colocate_all_models", "name no model"),
        (f"{VERL} actor_rollout_ref.rollout.gpu_memory_utilization=$SHARE", "no value in the text for $SHARE"),
        (f"{VERL} actor_rollout_ref.rollout.expert_parallel_size=many", "is not a whole number"),
    ],
)
def test_what_cannot_be_sized_is_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem.replace("$", r"\$")):
        read_command(text)


def test_an_option_states_what_the_text_leaves_open() -> None:
    text = f"{VERL} actor_rollout_ref.rollout.gpu_memory_utilization=$SHARE"
    answer = kvplan.estimate(gpu="h100-80g", max_model_len=4096, command=text, gpu_memory_utilization=0.5)
    assert answer.to_dict()["inputs"]["settings"]["gpu_memory_utilization"] == 0.5


def phases(**options: Any) -> dict[str, Any]:
    """The phases of an estimate, by name."""
    document = kvplan.estimate(**options).to_dict()
    return {phase["name"]: phase for phase in document["colocation"]["phases"]}


@pytest.mark.parametrize("row", ASLEEP, ids=lambda row: row["source"][:30])
def test_what_sleeping_servers_held_is_within_the_range(row: dict[str, Any]) -> None:
    names = {"tp": "tensor_parallel_size", "ctx": "max_model_len"}
    args = {names.get(key, key): value for key, value in row["args"].items()}
    asleep = phases(model=row["model"], gpu=row["gpu"], engine=row["engine"], enable_sleep_mode=True, **args)["asleep"]
    assert asleep["server_low"] <= row["asleep"][0] <= row["asleep"][1] <= asleep["server_high"]


SLIME = (
    "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 2 --colocate --rollout-num-gpus-per-engine 2 "
    "--sglang-mem-fraction-static 0.85 --hf-checkpoint meta-llama/Meta-Llama-3-8B-Instruct"
)


def test_what_sglang_keeps_asleep_is_within_the_range() -> None:
    """Of 2 H200: 1.6 GB before the workers start, 1 GB of NCCL, 0.6 GB of graphs (sgl-project/sglang#7873)."""
    asleep = phases(command=SLIME, gpu="h200", max_model_len=8192)["asleep"]
    assert asleep["server_low"] <= 3.2e9 <= asleep["server_high"] < 2 * 3.2e9
    assert asleep["rows"].keys() == {"context", "reserved"}


def test_a_framework_s_own_switch_is_no_hint(run: Run) -> None:
    result = run("estimate", "--from-command", SLIME, "--gpu", "h200", "--ctx", "8k")
    assert "--enable-memory-saver" in result.out  # as the printed command has it
    assert not any("--enable-memory-saver" in line for line in result.err.splitlines())


def test_unsloth_is_offered_without_the_4_bits_that_the_server_no_longer_has(run: Run) -> None:
    """vLLM 0.33 has no bitsandbytes; Unsloth's load_in_4bit is True by default (models/loader.py)."""
    text = "FastLanguageModel.from_pretrained('meta-llama/Llama-3.1-8B-Instruct', fast_inference=True)"
    document = kvplan.estimate(command=text, gpu="h100-80g", max_model_len=2048).to_dict()
    assert not document["fits"]
    assert document["fixes"][0]["flag"] == "without --quantization"
    ran = run("estimate", "--from-command", text, "--gpu", "h100-80g", "--ctx", "2k")
    assert "--quantization is load_in_4bit" in ran.err
    assert kvplan.estimate(
        command=text.replace(")", ", load_in_4bit=False)"), gpu="h100-80g", max_model_len=2048
    ).plan.fits  # fmt: skip


def test_server_others_and_what_is_left_make_the_gpu() -> None:
    options: dict[str, Any] = {"command": VERL, "gpu": "h100-80g", "max_model_len": 4096}
    document = kvplan.estimate(**options, memory_in_use="awake=10GiB,asleep=60GiB,waking=20GiB").to_dict()
    by_name = {phase["name"]: phase for phase in document["colocation"]["phases"]}
    for phase in by_name.values():
        assert phase["server"] == sum(phase["rows"].values())
        assert phase["server"] + phase["others"] + phase["free"] == document["memory"]["total"]
    # vLLM maps the weights' pool first, and the KV cache's when it is told to.
    awake, asleep, waking = (by_name[name]["rows"] for name in ("awake", "asleep", "waking"))
    assert waking.keys() - asleep.keys() == {"weights"}
    assert awake.keys() - waking.keys() == {"kv_cache", "activations"}


@pytest.mark.parametrize(
    ("in_use", "phase"),
    [
        ("awake=40GiB,asleep=10GiB", "while awake (rollout)"),
        ("awake=10GiB,asleep=77GiB", "while asleep (training)"),
        ("awake=10GiB,asleep=10GiB,waking=70GiB", "while waking up (weight sync)"),
    ],
)
def test_the_phase_that_does_not_fit_is_named_first_with_a_remedy_that_works(in_use: str, phase: str, run: Run) -> None:
    words = ["estimate", "--from-command", VERL, "--gpu", "h100-80g", "--ctx", "4k", "--memory-in-use", in_use]
    result = run(*words, "--exit-code")
    assert result.code == 1
    assert phase in result.out.splitlines()[0]
    fixes = kvplan.estimate(gpu="h100-80g", max_model_len=4096, command=VERL, memory_in_use=in_use).to_dict()["fixes"]
    assert fixes
    flags = fixes[0]["flag"].split()
    others = [word for word in words if word not in ("--gpu", "h100-80g")] if "--gpu" in flags else words
    assert run(*others, *flags, "--exit-code").code == 0


def test_a_trainer_without_sleep_is_offered_it() -> None:
    text = "GRPOTrainer(model='Qwen/Qwen2.5-7B', args=GRPOConfig(use_vllm=True, vllm_gpu_memory_utilization=0.5))"
    options: dict[str, Any] = {"command": text, "gpu": "h100-80g", "max_model_len": 4096}
    document = kvplan.estimate(**options, memory_in_use="awake=20GiB,asleep=60GiB").to_dict()
    assert document["colocation"]["sleep_level"] == 0
    assert document["fixes"][0]["flag"] == "--enable-sleep-mode"


@pytest.mark.parametrize(("rank", "has_row"), [(0, False), (16, True)])
def test_weights_wait_on_the_host_at_level_1_only(rank: int, has_row: bool) -> None:
    text = f"{VERL} actor_rollout_ref.model.lora_rank={rank}"
    document = kvplan.estimate(command=text, gpu="h100-80g", max_model_len=4096).to_dict()
    assert (document["host_memory"]["weights"] > 0) == has_row


@pytest.mark.parametrize("in_use", ["asleep=", "sleeping=1GiB", "awake=1GiB,awake=2GiB", "awake=1GiB,asleep=2GiB"])
def test_bad_phases_are_refused(in_use: str) -> None:
    with pytest.raises(KvplanError, match="--memory-in-use"):
        kvplan.estimate("qwen2.5-7b", gpu="h100-80g", memory_in_use=in_use)


def test_one_size_holds_at_all_times() -> None:
    by_name = phases(model="qwen2.5-7b", gpu="h200", max_model_len=4096, enable_sleep_mode=True,
                     memory_in_use="10GiB", gpu_memory_utilization=0.8)  # fmt: skip
    assert [by_name[name]["others"] for name in ("awake", "asleep", "waking")] == [10 * GIB, 10 * GIB, None]
