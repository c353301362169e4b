"""Workspaces of the kernels that compute the experts, by --moe-backend.

vLLM's own workspaces are shapes in its code (fused_moe's workspace_shapes). Some backends take memory of their own,
which these shapes do not show. FlashInfer's b12x kernels do so for every layer: vLLM 0.33
fused_moe/experts/flashinfer_b12x_moe.py makes a wrapper per layer, FlashInfer 0.7.2 fused_moe/cute_dsl/b12x_moe.py and
blackwell_sm12x/moe_dispatch.py say how large. Measured: one model each in vllm-project/vllm#49476 (11.47 GiB less KV
cache than with marlin where this module's formula for that release gives 12.26) and vllm-project/vllm#49079 (about 32
GiB, 38.6 by the formula); four models in flashinfer-ai/flashinfer#4916.
"""

from functools import partial
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.near import meant, near_names
from kvplan.core.units import DTYPE_BITS, GIB
from kvplan.models.spec import ModelSpec
from kvplan.servers.releases import Version
from kvplan.servers.vllm.rules import expert_backend
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.weights import cdiv, local_shape, stage_layers

Room = tuple[tuple[int, int, int], str]  # ((low, likely, high) bytes, formula)

# The workspace of Triton's fused experts. It explains the difference between MoE and dense models with the same
# vocabulary in vLLM 0.19 logs to 0.03 GiB: Qwen3-30B-A3B 0.50, Qwen1.5-MoE 0.30, DeepSeek-V2-Lite 0.44, Mixtral TP2
# 0.66 GiB (llm-d-planner, accuracy report: 1 thread, 4 models). Other kernels differ: half to twice. MXFP4 kernels show
# none (gpt-oss in that report and in "empirical vLLM memory results": 2 threads, 3 logs).
WORKSPACE_RANGE = (0.5, 2.0)
# NVFP4 experts on Blackwell take [tokens, hidden] (FlashInfer's CUTLASS kernels) or nothing (TensorRT-LLM's). Source:
# vLLM 0.20, 0.25 and 0.33 fused_moe/flashinfer_cutlass_moe.py and oracle/nvfp4.py; GLM-5.1-NVFP4 on RTX PRO 6000.
BLACKWELL = 100
# Above this, tokens go through fused experts in chunks, until 0.17 (vLLM envs.py, VLLM_FUSED_MOE_CHUNK_SIZE).
EXPERT_TOKENS, SMALL_EXPERT_TOKENS = 32_768, 16_384

FUSED: Final = ("marlin", "triton")  # kernels that are not chosen on Blackwell by themselves
B12X: Final = "flashinfer_b12x"
TRTLLM: Final = "flashinfer_trtllm"
# Backends whose workspaces are vLLM's own shapes; of any other, nothing is known. Source: vLLM 0.33 config/kernel.py.
OWN_SHAPES: Final = ("auto", "triton", "marlin", "cutlass", "deep_gemm", "flashinfer_cutlass", TRTLLM)
BACKENDS: Final = (
    *OWN_SHAPES, B12X, "batched_triton", "deep_gemm_mega_moe", "flashinfer_cutedsl", "flashinfer_moe_ep_cutedsl",
    "b12x", "flashinfer_moe_ep_mega_deep_gemm", "humming", "triton_unfused", "aiter", "aiter_mega_moe",
    "aiter_triton_mxfp4_bf16", "aiter_triton_mxfp4_mxfp4", "flydsl", "hpc", "emulation", "rdna3",
)  # fmt: skip
# B12x: routed rows up to which the static kernel serves, and rows by which it splits experts. FlashInfer 0.6's static
# kernel served fewer rows and did not split experts.
STATIC_ROWS, SPLIT_ROWS, TILE, GROUP = 1024, 32, 128, 256
EARLIER_STATIC_ROWS: Final = 640
B12X_LEAST: Final = 0.8  # of the formula: the larger of the two measured differences is 17% below it
MEASURED_ONCE: Final = int(11.47 * GIB)  # more than marlin: Qwen3.6-35B-A3B-NVFP4, 8,192 tokens (vllm#49476)
# What the TensorRT-LLM kernels asked for on a rank of 4 to 32 GPUs with expert parallelism: Qwen3.6-35B-A3B 4.06,
# DeepSeek-R1 4.15, Kimi-K2-Thinking 5.62, GLM-5 6.56 GiB (flashinfer#4916).
TRTLLM_RANGE: Final = (int(4.06 * GIB), int(6.56 * GIB))


def check(name: str | None, release: Version) -> None:
    """Reject a backend that vLLM does not have; other releases may have other names."""
    if name is not None and release.is_compared and expert_backend(name) not in BACKENDS:
        instead = meant(near_names(name, BACKENDS), f"use one of {', '.join(BACKENDS)}")
        raise UsageError(f"--moe-backend {printable(name, 40)}", "is not supported by vLLM", instead)


def expert_tokens(tokens: int, release: Version) -> int:
    """Tokens of a step that go through fused experts at once."""
    if release.has("whole_expert_batches"):
        return tokens
    usual = SMALL_EXPERT_TOKENS if release.has("small_expert_chunks") else EXPERT_TOKENS
    return min(tokens, release.expert_tokens or usual)


