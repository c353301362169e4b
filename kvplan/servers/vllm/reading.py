"""A model's config as vLLM reads it: with --hf-overrides, and without what the class of the model ignores.

Source: vLLM 0.33 model_executor/models, compared with its own answers on configs with such keys.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.hf_config import TIED, text_of
from kvplan.models.spec import FullAttention, LayerCache, ModelSpec, SlidingWindow
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.releases import Version
from kvplan.servers.start import Refusal, unsupported

# Model types whose class takes heads of hidden_size / num_attention_heads, whatever head_dim says.
WITHOUT_HEAD_DIM: Final = frozenset(
    {
        "bloom", "chatglm", "dbrx", "falcon", "gpt2", "gptj", "granitemoe", "granitemoehybrid", "internlm2", "jamba",
        "lfm2", "mimo", "mpt", "olmoe", "opt", "qwen", "qwen2", "qwen2_5_omni_text", "qwen2_5_vl", "qwen2_moe",
        "qwen2_vl", "stablelm", "stablelm_epoch",
    }
)  # fmt: skip
IGNORED: Final[Mapping[str, frozenset[str]]] = {
    "head_dim": WITHOUT_HEAD_DIM,
    "attention_bias": frozenset(
        {
            "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "falcon_h1", "gemma", "glm4_moe_lite",
            "glm_moe_dsa", "kimi_k2", "nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
        }
    ),
    "mlp_bias": frozenset({"falcon_h1"}),
}  # fmt: skip
HYBRIDS: Final = ("granitemoehybrid", "jamba", "lfm2")  # of these
# Model types whose class has an output head of its own, or none, whatever tie_word_embeddings says.
NEVER_TIED: Final = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
        "gpt_oss", "jamba", "kimi_k2", "mimo_v2_flash", "minimax_m2", "minimax_m3", "minimax_m3_vl", "nemotron_h",
        "olmoe", "phimoe", "qwen3_next",
    }
)  # fmt: skip
ALWAYS_TIED: Final = frozenset({"cohere", "cohere2", "gemma2"})
TIED_INSIDE: Final = ("qwen3_5_text", "qwen3_5_moe_text")  # by their own part of the config, not the outer one


# Model types whose class leaves a window to cache_config.sliding_window: the config's, unless its layers are listed.
WINDOWED: Final = frozenset(
    {
        "bloom", "chatglm", "cohere", "dbrx", "gemma", "glm", "glm4", "glm4_moe", "glm4v_moe_text", "glm4v_text",
        "glm_ocr_text", "gpt2", "gptj", "granite", "granitemoe", "internlm2", "internlm3", "llama", "minimax_m2",
        "nemotron-nas", "nemotron_h", "olmo2", "olmoe", "opt", "phi", "qwen3_vl_moe_text", "qwen3_vl_text",
        "stablelm",
    }
)  # fmt: skip
# Those that slide only with use_sliding_window: all layers or none.
FLAGGED: Final = ("mimo", "qwen2", "qwen2_5_omni_text", "qwen2_5_vl", "qwen2_vl", "qwen3")


def as_read(spec: ModelSpec, args: EngineArgs) -> ModelSpec:
    """The model as vLLM reads its config: usually as it is."""
    if args.hf_overrides is not None:
        from kvplan.servers.vllm import hf_overrides  # only if the config is changed

        spec = hf_overrides.applied(spec, args.hf_overrides)
    changes = by_class(spec)
    if changes:
        from kvplan.servers.overrides import changed

        spec = changed(spec, changes)
    return windowed(spec)


def check_hybrid(text: Mapping[str, Any], model_type: str, name: str) -> None:
    """Reject a hybrid whose blocks are sized by a head_dim that its attention ignores: vLLM starts, with pages of
    states padded to those of its heads.
    """
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    stated = text.get("head_dim")
    if model_type in HYBRIDS and stated and isinstance(hidden, int) and hidden != stated * (heads or 0):
        problem = f"blocks follow head_dim ({stated}) and heads hidden_size / num_attention_heads, which is not modeled"
        raise UnsupportedModelError(f"{name} on vLLM", problem, "remove head_dim from the config, or correct it")


def by_class(spec: ModelSpec) -> dict[str, bool | None]:
    """Keys of the config that the model's class reads otherwise: None if it ignores them."""
    model_type, text = spec.model_type, text_of(spec.config)
    check_hybrid(text, model_type, spec.name)
    changes: dict[str, bool | None] = {
        key: None for key, types in IGNORED.items() if model_type in types and text.get(key)
    }
    tied = spec.tied
    if model_type in NEVER_TIED | ALWAYS_TIED:
        tied = model_type in ALWAYS_TIED
    elif model_type in TIED_INSIDE and text is not spec.config:
        tied = bool(text.get(TIED))
    return changes | ({TIED: tied} if tied != spec.tied else {})


