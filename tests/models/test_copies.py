"""Quantized copies known by name alone, against others' published configs and the weights that servers logged."""

import pytest

from kvplan.models import catalog, copies
from kvplan.models.lookup import base_of
from kvplan.models.spec import ModelSpec
from kvplan.sizing.weights import Layout, total_weights
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

GIB = 2**30
# What a server's log calls the model's memory, in GiB, by the name of the copy that it loaded. It counts buffers and
# the allocator's rounding, too. Sources: public logs, vLLM 0.6 to 0.19 on one GPU.
LOGGED = {
    "casperhansen/deepseek-r1-distill-qwen-14b-awq": 9.4922,
    "RedHatAI/DeepSeek-R1-Distill-Qwen-14B-FP8-dynamic": 15.4668,
    "/models/DeepSeek-R1-Distill-Qwen-32B-FP8": 32.1993,
    "ybelkada/llava-1.5-7b-hf-awq": 4.2530,
    "/models/phi-4-AutoRound-GPTQ-4bit": 8.5107,
    "someone/Qwen2.5-14B-Instruct-AWQ": 9.3795,
}
# Published copies that are not stored as the tool does by default, and why.
OTHERWISE = {
    "llama-3.1-405b-fp8": "its attention and two layers are in 16 bits",
    "llama-3.1-405b-awq": "made of an earlier upload with every KV head twice",
    "qwen2.5-72b-awq": "its MLP is wider, so that groups divide",
}
# Names that say nothing of how a copy is stored, or a format in which publishers differ.
NOT_TAKEN = (
    "nvidia/Llama-3.3-70B-Instruct-NVFP4", "unsloth/qwen2.5-3b-instruct-unsloth-bnb-4bit", "someone/Qwen3-8B-4bit",
    "someone/Qwen3-8B-GGUF", "someone/Qwen3-8B-exl2", "someone/Qwen3.6-27B-AWQ", "someone/Unheard-Of-7B-AWQ",
    "google/gemma-3-27b-it-qat-w4a16", "someone/Qwen3-8B", "someone/gpt-oss-120b-AWQ",
)  # fmt: skip


def size(spec: ModelSpec) -> int:
    return total_weights(spec, Layout(dtype=spec.dtype))


@pytest.mark.parametrize("name", LOGGED)
def test_a_log_of_a_copy_prints_the_weights_that_its_name_gives(name: str) -> None:
    sized = copies.sized(name)
    assert sized is not None
    assert 1 <= LOGGED[name] / (size(sized[0]) / GIB) < 1.022


def published() -> list[str]:
    """Names of the catalog's quantized copies of models that it has, in a format that is taken by name."""
    names = []
    for name in catalog.model_names():
        base = base_of(name)
        if base != name and catalog.find(base) is not None and copies.format_of(name) is not None:
            names.append(name)
    return names


def test_the_default_config_of_a_format_is_what_publishers_wrote() -> None:
    far = {}
    for name in published():
        sized = copies.sized(name)
        if sized is None:
            assert catalog.load(name).has_states, name
            continue
        error = size(sized[0]) / size(catalog.load(name)) - 1
        if abs(error) > 0.003:
            far[name] = error
    assert len(published()) >= 40
    assert set(far) == set(OTHERWISE)


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_a_name_that_does_not_say_how_a_copy_is_stored_is_not_taken(name: str) -> None:
    assert copies.sized(name) is None


def test_a_pasted_command_with_a_copy_is_planned_and_says_how_it_is_taken(run: Run) -> None:
    result = run(
        "estimate", "--from-command", "vllm serve /models/gemma-3-27b-it-awq --max-model-len 8k", "--gpu", "l40s"
    )
    assert result.code == 0
    assert "sized as google/gemma-3-27b-it in AWQ in 4 bits, as AutoAWQ writes it; others' copies differ" in result.err
    assert "vllm serve /models/gemma-3-27b-it-awq " in result.out


def test_quantization_of_a_model_without_such_a_checkpoint_is_sized_as_a_copy(run: Run) -> None:
    by_flag = run("estimate", "llama-3.3-70b", "--quant", "awq", "--gpu", "2xa100-80g", "--ctx", "32k")
    by_name = run("estimate", "llama-3.3-70b-awq", "--gpu", "2xa100-80g", "--ctx", "32k")
    assert by_flag.code == by_name.code == 0
    assert by_flag.out.replace(" --quantization awq\n", "\n") == by_name.out
    assert "the server's command takes the repository or folder of a copy" in by_name.err


def test_a_format_that_is_no_method_is_offered_as_a_copy(run: Run) -> None:
    refused = run("estimate", "llama-3.3-70b", "--quant", "w4a16", "--gpu", "h100")
    assert refused.errors[0].endswith(
        "name a quantized checkpoint, such as llama-3.3-70b-fp8-dynamic or llama-3.3-70b-w4a16"
    )
    assert run("estimate", "llama-3.3-70b-w4a16", "--gpu", "h100", "--ctx", "8k").code == 0
