"""What family readers build: weights in the shapes a server loads (fused QKV, fused gate and up), and their result."""

from dataclasses import replace
from typing import Literal

from kvplan.core.records import dataclass
from kvplan.models.families.rope import Context
from kvplan.models.spec import Group, LayerCache, Part, Place, Rope, Sharing, Weight

Norms = Literal["rms", "layer"]
VOCAB_PAD = 64  # vLLM pads vocabularies to a multiple of 64 rows (model_executor/layers/vocab_parallel_embedding.py)


def vector(name: str, size: int, group: Group = "norm", *, split: bool = False, dtype: str | None = None) -> Weight:
    """A one-dimensional weight, sharded over the ranks (`split`) or replicated."""
    return Weight(name, group, 1, (Part(size),), "outputs" if split else "none", dtype=dtype)


def norm(name: str, size: int, kind: Norms = "rms", bias: bool | None = None, group: Group = "norm") -> Weight:
    """Weights of a norm: RMSNorm has a weight, LayerNorm a weight and a bias (unless overridden)."""
    with_bias = kind == "layer" if bias is None else bias
    return Weight(name, group, 1, (Part(size),), bias=with_bias)


def column(
    name: str,
    inputs: int,
    parts: tuple[Part, ...] | int,
    group: Group,
    *,
    bias: bool = False,
    sources: tuple[str, ...] = (),
) -> Weight:
    """A linear layer whose outputs are sharded over the ranks."""
    as_parts = (Part(parts),) if isinstance(parts, int) else parts
    return Weight(name, group, inputs, as_parts, "outputs", bias, quantizable=True, sources=sources)


def row(name: str, inputs: int, outputs: int, group: Group, *, bias: bool = False) -> Weight:
    """A linear layer whose inputs are sharded over the ranks; its bias is replicated."""
    return Weight(name, group, inputs, (Part(outputs),), "inputs", bias, quantizable=True)


def whole(
    name: str, inputs: int, parts: tuple[int, ...] | int, group: Group, *, bias: bool = False, quantizable: bool = True,
    dtype: str | None = None, sources: tuple[str, ...] = (),
) -> Weight:  # fmt: skip
    """A linear layer replicated on every rank."""
    as_parts = tuple(Part(n) for n in ((parts,) if isinstance(parts, int) else parts))
    return Weight(
        name, group, inputs, as_parts, bias=bias, quantizable=quantizable, dtype=dtype, sources=sources
    )  # fmt: skip


def replicated(width: int) -> Part:
    """Rows replicated on every rank, within a sharded weight."""
    return Part(1, width, Sharing.KV_HEADS)


def router(
    name: str, hidden: int, experts: int, *, dtype: str | None = None, bias: bool = False, quantizable: bool = False
) -> Weight:
    """The router that chooses experts, replicated on every rank; few families allow quantizing it."""
    return whole(name, hidden, experts, "router", bias=bias, quantizable=quantizable, dtype=dtype)


def correction_bias(name: str, experts: int) -> Weight:
    """Routing bias in float32; transformers keeps it as a buffer, so it is not in parameter counts."""
    return Weight(name, "router", 1, (Part(experts),), dtype="float32", counted=False)


@dataclass(frozen=True, slots=True)
class Heads:
    """An attention's head counts and widths."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int

    def kv(self, width: int) -> Part:
        return Part(self.num_kv_heads, width, Sharing.KV_HEADS)


def attention(
    hidden: int, heads: Heads, *, qkv_bias: bool = False, o_bias: bool = False, prefix: str = "self_attn",
    gate: bool = False, out: str = "o_proj",
) -> tuple[Weight, ...]:  # fmt: skip
    """Fused QKV and the output projection; `gate` doubles the query (an output gate, Qwen3-Next)."""
    query = Part(heads.num_heads, heads.head_dim * (2 if gate else 1))
    sources = tuple(f"{prefix}.{x}_proj" for x in "qkv")
    return (
        column(
            f"{prefix}.qkv_proj", hidden, (query, heads.kv(heads.head_dim), heads.kv(heads.head_dim_v)), "attention",
            bias=qkv_bias, sources=sources,
        ),
        row(f"{prefix}.{out}", heads.num_heads * heads.head_dim_v, hidden, "attention", bias=o_bias),
    )  # fmt: skip


def qk_norms(heads: Heads, prefix: str = "self_attn", *, full: bool = False, split: bool = False) -> tuple[Weight, ...]:
    """Norms of query and key: one head wide, or (`full`) all heads wide; replicated, or sharded with their heads
    (`split`).
    """
    if split:
        parts = Part(heads.num_heads, heads.head_dim), heads.kv(heads.head_dim)
        q, k = (
            Weight(f"{prefix}.{x}_norm", "norm", 1, (part,), "outputs") for x, part in zip("qk", parts, strict=True)
        )
        return q, k
    q_size = heads.num_heads * heads.head_dim if full else heads.head_dim
    k_size = heads.num_kv_heads * heads.head_dim if full else heads.head_dim
    return norm(f"{prefix}.q_norm", q_size), norm(f"{prefix}.k_norm", k_size)


def gated_mlp(
    hidden: int, inner: int, *, bias: bool = False, prefix: str = "mlp", group: Group = "mlp"
) -> tuple[Weight, ...]:
    """Fused gate and up projections, and the down projection."""
    return (
        column(
            f"{prefix}.gate_up_proj", hidden, (Part(inner), Part(inner)), group,
            bias=bias, sources=(f"{prefix}.gate_proj", f"{prefix}.up_proj"),
        ),
        row(f"{prefix}.down_proj", inner, hidden, group, bias=bias),
    )  # fmt: skip


def plain_mlp(
    hidden: int,
    inner: int,
    *,
    bias: bool,
    names: tuple[str, str] = ("mlp.up_proj", "mlp.down_proj"),
    group: Group = "mlp",
) -> tuple[Weight, ...]:
    """An up and a down projection, without a gate."""
    return column(names[0], hidden, inner, group, bias=bias), row(names[1], inner, hidden, group, bias=bias)


def experts(
    hidden: int, inner: int, count: int, *, prefix: str = "mlp.experts", gated: bool = True, bias: bool = False
) -> tuple[Weight, ...]:
    """The experts' matrices: gate and up fused (`w13`), and down (`w2`)."""
    up_parts = (Part(inner), Part(inner)) if gated else (Part(inner),)
    up_sources = (f"{prefix}.0.gate_proj", f"{prefix}.0.up_proj") if gated else (f"{prefix}.0.up_proj",)
    return (
        Weight(
            f"{prefix}.w13", "experts", hidden, up_parts, "outputs", bias, count, quantizable=True, sources=up_sources
        ),
        Weight(
            f"{prefix}.w2", "experts", inner, (Part(hidden),), "inputs", bias, count, quantizable=True,
            sources=(f"{prefix}.0.down_proj",),
        ),
    )  # fmt: skip


