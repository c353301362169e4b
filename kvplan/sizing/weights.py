"""Parameters -> bytes on one rank, by tensor group, quantization, and tensor/pipeline/expert parallelism.

Sources: vLLM 0.33's own parameters for some 180 configurations (created, not yet post-processed); storage layouts of
AutoAWQ, GPTQ, compressed-tensors, ModelOpt, OCP microscaling and bitsandbytes.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from math import gcd

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.records import dataclass
from kvplan.models.quant import BY_MATRIX, WEIGHT_ONLY, head_scheme, scheme_of, tower_scheme
from kvplan.models.spec import (
    ChunkedAttention,
    FullAttention,
    LatentAttention,
    LayerCache,
    ModelSpec,
    Part,
    Place,
    Quantization,
    Scheme,
    Sharing,
    SlidingWindow,
    Weight,
    unique,
)

WNA16 = "moe_wna16"
BLACKWELL = 100  # compute capability, times ten
FLASHMLA_HEADS = 64  # and twice that; vLLM 0.33 models/deepseek_v4/nvidia/flashmla.py
FULL_PRECISION = ("float32", "float")  # served in 16 bits, stored in 32
BYTES = {"int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "mxfp8": 1, "fp8": 1, "nvfp4": 1}


@dataclass(frozen=True, slots=True)
class Layout:
    """Sharding of a model: tensor parallel, pipeline parallel and its stage, expert parallel ranks (1: none).

    dp  data parallel replicas; without expert parallelism they shard the experts' matrices like tensor ranks (vLLM)
    sm  compute capability of the GPU, 90 for 9.0
    rest_last  layers that do not divide evenly among pipeline stages go to the last stages
    left_out      disabled modalities: a tower that serves no other is not built
    whole_towers  towers are replicated on ranks that divide the batch, except for parts that stay sharded (vLLM)
    tower_tp      ranks that shard a tower; 0: same as `tp`
    expert_units  (kind of a scheme, width, hidden width): multiples to which a rank's experts are padded
    expert_kernel  kernel requested for experts; "auto": none
    joined        a speculative head loaded with its target: shared tensors belong to the target
    redundant     redundant experts per layer, over all expert parallel ranks
    whole_shared  shared experts are replicated on ranks that divide the tokens
    partition     layers of each pipeline stage, if given
    attention_tp  ranks that shard attention; 0: same as `tp`
    dense_tp      ranks that shard a dense MLP; 0: same as `tp`
    head_tp       ranks that shard the output head; 0: same as `tp`
    twice_scaled  NVFP4 experts keep a second copy of their block scales, in tiles
    wide_scales   scales of fp8 blocks are stored once per output, in 16 bits, when loaded (Marlin's kernels)
    as_stored     experts keep the checkpoint's shapes and groups: no kernel needs others (the bundled engine)
    """

    tp: int = 1
    pp: int = 1
    stage: int = 0
    ep: int = 1
    dp: int = 1
    sm: int = 90
    dtype: str | None = None
    online: str | None = None
    rest_last: bool = False
    left_out: frozenset[str] = frozenset()
    whole_towers: bool = False
    tower_tp: int = 0
    expert_units: tuple[tuple[str, int, int], ...] = ()
    expert_kernel: str = "auto"
    joined: bool = False
    redundant: int = 0
    whole_shared: bool = False
    partition: tuple[int, ...] = ()
    attention_tp: int = 0
    dense_tp: int = 0
    head_tp: int = 0
    twice_scaled: bool = False
    wide_scales: bool = False
    as_stored: bool = False


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def stage_layers(num_layers: int, pp: int, *, rest_last: bool = False, partition: tuple[int, ...] = ()) -> list[range]:
    """Layers of each pipeline stage: as in `partition`, or evenly divided, with the remainder given one by one to the
    stages from the last but one backwards, or with rest_last from the last one.

    Source: vLLM 0.33 and sglang 0.5.23 distributed/utils.py (get_pp_indices).
    """
    if partition and pp > 1:
        return partitioned(num_layers, pp, partition)
    share, rest = divmod(num_layers, pp)
    sizes = [share] * pp
    for i in range(1, rest + 1) if rest_last else range(2, rest + 2):
        sizes[-i if i <= pp else -1] += 1
    starts = [sum(sizes[:i]) for i in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def partitioned(num_layers: int, pp: int, partition: tuple[int, ...]) -> list[range]:
    """Layers of stages with given counts. Reject what a server does not start with."""
    text = ",".join(map(str, partition))
    if len(partition) != pp:
        raise UsageError(
            f"pp_layer_partition {text}", f"says {len(partition)} stages of {pp}", "write a number for each stage"
        )
    if sum(partition) != num_layers:
        raise UsageError(
            f"pp_layer_partition {text}",
            f"adds up to {sum(partition)} layers of {num_layers}",
            "write numbers that add up",
        )
    starts = [sum(partition[:i]) for i in range(pp)]
    return [range(start, start + size) for start, size in zip(starts, partition, strict=True)]


def layers_on(spec: ModelSpec, layout: "Layout") -> range:
    """The layers of a layout's stage."""
    stages = stage_layers(spec.num_layers, layout.pp, rest_last=layout.rest_last, partition=layout.partition)
    return stages[layout.stage]


def local_units(part: Part, tp: int, name: str) -> int:
    """Number of units of a part on one rank."""
    match part.sharing:
        case Sharing.SPLIT:
            if part.units % tp:
                raise UsageError(
                    f"tensor_parallel_size {tp}",
                    f"{name} has {part.units} units, which {tp} ranks cannot share",
                    "use a divisor",
                )
            return part.units // tp
        case Sharing.KV_HEADS:
            if part.units % tp and tp % part.units:
                raise UsageError(
                    f"tensor_parallel_size {tp}",
                    f"{part.units} KV heads can neither be split nor repeated evenly",
                    "use a divisor or a multiple",
                )
            return max(1, part.units // tp)
        case Sharing.GROUPS:
            return cdiv(part.units, tp)
        case Sharing.PADDED_HEADS:
            return up(cdiv(part.units, tp), FLASHMLA_HEADS)


def up(value: int, multiple: int) -> int:
    return cdiv(value, multiple) * multiple


def linear_bytes(scheme: Scheme, k: int, parts: list[int], *, expert: bool = False, element: int = 2) -> int:
    """Bytes of one matrix `[sum(parts), k]` with its scales, as a server creates it.

    expert  one of many in a fused layer: one fp8 input scale for all its parts, shapes in 16 bits, and scales for
    4-bit inputs even if the inputs are not quantized
    element  bytes of a value of the dtype in which the layer computes
    """
    n, p = sum(parts), len(parts)
    group = scheme.group_size or k
    match scheme.kind:
        case "fp8_tensor":
            return k * n + 4 * p + (4 * (1 if expert else p) if scheme.static else 0)
        case "fp8_channel":
            return k * n + 4 * n + (4 * p if scheme.static else 0)
        case "int8_channel" | "int8_tensor":  # a zero point of the inputs has 8 bits
            scales = n if scheme.kind == "int8_channel" else p
            return k * n + 4 * scales + (4 + scheme.zeros if scheme.static else 0)
        case "fp8_block":
            rows, columns = scheme.block or (128, 128)
            return k * n + scheme.scale_bytes * cdiv(k, columns) * cdiv(n, rows)
        case "int4" | "int8":
            shape = 4 if expert else 16  # two numbers, in the model's dtype or as int64
            per_byte = 2 if scheme.kind == "int4" else 1
            zeros = cdiv(k, group) * n // per_byte if scheme.zeros else 0
            return k * n // per_byte + element * cdiv(k, group) * n + shape + zeros
        case "awq":  # outputs are packed by eight
            groups, packed = cdiv(k, group), n // 8 * 4
            return (k + groups) * packed + element * groups * n
        case "gptq":
            groups = k // group
            zeros = 0 if scheme.variant == WNA16 else groups * n // 2
            return k * n // 2 + 2 * groups * n + zeros
        case "gptq_int8":
            return k * n + 3 * (k // group) * n
        case "nvfp4":
            inputs = 4 if expert or scheme.variant != WEIGHT_ONLY else 2 if scheme.static else 0
            return k * n // 2 + k // group * n + (4 + inputs) * p
        case "mxfp8":
            return k * n + k // group * n
        case "mxfp4":
            return k * n // 2 + k // group * n
        case "nf4":
            return k * n // 2 + 4 * cdiv(k * n, 64)
        case "nf4_double":
            # absmax itself in 8 bits per 64, with one fp32 per 256 of them: 4.127 bits in all
            return k * n // 2 + cdiv(k * n, 64) + 4 * cdiv(k * n, 64 * 256)
        case "bnb_int8":
            return k * n + 4 * n


FINEST_BLOCK = 32  # of FP8 experts' scales


def expert_scheme(scheme: Scheme, k: int, parts: list[int], split: str) -> Scheme:
    """Scheme of experts whose sharded width does not suit the scheme's groups (vLLM 0.33).

    FP8 block scales: per square of the largest size that divides block and shard.
    AWQ and GPTQ: Marlin takes a width of whole groups, of 64 at least; other widths go
    to a kernel (moe_wna16) that halves the group until it divides the width, and has no zeros for GPTQ.
    """
    width, group = parts[0] if split == "outputs" else k, scheme.group_size
    if scheme.variant == BY_MATRIX:
        return Scheme("fp8_tensor", static=True)
    if scheme.kind == "fp8_block" and scheme.block and any(width % side for side in scheme.block):
        side = gcd(*scheme.block, k, parts[0])
        return replace(scheme, block=(side, side)) if side >= FINEST_BLOCK else scheme
    if scheme.kind in ("awq", "gptq", "gptq_int8") and group is not None and width % max(64, group):
        while width % group and group > 32:
            group //= 2
        return replace(scheme, group_size=group, variant=WNA16)
    return scheme


def expert_units(layout: Layout, kind: str) -> tuple[int, int]:
    """Multiples to which experts in a kind of scheme are padded: their inner width, the hidden width.

    MXFP4 experts of which the layout says nothing: Triton's on compute capability 9.0; Marlin's and TRT-LLM's
    elsewhere. Source: vLLM 0.33's parameters on A100, L40S, H100, B200.
    """
    default = (1, 1) if kind != "mxfp4" else (64, 1) if layout.sm // 10 == 9 else (128, 256)
    return next(((width, hidden) for name, width, hidden in layout.expert_units if name == kind), default)


def padded(k: int, parts: list[int], split: str, units: tuple[int, int]) -> tuple[int, list[int]]:
    """(columns, rows of each part) of experts, padded for the kernel that reads them."""
    width, hidden = units
    if split == "outputs":
        return up(k, hidden), [up(part, width) for part in parts]
    return up(k, width), [up(part, hidden) for part in parts]


def swizzled(columns: int, rows: int) -> int:
    """Bytes of fp8 block scales in tiles of 128 x 4."""
    return up(rows, 128) * up(columns, 4)


def local_shape(weight: Weight, tp: int) -> tuple[int, list[int]]:
    """(columns, rows of each part) of a weight on one rank."""
    if weight.even and weight.even % tp:
        tp = 1
    match weight.split:
        case "none":
            return weight.inputs, [part.size for part in weight.parts]
        case "inputs":
            if weight.inputs % tp:
                raise UsageError(
                    f"tensor_parallel_size {tp}",
                    f"{weight.name} has {weight.inputs} inputs, which {tp} ranks cannot share",
                    "use a divisor",
                )
            return max(weight.inputs // tp, least_of(weight, tp)), [part.size for part in weight.parts]
        case "outputs" if weight.heads:
            return weight.inputs, [most_rows(weight, tp)]
        case "outputs" if weight.pad_rows > 1:
            return weight.inputs, [cdiv(up(weight.outputs, weight.pad_rows), tp)]
        case "outputs":
            rows = [local_units(part, tp, weight.name) * part.width for part in weight.parts]
            rows = [max(row, least_of(weight, tp)) for row in rows]
            rows[-1] += up(sum(rows), weight.align_rows) - sum(rows)
            return weight.inputs, [sum(rows)] if repeats_groups(weight, tp) else rows


def most_rows(weight: Weight, tp: int) -> int:
    """Rows of an n-gram table on the rank with most; some heads have a few more than others.

    Source: vLLM 0.33 models/deepseek_v41/common/engram.py (ParallelEngramEmbedding).
    """
    heads, share = weight.heads, cdiv(len(weight.heads), tp)
    if (tp - 1) * share >= len(heads):
        problem = f"leaves ranks without one of the {len(heads)} heads of {weight.name}"
        raise UsageError(f"tensor_parallel_size {tp}", problem, "use fewer ranks")
    return max(sum(heads[start : start + share]) for start in range(0, len(heads), share))


def repeats_groups(weight: Weight, tp: int) -> bool:
    """True for a Mamba 2 projection whose groups are repeated: servers then make one matrix of its parts.

    Source: mamba_mixer2.py of vLLM 0.33, mamba.py of SGLang 0.5.23.
    """
    return any(part.sharing is Sharing.GROUPS and part.units % tp for part in weight.parts)


def least_of(weight: Weight, tp: int) -> int:
    """Smallest shard of a rank, if there are several."""
    return weight.least if tp > 1 else 0


# Schemes applied to every linear layer while loading. Source: vLLM 0.33 config/quantization.py (_ONLINE_SHORTHANDS).
ONLINE = {
    "fp8": Scheme("fp8_tensor"),
    "fp8_per_channel": Scheme("fp8_channel"),
    "fp8_per_block": Scheme("fp8_block", block=(128, 128)),
    "mxfp8": Scheme("mxfp8", 32),
    "mxfp4": Scheme("mxfp4", 32),
}
FIXED = {**ONLINE, "nvfp4": Scheme("nvfp4", 16, variant=WEIGHT_ONLY)}  # by the model, of some weights


def table_scheme(stored: Quantization | None, name: str, layer: int | None) -> Scheme | None:
    """Scheme of a table of n-grams that its config does not fix: FP8 checkpoints', or listed with its algorithm.

    Source: vLLM 0.33 models/qwen4_exp/common/ngram_embedding.py (from_quant_config).
    """
    if stored is None or not (stored.mixed or stored.method == "fp8"):
        return None
    parts = [scheme_of(stored, layer, (part,), part) for part in (name, f"{name}.shard_0")]
    if parts[0] is None or (parts[1] is None and not stored.mixed):
        return None
    return FIXED["nvfp4" if parts[0].kind == "nvfp4" else "fp8"]


def scheme_for(spec: ModelSpec, weight: Weight, layer: int | None, online: str | None) -> Scheme | None:
    if weight.dtype in FIXED:
        return FIXED[weight.dtype]
    if weight.serves == ("tables",):
        return table_scheme(spec.quantization, weight.name, layer)
    if weight.group == "lm_head" and not weight.quantizable and spec.quantization is not None and online is None:
        return head_scheme(spec.quantization, spec.model_type)
    if not weight.quantizable or (weight.serves and online is not None):
        return None
    if weight.serves and spec.quantization is not None:
        return tower_scheme(spec.quantization, weight.sources, spec.config)
    if online == "experts_int8":
        return Scheme("int8_channel") if weight.experts else None
    if online is not None:
        return ONLINE[online]
    if spec.quantization is None:
        return None
    return scheme_of(spec.quantization, layer, weight.sources or (weight.name,), weight.name)


@lru_cache(maxsize=256)
def equals(spec: ModelSpec, online: str | None) -> tuple[int, ...]:
    """For each layer the first one that is as large: with the same weights, each stored in the same way."""
    first: dict[Hashable, int] = {}
    answer = []
    for layer, weights in enumerate(spec.layer_weights):
        schemes = tuple(scheme_for(spec, weight, spec.first_layer + layer, online) for weight in weights)
        answer.append(first.setdefault((id(weights), schemes), layer))
    return tuple(answer)


def expert_tp(layout: Layout) -> int:
    """Ranks that shard each expert's matrices: 1 under expert parallelism, else those of all replicas."""
    return 1 if layout.ep > 1 else layout.tp * layout.dp


def held_dtype(weight: Weight, layout: Layout, dtype: str) -> str:
    """Dtype of an unquantized weight in memory: its own, the requested one, or the model's."""
    if layout.sm and weight.narrow_on and layout.sm // 10 not in weight.narrow_on:
        return "float32"
    return weight.dtype or layout.dtype or dtype


def is_built(weight: Weight, layout: Layout) -> bool:
    """True if a server builds the weight at all: a tower only for enabled modalities."""
    if weight.shared and layout.joined:
        return False
    is_loaded = weight.is_loaded or (layout.as_stored and weight.group == "lm_head")  # phi's bias of the head
    return is_loaded and not (weight.serves and layout.left_out.issuperset(weight.serves))


def ranks_of(weight: Weight, layout: Layout) -> int:
    """Ranks that shard the weight's matrix."""
    if weight.experts:
        return expert_tp(layout)
    if layout.whole_shared and weight.group == "shared_expert":
        return 1
    if weight.heads:  # replicas divide them too
        return layout.tp * layout.dp
    if layout.whole_towers and weight.whole_by_data:
        return 1
    if layout.tower_tp and weight.serves:
        return layout.tower_tp
    if layout.attention_tp and weight.group in ("attention", "state", "embedding"):
        return layout.attention_tp
    if layout.dense_tp and weight.group == "mlp":
        return layout.dense_tp
    if layout.head_tp and weight.group == "lm_head":
        return layout.head_tp
    return layout.tp


def expert_copies(weight: Weight, layout: Layout) -> int:
    """Number of experts on a rank, including redundant ones."""
    return cdiv(weight.experts + layout.redundant, layout.ep)


WIDE_SCHEMES = (
    "fp8_tensor",
    "fp8_channel",
    "fp8_block",
    "int8_channel",
    "int8_tensor",
    "int8",
    "mxfp8",
    "bnb_int8",
    "gptq_int8",
)  # else 4 bits


def weight_tensors(spec: ModelSpec, weight: Weight, layer: int | None, layout: Layout) -> tuple[int, int, int]:
    """Bytes of a weight's (values, scales, bias), for all its experts on this rank."""
    if not is_built(weight, layout):
        return 0, 0, 0
    is_expert = weight.experts > 0
    k, parts = local_shape(weight, ranks_of(weight, layout))
    copies = expert_copies(weight, layout) if is_expert else 1
    scheme = scheme_for(spec, weight, layer, layout.online)
    element = BYTES[held_dtype(weight, layout, spec.dtype)]
    if is_expert and not layout.as_stored:
        k, parts = padded(k, parts, weight.split, expert_units(layout, scheme.kind if scheme else ""))
    bias = element * sum(parts) if weight.bias else 0
    if scheme is None:
        return element * k * sum(parts) * copies, 0, bias * copies
    if is_expert and not layout.as_stored:
        scheme = expert_scheme(scheme, k, parts, weight.split)
        if (
            scheme.kind in ("gptq", "gptq_int8") and scheme.variant != WNA16
        ):  # in Marlin's kernels experts have a bias in any case
            bias = element * sum(parts)
    size = linear_bytes(scheme, k, parts, expert=is_expert, element=element)
    values = k * sum(parts) if scheme.kind in WIDE_SCHEMES else k * sum(parts) // 2
    scales = (size - values) * copies
    if is_expert and scheme.kind == "nvfp4" and layout.sm >= BLACKWELL and layout.ep > 1:
        scales += 4 * len(parts) * (weight.experts + layout.redundant - copies)  # input scales of all experts
    if is_expert and scheme.kind == "nvfp4" and layout.twice_scaled:
        scales += swizzled(k // (scheme.group_size or 16), sum(parts)) * copies
    return values * copies, scales, bias * copies


def weight_bytes(spec: ModelSpec, weight: Weight, layer: int | None, layout: Layout) -> int:
    """Bytes of one weight, for all its experts on this rank."""
    return sum(weight_tensors(spec, weight, layer, layout))


def on_stage(place: Place, layout: Layout) -> bool:
    match place:
        case Place.FIRST:
            return layout.stage == 0
        case Place.LAST:
            return layout.stage == layout.pp - 1
        case Place.FIRST_AND_LAST:
            return layout.stage in (0, layout.pp - 1)
        case Place.EVERY:
            return True


# KV cache scales that a quantized attention layer has as parameters (vLLM 0.33), (in float32, in the model's dtype): q,
# k, v and probability in the model's (fp8, ModelOpt), or q, k, v in float32 with zero points in the model's
# (compressed-tensors).
KV_SCALES = {"fp8": (0, 4), "modelopt": (0, 4), "quark": (0, 4), "compressed-tensors": (3, 3)}


UNSCALED = ("jamba", "qwen4_exp_text")  # their classes do not pass the quantization on to attention


def kv_scale_bytes(
    caches: tuple[LayerCache, ...], quantization: Quantization | None, layout: Layout, dtype: str
) -> int:
    """Bytes of one layer's KV scale parameters on a rank; MLA has them only under ModelOpt.

    dtype  the model's, unless the layout has another

    With per-layer algorithms ModelOpt has them if the cache has an algorithm too, and not in MLA. compressed-tensors
    can have a scale per KV head.
    """
    if quantization is None or (quantization.mixed and quantization.kv_dtype is None):
        return 0
    kinds: tuple[type, ...] = (FullAttention, SlidingWindow, ChunkedAttention)
    if quantization.method == "modelopt" and not quantization.mixed:
        kinds += (LatentAttention,)
    cache = next((cache for cache in caches if isinstance(cache, kinds)), None)
    if cache is None:
        return 0
    heads = 1
    if quantization.kv_by_head and isinstance(cache, FullAttention | SlidingWindow | ChunkedAttention):
        heads = max(1, cache.num_kv_heads // (layout.attention_tp or layout.tp))
    wide, own = KV_SCALES.get(quantization.method, (0, 0))
    return (BYTES["float32"] * wide + BYTES[layout.dtype or dtype] * own) * heads


def attended(spec: ModelSpec, index: int) -> tuple[LayerCache, ...]:
    """The caches of a layer with quantized attention; of the first one, if it has queries alone and reads another's."""
    if spec.model_type in UNSCALED:
        return ()
    reads = any(weight.name.endswith(".q_proj") for weight in spec.layer_weights[index])
    return spec.layers[index] or (spec.layers[0] if reads else ())


def check_known(spec: ModelSpec) -> None:
    if spec.quantization is not None and not spec.quantization.known:
        raise UnsupportedModelError(
            spec.name,
            f"{spec.quantization.problem}",
            "pass --weights-bytes, or a directory that holds the safetensors files",
        )


@lru_cache(maxsize=4096)
def rank_weights(spec: ModelSpec, layout: Layout) -> Counter[str]:
    """Bytes on one rank by tensor group, once loaded by a server.

    Raise UnsupportedModelError for a quantization kvplan cannot size, UsageError for an impossible split.
    """
    check_known(spec)
    if layout.pp > spec.num_layers:
        raise UsageError(
            f"pipeline_parallel_size {layout.pp}", f"{spec.name} has only {spec.num_layers} layers", "lower it"
        )
    total: Counter[str] = Counter()
    for weight in spec.other_weights:
        if on_stage(weight.place, layout):
            total[weight.group] += weight_bytes(spec, weight, None, layout)
    cache: dict[int, Counter[str]] = {}
    first = equals(spec, layout.online)
    for index in layers_on(spec, layout):
        weights = spec.layer_weights[index]
        key = first[index]
        if key not in cache:
            cache[key] = Counter()
            for weight in weights:
                cache[key][weight.group] += weight_bytes(spec, weight, spec.first_layer + index, layout)
        total.update(cache[key])
        scales = kv_scale_bytes(attended(spec, index), spec.quantization, layout, spec.dtype)
        if scales:
            total["attention"] += scales
    return total


def total_weights(spec: ModelSpec, layout: Layout) -> int:
    """Bytes of all weights on one rank."""
    return sum(rank_weights(spec, layout).values())


def num_params(spec: ModelSpec) -> Counter[str]:
    """Parameters of the whole model by tensor group, towers as `vision_audio`."""
    counts: Counter[str] = Counter()
    layers = Counter(map(id, spec.layer_weights))
    for weight in spec.other_weights:
        counts[weight.group] += weight.num_params
    for weights in unique(spec.layer_weights):
        for weight in weights:
            counts[weight.group] += layers[id(weights)] * weight.num_params
    return counts


def stored_dtype(spec: ModelSpec) -> str:
    """The config's dtype for the files: a float32 checkpoint is served in bfloat16."""
    text = spec.config.get("text_config")
    for level in (spec.config, text if isinstance(text, dict) else {}):
        stated = level.get("dtype") or level.get("torch_dtype")
        if isinstance(stated, str):
            return "float32" if stated.removeprefix("torch.") in FULL_PRECISION else spec.dtype
    return spec.dtype


def file_bytes(spec: ModelSpec, weight: Weight, layer: int | None, dtype: str) -> int:
    """Bytes of one weight in the files: values, scales and bias, for all its experts."""
    if weight.quantizable and not weight.counted:  # a second copy of a matrix, made by the server (Gemma 4's K as V)
        return 0
    parts = [part.size for part in weight.parts]
    scheme = scheme_for(spec, weight, layer, None)
    element = BYTES[weight.dtype or dtype]
    bias = element * weight.outputs if weight.bias else 0
    if scheme is None:
        size = element * weight.inputs * weight.outputs
    else:
        size = linear_bytes(scheme, weight.inputs, parts)
        if scheme.kind in ("gptq", "gptq_int8"):  # each matrix stores the group of every input: `g_idx`, 32 bits
            size += 4 * weight.inputs * max(1, len(weight.sources))
    return (size + bias) * max(1, weight.experts)


def stored_bytes(spec: ModelSpec) -> int | None:
    """Bytes of all tensors of the checkpoint, as stored: not sharded, not padded. None for a quantization whose layout
    kvplan does not know.

    Multi-token prediction layers and second copies of a tied head are not counted: a server leaves them on disk unless
    it speculates.
    """
    if spec.quantization is not None and not spec.quantization.known:
        return None
    dtype = stored_dtype(spec)
    total = sum(file_bytes(spec, weight, None, dtype) for weight in spec.other_weights)
    sizes: dict[int, int] = {}
    for index, key in enumerate(equals(spec, None)):
        if key not in sizes:
            sizes[key] = sum(file_bytes(spec, weight, index, dtype) for weight in spec.layer_weights[index])
        total += sizes[key]
    return total
