"""Families older than Llama's shape, by model_type; here those without rotary positions: GPT-2, OPT, BLOOM, MPT.

They differ in their config keys and in the placement of biases and norms. Sources: the transformers classes of the
same model_type, and vLLM 0.33's parameters for bloom-7b1.
"""

from collections.abc import Callable
from dataclasses import replace

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families import classic_rotary
from kvplan.models.families.blocks import SpecDraft, embedding, final_norm, norm, plain_mlp, whole
from kvplan.models.families.classic_shape import (
    Shape,
    attend,
    draft,
    heads_of,
    inner_size,
    norms,
    positions,
    separate,
    tied_by,
)
from kvplan.models.families.config import Config
from kvplan.models.spec import Place


def read_gpt2(config: Config, model_type: str) -> SpecDraft:
    """GPT-2, and StarCoder 1 (gpt_bigcode), which with `multi_query` has one K and V head."""
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
    """OPT: its position table has two more rows than positions; OPT-350m has a narrower embedding."""
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
        outer.append(replace(whole("model.decoder.project_out", hidden, width, "embedding"), place=Place.LAST))
    final = config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm")
    if final and affine:
        outer.append(final_norm(hidden, "layer"))
    return draft(config, Shape(hidden, heads, vocab, layer, tuple(outer), tied, inner))


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
    """MPT: ALiBi; its LayerNorms have no bias, whatever `no_bias` is."""
    attn = config.sub("attn_config")
    for key, wrong in (("alibi", not attn.flag("alibi", True)), ("qk_ln", attn.flag("qk_ln"))):
        if wrong:
            raise UnsupportedModelError(
                attn.where,
                f"{key} is {attn.values[key]}, an MPT variant kvplan cannot size",
                "only the published ones",
            )
    multi_query = attn.text("attn_type", "multihead_attention") == "multiquery_attention"
    hidden, heads = heads_of(config, attn.maybe_count("kv_n_heads") or (1 if multi_query else None))
    inner, vocab = int(config.ratio("expansion_ratio", 4) * hidden), config.count("vocab_size")
    bias, tied = not config.flag("no_bias", True), tied_by(config, True)
    layer = (
        *attend(hidden, heads, ("attn.Wqkv", "attn.out_proj"), bias=bias, out_bias=bias),
        *plain_mlp(hidden, inner, bias=bias, names=("ffn.up_proj", "ffn.down_proj")),
        *norms(hidden, "norm_1", "norm_2", bias=False),
    )
    outer = (*embedding(vocab, hidden, tied, name="transformer.wte"), final_norm(hidden, "layer", bias=False))
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner))


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {
    "gpt2": read_gpt2,
    "gpt_bigcode": read_gpt2,
    "opt": read_opt,
    "bloom": read_bloom,
    "mpt": read_mpt,
    "falcon": classic_rotary.read_falcon,
    "phi": classic_rotary.read_phi,
    "gpt_neox": classic_rotary.read_gpt_neox,
    "gptj": classic_rotary.read_gptj,
    "stablelm": classic_rotary.read_stablelm,
    "stablelm_epoch": classic_rotary.read_stablelm,  # the files' original model_type
    "chatglm": classic_rotary.read_chatglm,
    "qwen": classic_rotary.read_qwen,
    "dbrx": classic_rotary.read_dbrx,
}
