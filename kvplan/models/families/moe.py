"""Mixture-of-experts transformers with ordinary attention: Mixtral, Qwen-MoE, gpt-oss, Llama 4, GLM-4.5, MiniMax."""

from dataclasses import dataclass, replace

from kvplan.models.families import dense, rope
from kvplan.models.families.blocks import (
    Heads,
    SpecDraft,
    attention,
    column,
    correction_bias,
    experts,
    gated_mlp,
    norm,
    replicated,
    router,
    vector,
    whole,
)
from kvplan.models.families.config import Config
from kvplan.models.families.dense import (
    Traits,
    attention_cache,
    attention_layer,
    dense_mlp,
    heads_of,
    layer_windows,
    outer_weights,
    rope_tables,
)
from kvplan.models.spec import ChunkedAttention, FullAttention, KeyIndex, LayerCache, Part, Sharing, Weight

EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "experts_per_token", "moe_top_k", "top_k_experts", "moe_topk", "moe_k")


@dataclass(frozen=True, slots=True)
class Moe:
    """Config keys of a family's feed-forward facts, and the properties of its router.

    router_dtype  float32 if vLLM 0.33 keeps the router in it (according to its parameters)
    correction    a float32 routing bias per expert; "counted" if transformers counts it as a parameter
    """

    inner: str = "moe_intermediate_size"
    dense_inner: str = "intermediate_size"
    shared: str | None = None  # key of the shared experts' width; "n_shared_experts" multiplies `inner`
    shared_name: str = "mlp.shared_experts"
    shared_gate: bool = False
    router_dtype: str | None = None
    router_bias: bool = False
    router_stored: bool = False  # quantized like any linear layer, unless the config excludes it
    correction: str = ""
    expert_bias: bool = False


NO_BIAS = Traits(qkv_bias=False, o_bias=False, mlp_bias=False)

FAMILIES: dict[str, tuple[Traits, Moe]] = {
    "mixtral": (replace(NO_BIAS, windows="all"), Moe(inner="intermediate_size")),
    "qwen2_moe": (
        Traits(qkv_bias=True, o_bias=False, mlp_bias=False, windows="flagged"),
        Moe(shared="shared_expert_intermediate_size", shared_name="mlp.shared_expert", shared_gate=True),
    ),
    "qwen3_moe": (
        Traits(serves_o_bias=False, mlp_bias=False, qk_norm="head", windows="flagged", head_every_stage=True),
        Moe(router_stored=True),
    ),
    "qwen3_vl_moe_text": (
        Traits(serves_o_bias=False, mlp_bias=False, qk_norm="head", head_every_stage=True),
        Moe(router_stored=True),
    ),
    "qwen3_omni_moe_text": (
        Traits(serves_o_bias=False, mlp_bias=False, qk_norm="head", head_every_stage=True),
        Moe(router_stored=True),
    ),
    "xverse": (NO_BIAS, Moe(inner="intermediate_size", shared="num_shared_experts")),
    "olmoe": (Traits(mlp_bias=False, qk_norm="full"), Moe(inner="intermediate_size")),
    "granitemoe": (Traits(mlp_bias=False, tied=True), Moe(inner="intermediate_size")),
    "phimoe": (
        Traits(mlp_bias=False, layer_norm=True, windows="all", lm_head_bias=True),
        Moe(inner="intermediate_size"),
    ),
    "gpt_oss": (
        Traits(qkv_bias=True, o_bias=True, windows="types", full_every=2, head_every_stage=True, sinks=True),
        Moe(inner="intermediate_size", router_bias=True, expert_bias=True),
    ),
    "llama4_text": (
        NO_BIAS,
        Moe(inner="intermediate_size", dense_inner="intermediate_size_mlp", shared="intermediate_size"),
    ),
    "glm4_moe": (
        Traits(o_bias=False, mlp_bias=False, qk_norm="flag_head"),
        Moe(shared="n_shared_experts", router_dtype="float32", correction="buffer"),
    ),
    "glm4v_moe_text": (
        Traits(o_bias=False, mlp_bias=False, qk_norm="flag_head"),
        Moe(shared="n_shared_experts", router_dtype="float32", correction="buffer"),
    ),
    "minimax_m2": (
        replace(NO_BIAS, qk_norm="split"),  # vLLM's MiniMaxText01RMSNormTP: each rank normalizes its own heads
        Moe(inner="intermediate_size", router_dtype="float32", correction="buffer"),
    ),
    "minimax_m3": (
        replace(NO_BIAS, qk_norm="head"),
        Moe(
            inner="intermediate_size", dense_inner="dense_intermediate_size", shared="n_shared_experts",
            router_dtype="float32", correction="buffer",
        ),
    ),
    "mimo_v2_flash": (NO_BIAS, Moe(router_dtype="float32", correction="buffer")),
    "laguna": (
        Traits(mlp_bias=False, qk_norm="head", windows="types"),
        Moe(shared="shared_expert_intermediate_size", shared_name="mlp.shared_expert", correction="counted"),
    ),
    "aria_text": (Traits(mlp_bias=False), Moe(inner="intermediate_size", shared="moe_num_shared_experts")),
    "deepseek": (Traits(mlp_bias=False), Moe(shared="n_shared_experts")),
    "exaone_moe": (
        replace(NO_BIAS, qk_norm="head", windows="types"),
        Moe(shared="num_shared_experts", correction="buffer"),
    ),
    "granitemoeshared": (Traits(mlp_bias=False), Moe(inner="intermediate_size", shared="shared_intermediate_size")),
    "granitemoe_swa": (
        Traits(mlp_bias=False, windows="types", sinks=True),
        Moe(inner="intermediate_size", shared="shared_intermediate_size"),
    ),
}  # fmt: skip


