"""Families older than Llama's shape: GPT-2, OPT, BLOOM, MPT, Falcon, Phi, ChatGLM, Qwen 1, DBRX, GPT-NeoX and kin.

They differ in which keys their configs use, in where biases and norms sit, and in how many heads keep K and V.
Sources: the transformers classes of the same model_type, the checkpoints' own modeling files for ChatGLM and Qwen 1,
and the parameters vLLM 0.33 holds for bloom-7b1, phi-2 and dbrx-base.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvplan.errors import UnsupportedModelError
from kvplan.families import rope
from kvplan.families.blocks import (
    Heads,
    Norms,
    column,
    embedding,
    experts,
    final_norm,
    gated_mlp,
    norm,
    plain_mlp,
    router,
    row,
    whole,
)
from kvplan.families.config import Config
from kvplan.families.draft import SpecDraft
from kvplan.spec import FullAttention, Part, Place, Rope, Weight


@dataclass(frozen=True, slots=True)
class Shape:
    """What a reader found: one layer's weights, repeated, and what stands outside the layers."""

    hidden: int
    heads: Heads
    vocab: int
    layer: tuple[Weight, ...]
    outer: tuple[Weight, ...]
    tied: bool
    inner: int
    rope_dim: int = 0  # 0: no rotary table is kept
    experts_per_token: int = 0


def draft(config: Config, shape: Shape) -> SpecDraft:
    """Every layer alike, every token's K and V kept."""
    num_layers = config.num_layers()
    wanted, limit = rope.context(config)
    heads = shape.heads
    return SpecDraft(
        hidden_size=shape.hidden,
        num_heads=heads.num_heads,
        vocab_size=shape.vocab,
        max_model_len=wanted,
        context_limit=limit,
        layers=[(FullAttention(heads.num_kv_heads, heads.head_dim, heads.head_dim_v),)] * num_layers,
        layer_weights=[shape.layer] * num_layers,
        other_weights=list(shape.outer),
        ropes=(Rope(shape.rope_dim, limit),) if shape.rope_dim else (),
        tied=shape.tied,
        experts_per_token=shape.experts_per_token,
        widest_mlp=shape.inner,
    )


def heads_of(config: Config, num_kv_heads: int | None = None, head_dim: int | None = None) -> tuple[int, Heads]:
    """(hidden size, heads); without `num_kv_heads` every head keeps K and V, as these families were built."""
    hidden = config.count("hidden_size", "n_embd", "d_model", "n_embed")
    num_heads = config.count("num_attention_heads", "n_head", "n_heads")
    if head_dim is None and hidden % num_heads:
        raise config.fail("hidden_size", f"is not a multiple of the number of heads ({hidden}, {num_heads})")
    num_kv = num_kv_heads or num_heads
    if num_heads % num_kv:
        raise config.fail("num_kv_heads", f"does not divide the number of heads ({num_kv}, {num_heads})")
    width = head_dim or hidden // num_heads
    return hidden, Heads(num_heads, num_kv, width, width)


def attend(
    hidden: int, heads: Heads, names: tuple[str, str], *, bias: bool = False, out_bias: bool = False,
    sources: tuple[str, ...] = (),
) -> tuple[Weight, ...]:  # fmt: skip
    """Fused query, key and value, and the output projection, under the family's names."""
    parts = (Part(heads.num_heads, heads.head_dim), heads.kv(heads.head_dim), heads.kv(heads.head_dim))
    return (
        column(names[0], hidden, parts, "attention", bias=bias, sources=sources),
        row(names[1], heads.num_heads * heads.head_dim, hidden, "attention", bias=out_bias),
    )


def norms(hidden: int, *names: str, kind: Norms = "layer", bias: bool | None = None) -> tuple[Weight, ...]:
    return tuple(norm(name, hidden, kind, bias) for name in names)


def positions(name: str, rows: int, hidden: int) -> Weight:
    """A learned position table: whole on every rank of the first stage."""
    return Weight(name, "embedding", hidden, (Part(rows),), place=Place.FIRST)


def separate(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{x}_proj" for x in "qkv")


def inner_size(config: Config, hidden: int, *keys: str) -> int:
    """The MLP's width: 4 x hidden where the config leaves it open."""
    return config.maybe_count(*keys) or 4 * hidden


def tied_by(config: Config, default: bool) -> bool:
    return config.flag("tie_word_embeddings", default)


def read_gpt2(config: Config, model_type: str) -> SpecDraft:
    """GPT-2, and StarCoder 1 (gpt_bigcode), where `multi_query` leaves one K and V head."""
    multi_query = model_type == "gpt_bigcode" and config.flag("multi_query", True)
    hidden, heads = heads_of(config, 1 if multi_query else None)
    inner = inner_size(config, hidden, "n_inner")
    vocab = config.count("vocab_size")
    tied = tied_by(config, True)
    layer = (
        *attend(hidden, heads, ("attn.c_attn", "attn.c_proj"), bias=True, out_bias=True),
        *plain_mlp(hidden, inner, bias=True, names=("mlp.c_fc", "mlp.c_proj")),
        *norms(hidden, "ln_1", "ln_2"),
    )
    outer = (
        *embedding(vocab, hidden, tied, name="transformer.wte"),
        positions("transformer.wpe", config.count("n_positions", "n_ctx", "max_position_embeddings"), hidden),
        final_norm(hidden, "layer"),
    )
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner))


