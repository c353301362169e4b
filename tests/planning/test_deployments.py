"""Servers that vendors publish start by kvplan's plans, and `recommend` buys no more GPUs than they use.

tests/facts/deployments.jsonl: commands of the vLLM recipes and of SGLang's cookbook with the GPUs that they name.
`starts` is false where the source says that the server cannot; `differs`: why kvplan says otherwise than the source;
`recommended` and `why`: more GPUs than published, and the sentence that tells the reason.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.pasted import read_command
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Plan, Request, plan
from kvplan.planning.recommend import Question, recommend
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs

FACTS = Path(__file__).parents[1] / "facts" / "deployments.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in FACTS.read_text(encoding="utf-8").splitlines()]
VLLM = [row for row in ROWS if row["command"].startswith("vllm")]


def name(row: dict[str, Any]) -> str:
    return f"{row['command'].split('serve ')[-1].split('path ')[-1][:60]} on {row['num_gpus']} x {row['gpu']}"


def planned(row: dict[str, Any]) -> Plan:
    command = read_command(row["command"])
    assert command.model is not None
    return plan(Request(
        catalog.load(command.model), gpu(row["gpu"]), EngineArgs(**command.args),
        parse_engine("vllm" if row in VLLM else "sglang"),
    ))  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_published_server_starts(row: dict[str, Any]) -> None:
    """vLLM starts if one request of the whole context fits, SGLang with any pool."""
    published = planned(row)
    assert published.request.args.num_gpus == row["num_gpus"]
    starts = published.fits if row in VLLM else published.refusal is None and published.available > 0
    assert starts is (row.get("starts", True) and "differs" not in row), row.get("differs")
    assert (
        row in VLLM
        or published.fits
        or not starts
        or any("SGLang starts all the same" in note for note in published.notes)
    )


@pytest.mark.parametrize("row", [row for row in VLLM if row.get("starts", True)], ids=name)
@pytest.mark.full
def test_no_more_gpus_are_recommended_than_published(row: dict[str, Any]) -> None:
    """For one user of the whole context, at the conservative end of every estimate."""
    published = planned(row)
    args = EngineArgs(max_model_len=published.capacity.max_model_len)
    answer = recommend(Question(1), [Request(published.request.spec, published.request.gpu, args)])
    fewest = min(placement.num_gpus for placement in answer.placements)
    assert fewest <= row.get("recommended", row["num_gpus"])
    reasons = [f"{failure.gpu} x{failure.num_gpus}: {failure.reason}" for failure in answer.failures]
    assert row.get("why", "") in " ".join(reasons)
