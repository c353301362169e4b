"""Towers with rotary positions and a projector of their own.

Missing config keys take the default of the transformers class of the same model_type (5.23). Parts and sharding are
vLLM 0.33's parameters per rank (tests/facts/architectures.jsonl).
"""

from dataclasses import replace

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
from kvplan.models.families.towers_vision import channels, merge_area, merger, qwen2_5_vl, qwen3_5, video_patch
from kvplan.models.spec import Part, Weight


def exaone4_5(outer: Config) -> list[Weight]:
    """EXAONE 4.5: Qwen2.5-VL's tower with fewer key and value heads."""
    config = outer.sub("vision_config")
    hidden, inner = config.count("hidden_size", default=3584), config.count("intermediate_size", default=3420)
    heads, depth = config.count("num_heads", default=16), depth_of(config, "depth", default=32)
    width, kv = check_heads(config, hidden, heads), config.count("num_key_value_heads", default=heads)
    head = hidden // width
    qkv, *others = block(config, hidden, heads, inner, norm_bias=False, gated=True)
    qkv = replace(qkv, parts=(Part(heads, head), Part(kv, head), Part(kv, head)))
    return [
        linear("visual.patch_embed.proj", video_patch(config, 14), hidden),
        *(qkv, *others) * depth,
        vector("visual.merger.ln_q", hidden),
        *merger("visual.merger", hidden, config.count("out_hidden_size", default=hidden), merge_area(config)),
    ]


def mimo_v2_omni(outer: Config) -> list[Weight]:
    """MiMo-V2-Omni: Qwen2.5-VL's layout with fewer key and value heads, sinks in windowed layers, a plain merger."""
    config = outer.sub("vision_config")
    hidden, inner = config.count("hidden_size", default=1280), config.count("intermediate_size", default=4608)
    heads, depth = config.count("num_heads", default=32), depth_of(config, "depth", default=28)
    width, kv = config.count("qk_channels", default=64), config.count("num_key_value_heads", default=8)
    qkv, out, *others = block(config, hidden, heads, inner, norm_bias=False, gated=True)
    qkv = replace(qkv, parts=(Part(heads, width), Part(kv, width), Part(kv, width)))
    full = config.ints("fullatt_block_indexes") or [7, 15, 23, 31]
    sinks = depth - sum(1 for i in full if i < depth) if config.flag("use_sink") else 0
    merged = merger("visual.merger", hidden, config.count("out_hidden_size", default=2048), merge_area(config))
    return [
        linear("visual.patch_embed.proj", video_patch(config, 16), hidden),
        *(qkv, replace(out, inputs=heads * width), *others) * depth,
        *(vector("visual.blocks.attn.sinks", heads),) * sinks,
        vector("visual.merger.ln_q", hidden),
        *(replace(weight, bias=False) for weight in merged),
    ]


def dots_ocr(outer: Config) -> list[Weight]:
    """dots.ocr: gated rotary blocks without biases, and Qwen2-VL's merger."""
    config = outer.sub("vision_config")
    hidden, inner = config.count("embed_dim", default=1536), config.count("intermediate_size", default=4224)
    heads, depth = config.count("num_attention_heads", default=12), depth_of(config, "num_hidden_layers", default=42)
    pixels = channels(config) * config.count("patch_size", default=14) ** 2 * config.count(
        "temporal_patch_size", default=1
    )  # fmt: skip
    biased = config.flag("use_bias")
    layer = block(
        config, hidden, heads, inner, attention_bias=biased, mlp_bias=biased, norm_bias=False, gated=True
    )  # fmt: skip
    return [
        linear("vision_tower.patch_embed.patchifier.proj", pixels, hidden, bias=True),
        vector("vision_tower.patch_embed.patchifier.norm", hidden),
        *layer * depth,
        *((vector("vision_tower.post_trunk_norm", hidden),) if config.flag("post_norm", True) else ()),
        layer_norm("vision_tower.merger.ln_q", hidden),
        *merger("vision_tower.merger", hidden, config.count("hidden_size", default=1536), merge_area(config)),
    ]


def llava_onevision2(outer: Config) -> list[Weight]:
    """LLaVA-OneVision 2: rotary blocks between a norm and Qwen2-VL's merger."""
    config = outer.sub("vision_config")
    hidden, inner = config.count("hidden_size"), config.count("intermediate_size")
    return [
        linear("visual.patch_embedding", channels(config) * config.count("patch_size", default=14) ** 2, hidden),
        layer_norm("visual.layernorm_pre", hidden),
        *block(config, hidden, config.count("num_attention_heads"), inner)
        * depth_of(config, "num_hidden_layers", default=24),
        layer_norm("visual.merger.ln_q", hidden),
        *merger("visual.merger", hidden, text_hidden(outer), merge_area(config)),
    ]


def hyperclovax(outer: Config) -> list[Weight]:
    """HyperCLOVA X with vision: Qwen2.5-VL's tower, and one linear layer."""
    out = outer.sub("vision_config").count("out_hidden_size", default=3584)
    return [*qwen2_5_vl(outer), linear("mm_projector", out, text_hidden(outer), bias=True)]


def muse_glimmer(outer: Config) -> list[Weight]:
    """Muse Glimmer: rotary blocks between two norms whose MLPs are whole, neighboring patches joined, three layers."""
    config = outer.sub("vision_config")
    hidden, depth = (
        config.count("hidden_size", default=1536),
        depth_of(config, "num_hidden_layers", "depth", default=50),
    )
    inner, heads = config.count("intermediate_size", default=8960), config.count("num_attention_heads", default=16)
    qkv, out, up, down, *norms = block(config, hidden, heads, inner)
    last = outer.count("out_hidden_size", default=4 * hidden)
    middle, frames = outer.count("projector_hidden_size", default=4096), config.count("patch_temporal", default=2)
    grid = config.count("pos_emb_height", default=32) * config.count("pos_emb_width", default=32)
    return [
        linear("vision_encoder.positional_embedding", hidden, grid),
        linear(
            "vision_encoder.conv1_linear",
            channels(config) * frames * config.count("patch_size", default=14) ** 2,
            hidden,
        ),
        layer_norm("vision_encoder.ln_pre", hidden),
        *(qkv, out, replace(up, split="none"), replace(down, split="none"), *norms) * depth,
        layer_norm("vision_encoder.ln_post", hidden),
        linear("vision_adapter.c_fc", last, middle),
        linear("vision_adapter.c_proj", middle, middle),
        linear("vision_projection", middle, text_hidden(outer)),
    ]


def bailing_v3(outer: Config) -> list[Weight]:
    """Ling 3 with vision: Qwen3.5's tower, whose merger goes to the text's width and through one more layer."""
    config, text = outer.sub("vision_config"), text_hidden(outer)
    area = config.count("hidden_size", default=1152) * config.count("spatial_merge_size", default=2) ** 2
    *tower, _, _ = qwen3_5(outer)
    return [*tower, column("linear_proj.linear_fc1", area, text), row("linear_proj.linear_fc2", text, text)]


def openpangu(outer: Config) -> list[Weight]:
    """openPangu-VL: Qwen2.5-VL's blocks, a merger for each chosen layer, and one linear layer."""
    config = outer.sub("vision_config")
    hidden, out = config.count("hidden_size", default=1280), config.count("out_hidden_size")
    chosen = len(config.items("mm_unit_vision_select_layer") or (-1, -3))
    *tower, norm, up, down = qwen2_5_vl(outer)
    last = linear("visual.vision_projection", out, outer.count("hidden_size"), bias=True)
    return [*tower, vector("visual.final_layernorm", hidden), *(norm, up, down) * chosen, last]
