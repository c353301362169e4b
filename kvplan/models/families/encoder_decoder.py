"""Whisper: an audio encoder, and a decoder whose layers attend to it; Nemotron Parse, likewise of a page.

Names, sharding and the biases that a server adds to keys (the checkpoint has none there) are from vLLM 0.33's
parameters for whisper-large-v3; parameter counts from the transformers class.
"""

from collections.abc import Callable
from dataclasses import replace

from kvplan.models.families import towers_radio
from kvplan.models.families.blocks import SpecDraft, embedding, vector
from kvplan.models.families.config import MAX_LAYERS, Config
from kvplan.models.families.rope import Context
from kvplan.models.families.tower_blocks import check_heads
from kvplan.models.spec import CrossAttention, FullAttention, Group, LayerCache, Part, Place, Weight

KERNEL = 3  # of the encoder's first two convolutions


def attention(name: str, hidden: int, heads: Part, group: Group, *, crossing: bool = False) -> tuple[Weight, ...]:
    """Four projections, with separate queries if keys and values come from the encoder."""
    fused = ((heads,), (heads, heads)) if crossing else ((heads, heads, heads),)
    names = ("q_proj", "kv_proj") if crossing else ("qkv_proj",)
    sources = ((f"{name}.q_proj",), (f"{name}.k_proj", f"{name}.v_proj")) if crossing else (separate(name),)
    projections = tuple(
        Weight(f"{name}.{item}", group, hidden, parts, "outputs", quantizable=True, sources=source)
        for item, parts, source in zip(names, fused, sources, strict=True)
    )
    return (
        *projections,
        vector(f"{name}.q_proj.bias", hidden, group, split=True),
        vector(f"{name}.v_proj.bias", hidden, group, split=True),
        replace(vector(f"{name}.k_proj.bias", hidden, group, split=True), counted=False),
        Weight(f"{name}.out_proj", group, hidden, (Part(hidden),), "inputs", True, quantizable=True),
    )


def separate(name: str) -> tuple[str, ...]:
    return tuple(f"{name}.{x}_proj" for x in "qkv")


def mlp(hidden: int, inner: int, group: Group) -> tuple[Weight, ...]:
    return (
        Weight("fc1", group, hidden, (Part(inner),), "outputs", True, quantizable=True),
        Weight("fc2", group, inner, (Part(hidden),), "inputs", True, quantizable=True),
    )


def layer_norm(name: str, hidden: int, group: Group = "norm") -> Weight:
    return Weight(name, group, 1, (Part(hidden),), bias=True)


def encoder(config: Config, hidden: int) -> list[Weight]:
    """Two convolutions over the mel bins, sinusoidal positions, and layers like a vision tower's."""
    heads = config.count("encoder_attention_heads")
    head = Part(check_heads(config, hidden, heads), hidden // heads)
    layers = config.count("encoder_layers", high=MAX_LAYERS)
    bins, rows = config.count("num_mel_bins", default=80), config.count("max_source_positions", default=1500)
    layer = (
        *attention("self_attn", hidden, head, "vision_audio"),
        *mlp(hidden, config.count("encoder_ffn_dim"), "vision_audio"),
        layer_norm("self_attn_layer_norm", hidden, "vision_audio"),
        layer_norm("final_layer_norm", hidden, "vision_audio"),
    )
    return [
        Weight("model.encoder.conv1", "vision_audio", bins * KERNEL, (Part(hidden),), bias=True),
        Weight("model.encoder.conv2", "vision_audio", hidden * KERNEL, (Part(hidden),), bias=True),
        Weight("model.encoder.embed_positions", "vision_audio", hidden, (Part(rows),)),
        *layer * layers,
        layer_norm("model.encoder.layer_norm", hidden, "vision_audio"),
    ]


def read_whisper(config: Config, model_type: str) -> SpecDraft:
    """Whisper: every decoder layer caches K and V of its own tokens and of the encoder's."""
    hidden, vocab = config.count("d_model"), config.count("vocab_size")
    heads, num_layers = config.count("decoder_attention_heads"), config.count("decoder_layers", high=MAX_LAYERS)
    inner, positions = config.count("decoder_ffn_dim"), config.count("max_target_positions", default=448)
    head = Part(check_heads(config, hidden, heads), hidden // heads)
    layer = (
        *attention("self_attn", hidden, head, "attention"),
        *attention("encoder_attn", hidden, head, "attention", crossing=True),
        *mlp(hidden, inner, "mlp"),
        *(layer_norm(name, hidden) for name in ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")),
    )
    geometry = heads, head.width, head.width
    caches: tuple[LayerCache, ...] = FullAttention(*geometry), CrossAttention(*geometry)
    return SpecDraft(
        hidden_size=hidden,
        num_heads=heads,
        vocab_size=vocab,
        context=Context.of(positions),
        layers=[caches] * num_layers,
        layer_weights=[layer] * num_layers,
        other_weights=[
            Weight("model.decoder.embed_tokens", "embedding", hidden, (Part(vocab),), place=Place.FIRST_AND_LAST),
            Weight("model.decoder.embed_positions", "embedding", hidden, (Part(positions),)),
            replace(layer_norm("model.decoder.layer_norm", hidden), place=Place.LAST),
            *encoder(config, hidden),
        ],
        tied=True,
        widest_mlp=inner,
        multimodal=True,
    )


def read_nemotron_parse(outer: Config, model_type: str) -> SpecDraft:
    """Nemotron Parse: RADIO and convolutions that shorten its rows, then mBART's decoder without positions."""
    config = outer.sub("decoder")
    hidden, vocab = config.count("d_model"), outer.count("vocab_size", default=config.count("vocab_size"))
    heads, num_layers = config.count("decoder_attention_heads"), config.count("decoder_layers", high=MAX_LAYERS)
    inner, head = config.count("decoder_ffn_dim"), Part(check_heads(config, hidden, heads), hidden // heads)
    layer = (
        *attention("self_attn", hidden, head, "attention"),
        *attention("encoder_attn", hidden, head, "attention", crossing=True),
        *mlp(hidden, inner, "mlp"),
        *(layer_norm(name, hidden) for name in ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")),
    )
    geometry = heads, head.width, head.width
    caches: tuple[LayerCache, ...] = FullAttention(*geometry), CrossAttention(*geometry)
    positions = outer.count("max_sequence_length", default=config.count("max_position_embeddings", default=1024))
    return SpecDraft(
        hidden_size=hidden, num_heads=heads, vocab_size=vocab, context=Context.of(positions),
        layers=[caches] * num_layers,
        layer_weights=[tuple(replace(weight, counted=True) for weight in layer)] * num_layers,
        other_weights=[
            *embedding(vocab, hidden, False, name="decoder.embed_tokens"),
            layer_norm("decoder.layernorm_embedding", hidden),
            layer_norm("decoder.layer_norm", hidden),
            *towers_radio.parsed(outer.sub("encoder")),
        ],
        widest_mlp=inner, multimodal=True,
    )  # fmt: skip


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {
    "whisper": read_whisper,
    "nemotron_parse": read_nemotron_parse,
}
