"""Every place of a plan adds up: the ranks of each pipeline stage, and the host."""

from typing import Any

import pytest

from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

# Bytes of one token's K and V in a layer of Llama 3: 2 x 8 heads x 128 x 2 B, in blocks of 16 tokens.
LLAMA_BLOCK = 16 * 2 * 8 * 128 * 2


def places(run: Run, *words: str) -> list[dict[str, Any]]:
    answer = run("estimate", *words, "--format", "json").json
    listed: list[dict[str, Any]] = answer["places"]
    return listed


@pytest.mark.parametrize(
    "words",
    [
        ("llama-3.1-8b", "--gpu", "h100-80g", "--ctx", "8k"),
        ("llama-3.3-70b", "--gpu", "a100-80g", "--ctx", "8k", "--pp", "3"),
        ("llama-3.3-70b", "--gpu", "a100-80g", "--ctx", "8k", "--pp", "3", "--tp", "2", "--dp", "2"),
        ("llama-3.3-70b", "--gpu", "a100-80g", "--ctx", "8k"),  # does not fit
        ("llama-3.3-70b", "--gpu", "a100-80g", "--ctx", "8k", "--pp", "3", "--engine", "sglang"),
        ("qwen3-next-80b-a3b", "--gpu", "h100-80g", "--ctx", "8k", "--pp", "4"),
        ("qwen3-8b", "--gpu", "l40s", "--ctx", "8k", "--kv-offloading-size", "8", "--tp", "2"),
        ("gemma-3-27b", "--gpu", "h100-80g", "--ctx", "8k", "--pp", "2"),
    ],
    ids=" ".join,
)
def test_the_rows_of_each_place_add_up_to_its_total(run: Run, words: tuple[str, ...]) -> None:
    listed = places(run, *words)
    assert [place["kind"] for place in listed] == ["gpu"] * (len(listed) - 1) + ["host"]
    assert [place["decides"] for place in listed].count(True) == 1
    for place in listed:
        assert sum(place["rows"].values()) - place["missing"] == place["total"], place["name"]


def test_each_stage_has_the_pool_of_its_own_layers(run: Run) -> None:
    """80 layers over 3 stages: 27, 27 and 26 (vLLM 0.33 distributed/utils.py, get_pp_indices: the last has fewer)."""
    answer = run("estimate", "llama-3.3-70b", "--gpu", "a100-80g", "--ctx", "8k", "--pp", "3", "--format", "json").json
    blocks = answer["kv"]["num_blocks"]
    pools = [place["rows"]["kv_cache"] for place in answer["places"] if place["kind"] == "gpu"]
    assert pools == [blocks * layers * LLAMA_BLOCK for layers in (27, 27, 26)]


def test_the_place_that_decides_is_the_one_with_the_least_room(run: Run) -> None:
    answer = run("estimate", "llama-3.3-70b", "--gpu", "a100-80g", "--ctx", "8k", "--pp", "3", "--format", "json").json
    (decides,) = [place for place in answer["places"] if place["decides"]]
    assert decides["rows"] == {name: answer["memory"][name] for name in decides["rows"]}
    # What a stage leaves unused would hold no further block of the stage that decides.
    left = [place["rows"]["unused"] for place in answer["places"] if place["kind"] == "gpu"]
    assert decides["rows"]["unused"] == min(left)


def test_the_explanation_lists_the_stages_if_there_are_several(run: Run) -> None:
    single = run("estimate", "llama-3.3-70b", "--gpu", "h200", "--ctx", "8k", "--explain").out
    three = run("estimate", "llama-3.3-70b", "--gpu", "a100-80g", "--ctx", "8k", "--pp", "3", "--explain").out
    assert "Memory of each stage" not in single
    assert [line for line in three.splitlines() if "stage 3 of 3, 1 GPU: weights" in line]


def test_the_host_has_what_all_ranks_use(run: Run) -> None:
    """8 GiB of --kv-offloading-size are over all ranks, and each of the two keeps half."""
    host = places(run, "qwen3-8b", "--gpu", "l40s", "--ctx", "8k", "--kv-offloading-size", "8", "--tp", "2")[-1]
    assert host["rows"]["kv_offloading"] == pytest.approx(8 * 2**30, rel=0.01)
