"""Decode steps as lines over the tokens they read."""

from typing import NamedTuple


class Line(NamedTuple):
    """Seconds of a decode step over tokens read, up to `until` of them: base + slope x read, at least `least`."""

    base: float
    slope: float
    until: float = float("inf")
    least: float = 0.0