def read_opt(config: Config, model_type: str) -> SpecDraft:
    """OPT: its position table has two rows more than positions; OPT-350m embeds in a narrower space."""
    hidden, heads = heads_of(config)
    inner, vocab = config.count("ffn_dim"), config.count("vocab_size")
    bias, affine = config.flag("enable_bias", True), config.flag("layer_norm_elementwise_affine", True)
    tied = tied_by(config, True)
    width = config.count("word_embed_proj_dim", default=hidden)
    layer = (
        *attend(
            hidden, heads, ("self_attn.qkv_proj", "self_attn.out_proj"), bias=bias, out_bias=bias,
            sources=separate("self_attn"),
        ),
        *plain_mlp(hidden, inner, bias=bias, names=("fc1", "fc2")),
        *(norms(hidden, "self_attn_layer_norm", "final_layer_norm") if affine else ()),
    )  # fmt: skip
    outer = [
        *embedding(vocab, width, tied, name="model.decoder.embed_tokens"),
        positions("model.decoder.embed_positions", config.count("max_position_embeddings") + 2, hidden),
    ]
    if width != hidden:
        outer.append(whole("model.decoder.project_in", width, hidden, "embedding"))
        outer.append(place_last(whole("model.decoder.project_out", hidden, width, "embedding")))
    final = config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm")
    if final and affine:
        outer.append(final_norm(hidden, "layer"))
    return draft(config, Shape(hidden, heads, vocab, layer, tuple(outer), tied, inner))


def place_last(weight: Weight) -> Weight:
    return replace(weight, place=Place.LAST)


def read_bloom(config: Config, model_type: str) -> SpecDraft:
    """BLOOM: ALiBi instead of rotary positions, and a LayerNorm right after the embedding."""
    hidden, heads = heads_of(config)
    inner, vocab = 4 * hidden, config.count("vocab_size")
    tied = tied_by(config, True)
    layer = (
        *attend(hidden, heads, ("self_attention.query_key_value", "self_attention.dense"), bias=True, out_bias=True),
        *plain_mlp(hidden, inner, bias=True, names=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")),
        *norms(hidden, "input_layernorm", "post_attention_layernorm"),
    )
    outer = (
        *embedding(vocab, hidden, tied, name="transformer.word_embeddings"),
        norm("transformer.word_embeddings_layernorm", hidden, "layer"),
        final_norm(hidden, "layer"),
    )
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner))


def read_mpt(config: Config, model_type: str) -> SpecDraft:
    """MPT: ALiBi; its LayerNorms have no bias, whatever `no_bias` says."""
    attn = config.sub("attn_config")
    for key, wrong in (("alibi", not attn.flag("alibi", True)), ("qk_ln", attn.flag("qk_ln"))):
        if wrong:
            raise UnsupportedModelError(
                f"{attn.where}: {key} is {attn.values[key]}, an MPT variant kvplan cannot size; only the published ones"
            )
    multi_query = attn.text("attn_type", "multihead_attention") == "multiquery_attention"
    hidden, heads = heads_of(config, attn.maybe_count("kv_n_heads") or (1 if multi_query else None))
    inner, vocab = int(config.number("expansion_ratio", 4) * hidden), config.count("vocab_size")
    bias, tied = not config.flag("no_bias", True), tied_by(config, True)
    layer = (
        *attend(hidden, heads, ("attn.Wqkv", "attn.out_proj"), bias=bias, out_bias=bias),
        *plain_mlp(hidden, inner, bias=bias, names=("ffn.up_proj", "ffn.down_proj")),
        *norms(hidden, "norm_1", "norm_2", bias=False),
    )
    outer = (*embedding(vocab, hidden, tied, name="transformer.wte"), final_norm(hidden, "layer", bias=False))
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner))


def falcon_kv_heads(config: Config, new: bool) -> int | None:
    """Only the new architecture reads `num_kv_heads`; before it, `multi_query` means one, whatever that key says."""
    if new:
        return config.maybe_count("num_kv_heads", "n_head_kv", "num_key_value_heads")
    return 1 if config.flag("multi_query", True) else None


