"""SGLang's LoRA adapters: the pool of slots allocated after the weights are loaded and before the KV pool is sized.

A slot has A and B for every module that adapters may change, at the largest rank and in the model's dtype, for every
layer of the model on each pipeline stage. Each expert has its own pair, in every layer. Embedding and head, if both are
targets, are allocated twice. Source: sglang 0.5.23 srt/lora/mem_pool.py, lora/utils.py and lora/lora_manager.py.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.records import dataclass
from kvplan.core.units import DTYPE_BITS, plural
from kvplan.models.spec import ModelSpec, Weight
from kvplan.servers.plans.plan import Estimate
from kvplan.servers.releases import Version
from kvplan.servers.sglang.classes import class_of, type_of
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.weights import local_shape, up

ALL: Final = "all"
TABLES: Final = ("embed_tokens", "lm_head")
# SGLang's normalized module names, lora/utils.py (get_normalized_target_modules).
NORMALIZED: Final = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj", "q_a_proj": "fused_qkv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj_with_mqa",
}  # fmt: skip
# --lora-target-modules takes only these names (SUPPORTED_LORA_TARGET_MODULES); wq_b, wk and weights_proj belong to an
# index that SGLang fuses on CUDA, qkvr and wo_ud to Inkling.
CHOICES: Final = (
    "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "gate_proj",
    "up_proj", "down_proj", "qkv_proj", "gate_up_proj", *TABLES,
)  # fmt: skip
STACKED: Final = {"qkv_proj": 3, "gate_up_proj": 2, "fused_qkv_a_proj_with_mqa": 2}  # A matrices stacked in one
OUR_NAMES: Final = {"fused_qkv_a_proj": "fused_qkv_a_proj_with_mqa"}
IN_LAYERS: Final = ("qkv_proj", "o_proj", "fused_qkv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "gate_up_proj",
                    "down_proj")  # fmt: skip
# Their classes define their modules' sizes (get_hidden_dim), or reject adapters.
OWN_SIZES: Final = ("gemma3n", "gemma4", "laguna", "llama4", "nemotron_h", "qwen3_5", "qwen3_next", "inkling")
PADDING: Final = 64  # of a vocabulary
TILE: Final = 64  # tokens per expert block in a graph's tables
INT32: Final = 4
BLACKWELL: Final = 100
SOURCE: Final = "sglang 0.5.23 srt/lora/mem_pool.py"
EXACT: Final = f"{SOURCE}, equal to its own pool on torch's meta device"
UNCOMPARED: Final = f"{SOURCE}, not compared for this model or release"


@dataclass(frozen=True, slots=True)
class Slots:
    """Inputs to the elements of a slot, besides the model.

    attention, experts  ranks that shard attention and dense layers, and ranks that shard experts' width
    local               ranks that divide whole experts among them
    targets             SGLang's own names of the target modules
    """

    rank: int
    attention: int
    experts: int
    local: int
    targets: frozenset[str]
    shared_outer: bool = False


def check(spec: ModelSpec, args: EngineArgs, release: Version, sm: int) -> None:
    """Reject what SGLang rejects about adapters, and what is not sized."""
    if args.max_loras < 0:
        raise UsageError(f"--max-loras-per-batch {args.max_loras}", "must be 0 (none) or more")
    if not args.max_loras:
        return
    if not args.lora_target_modules:
        raise UsageError(
            "--enable-lora",
            "SGLang reads the modules from the adapters, which kvplan does not read",
            "state --lora-target-modules (all, or q_proj,v_proj,...) and --max-lora-rank",
        )
    if args.max_cpu_loras is not None and args.max_cpu_loras < args.max_loras:
        raise UsageError(
            f"--max-loaded-loras {args.max_cpu_loras}", f"is less than --max-loras-per-batch {args.max_loras}"
        )
    if args.speculative_method is not None or args.enable_dp_attention:
        beside = "drafts" if args.speculative_method is not None else "DP attention"
        raise UnsupportedModelError("--enable-lora", f"adapters with {beside} are not modeled", "use only one")
    own = next((name for name in OWN_SIZES if spec.model_type.startswith(name)), None)
    if own is not None or spec.has_states:
        raise UnsupportedModelError(
            "--enable-lora", f"SGLang's adapters of {spec.model_type} are not modeled", "remove it, or use vllm"
        )
    if not release.has("adapter_pools"):
        raise UnsupportedModelError(
            f"--engine {release.label}", "adapters are sized from SGLang 0.5.2 on", "remove --enable-lora"
        )
    modules = targets(spec, args)
    with_experts = bool(spec.experts_per_token) and bool({"gate_up_proj", "down_proj"} & modules)
    if not release.has("expert_adapters") and (with_experts or spec.is_mla or modules & {*TABLES}):
        raise UnsupportedModelError(
            f"--engine {release.label}",
            "adapters of experts, latent attention, embedding and head are sized only for 0.5.23",
            "name attention and MLP modules of a dense model",
        )
    if with_experts and args.enable_expert_parallel and sm >= BLACKWELL:
        raise UnsupportedModelError(
            "enable_expert_parallel",
            "adapters of experts on Blackwell depend on SGLang's choice of kernel",
            "remove it",
        )


def targets(spec: ModelSpec, args: EngineArgs) -> frozenset[str]:
    """SGLang's names of the target modules."""
    names = (args.lora_target_modules or ALL).split(",")
    present = {module for module, _, _ in modules_of(spec)}
    if names == [ALL]:
        if spec.is_sparse_mla:
            raise UsageError(
                "--lora-target-modules all", "SGLang fuses this model's index, and then refuses adapters of it",
                "name the modules",
            )  # fmt: skip
        if spec.is_mla and "q_b_proj" not in present:
            raise UnsupportedModelError(
                "--lora-target-modules all", f"SGLang's q_proj of {spec.name} is not modeled", "name the modules"
            )
        return frozenset({*present, *TABLES})
    if ALL in names:
        raise UsageError("--lora-target-modules", "all cannot be combined with others", "remove the others")
    if strange := sorted({*names} - {*CHOICES}):
        raise UsageError(
            f"--lora-target-modules {strange[0]}", "is no module that is modeled for SGLang",
            f"it has {', '.join(CHOICES)}",
        )  # fmt: skip
    modules = {NORMALIZED.get(name, name) for name in names}
    if lacking := sorted(modules - present - {*TABLES}):
        raise UsageError(
            f"--lora-target-modules {lacking[0]}",
            f"is no module of {spec.name}",
            f"it has {', '.join(sorted(present))}",
        )
    return frozenset(modules)


