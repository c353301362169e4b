"""Weights on the host and data-parallel towers under SGLang against its own code.

tests/facts/offload_sglang.jsonl: flags, and what SGLang 0.5.23's own offloaders moved off its own classes on torch's
meta device, stage by stage: `host` bytes, of those `fetched` ones that are back before the pool is sized; or the bytes
of its tower's parameters (`tower`). A model stands for its catalog entry.
"""

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.pasted import read_command
from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Plan, Request, host_rows, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.weights import rank_weights
from kvplan.servers.sglang import classes, offload
from kvplan.servers.sglang import models as sglang_models
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

GIB = 2**30
FACTS = Path(__file__).parents[2] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "offload_sglang.jsonl").read_text().splitlines()]
MOVED = [row for row in ROWS if "host" in row.get("stages", [{}])[0]]
TOWERS = [row for row in ROWS if "tower" in row.get("stages", [{}])[0]]
# Where a class makes a layer's small parameters in another order, or has scales that no kernel reads, the last one
# that is moved is another: bytes of difference at most, relative to what is moved.
NEAR = {"granite-3b-code": 0.00022, "olmo-2-7b": 4e-6, "qwen3.5-35b-a3b": 2e-7, "qwen3.6-35b-a3b": 2e-7}
SCALES = 1e-7  # of quantized checkpoints: 8 to 16 bytes a layer
TOWERS_NEAR = {"qwen2.5-vl-7b": 0.0008, "glm-ocr": 0.0041, "glm-4.1v-9b": 0.00001, "glm-4.5v": 0.00001}


def request_of(row: dict[str, Any]) -> Request:
    inputs = row["inputs"]
    sizes = f"--tp {inputs.get('tp', 1)} --pp {inputs.get('pp', 1)}"
    command = f"python -m sglang.launch_server --model-path a/b {sizes} {shlex.join(inputs['argv'])}"
    args = EngineArgs(**read_command(command).args)
    return Request(
        spec=catalog.load(inputs["model"]), gpu=gpu("h100"), args=args, release=parse_engine("sglang")
    )  # fmt: skip


def outcome(row: dict[str, Any]) -> str:
    request = request_of(row)
    try:
        offload.check(request.spec, request.args, request.release)
    except KvplanError:
        return "refused"
    name = row["inputs"]["model"]
    for stage, expected in enumerate(row["stages"]):
        moved = offload.offloaded(request, stage)
        assert moved is not None
        quantized = request.spec.quantization is not None
        near = NEAR.get(name, SCALES if quantized else 0)
        assert moved.size == pytest.approx(expected["host"], rel=near, abs=0), name
        assert moved.buffers == expected.get("fetched", 0), name
    return "equal"


def test_what_is_moved_equals_sglangs_own_offloaders() -> None:
    assert Counter(map(outcome, MOVED)) == {"equal": 133, "refused": 43}


def test_models_whose_class_moves_nothing_are_refused_by_name() -> None:
    still = {row["inputs"]["model"] for row in MOVED if row["stages"][0]["host"] == 0}
    assert len(still) > 5
    for name in still:
        request = request_of({"inputs": {"model": name, "argv": ["--cpu-offload-gb", "4"]}})
        with pytest.raises(UnsupportedModelError, match="offloads nothing"):
            offload.check(request.spec, request.args, request.release)


def test_groups_that_sglang_cannot_make_are_refused() -> None:
    for row in ROWS:
        if "failed" in row:
            request = request_of(row)
            with pytest.raises(UnsupportedModelError, match="cannot do it; use --cpu-offload-gb"):
                offload.check(request.spec, request.args, request.release)


