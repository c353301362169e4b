"""Bytes per rank that are neither weights nor KV: buffers, activation peak, CUDA graphs, non-torch memory.

Formulas re-derive vLLM's code; constants are fitted to start-up logs posted by users and projects. The evidence for
each, thread by thread and including what does not fit, is in reports/constants.md, which every `source` refers to; a
thread is one report (an issue, a document), its logs are not independent. Subtracted from the budget are
`buffers + activations + non_torch + lora`, and `cuda_graphs` if vLLM estimates them (`Settings.graphs_in_budget`);
otherwise graphs use memory outside the budget. `context` is outside the budget in every version.

Comparing with a log: from 0.27 on the "peak activation" of vLLM's summary line includes the CUDA graph estimate
(vllm-project/vllm#57936), and "consumed memory" is weights + buffers + non-torch. Earlier releases report `buffers`
partly as weights (rotary tables) and partly as peak activation (MoE workspace).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from kvplan.core.errors import UsageError
from kvplan.core.records import dataclass
from kvplan.core.units import DTYPE_BITS, GIB, MIB
from kvplan.hardware.gpu import GpuSpec
from kvplan.models.hf_config import text_of
from kvplan.models.spec import CompressedLatent, LatentAttention, ModelSpec, SparseIndexer, Weight, unique
from kvplan.servers.plans.plan import Estimate, Kind, Request
from kvplan.servers.plans.weights import ONLINE_NAMES, own_layout
from kvplan.servers.releases import Version
from kvplan.servers.vllm.rules import generates, takes_items
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.allocator import weights_excess
from kvplan.sizing.weights import Layout, cdiv, local_shape, scheme_for, stage_layers

if TYPE_CHECKING:
    from kvplan.servers.vllm import moe_backends
    from kvplan.servers.vllm.compilation import Graphs

# --- facts about a model, found once ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Widths:
    """Elements per token on one rank that are live at once in a forward pass, in addition to the two residual streams.

    layer     widest of a layer's parts: a projection's outputs and the next one's inputs
    latent    heads x (key + value) of MLA's up-projection; 0 without MLA
    workspace the two buffers of fused experts for one token and one chosen expert; 0 without experts
    """

    layer: int
    latent: int
    workspace: int


@lru_cache(maxsize=4096)
def widths(spec: ModelSpec, tp: int, ep: int) -> Widths:
    """Compute the widths. Source: vLLM 0.33 model code (fused QKV, gate and up) and fused_moe's workspace shapes."""
    layer = latent = workspace = 0
    for weights in unique(spec.layer_weights):
        parts: dict[str, int] = {}
        for weight in weights:
            if weight.experts:
                workspace = max(workspace, _expert_workspace(weight, 1 if ep > 1 else tp))
                parts["experts"] = spec.hidden_size
            elif weight.quantizable and weight.split != "none":
                columns, rows = local_shape(weight, tp)
                parts[weight.group] = parts.get(weight.group, 0) + (sum(rows) if weight.split == "outputs" else columns)
                if weight.name.endswith("kv_b_proj"):
                    latent = max(latent, sum(rows))
        layer = max(layer, *parts.values(), 0)
    return Widths(layer, latent, workspace)


def _expert_workspace(weight: Weight, tp: int) -> int:
    """max(width of gate and up, hidden) + max(inner width, hidden), counted once, at the first of the two matrices."""
    if weight.split != "outputs":
        return 0
    hidden, rows = local_shape(weight, tp)
    return max(sum(rows), hidden) + max(rows[0], hidden)


@lru_cache(maxsize=1024)
def rope_elements(spec: ModelSpec, context: int) -> int:
    return sum(rope.rows(context) * rope.dim for rope in spec.ropes)


# Model types whose published configs have an mrope_section, and those whose tables have others' rows from 0.32 on.
MROPE: Final = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_omni", "qwen3_vl", "qwen3_5")
SHORT_MROPE: Final = ("qwen3_vl", "qwen3_5")


@lru_cache(maxsize=1024)
def has_mrope(spec: ModelSpec) -> bool:
    """True if rotary tables are of positions in time, height and width."""
    text = text_of(spec.config)
    ropes = text.get("rope_parameters") or text.get("rope_scaling")
    return spec.model_type.startswith(MROPE) or (isinstance(ropes, Mapping) and "mrope_section" in ropes)


def rope_tables(spec: ModelSpec, release: Version) -> int:
    """How many times the rows of the context a model's rotary tables have.

    Source: vLLM 0.11 to 0.33 layers/rotary_embedding/mrope.py (MRotaryEmbedding).
    """
    if not has_mrope(spec) or not release.has("long_mrope"):
        return 1
    return 1 if spec.model_type.startswith(SHORT_MROPE) and release.has("short_mrope") else 4


@lru_cache(maxsize=1024)
def deepstack_width(spec: ModelSpec) -> int:
    """Elements of a token in the buffers of a tower's inner outputs, which go to the first layers.

    Source: vLLM 0.12 to 0.33 model_executor/models/qwen3_vl.py (deepstack_input_embeds).
    """
    vision = spec.config.get("vision_config")
    levels = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
    return len(levels) * spec.hidden_size if isinstance(levels, list) else 0


def online_of(spec: ModelSpec, args: EngineArgs) -> str | None:
    """Scheme that a model is quantized to while loading; None: it is loaded as it is stored."""
    return ONLINE_NAMES.get(args.quantization or "") if spec.quantization is None else None


@lru_cache(maxsize=4096)
def dequantized_latents(spec: ModelSpec, tp: int, pp: int, online: str | None, partition: tuple[int, ...] = ()) -> int:
    """Elements of the dequantized copies that MLA keeps of a quantized kv_b_proj, on the stage with the most layers.

    Source: vLLM 0.33 mla_attention (process_weights_after_loading): W_UK_T and W_UV; views when not quantized.
    """
    if not spec.is_mla:
        return 0
    return max(
        sum(
            weight.inputs * sum(local_shape(weight, tp)[1])
            for index in stage
            for weight in spec.layer_weights[index]
            if weight.name.endswith("kv_b_proj") and scheme_for(spec, weight, index, online)
        )
        for stage in stage_layers(spec.num_layers, pp, partition=partition)
    )


