"""Shared code of the older families' readers: one kind of layer, K and V in every head unless specified otherwise."""

from dataclasses import dataclass

from kvplan.models.families import rope
from kvplan.models.families.blocks import Heads, Norms, SpecDraft, column, norm, row
from kvplan.models.families.config import Config
from kvplan.models.spec import FullAttention, Part, Place, Rope, Weight


@dataclass(frozen=True, slots=True)
class Shape:
    """Result of a reader: one layer's weights, repeated, and the weights outside the layers."""

    hidden: int
    heads: Heads
    vocab: int
    layer: tuple[Weight, ...]
    outer: tuple[Weight, ...]
    tied: bool
    inner: int
    rope_dim: int = 0  # 0: there is no rotary table
    experts_per_token: int = 0


def draft(config: Config, shape: Shape) -> SpecDraft:
    """A model of identical layers that cache every token's K and V."""
    num_layers = config.num_layers()
    context = rope.context_of(config)
    heads = shape.heads
    return SpecDraft(
        hidden_size=shape.hidden,
        num_heads=heads.num_heads,
        vocab_size=shape.vocab,
        context=context,
        layers=[(FullAttention(heads.num_kv_heads, heads.head_dim, heads.head_dim_v),)] * num_layers,
        layer_weights=[shape.layer] * num_layers,
        other_weights=list(shape.outer),
        ropes=(Rope(shape.rope_dim, rope.table_rows(config, context.positions)),) if shape.rope_dim else (),
        tied=shape.tied,
        experts_per_token=shape.experts_per_token,
        widest_mlp=shape.inner,
    )


def heads_of(config: Config, num_kv_heads: int | None = None, head_dim: int | None = None) -> tuple[int, Heads]:
    """(hidden size, heads); without `num_kv_heads` every head has K and V, as in these families' original design."""
    hidden = config.count("hidden_size", "n_embd", "d_model", "n_embed")
    num_heads = config.count("num_attention_heads", "n_head", "n_heads")
    if head_dim is None and hidden % num_heads:
        raise config.fail("hidden_size", f"is not a multiple of the number of heads ({hidden}, {num_heads})")
    num_kv = num_kv_heads or num_heads
    if num_heads % num_kv:
        raise config.fail("num_kv_heads", f"does not divide the number of heads ({num_kv}, {num_heads})")
    width = head_dim or config.maybe_count("head_dim") or hidden // num_heads
    return hidden, Heads(num_heads, num_kv, width, width)


def attend(
    hidden: int, heads: Heads, names: tuple[str, str], *, bias: bool = False, out_bias: bool = False,
    sources: tuple[str, ...] = (),
) -> tuple[Weight, ...]:  # fmt: skip
    """Fused query, key and value, and the output projection, with the family's names."""
    parts = (Part(heads.num_heads, heads.head_dim), heads.kv(heads.head_dim), heads.kv(heads.head_dim))
    return (
        column(names[0], hidden, parts, "attention", bias=bias, sources=sources),
        row(names[1], heads.num_heads * heads.head_dim, hidden, "attention", bias=out_bias),
    )


def norms(hidden: int, *names: str, kind: Norms = "layer", bias: bool | None = None) -> tuple[Weight, ...]:
    return tuple(norm(name, hidden, kind, bias) for name in names)


def positions(name: str, rows: int, hidden: int) -> Weight:
    """A learned position table: replicated on every rank of the first stage."""
    return Weight(name, "embedding", hidden, (Part(rows),), place=Place.FIRST)


def separate(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{x}_proj" for x in "qkv")


def inner_size(config: Config, hidden: int, *keys: str) -> int:
    """The MLP's width: 4 x hidden if the config does not set it."""
    return config.maybe_count(*keys) or 4 * hidden


def tied_by(config: Config, default: bool) -> bool:
    return config.flag("tie_word_embeddings", default)
