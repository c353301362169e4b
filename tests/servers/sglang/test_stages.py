"""Weights of a rank and a pipeline stage under SGLang against its own classes.

tests/facts/stages_sglang.jsonl: ranks and stages, and the bytes of all parameters of SGLang 0.5.23's own class on
torch's meta device, stage by stage. A model stands for its catalog entry.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import UnsupportedModelError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.weights import rank_weights
from kvplan.servers.sglang.spread import check, spread
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FACTS = Path(__file__).parents[2] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "stages_sglang.jsonl").read_text().splitlines()]
# Relative to a rank's weights: norms of queries and keys, the width of a projector and a table, the order of groups
# that packed experts have until they are loaded, and a bias that SGLang counts twice.
NEAR = {"falcon-h1-1.5b": 8e-6, "glm-ocr": 0.0031, "kimi-k2.5": 0.0094, "phi-2": 2e-5}
SCALES = 2e-7  # 8 to 16 bytes a layer of quantized checkpoints


def request_of(inputs: dict[str, Any]) -> Request:
    args = EngineArgs(
        tensor_parallel_size=inputs["tp"], pipeline_parallel_size=inputs["pp"],
        enable_multimodal="--enable-multimodal" in inputs.get("argv", ()) or None,
    )  # fmt: skip
    return Request(spec=catalog.load(inputs["model"]), gpu=gpu("h100"), args=args, release=parse_engine("sglang"))


def outcome(row: dict[str, Any]) -> str:
    request, name = request_of(row["inputs"]), row["inputs"]["model"]
    try:
        check(request.spec, request.args, request.release)
    except UnsupportedModelError as error:
        return "undivided" if "has no pipeline stages" in str(error) else "refused"
    near = NEAR.get(name, SCALES if request.spec.quantization is not None else 0)
    for stage, params in enumerate(row["params"]):
        own = sum(rank_weights(spread(request), stage).values())
        assert own == pytest.approx(params, rel=near, abs=0), (row["inputs"], stage)
    return "near" if name in NEAR else "equal"


def test_weights_of_stages_equal_sglangs_own_classes() -> None:
    assert Counter(map(outcome, ROWS)) == {"equal": 120, "near": 8, "undivided": 23, "refused": 6}


def planned(model: str, engine: str = "sglang", **args: Any) -> int:
    answer = plan(
        Request(catalog.load(model), gpu("h200"), EngineArgs(max_model_len=8192, **args), parse_engine(engine))
    )
    return answer.memory.weights


def test_a_tower_stands_on_every_stage_and_a_head_of_its_own_too() -> None:
    """Bytes of SGLang's own class on a rank of each of two stages, the larger of which a plan shows."""
    (row,) = [row for row in ROWS if row["inputs"] == {"model": "mistral-small-3.1-24b", "tp": 2, "pp": 2}]
    assert planned("mistral-small-3.1-24b", tensor_parallel_size=2, pipeline_parallel_size=2) in row["params"]


def test_every_rank_of_gemma_4_holds_the_whole_embedding() -> None:
    (row,) = [row for row in ROWS if row["inputs"] == {"model": "gemma-4-26b-a4b", "tp": 4, "pp": 1}]
    assert planned("gemma-4-26b-a4b", tensor_parallel_size=4) == row["params"][0]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("gemma-2-9b", "Gemma2ForCausalLM has no pipeline stages"),
        ("llama-3.2-3b", "has no output head on its last stage"),
        ("nemotron-super-49b", "is not compared with its own code"),
    ],
)
def test_stages_that_sglang_does_not_run_are_refused(run: Run, model: str, problem: str) -> None:
    refused = run("estimate", model, "--gpu", "h200", "--engine", "sglang", "--pp", "2", "--ctx", "8k")
    assert (refused.code, problem in refused.err) == (2, True)
    assert run("estimate", model, "--gpu", "h200", "--pp", "2", "--ctx", "8k").code == 0  # vLLM does


def test_older_releases_are_planned_as_before() -> None:
    assert planned("gemma-2-9b", "sglang@0.5.9", pipeline_parallel_size=2) > 0
