"""Expert parallelism under vLLM: redundant experts (EPLB), shared experts, and the buffers for token exchange.

Sources: vLLM 0.33 config/parallel.py, model_executor/layers/fused_moe, distributed/eplb/eplb_state.py and
distributed/device_communicators/all2all.py; DeepEP csrc/legacy/config.hpp. Weights per rank are equal to vLLM's own
parameters (tests/facts/experts.jsonl); the buffers follow the code and were not compared on a device.
"""

from dataclasses import replace
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.units import MIB
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans.plan import Estimate, Request
from kvplan.servers.plans.weights import weight_layout
from kvplan.servers.releases import Version
from kvplan.servers.vllm import moe_backends
from kvplan.servers.vllm.classes import type_of
from kvplan.servers.vllm.features import Feature
from kvplan.servers.vllm.overheads import expert_ranks
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.deepep import GPUS_PER_NODE, low_latency_bytes
from kvplan.sizing.weights import Layout, expert_copies, layers_on, scheme_for, weight_bytes

PLAIN: Final = (None, "allgather_reducescatter", "naive", "pplx")  # from 0.20 on the last two are aliases of the second
DEEPEP_BUFFER: Final = 1024 * MIB  # VLLM_DEEPEP_BUFFER_SIZE_MB
NOT_SIZED: Final = (
    "deepep_v2", "flashinfer_all2allv", "flashinfer_nvlink_one_sided", "flashinfer_nvlink_two_sided", "mori",
    "mori_high_throughput", "mori_low_latency", "nixl_ep", "passthrough",
)  # fmt: skip
SIZED: Final = ("deepep_high_throughput", "deepep_low_latency")
MOST_COPIES: Final = 1024  # of an expert, limited by the size of the maps
# Methods of experts without supports_eplb: with any scheme, or with these kinds (model_executor/layers/quantization).
UNBALANCED: Final = (
    "auto-round", "awq", "awq_marlin", "bitsandbytes", "gptq", "gptq_marlin", "humming", "moe_wna16",
)  # fmt: skip
UNBALANCED_KINDS: Final = {
    "modelopt": ("fp8_tensor", "fp8_channel", "fp8_block", "mxfp8"),
    "compressed-tensors": ("int8_channel", "int8_tensor", "mxfp8"),
    "quark": ("fp8_tensor", "fp8_channel", "fp8_block", "int8_channel", "int8_tensor", "nvfp4"),
}
UNAWARE: Final = ("ignored", "copied")
EPLB_SOURCE: Final = "vLLM 0.33 distributed/eplb/eplb_state.py (add_model); as its code reads, compared with no device"
DEEPEP_SOURCE: Final = (
    "vLLM 0.33 distributed/device_communicators/all2all.py, DeepEP csrc/legacy/config.hpp; as the code reads, compared "
    "with no device"
)


