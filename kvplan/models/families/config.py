"""Typed access to a model config: every value is checked before it becomes a fact."""

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from kvplan.core.errors import InvalidInputError
from kvplan.core.records import dataclass

MAX_DIM = 2**31
MAX_LAYERS = 4096  # far above any published model; a larger count means a damaged file
_MISSING = object()


class Oddity(str):
    """A warning about a config that contradicts itself, or about a guess made from it."""

    __slots__ = ()


@dataclass(slots=True)
class Config:
    """A config.json (or its part for the language model) and where it came from.

    Reading a missing or null key returns the default, or raises if there is none. Numbers written as strings or
    booleans are rejected; 32.0 is read as 32 with a note.
    """

    values: Mapping[str, Any]
    where: str
    notes: list[str] = field(default_factory=list)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def first(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        for key in keys:
            if self.values.get(key) is not None:
                return key, self.values[key]
        return keys[0], None

    def fail(self, key: str, problem: str, remedy: str = "") -> InvalidInputError:
        return InvalidInputError(f"{self.where}: {key}", problem, remedy)

    def whole(self, key: str, value: Any, low: int = 1, high: int = MAX_DIM) -> int:
        """Check that `value` is an integer in [low, high]. Raise an error naming the key if it is not."""
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            self.notes.append(Oddity(f"{key} is written {value}; read as {int(value)}"))
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"must be an integer ({value!r:.60})", "correct the config")
        if not low <= value <= high:
            raise self.fail(key, f"must be between {low} and {high} ({value})", "correct the config")
        return value

    def count(self, *keys: str, default: Any = _MISSING, low: int = 1, high: int = MAX_DIM) -> int:
        """Value of the first of `keys` that is present."""
        key, value = self.first(keys)
        if value is None:
            if default is _MISSING:
                raise self.fail(keys[0], "missing", "kvplan cannot size the model without it")
            return int(default)
        return self.whole(key, value, low, high)

    def maybe_count(self, *keys: str, low: int = 0) -> int | None:
        """Value of the first of `keys` that is present and not 0, or None (0 and null mean "not set")."""
        key, value = self.first(keys)
        if value is None:
            return None
        return self.whole(key, value, low) or None

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "missing", "kvplan cannot size the model without it")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(key, f"must be a finite number ({value!r:.60})", "correct the config")
        return float(value)

    def ratio(self, key: str, default: float, high: float = 1024) -> float:
        """A factor on widths, in (0, high]."""
        value = self.number(key, default)
        if not 0 < value <= high:
            raise self.fail(key, f"must be above 0 and at most {high:g} ({value})", "correct the config")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false ({value!r:.60})", "correct the config")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "missing", "kvplan cannot size the model without it")
            return default
        if not isinstance(value, str):
            raise self.fail(key, f"must be text ({value!r:.60})", "correct the config")
        return value

    def items(self, key: str) -> list[Any] | None:
        """A list, or None if the key is missing or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.fail(key, f"must be a list ({type(value).__name__})", "correct the config")
        return value

    def ints(self, key: str) -> list[int] | None:
        values = self.items(key)
        if values is None:
            return None
        return [self.whole(f"{key}[{i}]", value, low=0) for i, value in enumerate(values)]

    def names(self, key: str) -> list[str] | None:
        values = self.items(key)
        if values is None:
            return None
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise self.fail(f"{key}[{i}]", f"must be text ({value!r:.60})", "correct the config")
        return values

    def sub(self, key: str) -> "Config":
        """A nested object; empty if the key is missing or null."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.fail(key, f"must be an object ({type(value).__name__})", "correct the config")
        return Config(value, f"{self.where}: {key}", self.notes)

    def num_layers(self) -> int:
        return self.count("num_hidden_layers", "n_layer", "num_layers", "n_layers", high=MAX_LAYERS)

    def per_layer_names(self, key: str, num_layers: int) -> list[str] | None:
        """A list with one name per layer; another length is an error."""
        names = self.names(key)
        if names is not None and len(names) != num_layers:
            raise self.fail(key, f"has {len(names)} entries for {num_layers} layers", "correct the config")
        return names


ALWAYS = (  # the class has a tower in any case
    "llava", "llava_llama", "minimax_m3", "minimax_m3_vl", "openvla", "kimi_audio", "molmo", "moondream3",
)  # fmt: skip
TOWER_KEYS = (
    "vision_config", "audio_config", "speech_config", "visual", "vision_tower", "mm_vision_tower", "vit_config",
    "img_processor", "audio_processor", "embd_layer", "encoder_config", "acoustic_tokenizer_encoder_config",
    "vlm_config", "visual_tokenizer_config", "audio_encoder_config", "audio_encoder_conf",
    "vision_n_layers",  # DeepSeek-V4's, which has no part of its own
)  # fmt: skip
NESTED = ("thinker_config", "model_config")


def has_tower_keys(outer: Config) -> bool:
    """True if a config describes a tower, at its own level or one below (Qwen-Omni's thinker)."""
    below = [value for key in NESTED if isinstance(value := outer.values.get(key), dict)]
    return any(level.get(key) not in (None, 0) for level in (outer.values, *below) for key in TOWER_KEYS)


def is_multimodal(outer: Config) -> bool:
    """True if the model has a tower that a server loads."""
    return has_tower_keys(outer) or outer.values.get("model_type") in ALWAYS
