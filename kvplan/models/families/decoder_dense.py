"""Families that the engine runs as rows: what their config classes and layers have that sizes do not say.

Norms, biases, windows and gates come from the rows of dense.TRAITS and moe.FAMILIES, and of CLASSIC. Source:
transformers 5.23, models/<family>/configuration_<family>.py and modeling_<family>.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvplan.models.families.config import Config
from kvplan.models.families.dense import FOUR_NORMS, GLM4, TRAITS, Traits
from kvplan.models.families.moe import FAMILIES
from kvplan.models.spec import TensorNames

_SILU: dict[str, Any] = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10_000.0}
_OLMO: dict[str, Any] = {**_SILU, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}
_GRANITE: dict[str, Any] = {
    **_SILU, "max_position_embeddings": 2048, "embedding_multiplier": 1.0, "logits_scaling": 1.0,
    "residual_multiplier": 1.0, "attention_multiplier": 1.0,
}  # fmt: skip
_HALF_TURNED: dict[str, Any] = {**_SILU, "partial_rotary_factor": 0.5, "max_position_embeddings": 131_072}

ROWS: dict[str, Mapping[str, Any]] = {
    "qwen2_moe": {
        **_SILU, "max_position_embeddings": 32_768, "num_experts_per_tok": 4, "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    "phi3": {**_SILU, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
             "partial_rotary_factor": 1.0},
    "granite": _GRANITE,
    "olmo2": _OLMO,
    "olmo3": {**_OLMO, "rope_theta": 500_000.0},
    "gemma": {**_SILU, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192},
    "cohere2": {**_SILU, "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "logit_scale": 0.0625},
    "starcoder2": {
        **_SILU, "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "max_position_embeddings": 4096,
    },
    "smollm3": {
        **_SILU, "rope_theta": 2_000_000.0, "max_position_embeddings": 32_768, "no_rope_layer_interval": 4,
    },
    "glm4": {**_HALF_TURNED, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
    "exaone4": {**_SILU, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    "seed_oss": {**_SILU, "max_position_embeddings": 524_288},
    "glm4_moe": {
        **_HALF_TURNED, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    },
    "glm": {**_HALF_TURNED, "rms_norm_eps": 1.5625e-7},
    "cohere": {
        **_SILU, "rope_theta": 500_000.0, "layer_norm_eps": 1e-5, "max_position_embeddings": 8192,
        "logit_scale": 0.0625,
    },
    "phi": {**_HALF_TURNED, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048},
    "stablelm": {
        **_HALF_TURNED, "partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5, "max_position_embeddings": 4096,
    },
    "opt": {"activation_function": "relu", "layer_norm_eps": 1e-5},
    "olmoe": {
        **_SILU, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    "granitemoe": {**_GRANITE, "num_experts_per_tok": 2},
    "phimoe": {
        **_SILU, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_position_embeddings": 131_072,
        "num_experts_per_tok": 2, "router_jitter_noise": 0.01,
    },
    "minimax_m2": {
        **_SILU, "rope_theta": 5_000_000.0, "max_position_embeddings": 196_608, "num_experts_per_tok": 8,
        "partial_rotary_factor": 1.0,
    },
}  # fmt: skip

# Older families, whose sizes are read without traits.
CLASSIC: dict[str, Traits] = {
    "phi": Traits(qkv_bias=True, o_bias=True, bias_default=True, gated=False, layer_norm=True,
                  norms=("input_layernorm",), lm_head_bias=True),
    "stablelm": Traits(attention_key="use_qkv_bias", o_bias=False, mlp_bias=False, layer_norm=True),
    "opt": Traits(attention_key="enable_bias", mlp_key="enable_bias", bias_default=True, gated=False, layer_norm=True,
                  norms=("self_attn_layer_norm", "final_layer_norm"), tied=True),
}  # fmt: skip

ROWS_STATED: dict[str, tuple[str, ...]] = {
    "qwen2_moe": ("num_key_value_heads",),
    "gemma": ("num_key_value_heads", "head_dim"),
    "olmo3": ("sliding_window",),
    "cohere2": ("sliding_window",),
    "starcoder2": ("num_key_value_heads", "sliding_window"),
    "smollm3": ("num_key_value_heads",),
    "glm4": ("num_key_value_heads", "head_dim"),
    "exaone4": ("num_key_value_heads", "sliding_window"),
    "seed_oss": ("num_key_value_heads", "head_dim"),
    "glm4_moe": ("num_key_value_heads",),
    "glm": ("num_key_value_heads", "head_dim", "attention_bias"),
    "stablelm": ("num_key_value_heads",),
    "phimoe": ("num_key_value_heads", "lm_head_bias"),
    "minimax_m2": ("num_key_value_heads", "head_dim"),
}

ROWS_ONLY: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen2_moe": {"use_sliding_window": (False,), "qkv_bias": (True,)},
    "phi3": {"attention_bias": (False,), "mlp_bias": (False,)},  # not read by transformers
    "olmo3": {"rope_theta": (500_000,)},  # transformers takes its own for sliding layers
    "gemma": {"use_bidirectional_attention": (False,), "attention_bias": (False,)},
    "smollm3": {"use_sliding_window": (False,)},
    "exaone4": {"attention_bias": (False,)},
    "seed_oss": {"attention_bias": (True,), "attention_out_bias": (False,)},
    "glm4_moe": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    "phi": {"qk_layernorm": (False,), "mlp_bias": (True,)},
    "stablelm": {"qk_layernorm": (False,)},
    "opt": {
        "do_layer_norm_before": (True,), "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    },
    "olmoe": {"clip_qkv": ()},
    "phimoe": {"num_experts_per_tok": (2,), "lm_head_bias": (True,)},
    "minimax_m2": {
        "scoring_func": ("sigmoid",), "use_routing_bias": (True,), "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",), "shared_intermediate_size": (0,),
    },
}  # fmt: skip

# Read partial_rotary_factor.
PARTLY_TURNED = ("phi3", "glm4", "glm4_moe", "glm", "phi", "stablelm", "minimax_m2")
INTERLEAVED = ("cohere", "cohere2", "glm", "glm4")
EPS_KEYS = dict.fromkeys(("cohere", "cohere2", "phi", "stablelm", "opt"), "layer_norm_eps") | {
    "starcoder2": "norm_epsilon"
}
# A checkpoint's names of the feed-forward part, where it does not have gate_proj, up_proj and down_proj.
JOINED_MLP = dict.fromkeys(("phi3", "glm", "glm4"), "gate_up_proj")
PLAIN_NAMES = {"starcoder2": ("c_fc", "c_proj"), "phi": ("fc1", "fc2"), "opt": ("fc1", "fc2")}
OUTPUT_NAMES = {"phi": "dense", "opt": "out_proj"}  # of attention, where it is not o_proj

_PLAIN = ("input_layernorm", "post_attention_layernorm")
# By the norms of a layer: names of those before and after attention and MLP.
LAYOUTS: dict[tuple[str, ...], TensorNames] = {
    _PLAIN: TensorNames(),
    ("input_layernorm",): TensorNames(before_mlp=""),
    FOUR_NORMS: TensorNames(
        before_mlp=FOUR_NORMS[2], after_attention="post_attention_layernorm", after_mlp=FOUR_NORMS[3]
    ),
    TRAITS["olmo2"].norms: TensorNames(
        before_attention="", before_mlp="", after_attention="post_attention_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    GLM4.norms: TensorNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    CLASSIC["opt"].norms: TensorNames(
        final_norm="final_layer_norm", mlp="", before_attention="self_attn_layer_norm", before_mlp="final_layer_norm"
    ),
}  # fmt: skip


def traits_of(config: Config, model_type: str) -> Traits:
    if model_type == "stablelm" and config.flag("use_parallel_residual"):
        return replace(CLASSIC[model_type], norms=("input_layernorm",))
    return {**TRAITS, **CLASSIC}.get(model_type) or FAMILIES[model_type][0]


def turning_layers(config: Config, model_type: str, slides: list[bool]) -> list[bool]:
    """Whether positions turn queries and keys, by layer; slides: whether a layer has a window."""
    match model_type:
        case "opt":
            return [False] * len(slides)
        case "cohere2":
            return slides
        case "exaone4" if "sliding_window" in config:
            return slides
        case "smollm3":
            flags, every = config.ints("no_rope_layers"), config.count("no_rope_layer_interval")
            if flags is None:
                return [(i + 1) % every != 0 for i in range(len(slides))]
            if len(flags) != len(slides):
                problem = f"has {len(flags)} entries for {len(slides)} layers"
                raise config.fail("no_rope_layers", problem, "correct the config")
            return [bool(flag) for flag in flags]
        case _:
            return [True] * len(slides)
