"""Weights of one rank, as a server loads them: sized from the model, read from its files, or stated."""

from math import ceil

from kvplan.core.errors import UsageError
from kvplan.servers.base import server_of
from kvplan.servers.plans import Request
from kvplan.servers.vllm import rules as vllm
from kvplan.sizing import weights
from kvplan.sizing.weights import Layout


def weight_layout(request: Request, stage: int, *, online: bool = True) -> Layout:
    args = request.args
    replicas = 1 if args.enable_dp_attention else args.data_parallel_size
    ep = args.tensor_parallel_size * replicas if args.enable_expert_parallel else 1
    return Layout(
        tp=args.tensor_parallel_size,
        pp=args.pipeline_parallel_size,
        stage=stage,
        ep=ep,
        dp=replicas,
        sm=request.gpu.sm,
        dtype=vllm.resolve_dtype(request.spec, args.dtype, request.gpu.sm, request.release),
        online=online_scheme(request) if online else None,
        rest_last=server_of(request.release.engine).rest_last,
        left_out=vllm.left_out(request.spec, args, request.release),
        whole_towers=args.mm_encoder_tp_mode == "data" and request.release.engine != "sglang",
        tower_tp=1 if _keeps_towers_whole(request) else 0,
        expert_tile=vllm.expert_tile(request.spec, args, request.gpu.sm, request.release),
        redundant=args.num_redundant_experts,
        whole_shared=vllm.keeps_shared_whole(request.spec, args, request.release),
        partition=args.partition,
        dense_tp=1 if _keeps_dense_whole(request) else 0,
        attention_tp=args.attention_ranks if args.enable_dp_attention else 0,
        head_tp=args.attention_ranks if args.enable_dp_lm_head else 0,
        marlin=args.max_loras > 0 and request.release.engine == "vllm",
    )


def _keeps_dense_whole(request: Request) -> bool:
    """Whether dense layers are whole on each rank: SGLang's flag counts in models that have experts, too."""
    args, spec = request.args, request.spec
    by_flag = bool(args.moe_dense_tp_size and spec.experts_per_token)
    return by_flag or vllm.keeps_dense_whole(spec, args, request.release)


def _keeps_towers_whole(request: Request) -> bool:
    """Whether SGLang puts the whole tower on each rank."""
    if request.args.mm_encoder_tp_mode != "data" or request.release.engine != "sglang":
        return False
    from kvplan.servers.sglang.models import keeps_towers_whole  # of no account to another server

    return keeps_towers_whole(request.spec, request.args)


def own_layout(request: Request, stage: int) -> Layout | None:
    """The layout of weights that the spec itself sizes; None for a checkpoint's own sizes and stated bytes."""
    sized = request.weights_bytes is None and request.checkpoint is None
    return weight_layout(request, stage) if sized else None


ONLINE_METHODS = ("fp8", "experts_int8")


def online_scheme(request: Request) -> str | None:
    """The scheme a server quantizes to while loading; None when the checkpoint is taken as it is.

    Raises UsageError for a --quantization that contradicts the checkpoint or cannot be done while loading.
    """
    method, stored = request.args.quantization, request.spec.quantization
    if method is None:
        return None
    if stored is not None:
        if method.removesuffix("_marlin") != stored.method.removesuffix("_marlin"):
            raise UsageError(
                f"--quantization {method}", f"{request.spec.name} is stored as {stored.method}", "leave the flag out"
            )
        return None
    if method not in ONLINE_METHODS:
        from kvplan.models import catalog

        sibling = catalog.quantized(request.spec.served_name, method)
        raise UsageError(
            f"--quantization {method}",
            f"{request.spec.name} is not quantized, and only {' or '.join(ONLINE_METHODS)} can be applied on load",
            f"name a quantized checkpoint{f', such as {sibling}' if sibling else ''}",
        )
    return method


def takes_headers(request: Request) -> bool:
    """Whether the files' own sizes are what a server keeps: not when it quantizes while loading, nor for MXFP4, which
    it pads for its kernels."""
    assert request.checkpoint is not None
    padded = "mxfp4" in vllm.scheme_kinds(request.spec)
    return bool(request.checkpoint.tensors) and not padded and online_scheme(request) is None


def rank_weights(request: Request, stage: int) -> dict[str, int]:
    """Weight bytes of one rank by tensor group; a draft model's are `draft`, a stated total is `stated`."""
    args = request.args
    if request.weights_bytes is not None:
        ranks = args.tensor_parallel_size * args.pipeline_parallel_size
        groups = {"stated": ceil(request.weights_bytes / ranks)}
    elif request.checkpoint is not None and takes_headers(request):
        from kvplan.sizing.stored import stored_weights

        groups = dict(stored_weights(request.spec, request.checkpoint, weight_layout(request, stage)))
    else:
        groups = dict(weights.rank_weights(request.spec, weight_layout(request, stage)))
    if request.draft is not None:
        groups["draft"] = weights.total_weights(request.draft, draft_layout(request))
    return groups


def draft_layout(request: Request, *, joined: bool = True) -> Layout:
    """How a draft's weights are spread: as its target's, on one stage, in the target's dtype.

    joined  what it shares with its target is the target's; False: while it loads
    """
    args, draft = request.args, request.draft
    assert draft is not None
    ranks = args.tensor_parallel_size * args.data_parallel_size
    return Layout(
        tp=args.tensor_parallel_size,
        ep=ranks if args.enable_expert_parallel and draft.experts_per_token else 1,
        dp=args.data_parallel_size,
        sm=request.gpu.sm,
        dtype=vllm.resolve_dtype(request.spec, args.dtype, request.gpu.sm, request.release),
        online=online_scheme(request) if draft.head == "mtp" else None,
        expert_tile=vllm.expert_tile(draft, args, request.gpu.sm, request.release),
        joined=joined,
        redundant=args.num_redundant_experts if draft.experts_per_token else 0,
        whole_shared=vllm.keeps_shared_whole(draft, args, request.release),
    )
