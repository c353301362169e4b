"""Metadata of a GGUF file <-> a config.json of the same model.

Source: llama.cpp's keys (commit 0c1e57098, src/llama-arch.cpp) and what its converter writes under them. A key is given
without the architecture's name in front.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvplan.core.errors import InvalidInputError, UnsupportedModelError
from kvplan.core.files import printable
from kvplan.models.gguf_names import architecture_of, num_nextn
from kvplan.models.hf_config import text_of
from kvplan.models.spec import FullAttention, LayerCache, ModelSpec, SlidingWindow

Values = dict[str, Any]
# Shapes of the file's tensors, by name.
Shapes = Mapping[str, tuple[int, ...]]

# Architecture -> model_type of its config.
MODEL_TYPES: Final = {
    "llama": "llama", "mistral3": "ministral3", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "phi3": "phi3", "deepseek2": "deepseek_v3",
    "gpt-oss": "gpt_oss", "glm4moe": "glm4_moe", "minimax-m2": "minimax_m2", "granite": "granite", "olmo2": "olmo2",
    "command-r": "cohere", "cohere2": "cohere2", "starcoder2": "starcoder2", "smollm3": "smollm3",
    "falcon-h1": "falcon_h1", "nemotron_h": "nemotron_h", "nemotron_h_moe": "nemotron_h", "mamba": "mamba",
    "lfm2": "lfm2",
}  # fmt: skip
# Keys that mean the same in both, for every architecture and for some.
COMMON: Final = (
    ("context_length", "max_position_embeddings"), ("embedding_length", "hidden_size"),
    ("attention.head_count", "num_attention_heads"), ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"), ("rope.freq_base", "rope_theta"),
    ("attention.sliding_window", "sliding_window"), ("final_logit_softcapping", "final_logit_softcapping"),
)  # fmt: skip
_CHOICE: Final = (
    ("expert_weights_scale", "routed_scaling_factor"), ("expert_weights_norm", "norm_topk_prob"),
    ("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group"),
)  # fmt: skip
_DELTA: Final = (
    ("ssm.conv_kernel", "linear_conv_kernel_dim"), ("ssm.state_size", "linear_key_head_dim"),
    ("ssm.time_step_rank", "linear_num_value_heads"), ("ssm.group_count", "linear_num_key_heads"),
    ("full_attention_interval", "full_attention_interval"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
)  # fmt: skip
PAIRS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "qwen3next": _DELTA,
    "qwen35": _DELTA,
    "qwen35moe": _DELTA,
    "deepseek2": (
        ("attention.q_lora_rank", "q_lora_rank"), ("attention.kv_lora_rank", "kv_lora_rank"),
        ("rope.dimension_count", "qk_rope_head_dim"), ("attention.value_length_mla", "v_head_dim"),
        ("leading_dense_block_count", "first_k_dense_replace"), ("expert_shared_count", "n_shared_experts"),
        *_CHOICE,
    ),
    "glm4moe": (
        ("leading_dense_block_count", "first_k_dense_replace"), ("expert_shared_count", "n_shared_experts"),
        *_CHOICE,
    ),
    "granite": (
        ("logit_scale", "logits_scaling"), ("residual_scale", "residual_multiplier"),
        ("embedding_scale", "embedding_multiplier"), ("attention.scale", "attention_multiplier"),
    ),
    "command-r": (("logit_scale", "logit_scale"),),
    "cohere2": (("logit_scale", "logit_scale"),),
    "minimax-m2": (("rope.dimension_count", "rotary_dim"),),
    "falcon-h1": (
        ("ssm.conv_kernel", "mamba_d_conv"), ("ssm.inner_size", "mamba_d_ssm"), ("ssm.state_size", "mamba_d_state"),
        ("ssm.time_step_rank", "mamba_n_heads"), ("ssm.group_count", "mamba_n_groups"),
    ),
    "nemotron_h": (
        ("ssm.conv_kernel", "conv_kernel"), ("ssm.state_size", "ssm_state_size"),
        ("ssm.time_step_rank", "mamba_num_heads"), ("ssm.group_count", "n_groups"),
        ("expert_shared_count", "n_shared_experts"),
        ("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"), *_CHOICE,
    ),
    "mamba": (
        ("ssm.conv_kernel", "conv_kernel"), ("ssm.inner_size", "intermediate_size"),
        ("ssm.state_size", "state_size"), ("ssm.time_step_rank", "time_step_rank"),
    ),
    "lfm2": (("shortconv.l_cache", "conv_L_cache"),),
}  # fmt: skip
PAIRS["nemotron_h_moe"] = PAIRS["nemotron_h"]
# A config's key for the number of experts.
EXPERTS: Final = {
    "llama": "num_local_experts", "gpt-oss": "num_local_experts", "minimax-m2": "num_local_experts",
    "deepseek2": "n_routed_experts", "glm4moe": "n_routed_experts", "nemotron_h_moe": "n_routed_experts",
}  # fmt: skip
SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of how an expert's score is computed
# llama.cpp keeps every token of these, and their files state no window.
NOT_KEPT: Final = ("llama", "qwen2", "qwen3", "qwen3moe", "starcoder2", "minimax-m2", "mistral3")


def metadata_of(spec: ModelSpec, drafts: bool = False) -> Values:
    """The metadata that the converter would write for a model: what sizing needs of it."""
    architecture = architecture_of(spec)
    config = text_of(spec.config)
    values: Values = {
        key: config[name]
        for key, name in (*COMMON, *PAIRS.get(architecture, ()))
        if config.get(name) is not None and not isinstance(config[name], list)
    }
    experts = max((weight.experts for layer in spec.layer_weights for weight in layer), default=0)
    if nextn := num_nextn(spec, drafts):
        values["nextn_predict_layers"] = nextn
    values |= {
        "context_length": spec.context_limit,
        "block_count": spec.num_layers + nextn,
        "attention.head_count": spec.num_heads if spec.has_attention else 0,
        "vocab_size": spec.vocab_size,
    }
    if experts:
        values |= {"expert_count": experts, "expert_used_count": spec.experts_per_token}
    if "attention.sliding_window" in values and architecture in NOT_KEPT:
        del values["attention.sliding_window"]
    values |= _widths(spec, architecture, config) | _rotation(spec, config)
    if architecture in WRITERS:
        values |= WRITERS[architecture](spec, config)
    return {f"{architecture}.{key}": value for key, value in values.items()} | {"general.architecture": architecture}


def _heads(layer: Sequence[LayerCache]) -> FullAttention | SlidingWindow | None:
    return next((cache for cache in layer if isinstance(cache, FullAttention | SlidingWindow)), None)


def _widths(spec: ModelSpec, architecture: str, config: Mapping[str, Any]) -> Values:
    """Widths of heads and of the feed-forward part."""
    heads = [_heads(layer) for layer in spec.layers]
    attending = [cache for cache in heads if cache is not None]
    inner = spec.widest_mlp if architecture == "lfm2" else config.get("intermediate_size") or 0  # LFM2 adjusts it
    values: Values = {"feed_forward_length": 0 if architecture == "mamba" else inner}
    if attending:
        kv_heads = [0 if cache is None else cache.num_kv_heads for cache in heads]
        alike = architecture.startswith("qwen3") or len(set(kv_heads)) == 1
        values |= {
            "attention.head_count_kv": attending[0].num_kv_heads if alike else kv_heads,
            "attention.key_length": attending[0].head_dim,
            "attention.value_length": attending[0].head_dim_v,
        }
    return values


def _rotation(spec: ModelSpec, config: Mapping[str, Any]) -> Values:
    """How many elements of a head are rotated, and by which scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope.get("full_attention"), dict):
        rope = rope["full_attention"]
    heads = next((cache for layer in spec.layers if (cache := _heads(layer)) is not None), None)
    values: Values = {}
    if heads is not None:
        share = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1
        values["rope.dimension_count"] = int(heads.head_dim * share)
    if rope.get("rope_theta"):
        values["rope.freq_base"] = rope["rope_theta"]
    if isinstance(rope.get("mrope_section"), list):
        values["rope.dimension_sections"] = [*rope["mrope_section"], 0][:4]
    kind = rope.get("rope_type") or rope.get("type")
    if kind in ("yarn", "linear") and rope.get("factor"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if original and kind != "llama3":
        values["rope.scaling.original_context_length"] = original
    return values


def _write_delta(spec: ModelSpec, config: Mapping[str, Any]) -> Values:
    return {
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "full_attention_interval": config.get("full_attention_interval", 4),
    }


def _write_latent(spec: ModelSpec, config: Mapping[str, Any]) -> Values:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "rope.dimension_count": rotated,
        "expert_gating_func": SOFTMAX if config.get("scoring_func", "sigmoid") == "softmax" else SIGMOID,
    }


