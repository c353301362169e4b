"""NVIDIA's towers: RADIO with two scales a layer and positions for large images, and Parakeet's Conformer.

Source: vLLM 0.33 nano_nemotron_vl.py, radio.py, parakeet.py; compared with their parameters
(tests/facts/architectures.jsonl).
"""

from math import ceil

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable
from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import block, depth_of, layer_norm, linear, linears, text_hidden, vector
from kvplan.models.spec import Weight

# Width, layers, heads and MLP. Source: vLLM 0.33 transformers_utils/configs/radio.py (VIT_TIMM_DIM_BY_NAME).
VITS = {
    "vit_small_patch16_224": (384, 12, 6, 1536), "vit_base_patch16_224": (768, 12, 12, 3072),
    "vit_large_patch16_224": (1024, 24, 16, 4096), "vit_huge_patch16_224": (1280, 32, 16, 5120),
    "vit_so400m_patch16_224": (1152, 27, 16, 4304),
}  # fmt: skip
NAME, SOUND = "vision_model", "sound_encoder.layers"
STEPS = 3  # of the kernels over time and mel bins


def radio(config: Config) -> list[Weight]:
    args = config.sub("args")
    kind = args.text("model")
    if kind not in VITS:
        raise UnsupportedModelError(args.where, f"model {printable(repr(kind), 60)} is not one of {', '.join(VITS)}")
    width, layers, heads, inner = VITS[kind]
    patch, frames = config.count("patch_size", default=16), config.count("video_temporal_patch_size", default=1)
    teachers = len(args.items("teachers") or ()) if args.flag("cls_token_per_teacher") else 1
    multiple = args.count("register_multiple", default=0, low=0)
    tokens = teachers + (multiple - teachers % multiple if multiple else 0)
    layer = (*block(args, width, heads, inner), *(vector(f"{NAME}.layers.ls{i}", width) for i in (1, 2)))
    return [
        linear(f"{NAME}.pos_embed", width, ceil(args.count("cpe_max_size", default=2048) / patch) ** 2),
        linear(f"{NAME}.embedder", 3 * patch**2, width),
        *((linear(f"{NAME}.video_embedder", 3 * frames * patch**2, width),) if frames > 1 else ()),
        linear(f"{NAME}.cls_token", width, tokens),
        *layer * layers,
    ]


def parakeet(config: Config, text: int) -> list[Weight]:
    """Convolutions that shorten the sound, blocks without sharding, and a projection."""
    hidden, inner = config.count("hidden_size", default=1024), config.count("intermediate_size", default=4096)
    front, bins = config.count("subsampling_conv_channels", default=256), config.count("num_mel_bins", default=80)
    halvings = config.count("subsampling_factor", default=8).bit_length() - 1
    kernel, biased = config.count("conv_kernel_size", default=9), config.flag("convolution_bias", True)
    out, projected = config.count("projection_hidden_size"), config.flag("projection_bias")
    layer = (
        *linears(f"{SOUND}.feed_forward", (hidden, inner), (inner, hidden)) * 2,
        *linears(f"{SOUND}.self_attn", (hidden, hidden)) * 5,
        *(vector(f"{SOUND}.self_attn.bias", hidden),) * 2,
        *linears(f"{SOUND}.conv", (hidden, 2 * hidden), (kernel, hidden), (hidden, hidden), bias=biased),
        *(layer_norm(f"{SOUND}.norm", hidden),) * 6,
    )
    subsampling = linears("sound_encoder.subsampling", (STEPS**2, front), (front, front), bias=True)
    return [
        linear("sound_encoder.conv", STEPS**2, front, bias=True),
        *subsampling * (halvings - 1),
        linear("sound_encoder.linear", front * (bins // 2**halvings), hidden, bias=True),
        *layer * depth_of(config, "num_hidden_layers", default=24),
        vector("sound_encoder.projection.norm", hidden),
        *linears("sound_encoder.projection", (hidden, out), (out, text), bias=projected),
    ]


def parsed(config: Config) -> list[Weight]:
    """Nemotron Parse: RADIO, four columns joined, and the three summaries of its teachers beside them."""
    tower, wide, name = radio(config), 1024, "encoder.neck"
    seen = tower[1].parts[0].size
    return [
        *tower,
        linear(f"{name}.conv1", seen, wide, bias=True),
        linear(f"{name}.conv2", wide * 4, wide),
        linear(f"{name}.sum_proj", 3 * seen, wide, "outputs", bias=True),
        *(layer_norm(f"{name}.norm", wide),) * 3,
    ]


def nano_nemotron(outer: Config) -> list[Weight]:
    """Nemotron Nano VL and Omni: neighboring patches joined, and two layers without biases."""
    text, middle = text_hidden(outer), outer.count("projector_hidden_size")
    area = outer.count("vit_hidden_size") * round(1 / outer.ratio("downsample_ratio", 0.5, 1)) ** 2
    return [
        *radio(outer.sub("vision_config")),
        vector("mlp1.norm", area),
        *linears("mlp1", (area, middle), (middle, text)),
        *(parakeet(outer.sub("sound_config"), text) if "sound_config" in outer else ()),
    ]
