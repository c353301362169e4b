"""The towers of Gemma 3n and Gemma 4: replicated on every rank, except for Gemma 3n's embedders.

Sources: the transformers classes gemma3n and gemma4 (5.23) for shapes and defaults; vLLM 0.33's parameters for
gemma-3n-E4B-it, gemma-4-E4B-it, 26B-A4B and 31B-it (at TP 2 too) for replication; its gemma3n_mm.py for the
embedders.
"""

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable
from kvplan.models.families.blocks import VOCAB_PAD
from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import check_heads, column, depth_of, linear, row, text_hidden, vector
from kvplan.models.spec import Part, Weight

MOBILENET = "mobilenetv5_300m_enc"


def inverted(inputs: int, middle: int, outputs: int, start: int = 0, mid: int = 0) -> list[Weight]:
    """MobileNet's inverted bottleneck: up, down, and depthwise kernels of side `start` and `mid` (0: none)."""
    return [
        *([linear("dw_start", start**2, inputs), vector("dw_start.bn", inputs)] if start else []),
        linear("pw_exp", inputs, middle),
        vector("pw_exp.bn", middle),
        *([linear("dw_mid", mid**2, middle), vector("dw_mid.bn", middle)] if mid else []),
        linear("pw_proj", middle, outputs),
        vector("pw_proj.bn", outputs),
        vector("layer_scale", outputs),
    ]


def edge(inputs: int, middle: int, outputs: int) -> list[Weight]:
    """A 3 x 3 up convolution and a 1 x 1 down convolution."""
    return [
        linear("conv_exp", 9 * inputs, middle),
        vector("bn1", middle),
        linear("conv_pwl", middle, outputs),
        vector("bn2", outputs),
    ]


def multi_query(width: int, heads: int, head_dim: int, *, downscaled: bool) -> list[Weight]:
    """Attention with one key and value head; `downscaled` ones first shrink the grid with a 3 x 3 depthwise kernel."""
    down = [linear("down_conv", 9, width), vector("down_norm", width)] if downscaled else []
    return [
        vector("norm", width),
        linear("query", width, heads * head_dim),
        *([*down, linear("key_or_value", width, head_dim)] * 2),
        linear("output", heads * head_dim, width),
        vector("layer_scale", width),
    ]


def mobilenet_v5() -> list[Weight]:
    """timm's mobilenetv5_300m_enc: 294,126,912 parameters in four stages, independent of config keys."""
    return [
        linear("conv_stem", 27, 64, bias=True),
        vector("conv_stem.bn", 64),
        *edge(64, 256, 128),
        *edge(128, 512, 128) * 2,
        *inverted(128, 768, 256, start=3, mid=5),
        *(inverted(256, 1024, 256, start=5) + inverted(256, 1024, 256, start=3)) * 2,
        *inverted(256, 1536, 640, start=5, mid=5),
        *inverted(640, 2560, 640, start=5) * 7,
        *inverted(640, 640, 640),
        *(multi_query(640, 12, 64, downscaled=True) + inverted(640, 1280, 640)) * 14,
        *inverted(640, 3840, 1280, start=5, mid=5),
        *(multi_query(1280, 16, 96, downscaled=False) + inverted(1280, 2560, 1280)) * 19,
        linear("msfa.pw_exp", 640 + 1280, 3840),  # fused from the last two stages
        vector("msfa.pw_exp.bn", 3840),
        linear("msfa.pw_proj", 3840, 2048),
        vector("msfa.pw_proj.bn", 2048),
        vector("msfa.norm", 2048),
    ]


