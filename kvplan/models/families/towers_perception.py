"""Step's perception encoder: rotary positions beside a table, two scales a layer, and two convolutions.

Source: vLLM 0.33 step_vl.py and step3_vl.py; compared with their parameters (tests/facts/architectures.jsonl).
"""

from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import (
    block,
    column,
    depth_of,
    layer_norm,
    linear,
    linears,
    patches,
    text_hidden,
    vector,
)
from kvplan.models.spec import Weight


def step_vl(outer: Config) -> list[Weight]:
    config = outer.sub("vision_config")
    width, layers = config.count("width", default=1536), depth_of(config, "layers", default=47)
    patch, size = config.count("patch_size", default=14), config.count("image_size", default=728)
    inner = int(width * config.ratio("mlp_ratio", 8960 / 1536))
    layer = block(config, width, config.count("heads", default=16), inner)
    if config.number("ls_init_value", 0.1):
        layer += (vector("vision_model.layers.ls_1", width), vector("vision_model.layers.ls_2", width))
    optional = {
        "use_abs_posemb": linear("vision_model.positional_embedding", width, (size // patch) ** 2),
        "use_cls_token": vector("vision_model.class_embedding", width),
        "use_ln_pre": layer_norm("vision_model.ln_pre", width),
        "use_ln_post": layer_norm("vision_model.ln_post", width),
    }
    return [
        *(weight for key, weight in optional.items() if config.flag(key, key in ("use_abs_posemb", "use_ln_pre"))),
        linear("vision_model.conv1", 3 * patch**2, width),
        *layer * layers,
        *linears("vit_downsampler", (width * 3**2, 2 * width), (2 * width * 3**2, 4 * width), bias=True),
        column("vit_large_projector", 4 * width, text_hidden(outer), bias=outer.flag("projector_bias")),
    ]


def step3_vl(outer: Config) -> list[Weight]:
    """Step 3: CLIP's layers without outer norms, two convolutions, and a layer whole on every rank."""
    config = outer.sub("vision_config")
    hidden, inner = config.count("hidden_size", default=1792), config.count("intermediate_size", default=3072)
    heads, layers = config.count("num_attention_heads", default=16), depth_of(config, "num_hidden_layers", default=63)
    out, patch = config.count("output_hidden_size", default=4096), config.count("patch_size", default=14)
    return [
        vector("vision_model.class_embedding", hidden),
        linear("vision_model.patch_embedding", 3 * patch**2, hidden, bias=True),
        linear("vision_model.position_embedding", hidden, patches(config, 728, patch) + 1),
        *block(config, hidden, heads, inner) * layers,
        *linears("vit_downsampler", (hidden * 2**2, out), (out * 3**2, 2 * out), bias=True),
        linear("vit_large_projector", 2 * out, text_hidden(outer), bias=outer.flag("projector_bias", True)),
    ]
