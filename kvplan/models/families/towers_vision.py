"""Vision towers: SigLIP, CLIP, Pixtral, Llama 3.2 and 4, Qwen-VL, Kimi, MiniMax, Step.

Missing config keys take the default of the transformers class of the same model_type (5.23). Sharding is from vLLM
0.33's parameters per rank for those that were run (SigLIP, Pixtral, Llama 4, Qwen3.5, Kimi), else from its model files
(vllm/model_executor/models and vllm/models/minimax_m3).
"""

from dataclasses import replace
from math import prod

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable
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
)
from kvplan.models.spec import Part, Weight


def siglip(config: Config) -> list[Weight]:
    """SigLIP; its pooling head, which no server builds, is in a checkpoint unless the config disables it."""
    hidden = config.count("hidden_size", default=768)
    inner = config.count("intermediate_size", default=3072)
    heads, layers = config.count("num_attention_heads", default=12), depth_of(config, "num_hidden_layers", default=12)
    patch = config.count("patch_size", default=16)
    rows = config.count("num_patches", default=patches(config, 224, patch))
    return [
        linear("vision_tower.patch_embedding", channels(config) * patch**2, hidden, bias=True),
        linear("vision_tower.position_embedding", hidden, rows),
        *block(config, hidden, heads, inner) * layers,
        layer_norm("vision_tower.post_layernorm", hidden),
        *(not_held(pooling_head(hidden, inner)) if config.flag("vision_use_head", True) else ()),
    ]


def pooling_head(hidden: int, inner: int) -> tuple[Weight, ...]:
    """One query that attends to all patches; only its MLP is sharded."""
    return (
        vector("vision_tower.head.probe", hidden),
        linear("vision_tower.head.attention.in_proj", hidden, 3 * hidden, bias=True),
        linear("vision_tower.head.attention.out_proj", hidden, hidden, bias=True),
        layer_norm("vision_tower.head.layernorm", hidden),
        column("vision_tower.head.mlp.fc1", hidden, inner),
        row("vision_tower.head.mlp.fc2", inner, hidden),
    )


def channels(config: Config) -> int:
    return config.count("num_channels", "in_channels", "in_chans", default=3)


def gemma3(outer: Config) -> list[Weight]:
    config = outer.sub("vision_config")
    hidden = config.count("hidden_size", default=768)
    return [
        *siglip(config),
        vector("multi_modal_projector.mm_soft_emb_norm", hidden),
        linear("multi_modal_projector.mm_input_projection", hidden, text_hidden(outer)),
    ]


def feature_depth(outer: Config, layers: int, default: int) -> int:
    """Number of layers that a server builds: up to the deepest whose output is used (`vision_feature_layer`)."""
    key, chosen = outer.first(("vision_feature_layer", "mm_vision_select_layer"))
    indices = chosen if isinstance(chosen, list) and chosen else [default if chosen is None else chosen]
    depths = [outer.whole(key, i, low=-layers, high=layers) for i in indices]
    return max(layers + i + 1 if i < 0 else i for i in depths)


def clip(config: Config, layers: int, depth: int) -> list[Weight]:
    """CLIP's vision half; a server builds `depth` layers, and drops the last norm if that is not all of them."""
    hidden, patch = config.count("hidden_size", default=768), config.count("patch_size", default=32)
    heads, inner = config.count("num_attention_heads", default=12), config.count("intermediate_size", default=3072)
    layer = block(config, hidden, heads, inner)
    post = (layer_norm("vision_tower.post_layernorm", hidden),)
    return [
        vector("vision_tower.class_embedding", hidden),
        linear("vision_tower.patch_embedding", channels(config) * patch**2, hidden),
        linear("vision_tower.position_embedding", hidden, patches(config, 224, patch) + 1),
        layer_norm("vision_tower.pre_layrnorm", hidden),
        *layer * depth,
        *not_held(layer) * (layers - depth),
        *(post if depth == layers else not_held(post)),
    ]


