"""SigLIP towers that take images of any shape (MiniCPM-V, Phi-4-multimodal), and Phi-4-multimodal's audio encoder.

Missing config keys take the default of the published checkpoints' own classes. Sharding is from vLLM 0.33's parameters
per rank (tests/facts/tower_weights.jsonl).
"""

from dataclasses import replace

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable
from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import (
    block,
    depth_of,
    layer_norm,
    linear,
    linears,
    not_held,
    patches,
    text_hidden,
    vector,
)
from kvplan.models.families.towers_vision import channels, pooling_head
from kvplan.models.spec import Weight

# Rows of a resampler's tables of positions, which are made, not loaded: patches along a side, and moments of videos.
# Source: vLLM 0.33 minicpmv.py (Resampler2_5, Resampler4_5).
SIDE, MOMENTS = 70, 36_000


def navit(config: Config, *, dropped: int, image_size: int) -> list[Weight]:
    """SigLIP without its head, its last norm and its last `dropped` layers."""
    hidden, patch = config.count("hidden_size", default=1152), config.count("patch_size", default=14)
    heads, inner = config.count("num_attention_heads", default=16), config.count("intermediate_size", default=4304)
    layers, layer = depth_of(config, "num_hidden_layers", default=27), block(config, hidden, heads, inner)
    return [
        linear("vision_tower.patch_embedding", channels(config) * patch**2, hidden, bias=True),
        linear("vision_tower.position_embedding", hidden, patches(config, image_size, patch)),
        *layer * (layers - dropped),
        *not_held(layer) * dropped,
    ]


def minicpmv(outer: Config) -> list[Weight]:
    """MiniCPM-V 2.5 to 4.5: queries that attend to an image's patches; the resampler is replicated on every rank."""
    config = outer.sub("vision_config")
    text, seen = text_hidden(outer), config.count("hidden_size", default=1152)
    tables = {
        "pos_embed": SIDE**2,
        **({"temporal_pos_embed": MOMENTS} if str(outer.values.get("version")) == "4.5" else {}),
    }
    return [
        *navit(config, dropped=int(outer.flag("drop_vision_last_layer", True)), image_size=980),
        layer_norm("vision_tower.post_layernorm", seen),
        linear("resampler.query", text, outer.count("query_num", default=64)),
        *((linear("resampler.kv_proj", seen, text),) if seen != text else ()),
        linear("resampler.attn.in_proj", text, 3 * text, bias=True),
        linear("resampler.attn.out_proj", text, text, bias=True),
        *(layer_norm(f"resampler.{name}", text) for name in ("ln_q", "ln_kv", "ln_post")),
        linear("resampler.proj", text, text),
        *(replace(linear(f"resampler.{name}", text, rows), counted=False) for name, rows in tables.items()),
    ]


PHI4_TOWER = {"hidden_size": 1152, "intermediate_size": 4304}  # which the published config does not describe
PHI4_DROPPED = 1  # the output of the last layer but one is used


def phi4mm(outer: Config) -> list[Weight]:
    """Phi-4-multimodal: all but SigLIP's layers is replicated on every rank; the checkpoint's adapters are left out."""
    text = text_hidden(outer)
    config = Config(PHI4_TOWER, outer.where, outer.notes)
    width = config.count("hidden_size")
    return [
        *navit(config, dropped=PHI4_DROPPED, image_size=448),
        *not_held((layer_norm("vision_tower.post_layernorm", width),)),
        *not_held(pooling_head(width, config.count("intermediate_size"))),
        vector("vision_tower.glb_GN", width),
        vector("vision_tower.sub_GN", width),
        *two_layers("vision_tower.img_projection", width, text),
        *conformer(audio_part(outer)),
        *two_layers("audio_tower.audio_projection", conformer_width(audio_part(outer)), text),
        *two_layers("audio_tower.audio_projection_for_vision", conformer_width(audio_part(outer)), text),
    ]


