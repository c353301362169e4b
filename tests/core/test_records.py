"""Classes of core.records are what dataclasses makes of the same definition, in everything that is used of them."""

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any

import pytest

from kvplan.core import records
from kvplan.models.spec import FullAttention, KeyIndex, Part, SparseIndexer

Decorator = Callable[..., Any]


def classes(dataclass: Decorator) -> tuple[Any, Any, Any, Any]:
    @dataclass(frozen=True, slots=True)
    class Plain:
        """Has every kind of field."""

        number: int
        text: str = "x"
        values: list[int] = field(default_factory=list)
        hidden: int = field(default=3, repr=False, compare=False)

        @property
        def double(self) -> int:
            return 2 * self.number

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Named(Plain):
        """Adds a field by name only."""

        more: int = 4

    @dataclass(frozen=True, slots=True)
    class Own:
        """Shows and compares itself as it likes."""

        number: int

        def __repr__(self) -> str:
            return "mine"

        def __post_init__(self) -> None:
            if self.number < 0:
                raise ValueError("negative")

    @dataclass(frozen=True, slots=True, eq=False)
    class Itself:
        """Equals itself only."""

        number: int

    return Plain, Named, Own, Itself


USUAL = classes(dataclasses.dataclass)
OURS = classes(records.dataclass)


@pytest.mark.parametrize(("ours", "usual"), list(zip(OURS, USUAL, strict=True)))
def test_fields_and_parameters_are_the_same(ours: Any, usual: Any) -> None:
    for name in ("name", "init", "repr", "compare", "kw_only"):
        assert [getattr(field, name) for field in dataclasses.fields(ours)] == [
            getattr(field, name) for field in dataclasses.fields(usual)
        ]
    shape = [
        [(name, parameter.kind) for name, parameter in inspect.signature(cls).parameters.items()]
        for cls in (ours, usual)
    ]
    assert shape[0] == shape[1]
    assert ours.__match_args__ == usual.__match_args__
    assert ours.__slots__ == usual.__slots__
    assert not hasattr(ours(1), "__dict__")


@pytest.mark.parametrize("kind", range(4))
def test_values_are_made_shown_compared_and_hashed_alike(kind: int) -> None:
    ours, usual = OURS[kind], USUAL[kind]
    assert repr(ours(1)) == repr(usual(1))
    assert (ours(1) == ours(1)) is (usual(1) == usual(1))
    assert (ours(1) == ours(2)) is (usual(1) == usual(2)) is False
    assert ours(1) != usual(1)
    assert dataclasses.asdict(ours(7)) == dataclasses.asdict(usual(7))
    assert dataclasses.replace(ours(7), number=8).number == 8
    wrongs: list[tuple[Any, ...]] = [(), (1, "x", [], 3, 4, 5)]
    for wrong in wrongs:
        with pytest.raises(TypeError):
            ours(*wrong)


def test_fields_that_do_not_compare_do_not() -> None:
    plain = OURS[0]
    assert plain(1, "y", [2], 3) == plain(1, "y", [2], 4)
    assert plain(1, "y", [2]) != plain(1, "y", [3])
    first, second = plain(1), plain(1)
    assert first.values is not second.values
    assert (first.double, first.hidden) == (2, 3)


def test_nothing_can_be_set_or_deleted() -> None:
    for cls in OURS:
        record = cls(1)
        with pytest.raises(FrozenInstanceError, match="cannot assign to field 'number'"):
            record.number = 2
        with pytest.raises(FrozenInstanceError, match="cannot delete field 'number'"):
            del record.number
    with pytest.raises(ValueError, match="negative"):
        OURS[2](-1)


def test_copies_and_pickles_are_equal() -> None:
    part = Part(8, 128)
    assert pickle.loads(pickle.dumps(part)) == copy.copy(part) == copy.deepcopy(part) == part
    assert hash(copy.copy(part)) == hash(part)


@pytest.mark.parametrize("decorators", [(records, dataclasses), (dataclasses, records), (records, records)])
def test_classes_of_both_kinds_inherit_from_each_other(decorators: tuple[Any, Any]) -> None:
    first, second = decorators

    @first.dataclass(frozen=True, slots=True)
    class Base:
        """One field."""

        number: int

    @second.dataclass(frozen=True, slots=True)
    class Derived(Base):
        """Two."""

        text: str = "x"

    made_with: list[tuple[Any, tuple[Any, ...]]] = [(Base, (1,)), (Derived, (1, "y"))]
    for cls, arguments in made_with:
        assert cls.__dataclass_params__.frozen
        record = cls(*arguments)
        assert record == copy.copy(record)
        with pytest.raises(FrozenInstanceError):
            record.number = 2
    assert repr(made_with[1][0](1)).endswith("Derived(number=1, text='x')")


def test_kinds_with_the_same_values_are_different() -> None:
    kinds: list[object] = [KeyIndex(128), SparseIndexer(128), KeyIndex(128)]
    assert kinds[0] != kinds[1]
    assert len(set(kinds)) == 2
    match FullAttention(8, 128, 64):
        case FullAttention(heads, dim, dim_v):
            assert (heads, dim, dim_v) == (8, 128, 64)


@pytest.mark.parametrize("dataclass", [records.dataclass, dataclasses.dataclass])
def test_a_class_that_is_not_frozen_can_be_set_and_has_no_hash(dataclass: Decorator) -> None:
    @dataclass(slots=True)
    class Open:
        """Can be set."""

        number: int = 1
        values: list[int] = field(default_factory=list)
        double: int = field(init=False)

        def __post_init__(self) -> None:
            self.double = 2 * self.number

    record = Open(3)
    assert repr(record).endswith("Open(number=3, values=[], double=6)")
    assert not hasattr(record, "__dict__")
    assert not Open.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert record == Open(3) == copy.copy(record)
    record.number = 2
    assert record != Open(3)
    with pytest.raises(TypeError, match="unhashable"):
        hash(record)
    with pytest.raises(TypeError):
        Open(1, [], 2)  # type: ignore[call-arg]

    @dataclass(slots=True, eq=False)
    class Itself:
        """Equals itself only."""

        number: int

    itself = Itself(3)
    assert itself != Itself(3)
    assert {itself: 1}[itself] == 1


def test_a_class_without_slots_is_the_usual_one() -> None:
    @records.dataclass(frozen=True)
    class Loose:
        """Has a dictionary."""

        number: int = 1

    assert vars(Loose(2)) == {"number": 2}
