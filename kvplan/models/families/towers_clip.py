"""Towers of CLIP's layers with a projector of their own.

Missing config keys take the default of the transformers class of the same model_type (5.23). Parts and sharding are
vLLM 0.33's parameters per rank (tests/facts/architectures.jsonl).
"""

from dataclasses import replace

from kvplan.models.families.blocks import table
from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import depth_of, text_hidden, vector, whole_projector
from kvplan.models.families.towers_vision import CLIP_LARGE_336_CONFIG, clip, feature_depth, llava_tower
from kvplan.models.spec import Weight


def llava_next_video(outer: Config) -> list[Weight]:
    """LLaVA-NeXT-Video: CLIP as in LLaVA 1.6, without an embedding for the end of a row."""
    config, text = llava_tower(outer), text_hidden(outer, 4096)
    layers = depth_of(config, "num_hidden_layers", default=12)
    bias = outer.flag("multimodal_projector_bias", True)
    return [
        *clip(config, layers, feature_depth(outer, layers, -2)),
        *whole_projector(config.count("hidden_size", default=768), text, text, bias=bias),
    ]


def phi3_v(outer: Config) -> list[Weight]:
    """Phi-3-vision: CLIP up to the last layer but one, two separators, and a projector of four joined patches."""
    config, text = Config(CLIP_LARGE_336_CONFIG, outer.where, outer.notes), outer.count("hidden_size")
    hidden, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    return [
        *clip(config, layers, layers - 1),
        replace(  # vLLM 0.33's class makes the language model's table twice
            table("embed_tokens", outer.count("vocab_size"), text, group="vision_audio"), counted=False
        ),
        vector("vision_embed_tokens.glb_GN", 4 * hidden),
        vector("vision_embed_tokens.sub_GN", 4 * hidden),
        *whole_projector(4 * hidden, text, text),
    ]
