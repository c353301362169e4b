"""Kernels of a step: which a layer has, what was measured of them, and what stands for those that were not.

Measured times are rows of the collected data itself (aiconfigurator-core 0.12.0), in milliseconds.
"""

import pickle
from array import array
from dataclasses import replace
from typing import Any

import pytest

from kvplan.core.errors import UsageError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.models.hf_config import read_config
from kvplan.models.spec import Scheme
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.host import Host
from kvplan.simulate.kernels.choice import source_of
from kvplan.simulate.kernels.layers import Exchange, Linear, form_of, layers
from kvplan.simulate.kernels.library import Kernels, Shares
from kvplan.simulate.kernels.roof import IN_BLOCKS, Experts, Heads
from kvplan.simulate.kernels.step import MODULES, KernelStep, kernel_step
from kvplan.simulate.kernels.tables import Surface
from kvplan.simulate.steptime import attention_kinds
from kvplan.simulate.work import StepWork

ROUNDING = 0.0025  # a factor is stored as a whole number of half percents of its logarithm


def planned(model: str = "llama-3.1-8b", gpu_name: str = "h100-80g", engine: str = "vllm", **args: Any) -> Plan:
    engine_args = EngineArgs(**{"max_model_len": 4096, **args})
    return plan(Request(catalog.load(model), gpu(gpu_name), engine_args, parse_engine(engine)))


def alone(answer: Plan, host: Host | None = None) -> KernelStep:
    """A plan's step without a host, or with this one."""
    reaches = tuple(kind.reach for kind in attention_kinds(answer))
    return kernel_step(answer, reaches, Shares(), host=host or Host())


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "tokens", "outputs", "inputs", "measured"),
    [
        ("bfloat16", 16384, 16384, 16384, 12.701923794216581),  # 693 TFLOP/s, 70% of the data sheet's
        ("bfloat16", 64, 4096, 4096, 0.014767110347747803),
        ("fp8", 16384, 16384, 16384, 8.10567135281033),  # 1,085 TFLOP/s
    ],
)
def test_a_linear_layer_takes_what_was_measured(
    form: str, tokens: int, outputs: int, inputs: int, measured: float
) -> None:
    kernels = Kernels(gpu("h100-80g"), "vllm", Shares())
    assert kernels.gemm(form, tokens, outputs, inputs) == pytest.approx(measured / 1000, rel=ROUNDING)


@pytest.mark.parametrize(("tokens", "measured"), [(1, 0.047456), (64, 0.302490), (1024, 0.770118)])
def test_experts_take_what_was_measured(tokens: int, measured: float) -> None:
    """gpt-oss-120b in mxfp4 on two ranks."""
    seconds = Kernels(gpu("h100-80g"), "vllm", Shares()).experts("mxfp4", tokens, Experts(2880, 2880, 4, 128, 2, 1))
    assert seconds == pytest.approx(measured / 1000, rel=ROUNDING)


@pytest.mark.parametrize(("context", "measured"), [(256, 0.046112), (1024, 0.119408), (4096, 0.353573)])
def test_decoding_attends_as_long_as_measured(context: int, measured: float) -> None:
    """64 sequences, 32 heads over 8 of 128."""
    seconds = Kernels(gpu("h100-80g"), "vllm", Shares()).decode(64, context, Heads(32, 8, 128))
    assert seconds == pytest.approx(measured / 1000, rel=ROUNDING)


@pytest.mark.parametrize(("elements", "measured"), [(524_288, 0.014968), (536_870_912, 4.009240)])
def test_an_all_reduce_takes_what_was_measured(elements: int, measured: float) -> None:
    """Numbers of 16 bits on 8 H100, in a graph; the largest at a bus bandwidth of 469 GB/s, NCCL's known 470."""
    seconds = Kernels(gpu("h100-80g"), "vllm", Shares()).all_reduce(8, elements)
    assert seconds == pytest.approx(measured / 1000, rel=ROUNDING)


