"""Models that combine attention with recurrent states, and pure Mamba."""

from dataclasses import replace

from kvplan.models.families import rope
from kvplan.models.families.blocks import (
    Heads,
    SpecDraft,
    attention,
    column,
    correction_bias,
    experts,
    final_norm,
    gated_mlp,
    norm,
    plain_mlp,
    qk_norms,
    router,
    row,
    table,
    vector,
    whole,
)
from kvplan.models.families.config import Config
from kvplan.models.families.dense import attention_cache, dense_mlp, heads_of, outer_weights
from kvplan.models.families.mla import PLAIN, latent_attention, latent_caches
from kvplan.models.families.moe import TOP_K_KEYS, Moe, expert_layer, sparse_layers
from kvplan.models.families.state import (
    Mixer,
    convolution,
    gated_delta_net,
    gated_kimi_delta,
    kimi_delta,
    mamba1,
    mamba2,
)
from kvplan.models.spec import LayerCache, Part, Place, RecurrentState, Weight

Layer = tuple[tuple[Weight, ...], tuple[LayerCache, ...]]
DTYPES = {"float32": "float32", "bfloat16": None, "float16": None, "auto": None}


def draft(
    config: Config, layers: list[Layer], other: list[Weight], *, heads: Heads | None, tied: bool, rotary: bool = True,
    widest: int = 0,
) -> SpecDraft:  # fmt: skip
    context = rope.context_of(config)
    return SpecDraft(
        hidden_size=config.count("hidden_size"),
        num_heads=heads.num_heads if heads else 1,
        vocab_size=config.count("vocab_size"),
        context=context,
        layers=[caches for _, caches in layers],
        layer_weights=[weights for weights, _ in layers],
        other_weights=other,
        ropes=rope.tables(config, heads.head_dim, context.positions) if heads and rotary else (),
        tied=tied,
        experts_per_token=config.count(*TOP_K_KEYS, "num_experts_per_token", default=0, low=0),
        widest_mlp=widest or config.count("intermediate_size", "moe_intermediate_size", default=0),
    )


def ssm_dtype(config: Config, key: str, default: str | None) -> str | None:
    """The recurrence's dtype: None means the model's own."""
    stated = config.text(key, "")
    if not stated:
        return default
    if stated not in DTYPES:
        raise config.fail(key, f"{stated!r} is not a state dtype kvplan knows ({', '.join(DTYPES)})")
    return DTYPES[stated]


# --- Qwen3-Next, Qwen3.5 ----------------------------------------------------------------------------------------


