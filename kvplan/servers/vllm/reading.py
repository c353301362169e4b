"""A model's config as vLLM reads it: with --hf-overrides, and without what the class of the model ignores.

Source: vLLM 0.33 model_executor/models, compared with its own answers on configs with such keys.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, Literal

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.records import dataclass
from kvplan.models.hf_config import TIED, text_of
from kvplan.models.spec import FullAttention, LayerCache, ModelSpec, SlidingWindow
from kvplan.servers.plans.plan import Refusal, unsupported
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import EngineArgs

HEAD_DIM: Final = ("head_dim",)  # heads are hidden_size / num_attention_heads wide
UNLIMITED: Final = 2**31
BIAS: Final = ("attention_bias",)


@dataclass(frozen=True, slots=True)
class Reading:
    """How the class of a model type reads its config, and what it lacks.

    ignores             keys without an effect
    blocks_by_head_dim  blocks of states follow head_dim all the same
    tied                the tie_word_embeddings that counts: the outer config's, that of the text's own part, or none
    windows             layers that slide: those of the config; "every" one by sliding_window, unless layer_types lists
    them; "every if flagged" by use_sliding_window, likewise, and none of a list; "all or none": no mix starts, but for
    one whose max_window_layers is all of them; "none if mixed"
    no_float16          it is rejected in float16 (config/model.py)
    no_stages           it has no SupportsPP
    hides_experts       vLLM's model config does not find the number of its experts
    own_cache           its attention gets no cache settings: K and V stay in the model's dtype
    """

    ignores: tuple[str, ...] = ()
    blocks_by_head_dim: bool = False
    tied: Literal["outside", "inside", "never", "always"] = "outside"
    windows: Literal["as stated", "every", "every if flagged", "all or none", "none if mixed"] = "as stated"
    no_float16: bool = False
    no_stages: bool = False
    hides_experts: bool = False
    own_cache: bool = False


AS_STATED: Final = Reading()
READINGS: Final[Mapping[str, Reading]] = {
    "bloom": Reading(ignores=HEAD_DIM, windows="every"),
    "chatglm": Reading(ignores=HEAD_DIM, windows="every"),
    "cohere": Reading(ignores=BIAS, tied="always", windows="every"),
    "cohere2": Reading(ignores=BIAS, tied="always"),
    "dbrx": Reading(ignores=HEAD_DIM, windows="every", hides_experts=True),
    "deepseek_v2": Reading(ignores=BIAS, tied="never"),
    "deepseek_v3": Reading(ignores=BIAS, tied="never"),
    "deepseek_v32": Reading(ignores=BIAS, tied="never"),
    "deepseek_v4": Reading(tied="never"),
    "falcon": Reading(ignores=HEAD_DIM, own_cache=True),
    "falcon_h1": Reading(ignores=("attention_bias", "mlp_bias")),
    "gemma": Reading(ignores=BIAS, windows="every"),
    "gemma2": Reading(tied="always", no_float16=True),
    "gemma3_text": Reading(no_float16=True),
    "gemma3n_text": Reading(no_stages=True),
    "glm": Reading(windows="every"),
    "glm4": Reading(windows="every", no_float16=True),
    "glm4_moe": Reading(tied="never", windows="every"),
    "glm4_moe_lite": Reading(ignores=BIAS, tied="never"),
    "glm4v_moe_text": Reading(windows="every"),
    "glm4v_text": Reading(windows="every"),
    "glm_moe_dsa": Reading(ignores=BIAS, tied="never"),
    "glm_ocr_text": Reading(windows="every"),
    "gpt2": Reading(ignores=HEAD_DIM, windows="every"),
    "gpt_oss": Reading(tied="never"),
    "gptj": Reading(ignores=HEAD_DIM, windows="every"),
    "granite": Reading(windows="every"),
    "granitemoe": Reading(ignores=HEAD_DIM, windows="every"),
    "granitemoehybrid": Reading(ignores=HEAD_DIM, blocks_by_head_dim=True),
    "internlm2": Reading(ignores=HEAD_DIM, windows="every"),
    "internlm3": Reading(windows="every"),
    "jamba": Reading(ignores=HEAD_DIM, blocks_by_head_dim=True, tied="never"),
    "kimi_k2": Reading(ignores=BIAS, tied="never"),
    "lfm2": Reading(ignores=HEAD_DIM, blocks_by_head_dim=True),
    "llama": Reading(windows="every"),
    "mimo": Reading(ignores=HEAD_DIM, windows="all or none"),
    "mimo_v2_flash": Reading(tied="never"),
    "minimax_m2": Reading(tied="never", windows="every"),
    "minimax_m3": Reading(tied="never"),
    "minimax_m3_vl": Reading(tied="never"),
    "mpt": Reading(ignores=HEAD_DIM),
    "nemotron-nas": Reading(windows="every"),
    "nemotron_h": Reading(ignores=BIAS, tied="never", windows="every"),
    "olmo2": Reading(windows="every"),
    "olmoe": Reading(ignores=HEAD_DIM, tied="never", windows="every"),
    "opt": Reading(ignores=HEAD_DIM, windows="every"),
    "phi": Reading(windows="every"),
    "phi4mm": Reading(no_stages=True),
    "phimoe": Reading(tied="never"),
    "qwen": Reading(ignores=HEAD_DIM),
    "qwen2": Reading(ignores=HEAD_DIM, windows="all or none"),
    "qwen2_5_omni_text": Reading(ignores=HEAD_DIM, windows="all or none"),
    "qwen2_5_vl": Reading(ignores=HEAD_DIM, windows="all or none"),
    "qwen2_moe": Reading(ignores=HEAD_DIM, windows="none if mixed"),
    "qwen2_vl": Reading(ignores=HEAD_DIM, windows="all or none"),
    "qwen3": Reading(windows="all or none"),
    "qwen3_5_moe_text": Reading(ignores=BIAS, tied="inside"),
    "qwen3_5_text": Reading(ignores=BIAS, tied="inside"),
    "qwen3_moe": Reading(windows="every if flagged"),
    "qwen3_next": Reading(ignores=BIAS, tied="never"),
    "qwen3_vl_moe_text": Reading(windows="every"),
    "qwen3_vl_text": Reading(windows="every"),
    "stablelm": Reading(ignores=HEAD_DIM, windows="every"),
    "stablelm_epoch": Reading(ignores=HEAD_DIM),
}


def as_read(spec: ModelSpec, args: EngineArgs) -> ModelSpec:
    """The model as vLLM reads its config: usually as it is."""
    if args.hf_overrides is not None:
        from kvplan.servers.vllm import hf_overrides  # only if the config is changed

        spec = hf_overrides.applied(spec, args.hf_overrides)
    changes = by_class(spec)
    if changes:
        from kvplan.servers.plans.overrides import changed

        spec = changed(spec, changes)
    return windowed(spec)


def check_hybrid(text: Mapping[str, Any], name: str) -> None:
    """Reject a hybrid whose blocks are sized by a head_dim that its attention ignores: vLLM starts, with pages of
    states padded to those of its heads.
    """
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    stated = text.get("head_dim")
    if stated and isinstance(hidden, int) and hidden != stated * (heads or 0):
        problem = f"blocks follow head_dim ({stated}) and heads hidden_size / num_attention_heads, which is not modeled"
        raise UnsupportedModelError(f"{name} on vLLM", problem, "remove head_dim from the config, or correct it")


def by_class(spec: ModelSpec) -> dict[str, bool | None]:
    """Keys of the config that the model's class reads otherwise: None if it ignores them."""
    reading, text = reading_of(spec), text_of(spec.config)
    if reading.blocks_by_head_dim:
        check_hybrid(text, spec.name)
    changes: dict[str, bool | None] = {key: None for key in reading.ignores if text.get(key)}
    tied = spec.tied
    match reading.tied:
        case "never" | "always":
            tied = reading.tied == "always"
        case "inside" if text is not spec.config:
            tied = bool(text.get(TIED))
    return changes | ({TIED: tied} if tied != spec.tied else {})


