"""SGLang's settings and pools: what it decides when a flag is not given, and how many tokens its KV cache holds.

SGLang measures no activation peak. It loads the model, keeps back a share of what was free before, and turns the rest
into tokens: KV bytes = free before loading x mem_fraction_static - what loading took. Activations and CUDA graphs live
in the share kept back, which a rule of thumb sizes.

Source: sglang 0.5.23 srt/arg_groups/memory_hook.py and srt/mem_cache/kv_cache_configurator.py; 0.4.9 and 0.4.4
srt/server_args.py for the older defaults. The pool rule agrees with logged pools to 0.1 % (tests/test_sglang.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import floor

from kvplan.errors import UnsupportedModelError, UsageError
from kvplan.gpu import GpuSpec
from kvplan.layout import cdiv, state_bytes
from kvplan.rules import vllm
from kvplan.rules.releases import Version
from kvplan.rules.vllm import EngineArgs, Settings
from kvplan.rules.vllm_pages import KVSpec, Paging, attention_spec
from kvplan.rules.vllm_pool import Capacity, KVGroup, Pool
from kvplan.spec import (
    ChunkedAttention,
    CompressedLatent,
    CrossAttention,
    KeyIndex,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
    WindowLatent,
)
from kvplan.units import MIB, format_gib
from kvplan.weights import stage_layers

NEWEST, OLDEST = (0, 5), (0, 4)
TABLE_UNTIL = (0, 4, 4)  # the default fraction was a table by tensor parallel size

# `memory.total` of nvidia-smi in MiB, from which SGLang computes its default fraction: more than CUDA sees. Source:
# public listings ("0MiB / 81559MiB").
SMI_MIB = {
    "t4": 15_360, "a10": 23_028, "a10g": 23_028, "l4": 23_034, "rtx-4090": 24_564, "rtx-3090": 24_576,
    "rtx-5090": 32_607, "a100-40g": 40_960, "a40": 46_068, "l40": 46_068, "l40s": 46_068, "rtx-a6000": 49_140,
    "rtx-6000-ada": 49_140, "h100-80g": 81_559, "h100-pcie-80g": 81_559, "a100-80g": 81_920,
    "a100-pcie-80g": 81_920, "h100-nvl-94g": 95_830, "h20": 97_871, "gh200-96g": 97_871, "rtx-pro-6000": 97_887,
    "h200": 143_771, "b200": 183_359,
}  # fmt: skip
# (below so many MiB, chunked_prefill_size, largest decode graph, the same from tensor parallel size 4 on)
CLASSES = (
    (20 * 1024, 2048, 8, 8),
    (35 * 1024, 4096, 48, 160),
    (60 * 1024, 4096, 32, 160),
    (160 * 1024, 8192, 256, 512),
)
LARGEST_CLASS = (16_384, 512, 512)
CLASSES_04 = ((35 * 1024, 2048, 8, 80), (160 * 1024, 8192, 160, 160))  # 256 graphs from 90 GiB on: of no account here
# Tokens of the prefill graphs that are captured: (from, to, step).
PREFILL_GRAPHS = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256))
PREFILL_STEP = 512  # beyond the last
MLA_GRAPHS_MIB = 1536
VISION_FACTOR = 0.95  # of the fraction, for a vision tower like ViT-L, whose size is 24 layers of 1,024
VISION_SIZE = (24, 1024)
VISION_STEP, VISION_RANGE = 0.1, (0.8, 1.05)  # a tenth less for each time that the tower is larger
SLOTS_PER_REQUEST = 3  # of recurrent states, while the radix cache may keep some
MAMBA_RATIO, SWA_RATIO = 0.9, 0.8  # mamba_full_memory_ratio, swa_full_tokens_ratio
PAGE_SIZES = (1, 16, 32, 64, 128)
KV_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
COUNTED_IN_FULL = ("gemma2", "gemma3_text", "gemma3", "gemma3n_text")  # no window pool: srt/server_args.py


def version(number: tuple[int, ...]) -> Version:
    """The behaviour of a release: (0, 5), or (0, 4, 3), whose third field matters to the default fraction."""
    if not OLDEST <= number[:2] <= NEWEST:
        raise UsageError(
            f"--engine sglang@{'.'.join(map(str, number))}: kvplan knows SGLang {OLDEST[0]}.{OLDEST[1]} and "
            f"{NEWEST[0]}.{NEWEST[1]}; use one of those"
        )
    return Version((number[0], number[1]), "sglang", number[2] if len(number) > 2 else None)


# --- settings ---------------------------------------------------------------------------------------------------------

DP_ATTENTION = "SGLang's DP attention is not modelled"
QUANTIZED_WHILE_LOADING = ("fp8",)  # of what vLLM can, too
VLLM_ONLY = {
    "gpu_memory_utilization": "SGLang divides memory by --mem-fraction-static; give that",
    "kv_cache_memory_bytes": "SGLang has no such flag; --engine-arg max_total_tokens=N sets its pool",
    "num_gpu_blocks_override": "SGLang counts tokens; --engine-arg max_total_tokens=N sets its pool",
    "disable_hybrid_kv_cache_manager": "SGLang has no such flag; leave it out",
    "num_speculative_tokens": "drafts in SGLang are not modelled; leave it out",
    "max_loras": "adapters in SGLang are not modelled; leave them out",
    "kv_offloading_size": "SGLang's hierarchical cache is not modelled; leave it out",
}


NO_FLAG = (
    "enable_chunked_prefill", "async_scheduling", "performance_mode", "usage", "max_lora_rank", "fully_sharded_loras",
    "decode_context_parallel_size",
)  # fmt: skip


def check_args(spec: ModelSpec, args: EngineArgs) -> None:
    """Refuse flags that SGLang has not, and what is not modelled of it."""
    for name, cure in VLLM_ONLY.items():
        if getattr(args, name) not in (None, False, 0):
            raise UsageError(f"--{name.replace('_', '-')}: {cure}")
    for name in NO_FLAG:
        if getattr(args, name) != getattr(EngineArgs(), name):
            raise UsageError(f"--{name.replace('_', '-')}: SGLang has no such flag; leave it out")
    if args.quantization is not None and spec.quantization is None and args.quantization not in QUANTIZED_WHILE_LOADING:
        raise UsageError(
            f"--quantization {args.quantization}: is not one that is modelled for SGLang; name a quantised checkpoint"
        )
    if spec.num_layers % args.pipeline_parallel_size:
        raise UsageError(
            f"--pipeline-parallel-size {args.pipeline_parallel_size}: does not divide the {spec.num_layers} layers of "
            f"{spec.name}, and SGLang's split of the rest is not modelled; use a divisor"
        )
    if args.data_parallel_size > 1 and args.enable_expert_parallel:
        raise UsageError(f"--enable-expert-parallel with replicas: {DP_ATTENTION}; use --dp 1")
    if args.block_size is not None and args.block_size not in PAGE_SIZES:
        raise UsageError(
            f"--block-size (page_size) {args.block_size}: SGLang's pages have 1, 16, 32, 64 or 128 tokens; use one"
        )
    if args.kv_cache_dtype not in KV_DTYPES:
        raise UsageError(
            f"--kv-cache-dtype {args.kv_cache_dtype!r}: is not one that is modelled for SGLang; "
            f"use {', '.join(KV_DTYPES)}"
        )
    if vllm.is_sparse_mla(spec) and args.kv_cache_dtype.startswith("fp8"):
        raise UsageError("--kv-cache-dtype fp8: SGLang's layout for sparse attention depends on its backend; use auto")


def resolve(spec: ModelSpec, gpu: GpuSpec, args: EngineArgs, release: Version) -> Settings:
    """The settings in effect; `max_num_seqs` is the largest there can be until the pool is known (max_requests)."""
    check_args(spec, args)
    asked = args.max_model_len
    context = spec.max_model_len if asked in (None, "auto") else asked
    assert isinstance(context, int)
    if context > spec.context_limit:
        raise UsageError(
            f"max_model_len {context:,}: {spec.name} was made for {spec.context_limit:,} tokens; use at most that"
        )
    dtype = vllm.resolve_dtype(spec, args.dtype, gpu.sm, release)
    return Settings(
        version=release,
        max_model_len=context,
        auto_fit=asked == "auto",
        max_num_batched_tokens=chunk_size(gpu, args, release),
        max_num_seqs=args.max_num_seqs or MOST_REQUESTS,
        in_flight_tokens=chunk_size(gpu, args, release),
        gpu_memory_utilization=args.mem_fraction_static or default_fraction(spec, gpu, args, release),
        kv_dtype=vllm.resolve_kv_dtype(spec, args.kv_cache_dtype, dtype, gpu.sm),
        dtype=dtype,
        prefix_caching=caches_prefixes(args),
    )


def smi_mib(gpu: GpuSpec) -> int:
    """What nvidia-smi calls the GPU's memory; where no listing is known or the user gave a size, what CUDA sees."""
    seen = gpu.total_memory // MIB
    return seen if gpu.total_memory_kind == "given" else SMI_MIB.get(gpu.name, seen)