def read_qwen(config: Config, model_type: str) -> SpecDraft:
    """Three gated delta nets, then one gated full attention; every fourth layer by default."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    heads = heads_of(config)
    tied = config.flag("tie_word_embeddings")
    types = config.per_layer_names("layer_types", num_layers)
    if types is None:
        every = config.count("full_attention_interval", default=4)
        types = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
    state_dtype = ssm_dtype(config, "mamba_ssm_dtype", None)
    linear, state = gated_delta_net(config, hidden, state_dtype)
    full = attention(hidden, heads, qkv_bias=config.flag("attention_bias"), gate=True) + qk_norms(heads)
    mixers: dict[str, Layer] = {
        "linear_attention": (linear, (state,)),
        "full_attention": (full, (attention_cache(heads, None),)),
    }
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
    moe = Moe(shared="shared_expert_intermediate_size", shared_name="mlp.shared_expert", shared_gate=True)
    has_experts = "num_experts" in config
    blocks = config.maybe_count("num_blocks")  # InternS2 Mobius: experts outside the layers, which share them
    sparse = sparse_layers(config, num_layers) if has_experts else [False] * num_layers
    feed_forward = {True: expert_layer(config, moe, hidden) if has_experts else ()}
    pooled = tuple(w for w in feed_forward[True] if "shared_expert" not in w.name) if blocks else ()
    feed_forward[True] = tuple(w for w in feed_forward[True] if w not in pooled)
    if not all(sparse):
        feed_forward[False] = dense_mlp(config, PLAIN, hidden, config.count("intermediate_size"))
    layers = []
    for kind, is_sparse in zip(types, sparse, strict=True):
        if kind not in mixers:
            raise config.fail("layer_types", f"{kind!r} is a layer kind kvplan cannot size here")
        weights, caches = mixers[kind]
        layers.append((weights + norms + feed_forward[is_sparse], caches))
    if tied:
        other = [table("model.embed_tokens", vocab, hidden, Place.EVERY), final_norm(hidden)]
    else:  # vLLM 0.33 has the embedding on every pipeline stage, the head on the last
        other = [
            table("model.embed_tokens", vocab, hidden, Place.EVERY),
            table("lm_head", vocab, hidden, Place.LAST, "lm_head"),
            final_norm(hidden),
        ]
    other += [replace(weight, place=Place.EVERY) for weight in pooled] * (blocks or 0)
    return draft(config, layers, other, heads=heads, tied=tied)


# --- Kimi Linear ------------------------------------------------------------------------------------------------

# The transformers class is documented as Kimi-Linear-48B-A3B; its values are the defaults for missing keys.
KIMI_DEFAULTS: dict[str, object] = {
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
    "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "num_shared_experts": 1,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_experts": 256,
    "num_experts_per_token": 8, "first_k_dense_replace": 1, "linear_head_dim": 128, "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4, "model_max_length": 1048576,
}  # fmt: skip


def with_defaults(config: Config, defaults: dict[str, object], family: str) -> Config:
    """The config with its family's class defaults for missing keys, listed in a note."""
    missing = [key for key in defaults if key not in config]
    if missing:
        config.notes.append(f"{len(missing)} keys are not given and take the {family} class defaults")
    return Config({**config.values, **{k: defaults[k] for k in missing}}, config.where, config.notes)


def kimi_full_layers(config: Config, num_layers: int) -> list[bool]:
    """True for each MLA layer: by `layer_types`, or by the 1-based list in `linear_attn_config`."""
    types = config.per_layer_names("layer_types", num_layers)
    if types is not None:
        return [kind == "full_attention" for kind in types]
    linear = config.sub("linear_attn_config")
    full = linear.ints("full_attn_layers")
    if full is None:
        raise config.fail("layer_types", "is missing and linear_attn_config.full_attn_layers too")
    return [i + 1 in full for i in range(num_layers)]


def read_kimi(config: Config, model_type: str) -> SpecDraft:
    """Kimi delta attention, with MLA in every fourth layer."""
    if "linear_attn_config" not in config:
        config = with_defaults(config, KIMI_DEFAULTS, "Kimi Linear")
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    delta, state = kimi_mixer(config, hidden)
    output_gate = config.flag("mla_use_output_gate")
    full = latent_attention(config, hidden, output_gate=output_gate), latent_caches(config, indexed=None)
    mixers: dict[bool, Layer] = {True: full, False: (delta, (state,))}
    norms: tuple[Weight, ...] = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
    residuals = "attn_res_block_size" in config  # attention over the residuals of earlier blocks (Kimi K3)
    if residuals:
        norms += residual_attention("self_attention", hidden) + residual_attention("mlp", hidden)
    sparse = kimi_experts(config, hidden)
    dense = dense_mlp(config, PLAIN, hidden, config.count("intermediate_size"))
    first_sparse = config.count("first_k_dense_replace", low=0)
    layers = []
    for i, is_full in enumerate(kimi_full_layers(config, num_layers)):
        weights, caches = mixers[is_full]
        layers.append((weights + norms + (sparse if i >= first_sparse else dense), caches))
    tied = config.flag("tie_word_embeddings")
    outer = list(outer_weights(config, PLAIN, vocab, hidden, tied))
    if residuals:
        outer += [replace(weight, place=Place.LAST) for weight in residual_attention("model.output_attn", hidden)]
    result = draft(config, layers, outer, heads=None, tied=tied)
    result.num_heads = config.count("num_attention_heads")
    return result


KIMI_FLAT_KEYS = {
    "num_heads": "linear_num_heads", "head_dim": "linear_head_dim", "short_conv_kernel_size": "linear_conv_kernel_dim",
}  # fmt: skip


