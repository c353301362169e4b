"""Weights that vLLM keeps on the host: --cpu-offload-gb (read over the bus in place) and --offload-group-size (fetched
ahead into buffers on the GPU).

Source: vLLM 0.33 config/offload.py and model_executor/offloader (uva.py, prefetch.py), re-derived; equal to its own
classes except for the order of a layer's parameters: one more may be offloaded (tests/servers/vllm/test_offload.py).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Final, Literal

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.records import dataclass
from kvplan.core.units import format_gib, plural
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans.plan import Estimate, HostRow, Plan, Request
from kvplan.servers.plans.weights import own_layout
from kvplan.servers.releases import Version
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.vllm.changes import since
from kvplan.servers.vllm.features import Feature
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.allocator import pinned, weights_segments
from kvplan.sizing.weights import Layout, is_built, kv_scale_bytes, layers_on, on_stage, weight_tensors

SOURCE: Final = "vLLM 0.33 model_executor/offloader"
COMPARED: Final = "vLLM 0.33's own offloaders (tests/servers/vllm/test_offload.py): equal but for one parameter's size"
SLEEP: Final = "vLLM 0.33 device_allocator/cumem.py and v1/worker/gpu_worker.py (sleep)"
FLAGS: Final = {"uva": "--cpu-offload-gb", "prefetch": "--offload-group-size"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a rank: its name within its layer, its tensor group and its bytes."""

    name: str
    group: str
    size: int


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Weights that a rank keeps on the host instead of the GPU.

    groups   bytes by tensor group
    buffers  bytes on the GPU into which layers are fetched
    how      what was offloaded
    host     bytes of host memory that torch takes for them, parameter by parameter
    """

    groups: Mapping[str, int]
    buffers: int
    how: str
    host: int

    @property
    def size(self) -> int:
        return sum(self.groups.values())


def backend(args: EngineArgs) -> Literal["uva", "prefetch"] | None:
    """The offloading method in effect, or None; prefetching wins if both are requested."""
    group, size = bool(args.offload_group_size), bool(args.cpu_offload_gb)
    match args.offload_backend:
        case "uva":
            return "uva" if size else None
        case "prefetch":
            return "prefetch"
        case _:
            return "prefetch" if group else "uva" if size else None


def grouped(args: EngineArgs) -> tuple[int, int]:
    """(layers per group, layers of those that are offloaded)."""
    return args.offload_group_size or 0, args.offload_num_in_group or 1


def check(args: EngineArgs, release: Version) -> None:
    """Reject what vLLM rejects."""
    fetches = args.offload_group_size or args.offload_backend is not None
    if fetches and not release.has("prefetched_weights"):
        raise vllm.unknown_flag("--offload-group-size", release, since("prefetched_weights"))
    if args.offload_backend != "prefetch" and not args.offload_group_size:
        return
    size, item = grouped(args)
    if item > size:
        raise UsageError(f"offload_num_in_group {item}", f"must be <= offload_group_size ({size})", "lower it")


def offloaded(request: Request, stage: int) -> Offloaded | None:
    """Weights that one rank of a stage keeps on the host, or None if there are none.

    Raise UnsupportedModelError if individual parameters are not known.
    """
    args, spec = request.args, request.spec
    kind = backend(args)
    if kind is None:
        return None
    layout = own_layout(request, stage)
    if layout is None:
        raise UnsupportedModelError(
            FLAGS[kind], f"{spec.name} is sized by its files, where layers are not told apart", "remove --weights-bytes"
        )
    if request.draft is not None:
        raise UnsupportedModelError(FLAGS[kind], "offloaded weights with a draft are not modeled", "use only one")
    if kind == "prefetch":
        moved = _by_groups(spec, layout, args, copies=2 if request.release.has("pinned_again") else 1)
    else:
        parameters = chain(_towers(spec, layout), *layer_parameters(spec, layout, _rank))
        moved = until_full(parameters, args.cpu_offload_gb or 0)
    return moved if request.release.pinned_weights else replace(moved, host=moved.size)


def moved(request: Request, stage: int) -> Mapping[str, int]:
    """Bytes of a stage's weights on the host, by tensor group."""
    weights = offloaded(request, stage)
    return {} if weights is None else weights.groups


def with_buffers(buffers: Estimate, request: Request, stage: int) -> Estimate:
    """Add to the buffers those that layers are fetched into."""
    moved = offloaded(request, stage)
    if moved is None or not moved.buffers:
        return buffers
    return Estimate(
        buffers.low + moved.buffers,
        buffers.likely + moved.buffers,
        buffers.high + moved.buffers,
        f"{buffers.formula}; {moved.buffers:,} B to fetch offloaded weights into",
        buffers.source,
        buffers.kind,
    )


def notes(request: Request, stage: int) -> Iterator[str]:
    if request.args.enable_sleep_mode:
        yield "sleep mode: how its allocator rounds up sizes is not modeled"
    moved = offloaded(request, stage)
    if moved is not None:
        what = "read over the bus in every step" if backend(request.args) == "uva" else "fetched in every step"
        yield f"{format_gib(moved.size)} of each GPU's weights are kept on the host and {what}: {moved.how}"