CLIP_LARGE_336 = "openai/clip-vit-large-patch14-336"
CLIP_LARGE_336_CONFIG = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}


def llava_tower(outer: Config) -> Config:
    """The tower's config; the first published LLaVA configs are flat and only name the tower."""
    if "vision_config" not in outer:
        named = outer.text("mm_vision_tower", CLIP_LARGE_336)
        if named != CLIP_LARGE_336:
            raise UnsupportedModelError(
                outer.where,
                f"mm_vision_tower {printable(repr(named), 60)} is not a tower kvplan knows (it knows {CLIP_LARGE_336})",
                "use a config with a vision_config",
            )
        return Config(CLIP_LARGE_336_CONFIG, outer.where, outer.notes)
    config = outer.sub("vision_config")
    kind = config.text("model_type", "clip_vision_model")
    if kind != "clip_vision_model":
        raise UnsupportedModelError(
            config.where,
            f"model_type {printable(repr(kind), 60)} is not a tower kvplan can size for LLaVA",
            "use --text-only to size the language model alone",
        )
    return config


def llava(outer: Config) -> list[Weight]:
    """LLaVA 1.5: CLIP without its last layer, and two projection layers."""
    config, text = llava_tower(outer), text_hidden(outer, 4096)
    hidden, layers = config.count("hidden_size", default=768), depth_of(config, "num_hidden_layers", default=12)
    bias = outer.flag("multimodal_projector_bias", True)
    return [
        *clip(config, layers, feature_depth(outer, layers, -2)),
        column("multi_modal_projector.linear_1", hidden, text, bias=bias),
        row("multi_modal_projector.linear_2", text, text, bias=bias),
    ]


def mistral3(outer: Config) -> list[Weight]:
    """Pixtral: rotary positions, no biases; its patches are merged before the projector."""
    config = outer.sub("vision_config")
    hidden, inner = config.count("hidden_size", default=1024), config.count("intermediate_size", default=4096)
    heads, layers = config.count("num_attention_heads", default=16), depth_of(config, "num_hidden_layers", default=24)
    patch, merge = config.count("patch_size", default=16), outer.count("spatial_merge_size", default=2)
    depth = feature_depth(outer, layers, -1)
    layer = block(config, hidden, heads, inner, attention_bias=False, mlp_bias=False, norm_bias=False, gated=True)
    text, bias = text_hidden(outer), outer.flag("multimodal_projector_bias")
    return [
        linear("vision_tower.patch_conv", channels(config) * patch**2, hidden),
        vector("vision_tower.ln_pre", hidden),
        *layer * depth,
        *not_held(layer) * (layers - depth),
        vector("multi_modal_projector.norm", hidden),
        linear("multi_modal_projector.patch_merger", hidden * merge**2, hidden),
        column("multi_modal_projector.linear_1", hidden, text, bias=bias),
        row("multi_modal_projector.linear_2", text, text, bias=bias),
    ]


def pixtral(outer: Config) -> list[Weight]:
    """Pixtral in Mistral's own format: Mistral 3's tower, with a merger where stated, whole projections."""
    config, text = outer.sub("vision_config"), text_hidden(outer)
    hidden, bias = config.count("hidden_size", default=1024), config.flag("adapter_bias", True)
    *tower, norm, patch_merger, _, _ = mistral3(outer)
    area = config.count("spatial_merge_size", default=1) ** 2
    is_merged = config.text("mm_projector_id", "") == "patch_merge"
    return [
        *tower,
        *((norm,) if config.flag("add_pre_mm_projector_layer_norm") else ()),
        *((linear(patch_merger.name, hidden * area, hidden),) if is_merged else ()),
        *linears("multi_modal_projector", (hidden, text), (text, text), bias=bias),
    ]