@lru_cache(maxsize=4096)
def absorbed_projections(spec: ModelSpec, tp: int, pp: int, element: int) -> int:
    """Bytes of the products of MLA's projections that vLLM 0.7 kept in addition to them, on the stage with the most
    layers.

    Source: vLLM 0.7.3 attention/backends/mla (W_Q_UK and W_UV_O, in fp8 with fp8 weights; the queries' rope part in two
    bytes). This matches what DeepSeek-R1 takes on 8 H200 (83.88 GiB) and on 3 x 8 L20 (25.02) beyond its parameters.
    """
    heads = spec.num_heads // tp
    per_layer = []
    for weights, caches in zip(spec.layer_weights, spec.layers, strict=True):
        latent = next((cache for cache in caches if isinstance(cache, LatentAttention)), None)
        queries = next((w.inputs for w in weights if w.name.endswith(("q_b_proj", ".q_proj", "q_proj"))), None)
        if latent is None or queries is None:
            per_layer.append(0)
            continue
        products = heads * latent.kv_lora_rank * (queries + spec.hidden_size)
        per_layer.append(element * products + 2 * queries * heads * latent.qk_rope_head_dim)
    return max(sum(per_layer[index] for index in stage) for stage in stage_layers(spec.num_layers, pp))


def expert_ranks(args: EngineArgs) -> int:
    return args.tensor_parallel_size * args.data_parallel_size if args.enable_expert_parallel else 1


def element_bytes(settings: Settings) -> int:
    return DTYPE_BITS[settings.dtype] // 8


# --- what stays allocated -----------------------------------------------------------------------------------------

EVIDENCE = "reports/constants.md#"

INPUT_BYTES = 13  # token id, position, slot and flags per batched token
BUFFERS_SOURCE = f"vLLM 0.33 model runner, rotary embedding, fused_moe, torch's allocator; {EVIDENCE}buffers"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Bytes loaded with the weights, which a log counts as weights.

    ropes      rotary tables
    latents    copies that MLA keeps of quantized up-projections
    alignment  padding from the allocator's blocks and the kernels' layouts
    deepstack  buffers of a tower's inner outputs
    """

    ropes: int
    latents: int
    alignment: int
    deepstack: int = 0

    @property
    def total(self) -> int:
        return self.ropes + self.latents + self.alignment + self.deepstack


def loaded(spec: ModelSpec, settings: Settings, args: EngineArgs, layout: Layout | None) -> Loaded:
    """Bytes on a rank after loading, besides its weights; `layout` None: without the allocator's padding."""
    latents, version = 0, settings.version
    if spec.is_mla:
        tp, pp = args.tensor_parallel_size, args.pipeline_parallel_size
        if spec.quantization is not None or args.quantization is not None:
            latents = 2 * dequantized_latents(spec, tp, pp, online_of(spec, args), args.partition)
        if not version.has("plain_projections") and version.has("latent_cache"):
            latents += absorbed_projections(spec, tp, pp, 1 if latents else 2)
    alignment = 0
    if layout is not None and (spec.quantization is None or spec.quantization.known):
        alignment = weights_excess(spec, layout)
    element, deepstack = element_bytes(settings), 0
    ropes = rope_elements(spec, settings.max_model_len) * element
    if has_mrope(spec):
        ropes *= rope_tables(spec, version)
        if deepstack_width(spec) and takes_items(spec, args, version):
            deepstack = element * settings.max_num_batched_tokens * deepstack_width(spec)
    return Loaded(ropes, latents, alignment, deepstack)


INDEXER_BLOCK = 8  # index keys in the space of a gathered latent: 576 x 2 B // 132 B
INDEXER_CONTEXTS, INDEXER_LONG_CONTEXTS = 5, 2  # contexts gathered at once, up to and beyond INDEXER_LONG
INDEXER_LONG = 256 * 1024


@lru_cache(maxsize=1024)
def index_keys(spec: ModelSpec) -> tuple[int, int] | None:
    """(bytes of an index key and its scales, tokens it covers) of DeepSeek's sparse attention, or None without it."""
    for cache in {cache for caches in spec.layers for cache in caches}:
        match cache:
            case SparseIndexer(plain=False, pool=pool):
                return cache.key_bytes, pool
            case CompressedLatent(_, _, ratio, int(dim)):
                return dim + 4 * cdiv(dim, 128), ratio
    return None


def indexer_workspace(spec: ModelSpec, settings: Settings) -> tuple[int, str]:
    """(bytes, formula) of the gathered index keys of a prefill, reserved before the pool is sized.

    Source: vLLM 0.33 v1/attention/backends/mla/indexer.py (get_max_prefill_buffer_size).
    """
    keys = index_keys(spec)
    if keys is None or not settings.version.has("indexer_workspace"):
        return 0, ""
    (size, ratio), context = keys, settings.max_model_len
    long = context > INDEXER_LONG and settings.version.has("indexer_contexts")
    times = INDEXER_BLOCK * (INDEXER_LONG_CONTEXTS if long else INDEXER_CONTEXTS)
    compressed = f" / {ratio}" if ratio > 1 else ""
    return times * context // ratio * size, f" + indexer {times} x {context:,} tokens{compressed} x {size} B"


def indexer_logits(spec: ModelSpec, settings: Settings) -> int:
    """Most bytes of a prefill's scores against the index keys; the profile run reserves them.

    Source: vLLM 0.33 model_executor/layers/sparse_attn_indexer.py; VLLM_SPARSE_INDEXER_MAX_LOGITS_MB.
    """
    has = index_keys(spec) is not None and settings.version.has("indexer_logits")
    return settings.version.indexer_logits_mib * MIB if has else 0