def read_falcon(config: Config, model_type: str) -> SpecDraft:
    """Falcon 7B (multi-query), 40B, 180B and 11B (new decoder architecture), RW (ALiBi, biases)."""
    new = config.flag("new_decoder_architecture")
    hidden, heads = heads_of(config, falcon_kv_heads(config, new))
    inner, vocab = inner_size(config, hidden, "ffn_hidden_size"), config.count("vocab_size")
    bias, tied = config.flag("bias"), tied_by(config, True)
    names: tuple[str, ...] = ("input_layernorm",)
    if new and config.count("num_ln_in_parallel_attn", default=2) == 2:
        names = ("ln_attn", "ln_mlp")
    elif not new and not config.flag("parallel_attn", True):
        names = ("input_layernorm", "post_attention_layernorm")
    layer = (
        *attend(hidden, heads, ("self_attention.query_key_value", "self_attention.dense"), bias=bias, out_bias=bias),
        *plain_mlp(hidden, inner, bias=bias, names=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")),
        *norms(hidden, *names),
    )
    outer = (*embedding(vocab, hidden, tied, name="transformer.word_embeddings"), final_norm(hidden, "layer"))
    rope_dim = 0 if config.flag("alibi") else heads.head_dim
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner, rope_dim))


def read_phi(config: Config, model_type: str) -> SpecDraft:
    """Phi-1, 1.5 and 2: vLLM 0.33 serves them with transformers' own layers, so it keeps no rotary table."""
    hidden, heads = heads_of(config, config.maybe_count("num_key_value_heads"))
    inner, vocab = config.count("intermediate_size"), config.count("vocab_size")
    tied = tied_by(config, False)
    qk = ("self_attn.q_layernorm", "self_attn.k_layernorm") if config.flag("qk_layernorm") else ()
    layer = (
        *attend(
            hidden, heads, ("self_attn.qkv_proj", "self_attn.dense"), bias=True, out_bias=True,
            sources=separate("self_attn"),
        ),
        *norms(heads.head_dim, *qk),
        *plain_mlp(hidden, inner, bias=True, names=("mlp.fc1", "mlp.fc2")),
        *norms(hidden, "input_layernorm"),
    )  # fmt: skip
    outer = (*embedding(vocab, hidden, tied, head_bias=True), final_norm(hidden, "layer"))
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner))


def read_gpt_neox(config: Config, model_type: str) -> SpecDraft:
    """GPT-NeoX and Pythia."""
    hidden, heads = heads_of(config)
    inner, vocab = config.count("intermediate_size"), config.count("vocab_size")
    bias, tied = config.flag("attention_bias", True), tied_by(config, False)
    layer = (
        *attend(hidden, heads, ("attention.query_key_value", "attention.dense"), bias=bias, out_bias=bias),
        *plain_mlp(hidden, inner, bias=True, names=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")),
        *norms(hidden, "input_layernorm", "post_attention_layernorm"),
    )
    outer = (*embedding(vocab, hidden, tied, name="gpt_neox.embed_in"), final_norm(hidden, "layer"))
    rope_dim = int(heads.head_dim * config.number("rotary_pct", 0.25))
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner, rope_dim))


def read_gptj(config: Config, model_type: str) -> SpecDraft:
    """GPT-J: one LayerNorm, biases in the MLP and in the head only."""
    hidden, heads = heads_of(config)
    inner, vocab = inner_size(config, hidden, "n_inner"), config.count("vocab_size")
    tied = tied_by(config, False)
    layer = (
        *attend(hidden, heads, ("attn.qkv_proj", "attn.out_proj"), sources=separate("attn")),
        *plain_mlp(hidden, inner, bias=True, names=("mlp.fc_in", "mlp.fc_out")),
        *norms(hidden, "ln_1"),
    )
    head_bias = Weight("lm_head.bias", "lm_head", 1, (Part(vocab),), "outputs", pad_rows=64, place=Place.LAST)
    outer = (*embedding(vocab, hidden, tied, name="transformer.wte"), head_bias, final_norm(hidden, "layer"))
    rope_dim = config.count("rotary_dim", default=heads.head_dim)
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner, rope_dim))


def read_stablelm(config: Config, model_type: str) -> SpecDraft:
    """StableLM: Llama's gated MLP with LayerNorms; the 12B normalises each head of query and key apart."""
    hidden, heads = heads_of(config, config.maybe_count("num_key_value_heads"))
    inner, vocab = config.count("intermediate_size"), config.count("vocab_size")
    tied = tied_by(config, False)
    names = (
        ("input_layernorm",)
        if config.flag("use_parallel_residual")
        else ("input_layernorm", "post_attention_layernorm")
    )
    layer = (
        *attend(
            hidden, heads, ("self_attn.qkv_proj", "self_attn.o_proj"), bias=config.flag("use_qkv_bias"),
            sources=separate("self_attn"),
        ),
        *(per_head_norms(heads) if config.flag("qk_layernorm") else ()),
        *gated_mlp(hidden, inner),
        *norms(hidden, *names),
    )  # fmt: skip
    outer = (*embedding(vocab, hidden, tied), final_norm(hidden, "layer"))
    rope_dim = int(heads.head_dim * config.number("partial_rotary_factor", 0.25))
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner, rope_dim))


