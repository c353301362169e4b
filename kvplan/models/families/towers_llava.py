"""Vision towers with a single sequence of patches and a projector: LLaVA-NeXT and -OneVision, InternVL, BLIP-2, GLM-V,
GLM-OCR.

Missing config keys take the default of the transformers class of the same model_type (5.23). Sharding is from vLLM
0.33's parameters per rank (tests/facts/tower_weights.jsonl).
"""

from dataclasses import replace

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable
from kvplan.models.families.blocks import table
from kvplan.models.families.config import Config
from kvplan.models.families.tower_blocks import (
    block,
    check_heads,
    column,
    depth_of,
    layer_norm,
    linear,
    linears,
    not_held,
    patches,
    row,
    text_hidden,
    vector,
    whole_projector,
    with_defaults,
)
from kvplan.models.families.towers_vision import (
    CLIP_LARGE_336_CONFIG,
    channels,
    clip,
    feature_depth,
    llava_tower,
    merge_area,
    siglip,
    video_patch,
)
from kvplan.models.spec import Part, Weight

GLM = "transformer.vision"
OFFSETS = 4  # of Granite 4 Vision's samples in a square of patches, each with a projector (vLLM 0.33)
DUMMY_HEADS = 7  # of NVLM-D (vLLM 0.33 nvlm_d.py)
TEXT_ONLY_REMEDY = "use --text-only to size the language model alone"


def llava_next(outer: Config) -> list[Weight]:
    """LLaVA 1.6: CLIP as in 1.5, and an embedding for the end of a row of tiles."""
    config, text = llava_tower(outer), text_hidden(outer, 4096)
    hidden, layers = config.count("hidden_size", default=768), depth_of(config, "num_hidden_layers", default=12)
    return [
        *clip(config, layers, feature_depth(outer, layers, -2)),
        vector("image_newline", text),
        *projector(hidden, text, bias=outer.flag("multimodal_projector_bias", True)),
    ]


def projector(inputs: int, outputs: int, *, bias: bool) -> tuple[Weight, ...]:
    """Two layers, sharded over the ranks."""
    return (
        column("multi_modal_projector.linear_1", inputs, outputs, bias=bias),
        row("multi_modal_projector.linear_2", outputs, outputs, bias=bias),
    )


def llava_onevision(outer: Config) -> list[Weight]:
    """SigLIP without its head up to the chosen layer; its projector is replicated on every rank."""
    config = outer.sub("vision_config")
    kind = config.text("model_type", "siglip_vision_model")
    if kind != "siglip_vision_model":
        raise UnsupportedModelError(
            config.where,
            f"model_type {printable(repr(kind), 60)} is not a tower kvplan can size for LLaVA-OneVision",
            TEXT_ONLY_REMEDY,
        )
    hidden = config.count("hidden_size", default=768)
    inner, patch = config.count("intermediate_size", default=3072), config.count("patch_size", default=16)
    heads, layers = config.count("num_attention_heads", default=12), depth_of(config, "num_hidden_layers", default=12)
    depth, text = feature_depth(outer, layers, -1), text_hidden(outer)
    layer, post = block(config, hidden, heads, inner), (layer_norm("vision_tower.post_layernorm", hidden),)
    bias = outer.flag("multimodal_projector_bias", True)
    return [
        linear("vision_tower.patch_embedding", channels(config) * patch**2, hidden, bias=True),
        linear("vision_tower.position_embedding", hidden, patches(config, 224, patch)),
        *layer * depth,
        *not_held(layer) * (layers - depth),
        *not_held(post),
        vector("image_newline", text),
        *whole_projector(hidden, text, text, bias=bias),
    ]