def buffers(
    spec: ModelSpec,
    settings: Settings,
    args: EngineArgs,
    layout: Layout | None = None,
    *,
    stage: int | None = None,
    gpu: GpuSpec | None = None,
) -> Estimate:
    """Bytes of persistent tensors allocated before the pool is sized: rotary tables, sampling state, workspaces.

    layout  how the weights are sharded, if the spec determines it; it adds the allocator's padding
    stage   pipeline stage; only the last one samples; None: the last
    gpu     Blackwell's kernels for NVFP4 experts work in place; Triton's sampler keeps rows for its multiprocessors
    """
    tokens, seqs = settings.max_num_batched_tokens, settings.max_num_seqs
    with_weights = loaded(spec, settings, args, layout)
    sampling = 0
    formula = f"rotary {with_weights.ropes:,} B + {tokens:,} tokens x {INPUT_BYTES} B"
    samples = (stage is None or stage == args.pipeline_parallel_size - 1) and not pools(spec, args)
    is_consumed = settings.version.has("consumed_memory")  # what the runner allocated earlier counts too
    if samples and settings.runner_v2 and is_consumed:
        sampling = seqs * (4 * spec.vocab_size + 8 * cdiv(spec.vocab_size, 32))
        formula += f" + {seqs:,} seqs x {spec.vocab_size:,} vocab x 4.25 B sampling"
    if gpu is not None:
        sampler = sampler_of(settings, gpu)
        if samples and (top_rows := sampler_rows(sampler, settings, gpu)):
            sampling += 4 * top_rows * spec.vocab_size
            formula += f" + {top_rows} x {spec.vocab_size:,} vocab x 4 B top-k"
        if workspace := blas_workspace(sampler, gpu):
            sampling += workspace
            formula += f" + {workspace:,} B cuBLAS"
    takes = spec.multimodal and not stage and takes_items(spec, args, settings.version)
    if is_consumed and (takes or not settings.runner_v2):  # runner V1: for any model
        sampling += tokens * spec.hidden_size * element_bytes(settings)
        formula += f" + {tokens:,} x {spec.hidden_size:,} embeddings"
    fixed = with_weights.total + sampling + tokens * INPUT_BYTES
    if with_weights.deepstack:
        formula += f" + deepstack {with_weights.deepstack:,} B"
    if with_weights.latents:
        formula += f" + MLA copies {with_weights.latents:,} B"
    if with_weights.alignment:
        formula += f" + alignment {with_weights.alignment:,} B"
    gathered, gathered_text = indexer_workspace(spec, settings)
    room, room_text = (0, 0, 0), ""
    if is_consumed or settings.version.has("kept_expert_workspace"):  # before, it is part of the forward pass
        room, room_text = expert_room(spec, settings, args, 0 if gpu is None else gpu.sm)
    low, likely, high = fixed + room[0], fixed + room[1], fixed + room[2]
    formula += room_text
    # The code suggests that experts and indexer may share one workspace in turn; one log has room for both.
    low = max(low, fixed + gathered)
    likely, high = likely + gathered, high + gathered
    return Estimate(low, likely, high, formula + gathered_text, BUFFERS_SOURCE, "formula")


def outside_pools(own: Estimate, request: Request, settings: Settings, stage: int) -> Estimate:
    """The part of the buffers that stays while the server sleeps.

    Source: vLLM 0.33 v1/worker/gpu_worker.py (load_model, _init_workspace_and_model_runner), v1/worker/workspace.py.
    """
    spec, args = request.spec, request.args
    moved = [loaded(spec, settings, args, own_layout(request, stage)).total] * 3
    if settings.version.has("workspace_pool"):
        gathered, room = indexer_workspace(spec, settings)[0], expert_room(spec, settings, args, request.gpu.sm)[0]
        moved = [moved[0] + max(room[0], gathered), *(moved[0] + size + gathered for size in room[1:])]
    low, likely, high = (max(0, size - less) for size, less in zip((own.low, own.likely, own.high), moved, strict=True))
    return Estimate(low, likely, high, f"{own.formula}; {likely:,} B outside pools", own.source, own.kind)


def expert_room(
    spec: ModelSpec, settings: Settings, args: EngineArgs, sm: int, *, shared: bool = False
) -> "moe_backends.Room":
    """Bytes of the workspaces of the experts' kernels, or only of the one that all layers share."""
    if not spec.experts_per_token:
        return (0, 0, 0), ""
    from kvplan.servers.vllm import moe_backends  # of a model with experts

    per_choice = widths(spec, args.tensor_parallel_size, expert_ranks(args)).workspace
    room = moe_backends.shared_room if shared else moe_backends.expert_room
    return room(spec, settings, args, sm, per_choice)


DRAFT_SOURCE = "vLLM 0.33 v1/worker/gpu/spec_decode, qwen3_dflash.py; not compared with a device"


def with_draft(own: Estimate, draft: ModelSpec, settings: Settings, args: EngineArgs) -> Estimate:
    """Add to a server's buffers the hidden states kept for a draft that reads them from its target.

    An independent draft model has none; for DFlash and DSpark there are also fused copies of the K and V projections.
    """
    element, tokens, tp = element_bytes(settings), settings.max_num_batched_tokens, args.tensor_parallel_size
    parts: dict[str, int] = {}
    if draft.head:
        copies = draft.config.get("hc_mult") if CompressedLatent in draft.cache_kinds else None
        width = draft.hidden_size * (copies if isinstance(copies, int) else 1)
        parts[f"{tokens:,} tokens x {width:,} hidden x {element} B for the draft"] = tokens * width * element
    if draft.head in ("dflash", "dspark"):
        rows = min(settings.max_num_seqs * (1 + args.num_speculative_tokens), tokens)
        width = max(weight.inputs for weight in draft.other_weights)
        parts[f"{rows:,} tokens x {width:,} of several layers x {element} B"] = rows * width * element
        fused = sum(sum(local_shape(w, tp)[1][1:]) * w.inputs for w in draft.weights if w.name.endswith("qkv_proj"))
        parts[f"fused K and V projections {fused * element:,} B"] = fused * element
    if draft.is_mla and (draft.quantization is not None or args.quantization is not None):
        copied = 2 * dequantized_latents(draft, tp, 1, online_of(draft, args))
        parts[f"MLA copies of the draft {copied:,} B"] = copied
    more = sum(parts.values())
    if not more:
        return own
    formula = " + ".join([own.formula, *(text for text, size in parts.items() if size)])
    return Estimate(
        own.low + more, own.likely + more, own.high + more, formula, f"{own.source}; {DRAFT_SOURCE}", own.kind
    )