def gpu_class(gpu: GpuSpec, args: EngineArgs, release: Version) -> tuple[int, int]:
    """(chunked_prefill_size, largest decode graph) by the GPU's memory."""
    small_tp = args.tensor_parallel_size < 4
    for below, chunk, graphs, graphs_tp4 in CLASSES if release.number >= NEWEST else CLASSES_04:
        if smi_mib(gpu) < below:
            return chunk, graphs if small_tp else graphs_tp4
    chunk, graphs, graphs_tp4 = LARGEST_CLASS
    return chunk, graphs if small_tp else graphs_tp4


def chunk_size(gpu: GpuSpec, args: EngineArgs, release: Version) -> int:
    return args.max_num_batched_tokens or gpu_class(gpu, args, release)[0]


def num_prefill_graphs(most: int) -> int:
    """Prefill graphs of up to `most` tokens."""
    sizes = [size for start, end, step in PREFILL_GRAPHS for size in range(start, end + 1, step)]
    sizes += range(PREFILL_GRAPHS[-1][1] + PREFILL_STEP, most + 1, PREFILL_STEP)
    return len([size for size in sizes if size <= most])


def default_fraction(spec: ModelSpec, gpu: GpuSpec, args: EngineArgs, release: Version) -> float:
    """mem_fraction_static where it is not given: what a rule of thumb leaves beside activations and graphs."""
    total, ranks = smi_mib(gpu), args.tensor_parallel_size * args.pipeline_parallel_size
    if release.number < NEWEST:
        fraction = _older_fraction(total, ranks, release)
    else:
        fraction = round((total - reserved_mib(spec, gpu, args, release)) / total, 3)
    if fraction <= 0:
        raise UsageError(
            f"--mem-fraction-static: SGLang's rule of thumb leaves nothing of {total:,} MiB for weights and KV; state "
            "it, or lower --max-num-batched-tokens (chunked_prefill_size)"
        )
    return fraction * vision_factor(spec)


