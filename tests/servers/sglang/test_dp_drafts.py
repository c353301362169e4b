"""A model's own draft head under SGLang's DP attention against SGLang 0.5.23's own code.

tests/facts/dp_drafts_sglang.jsonl: flags, settings and pools of a rank, and the bytes of all parameters of SGLang's own
draft class that it does not share with its target (`draft`, unless its pool alone was asked). The model is a catalog
entry, or a config of the oracles' data.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog, hf_config
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from tests import oracles
from tests.support.oracle_data import DATA, needs_oracle_data

FACTS = Path(__file__).parents[2] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "dp_drafts_sglang.jsonl").read_text().splitlines()]
SCALES = 16  # bytes: scales of the KV cache in a layer of an FP8 checkpoint


def name_of(row: dict[str, Any]) -> str:
    argv = [word for word in row["inputs"]["argv"] if not word.startswith("--speculative")]
    return f"{row['inputs']['model']} {' '.join(argv)}"


def spec_of(name: str) -> ModelSpec:
    return catalog.load(name) if "__" not in name else hf_config.load_spec(DATA / "models" / name)


def draft_of(row: dict[str, Any]) -> int:
    return plan(oracles.sglang_request(row["inputs"], spec_of(row["inputs"]["model"]))).weight_groups["draft"]


def check(row: dict[str, Any]) -> None:
    assert oracles.compare_sglang(row, spec_of) == (oracles.EQUAL, [])
    if "draft" in row:
        scales = SCALES if row["inputs"]["model"] == "deepseek-v3" else 0
        assert draft_of(row) == row["draft"] - scales


@pytest.mark.parametrize("row", [row for row in ROWS if "__" not in row["inputs"]["model"]], ids=name_of)
def test_pool_and_draft_equal_sglangs(row: dict[str, Any]) -> None:
    check(row)


@needs_oracle_data
@pytest.mark.parametrize("row", [row for row in ROWS if "__" in row["inputs"]["model"]], ids=name_of)
def test_pool_and_draft_equal_sglangs_for_other_configs(row: dict[str, Any]) -> None:
    check(row)


@pytest.mark.parametrize(
    ("model", "method", "match"),
    [
        ("qwen3-next-80b-a3b", "mtp", "has weights that were not compared"),
        ("deepseek-v3", "ngram", "is not modeled with NGRAM drafts"),
    ],
)
def test_other_drafts_are_refused(model: str, method: str, match: str) -> None:
    args = EngineArgs(
        tensor_parallel_size=8, data_parallel_size=8, enable_dp_attention=True, speculative_method=method,
        speculative_num_draft_tokens=4 if method == "ngram" else None,
    )  # fmt: skip
    with pytest.raises((UnsupportedModelError, UsageError), match=match):
        plan(Request(catalog.load(model), gpu("h200"), args, parse_engine("sglang")))


@pytest.mark.parametrize(("model", "is_noted"), [("deepseek-v3.2", True), ("deepseek-v3", False)])
def test_a_head_whose_weights_were_not_compared_is_noted(model: str, is_noted: bool) -> None:
    args = EngineArgs(
        tensor_parallel_size=8, data_parallel_size=8, enable_dp_attention=True, speculative_method="mtp"
    )  # fmt: skip
    notes = plan(Request(catalog.load(model), gpu("h200"), args, parse_engine("sglang"))).notes
    assert any("not compared with SGLang's class" in note for note in notes) is is_noted