# --- sampling -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampler:
    """Bytes per (sequence x vocabulary entry) that sampling needs for a 2-byte model, with its range.

    `rest` describes the part in addition to the logits themselves.
    """

    low: float
    likely: float
    high: float
    rest: str
    source: str
    kind: Kind


# Until 0.16 sampling sorts: logits (2), their fp32 copy (4), sorted values (4) and indices (8), and what torch's sort
# takes meanwhile: indices (8) and CUB's second copies of keys and indices (12), or for 2 to 127 rows, which it sorts as
# one, two arrays of pairs (16), keys (4) and the second copies (12). The samplers of 0.7.3, 0.8.5 (V0 and V1), 0.9 to
# 0.11 and 0.16 have this live on tensors without data (benchmarks/release_peaks.py), and logs of 0.6 to 0.11 on H100,
# A100, L40S and T4 are met within 0.01 GiB; 38.4 had been fitted to them. Mistral-Small-3.2 on 0.11.0 logs 2.12 GiB.
SORT_SOURCE = f"vLLM 0.7 to 0.16 samplers, torch SortStable.cu; {EVIDENCE}sampler"
SAMPLER_SORTS = Sampler(38.0, 38.0, 38.0, "4 fp32 copy + 32 sort", SORT_SOURCE, "formula")
SAMPLER_SORTS_FEW = Sampler(50.0, 50.0, 50.0, "4 fp32 copy + 44 sort", SORT_SOURCE, "formula")
FEW = range(2, 128)  # rows that torch sorts as one
LEAST_TRITON_ROWS = 8  # vLLM 0.17 to 0.25 v1/sample/ops/topk_topp_sampler.py (apply_top_k_top_p): fewer are sorted
# Until 0.11 the second engine samples with FlashInfer, without a sort, if it is installed: its fp32 copy (4), and what
# top-k leaves (4) with its softmax (4). FlashInfer is an extra of the wheel (vLLM 0.10.2 and 0.11.0 METADATA: `pip
# install vllm` sorts) included in container images of 0.8 to 0.11. Source: vLLM 0.8.5, 0.9.2, 0.10.2, 0.11.0
# v1/sample/ops/topk_topp_sampler.py with FlashInfer 0.2.2 and 0.3.1, run on tensors without data.
SAMPLER_FLASHINFER = Sampler(
    14.0, 14.0, 14.0, "4 fp32 copy + 4 masked + 4 softmax",
    f"vLLM 0.8.5 to 0.11 and FlashInfer samplers; {EVIDENCE}sampler", "formula",
)  # fmt: skip
# 0.8 to 0.11 if not specified: as installed by `pip install vllm`; `low` covers container images.
SAMPLER_TO_011 = replace(SAMPLER_SORTS, low=14.0, source=f"as pip installs it; {SORT_SOURCE}")
SAMPLER_TO_011_FEW = replace(SAMPLER_SORTS_FEW, low=14.0, source=SAMPLER_TO_011.source)
# From 0.17 to 0.24 runner V1 keeps logits (2), their fp32 copy (4), its softmax (4) and as much noise (4), and Triton's
# top-k works in place. Read in 0.19 (v1/sample/sampler.py and ops). With Triton's rows and cuBLAS's workspace, which
# are buffers, 14 text models' logs on H100 are met within 0.01 GiB (llm-d-planner, accuracy report), for which 14.9 was
# fitted before; the rows are part of what that left unexplained on A100 (myoceane.fr).
SAMPLER_TO_024 = Sampler(
    14.0, 14.0, 14.5, "4 fp32 copy + 4 softmax + 4 noise",
    f"vLLM 0.19 v1/sample; llm-d-planner v0.19.0 report; {EVIDENCE}sampler", "formula",
)  # fmt: skip
# Model runner V2 keeps its penalties in `buffers`. Its profile run samples greedily: 2 for logits and, until 0.27, 4
# for the fp32 copy, both read in the code of 0.22 to 0.27, where one log shows 6.9 (Qwen2.5-0.5B on 0.27.1).
SAMPLER_V2_TO_027 = Sampler(
    6.0, 6.9, 8.0, "4 fp32 copy + 0.9 rounding",
    f"vLLM 0.27 gpu/sample/sampler.py, 1 log; {EVIDENCE}sampler", "formula",
)  # fmt: skip
# From 0.28 to 0.32 the copy is not made: only the logits, and temporaries of the kernels. No log shows it.
SAMPLER_V2_TO_032 = Sampler(
    2.0, 2.9, 8.0, "0.9 rounding",
    f"vLLM 0.28 to 0.32 gpu/sample/sampler.py, no log; {EVIDENCE}sampler", "formula",
)  # fmt: skip
# From 0.33 a second pass sets every sampling parameter: 2 for logits, 4 for the fp32 copy, and with FlashInfer 4 for
# the logits that its top-k masks and 4 for their softmax; without it Triton's top-k works in place. Both are the bytes
# of the server's own sampler on tensors without data; no log states them apart.
SAMPLER_V2 = Sampler(
    14.0, 14.0, 14.0, "4 fp32 copy + 4 masked + 4 softmax",
    f"vLLM 0.33 model_runner.py (_dummy_sampler_run), FlashInfer; {EVIDENCE}sampler", "formula",
)  # fmt: skip
SAMPLER_V2_TRITON = Sampler(
    6.0, 6.0, 6.0, "4 fp32 copy",
    f"vLLM 0.33 model_runner.py (_dummy_sampler_run), Triton; {EVIDENCE}sampler", "formula",
)  # fmt: skip
# GPUs that FlashInfer samples on. Source: vLLM 0.33 v1/sample/ops/topk_topp_sampler.py (flashinfer_sampler_supported).
FLASHINFER_SM, FLASHINFER_COUNT = range(80, 122), 16


