"""Kanana-V: Qwen2-VL's blocks, and an abstractor of convolutions.

Source: vLLM 0.33 kanana_v.py; compared with its parameters (tests/facts/architectures.jsonl).
"""

from dataclasses import replace

from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import layer_norm, linear, text_hidden
from kvplan.models.families.towers_vision import qwen2_vl
from kvplan.models.spec import Weight

KERNEL, SQUEEZED = 3, 4  # of a stage's convolutions by channel, and how much its gate narrows the block's input


def stage(inputs: int, width: int, depth: int) -> list[Weight]:
    """RegNet's blocks: 1x1, 3x3 by channel, a gate, 1x1; the first changes the width."""
    weights: list[Weight] = []
    for _ in range(depth):
        narrow, other = round(inputs / SQUEEZED), inputs != width
        weights += [
            linear("abstractor.conv1", inputs, width),
            linear("abstractor.conv2", KERNEL**2, width),
            linear("abstractor.se.fc1", width, narrow, bias=True),
            linear("abstractor.se.fc2", narrow, width, bias=True),
            linear("abstractor.conv3", width, width),
            *((linear("abstractor.downsample", inputs, width),) if other else ()),
            *(layer_norm("abstractor.bn", width),) * (3 + other),
        ]
        inputs = width
    return weights


def kanana(outer: Config) -> list[Weight]:
    config = outer.sub("projector_config")
    seen, width = config.count("encoder_hidden_size", default=1280), config.count("hidden_size", default=1024)
    depth, out = config.count("depth", default=3), config.count("output_hidden_size", default=text_hidden(outer))
    area, layers = config.count("merge_size", default=2) ** 2, config.count("mlp_depth", default=2)
    positions = config.count("pos_emb_size", default=576) if config.flag("pos_emb", True) else 0
    tower = [replace(weight, name=weight.name.replace("visual.", "vision_model.")) for weight in qwen2_vl(outer)[:-3]]
    return [
        *tower,
        *((linear("abstractor.pos_emb", seen, positions),) if positions else ()),
        *stage(seen, width, depth),
        *stage(width * area, width, depth),
        linear("abstractor.readout.0", width, out, bias=True),
        *(linear("abstractor.readout.2", out, out, bias=True),) * (layers - 1),
    ]