def kimi_mixer(config: Config, hidden: int) -> Mixer:
    """Kimi delta attention, from `linear_attn_config` or the flat keys of the transformers class."""
    flat = {key: config.values.get(name) for key, name in KIMI_FLAT_KEYS.items()}
    linear = config.sub("linear_attn_config")
    linear = Config({**flat, **linear.values}, linear.where, config.notes)
    heads, head_dim = linear.count("num_heads"), linear.count("head_dim")
    kernel = linear.count("short_conv_kernel_size")
    if linear.flag("use_full_rank_gate"):
        return gated_kimi_delta(hidden, heads, head_dim, kernel, bounded="gate_lower_bound" in linear)
    return kimi_delta(hidden, heads, head_dim, kernel)


def residual_attention(prefix: str, hidden: int) -> tuple[Weight, ...]:
    return norm(f"{prefix}_res_norm", hidden), vector(f"{prefix}_res_proj", hidden)


LEAST_EXPERT_WIDTH = 256  # per rank; default of vLLM 0.33's `min_moe_intermediate_per_partition`


def kimi_experts(config: Config, hidden: int) -> tuple[Weight, ...]:
    """Router, experts and shared experts; Kimi K3's experts run between projections to and from a narrower space."""
    inner, latent = config.count("moe_intermediate_size"), config.maybe_count("routed_expert_hidden_size")
    shared = gated_mlp(
        hidden, inner * config.count("num_shared_experts"), prefix="mlp.shared_experts", group="shared_expert"
    )
    if latent is None:
        return expert_layer(config, Moe(correction="buffer"), hidden) + shared
    count = config.count("num_experts")
    least = config.count("min_moe_intermediate_per_partition", default=LEAST_EXPERT_WIDTH)
    name = "block_sparse_moe"
    routed = experts(latent, inner, count, prefix=f"{name}.experts")
    return (
        router(f"{name}.gate", hidden, count),
        correction_bias(f"{name}.gate.e_score_correction_bias", count),
        *(replace(weight, least=least) for weight in routed),
        whole(f"{name}.routed_expert_down_proj", hidden, latent, "mlp", quantizable=False),
        whole(f"{name}.routed_expert_up_proj", latent, hidden, "mlp", quantizable=False),
        *((norm(f"{name}.routed_expert_norm", latent),) if config.flag("latent_moe_use_norm") else ()),
        *shared,
    )


# --- Jamba and Mamba --------------------------------------------------------------------------------------------

JAMBA_KEYS = {
    "expand": "mamba_expand", "state": "mamba_d_state", "kernel": "mamba_d_conv", "rank": "mamba_dt_rank",
    "bias": "mamba_proj_bias", "conv_bias": "mamba_conv_bias",
}  # fmt: skip
MAMBA_KEYS = {
    "expand": "expand", "state": "state_size", "kernel": "conv_kernel", "rank": "time_step_rank",
    "bias": "use_bias", "conv_bias": "use_conv_bias",
}  # fmt: skip


def read_jamba(config: Config, model_type: str) -> SpecDraft:
    """One attention layer in eight, Mamba 1 elsewhere, experts in every other layer."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    heads = heads_of(config)
    inner = config.count("intermediate_size")
    weights, state = mamba1(config, hidden, JAMBA_KEYS, inner_norms=True)
    mixers: dict[bool, Layer] = {
        True: (attention(hidden, heads), (attention_cache(heads, None),)),
        False: (weights, (state,)),
    }
    norms = (norm("input_layernorm", hidden), norm("pre_ff_layernorm", hidden))
    count = config.count("num_experts")
    sparse = (
        router("feed_forward.router", hidden, count),
        *experts(hidden, inner, count, prefix="feed_forward.experts"),
    )
    feed_forward = {True: sparse, False: gated_mlp(hidden, inner, prefix="feed_forward")}
    attn_at, attn_every = config.count("attn_layer_offset", low=0), config.count("attn_layer_period")
    moe_at, moe_every = config.count("expert_layer_offset", low=0), config.count("expert_layer_period")
    layers = []
    for i in range(num_layers):
        mixer, caches = mixers[i % attn_every == attn_at]
        is_sparse = count > 1 and i % moe_every == moe_at
        layers.append((mixer + norms + feed_forward[is_sparse], caches))
    tied = config.flag("tie_word_embeddings")
    other = list(outer_weights(config, PLAIN, vocab, hidden, tied))
    return draft(config, layers, other, heads=heads, tied=tied, rotary=False)


def read_mamba(config: Config, model_type: str) -> SpecDraft:
    """Pure Mamba 1: no attention anywhere."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    weights, state = mamba1(config, hidden, MAMBA_KEYS, inner_norms=False)
    layers: list[Layer] = [((*weights, norm("norm", hidden)), (state,))] * num_layers
    tied = config.flag("tie_word_embeddings", True)
    return draft(config, layers, list(outer_weights(config, PLAIN, vocab, hidden, tied)), heads=None, tied=tied)


