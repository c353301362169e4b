"""How decoders compute, against transformers' own models built from the same config, and against hand-worked facts."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch.nn import functional

from kvplan.core.errors import InvalidInputError, KvplanError, UnsupportedModelError
from kvplan.models import catalog, hf_config
from kvplan.models.families.decoder import LEFT_OUT
from kvplan.models.families.decoder_dense import ROWS
from kvplan.models.families.decoder_hybrid import QWEN_HYBRIDS
from kvplan.models.spec import (
    Decoder,
    DecoderLayer,
    DynamicScaling,
    GatedMlp,
    HeadAttention,
    LatentHeads,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelSpec,
    MoeMlp,
    Rotary,
    SlidingWindow,
    YarnScaling,
)
from tests.support import small_models
from tests.support.small_models import AUTO, LLAMA3_ROPE, YARN_ROPE, save_small_model, small_config

Values = dict[str, Any]

# inv_freq is theta^(-k/dim) in float32: the exponent's rounding counts ln(theta) < 14 times; a few operations follow.
FLOAT32 = 16 * torch.finfo(torch.float32).eps

SIZES: Values = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MLA_SIZES: Values = {
    **SIZES,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
}
WINDOWED: Values = {**SIZES, "head_dim": 32, "sliding_window": 12}
# Nothing but what the sizes need: all else is what the config class takes for a key left out.
BARE: dict[str, Values] = {
    "llama": SIZES,
    "mistral": SIZES,
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 32},
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen3_moe": {**SIZES, "num_experts": 16, "moe_intermediate_size": 32},
    "gemma2": WINDOWED,
    "gemma3_text": WINDOWED,
    "gpt_oss": {**WINDOWED, "num_local_experts": 8},
    "deepseek_v2": MLA_SIZES,
    "deepseek_v3": MLA_SIZES,
    "kimi_k2": MLA_SIZES,
}
OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
# What a published config may say beyond the small models: older spellings, and one key more or less.
MORE: dict[str, tuple[str, Values]] = {
    "llama, rope_theta": ("llama", {"rope_theta": 500000.0, "rms_norm_eps": 1e-5}),
    "llama, theta in rope_parameters": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama, both spellings": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_parameters": LLAMA3_ROPE, "rope_theta": 20000.0},
    ),
    "llama, llama3 of old": (
        "llama",
        {"rope_theta": 500000.0, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}},
    ),
    "llama, original context outside": (
        "llama",
        {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": 128},
    ),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, head_dim": ("llama", {"head_dim": 32}),
    "qwen2, yarn of old": ("qwen2", {"rope_scaling": OLD_YARN, "rope_theta": 1e6, "max_position_embeddings": 512}),
    "qwen2, yarn from today's context": (
        "qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 512},
    ),
    "qwen3, yarn with its attention factor": ("qwen3", {"rope_scaling": {**OLD_YARN, "attention_factor": 0.75}}),
    "qwen3, yarn with mscale alone": ("qwen3", {"rope_scaling": {**OLD_YARN, "mscale": 0.7}}),
    "qwen3, yarn that shrinks": ("qwen3", {"rope_scaling": {**OLD_YARN, "factor": 1.0}}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3_moe, every second layer sparse": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "gemma2, no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3_text, of old": (
        "gemma3_text",
        {
            "rope_theta": 2e6,
            "rope_local_base_freq": 20000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 3,
        },
    ),
    "gemma3_text, both spellings": (
        "gemma3_text",
        {
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e6}},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3_text, new and yarn": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {k: v for k, v in YARN_ROPE.items() if k != "rope_theta"},
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
            },
            "final_logit_softcapping": 20.0,
        },
    ),
    "gpt_oss, its own clamp": ("gpt_oss", {"swiglu_limit": 3.0, "swiglu_alpha": 1.5, "rms_norm_eps": 1e-6}),
    "gpt_oss, plain rope": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "deepseek_v2, yarn": ("deepseek_v2", {"rope_scaling": {**OLD_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    "deepseek_v2, groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "deepseek_v3, linear with mscale": (
        "deepseek_v3",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3, halves": ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False}),
    "deepseek_v3, yarn of old": ("deepseek_v3", {"rope_scaling": {**OLD_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
}


def small_values(family: str) -> Values:
    values = cast(Values, json.loads(small_config(family).to_json_string(use_diff=False)))
    return {**values, "model_type": "kimi_k2"} if family == "kimi_k2" else values


CASES: dict[str, Values] = {
    **{f"{kind}, bare": {"model_type": kind, **sizes} for kind, sizes in BARE.items()},
    **{f"{family}, small": small_values(family) for family in small_models.FAMILIES},
    **{name: {"model_type": kind, **BARE[kind], **changes} for name, (kind, changes) in MORE.items()},
}


def spec_of(values: Values) -> ModelSpec:
    return hf_config.read_config(values, "config.json", "tested")


def transformers_model(values: Values) -> Any:
    """The model that transformers makes of the same config, with random weights."""
    copied = copy.deepcopy(values)  # transformers writes into nested dicts
    if copied["model_type"] == "kimi_k2":
        copied["model_type"] = "deepseek_v3"
    config = transformers.AutoConfig.for_model(**copied)
    torch.manual_seed(0)
    return AUTO.from_config(config, attn_implementation="eager", experts_implementation="eager")


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest) -> tuple[ModelSpec, Any]:
    """(what kvplan reads, the text part of what transformers builds) for each case."""
    values = CASES[request.param]
    return spec_of(values), transformers_model(values)


def text_model(model: Any) -> Any:
    return getattr(model.model, "language_model", model.model)


def layer_pairs(pair: tuple[ModelSpec, Any]) -> list[tuple[DecoderLayer, Any]]:
    spec, model = pair
    return list(zip(spec.decoder.layers, text_model(model).layers, strict=True))


def has_bias(module: Any, name: str) -> bool:
    return getattr(module, name).bias is not None


# --- what is written down here once more, independently: the formulas behind the facts ----------------------------


def frequencies(rotary: Rotary) -> tuple[list[float], float]:
    """(radians per position of each pair, what cos and sin are multiplied by), in float64."""
    half = rotary.dim // 2
    plain = [rotary.theta ** (-i / half) for i in range(half)]
    match rotary.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor):
            return [f / factor for f in plain], 1.0
        case Llama3Scaling() as s:
            return [llama3_frequency(f, s) for f in plain], 1.0
        case YarnScaling() as s:
            low, high = (half * math.log(s.original_positions / (turns * 2 * math.pi)) / math.log(rotary.theta)
                         for turns in (s.beta_fast, s.beta_slow))  # fmt: skip
            if s.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, rotary.dim - 1)
            unscaled = [1 - min(1.0, max(0.0, (i - low) / ((high - low) or 0.001))) for i in range(half)]
            return [f * k + f / s.factor * (1 - k) for f, k in zip(plain, unscaled, strict=True)], s.attention_factor
        case LongRopeScaling() | DynamicScaling():
            raise NotImplementedError("is compared by logits")


def llama3_frequency(frequency: float, s: Llama3Scaling) -> float:
    turns = s.original_positions * frequency / (2 * math.pi)
    if turns > s.high_freq_factor:
        return frequency
    if turns < s.low_freq_factor:
        return frequency / s.factor
    part = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    return frequency * (part + (1 - part) / s.factor)


def routed(moe: MoeMlp, logits: torch.Tensor, correction: torch.Tensor | None) -> torch.Tensor:
    """[tokens, experts]: the weight of each expert, 0 where not chosen."""
    scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()
    ranked = scores + correction if correction is not None else scores
    grouped = ranked.unflatten(-1, (moe.groups, -1))
    best = grouped.topk(2 if moe.correction else 1, dim=-1).values.sum(-1)
    open_groups = functional.one_hot(best.topk(moe.top_groups, dim=-1).indices, moe.groups).sum(-2).bool()
    ranked = grouped.masked_fill(~open_groups[..., None], -math.inf).flatten(-2)
    chosen = functional.one_hot(ranked.topk(moe.top_k, dim=-1).indices, moe.num_experts).sum(-2)
    weights = scores * chosen
    if moe.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * moe.scale


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}

# --- against transformers -----------------------------------------------------------------------------------------


def test_the_cases_cover_every_family() -> None:
    # The logits of those with recurrent states are compared in tests/engine/test_delta_net.py and test_mamba2.py, and
    # those of the rows in test_engine_models.py.
    read_here = set(LEFT_OUT) - set(QWEN_HYBRIDS) - set(ROWS) - {"nemotron_h", "granitemoehybrid", "lfm2"}
    assert {values["model_type"] for values in CASES.values()} - {"gemma3"} == read_here == set(BARE)


def test_the_score_scale_is_that_of_the_attention_module(pair: tuple[ModelSpec, Any]) -> None:
    for layer, theirs in layer_pairs(pair):
        assert isinstance(layer.attention, HeadAttention | LatentHeads)
        assert layer.attention.scale == pytest.approx(theirs.self_attn.scaling, rel=1e-12)


def test_biases_norms_softcap_and_sinks_are_those_of_the_attention_module(pair: tuple[ModelSpec, Any]) -> None:
    for layer, theirs in layer_pairs(pair):
        ours, module = layer.attention, theirs.self_attn
        if isinstance(ours, LatentHeads):
            assert ours.bias == has_bias(module, "o_proj") == has_bias(module, "kv_a_proj_with_mqa")
            assert not has_bias(module, "kv_b_proj")
            assert ours.q_lora_rank == module.q_lora_rank
            assert (ours.qk_nope_head_dim, ours.v_head_dim) == (module.qk_nope_head_dim, module.v_head_dim)
            continue
        assert isinstance(ours, HeadAttention)
        assert {ours.qkv_bias} == {has_bias(module, name) for name in ("q_proj", "k_proj", "v_proj")}
        assert ours.out_bias == has_bias(module, "o_proj")
        assert (ours.qk_norm == "head") == hasattr(module, "q_norm") == hasattr(module, "k_norm")
        assert ours.softcap == getattr(module, "attn_logit_softcapping", None)
        assert ours.sinks == hasattr(module, "sinks")


def test_positions_rotate_at_the_frequencies_of_the_rotary_module(pair: tuple[ModelSpec, Any]) -> None:
    rotary_module = text_model(pair[1]).rotary_emb
    for layer, theirs in layer_pairs(pair):
        local = getattr(theirs, "layer_type", None) or getattr(theirs.self_attn, "layer_type", None)
        prefix = f"{local}_" if hasattr(rotary_module, f"{local}_inv_freq") else ""
        assert isinstance(layer.attention, HeadAttention | LatentHeads)
        rotary = layer.attention.rotary
        assert rotary is not None
        expected, factor = frequencies(rotary)
        assert getattr(rotary_module, f"{prefix}inv_freq").tolist() == pytest.approx(expected, rel=FLOAT32)
        attention_scaling = (
            getattr(rotary_module, f"{prefix}attention_scaling", None) or rotary_module.attention_scaling
        )
        assert factor == pytest.approx(attention_scaling, rel=1e-12)


def test_dense_layers_have_the_width_bias_and_activation_of_the_module(pair: tuple[ModelSpec, Any]) -> None:
    points = torch.linspace(-4, 4, 101)
    for layer, theirs in layer_pairs(pair):
        assert isinstance(layer.mlp, GatedMlp) == hasattr(theirs.mlp, "gate_proj")
        if isinstance(layer.mlp, GatedMlp):
            assert layer.mlp.inner == theirs.mlp.gate_proj.out_features
            assert {layer.mlp.bias} == {has_bias(theirs.mlp, name) for name in ("gate_proj", "up_proj", "down_proj")}
            expected = theirs.mlp.act_fn(points)
            torch.testing.assert_close(ACTIVATIONS[layer.mlp.activation](points), expected)


def test_the_router_weighs_the_experts_as_the_facts_say(pair: tuple[ModelSpec, Any]) -> None:
    """The oracle is the router module run on random tokens; the facts go through the formulas above."""
    for layer, theirs in layer_pairs(pair):
        if not isinstance(layer.mlp, MoeMlp):
            continue
        router = theirs.mlp.router if layer.mlp.names == "gpt_oss" else theirs.mlp.gate
        for tensor in (*router.parameters(), *router.buffers()):
            tensor.data.normal_()
        with torch.no_grad():
            logits, weights, indices = router(torch.randn(32, 64))
        expected = torch.zeros_like(logits).scatter(-1, indices, weights)
        correction = getattr(router, "e_score_correction_bias", None)
        assert layer.mlp.correction == (correction is not None)
        assert layer.mlp.router_bias == (getattr(router, "bias", None) is not None)
        torch.testing.assert_close(routed(layer.mlp, logits, correction), expected)


def test_experts_have_the_shape_bias_and_clamp_of_the_module(pair: tuple[ModelSpec, Any]) -> None:
    for layer, theirs in layer_pairs(pair):
        if not isinstance(layer.mlp, MoeMlp):
            continue
        ours, experts = layer.mlp, theirs.mlp.experts
        shared = getattr(theirs.mlp, "shared_experts", None)
        assert ours.shared_inner == (shared.gate_proj.out_features if shared else 0)
        assert (ours.num_experts, ours.bias) == (len(experts.down_proj), hasattr(experts, "down_proj_bias"))
        if ours.names == "gpt_oss":
            assert ours.inner == experts.intermediate_size
            assert ours.activation == "clamped_swiglu"
            assert (ours.swiglu_limit, ours.swiglu_alpha) == (experts.limit, experts.alpha)
        else:
            assert ours.inner == experts.intermediate_dim
            points = torch.linspace(-4, 4, 101)
            torch.testing.assert_close(ACTIVATIONS[ours.activation](points), experts.act_fn(points))


def test_norms_embedding_and_logits_are_those_of_the_model(pair: tuple[ModelSpec, Any]) -> None:
    spec, model = pair
    decoder, inner = spec.decoder, text_model(model)
    norm = inner.norm
    assert decoder.norm_eps == (norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)
    sandwich = decoder.names.before_mlp == "pre_feedforward_layernorm"
    assert {sandwich} == {hasattr(layer, "pre_feedforward_layernorm") for layer in inner.layers}
    norm.weight.data.zero_()  # a norm that multiplies by 1 + weight lets its input through all the same
    assert decoder.unit_offset == bool(norm(torch.ones(1, spec.hidden_size)).any())
    assert decoder.embedding_scale == getattr(inner.embed_tokens, "scalar_embed_scale", 1.0)
    assert decoder.logit_softcap == getattr(model.config.get_text_config(), "final_logit_softcapping", None)


def test_layers_are_of_the_kinds_that_their_caches_are(pair: tuple[ModelSpec, Any]) -> None:
    """A layer that slides in the sizes is a layer that slides in transformers, so one rope goes with one cache."""
    spec, model = pair
    types = getattr(model.config.get_text_config(), "layer_types", None)
    if types is not None and not isinstance(spec.decoder.layers[0].attention, LatentHeads):
        slides = [isinstance(caches[0], SlidingWindow) for caches in spec.layers]
        assert slides == [kind == "sliding_attention" for kind in types]


def rotated_score(rotary: Rotary, q: torch.Tensor, k: torch.Tensor, distance: int) -> float:
    """q . k after k has been turned back by `distance` positions, each pair as one complex number."""

    def as_complex(x: torch.Tensor) -> torch.Tensor:
        pairs = x.double().unflatten(-1, (-1, 2) if rotary.interleaved else (2, -1))
        return torch.view_as_complex((pairs if rotary.interleaved else pairs.mT).contiguous())

    angles = torch.tensor(frequencies(rotary)[0], dtype=torch.float64) * distance
    turned = as_complex(k) * torch.exp(-1j * angles)
    return float((as_complex(q) * turned.conj()).real.sum())


@pytest.mark.parametrize("case", ["deepseek_v2, bare", "deepseek_v3, bare", "deepseek_v3, halves"])
def test_deepseek_turns_the_pairs_that_its_config_says(case: str) -> None:
    latent = spec_of(CASES[case]).decoder.layers[0].attention
    assert isinstance(latent, LatentHeads)
    model = transformers_model(CASES[case])
    q, k = torch.randn(2, 1, 1, 1, latent.rotary.dim)
    module = sys.modules[type(model).__module__]
    angle_tables = [model.model.rotary_emb(q, torch.tensor([[position]])) for position in (9, 4)]
    if "v2" in case:
        (turned_q, _), (_, turned_k) = (module.apply_rotary_emb(q, k, angles) for angles in angle_tables)
    else:
        apply = module.apply_rotary_pos_emb_interleave if model.config.rope_interleave else module.apply_rotary_pos_emb
        (turned_q, _), (_, turned_k) = (apply(q, k, *angles) for angles in angle_tables)
    expected = float((turned_q * turned_k).sum())
    assert rotated_score(latent.rotary, q[0, 0, 0], k[0, 0, 0], 5) == pytest.approx(expected, rel=1e-4, abs=1e-5)


# --- published models, by hand ------------------------------------------------------------------------------------


def published(name: str, **unsized: Any) -> Decoder:
    """The decoder of a catalog model; `unsized` are the published keys that decide no size, which the catalog omits."""
    values = catalog.expand(catalog.facts(name)["config"])
    if "text_config" in values:
        values["text_config"] = {**values["text_config"], **unsized}
        return spec_of(values).decoder
    return spec_of({**values, **unsized}).decoder


def test_llama_3_1_8b() -> None:
    decoder = published(
        "llama-3.1-8b",
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    )
    rotary = Rotary(128, 500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    layer = DecoderLayer(HeadAttention(128**-0.5, rotary), GatedMlp(14336, "silu"))
    assert decoder == Decoder((layer,) * 32, norm_eps=1e-5)


def test_llama3_scaling_has_the_constants_of_llamas_own_code_where_a_config_leaves_them_out() -> None:
    """apply_scaling in meta-llama/llama-models has low_freq_factor = 1 and high_freq_factor = 4."""
    settings = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
    attention = spec_of(changed("llama", {"rope_scaling": settings})).decoder.layers[0].attention
    assert isinstance(attention, HeadAttention)
    assert attention.rotary == Rotary(16, 10000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))


def test_mixtral_8x7b() -> None:
    decoder = published("mixtral-8x7b", rms_norm_eps=1e-5, rope_theta=1e6)
    attention = HeadAttention(128**-0.5, Rotary(128, 1e6))
    experts = MoeMlp(8, 2, 14336, "silu", scoring="softmax", renormalize=True, names="mixtral")
    assert decoder == Decoder((DecoderLayer(attention, experts),) * 32, norm_eps=1e-5)


def test_qwen3_30b_a3b() -> None:
    decoder = published("qwen3-30b-a3b", rms_norm_eps=1e-6, rope_theta=1e6, norm_topk_prob=True)
    attention = HeadAttention(128**-0.5, Rotary(128, 1e6), qk_norm="head")
    experts = MoeMlp(128, 8, 768, "silu", scoring="softmax", renormalize=True, names="qwen")
    assert decoder == Decoder((DecoderLayer(attention, experts),) * 48, norm_eps=1e-6)


def test_gemma_3_4b() -> None:
    """Its published text config names no theta, no eps and no scalar: they are the class's."""
    decoder = published("gemma-3-4b")
    scaled = HeadAttention(1 / 16, Rotary(256, 1e6, LinearScaling(8.0)), qk_norm="head")  # 256^-0.5 = 1/16
    local = HeadAttention(1 / 16, Rotary(256, 1e4), qk_norm="head")
    full = [i for i, layer in enumerate(decoder.layers) if layer.attention == scaled]
    assert full == [5, 11, 17, 23, 29]
    assert {layer.attention for i, layer in enumerate(decoder.layers) if i not in full} == {local}
    assert {layer.mlp for layer in decoder.layers} == {GatedMlp(10240, "gelu_tanh")}
    after = (decoder.names.after_attention, decoder.names.after_mlp)
    assert after == ("post_attention_layernorm", "post_feedforward_layernorm")
    assert (decoder.unit_offset, decoder.norm_eps) == (True, 1e-6)
    assert decoder.embedding_scale == pytest.approx(50.596443, abs=1e-6)  # sqrt(2560)
    assert decoder.logit_softcap is None