def vision_factor(spec: ModelSpec) -> float:
    """By which the default is lowered for a model with a vision tower: by the tower's layers x width squared."""
    tower = spec.config.get("vision_config")
    if not spec.multimodal or not isinstance(tower, Mapping):
        return 1.0
    layers, width = (
        tower[name] if isinstance(tower.get(name), int) else usual
        for name, usual in zip(("num_hidden_layers", "hidden_size"), VISION_SIZE, strict=True)
    )
    times = layers * width**2 / (VISION_SIZE[0] * VISION_SIZE[1] ** 2)
    least, most = VISION_RANGE
    return VISION_FACTOR * max(least, min(most, 1 - VISION_STEP * (times - 1)))


def reserved_mib(spec: ModelSpec, gpu: GpuSpec, args: EngineArgs, release: Version) -> float:
    """What 0.5 keeps back, in MiB: 1.5 per token of a chunk, 2 per sequence of the largest graph, 8 per prefill."""
    chunk, graphs = chunk_size(gpu, args, release), gpu_class(gpu, args, release)[1]
    reserved = 512 + 1.5 * max(chunk, 2048) + args.tensor_parallel_size * args.pipeline_parallel_size / 8 * 1024
    if not args.enforce_eager:
        graphs = args.cuda_graph_max_bs or graphs
        reserved += 2 * graphs + (MLA_GRAPHS_MIB if vllm.is_mla(spec) else 8 * num_prefill_graphs(chunk))
    return max(reserved, 10 * 1024) if smi_mib(gpu) > 60 * 1024 else reserved


