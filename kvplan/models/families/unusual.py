"""Decoders of a shape of their own: Mamba 2 alone, OLMo Hybrid, MiniCPM 3, LongCat Flash, HRM.

Source: vLLM 0.33 model_executor/models; compared with its parameters (tests/facts/architectures.jsonl).
"""

from collections.abc import Callable

from kvplan.models.families import dense, rope
from kvplan.models.families.blocks import (
    SpecDraft,
    attention,
    column,
    correction_bias,
    embedding,
    experts,
    gated_mlp,
    norm,
    qk_norms,
    router,
    row,
    vector,
)
from kvplan.models.families.config import Config
from kvplan.models.families.dense import attention_cache, dense_mlp, heads_of, outer_weights
from kvplan.models.families.hybrid import Layer, draft, ssm_dtype
from kvplan.models.families.mla import PLAIN, latent_attention, latent_caches
from kvplan.models.families.moe import TOP_K_KEYS
from kvplan.models.families.state import Mixer, convolution, mamba2
from kvplan.models.spec import FullAttention, LayerCache, Part, RecurrentState, Weight


def read_mamba2(config: Config, model_type: str) -> SpecDraft:
    """Pure Mamba 2: no attention anywhere."""
    hidden, vocab = config.count("hidden_size"), config.count("vocab_size")
    config = Config({**config.values, "mamba_proj_bias": config.flag("use_bias")}, config.where, config.notes)
    weights, state = mamba2(
        config, hidden, config.count("expand", default=2) * hidden, config.count("num_heads"), config.count("head_dim"),
        config.count("n_groups"), config.count("state_size"), config.count("conv_kernel"), prefix="mixer",
    )  # fmt: skip
    layers: list[Layer] = [((*weights, norm("norm", hidden)), (state,))] * config.num_layers()
    tied = config.flag("tie_word_embeddings")
    return draft(config, layers, list(outer_weights(config, PLAIN, vocab, hidden, tied)), heads=None, tied=tied)


def olmo_delta_net(config: Config, hidden: int) -> Mixer:
    """OLMo Hybrid's gated delta net: queries, keys, values and gate in one tensor, all of it in the model's dtype."""
    k_heads, v_heads = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    k_dim, v_dim = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    kernel, value = config.count("linear_conv_kernel_dim"), Part(v_heads, v_dim)
    channels = (Part(k_heads, k_dim), Part(k_heads, k_dim), value)
    weights = (
        column("linear_attn.in_proj_qkvg", hidden, (*channels, value), "state"),
        convolution("linear_attn.conv1d", kernel, channels, bias=False),
        column("linear_attn.b_proj", hidden, v_heads, "state"),
        column("linear_attn.a_proj", hidden, v_heads, "state"),
        vector("linear_attn.A_log", v_heads, "state", split=True),
        vector("linear_attn.dt_bias", v_heads, "state", split=True),
        norm("linear_attn.o_norm", v_dim),
        row("linear_attn.o_proj", v_heads * v_dim, hidden, "state"),
    )
    dtype = ssm_dtype(config, "mamba_ssm_dtype", None)
    return weights, RecurrentState("gated_delta_net", kernel, channels, v_heads, (v_dim, k_dim), dtype)


def read_olmo_hybrid(config: Config, model_type: str) -> SpecDraft:
    """OLMo Hybrid: OLMo 2's attention in every fourth layer, its own delta net elsewhere."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    types = config.per_layer_names("layer_types", num_layers)
    if types is None:
        raise config.fail("layer_types", "missing", "kvplan cannot tell which layers attend")
    heads = heads_of(config)
    delta, state = olmo_delta_net(config, hidden)
    full = attention(hidden, heads, qkv_bias=config.flag("attention_bias")) + qk_norms(heads, full=True)
    mlp = gated_mlp(hidden, config.count("intermediate_size"))
    after = norm("post_attention_layernorm", hidden)
    kinds: dict[bool, Layer] = {
        True: ((*full, after, norm("post_feedforward_layernorm", hidden), *mlp), (attention_cache(heads, None),)),
        False: ((*delta, norm("input_layernorm", hidden), after, *mlp), (state,)),
    }
    layers = [kinds[kind == "full_attention"] for kind in types]
    tied = config.flag("tie_word_embeddings")
    return draft(config, layers, list(outer_weights(config, PLAIN, vocab, hidden, tied)), heads=heads, tied=tied)


def read_minicpm3(config: Config, model_type: str) -> SpecDraft:
    """MiniCPM 3: MLA's projections, whose keys and values the server keeps in full, as wide as its queries."""
    config = Config({**config.values, "num_key_value_heads": None}, config.where, config.notes)
    result = dense.read_with(config, dense.Traits(qkv_bias=False, o_bias=False, mlp_bias=False, tied=True), model_type)
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    width, rotary = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    latent = latent_attention(config, hidden)
    result.layer_weights = [latent + weights[2:] for weights in result.layer_weights]
    result.layers = [(FullAttention(heads, width + rotary, width + rotary),)] * len(result.layers)
    result.ropes = rope.tables(config, rotary, result.context.positions)
    return result


