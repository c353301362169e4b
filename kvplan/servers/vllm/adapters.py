"""LoRA adapters under vLLM: slots on the GPU, allocated when the model is loaded, and adapters in host memory.

Each linear layer that an adapter may change gets its two matrices at the largest rank, for `max_loras` adapters,
whatever they contain. Source: vLLM 0.33 lora/model_manager.py and lora/layers; equal to its own `create_lora_weights`
for the model types in COMPARED (tests/facts/adapters.jsonl).
"""

from dataclasses import replace
from functools import lru_cache
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.records import dataclass
from kvplan.core.units import DTYPE_BITS
from kvplan.models.spec import ModelSpec, Place, Sharing, Weight
from kvplan.servers.plans.plan import Estimate, Kind
from kvplan.servers.plans.weights import ONLINE_NAMES
from kvplan.servers.vllm import experts, features
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.vllm.classes import class_of, type_of
from kvplan.servers.vllm.overheads import expert_ranks
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.weights import (
    Layout,
    cdiv,
    expert_units,
    layers_on,
    local_shape,
    on_stage,
    padded,
    repeats_groups,
    scheme_for,
)

ADAPTED: Final = (("mxfp4", 128, 256),)  # kernels that take adapters pad MXFP4 experts so on every GPU
PER_LAYER: Final = "per_layer_model_projection"
RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MOST_VOCABULARY: Final = 258_048  # for a head with adapters; lora/layers/logits_processor.py
# Suffixes of weights that are not linear layers in vLLM, or that it excludes from adapters.
LEFT_ALONE: Final = (
    "indexer.wk_weights_proj", "hc_attn_fn", "hc_ffn_fn", "tid2eid", "compressor.ape", "mamba.A", "mixer.gate",
)  # fmt: skip
EVIDENCE: Final = "reports/constants.md#lora"
EXACT: Final = f"vLLM 0.33 lora/layers, equal to its create_lora_weights; {EVIDENCE}"
MODELED: Final = f"vLLM 0.33 lora/layers, not compared for this model or release; {EVIDENCE}"


@dataclass(frozen=True, slots=True)
class Slots:
    """Inputs to the elements of a slot, besides the model: the largest rank, the sharding, and switches.

    targets  target modules; none: all
    """

    rank: int
    layout: Layout
    sharded: bool = False
    targets: frozenset[str] = frozenset()
    two_dimensional: bool = False
    shared_outer: bool = False


def is_wrapped(weight: Weight, slots: Slots) -> bool:
    """True if a layer's weight is a linear layer that adapters may change."""
    if weight.inputs == 1 or weight.group == "norm" or weight.name.endswith(LEFT_ALONE):
        return False
    if not slots.targets:
        return True
    names = [weight.name.removesuffix(".w13").removesuffix(".w2")]
    names += [] if weight.experts else [*weight.sources]
    return not slots.targets.isdisjoint(name.rpartition(".")[2] for name in names)


def slices(weight: Weight, spec: ModelSpec, slots: Slots) -> int:
    """Number of A matrices of a fused layer: one for each part that a checkpoint stores separately."""
    if weight.experts:
        split = slots.two_dimensional or slots.shared_outer or not type_of(spec).fused_experts
        return len(weight.parts) if split else 1
    in_one = weight.name.endswith(type_of(spec).in_one or ("\0",))
    # A Mamba 2 projection is loaded whole if fully sharded.
    has_groups = slots.sharded and any(part.sharing is Sharing.GROUPS for part in weight.parts)
    return 1 if in_one or has_groups or repeats_groups(weight, slots.layout.tp) else len(weight.parts)


def elements(weight: Weight, spec: ModelSpec, layer: int, slots: Slots) -> int:
    """Elements of one slot of one weight on one rank: A `[rank, inputs]` for each slice, B `[outputs, rank]`.

    Fully sharded, A of a layer with split outputs has a shard of the rank, and B of one with split inputs a shard of
    the outputs.
    """
    layout, rank, is_expert = slots.layout, slots.rank, weight.experts > 0
    ranks = (1 if layout.ep > 1 else layout.tp) if is_expert else layout.tp
    if weight.group == "shared_expert" and layout.whole_shared:
        ranks = 1
    inputs, parts = local_shape(weight, ranks)
    scheme = scheme_for(spec, weight, layer, layout.online)
    if is_expert and scheme is not None and scheme.kind == "mxfp4":
        inputs, parts = padded(inputs, parts, weight.split, expert_units(layout, scheme.kind))
    outputs, rank_a = sum(parts), rank
    if slots.sharded and ranks > 1 and weight.split == "outputs":
        rank_a = divided(rank, ranks)
    if slots.sharded and ranks > 1 and weight.split == "inputs":
        outputs = divided(outputs, ranks)
    copies = cdiv(weight.experts + layout.redundant, layout.ep) if is_expert else 1
    copies_a = 1 if is_expert and slots.shared_outer and weight.split == "outputs" else copies
    copies_b = 1 if is_expert and slots.shared_outer and weight.split == "inputs" else copies
    return copies_a * slices(weight, spec, slots) * rank_a * inputs + copies_b * rank * outputs