def _write_gemma4(spec: ModelSpec, config: Mapping[str, Any]) -> Values:
    """Its windowed layers have narrower heads than the others."""
    return {
        "attention.sliding_window_pattern": [
            isinstance(cache, SlidingWindow) for layer in spec.layers for cache in layer
        ],
        "attention.key_length": config["global_head_dim"],
        "attention.value_length": config["global_head_dim"],
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": config["global_head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
    }


def _write_nemotron(spec: ModelSpec, config: Mapping[str, Any]) -> Values:
    inner = {True: config["intermediate_size"], False: 0}
    pattern = config["hybrid_override_pattern"]
    return {
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "feed_forward_length": [inner[kind in "-E"] for kind in pattern],
    }


def _write_gpt_oss(spec: ModelSpec, config: Mapping[str, Any]) -> Values:
    """Its experts' width is what a config calls intermediate_size."""
    return {"expert_feed_forward_length": config["intermediate_size"]}


def _write_minimax(spec: ModelSpec, config: Mapping[str, Any]) -> Values:
    return {
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": SIGMOID,
        "rope.dimension_count": config["rotary_dim"],
    }


WRITERS: Final[dict[str, Callable[[ModelSpec, Mapping[str, Any]], Values]]] = {
    "qwen3next": _write_delta,
    "qwen35": _write_delta,
    "qwen35moe": _write_delta,
    "deepseek2": _write_latent,
    "gemma4": _write_gemma4,
    "nemotron_h": _write_nemotron,
    "nemotron_h_moe": _write_nemotron,
    "gpt-oss": _write_gpt_oss,
    "minimax-m2": _write_minimax,
    "glm4moe": lambda *_: {"expert_gating_func": SIGMOID},
}


