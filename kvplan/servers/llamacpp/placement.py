"""Which tensor lies on which device, and the bytes of the buffers that hold them.

Source: llama.cpp at commit 0c1e57098: `llama_model_base::load_tensors`, `llama_model_loader::create_tensor`, and the
buffer types of ggml's CUDA and CPU backends.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from struct import pack, unpack
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.models.ggml_types import BLOCKS, row_bytes
from kvplan.servers.llamacpp.settings import Device, Settings, padded
from kvplan.servers.llamacpp.shape import FileLike, Shape, TensorLike

DEVICE_ALIGNMENT: Final = 128
HOST_ALIGNMENT: Final = 32
# CUDA kernels read quantized rows in runs of so many elements; what a row lacks is allocated once behind the tensor.
ROW_ELEMENTS: Final = 512
# Tensors of no layer that the server keeps beside the embedding, on the host.
INPUTS: Final = ("token_embd.weight", "position_embd.weight", "token_types.weight", "per_layer_token_embd.weight")
# Architectures that read the output before the embedding, and so keep a tied one twice on the host, too.
OUTPUT_FIRST: Final = ("gemma3n", "gemma4")
ROPE_FACTORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Tensors of no layer that are placed like those of the first.
FIRST_LAYER: Final = ("token_embd_norm", "per_layer_model_proj", "per_layer_proj_norm", *ROPE_FACTORS)


def quantized(kind: str) -> bool:
    return BLOCKS[kind][0] > 1


def device_bytes(kind: str, row: int, nbytes: int) -> int:
    """Bytes of a tensor in a CUDA buffer, the padding of its row included."""
    if quantized(kind) and row % ROW_ELEMENTS:
        nbytes += row_bytes(kind, ROW_ELEMENTS - row % ROW_ELEMENTS)
    return nbytes


def buffer_bytes(tensor: TensorLike, device: int | None) -> int:
    """Bytes that a tensor takes in its buffer, up to where the next one begins."""
    if device is None:
        return padded(tensor.nbytes, HOST_ALIGNMENT)
    return padded(device_bytes(tensor.kind, tensor.shape[0], tensor.nbytes), DEVICE_ALIGNMENT)


def single(value: float) -> float:
    """The value as a C `float` holds it."""
    return float(unpack("f", pack("f", value))[0])


def split_points(devices: Sequence[Device], shares: Sequence[float]) -> list[float]:
    """The cumulative share of each device, added and divided in single precision as llama.cpp does."""
    if not any(shares):
        shares = [device.free for device in devices]
    total, sums = 0.0, []
    for share in (*shares, *[0.0] * len(devices))[: len(devices)]:
        total = single(total + single(share))
        sums.append(total)
    return [single(part / total) for part in sums]


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of each block, of the output and of each tensor; None is the host.

    devices        the devices in use, in the server's order, by their number among all
    layers         block -> position among the devices in use
    tensors        (tensor, position); one that is stored twice stands twice
    gpu_layers     as `-ngl` says it: blocks and the output
    adapters       of each LoRA adapter its tensors, with their positions
    """

    devices: tuple[int, ...]
    layers: tuple[int | None, ...]
    output: int | None
    tensors: tuple[tuple[TensorLike, int | None], ...]
    gpu_layers: int
    adapters: tuple[tuple[tuple[TensorLike, int | None], ...], ...] = ()

    def weights(self, position: int | None) -> int:
        """Bytes of the buffers with weights on a device in use, or on the host."""
        loaded = (self.tensors, *self.adapters)
        return sum(buffer_bytes(tensor, where) for file in loaded for tensor, where in file if where == position)

    def by_name(self) -> dict[str, int | None]:
        """The place that operations read a tensor from; of one that is stored twice, the embedding's."""
        return {tensor.name: where for tensor, where in reversed(self.tensors)}


def devices_in_use(devices: Sequence[Device], settings: Settings) -> tuple[int, ...]:
    """GPUs that the server uses, by number."""
    if settings.split_mode == "row":
        raise UsageError("-sm row", "CUDA devices have no split buffers in this llama.cpp", "use -sm layer")
    if settings.split_mode == "tensor":
        raise UsageError("-sm tensor", "is experimental, and kvplan does not size it", "use -sm layer")
    if settings.split_mode == "none":
        if not devices or settings.main_gpu < 0:
            return ()
        if settings.main_gpu >= len(devices):
            problem = f"there are {len(devices)} devices, numbered from 0"
            raise UsageError(f"-mg {settings.main_gpu}", problem, "use -mg 0")
        return (settings.main_gpu,)
    return tuple(range(len(devices)))


def place(model: FileLike, shape: Shape, settings: Settings, devices: Sequence[Device]) -> Placement:
    """Where each tensor of a file lies under these settings."""
    used = devices_in_use(devices, settings)
    total = shape.num_blocks + 1
    gpu_layers = total if settings.gpu_layers is None else settings.gpu_layers
    points = split_points([devices[i] for i in used], settings.split) if used else []
    first, count = max(total - gpu_layers, 0), min(gpu_layers, total) if used else 0

    def device_of(layer: int) -> int | None:
        if not first <= layer < first + count:
            return None
        return bisect_right(points, single(single(layer - first) / single(count)))

    layers = tuple(map(device_of, range(shape.num_blocks)))
    output = device_of(shape.num_blocks)
    overrides = tuple((override.pattern, override.device) for override in settings.overrides)
    tensors = tuple(_tensors(model, shape, layers, output, overrides, used, settings.mtp_tokens > 0))
    return Placement(used, layers, output, tensors, gpu_layers)


def _tensors(model: FileLike, shape: Shape, layers: Sequence[int | None], output: int | None,
             overrides: tuple[tuple[str, int | None], ...],
             used: tuple[int, ...], drafts: bool) -> Iterator[tuple[TensorLike, int | None]]:  # fmt: skip
    tied = not any(tensor.name == "output.weight" for tensor in model.tensors)
    for tensor in model.tensors:
        block = tensor.layer
        if block is not None and block >= shape.num_layers and not drafts:
            continue
        stated, matches = override(tensor.name, overrides)
        if matches:
            where = None if stated is None else used.index(stated)
            yield tensor, where
            if tied and tensor.name == "token_embd.weight" and where != output:
                yield tensor, output
        elif block is not None:
            yield tensor, layers[block]
        elif tensor.name in INPUTS:
            yield tensor, None
            if tied and tensor.name == "token_embd.weight" and (output is not None or shape.arch in OUTPUT_FIRST):
                yield tensor, output
        elif tensor.name in ROPE_FACTORS:
            yield from ((tensor, where) for where in dict.fromkeys(layers[: shape.num_layers]))
        elif tensor.name.startswith(FIRST_LAYER):
            yield tensor, layers[0]
        else:
            yield tensor, output


def override(name: str, overrides: tuple[tuple[str, int | None], ...]) -> tuple[int | None, bool]:
    """The device of the first pattern of `-ot` that matches a tensor's name, and whether any does."""
    for pattern, device in overrides:
        if compiled(pattern).search(name):
            return device, True
    return None, False


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(f"-ot {pattern!r}", f"is not a regular expression ({error})", "correct it") from None