def samples_with_flashinfer(release: Version, gpu: GpuSpec) -> bool:
    """True if FlashInfer samples, where the server looks at the GPU (from 0.33 on), or an installation is stated."""
    if gpu.vendor != "nvidia" or release.flashinfer is False:
        return False
    return gpu.sm in FLASHINFER_SM and (gpu.sm_count is None or gpu.sm_count > FLASHINFER_COUNT)


def sampler_rows(sampler: Sampler, settings: Settings, gpu: GpuSpec) -> int:
    """Rows of logits that Triton's top-k keeps: one for each multiprocessor, or for each sequence if these are fewer.

    Source: vLLM 0.19 to 0.33 v1/sample/ops/topk_topp_triton.py; 0.19 sorts fewer than 8 rows.
    """
    if not (sampler is SAMPLER_V2_TRITON or sampler is SAMPLER_TO_024) or gpu.sm_count is None:
        return 0
    rows = min(gpu.sm_count, settings.max_num_seqs, settings.max_num_batched_tokens)
    return min(1 << (rows - 1).bit_length(), gpu.sm_count)


FITTED: Final = frozenset(map(id, (SAMPLER_V2_TO_027, SAMPLER_V2_TO_032)))
BLAS_WORKSPACE, BLAS_WORKSPACE_SM90 = 8_519_680, 32 * MIB


def blas_workspace(sampler: Sampler, gpu: GpuSpec) -> int:
    """Bytes that torch gives cuBLAS at the first product, in the profile run; fitted constants of samplers include it.

    Source: torch aten/src/ATen/cuda/CublasHandlePool.cpp (parseChosenWorkspaceSize).
    """
    if gpu.vendor not in ("nvidia", "unknown") or id(sampler) in FITTED:  # unknown: only its memory is given
        return 0
    return BLAS_WORKSPACE_SM90 if gpu.sm // 10 in (9, 10, 12) else BLAS_WORKSPACE


def sampler_of(settings: Settings, gpu: GpuSpec) -> Sampler:
    """Return the sampler of a release, a GPU and its installation options: `--engine vllm@0.9+flashinfer`."""
    release = settings.version
    if settings.runner_v2:
        if release.has("sampler_warm_up"):
            return SAMPLER_V2 if samples_with_flashinfer(release, gpu) else SAMPLER_V2_TRITON
        return SAMPLER_V2_TO_032 if release.has("logits_as_they_are") else SAMPLER_V2_TO_027
    rows = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    if release.has("lean_sampler") and rows >= LEAST_TRITON_ROWS:
        return SAMPLER_TO_024
    is_few = rows in FEW
    sorts = SAMPLER_SORTS_FEW if is_few else SAMPLER_SORTS
    if settings.first_engine or release.has("sampler_on_request"):
        return SAMPLER_FLASHINFER if release.flashinfer and not settings.first_engine else sorts
    if release.flashinfer is None:
        return SAMPLER_TO_011_FEW if is_few else SAMPLER_TO_011
    return SAMPLER_FLASHINFER if release.flashinfer else sorts


def kept_states(settings: Settings, rows: int) -> int:
    """Hidden states that live while `rows` of them are sampled, in tokens.

    Source: vLLM 0.8.0 to 0.25 v1/worker/gpu_model_runner.py, 0.22 to 0.33 v1/worker/gpu/model_runner.py (profile_run).
    """
    if settings.first_engine:
        return settings.max_num_batched_tokens
    if settings.runner_v2:
        return settings.max_num_batched_tokens + rows
    whole = settings.max_num_batched_tokens if settings.version.has("states_while_sampling") else 0
    return whole + (2 if settings.version.has("random_states") else 1) * rows


def pools(spec: ModelSpec, args: EngineArgs) -> bool:
    """True if the profile run ends with a pooler, which samples nothing and needs less than the forward pass."""
    if generates(spec, args):
        return False
    from kvplan.servers.vllm import pooling  # of what does not plainly generate

    return pooling.converts(spec, args) is not None


# --- CUDA graphs --------------------------------------------------------------------------------------------------

# vLLM captures the two largest graphs of a mode and estimates first + (n - 1) x max(second, 1 MiB); runner V1 takes the
# larger first of both modes, V2 measures all piecewise graphs (0.19, 0.25, 0.33 profile_cudagraph_memory). What a
# graph takes is not derivable (the tensors of the pool are 0 to 0.1 GiB of it), so both samples are fitted.
# vLLM's own estimate, which it subtracts: 0.25 GiB + 6 MiB per captured graph, through 0.84 GiB at 102 graphs
# (Llama-3.1-8B, accuracy report), 0.79, 0.78 and 0.64 at 86, 0.37 at 54 (vLLM issues and recipes of 2026). Fewer graphs
# scatter: 0.14 at 30, 0.22 at 15, 0.09-0.61 below ten; so did larger ones (1.6 at 86). n = 14 logs, half of them
# within a third. Actual graph pools were between a third of the estimate and the estimate; 0.5-1.9 GiB (mean 1.0) with
# 1,024 sequences.
GRAPHS_BASE = GIB // 4
GRAPH = 6 * MIB
GRAPHS_RANGE = (0.3, 2.5)
# HIP graphs: 3.19, 3.9 and 4.08 GiB captured at 102, 102 and 86 graphs (0.17, 0.29 and 0.14 on three kinds of GPU).
GRAPH_ROCM = 36 * MIB
# Experts, states, drafts and adapters: reports of 0.14-1.94 GiB, 2.6 x; 4.79 at 204 graphs with adapters (Qwen3-4B,
# 0.19.1), 3.3 x. MLA: 4.77-5.10 (GLM-5.1 TP8: 6.0 x). Not covered: 33 and 119 GiB
# (vllm-project/vllm#45178, #50780, #53013: no range covers them), as one graph's size is multiplied by their number.
GRAPHS_HIGH_EXOTIC, GRAPHS_HIGH_LATENTS = 4.0, 6.5
GRAPHS_SOURCE = f"llm-d-planner v0.19.0, logs of 2026; not vllm#50780, vllm#53013; {EVIDENCE}cuda-graphs"
# Largest size captured: 1,024 on compute capability 10.x from 0.28 on (vllm-project/vllm#49390), 512 elsewhere.
LARGEST_GRAPH = 512
LARGEST_GRAPH_SM100 = 1024


