"""What releases of vLLM no longer load, as the wheels of these releases say."""

from dataclasses import replace
from typing import Any

import pytest

from kvplan.core.errors import UnsupportedModelError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec, Quantization, Scheme
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from tests.support.refusals import reason_of


def planned(spec: ModelSpec, engine: str) -> Plan:
    return plan(Request(spec, gpu("h100-80g"), release=parse_engine(engine)))


def stored(quantization: Quantization) -> ModelSpec:
    return replace(catalog.load("llama-3.1-8b"), quantization=quantization)


IN_ORDER = Quantization("gptq", Scheme("gptq", 128, variant="desc_act"))
DOUBLE = Quantization("bitsandbytes", Scheme("nf4_double", 64))


@pytest.mark.parametrize(("quantization", "last"), [(IN_ORDER, 29), (DOUBLE, 27)])
def test_a_format_is_refused_from_the_release_that_dropped_it(quantization: Quantization, last: int) -> None:
    assert planned(stored(quantization), f"vllm@0.{last}").fits
    assert f"0.{last} was the last to do so" in reason_of(planned(stored(quantization), f"vllm@0.{last + 1}"))


@pytest.mark.parametrize("quantization", [IN_ORDER, DOUBLE], ids=["gptq", "bitsandbytes"])
def test_a_format_that_vllm_0_33_answers_is_refused_in_its_words(quantization: Quantization) -> None:
    """One reason for one thing: vLLM 0.33's own text is in the table, and no earlier check hides it."""
    words = {"gptq": "GPTQ group activation ordering (desc_act=True) is no longer supported",
             "bitsandbytes": "Unknown quantization method: bitsandbytes"}  # fmt: skip
    assert words[quantization.method] in reason_of(planned(stored(quantization), "vllm@0.33"))


def test_a_quantization_without_its_method_is_passed_over() -> None:
    """Qwen3-32B-FP8-Static-PerTensor has ModelOpt's form: vLLM 0.33 creates 65,524,246,528 bytes, all in bfloat16."""
    spec = catalog.load("qwen3-32b")
    fp8 = Quantization("modelopt", Scheme("fp8_tensor", static=True), {"lm_head": None}, kv_dtype="fp8", named=False)
    result = planned(replace(spec, quantization=fp8), "vllm")
    assert result.memory.weights == 65_524_246_528
    assert result.settings.kv_dtype == "bfloat16"
    assert any('add "quant_method"' in note for note in result.notes)


def test_the_outer_dtype_of_a_config_counts() -> None:
    """LLaVA-OneVision 7B says float16 outside and bfloat16 for its text: vLLM 0.33 resolves float16."""
    assert planned(catalog.load("llava-onevision-7b"), "vllm").settings.dtype == "float16"


def test_a_checkpoint_in_llavas_own_format_has_no_class() -> None:
    """vLLM 0.33: "Model architectures ['LlavaLlamaForCausalLM'] are not supported for now."."""
    answer = planned(catalog.load("llava-1.5-7b"), "vllm")
    assert reason_of(answer).startswith("there is no class for LlavaLlamaForCausalLM")


def test_turboquant_over_stages_is_refused() -> None:
    """vLLM 0.33: 4,096 blocks in nine groups for Qwen3-8B on two stages with 4 GiB, and 2,647 in one group on one."""
    flags: dict[str, Any] = {
        "kv_cache_dtype": "turboquant_4bit_nc",
        "max_model_len": 16384,
        "kv_cache_memory_bytes": 2**32,
    }
    spec, device = catalog.load("qwen3-8b"), gpu("h100-80g")
    assert plan(Request(spec, device, EngineArgs(**flags))).capacity.num_blocks == 2647
    with pytest.raises(UnsupportedModelError, match="not modeled; use ranks in place of stages"):
        plan(Request(spec, device, EngineArgs(pipeline_parallel_size=2, **flags)))
