"""Decode steps as lines over the tokens they read; and values by key."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Known(dict[Key, Value]):
    """Values by key, made where they are first asked for."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[Key], Value]) -> None:
        self._make = make

    def __missing__(self, key: Key) -> Value:
        value = self[key] = self._make(key)
        return value


class Line(NamedTuple):
    """Seconds of a decode step over tokens read, up to `until` of them: base + slope x read, at least `least`."""

    base: float
    slope: float
    until: float = float("inf")
    least: float = 0.0
