"""Towers of known parts with a projector of their own: SigLIP's, CLIP's, Qwen2.5-VL's and Whisper's.

Missing config keys take the default of the transformers class of the same model_type (5.23). Parts and sharding are
vLLM 0.33's parameters per rank (tests/facts/architectures.jsonl).
"""

from dataclasses import replace

from kvplan.models.families.blocks import table
from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import (
    block,
    check_heads,
    column,
    depth_of,
    layer_norm,
    linear,
    row,
    text_hidden,
    vector,
)
from kvplan.models.families.towers_audio import KERNEL, ears, thinker, whisper
from kvplan.models.families.towers_audio import NAME as AUDIO_TOWER
from kvplan.models.families.towers_llava import projector
from kvplan.models.families.towers_vision import (
    CLIP_LARGE_336_CONFIG,
    channels,
    clip,
    feature_depth,
    llava_tower,
    siglip,
    video_patch,
)
from kvplan.models.spec import Part, Weight

PROJECTOR = "multi_modal_projector"


def with_defaults(config: Config, **values: object) -> Config:
    stated = {key: value for key, value in config.values.items() if value is not None}
    return Config({**values, **stated}, config.where, config.notes)


def whole_projector(inputs: int, middle: int, out: int, *, bias: bool = True) -> tuple[Weight, ...]:
    """Two layers, replicated on every rank."""
    return (
        linear(f"{PROJECTOR}.linear_1", inputs, middle, bias=bias),
        linear(f"{PROJECTOR}.linear_2", middle, out, bias=bias),
    )


# --- Images -----------------------------------------------------------------------------------------------------


def deepseek_v41(outer: Config) -> list[Weight]:
    """DeepSeek-V4.1: a gated transformer, whole on every rank if its heads do not divide; neighboring patches joined,
    and two layers (vLLM 0.33 models/deepseek_v4/common/vision.py).
    """
    config, text = outer.sub("vision_config"), text_hidden(outer)
    hidden, inner = config.count("hidden_size", default=1024), config.count("intermediate_size", default=2816)
    heads, patch = config.count("num_attention_heads", default=16), config.count("patch_size", default=14)
    joined = hidden * config.count("downsample_ratio", default=3) ** 2
    layer = block(config, hidden, heads, inner, mlp_bias=False, norm_bias=False, gated=True)
    sharded = (*layer, column("aligner.w1", joined, text), row("aligner.w2", text, text))
    *layers, up, down = (replace(weight, even=heads) if weight.split != "none" else weight for weight in sharded)
    return [
        linear("vision.patch_embed.proj", 3 * patch**2, hidden, bias=True),
        *layers * depth_of(config, "num_hidden_layers", default=32),
        vector("vision.norm", hidden),
        up,
        down,
    ]


def paligemma(outer: Config) -> list[Weight]:
    """PaliGemma: SigLIP and one linear layer."""
    config = outer.sub("vision_config")
    out = config.count("projection_dim", default=outer.count("projection_dim", default=2048))
    return [*siglip(config), linear(f"{PROJECTOR}.linear", config.count("hidden_size", default=768), out, bias=True)]


def idefics3(outer: Config) -> list[Weight]:
    """Idefics 3 and SmolVLM: neighboring patches joined, then one linear layer."""
    config = with_defaults(
        outer.sub("vision_config"), hidden_size=1152, patch_size=32, num_attention_heads=16, vision_use_head=False
    )
    inputs = config.count("hidden_size") * outer.count("scale_factor", default=2) ** 2
    return [*siglip(config), linear("connector.modality_projection.proj", inputs, text_hidden(outer))]