# --- the other way --------------------------------------------------------------------------------------------------


def config_of(architecture: str, metadata: Mapping[str, object], shapes: Shapes, where: str) -> Values:
    """A config.json that describes the model of a file.

    Raise UnsupportedModelError for an architecture that kvplan has no reader for, InvalidInputError for a missing key.
    """
    if architecture not in MODEL_TYPES:
        raise UnsupportedModelError(
            where,
            f"architecture {printable(repr(architecture), 60)} is not one that kvplan reads from a GGUF file alone",
            "name the model it was made from and add --weights-bytes",
        )
    keys = _Keys(architecture, metadata, where)
    experts = keys.number("expert_count", 0)
    config: Values = {"model_type": MODEL_TYPES[architecture]}
    for key, name in (*COMMON, *PAIRS.get(architecture, ())):
        value = keys.get(key)
        if value is not None and not isinstance(value, list):
            config[name] = value
    config |= {
        "num_hidden_layers": keys.number("block_count") - keys.number("nextn_predict_layers", 0),
        "vocab_size": _vocabulary(shapes, where),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "sliding_window": config.get("sliding_window") or None,
    }
    if experts:
        config[EXPERTS.get(architecture, "num_experts")] = experts
    config |= _read_widths(keys, config) | _read_scaling(keys)
    if architecture in READERS:
        config |= READERS[architecture](keys, config, shapes)
    return config


class _Keys:
    """Metadata by keys without the architecture's name; a missing or wrong one is refused by its name."""

    def __init__(self, architecture: str, metadata: Mapping[str, object], where: str) -> None:
        self.architecture, self._metadata, self.where = architecture, metadata, where

    def get(self, key: str) -> object:
        return self._metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            problem = "is missing" if value is None else f"is not a whole number ({printable(repr(value), 40)})"
            raise InvalidInputError(self.where, f"{self.architecture}.{key} {problem}", "fetch the file again")
        return value

    def numbers(self, key: str, count: int) -> list[int]:
        """A value for each layer, of a list or of one number for all."""
        value = self.get(key)
        if not isinstance(value, list):
            return [self.number(key)] * count
        if len(value) < count or not all(isinstance(entry, int) for entry in value):
            raise InvalidInputError(
                self.where, f"{self.architecture}.{key} is not a list of {count} numbers", "fetch the file again"
            )
        return [int(entry) for entry in value[:count]]


