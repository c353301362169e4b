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
    linears,
    row,
    text_hidden,
    whole_projector,
    with_defaults,
)
from kvplan.models.families.towers_audio import KERNEL, ears, thinker, whisper
from kvplan.models.families.towers_audio import NAME as AUDIO_TOWER
from kvplan.models.families.towers_llava import projector
from kvplan.models.spec import Part, Weight

WHISPER_LARGE_V3 = {
    "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "num_mel_bins": 128,
}  # fmt: skip


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
        *linears(f"{AUDIO_TOWER}.conv", (bins * KERNEL, hidden), (hidden * KERNEL, hidden), bias=True),
        *block(config, hidden, heads, inner) * layers,
        layer_norm(f"{AUDIO_TOWER}.norm", hidden),
        first,
        replace(second, inputs=2 * text, parts=(Part(text),)),
    ]


def qwen3_asr(outer: Config) -> list[Weight]:
    """Qwen3-ASR: Qwen3-Omni's ears alone."""
    return ears(with_defaults(thinker(outer).sub("audio_config"), output_dim=3584))


def moss_audio(outer: Config) -> list[Weight]:
    """MOSS-Audio: Qwen3-Omni's layers, and a gated projection for the last layer and for each chosen one."""
    config, text = outer.sub("audio_config"), text_hidden(outer)
    hidden, out = config.count("d_model", default=1280), config.count("output_dim", default=1280)
    inner, taps = outer.count("adapter_hidden_size", default=8192), config.ints("deepstack_encoder_layer_indexes") or []
    adapter = (
        linear("audio_adapter.gate_up_proj", out, (Part(inner), Part(inner)), "outputs"),
        row("audio_adapter.down_proj", inner, text, bias=False),
    )
    tower = [weight for weight in ears(config) if not weight.name.endswith("k_proj.bias")]
    return [
        *(replace(w, bias=True) if w.name.endswith("conv_out") else w for w in tower[:-3]),  # less norm and projector
        layer_norm(f"{AUDIO_TOWER}.layer_norm", hidden),
        linear(f"{AUDIO_TOWER}.out_proj", hidden, out),
        *adapter * (1 + outer.count("deepstack_num_inject_layers", default=len(taps), low=0)),
    ]


def funaudiochat(outer: Config) -> list[Weight]:
    """Fun-Audio-Chat: Whisper's layers with whole MLPs, and a table of sounds as words with two layers of its own."""
    config = outer.sub("audio_config")
    hidden, out = config.count("d_model", default=1280), config.count("output_dim", default=3584)
    inner, bins = config.count("encoder_ffn_dim", default=5120), config.count("num_mel_bins", default=128)
    qkv, attended, *_ = block(config, hidden, config.count("encoder_attention_heads", default=20), inner)
    layer = (
        qkv, attended,
        *linears(f"{AUDIO_TOWER}.layers", (hidden, inner), (inner, hidden), bias=True),
        *(layer_norm(f"{AUDIO_TOWER}.layers.norm", hidden),) * 2,
    )  # fmt: skip
    return [
        *linears(f"{AUDIO_TOWER}.conv", (bins * KERNEL, hidden), (hidden * KERNEL, hidden), bias=True),
        *layer * depth_of(config, "encoder_layers", default=32),
        layer_norm(f"{AUDIO_TOWER}.ln_post", hidden),
        linear(f"{AUDIO_TOWER}.proj", hidden, out, bias=True),
        linear(f"{AUDIO_TOWER}.audio_bos_eos_token", out, 2),
        linear("audio_tower.embed_tokens", out, config.count("codebook_size")),
        *linears("audio_tower.output_matching", (out, out), (out, out)),
    ]


def midashenglm(outer: Config) -> list[Weight]:
    """MiDashengLM: a ViT over patches of a spectrum, neighboring frames joined, two layers."""
    config, text = outer.sub("audio_encoder_config"), text_hidden(outer)
    hidden, patch = config.count("embed_dim", default=768), config.count("patch_size", default=16)
    bins, length = config.count("n_mels", default=64), config.count("target_length", default=1012)
    layer = block(config, hidden, config.count("num_heads", default=12), int(hidden * config.ratio("mlp_ratio", 4)))
    joined = hidden * outer.count("subsample_factor", default=5)
    return [
        linear("audio_encoder.time_pos_embed", hidden, length // patch),
        linear("audio_encoder.freq_pos_embed", hidden, bins // patch),
        layer_norm("audio_encoder.init_bn", bins),
        linear("audio_encoder.patch_embed", patch**2, hidden, bias=True),
        *layer * depth_of(config, "depth", default=12),
        layer_norm("audio_encoder.norm", hidden),
        *projector(joined, text, bias=True),
    ]


def joined_frames(config: Config, inputs: int, text: int) -> list[Weight]:
    """Whisper's encoder, neighboring frames joined, two layers and a norm."""
    return [*whisper(config, split=True), *whole_projector(inputs, text, text), layer_norm(f"{PROJECTOR}.norm", text)]


def moss_transcribe(outer: Config) -> list[Weight]:
    config = outer.sub("audio_config")
    inputs = config.count("d_model", default=1024) * outer.count("audio_merge_size", default=4)
    return joined_frames(config, outer.count("adaptor_input_dim", default=inputs), text_hidden(outer))


def kimi_audio(outer: Config) -> list[Weight]:
    """Kimi-Audio, whose encoder is that of Whisper large v3."""
    config = Config(WHISPER_LARGE_V3, outer.where, outer.notes)
    return joined_frames(config, outer.count("kimia_adaptor_input_dim", default=5120), outer.count("hidden_size"))
