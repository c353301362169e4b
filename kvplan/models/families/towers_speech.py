"""Encoders of sounds between a Conformer and a Q-Former (Granite Speech), and Whisper's in MiniCPM-o and Ultravox.

Source: vLLM 0.33 granite_speech.py, minicpmo.py and ultravox.py; compared with their parameters
(tests/facts/architectures.jsonl).
"""

from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import (
    PROJECTOR,
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
from kvplan.models.families.towers_audio import whisper
from kvplan.models.families.towers_llava import qformer
from kvplan.models.families.towers_navit import minicpmv, two_layers
from kvplan.models.spec import Weight

NAME = "audio_tower.layers"


def conformer(config: Config) -> list[Weight]:
    """Blocks of two feed-forwards, which alone are sharded, attention by relative positions and a convolution."""
    hidden, layers = config.count("hidden_dim", default=1024), depth_of(config, "num_layers", default=10)
    heads, width = config.count("num_heads", default=8), config.count("dim_head", default=128)
    inner, kernel = hidden * config.count("feedforward_mult", default=4), config.count("conv_kernel_size", default=15)
    wide, attended = hidden * config.count("conv_expansion_factor", default=2), heads * width
    out, bins = config.count("output_dim", default=42), config.count("input_dim", default=160)
    feed_forward = (
        layer_norm(f"{NAME}.ff.pre_norm", hidden),
        column(f"{NAME}.ff.up_proj", hidden, inner),
        row(f"{NAME}.ff.down_proj", inner, hidden),
    )
    layer = (
        *feed_forward * 2,
        *linears(f"{NAME}.attn", (hidden, attended), (hidden, 2 * attended)),
        *linears(f"{NAME}.attn.to_out", (attended, hidden), bias=True),
        linear(f"{NAME}.attn.rel_pos_emb", width, 2 * config.count("max_pos_emb", default=512) + 1),
        *linears(f"{NAME}.conv", (hidden, 2 * wide), (wide, hidden), bias=True),
        linear(f"{NAME}.conv.depth_conv", kernel, wide),
        layer_norm(f"{NAME}.conv.batch_norm", wide),
        *(layer_norm(f"{NAME}.norm", hidden),) * 3,
    )
    return [
        linear("audio_tower.input_linear", bins, hidden, bias=True),
        *layer * layers,
        column("audio_tower.out", hidden, out),
        row("audio_tower.out_mid", out, hidden),
    ]


def granite_speech(outer: Config) -> list[Weight]:
    """Granite Speech: a Conformer, and a Q-Former's queries for each window."""
    config = outer.sub("projector_config")
    width = config.count("hidden_size", default=768)
    queries = outer.count("window_size", default=15) // outer.count("downsample_rate", default=5)
    return [
        *conformer(outer.sub("encoder_config")),
        linear("projector.query", width, queries),
        *qformer(config, width),
        linear("projector.linear", width, text_hidden(outer), bias=True),
    ]


def ultravox(outer: Config) -> list[Weight]:
    """Ultravox: Whisper's encoder, frames joined, a gated layer between two norms."""
    config, text = outer.sub("audio_config"), text_hidden(outer)
    joined = config.count("d_model", default=384) * outer.count("stack_factor", default=8)
    middle = outer.count("hidden_size", default=4096)
    half = middle // 2 if outer.text("projector_act", "swiglu") == "swiglu" else middle
    normed = half if outer.flag("projector_ln_mid") else text
    return [
        *whisper(config, split=True),
        vector(f"{PROJECTOR}.ln_pre", joined),
        linear(f"{PROJECTOR}.linear_1", joined, middle),
        linear(f"{PROJECTOR}.linear_2", half, text),
        vector(f"{PROJECTOR}.ln", normed),
    ]


def minicpmo(outer: Config) -> list[Weight]:
    """MiniCPM-o 2.6: MiniCPM-V's tower and resampler, Whisper's encoder, whole on every rank, and two layers."""
    config, text = outer.sub("audio_config"), text_hidden(outer)
    hidden = config.count("d_model", default=1024)
    audio = with_defaults(config, d_model=1024, encoder_layers=24, encoder_attention_heads=16, encoder_ffn_dim=4096)
    eyes = minicpmv(outer) if outer.flag("init_vision", True) else []
    if not outer.flag("init_audio", True):
        return eyes
    return [*eyes, *whisper(audio, split=False), *two_layers("audio_tower.projection", hidden, text)]