def _vocabulary(shapes: Shapes, where: str) -> int:
    shape = shapes.get("token_embd.weight")
    if shape is None or len(shape) != 2:
        raise InvalidInputError(where, "it has no token_embd.weight, so no vocabulary", "fetch the file again")
    return shape[1]


def _read_widths(keys: _Keys, config: Mapping[str, Any]) -> Values:
    """Widths that are alike in all layers."""
    values: Values = {}
    inner, kv_heads = keys.get("feed_forward_length"), keys.get("attention.head_count_kv")
    if isinstance(inner, list):
        inner = max((entry for entry in inner if isinstance(entry, int)), default=0)
    if inner:
        values["intermediate_size"] = inner
    if isinstance(kv_heads, list):
        kv_heads = max((entry for entry in kv_heads if isinstance(entry, int)), default=0)
    values["num_key_value_heads"] = kv_heads or config.get("num_attention_heads")
    width = keys.get("attention.key_length")
    if width:
        values["head_dim"] = width
    return {name: value for name, value in values.items() if value is not None}


def _read_scaling(keys: _Keys) -> Values:
    kind = keys.get("rope.scaling.type")
    if kind not in ("yarn", "linear"):
        return {}
    scaling = {"rope_type": kind, "factor": keys.get("rope.scaling.factor")}
    original = keys.get("rope.scaling.original_context_length")
    if original:
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _share_rotated(keys: _Keys, config: Mapping[str, Any]) -> Values:
    """The rotated part of a head, where a file states it."""
    rotated, width = keys.get("rope.dimension_count"), config.get("head_dim")
    if not isinstance(rotated, int) or not isinstance(width, int) or rotated >= width:
        return {}
    return {"partial_rotary_factor": rotated / width}


def _read_llama(keys: _Keys, config: Values, shapes: Shapes) -> Values:
    if keys.number("expert_count", 0):
        return {"model_type": "mixtral"}
    return {"mlp_bias": "blk.0.ffn_up.bias" in shapes}


