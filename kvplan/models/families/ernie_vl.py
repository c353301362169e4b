"""ERNIE 4.5 with vision: experts of text and of images side by side, and a ViT whose patches are joined twice.

Source: vLLM 0.33 ernie45_vl_moe.py and ernie45_vl.py; compared with their parameters (tests/facts/architectures.jsonl).
"""

from collections.abc import Callable
from dataclasses import replace

from kvplan.models.families.blocks import SpecDraft, correction_bias, experts, gated_mlp, router
from kvplan.models.families.config import Config
from kvplan.models.families.dense import LLAMA, read_with
from kvplan.models.families.tower_blocks import block, column, depth_of, layer_norm, linear, vector
from kvplan.models.families.towers_vision import channels
from kvplan.models.spec import Weight

NAMES = ("text", "vision")


def pair(config: Config, key: str, default: int | None = None) -> tuple[int, int]:
    """The values for text and for images."""
    values = config.ints(key) if isinstance(config.values.get(key), list) else None
    if values is None:
        value = config.count(key, low=0) if default is None else config.count(key, default=default, low=0)
        return value, value
    if len(values) != len(NAMES):
        raise config.fail(key, f"must be two numbers, of text and of images ({len(values)})", "correct the config")
    return values[0], values[1]


def expert_part(config: Config, hidden: int) -> tuple[Weight, ...]:
    """Two routers with a bias each, two sets of experts, and the shared experts, as wide as those of text."""
    (count, others), inner = pair(config, "moe_num_experts"), pair(config, "moe_intermediate_size")
    if count != others:
        raise config.fail("moe_num_experts", "must be the same for text and images", "correct the config")
    shared = inner[0] * config.count("moe_num_shared_experts", default=0, low=0)
    bias = replace(correction_bias("mlp.e_score_correction_bias", count), counted=True)
    return (
        bias,
        bias,
        *(router(f"mlp.{name}_experts_gate", hidden, count, dtype="float32") for name in NAMES),
        *(w for name, width in zip(NAMES, inner, strict=True)
          for w in experts(hidden, width, count, prefix=f"mlp.{name}_experts")),
        *(gated_mlp(hidden, shared, prefix="mlp.shared_experts", group="shared_expert") if shared else ()),
    )  # fmt: skip


def read(config: Config, model_type: str) -> SpecDraft:
    """Sparse from one layer to another, the same for text and images."""
    draft = read_with(config, replace(LLAMA, attention_key="use_bias", mlp_key="use_bias", tied=True), "llama")
    depth, every = len(draft.layers), config.count("moe_layer_interval", default=1)
    firsts, lasts = pair(config, "moe_layer_start_index", 0), pair(config, "moe_layer_end_index", depth - 1)
    for key, values in (("moe_layer_start_index", firsts), ("moe_layer_end_index", lasts)):
        if values[0] != values[1]:
            raise config.fail(key, "differs between text and images: such layers are not modeled")
    own = expert_part(config, draft.hidden_size)
    draft.layer_weights = [
        (*(w for w in weights if w.group != "mlp"), *own)
        if (i + 1) % every == 0 and firsts[0] <= i <= lasts[0]
        else weights
        for i, weights in enumerate(draft.layer_weights)
    ]
    draft.experts_per_token = config.count("moe_k", default=6)
    return draft


def tower(outer: Config) -> list[Weight]:
    """Rotary blocks, then neighboring patches and neighboring frames joined; every layer sharded by its outputs."""
    config, name = outer.sub("vision_config"), "resampler_model"
    hidden, patch = config.count("embed_dim", "hidden_size", default=1280), config.count("patch_size", default=14)
    inner = int(hidden * config.ratio("mlp_ratio", 4))
    area = outer.count("pixel_hidden_size", default=hidden) * outer.count("spatial_conv_size", default=2) ** 2
    frames = outer.count("temporal_conv_size", default=2)
    joined = [column(f"{name}.spatial_linear1", area, area)]
    if outer.flag("use_temporal_conv", True):
        joined.append(column(f"{name}.temporal_linear1", area * frames, area))
    text = outer.count("hidden_size")
    return [
        linear("vision_model.patch_embed.proj", channels(config) * patch**2, hidden),
        *block(config, hidden, config.count("num_heads", default=16), inner) * depth_of(config, "depth", default=32),
        layer_norm("vision_model.ln", hidden),
        *(w for first in joined for w in (first, column(f"{name}.linear2", area, area), layer_norm(name, area))),
        column(f"{name}.mlp", area, text),
        vector(f"{name}.after_norm", text),
    ]


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {"ernie4_5_moe_vl": read}
