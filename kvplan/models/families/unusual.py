"""Decoders of a shape of their own: Mamba 2 alone, OLMo Hybrid, MiniCPM 3, LongCat Flash, Qwen 4's preview.

Source: vLLM 0.33 model_executor/models; compared with its parameters (tests/facts/architectures.jsonl).
"""

from collections.abc import Callable
from dataclasses import replace

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families import dense, rope
from kvplan.models.families.blocks import (
    SpecDraft,
    attention,
    column,
    correction_bias,
    experts,
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
from kvplan.models.families.dense import attention_cache, heads_of, outer_weights
from kvplan.models.families.hybrid import Layer, draft, read_qwen, ssm_dtype
from kvplan.models.families.mla import PLAIN, latent_attention, latent_caches
from kvplan.models.families.moe import TOP_K_KEYS
from kvplan.models.families.state import Mixer, convolution, mamba2
from kvplan.models.spec import FullAttention, LayerCache, Part, Place, RecurrentState, Weight


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
    ngrams = longcat_ngrams(config, hidden, vocab) if "ngram_vocab_size_ratio" in config else ()
    caches: tuple[LayerCache, ...] = latent_caches(config, indexed=None) * 2
    context, tied = rope.context_of(config), config.flag("tie_word_embeddings")
    return SpecDraft(
        hidden_size=hidden,
        num_heads=config.count("num_attention_heads"),
        vocab_size=vocab,
        context=context,
        layers=[caches] * num_layers,
        layer_weights=[half * 2 + sparse] * num_layers,
        other_weights=[*outer_weights(config, PLAIN, vocab, hidden, tied), *ngrams],
        ropes=rope.tables(config, config.count("qk_rope_head_dim"), context.positions),
        tied=tied,
        experts_per_token=config.count(*TOP_K_KEYS, default=1),
        widest_mlp=width,
    )


def longcat_ngrams(config: Config, hidden: int, vocab: int) -> tuple[Weight, ...]:
    """Tables of hashed n-grams, in one, and a projection for each (vLLM 0.33 longcat_flash_ngram.py)."""
    tables = config.count("emb_split_num") * (config.count("emb_neighbor_num", low=2) - 1)
    rows = tables * config.count("ngram_vocab_size_ratio") * vocab + tables**2  # each has two rows more than the last
    width = hidden // tables
    projections = whole("model.ngram_embeddings.oe_projection", width, (hidden,) * tables, "embedding")
    return table("model.ngram_embeddings.oe_embedder", rows, width), replace(projections, place=Place.FIRST)


QWEN4_MORE = ("ple_layer_ids", "index_head_dim", "index_n_heads", "indexer_head_dim", "index_topk")


def read_qwen4(config: Config, model_type: str) -> SpecDraft:
    """Qwen 4's preview without its tables and indexers: Qwen3.5's layers between mixers of several residual streams."""
    for key in QWEN4_MORE:
        if config.values.get(key):
            raise UnsupportedModelError(
                f"{config.where}: {key}",
                "Qwen 4's n-gram tables and key indexes are not modeled",
                "choose another model",
            )
    types = [str(kind).replace("indexed_attention", "full_attention") for kind in config.items("layer_types") or ()]
    plain = Config({**config.values, "layer_types": types or None}, config.where, config.notes)
    result = read_qwen(plain, "qwen3_5_moe_text")
    hidden, streams, rank = config.count("hidden_size"), config.count("hc_count"), config.count("hc_lowrank")
    width = streams * hidden
    up, scale = whole("input_mix_weight_up", rank, width, "mlp", quantizable=False), norm("hc_norm", width)
    down = whole("input_mix_weight_down_block_inject", width, rank + streams**2, "mlp", quantizable=False)
    plain_norms = ("input_layernorm", "post_attention_layernorm")
    result.layer_weights = [
        (*(weight for weight in weights if weight.name not in plain_norms), *(scale, down, up) * 2)
        for weights in result.layer_weights
    ]
    mixer = scale, whole("model.mixer.input_mix_weight_down", width, rank, "mlp", quantizable=False), up
    result.other_weights = [weight for weight in result.other_weights if weight.name != "model.norm"]
    result.other_weights += [replace(weight, place=Place.LAST) for weight in mixer]
    return result


READERS: dict[str, Callable[[Config, str], SpecDraft]] = {
    "mamba2": read_mamba2,
    "olmo_hybrid": read_olmo_hybrid,
    "minicpm3": read_minicpm3,
    "longcat_flash": read_longcat,
    "qwen4_exp_text": read_qwen4,
}
