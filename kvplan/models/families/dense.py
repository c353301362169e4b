"""Dense decoder-only transformers with rotary positions: Llama and similar models."""

from typing import Literal

from kvplan.core.records import dataclass
from kvplan.models.families import rope
from kvplan.models.families.blocks import (
    Heads,
    SpecDraft,
    attention,
    column,
    embedding,
    final_norm,
    gated_mlp,
    norm,
    plain_mlp,
    qk_norms,
    vector,
)
from kvplan.models.families.config import Config
from kvplan.models.spec import FullAttention, LayerCache, Place, Rope, SlidingWindow, Weight


@dataclass(frozen=True, slots=True)
class Traits:
    """A family's defaults for missing keys, and its fixed properties."""

    qkv_bias: bool | None = None  # None: `attention_key` decides
    o_bias: bool | None = None
    serves_o_bias: bool = True  # False: vLLM's class has none even where transformers' follows attention_bias
    mlp_bias: bool | None = None  # None: `mlp_key` decides
    attention_key: str = "attention_bias"
    mlp_key: str = "mlp_bias"
    bias_default: bool = False
    gated: bool = True
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    layer_norm: bool = False
    norm_bias: bool = True
    qk_norm: Literal["no", "head", "full", "split", "flag_head", "flag_split"] = "no"
    tied: bool = False
    window_default: int | None = None
    windows: Literal["no", "all", "flagged", "types"] = "no"
    full_every: int | None = None  # with windows="types" and no layer_types: every n-th layer is full
    every_stage: bool = False  # the embedding and the final norm are on every pipeline stage
    head_every_stage: bool = False
    lm_head_bias: bool = False
    sinks: bool = False  # a learned logit per head
    gate: bool = False  # the heads' outputs are gated by a projection of their own, as wide


LLAMA = Traits()
FOUR_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

GLM4 = Traits(
    o_bias=False,
    mlp_bias=False,
    norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)

TRAITS: dict[str, Traits] = {
    "llama": LLAMA,
    "internlm2": Traits(qkv_bias=False, o_bias=False, mlp_bias=False),
    "internlm3": LLAMA,
    "granite": LLAMA,
    "seed_oss": Traits(qkv_bias=True, o_bias=False),
    "smollm3": Traits(tied=True),
    "mistral": Traits(windows="all", window_default=4096),
    "ministral3": Traits(windows="all"),
    "qwen2": Traits(qkv_bias=True, o_bias=False, mlp_bias=False, windows="flagged"),
    "mimo": Traits(qkv_bias=True, o_bias=False, mlp_bias=False, windows="flagged"),
    "qwen2_5_vl": Traits(qkv_bias=True, o_bias=False, mlp_bias=False, windows="flagged"),
    "qwen2_5_omni_text": Traits(qkv_bias=True, o_bias=False, mlp_bias=False, windows="flagged"),
    "qwen2_vl": Traits(qkv_bias=True, o_bias=False, mlp_bias=False, windows="flagged"),
    "qwen3": Traits(serves_o_bias=False, mlp_bias=False, qk_norm="head", windows="flagged"),
    "qwen3_vl_text": Traits(serves_o_bias=False, mlp_bias=False, qk_norm="head"),
    "phi3": Traits(windows="all"),
    "gemma": Traits(mlp_bias=False, tied=True),
    "gemma2": Traits(mlp_bias=False, norms=FOUR_NORMS, tied=True, windows="types", full_every=2, every_stage=True),
    "gemma3_text": Traits(
        mlp_bias=False, norms=FOUR_NORMS, tied=True, qk_norm="head", windows="types", full_every=6, every_stage=True,
    ),
    "cohere": Traits(
        mlp_bias=False, norms=("input_layernorm",), layer_norm=True, norm_bias=False, qk_norm="flag_split", tied=True,
        every_stage=True,
    ),
    "cohere2": Traits(
        mlp_bias=False, norms=("input_layernorm",), layer_norm=True, norm_bias=False, tied=True, windows="types",
        full_every=4, every_stage=True,
    ),
    "olmo2": Traits(mlp_bias=False, norms=("post_attention_layernorm", "post_feedforward_layernorm"), qk_norm="full"),
    "olmo3": Traits(
        mlp_bias=False, norms=("post_attention_layernorm", "post_feedforward_layernorm"), qk_norm="full",
        windows="types", full_every=4,
    ),
    "starcoder2": Traits(
        gated=False, layer_norm=True, tied=True, windows="all", window_default=4096,
        attention_key="use_bias", mlp_key="use_bias", bias_default=True,
    ),
    "glm": Traits(qkv_bias=None, o_bias=False, mlp_bias=False),
    "glm4": GLM4,
    "glm4v_text": GLM4,
    "glm_ocr_text": GLM4,
    "exaone4": Traits(mlp_bias=False, norms=("post_attention_layernorm", "post_feedforward_layernorm"),
                      qk_norm="head", windows="types", full_every=4),
    "arcee": Traits(gated=False),
    "cwm": Traits(windows="types"),
    "jais2": Traits(gated=False, layer_norm=True),
    "ernie4_5": Traits(tied=True),
    "paddleocr_vl_text": Traits(tied=True),
    "dots_ocr": Traits(qkv_bias=True, o_bias=False, mlp_bias=False),
    "phi3_v": Traits(windows="all"),
    "Keye": Traits(serves_o_bias=False, mlp_bias=False, qk_norm="head", windows="flagged"),
    "KeyeVL1_5": Traits(serves_o_bias=False, mlp_bias=False, qk_norm="head", windows="flagged"),
    "cosmos3_edge_text": Traits(gated=False),
    "muse_glimmer_text": Traits(
        qkv_bias=False, o_bias=False, mlp_bias=False, norms=FOUR_NORMS, gate=True, windows="types",
    ),
    "granite_swa": Traits(windows="types", sinks=True),
    "orion": Traits(qkv_bias=False, o_bias=False, mlp_bias=False, layer_norm=True),
    "plamo3": Traits(qkv_bias=False, o_bias=False, mlp_bias=False, norms=FOUR_NORMS, qk_norm="head", windows="types"),
    "solar": Traits(windows="all"),
    "nemotron": Traits(gated=False, layer_norm=True),
    "exaone": LLAMA,
    "minicpm": Traits(qkv_bias=False, o_bias=False, mlp_bias=False),
    "PanguEmbedded": Traits(attention_key="bias"),
}  # fmt: skip