def piecewise_graphs(seqs: int, largest: int) -> int:
    """Number of piecewise graphs of up to min(2 x seqs, largest) tokens: all that an encoder has.

    Sizes are 1, 2, 4, then every 8 below 256, then every 16. Source: vLLM 0.33 config/vllm.py; logs with 256 sequences
    show PIECEWISE=51 (largest=512), FULL=35 (largest=256), one with sizes up to 1,024 PIECEWISE=83 (largest=1024).
    """
    return len(usual_sizes(seqs, largest))


def usual_sizes(seqs: int, largest: int) -> list[int]:
    """The server's own batch sizes, in tokens."""
    return [size for size in sizes_to(largest, largest) if size <= 2 * seqs]


def captured_sizes(seqs: int, largest: int, query: int, tokens: int, *, uniform: bool) -> list[int]:
    """Captured batch sizes, in tokens, when each sequence decodes `query` tokens at once: the last one and its drafts.

    uniform  multiples of `query` are captured in addition to the usual sizes
    Source: vLLM 0.33 config/vllm.py (_set_cudagraph_sizes); the counts equal its own (tests/facts/speculation.jsonl).
    """
    most = min(2 * seqs * query, largest, tokens)
    usual = {*(1, 2, 4), *range(8, 256, 8), *range(256, most + 1, 16), tokens}
    together = {n * query for n in (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16), min(seqs, largest))}
    limit = min(seqs, largest) * query
    return sorted(n for n in usual | ({n for n in together if n <= limit} if uniform else set()) if n <= most)


def sizes_to(largest: int, tokens: int) -> list[int]:
    """Captured batch sizes, in tokens, if --max-cudagraph-capture-size sets the largest.

    Source: vLLM 0.33 config/vllm.py (_set_cudagraph_sizes); their number equals its own.
    """
    last = min(largest, tokens)
    return sorted(size for size in {1, 2, 4, *range(8, 256, 8), *range(256, last + 1, 16), tokens} if size <= last)


@lru_cache(maxsize=1024)
def num_graphs(
    captured: "Graphs | None", seqs: int, tokens: int, query: int, largest: int, stated: int | None, *, uniform: bool
) -> int:
    """Number of captured graphs of steps of up to `tokens` tokens, if sequences decode `query` tokens at once.

    stated  the largest size, if it is given; largest: the server's own
    """
    if captured is not None and captured.sizes is not None:
        sizes = [size for size in captured.sizes if size <= tokens]
    elif stated is not None:
        sizes = sizes_to(stated, tokens)
    elif query > 1:
        sizes = captured_sizes(seqs, largest, query, tokens, uniform=uniform)
    else:
        sizes = usual_sizes(seqs, largest)
    decoding = len({count for count in (cdiv(size, query) for size in sizes) if count <= seqs})
    return len(sizes) + decoding if captured is None else captured.count(len(sizes), decoding)


def graphs_of(args: EngineArgs) -> "Graphs | None":
    """What --compilation-config captures; None without one: full graphs of decodes and piecewise ones."""
    if args.compilation_config is None:
        return None
    from kvplan.servers.vllm import compilation  # only with such a config

    return compilation.of_args(args)


def captures_full(args: EngineArgs) -> bool:
    """True if steps of decodes run whole in a graph."""
    captured = graphs_of(args)
    return not args.enforce_eager and (captured is None or captured.mode not in ("NONE", "PIECEWISE"))


MOST_GRAPH_TOKENS = 2**20  # 65,555 graphs, 384 GiB at 6 MiB each: more than a GPU has


def stated_size(args: EngineArgs, captured: "Graphs | None", tokens: int) -> int | None:
    """The largest batch size to capture, if it is set. Raise UsageError for one that no GPU has memory for."""
    stated = args.max_cudagraph_capture_size or (None if captured is None else captured.largest)
    if stated and min(stated, tokens) > MOST_GRAPH_TOKENS:
        option = "--max-cudagraph-capture-size" if args.max_cudagraph_capture_size else "--compilation-config"
        problem = f"asks for CUDA graphs of up to {min(stated, tokens):,} tokens, which no GPU has memory for"
        raise UsageError(option, problem, f"use {MOST_GRAPH_TOKENS:,} tokens or fewer")
    return stated


GPT_OSS_GRAPH = 1024  # on any GPU; vLLM 0.14 to 0.33 model_executor/models/config.py (GptOssForCausalLMConfig)


def largest_graph(release: Version, sm: int) -> int:
    return LARGEST_GRAPH_SM100 if sm // 10 == 10 and release.has("large_graphs") else LARGEST_GRAPH


NARROWER = "set --kv-cache-memory-bytes, use --enforce-eager, or run kvplan reconcile --log on a start-up log"
WIDE = 0.2  # report a range of the pool that is this fraction wide


def wide_by_graphs(
    estimates: Mapping[str, Estimate], available: tuple[int, int, int], *, in_budget: bool
) -> str | None:
    """Say what to do about a wide range of the pool mostly caused by graphs, or None if it is not."""
    low, likely, high = available
    graphs = estimates["cuda_graphs"]
    spread = graphs.high - graphs.low
    if not in_budget or likely <= 0 or high - low < WIDE * likely or 2 * spread < high - low:
        return None
    share = f"{graphs.low / GIB:.2f}-{graphs.high / GIB:.2f} GiB"
    return f"most of the uncertainty is CUDA graphs ({share}). To narrow it, {NARROWER}"


