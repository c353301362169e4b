"""The compute buffers: what the graph of a full micro-batch takes on each device and on the host.

Source: llama.cpp at commit 0c1e57098, `llama_context::sched_reserve` and `graph_reserve`. The graph is built and
laid out as the server does before it serves, with nothing in the tensors; the result is exact for the architectures of
architectures.py on CUDA devices (this version, compared with llama.cpp's own answers), not compared elsewhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvplan.servers.llamacpp.allocator import Arena, Layout
from kvplan.servers.llamacpp.architectures import build
from kvplan.servers.llamacpp.blocks import Batch
from kvplan.servers.llamacpp.graph import Tensor
from kvplan.servers.llamacpp.kernels import device_size
from kvplan.servers.llamacpp.placement import DEVICE_ALIGNMENT, HOST_ALIGNMENT, Placement
from kvplan.servers.llamacpp.recurrent import RecurrentBlocks
from kvplan.servers.llamacpp.schedule import PIPELINE_COPIES, Schedule
from kvplan.servers.llamacpp.settings import Context, Device, Settings, padded
from kvplan.servers.llamacpp.shape import Shape


class Compute(NamedTuple):
    """Bytes of the compute buffers on each device in use and on the host (None), and the copies of a batch's inputs."""

    sizes: dict[int | None, int]
    copies: int


def flash_attention(shape: Shape, placement: Placement, context: Context, settings: Settings,
                    devices: Sequence[Device]) -> bool:  # fmt: skip
    """Whether `-fa auto` is flash attention: not if a layer's own place does not compute it.

    With a quantized V cache, which needs it, the server does not ask.
    """
    slots = context.slots
    graph = RecurrentBlocks(shape, placement, context, settings, Batch(slots, 1, slots, slots), True)
    build(graph)
    host = len(placement.devices)
    schedule = Schedule(graph, devices, graph.assigned, offload=settings.offload_ops)
    for layer, op in graph.attentions:
        where = placement.layers[layer]
        if schedule.place.get(id(op)) != (host if where is None else where):
            return False
    return True


def pipelined(shape: Shape, placement: Placement, settings: Settings) -> bool:
    """True if several devices work on several batches at once, for which inputs are kept several times."""
    return (
        len(placement.devices) > 1
        and placement.gpu_layers > shape.num_blocks
        and settings.split_mode == "layer"
        and settings.offload_cache
        and not settings.overrides
    )


def compute(shape: Shape, placement: Placement, context: Context, settings: Settings, devices: Sequence[Device],
            flash: bool, *, pipeline: bool = True, allocated: bool = False) -> Compute:  # fmt: skip
    """The compute buffers; `devices` are those in use.

    pipeline   several devices work on several batches at once if they can; not after buffers for that did not fit
    allocated  what the server allocates; else what it expects when `--fit` asks. Before it measures a graph it forgets
               which place it has pinned norms and attention to, so that it expects other copies between the places.
    """
    tokens = min(context.total, context.ubatch)
    outputs = min(tokens, context.outputs)
    tokens = padded(tokens, context.slots)
    prompt = Batch(tokens, tokens // context.slots, context.slots, outputs)
    copies = PIPELINE_COPIES if pipeline and pipelined(shape, placement, settings) else 1
    batches = [prompt, Batch(context.slots, 1, context.slots, context.slots)] if allocated else [prompt]
    sizes: dict[int | None, int] = {}
    for batch in batches:
        graph = RecurrentBlocks(shape, placement, context, settings, batch, flash)
        build(graph)
        pinned = graph.assigned if allocated else {}
        schedule = Schedule(graph, devices, pinned, offload=settings.offload_ops, copies=copies)
        for place, size in laid_out(schedule, devices).items():
            sizes[place] = max(size, sizes.get(place, 0))
    return Compute(sizes, copies)


def laid_out(schedule: Schedule, devices: Sequence[Device]) -> dict[int | None, int]:
    """Bytes of the buffers that hold a graph."""
    arenas = [Arena(DEVICE_ALIGNMENT) for _ in devices] + [Arena(HOST_ALIGNMENT)]
    known: dict[int, int] = {}

    def size(place: int, tensor: Tensor) -> int:
        if place == len(devices):
            return tensor.nbytes
        if id(tensor) not in known:
            known[id(tensor)] = device_size(devices[place], tensor)
        return known[id(tensor)]

    Layout(arenas, size).run(schedule.laid())
    sizes: dict[int | None, int] = {place: arena.peak for place, arena in enumerate(arenas[:-1])}
    return sizes | {None: arenas[-1].peak}
