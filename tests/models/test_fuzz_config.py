"""A damaged config ends in a plan or in one line of error: never another exception, never NaN."""

import json
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.errors import KvplanError
from kvplan.core.files import parse_json
from kvplan.documents.artifact import dumps, plan_document
from kvplan.hardware.gpu import gpu
from kvplan.models.hf_config import read_config
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.releases import names_in
from kvplan.servers.vllm import classes
from kvplan.servers.vllm import rules as vllm
from tests.support.config_shapes import paths, shape, shape_names

DROP = object()
BAD: tuple[Any, ...] = (
    DROP, None, 0, -1, 1, 7, 2**31 + 1, 2**63, 10**30, 32.0, 1.5, 1e300, math.nan, math.inf, "32", "", True, False,
    [], [1], [None], ["full_attention"], [[1]], {}, {"a": 1},
)  # fmt: skip


def damage(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Put `value` at a path, or drop the key; a path that an earlier damage removed is left alone."""
    inner: Any = config
    for key in path[:-1]:
        inner = inner.get(key) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        if value is DROP:
            inner.pop(path[-1], None)
        else:
            inner[path[-1]] = value


def is_one_line(error: KvplanError) -> bool:
    return str(error).isprintable() and len(str(error)) < 1000


def answer(config: dict[str, Any], name: str) -> Plan | KvplanError:
    """The plan or the error, checked for what both promise."""
    result: Plan | KvplanError
    try:
        spec = read_config(config, "config.json", name)
        last = names_in(classes.REGISTRY).get(spec.architecture, "").partition("until 0.")[2]
        release = vllm.version((0, int(last)) if last else vllm.NEWEST)
        result = plan(Request(spec, gpu("h100-80g"), release=release))
        dumps(plan_document(result))  # refuses NaN and infinities
    except KvplanError as error:
        result = error
    if isinstance(result, KvplanError):
        assert is_one_line(result)
    else:
        assert 0 <= result.concurrency.max < math.inf
        rows = sum(getattr(result.memory, row) for row in result.memory.ROWS) - result.memory.missing
        assert rows == result.memory.total
    return result


@pytest.mark.parametrize("name", shape_names())
def test_an_undamaged_shape_is_planned(name: str) -> None:
    assert isinstance(answer(shape(name), name), Plan)


@given(name=st.sampled_from(shape_names()), data=st.data())
def test_a_damaged_config_is_planned_or_refused(name: str, data: st.DataObject) -> None:
    config = shape(name)
    keys = paths(config)
    for _ in range(data.draw(st.integers(1, 3))):
        damage(config, data.draw(st.sampled_from(keys)), data.draw(st.sampled_from(BAD)))
    answer(config, name)


@given(name=st.sampled_from(shape_names()), data=st.data())
def test_any_value_of_json_in_any_place_is_planned_or_refused(name: str, data: st.DataObject) -> None:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    values = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
    )
    config = shape(name)
    damage(config, data.draw(st.sampled_from(paths(config))), data.draw(values))
    answer(config, name)


@given(name=st.sampled_from(shape_names()), data=st.data())
def test_the_order_of_keys_and_unknown_keys_change_nothing(name: str, data: st.DataObject) -> None:
    config = shape(name)
    shuffled = dict(data.draw(st.permutations(list(config.items()))))
    first = answer(config, name)
    second = answer(shuffled | {"_kvplan_unknown": data.draw(st.integers() | st.text(max_size=5))}, name)
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    assert (first.memory, first.capacity) == (second.memory, second.capacity)


@given(name=st.sampled_from(shape_names()), data=st.data())
def test_a_file_cut_or_changed_anywhere_is_read_or_refused(name: str, data: st.DataObject) -> None:
    text = json.dumps(shape(name))
    offset = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 3))
    changed = (
        text[:offset]
        + data.draw(st.sampled_from(["", "\0", "NaN", '"', "[", "}", "1e999", ",", "\ud800"]))
        + text[offset + cut :]
    )
    try:
        config = parse_json(changed, "config.json")
    except KvplanError as error:
        refused: KvplanError | None = error
    else:
        refused = None
        answer(config, name)
    assert refused is None or is_one_line(refused)


Path = tuple[str, ...]
THIRDS = 3


@cache
def shares() -> dict[str, list[tuple[Path, tuple[Any, ...]]]]:
    """The keys of each shape with a third of the bad values, each time another; with all where few have the key."""
    places = [(name, path) for name in shape_names() for path in paths(shape(name))]
    num_shapes = Counter(path[-1] for _, path in places)
    met: Counter[str] = Counter()
    shared: dict[str, list[tuple[Path, tuple[Any, ...]]]] = {name: [] for name in shape_names()}
    for name, path in places:
        key = path[-1]
        shared[name].append((path, BAD if num_shapes[key] < THIRDS else BAD[met[key] % THIRDS :: THIRDS]))
        met[key] += 1
    return shared


@pytest.mark.full
@pytest.mark.parametrize("name", shape_names())
def test_every_key_with_every_bad_value_is_planned_or_refused(name: str) -> None:
    """Each value in a third of the shapes that have the key."""
    for path, values in shares()[name]:
        for value in values:
            config = shape(name)
            damage(config, path, value)
            answer(config, name)


@pytest.mark.full
def test_every_key_meets_every_bad_value() -> None:
    met = {(path[-1], id(value)) for places in shares().values() for path, values in places for value in values}
    keys = {path[-1] for name in shape_names() for path in paths(shape(name))}
    assert met == {(key, id(value)) for key in keys for value in BAD}
    for name, places in shares().items():
        assert [path for path, _ in places] == paths(shape(name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", shape_names())
def test_every_key_of_every_shape_with_every_bad_value_is_planned_or_refused(name: str) -> None:
    for path in paths(shape(name)):
        for value in BAD:
            config = shape(name)
            damage(config, path, value)
            answer(config, name)