def cuda_graphs(
    spec: ModelSpec, settings: Settings, args: EngineArgs, release: Version, *, sm: int = 0, amd: bool = False
) -> Estimate:
    """Bytes of CUDA graphs: within the budget if `settings.graphs_in_budget`, else in addition to it.

    `sm` is `GpuSpec.sm`, 103 for compute capability 10.3; `amd`: HIP's graphs.
    """
    captured = graphs_of(args)
    if args.enforce_eager or (captured is not None and captured.mode == "NONE"):
        return Estimate(0, 0, 0, "none with enforce_eager", "vLLM 0.33 v1/worker/gpu_worker.py", "exact")
    largest, seqs, tokens = largest_graph(release, sm), settings.max_num_seqs, settings.max_num_batched_tokens
    raised = spec.architecture == "GptOssForCausalLM" and release.has("gpt_oss_graphs")
    stated = stated_size(args, captured, tokens) or (GPT_OSS_GRAPH if raised else None)
    uniform = release.has("uniform_decode_graphs")
    graphs = num_graphs(captured, seqs, tokens, 1 + args.num_speculative_tokens, largest, stated, uniform=uniform)
    graph = GRAPH_ROCM if amd else GRAPH
    plain = GRAPHS_BASE + graphs * graph
    twice = args.max_loras > 0 and release.has("adapter_graphs") and (captured is None or captured.both)
    likely = plain + graphs * graph if twice else plain
    drafts = args.num_speculative_tokens > 0  # whose own graphs no log reports separately
    exotic = spec.experts_per_token > 0 or spec.has_states or drafts or twice
    latents = widths(spec, args.tensor_parallel_size, 1).latent
    widest = GRAPHS_HIGH_LATENTS if latents else GRAPHS_HIGH_EXOTIC if exotic else GRAPHS_RANGE[1]
    high = int(likely * widest)
    outside = "" if settings.graphs_in_budget else ", outside the budget"
    without = ", the draft's own within the range" if drafts else ""
    with_both = ", each with adapters and without," if twice else ""
    fitted = f"x {graph // MIB} MiB, fitted on {3 if amd else 14} logs"
    formula = f"0.25 GiB + {graphs * (1 + twice)} graphs{with_both} {fitted}{without}{outside}"
    low = int(plain * GRAPHS_RANGE[0])
    if (
        captured is not None and not captured.is_plain
    ):  # no log has such graphs, and a backend may fall back to others or to none
        formula, low = f"{formula}; --compilation-config: a wider range", 0
        high = int(likely * GRAPHS_HIGH_LATENTS)
    return Estimate(low, likely, high, formula, GRAPHS_SOURCE, "calibrated")


# --- memory that torch does not manage ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """Measured bytes; `spread` describes the range and its sample."""

    low: int
    likely: int
    high: int
    over: str
    source: str

    @property
    def spread(self) -> str:
        return f"{self.low / GIB:.2f}-{self.high / GIB:.2f} {self.over}"


# Growth between the snapshot and the end of the profiling run: kernels loaded, cuBLAS workspaces, all-reduce buffers.
# One NVIDIA GPU, vLLM 0.6-0.11: median of 24 threads 0.085, 10-90% 0.03-0.28 GiB; all 8 runs on H100 with 0.11: 0.13.
NON_TORCH_ONE = Range(
    GIB * 3 // 100, GIB * 12 // 100, GIB // 3, "over 24 reports",
    f"llm-d-benchmark, vllm#11899, vllm#10517, Unsloth; {EVIDENCE}non-torch",
)  # fmt: skip
# From 0.18: 0.24-0.27 on H100 (21 models, 1 thread; Granite 0.46, unexplained), 0.12-0.22 in 5 logs of smaller GPUs of
# 2026, model runner V2's own buffers subtracted. First pipeline stages showed 0.07.
NON_TORCH_ONE_NEW = Range(
    GIB // 10, GIB // 5, GIB // 2, "over 6 reports",
    f"llm-d-planner v0.19.0 report and 5 logs of 2026; {EVIDENCE}non-torch",
)  # fmt: skip
# Several GPUs, 0.6-0.17: 0.11 (8 T4), 0.15 and 0.20 (3090), 0.21 (8 L40S), 0.25-0.33 (TP2 without NVLink), 0.4-0.52
# (TP4 A100), 0.54-0.55 (TP2 H100); 5.2-7.7 on H200 TP8 under the old V0 engine (2 threads) is not covered.
NON_TORCH_MANY = Range(
    GIB // 10, GIB // 2, 2 * GIB, "over 9 of 11 reports",
    f"llm-d-benchmark, vllm#13061, vllm#16378, vllm#15766; {EVIDENCE}non-torch",
)  # fmt: skip
# Eight Hopper GPUs with an NVSwitch, before 0.8: 5.2-7.7 (H200: Llama-3.1-70B 5.21, 5.68, 7.71 by rank, DeepSeek-R1
# 7.16): the first engine takes its snapshot before NCCL starts, so NCCL's buffers count.
NON_TORCH_NVSWITCH_V0 = Range(
    GIB * 52 // 10, GIB * 64 // 10, GIB * 77 // 10, "over 2 reports",
    f"vllm#10702 and a log of DeepSeek-R1, both on 8 H200; {EVIDENCE}non-torch",
)  # fmt: skip
# From 0.18 on H100: TP2 2.06-2.10, TP4 2.13-2.21 (14 runs, 1 thread): all-reduce buffers over NVLink.
NON_TORCH_NVLINK = Range(
    GIB, GIB * 21 // 10, GIB * 5 // 2, "over 14 runs in 1 report",
    f"llm-d-planner vLLM v0.19.0 accuracy report (H100); {EVIDENCE}non-torch",
)  # fmt: skip
# Without NVLink, from what logs leave for it: 0.63 GiB on four RTX PRO 6000 (Qwen3-235B, August 2026), 0.05 on two
# (Qwen3-32B, 0.27.1), 0.31 on two T4 (Qwen3-8B in three starts of 0.22). Older releases: 0.11-0.33 in six threads.
NON_TORCH_PCIE = Range(
    GIB // 20, GIB * 35 // 100, GIB, "from 5 logs and older releases",
    f"5 logs of RTX PRO 6000 and T4, vllm#16378; {EVIDENCE}non-torch",
)  # fmt: skip
# GPUs that reach each other over NVLink, but through no NVSwitch, whose multicast buffers they lack: 0.07-0.09 GiB on
# four GH200 of a node (GLM-5.2 in three starts of 0.23).
WITHOUT_SWITCH = "gh200"
# ROCm: 0.59 GiB (MI300X, vllm-project/vllm#20069), others 0.25-0.6 without a repository on record.
NON_TORCH_ROCM = Range(
    GIB // 4, GIB * 4 // 10, GIB * 6 // 10, "in ROCm logs",
    f"vllm#20069 (MI300X) and unnamed ROCm logs; {EVIDENCE}non-torch",
)  # fmt: skip


