"""Encoders of sounds with a projector of their own.

Missing config keys take the default of the transformers class of the same model_type (5.23). Parts and sharding are
vLLM 0.33's parameters per rank (tests/facts/architectures.jsonl).
"""

from dataclasses import replace

from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import (
    PROJECTOR,
    block,
    depth_of,
    layer_norm,
    linear,
    text_hidden,
    whole_projector,
    with_defaults,
)
from kvplan.models.families.towers_audio import KERNEL, ears, thinker, whisper
from kvplan.models.families.towers_audio import NAME as AUDIO_TOWER
from kvplan.models.families.towers_llava import projector
from kvplan.models.spec import Part, Weight


def audio_flamingo(outer: Config) -> list[Weight]:
    """Audio Flamingo 3: Whisper's encoder and a projector, replicated on every rank."""
    config = outer.sub("audio_config")
    config = with_defaults(
        config,
        encoder_ffn_dim=config.count("intermediate_size", default=5120),
        encoder_attention_heads=config.count("num_attention_heads", default=20),
    )
    hidden, text = config.count("hidden_size", default=1280), text_hidden(outer)
    return [*whisper(config, split=False), *whole_projector(hidden, text, text)]


def glm_asr(outer: Config) -> list[Weight]:
    """GLM-ASR: Whisper's layers with rotary positions and a key bias; four frames joined."""
    config = outer.sub("audio_config")
    hidden, inner = config.count("hidden_size", default=1280), config.count("intermediate_size", default=5120)
    heads, layers = config.count("num_attention_heads", default=20), depth_of(config, "num_hidden_layers", default=32)
    bins, text = config.count("num_mel_bins", default=128), text_hidden(outer)
    first, second = projector(inner, 2 * text, bias=True)
    return [
        linear(f"{AUDIO_TOWER}.conv1", bins * KERNEL, hidden, bias=True),
        linear(f"{AUDIO_TOWER}.conv2", hidden * KERNEL, hidden, bias=True),
        *block(config, hidden, heads, inner) * layers,
        layer_norm(f"{AUDIO_TOWER}.norm", hidden),
        first,
        replace(second, inputs=2 * text, parts=(Part(text),)),
    ]


def qwen3_asr(outer: Config) -> list[Weight]:
    """Qwen3-ASR: Qwen3-Omni's ears alone."""
    return ears(with_defaults(thinker(outer).sub("audio_config"), output_dim=3584))


def moss_transcribe(outer: Config) -> list[Weight]:
    """MOSS-Transcribe: Whisper's encoder, neighboring frames joined, two layers and a norm."""
    config, text = outer.sub("audio_config"), text_hidden(outer)
    inputs = config.count("d_model", default=1024) * outer.count("audio_merge_size", default=4)
    return [
        *whisper(config, split=True),
        *whole_projector(outer.count("adaptor_input_dim", default=inputs), text, text),
        layer_norm(f"{PROJECTOR}.norm", text),
    ]
