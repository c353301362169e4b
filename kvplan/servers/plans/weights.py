"""Weights of one rank as a server loads them: sized from the model, read from its files, or given."""

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.models.spec import ModelSpec, Place
from kvplan.servers.base import abilities_of, server_of
from kvplan.servers.plans.plan import Request
from kvplan.servers.words.arguments import HEADS
from kvplan.sizing import weights
from kvplan.sizing.weights import Layout


def weight_layout(request: Request, stage: int, *, online: bool = True) -> Layout:
    """Layout on the requested ranks: what its server replicates, pads or leaves out."""
    args, server = request.args, server_of(request.release.engine)
    replicas = 1 if args.enable_dp_attention else args.data_parallel_size
    sharers = replicas * args.prefill_context_parallel_size  # experts are sharded over them, too
    ep = args.tensor_parallel_size * sharers if args.enable_expert_parallel else 1
    return replace(
        server.layout(request, request.spec),
        tp=args.tensor_parallel_size,
        pp=args.pipeline_parallel_size,
        stage=stage,
        ep=ep,
        dp=sharers,
        sm=request.gpu.sm,
        online=online_scheme(request) if online else None,
        rest_last=server.rest_last,
        redundant=args.num_redundant_experts,
        partition=args.partition,
        attention_tp=args.attention_ranks if args.enable_dp_attention else 0,
        head_tp=args.attention_ranks if args.enable_dp_lm_head else 0,
    )


def own_layout(request: Request, stage: int) -> Layout | None:
    """Layout of weights that the spec itself sizes, or None for a checkpoint's own sizes and given bytes."""
    sized = request.weights_bytes is None and request.checkpoint is None
    return weight_layout(request, stage) if sized else None


# Methods applied while loading, by the names of vLLM 0.33; older releases have the first and the last.
ONLINE_NAMES: Final = {
    **{name: name for name in weights.ONLINE},
    "fp8_per_tensor": "fp8",
    "int8_per_channel_weight_only": "experts_int8",
    "experts_int8": "experts_int8",
}
ONLINE_METHODS: Final = tuple(ONLINE_NAMES)


def online_scheme(request: Request) -> str | None:
    """Scheme a server quantizes to while loading, or None if the checkpoint is loaded unchanged.

    Raise UsageError for a --quantization that contradicts the checkpoint or cannot be applied while loading.
    """
    method, stored = request.args.quantization, request.spec.quantization
    if stored is not None and stored.method == "experts_int8":
        return "experts_int8"
    if method is None or abilities_of(request.release.engine).file_types:
        return None
    if stored is not None:
        if method.removesuffix("_marlin") != stored.method.removesuffix("_marlin"):
            raise UsageError(
                f"--quantization {method}", f"{request.spec.name} is stored as {stored.method}", "remove the flag"
            )
        return None
    if method not in ONLINE_NAMES:
        from kvplan.models import catalog, copies

        own = catalog.find(request.spec.served_name) or ""
        copy = f"{own}-{method.lower()}"
        stored_as = catalog.quantized(request.spec.served_name, method)
        others = [stored_as] if stored_as else [*catalog.siblings(own), *([copy] if copies.sized(copy) else [])]
        raise UsageError(
            f"--quantization {method}",
            f"{request.spec.name} is not quantized, and only {', '.join(ONLINE_METHODS)} can be applied on load",
            ", such as ".join(("name a quantized checkpoint", *filter(None, [" or ".join(others)]))),
        )
    return ONLINE_NAMES[method]


def takes_headers(request: Request) -> bool:
    """True if the files' own sizes are what a server keeps: not if it quantizes while loading, nor for MXFP4, which it
    pads for its kernels.
    """
    assert request.checkpoint is not None
    padded = "mxfp4" in request.spec.scheme_kinds
    return bool(request.checkpoint.tensors) and not padded and online_scheme(request) is None


def rank_weights(request: Request, stage: int) -> dict[str, int]:
    """Weight bytes of one rank by tensor group; those of a draft model are `draft`, a given total is `stated`."""
    args = request.args
    request = embedded(request)
    if request.weights_bytes is not None:
        ranks = args.tensor_parallel_size * args.pipeline_parallel_size
        groups = {"stated": ceil(request.weights_bytes / ranks)}
    elif request.checkpoint is not None and takes_headers(request):
        from kvplan.sizing.stored import stored_weights

        groups = dict(stored_weights(request.spec, request.checkpoint, weight_layout(request, stage)))
    else:
        groups = dict(weights.rank_weights(request.spec, weight_layout(request, stage)))
    if request.draft is not None and stage == args.pipeline_parallel_size - 1:
        groups["draft"] = weights.total_weights(*drafted(request))
    return groups


def drafted(request: Request) -> tuple[ModelSpec, Layout]:
    """The draft and its layout; with pipeline stages a head of the model's own keeps its embedding."""
    draft = request.draft
    assert draft is not None
    if draft.head == "mtp" and request.args.pipeline_parallel_size > 1:
        outer = tuple(replace(w, shared=w.shared and w.group != "embedding") for w in draft.other_weights)
        draft = replace(draft, other_weights=outer)
    return draft, draft_layout(request)


def embedded(request: Request) -> Request:
    """The request with the embedding on the last pipeline stage, too, if a head shares it there."""
    draft, args = request.draft, request.args
    if draft is None or args.pipeline_parallel_size == 1 or draft.head not in HEADS:
        return request
    return replace(request, spec=_embedded_twice(request.spec))


@lru_cache(maxsize=64)
def _embedded_twice(spec: ModelSpec) -> ModelSpec:
    both = tuple(
        replace(weight, place=Place.FIRST_AND_LAST)
        if weight.group == "embedding" and weight.place is Place.FIRST
        else weight
        for weight in spec.other_weights
    )
    return replace(spec, other_weights=both)


def draft_layout(request: Request, *, joined: bool = True) -> Layout:
    """Layout of a draft's weights: as its target's, on one stage, in the target's dtype.

    joined  tensors shared with the target are not duplicated; False: while it loads
    """
    args, draft = request.args, request.draft
    assert draft is not None
    replicas = 1 if args.enable_dp_attention else args.data_parallel_size
    ranks = args.tensor_parallel_size * replicas
    own = server_of(request.release.engine).layout(request, draft)
    return Layout(
        tp=args.tensor_parallel_size,
        ep=ranks if args.enable_expert_parallel and draft.experts_per_token else 1,
        dp=replicas,
        sm=request.gpu.sm,
        dtype=own.dtype,
        online=online_scheme(request) if draft.head == "mtp" else None,
        expert_units=own.expert_units,
        expert_kernel=own.expert_kernel,
        joined=joined,
        redundant=args.num_redundant_experts if draft.experts_per_token else 0,
        whole_shared=own.whole_shared,
        twice_scaled=own.twice_scaled,
        attention_tp=args.attention_ranks if args.enable_dp_attention else 0,
        dense_tp=own.dense_tp,
    )