def heads_of(config: Config) -> Heads:
    """Head counts and width; a missing, null or 0 head_dim is derived and must be a whole number."""
    num_heads = config.count("num_attention_heads", "n_head", "n_heads")
    hidden = config.count("hidden_size", "n_embd", "d_model")
    num_kv = config.maybe_count("num_key_value_heads", "num_kv_heads")
    if num_kv is None:
        config.notes.append(f"num_key_value_heads is not given: every one of the {num_heads} heads keeps K and V (MHA)")
        num_kv = num_heads
    if num_heads % num_kv:
        raise config.fail("num_key_value_heads", f"does not divide num_attention_heads ({num_kv}, {num_heads})")
    head_dim = config.maybe_count("head_dim", "hidden_size_per_head", "kv_channels")
    if head_dim is None:
        if hidden % num_heads:
            raise config.fail(
                "head_dim", f"is missing and hidden_size / num_attention_heads is not whole ({hidden} / {num_heads})"
            )
        head_dim = hidden // num_heads
        if not config.values.get("head_dim"):
            config.notes.append(f"head_dim is derived: hidden_size {hidden} / {num_heads} heads = {head_dim}")
    return Heads(num_heads, num_kv, head_dim, head_dim)


def attention_cache(heads: Heads, window: int | None) -> LayerCache:
    if window is None:
        return FullAttention(heads.num_kv_heads, heads.head_dim, heads.head_dim_v)
    return SlidingWindow(heads.num_kv_heads, heads.head_dim, heads.head_dim_v, window)


def layer_windows(config: Config, traits: Traits, num_layers: int) -> list[int | None]:
    """Window of each layer, or None if the layer is full.

    Source: facts on which layers slide, confirmed with vLLM 0.33's own results for real configs.
    """
    window = config.maybe_count("sliding_window")
    if "sliding_window" not in config.values and traits.window_default:
        window = traits.window_default
    types = config.per_layer_names("layer_types", num_layers)
    if window is None or traits.windows == "no":
        if types and traits.windows == "types" and any(t == "sliding_attention" for t in types):
            raise config.fail("sliding_window", "is missing although layer_types has sliding layers")
        return [None] * num_layers
    if traits.windows == "all":
        return [window] * num_layers
    if traits.windows == "flagged" and not config.flag("use_sliding_window"):
        return [None] * num_layers
    if types is not None:
        return [window if kind == "sliding_attention" else None for kind in types]
    if traits.windows == "flagged":
        first = config.count("max_window_layers", default=num_layers, low=0)
        return [None if i < first else window for i in range(num_layers)]
    if traits.full_every is None and "sliding_window_pattern" not in config:
        raise config.fail("layer_types", "missing", "kvplan cannot tell which layers slide")
    every = config.count("sliding_window_pattern", default=traits.full_every)
    return [None if (i + 1) % every == 0 else window for i in range(num_layers)]