# --- Mamba 2 hybrids --------------------------------------------------------------------------------------------


def prefixed_mamba2(config: Config, hidden: int, inner: int, default_dtype: str | None, *, gated_norm: bool) -> Layer:
    """Mamba 2 with `mamba_` keys (Falcon-H1, Granite 4)."""
    heads = config.count("mamba_n_heads")
    weights, state = mamba2(
        config, hidden, inner, heads, config.count("mamba_d_head", default=inner // heads),
        config.count("mamba_n_groups"), config.count("mamba_d_state"), config.count("mamba_d_conv"),
        gated_norm=gated_norm, ssm_dtype=ssm_dtype(config, "mamba_ssm_cache_dtype", default_dtype),
    )  # fmt: skip
    return weights, (state,)


def read_falcon_h1(config: Config, model_type: str) -> SpecDraft:
    """Attention and Mamba 2 side by side in every layer."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    heads = heads_of(config)
    inner = config.maybe_count("mamba_d_ssm") or config.count("mamba_expand", default=2) * hidden
    mixer, states = prefixed_mamba2(config, hidden, inner, None, gated_norm=config.flag("mamba_rms_norm"))
    weights = (
        attention(hidden, heads, qkv_bias=config.flag("attention_bias"))
        + mixer
        + gated_mlp(hidden, config.count("intermediate_size"), bias=config.flag("mlp_bias"), prefix="feed_forward")
        + (norm("input_layernorm", hidden), norm("pre_ff_layernorm", hidden))
    )
    layers: list[Layer] = [(weights, (attention_cache(heads, None), *states))] * num_layers
    tied = config.flag("tie_word_embeddings")
    return draft(config, layers, list(outer_weights(config, PLAIN, vocab, hidden, tied)), heads=heads, tied=tied)


GRANITE_LAYERS = {
    "mamba": "mamba", "attention": "attention",
    "linear_attention": "mamba", "full_attention": "attention",  # as transformers 5.23 saves them
}  # fmt: skip


def granite_types(config: Config) -> list[str]:
    """The kind of each layer, as the config names it."""
    num_layers = config.num_layers()
    types = config.per_layer_names("layer_types", num_layers) or config.per_layer_names("layers_block_type", num_layers)
    if types is None:
        raise config.fail("layer_types", "missing", "kvplan cannot tell which layers are attention")
    for kind in types:
        if kind not in GRANITE_LAYERS:
            raise config.fail("layer_types", f"{kind!r} is a layer kind kvplan cannot size here")
    return types


def read_granite(config: Config, model_type: str) -> SpecDraft:
    """Granite 4: Mamba 2 and attention by `layer_types`; a shared MLP, and experts if there are any."""
    hidden, vocab = config.count("hidden_size"), config.count("vocab_size")
    heads = heads_of(config)
    kinds = [GRANITE_LAYERS[kind] for kind in granite_types(config)]
    bias = config.flag("attention_bias")
    mixers: dict[str, Layer] = {
        "attention": (
            attention(hidden, heads, qkv_bias=bias, o_bias=bias), (attention_cache(heads, None),),
        )
    }  # fmt: skip
    if "mamba" in kinds:
        inner = config.count("mamba_expand", default=2) * hidden
        mixers["mamba"] = prefixed_mamba2(config, hidden, inner, None, gated_norm=True)
    count = config.count("num_local_experts", default=0, low=0)
    feed_forward: tuple[Weight, ...] = gated_mlp(
        hidden, config.count("shared_intermediate_size"), prefix="shared_mlp", group="shared_expert" if count else "mlp"
    )
    if count:
        feed_forward += (
            router("block_sparse_moe.router", hidden, count),
            *experts(hidden, config.count("intermediate_size"), count, prefix="block_sparse_moe.experts"),
        )
    norms = (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))
    layers = [(mixers[kind][0] + norms + feed_forward, mixers[kind][1]) for kind in kinds]
    tied = config.flag("tie_word_embeddings")
    other = list(outer_weights(config, PLAIN, vocab, hidden, tied))
    rotary = config.values.get("position_embedding_type") == "rope"
    return draft(config, layers, other, heads=heads, tied=tied, rotary=rotary)


NEMOTRON_BLOCKS = {
    "mamba": "M", "attention": "*", "mlp": "-", "moe": "E",
    "linear_attention": "M", "full_attention": "*",  # as transformers 5.23 saves them
}  # fmt: skip


def nemotron_pattern(config: Config) -> str:
    """One letter per layer: M Mamba 2, * attention, - MLP, E experts."""
    names = config.names("layers_block_type")
    if names is not None:
        unknown = [name for name in names if name not in NEMOTRON_BLOCKS]
        if unknown:
            raise config.fail("layers_block_type", f"{unknown[0]!r} is a block kvplan cannot size")
        return "".join(NEMOTRON_BLOCKS[name] for name in names)
    pattern = config.text("hybrid_override_pattern")
    unknown_letters = set(pattern) - set("M*-E")
    if unknown_letters:
        raise config.fail("hybrid_override_pattern", f"{sorted(unknown_letters)[0]!r} is a block kvplan cannot size")
    num_layers = config.count("num_hidden_layers", default=len(pattern))
    if len(pattern) != num_layers:
        raise config.fail("hybrid_override_pattern", f"has {len(pattern)} letters for {num_layers} layers")
    return pattern


def nemotron_experts(config: Config, hidden: int) -> tuple[Weight, ...]:
    """Experts without a gate, after a latent projection in the larger models."""
    count, inner = config.count("n_routed_experts"), config.count("moe_intermediate_size")
    latent = config.maybe_count("moe_latent_size")
    shared = config.count("moe_shared_expert_intermediate_size") * config.count("n_shared_experts", default=1, low=0)
    weights: tuple[Weight, ...] = (
        replace(router("mixer.gate", hidden, count), narrow_on=(9, 10)),  # vLLM 0.28 to 0.33 (GateLinear)
        correction_bias("mixer.gate.e_score_correction_bias", count),
        *experts(latent or hidden, inner, count, prefix="mixer.experts", gated=False),
    )
    if latent:
        weights += (
            whole("mixer.fc1_latent_proj", hidden, latent, "mlp"),
            whole("mixer.fc2_latent_proj", latent, hidden, "mlp"),
        )
    if shared:
        names = ("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj")
        weights += plain_mlp(hidden, shared, bias=False, names=names, group="shared_expert")
    return weights


def read_nemotron_h(config: Config, model_type: str) -> SpecDraft:
    """One mixer per layer; the recurrence is in float32."""
    hidden, vocab = config.count("hidden_size"), config.count("vocab_size")
    pattern = nemotron_pattern(config)
    heads = heads_of(config)
    mamba_heads, head_dim = config.count("mamba_num_heads"), config.count("mamba_head_dim")
    weights, state = mamba2(
        config, hidden, mamba_heads * head_dim, mamba_heads, head_dim, config.count("n_groups"),
        config.count("ssm_state_size"), config.count("conv_kernel"),
        ssm_dtype=ssm_dtype(config, "mamba_ssm_cache_dtype", "float32"), prefix="mixer",
    )  # fmt: skip
    blocks: dict[str, Layer] = {
        "M": (weights, (state,)),
        "*": (
            attention(hidden, heads, qkv_bias=config.flag("attention_bias"), prefix="mixer"),
            (attention_cache(heads, None),),
        ),
    }
    if "-" in pattern:
        names = ("mixer.up_proj", "mixer.down_proj")
        inner = config.count("intermediate_size")
        blocks["-"] = plain_mlp(hidden, inner, bias=config.flag("mlp_bias"), names=names), ()
    if "E" in pattern:
        blocks["E"] = nemotron_experts(config, hidden), ()
    layers = [((*blocks[letter][0], norm("norm", hidden)), blocks[letter][1]) for letter in pattern]
    tied = config.flag("tie_word_embeddings")
    other = list(outer_weights(config, PLAIN, vocab, hidden, tied))
    return draft(config, layers, other, heads=heads, tied=tied, rotary=False)


def read_lfm2(config: Config, model_type: str) -> SpecDraft:
    """LFM2: short gated convolutions, with attention in some layers; LFM2-MoE has experts in all but the first."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    heads = heads_of(config)
    inner = lfm2_inner(config, model_type)
    kernel, bias = config.count("conv_L_cache", default=3, low=2), config.flag("conv_bias")
    width = config.count("conv_dim", default=hidden)
    conv = (
        column("conv.in_proj", hidden, (Part(width), Part(width), Part(width)), "state", bias=bias),
        convolution("conv.conv", kernel, (Part(width),), bias=bias),
        row("conv.out_proj", width, hidden, "state", bias=bias),
    )
    state = RecurrentState("short_conv", kernel, (Part(width),), 0, (1, 1))
    full = attention(hidden, heads, out="out_proj") + qk_norms(heads)
    mixers: dict[bool, Layer] = {True: (full, (attention_cache(heads, None),)), False: (conv, (state,))}
    norms = norm("operator_norm", hidden), norm("ffn_norm", hidden)
    dense, first_sparse = gated_mlp(hidden, inner, prefix="feed_forward"), num_layers
    sparse: tuple[Weight, ...] = ()
    if model_type == "lfm2_moe":
        first_sparse = config.count("num_dense_layers", default=0, low=0)
        sparse = expert_layer(config, Moe(correction="buffer" if config.flag("use_expert_bias") else ""), hidden)
    layers = []
    for i, is_full in enumerate(lfm2_full_layers(config, num_layers)):
        weights, caches = mixers[is_full]
        layers.append((weights + norms + (dense if i < first_sparse else sparse), caches))
    tied = config.flag("tie_word_embeddings", config.flag("tie_embedding", True))
    other = list(outer_weights(config, PLAIN, vocab, hidden, tied))
    return draft(config, layers, other, heads=heads, tied=tied, widest=inner)


def lfm2_inner(config: Config, model_type: str) -> int:
    """The MLP's width, which is derived from what the config states unless that is said to be it."""
    inner = config.count("block_ff_dim", "intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", model_type == "lfm2"):
        return inner
    multiple = config.count("block_multiple_of", default=256)
    inner = int(2 * inner / 3 * config.ratio("block_ffn_dim_multiplier", 1.0))
    return -(-inner // multiple) * multiple


def lfm2_full_layers(config: Config, num_layers: int) -> list[bool]:
    types = config.per_layer_names("layer_types", num_layers)
    if types is not None:
        return [kind == "full_attention" for kind in types]
    chosen = config.ints("full_attn_idxs")
    if chosen is None:
        raise config.fail("layer_types", "is missing and full_attn_idxs too", "kvplan cannot tell which layers attend")
    return [i in chosen for i in range(num_layers)]


READERS = {
    "qwen3_next": read_qwen,
    "qwen3_5_text": read_qwen,
    "qwen3_5_moe_text": read_qwen,
    "kimi_linear": read_kimi,
    "jamba": read_jamba,
    "mamba": read_mamba,
    "falcon_h1": read_falcon_h1,
    "granitemoehybrid": read_granite,
    "nemotron_h": read_nemotron_h,
    "lfm2": read_lfm2,
    "lfm2_moe": read_lfm2,
    "falcon_mamba": read_mamba,
}
