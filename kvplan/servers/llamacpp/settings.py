"""What a llama-server is started with, as far as memory depends on it, and what it makes of it.

Source: llama.cpp at commit 0c1e57098: `llama_context::llama_context`, and what llama-server does between its arguments
and the load (four slots that share one cache if `-np` is not given; one output per slot).
"""

from dataclasses import dataclass
from typing import Final, Literal

from kvplan.core.errors import UsageError
from kvplan.servers.llamacpp.shape import GO_BACK, Shape

MIB: Final = 1 << 20
DEFAULT_SLOTS: Final = 4
# Cache types that `-ctk` and `-ctv` take.
CACHE_KINDS: Final = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "IQ4_NL", "Q5_0", "Q5_1")
CELLS: Final = 256  # a cache is whole runs of so many cells
MAX_SLOTS: Final = 256


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as the server finds it: bytes that exist and bytes that are free.

    capability  compute capability times 100, as ggml writes it (8.9 -> 890)
    integrated  True if its memory is the host's, without a limit of its own
    """

    total: int
    free: int
    capability: int = 890
    integrated: bool = False


@dataclass(frozen=True, slots=True)
class Override:
    """A pair of `-ot`: tensors whose name matches the pattern lie on a device, or on the host (None)."""

    pattern: str
    device: int | None


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of llama-server, by what they mean; None is not given.

    ctx         -c: tokens of all slots together; 0: what the model was trained for
    slots       -np
    unified     -kvu, -no-kvu
    gpu_layers  -ngl: layers on GPUs, the output is one; None: all
    split       -ts: shares of the devices; none: their free memory
    outputs     tokens whose logits are kept; None: one per slot
    fit_target  bytes that `--fit` leaves free on each device; one for all, or one each
    mapped      weights of the host stay in the mapped file
    mtp_tokens  tokens that the file's own MTP blocks draft in a step; 0: they are not loaded
    """

    ctx: int = 0
    slots: int | None = None
    unified: bool | None = None
    batch: int = 2048
    ubatch: int = 512
    gpu_layers: int | None = None
    flash: Literal["auto", "on", "off"] = "auto"
    cache_k: str = "F16"
    cache_v: str = "F16"
    offload_cache: bool = True
    full_windows: bool = False
    offload_ops: bool = True
    split_mode: Literal["layer", "none", "row", "tensor"] = "layer"
    main_gpu: int = 0
    split: tuple[float, ...] = ()
    overrides: tuple[Override, ...] = ()
    outputs: int | None = None
    fit: bool = True
    fit_target: tuple[int, ...] = (1024 * MIB,)
    fit_ctx: int = 4096
    mapped: bool = True
    mtp_tokens: int = 0

    @property
    def num_slots(self) -> int:
        return DEFAULT_SLOTS if self.slots is None else self.slots

    @property
    def is_unified(self) -> bool:
        """True if all slots share one cache: so it is, whatever -kvu says, if their number is not given."""
        return self.slots is None or bool(self.unified)


@dataclass(frozen=True, slots=True)
class Context:
    """What the server makes of the context's arguments.

    cells    tokens of one stream: of all slots if they share a cache, else of each
    streams  caches of so many cells
    outputs  tokens whose logits a batch keeps
    states   states kept of each slot, of which the last ones are what it goes back to if drafts are refused
    """

    total: int
    cells: int
    streams: int
    slots: int
    batch: int
    ubatch: int
    outputs: int
    states: int = 1


def padded(value: int, to: int) -> int:
    return -(-value // to) * to


def context_of(shape: Shape, settings: Settings) -> Context:
    """The context as `llama_context` resolves it."""
    slots = settings.num_slots
    if not 1 <= slots <= MAX_SLOTS:
        raise UsageError(f"-np {slots}", f"llama.cpp takes 1 to {MAX_SLOTS} slots", "use fewer")
    total = settings.ctx or shape.trained_ctx
    batch = min(total, settings.batch)
    ubatch = min(batch, settings.ubatch or settings.batch)
    outputs = slots if settings.outputs is None else settings.outputs
    total = padded(total, CELLS)
    states = 1 + settings.mtp_tokens if shape.arch in GO_BACK else 1
    if settings.is_unified:
        return Context(total, total, 1, slots, batch, ubatch, outputs, states)
    cells = padded(total // slots, CELLS)
    return Context(cells * slots, cells, slots, slots, batch, ubatch, outputs, states)
