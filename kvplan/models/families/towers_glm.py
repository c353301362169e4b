"""GLM-4V: blocks with norms after, patches merged by a convolution, a gated projection and two marks.

Source: vLLM 0.33 glm4v.py; compared with its parameters (tests/facts/architectures.jsonl).
"""

from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import block, depth_of, layer_norm, linear, row, vector
from kvplan.models.families.towers_vision import channels
from kvplan.models.spec import Part, Weight

NAME = "transformer.vision"


def glm4v_9b(outer: Config) -> list[Weight]:
    config, text, inner = outer.sub("vision_config"), outer.count("hidden_size"), outer.count("ffn_hidden_size")
    hidden, layers = config.count("hidden_size", default=1792), depth_of(config, "num_hidden_layers", default=63)
    heads, patch = config.count("num_heads", default=16), config.count("patch_size", default=14)
    return [
        vector(f"{NAME}.cls_embedding", hidden),
        linear(f"{NAME}.patch_embedding", channels(config) * patch**2, hidden, bias=True),
        linear(f"{NAME}.position_embedding", hidden, config.count("num_positions", default=6401)),
        *block(config, hidden, heads, config.count("intermediate_size", default=15360)) * layers,
        linear(f"{NAME}.conv", hidden * 2**2, text, bias=True),
        linear(f"{NAME}.linear_proj", text, text),
        layer_norm(f"{NAME}.norm1", text),
        linear(f"{NAME}.merged_proj", text, (Part(inner), Part(inner)), "outputs"),
        row(f"{NAME}.dense_4h_to_h", inner, text, bias=False),
        *(vector(f"{NAME}.mark", text),) * 2,
    ]
