"""Step's perception encoder: rotary positions beside a table, two scales a layer, and two convolutions.

Source: vLLM 0.33 step_vl.py and step3_vl.py; compared with their parameters (tests/facts/architectures.jsonl).
"""

from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import block, column, depth_of, layer_norm, linear, text_hidden, vector
from kvplan.models.spec import Weight


def step_vl(outer: Config) -> list[Weight]:
    config = outer.sub("vision_config")
    width, layers = config.count("width", default=1536), depth_of(config, "layers", default=47)
    patch, size = config.count("patch_size", default=14), config.count("image_size", default=728)
    inner = int(width * config.ratio("mlp_ratio", 8960 / 1536))
    layer = block(config, width, config.count("heads", default=16), inner)
    if config.number("ls_init_value", 0.1):
        layer += (vector("vision_model.layers.ls_1", width), vector("vision_model.layers.ls_2", width))
    return [
        *(
            (linear("vision_model.positional_embedding", width, (size // patch) ** 2),)
            if config.flag("use_abs_posemb", True)
            else ()
        ),
        *((vector("vision_model.class_embedding", width),) if config.flag("use_cls_token") else ()),
        linear("vision_model.conv1", 3 * patch**2, width),
        *((layer_norm("vision_model.ln_pre", width),) if config.flag("use_ln_pre", True) else ()),
        *layer * layers,
        *((layer_norm("vision_model.ln_post", width),) if config.flag("use_ln_post") else ()),
        linear("vision_model.vit_downsampler1", width * 3**2, 2 * width, bias=True),
        linear("vision_model.vit_downsampler2", 2 * width * 3**2, 4 * width, bias=True),
        column("vit_large_projector", 4 * width, text_hidden(outer), bias=outer.flag("projector_bias")),
    ]