def conv_subsampling(channels: tuple[int, int], mels: int, hidden: int) -> list[Weight]:
    """Two 3 x 3 convolutions of stride 2 over a mel spectrogram, and a projection of the result."""
    first, second = channels
    return [
        linear("audio_tower.subsample.conv_0", 9, first),
        vector("audio_tower.subsample.norm_0", first),
        linear("audio_tower.subsample.conv_1", 9 * first, second),
        vector("audio_tower.subsample.norm_1", second),
        linear("audio_tower.subsample.input_proj_linear", second * (mels // 4), hidden),
    ]


def conformer(hidden: int, heads: int, kernel: int) -> tuple[Weight, ...]:
    """One conformer layer: half an MLP, attention with relative positions, a light convolution, half an MLP."""
    name = "audio_tower.layers"
    half_mlp = (
        vector(f"{name}.ffw.pre_layer_norm", hidden),
        linear(f"{name}.ffw.ffw_layer_1", hidden, 4 * hidden),
        linear(f"{name}.ffw.ffw_layer_2", 4 * hidden, hidden),
        vector(f"{name}.ffw.post_layer_norm", hidden),
    )
    return (
        *half_mlp * 2,
        linear(f"{name}.attn.qkv", hidden, (Part(hidden), Part(hidden), Part(hidden))),
        linear(f"{name}.attn.relative_k_proj", hidden, hidden),
        linear(f"{name}.attn.post", hidden, hidden),
        vector(f"{name}.attn.per_dim_scale", hidden // heads),
        vector(f"{name}.norm_pre_attn", hidden),
        vector(f"{name}.norm_post_attn", hidden),
        vector(f"{name}.lconv1d.pre_layer_norm", hidden),
        linear(f"{name}.lconv1d.linear_start", hidden, 2 * hidden),
        linear(f"{name}.lconv1d.depthwise_conv1d", kernel, hidden),
        vector(f"{name}.lconv1d.conv_norm", hidden),
        linear(f"{name}.lconv1d.linear_end", hidden, hidden),
        vector(f"{name}.norm_out", hidden),
    )


def channel_pair(config: Config, key: str) -> tuple[int, int]:
    pair = config.ints(key)
    if pair is None:
        return 128, 32
    if len(pair) != 2:
        raise config.fail(key, f"must name two channel counts ({len(pair)})", "correct the config")
    return pair[0], pair[1]


def gemma3n(outer: Config) -> list[Weight]:
    vision, audio = outer.sub("vision_config"), outer.sub("audio_config")
    named = vision.text("architecture", MOBILENET)
    if named != MOBILENET:
        raise UnsupportedModelError(
            vision.where,
            f"architecture {printable(repr(named), 60)} is not a tower kvplan can size (it knows {MOBILENET})",
            "use --text-only to size the language model alone",
        )
    text = text_hidden(outer, 2048)
    weights: list[Weight] = []
    if "vision_config" in outer:
        weights += [*mobilenet_v5(), *embedder("embed_vision", vision, 2048, text)]
    if "audio_config" in outer:
        hidden = audio.count("hidden_size", default=1536)
        heads = check_heads(audio, hidden, audio.count("conf_num_attention_heads", default=8))
        layer = conformer(hidden, heads, audio.count("conf_conv_kernel_size", default=5))
        mels = audio.count("input_feat_size", default=128)
        weights += conv_subsampling(channel_pair(audio, "sscp_conv_channel_size"), mels, hidden)
        weights += layer * depth_of(audio, "conf_num_hidden_layers", default=12)
        weights += embedder("embed_audio", audio, 1536, text)
    return weights


def embedder(name: str, config: Config, hidden_default: int, text: int) -> list[Weight]:
    """Gemma 3n's bridge to the language model: a small vocabulary of its own and a projection, both sharded."""
    hidden, rows = config.count("hidden_size", default=hidden_default), config.count("vocab_size", default=128)
    return [
        Weight(f"{name}.embedding", "vision_audio", hidden, (Part(rows),), "outputs", pad_rows=VOCAB_PAD),
        vector(f"{name}.hard_embedding_norm", hidden),
        vector(f"{name}.soft_embedding_norm", hidden),
        row(f"{name}.embedding_projection", hidden, text, bias=False),
    ]


def gemma4(outer: Config) -> list[Weight]:
    text = text_hidden(outer, 2304)
    weights: list[Weight] = []
    if "vision_config" in outer:
        weights += gemma4_vision(outer.sub("vision_config"), text)
    if "audio_config" in outer:
        weights += gemma4_audio(outer.sub("audio_config"), text)
    return weights


def gemma4_unified(outer: Config) -> list[Weight]:
    """Gemma 4 without a tower: large patches between norms, a position table per axis."""
    config = outer.sub("vision_config")
    if "audio_config" in outer:
        raise UnsupportedModelError(outer.where, "audio_config: Gemma 4 Unified's ears are not modeled")
    side = config.count("patch_size", default=16) * config.count("pooling_kernel_size", default=3)
    hidden, pixels = config.count("mm_embed_dim", default=3840), 3 * side**2
    return [
        linear("vision_embedder.pos_embedding", 2 * hidden, config.count("mm_posemb_size", default=1120)),
        vector("vision_embedder.patch_ln1", pixels, bias=True),
        column("vision_embedder.patch_dense", pixels, hidden),
        *(vector(f"vision_embedder.{name}", hidden, bias=True) for name in ("patch_ln2", "pos_norm")),
        linear("embed_vision.embedding_projection", hidden, text_hidden(outer)),
    ]


def gemma4_vision(config: Config, text: int) -> list[Weight]:
    """Patches with a position table per axis; sandwich norms, query and key norms, a gated MLP."""
    hidden, inner = config.count("hidden_size", default=768), config.count("intermediate_size", default=3072)
    heads, head_dim = config.count("num_attention_heads", default=12), config.count("head_dim", default=64)
    kv_heads, patch = config.count("num_key_value_heads", default=12), config.count("patch_size", default=16)
    bias = config.flag("attention_bias")
    name = "vision_tower.layers"
    qkv = (Part(heads, head_dim), Part(kv_heads, head_dim), Part(kv_heads, head_dim))
    layer = (
        linear(f"{name}.self_attn.qkv_proj", hidden, qkv, bias=bias),
        linear(f"{name}.self_attn.o_proj", heads * head_dim, hidden, bias=bias),
        vector(f"{name}.self_attn.q_norm", head_dim),
        vector(f"{name}.self_attn.k_norm", head_dim),
        linear(f"{name}.mlp.gate_up_proj", hidden, (Part(inner), Part(inner))),
        linear(f"{name}.mlp.down_proj", inner, hidden),
        *(
            vector(f"{name}.{norm}", hidden)
            for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        ),
    )
    return [
        linear("vision_tower.patch_embedder.input_proj", 3 * patch**2, hidden),
        linear(
            "vision_tower.patch_embedder.position_embedding_table", hidden,
            2 * config.count("position_embedding_size", default=10240),
        ),
        *layer * depth_of(config, "num_hidden_layers", default=16),
        linear("embed_vision.embedding_projection", hidden, text),
    ]  # fmt: skip


def gemma4_audio(config: Config, text: int) -> list[Weight]:
    hidden, out = config.count("hidden_size", default=1024), config.count("output_proj_dims", default=1536)
    heads = check_heads(config, hidden, config.count("num_attention_heads", default=8))
    mels = 128  # fixed in the class
    return [
        *conv_subsampling(channel_pair(config, "subsampling_conv_channels"), mels, hidden),
        *conformer(hidden, heads, config.count("conv_kernel_size", default=5))
        * depth_of(config, "num_hidden_layers", default=12),
        linear("audio_tower.output_proj", hidden, out, bias=True),
        linear("embed_audio.embedding_projection", out, text),
    ]
