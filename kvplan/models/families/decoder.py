"""Computation of the decoders that the engine runs: config.json -> Decoder.

A missing key takes the default of the family's config class. Source of the defaults and of each family's computation:
transformers 5.23, models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable
from kvplan.models.families import mla
from kvplan.models.families.config import Config
from kvplan.models.families.decoder_dense import (
    EPS_KEYS,
    INTERLEAVED,
    JOINED_MLP,
    LAYOUTS,
    OUTPUT_NAMES,
    PARTLY_TURNED,
    PLAIN_NAMES,
    ROWS,
    ROWS_ONLY,
    ROWS_STATED,
    traits_of,
    turning_layers,
)
from kvplan.models.families.decoder_hybrid import QWEN_HYBRIDS, read_qwen_hybrid
from kvplan.models.families.decoder_mamba import (
    GRANITE,
    GRANITE_ONLY,
    LFM2,
    NEMOTRON_H,
    NEMOTRON_H_ONLY,
    read_granite,
    read_lfm2,
    read_nemotron_h,
)
from kvplan.models.families.decoder_rope import Kind, positive, read_partial_rotary, read_rotary, score_factor
from kvplan.models.families.dense import Traits, has_qk_norm, heads_of, layer_windows
from kvplan.models.families.moe import EXPERT_KEYS, FAMILIES, Moe, shared_width, sparse_layers
from kvplan.models.spec import (
    Decoder,
    DecoderLayer,
    GatedMlp,
    HeadAttention,
    LatentHeads,
    MoeMlp,
    PlainActivation,
    PlainMlp,
    Rotary,
    SmoothActivation,
)

_ALL: dict[str, Any] = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10_000.0}
_GEMMA: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
}
_DEEPSEEK_V3: dict[str, Any] = {
    **_ALL,
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
}

# The types that the engine runs, and their config classes' defaults for missing keys.
LEFT_OUT: dict[str, Mapping[str, Any]] = {
    "llama": {**_ALL, "max_position_embeddings": 2048},
    "mistral": {**_ALL, "max_position_embeddings": 131_072},
    "qwen2": {**_ALL, "max_position_embeddings": 32_768},
    "qwen3": {**_ALL, "max_position_embeddings": 32_768},
    "mixtral": {
        **_ALL, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_position_embeddings": 131_072,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {**_ALL, "max_position_embeddings": 32_768, "num_experts_per_tok": 8, "norm_topk_prob": False},
    "gemma2": {
        **_GEMMA, "rope_theta": 10_000.0, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "max_position_embeddings": 131_072,
    },
    "gpt_oss": {
        **_ALL, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "max_position_embeddings": 131_072,
        "num_experts_per_tok": 4, "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
    },
    "deepseek_v2": {
        **_ALL, "max_position_embeddings": 2048, "q_lora_rank": 1536, "first_k_dense_replace": 0,
        "n_shared_experts": 2, "topk_method": "greedy", "routed_scaling_factor": 1.0,
    },
    **ROWS,
    **QWEN_HYBRIDS,
    "nemotron_h": NEMOTRON_H,
    "granitemoehybrid": GRANITE,
    "lfm2": LFM2,
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,  # a DeepSeek-V3 under another name; its published class is a copy of it
}  # fmt: skip

# Keys required here: transformers has unrelated defaults for them, which do not match this model's layer sizes.
STATED: dict[str, tuple[str, ...]] = {
    **ROWS_STATED,
    "mistral": ("num_key_value_heads",),
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
    "mixtral": ("num_key_value_heads",),
    "qwen3_moe": ("num_key_value_heads",),
    "gemma2": ("num_key_value_heads", "head_dim", "sliding_window"),
    "gemma3_text": ("num_key_value_heads", "head_dim", "sliding_window"),
    "gpt_oss": ("num_key_value_heads", "head_dim", "sliding_window"),
    "qwen3_next": ("num_key_value_heads", "head_dim", "num_experts"),
    "granitemoehybrid": ("num_key_value_heads", "num_local_experts"),
    "qwen3_5_text": ("num_key_value_heads", "head_dim"),
    "qwen3_5_moe_text": ("num_key_value_heads", "head_dim", "num_experts"),
}

# Keys that may be missing or null, or have one of these values; with others the model computes something else.
_DEEPSEEK_V3_ONLY: dict[str, tuple[Any, ...]] = {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)}
_QWEN3_5_ONLY: dict[str, tuple[Any, ...]] = {"attn_output_gate": (True,), "layer_scale": (False,)}
ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    **ROWS_ONLY,
    "qwen3_moe": {"use_sliding_window": (False,)},  # then all its layers would slide, not those of max_window_layers
    "gemma2": {"use_bidirectional_attention": (False,)},
    "gemma3_text": {"use_bidirectional_attention": (False,), "attn_logit_softcapping": ()},  # not read by its attention
    "gpt_oss": {"hidden_act": ("silu",), "attention_bias": (True,)},
    "deepseek_v2": {
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "norm_topk_prob": (False,),  # not read by transformers
        "mlp_bias": (False,),
    },
    "qwen3_5_text": _QWEN3_5_ONLY,
    "nemotron_h": NEMOTRON_H_ONLY,
    "granitemoehybrid": GRANITE_ONLY,
    "qwen3_5_moe_text": {
        **_QWEN3_5_ONLY, "norm_topk_prob": (True,), "mlp_only_layers": ([],), "decoder_sparse_step": (1,),
    },
    "deepseek_v3": _DEEPSEEK_V3_ONLY,
    "kimi_k2": _DEEPSEEK_V3_ONLY,
}  # fmt: skip
ONLY_EVERYWHERE: dict[str, tuple[Any, ...]] = {"partial_rotary_factor": (1,)}

ACTIVATIONS: dict[str, SmoothActivation] = {
    "silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
}  # fmt: skip


def read_decoder(inner: Config, model_type: str, where: str) -> Decoder:
    """Read how the language model of `inner` computes.

    where  name of the file in error messages
    Raise UnsupportedModelError, by name, for what the engine does not compute; InvalidInputError for a damaged config.
    """
    if model_type not in LEFT_OUT:
        raise UnsupportedModelError(
            where,
            f"model_type {printable(repr(model_type), 60)} is not one the engine can run (it runs "
            f"{', '.join(LEFT_OUT)})",
            "choose another model",
        )
    _check_known(inner, model_type)
    config = Config({**LEFT_OUT[model_type], **inner.values}, inner.where)
    if model_type in QWEN_HYBRIDS:
        return read_qwen_hybrid(config, model_type, _activation(config, model_type))
    if model_type == "nemotron_h":
        return read_nemotron_h(config)
    if model_type == "granitemoehybrid":
        return read_granite(config)
    if model_type == "lfm2":
        return read_lfm2(config)
    num_layers = config.num_layers()
    layers = zip(_attentions(config, model_type, num_layers), _mlps(config, model_type, num_layers), strict=True)
    decoder = Decoder(
        layers=tuple(DecoderLayer(attention, mlp) for attention, mlp in layers),
        norm_eps=positive(config, EPS_KEYS.get(model_type, "rms_norm_eps")),
    )
    if model_type in mla.ROUTERS:
        return decoder
    traits = traits_of(config, model_type)
    layout = replace(decoder, names=LAYOUTS[traits.norms], parallel=len(traits.norms) == 1)
    if traits.lm_head_bias and not config.flag("tie_word_embeddings"):
        layout = replace(layout, head_bias=True)
    if traits.layer_norm:
        layout = replace(layout, norm="layer" if traits.norm_bias else "layer_without_bias")
    match model_type:
        case "gemma" | "gemma2" | "gemma3_text":
            cap = None if model_type == "gemma" else _softcap(config, "final_logit_softcapping")
            scale = config.count("hidden_size") ** 0.5
            return replace(layout, unit_offset=True, embedding_scale=scale, logit_softcap=cap)
        case "phi":
            return replace(layout, names=replace(layout.names, final_norm="final_layernorm"))
        case "opt":
            hidden, width = config.count("hidden_size"), config.count("word_embed_proj_dim", default=0, low=0)
            if width not in (0, hidden):
                where, problem = f"{config.where}: word_embed_proj_dim", f"the engine runs opt with {hidden} only"
                raise UnsupportedModelError(where, f"{problem} ({width})", "choose another model")
            return replace(layout, learned=config.count("max_position_embeddings") + 2)
        case "granite" | "granitemoe":
            return replace(
                layout,
                embedding_scale=positive(config, "embedding_multiplier"),
                residual_scale=positive(config, "residual_multiplier"),
                logit_divisor=positive(config, "logits_scaling"),
            )
        case "cohere" | "cohere2":
            return replace(layout, logit_divisor=1 / positive(config, "logit_scale"))
        case _:
            return layout


def _check_known(config: Config, model_type: str) -> None:
    """Reject what the engine computes differently, and missing keys for which two readers have different defaults."""
    for key in STATED.get(model_type, ()):
        if key not in config.values:
            raise config.fail(
                key, "is missing: transformers has a number of its own, kvplan's sizes another", "state it"
            )
    everywhere = (
        {} if model_type in (*QWEN_HYBRIDS, *PARTLY_TURNED) else ONLY_EVERYWHERE
    )  # which rotate part of their heads
    for key, known in {**everywhere, **ONLY.get(model_type, {})}.items():
        value = config.values.get(key)
        if value is not None and value not in known:
            allowed = " or ".join(map(repr, known)) or "null"
            raise UnsupportedModelError(
                f"{config.where}: {key}",
                f"the engine runs {model_type} with {allowed} only ({value!r:.60})",
                "choose another model",
            )


def _attentions(config: Config, model_type: str, num_layers: int) -> Sequence[HeadAttention | LatentHeads]:
    """Attention of each layer; which ones slide is said by the facts used to size their caches."""
    if model_type in mla.ROUTERS:
        return [_latent_heads(config, model_type)] * num_layers
    slides = [window is not None for window in layer_windows(config, traits_of(config, model_type), num_layers)]
    kinds = list(zip(slides, turning_layers(config, model_type, slides), strict=True))
    by_kind = {kind: _head_attention(config, model_type, *kind) for kind in kinds}
    return [by_kind[kind] for kind in kinds]


def _head_attention(config: Config, model_type: str, slides: bool, turns: bool) -> HeadAttention:
    traits = traits_of(config, model_type)
    head_dim = heads_of(config).head_dim
    capped = model_type in ("gemma2", "gemma3_text")
    bias = config.flag(traits.attention_key, traits.bias_default)
    scale = (positive(config, "query_pre_attn_scalar") if capped else head_dim) ** -0.5
    kind: Any = traits.qk_norm.replace("flag_split", "around_mean").removeprefix("flag_")
    return HeadAttention(
        scale=positive(config, "attention_multiplier") if model_type.startswith("granite") else scale,
        rotary=_rotary(config, model_type, head_dim, "sliding_attention" if slides else "full_attention")
        if turns
        else None,
        qkv_bias=bias if traits.qkv_bias is None else traits.qkv_bias,
        out_bias=bias if traits.o_bias is None else traits.o_bias,
        qk_norm=kind if has_qk_norm(config, traits) else "",
        softcap=_softcap(config, "attn_logit_softcapping") if capped else None,
        sinks=model_type == "gpt_oss",
        joined=model_type == "phi3",
        names=(OUTPUT_NAMES.get(model_type, "o_proj"), "q_norm", "k_norm"),
    )


def _rotary(config: Config, model_type: str, head_dim: int, kind: Kind) -> Rotary:
    read = read_partial_rotary if model_type in PARTLY_TURNED else read_rotary
    return read(config, model_type, head_dim, kind, interleaved=model_type in INTERLEAVED)


def _latent_heads(config: Config, model_type: str) -> LatentHeads:
    nope, rotated = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    # transformers implements DeepSeek-V2's rotation with complex numbers: always adjacent pairs.
    interleaved = model_type == "deepseek_v2" or config.flag("rope_interleave")
    return LatentHeads(
        scale=(nope + rotated) ** -0.5 * score_factor(config, model_type),
        rotary=read_rotary(config, model_type, rotated, interleaved=interleaved),
        q_lora_rank=config.maybe_count("q_lora_rank"),
        qk_nope_head_dim=nope,
        v_head_dim=config.count("v_head_dim"),
        bias=config.flag("attention_bias"),
    )


def _mlps(config: Config, model_type: str, num_layers: int) -> list[GatedMlp | MoeMlp | PlainMlp]:
    moe = mla.ROUTERS.get(model_type) or (FAMILIES[model_type][1] if model_type in FAMILIES else None)
    sparse = sparse_layers(config, num_layers) if moe else [False] * num_layers
    by_kind: dict[bool, GatedMlp | MoeMlp | PlainMlp] = {}
    if moe and any(sparse):
        by_kind[True] = _check_routing(config, _experts(config, model_type, moe))
    if not all(sparse):
        by_kind[False] = _dense_mlp(config, model_type)
    return [by_kind[flag] for flag in sparse]


def _dense_mlp(config: Config, model_type: str) -> GatedMlp | PlainMlp:
    traits = Traits(mlp_bias=False) if model_type in mla.ROUTERS else traits_of(config, model_type)
    biased = traits.mlp_bias is None and config.flag(traits.mlp_key, traits.bias_default)
    inner = config.count("ffn_dim" if model_type == "opt" else "intermediate_size")
    if not traits.gated:
        return PlainMlp(inner, biased, _plain_activation(config, model_type), *PLAIN_NAMES[model_type])
    return GatedMlp(inner, _activation(config, model_type), bias=biased, joined=JOINED_MLP.get(model_type, ""))


def _experts(config: Config, model_type: str, moe: Moe) -> MoeMlp:
    """Settings of the model's router and experts, by router type."""
    inner = config.count(moe.inner)
    plain = MoeMlp(
        num_experts=config.count(*EXPERT_KEYS),
        top_k=config.count("num_experts_per_tok"),
        inner=inner,
        activation=_activation(config, model_type),
        scoring="softmax",
        renormalize=True,
        names="qwen",
        shared_inner=shared_width(config, moe, inner),
        wide_router=moe.router_dtype == "float32",
    )
    match model_type:
        case "mixtral":
            return replace(plain, names="mixtral")
        case "granitemoe":
            return replace(plain, names="granite")
        case "phimoe":
            jitter = config.number("router_jitter_noise")
            return replace(plain, names="mixtral", scoring="sparsemixer", renormalize=False, jitter=jitter)
        case "minimax_m2":
            return replace(plain, names="minimax", scoring="sigmoid", correction=True)
        case "qwen2_moe" | "qwen3_moe" | "olmoe":
            return replace(plain, renormalize=config.flag("norm_topk_prob"), shared_gate=moe.shared_gate)
        case "gpt_oss":
            return replace(
                plain,
                names="gpt_oss",
                activation="clamped_swiglu",
                router_bias=True,
                bias=True,
                swiglu_limit=positive(config, "swiglu_limit"),
                swiglu_alpha=positive(config, "swiglu_alpha"),
            )
        case "deepseek_v2":
            limited = config.text("topk_method") == "group_limited_greedy"
            return replace(
                plain,
                renormalize=False,
                scale=positive(config, "routed_scaling_factor"),
                groups=config.count("n_group") if limited else 1,
                top_groups=config.count("topk_group") if limited else 1,
            )
        case _:  # deepseek_v3, kimi_k2 and glm4_moe
            return replace(
                plain,
                scoring="sigmoid",
                renormalize=config.flag("norm_topk_prob"),
                scale=positive(config, "routed_scaling_factor"),
                groups=config.count("n_group"),
                top_groups=config.count("topk_group"),
                correction=True,
            )


