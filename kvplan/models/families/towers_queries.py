"""Towers of SigLIP's layers whose patches are asked for by queries, merged by windows, or read as words.

Missing config keys take the default of the transformers class of the same model_type (5.23). Parts and sharding are
vLLM 0.33's parameters per rank (tests/facts/architectures.jsonl).
"""

from dataclasses import replace

from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import (
    PROJECTOR,
    block,
    column,
    layer_norm,
    linear,
    linears,
    row,
    text_hidden,
    whole_projector,
    with_defaults,
)
from kvplan.models.families.towers_llava import llava_onevision
from kvplan.models.families.towers_vision import siglip
from kvplan.models.spec import Weight


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
        *linears(cross, (hidden, 3 * hidden), (hidden, hidden), (hidden, hidden), bias=True),
        *(layer_norm(f"{cross}.{name}", hidden) for name in ("layer_norm", "layer_norm_kv")),
        layer_norm(f"{PROJECTOR}.layer_norm", hidden),
        column(f"{PROJECTOR}.feed_forward.linear_in", hidden, text, bias=False),
        row(f"{PROJECTOR}.feed_forward.linear_out", text, text, bias=False),
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
        *linears("vit_merger", (area, 4 * inner), (4 * inner, hidden), bias=True),
        layer_norm("merger.mlp.0.pre_norm", area),
        *linears("merger.mlp.0", (area, area), (area, text_hidden(outer)), bias=True),
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
    return worded(outer, config, config, outer.count("visual_vocab_size", default=65536), 4)


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
