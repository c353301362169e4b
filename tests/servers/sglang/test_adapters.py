"""LoRA under SGLang against its own code: the pool that LoRAMemoryPool makes for the classes of its models.

tests/facts/adapters_sglang.jsonl: flags, and the bytes of all tensors of SGLang 0.5.23's LoRAMemoryPool, whose base
model was its own class on torch's meta device, with its own answer to `all`. A model stands for its catalog entry.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.pasted import read_command
from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.sglang import adapters, classes
from kvplan.servers.sglang import rules as sglang
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FACTS = Path(__file__).parents[2] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "adapters_sglang.jsonl").read_text().splitlines()]
NOT_SIZED = ("qwen3.5-27b", "nemotron-nano-9b-v2")
FUSED_INDEX = ("deepseek-v3.2", "glm-5.2")  # SGLang refuses `all` where CUDA fuses the index
START = "python -m sglang.launch_server --model-path a/b --enable-lora --max-lora-rank 16"


def name_of(row: dict[str, Any]) -> str:
    inputs = row["inputs"]
    return f"{inputs['model']} {inputs.get('tp', 1)} {inputs.get('pp', 1)} {' '.join(inputs['argv'][3:])}"


def is_refused(row: dict[str, Any]) -> bool:
    model, argv = row["inputs"]["model"], row["inputs"]["argv"]
    without_rank = "all" in argv and model in (*FUSED_INDEX, "deepseek-v2-lite")
    return model in NOT_SIZED or without_rank or "--enable-dp-attention" in argv


def args_of(row: dict[str, Any]) -> EngineArgs:
    inputs = row["inputs"]
    sizes = f"--tp {inputs.get('tp', 1)} --pp {inputs.get('pp', 1)}"
    command = f"python -m sglang.launch_server --model-path a/b {sizes} {shlex.join(inputs['argv'])}"
    return EngineArgs(**read_command(command).args)


def pool_of(row: dict[str, Any]) -> int:
    spec, args, release = catalog.load(row["inputs"]["model"]), args_of(row), parse_engine("sglang")
    adapters.check(spec, args, release, 90)
    settings = sglang.resolve(spec, gpu("h100"), args, release)
    tables = adapters.routing(spec, args, 256) if {"gate_up_proj", "down_proj"} <= {*row["modules"]} else 0
    return adapters.lora(spec, settings, args, 256).likely - tables


@pytest.mark.parametrize("row", [row for row in ROWS if not is_refused(row)], ids=name_of)
def test_slots_are_as_large_as_sglang_makes_them(row: dict[str, Any]) -> None:
    assert [pool_of(row)] * len(row["slots"]) == row["slots"]


@pytest.mark.parametrize("row", [row for row in ROWS if is_refused(row)], ids=name_of)
def test_what_is_not_sized_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(KvplanError):
        pool_of(row)


def test_many_are_compared_and_few_refused() -> None:
    refused = [row for row in ROWS if is_refused(row)]
    assert (len(ROWS) - len(refused), len(refused)) >= (60, 0)
    assert len(refused) <= 7


def test_every_model_that_is_called_exact_is_among_them() -> None:
    compared = {catalog.load(row["inputs"]["model"]).model_type for row in ROWS if not is_refused(row)}
    assert compared == {name for name, row in classes.TYPES.items() if row.adapters}


def test_the_pool_is_taken_off_the_kv_cache(run: Run) -> None:
    flags = "--lora-target-modules q_proj v_proj --max-loras-per-batch 4 --context-length 8192"
    base = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --context-length 8192"
    with_slots = run("estimate", "--from-command", START.replace("a/b", "llama-3.1-8b") + f" {flags}", "--gpu", "h100",
                     "--format", "json").json  # fmt: skip
    without = run("estimate", "--from-command", base, "--gpu", "h100", "--format", "json").json
    # 4 slots of 32 layers: A of 3 x 16 x 4,096 and B of 6,144 x 16, in two bytes
    slots = 4 * 32 * (3 * 16 * 4096 + 6144 * 16) * 2
    assert with_slots["memory"]["lora"] == slots
    assert 0 <= without["memory"]["kv_cache"] - with_slots["memory"]["kv_cache"] - slots < 131_072  # a token at most
    assert "--max-lora-rank 16 --lora-target-modules q_proj v_proj" in with_slots["flags"]["command"]
    (row,) = [row for row in with_slots["host"]["rows"] if row["name"] == "adapters"]
    assert row["bytes"] == slots  # as many as slots, each of the same elements on one rank


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (f"{START} --lora-target-modules nonsense", "is no module that is modeled for SGLang"),
        (f"{START} --lora-target-modules q_a_proj", "is no module of llama-3.1-8b"),
        (f"{START} --lora-target-modules all q_proj", "all cannot be combined with others"),
        (f"{START} --lora-target-modules all --max-loaded-loras 4", "is less than --max-loras-per-batch 8"),
        (f"{START}", "SGLang takes --lora-target-modules from its adapters, which kvplan does not read; set them"),
        (START.replace("--max-lora-rank 16", "--lora-target-modules all"), "SGLang takes --max-lora-rank from"),
        (
            "python -m sglang.launch_server --model-path a/b --lora-paths a=b/c",
            "--max-lora-rank and --lora-target-modules from",
        ),
    ],
)
def test_refuses_what_sglang_refuses(run: Run, words: str, fault: str) -> None:
    ran = run("estimate", "--from-command", words.replace("a/b", "llama-3.1-8b"), "--gpu", "h100")
    assert ran.code == 2
    assert fault in ran.err


@pytest.mark.parametrize(
    ("engine", "model", "modules", "fault"),
    [
        ("sglang@0.4.9", "llama-3.1-8b", "q_proj", "adapters are sized from SGLang 0.5.2 on"),
        ("sglang@0.5.9", "qwen3-30b-a3b", "gate_proj,up_proj,down_proj", "are sized only for 0.5.23"),
        ("sglang@0.5.9", "llama-3.1-8b", "all", "are sized only for 0.5.23"),
        ("sglang", "llama-4-scout", "q_proj", "SGLang's adapters of llama4"),
    ],
)
def test_older_releases_and_other_classes_are_refused_by_name(
    engine: str, model: str, modules: str, fault: str
) -> None:
    args = EngineArgs(max_loras=8, lora_target_modules=modules, tensor_parallel_size=8)
    with pytest.raises(KvplanError, match=fault):
        plan(Request(catalog.load(model), gpu("h200"), args, parse_engine(engine)))


def test_a_release_that_was_not_compared_is_not_called_exact() -> None:
    args = EngineArgs(max_loras=8, lora_target_modules="q_proj,o_proj")
    kinds = [
        plan(Request(catalog.load("llama-3.1-8b"), gpu("h100"), args, parse_engine(name))).estimates["lora"].kind
        for name in ("sglang", "sglang@0.5.23", "sglang@0.5.9")
    ]
    assert kinds == ["exact", "exact", "formula"]
