"""Dataclasses with slots, created at a quarter of the usual cost; and the field types of JSON documents.

`dataclasses` compiles six methods for every class, one by one: a third of the time of a short command. Here only
`__init__` is compiled; comparison, hashing and repr iterate over the fields. Type checkers see the usual decorator.
"""

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, cast

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    from contextlib import contextmanager
    from operator import attrgetter

    def dataclass(*, frozen=False, slots=False, kw_only=False, eq=True, **others):
        """Replace `dataclasses.dataclass`, which still handles classes without slots or with other options."""
        if others or not slots:
            return dataclasses.dataclass(frozen=frozen, slots=slots, kw_only=kw_only, eq=eq, **others)

        def made(cls):
            own, doc = set(cls.__dict__), cls.__doc__
            cls.__doc__ = doc or cls.__name__  # for a class without one `dataclasses` would format the signature: 5 ms
            with _thawed(cls.__mro__):
                plain = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
            plain.__doc__ = doc
            plain.__dataclass_params__.frozen = frozen
            fields = dataclasses.fields(plain)
            methods = {"__init__": _init(plain, fields, frozen=frozen), "__repr__": _repr}
            if eq:
                methods |= _comparison(tuple(field.name for field in fields if field.compare), frozen=frozen)
            for name, method in (methods | (FROZEN if frozen else {})).items():
                if name not in own:
                    setattr(plain, name, method)
            return plain

        return made

    @contextmanager
    def _thawed(classes):
        """Mark frozen bases as not frozen inside: `dataclasses` refuses to mix them with classes that are not."""
        bases = [cls for cls in classes if "__dataclass_params__" in vars(cls) and cls.__dataclass_params__.frozen]
        for base in bases:
            base.__dataclass_params__.frozen = False
        try:
            yield
        finally:
            for base in bases:
                base.__dataclass_params__.frozen = True

    def _init(cls, fields, *, frozen):
        """Build __init__, the only compiled method, because it is called most."""
        names = {"__set": object.__setattr__, "__missing": dataclasses.MISSING}
        positional, named, body = [], [], []
        for field in fields:
            parameter = value = field.name
            if field.default is not dataclasses.MISSING:
                names[f"__default_{field.name}"] = field.default
                parameter += f"=__default_{field.name}"
            elif field.default_factory is not dataclasses.MISSING:
                names[f"__factory_{field.name}"] = field.default_factory
                parameter += "=__missing"
                value = f"__factory_{field.name}() if {field.name} is __missing else {field.name}"
            if not field.init:
                assert value == parameter, f"{field.name}: __post_init__ sets it, so it has no default"
                continue
            (named if field.kw_only else positional).append(parameter)
            body.append(f"__set(self, {field.name!r}, {value})" if frozen else f"self.{field.name} = {value}")
        if hasattr(cls, "__post_init__"):
            body.append("self.__post_init__()")
        parameters = ", ".join(["self", *positional, *(["*", *named] if named else [])])
        exec(f"def __init__({parameters}):\n " + "\n ".join(body or ["pass"]), names)  # of our own fields
        init = names["__init__"]
        init.__qualname__ = f"{cls.__qualname__}.__init__"
        init.__annotations__ = {field.name: field.type for field in fields} | {"return": None}
        return init

    def _comparison(names, *, frozen):
        """Build __eq__ and __hash__ over the values of some fields; instances of other classes are never equal."""
        values = attrgetter(*names) if names else lambda _: ()

        def __eq__(self, other):
            return _alike(self, other, values)

        def __hash__(self):
            return hash(values(self))

        return {"__eq__": __eq__, "__hash__": __hash__ if frozen else None}

    def _alike(left, right, values):
        if right.__class__ is not left.__class__:
            return NotImplemented
        return values(left) == values(right)

    def _repr(self):
        fields_text = (
            f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr
        )
        return f"{self.__class__.__qualname__}({', '.join(fields_text)})"

    def _refuse_to_set(self, name, value):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def _refuse_to_delete(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def _getstate(self):
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def _setstate(self, state):
        for field, value in zip(dataclasses.fields(self), state, strict=True):
            object.__setattr__(self, field.name, value)

    FROZEN = {
        "__setattr__": _refuse_to_set,
        "__delattr__": _refuse_to_delete,
        "__getstate__": _getstate,
        "__setstate__": _setstate,
    }


# --- the fields of JSON documents -------------------------------------------------------------------------------------


class Keyword(NamedTuple):
    """A JSON Schema keyword in an annotation: `minimum`, `maximum`, `enum`."""

    name: str
    value: int | tuple[str, ...]


Count = Annotated[int, Keyword("minimum", 0)]
Size = Annotated[int, Keyword("minimum", 1)]
Number = Annotated[float, Keyword("minimum", 0)]
Share = Annotated[float, Keyword("minimum", 0), Keyword("maximum", 1)]
Correlation = Annotated[float, Keyword("minimum", -1), Keyword("maximum", 1)]


Document = TypeVar("Document")


def from_fields(document: type[Document], record: object, **others: Any) -> Document:
    """A document whose keys are the record's fields of the same names, but for `others`."""
    names = document.__annotations__
    return cast("Document", {name: others[name] if name in others else getattr(record, name) for name in names})


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Schema of a key that may be null in a file, which its reader treats as absent."""
    return {"anyOf": [schema, {"type": "null"}]}
