"""Older families with rotary positions: Falcon, Phi, GPT-NeoX, GPT-J, StableLM, ChatGLM, Qwen 1, DBRX.

Sources: the transformers classes of the same model_type, the checkpoints' own modeling files for ChatGLM and Qwen 1,
and vLLM 0.33's parameters for phi-2 and dbrx-base.
"""

from dataclasses import replace

from kvplan.models.families.blocks import (
    Heads,
    Norms,
    SpecDraft,
    column,
    embedding,
    experts,
    final_norm,
    gated_mlp,
    norm,
    plain_mlp,
    router,
    row,
)
from kvplan.models.families.classic_shape import Shape, attend, draft, heads_of, inner_size, norms, separate, tied_by
from kvplan.models.families.config import Config
from kvplan.models.spec import Part, Place, Weight


def falcon_kv_heads(config: Config, new: bool) -> int | None:
    """KV heads; only the new architecture reads `num_kv_heads`; before it, `multi_query` means one, whatever
    that key is.
    """
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
    """Phi-1, 1.5 and 2: vLLM 0.33 serves them with transformers' own layers: no rotary table, no bias of the head."""
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
    bias = Weight("lm_head.bias", "lm_head", 1, (Part(vocab),), "outputs", is_loaded=False, place=Place.LAST)
    outer = (*embedding(vocab, hidden, tied), *(() if tied else (bias,)), final_norm(hidden, "layer"))
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
    rope_dim = int(heads.head_dim * config.ratio("rotary_pct", 0.25, 1))
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
    """StableLM: Llama's gated MLP with LayerNorms; the 12B normalizes each head of query and key separately."""
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
    share = config.ratio("partial_rotary_factor", config.ratio("rope_pct", 0.25, 1), 1)
    rope_dim = int(heads.head_dim * share)
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner, rope_dim))


def per_head_norms(heads: Heads) -> tuple[Weight, ...]:
    return (
        norm("self_attn.q_layernorm", heads.num_heads * heads.head_dim),
        norm("self_attn.k_layernorm", heads.num_kv_heads * heads.head_dim),
    )


def read_chatglm(config: Config, model_type: str) -> SpecDraft:
    """ChatGLM2, ChatGLM3 and GLM-4-9B as first published: half of each head is rotated."""
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
    """Qwen 1: `intermediate_size` is the sum of gate and up, and `c_attn` has a bias whatever `no_bias` is."""
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
    rope_dim = int(heads.head_dim * config.ratio("rotary_pct", 1, 1))
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner, rope_dim))


def read_dbrx(config: Config, model_type: str) -> SpecDraft:
    """DBRX: experts in every layer; LayerNorms without bias."""
    ffn = config.sub("ffn_config")
    hidden, heads = heads_of(config, config.sub("attn_config").count("kv_n_heads"))
    inner, num_experts = ffn.count("ffn_hidden_size"), ffn.count("moe_num_experts")
    vocab, tied = config.count("vocab_size"), tied_by(config, False)
    # The class of its experts is none that compressed-tensors quantizes. Source: vLLM 0.33's parameters.
    quantized = config.sub("quantization_config").values.get("quant_method") != "compressed-tensors"
    matrices = experts(hidden, inner, num_experts, prefix="ffn.experts")
    layer = (
        *attend(hidden, heads, ("norm_attn_norm.attn.Wqkv", "norm_attn_norm.attn.out_proj")),
        router("ffn.router.layer", hidden, num_experts),
        *(replace(matrix, quantizable=quantized) for matrix in matrices),
        *norms(hidden, "norm_attn_norm.norm_1", "norm_attn_norm.norm_2", bias=False),
    )
    outer = (*embedding(vocab, hidden, tied, name="transformer.wte"), final_norm(hidden, "layer", bias=False))
    top_k = ffn.count("moe_top_k", high=num_experts)
    return draft(config, Shape(hidden, heads, vocab, layer, outer, tied, inner, heads.head_dim, top_k))