def per_head_norms(heads: Heads) -> tuple[Weight, ...]:
    return (
        norm("self_attn.q_layernorm", heads.num_heads * heads.head_dim),
        norm("self_attn.k_layernorm", heads.num_kv_heads * heads.head_dim),
    )


def read_chatglm(config: Config, model_type: str) -> SpecDraft:
    """ChatGLM2, ChatGLM3 and GLM-4-9B as published first: half of each head is rotated."""
    groups = config.count("multi_query_group_num") if config.flag("multi_query_attention") else None
    hidden, heads = heads_of(config, groups, config.maybe_count("kv_channels"))
    inner, vocab = config.count("ffn_hidden_size"), config.count("padded_vocab_size", "vocab_size")
    bias, tied = config.flag("add_bias_linear"), tied_by(config, False)
    kind: Norms = "rms" if config.flag("rmsnorm", True) else "layer"
    layer = (
        *attend(
            hidden, heads, ("self_attention.query_key_value", "self_attention.dense"),
            bias=bias or config.flag("add_qkv_bias"), out_bias=bias,
        ),
        column("mlp.dense_h_to_4h", hidden, (Part(inner), Part(inner)), "mlp", bias=bias),
        row("mlp.dense_4h_to_h", inner, hidden, "mlp", bias=bias),
        *norms(hidden, "input_layernorm", "post_attention_layernorm", kind=kind),
    )  # fmt: skip
    final = (final_norm(hidden, kind),) if config.flag("post_layer_norm", True) else ()
    outer = (*embedding(vocab, hidden, tied, name="transformer.embedding.word_embeddings"), *final)
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner, heads.head_dim // 2))


def read_qwen(config: Config, model_type: str) -> SpecDraft:
    """Qwen 1: `intermediate_size` counts gate and up together, and `c_attn` has a bias whatever `no_bias` says."""
    hidden, heads = heads_of(config, None, config.maybe_count("kv_channels"))
    inner, vocab = config.count("intermediate_size") // 2, config.count("vocab_size")
    bias, tied = not config.flag("no_bias", True), tied_by(config, False)
    layer = (
        *attend(hidden, heads, ("attn.c_attn", "attn.c_proj"), bias=True, out_bias=bias),
        column("mlp.gate_up_proj", hidden, (Part(inner), Part(inner)), "mlp", bias=bias, sources=("mlp.w2", "mlp.w1")),
        row("mlp.c_proj", inner, hidden, "mlp", bias=bias),
        *norms(hidden, "ln_1", "ln_2", kind="rms"),
    )
    outer = (*embedding(vocab, hidden, tied, name="transformer.wte"), final_norm(hidden))
    rope_dim = int(heads.head_dim * config.number("rotary_pct", 1.0))
    found = draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner, rope_dim))
    trained = config.maybe_count("seq_length")  # vLLM takes the smallest of the lengths a config names
    if trained and trained < found.max_model_len:
        found.max_model_len = found.context_limit = trained
    return found


def read_dbrx(config: Config, model_type: str) -> SpecDraft:
    """DBRX: experts in every layer; LayerNorms without bias."""
    ffn = config.sub("ffn_config")
    hidden, heads = heads_of(config, config.sub("attn_config").count("kv_n_heads"))
    inner, num_experts = ffn.count("ffn_hidden_size"), ffn.count("moe_num_experts")
    vocab, tied = config.count("vocab_size"), tied_by(config, False)
    layer = (
        *attend(hidden, heads, ("norm_attn_norm.attn.Wqkv", "norm_attn_norm.attn.out_proj")),
        router("ffn.router.layer", hidden, num_experts),
        *experts(hidden, inner, num_experts, prefix="ffn.experts"),
        *norms(hidden, "norm_attn_norm.norm_1", "norm_attn_norm.norm_2", bias=False),
    )
    outer = (*embedding(vocab, hidden, tied, name="transformer.wte"), final_norm(hidden, "layer", bias=False))
    top_k = ffn.count("moe_top_k", high=num_experts)
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner, heads.head_dim, top_k))


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {
    "gpt2": read_gpt2,
    "gpt_bigcode": read_gpt2,
    "opt": read_opt,
    "bloom": read_bloom,
    "mpt": read_mpt,
    "falcon": read_falcon,
    "phi": read_phi,
    "gpt_neox": read_gpt_neox,
    "gptj": read_gptj,
    "stablelm": read_stablelm,
    "chatglm": read_chatglm,
    "qwen": read_qwen,
    "dbrx": read_dbrx,
}
