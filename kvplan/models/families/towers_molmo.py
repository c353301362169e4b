"""Molmo's towers: a ViT up to the deepest layer used, patches pooled by an attention, and a gated projection.

Source: vLLM 0.33 molmo.py and molmo2.py; compared with their parameters (tests/facts/architectures.jsonl).
"""

from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import block, depth_of, layer_norm, linear, row, vector
from kvplan.models.spec import Part, Weight

PROJECTOR = "image_projector"


def pooled(seen: int, width: int, heads: int, head: int, kv: int) -> tuple[Weight, ...]:
    """An attention whose query is the mean of neighboring patches."""
    return (
        linear("image_pooling_2d.q_proj", seen, (Part(heads, head),), "outputs", bias=True),
        linear("image_pooling_2d.merged_kv", seen, (Part(kv, head), Part(kv, head)), "outputs", bias=True),
        row("image_pooling_2d.o_proj", heads * head, width),
    )


def projected(inputs: int, inner: int, text: int) -> tuple[Weight, ...]:
    return (
        linear(f"{PROJECTOR}.merged_linear", inputs, (Part(inner), Part(inner)), "outputs"),
        row(f"{PROJECTOR}.down_proj", inner, text, bias=False),
    )


def molmo2(outer: Config) -> list[Weight]:
    config, adapter = outer.sub("vit_config"), outer.sub("adapter_config")
    hidden, layers = config.count("hidden_size", default=1152), depth_of(config, "num_hidden_layers", default=27)
    inner, heads = config.count("intermediate_size", default=4304), config.count("num_attention_heads", default=16)
    taps = adapter.items("vit_layers") or [-3, -9]
    depth = max(
        layers + tap + 1 if tap < 0 else tap + 1 for tap in (outer.whole("vit_layers", t, -layers) for t in taps)
    )
    width, count = adapter.count("hidden_size", default=1152), adapter.count("num_attention_heads", default=16)
    head, kv = adapter.count("head_dim", default=72), adapter.count("num_key_value_heads", default=count)
    return [
        linear("image_vit.positional_embedding", hidden, config.count("image_num_pos", default=577)),
        linear("image_vit.patch_embedding", 3 * config.count("image_patch_size", default=14) ** 2, hidden, bias=True),
        *block(config, hidden, heads, inner) * depth,
        *pooled(hidden * len(taps), width, count, head, kv),
        *projected(width, adapter.count("intermediate_size", default=18944), adapter.count("text_hidden_size")),
    ]


CLIP = {"width": 1024, "layers": 23, "inner": 4096, "heads": 16, "rows": 577}  # of which no config says anything


def molmo(outer: Config) -> list[Weight]:
    """Molmo: CLIP up to the last layer but one, two of whose layers are pooled."""
    width, text = CLIP["width"], outer.count("hidden_size")
    return [
        vector("image_vit.class_embedding", width),
        linear("image_vit.positional_embedding", width, CLIP["rows"]),
        linear("image_vit.patch_embedding", 3 * 14**2, width),
        layer_norm("image_vit.pre_ln", width),
        *block(outer, width, CLIP["heads"], CLIP["inner"]) * CLIP["layers"],
        linear("pad_embed", 2 * width, 2),
        *pooled(2 * width, width, CLIP["heads"], width // CLIP["heads"], CLIP["heads"]),
        *projected(width, outer.count("intermediate_size") // 2, text),
    ]