def non_torch_range(gpu: GpuSpec, tp: int, release: Version) -> Range:
    if gpu.vendor == "amd":
        return NON_TORCH_ROCM
    if tp == 1:
        return NON_TORCH_ONE_NEW if release.has("all_reduce_buffers") else NON_TORCH_ONE
    if not release.has("v1") and gpu.sm == 90 and tp >= 8:
        return NON_TORCH_NVSWITCH_V0
    if not release.has("all_reduce_buffers"):
        return NON_TORCH_MANY
    if gpu.name.startswith(WITHOUT_SWITCH):
        return NON_TORCH_PCIE
    return NON_TORCH_NVLINK if gpu.sm in (90, 100, 103) else NON_TORCH_PCIE


def non_torch(spec: ModelSpec, settings: Settings, args: EngineArgs, gpu: GpuSpec, *, weights: int = 0) -> Estimate:
    """Device memory allocated during loading and profiling that torch does not track.

    weights  bytes that the rank loads, which the host reads on a GPU that shares its memory
    """
    tp = args.tensor_parallel_size
    talks_to = tp * (args.data_parallel_size if spec.experts_per_token else 1)  # replicas exchange tokens for experts
    measured = non_torch_range(gpu, talks_to, settings.version)
    causes = "kernels, BLAS" if gpu.vendor == "amd" else "kernels, cuBLAS"
    if talks_to > 1:
        causes += ", all-reduce"
    where = f"TP {tp}" if talks_to == tp else f"{talks_to} ranks, as at TP"
    formula = f"{measured.likely / GIB:.2f} GiB measured growth at {where} ({causes}), {measured.spread}"
    low, likely, high, source = measured.low, measured.likely, measured.high, measured.source
    if gpu.unified and not gpu.has_own_limit:
        host, read = HOST_GROWTH, [int(weights * share) for share in HOST_GROWTH_SHARES]
        growth = min(host.likely + read[0], HOST_GROWTH_MOST[0])
        low, likely = low + host.low, likely + growth
        high += min(host.high + read[1], HOST_GROWTH_MOST[1])
        formula += f"; {growth / GIB:.1f} GiB used by the host meanwhile, not computable: 1 and a tenth of the weights"
        source += f"; {host.source}"
    return Estimate(low, likely, high, formula, source, "calibrated")


# Missing from "Free memory on device (free/total)" when vLLM starts. One GPU: 0.61 (4 H100 runs of one document), 0.56,
# 0.53, 0.51, 0.50, 0.49, 0.41, 0.33, 0.23, 0.17, 0.11 GiB. Several: 0.49 (8 L40S), 0.96, 1.18, 1.54, 2.35, 3.33. It is
# driver and context and, with several GPUs, NCCL. Other processes on the GPU add to it.
CONTEXT_ONE = Range(
    GIB // 10, GIB // 2, GIB * 65 // 100, "in 11 reports",
    f"llm-d-benchmark on H100 and 10 start-up logs; {EVIDENCE}context",
)  # fmt: skip
CONTEXT_MANY = Range(
    GIB * 45 // 100, GIB * 12 // 10, GIB * 335 // 100, "in 6 reports",
    f"llm-d-benchmark on H100 and 5 start-up logs; {EVIDENCE}context",
)  # fmt: skip


def context(gpu: GpuSpec, args: EngineArgs) -> Estimate:
    """CUDA context and NCCL, allocated before the snapshot: outside the budget, in the memory that utilization
    leaves.
    """
    ranks = args.num_gpus
    measured = CONTEXT_ONE if ranks == 1 else CONTEXT_MANY
    runtime, collectives = ("HIP", "RCCL") if gpu.vendor == "amd" else ("CUDA", "NCCL")
    causes = f"{runtime} context" if ranks == 1 else f"{runtime} context and {collectives} of {ranks} ranks"
    formula = f"{measured.likely / GIB:.2f} GiB ({causes}), {measured.spread}"
    return Estimate(measured.low, measured.likely, measured.high, formula, measured.source, "calibrated")


# On a GPU that shares its memory with the CPU: use by the host and other processes when the server starts, and the
# host's growth while weights are loaded. Neither can be derived: both depend on the machine's other work.
HOST_AT_START = Range(
    GIB * 2, GIB * 152 // 10, GIB * 192 // 10, "posted for GB10",
    "GB10s with 102-110.4 GiB free of 121.69 (GLM-5.3-Flash-EXL3#47) and one that started at 0.92 "
    f"(Qwen3.8-27B on 0.27.1); {EVIDENCE}context",
)  # fmt: skip
HOST_GROWTH = Range(
    GIB // 2, GIB, 3 * GIB, "in 8 logs",
    f"8 logs of GB10, 5 threads; {EVIDENCE}non-torch",
)  # fmt: skip
# Of the weights in addition, likely and at most, and the most of both. What is left in logs: 0.9 GiB with 0.9 GiB of
# weights, 1.6-2.9 with 14, about 3 with 23, 2.8 and 5.5 with 48, 6.5 and 7.4 with 51, at most 3 with 96.
HOST_GROWTH_SHARES = (0.1, 0.25)
HOST_GROWTH_MOST = (GIB * 65 // 10, 15 * GIB)


def in_use(gpu: GpuSpec, stated: int | None) -> Estimate:
    """Memory that other processes hold when the server starts: as given, else typical for GPUs that share the
    CPU's memory.
    """
    if stated is not None:
        return Estimate(stated, stated, stated, "as stated (--memory-in-use)", "--memory-in-use", "exact")
    if not gpu.unified or gpu.has_own_limit:
        return Estimate(0, 0, 0, "none: no other process on the GPU", "set it with --memory-in-use", "exact")
    spread = HOST_AT_START
    formula = f"{spread.likely / GIB:.1f} GiB of the host, {spread.spread}; not computable: set it with --memory-in-use"
    return Estimate(spread.low, spread.likely, spread.high, formula, spread.source, "calibrated")
