"""How SGLang's ranks of experts exchange tokens: what DeepEP's buffers take, after the pool, of what is kept back.

Source: SGLang 0.5.23 srt/layers/moe/token_dispatcher/deepep.py, arg_groups/memory_hook.py (reserve_for_deepep_a2a_mb,
reserve_for_graph_mb) and moe_hook.py; the default fractions equal its own classes', the buffers are as the code reads.
"""

from collections.abc import Iterator
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.units import format_gib
from kvplan.models.spec import ModelSpec
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.deepep import RECEIVED, WORKSPACE, low_latency_bytes, normal_bytes

DEEPEP: Final = "deepep"
DISPATCHED: Final = 128  # tokens of a rank at once: SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK
GRAPH_TOKENS, GRAPH_UNIT = 2048, 8  # of prefill graphs (arg_groups/cuda_graph_hook.py: apply_deepep_adjustments)
GRAPHS_MIB: Final = 1024  # kept for prefill graphs
DECODES_MIB: Final = 2048  # kept for decode graphs


def check(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject exchanges that are not sized, or that SGLang does not start."""
    backend, ranks = args.all2all_backend, args.tensor_parallel_size
    if backend in (None, "none"):
        return
    flag = f"--moe-a2a-backend {backend}"
    if backend != DEEPEP:
        raise UnsupportedModelError(flag, "keeps buffers that are not sized", f"use {DEEPEP}, or remove it")
    if not release.has("halves"):
        raise UnsupportedModelError(flag, f"is modeled only for 0.5.23, not for {release.label}", "remove it")
    if not spec.experts_per_token:
        raise UsageError(flag, f"{spec.name} has no experts", "remove it")
    if ranks not in RECEIVED:
        raise UsageError(flag, f"DeepEP takes {', '.join(map(str, RECEIVED))} ranks, not {ranks}", "change --tp-size")


def exchanges(args: EngineArgs) -> bool:
    return args.all2all_backend == DEEPEP


def kept_mib(args: EngineArgs, *, prefill_graphs: bool, decode_graphs: bool) -> int:
    """MiB that the default fraction keeps back for it."""
    return (prefill_graphs * GRAPHS_MIB + decode_graphs * DECODES_MIB) if exchanges(args) else 0


def buffers(spec: ModelSpec, args: EngineArgs) -> int:
    """Bytes of the buffers on a rank, made by the first forward pass, when the pool is there."""
    if not exchanges(args) or args.tensor_parallel_size not in RECEIVED or not spec.experts_per_token:
        return 0  # a log may say of it what its server does not use
    experts = max(weight.experts for weight in spec.weights) + args.num_redundant_experts
    inside, between = normal_bytes(args.tensor_parallel_size, spec.hidden_size)
    if args.deepep_mode == "low_latency":
        inside = between = 0
    if args.deepep_mode != "normal":
        between = max(between, low_latency_bytes(DISPATCHED, spec.hidden_size, experts))
    return inside + between + WORKSPACE


def notes(spec: ModelSpec, args: EngineArgs) -> Iterator[str]:
    if size := buffers(spec, args):
        yield (
            f"DeepEP's buffers take {format_gib(size)} on each GPU after the pool, out of what is "
            "reserved; experts are spread over all ranks, and each holds the shared ones whole"
        )