def table(name: str, rows: int, hidden: int, place: Place = Place.FIRST, group: Group = "embedding") -> Weight:
    """A vocabulary table: rows padded to 64 and sharded over the ranks."""
    return Weight(name, group, hidden, (Part(rows),), "outputs", pad_rows=VOCAB_PAD, place=place)


def embedding(
    vocab: int, hidden: int, tied: bool, *, place: Place | None = None, name: str = "model.embed_tokens",
    head_bias: bool = False, head_place: Place = Place.LAST,
) -> tuple[Weight, ...]:  # fmt: skip
    """The embedding, and the head unless it is the same table (in that case the last stage has the table too)."""
    if tied:
        return (table(name, vocab, hidden, place or Place.FIRST_AND_LAST),)
    head = table("lm_head", vocab, hidden, head_place, "lm_head")
    bias = Weight("lm_head.bias", "lm_head", 1, (Part(vocab),), "outputs", pad_rows=VOCAB_PAD, place=head_place)
    return (table(name, vocab, hidden, place or Place.FIRST), head, *((bias,) if head_bias else ()))


def final_norm(hidden: int, kind: Norms = "rms", *, bias: bool | None = None, place: Place = Place.LAST) -> Weight:
    with_bias = kind == "layer" if bias is None else bias
    return Weight("model.norm", "norm", 1, (Part(hidden),), bias=with_bias, place=place)


@dataclass(slots=True)
class SpecDraft:
    """A model's facts from its family reader; see kvplan.models.spec.ModelSpec for the fields."""

    hidden_size: int
    num_heads: int
    vocab_size: int
    context: Context
    layers: list[tuple[LayerCache, ...]]
    layer_weights: list[tuple[Weight, ...]]
    other_weights: list[Weight]
    ropes: tuple[Rope, ...] = ()
    tied: bool = False
    experts_per_token: int = 0
    widest_mlp: int = 0
    multimodal: bool = False
    item_tokens: int = 0


# Model types whose classes create embedding, head and final norm on every stage. Source: vLLM 0.33's parameters on
# each of three stages, for an available config of every model_type; for others, its model_executor/models.
EVERYTHING = frozenset({
    "bloom", "chatglm", "dbrx", "falcon", "gemma", "gpt2", "gptj", "granitemoe", "granitemoehybrid", "granitemoeshared",
    "internlm2", "jamba", "mamba", "mamba2", "minicpm", "mixtral", "nemotron_h", "olmo_hybrid", "olmoe", "opt", "orion",
    "phimoe", "stablelm", "stablelm_epoch", "zamba2",
})  # fmt: skip
# Groups that certain classes have on every stage.
GROUPS: dict[str, tuple[str, ...]] = {
    "deepseek_v4": ("mlp",),  # mixes the copies of the hidden state before the head
    "gemma4_text": ("embedding", "norm"),
    "lfm2": ("embedding",),
    "lfm2_moe": ("embedding",),
    "qwen3_next": ("lm_head",),
}


def placed(weight: Weight, model_type: str) -> Weight:
    """The weight with its pipeline stages."""
    if model_type in EVERYTHING or weight.group in GROUPS.get(model_type, ()):
        return replace(weight, place=Place.EVERY)
    return weight
