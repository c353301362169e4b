"""llama.cpp's memory on each place as a plan: the file's weights, a fixed cache, compute buffers."""

from collections import Counter
from dataclasses import replace
from typing import Final

from kvplan.core.records import dataclass
from kvplan.core.units import MIB, format_gib, plural
from kvplan.models.gguf_model import GGUFModel, gguf_of
from kvplan.models.spec import ModelSpec
from kvplan.servers.llamacpp import asked
from kvplan.servers.llamacpp.beside import TOWER_COMPUTE
from kvplan.servers.llamacpp.cache import layer_bytes
from kvplan.servers.llamacpp.changes import SOURCE, TYPES
from kvplan.servers.llamacpp.fit import Fit, fit
from kvplan.servers.llamacpp.inversions import room
from kvplan.servers.llamacpp.loading import Obstacle, loaded
from kvplan.servers.llamacpp.measure import Measured, Server
from kvplan.servers.llamacpp.outside import SOURCE as UNACCOUNTED
from kvplan.servers.llamacpp.outside import growth
from kvplan.servers.llamacpp.pace import speed
from kvplan.servers.llamacpp.placement import buffer_bytes
from kvplan.servers.llamacpp.settings import Settings as Own
from kvplan.servers.plans.plan import (
    BUDGET_ROWS,
    Budget,
    Estimate,
    PoolShare,
    Request,
    Sized,
    SlotCache,
    SlotPlace,
    check_load,
)
from kvplan.servers.plans.pool import Capacity, KVGroup, KVSpec, Paging, Pool
from kvplan.servers.words.arguments import Settings

GROUPS: Final = (
    ("token_embd", "embedding"), ("output.", "lm_head"), ("_norm", "norm"), ("ffn_gate_inp", "router"),
    ("shexp", "shared_expert"), ("exps", "experts"), ("ffn_", "mlp"), ("ssm_", "state"), ("shortconv", "state"),
    ("attn_", "attention"),
)  # fmt: skip
SPARE: Final = 1  # the block that other servers keep for themselves


@dataclass(frozen=True, slots=True, eq=False)
class CellPool(Pool):
    """A cache of so many cells, allocated whole at the start: a block is the cell of one token.

    per_token  bytes of a token in the layers that keep every token, on all places
    per_slot   bytes of a slot's states
    """

    per_token: int = 0
    per_slot: int = 0

    def rates(self, spec: ModelSpec, stage: int) -> tuple[int, int]:
        return self.per_token, self.per_slot

    def draft_rate(self, draft: ModelSpec) -> int:
        return 0  # in per_token


@dataclass(frozen=True, slots=True)
class Started:
    """A server as it starts: what --fit made of its settings, and what it then allocates."""

    model: GGUFModel
    server: Server
    stated: Own
    fit: Fit
    measured: Measured
    obstacle: Obstacle | None

    @property
    def own(self) -> Own:
        return self.fit.settings


def started(request: Request, taken: int) -> Started:
    """The server on GPUs of which so many bytes each are in use."""
    file, count = asked.model(request), request.args.num_gpus
    server = Server(file, [asked.device(request, taken)] * count, asked.beside(request, file.architecture))
    own = asked.settings(request.args, count, drafts=request.draft is not None)
    result = fitted(server, own) if own.fit else Fit(own, False)
    return Started(file, server, own, result, *loaded(server, result.settings))


def fitted(server: Server, own: Own) -> Fit:
    """What --fit chooses; it leaves the first GPU as much more as a tower on it takes."""
    if not server.beside.tower or not server.beside.on_gpu:
        return fit(server, own)
    margins = [own.fit_target[min(i, len(own.fit_target) - 1)] for i in range(len(server.devices))]
    margins[0] += sum(server.beside.tower_bytes())
    result = fit(server, replace(own, fit_target=tuple(margins)))
    return result._replace(settings=replace(result.settings, fit_target=own.fit_target))


# A GPU with the host's memory: 117,434 of 124,610 MiB free in a start-up log of an idle GB10.
SHARED_IN_USE: Final = (124_610 - 117_434) * MIB


def in_use(request: Request) -> Estimate:
    stated = request.memory_in_use
    if stated is None and request.gpu.unified and not request.gpu.has_own_limit:
        size, text = SHARED_IN_USE, "the host's on an idle GB10; set --memory-in-use"
        return Estimate(size, size, size, text, "a start-up log of llama.cpp", "measured")
    stated = stated or 0
    return Estimate(stated, stated, stated, "as stated (--memory-in-use)", "--memory-in-use", "exact")