@lru_cache(maxsize=256)
def modules_of(spec: ModelSpec) -> tuple[tuple[str, int, Weight], ...]:
    """(SGLang's module, layer, weight) of every module in the layers that adapters may change."""
    pairs = []
    for index, weights in enumerate(spec.layer_weights):
        for weight in weights:
            last = weight.name.rpartition(".")[2]
            name = {"w13": "gate_up_proj", "w2": "down_proj"}.get(last, last) if weight.experts else last
            name = OUR_NAMES.get(name, name)
            if name in IN_LAYERS and weight.inputs > 1:
                pairs.append((name, index, weight))
    return tuple(pairs)


def elements(spec: ModelSpec, slots: Slots) -> int:
    """Elements of one slot of the layers, on each rank of every stage."""
    return sum(_pair(module, weight, copies, slots) for module, weight, copies in _pairs(spec, slots))


def _pairs(spec: ModelSpec, slots: Slots) -> Iterator[tuple[str, Weight, int]]:
    """(module, weight, number of layers with such a pair) of every buffer."""
    layers = spec.num_layers
    has_experts = any(weight.experts for _, _, weight in modules_of(spec))
    has_shared = any(weight.group == "shared_expert" for _, _, weight in modules_of(spec))
    for module in sorted(slots.targets - {*TABLES}):
        weights = [(index, weight) for name, index, weight in modules_of(spec) if name == module]
        dense = [weight for _, weight in weights if not weight.experts]
        experts = [weight for _, weight in weights if weight.experts]
        if experts:
            yield module, experts[0], layers
        if dense and (not has_experts or has_shared or module not in ("gate_up_proj", "down_proj")):
            if len(dense) != layers:
                raise UnsupportedModelError(
                    "--enable-lora", f"{module} is not in every layer of {spec.name}", "remove it from the modules"
                )
            yield from ((module, weight, 1) for weight in dense)