def takes_one_kind(spec: ModelSpec) -> bool:
    """True if the config mixes windows with full attention for a class that has either in all layers."""
    return spec.model_type in FLAGGED and spec.cache_kinds == {FullAttention, SlidingWindow}


def refusal(spec: ModelSpec) -> Refusal | None:
    """Return a refusal of windows in some layers. Source: vLLM 0.33 model_executor/models/qwen2.py (Qwen2Model)."""
    if not takes_one_kind(spec):
        return None
    stated = text_of(spec.config).get("max_window_layers")
    return unsupported(
        f"windows for some but all layers are not supported (max_window_layers {stated} of {spec.num_layers} layers); "
        "without use_sliding_window in the config they are for none"
    )


@lru_cache(maxsize=64)
def windowed(spec: ModelSpec) -> ModelSpec:
    """The model with the windows that vLLM gives its layers.

    Source: vLLM 0.33 engine/arg_utils.py (create_engine_config), model_executor/models/qwen2.py (Qwen2Model).
    """
    text, kinds = text_of(spec.config), spec.cache_kinds
    window = text.get("sliding_window")
    if not isinstance(window, int) or window < 1:
        return spec
    if takes_one_kind(spec):
        return with_caches(spec, None) if text.get("max_window_layers") == spec.num_layers else spec
    listed, flagged = text.get("layer_types") is not None, text.get("use_sliding_window") is True
    mixed = kinds == {FullAttention, SlidingWindow}
    if mixed and (spec.model_type == "qwen2_moe" or (spec.model_type == "qwen3_moe" and listed)):
        return with_caches(spec, None)
    if not listed and (spec.model_type in WINDOWED or (spec.model_type == "qwen3_moe" and flagged)):
        return with_caches(spec, window)
    return spec


def with_caches(spec: ModelSpec, window: int | None) -> ModelSpec:
    """The model with the same window in all layers of attention, or none."""

    def cache_of(cache: LayerCache) -> LayerCache:
        if not isinstance(cache, FullAttention | SlidingWindow):
            return cache
        shape = cache.num_kv_heads, cache.head_dim, cache.head_dim_v
        return FullAttention(*shape) if window is None else SlidingWindow(*shape, window)

    return replace(spec, layers=tuple(tuple(map(cache_of, caches)) for caches in spec.layers))


def context_limits(spec: ModelSpec, release: Version) -> tuple[int, int]:
    """(default context, largest accepted one): with YaRN, earlier releases multiply the original length."""
    if not release.has("yarn_length_stated"):
        text = text_of(spec.config)
        rope = text.get("rope_parameters") or text.get("rope_scaling")
        if isinstance(rope, Mapping) and "yarn" in (rope.get("rope_type"), rope.get("type")):
            original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
            if isinstance(original, int) and isinstance(factor, int | float):
                return int(original * factor), int(original * factor)
    return spec.max_model_len, spec.context_limit
