"""Gemma 3n and Gemma 4: local and global layers of different shapes, shared caches, per-layer embeddings."""

from kvplan.models.families import rope
from kvplan.models.families.blocks import (
    Heads,
    SpecDraft,
    attention,
    column,
    experts,
    final_norm,
    gated_mlp,
    norm,
    qk_norms,
    router,
    row,
    table,
    vector,
    whole,
)
from kvplan.models.families.config import Config
from kvplan.models.families.dense import attention_cache
from kvplan.models.families.hybrid import with_defaults
from kvplan.models.spec import LayerCache, Part, Place, Rope, Weight

GEMMA3N_DEFAULTS: dict[str, object] = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
    "sliding_window": 512, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
}  # fmt: skip
# An image attends bidirectionally to itself, so one item must fit in one step (vLLM 0.33's default for these models).
GEMMA4_ITEM = 2496
FOUR_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def layer_types(config: Config, num_layers: int, every: int) -> list[bool]:
    """True for each global layer; by `layer_types`, else every n-th."""
    types = config.per_layer_names("layer_types", num_layers)
    if types is None:
        return [(i + 1) % every == 0 for i in range(num_layers)]
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.fail("layer_types", f"{kind!r} is a layer kind kvplan cannot size here")
    return [kind == "full_attention" for kind in types]


def per_layer_inputs(config: Config, hidden: int, num_layers: int) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """(outside the layers, inside each layer): the per-layer embedding and its projections, if any."""
    width = config.maybe_count("hidden_size_per_layer_input")
    if width is None:
        return (), ()
    rows = config.count("vocab_size_per_layer_input")
    outside = (
        table("model.embed_tokens_per_layer", rows, width * num_layers, Place.EVERY),
        column("model.per_layer_model_projection", hidden, width * num_layers, "embedding"),
        norm("model.per_layer_projection_norm", width),
    )
    inside = (
        whole("per_layer_input_gate", hidden, width, "mlp"),
        whole("per_layer_projection", width, hidden, "mlp"),
        norm("post_per_layer_input_norm", hidden),
    )
    return outside, inside


def shared_attention(hidden: int, heads: Heads, *, bias: bool) -> tuple[Weight, ...]:
    """Weights of a layer that reads an earlier layer's cache: it projects only queries."""
    return (
        column("self_attn.q_proj", hidden, (Part(heads.num_heads, heads.head_dim),), "attention", bias=bias),
        row("self_attn.o_proj", heads.num_heads * heads.head_dim, hidden, "attention", bias=bias),
        norm("self_attn.q_norm", heads.head_dim),
    )


def key_is_value(hidden: int, heads: Heads) -> tuple[Weight, ...]:
    """Attention without a value projection; a server has a value slice nevertheless (vLLM 0.33: fused QKV)."""
    value = Weight(
        "self_attn.v_slice", "attention", hidden, (heads.kv(heads.head_dim),), "outputs",
        quantizable=True, counted=False, sources=("self_attn.k_proj",),
    )  # fmt: skip
    return (
        Weight(
            "self_attn.qk_proj", "attention", hidden,
            (Part(heads.num_heads, heads.head_dim), heads.kv(heads.head_dim)), "outputs", quantizable=True,
            sources=("self_attn.q_proj", "self_attn.k_proj"),
        ),
        value,
        row("self_attn.o_proj", heads.num_heads * heads.head_dim, hidden, "attention"),
    )  # fmt: skip


def layer_ropes(heads: tuple[Heads, ...], positions: int) -> tuple[Rope, ...]:
    """One rotary table per kind of layer, each rotating its whole head."""
    return tuple(Rope(h.head_dim, positions) for h in heads)


def own_width(config: Config) -> int | None:
    """Head width of the global layers, as newer transformers (5.19) write it: layer by layer."""
    layers = config.sub("per_layer_config")
    widths = {layers.sub(key).maybe_count("head_dim") for key in layers.values}
    if len(widths) > 1:
        raise config.fail("per_layer_config", "has several head_dim", "kvplan sizes one width for all global layers")
    return widths.pop() if widths else None