def has_qk_norm(config: Config, traits: Traits) -> bool:
    return traits.qk_norm in ("head", "full", "split") or (
        traits.qk_norm.startswith("flag") and config.flag("use_qk_norm")
    )


def attention_layer(config: Config, traits: Traits, hidden: int, heads: Heads) -> tuple[Weight, ...]:
    """A layer's weights except for its feed-forward part."""
    use_bias = config.flag(traits.attention_key, traits.bias_default)
    qkv_bias = use_bias if traits.qkv_bias is None else traits.qkv_bias
    o_bias = traits.serves_o_bias and (use_bias if traits.o_bias is None else traits.o_bias)
    kind: Literal["layer", "rms"] = "layer" if traits.layer_norm else "rms"
    norms = tuple(norm(name, hidden, kind, bias=traits.layer_norm and traits.norm_bias) for name in traits.norms)
    full, split = traits.qk_norm == "full", traits.qk_norm in ("split", "flag_split")
    qk = qk_norms(heads, full=full, split=split) if has_qk_norm(config, traits) else ()
    weights = attention(hidden, heads, qkv_bias=qkv_bias, o_bias=o_bias) + qk + norms
    if traits.gate:
        weights += (column("self_attn.gate_proj", hidden, heads.num_heads * heads.head_dim, "attention"),)
    if traits.sinks:
        weights += (vector("self_attn.sinks", heads.num_heads, "attention", split=True),)
    return weights


def dense_mlp(config: Config, traits: Traits, hidden: int, inner: int) -> tuple[Weight, ...]:
    bias = traits.mlp_bias
    if bias is None:
        bias = config.flag(traits.mlp_key, traits.bias_default)
    return gated_mlp(hidden, inner, bias=bias) if traits.gated else plain_mlp(hidden, inner, bias=bias)


def outer_weights(config: Config, traits: Traits, vocab: int, hidden: int, tied: bool) -> tuple[Weight, ...]:
    """Embedding, head and final norm, and their pipeline stages."""
    everywhere = traits.every_stage or traits.head_every_stage
    place = Place.EVERY if everywhere else None
    kind: Literal["layer", "rms"] = "layer" if traits.layer_norm else "rms"
    return (
        *embedding(
            vocab, hidden, tied, place=place, head_bias=traits.lm_head_bias,
            head_place=Place.EVERY if traits.head_every_stage else Place.LAST,
        ),
        final_norm(
            hidden, kind, bias=traits.layer_norm and traits.norm_bias,
            place=Place.EVERY if everywhere else Place.LAST,
        ),
    )  # fmt: skip


def read(config: Config, model_type: str) -> SpecDraft:
    """Read any family of TRAITS."""
    return read_with(config, TRAITS[model_type], model_type)


def read_with(config: Config, traits: Traits, model_type: str) -> SpecDraft:
    heads = heads_of(config)
    hidden = config.count("hidden_size")
    num_layers = config.num_layers()
    inner = config.count("intermediate_size")
    vocab = config.count("vocab_size")
    tied = config.flag("tie_word_embeddings", traits.tied)
    block = attention_layer(config, traits, hidden, heads) + dense_mlp(config, traits, hidden, inner)
    windows = layer_windows(config, traits, num_layers)
    context = rope.context_of(config)
    is_encoder = model_type == "gemma3_text" and config.flag("use_bidirectional_attention", False)  # EmbeddingGemma
    return SpecDraft(
        hidden_size=hidden,
        num_heads=heads.num_heads,
        vocab_size=vocab,
        context=context,
        layers=[() if is_encoder else (attention_cache(heads, window),) for window in windows],
        layer_weights=[block] * num_layers,
        other_weights=list(outer_weights(config, traits, vocab, hidden, tied)),
        ropes=rope_tables(config, model_type, heads, context.positions),
        tied=tied,
        widest_mlp=inner,
    )


def rope_tables(config: Config, model_type: str, heads: Heads, positions: int) -> tuple[Rope, ...]:
    tables = rope.tables(config, heads.head_dim, positions)
    if model_type == "gemma3_text":  # local layers use another base: a separate table
        scaled = rope.scaling(config).ratio("factor", 1.0, rope.MAX_FACTOR)
        return (Rope(heads.head_dim, int(positions * scaled)), Rope(heads.head_dim, positions))
    if model_type == "olmo3" and any(rope.rope_type(part) != "default" for part in rope.scalings(config)):
        return (*tables, Rope(heads.head_dim, positions))  # sliding layers are not scaled (vLLM 0.33, models/olmo2.py)
    return tables


READERS = dict.fromkeys(TRAITS, read)