def divided(value: int, ranks: int) -> int:
    if value % ranks:
        raise UsageError(
            "--fully-sharded-loras", f"{ranks} ranks cannot share {value} evenly, as vLLM requires", "remove it"
        )
    return value // ranks


@lru_cache(maxsize=1024)
def in_layers(spec: ModelSpec, slots: Slots) -> int:
    """Elements of one slot of the layers of a stage."""
    made: dict[int, int] = {}
    total = 0
    for index in layers_on(spec, slots.layout):
        weights = spec.layer_weights[index]
        if id(weights) not in made:
            wrapped = (weight for weight in weights if is_wrapped(weight, slots))
            made[id(weights)] = sum(elements(weight, spec, index, slots) for weight in wrapped)
        total += made[id(weights)]
    return total


def in_tables(spec: ModelSpec, slots: Slots) -> int:
    """Elements of one slot for embedding and head, replicated on each rank of their stages."""
    own = type_of(spec).adapted_tables
    places = {weight.group: weight.place for weight in spec.other_weights}
    where = {"embed_tokens": places.get("embedding", Place.FIRST), "lm_head": places.get("lm_head", Place.LAST)}
    names = [name for name in own if on_stage(where[name], slots.layout)]
    if slots.targets:
        names = [name for name in names if name in slots.targets]
    count = len(names) * slots.rank * (spec.vocab_size + spec.hidden_size)
    for weight in spec.other_weights:  # Gemma 4's per-layer projection
        if weight.name.endswith(PER_LAYER) and on_stage(weight.place, slots.layout) and is_wrapped(weight, slots):
            inputs, parts = local_shape(weight, slots.layout.tp)
            count += slots.rank * (inputs + sum(parts))
    return count


def mappings(settings: Settings, num_slots: int) -> int:
    """Bytes of the tensors that map tokens to adapters (lora/punica_wrapper)."""
    return 48 * settings.max_num_batched_tokens + 24 * settings.max_num_seqs + 24 * (num_slots + 1) + 8


def layout_of(spec: ModelSpec, settings: Settings, args: EngineArgs, stage: int) -> Layout:
    """Layout of the layers that adapters change."""
    return Layout(
        tp=args.tensor_parallel_size,
        pp=args.pipeline_parallel_size,
        stage=stage,
        ep=expert_ranks(args),
        online=ONLINE_NAMES.get(args.quantization or "") if spec.quantization is None else None,
        expert_units=ADAPTED,
        redundant=args.num_redundant_experts,
        whole_shared=vllm.keeps_shared_whole(spec, args, settings.version),
        partition=args.partition,
    )


def check(spec: ModelSpec, args: EngineArgs) -> None:
    """Reject what vLLM rejects about adapters, and what is not sized."""
    if args.max_loras < 0:
        raise UsageError(f"--max-loras {args.max_loras}", "must be 0 (none) or more")
    if args.max_cpu_loras is not None and args.max_cpu_loras < args.max_loras:
        raise UsageError(f"--max-cpu-loras {args.max_cpu_loras}", f"is less than --max-loras {args.max_loras}")
    if not class_of(spec).adapters:
        raise UsageError("--enable-lora", f"vLLM has no adapters for {spec.name}", "remove it")
    if args.lora_dtype not in ("auto", "bfloat16", "float16"):
        raise UsageError(f"--lora-dtype {args.lora_dtype}", "is not supported by vLLM", "use auto, bfloat16 or float16")
    own = type_of(spec).adapted_tables
    if "lm_head" in own and spec.vocab_size > MOST_VOCABULARY:
        raise UsageError(
            "--enable-lora",
            f"vLLM takes vocabularies of {MOST_VOCABULARY:,} at most; {spec.vocab_size:,} of {spec.name}",
        )
    if args.enable_tower_connector_lora and spec.multimodal and not args.language_model_only:
        raise UnsupportedModelError(
            "--enable-tower-connector-lora", f"adapters of {spec.name}'s encoder are not sized", "remove it"
        )
    with_experts = bool(spec.experts_per_token)
    if with_experts and args.enable_expert_parallel and args.fully_sharded_loras:
        raise UsageError("--fully-sharded-loras", "vLLM does not support it with expert parallelism", "use only one")
    spread = args.enable_expert_parallel and args.data_parallel_size > 1
    if with_experts and spread and (args.tensor_parallel_size > 1 or args.all2all_backend not in experts.PLAIN):
        raise UsageError(
            "--enable-lora",
            "vLLM supports adapters of experts over data-parallel ranks only with --tp 1 and the default all-to-all",
            "use --tp 1 without --all2all-backend, or remove --enable-expert-parallel",
        )


