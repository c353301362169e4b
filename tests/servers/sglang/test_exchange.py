"""DeepEP's buffers against its own header, compiled on a CPU, and SGLang's default fraction with it."""

import pytest

from kvplan.asked.pasted import read_command
from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.plans.weights import rank_weights
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.deepep import low_latency_bytes, normal_bytes
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

# (ranks, hidden size): bytes inside a node and between nodes, the larger of the dispatch's and the combine's config.
# DeepEP dd758ca csrc/legacy/config.hpp (get_nvl_buffer_size_hint, get_rdma_buffer_size_hint), compiled with g++.
NORMAL = {
    (2, 2048): (31498752, 0), (2, 7168): (83927552, 0), (8, 2048): (125994624, 0), (8, 4096): (209880704, 0),
    (8, 7168): (335709824, 0), (16, 2048): (141744384, 34543744), (16, 7168): (377673984, 91887744),
    (32, 4096): (236117504, 105109120), (32, 7168): (377675264, 168023680), (96, 2048): (236245504, 195419520),
    (144, 7168): (944191744, 779734144),
}  # fmt: skip
# (hidden size, experts): bytes for 128 tokens of a rank (get_low_latency_rdma_size_hint).
LOW_LATENCY = {(2048, 128): 272630912, (2048, 256): 545261696, (7168, 128): 954205312, (7168, 256): 1908410496}
# Model, GPU, ranks, flags: the default fraction that SGLang 0.5.23's own classes resolve.
FRACTIONS = [
    ("deepseek-v3", "h200", 8, "", 0.886),
    ("deepseek-v3", "h200", 8, "--moe-a2a-backend deepep", 0.865),
    ("deepseek-v3", "h200", 8, "--moe-a2a-backend deepep --deepep-mode normal", 0.865),
    ("deepseek-v3", "h200", 8, "--moe-a2a-backend deepep --disaggregation-mode prefill", 0.886),
    ("deepseek-v3", "h200", 8, "--moe-a2a-backend deepep --disaggregation-mode decode", 0.915),
    ("deepseek-v3", "h100", 16, "--moe-a2a-backend deepep --dp-size 16 --enable-dp-attention", 0.297),
    ("qwen3-30b-a3b", "l40s", 4, "--moe-a2a-backend deepep", 0.764),
    ("qwen3-30b-a3b", "a100-80g", 4, "--moe-a2a-backend deepep --disable-cuda-graph", 0.838),
]


def request_of(model: str, device: str, ranks: int, flags: str) -> Request:
    words = f"python -m sglang.launch_server --model-path a/b --tp {ranks} {flags}"
    args = EngineArgs(**read_command(words).args)
    return Request(spec=catalog.load(model), gpu=gpu(device), args=args, release=parse_engine("sglang"))


@pytest.mark.parametrize(("ranks", "hidden"), NORMAL)
def test_buffers_for_prefills_are_those_of_deepeps_header(ranks: int, hidden: int) -> None:
    assert normal_bytes(ranks, hidden) == NORMAL[ranks, hidden]


@pytest.mark.parametrize(("hidden", "experts"), LOW_LATENCY)
def test_buffers_for_decodes_are_those_of_deepeps_header(hidden: int, experts: int) -> None:
    assert low_latency_bytes(128, hidden, experts) == LOW_LATENCY[hidden, experts]


@pytest.mark.parametrize(("model", "device", "ranks", "flags", "fraction"), FRACTIONS)
def test_the_default_fraction_keeps_back_what_sglang_does(
    model: str, device: str, ranks: int, flags: str, fraction: float
) -> None:
    assert plan(request_of(model, device, ranks, flags)).settings.gpu_memory_utilization == fraction


def test_shared_experts_are_whole_and_routed_ones_are_spread() -> None:
    plain = request_of("deepseek-v3", "h200", 8, "--ep-size 8")
    deepep = request_of("deepseek-v3", "h200", 8, "--moe-a2a-backend deepep")
    own, spread = rank_weights(plain, 0), plan(deepep).weight_groups
    assert spread["experts"] == own["experts"]
    # 58 layers of 3 matrices of 7168 x 2048 in fp8, and a float32 scale for each block of 128 x 128.
    assert spread["shared_expert"] == 58 * 3 * (7168 * 2048 + 4 * 56 * 16)


def test_the_buffers_are_said_and_must_have_room(run: Run) -> None:
    command = "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --moe-a2a-backend deepep"
    result = run("estimate", "--from-command", command, "--gpu", "h200", "--ctx", "32k")
    # 335,709,824 B inside the node, 1,908,410,496 B of low latency and a workspace of 32 MiB.
    assert "DeepEP's buffers take 2.12 GiB on each GPU after the pool" in result.err
    full = run("estimate", "--from-command", f"{command} --mem-fraction-static 0.99", "--gpu", "h200", "--ctx", "32k")
    assert "does not start" in full.out


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--moe-a2a-backend mooncake", "keeps buffers that are not sized; use deepep"),
        ("--moe-a2a-backend deepep --tp 6", "DeepEP takes 2, 4, 8"),
        ("--moe-a2a-backend deepep --deepep-config tuned.json", "not modeled"),
    ],
)
def test_exchanges_that_are_not_sized_are_refused(run: Run, flags: str, why: str) -> None:
    command = "python -m sglang.launch_server --tp 8 --model-path deepseek-ai/DeepSeek-V3"
    result = run("estimate", "--from-command", f"{command} {flags}", "--gpu", "h200")
    assert result.code == 2
    assert why in result.errors[0]


def test_a_dense_model_has_nothing_to_exchange() -> None:
    with pytest.raises(KvplanError, match="has no experts"):
        plan(request_of("qwen3-8b", "h200", 8, "--moe-a2a-backend deepep"))