def sparse_layers(config: Config, num_layers: int) -> list[bool]:
    """True for each layer with experts: by list, by the first dense ones, or by a period."""
    types = config.per_layer_names("mlp_layer_types", num_layers)
    if types is not None:
        return [kind == "sparse" for kind in types]
    if isinstance(config.values.get("moe_layer_freq"), list):
        flags = config.ints("moe_layer_freq") or []
        if len(flags) != num_layers:
            raise config.fail(
                "moe_layer_freq", f"has {len(flags)} entries for {num_layers} layers", "correct the config"
            )
        return [bool(flag) for flag in flags]
    if "first_k_dense_replace" in config:
        first = config.count("first_k_dense_replace", low=0)
        every = config.count("moe_layer_freq", default=1)
        return [i >= first and i % every == 0 for i in range(num_layers)]
    if config.ints("moe_layers") is not None:
        chosen = set(config.ints("moe_layers") or [])
        return [i in chosen for i in range(num_layers)]
    step = config.count("interleave_moe_layer_step", "decoder_sparse_step", default=1)
    dense = set(config.ints("mlp_only_layers") or [])
    return [(i + 1) % step == 0 and i not in dense for i in range(num_layers)]


def shared_width(config: Config, moe: Moe, inner: int) -> int:
    """Total width of the shared experts; 0 for none."""
    match moe.shared:
        case None:
            return 0
        case "n_shared_experts" | "num_shared_experts" | "moe_num_shared_experts":
            return inner * config.count(moe.shared, default=0, low=0)
        case key:
            return config.count(key, default=0, low=0)


def expert_layer(config: Config, moe: Moe, hidden: int) -> tuple[Weight, ...]:
    """Router, experts and shared experts of one sparse layer."""
    count = config.count(*EXPERT_KEYS)
    inner = config.count(moe.inner)
    shared = shared_width(config, moe, inner)
    weights = [
        router("mlp.gate", hidden, count, dtype=moe.router_dtype, bias=moe.router_bias, quantizable=moe.router_stored)
    ]
    if moe.correction:
        bias = correction_bias("mlp.gate.e_score_correction_bias", count)
        weights.append(replace(bias, counted=moe.correction == "counted"))
    weights += experts(hidden, inner, count, bias=moe.expert_bias)
    if shared:
        weights += gated_mlp(hidden, shared, prefix=moe.shared_name, group="shared_expert")
    if moe.shared_gate:
        weights.append(whole("mlp.shared_expert_gate", hidden, 1, "shared_expert", quantizable=False))
    return tuple(weights)