@pytest.mark.parametrize("row", TOWERS, ids=lambda row: f"{row['inputs']['model']} {row['inputs'].get('tp', 1)}")
def test_data_parallel_towers_are_as_large_as_sglangs(row: dict[str, Any]) -> None:
    request, name = request_of(row), row["inputs"]["model"]
    sglang_models.check_towers(request.spec, request.args, request.release)
    own = row["stages"][0]["tower"]
    if classes.outer_of(request.spec).tower == "split":
        whole = next(other["stages"][0]["tower"] for other in TOWERS if other["inputs"]["model"] == name)
        assert own == whole or row["inputs"]["tp"] > 1  # split over the ranks, flag or not
        assert any("stays as it is" in note for note in sglang_models.tower_notes(request.spec, request.args))
        return
    tower = rank_weights(request, 0)["vision_audio"]
    assert tower == pytest.approx(own, rel=TOWERS_NEAR.get(name, 0), abs=0)


def planned(model: str, *argv: str) -> Plan:
    return plan(request_of({"inputs": {"model": model, "argv": list(argv)}}))


def test_moved_weights_make_room_in_the_pool_and_stand_in_the_hosts_rows() -> None:
    whole, moved = planned("llama-3.1-8b"), planned("llama-3.1-8b", "--cpu-offload-gb", "4")
    assert whole.memory.weights - moved.memory.weights == 4_362_223_616  # what SGLang's own offloader moves
    assert (moved.capacity.num_blocks - whole.capacity.num_blocks) * 131_072 == pytest.approx(
        4_362_223_616, abs=131_072
    )
    (row,) = [row for row in host_rows(moved) if row.name == "weights"]
    # ten layers of 48, 32, 224 and 112 MiB, pinned in 64, 32, 256 and 128, and the norms of nine
    assert (row.size, row.per) == (10 * 480 * 2**20 + 9 * 2 * 8192, "rank")


def test_experts_of_the_first_groups_are_back_when_the_pool_is_sized() -> None:
    whole = planned("deepseek-v2-lite")
    moved = planned("deepseek-v2-lite", "--offload-group-size", "4", "--offload-num-in-group", "2")
    gained = (moved.capacity.num_blocks - whole.capacity.num_blocks) * whole.capacity.bytes_per_block
    assert gained == pytest.approx(14_394_851_328 - 1_107_296_256, abs=31_104)


@pytest.mark.parametrize(
    ("model", "argv", "problem"),
    [
        ("llama-3.1-8b", "--cpu-offload-gb 4 --speculative-algorithm NGRAM", "with drafts"),
        ("deepseek-v2-lite", "--offload-group-size 30", "is more than the layers of a stage (27)"),
        ("deepseek-v2-lite", "--offload-group-size 4 --offload-prefetch-step 9", "a stage offloads 6 layers"),
        ("deepseek-v2-lite", "--offload-group-size 4 --offload-num-in-group 5", "is more than offload_group_size"),
        ("qwen3-30b-a3b-fp8", "--cpu-offload-gb 4", "are not compared with offloaded weights"),
        ("llava-1.5-7b", "--mm-enable-dp-encoder", "is not modeled"),
        ("gemma-4-31b", "--cpu-offload-gb 4", "is not compared with offloaded weights"),
    ],
)
def test_what_sglang_does_not_start_with_or_nobody_compared_is_refused(model: str, argv: str, problem: str) -> None:
    with pytest.raises((UsageError, UnsupportedModelError)) as error:
        planned(model, *argv.split())
    assert problem in str(error.value)


def test_commands_say_it_in_sglangs_words(run: Run) -> None:
    sized = run("estimate", "qwen2.5-vl-7b", "--gpu", "h100", "--ctx", "8k", "--engine", "sglang", "--tp", "2",
                "--mm-encoder-tp-mode", "data", "--cpu-offload-gb", "2")  # fmt: skip
    assert sized.code == 0
    assert "--cpu-offload-gb 2" in sized.out
    assert "--mm-enable-dp-encoder" in sized.out
    older = run("estimate", "llama-3.1-8b", "--gpu", "h100", "--engine", "sglang@0.5.9", "--cpu-offload-gb", "4")
    assert (older.code, "is modeled only for 0.5.23" in older.err) == (2, True)
    part = run("estimate", "llama-3.1-8b", "--gpu", "h100", "--engine", "sglang", "--cpu-offload-gb", "4.5")
    assert (part.code, "SGLang accepts only whole GiB" in part.err) == (2, True)
