"""Weights that SGLang keeps on the host: --cpu-offload-gb (parameter by parameter, fetched for each layer's forward
pass) and --offload-group-size (the experts of some layers, fetched ahead).

Source: sglang 0.5.23 srt/utils/offloader.py and make_layers (srt/utils/common.py), re-derived; equal to its own
offloaders on its own classes (tests/servers/sglang/test_offload.py).
"""

from collections.abc import Callable, Iterator
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.units import GIB, format_gib, plural
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans.plan import Request
from kvplan.servers.plans.weights import own_layout
from kvplan.servers.releases import Version
from kvplan.servers.sglang.classes import outer_of, outer_type
from kvplan.servers.vllm.offload import Offloaded, Parameter, layer_parameters, until_full
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.allocator import pinned
from kvplan.sizing.weights import Layout, layers_on

SOURCE: Final = "sglang 0.5.23 srt/utils/offloader.py"
COMPARED: Final = "sglang 0.5.23's own offloaders (tests/servers/sglang/test_offload.py): equal, quantized ones to 64 B"
BY_BYTES, BY_LAYERS = "--cpu-offload-gb", "--offload-group-size"
RESIDENT: Final = "self_attn.kv_b_proj"  # read by attention in another shape, so it stays on the GPU


def is_asked(args: EngineArgs) -> bool:
    return bool(args.cpu_offload_gb or args.offload_group_size)


def check(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject what SGLang rejects, and offloading that is not modeled."""
    if not is_asked(args):
        return
    flag = BY_BYTES if args.cpu_offload_gb else BY_LAYERS
    if args.cpu_offload_gb and args.cpu_offload_gb % GIB:
        raise UsageError(
            f"{BY_BYTES} {args.cpu_offload_gb / GIB:.6g}", "SGLang accepts only whole GiB", "write a whole number"
        )
    if not release.has("weights_on_host"):
        raise UnsupportedModelError(flag, f"is modeled only for 0.5.23, not for {release.label}", "remove it")
    if args.speculative_method is not None or args.max_loras:
        beside = "drafts" if args.speculative_method is not None else "adapters"
        raise UnsupportedModelError(flag, f"offloaded weights with {beside} are not modeled", "use only one")
    row = outer_of(spec)
    if not row.offload:
        does = "is not compared with offloaded weights" if row.offload is None else "offloads nothing"
        raise UnsupportedModelError(flag, f"SGLang's class of {outer_type(spec)} {does}", "remove it")
    if row.gate_behind and spec.quantization is not None:
        raise UnsupportedModelError(
            flag, f"quantized experts of {outer_type(spec)} are not compared with offloaded weights", "remove it"
        )
    if not args.cpu_offload_gb:
        _check_groups(spec, args)


def _check_groups(spec: ModelSpec, args: EngineArgs) -> None:
    size, last = args.offload_group_size or 0, args.offload_num_in_group or 1
    if not outer_of(spec).experts_apart:
        raise UnsupportedModelError(
            f"{BY_LAYERS} {size}", f"SGLang's class of {outer_type(spec)} cannot do it", f"use {BY_BYTES}"
        )
    if last > size:
        raise UsageError(f"offload_num_in_group {last}", f"is more than offload_group_size ({size})", "lower it")


def offloaded(request: Request, stage: int) -> Offloaded | None:
    """Weights that one rank of a stage keeps on the host, or None if there are none.

    Raise UnsupportedModelError if individual parameters are not known, UsageError if SGLang does not start.
    """
    args, spec = request.args, request.spec
    if not is_asked(args):
        return None
    layout = own_layout(request, stage)
    if layout is None:
        flag = BY_BYTES if args.cpu_offload_gb else BY_LAYERS
        raise UnsupportedModelError(
            flag, f"{spec.name} is sized by its files, where layers are not told apart", "remove --weights-bytes"
        )
    if not args.cpu_offload_gb:
        return _experts(spec, layout, args)
    layers = layer_parameters(spec, layout, _order(spec))
    return until_full((part for layer in layers for part in layer if not _stays(spec, part)), args.cpu_offload_gb)


def notes(request: Request, stage: int) -> Iterator[str]:
    moved = offloaded(request, stage)
    if moved is not None:
        yield f"{format_gib(moved.size)} of each GPU's weights are kept on the host, fetched in every step: {moved.how}"


def _experts(spec: ModelSpec, layout: Layout, args: EngineArgs) -> Offloaded:
    """The experts of the last layers of each group; those of the first layers stay on the GPU."""
    size, last = args.offload_group_size or 0, args.offload_num_in_group or 1
    parts = [
        [part.size for part in layer if part.name.startswith("mlp.experts") and part.name.endswith(".0")]
        for index, layer in enumerate(layer_parameters(spec, layout, _order(spec)))
        if index % size >= size - last
    ]
    moved = [sum(sizes) for sizes in parts]
    ahead = args.offload_prefetch_step or 1
    if not moved:
        raise UsageError(
            f"{BY_LAYERS} {size}", f"is more than the layers of a stage ({len(layers_on(spec, layout))})",
            "lower it",
        )  # fmt: skip
    if ahead > len(moved):
        raise UsageError(
            f"offload_prefetch_step {ahead}", f"a stage offloads {plural(len(moved), 'layer')}",
            "lower it",
        )  # fmt: skip
    fetched = sum(moved[:ahead])
    how = (
        f"experts of {plural(len(moved), 'layer')}, the last {last} of every {size}; {fetched:,} B of them on the GPU "
        "when the pool is sized, those of a layer more while it runs"
    )
    return Offloaded({"experts": sum(moved)}, fetched, how, sum(pinned(part) for sizes in parts for part in sizes))


def _stays(spec: ModelSpec, part: Parameter) -> bool:
    """True if attention reads it in another shape; KV cache scales are not parameters in SGLang."""
    return part.group == "kv_scales" or (spec.is_mla and part.name.startswith(RESIDENT))


def _order(spec: ModelSpec) -> Callable[[str], int]:
    """Construction order: attention; then the MLP, with the gate before or after the experts; then the norms."""
    behind = outer_of(spec).gate_behind
    order = ("self_attn.", "linear_attn.", *(("mlp.experts", "mlp.gate") if behind else ("mlp.gate",)), *MLP)
    return lambda name: next((rank for rank, prefix in enumerate(order) if name.startswith(prefix)), len(order))


MLP: Final = ("mlp.experts", "mlp.", "block_sparse_moe.")
