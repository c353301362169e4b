"""GLM-5.3-Flash: Kimi delta attention, with sparse MLA in every fourth layer, whose index keys are pooled."""

from dataclasses import replace

from kvplan.models.families.blocks import SpecDraft, norm, whole
from kvplan.models.families.config import Config
from kvplan.models.families.deepseek_v4 import full_precision, hyper_connections
from kvplan.models.families.dense import dense_mlp, outer_weights
from kvplan.models.families.hybrid import draft
from kvplan.models.families.mla import DEEPSEEK, PLAIN, indexer, latent_attention
from kvplan.models.families.moe import expert_layer, sparse_layers
from kvplan.models.families.state import fused_kimi_delta
from kvplan.models.spec import LatentAttention, LayerCache, SparseIndexer, Weight

STATE_KEYS = {
    "num_heads": "linear_num_heads", "head_dim": "linear_head_dim", "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}  # fmt: skip


def pooled_indexer(config: Config, hidden: int) -> tuple[Weight, ...]:
    """DeepSeek's indexer, and the weights that pool `index_kpool` keys into one: position biases and a gate."""
    dim, pool = config.count("index_head_dim"), config.count("index_kpool", low=2)
    return (
        *indexer(config, hidden),
        full_precision("self_attn.indexer.index_kpool_compress_ape", pool, dim, "attention"),
        whole(
            "self_attn.indexer.index_kpool_compress_gate", hidden, dim, "attention", quantizable=False,
            dtype="bfloat16",
        ),
    )  # fmt: skip


def stored_wide(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Weights that stay in 16 bits in quantized checkpoints (vLLM 0.33 models/glm5next)."""
    return tuple(replace(weight, quantizable=False) for weight in weights)


def read(config: Config, model_type: str) -> SpecDraft:
    """GLM-5.3-Flash; without `index_topk` its MLA is not sparse."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    heads, kv_heads = config.count("num_attention_heads"), config.maybe_count("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise config.fail(
            "num_key_value_heads", f"must be the {heads} attention heads ({kv_heads})", "correct the config"
        )
    nested = config.sub("linear_attn_config")
    keys = {key: config.values.get(flat) for key, flat in STATE_KEYS.items()}
    linear = Config({**keys, **nested.values}, nested.where, config.notes)
    delta, state = fused_kimi_delta(
        hidden, linear.count("num_heads"), linear.count("head_dim"), linear.count("short_conv_kernel_size"),
        bounded=linear.values.get("gate_lower_bound") is not None,
    )  # fmt: skip
    pooled = config.maybe_count("index_topk") is not None
    latent: tuple[LayerCache, ...] = (
        LatentAttention(config.count("kv_lora_rank"), config.count("qk_rope_head_dim", low=0), pooled),
    )
    full = latent_attention(config, hidden)
    if pooled:
        latent += (SparseIndexer(config.count("index_head_dim"), config.count("index_kpool", low=2)),)
        full += pooled_indexer(config, hidden)
    types = config.per_layer_names("layer_types", num_layers)
    if types is None:
        raise config.fail("layer_types", "missing", "kvplan cannot tell which layers are attention")
    mixers = {True: (stored_wide(delta), (state,)), False: (stored_wide(full), latent)}
    streams = hyper_connections(hidden, config.count("hc_mult")) if config.flag("mhc", True) else ()
    base = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden), *streams)
    sparse = sparse_layers(config, num_layers)
    feed_forward = {
        True: expert_layer(config, replace(DEEPSEEK, correction="buffer"), hidden) if any(sparse) else (),
        False: () if all(sparse) else dense_mlp(config, PLAIN, hidden, config.count("intermediate_size")),
    }
    layers = []
    for kind, is_sparse in zip(types, sparse, strict=True):
        weights, caches = mixers[kind == "linear_attention"]
        layers.append((weights + base + feed_forward[is_sparse], caches))
    tied = config.flag("tie_word_embeddings")
    result = draft(config, layers, list(outer_weights(config, PLAIN, vocab, hidden, tied)), heads=None, tied=tied)
    result.num_heads = heads
    return result


READERS = {"glm5_next": read, "glm5_next_text": read}