def with_targets(spec: ModelSpec, slots: Slots) -> None:
    """Reject target modules that no layer has."""
    known = {
        name.rpartition(".")[2]
        for weight in {weight for weights in spec.layer_weights for weight in weights}
        if is_wrapped(weight, replace(slots, targets=frozenset()))
        for name in (weight.name.removesuffix(".w13").removesuffix(".w2"), *(() if weight.experts else weight.sources))
    }
    known |= set(type_of(spec).adapted_tables)
    if strange := sorted(slots.targets - known):
        raise UsageError(
            f"--lora-target-modules {strange[0]}",
            f"is no module of {spec.name} that adapters change",
            f"it has {', '.join(sorted(known))}",
        )


def lora(spec: ModelSpec, settings: Settings, args: EngineArgs, stage: int = 0) -> Estimate:
    """Adapter slots of one stage: `max_loras` of them, at the largest rank whatever the adapters contain."""
    if args.max_lora_rank not in RANKS:  # rejected by its own parser, with adapters or without
        ranks = ", ".join(map(str, RANKS))
        raise UsageError(f"--max-lora-rank {args.max_lora_rank}", f"is not one of {ranks}")
    if args.max_loras == 0:
        return features.NO_ADAPTERS
    check(spec, args)
    slots = Slots(
        args.max_lora_rank,
        layout_of(spec, settings, args, stage),
        args.fully_sharded_loras,
        frozenset(args.lora_target_modules.split(",")) if args.lora_target_modules else frozenset(),
        args.enable_mixed_moe_lora_format,
        args.enable_moe_shared_loras,
    )
    if slots.targets:
        with_targets(spec, slots)
    count = in_layers(spec, slots) + in_tables(spec, slots)
    element = DTYPE_BITS[settings.dtype if args.lora_dtype == "auto" else args.lora_dtype] // 8
    likely = element * args.max_loras * count + mappings(settings, args.max_loras)
    compared = settings.version.is_compared and type_of(spec).adapters and is_plain(spec)
    wider = 0
    if not compared and not type_of(spec).adapted_tables and not slots.targets:
        wider = element * args.max_loras * 2 * args.max_lora_rank * (spec.vocab_size + spec.hidden_size)
    formula = f"{args.max_loras} slots x {count:,} elements at rank {args.max_lora_rank} x {element} B + mappings"
    kind: Kind = "exact" if compared else "formula"
    return Estimate(likely, likely, likely + wider, formula, EXACT if compared else MODELED, kind)


def is_plain(spec: ModelSpec) -> bool:
    """True if adapters of a checkpoint's experts were compared in the form it stores them."""
    return spec.quantization is None or not spec.experts_per_token or spec.quantization.method in ("fp8", "mxfp4")


def adapter_bytes(spec: ModelSpec, settings: Settings, args: EngineArgs) -> int:
    """Bytes of one full adapter at the largest rank, as a process keeps it in host memory."""
    whole = Slots(
        args.max_lora_rank,
        Layout(),
        targets=frozenset(args.lora_target_modules.split(",")) if args.lora_target_modules else frozenset(),
        two_dimensional=args.enable_mixed_moe_lora_format,
        shared_outer=args.enable_moe_shared_loras,
    )
    element = DTYPE_BITS[settings.dtype if args.lora_dtype == "auto" else args.lora_dtype] // 8
    return element * (in_layers(spec, whole) + in_tables(spec, whole))