def test_gpt_oss_20b() -> None:
    decoder = published(
        "gpt-oss-20b",
        rope_theta=150000,
        swiglu_limit=7.0,
        rope_scaling={
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
    )
    scaling = YarnScaling(32.0, 4096, 32.0, 1.0, attention_factor=0.1 * math.log(32) + 1, truncate=False)
    attention = HeadAttention(1 / 8, Rotary(64, 150000.0, scaling), qkv_bias=True, out_bias=True, sinks=True)
    experts = MoeMlp(
        32, 4, 2880, "clamped_swiglu", scoring="softmax", renormalize=True, names="gpt_oss", router_bias=True,
        bias=True, swiglu_limit=7.0, swiglu_alpha=1.702,
    )  # fmt: skip
    assert decoder == Decoder((DecoderLayer(attention, experts),) * 24, norm_eps=1e-5)


def test_deepseek_v3() -> None:
    decoder = published(
        "deepseek-v3",
        rms_norm_eps=1e-6,
        rope_theta=10000,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        rope_scaling={
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    )
    latent = decoder.layers[0].attention
    assert isinstance(latent, LatentHeads)
    # (128 + 64)^-0.5 = 0.0721688; (0.1 ln 40 + 1)^2 = 1.3688879^2 = 1.8738542
    assert latent.scale == pytest.approx(0.1352338, abs=1e-7)
    scaling = YarnScaling(40.0, 4096, 32.0, 1.0, attention_factor=1.0)
    rotary = Rotary(64, 10000.0, scaling, interleaved=True)
    assert latent == LatentHeads(latent.scale, rotary, q_lora_rank=1536, qk_nope_head_dim=128, v_head_dim=128)
    experts = MoeMlp(
        256, 8, 2048, "silu", scoring="sigmoid", renormalize=True, names="qwen", scale=2.5, groups=8, top_groups=4,
        correction=True, shared_inner=2048,
    )  # fmt: skip
    assert [layer.mlp for layer in decoder.layers] == [GatedMlp(18432, "silu")] * 3 + [experts] * 58


# --- the whole catalog --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalog.model_names())
def test_every_catalog_model_has_a_decoder_or_a_refusal_that_names_its_type(name: str) -> None:
    spec = catalog.load(name)
    says = f"model_type {spec.model_type!r} is not one the engine can run"
    if name == "embeddinggemma-300m":  # of Gemma 3's type, but an encoder
        says = "use_bidirectional_attention: the engine runs gemma3_text with False only"
    elif spec.model_type in ("phi3", "phimoe") and spec.config.get("rope_scaling"):
        says = "rope_scaling: short_factor: missing"  # which decides no size, so that the catalog has none
    elif spec.model_type in LEFT_OUT:
        assert len(spec.decoder.layers) == spec.num_layers
        return
    with pytest.raises(KvplanError, match=says):
        _ = spec.decoder


# --- refusals -----------------------------------------------------------------------------------------------------

UNSUPPORTED: dict[str, tuple[str, Values, str]] = {
    "dynamic rope of another kind": (
        "llama", {"rope_scaling": {"type": "dynamic", "alpha": 1000.0}},
        "rope_type 'dynamic' is not one the engine runs with alpha; choose",
    ),
    "norms of heads around their means": (
        "stablelm", {"qk_layernorm": True}, "qk_layernorm: the engine runs stablelm with False only (True)",
    ),
    "norms after OPT's parts": (
        "opt", {"ffn_dim": 96, "max_position_embeddings": 512, "do_layer_norm_before": False},
        "do_layer_norm_before: the engine runs opt with True only (False)",
    ),
    "an embedding narrower than the stream": (
        "opt", {"ffn_dim": 96, "max_position_embeddings": 512, "word_embed_proj_dim": 32},
        "word_embed_proj_dim: the engine runs opt with 64 only (32)",
    ),
    "clipped queries": (
        "olmoe", {"num_experts": 4, "clip_qkv": 8.0}, "clip_qkv: the engine runs olmoe with null only (8.0)",
    ),
    "longrope of two strengths": (
        "phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
                                  "long_mscale": 1.2}},
        "rope_scaling: long_mscale: the engine scales both lists of longrope alike (1.2)",
    ),
    "deepseek_yarn": ("deepseek_v3", {"rope_scaling": {"type": "deepseek_yarn", "factor": 4}}, "'deepseek_yarn'"),
    "rope by kind of layer": (
        "qwen3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "settings for full_attention alone",
    ),
    "part of a head": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: the engine runs llama with 1"),
    "part of a head, inside": (
        "llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "whole heads only (0.5)",
    ),
    "activation": ("llama", {"hidden_act": "relu"}, "hidden_act: 'relu' is not an activation the engine computes"),
    "Gemma's activation": ("gemma2", {"hidden_activation": "quick_gelu"}, "hidden_activation: 'quick_gelu'"),
    "gpt-oss activation": ("gpt_oss", {"hidden_act": "gelu"}, "the engine runs gpt_oss with 'silu' only ('gelu')"),
    "gpt-oss without biases": ("gpt_oss", {"attention_bias": False}, "the engine runs gpt_oss with True only"),
    "both ways": ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "both ways, Gemma 2": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "a cap nobody reads": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "with null only (50.0)"),
    "sliding experts": ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
    "sliding experts, Qwen2": ("qwen2_moe", {"num_experts": 8, "moe_intermediate_size": 32, "use_sliding_window": True},
                               "use_sliding_window: the engine runs qwen2_moe with False only (True)"),
    "biases after attention": ("seed_oss", {"attention_out_bias": True}, "the engine runs seed_oss with False only"),
    "another theta for windows": ("olmo3", {"rope_theta": 1e4}, "rope_theta: the engine runs olmo3 with 500000 only"),
    "choosing, GLM": ("glm4_moe", {"n_routed_experts": 8, "moe_intermediate_size": 32, "scoring_func": "softmax"},
                      "scoring_func: the engine runs glm4_moe with 'sigmoid' only ('softmax')"),
    "choosing, V2": ("deepseek_v2", {"topk_method": "noaux_tc"}, "with 'greedy' or 'group_limited_greedy' only"),
    "choosing, V3": ("deepseek_v3", {"topk_method": "greedy"}, "topk_method: the engine runs deepseek_v3"),
    "choosing, Kimi": ("kimi_k2", {"topk_method": "greedy"}, "topk_method: the engine runs kimi_k2"),
    "scoring, V2": ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func: the engine runs deepseek_v2"),
    "scoring, V3": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: the engine runs deepseek_v3"),
    "V2 renormalised": ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: the engine runs deepseek_v2"),
    "V2 with biases": ("deepseek_v2", {"mlp_bias": True}, "mlp_bias: the engine runs deepseek_v2 with False"),
}  # fmt: skip

