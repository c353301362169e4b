"""Cures of every cause, asked of the servers' own code: vLLM 0.33 and SGLang 0.5.23 answered (benchmarks/cures.py).

The rows are a part of 1,046 printed cures of 29 models: of each cause and kind of change the first.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import UsageError
from kvplan.hardware.gpu import gpu
from kvplan.measure.failure import read_failure
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec
from kvplan.planning.cures import MOVES, free_share
from kvplan.planning.plan import Request, plan
from kvplan.servers.words.arguments import EngineArgs
from tests import oracles
from tests.support.oracle_data import DATA, needs_oracle_data

FACTS = Path(__file__).resolve().parents[1] / "facts"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FACTS / name).read_text(encoding="utf-8").splitlines()]


def name_of(row: dict[str, Any]) -> str:
    return f"{row['inputs']['model']}: {row['cures'][0][0]}: {row['cures'][0][1]}"


VLLM, SGLANG = rows("cures_of_causes.jsonl"), rows("cures_of_causes_sglang.jsonl")


@needs_oracle_data
@pytest.mark.parametrize("row", VLLM, ids=name_of)
def test_vllm_starts_with_a_cure_of_any_cause_and_has_the_blocks_that_were_planned(row: dict[str, Any]) -> None:
    assert all("error" not in result for result in row["results"])
    assert oracles.compare_case(row, DATA / "models") == (oracles.EQUAL, [])


def spec_of(model: str) -> ModelSpec:
    return oracles.spec_in(DATA / "models" / model)


@needs_oracle_data
@pytest.mark.parametrize("row", SGLANG, ids=name_of)
def test_sglang_starts_with_a_cure_of_any_cause_and_has_the_pool_that_was_planned(row: dict[str, Any]) -> None:
    assert all("error" not in result for result in row["results"])
    assert oracles.compare_sglang(row, spec_of) == (oracles.EQUAL, [])


def test_every_cause_of_which_a_plan_knows_a_cure_was_asked() -> None:
    causes = {cure[0] for row in VLLM for cure in row["cures"]}
    known = {cause for cause in MOVES if cause not in ("dtype_or_capability", "quantization_mismatch")}
    kinds = {"pool_after_weights", "oom_decode", "oom_prefill", "oom_graphs"}  # of the other server
    assert known - kinds - {"out_of_memory"} <= causes
    assert {"sglang_not_enough_memory", "sglang_oom_decode_retract", "sglang_oom_prefill", "oom_runtime"} <= {
        cure[0] for row in SGLANG for cure in row["cures"]
    }


@pytest.mark.parametrize("row", rows("free_shares.jsonl"), ids=lambda row: f"{row['free']} of {row['total']}")
def test_a_share_that_is_free_passes_vllm_s_own_check(row: dict[str, Any]) -> None:
    """`largest_share`: the largest in hundredths that vLLM 0.33's request_memory takes; the line rounds its bytes."""
    share = free_share(read_failure([f"ValueError: {row['line']}"]).figures)
    assert share is not None
    assert row["largest_share"] - 0.0101 < share <= row["largest_share"]


def test_ranks_that_do_not_divide_the_groups_of_a_state_are_refused() -> None:
    """mamba_mixer2.py: "If tensor parallel world size does not divide num_groups, then num_groups must equal 1."
    Nemotron-H has 8 groups; Falcon-H1 has one, which is repeated."""
    spec = catalog.load("nemotron-h-8b")
    request = Request(spec, gpu("h100-80g"), EngineArgs(tensor_parallel_size=16, max_model_len=4096))
    with pytest.raises(UsageError, match="does not divide the 8 groups of the states"):
        plan(request)