def read(config: Config, model_type: str) -> SpecDraft:
    """Read any family of FAMILIES."""
    if model_type == "xverse" and config.values.get("num_experts") is None:
        return dense.read(config, "llama")
    return read_with(config, *FAMILIES[model_type], model_type)


def read_with(config: Config, traits: Traits, moe: Moe, model_type: str) -> SpecDraft:
    heads = heads_of(config)
    hidden = config.count("hidden_size")
    num_layers = config.num_layers()
    vocab = config.count("vocab_size")
    tied = config.flag("tie_word_embeddings", traits.tied)
    sparse = sparse_layers(config, num_layers)
    context = rope.context_of(config)
    feed_forward = {True: expert_layer(config, moe, hidden) if any(sparse) else ()}
    if not all(sparse):
        feed_forward[False] = dense_mlp(config, traits, hidden, config.count(moe.dense_inner))
    attentions, caches = attention_parts(config, model_type, traits, hidden, heads, num_layers)
    return SpecDraft(
        hidden_size=hidden,
        num_heads=heads.num_heads,
        vocab_size=vocab,
        context=context,
        layers=caches,
        layer_weights=[attentions[i] + feed_forward[sparse[i]] for i in range(num_layers)],
        other_weights=list(outer_weights(config, traits, vocab, hidden, tied)),
        ropes=rope_tables(config, model_type, heads, context.positions),
        tied=tied,
        experts_per_token=config.count(*TOP_K_KEYS, default=1),
        widest_mlp=config.count(moe.inner),
    )


def attention_parts(
    config: Config, model_type: str, traits: Traits, hidden: int, heads: Heads, num_layers: int
) -> tuple[list[tuple[Weight, ...]], list[tuple[LayerCache, ...]]]:
    """Per layer: the weights other than the feed-forward part, and the caches."""
    match model_type:
        case "llama4_text":
            return llama4_attention(config, traits, hidden, heads, num_layers)
        case "mimo_v2_flash" | "mimo_v2":
            return mimo_attention(config, hidden, num_layers)
        case "minimax_m3" | "minimax_m3_vl":
            return minimax_m3_attention(config, traits, hidden, heads, num_layers)
        case "laguna":
            return gated_attention(config, traits, hidden, num_layers)
    weights = attention_layer(config, traits, hidden, heads)
    windows = layer_windows(config, traits, num_layers)
    return [weights] * num_layers, [(attention_cache(heads, window),) for window in windows]


def llama4_attention(
    config: Config, traits: Traits, hidden: int, heads: Heads, num_layers: int
) -> tuple[list[tuple[Weight, ...]], list[tuple[LayerCache, ...]]]:
    """Three chunked layers, then one full layer without rotary positions; determined by `no_rope_layers` (1 =
    chunked).
    """
    chunk = config.count("attention_chunk_size", default=8192)
    rotary = config.ints("no_rope_layers")
    if not rotary:
        step = config.count("no_rope_layer_interval", default=4)
        rotary = [int((i + 1) % step != 0) for i in range(num_layers)]
    if len(rotary) != num_layers:
        raise config.fail("no_rope_layers", f"has {len(rotary)} entries for {num_layers} layers", "correct the config")
    full = FullAttention(heads.num_kv_heads, heads.head_dim, heads.head_dim_v)
    chunked = ChunkedAttention(heads.num_kv_heads, heads.head_dim, heads.head_dim_v, chunk)
    weights = attention_layer(config, traits, hidden, heads)
    return [weights] * num_layers, [(chunked if flag else full,) for flag in rotary]