INVALID: dict[str, tuple[str, Values, str]] = {
    "one rope for Gemma 3": (
        "gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "rope_parameters must have an entry for each kind of layer (full_attention and sliding_attention)",
    ),
    "no factor": ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor: missing"),
    "a theta of 0": ("llama", {"rope_theta": 0}, "rope_theta must be above 0 (0)"),
    "text for eps": ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a finite number ('1e-5')"),
    "an odd head": ("llama", {"head_dim": 15}, "head_dim must be even where positions rotate (15)"),
    "no scalar": ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be above 0 (-1)"),
    "groups that do not divide": ("deepseek_v3", {"n_group": 3}, "n_group must divide the 16 experts (3)"),
    "too few in a group": ("deepseek_v3", {"n_group": 16}, "n_group must leave each group two experts (16)"),
    "too many groups": ("deepseek_v3", {"topk_group": 9}, "topk_group must be at most n_group, 8 (9)"),
    "too many experts": ("deepseek_v3", {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most 8 (9)"),
    "groups nobody counted": ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "n_group: missing"),
    "no KV heads": ("mistral", {"num_key_value_heads": ...}, "num_key_value_heads is missing: transformers has"),
    "no head_dim": ("qwen3", {"head_dim": ...}, "head_dim is missing: transformers has"),
    "rope for some layers": (
        "smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 7 layers; correct the config",
    ),
    "one rope for OLMo 3": (
        "olmo3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "rope_parameters must have an entry for each kind of layer (full_attention and sliding_attention)",
    ),
    "no window, Cohere": ("cohere2", {"sliding_window": ...}, "sliding_window is missing: transformers has"),
    "no window": ("gemma3_text", {"sliding_window": ...}, "sliding_window is missing: transformers has"),
}  # fmt: skip


def changed(model_type: str, changes: Mapping[str, Any]) -> Values:
    """A bare config with `changes`; `...` takes a key away."""
    values = {"model_type": model_type, **BARE.get(model_type, WINDOWED), **changes}
    return {key: value for key, value in values.items() if value is not ...}


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *[pytest.param(UnsupportedModelError, case, id=name) for name, case in UNSUPPORTED.items()],
        *[pytest.param(InvalidInputError, case, id=name) for name, case in INVALID.items()],
    ],
)
def test_what_the_engine_does_not_compute_is_refused_by_name(
    kind: type[KvplanError], case: tuple[str, Values, str]
) -> None:
    model_type, changes, text = case
    spec = spec_of(changed(model_type, changes))  # it can be sized all the same
    with pytest.raises(KvplanError) as caught:
        _ = spec.decoder
    assert type(caught.value) is kind
    message = str(caught.value)
    assert text in message
    assert message.startswith("config.json: ")
    assert "\n" not in message