def _older_fraction(total: int, ranks: int, release: Version) -> float:
    """0.4: by tensor parallel size up to 0.4.4, then by the GPU's memory."""
    if release.patch is not None and (*release.number, release.patch) <= TABLE_UNTIL:
        table = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87))
        return next((fraction for least, fraction in table if ranks >= least), 0.88)
    gib = 2.8 + ranks / 10 if total < 35 * 1024 else (9.5 if total < 90 * 1024 else 12) + ranks / 2
    return round((total - (32 if total >= 160 * 1024 else gib) * 1024) / total, 3)


# --- pools ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class SglangPool(Pool):
    """Pages of all layers that keep every token; window layers have a pool of their own, states have slots.

    A block is a page of the full pool with its share of the windows' pool.

    full, windows  bytes per token of the layers that keep all tokens, and of those that keep a window; by stage
    swa_ratio      tokens of the windows' pool per token of the full one
    state          bytes of one slot of recurrent states; by stage
    """

    full: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    swa_ratio: Fraction = Fraction(1)
    state: tuple[int, ...] = ()

    def in_full_pages(self, per_group: list[int]) -> int:
        """Pages of the full pool that requests take, or that their pages of the windows' pool stand for, if more."""
        pages = [
            cdiv(count * self.swa_ratio.denominator, self.swa_ratio.numerator)
            if group.first.kind == "sliding"
            else count
            for group, count in zip(self.groups, per_group, strict=True)
        ]
        return max(pages)

    def charged(self, context: int, settings: Settings) -> int:
        return self.in_full_pages([group.charged(context, settings, 1) for group in self.groups])

    def held(self, num_tokens: int) -> int:
        return self.in_full_pages([group.held(num_tokens, 1) for group in self.groups])

    def prefilling(self, num_tokens: int, context: int, settings: Settings) -> int:
        return self.in_full_pages([group.prefilling(num_tokens, context, settings, 1) for group in self.groups])

    def shared(self, num_tokens: int) -> int:
        return num_tokens // self.block_size

    def given_out(self, pages: int, slots: int, stage: int) -> int:
        """What counts against the budget: the pages that requests can have, and every slot."""
        page = self.block_size
        swa_pages = floor(pages * page * self.swa_ratio) // page
        states = (slots + 1) * self.state[stage] if self.state[stage] else 0
        return pages * page * self.full[stage] + swa_pages * page * self.windows[stage] + states

    def num_bytes(self, pages: int, slots: int, stage: int) -> int:
        """What the buffers take: each pool holds one page more than is counted, the slots one more."""
        page = self.block_size
        swa_pages = floor(pages * page * self.swa_ratio) // page
        full = (pages + 1) * page * self.full[stage]
        windows = (swa_pages + 1) * page * self.windows[stage] if self.windows[stage] else 0
        return full + windows + ((slots + 1) * self.state[stage] if self.state[stage] else 0)


def page_size(spec: ModelSpec, args: EngineArgs) -> int:
    """Sparse attention has pages of 64 tokens, whatever is asked for. Source: srt/server_args.py (DSA)."""
    return 64 if vllm.is_sparse_mla(spec) else args.block_size or 1


def caches_prefixes(args: EngineArgs) -> bool:
    """The radix cache is on unless it was switched off."""
    return args.enable_prefix_caching is not False