def reading_of(spec: ModelSpec) -> Reading:
    return READINGS.get(spec.model_type, AS_STATED)


def takes_one_kind(spec: ModelSpec) -> bool:
    """True if the config mixes windows with full attention for a class that has either in all layers."""
    return reading_of(spec).windows == "all or none" and is_mixed(spec)


def is_mixed(spec: ModelSpec) -> bool:
    return spec.cache_kinds == {FullAttention, SlidingWindow}


def refusal(spec: ModelSpec) -> Refusal | None:
    """Return a refusal of windows in some layers, or of image positions that do not fill a rotary table.

    Source: vLLM 0.33 model_executor/models/qwen2.py (Qwen2Model), layers/rotary_embedding/mrope.py.
    """
    text = text_of(spec.config)
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    match rope.get("mrope_section") if isinstance(rope, Mapping) else None:
        case [int(t), int(h), int(w)] if spec.ropes and t + h + w != spec.ropes[0].dim // 2:
            pairs, others = t + h + w, spec.ropes[0].dim // 2
            return unsupported(f"mrope_section of {spec.name} has {pairs} pairs of rotated values, a head {others}")
    if not takes_one_kind(spec):
        return None
    stated = text.get("max_window_layers")
    return unsupported(
        f"windows for some but all layers are not supported (max_window_layers {stated} of {spec.num_layers} layers); "
        "without use_sliding_window in the config they are for none"
    )


@lru_cache(maxsize=64)
def windowed(spec: ModelSpec) -> ModelSpec:
    """The model with the windows that vLLM gives its layers.

    Source: vLLM 0.33 engine/arg_utils.py (create_engine_config), model_executor/models/qwen2.py (Qwen2Model).
    """
    text = text_of(spec.config)
    window, listed = text.get("sliding_window"), text.get("layer_types") is not None
    if not isinstance(window, int) or window < 1:
        return spec
    match reading_of(spec).windows:
        case "all or none" if is_mixed(spec) and text.get("max_window_layers") == spec.num_layers:
            return with_caches(spec, None)
        case "none if mixed" if is_mixed(spec):
            return with_caches(spec, None)
        case "every if flagged" if listed and is_mixed(spec):
            return with_caches(spec, None)
        case "every if flagged" if not listed and text.get("use_sliding_window") is True:
            return with_caches(spec, window)
        case "every" if not listed:
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
    unlimited = not spec.lengths and release.is_compared  # any that is stated (config/model.py)
    return spec.max_model_len, UNLIMITED if unlimited else spec.context_limit
