"""Kimi delta attention beside another: latent in each fifth layer of Ling 3 (Bailing V3), gated in Alice AI.

Source: vLLM 0.33 bailing_moe_v3.py and alice_ai.py; compared with their parameters (tests/facts/architectures.jsonl).
"""

from collections.abc import Callable
from dataclasses import replace

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families import rope
from kvplan.models.families.blocks import SpecDraft, attention, column, norm, qk_norms, replicated, whole
from kvplan.models.families.config import Config
from kvplan.models.families.dense import attention_cache, dense_mlp, heads_of, outer_weights
from kvplan.models.families.hybrid import Layer, draft, residual_attention
from kvplan.models.families.mla import PLAIN, latent_attention, latent_caches
from kvplan.models.families.moe import Moe, expert_layer, sparse_layers
from kvplan.models.families.renamed import first_dense, reworded
from kvplan.models.families.state import Mixer, gated_kimi_delta, kimi_delta
from kvplan.models.spec import Part, Place

KEPT = ("conv1d", "A_log", "dt_bias", "o_norm", "o_proj")  # of Kimi Linear's layer


def full_rank_delta(config: Config, hidden: int) -> Mixer:
    """Queries, keys, values and b in one tensor, f and gate of full rank."""
    if not config.flag("no_kda_lora"):
        raise UnsupportedModelError(config.where, "no_kda_lora: vLLM builds Ling 3 with gates of full rank alone")
    heads, head_dim = config.count("num_attention_heads"), config.count("head_dim")
    width, inner = Part(heads, head_dim), heads * head_dim
    weights, state = kimi_delta(hidden, heads, head_dim, config.count("short_conv_kernel_size", default=4))
    own = (
        column("self_attn.qkvb_proj", hidden, (width, width, width, Part(heads)), "attention"),
        column("self_attn.f_proj", hidden, inner, "attention"),
        column("self_attn.g_proj", hidden, inner, "attention"),
    )
    return (*own, *(weight for weight in weights if weight.name.endswith(KEPT))), state


def read(config: Config, model_type: str) -> SpecDraft:
    hidden, num_layers = config.count("hidden_size"), config.num_layers()
    inner = config.count("moe_shared_expert_intermediate_size", "moe_intermediate_size")
    shared = inner * config.count("num_shared_experts", default=1)
    config = reworded(first_dense(config, "first_k_dense_replace", 1), shared_width=shared)
    wide = "float32" if config.values.get("router_dtype", "fp32") == "fp32" else None
    biased = config.flag("moe_router_enable_expert_bias", True)
    router = Moe(shared="shared_width", router_dtype=wide, correction="counted" if biased else "")
    delta, state = full_rank_delta(config, hidden)
    mixers: dict[bool, Layer] = {
        False: (delta, (state,)),
        True: (latent_attention(config, hidden), latent_caches(config, indexed=None)),
    }
    group, types = config.count("layer_group_size", default=5), config.per_layer_names("layer_types", num_layers)
    types = types or ["linear" if (i + 1) % group else "full_attention" for i in range(num_layers)]
    result = assembled(config, mixers, types, router)
    result.ropes = rope.tables(config, config.count("qk_rope_head_dim"), result.context.positions)
    return result


def assembled(config: Config, mixers: dict[bool, Layer], types: list[str], router: Moe) -> SpecDraft:
    """The decoder with the mixer of each layer's type; its first layers, or those listed, without experts."""
    hidden, sparse = config.count("hidden_size"), sparse_layers(config, len(types))
    mlps = {True: expert_layer(config, router, hidden)}
    if not all(sparse):
        mlps[False] = dense_mlp(config, PLAIN, hidden, config.count("intermediate_size"))
    norms = norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden)
    layers: list[Layer] = []
    for kind, is_sparse in zip(types, sparse, strict=True):
        weights, caches = mixers[kind == "full_attention"]
        layers.append((weights + norms + mlps[is_sparse], caches))
    tied, vocab = config.flag("tie_word_embeddings"), config.count("vocab_size")
    result = draft(config, layers, list(outer_weights(config, PLAIN, vocab, hidden, tied)), heads=None, tied=tied)
    result.num_heads = config.count("num_attention_heads")
    return result


def read_alice(config: Config, model_type: str) -> SpecDraft:
    """Alice AI: Kimi K3's delta net with low-rank gates, Qwen3-Next's gated attention, attention over residuals."""
    hidden, own = config.count("hidden_size"), heads_of(config)
    heads, head_dim = config.count("linear_num_key_heads"), config.count("linear_key_head_dim")
    width, kernel = Part(heads, head_dim), config.count("linear_conv_kernel_dim", default=4)
    (_, *others), state = gated_kimi_delta(hidden, heads, head_dim, kernel, bounded=False)
    delta = (
        column(
            "linear_attn.in_proj_qkvgfab", hidden, (width, width, width, replicated(head_dim), Part(heads)), "state"
        ),
        whole("linear_attn.g_a_proj", hidden, head_dim, "state"),
        column("linear_attn.g_b_proj", head_dim, (width,), "state"),
        *others,
    )
    full = attention(hidden, own, qkv_bias=config.flag("attention_bias"), gate=True) + qk_norms(own)
    mixers: dict[bool, Layer] = {False: (delta, (state,)), True: (full, (attention_cache(own, None),))}
    types = config.per_layer_names("layer_types", config.num_layers())
    if types is None:
        raise config.fail("layer_types", "missing", "kvplan cannot tell which layers attend")
    shared = "shared_expert_intermediate_size"
    router = Moe(shared=shared, shared_name="mlp.shared_expert", shared_gate=True, correction="counted")
    result = assembled(config, mixers, types, router)
    residuals = residual_attention("mlp", hidden), residual_attention("attn", hidden)
    result.layer_weights = [
        (*weights, *residuals[0], *(residuals[1] if i else ())) for i, weights in enumerate(result.layer_weights)
    ]
    result.other_weights += [replace(w, place=Place.LAST) for w in residual_attention("model.attnres_final", hidden)]
    return result


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {"bailing_hybrid": read, "alice_ai": read_alice}