def size(request: Request) -> Sized:
    """Everything of a plan; raise UsageError for what the server refuses."""
    asked.check(request)
    context, used = asked.context(request.gpu), in_use(request)
    run = started(request, context.likely + used.likely)
    cache, own = run.measured.context, run.own
    check_load(request, cache.cells)
    worst = tightest(run)
    memory = run.measured.places.get(worst) if worst is not None else None
    free = run.server.devices[0].free
    margin = own.fit_target[0] if own.fit else 0
    settings = Settings(
        version=request.release, max_model_len=cache.cells, auto_fit=False, max_num_batched_tokens=cache.batch,
        max_num_seqs=cache.slots, in_flight_tokens=0, gpu_memory_utilization=1.0, kv_dtype=kinds_text(own),
        dtype=run.model.label,
    )  # fmt: skip
    groups = groups_of(run, worst)
    compute = 0 if memory is None else memory.compute
    none = Estimate(0, 0, 0, "none", SOURCE, "exact")
    estimates = {
        **dict.fromkeys(BUDGET_ROWS, none),
        "buffers": buffers_of(run, worst, compute),
        "non_torch": Estimate(*growth(), "outside its books: cuBLAS, kernels, growing pools", UNACCOUNTED, "measured"),
        "context": context,
        "in_use": used,
    }
    left = free - sum(groups.values()) - compute
    share = 0 if memory is None else memory.context
    short = missing(run, free)
    capacity = Capacity(
        num_blocks=cache.total + SPARE, bytes_per_block=max(1, per_token(run)), stage=0, max_model_len=cache.cells,
        blocks_per_request=cache.cells, max_concurrency=float(cache.streams), tokens=cache.total, fits=short <= 0,
        deficit=max(0, short),
    )  # fmt: skip
    budget = Budget(max(0, free - margin), groups, estimates, (left, left, left))
    blocks, ends = (capacity.num_blocks,) * 2, (float(cache.streams),) * 2
    return Sized(
        settings, pool_of(run), [budget], capacity, blocks, ends, (PoolShare(share, share),), tuple(notes(run)),
        slots=slots_of(run, free, request),
    )  # fmt: skip


def buffers_of(run: Started, device: int | None, compute: int) -> Estimate:
    """The compute buffers of a device; a tower's are known as a range."""
    beside, text = run.server.beside, compute_text(run)
    if not beside.tower or not beside.on_gpu or device != 0:
        return Estimate(compute, compute, compute, text, SOURCE, "formula")
    least, likely, most = (size * MIB for size in TOWER_COMPUTE)
    low, high = compute - likely + least, compute - likely + most
    return Estimate(
        low, compute, high, f"{text}; of the tower's graph {least // MIB}-{most // MIB} MiB", SOURCE, "calibrated"
    )


def missing(run: Started, free: int) -> int:
    """Bytes that a GPU lacks; at least those of the first buffer that does not fit."""
    if run.obstacle is None:
        return 0
    on_gpus = (use.total - free for place, use in run.measured.places.items() if place is not None)
    return max(run.obstacle.size - run.obstacle.left, *on_gpus)


def tightest(run: Started) -> int | None:
    """The device with the least room left; None without one."""
    devices = [(use.total, place) for place, use in run.measured.places.items() if place is not None]
    return max(devices, key=lambda item: item[0])[1] if devices else None


def groups_of(run: Started, device: int | None) -> dict[str, int]:
    """Weights on a device by tensor group, with what aligns them."""
    placement = run.measured.placement
    if device is None:
        return {"embedding": 0}
    position, totals = placement.devices.index(device), Counter[str]()
    for tensor, where in placement.tensors:
        if where == position:
            nextn = tensor.layer is not None and tensor.layer >= run.server.shape.num_layers
            group = "draft" if nextn else next((group for word, group in GROUPS if word in tensor.name), "other")
            totals[group] += buffer_bytes(tensor, position)
    for file in placement.adapters:
        totals["adapters"] += sum(buffer_bytes(tensor, where) for tensor, where in file if where == position)
    if run.server.beside.on_gpu and device == 0:
        totals["tower"] = run.server.beside.tower_bytes()[0]
    if run.measured.draft is not None:
        totals["draft"] += run.measured.draft.places[device].weights
    return {group: size for group, size in totals.items() if size} or {"embedding": 0}


def per_token(run: Started) -> int:
    """Bytes of one more token in the layers that keep every token, of a draft, too."""
    context, total = run.measured.context, 0
    servers = [(run.server.shape, run.own)]
    if run.measured.draft is not None:
        servers.append((run.server.drafter.shape, replace(run.own, cache_k="F16", cache_v="F16")))
    for shape, own in servers:
        whole = replace(own, full_windows=True)
        total += sum(
            sum(size for size, _ in layer_bytes(shape, layer, context, whole))
            for layer in shape.running
            if shape.attends(layer) and not shape.windowed[layer] and not shape.keeps_state(layer)
        )
    return total // (context.cells * context.streams)


def pool_of(run: Started) -> CellPool:
    """All layers in one group: a request holds a cell for each of its tokens."""
    shape, token = run.server.shape, per_token(run)
    how = Paging(0, "", "", 1, 1, 1, 1, True, True, False, frozenset(), frozenset(), 0, None, 0, 0)
    spec = KVSpec("full", 1, max(1, token))
    layers = tuple((layer, spec) for layer in range(shape.num_layers))
    states = sum(shape.keeps_state(layer) for layer in range(shape.num_layers))
    slot = 4 * (shape.conv_state + shape.scan_state) * states * run.measured.context.states
    return CellPool((KVGroup(layers, (spec,)),), (max(1, token),), how, token, slot)