def _check_routing(config: Config, experts: MoeMlp) -> MoeMlp:
    """Check that the counts of `experts` leave the router a choice, and return it."""
    count, groups = experts.num_experts, experts.groups
    choice = count // groups * experts.top_groups
    for good, key, problem in (
        (count % groups == 0, "n_group", f"must divide the {count} experts ({groups})"),
        (experts.top_groups <= groups, "topk_group", f"must be at most n_group, {groups} ({experts.top_groups})"),
        (not experts.correction or count >= 2 * groups, "n_group", f"must leave each group two experts ({groups})"),
        (experts.top_k <= choice, "num_experts_per_tok", f"must be at most {choice} ({experts.top_k})"),
    ):
        if not good:
            raise config.fail(key, f"{problem}", "correct the config")
    return experts


def _plain_activation(config: Config, model_type: str) -> PlainActivation:
    return (
        "relu"
        if model_type == "opt" and config.text("activation_function") == "relu"
        else _activation(config, model_type)
    )


def _activation(config: Config, model_type: str) -> SmoothActivation:
    keys = {"gemma2": "hidden_activation", "gemma3_text": "hidden_activation", "opt": "activation_function"}
    key = keys.get(model_type, "hidden_act")
    name = config.text(key)
    if (model_type, name) == ("gemma", "gelu"):  # as released, and always meant so
        return "gelu_tanh"
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"{config.where}: {key}",
            f"{printable(repr(name), 40)} is not an activation the engine computes (it knows {', '.join(ACTIVATIONS)})",
            "choose another model",
        )
    return ACTIVATIONS[name]


def _softcap(config: Config, key: str) -> float | None:
    return positive(config, key) if key in config else None
