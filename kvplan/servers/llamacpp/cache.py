"""The bytes of the KV caches and of the recurrent states, on each device and on the host.

Source: llama.cpp at commit 0c1e57098: `llama_kv_cache`, `llama_kv_cache_iswa`, `llama_memory_recurrent`,
`llama_model::create_memory`.
"""

from collections import defaultdict

from kvplan.core.errors import UsageError
from kvplan.models.ggml_types import BLOCKS, row_bytes
from kvplan.servers.llamacpp.placement import DEVICE_ALIGNMENT, HOST_ALIGNMENT, Placement, device_bytes, quantized
from kvplan.servers.llamacpp.settings import CACHE_KINDS, CELLS, Context, Settings, padded
from kvplan.servers.llamacpp.shape import Shape


def window_cells(shape: Shape, context: Context, settings: Settings) -> int:
    """Cells of a stream in the layers that attend within a window."""
    if settings.full_windows:
        return context.cells
    slots = context.slots if context.streams == 1 else 1
    return padded(min(context.cells, shape.window * slots + context.ubatch), CELLS)


def layer_cells(shape: Shape, layer: int, context: Context, settings: Settings) -> int:
    return window_cells(shape, context, settings) if shape.windowed[layer] else context.cells


def v_width(shape: Shape, layer: int, settings: Settings) -> int:
    """Elements of a token's V; with -fa off, where V is stored by element, every layer has the widest one's."""
    if shape.is_mla:
        return 0
    if settings.flash != "off":
        return shape.kv_widths(layer)[1]
    return max(shape.kv_widths(other)[1] for other in range(shape.num_blocks))


def check_kinds(shape: Shape, settings: Settings, flash: bool) -> None:
    """Refuse what the server refuses to start with."""
    k, v = settings.cache_k, settings.cache_v
    for flag, kind in (("-ctk", k), ("-ctv", v)):
        if kind not in CACHE_KINDS:
            raise UsageError(f"{flag} {kind.lower()}", "llama.cpp has no such cache type", "use f16 or q8_0")
    if shape.is_mla and k != v:
        cure = f"use -ctv {k.lower()}"
        raise UsageError(f"-ctk {k.lower()} -ctv {v.lower()}", "this model keeps one cache for both", cure)
    if quantized(v) and not flash:
        raise UsageError(f"-ctv {v.lower()}", "a quantized V cache needs flash attention", "use -fa on or -ctv f16")
    if settings.flash == "off":
        return
    for which, (flag, kind) in enumerate((("-ctk", k), ("-ctv", v))):
        for layer in shape.running:
            if (head := shape.head_dims(layer)[which]) % BLOCKS[kind][0]:
                problem = f"blocks of {BLOCKS[kind][0]} elements do not divide heads of {head}"
                raise UsageError(f"{flag} {kind.lower()}", problem, f"use {flag} f16")


def layer_bytes(shape: Shape, layer: int, context: Context, settings: Settings) -> list[tuple[int, int]]:
    """(bytes, bytes on a device) of each cache tensor of a layer: K, V, convolution and recurrent state."""
    cells, sizes = layer_cells(shape, layer, context, settings) * context.streams, []
    if shape.attends(layer):
        widths = (shape.kv_widths(layer)[0], settings.cache_k), (v_width(shape, layer, settings), settings.cache_v)
        for width, kind in widths:
            nbytes = row_bytes(kind, width) * cells
            sizes.append((nbytes, device_bytes(kind, width, nbytes) if nbytes else 0))
    if shape.keeps_state(layer):
        sizes += [(4 * width * context.slots * context.states,) * 2 for width in (shape.conv_state, shape.scan_state)]
    return sizes


def context_bytes(shape: Shape, placement: Placement, context: Context, settings: Settings) -> dict[int | None, int]:
    """Bytes of caches and states on each device in use, and on the host (None)."""
    totals: dict[int | None, int] = defaultdict(int)
    for layer in shape.running:
        where = placement.layers[layer] if settings.offload_cache else None
        for nbytes, on_device in layer_bytes(shape, layer, context, settings):
            alignment = HOST_ALIGNMENT if where is None else DEVICE_ALIGNMENT
            totals[where] += padded(nbytes if where is None else on_device, alignment)
    return dict(totals)