def mimo_attention(
    config: Config, hidden: int, num_layers: int
) -> tuple[list[tuple[Weight, ...]], list[tuple[LayerCache, ...]]]:
    """MiMo-V2: window layers (pattern 1) and full layers (0) with separate head counts and sinks."""
    pattern = config.ints("hybrid_layer_pattern")
    if pattern is None or len(pattern) != num_layers:
        raise config.fail("hybrid_layer_pattern", f"must have one entry for each of the {num_layers} layers")
    window = config.count("sliding_window_size", "sliding_window")
    full_heads, swa_heads = mimo_heads(config, ""), mimo_heads(config, "swa_")
    kinds: dict[bool, tuple[tuple[Weight, ...], tuple[LayerCache, ...]]] = {}
    for slides, heads in ((False, full_heads), (True, swa_heads)):
        name = "add_swa_attention_sink_bias" if slides else "add_full_attention_sink_bias"
        weights = attention(hidden, heads, qkv_bias=config.flag("attention_bias"))
        if config.flag(name):
            weights += (vector("self_attn.attention_sink_bias", heads.num_heads, "attention", split=True),)
        weights += (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
        kinds[slides] = weights, (attention_cache(heads, window if slides else None),)
    return [kinds[bool(flag)][0] for flag in pattern], [kinds[bool(flag)][1] for flag in pattern]


def mimo_heads(config: Config, prefix: str) -> Heads:
    return Heads(
        config.count(f"{prefix}num_attention_heads"),
        config.count(f"{prefix}num_key_value_heads"),
        config.count(f"{prefix}head_dim"),
        config.count(f"{prefix}v_head_dim"),
    )


def minimax_m3_attention(
    config: Config, traits: Traits, hidden: int, heads: Heads, num_layers: int
) -> tuple[list[tuple[Weight, ...]], list[tuple[LayerCache, ...]]]:
    """Sparse layers store index keys in addition to K and V, and project index queries and keys."""
    sparse = config.sub("sparse_attention_config")
    flags = sparse.ints("sparse_attention_freq") or [0] * num_layers
    if len(flags) != num_layers:
        raise sparse.fail("sparse_attention_freq", f"has {len(flags)} entries for {num_layers} layers")
    base = attention_layer(config, traits, hidden, heads)
    full = attention_cache(heads, None)
    weights: list[tuple[Weight, ...]] = []
    caches: list[tuple[LayerCache, ...]] = []
    for flag in flags:
        if not flag:
            weights.append(base)
            caches.append((full,))
            continue
        dim, index_heads = sparse.count("sparse_index_dim"), sparse.count("sparse_num_index_heads")
        index = (
            norm("self_attn.index_q_norm", dim),
            norm("self_attn.index_k_norm", dim),
        )
        weights.append((with_index(base[0], index_heads, dim), *base[1:], *index))
        caches.append((full, KeyIndex(dim)))
    return weights, caches


def with_index(qkv: Weight, heads: int, dim: int) -> Weight:
    """Fused QKV with the index queries, sharded like KV heads, and the index key, replicated on every rank."""
    parts = Part(heads, dim, Sharing.KV_HEADS), replicated(dim)
    names = "self_attn.index_q_proj", "self_attn.index_k_proj"
    return replace(qkv, parts=qkv.parts + parts, sources=qkv.sources + names)


def gated_attention(
    config: Config, traits: Traits, hidden: int, num_layers: int
) -> tuple[list[tuple[Weight, ...]], list[tuple[LayerCache, ...]]]:
    """Laguna: per-layer head counts, and one output gate per head."""
    default = config.count("num_attention_heads")
    per_layer = config.ints("num_attention_heads_per_layer") or [default] * num_layers
    if len(per_layer) != num_layers:
        raise config.fail("num_attention_heads_per_layer", f"has {len(per_layer)} entries for {num_layers} layers")
    windows = layer_windows(config, traits, num_layers)
    kv_heads, head_dim = config.count("num_key_value_heads"), config.count("head_dim")
    weights: list[tuple[Weight, ...]] = []
    caches: list[tuple[LayerCache, ...]] = []
    for num_heads, window in zip(per_layer, windows, strict=True):
        heads = Heads(num_heads, kv_heads, head_dim, head_dim)
        gate = column("self_attn.g_proj", hidden, num_heads, "attention")
        weights.append((*attention_layer(config, traits, hidden, heads), gate))
        caches.append((attention_cache(heads, window),))
    return weights, caches


FAMILIES["mimo_v2"] = FAMILIES["mimo_v2_flash"]
FAMILIES["minimax_m3_vl"] = FAMILIES["minimax_m3"]  # the text part of the vision model has no type of its own
READERS = dict.fromkeys(FAMILIES, read)
