"""Decoders whose configs have keys or flags of their own, in the words of the dense and the sparse readers.

Source: vLLM 0.33 model_executor/models, a class each; compared with its parameters (tests/facts/architectures.jsonl).
"""

from collections.abc import Callable
from dataclasses import replace
from math import pi

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families import dense, moe
from kvplan.models.families.blocks import Heads, SpecDraft, attention, column, norm, qk_norms, vector, whole
from kvplan.models.families.config import Config
from kvplan.models.families.dense import FOUR_NORMS, LLAMA, Traits
from kvplan.models.families.moe import NO_BIAS, Moe
from kvplan.models.spec import Part, SlidingWindow, Weight

MOST_BASE = 1e15  # of rotary positions that are not damaged


def reworded(config: Config, **values: object) -> Config:
    """The config with these values; None leaves a key as it is."""
    return Config(
        {**config.values, **{k: v for k, v in values.items() if v is not None}}, config.where, config.notes
    )  # fmt: skip


def first_dense(config: Config, key: str, default: int = 0) -> Config:
    """A config whose first `key` layers are dense, the others sparse."""
    return reworded(config, first_k_dense_replace=config.count(key, default=default, low=0), moe_layer_freq=1)


def chosen_layers(config: Config, key: str) -> Config:
    """A config that lists its sparse layers as numbers in text ("1,2,3")."""
    num_layers, text = config.num_layers(), config.values.get(key)
    if text is None:
        return config
    listed = text.split(",") if isinstance(text, str) else text
    if not isinstance(listed, list) or not all(str(item).strip().isdigit() for item in listed):
        raise config.fail(key, f"must list layers ({text!r:.60})", "correct the config")
    sparse = {int(item) for item in listed}
    return reworded(config, mlp_layer_types=["sparse" if i in sparse else "dense" for i in range(num_layers)])


# --- Dense ------------------------------------------------------------------------------------------------------


def read_hyperclovax(config: Config, model_type: str) -> SpecDraft:
    """Llama, with two more norms where `use_post_norm` says so."""
    norms = (*LLAMA.norms, "post_norm1", "post_norm2") if config.flag("use_post_norm") else LLAMA.norms
    return dense.read_with(config, replace(LLAMA, norms=norms), model_type)


def read_apertus(config: Config, model_type: str) -> SpecDraft:
    """Apertus: an MLP without a gate, its activation with two numbers of its own, norms of queries and keys."""
    draft = dense.read_with(config, Traits(gated=False, qk_norm="head"), model_type)
    own = vector("mlp.act_fn.alpha_p", 1, "mlp"), vector("mlp.act_fn.alpha_n", 1, "mlp")
    draft.layer_weights = [weights + own for weights in draft.layer_weights]
    return draft


def read_telechat(config: Config, model_type: str) -> SpecDraft:
    """TeleChat 2: the output and the down projection alone have biases."""
    widths = {"intermediate_size": config.count("intermediate_size", "ffn_hidden_size")}
    config = reworded(config, num_hidden_layers=config.num_layers(), **widths)
    draft = dense.read_with(config, replace(NO_BIAS, o_bias=True), model_type)
    draft.layer_weights = [
        tuple(replace(weight, bias=True) if weight.name == "mlp.down_proj" else weight for weight in weights)
        for weights in draft.layer_weights
    ]
    return draft


def read_step1(config: Config, model_type: str) -> SpecDraft:
    """Llama with ALiBi, its KV heads counted as `num_attention_groups`."""
    groups = config.count("num_attention_groups", "num_key_value_heads", default=1)
    draft = dense.read_with(reworded(config, num_key_value_heads=groups), replace(LLAMA, tied=True), model_type)
    draft.ropes = ()
    return draft


def read_loop_coder(config: Config, model_type: str) -> SpecDraft:
    """IQuest-Coder's loop: each layer is run several times, later ones in a window and gated by head."""
    draft = dense.read_with(config, replace(NO_BIAS, qkv_bias=False), model_type)
    heads, loops = dense.heads_of(config), config.count("loop_num", default=2)
    window = SlidingWindow(
        heads.num_kv_heads, heads.head_dim, heads.head_dim, config.count("loop_window_size", default=64)
    )
    gate = Weight("gate_proj", "attention", heads.head_dim, (Part(heads.num_heads),), "outputs", bias=True)
    draft.layers = [(*caches, *(window,) * (loops - 1)) for caches in draft.layers]
    draft.layer_weights = [(*weights, gate) for weights in draft.layer_weights]
    return draft


# --- Experts ----------------------------------------------------------------------------------------------------


def read_ernie_moe(config: Config, model_type: str) -> SpecDraft:
    """ERNIE 4.5: sparse every n-th layer from one layer to another."""
    num_layers, every = config.num_layers(), config.count("moe_layer_interval", default=1)
    first = config.count("moe_layer_start_index", default=0, low=0)
    last = config.count("moe_layer_end_index", default=num_layers - 1, low=0)
    kinds = ["sparse" if (i + 1) % every == 0 and first <= i <= last else "dense" for i in range(num_layers)]
    biased = config.flag("use_bias")
    traits = Traits(qkv_bias=biased, o_bias=False, mlp_bias=biased, tied=True)
    router = Moe(shared="moe_num_shared_experts", router_dtype="float32", correction="counted")
    return moe.read_with(reworded(config, mlp_layer_types=kinds), traits, router, model_type)