def paging(spec: ModelSpec, settings: Settings, args: EngineArgs, sm: int) -> Paging:
    return Paging(
        sm=sm, kv_dtype=settings.kv_dtype, dtype=settings.dtype, tp=args.tensor_parallel_size,
        pp=args.pipeline_parallel_size, dcp=1, block_size=page_size(spec, args),
        prefix_caching=caches_prefixes(args), flat=False, first_engine=False, checkpoints=frozenset(),
        every_block=frozenset(), spec_tokens=0, ssm_dtype=args.mamba_ssm_cache_dtype, context=0, encoder=0,
    )  # fmt: skip


NOT_MODELLED = (ChunkedAttention, CrossAttention, KeyIndex, WindowLatent, CompressedLatent)


@lru_cache(maxsize=4096)
def pool(spec: ModelSpec, how: Paging, ratio: float | None, release: Version) -> SglangPool:
    """The pools of a model. Raises UnsupportedModelError for caches whose pool in SGLang is not modelled."""
    for kind in vllm.caches_of(spec):
        if issubclass(kind, NOT_MODELLED):
            raise UnsupportedModelError(f"{spec.name}: SGLang's pool for its {kind.__name__} is not modelled; use vllm")
    if any(not caches for caches in spec.layers):
        raise UnsupportedModelError(
            f"{spec.name}: some layers share the KV of others, of which SGLang allocates some all the same; use vllm"
        )
    if vllm.has_states(spec) and release.number < NEWEST:
        raise UnsupportedModelError(f"{spec.name}: SGLang 0.4's pools for states are not modelled; use sglang@0.5")
    mixed = SlidingWindow in vllm.caches_of(spec) and len(vllm.caches_of(spec)) > 1
    if mixed and release.number < NEWEST:
        raise UnsupportedModelError(f"{spec.name}: SGLang 0.4's pools for windows are not modelled; use sglang@0.5")
    flat = not mixed or spec.model_type in COUNTED_IN_FULL
    page = how.block_size or 1
    full: list[tuple[int, KVSpec]] = []
    windows: list[tuple[int, KVSpec]] = []
    states: list[tuple[int, int]] = []
    for index, caches in enumerate(spec.layers):
        for cache in caches:
            if isinstance(cache, RecurrentState):
                states.append((index, state_bytes(cache, how.dtype, how.tp, ssm_dtype=how.ssm_dtype)))
                continue
            paged = attention_spec(cache, page, how.kv_dtype, how.tp, flat=flat, encoder=0, model_type=spec.model_type)
            (windows if paged.kind == "sliding" else full).append((index, paged))
    if not full:
        raise UnsupportedModelError(f"{spec.name}: no layer keeps all tokens; SGLang's pool for it is not modelled")
    stages: list[range] = stage_layers(spec.num_layers, how.pp)
    share = Fraction(str(SWA_RATIO if ratio is None else ratio))
    by_stage = [
        tuple(sum(each.page for i, each in layers if i in stage) // page for stage in stages)
        for layers in (full, windows)
    ]
    stage_bytes = tuple(-(-page * (whole + share * window) // 1) for whole, window in zip(*by_stage, strict=True))
    groups = tuple(
        KVGroup(tuple(layers), tuple(dict.fromkeys(paged for _, paged in layers)))
        for layers in (full, windows)
        if layers
    )
    return SglangPool(
        groups, tuple(int(size) for size in stage_bytes), how, full=by_stage[0], windows=by_stage[1], swa_ratio=share,
        state=tuple(sum(size for i, size in states if i in stage) for stage in stages),
    )  # fmt: skip


# --- capacity ---------------------------------------------------------------------------------------------------------

LEAST_REQUESTS, MOST_REQUESTS, REQUESTS_PER_CONTEXT = 2048, 4096, 512


def num_slots(layout: SglangPool, args: EngineArgs, room: int, stage: int) -> int:
    """Slots for recurrent states: as many as requests where nothing is kept of them, else a share of the memory."""
    if not layout.state[stage]:
        return 0
    if not caches_prefixes(args) and args.max_num_seqs is not None:
        return args.max_num_seqs
    ratio = MAMBA_RATIO if args.mamba_full_memory_ratio is None else args.mamba_full_memory_ratio
    return max(0, int(room * ratio / (1 + ratio) // layout.state[stage]) - 1)  # one more is never given out


def pages_in(layout: SglangPool, args: EngineArgs, available: list[int]) -> tuple[int, int, int]:
    """(pages that every stage can hold, slots, the stage that decides)."""
    found = []
    room = min(available)  # all ranks agree on the least
    for stage in range(len(available)):
        slots = num_slots(layout, args, room, stage)
        per_token = layout.full[stage] + layout.swa_ratio * layout.windows[stage]
        if per_token:
            taken = (slots + 1) * layout.state[stage]
            tokens = floor(max(0, room - taken) / per_token)
            found.append((min(tokens, args.max_total_tokens or tokens) // layout.block_size, stage, slots))
    pages, stage, _ = min(found)
    with_states = [slots for _, at, slots in found if layout.state[at]]
    return pages, min(with_states, default=0), stage


def max_requests(layout: SglangPool, settings: Settings, args: EngineArgs, pages: int, slots: int) -> int:
    """max_running_requests: 512 per context that the pool holds, from 2,048 to 4,096, and no more than states allow."""
    tokens = pages * layout.block_size
    most = int(tokens / settings.max_model_len * REQUESTS_PER_CONTEXT)
    most = min(args.max_num_seqs or max(min(most, MOST_REQUESTS), LEAST_REQUESTS), tokens // 2)
    if not any(layout.state):
        return most
    return min(most, slots // (SLOTS_PER_REQUEST if caches_prefixes(args) else 1))


def capacity(layout: SglangPool, settings: Settings, args: EngineArgs, available: list[int]) -> Capacity:
    """Pages, tokens and users for `available` KV bytes per rank, one entry per pipeline stage.

    `num_blocks` counts the page that is never given out. A server whose pool is smaller than the context starts all
    the same and refuses longer requests; here it does not fit.
    """
    pages, slots, worst = pages_in(layout, args, available)
    context = settings.max_model_len
    if settings.auto_fit:
        context = _largest_context(layout, settings, context, pages) or context
    charged = layout.charged(context, settings)
    cost = layout.stage_bytes[worst]
    fits = pages >= charged and max_requests(layout, settings, args, pages, slots) > 0
    return Capacity(
        num_blocks=pages + 1,
        bytes_per_block=cost,
        stage=worst,
        max_model_len=context,
        blocks_per_request=charged,
        max_concurrency=pages / charged,
        tokens=pages * layout.block_size,
        fits=fits,
        deficit=0 if fits else max(1, charged * cost - available[worst]),
    )


def _largest_context(layout: SglangPool, settings: Settings, limit: int, pages: int) -> int:
    """The largest context, at most `limit`, that the pool holds once; 0 when there is none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if layout.charged(middle, settings) <= pages else (low, middle - 1)
    return low


def notes(request_args: EngineArgs, settings: Settings, spec: ModelSpec, kept: int, wanted: int) -> Iterator[str]:
    """What the answer rests on that no row shows.

    kept, wanted  bytes kept back for activations and graphs, and what SGLang's own rule of thumb would keep
    """
    if request_args.mem_fraction_static is None:
        fraction = f"{settings.gpu_memory_utilization:.6g}"
        yield f"no --mem-fraction-static: SGLang's rule of thumb gives {fraction}; the command states it"
        if spec.multimodal:
            yield "what SGLang sets aside for images beside its lower default is not modelled"
    elif kept < wanted:
        yield (
            f"{format_gib(max(0, kept))} are kept back for activations and CUDA graphs; SGLang's rule of thumb keeps "
            f"{format_gib(wanted)}"
        )
    if spec.model_type in COUNTED_IN_FULL or (
        SlidingWindow in vllm.caches_of(spec) and settings.version.number < NEWEST
    ):
        yield "SGLang keeps every token of this model's windows: they are counted in full"


def slots_note(layout: SglangPool, slots: int, stage: int) -> str | None:
    """How much of the KV cache is recurrent states; None where there are none."""
    if not layout.state[stage]:
        return None
    size = (slots + 1) * layout.state[stage]
    return f"{format_gib(size)} of the KV cache are {slots:,} slots for recurrent states"