def _read_delta(keys: _Keys, config: Values, shapes: Shapes) -> Values:
    heads = keys.number("ssm.time_step_rank")
    return {"linear_value_head_dim": keys.number("ssm.inner_size") // heads} | _share_rotated(keys, config)


def _read_delta_in_float32(keys: _Keys, config: Values, shapes: Shapes) -> Values:
    """Qwen3.5's published configs state the dtype of their states, which no header does."""
    return {"mamba_ssm_dtype": "float32"} | _read_delta(keys, config, shapes)


def _read_latent(keys: _Keys, config: Values, shapes: Shapes) -> Values:
    """DeepSeek's: its K and V stand for all heads as one latent; older files state the width of a head itself."""
    rotated = keys.number("rope.dimension_count")
    corrected = any(name.endswith("exp_probs_b.bias") for name in shapes)
    values: Values = {
        "model_type": "deepseek_v3" if corrected else "deepseek_v2",
        "qk_nope_head_dim": keys.number("attention.key_length_mla", keys.number("attention.key_length")) - rotated,
        "v_head_dim": keys.number("attention.value_length_mla", keys.number("attention.value_length")),
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": config.get("q_lora_rank"),
        "attention_bias": False,
        "n_group": keys.number("expert_group_count", 1),
        "topk_group": keys.number("expert_group_used_count", 1),
        "topk_method": "noaux_tc" if corrected else "greedy",
    }
    return values


def _read_gemma2(keys: _Keys, config: Values, shapes: Shapes) -> Values:
    return {"sliding_window": config["sliding_window"] or 4096}  # llama.cpp's default


def _read_gemma4(keys: _Keys, config: Values, shapes: Shapes) -> Values:
    count = config["num_hidden_layers"]
    windowed = keys.get("attention.sliding_window_pattern")
    if not isinstance(windowed, list) or len(windowed) != count:
        raise InvalidInputError(keys.where, f"its sliding_window_pattern is not a list of {count}", "fetch it again")
    if keys.number("embedding_length_per_layer_input", 0) or keys.number("attention.shared_kv_layers", 0):
        raise UnsupportedModelError(
            keys.where, "a Gemma 4 with embeddings for each layer is not read from a GGUF file alone", "name the model"
        )
    kv_heads = keys.numbers("attention.head_count_kv", count)
    windows = [heads for heads, short in zip(kv_heads, windowed, strict=True) if short]
    full = [heads for heads, short in zip(kv_heads, windowed, strict=True) if not short]
    first = windowed.index(False)
    moe = "blk.0.ffn_gate_inp.weight" in shapes
    return {
        "layer_types": ["sliding_attention" if short else "full_attention" for short in windowed],
        "num_key_value_heads": windows[0] if windows else full[0],
        "num_global_key_value_heads": full[0],
        "global_head_dim": keys.number("attention.key_length"),
        "head_dim": keys.number("attention.key_length_swa"),
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in shapes,
        "attention_bias": False,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": moe,
        "top_k_experts": keys.get("expert_used_count"),
    }


def _read_phi3(keys: _Keys, config: Values, shapes: Shapes) -> Values:
    values: Values = {"attention_bias": False} | _share_rotated(keys, config)
    factors = shapes.get("rope_factors_long.weight")
    if factors is not None:  # the factors themselves are weights, and no size depends on them
        same = [1.0] * factors[0]
        values["rope_scaling"] = {"rope_type": "longrope", "short_factor": same, "long_factor": same}
        values["original_max_position_embeddings"] = keys.number("rope.scaling.original_context_length")
    return values


def _read_glm4(keys: _Keys, config: Values, shapes: Shapes) -> Values:
    return {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
        "n_group": keys.number("expert_group_count", 1),
        "topk_group": keys.number("expert_group_used_count", 1),
        **_share_rotated(keys, config),
    }


def _read_falcon_h1(keys: _Keys, config: Values, shapes: Shapes) -> Values:
    heads = keys.number("ssm.time_step_rank")
    return {
        "mamba_d_head": keys.number("ssm.inner_size") // heads,
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in shapes,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in shapes,
    }


def _read_nemotron(keys: _Keys, config: Values, shapes: Shapes) -> Values:
    """A layer is attention, a feed-forward part or a state: what it has width for."""
    count = config["num_hidden_layers"]
    pairs = zip(keys.numbers("attention.head_count_kv", count), keys.numbers("feed_forward_length", count), strict=True)
    mlp = "E" if keys.architecture == "nemotron_h_moe" else "-"
    return {
        "hybrid_override_pattern": "".join("*" if kv else mlp if inner else "M" for kv, inner in pairs),
        "mamba_head_dim": keys.number("ssm.inner_size") // keys.number("ssm.time_step_rank"),
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in shapes,
        "expand": 2,
    }


def _read_lfm2(keys: _Keys, config: Values, shapes: Shapes) -> Values:
    count = config["num_hidden_layers"]
    kv_heads = keys.numbers("attention.head_count_kv", count)
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "block_auto_adjust_ff_dim": False,
        "conv_bias": "blk.0.shortconv.conv.bias" in shapes,
    }


READERS: Final[dict[str, Callable[[_Keys, Values, Shapes], Values]]] = {
    "llama": _read_llama,
    "mistral3": _read_llama,
    "qwen3next": _read_delta,
    "qwen35": _read_delta_in_float32,
    "qwen35moe": _read_delta_in_float32,
    "deepseek2": _read_latent,
    "gemma2": _read_gemma2,
    "gemma4": _read_gemma4,
    "phi3": _read_phi3,
    "gpt-oss": lambda keys, *_: {
        "intermediate_size": keys.number("expert_feed_forward_length"),
        "attention_bias": True,
    },
    "glm4moe": _read_glm4,
    "minimax-m2": lambda keys, *_: {
        "intermediate_size": keys.number("expert_feed_forward_length"),
        "use_qk_norm": True,
    },
    "command-r": lambda keys, config, shapes: {"use_qk_norm": "blk.0.attn_q_norm.weight" in shapes},
    "cohere2": lambda *_: {"sliding_window_pattern": 4},
    "starcoder2": lambda keys, config, shapes: {"use_bias": "blk.0.attn_q.bias" in shapes},
    "falcon-h1": _read_falcon_h1,
    "nemotron_h": _read_nemotron,
    "nemotron_h_moe": _read_nemotron,
    "mamba": lambda keys, config, shapes: {"use_conv_bias": "blk.0.ssm_conv1d.bias" in shapes, "use_bias": False},
    "lfm2": _read_lfm2,
}
