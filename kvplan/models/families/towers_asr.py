"""Encoders of speech before a language model: FireRedASR 2's Conformer, and FunASR's memory blocks.

Source: vLLM 0.33 fireredasr2.py, conformer_encoder.py and funasr.py; compared with their parameters
(tests/facts/architectures.jsonl).
"""

from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import column, depth_of, layer_norm, linear, linears, row, vector
from kvplan.models.families.towers_audio import KERNEL
from kvplan.models.spec import Part, Weight

NAME = "audio_encoder"
CHANNELS = 32  # of FireRedASR 2's first two convolutions
JOINED = 7  # frames that FunASR's encoder sees at once
BINS = 80
ADAPTER = 2048, 8, 2  # width, heads and layers of FunASR's, whatever its config says


def firered(outer: Config) -> list[Weight]:
    """Blocks of two feed-forwards, attention by relative positions and a convolution; on every rank."""
    config, text = outer.sub("audio_encoder_conf"), outer.count("hidden_size")
    width, kernel = config.count("d_model", default=1280), config.count("kernel_size", default=33)
    bins, layer = config.count("idim", default=BINS), f"{NAME}.layers"
    feed_forward = layer_norm(f"{layer}.ffn", width), *linears(f"{layer}.ffn", (width, 4 * width), bias=True)
    feed_forward += linears(f"{layer}.ffn", (4 * width, width), bias=True)
    block = (
        *feed_forward * 2,
        *(vector(f"{layer}.mhsa.pos_bias", width),) * 2,
        *linears(f"{layer}.mhsa", (width, 5 * width)),
        *(layer_norm(f"{layer}.norm", width),) * 5,
        *linears(f"{layer}.conv", (width, 4 * width), (kernel, 2 * width), (2 * width, width)),
        layer_norm(f"{layer}.conv.batch_norm", 2 * width),
    )
    seen, joined = CHANNELS * (((bins - 1) // 2 - 1) // 2), outer.count("encoder_downsample_rate", default=2)
    return [
        *linears(f"{NAME}.conv", (KERNEL**2, CHANNELS), (CHANNELS * KERNEL**2, CHANNELS), (seen, width), bias=True),
        *block * depth_of(config, "n_layers_enc", default=16),
        *linears("encoder_projector", (width * joined, text), (text, text), bias=True),
    ]


def funasr(outer: Config) -> list[Weight]:
    """Attention beside a convolution of its values, feed-forwards alone sharded, then two layers of an adapter."""
    config, text = outer.sub("audio_encoder_conf"), outer.count("hidden_size")
    width, inner = config.count("output_size", default=512), config.count("linear_units", default=2048)
    kernel, bins = config.count("kernel_size", default=11), JOINED * BINS

    def block(inputs: int) -> tuple[Weight, ...]:
        return (
            *linears(f"{NAME}.self_attn", (inputs, 3 * width), (width, width), bias=True),
            linear(f"{NAME}.self_attn.fsmn_block", kernel, width),
            column(f"{NAME}.feed_forward.w_1", width, inner),
            row(f"{NAME}.feed_forward.w_2", inner, width),
            layer_norm(f"{NAME}.norm1", inputs),
            layer_norm(f"{NAME}.norm2", width),
        )

    plain = depth_of(config, "num_blocks", default=50) - 1 + depth_of(config, "tp_blocks", default=20)
    middle, heads, layers = ADAPTER
    head, narrow, name = Part(heads, text // heads), text // 4, "audio_adaptor.blocks"
    layer = (
        linear(f"{name}.qkv", text, (head, head, head), "outputs", bias=True),
        row(f"{name}.out_proj", text, text),
        column(f"{name}.w_1", text, narrow),
        row(f"{name}.w_2", narrow, text),
        *(layer_norm(f"{name}.norm", text),) * 2,
    )
    return [
        *block(bins),
        *block(width) * plain,
        *(layer_norm(f"{NAME}.after_norm", width),) * 2,
        column("audio_adaptor.linear1", width, middle),
        row("audio_adaptor.linear2", middle, text),
        *layer * layers,
    ]
