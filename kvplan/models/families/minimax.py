"""MiniMax-Text-01 and M1: lightning attention (a linear recurrence) with full attention in every eighth layer.

Source: vLLM 0.11, 0.14, 0.16, 0.18, 0.20, 0.22, 0.23 model_executor/models/minimax_text_01.py and
layers/mamba/linear_attn.py. The parameters of MiniMax-M1 come to 456,089,655,296, as published.
"""

from dataclasses import replace

from kvplan.models.families import rope
from kvplan.models.families.blocks import (
    Heads,
    SpecDraft,
    attention,
    column,
    experts,
    final_norm,
    gated_mlp,
    norm,
    router,
    row,
    table,
    vector,
    whole,
)
from kvplan.models.families.config import Config
from kvplan.models.families.dense import attention_cache, heads_of
from kvplan.models.spec import Part, Place, RecurrentState, Rope, Weight

TYPE_KEYS = ("attn_type_list", "decoder_attention_types")  # 0: lightning attention, 1: full attention
FLOAT32 = 2  # elements of a 16-bit dtype in the size of one float32


def full_layers(config: Config, num_layers: int) -> list[bool]:
    """True for each full-attention layer: by the lists of the published files, by `layer_types`, or all."""
    for key in TYPE_KEYS:
        flags = config.ints(key)
        if flags:
            if len(flags) < num_layers or set(flags) - {0, 1}:
                raise config.fail(key, f"must be 0 (linear) or 1 (full) for each of the {num_layers} layers")
            return [flag == 1 for flag in flags[:num_layers]]
    types = config.per_layer_names("layer_types", num_layers)
    return [kind == "full_attention" for kind in types] if types else [True] * num_layers


def lightning(hidden: int, heads: Heads) -> tuple[tuple[Weight, ...], RecurrentState]:
    """A gated linear attention whose state is one matrix per head, in the model's dtype."""
    count, dim = heads.num_heads, heads.head_dim
    inner = count * dim
    weights = (
        column("self_attn.qkv_proj", hidden, (Part(count, 3 * dim),), "attention"),
        column("self_attn.output_gate", hidden, inner, "attention"),
        row("self_attn.out_proj", inner, hidden, "attention"),
        vector("self_attn.norm", inner, "norm", split=True),
    )
    return weights, RecurrentState("lightning", 1, (), count, (dim, dim))


def shared_expert(config: Config, hidden: int) -> tuple[Weight, ...]:
    """A dense MLP in addition to the experts, mixed in with a coefficient; not used in the published models."""
    inner = config.maybe_count("shared_intermediate_size")
    if inner is None:
        return ()
    coefficient = whole("coefficient", hidden, 1, "shared_expert", quantizable=False, dtype="float32")
    return (*gated_mlp(hidden, inner, prefix="shared_mlp", group="shared_expert"), coefficient)


def read(config: Config, model_type: str) -> SpecDraft:
    """MiniMax-Text-01 and M1. The head is in float32, like the routers."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    heads, inner = heads_of(config), config.count("intermediate_size")
    count = config.count("num_local_experts", default=1)
    linear, state = lightning(hidden, heads)
    mixers = {True: (attention(hidden, heads), (attention_cache(heads, None),)), False: (linear, (state,))}
    feed_forward: tuple[Weight, ...] = gated_mlp(hidden, inner)
    if count > 1:
        name = "block_sparse_moe"
        gate = router(f"{name}.gate", hidden, count, dtype="float32")
        feed_forward = (gate, *experts(hidden, inner, count, prefix=f"{name}.experts"))
    common = (
        *feed_forward,
        *shared_expert(config, hidden),
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
    )
    kinds = full_layers(config, num_layers)
    tied = config.flag("tie_word_embeddings")
    head = replace(table("lm_head", vocab, hidden, Place.LAST, "lm_head"), dtype="float32")
    context = rope.context_of(config)
    rotary = config.count("rotary_dim", default=heads.head_dim)
    return SpecDraft(
        hidden_size=hidden,
        num_heads=heads.num_heads,
        vocab_size=vocab,
        context=context,
        layers=[mixers[is_full][1] for is_full in kinds],
        layer_weights=[mixers[is_full][0] + common for is_full in kinds],
        other_weights=[table("model.embed_tokens", vocab, hidden), head, final_norm(hidden)],
        ropes=(Rope(FLOAT32 * rotary, context.positions, served=True),),
        tied=tied,
        experts_per_token=config.count("num_experts_per_tok", default=0, low=0) if count > 1 else 0,
        widest_mlp=inner,
    )


READERS = {"minimax_m1": read, "minimax_text_01": read, "minimax": read}
