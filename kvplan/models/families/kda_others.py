"""Kimi delta attention in others' decoders: Ling 3 (Bailing V3) and Alice AI, each with its own second mixer.

Source: vLLM 0.33 bailing_moe_v3.py and alice_ai.py; compared with their parameters (tests/facts/architectures.jsonl).
"""

from collections.abc import Callable
from dataclasses import replace

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families.blocks import SpecDraft, attention, column, norm, qk_norms, replicated, whole
from kvplan.models.families.config import Config
from kvplan.models.families.dense import attention_cache, dense_mlp, heads_of, outer_weights
from kvplan.models.families.hybrid import Layer, draft, residual_attention
from kvplan.models.families.mla import PLAIN, latent_attention, latent_caches
from kvplan.models.families.moe import Moe, expert_layer, sparse_layers
from kvplan.models.families.renamed import first_dense, reworded
from kvplan.models.families.state import Mixer, gated_kimi_delta, kimi_delta
from kvplan.models.spec import Part, Place, Weight


def full_rank_delta(config: Config, hidden: int) -> Mixer:
    """Ling 3's: queries, keys, values and b in one tensor, full-rank f and gate, each convolution its own."""
    if not config.flag("no_kda_lora"):
        raise UnsupportedModelError(
            config.where, "no_kda_lora: vLLM builds Ling 3 with full-rank gates alone", "set no_kda_lora"
        )
    heads, head_dim = config.count("num_attention_heads"), config.count("head_dim")
    width, inner = Part(heads, head_dim), heads * head_dim
    weights, state = kimi_delta(hidden, heads, head_dim, config.count("short_conv_kernel_size", default=4))
    kept = ("conv1d", "A_log", "dt_bias", "o_norm", "o_proj")
    own = (
        column("self_attn.qkvb_proj", hidden, (width, width, width, Part(heads)), "attention"),
        column("self_attn.f_proj", hidden, inner, "attention"),
        column("self_attn.g_proj", hidden, inner, "attention"),
    )
    return (*own, *(weight for weight in weights if weight.name.endswith(kept))), state


def bailing_full(config: Config, num_layers: int) -> list[bool]:
    """True for each layer of latent attention: by `layer_types`, or the last of every group."""
    types = config.per_layer_names("layer_types", num_layers)
    if types is not None:
        return [kind == "full_attention" for kind in types]
    group = config.count("layer_group_size", default=5)
    return [(i + 1) % group == 0 for i in range(num_layers)]


def read_bailing_v3(config: Config, model_type: str) -> SpecDraft:
    """Ling 3: four delta layers, then one of latent attention; the router in float32."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    delta, state = full_rank_delta(config, hidden)
    mixers: dict[bool, Layer] = {
        False: (delta, (state,)),
        True: (latent_attention(config, hidden), latent_caches(config, indexed=None)),
    }
    inner = config.count("moe_shared_expert_intermediate_size", "moe_intermediate_size")
    config = reworded(
        first_dense(config, "first_k_dense_replace", 1),
        shared_width=inner * config.count("num_shared_experts", default=1),
    )
    wide = "float32" if config.values.get("router_dtype", "fp32") == "fp32" else None
    biased = config.flag("moe_router_enable_expert_bias", True)
    router = Moe(shared="shared_width", router_dtype=wide, correction="counted" if biased else "")
    return assembled(config, mixers, bailing_full(config, num_layers), router, vocab)


def assembled(config: Config, mixers: dict[bool, Layer], full: list[bool], router: Moe, vocab: int) -> SpecDraft:
    hidden, sparse = config.count("hidden_size"), sparse_layers(config, len(full))
    feed_forward = {True: expert_layer(config, router, hidden)}
    if not all(sparse):
        feed_forward[False] = dense_mlp(config, PLAIN, hidden, config.count("intermediate_size"))
    norms = norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden)
    layers = [
        (mixers[is_full][0] + norms + feed_forward[is_sparse], mixers[is_full][1])
        for is_full, is_sparse in zip(full, sparse, strict=True)
    ]
    tied = config.flag("tie_word_embeddings")
    result = draft(config, layers, list(outer_weights(config, PLAIN, vocab, hidden, tied)), heads=None, tied=tied)
    result.num_heads = config.count("num_attention_heads")
    return result


def read_alice(config: Config, model_type: str) -> SpecDraft:
    """Alice AI: Kimi K3's delta net with low-rank gates, Qwen3-Next's gated attention, attention over residuals."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    heads, head_dim = config.count("linear_num_key_heads"), config.count("linear_key_head_dim")
    width, kernel = Part(heads, head_dim), config.count("linear_conv_kernel_dim", default=4)
    (_, *others), state = gated_kimi_delta(hidden, heads, head_dim, kernel, bounded=False)
    parts = (width, width, width, replicated(head_dim), Part(heads))
    own_weights: tuple[Weight, ...] = (
        column("linear_attn.in_proj_qkvgfab", hidden, parts, "state"),
        whole("linear_attn.g_a_proj", hidden, head_dim, "state"),
        column("linear_attn.g_b_proj", head_dim, (width,), "state"),
        *others,
    )
    own = heads_of(config)
    full = attention(hidden, own, qkv_bias=config.flag("attention_bias"), gate=True) + qk_norms(own)
    mixers: dict[bool, Layer] = {False: (own_weights, (state,)), True: (full, (attention_cache(own, None),))}
    types = config.per_layer_names("layer_types", num_layers) or []
    router = Moe(
        shared="shared_expert_intermediate_size",
        shared_name="mlp.shared_expert",
        shared_gate=True,
        correction="counted",
    )
    result = assembled(config, mixers, [kind == "full_attention" for kind in types], router, vocab)
    residuals = residual_attention("mlp", hidden), residual_attention("attn", hidden)
    result.layer_weights = [
        (*weights, *residuals[0], *(residuals[1] if i else ())) for i, weights in enumerate(result.layer_weights)
    ]
    result.other_weights += [replace(w, place=Place.LAST) for w in residual_attention("model.attnres_final", hidden)]
    return result


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {
    "bailing_hybrid": read_bailing_v3,
    "alice_ai": read_alice,
}