def test_vllms_block_layers_are_those_of_the_same_kernel_elsewhere() -> None:
    """DeepGEMM on an H200, 8 tokens, 7,168 x 2,048: vLLM's rows hold a launch of 64.2 us, SGLang's the kernel: 8.85."""
    seconds = Kernels(gpu("h200"), "vllm", Shares()).gemm("fp8_block", 8, 7168, 2048)
    assert round(1e6 * seconds, 1) == 8.8  # the least that was measured for 8 tokens or more


def test_between_measured_places_a_factor_is_linear_in_logarithms() -> None:
    """Axes of 1 and e, values of 0 and 200 half percents: halfway e^0.5, outside the edge's."""
    surface = Surface(((0.0, 1.0),), array("h", [0, 200]))
    e = 2.718281828459045
    places = {1.0: 1.0, e**0.5: e**0.5, e: e, 0.1: 1.0, 100.0: e}
    assert {place: surface(place) for place in places} == pytest.approx(places)


# --- layers -----------------------------------------------------------------------------------------------------------


def test_a_dense_model_multiplies_by_all_its_weights() -> None:
    """Llama-3.1-8B: 8,030,261,248 parameters less the embedding, the head (both 128,256 x 4,096) and 65 norms."""
    own = layers(planned())
    weights = sum(times * layer.outputs * layer.inputs for layer, times in own.linear.items())
    assert weights == 8_030_261_248 - 2 * 128_256 * 4_096 - 65 * 4_096
    assert own.head == Linear("bfloat16", 128_256, 4_096)
    assert (own.sums, own.heads) == (0, {Heads(32, 8, 128): 32})


@pytest.mark.parametrize(
    ("gpu_name", "layers", "hidden", "prompt", "first_token"),
    [("rtx-4090", 48, 5120, 208, 0.0927), ("rtx-a6000", 32, 4096, 256, 0.0894)],
)
def test_a_prompts_all_reduces_take_less_than_a_published_first_token(
    gpu_name: str, layers: int, hidden: int, prompt: int, first_token: float
) -> None:
    """8 RTX 4090 (DeepSeek-R1-Distill-Qwen 14B at 4 requests/s) and 8 RTX A6000 (Mixtral at 2): two of them a layer."""
    assert 2 * layers * Kernels(gpu(gpu_name), "vllm", Shares()).all_reduce(8, prompt * hidden) < first_token