def read_bailing(config: Config, model_type: str) -> SpecDraft:
    """Ling and Ring, Sarvam and Param 2: whether there are biases, norms and a routing bias is flagged."""
    fixed = model_type == "param2moe"
    norms_biased = model_type == "sarvam_moe"  # whose norms of queries and keys are torch's LayerNorm
    traits = Traits(
        attention_key="use_bias", qkv_bias=config.flag("use_qkv_bias") or config.flag("use_bias"), mlp_key="use_bias",
        qk_norm="no" if norms_biased else "flag_head",
    )  # fmt: skip
    inner = config.count("moe_shared_expert_intermediate_size", "moe_intermediate_size")
    shared = config.count("num_shared_experts", default=int(fixed), low=0) * inner
    wide = fixed or config.values.get("router_dtype") == "fp32"
    corrected = config.flag("moe_router_enable_expert_bias", fixed)
    router = Moe(
        shared="shared_width", router_dtype="float32" if wide else None, correction="buffer" if corrected else ""
    )
    config = reworded(first_dense(config, "first_k_dense_replace", int(fixed)), shared_width=shared)
    draft = moe.read_with(config, traits, router, model_type)
    if norms_biased and config.flag("use_qk_norm"):
        width = dense.heads_of(config).head_dim
        extra = tuple(norm(f"self_attn.{x}_norm", width, "layer") for x in "qk")
        draft.layer_weights = [weights + extra for weights in draft.layer_weights]
    return draft


def read_afmoe(config: Config, model_type: str) -> SpecDraft:
    """Arcee's AFMoE: gated attention heads, four norms, windows in three layers of four."""
    traits = replace(
        NO_BIAS, norms=FOUR_NORMS, qk_norm="head", gate=True, windows="types",
        full_every=config.count("global_attn_every_n_layers", default=4),
    )  # fmt: skip
    router = Moe(shared="num_shared_experts", router_dtype="float32", correction="counted")
    return moe.read_with(first_dense(config, "num_dense_layers"), traits, router, model_type)


def read_cohere2_moe(config: Config, model_type: str) -> SpecDraft:
    """Command A with experts: its windows hold a token more, its dense prefix keeps every token."""
    rms = "rms_norm_eps" in config
    traits = replace(dense.TRAITS["cohere2"], layer_norm=not rms, every_stage=False)
    window = config.maybe_count("sliding_window")
    config = reworded(
        config, sliding_window=window and window + 1,
        prefix_dense_intermediate_size=config.count("prefix_dense_intermediate_size", "intermediate_size"),
    )  # fmt: skip
    router = Moe(inner="intermediate_size", dense_inner="prefix_dense_intermediate_size", shared="num_shared_experts")
    return moe.read_with(config, traits, router, model_type)


def read_hy_v3(config: Config, model_type: str) -> SpecDraft:
    """Hunyuan 3: norms of queries and keys where `qk_norm` says so."""
    traits = replace(NO_BIAS, qk_norm="head" if config.flag("qk_norm") else "no")
    router = Moe(inner="expert_hidden_dim", shared="num_shared_experts", router_dtype="float32", correction="buffer")
    inner = config.count("expert_hidden_dim", "moe_intermediate_size")
    return moe.read_with(reworded(config, expert_hidden_dim=inner), traits, router, model_type)


def read_k2_horizon(config: Config, model_type: str) -> SpecDraft:
    """K2 Horizon without experts in its attention."""
    if config.maybe_count("mova_num_experts"):
        raise UnsupportedModelError(config.where, "mova_num_experts: experts in the attention are not modeled")
    if config.values.get("attention_gate_func") is not None:
        raise UnsupportedModelError(config.where, "attention_gate_func: a gated attention is not modeled here")
    traits = replace(NO_BIAS, qkv_bias=None, qk_norm="split" if config.flag("query_key_norm") else "no")
    router = Moe(shared="num_shared_experts", correction="buffer" if config.flag("moe_gate_bias") else "")
    return moe.read_with(config, traits, router, model_type)


