"""What a server allocates with given settings: weights, context and compute buffers on each place."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from kvplan.servers.llamacpp.beside import Beside, draft_settings, placed
from kvplan.servers.llamacpp.cache import check_kinds, context_bytes
from kvplan.servers.llamacpp.compute import compute, flash_attention
from kvplan.servers.llamacpp.kernels import OFFLOAD_BATCH
from kvplan.servers.llamacpp.placement import Placement, place, quantized
from kvplan.servers.llamacpp.settings import Context, Device, Settings, context_of
from kvplan.servers.llamacpp.shape import FileLike, Shape, shape_of


class Memory(NamedTuple):
    """Bytes of one place that are in llama.cpp's books."""

    weights: int
    context: int
    compute: int

    @property
    def total(self) -> int:
        return self.weights + self.context + self.compute


class Measured(NamedTuple):
    """What a server allocates: memory of each device in use, by its number, and of the host (None).

    draft  of a draft model or of the model's own MTP blocks, which `places` include
    """

    places: dict[int | None, Memory]
    placement: Placement
    context: Context
    flash: bool
    copies: int
    draft: "Measured | None" = None


class Server:
    """A model on a machine, with what is loaded beside it, measured under one settings after another."""

    def __init__(self, model: FileLike, devices: Sequence[Device], beside: Beside | None = None) -> None:
        self.model, self.devices, self.beside = model, tuple(devices), beside or Beside()
        self._known: dict[tuple[Settings, bool, bool, Settings | None], Measured] = {}
        self._flash: dict[tuple[Settings, Device | None], bool] = {}

    @cached_property
    def shape(self) -> Shape:
        return shape_of(self.model)

    def measure(self, settings: Settings, draft: Settings | None = None) -> Measured:
        """What the server expects to allocate, as `--fit` measures it; raise UsageError for what it refuses.

        draft  the settings of what drafts, if they are not the same: those that `--fit` began with
        """
        return self._known_or_new(settings, True, False, draft)

    def allocate(self, settings: Settings, *, pipeline: bool = True) -> Measured:
        """What it allocates: with several devices, or with caches on the host, other compute buffers than it expects.

        Without `pipeline`: as it tries again if the buffers of several devices at work at once do not fit.
        """
        return self._known_or_new(settings, pipeline, True)

    def _known_or_new(self, settings: Settings, pipeline: bool, allocated: bool,
                      draft: Settings | None = None) -> Measured:  # fmt: skip
        key = settings, pipeline, allocated, draft
        if key not in self._known:
            self._known[key] = self._measure(settings, pipeline, allocated, draft)
        return self._known[key]

    def flash(self, settings: Settings, where: Placement, context: Context) -> bool:
        """Whether it uses flash attention.

        The operation runs where its cache is stored just before it, so that only the devices decide; no length of the
        context does, for a cache is whole runs of cells. The whole graph decides where that is not certain: caches or
        layers elsewhere, layers that store none, heads that differ, slots so many that the weights of the host move.
        """
        shape, used = self.shape, [self.devices[i] for i in where.devices]
        attending = [i for i in shape.running if shape.attends(i)]
        alike = len({shape.head_dims(i) for i in attending}) == 1 and not shape.num_shared_kv
        # A layer of the host computes on a device that reads its weights, or has them by an override.
        drawn = any(device.integrated for device in used) or any("ffn_" not in o.pattern for o in settings.overrides)
        plain = not drawn or all(where.layers[i] is not None for i in attending)
        if not (settings.offload_cache and alike and plain) or context.slots >= OFFLOAD_BATCH:
            key = replace(settings, ctx=0), None
            if key not in self._flash:
                self._flash[key] = flash_attention(shape, where, context, settings, used)
            return self._flash[key]
        positions = {where.layers[i] for i in attending}
        return all(self._flash_on(used[i], settings) for i in positions if i is not None)

    def _flash_on(self, device: Device, settings: Settings) -> bool:
        """Whether a device that holds all layers uses flash attention."""
        alone = replace(settings, ctx=0, gpu_layers=None, overrides=(), split=(), split_mode="layer")
        if (alone, device) not in self._flash:
            where, context = place(self.model, self.shape, alone, [device]), context_of(self.shape, alone)
            self._flash[alone, device] = flash_attention(self.shape, where, context, alone, [device])
        return self._flash[alone, device]

    def _measure(self, settings: Settings, pipeline: bool, allocated: bool, draft: Settings | None) -> Measured:
        shape, context = self.shape, context_of(self.shape, settings)
        where = place(self.model, shape, settings, self.devices)
        used = [self.devices[i] for i in where.devices]
        flash = settings.flash != "off"
        if settings.flash == "auto" and not quantized(settings.cache_v):
            flash = self.flash(settings, where, context)
        check_kinds(shape, settings, flash)
        if allocated and self.beside.adapters:  # --fit does not measure them
            where = placed(self.beside.adapters, where)
        caches = context_bytes(shape, where, context, settings)
        buffers = compute(shape, where, context, settings, used, flash, pipeline=pipeline, allocated=allocated)
        places: dict[int | None, Memory] = {}
        for position in (*range(len(used)), None):
            number = None if position is None else where.devices[position]
            places[number] = Memory(where.weights(position), caches.get(position, 0), buffers.sizes[position])
        if allocated and self.beside.tower:  # --fit leaves room for it instead
            number = 0 if self.beside.on_gpu and used else None
            weights, graph = self.beside.tower_bytes()
            memory = places[number]
            places[number] = Memory(memory.weights + weights, memory.context, memory.compute + graph)
        own = Measured(places, where, context, flash, buffers.copies)
        drafting = self.beside.draft is not None or (settings.mtp_tokens > 0 and not shape.drafts)
        return self._with_draft(own, draft or settings, allocated) if drafting else own

    @cached_property
    def drafter(self) -> "Server":
        """The draft on the same devices, all of their memory free; else the model's own MTP blocks."""
        if self.beside.draft is not None:
            return Server(self.beside.draft, self.devices)
        server = Server(self.model, self.devices)
        server.shape = replace(self.shape, drafts=True)
        return server

    def _with_draft(self, own: Measured, settings: Settings, allocated: bool) -> Measured:
        """The memory with that of a draft, which is loaded after its target."""
        server = self.drafter
        if server.shape.drafts:  # a context of its own on weights that are loaded already
            stated = replace(settings, ctx=own.context.total, cache_k="F16", cache_v="F16", outputs=None)
            draft = server.allocate(stated) if allocated else server.measure(stated)
            places = {place: memory._replace(weights=0) for place, memory in draft.places.items()}
            return own._replace(places=added(own.places, places), draft=draft._replace(places=places))
        if allocated and len(own.placement.devices) > 1 and not any(settings.split):  # shared by what is left
            used = {place: memory.total for place, memory in own.places.items()}
            left = [replace(gpu, free=max(0, gpu.free - used.get(i, 0))) for i, gpu in enumerate(self.devices)]
            server = Server(server.model, left)
        stated = draft_settings(settings, own.context.total, self.beside.draft_layers)
        draft = server.allocate(stated) if allocated else server.measure(stated)
        return own._replace(places=added(own.places, draft.places), draft=draft)


def added(first: Mapping[int | None, Memory], second: Mapping[int | None, Memory]) -> dict[int | None, Memory]:
    return {place: Memory(*map(sum, zip(memory, second[place], strict=True))) for place, memory in first.items()}