def test_a_rank_has_its_part_of_a_layer_and_its_all_reduces() -> None:
    """Llama-3.1-8B on 4 ranks: 8 heads over 2 each, two sums in each of 32 layers and one of the embedding."""
    own = layers(planned(tensor_parallel_size=4))
    assert own.heads == {Heads(8, 2, 128): 32}
    assert (own.sums, own.ranks) == (65, 4)
    assert own.linear[Linear("bfloat16", 14_336 * 2 // 4, 4_096)] == 32


def test_experts_are_a_kernel_of_their_own() -> None:
    """Mixtral-8x7B: 32 layers, 8 experts of 14,336, two of them for a token."""
    own = layers(planned("mixtral-8x7b", "b200", gpu_memory_utilization=0.95))
    assert own.experts == {("bfloat16", Experts(4096, 14_336, 2, 8, 1, 1)): 32}


MINIMAX_M2 = 62, Experts(3072, 1536, 8, 256, 4, 1)  # layers, and the experts of one of four ranks


def test_experts_in_whole_blocks_take_as_much_longer_as_was_measured() -> None:
    """MiniMax-M2 on 4 H100, ten users, with DeepGEMM's experts and without: 32.21 and 16.39 ms per output token.

    Source: vllm-project/recipes#112, 2025-11-06; four ranks as in #120. Nine in ten of the tables' kernels are within
    10% of what was measured between their places.
    """
    kernels, (times, shape) = Kernels(gpu("h100-80g"), "vllm", Shares()), MINIMAX_M2
    blocks, others = (kernels.experts(form, 10, shape) for form in (IN_BLOCKS, "fp8_block"))
    assert times * (blocks - others) == pytest.approx(32.21e-3 - 16.39e-3, rel=0.1)


def test_a_step_in_whole_blocks_hardly_grows_with_its_users() -> None:
    """Qwen3-235B in blocks of fp8 under vLLM 0.12 on 2 H200: published are 55.8 ms with 4 users, 52.0 with 20."""
    step = alone(planned("qwen3-235b-a22b-fp8", "h200", "vllm@0.12.0", tensor_parallel_size=2))
    few, many = (sum(step.parts(users).values()) for users in (4, 20))
    assert few < many < 1.05 * few


@pytest.mark.parametrize(
    ("engine", "gpu_name", "ranks", "form"),
    [
        ("vllm@0.11.0", "h100-80g", 4, "fp8_block"),  # Triton below 128 tokens
        ("vllm@0.12", "h200", 2, IN_BLOCKS),
        ("vllm@0.14", "b200", 2, IN_BLOCKS),
        ("vllm@0.12", "h200", 8, "fp8_block"),  # Triton from eight ranks on
        ("vllm@0.12", "rtx-pro-6000", 4, "fp8_block"),  # DeepGEMM has no kernels for it
        ("vllm@0.15", "h200", 2, "fp8_block"),
        ("sglang", "h200", 2, "fp8_block"),
    ],
)
def test_experts_are_in_whole_blocks_where_the_release_takes_deep_gemm(
    engine: str, gpu_name: str, ranks: int, form: str
) -> None:
    """Source: vLLM 0.11.0 and 0.12 to 0.15, fused_moe/triton_deep_gemm_moe.py and quantization/fp8.py."""
    own = layers(planned("qwen3-235b-a22b-fp8", gpu_name, engine, tensor_parallel_size=ranks, max_model_len=512))
    assert {stored for stored, _ in own.experts} == {form}


@pytest.mark.parametrize(
    ("server", "users", "measured"), [("sglang", 4, 0.068), ("sglang", 64, 0.089), ("vllm", 4, 0.172)]
)
def test_a_layer_measured_whole_is_the_servers_own(server: str, users: int, measured: float) -> None:
    """GLM-5 on one of eight B200, fp8 KV cache, 1,025 tokens; vLLM's rows name the model otherwise than SGLang's."""
    kernels = Kernels(gpu("b200"), server, Shares())
    names = [tuple(f"dsa_generation/{model}/fp8/fp8_block" for model in MODULES["dsa"] if "GLM" in model)]
    assert kernels.timed_first(names, (8,), users, 1025) == pytest.approx(measured / 1000, rel=0.02)


def test_models_whose_layers_were_measured_whole_are_timed() -> None:
    """DeepSeek-V3.2 reads sparsely (DSA), Qwen3-Next keeps states: 61 modules; 36 of 48 layers are delta nets."""
    sparse = layers(planned("deepseek-v3.2", "b300", tensor_parallel_size=8))
    assert {module.kind: times for module, times in sparse.modules.items()} == {"dsa": 61}
    states = layers(planned("qwen3-next-80b-a3b", "b200", tensor_parallel_size=2))
    assert sum(states.states.values()) == 36


FP8 = {"quant_method": "fp8"}
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
FP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}


def compressed(weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}, "ignore": ["lm_head"]}