def read_gemma4(config: Config, model_type: str) -> SpecDraft:
    """Gemma 4: global layers have their own head width and head count; the last layers may share caches."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    inner, num_heads = config.count("intermediate_size"), config.count("num_attention_heads")
    kv_heads, head_dim = config.count("num_key_value_heads"), config.count("head_dim")
    window = config.count("sliding_window")
    k_eq_v, bias = config.flag("attention_k_eq_v"), config.flag("attention_bias")
    global_dim = config.maybe_count("global_head_dim") or own_width(config) or head_dim
    global_kv = (config.maybe_count("num_global_key_value_heads") if k_eq_v else None) or kv_heads
    local, full = Heads(num_heads, kv_heads, head_dim, head_dim), Heads(num_heads, global_kv, global_dim, global_dim)
    shared_from = num_layers - config.count("num_kv_shared_layers", default=0, low=0)
    double_wide = config.flag("use_double_wide_mlp")
    outside, per_layer = per_layer_inputs(config, hidden, num_layers)
    norms = tuple(norm(name, hidden) for name in FOUR_NORMS)
    moe = gemma4_experts(config, hidden) if config.flag("enable_moe_block") else ()
    layers: list[tuple[LayerCache, ...]] = []
    weights: list[tuple[Weight, ...]] = []
    kinds = [*layer_types(config, num_layers, 6)[:-1], True]  # transformers' Gemma4TextConfig makes the last one global
    for i, is_full in enumerate(kinds):
        heads = full if is_full else local
        shares = i >= shared_from
        layers.append(() if shares else (attention_cache(heads, None if is_full else window),))
        if shares:
            mixer = shared_attention(hidden, heads, bias=bias)
        elif is_full and k_eq_v:
            mixer = key_is_value(hidden, heads) + qk_norms(heads)
        else:
            mixer = attention(hidden, heads, qkv_bias=bias, o_bias=bias) + qk_norms(heads)
        mlp = gated_mlp(hidden, inner * (2 if double_wide and shares else 1))
        weights.append(mixer + mlp + norms + moe + per_layer)
    context = rope.context_of(config)
    tied = config.flag("tie_word_embeddings", True)
    embed = (table("model.embed_tokens", vocab, hidden, Place.EVERY),)
    head = () if tied else (table("lm_head", vocab, hidden, Place.EVERY, "lm_head"),)
    return SpecDraft(
        hidden_size=hidden, num_heads=num_heads, vocab_size=vocab, context=context,
        layers=layers, layer_weights=weights,
        other_weights=[*embed, *head, *outside, final_norm(hidden, place=Place.EVERY)],
        ropes=layer_ropes((local, full), context.positions), tied=tied,
        experts_per_token=config.count("top_k_experts", default=0, low=0) if moe else 0,
        widest_mlp=inner, item_tokens=GEMMA4_ITEM if config.text("use_bidirectional_attention", "") == "vision" else 0,
    )  # fmt: skip


def gemma4_experts(config: Config, hidden: int) -> tuple[Weight, ...]:
    """Experts in addition to the dense MLP, three more norms, and the router's scales."""
    count = config.count("num_experts")
    return (
        router("router.proj", hidden, count),
        vector("router.scale", hidden, "router"),
        vector("router.per_expert_scale", count, "router"),
        *experts(hidden, config.count("moe_intermediate_size", "expert_intermediate_size"), count, prefix="experts"),
        norm("post_feedforward_layernorm_1", hidden),
        norm("post_feedforward_layernorm_2", hidden),
        norm("pre_feedforward_layernorm_2", hidden),
    )


def read_gemma3n(config: Config, model_type: str) -> SpecDraft:
    """Gemma 3n: AltUp keeps several copies of the stream, Laurel adds a low-rank path, the last layers share caches."""
    config = with_defaults(config, GEMMA3N_DEFAULTS, "Gemma 3n")
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    widths = config.values["intermediate_size"]
    inners = (config.ints("intermediate_size") or []) if isinstance(widths, list) else []
    inners = inners or [config.count("intermediate_size")] * num_layers
    if len(inners) != num_layers:
        raise config.fail("intermediate_size", f"has {len(inners)} entries for {num_layers} layers")
    dim, bias = config.count("head_dim"), config.flag("attention_bias")
    heads = Heads(config.count("num_attention_heads"), config.count("num_key_value_heads"), dim, dim)
    window, copies, rank = (
        config.count("sliding_window"),
        config.count("altup_num_inputs", high=64),
        config.count("laurel_rank"),
    )
    shared_from = num_layers - config.count("num_kv_shared_layers", low=0)
    outside, per_layer = per_layer_inputs(config, hidden, num_layers)
    common = (
        *(norm(name, hidden) for name in FOUR_NORMS),
        *per_layer,
        column("laurel.linear_left", hidden, rank, "mlp"),
        row("laurel.linear_right", rank, hidden, "mlp"),
        norm("laurel.post_laurel_norm", hidden),
        whole("altup.modality_router", hidden, copies, "router"),
        whole("altup.prediction_coefs", copies, copies * copies, "mlp"),
        whole("altup.correction_coefs", copies, copies, "mlp"),
        vector("altup.correct_output_scale", hidden, "mlp", dtype="float32"),
        norm("altup.router_norm", hidden),
    )
    layers: list[tuple[LayerCache, ...]] = []
    weights: list[tuple[Weight, ...]] = []
    for i, is_full in enumerate(layer_types(config, num_layers, 5)):
        shares = i >= shared_from
        layers.append(() if shares else (attention_cache(heads, None if is_full else window),))
        mixer = (
            shared_attention(hidden, heads, bias=bias)
            if shares
            else attention(hidden, heads, qkv_bias=bias, o_bias=bias) + qk_norms(heads)
        )
        weights.append(mixer + gated_mlp(hidden, inners[i]) + common)
    context = rope.context_of(config)
    altup = tuple(
        column(f"model.altup_{kind}_projections.{i}", hidden, hidden, "embedding")
        for kind in ("", "unembed")
        for i in range(copies - 1)
    )
    return SpecDraft(
        hidden_size=hidden, num_heads=heads.num_heads, vocab_size=vocab, context=context,
        layers=layers, layer_weights=weights,
        other_weights=[
            table("model.embed_tokens", vocab, hidden, Place.EVERY), *outside, *altup,
            final_norm(hidden, place=Place.EVERY),
        ],
        ropes=layer_ropes((heads, heads), context.positions), tied=True, widest_mlp=max(inners),
    )  # fmt: skip


def read_diffusion(config: Config, model_type: str) -> SpecDraft:
    """DiffusionGemma: Gemma 4, and an MLP of what was written before, whole on every rank."""
    result, hidden = read_gemma4(config, model_type), config.count("hidden_size")
    inner = config.count("intermediate_size")
    result.other_weights += [
        norm("self_conditioning.pre_norm", hidden),
        whole("self_conditioning.gate_up_proj", hidden, (inner, inner), "mlp"),
        whole("self_conditioning.down_proj", inner, hidden, "mlp"),
    ]
    return result


READERS = {"gemma3n_text": read_gemma3n, "gemma4_text": read_gemma4, "diffusion_gemma_text": read_diffusion}