def llama4(outer: Config) -> list[Weight]:
    config = outer.sub("vision_config")
    hidden, inner = config.count("hidden_size", default=768), config.count("intermediate_size", default=5632)
    heads, layers = config.count("num_attention_heads", default=16), depth_of(config, "num_hidden_layers", default=34)
    patch, shuffle = config.count("patch_size", default=14), config.ratio("pixel_shuffle_ratio", 0.5, 1)
    middle = config.count("projector_input_dim", default=4096)
    last = config.count("projector_output_dim", default=4096)
    return [
        vector("vision_model.class_embedding", hidden),
        linear("vision_model.positional_embedding_vlm", hidden, patches(config, 448, patch) + 1),
        column("vision_model.patch_embedding.linear", channels(config) * patch**2, hidden, bias=False),
        layer_norm("vision_model.layernorm_pre", hidden),
        *block(config, hidden, heads, inner) * layers,
        layer_norm("vision_model.layernorm_post", hidden),
        column("vision_model.vision_adapter.mlp.fc1", int(hidden // shuffle**2), middle, bias=False),
        row("vision_model.vision_adapter.mlp.fc2", last, last, bias=False),
        column(
            "multi_modal_projector.linear_1", config.count("vision_output_dim", default=7680), text_hidden(outer),
            bias=False,
        ),
    ]  # fmt: skip


def mllama(outer: Config) -> list[Weight]:
    """Llama 3.2 Vision: tiles with gated position tables, then global layers with gates."""
    config = outer.sub("vision_config")
    hidden, inner = config.count("hidden_size", default=1280), config.count("intermediate_size", default=5120)
    heads, patch = config.count("attention_heads", default=16), config.count("patch_size", default=14)
    layers, last = depth_of(config, "num_hidden_layers", default=32), depth_of(config, "num_global_layers", default=8)
    tiles, rows = config.count("max_num_tiles", default=4), patches(config, 448, patch) + 1
    ratios = config.items("supported_aspect_ratios")
    ratio_ids = (8 if ratios is None else len(ratios)) + 1
    layer = block(config, hidden, heads, inner, attention_bias=False)
    gates = (
        vector("vision_model.global_transformer.gate_attn", 1),
        vector("vision_model.global_transformer.gate_ffn", 1),
    )
    width = config.count("vision_output_dim", default=7680)
    return [
        vector("vision_model.class_embedding", hidden),
        linear("vision_model.patch_embedding", channels(config) * patch**2, hidden),
        vector("vision_model.gated_positional_embedding.gate", 1),
        linear("vision_model.gated_positional_embedding.embedding", hidden, rows),
        linear("vision_model.gated_positional_embedding.tile_embedding", tiles * rows * hidden, ratio_ids),
        *tile_positions("pre_tile_positional_embedding", ratio_ids, tiles * hidden),
        *tile_positions("post_tile_positional_embedding", ratio_ids, tiles * hidden),
        layer_norm("vision_model.layernorm_pre", hidden),
        layer_norm("vision_model.layernorm_post", hidden),
        *layer * layers,
        *(layer + gates) * last,
        linear("multi_modal_projector", width, text_hidden(outer, 4096), bias=True),
    ]


def tile_positions(name: str, ratio_ids: int, width: int) -> tuple[Weight, ...]:
    return vector(f"vision_model.{name}.gate", 1), linear(f"vision_model.{name}.embedding", width, ratio_ids)


def qwen2_vl(outer: Config) -> list[Weight]:
    config = outer.sub("vision_config")
    hidden, depth = config.count("embed_dim", default=1280), depth_of(config, "depth", default=32)
    inner = int(hidden * config.ratio("mlp_ratio", 4))
    return [
        linear("visual.patch_embed.proj", video_patch(config, 14), hidden),
        *block(config, hidden, config.count("num_heads", default=16), inner) * depth,
        layer_norm("visual.merger.ln_q", hidden),
        *merger("visual.merger", hidden, config.count("hidden_size", default=3584), merge_area(config)),
    ]


def video_patch(config: Config, patch_default: int) -> int:
    """Inputs of the patch convolution: channels x frames x height x width."""
    frames = config.count("temporal_patch_size", default=2)
    return channels(config) * frames * config.count("patch_size", default=patch_default) ** 2


def merge_area(config: Config) -> int:
    return config.count("spatial_merge_size", default=2) ** 2


def merger(name: str, hidden: int, out: int, area: int) -> tuple[Weight, ...]:
    """Concatenated neighboring patches, through two layers."""
    wide = hidden * area
    return column(f"{name}.linear_fc1", wide, wide), row(f"{name}.linear_fc2", wide, out)


def qwen2_5_vl(outer: Config) -> list[Weight]:
    """Qwen2.5-VL: RMS norms and a gated MLP."""
    config = outer.sub("vision_config")
    hidden, depth = config.count("hidden_size", default=3584), depth_of(config, "depth", default=32)
    inner, out = config.count("intermediate_size", default=3420), config.count("out_hidden_size", default=3584)
    heads = config.count("num_heads", default=16)
    return [
        linear("visual.patch_embed.proj", video_patch(config, 14), hidden),
        *block(config, hidden, heads, inner, norm_bias=False, gated=True) * depth,
        vector("visual.merger.ln_q", hidden),
        *merger("visual.merger", hidden, out, merge_area(config)),
    ]


def qwen3_vl(outer: Config) -> list[Weight]:
    """Qwen3-VL; each of the `deepstack_visual_indexes` has a separate merger."""
    config = outer.sub("vision_config")
    taps = config.ints("deepstack_visual_indexes")
    hidden, area = config.count("hidden_size", default=1152), merge_area(config)
    out = config.count("out_hidden_size", default=3584)
    deep = (
        layer_norm("visual.deepstack_merger_list.norm", hidden * area),
        *merger("visual.deepstack_merger_list", hidden, out, area),
    )
    return [*qwen3_5(outer), *deep * (3 if taps is None else len(taps))]


def qwen3_5(outer: Config) -> list[Weight]:
    """Qwen3.5 and later: Qwen3-VL's tower without deepstack mergers."""
    config = outer.sub("vision_config")
    hidden, depth = config.count("hidden_size", default=1152), depth_of(config, "depth", default=27)
    inner, out = config.count("intermediate_size", default=4304), config.count("out_hidden_size", default=3584)
    return [
        linear("visual.patch_embed.proj", video_patch(config, 16), hidden, bias=True),
        linear("visual.pos_embed", hidden, config.count("num_position_embeddings", default=2304)),
        *block(config, hidden, config.count("num_heads", default=16), inner) * depth,
        layer_norm("visual.merger.norm", hidden),
        *merger("visual.merger", hidden, out, merge_area(config)),
    ]


def kimi_k25(outer: Config) -> list[Weight]:
    """MoonViT; its projector is replicated on every rank."""
    config = outer.sub("vision_config")
    hidden = config.count("vt_hidden_size", "hidden_size", default=1152)
    inner = config.count("vt_intermediate_size", "intermediate_size", default=4304)
    heads = config.count("vt_num_attention_heads", "num_attention_heads", default=16)
    layers = depth_of(config, "vt_num_hidden_layers", "num_hidden_layers", default=27)
    grid = config.count("init_pos_emb_height", "pos_emb_height", default=64)
    grid *= config.count("init_pos_emb_width", "pos_emb_width", default=64)
    area = 1
    for side in config.ints("merge_kernel_size") or (2, 2):
        area *= side
    patch = config.count("patch_size", default=14)
    return [
        linear("vision_tower.patch_embed.proj", channels(config) * patch**2, hidden, bias=True),
        linear("vision_tower.patch_embed.pos_emb", hidden, grid),
        *block(config, hidden, heads, inner) * layers,
        layer_norm("vision_tower.final_layernorm", hidden),
        layer_norm("mm_projector.pre_norm", hidden),
        *linears("mm_projector", (hidden * area, hidden * area), (hidden * area, text_hidden(outer)), bias=True),
    ]


KIMI_K3_KINDS = {"norm_type": "rmsnorm", "mlp_type": "mlp2", "mm_projector_type": "patchmergerv2"}


def kimi_k3(outer: Config) -> list[Weight]:
    """MoonViT without biases, with attention wider than its hidden size; sharded only if the ranks divide the heads."""
    config = outer.sub("vision_config")
    hidden, inner = config.count("vt_hidden_size", default=1024), config.count("vt_intermediate_size", default=4096)
    heads, qkv = config.count("vt_num_attention_heads", default=12), config.count("qkv_hidden_size", default=1536)
    layers = depth_of(config, "vt_num_hidden_layers", default=27)
    grid = config.count("init_pos_emb_height", default=64) * config.count("init_pos_emb_width", default=64)
    area = prod(config.ints("merge_kernel_size") or (2, 2))
    for key, known in KIMI_K3_KINDS.items():
        kind = config.text(key, known)
        if kind != known:
            raise UnsupportedModelError(
                config.where,
                f"{key} {printable(repr(kind), 60)} is not supported (it knows {known})",
                "use --text-only to size the language model alone",
            )
    head = Part(check_heads(config, qkv, heads), qkv // heads)
    name, biased = "vision_tower.encoder.blocks", config.flag("linear_bias")
    layer = (
        linear(f"{name}.wqkv", hidden, (head, head, head), "outputs", bias=config.flag("attn_bias")),
        row(f"{name}.wo", qkv, hidden, bias=config.flag("attn_bias")),
        column(f"{name}.mlp.fc0", hidden, inner, bias=biased),
        row(f"{name}.mlp.fc1", inner, hidden, bias=biased),
        vector(f"{name}.norm0", hidden),
        vector(f"{name}.norm1", hidden),
    )
    patch = config.count("patch_size", default=14)
    wide, text = config.count("mm_hidden_size", default=hidden) * area, text_hidden(outer)
    return [
        linear(
            "vision_tower.patch_embed.proj",
            channels(config) * patch**2,
            hidden,
            bias=config.flag("patch_embed_proj_bias"),
        ),
        linear("vision_tower.patch_embed.pos_emb", hidden, grid),
        *(replace(weight, even=heads) for weight in layer * layers),
        vector("vision_tower.encoder.final_layernorm", hidden),
        *linears("mm_projector", (wide, wide), (wide, text), bias=biased),
        vector("mm_projector.post_norm", text),
    ]


def minimax_m3(outer: Config) -> list[Weight]:
    """MiniMax-M3: CLIP's blocks over video patches, a projector, and a second one over merged patches."""
    config = outer.sub("vision_config")
    grouping = config if "spatial_merge_size" in config else config.sub("img_token_compression_config")
    hidden, inner = config.count("hidden_size", default=1280), config.count("intermediate_size", default=5120)
    heads, layers = config.count("num_attention_heads", default=16), depth_of(config, "num_hidden_layers", default=32)
    patch, frames = config.count("patch_size", default=14), grouping.count("temporal_patch_size", default=2)
    text, middle = text_hidden(outer, 6144), outer.count("projector_hidden_size", default=6144)
    return [
        linear("vision_tower.patch_embedding", channels(config) * frames * patch**2, hidden),
        layer_norm("vision_tower.pre_layrnorm", hidden),
        *block(config, hidden, heads, inner) * layers,
        column("multi_modal_projector.linear_1", hidden, middle),
        row("multi_modal_projector.linear_2", middle, text),
        column("patch_merge_mlp.linear_1", text * merge_area(grouping), middle),
        row("patch_merge_mlp.linear_2", middle, text),
    ]
