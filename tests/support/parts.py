"""The part of a product that `make test` runs; `make test-full` runs the rest."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def some(values: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """All values, for parametrize; those that are not chosen are marked full."""
    params = [pytest.param(value, marks=[] if value in chosen else pytest.mark.full) for value in values]
    assert sum(not param.marks for param in params) == len(chosen)
    return params


def paired(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """All pairs, for parametrize; those with neighbors in turn cover every value, the others are marked full."""
    rows, columns = list(first), list(second)
    num = max(len(rows), len(columns))
    chosen = {(i % len(rows), i % len(columns)) for i in range(num)}
    return [
        pytest.param(rows[i], columns[j], marks=[] if (i, j) in chosen else pytest.mark.full)
        for i, j in product(range(len(rows)), range(len(columns)))
    ]


def first_pair(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """All pairs, for parametrize; all but the first are marked full."""
    pairs = list(product(first, second))
    return [pairs[0], *(pytest.param(*pair, marks=pytest.mark.full) for pair in pairs[1:])]
