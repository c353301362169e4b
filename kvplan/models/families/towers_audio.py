"""Audio towers: Whisper's encoder in a language model (Qwen2-Audio, Voxtral), and those of Qwen-Omni.

Missing config keys take the default of the transformers class of the same model_type (5.23). Sharding is from vLLM
0.33's parameters per rank (tests/facts/tower_weights.jsonl).
"""

from dataclasses import replace

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families import towers_vision
from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import (
    check_heads,
    column,
    depth_of,
    layer_norm,
    linear,
    linears,
    row,
    text_hidden,
    vector,
    with_defaults,
)
from kvplan.models.spec import Part, Weight

KERNEL = 3  # of an encoder's first convolutions
NAME = "audio_tower"


def layers_of(config: Config, hidden: int, *, split: bool, key_bias: bool = False) -> list[Weight]:
    """Whisper's layers. vLLM adds a key bias to its own ones, which no checkpoint has."""
    inner = config.count("encoder_ffn_dim", default=5120)
    heads = config.count("encoder_attention_heads", default=20)
    head = Part(check_heads(config, hidden, heads), hidden // heads)
    name = f"{NAME}.layers"
    layer: tuple[Weight, ...]
    keys = replace(vector(f"{name}.k_proj.bias", hidden), counted=key_bias)
    if split:
        attention = (
            linear(f"{name}.qkv", hidden, (head, head, head), "outputs"),
            *(
                linear(f"{name}.{part}_proj.bias", 1, (head,), "outputs")
                for part in "qv"
            ),
            linear(f"{name}.k_proj.bias", 1, (head,), "outputs") if key_bias
            else replace(linear(f"{name}.k_proj.bias", 1, (head,), "outputs"), counted=False),
            row(f"{name}.out_proj", hidden, hidden),
        )  # fmt: skip
        mlp = column(f"{name}.fc1", hidden, inner), row(f"{name}.fc2", inner, hidden)
    else:
        attention = (
            linear(f"{name}.qkv", hidden, 3 * hidden),
            vector(f"{name}.q_proj.bias", hidden),
            vector(f"{name}.v_proj.bias", hidden),
            *((keys,) if key_bias else ()),
            linear(f"{name}.out_proj", hidden, hidden, bias=True),
        )
        mlp = linear(f"{name}.fc1", hidden, inner, bias=True), linear(f"{name}.fc2", inner, hidden, bias=True)
    layer = (*attention, *mlp, layer_norm(f"{name}.norm1", hidden), layer_norm(f"{name}.norm2", hidden))
    return [*layer * depth_of(config, "encoder_layers", "num_hidden_layers", default=32)]


def whisper(config: Config, *, split: bool) -> list[Weight]:
    """Two convolutions over the mel bins, a position table, layers and a norm."""
    hidden = config.count("d_model", "hidden_size", default=1280)
    bins, rows = config.count("num_mel_bins", default=128), config.count("max_source_positions", default=1500)
    return [
        *linears(f"{NAME}.conv", (bins * KERNEL, hidden), (hidden * KERNEL, hidden), bias=True),
        linear(f"{NAME}.embed_positions", hidden, rows),
        *layers_of(config, hidden, split=split),
        layer_norm(f"{NAME}.layer_norm", hidden),
    ]


def qwen2_audio(outer: Config) -> list[Weight]:
    """Qwen2-Audio: the encoder is replicated on every rank, like its projection."""
    config = outer.sub("audio_config")
    hidden = config.count("d_model", default=1280)
    return [
        *whisper(config, split=False),
        linear(f"{NAME}.multi_modal_projector", hidden, text_hidden(outer, 4096), bias=True),
    ]


def voxtral(outer: Config) -> list[Weight]:
    """Voxtral: four concatenated frames go through two layers without biases."""
    config = outer.sub("audio_config")
    if config.flag("is_causal"):
        raise UnsupportedModelError(config.where, "is_causal: Voxtral Realtime's encoder keeps a cache of its own")
    inner, text = config.count("intermediate_size", "encoder_ffn_dim", default=5120), text_hidden(outer, 4096)
    joined = config.count("d_model", "hidden_size", default=1280) * config.count("downsample_factor", default=4)
    heads = config.count("num_attention_heads", "encoder_attention_heads", default=20)
    shaped = with_defaults(config, encoder_ffn_dim=inner, encoder_attention_heads=heads)
    positions = f"{NAME}.embed_positions"  # in float32, whatever the model's dtype (vLLM 0.33 voxtral.py)
    return [
        *(replace(w, dtype="float32") if w.name == positions else w for w in whisper(shaped, split=True)),
        *linears(f"{NAME}.multi_modal_projector", (joined, text), (text, text)),
    ]


def thinker(outer: Config) -> Config:
    return outer.sub("thinker_config") if "thinker_config" in outer else outer


def qwen2_5_omni(outer: Config) -> list[Weight]:
    """Qwen2.5-Omni's thinker: Qwen2.5-VL's tower, and an audio encoder that is replicated on every rank."""
    config = thinker(outer)
    audio = config.sub("audio_config")
    hidden, out = audio.count("d_model", default=1280), audio.count("output_dim", default=3584)
    bins = audio.count("num_mel_bins", default=128)
    return [
        *towers_vision.qwen2_5_vl(config),
        *linears(f"{NAME}.conv", (bins * KERNEL, hidden), (hidden * KERNEL, hidden), bias=True),
        linear(f"{NAME}.audio_bos_eos_token", out, 2),
        *layers_of(audio, hidden, split=False),
        layer_norm(f"{NAME}.ln_post", hidden),
        linear(f"{NAME}.proj", hidden, out, bias=True),
    ]


def qwen3_omni_moe(outer: Config) -> list[Weight]:
    """Qwen3-Omni's thinker: Qwen3-VL's tower, and ears."""
    config = thinker(outer)
    return [*towers_vision.qwen3_vl(config), *ears(config.sub("audio_config"))]


def ears(audio: Config) -> list[Weight]:
    """Three convolutions before Whisper's layers with a key bias, and a projector."""
    hidden, out = audio.count("d_model", default=1280), audio.count("output_dim", default=2048)
    bins, wide = audio.count("num_mel_bins", default=128), audio.count("downsample_hidden_size", default=480)
    area = KERNEL**2
    bins_left = bins
    for _ in range(3):
        bins_left = (bins_left + 1) // 2
    return [
        *linears(f"{NAME}.conv2d", (area, wide), (wide * area, wide), (wide * area, wide), bias=True),
        linear(f"{NAME}.conv_out", wide * bins_left, hidden),
        *layers_of(audio, hidden, split=True, key_bias=True),
        layer_norm(f"{NAME}.ln_post", hidden),
        *linears(f"{NAME}.proj", (hidden, hidden), (hidden, out), bias=True),
    ]