def host_rows(plan: Plan) -> Iterator[HostRow]:
    weights = offloaded(plan.request, plan.stage)
    if weights is not None:
        yield pinned_row(weights, SOURCE, COMPARED)
    shared = plan.request.colocated
    if plan.request.args.enable_sleep_mode and (
        shared is None or (shared.level != 2 and "weights" not in shared.keeps)
    ):
        how = "the weights while the server sleeps at level 1, each segment of torch's pinned in a power of two bytes; "
        yield HostRow("weights", _asleep(plan), "rank", f"{how}at level 2 they are dropped", SLEEP, "")


def pinned_row(weights: Offloaded, source: str, compared: str) -> HostRow:
    how = "in their own size" if weights.host == weights.size else "each parameter pinned in a power of two bytes"
    return HostRow("weights", weights.host, "rank", f"{weights.how}; {weights.size:,} B, {how}", source, compared)


def _asleep(plan: Plan) -> int:
    """Bytes of a rank's weights on the host: segment by segment where all of them are its own and on the GPU."""
    request, layout = plan.request, own_layout(plan.request, plan.stage)
    if layout is None or request.draft is not None or backend(request.args) is not None:
        return plan.memory.weights
    return sum(map(pinned, weights_segments(request.spec, layout)))


FEATURE: Final = Feature(
    check=lambda request: check(request.args, request.release),
    moved=moved,
    buffers=lambda own, request, settings, stage: with_buffers(own, request, stage),
    notes=notes,
    host=host_rows,
)


def until_full(parameters: Iterable[Parameter], limit: int) -> Offloaded:
    """Offload parameters in construction order until the requested number of bytes is reached."""
    groups: dict[str, int] = {}
    total = host = 0
    for parameter in parameters:
        if total >= limit:
            break
        groups[parameter.group] = groups.get(parameter.group, 0) + parameter.size
        total += parameter.size
        host += pinned(parameter.size)
    how = f"the first parameters of the layers until {format_gib(limit)} are reached"
    return Offloaded(groups, 0, how, host)


def _by_groups(spec: ModelSpec, layout: Layout, args: EngineArgs, copies: int) -> Offloaded:
    """Offload the last layers of each group; per prefetched layer, one buffer for each distinct parameter shape.

    copies  pinned in turn of each parameter but the norms, of which torch gives none back
    """
    groups: dict[str, int] = {}
    shapes: set[tuple[str, int]] = set()
    count = host = 0
    size, item = grouped(args)
    for index, layer in enumerate(layer_parameters(spec, layout, _rank)):
        if index % size < size - item:
            continue
        count += 1
        for parameter in layer:
            groups[parameter.group] = groups.get(parameter.group, 0) + parameter.size
            shapes.add((parameter.name, parameter.size))
            host += pinned(parameter.size) * (1 if parameter.group == "norm" else copies)
    ahead = args.offload_prefetch_step or 1
    buffers = ahead * sum(width for _, width in shapes)
    how = f"{plural(count, 'layer')}, the last {item} of every {size}; buffers for {ahead} on the GPU: {buffers:,} B"
    if copies > 1:
        how += "; pinned as created and again as loaded"
    return Offloaded(groups, buffers, how, host)


def layer_parameters(spec: ModelSpec, layout: Layout, rank: Callable[[str], int]) -> Iterator[list[Parameter]]:
    """Parameters of each layer of a stage, approximately in the construction order of a server's classes: by `rank`."""
    for index in layers_on(spec, layout):
        weights = sorted(spec.layer_weights[index], key=lambda weight: rank(weight.name))
        parts = [
            Parameter(f"{weight.name}.{number}", weight.group, size)
            for weight in weights
            for number, size in enumerate(weight_tensors(spec, weight, spec.first_layer + index, layout))
            if size
        ]
        attention = sum(part.name.startswith(ATTENTION) for part in parts)
        scales = kv_scale_bytes(spec.layers[index], spec.quantization, layout, spec.dtype)
        if scales:
            parts.insert(attention, Parameter("kv_scales", "attention", scales))
        yield parts


ATTENTION: Final = ("self_attn.", "linear_attn.", "attn.", "mixer.")


def _rank(name: str) -> int:
    """Construction order: attention, its sinks first; then the MLP, shared experts before the others; then the
    norms.
    """
    order = ("self_attn.sinks", *ATTENTION, "mlp.gate", "mlp.shared", "mlp.", "block_sparse_moe.")
    return next((rank for rank, prefix in enumerate(order) if name.startswith(prefix)), len(order))


def _towers(spec: ModelSpec, layout: Layout) -> Iterator[Parameter]:
    """Parameters of encoders, which precede the language model's layers."""
    for weight in spec.other_weights:
        if weight.serves and is_built(weight, layout) and on_stage(weight.place, layout):
            for number, size in enumerate(weight_tensors(spec, weight, None, layout)):
                if size:
                    yield Parameter(f"{weight.name}.{number}", weight.group, size)
