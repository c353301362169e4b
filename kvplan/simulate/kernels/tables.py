"""Reduced tables of measured kernels: one file for each measured GPU, read part by part, without numpy.

A file is a line of JSON, an index, and compressed parts. A part has all surfaces of one kind of kernel, number format
and server, of the same axes; a surface belongs to one shape (heads, an expert's width, ...). It holds, in 16 bits, the
logarithm of measured over least time (kvplan/simulate/kernels/roof.py) in units of STEP, on the grid of its axes.
"""

import json
import sys
import zlib
from array import array
from bisect import bisect_right
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).with_name("measured")
STEP: Final = 0.005  # of a logarithm: half a percent


class Surface:
    """Measured over least time on a grid; outside of it that of the nearest edge."""

    __slots__ = ("_axes", "_known", "_strides", "_values")

    def __init__(self, axes: tuple[tuple[float, ...], ...], values: "array[int]") -> None:
        self._axes, self._values = axes, values
        self._known: dict[tuple[float, ...], float] = {}  # prompts of the same length come again and again
        strides, size = [], 1
        for logs in reversed(axes):
            strides.append(size)
            size *= len(logs)
        self._strides = tuple(reversed(strides))

    def __call__(self, *place: float) -> float:
        known = self._known.get(place)
        if known is None:
            known = self._known[place] = self._between(place)
        return known

    def _between(self, place: tuple[float, ...]) -> float:
        """The factor at a place, linear in logarithms between the grid's points."""
        corners = [(0, 1.0)]
        for logs, stride, value in zip(self._axes, self._strides, place, strict=True):
            y = log(value) if value > 0 else logs[0]
            if len(logs) == 1 or y <= logs[0]:
                continue
            last = len(logs) - 1
            if y >= logs[last]:
                corners = [(index + last * stride, weight) for index, weight in corners]
                continue
            low = bisect_right(logs, y) - 1
            share = (y - logs[low]) / (logs[low + 1] - logs[low])
            first = low * stride
            corners = [
                (index + first + side * stride, weight * part)
                for index, weight in corners
                for side, part in ((0, 1 - share), (1, share))
                if part
            ]
        return exp(STEP * sum([weight * self._values[index] for index, weight in corners]))


class Part:
    """Surfaces of one kind of kernel, by shape."""

    def __init__(self, shapes: list[list[float]], axes: list[list[float]], data: bytes) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        self._axes = tuple(tuple(log(value) for value in axis) for axis in axes)
        self._values = array("h")
        self._values.frombytes(data)
        if sys.byteorder == "big":
            self._values.byteswap()
        self._size = len(self._values) // len(shapes)
        self._surfaces: dict[int, Surface] = {}

    def surface(self, index: int) -> Surface:
        known = self._surfaces.get(index)
        if known is None:
            values = self._values[index * self._size : (index + 1) * self._size]
            known = self._surfaces[index] = Surface(self._axes, values)
        return known

    def nearest(self, shape: tuple[float, ...], weights: tuple[float, ...]) -> tuple[int, float]:
        """(index, distance) of the measured shape nearest to one, by weighted logarithms of its numbers."""
        logs = [log(value) if value else 0.0 for value in shape]
        best, least = 0, float("inf")
        for index, other in enumerate(self.shapes):
            away = 0.0
            for value, mine, weight in zip(other, logs, weights, strict=True):
                away += weight * abs((log(value) if value else 0.0) - mine)
            if away < least:
                best, least = index, away
        return best, least


class System:
    """The tables of one measured GPU."""

    def __init__(self, name: str) -> None:
        self.name = name
        content = (FOLDER / f"{name}.tables").read_bytes()
        head, _, self._content = content.partition(b"\n")
        self._index: dict[str, Any] = json.loads(head)["parts"]
        self._parts: dict[str, Part] = {}

    def part(self, name: str) -> Part | None:
        """A part by kind, format and server ("gemm/fp8/vllm"), or None if it was not measured."""
        if name not in self._parts:
            row = self._index.get(name)
            if row is None:
                return None
            data = zlib.decompress(self._content[row["first"] : row["first"] + row["size"]])
            self._parts[name] = Part(row["shapes"], row["axes"], data)
        return self._parts[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._index)


@cache
def system(name: str) -> System:
    return System(name)