def read_pangu_pro(config: Config, model_type: str) -> SpecDraft:
    """openPangu Pro MoE V2: keys of every request among the weights, keys alone normalized, narrower values."""
    width = config.count("qk_nope_dim") + config.count("qk_rope_dim")
    norms = FOUR_NORMS if config.flag("sandwich_norm") else LLAMA.norms
    router = Moe(
        shared="n_shared_experts", correction="counted" if config.flag("router_enable_expert_bias") else ""
    )  # fmt: skip
    draft = moe.read_with(reworded(config, head_dim=width), replace(NO_BIAS, norms=norms), router, model_type)
    plain = dense.heads_of(reworded(config, head_dim=width))
    heads = Heads(plain.num_heads, plain.num_kv_heads, width, config.count("v_channels"))
    count, hidden = config.count("param_sink_number", default=0, low=0), draft.hidden_size
    sinks = [heads.kv(count * heads.head_dim)] if count else []
    sinks += [heads.kv(count * heads.head_dim_v)] if count and config.flag("param_sink_with_value") else []
    own = (
        *attention(hidden, heads, qkv_bias=config.flag("attention_bias")),
        norm("self_attn.k_layernorm", width),
        *(Weight("self_attn.param_sink", "attention", 1, (part,), "outputs") for part in sinks),
    )
    draft.layers = [(dense.attention_cache(heads, None),)] * len(draft.layers)
    draft.layer_weights = [own + weights[2:] for weights in draft.layer_weights]
    return draft


def read_interns1_pro(config: Config, model_type: str) -> SpecDraft:
    """Intern-S1 Pro: Qwen3 with experts, and coefficients of its rotary table's waves, one table for all layers."""
    draft = moe.read_with(config, *moe.FAMILIES["qwen3_moe"], "qwen3_moe")
    heads, scaling = dense.heads_of(config), config.sub("rope_scaling")
    waves = scaling.maybe_count("num_inv_freq")
    if waves is None:  # those that turn once or more within the context (vLLM 0.33 rotary_embedding/fope.py)
        base, half = config.ratio("rope_theta", 10000.0, MOST_BASE), heads.head_dim // 2
        least = 2 * pi / config.count("max_position_embeddings")
        waves = sum(1 for i in range(half) if base ** (-i / half) > least)
    part = heads.kv(waves**2)
    draft.other_weights += [Weight(f"rotary_emb.{x}_coef", "attention", 1, (part,), "outputs") for x in ("cos", "sin")]
    return draft


STEP = Moe(shared="share_expert_dim", shared_name="share_expert")


def read_step3(config: Config, model_type: str) -> SpecDraft:
    """Step 3: queries through a narrower space, one head of K and V."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    width, rank = config.count("head_dim"), config.count("share_q_dim")
    config = reworded(chosen_layers(config, "moe_layers_enum"), num_key_value_heads=1)
    draft = moe.read_with(config, NO_BIAS, STEP, model_type)
    query = (
        whole("self_attn.qkv_proj", hidden, (rank, width, width), "attention"),
        norm("self_attn.inter_norm", rank),
        column("self_attn.wq", rank, (Part(heads, width),), "attention"),
    )
    draft.layer_weights = [query + weights[1:] for weights in draft.layer_weights]
    return draft


def read_step3p5(config: Config, model_type: str) -> SpecDraft:
    """Step 3.5: layers in a window may have other heads, each gated; a routing bias where flagged."""
    wide = "float32" if config.flag("need_fp32_gate") else None
    correction = "buffer" if config.flag("use_moe_router_bias") else ""
    config = chosen_layers(
        reworded(config, num_key_value_heads=config.count("num_attention_groups")), "moe_layers_enum"
    )
    traits = replace(NO_BIAS, qk_norm="head", windows="types")
    draft = moe.read_with(config, traits, replace(STEP, router_dtype=wide, correction=correction), model_type)
    hidden, gated = config.count("hidden_size"), config.flag("use_head_wise_attn_gate")
    full = dense.heads_of(config)
    other = config.sub("attention_other_setting")
    heads = {
        False: full,
        True: Heads(
            other.count("num_attention_heads", default=full.num_heads),
            other.count("num_attention_groups", default=full.num_kv_heads),
            *(other.count("head_dim", default=full.head_dim),) * 2,
        ),
    }
    for i, (window, weights) in enumerate(
        zip(dense.layer_windows(config, traits, len(draft.layers)), draft.layer_weights, strict=True)
    ):
        own = heads[window is not None]
        mixer = attention(hidden, own) + qk_norms(own)
        if gated:
            mixer += (column("self_attn.g_proj", hidden, own.num_heads, "attention"),)
        draft.layers[i] = (dense.attention_cache(own, window),)
        draft.layer_weights[i] = mixer + tuple(weight for weight in weights if weight not in mixer_of(config, full))
    return draft


def mixer_of(config: Config, heads: Heads) -> tuple[Weight, ...]:
    return attention(config.count("hidden_size"), heads) + qk_norms(heads)


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {
    "apertus": read_apertus,
    "telechat": read_telechat,
    "hyperclovax": read_hyperclovax,
    "step1": read_step1,
    "iquestloopcoder": read_loop_coder,
    "ernie4_5_moe": read_ernie_moe,
    "bailing_moe": read_bailing,
    "sarvam_moe": read_bailing,
    "param2moe": read_bailing,
    "afmoe": read_afmoe,
    "cohere2_moe": read_cohere2_moe,
    "hy_v3": read_hy_v3,
    "k2_horizon": read_k2_horizon,
    "step3_text": read_step3,
    "step3p5": read_step3p5,
    "PanguProMoE": read_pangu_pro,
    "interns1_pro_text": read_interns1_pro,
}
