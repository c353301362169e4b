"""Towers of SigLIP's layers with a projector of their own.

Missing config keys take the default of the transformers class of the same model_type (5.23). Parts and sharding are
vLLM 0.33's parameters per rank (tests/facts/architectures.jsonl).
"""

from dataclasses import replace

from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import (
    PROJECTOR,
    block,
    column,
    depth_of,
    layer_norm,
    linear,
    row,
    text_hidden,
    whole_projector,
    with_defaults,
)
from kvplan.models.families.towers_llava import llava_onevision, projector
from kvplan.models.families.towers_vision import channels, feature_depth, siglip
from kvplan.models.spec import Part, Weight


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


def bee(outer: Config) -> list[Weight]:
    """Bee and R: LLaVA-OneVision with a norm before its projector, whose first layer is four times as wide in Bee."""
    *tower, _, _ = llava_onevision(outer)
    hidden, text = outer.sub("vision_config").count("hidden_size", default=768), text_hidden(outer)
    middle = text if outer.values.get("model_type") == "rvl" else 4 * text
    return [*tower, layer_norm(f"{PROJECTOR}.pre_norm", hidden), *whole_projector(hidden, middle, text)]


def ovis(outer: Config) -> list[Weight]:
    """Ovis: SigLIP, joined patches as shares of words of its own, and a table of those words."""
    config = outer.sub("visual_tokenizer_config")
    return worded(outer, config, config.sub("backbone_config"), config.count("vocab_size", default=16384), 5)


def ovis2_5(outer: Config) -> list[Weight]:
    """Ovis 2.5 and 2.6: the same with SigLIP 2, its positions rotary beside a table."""
    config = outer.sub("vit_config")
    side = int(config.count("num_patches", default=256) ** 0.5) * config.count("patch_size", default=16)
    tower = Config({**config.values, "image_size": side}, config.where, config.notes)
    return worded(outer, config, tower, outer.count("visual_vocab_size", default=65536), 4)


def worded(outer: Config, config: Config, tower: Config, words: int, marks: int) -> list[Weight]:
    """A tower whose patches become shares of words; `marks` of them mark images and their parts."""
    tower = with_defaults(tower, vision_use_head=False)
    area = tower.count("hidden_size", default=768) * config.count("hidden_stride", default=1) ** 2
    shares = words - marks
    return [
        *siglip(tower),
        linear("visual_tokenizer.head.0", area, shares),
        layer_norm("visual_tokenizer.head.1", shares),
        linear("vte", text_hidden(outer), words),
    ]


def phi4_siglip(outer: Config) -> list[Weight]:
    """Phi-4 with vision: SigLIP 2 up to the last layer but one, and two layers."""
    config = outer.sub("vision_config")
    layers = depth_of(config, "num_hidden_layers", default=12) - 1
    side = int(config.count("num_patches", default=256) ** 0.5) * config.count("patch_size", default=16)
    tower = Config({**config.values, "num_hidden_layers": layers, "image_size": side, "vision_use_head": False},
                   config.where, config.notes)  # fmt: skip
    *kept, _ = siglip(tower)
    return [*kept, *projector(outer.count("mm_hidden_size", default=1152), outer.count("hidden_size"), bias=True)]


def joined(
    outer: Config, config: Config, *, area: int, middle: int | None = None, norm: int | None = None, bias: bool = True,
    split: bool = True,
) -> list[Weight]:  # fmt: skip
    """SigLIP without its head, neighboring patches joined after a norm `norm` wide, two layers, sharded or not.

    middle  width between the two layers; None: that of the joined patches
    """
    tower = siglip(Config({**config.values, "vision_use_head": False}, config.where, config.notes))
    inputs, text = config.count("hidden_size", default=1152) * area, text_hidden(outer)
    inner = middle or inputs
    layers = linear("mlp.1", inputs, inner, bias=bias), linear("mlp.2", inner, text, bias=bias)
    if split:
        layers = column("mlp.1", inputs, inner, bias=bias), row("mlp.2", inner, text, bias=bias)
    return [*tower, *((layer_norm("mlp.norm", norm),) if norm else ()), *layers]


def merged(config: Config) -> int:
    return config.count("spatial_merge_size", default=2) ** 2


def keye(outer: Config) -> list[Weight]:
    """Keye: a second table for packed positions; a norm of a patch, or in 1.5 of the joined ones."""
    config = outer.sub("vision_config")
    hidden, area = config.count("hidden_size", default=1152), merged(config)
    norm = hidden * area if outer.values.get("model_type") == "KeyeVL1_5" else hidden
    table = linear("visual.packing_position_embedding", hidden, 32768)
    return [*joined(outer, config, area=area, norm=norm), table]


def eagle_2_5_vl(outer: Config) -> list[Weight]:
    """Eagle 2.5, with InternVL's projector."""
    config, area = outer.sub("vision_config"), round(1 / outer.ratio("downsample_ratio", 0.5, 1)) ** 2
    norm = config.count("hidden_size", default=1152) * area
    return joined(outer, config, area=area, norm=norm, middle=text_hidden(outer), split=False)


def paddleocr_vl(outer: Config) -> list[Weight]:
    config = with_defaults(
        outer.sub("vision_config"), hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, image_size=384,
        num_attention_heads=16, patch_size=14,
    )  # fmt: skip
    return joined(outer, config, area=merged(config), norm=config.count("hidden_size"), split=False)


def bagel(outer: Config) -> list[Weight]:
    """BAGEL's understanding half."""
    config = with_defaults(outer.sub("vit_config"), hidden_size=768)
    return joined(outer, config, area=1, middle=text_hidden(outer))


def isaac(outer: Config) -> list[Weight]:
    config = with_defaults(outer.sub("vision_config"), hidden_size=768, image_size=256)
    area = config.count("pixel_shuffle_scale_factor", default=1) ** 2
    return joined(outer, config, area=area, middle=4 * area * config.count("hidden_size"), bias=False)


def cosmos3_edge(outer: Config) -> list[Weight]:
    config = with_defaults(outer.sub("vision_config"), hidden_size=1152, image_size=256)
    norm, middle = config.count("hidden_size"), outer.count("projector_hidden_size")
    return joined(outer, config, area=merged(config), norm=norm, middle=middle)