def expert_room(spec: ModelSpec, settings: Settings, args: EngineArgs, sm: int, per_choice: int) -> Room:
    """Bytes of the workspaces of the experts' kernels on the stage with the most.

    per_choice  elements of the two buffers of fused experts, for one token and one chosen expert
    """
    (low, likely, high), text = shared_room(spec, settings, args, sm, per_choice)
    name = expert_backend(args.moe_backend)
    if name == B12X:
        return b12x_room(spec, settings, args)
    if name == TRTLLM and (args.enable_expert_parallel or args.data_parallel_size > 1):
        least, limit = TRTLLM_RANGE
        return (low, likely + least, high + limit), f"{text} + 4.06-6.56 GiB measured on 4 servers of {TRTLLM}"
    if name in OWN_SHAPES:
        return (low, likely, high), text
    return (low, likely, high + MEASURED_ONCE), f"{text} + an unknown workspace of {name}: 11.47 GiB of {B12X}"


def shared_room(spec: ModelSpec, settings: Settings, args: EngineArgs, sm: int, per_choice: int) -> Room:
    """Bytes of the workspace that vLLM itself gives the experts, which all layers share."""
    name = expert_backend(args.moe_backend)
    if name == B12X:
        return (0, 0, 0), ""
    element, tokens = DTYPE_BITS[settings.dtype] // 8, settings.max_num_batched_tokens
    at_once = expert_tokens(tokens, settings.version)
    workspace = element * at_once * spec.experts_per_token * per_choice
    product = f"{at_once:,} x {spec.experts_per_token} experts x {per_choice:,} x {element} B"
    is_fused = name in FUSED
    if spec.quantization is not None and spec.quantization.method == "mxfp4":
        return (0, 0, workspace), f" + at most {product}"
    if sm >= BLACKWELL and "nvfp4" in spec.scheme_kinds and not is_fused:
        text = f" + {tokens:,} x {spec.hidden_size:,} hidden x {element} B, at most {product}"
        return (0, element * tokens * spec.hidden_size, workspace), text
    low, high = WORKSPACE_RANGE
    return (int(workspace * low), workspace, int(workspace * high)), f" + {product}"


def b12x_room(spec: ModelSpec, settings: Settings, args: EngineArgs) -> Room:
    """Bytes of the b12x wrappers of the expert layers on the stage with the most of them."""
    stages = stage_layers(spec.num_layers, args.pipeline_parallel_size, partition=args.partition)
    of_layers = [
        next((item for item in weights if item.experts and item.split == "outputs"), None)
        for weights in spec.layer_weights
    ]
    layers = max(sum(of_layers[index] is not None for index in stage) for stage in stages)
    plain = split = 0
    for weight in {item for item in of_layers if item is not None}:
        hidden, rows = local_shape(weight, args.tensor_parallel_size)
        layer = partial(
            b12x_bytes, weight.experts, spec.experts_per_token, hidden, rows[0], settings.max_num_batched_tokens,
            gated=len(rows) > 1,
        )  # fmt: skip
        plain, split = max(plain, layer(split=False)), max(split, layer(split=True))
    if not settings.version.has("b12x_in_every_layer"):
        return (0, plain, layers * plain), f" + {plain:,} B of {B12X}, once for all layers"
    likely = split if settings.version.has("b12x_split_experts") else plain
    text = f" + {layers} layers x {likely:,} B of {B12X} (measured once: 11.47 GiB more than marlin)"
    return (int(B12X_LEAST * layers * plain), layers * likely, layers * split), text


def b12x_bytes(
    experts: int, topk: int, hidden: int, inner: int, tokens: int, *, split: bool, gated: bool = True
) -> int:
    """Bytes of one layer's b12x workspaces: static, dynamic if a step has more rows, and the output.

    inner  width between the two matrices of an expert on this rank
    split  whether the static kernel splits experts, as FlashInfer 0.7 does

    Source: FlashInfer 0.7.2 moe_dispatch.py (allocate_sm120_static_workspace, allocate_sm120_dynamic_workspace).
    """
    packed = hidden // 2
    scales = cdiv(hidden // 16, 4) * 4
    rows = tokens * topk
    limit = STATIC_ROWS if split else EARLIER_STATIC_ROWS
    at_once = min(rows, limit)
    chunks = cdiv(at_once, SPLIT_ROWS) if split else 0
    slots = experts + chunks
    static = slots * (at_once * (packed + 8) + cdiv(at_once, TILE) * TILE * scales + 8)
    if split:
        groups = cdiv(inner, GROUP)
        static += 2 * at_once * groups * hidden + 4 * (max(experts, at_once) + experts * (2 + chunks))
    dynamic = _b12x_dynamic(experts, rows, packed, scales, gated=gated) if rows > limit else 0
    return static + dynamic + 2 * tokens * hidden


def _b12x_dynamic(experts: int, rows: int, packed: int, scales: int, *, gated: bool) -> int:
    """The dynamic kernel's rows are whole tiles of each expert; small steps of gated experts take smaller tiles."""
    per_expert = ((15, 16), (48, 32), (96, 64)) if gated else ()
    tile = next((tile for limit, tile in per_expert if rows < limit * experts), TILE)
    padded = (cdiv(rows, tile) + min(experts, rows) - 1) * tile
    return padded * (packed + 8) + cdiv(padded, TILE) * TILE * scales