def read_longcat(config: Config, model_type: str) -> SpecDraft:
    """LongCat Flash: two attentions and two dense MLPs a layer, beside experts of which some compute nothing."""
    hidden, num_layers, vocab = config.count("hidden_size"), config.num_layers(), config.count("vocab_size")
    count, empty = config.count("n_routed_experts"), config.count("zero_expert_num", default=0, low=0)
    inner, width = config.count("expert_ffn_hidden_size"), config.count("ffn_hidden_size")
    half = (
        *latent_attention(config, hidden),
        norm("input_layernorm", hidden),
        norm("post_attention_layernorm", hidden),
        *gated_mlp(hidden, width, prefix="mlps"),
    )
    sparse = (
        router("mlp.router.classifier", hidden, count + empty, dtype="float32"),
        correction_bias("mlp.router.e_score_correction_bias", count + empty),
        *experts(hidden, inner, count),
    )
    caches: tuple[LayerCache, ...] = latent_caches(config, indexed=None) * 2
    context, tied = rope.context_of(config), config.flag("tie_word_embeddings")
    return SpecDraft(
        hidden_size=hidden,
        num_heads=config.count("num_attention_heads"),
        vocab_size=vocab,
        context=context,
        layers=[caches] * num_layers,
        layer_weights=[half * 2 + sparse] * num_layers,
        other_weights=list(outer_weights(config, PLAIN, vocab, hidden, tied)),
        ropes=rope.tables(config, config.count("qk_rope_head_dim"), context.positions),
        tied=tied,
        experts_per_token=config.count(*TOP_K_KEYS, default=1),
        widest_mlp=width,
    )


def read_hrm(config: Config, model_type: str) -> SpecDraft:
    """HRM: two stacks of layers run in cycles, each run of a layer with a cache of its own; no norm has weights."""
    hidden, vocab = config.count("hidden_size"), config.count("vocab_size")
    heads, stack = heads_of(config), config.count("num_layers_per_stack")
    runs = config.count("H_cycles") * (config.count("L_cycles") + 1) * stack
    gate = Part(heads.num_heads, heads.head_dim)
    qkv, out = attention(hidden, heads)
    mixer = column("self_attn.gqkv_proj", hidden, (gate, *qkv.parts), "attention"), out
    block = mixer + dense_mlp(config, PLAIN, hidden, config.count("intermediate_size"))
    tied, context = config.flag("tie_word_embeddings"), rope.context_of(config)
    layers: list[tuple[Weight, ...]] = [block if i < 2 * stack else () for i in range(runs)]
    return SpecDraft(
        hidden_size=hidden,
        num_heads=heads.num_heads,
        vocab_size=vocab,
        context=context,
        layers=[(attention_cache(heads, None),)] * runs,
        layer_weights=layers,
        other_weights=[*embedding(vocab, hidden, tied), vector("model.z_L_init", hidden, "norm")],
        ropes=rope.tables(config, heads.head_dim, context.positions),
        tied=tied,
        widest_mlp=config.count("intermediate_size"),
    )


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {
    "mamba2": read_mamba2,
    "olmo_hybrid": read_olmo_hybrid,
    "minicpm3": read_minicpm3,
    "longcat_flash": read_longcat,
    "hrm_text": read_hrm,
}