def kinds_text(own: Own) -> str:
    """Types of the cache: "f16", or of keys and values if they differ."""
    kinds = dict.fromkeys((own.cache_k.lower(), own.cache_v.lower()))
    return " and ".join(kinds)


def compute_text(run: Started) -> str:
    context = run.measured.context
    flash = "on" if run.measured.flash else "off"
    return (
        f"the graph of {context.ubatch:,} tokens (--ubatch-size) with {context.total:,} cells in use, laid out as "
        f"llama.cpp does; flash attention {flash}"
    )


def host_experts(run: Started) -> int:
    """Layers on GPUs of whose experts some tensor is on the host."""
    placement = run.measured.placement
    layers = {f"blk.{number}." for number, where in enumerate(placement.layers) if where is not None}
    names = (tensor.name for tensor, where in placement.tensors if where is None and "exps" in tensor.name)
    return len({name[: name.index(".", 4) + 1] for name in names} & layers)


def slots_of(run: Started, free: int, request: Request) -> SlotCache:
    """The cache and the places, for an answer in the server's words."""
    measured, shape = run.measured, run.server.shape
    names = {None: "host"} | {number: f"GPU {number}" for number in measured.placement.devices}
    places = tuple(
        SlotPlace(names[place], use.weights, use.context, use.compute, 0 if place is None else free)
        for place, use in measured.places.items()
    )
    return SlotCache(
        cells=measured.context.cells,
        caches=measured.context.streams,
        slots=measured.context.slots,
        gpu_layers=min(measured.placement.gpu_layers, shape.num_blocks + 1) if measured.placement.devices else 0,
        num_layers=shape.num_blocks + 1,
        host_experts=host_experts(run),
        places=places,
        speed=speed(run, request, request.load.longest(measured.context.cells)),
        file_type=run.model.label,
    )


def chosen(run: Started) -> str:
    """What --fit chose, by its flags."""
    own, stated = run.own, run.stated
    shape = run.server.shape
    words = [f"--ctx-size {own.ctx}"] if stated.ctx == 0 and own.ctx != shape.trained_ctx else []
    layers = shape.num_blocks if own.mtp_tokens else shape.num_layers
    if own.gpu_layers is not None and stated.gpu_layers is None and own.gpu_layers <= layers:
        words.append(f"--gpu-layers {own.gpu_layers}")
    if len(own.overrides) > len(stated.overrides):
        words.append(f"the host for the experts of {plural(host_experts(run), 'layer')}")
    return " and ".join(words) or "the layers of each GPU"


def next_type(run: Started) -> str:
    """The largest smaller type of a file with which everything is on the GPUs; empty: it is, none does, or layers or
    experts are placed by the user.
    """
    own, context = run.own, run.measured.context
    if run.stated.gpu_layers is not None or run.stated.overrides:
        return ""
    whole = run.measured.placement.gpu_layers > run.server.shape.num_blocks and len(own.overrides) == 0
    if whole and run.obstacle is None:
        return ""
    plain = replace(run.stated, ctx=context.total, gpu_layers=None, overrides=())
    if (file := smaller_type(run, plain)) is None:
        return ""
    layers = f"all {run.server.shape.num_blocks + 1} layers on GPUs at {context.total:,} tokens"
    return f"--quant {file.label} ({format_gib(file.total_bytes)}) keeps {layers}"


def smaller_type(run: Started, settings: Own) -> GGUFModel | None:
    """The largest file of a smaller type with which these settings leave each GPU what --fit would."""
    model, margin = run.model, run.own.fit_target[0]
    if model.mixed_by == "file" or model.label not in TYPES:
        return None
    drafts = settings.mtp_tokens > 0
    files = (gguf_of(model.spec, kind, drafts=drafts) for kind in TYPES[TYPES.index(model.label) + 1 :])
    return next(
        (file for file in files if room(Server(file, run.server.devices, run.server.beside), settings, margin) >= 0),
        None,
    )


def notes(run: Started) -> list[str]:
    """What was decided for the user."""
    model, own, texts = run.model, run.own, list[str]()
    if model.mixed_by == "llama-quantize":
        texts.append(
            f"{format_gib(model.total_bytes)} of weights, as llama-quantize makes {model.label}; the mixes of others "
            "differ: name the GGUF file for its own"
        )
    if run.fit.problem is not None:
        texts.append(f"--fit gives up: {run.fit.problem}")
    elif run.fit.changed:
        texts.append(f"--fit chose {chosen(run)}, which leaves {own.fit_target[0] // MIB:,} MiB of each GPU free")
    if 0 <= (left := room(run.server, own)) < growth()[1] and run.obstacle is None:
        texts.append(
            f"only {left // MIB:,} MiB of a GPU stay free, and cuBLAS and kernels took {growth()[1] // MIB} after a "
            "load; a smaller --ctx-size is safer"
        )
    if smaller := next_type(run):
        texts.append(smaller)
    if run.server.devices and not run.server.devices[0].capability:
        texts.append("compute buffers are CUDA's; those of other GPUs were not compared")
    return texts
