"""Failing lines of vLLM 0.33's own code: what they need and estimate, and cures that its own code starts with."""

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.pasted import read_command
from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.measure.failure import read_failure
from kvplan.models import catalog
from kvplan.planning.case import Case
from kvplan.planning.cures import cures, estimate_range, estimated_context, stated_pool
from kvplan.planning.plan import Request, plan
from kvplan.servers.logs.failures import Figures
from kvplan.servers.words.arguments import EngineArgs
from tests.oracles import case_request, result_differences, serve_words
from tests.support.oracle_data import DATA, needs_oracle_data

FACTS = Path(__file__).resolve().parents[1] / "facts"
CASES = (
    ("capacity_cases_real.jsonl", "models"),
    ("capacity_cases_flags.jsonl", "models"),
    ("capacity_cases.jsonl", "capacity_configs"),
)


def refusals() -> Iterator[tuple[Request, int, Figures]]:
    """(what was asked for, bytes of the pool, the figures of vLLM's refusal) of every case that it refuses."""
    for name, folder in CASES:
        for line in (DATA / name).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            for result in row.get("results", ()):
                if result.get("error"):
                    failure = read_failure([f"ValueError: {result['error']}"])
                    assert failure.cause == "kv_too_small_for_max_len"
                    try:
                        request = case_request(row, DATA / folder)
                    except KvplanError:  # a flag that is refused by name
                        continue
                    own_args = replace(request.args, max_model_len=failure.figures.context)
                    budget = result["available_memory"]
                    yield (
                        replace(request, args=own_args),
                        min([budget] if isinstance(budget, int) else budget),
                        failure.figures,
                    )


@needs_oracle_data
def test_the_bytes_that_a_refusal_needs_and_the_length_it_estimates_are_the_plan_s() -> None:
    """Exactly, from the pool's bytes; and within the rounding of the line from what it says of them."""
    count = 0
    for request, pool, figures in refusals():
        assert figures.needed_bytes is not None
        assert figures.needed_bytes.low <= plan(request).bytes_per_request <= figures.needed_bytes.high
        assert estimated_context(request, pool) == figures.estimated_max_len
        read = stated_pool(figures, request, "kv_too_small_for_max_len")
        assert read is not None
        assert estimated_context(request, read) == figures.estimated_max_len
        within = estimate_range(figures, request)
        assert within is not None
        assert within[0] <= (figures.estimated_max_len or 0) <= within[1]
        count += 1
    assert count >= 70


def oracle_rows() -> list[dict[str, Any]]:
    """What vLLM 0.33's code says of cures: the settings with the change, the pool of its plan, and the answer."""
    return [json.loads(line) for line in (FACTS / "cures.jsonl").read_text(encoding="utf-8").splitlines()]


def name_of(row: dict[str, Any]) -> str:
    return str(row["inputs"]["model"]).replace("__", "/", 1)


@pytest.mark.parametrize("row", oracle_rows(), ids=lambda row: f"{row['inputs']['model']}-{row['number']}")
def test_vllm_starts_with_a_cure_and_has_the_blocks_that_were_planned(row: dict[str, Any]) -> None:
    known = catalog.find(name_of(row))
    if not DATA.is_dir() and (known is None or catalog.load(known).quantization is not None):
        pytest.skip("its config is not that of the catalog, and there is no oracle data")
    request = case_request(row, DATA / "models") if DATA.is_dir() else listed_request(row, str(known))
    for result in row["results"]:
        assert "error" not in result
        assert list(result_differences(request, result)) == []


def listed_request(row: dict[str, Any], name: str) -> Request:
    """The same of a model that the catalog has."""
    inputs = row["inputs"]
    args = read_command(shlex.join(serve_words(inputs))).args | {"usage": "server"}
    return Request(catalog.load(name), gpu({"H100": "h100-80g"}[inputs.get("gpu", "H100")]), EngineArgs(**args))


@needs_oracle_data
def test_the_cures_that_were_asked_are_those_that_are_printed() -> None:
    """The first refusal of Llama-3.1-8B on one H100: its cures are in the facts, with the pools of their plans."""
    request, _, figures = next(refusals())
    pool = stated_pool(figures, request, "kv_too_small_for_max_len")
    results = cures(Case("vllm", "kv_too_small_for_max_len", figures, request, pool))
    assert results
    pools = {tuple(row["inputs"]["available_memory"]) for row in oracle_rows()}
    assert any(cure.plan is not None and (cure.plan.available,) in pools for cure in results)