def test_a_quantised_checkpoint_is_the_loaders_business() -> None:
    values = changed("llama", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    assert spec_of(values).decoder == spec_of(changed("llama", {})).decoder


SIZE_ONE = "from kvplan.models import catalog; catalog.load('llama-3.1-8b'); import sys; print(*sys.modules)"


def test_sizing_a_model_does_not_load_the_reader_of_how_it_computes() -> None:
    done = subprocess.run([sys.executable, "-c", SIZE_ONE], capture_output=True, text=True, timeout=900, check=True)
    loaded = [name for name in done.stdout.split() if name.startswith("kvplan.models.families.")]
    assert "kvplan.models.families.dense" in loaded
    assert [name for name in loaded if "decoder" in name] == []


# --- the small models themselves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", small_models.FAMILIES)
def test_no_parameter_of_a_small_model_is_left_at_its_start(family: str) -> None:
    model = small_models.build_small_model(family)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    loaded = [name for name in model.state_dict() if name in tensors]
    constant = [name for name in loaded if "position_ids" not in name and tensors[name].std() < 0.01]
    assert constant == []


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "kimi_k2"])
def test_a_saved_small_model_comes_back_as_it_was(family: str, tmp_path: Path) -> None:
    tokens = torch.arange(40, 80)[None]
    saved = save_small_model(family, tmp_path, seed=1, max_shard_size="100KB")
    assert len(list(saved.glob("*.safetensors"))) > 1
    assert (saved / "model.safetensors.index.json").is_file()
    with torch.no_grad():
        expected = small_models.build_small_model(family, seed=1)(input_ids=tokens).logits
        assert torch.equal(small_models.load_reference(saved)(input_ids=tokens).logits, expected)