SMALL_LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 512, "vocab_size": 1024, "dtype": "bfloat16",
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("quantization", "gpu_name", "form"),
    [
        (FP8, "h100-80g", "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "h100-80g", "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "h100-80g", "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "h100-80g", "fp8_block"),
        (compressed(FP8_WEIGHTS), "h100-80g", "fp8"),
        (compressed(FP8_WEIGHTS | {"type": "int"}), "a100-80g", "int8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "b200", "nvfp4"),
        (compressed(FP4_WEIGHTS), "b200", "nvfp4"),
        # No such arithmetic there, or weights alone are narrow: widened to 16 bits first.
        (FP8, "a100-80g", "wide8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "h100-80g", "int4"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, "b200", "int4"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "h100-80g", "wide8"),
        ({"quant_method": "awq", "bits": 4}, "b200", "int4"),
        ({"quant_method": "gptq", "bits": 4}, "h100-80g", "int4"),
    ],
)
def test_layers_are_multiplied_in_what_the_gpu_has(quantization: dict[str, Any], gpu_name: str, form: str) -> None:
    spec = read_config(SMALL_LLAMA | {"quantization_config": quantization}, "config.json", "small")
    own = layers(plan(Request(spec, gpu(gpu_name), EngineArgs(max_model_len=512))))
    assert {layer.form for layer in own.linear} == {form}


def test_mxfp4_experts_take_inputs_of_8_bits_where_the_checkpoint_does() -> None:
    # vLLM 0.33 fused_moe/oracle/mxfp4.py: bfloat16 inputs come first for gpt-oss, mxfp8 ones for fp8 checkpoints.
    mxfp4 = Scheme("mxfp4", 32)
    assert form_of(mxfp4, gpu("b200"), narrow_inputs=True) == "mxfp4_mxfp8"
    assert form_of(mxfp4, gpu("b200"), narrow_inputs=False) == "mxfp4"
    assert form_of(mxfp4, gpu("h100-80g"), narrow_inputs=True) == "mxfp4"


def test_ranks_that_share_experts_see_each_others_tokens() -> None:
    """DeepSeek-V3 on eight ranks: 58 layers of experts, 3 of one MLP; 256 experts of 2,048."""
    whole = layers(planned("deepseek-v3", "h200", tensor_parallel_size=8))
    assert whole.exchange == Exchange()
    replicas = layers(planned("deepseek-v3", "h200", data_parallel_size=8, enable_expert_parallel=True))
    assert (replicas.exchange, replicas.sums) == (Exchange(8, 8, 58), 0)
    assert {(shape.tp, shape.ep) for _, shape in replicas.experts} == {(1, 8)}
    sharded = layers(planned("deepseek-v3", "h200", data_parallel_size=8))  # vLLM shards experts over the replicas
    assert {(shape.tp, shape.ep) for _, shape in sharded.experts} == {(8, 1)}
    attention = layers(
        planned("deepseek-v3", "h200", "sglang", tensor_parallel_size=8, data_parallel_size=8, enable_dp_attention=True)
    )
    assert (attention.exchange, attention.sums) == (Exchange(8, 8, 61), 0)
    assert (set(whole.latents), set(attention.latents)) == ({128 // 8}, {128})
    assert {shape.tp for _, shape in attention.experts} == {8}
    assert Linear("fp8_block", 2 * 18432 // 8, 7168) in attention.gathered  # the MLP of the first three layers
    alone_s = alone(planned("deepseek-v3", "h200", tensor_parallel_size=8))
    shared_s = alone(planned("deepseek-v3", "h200", data_parallel_size=8))
    moe = "256 experts fp8_block 2,048 x 7,168"
    assert shared_s.parts(16)[moe] == pytest.approx(alone_s.parts(128)[moe])


# --- what stands for kernels that were not measured -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu_name", "base"),
    [("h100-pcie-80g", "h100-80g"), ("a100-40g", "a100-80g"), ("rtx-4090", "l40s"), ("rtx-5090", "rtx-pro-6000")],
)
def test_a_gpu_without_tables_takes_those_of_its_architecture(gpu_name: str, base: str) -> None:
    source = source_of(gpu(gpu_name))
    assert (source.base.name, source.is_own) == (base, False)


def test_a_borrowed_kernel_keeps_its_efficiency_on_another_gpu() -> None:
    """16 MiB of bf16 weights at the bandwidth of an H100 PCIe (2.039 of 3.35 TB/s): as long, by that ratio, less 2 us
    of launch on each.
    """
    own, other = (Kernels(gpu(name), "vllm", Shares()) for name in ("h100-80g", "h100-pcie-80g"))
    large = (1, 28_672, 8_192)
    assert other.gemm("bfloat16", *large) / own.gemm("bfloat16", *large) == pytest.approx(
        gpu("h100-80g").memory_bandwidth / gpu("h100-pcie-80g").memory_bandwidth,  # type: ignore[operator]
        rel=0.02,
    )


def test_a_format_that_was_not_measured_is_named() -> None:
    """No linear layer of 4 bits was measured on an H100."""
    quantization = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    spec = read_config(SMALL_LLAMA | quantization, "config.json", "small")
    step = alone(plan(Request(spec, gpu("h100-80g"), EngineArgs(max_model_len=512))))
    assert any("int4 linear layers" in text for text in step.borrowed)


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "context"), [(1, 512), (8, 2_048), (64, 2_048)])
def test_a_decoding_step_takes_longer_than_its_bytes(batch: int, context: int) -> None:
    """Llama-3.1-8B on H200: 15.01 GB at 4.8 TB/s, 131,072 bytes of KV a token; kernels reach 60 to 95% of that."""
    tokens = batch * context
    least = (2 * 7_504_924_672 + 131_072 * tokens) / 4.8e12
    seconds = alone(planned(gpu_name="h200")).seconds(StepWork(batch, batch, batch, (tokens,), (tokens,)))
    assert least / 0.95 < seconds < least / 0.6


def test_a_step_that_decodes_is_its_lines_value() -> None:
    """To the last bit: the fast simulation takes lines, the other one works."""
    step = alone(planned(), Host(gap=1e-3, step=2e-3, sequence=1e-5, token=1e-4, is_hidden=True))
    for count, read in ((1, 1), (3, 192), (3, 193), (64, 64 * 4096), (64, 64 * 4096 + 1), (1000, 10**6)):
        line = step.line(count, read)
        assert line is not None
        value = max(line.base + line.slope * read, line.least)
        assert step.seconds(StepWork(count, count, count, (read,), (read,))) == value
        assert read <= line.until


def test_a_hidden_scheduler_costs_nothing_until_it_is_the_slower_one() -> None:
    """10 ms of scheduling beside a step of 6 ms of an H100: 10; 1 ms: none; in turn both come on top."""
    answer, work = planned(), StepWork(1, 1, 1, (100,), (100,))
    bare = alone(answer).seconds(work)
    assert bare < 0.010
    assert alone(answer, Host(step=0.010, is_hidden=True)).seconds(work) == 0.010
    assert alone(answer, Host(step=0.001, is_hidden=True)).seconds(work) == bare
    assert alone(answer, Host(step=0.010)).seconds(work) == pytest.approx(bare + 0.010)


def test_more_work_never_takes_less_time() -> None:
    step, last = alone(planned(tensor_parallel_size=2)), 0.0
    for tokens in (1, 2, 3, 10, 100, 1_000, 5_000, 8_192):
        seconds = step.seconds(StepWork(tokens, 1, 1, (tokens,), (tokens**2 // 2,), 1, tokens, (tokens**2 // 2,)))
        assert seconds >= last
        last = seconds
    assert step.seconds(StepWork(read=(0,), pairs=(0,))) == 0.0


def test_a_step_is_the_same_in_another_process() -> None:
    step, work = alone(planned()), StepWork(8, 8, 8, (800,), (800,))
    assert pickle.loads(pickle.dumps(step)).seconds(work) == step.seconds(work)


def test_a_gpu_with_unknown_bandwidth_has_no_step_time() -> None:
    device = replace(gpu("h100-80g"), memory_bandwidth=None)
    with pytest.raises(UsageError, match="bandwidth"):
        alone(plan(Request(catalog.load("llama-3.1-8b"), device, EngineArgs(max_model_len=4096))))
