"""MiniMax-M1, as vLLM 0.11 to 0.23 served it: sizes worked out by hand from their model files."""

import re

import pytest

from kvplan.core.errors import InvalidInputError, UnsupportedModelError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.hf_config import read_config
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.weights import Layout, num_params, total_weights
from tests.support.refusals import reason_of


def of(number: tuple[int, int], tp: int = 8, context: int = 131_072) -> Plan:
    args = EngineArgs(tensor_parallel_size=tp, max_model_len=context)
    return plan(Request(catalog.load("minimax-m1"), gpu("b200"), args, release=Version(number)))


def test_its_parameters_are_those_published() -> None:
    """456,089,655,296 in the index of MiniMax-M1-80k's files."""
    assert sum(num_params(catalog.load("minimax-m1")).values()) == 456_089_655_296


def test_routers_and_the_head_are_in_float32() -> None:
    """minimax_text_01.py: params_dtype of the gates, `lm_head.float()`; all else has two bytes."""
    wide = 80 * 32 * 6144 + 200_064 * 6144
    assert total_weights(catalog.load("minimax-m1"), Layout()) == 2 * (456_089_655_296 + wide)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_rank_holds_its_share_and_the_whole_of_routers_and_norms(tp: int) -> None:
    whole = 4 * 80 * 32 * 6144 + 2 * (80 * 2 + 1) * 6144  # routers; two norms a layer and the last
    everything = total_weights(catalog.load("minimax-m1"), Layout())
    assert total_weights(catalog.load("minimax-m1"), Layout(tp=tp)) == (everything - whole) // tp + whole


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("number", [(0, 14), (0, 18), (0, 22), (0, 23)])
def test_an_attention_block_is_a_state_wide(number: tuple[int, int], tp: int) -> None:
    """A state of 64 x 128 x 128 x 2 B is 512 tokens of 8 heads x 2 x 128 x 2 B, however many ranks share them."""
    answer = of(number, tp)
    attention = next(group for group in answer.pool.groups if group.first.kind == "full")
    assert (attention.first.block_size, attention.first.page) == (512, 2_097_152 // tp)
    states = [spec for group in answer.pool.groups for spec in group.specs if spec.kind == "state"]
    assert {spec.page for spec in states} == {2_097_152 // tp}
    # 70 states and 10 layers of attention in groups of 10: a block holds ten pages.
    assert len(answer.pool.groups) == 8
    assert answer.capacity.bytes_per_block == 10 * 2_097_152 // tp


def test_the_rotary_table_is_as_long_as_the_context() -> None:
    """64 of 128 dimensions in float32, a row for each position served."""
    formulas = [answer.estimates["buffers"].formula for answer in (of((0, 22)), of((0, 22), context=8192))]
    assert [re.findall(r"rotary ([\d,]+) B", text) for text in formulas] == [["33,554,432"], ["2,097,152"]]


@pytest.mark.parametrize("number", [(0, 24), (0, 33)])
def test_later_releases_do_not_run_it(number: tuple[int, int]) -> None:
    assert "0.23 was the last to do so" in reason_of(of(number))


def test_an_earlier_release_pages_it_otherwise() -> None:
    with pytest.raises(UnsupportedModelError, match=r"vllm@0\.11"):
        of((0, 10))


def test_a_list_that_names_other_layers_is_refused() -> None:
    config = catalog.expand(catalog.facts("minimax-m1")["config"])
    with pytest.raises(InvalidInputError, match="attn_type_list"):
        read_config(config | {"attn_type_list": [0, 1]}, "config.json", "m1")
    # The transformers class's config of MiniMax-Text-01 names the layers.
    kinds = ["full_attention" if i % 8 == 7 else "linear_attention" for i in range(80)]
    named = {key: value for key, value in config.items() if key != "attn_type_list"} | {"model_type": "minimax"}
    spec = read_config(named | {"layer_types": kinds}, "config.json", "m1")
    assert spec.layers == catalog.load("minimax-m1").layers


def test_sglang_has_no_class_for_it() -> None:
    request = Request(catalog.load("minimax-m1"), gpu("b200"), EngineArgs(), release=Version((0, 5), "sglang"))
    assert reason_of(plan(request)).startswith("there is no class for MiniMaxM1ForCausalLM")
