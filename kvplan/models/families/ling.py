"""Ling 3 (Bailing V3): layers of Kimi delta attention, each fifth of latent attention.

Source: vLLM 0.33 bailing_moe_v3.py; compared with its parameters (tests/facts/architectures.jsonl).
"""

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families import rope
from kvplan.models.families.blocks import SpecDraft, column, norm
from kvplan.models.families.config import Config
from kvplan.models.families.dense import dense_mlp, outer_weights
from kvplan.models.families.hybrid import Layer, draft
from kvplan.models.families.mla import PLAIN, latent_attention, latent_caches
from kvplan.models.families.moe import Moe, expert_layer, sparse_layers
from kvplan.models.families.renamed import first_dense, reworded
from kvplan.models.families.state import Mixer, kimi_delta
from kvplan.models.spec import Part

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
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
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
    mlps = {True: expert_layer(config, router, hidden)}
    mlps[False] = dense_mlp(config, PLAIN, hidden, config.count("intermediate_size"))
    norms = norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden)
    layers: list[Layer] = []
    for kind, is_sparse in zip(types, sparse_layers(config, num_layers), strict=True):
        weights, caches = mixers[kind == "full_attention"]
        layers.append((weights + norms + mlps[is_sparse], caches))
    tied = config.flag("tie_word_embeddings")
    result = draft(config, layers, list(outer_weights(config, PLAIN, vocab, hidden, tied)), heads=None, tied=tied)
    result.num_heads = config.count("num_attention_heads")
    result.ropes = rope.tables(config, config.count("qk_rope_head_dim"), result.context.positions)
    return result


READERS = {"bailing_hybrid": read}
