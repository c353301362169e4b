"""FP8 weights whose blocks a rank's shard does not consist of, against vLLM 0.33's own parameters and refusals."""

import pytest

from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.weights import weight_layout
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.weights import weight_tensors


def request_for(model: str, tp: int, engine: str = "vllm", *, expert_parallel: bool = False) -> Request:
    args = EngineArgs(tensor_parallel_size=tp, enable_expert_parallel=expert_parallel, kv_cache_memory_bytes=2**34)
    return Request(catalog.load(model), gpu("h100-80g"), args, parse_engine(engine))


@pytest.mark.parametrize(
    ("tp", "scales"),
    [
        (4, 4_718_592 + 2_359_296),  # 192 columns a rank: scales per 64 x 64
        (8, 9_437_184 + 4_718_592),  # 96 columns a rank: per 32 x 32
    ],
)
def test_scales_of_experts_follow_the_largest_square_that_divides_the_shard(tp: int, scales: int) -> None:
    """The parameters w13_weight_scale_inv and w2_weight_scale_inv that vLLM 0.33 creates for Qwen3-30B-A3B-FP8."""
    request = request_for("qwen3-30b-a3b-fp8", tp)
    layout = weight_layout(request, 0)
    num_scales = [
        weight_tensors(request.spec, weight, layer, layout)[1]
        for layer, weights in enumerate(request.spec.layer_weights)
        for weight in weights
        if weight.experts
    ]
    assert sum(num_scales) == scales


def test_ranks_that_do_not_share_whole_blocks_are_refused() -> None:
    # "Weight input_size_per_partition = 192 is not divisible by weight quantization block_k = 128"
    refusal = plan(request_for("qwen3-0.6b-fp8", 16)).refusal
    assert refusal is not None
    assert refusal.text.startswith("mlp.down_proj is 1,024 x 192 on each of 16 ranks")
    assert refusal.flags == tuple(f"--tensor-parallel-size {n}" for n in (8, 4, 2, 1))


def test_older_releases_do_not_refine_the_blocks_of_experts() -> None:
    # "The output_size of gate's and up's weight = 96 is not divisible by weight quantization block_n = 128"
    refusal = plan(request_for("qwen3-30b-a3b-fp8", 8, "vllm@0.28")).refusal
    assert refusal is not None
    assert "has 96 values on a rank, which FP8 blocks of 128 do not divide" in refusal.text


def test_whole_experts_need_no_division() -> None:
    assert plan(request_for("qwen3-30b-a3b-fp8", 8, "vllm@0.28", expert_parallel=True)).fits