def check(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject expert settings that vLLM rejects, and exchanges that are not sized."""
    moe_backends.check(args.moe_backend, release)
    ranks, spare = expert_ranks(args), args.num_redundant_experts
    backend = args.all2all_backend
    if backend is not None and backend not in (*PLAIN, *NOT_SIZED, *SIZED):
        known = ", ".join(name for name in (*PLAIN, *SIZED) if name)
        raise UsageError(f"--all2all-backend {backend}", "is not supported by vLLM", f"use one of {known}")
    exchanges = args.enable_expert_parallel and args.data_parallel_size > 1
    if backend == "pplx" and exchanges and not release.has("no_pplx"):
        raise UnsupportedModelError("--all2all-backend pplx", "keeps buffers that are not sized", "remove it")
    if backend in NOT_SIZED and exchanges:
        known = ", ".join(name for name in (*PLAIN, *SIZED) if name)
        raise UnsupportedModelError(
            f"--all2all-backend {backend}", "keeps buffers that are not sized", f"use {known}, or remove it"
        )
    if not args.enable_eplb:
        if spare:
            raise UsageError("--num-redundant-experts", "requires --enable-eplb", "add it, or remove this flag")
        return
    if not release.has("eplb"):
        raise UsageError(
            "--enable-eplb", f"is not supported by {release.label}", "remove it, or take vllm@0.10 or newer"
        )
    if not args.enable_expert_parallel:
        raise UsageError("--enable-eplb", "requires --enable-expert-parallel", "add it")
    if ranks == 1:
        raise UsageError("--enable-eplb", "requires several ranks", "raise --tp or --dp")
    if type_of(spec).balances == "refused" or is_unbalanced(spec):
        raise UsageError("--enable-eplb", f"vLLM does not balance the experts of {spec.name}", "remove it")
    if spare and type_of(spec).balances == "copied":
        problem = f"vLLM stops: its class of {spec.model_type} copies experts without balancing them"
        raise UsageError(f"--num-redundant-experts {spare}", problem, "remove it")
    experts = num_experts(spec)
    if (experts + spare) % ranks:
        least = -(-experts // ranks) * ranks - experts
        raise UsageError(
            f"--num-redundant-experts {spare}",
            f"{experts} experts and {spare} redundant ones cannot be split evenly over {ranks} ranks",
            f"use {least or ranks}",
        )


def is_unbalanced(spec: ModelSpec) -> bool:
    """True if the class that computes the experts' storage scheme does not let them move between ranks."""
    if spec.quantization is None or type_of(spec).balances in UNAWARE:
        return False
    method = spec.quantization.method
    if method not in UNBALANCED_KINDS:
        return method in UNBALANCED
    kinds = UNBALANCED_KINDS[method]
    stored = (
        scheme_for(spec, weight, spec.first_layer + index, None)
        for index, weights in enumerate(spec.layer_weights)
        for weight in weights
        if weight.experts
    )
    return any(scheme is not None and scheme.kind in kinds for scheme in stored)


def copied(request: Request) -> tuple[Request, list[str]]:
    """The request without copies that its model's class does not make, and a note on them."""
    spec, args = request.spec, request.args
    if not args.enable_eplb or not args.num_redundant_experts or type_of(spec).balances != "ignored":
        return request, []
    note = f"--num-redundant-experts has no effect: vLLM's class of {spec.model_type} makes no copies of its experts"
    return replace(request, args=replace(args, num_redundant_experts=0)), [note]


def num_experts(spec: ModelSpec) -> int:
    return max((weight.experts for weight in spec.weights), default=0)


def expert_layers(spec: ModelSpec, layout: Layout) -> list[int]:
    """Layers of a stage that have experts."""
    return [i for i in layers_on(spec, layout) if any(weight.experts for weight in spec.layer_weights[i])]


def balancing(spec: ModelSpec, args: EngineArgs, layout: Layout) -> tuple[int, str]:
    """Bytes that EPLB uses on a rank: a buffer for moving a layer's experts, maps, and the recent load statistics."""
    layers = expert_layers(spec, layout)
    if not args.enable_eplb or not layers or type_of(spec).balances in UNAWARE:
        return 0, ""
    experts, copies = num_experts(spec), num_experts(spec) + args.num_redundant_experts
    first = spec.layer_weights[layers[0]]
    moved = sum(weight_bytes(spec, weight, layers[0], layout) for weight in first if weight.experts)
    maps = len(layers) * (8 * copies + 8 * experts * MOST_COPIES + 8 * experts + 4 * copies + 8 * experts)
    loads = 4 * args.eplb_window_size * len(layers) * copies
    local = expert_copies(next(weight for weight in first if weight.experts), layout)
    text = (
        f"EPLB {moved:,} B of {local} experts that move + {maps:,} B of maps + {args.eplb_window_size:,} steps x "
        f"{len(layers)} layers x {copies} experts x 4 B"
    )
    return moved + maps + loads, text


def exchange(spec: ModelSpec, settings: Settings, args: EngineArgs) -> tuple[int, str]:
    """Bytes of the buffers for token exchange between ranks; none if it uses a step's own tensors."""
    ranks, backend = expert_ranks(args), args.all2all_backend
    if backend not in SIZED or args.data_parallel_size == 1 or not args.enable_expert_parallel:
        return 0, ""
    nodes = 2 if ranks > GPUS_PER_NODE else 1
    if backend == "deepep_high_throughput":
        return nodes * DEEPEP_BUFFER, f"DeepEP {nodes} x {DEEPEP_BUFFER // MIB:,} MiB"
    experts = num_experts(spec) + args.num_redundant_experts
    tokens = settings.max_num_batched_tokens
    size = low_latency_bytes(tokens, spec.hidden_size, experts)
    text = f"DeepEP {DEEPEP_BUFFER // MIB:,} MiB + {size:,} B for {tokens:,} tokens x {experts} experts"
    return DEEPEP_BUFFER + size, text


def with_experts(own: Estimate, spec: ModelSpec, settings: Settings, args: EngineArgs, layout: Layout) -> Estimate:
    """Add to a server's buffers what its experts use in addition to the weights."""
    balanced, kept_text = balancing(spec, args, layout)
    sent, sent_text = exchange(spec, settings, args)
    if not balanced + sent:
        return own
    formula = " + ".join(filter(None, (own.formula, kept_text, sent_text)))
    sources = [EPLB_SOURCE] * bool(balanced) + [DEEPEP_SOURCE] * bool(sent)
    more = balanced + sent
    return Estimate(
        own.low + more, own.likely + more, own.high + more, formula, "; ".join((own.source, *sources)), own.kind
    )


FEATURE: Final = Feature(
    check=lambda request: check(request.spec, request.args, request.release),
    buffers=lambda own, request, settings, stage: with_experts(
        own, request.spec, settings, request.args, weight_layout(request, stage)
    ),
)
