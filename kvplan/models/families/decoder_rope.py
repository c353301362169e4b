"""Rotary positions of the decoders that the engine runs, from either config format.

Older configs have rope_theta, rope_scaling (and Gemma 3 rope_local_base_freq), newer ones rope_parameters, which
Gemma 3 has once per kind of layer. Source: transformers 5.23 modeling_rope_utils.py (precedence, defaults, formulas)
and configuration_gemma3.py.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.files import printable
from kvplan.models.families.config import Config
from kvplan.models.spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    Rotary,
    YarnScaling,
)

Kind = Literal["full_attention", "sliding_attention"]
PARTIAL = "partial_rotary_factor"
KINDS: tuple[Kind, ...] = ("full_attention", "sliding_attention")
TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")

BY_KIND = ("gemma3_text", "olmo3")  # their sliding layers are never scaled by rope_scaling
# transformers' defaults if a config of this type has no scaling settings.
UNSAID: dict[str, Mapping[str, Any]] = {
    "gpt_oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
}


def read_rotary(
    config: Config, model_type: str, dim: int, kind: Kind = "full_attention", *, interleaved: bool = False
) -> Rotary:
    """Rotation of `dim` elements of a head in layers of one kind.

    config  with rope_theta and max_position_embeddings set if the family has a default
    """
    if dim % 2:
        raise config.fail("head_dim", f"must be even where positions rotate ({dim})", "correct the config")
    settings = rope_settings(config, model_type, kind)
    return Rotary(dim, _theta(config, settings, model_type, kind), _scaling(config, settings, model_type), interleaved)


def read_partial_rotary(
    config: Config, model_type: str, head_dim: int, kind: Kind = "full_attention", *, interleaved: bool = False
) -> Rotary:
    """Rotation of a head's first elements: of partial_rotary_factor, from the settings, else from the config."""
    share = config.sub("rope_parameters").number(PARTIAL, config.number(PARTIAL))
    if "rotary_dim" in config and PARTIAL not in config.sub("rope_parameters"):  # MiniMax-M2 as published
        share = config.count("rotary_dim") / head_dim
    # read_rotary takes the rotated part of a head from its caller.
    whole = {
        key: {name: item for name, item in value.items() if name != PARTIAL}
        for key in ("rope_parameters", "rope_scaling")
        if isinstance(value := config.values.get(key), Mapping)
    }
    settings = Config({**config.values, **whole}, config.where, config.notes)
    return read_rotary(settings, model_type, int(head_dim * share), kind, interleaved=interleaved)


def score_factor(config: Config, model_type: str) -> float:
    """DeepSeek's factor on the softmax scale: the square of YaRN's mscale for all dimensions, else 1.

    Source: transformers 5.23 yarn_apply_mscale in modeling_deepseek_v2.py and modeling_deepseek_v3.py, which are
    identical.
    """
    settings = rope_settings(config, model_type, "full_attention")
    weight = settings.number("mscale_all_dim", 0.0)
    if rope_type(settings) == "default" or not weight:
        return 1.0
    return yarn_mscale(positive(settings, "factor"), weight) ** 2


def rope_settings(config: Config, model_type: str, kind: Kind) -> Config:
    """Settings of one kind of layer, in either format; rope_scaling wins if both are present."""
    parameters = config.sub("rope_parameters")
    old = config.sub("rope_scaling")
    nested = [key for key in KINDS if key in parameters]
    if model_type in BY_KIND:
        if parameters.values and not nested:
            raise config.fail(
                "rope_parameters",
                f"must have an entry for each kind of layer ({' and '.join(KINDS)})",
                "correct the config",
            )
        own = parameters.sub(kind)
        return own if kind == "sliding_attention" else Config({**own.values, **old.values}, own.where, own.notes)
    if nested:
        raise UnsupportedModelError(
            parameters.where,
            f"{model_type} with settings for {nested[0]} alone is not something the engine runs",
            "give one set of settings for all layers",
        )
    if old.values or parameters.values:
        return old if old.values else parameters
    return Config(UNSAID.get(model_type, {}), parameters.where, parameters.notes)


