"""vLLM's --disable-sliding-window: the model that it loads."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families.config import Config
from kvplan.models.families.rope import rope_type, scaling, table_rows
from kvplan.models.spec import FullAttention, LayerCache, ModelSpec, SlidingWindow
from kvplan.servers.vllm.classes import type_of


@lru_cache(maxsize=64)
def without_windows(spec: ModelSpec) -> ModelSpec:
    """The model with --disable-sliding-window: its context ends at the window, which then is no window.

    Source: vLLM 0.33 config/model.py (get_and_verify_max_len; hf_text_config.sliding_window is removed after it).
    """
    inner = spec.config.get("text_config")
    text = inner if isinstance(inner, Mapping) else spec.config
    windows = {cache.window for layer in spec.layers for cache in layer if isinstance(cache, SlidingWindow)}
    window = text.get("sliding_window", max(windows, default=None))
    if windows and (not type_of(spec).without_windows or not isinstance(window, int)):
        problem = f"vLLM's class of {spec.name} ({spec.model_type}) needs its window, or was not compared"
        raise UnsupportedModelError("--disable-sliding-window", problem, "remove it")
    if not isinstance(window, int) or window < 1:
        return spec
    layers = tuple(tuple(full(cache) for cache in layer) for layer in spec.layers)
    end = window if type_of(spec).scaled_already else stretched(Config(dict(text), spec.source), window)
    context, limit = min(spec.max_model_len, end), min(spec.context_limit, end)
    return replace(spec, layers=layers, max_model_len=context, context_limit=limit)


def stretched(config: Config, positions: int) -> int:
    """The context of so many positions: vLLM scales it after the window has ended it."""
    return table_rows(config, positions) if rope_type(scaling(config)) in ("linear", "dynamic") else positions


def full(cache: LayerCache) -> LayerCache:
    match cache:
        case SlidingWindow(heads, k, v):
            return FullAttention(heads, k, v)
        case _:
            return cache
