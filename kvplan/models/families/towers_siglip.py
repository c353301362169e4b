"""Towers of SigLIP's layers with a projector of their own.

Missing config keys take the default of the transformers class of the same model_type (5.23). Parts and sharding are
vLLM 0.33's parameters per rank (tests/facts/architectures.jsonl).
"""

from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import (
    PROJECTOR,
    column,
    depth_of,
    layer_norm,
    linear,
    row,
    text_hidden,
    with_defaults,
)
from kvplan.models.families.towers_vision import feature_depth, merge_area, siglip
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


def keye(outer: Config) -> list[Weight]:
    """Keye: a second table for packed positions; a norm of a patch, or in 1.5 of the joined ones."""
    config = outer.sub("vision_config")
    hidden, area = config.count("hidden_size", default=1152), merge_area(config)
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
    return joined(outer, config, area=merge_area(config), norm=config.count("hidden_size"), split=False)


def bagel(outer: Config) -> list[Weight]:
    """BAGEL's understanding half."""
    config = with_defaults(outer.sub("vit_config"), hidden_size=768)
    return joined(outer, config, area=1, middle=text_hidden(outer))


def isaac(outer: Config) -> list[Weight]:
    config = with_defaults(outer.sub("vision_config"), hidden_size=768, num_patches=256)
    area = config.count("pixel_shuffle_scale_factor", default=1) ** 2
    return joined(outer, config, area=area, middle=4 * area * config.count("hidden_size"), bias=False)


def cosmos3_edge(outer: Config) -> list[Weight]:
    config = with_defaults(outer.sub("vision_config"), hidden_size=1152, num_patches=256)
    norm, middle = config.count("hidden_size"), outer.count("projector_hidden_size")
    return joined(outer, config, area=merge_area(config), norm=norm, middle=middle)


def lfm2_vl(outer: Config) -> list[Weight]:
    """LFM2-VL: a norm where stated."""
    config = with_defaults(outer.sub("vision_config"), hidden_size=768, num_patches=256)
    depth = feature_depth(outer, depth_of(config, "num_hidden_layers", default=12), -1)
    area, middle = outer.count("downsample_factor", default=2) ** 2, outer.count("projector_hidden_size", default=2560)
    norm = config.count("hidden_size") * area if outer.flag("projector_use_layernorm", True) else None
    tower = Config({**config.values, "num_hidden_layers": depth}, config.where, config.notes)
    bias = outer.flag("projector_bias", True)
    return joined(outer, tower, area=area, norm=norm, middle=middle, bias=bias, split=False)


def phi4_siglip(outer: Config) -> list[Weight]:
    """Phi-4 with vision: up to the last layer but one, without its norm."""
    config = with_defaults(outer.sub("vision_config"), hidden_size=outer.count("mm_hidden_size"), num_patches=256)
    depth = depth_of(config, "num_hidden_layers", default=12) - 1
    tower = Config({**config.values, "num_hidden_layers": depth}, config.where, config.notes)
    layers = joined(outer, tower, area=1, middle=outer.count("hidden_size"))
    return [weight for weight in layers if not weight.name.endswith("post_layernorm")]