def cohere2_vision(outer: Config) -> list[Weight]:
    """Command A Vision: neighboring patches joined, then a gated projection."""
    config = outer.sub("vision_config")
    inputs = config.count("hidden_size", default=768) * outer.count("downsample_factor", default=2) ** 2
    middle = outer.count("alignment_intermediate_size", default=36864)
    return [
        *siglip(with_defaults(config, vision_use_head=False)),
        linear(f"{PROJECTOR}.linear_1", inputs, (Part(middle // 2), Part(middle // 2)), "outputs", bias=True),
        row(f"{PROJECTOR}.linear_2", middle // 2, text_hidden(outer)),
    ]


def llava_next_video(outer: Config) -> list[Weight]:
    """LLaVA-NeXT-Video: CLIP as in LLaVA 1.6, without an embedding for the end of a row."""
    config, text = llava_tower(outer), text_hidden(outer, 4096)
    layers = depth_of(config, "num_hidden_layers", default=12)
    bias = outer.flag("multimodal_projector_bias", True)
    return [
        *clip(config, layers, feature_depth(outer, layers, -2)),
        *whole_projector(config.count("hidden_size", default=768), text, text, bias=bias),
    ]


def aria(outer: Config) -> list[Weight]:
    """Aria: queries attend to the patches of a Idefics-like tower, then an MLP."""
    config = with_defaults(
        outer.sub("vision_config"), hidden_size=1152, patch_size=32, num_attention_heads=16, vision_use_head=False
    )
    hidden, text = config.count("hidden_size"), text_hidden(outer)
    queries = outer.sub("projector_patch_to_query_dict")
    rows = outer.count(
        "max_value_projector_patch_to_query_dict",
        default=max((queries.count(key) for key in queries.values), default=256),
    )
    cross, square = f"{PROJECTOR}.cross_attn", linear(f"{PROJECTOR}.cross_attn.q_proj", hidden, hidden)
    return [
        *(weight for weight in siglip(config) if not weight.name.endswith("post_layernorm")),
        linear(f"{PROJECTOR}.query", hidden, rows),
        *(replace(square, name=f"{cross}.{part}_proj") for part in "qkv"),
        linear(f"{cross}.multihead_attn.in_proj", hidden, 3 * hidden, bias=True),
        linear(f"{cross}.multihead_attn.out_proj", hidden, hidden, bias=True),
        linear(f"{cross}.linear", hidden, hidden, bias=True),
        *(layer_norm(f"{cross}.{name}", hidden) for name in ("layer_norm", "layer_norm_kv")),
        layer_norm(f"{PROJECTOR}.layer_norm", hidden),
        column(f"{PROJECTOR}.feed_forward.linear_in", hidden, text, bias=False),
        row(f"{PROJECTOR}.feed_forward.linear_out", text, text, bias=False),
    ]


def exaone4_5(outer: Config) -> list[Weight]:
    """EXAONE 4.5: Qwen2.5-VL's tower with fewer key and value heads."""
    config = outer.sub("vision_config")
    hidden, inner = config.count("hidden_size", default=3584), config.count("intermediate_size", default=3420)
    heads, depth = config.count("num_heads", default=16), depth_of(config, "depth", default=32)
    width, kv = check_heads(config, hidden, heads), config.count("num_key_value_heads", default=heads)
    head = hidden // width
    qkv, *others = block(config, hidden, heads, inner, norm_bias=False, gated=True)
    qkv = replace(qkv, parts=(Part(heads, head), Part(kv, head), Part(kv, head)))
    area = hidden * config.count("spatial_merge_size", default=2) ** 2
    return [
        linear("visual.patch_embed.proj", video_patch(config, 14), hidden),
        *(qkv, *others) * depth,
        vector("visual.merger.ln_q", hidden),
        column("visual.merger.mlp.0", area, area),
        row("visual.merger.mlp.2", area, config.count("out_hidden_size", default=hidden)),
    ]


def lfm2_vl(outer: Config) -> list[Weight]:
    """LFM2-VL: SigLIP 2 without its head; neighboring patches joined, a norm where stated, and two layers."""
    config = outer.sub("vision_config")
    hidden, layers = config.count("hidden_size", default=768), depth_of(config, "num_hidden_layers", default=12)
    inner, heads = config.count("intermediate_size", default=3072), config.count("num_attention_heads", default=12)
    patch, rows = config.count("patch_size", default=16), config.count("num_patches", default=256)
    area, middle = hidden * outer.count("downsample_factor", default=2) ** 2, outer.count(
        "projector_hidden_size", default=2560
    )  # fmt: skip
    return [
        linear("vision_tower.patch_embedding", channels(config) * patch**2, hidden, bias=True),
        linear("vision_tower.position_embedding", hidden, rows),
        *block(config, hidden, heads, inner) * feature_depth(outer, layers, -1),
        layer_norm("vision_tower.post_layernorm", hidden),
        *((layer_norm(f"{PROJECTOR}.layer_norm", area),) if outer.flag("projector_use_layernorm", True) else ()),
        *whole_projector(area, middle, text_hidden(outer), bias=outer.flag("projector_bias", True)),
    ]


def phi3_v(outer: Config) -> list[Weight]:
    """Phi-3-vision: CLIP up to the last layer but one, two separators, and a projector of four joined patches."""
    config, text = Config(CLIP_LARGE_336_CONFIG, outer.where, outer.notes), outer.count("hidden_size")
    hidden, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    return [
        *clip(config, layers, layers - 1),
        replace(  # vLLM 0.33's class makes the language model's table twice
            table("embed_tokens", outer.count("vocab_size"), text, group="vision_audio"), counted=False
        ),
        vector("vision_embed_tokens.glb_GN", 4 * hidden),
        vector("vision_embed_tokens.sub_GN", 4 * hidden),
        *whole_projector(4 * hidden, text, text),
    ]


def dots_ocr(outer: Config) -> list[Weight]:
    """dots.ocr: gated rotary blocks without biases, and Qwen2-VL's merger."""
    config = outer.sub("vision_config")
    hidden, inner = config.count("embed_dim", default=1536), config.count("intermediate_size", default=4224)
    heads, depth = config.count("num_attention_heads", default=12), depth_of(config, "num_hidden_layers", default=42)
    pixels = channels(config) * config.count("patch_size", default=14) ** 2 * config.count(
        "temporal_patch_size", default=1
    )  # fmt: skip
    biased, area = config.flag("use_bias"), hidden * config.count("spatial_merge_size", default=2) ** 2
    layer = block(
        config, hidden, heads, inner, attention_bias=biased, mlp_bias=biased, norm_bias=False, gated=True
    )  # fmt: skip
    return [
        linear("vision_tower.patch_embed.patchifier.proj", pixels, hidden, bias=True),
        vector("vision_tower.patch_embed.patchifier.norm", hidden),
        *layer * depth,
        *((vector("vision_tower.post_trunk_norm", hidden),) if config.flag("post_norm", True) else ()),
        layer_norm("vision_tower.merger.ln_q", hidden),
        column("vision_tower.merger.mlp.0", area, area),
        row("vision_tower.merger.mlp.2", area, config.count("hidden_size", default=1536)),
    ]


def keye(outer: Config) -> list[Weight]:
    """Keye: SigLIP without its head, a second table for packed positions, and neighboring patches joined."""
    config = with_defaults(outer.sub("vision_config"), vision_use_head=False)
    hidden = config.count("hidden_size", default=1152)
    area = hidden * config.count("spatial_merge_size", default=2) ** 2
    joined = area if outer.values.get("model_type") == "KeyeVL1_5" else hidden
    first, second = projector(area, area, bias=True)
    return [
        *siglip(config),
        linear("visual.packing_position_embedding", hidden, 32768),
        layer_norm("mlp_AR.pre_norm", joined),
        first,
        replace(second, parts=(Part(outer.count("hidden_size")),)),
    ]


def eagle_2_5_vl(outer: Config) -> list[Weight]:
    """Eagle 2.5: SigLIP without its head, and InternVL's projector."""
    config, text = with_defaults(outer.sub("vision_config"), vision_use_head=False), text_hidden(outer)
    area = config.count("hidden_size", default=1152) * round(1 / outer.ratio("downsample_ratio", 0.5, 1)) ** 2
    return [
        *siglip(config),
        layer_norm("mlp1.norm", area),
        linear("mlp1.linear_1", area, text, bias=True),
        linear("mlp1.linear_2", text, text, bias=True),
    ]


def llava_onevision2(outer: Config) -> list[Weight]:
    """LLaVA-OneVision 2: rotary blocks between a norm and Qwen2-VL's merger."""
    config = outer.sub("vision_config")
    hidden, inner = config.count("hidden_size"), config.count("intermediate_size")
    area = hidden * config.count("spatial_merge_size", default=2) ** 2
    return [
        linear("visual.patch_embedding", channels(config) * config.count("patch_size", default=14) ** 2, hidden),
        layer_norm("visual.layernorm_pre", hidden),
        *block(config, hidden, config.count("num_attention_heads"), inner)
        * depth_of(config, "num_hidden_layers", default=24),
        layer_norm("visual.merger.ln_q", hidden),
        column("visual.merger.mlp.0", area, area),
        row("visual.merger.mlp.2", area, text_hidden(outer)),
    ]


def paddleocr_vl(outer: Config) -> list[Weight]:
    """PaddleOCR-VL: SigLIP without its head; neighboring patches joined."""
    config = with_defaults(
        outer.sub("vision_config"), hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, image_size=384,
        num_attention_heads=16, patch_size=14, vision_use_head=False,
    )  # fmt: skip
    hidden = config.count("hidden_size")
    area = hidden * config.count("spatial_merge_size", default=2) ** 2
    return [*siglip(config), layer_norm("mlp_AR.pre_norm", hidden), *whole_projector(area, area, text_hidden(outer))]


def minicpmv4_6(outer: Config) -> list[Weight]:
    """MiniCPM-V 4.6: SigLIP, an attention that merges windows of patches, and a merger."""
    config = with_defaults(outer.sub("vision_config"), vision_use_head=False)
    hidden, inner = config.count("hidden_size", default=768), config.count("intermediate_size", default=3072)
    qkv, out, *_ = block(config, hidden, config.count("num_attention_heads", default=12), inner)
    area = 4 * hidden
    return [
        *siglip(config),
        qkv,
        out,
        layer_norm("vit_merger.layer_norm1", hidden),
        layer_norm("vit_merger.pre_norm", area),
        linear("vit_merger.linear_1", area, 4 * inner, bias=True),
        linear("vit_merger.linear_2", 4 * inner, hidden, bias=True),
        layer_norm("merger.mlp.0.pre_norm", area),
        linear("merger.mlp.0.linear_1", area, area, bias=True),
        linear("merger.mlp.0.linear_2", area, text_hidden(outer), bias=True),
    ]


# --- Sounds -----------------------------------------------------------------------------------------------------


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