def _pair(module: str, weight: Weight, layers: int, slots: Slots) -> int:
    """Elements of A `[c x rank, inputs]` and B `[outputs, rank]` of a module, for every local expert."""
    inputs, parts = local_shape(weight, slots.experts if weight.experts else slots.attention)
    copies = weight.experts // slots.local if weight.experts else 1
    copies_a = 1 if weight.experts and slots.shared_outer and module == "gate_up_proj" else copies
    copies_b = 1 if weight.experts and slots.shared_outer and module == "down_proj" else copies
    stacked = STACKED.get(module, 1)
    return layers * slots.rank * (copies_a * stacked * inputs + copies_b * sum(parts))


def keeps_head_whole(spec: ModelSpec) -> bool:
    """True if SGLang finds no head to shard, because the class computes logits from the embedding."""
    return type_of(spec).no_head or (spec.tied and class_of(spec).nested_head)


def in_tables(spec: ModelSpec, slots: Slots, *, whole: bool = False) -> int:
    """Elements of one slot for embedding and head: each of the two buffers is sized for all requested targets of both.

    whole  the elements of an adapter itself, each counted once
    """
    own = [name for name in TABLES if name in slots.targets]
    shares = 1 if whole or keeps_head_whole(spec) else slots.attention
    vocabulary = spec.vocab_size
    if shares > 1:
        padding = PADDING if up(vocabulary, PADDING) % shares == 0 else PADDING * shares
        vocabulary = min(vocabulary, up(vocabulary, padding) // shares)
    sizes = {"embed_tokens": spec.vocab_size + spec.hidden_size, "lm_head": spec.hidden_size + vocabulary}
    return (1 if whole else len(own)) * slots.rank * sum(sizes[name] for name in own)


def routing(spec: ModelSpec, args: EngineArgs, graphs: int) -> int:
    """Bytes of the tables in graphs that map tokens of each expert to adapters, allocated before the pool is sized."""
    experts = max((weight.experts for weight in spec.weights), default=0)
    if not experts or args.enforce_eager:
        return 0
    tokens = min(graphs, max(1, args.max_num_seqs or graphs))
    padded = up(tokens * spec.experts_per_token + experts * (TILE - 1), TILE)
    of_slot = padded + padded // TILE + 3 + experts + 1 + tokens * spec.experts_per_token
    return INT32 * (args.max_loras * of_slot + tokens)


def slots_of(spec: ModelSpec, args: EngineArgs) -> Slots:
    tp = args.tensor_parallel_size
    spread = args.enable_expert_parallel and bool(spec.experts_per_token)
    return Slots(
        args.max_lora_rank, tp, 1 if spread else tp, tp if spread else 1, targets(spec, args),
        args.enable_moe_shared_loras,
    )  # fmt: skip


def lora(spec: ModelSpec, settings: Settings, args: EngineArgs, graphs: int) -> Estimate:
    """Adapter pool of a rank, the same on every stage; `graphs` is the batch size of the largest decode graph."""
    if not args.max_loras:
        return Estimate(0, 0, 0, "no adapters", SOURCE, "exact")
    slots = slots_of(spec, args)
    count = elements(spec, slots) + in_tables(spec, slots)
    element = DTYPE_BITS[settings.dtype] // 8
    with_experts = {"gate_up_proj", "down_proj"} <= slots.targets
    tables = routing(spec, args, graphs) if with_experts else 0
    size = args.max_loras * count * element + tables
    formula = f"{args.max_loras} slots x {count:,} elements at rank {args.max_lora_rank} x {element} B" + (
        f" + {tables:,} B of graphs' tables" if tables else ""
    )
    is_exact = settings.version.is_compared and type_of(spec).adapters and not tables
    return Estimate(size, size, size, formula, EXACT if is_exact else UNCOMPARED, "exact" if is_exact else "formula")


def adapter_bytes(spec: ModelSpec, settings: Settings, args: EngineArgs) -> int:
    """Bytes of one full adapter at the largest rank, as every process keeps it in host memory."""
    slots = Slots(args.max_lora_rank, 1, 1, 1, targets(spec, args), args.enable_moe_shared_loras)
    return DTYPE_BITS[settings.dtype] // 8 * (elements(spec, slots) + in_tables(spec, slots, whole=True))


def notes(args: EngineArgs) -> list[str]:
    if not args.max_loras:
        return []
    stages = f", whole on each of {plural(args.pipeline_parallel_size, 'stage')}"
    return [
        f"adapters: {plural(args.max_loras, 'slot')} at rank {args.max_lora_rank}, one of them for requests without "
        f"an adapter{stages if args.pipeline_parallel_size > 1 else ''}"
    ]