def internvl(outer: Config) -> list[Weight]:
    """InternViT: layers with two scales, and a projector over concatenated neighboring patches."""
    config = outer.sub("vision_config")
    hidden, inner = config.count("hidden_size", default=1024), config.count("intermediate_size", default=4096)
    heads, layers = config.count("num_attention_heads", default=16), depth_of(config, "num_hidden_layers", default=24)
    size, patch = side_of(config, "image_size", 448), side_of(config, "patch_size", 14)
    whole = config.flag("use_mean_pooling", True) or "use_mean_pooling" not in config
    depth = feature_depth_of(outer, layers)
    biased = config.flag("qkv_bias", config.flag("attention_bias"))
    plain = config.text("norm_type", "layer_norm") == "rms_norm"
    qkv, out, *others = block(config, hidden, heads, inner, norm_bias=not plain)
    qkv = replace(qkv, bias=biased)
    if outer.values.get("model_type") in (
        "internvl",
        "interns1",
    ):  # separate queries, keys and values, replicated on every rank
        qkv, out = replace(qkv, split="none"), replace(out, split="none")
    if outer.values.get("model_type") == "NVLM_D":  # heads of no use, which make their number even
        head = Part(heads + DUMMY_HEADS, hidden // heads)
        qkv = replace(qkv, parts=(head,) * 3, split="none")
        out = replace(out, inputs=head.size, split="none")
    norms = tuple(
        vector(f"vision_model.layers.attn.{name}", hidden)
        for name in ("q_norm", "k_norm")
        if config.flag("qk_normalization", config.flag("use_qk_norm"))
    )
    scales = vector("vision_model.layers.ls1", hidden), vector("vision_model.layers.ls2", hidden)
    layer = (qkv, out, *others, *norms, *scales)
    text, area = text_hidden(outer), round(1 / outer.ratio("downsample_ratio", 0.5, 1)) ** 2
    wide = outer.values.get("model_type") == "NVLM_D"
    middle = (
        outer.sub("llm_config" if "llm_config" in outer else "text_config").count("intermediate_size") if wide else text
    )
    return [
        vector("vision_model.class_embedding", hidden),
        linear("vision_model.patch_embedding", channels(config) * patch**2, hidden, bias=True),
        linear("vision_model.position_embedding", hidden, (size // patch) ** 2 + 1),
        *layer * depth,
        *not_held(layer) * (layers - depth),
        *(() if whole else (layer_norm("vision_model.layernorm", hidden),)),
        layer_norm("mlp1.norm", hidden * area),
        *linears("mlp1", (hidden * area, middle), (middle, text), bias=not wide),
    ]


def feature_depth_of(outer: Config, layers: int) -> int:
    """Layers up to the one whose output is used; the first published configs have it as `select_layer`."""
    if "vision_feature_layer" in outer:
        return feature_depth(outer, layers, -1)
    chosen = outer.whole("select_layer", outer.values.get("select_layer", -1), low=-layers, high=layers)
    return layers + chosen + 1 if chosen < 0 else chosen


def side_of(config: Config, key: str, default: int) -> int:
    """A number, or the first of a list of two."""
    sides = config.ints(key) if isinstance(config.values.get(key), list) else None
    return sides[0] if sides else config.count(key, default=default)


def blip_2(outer: Config) -> list[Weight]:
    """BLIP-2: a ViT, queries that attend to its output in every second layer of a BERT, and a projection."""
    config, queries = outer.sub("vision_config"), outer.sub("qformer_config")
    hidden, inner = config.count("hidden_size", default=1408), config.count("intermediate_size", default=6144)
    heads, layers = config.count("num_attention_heads", default=16), depth_of(config, "num_hidden_layers", default=39)
    patch = config.count("patch_size", default=14)
    qkv, *others = block(config, hidden, heads, inner)
    layer = (replace(qkv, bias=config.flag("qkv_bias", True)), *others)
    width = queries.count("hidden_size", default=768)
    return [
        vector("vision_model.class_embedding", hidden),
        linear("vision_model.patch_embedding", channels(config) * patch**2, hidden, bias=True),
        linear("vision_model.position_embedding", hidden, patches(config, 224, patch) + 1),
        *layer * layers,
        layer_norm("vision_model.post_layernorm", hidden),
        linear("query_tokens", width, outer.count("num_query_tokens", default=32)),
        *qformer(queries, width),
        linear("language_projection", width, text_hidden(outer), bias=True),
    ]


def qformer(config: Config, width: int) -> list[Weight]:
    """A BERT in which every n-th layer also attends to the image; replicated on every rank."""
    layers, every = (
        depth_of(config, "num_hidden_layers", default=12),
        config.count("cross_attention_frequency", default=2),
    )
    inner, seen = config.count("intermediate_size", default=3072), config.count("encoder_hidden_size", default=1408)

    def attention(name: str, inputs: int) -> tuple[Weight, ...]:
        return (
            *linears(name, (width, width), (inputs, 2 * width), (width, width), bias=True),
            layer_norm(f"{name}.norm", width),
        )

    feed_forward = (
        *linears("qformer.query", (width, inner), (inner, width), bias=True),
        layer_norm("qformer.output_query.norm", width),
    )
    weights = [layer_norm("qformer.layernorm", width)]
    for index in range(layers):
        weights += [*attention("qformer.attention", width), *feed_forward]
        if index % every == 0:
            weights += attention("qformer.crossattention", seen)
    return weights


def granite4_vision(outer: Config) -> list[Weight]:
    """Granite 4 Vision: SigLIP, and a Q-Former of one layer for each chosen layer and for each of four offsets."""
    config, text = with_defaults(outer.sub("vision_config"), vision_use_head=False), text_hidden(outer)
    hidden, rate = config.count("hidden_size", default=768), outer.text("downsample_rate", "1/2").split("/")
    if len(rate) != 2 or not all(part.isdigit() for part in rate):
        raise outer.fail("downsample_rate", "must be a fraction such as 4/8", "correct the config")
    rows, seen = (int(part) ** 2 for part in rate)
    former = {"num_hidden_layers": 1, "cross_attention_frequency": 1, "encoder_hidden_size": hidden}
    window = [
        linear("projectors.query", hidden, rows),
        linear("projectors.image_positions", hidden, seen),
        *qformer(Config(former, config.where, config.notes), hidden),
        layer_norm("projectors.norm", hidden),
        linear("projectors.out_linear", hidden, text, bias=True),
    ]
    tower = [weight for weight in siglip(config) if not weight.name.endswith("post_layernorm")]
    return [*tower, vector("image_newline", text), *window * (len(outer.items("deepstack_layer_map") or ()) + OFFSETS)]


def glm4v(outer: Config) -> list[Weight]:
    """GLM-4.1V to 4.6V: rotary blocks over video patches with a position table, and a gated merger."""
    config = outer.sub("vision_config")
    hidden, patch = config.count("hidden_size", default=1536), config.count("patch_size", default=14)
    inner = config.count("out_hidden_size", default=4096)
    heads, depth = config.count("num_heads", default=12), depth_of(config, "depth", default=24)
    biased = config.flag("attention_bias")
    return [
        linear("visual.patch_embed.proj", video_patch(config, 14), hidden, bias=True),
        linear("visual.embeddings.position_embedding", hidden, patches(config, 336, patch)),
        vector("visual.post_conv_layernorm", hidden),
        *block(
            config, hidden, heads, inner, attention_bias=biased, mlp_bias=False, norm_bias=False, gated=True
        ) * depth,
        *gated_merger(config, hidden, inner, config.count("intermediate_size", default=13696)),
    ]  # fmt: skip


def gated_merger(config: Config, hidden: int, out: int, middle: int) -> tuple[Weight, ...]:
    """A norm, a convolution over neighboring patches, and a gated projection."""
    return (
        vector("visual.post_layernorm", hidden),
        linear("visual.downsample", hidden * merge_area(config), out, bias=True),
        column("visual.merger.proj", out, out, bias=False),
        layer_norm("visual.merger.post_projection_norm", out),
        linear("visual.merger.gate_up_proj", out, (Part(middle), Part(middle)), "outputs"),
        row("visual.merger.down_proj", middle, out, bias=False),
    )


def glm_ocr(outer: Config) -> list[Weight]:
    """GLM-OCR and GLM-5.3-Flash: rotary blocks with biases and normalized queries and keys."""
    config = outer.sub("vision_config")
    hidden, inner = config.count("hidden_size", default=1024), config.count("intermediate_size", default=4096)
    heads, depth = config.count("num_heads", default=16), depth_of(config, "depth", default=24)
    own, width = "projection_intermediate_size" in config, hidden // check_heads(config, hidden, heads)
    out = config.count("out_hidden_size", default=4096 if own else 1536)
    fallback = outer.sub("text_config").count(
        "intermediate_size", default=out * channels(config)
    )  # vLLM 0.33 glm_ocr.py
    middle = config.count("projection_intermediate_size", default=fallback)
    layer = (
        *block(config, hidden, heads, inner, norm_bias=False, gated=True),
        vector("visual.blocks.attn.q_norm", width),
        vector("visual.blocks.attn.k_norm", width),
    )
    return [
        linear("visual.patch_embed.proj", video_patch(config, 14), hidden, bias=True),
        *layer * depth,
        *gated_merger(config, hidden, out, middle),
    ]


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


def glm4v_9b(outer: Config) -> list[Weight]:
    """GLM-4V 9B: patches merged by a convolution, a gated projection and two marks."""
    config, text, inner = outer.sub("vision_config"), outer.count("hidden_size"), outer.count("ffn_hidden_size")
    hidden, layers = config.count("hidden_size", default=1792), depth_of(config, "num_hidden_layers", default=63)
    heads, patch = config.count("num_heads", default=16), config.count("patch_size", default=14)
    return [
        vector(f"{GLM}.cls_embedding", hidden),
        linear(f"{GLM}.patch_embedding", channels(config) * patch**2, hidden, bias=True),
        linear(f"{GLM}.position_embedding", hidden, config.count("num_positions", default=6401)),
        *block(config, hidden, heads, config.count("intermediate_size", default=15360)) * layers,
        linear(f"{GLM}.conv", hidden * 2**2, text, bias=True),
        linear(f"{GLM}.linear_proj", text, text),
        layer_norm(f"{GLM}.norm1", text),
        linear(f"{GLM}.merged_proj", text, (Part(inner), Part(inner)), "outputs"),
        row(f"{GLM}.dense_4h_to_h", inner, text, bias=False),
        *(vector(f"{GLM}.mark", text),) * 2,
    ]
