"""Towers that timm's classes build, whole on every rank but for SigLIP's MLPs in DeepSeek-VL2.

Source: vLLM 0.33 openvla.py and deepseek_vl2.py; compared with their parameters (tests/facts/architectures.jsonl).
"""

from dataclasses import replace

from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import block, column, layer_norm, linear, row, text_hidden, vector
from kvplan.models.spec import Weight

SCALE = "vision_tower.layers.ls"


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
    dino, siglip, text = 1024, 1152, text_hidden(outer, 4096)
    both = dino + siglip
    return [
        *plain_vit(outer, width=dino, layers=24, inner=4 * dino, heads=16, side=side, patch=14, marks=5, scaled=True),
        *plain_vit(outer, width=siglip, layers=27, inner=4304, heads=16, side=side, patch=14),
        *pool(siglip, 4304),
        column("projector.fc1", both, 4 * both),
        row("projector.fc2", 4 * both, text),
        linear("projector.fc3", text, text, bias=True),
    ]
