"""Models from architecture search: every layer has its own attention and feed-forward part, or none."""

from typing import Any

from kvplan.models.families import rope
from kvplan.models.families.blocks import Heads, SpecDraft, attention, gated_mlp, norm
from kvplan.models.families.config import Config
from kvplan.models.families.dense import attention_cache, outer_weights
from kvplan.models.families.mla import PLAIN
from kvplan.models.spec import LayerCache, Weight


def ffn_width(config: Config, ffn: Config, hidden: int) -> int:
    """Two thirds of `ffn_mult x hidden`, doubled and rounded up to 256 (DeciLM's rule)."""
    if "intermediate_size" in ffn:
        return ffn.count("intermediate_size")
    inner = int(2 * ffn.ratio("ffn_mult", 0) * hidden / 3)
    return -(-inner // 256) * 256


def block(config: Config, index: int, entry: Any) -> tuple[Config, Config]:
    if not isinstance(entry, dict):
        raise config.fail(f"block_configs[{index}]", "must be an object", "correct the config")
    block_config = Config(entry, f"{config.where}: block_configs[{index}]", config.notes)
    return block_config.sub("attention"), block_config.sub("ffn")


def read(config: Config, model_type: str) -> SpecDraft:
    """Nemotron (DeciLM): `block_configs` defines the parts of each layer."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    num_heads = config.count("num_attention_heads")
    if hidden % num_heads:
        raise config.fail("hidden_size", f"is not divisible by num_attention_heads ({hidden} / {num_heads})")
    dim = config.maybe_count("head_dim") or hidden // num_heads
    bias, blocks = config.flag("attention_bias"), config.items("block_configs")
    if blocks is None or len(blocks) != num_layers:
        raise config.fail("block_configs", f"must have one entry for each of the {num_layers} layers")
    layers: list[tuple[LayerCache, ...]] = []
    weights: list[tuple[Weight, ...]] = []
    widest = 0
    for index, entry in enumerate(blocks):
        attn, ffn = block(config, index, entry)
        for part, name in ((attn, "attention"), (ffn, "ffn")):
            if part.flag("replace_with_linear"):
                raise config.fail(f"block_configs[{index}].{name}", "is replaced with a linear layer", "not modeled")
        tensors: tuple[Weight, ...] = ()
        caches: tuple[LayerCache, ...] = ()
        if not attn.flag("no_op"):
            per_group = attn.count("n_heads_in_group")
            if num_heads % per_group:
                raise attn.fail("n_heads_in_group", f"does not divide the {num_heads} heads ({per_group})")
            heads = Heads(num_heads, num_heads // per_group, dim, dim)
            tensors += (*attention(hidden, heads, qkv_bias=bias, o_bias=bias), norm("input_layernorm", hidden))
            caches = (attention_cache(heads, None),)
        if not ffn.flag("no_op"):
            inner = ffn_width(config, ffn, hidden)
            widest = max(widest, inner)
            tensors += (
                *gated_mlp(hidden, inner, bias=config.flag("mlp_bias")),
                norm("post_attention_layernorm", hidden),
            )
        layers.append(caches)
        weights.append(tensors)
    context = rope.context_of(config)
    tied = config.flag("tie_word_embeddings")
    return SpecDraft(
        hidden_size=hidden, num_heads=num_heads, vocab_size=vocab, context=context,
        layers=layers, layer_weights=weights,
        other_weights=list(outer_weights(config, PLAIN, vocab, hidden, tied)),
        ropes=rope.tables(config, dim, context.positions), tied=tied, widest_mlp=widest,
    )  # fmt: skip


READERS = {"nemotron-nas": read, "deci": read}