def rope_type(settings: Config) -> str:
    return settings.text("rope_type", settings.text("type", "default"))


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """0.1 weight ln(factor) + 1: YaRN's attention factor for a context extended `factor` times."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def positive(config: Config, key: str) -> float:
    value = config.number(key)
    if value <= 0:
        raise config.fail(key, f"must be above 0 ({value:g})", "correct the config")
    return value


def _theta(config: Config, settings: Config, model_type: str, kind: Kind) -> float:
    """The base: from the settings, else from the config, which in Gemma 3 has a separate one for sliding layers."""
    if "rope_theta" in settings:
        return positive(settings, "rope_theta")
    local = model_type == "gemma3_text" and kind == "sliding_attention"
    return positive(config, "rope_local_base_freq" if local else "rope_theta")


def _scaling(config: Config, settings: Config, model_type: str) -> RopeScaling | None:
    if settings.number("partial_rotary_factor", 1.0) != 1:
        raise UnsupportedModelError(
            f"{settings.where}: partial_rotary_factor",
            f"the engine rotates whole heads only ({settings.values['partial_rotary_factor']})",
            "choose another model",
        )
    match rope_type(settings):
        case "default":
            return None
        case "linear":
            return LinearScaling(positive(settings, "factor"))
        case "llama3":
            return Llama3Scaling(
                factor=positive(settings, "factor"),
                low_freq_factor=settings.number("low_freq_factor", 1.0),  # hardcoded as 1 and 4 in Llama's own code
                high_freq_factor=settings.number("high_freq_factor", 4.0),
                original_positions=_original_positions(config, settings),
            )
        case "yarn":
            return _yarn(config, settings)
        case "longrope" | "su":
            return _longrope(config, settings, model_type)
        case "dynamic":
            if "alpha" in settings:
                problem = "rope_type 'dynamic' is not one the engine runs with alpha"
                raise UnsupportedModelError(settings.where, problem, "choose another model")
            return DynamicScaling(positive(settings, "factor"), config.count("max_position_embeddings"))
        case other:
            raise UnsupportedModelError(
                settings.where,
                f"rope_type {printable(repr(other), 40)} is not one the engine runs (it runs {', '.join(TYPES)})",
                "choose another model",
            )


def _original_positions(config: Config, settings: Config) -> int:
    """The context before scaling: the config's own key wins over the settings'; without either, the current context."""
    key = "original_max_position_embeddings"
    if key in config:
        return config.count(key)
    return settings.count(key) if key in settings else config.count("max_position_embeddings")


def _yarn(config: Config, settings: Config) -> YarnScaling:
    factor = positive(settings, "factor")
    return YarnScaling(
        factor=factor,
        original_positions=_original_positions(config, settings),
        beta_fast=settings.number("beta_fast", 32.0) or 32.0,  # 0 means "not set" to transformers
        beta_slow=settings.number("beta_slow", 1.0) or 1.0,
        attention_factor=_attention_factor(settings, factor),
        truncate=settings.flag("truncate", True),
    )


def _longrope(config: Config, settings: Config, model_type: str) -> LongRopeScaling:
    """Phi 3.5 MoE alone reads a factor for each list (transformers 5.23; vLLM 0.33 does for any)."""
    scales = ("short_mscale", "long_mscale")
    for key in scales:
        if key in settings and model_type != "phimoe":
            problem = f"the engine scales both lists of longrope alike ({settings.values[key]!r:.40})"
            raise UnsupportedModelError(f"{settings.where}: {key}", problem, "choose another model")
    original = _original_positions(config, settings)
    factor = settings.number("factor", config.count("max_position_embeddings") / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (_factors(settings, key) for key in ("short_factor", "long_factor"))
    default = settings.number("attention_factor", default)
    return LongRopeScaling(original, short, long, *(settings.number(key, default) for key in scales))


def _factors(settings: Config, key: str) -> tuple[float, ...]:
    """A list of numbers above 0, whose length was checked when the model was sized."""
    values = settings.items(key)
    if values is None:
        raise settings.fail(key, "missing", "correct the config")
    numbers = Config({str(i): value for i, value in enumerate(values)}, f"{settings.where}: {key}")
    return tuple(positive(numbers, str(i)) for i in range(len(values)))


def _attention_factor(settings: Config, factor: float) -> float:
    if "attention_factor" in settings:
        return settings.number("attention_factor")
    weight, weight_all = settings.number("mscale", 0.0), settings.number("mscale_all_dim", 0.0)
    if weight and weight_all:
        return yarn_mscale(factor, weight) / yarn_mscale(factor, weight_all)
    return yarn_mscale(factor)