def two_layers(name: str, inputs: int, outputs: int) -> tuple[Weight, Weight]:
    return linear(f"{name}.0", inputs, outputs, bias=True), linear(f"{name}.2", outputs, outputs, bias=True)


def audio_part(outer: Config) -> Config:
    """The encoder's settings; another front end, or none, is an error."""
    processor = outer.sub("audio_processor")
    name, embedding = processor.text("name", "cascades"), outer.sub("embd_layer").sub("audio_embd_layer")
    config = processor.sub("config")
    front, projection = config.text("input_layer", "nemo_conv"), embedding.text("projection_cls", "mlp")
    kinds = {"name": (name, "cascades"), "input_layer": (front, "nemo_conv"), "projection_cls": (projection, "mlp")}
    for key, (stated, known) in kinds.items():
        if stated != known:
            raise UnsupportedModelError(
                processor.where,
                f"{key} {printable(repr(stated), 60)} is not supported (it knows {known})",
                "use --text-only to size the language model alone",
            )
    for key in ("use_qformer", "use_conv_downsample"):
        if embedding.flag(key):
            raise UnsupportedModelError(
                embedding.where, f"{key} is not supported", "use --text-only to size the language model alone"
            )
    return config


def conformer_width(config: Config) -> int:
    return config.count("attention_dim", default=1024)


KERNEL = 3  # of the front end's convolutions


def conformer(config: Config) -> list[Weight]:
    """A convolutional front end over mel bins, then blocks of two feed-forwards, attention and a gated convolution.

    Source: vLLM 0.33 phi4mm_audio.py and phi4mm_utils.py.
    """
    name, width, inner = "audio_tower", conformer_width(config), config.count("linear_units", default=1536)
    heads, kernel = config.count("attention_heads", default=16), config.count("kernel_size", default=3)
    bins, halvings = config.count("input_size", default=80), config.count("time_reduction", default=8).bit_length() - 1
    front = config.sub("nemo_conv_settings").count("conv_channels", default=1024)
    if 2**halvings != config.count("time_reduction", default=8):
        raise config.fail("time_reduction", "is not a power of two", "correct the config")
    length = bins
    for _ in range(halvings):
        length = (length + 1) // 2
    bias = config.sub("relative_attention_bias_args")
    distance = bias.count("t5_bias_max_distance", default=1000) * (1 if bias.flag("t5_bias_symmetric") else 2)
    glu_bias = config.flag("bias_in_glu", True)
    feed_forward = (
        layer_norm(f"{name}.layers.feed_forward.norm", width),
        linear(f"{name}.layers.feed_forward.fc1", width, 2 * inner, bias=glu_bias),
        linear(f"{name}.layers.feed_forward.fc2", inner, width, bias=True),
    )
    layer = (
        *feed_forward,
        *(linear(f"{name}.layers.attn.{part}", width, width, bias=True) for part in ("q", "k", "v", "out_proj")),
        layer_norm(f"{name}.layers.conv.norm", width),
        linear(f"{name}.layers.conv.glu", width, 2 * width, bias=True),
        *((vector(f"{name}.layers.conv.glu.b", 2 * width),) if glu_bias else ()),
        *linears(f"{name}.layers.conv", (kernel, width), (width, width), (width, width), bias=True),
        *feed_forward,
        layer_norm(f"{name}.layers.norm_att", width),
        layer_norm(f"{name}.layers.norm", width),
    )
    return [
        linear(f"{name}.embed.conv", KERNEL**2, front, bias=True),
        *(
            weight
            for _ in range(halvings - 1)
            for weight in (
                linear(f"{name}.embed.depthwise", KERNEL**2, front, bias=True),
                linear(f"{name}.embed.pointwise", front, front, bias=True),
            )
        ),
        linear(f"{name}.embed.out", front * length, width, bias=True),
        linear(f"{name}.relative_attention_bias", heads, distance),
        vector(f"{name}.encoder_embedding.mean", bins),
        vector(f"{name}.encoder_embedding.invstd", bins),
        *layer * depth_of(config, "num_blocks", default=24),
    ]
