"""Towers whole on every rank but for MLPs and CLIP: DeepSeek-VL2's and -OCR's, and OpenVLA's.

Source: vLLM 0.33 openvla.py, deepseek_vl2.py, deepseek_ocr.py, deepseek_ocr2.py, deepencoder.py; compared with their
parameters (tests/facts/architectures.jsonl).
"""

from dataclasses import replace

from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import (
    block,
    column,
    depth_of,
    layer_norm,
    linear,
    linears,
    row,
    text_hidden,
    vector,
    whole,
)
from kvplan.models.families.towers_vision import clip
from kvplan.models.spec import Weight

SCALE = "vision_tower.layers.ls"
SIGLIP, SIGLIP_INNER = 1152, 4304  # so400m
CLIP_LARGE_224 = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 224, "patch_size": 14,
}  # fmt: skip
SAM, SAM_LAYERS, SAM_GLOBAL, SAM_SIDE, SAM_WINDOW, SAM_HEADS = 768, 12, 4, 64, 14, 12
QUERIES, QWEN_LAYERS, QWEN_INNER, QWEN_KV = (144, 256), 24, 4864, 128  # of DeepSeek-OCR 2's second encoder


def plain_vit(
    outer: Config, *, width: int, layers: int, inner: int, heads: int, side: int, patch: int, marks: int = 0,
    scaled: bool = False, split_mlp: bool = False,
) -> list[Weight]:  # fmt: skip
    """A ViT with a position for each patch, `marks` tokens of its own, and where `scaled` two scales a layer."""
    layer = tuple(
        weight if split_mlp and ".mlp." in weight.name else replace(weight, split="none")
        for weight in block(outer, width, heads, inner)
    )
    if scaled:
        layer += (vector(f"{SCALE}1", width), vector(f"{SCALE}2", width))
    return [
        *((linear("vision_tower.tokens", width, marks),) if marks else ()),
        linear("vision_tower.pos_embed", width, (side // patch) ** 2),
        linear("vision_tower.patch_embed", 3 * patch**2, width, bias=True),
        *layer * layers,
        layer_norm("vision_tower.norm", width),
    ]


def pool(width: int, inner: int, *, split_mlp: bool = False) -> list[Weight]:
    """SigLIP's head, which timm's class builds too."""
    return [
        vector("vision_tower.attn_pool.latent", width),
        *(linear("vision_tower.attn_pool.linear", width, width, bias=True),) * 4,
        layer_norm("vision_tower.attn_pool.norm", width),
        linear("vision_tower.attn_pool.mlp.fc1", width, inner, "outputs" if split_mlp else "none", bias=True),
        linear("vision_tower.attn_pool.mlp.fc2", inner, width, "inputs" if split_mlp else "none", bias=True),
    ]


def openvla(outer: Config) -> list[Weight]:
    """OpenVLA: DINOv2 and SigLIP side by side, and three layers of which two are sharded."""
    side = (outer.ints("image_sizes") or [224])[0]
    dino, text = 1024, text_hidden(outer, 4096)
    both = dino + SIGLIP
    return [
        *plain_vit(outer, width=dino, layers=24, inner=4 * dino, heads=16, side=side, patch=14, marks=5, scaled=True),
        *plain_vit(outer, width=SIGLIP, layers=27, inner=SIGLIP_INNER, heads=16, side=side, patch=14),
        *pool(SIGLIP, SIGLIP_INNER),
        column("projector.fc1", both, 4 * both),
        row("projector.fc2", 4 * both, text),
        linear("projector.fc3", text, text, bias=True),
    ]


def sam(config: Config, out: int) -> list[Weight]:
    """SAM's encoder with relative positions, and three convolutions; whole on every rank."""
    layer = whole(block(config, SAM, SAM_HEADS, 4 * SAM))
    tables = linear("sam_model.attn.rel_pos", 2 * SAM // SAM_HEADS, 2 * SAM_WINDOW - 1)
    wide = replace(tables, parts=linear("", 1, 2 * SAM_SIDE - 1).parts)
    return [
        linear("sam_model.pos_embed", SAM, SAM_SIDE**2),
        linear("sam_model.patch_embed.proj", 3 * 16**2, SAM, bias=True),
        *(*layer, tables) * (SAM_LAYERS - SAM_GLOBAL),
        *(*layer, wide) * SAM_GLOBAL,
        *(layer_norm("sam_model.neck.norm", 256),) * 2,
        *linears("sam_model.net", (SAM, 256), (256 * 3**2, 256), (256 * 3**2, 512), (512 * 3**2, out)),
    ]


def qwen2_encoder(width: int) -> list[Weight]:
    """Queries that attend through Qwen2's layers; whole on every rank."""
    layer = (
        linear("qwen2_model.qkv_proj", width, width + 2 * QWEN_KV, bias=True),
        *linears("qwen2_model", (width, width), (width, 2 * QWEN_INNER), (QWEN_INNER, width)),
        *(vector("qwen2_model.norm", width),) * 2,
    )
    return [*layer * QWEN_LAYERS, vector("qwen2_model.norm", width), linear("qwen2_model.query", width, sum(QUERIES))]


def deepseek_vl2(outer: Config) -> list[Weight]:
    config = outer.sub("projector_config")
    inputs, out = config.count("input_dim", default=1152), config.count("n_embed", default=2048)
    name = (outer.names("architectures") or [""])[0]
    marks = [vector("image_newline", out), vector("view_seperator", out)]
    if name.startswith("DeepseekOCR2"):
        return [*sam(outer, inputs), *qwen2_encoder(inputs), marks[1], linear("projector", inputs, out, bias=True)]
    if name.startswith(("DeepseekOCR", "UnlimitedOCR")):
        encoder = Config(CLIP_LARGE_224, outer.where, outer.notes)
        *layers, _ = clip(encoder, 24, 24)
        return [*sam(outer, 1024), *layers, *marks, linear("projector", inputs, out, bias=True)]
    area, middle = config.count("downsample_ratio", default=2) ** 2, out * config.count("mlp_ratio", default=1)
    depth = config.count("depth", default=2)
    return [
        *plain_vit(outer, width=SIGLIP, layers=27, inner=SIGLIP_INNER, heads=16, side=384, patch=14, split_mlp=True),
        *pool(SIGLIP, SIGLIP_INNER, split_mlp=True),
        linear("projector.0", inputs * area, middle, bias=True),
        *(linear("projector.2", middle, middle, bias=True),) * (depth - 2),
        linear("projector.4", middle, out, bias=True),
        *marks,
    ]


V4_KEYS = {
    "hidden_size": "vision_dim", "intermediate_size": "vision_inter_dim", "num_attention_heads": "vision_n_heads",
    "patch_size": "vision_patch_size", "downsample_ratio": "vision_downsample_ratio",
    "num_hidden_layers": "vision_n_layers",
}  # fmt: skip


def deepseek_v4(outer: Config) -> list[Weight]:
    """DeepSeek-V4's, described by keys of the model itself: the same as V4.1's, and four vectors that mark images."""
    config = {"vision_config": {key: outer.values.get(own) for key, own in V4_KEYS.items()}}
    tower = deepseek_v41(Config({**outer.values, **config}, outer.where, outer.notes))
    mark = replace(vector("image_mark", outer.count("hidden_size")), dtype="float32")
    return [*tower, *(mark,) * 4]


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
