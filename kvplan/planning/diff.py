"""Differences in memory and concurrency between two plans, or between two sets of them.

A side is read from a document (kvplan/plan@1, kvplan/plans@1, kvplan/check@1) or made from a plan. Documents contain
no model, so only plans made here can attribute differences to inputs (kvplan.planning.attribute).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from kvplan.core.errors import InvalidInputError, UsageError
from kvplan.core.files import printable
from kvplan.core.units import GIB, MAX_BYTES, format_gib, format_size
from kvplan.planning.attribute import (
    CAPACITY,
    MEMORY,
    Figures,
    InputChange,
    InputStep,
    Kind,
    Number,
    Unit,
    attribution,
    figures_of,
    gpu_text,
    value_text,
)
from kvplan.planning.plan import Plan
from kvplan.servers.words.arguments import EngineArgs

Inputs = Mapping[tuple[Kind, str], str | None]

# Fields of a kvplan/check@1 target, under the paths of kvplan/plan@1; its headroom is `unused` minus `missing`.
CHECKED: Final = {
    "weights": "memory.weights",
    "lora": "memory.lora",
    "kv_cache": "memory.kv_cache",
    "kv_bytes_per_token": "kv.bytes_per_token",
    "kv_tokens": "kv.tokens",
    "concurrency": "concurrency.max",
    "users": "concurrency.users",
}
UNITS: Final = {**MEMORY, **CAPACITY}
Worse = Literal["fits", "bytes_per_token", "users"]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two sides of a comparison.

    key     what it is matched by: target, or model, GPU and context
    title   "llama-3.1-8b on a100-80g, 32,768 tokens"
    inputs  its inputs, as text
    groups  its weights by tensor group, bytes; empty if unknown
    plan    None if it was read from a document
    server  with its release; "" if a document does not say
    rooms   what stays allocated beside weights and cache, (low, high) bytes and the terms of its formula; None: unknown
    notes   what the server's rules say of the plan
    """

    key: str
    title: str
    fits: bool
    inputs: Inputs
    figures: Figures
    groups: Mapping[str, int] = field(default_factory=dict)
    plan: Plan | None = None
    server: str = ""
    rooms: tuple[int, int, tuple[str, ...]] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiffRow:
    """A figure, old and new; None: unknown or not requested."""

    name: str
    unit: Unit
    old: Number | None
    new: Number | None

    @property
    def delta(self) -> Number | None:
        return None if self.old is None or self.new is None else self.new - self.old


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides, compared.

    memory    rows that add up, minus memory.missing, to the last one, memory.total; empty if a document has none
    groups    the weights by tensor group, which add up to memory.weights
    figures   everything else
    steps     effect of each input change, or None if the sides are documents
    """

    old: Side
    new: Side
    changes: tuple[InputChange, ...]
    memory: tuple[DiffRow, ...]
    groups: tuple[DiffRow, ...]
    figures: tuple[DiffRow, ...]
    steps: tuple[InputStep, ...] | None

    @property
    def rows(self) -> tuple[DiffRow, ...]:
        return (*self.memory, *self.groups, *self.figures)

    @property
    def is_equal(self) -> bool:
        return self.old.fits == self.new.fits and not any(row.old != row.new for row in self.rows)

    @property
    def worse(self) -> tuple[Worse, ...]:
        """Ways in which NEW is worse, by the rule of --exit-code."""
        worse: list[Worse] = []
        if self.old.fits and not self.new.fits:
            worse.append("fits")
        if _value(self.new, "kv.bytes_per_token") > _value(self.old, "kv.bytes_per_token"):
            worse.append("bytes_per_token")
        path = next((path for path in USERS if self._both_have(path)), None)
        if path is not None and users_of(self.new, path) < users_of(self.old, path):
            worse.append("users")
        return tuple(worse)

    def _both_have(self, path: str) -> bool:
        return self.old.figures.get(path) is not None and self.new.figures.get(path) is not None


USERS: Final = ("concurrency.users", "concurrency.max")  # checks of earlier releases have only the server's figure


def users_of(side: Side, path: str) -> int:
    """Whole users over all replicas, if the side says how many there are."""
    return int(_value(side, path)) * int(side.figures.get("concurrency.replicas") or 1)


def _value(side: Side, path: str) -> Number:
    return side.figures.get(path) or 0


@dataclass(frozen=True, slots=True)
class Difference:
    """All comparisons, and the keys that only one side has."""

    old: str
    new: str
    comparisons: tuple[Comparison, ...]
    only_old: tuple[str, ...] = ()
    only_new: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """True if nothing differs, including the inputs."""
        alike = all(comparison.is_equal and not comparison.changes for comparison in self.comparisons)
        return alike and not self.only_old and not self.only_new

    @property
    def is_worse(self) -> bool:
        return any(comparison.worse for comparison in self.comparisons)


# --- comparing --------------------------------------------------------------------------------------------------------


def difference(old_name: str, new_name: str, old: Sequence[Side], new: Sequence[Side]) -> Difference:
    """Compare sides with the same key, in the order of the new ones; a single pair is compared whatever its keys.

    Raises UsageError if nothing can be compared.
    """
    if len(old) == len(new) == 1:
        return Difference(old_name, new_name, (compare(old[0], new[0]),))
    before, after = _by_key(old_name, old), _by_key(new_name, new)
    shared = [key for key in after if key in before]
    if not shared:
        raise UsageError(
            f"{printable(old_name, 400)} and {printable(new_name, 400)}",
            f"have no plan in common ({_few(before)}; {_few(after)})",
            "compare documents of the same targets, or models, GPUs and contexts",
        )
    return Difference(
        old_name,
        new_name,
        tuple(compare(before[key], after[key]) for key in shared),
        tuple(key for key in before if key not in after),
        tuple(key for key in after if key not in before),
    )


def _by_key(name: str, sides: Sequence[Side]) -> dict[str, Side]:
    by_key: dict[str, Side] = {}
    for side in sides:
        if side.key in by_key:
            raise UsageError(
                f"{printable(name, 400)}",
                f"contains two plans for {printable(side.key, 200)}",
                "write each to a file of its own",
            )
        by_key[side.key] = side
    return by_key


def _few(keys: Mapping[str, Side]) -> str:
    names = [printable(key, 80) for key in list(keys)[:3]]
    return ", ".join(names) + (", ..." if len(keys) > 3 else "") or "none"


def compare(old: Side, new: Side) -> Comparison:
    """Compare every figure that both sides have, and their inputs."""
    steps = None
    if old.plan is not None and new.plan is not None:
        steps = attribution(old.plan, new.plan)
    changes = [change for step in steps or () for change in step.changes]
    changes += _input_changes(old, new)
    arguments = {change.name for change in changes if change.kind == "argument"}
    known = [path for path in UNITS if path in old.figures and path in new.figures]
    has_rows = all(path in known for path in MEMORY)
    return Comparison(
        old,
        new,
        tuple(change for change in changes if change.kind != "setting" or SETTINGS[change.name] not in arguments),
        tuple(_row(path, old, new) for path in known if path in MEMORY and has_rows),
        tuple(_group_rows(old, new)),
        tuple(_row(path, old, new) for path in known if path in CAPACITY or not has_rows),
        steps,
    )


def _row(path: str, old: Side, new: Side) -> DiffRow:
    return DiffRow(path, UNITS[path], old.figures[path], new.figures[path])


def _group_rows(old: Side, new: Side) -> Iterator[DiffRow]:
    if old.groups and new.groups:
        for name in dict.fromkeys((*old.groups, *new.groups)):
            yield DiffRow(f"memory.weight_groups.{name}", "bytes", old.groups.get(name, 0), new.groups.get(name, 0))


def _input_changes(old: Side, new: Side) -> Iterator[InputChange]:
    """Yield the inputs that differ; between a document and a plan, which name their inputs differently, only those that
    both name.
    """
    mixed = (old.plan is None) != (new.plan is None)
    for kind, name in dict.fromkeys((*old.inputs, *new.inputs)):
        before, after = old.inputs.get((kind, name)), new.inputs.get((kind, name))
        if before != after and not (mixed and None in (before, after)):
            yield InputChange(kind, name, before, after)


# --- a plan as a side -------------------------------------------------------------------------------------------------

# Settings derived from a GPU, a release or a model -> the argument that would set them.
SETTINGS: Final = {
    "max_model_len": "--max-model-len",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_num_seqs": "--max-num-seqs",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "kv_dtype": "--kv-cache-dtype",
    "dtype": "--dtype",
}


def plan_side(plan: Plan, key: str | None = None) -> Side:
    """Make a side from a plan, with everything that attribution needs."""
    args, context = plan.request.args, plan.capacity.max_model_len
    ranks = args.num_gpus
    name = printable(plan.request.spec.name)
    gpu = plan.request.gpu
    where = gpu_text(gpu) if ranks == 1 else f"{ranks} x {gpu_text(gpu)}"
    settings = {name: getattr(plan.settings, name) for name in SETTINGS} | {"max_model_len": context}
    rooms = plan.estimates["buffers"]
    return Side(
        key=key or f"{name} on {where}, {length_text(args.max_model_len or context)}",
        title=f"{name} on {where}, {context:,} tokens",
        fits=plan.fits,
        inputs={("setting", name): value_text(value) for name, value in settings.items()},
        figures=figures_of(plan),
        groups=plan.weight_groups,
        plan=plan,
        server=plan.request.release.label,
        rooms=(rooms.low, rooms.high, terms_of(rooms.formula)),
        notes=tuple(plan.notes),
    )


def terms_of(formula: str) -> tuple[str, ...]:
    """What a formula adds up."""
    return tuple(formula.split(" + "))


# --- documents as sides -----------------------------------------------------------------------------------------------


def document_sides(document: Mapping[str, object], where: str) -> list[Side]:
    """The sides in a kvplan document. Raise InvalidInputError naming the missing or invalid field."""
    match document.get("schema"):
        case "kvplan/plan@1":
            return [_document_side(Reader(document, where))]
        case "kvplan/plans@1":
            plans = Reader(document, where).rows("plans")
            if not plans:
                raise InvalidInputError(f"{where}", "contains no plan", "write it again with `kvplan estimate`")
            return [_document_side(plan) for plan in plans]
        case "kvplan/check@1":
            return [_target_side(target) for target in Reader(document, where).rows("targets") if target.has("figures")]
        case other:
            raise InvalidInputError(
                f"{where}",
                f"is not a document that can be compared ({printable(repr(other), 60)})",
                "use kvplan/plan@1, kvplan/plans@1 (`kvplan estimate --format json`) or kvplan/check@1 (`kvplan "
                "check --format json`)",
            )


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_BYTES


MAY_BE_NEGATIVE: Final = ("figures.headroom",)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads values of a document by path and checks that each exists and has the right type."""

    document: Mapping[str, object]
    where: str

    def value(self, path: str) -> Any:
        value: Any = self.document
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                raise self.fault(path, "is missing", "it may come from another release of kvplan; write it again")
            value = value[key]
        return value

    def has(self, path: str) -> bool:
        return self.value(path) is not None

    def fault(self, path: str, what: str, cure: str) -> InvalidInputError:
        return InvalidInputError(f"{self.where}", f"{path} {what}", f"{cure}")

    def _wrong(self, path: str, value: Any, expected: str) -> InvalidInputError:
        return self.fault(path, f"is not {expected} ({printable(repr(value), 60)})", "write the document again")

    def number(self, path: str) -> Number:
        value = self.value(path)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_BYTES:
            raise self._wrong(path, value, "a number from 0 on")
        return value

    def whole(self, path: str) -> int:
        """A whole number >= 0; headroom may be negative."""
        value = self.value(path)
        if not is_whole(value) or (value < 0 and path not in MAY_BE_NEGATIVE):
            raise self._wrong(path, value, "a whole number of that kind")
        return int(value)

    def text(self, path: str) -> str:
        value = self.value(path)
        if not isinstance(value, str):
            raise self._wrong(path, value, "text")
        return value

    def flag(self, path: str) -> bool:
        value = self.value(path)
        if not isinstance(value, bool):
            raise self._wrong(path, value, "true or false")
        return value

    def table(self, path: str) -> dict[str, Any]:
        value = self.value(path)
        if not isinstance(value, dict):
            raise self._wrong(path, value, "an object")
        return value

    def sizes(self, path: str) -> dict[str, int]:
        """An object whose values are all whole numbers, with any keys."""
        table = self.table(path)
        for key, value in table.items():
            if not is_whole(value) or value < 0:
                raise self._wrong(f"{path}.{printable(key, 60)}", value, "a whole number")
        return table

    def rows(self, path: str) -> "list[Reader]":
        value = self.value(path)
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self._wrong(path, value, "a list of objects")
        return [Reader(entry, f"{self.where}: {path}[{i}]") for i, entry in enumerate(value)]


def headroom_figures(headroom: int) -> dict[str, Number]:
    return {"memory.unused": max(0, headroom), "memory.missing": max(0, -headroom)}


def with_missing(doc: Reader) -> Reader:
    """Add `memory.missing` to a document of an earlier release, in which `memory.unused` could be negative."""
    memory = doc.table("memory")
    if "missing" in memory or not is_whole(memory.get("unused")):
        return doc
    split = {path.partition(".")[2]: size for path, size in headroom_figures(memory["unused"]).items()}
    return Reader({**doc.document, "memory": memory | split}, doc.where)


def _document_side(doc: Reader) -> Side:
    doc = with_missing(doc)
    figures = _document_figures(doc)
    groups = doc.sizes("memory.weight_groups")
    _check_sums(doc, figures, groups)
    name, gpu, count = doc.text("inputs.model.name"), doc.text("inputs.gpu.name"), doc.whole("inputs.num_gpus")
    context, stated = doc.whole("kv.max_model_len"), doc.value("inputs.args.max_model_len")
    where = printable(gpu) if count == 1 else f"{count} x {printable(gpu)}"
    return Side(
        key=f"{printable(name)} on {where}, {length_text(stated or context)}",
        title=f"{printable(name)} on {where}, {context:,} tokens",
        fits=doc.flag("fits"),
        server=printable(doc.text("inputs.engine"), 60),
        rooms=_document_rooms(doc),
        notes=tuple(printable(str(note), 400) for note in doc.value("notes")) if doc.has("notes") else (),
        inputs=dict(_document_inputs(doc)),
        figures=figures,
        groups=groups,
    )


def _document_rooms(doc: Reader) -> tuple[int, int, tuple[str, ...]] | None:
    for row in doc.rows("assumptions") if doc.has("assumptions") else ():
        if row.text("name") == "buffers":
            return row.whole("low"), row.whole("high"), terms_of(printable(row.text("formula"), 2000))
    return None


def length_text(context: object) -> str:
    """A context as in titles: 8,192 tokens."""
    return f"{context:,} tokens" if isinstance(context, int) else f"{value_text(context)} tokens"


MAY_BE_NULL: Final = ("concurrency.users",)  # documents of earlier releases lack this number
FLOATS: Final = ("concurrency.max",)


def _document_figures(doc: Reader) -> Figures:
    figures: dict[str, Number | None] = {}
    for path in UNITS:
        if path in MAY_BE_NULL and not doc.has(path):
            figures[path] = None
        else:
            figures[path] = doc.number(path) if path in FLOATS else doc.whole(path)
    return figures


def _check_sums(doc: Reader, figures: Figures, groups: Mapping[str, int]) -> None:
    *rows, missing, total = (int(figures[path] or 0) for path in MEMORY)
    if sum(rows) - missing != total:
        total_of_rows = sum(rows) - missing
        raise doc.fault(
            "memory", f"adds up to {total_of_rows:,} bytes, not to its total of {total:,}", "write it again"
        )
    if sum(groups.values()) != figures["memory.weights"]:
        raise doc.fault(
            "memory.weight_groups",
            f"adds up to {sum(groups.values()):,} bytes, not to the weights of {figures['memory.weights']:,}",
            "write it again",
        )


def _document_inputs(doc: Reader) -> Iterator[tuple[tuple[Kind, str], str | None]]:
    for key in ("name", "architecture", "model_type", "dtype", "quantization", "scheme", "num_layers", "max_model_len"):
        yield ("model", key), value_text(doc.value(f"inputs.model.{key}"))
    yield ("model", "parameters"), f"{doc.whole('parameters.total'):,}"
    yield ("model", "layers"), _layers_text(doc)
    yield ("files", "--weights-bytes"), value_text(doc.value("inputs.weights_bytes"))
    if "memory_in_use" in doc.table("inputs"):  # documents of earlier releases lack it
        yield ("gpu", "--memory-in-use"), value_text(doc.value("inputs.memory_in_use"))
    yield ("draft", "draft model"), doc.text("inputs.draft.name") if doc.has("inputs.draft") else None
    yield ("gpu", "GPU"), printable(doc.text("inputs.gpu.name"))
    yield ("gpu", "total memory"), format_gib(doc.whole("inputs.gpu.total_memory"))
    yield ("engine", "--engine"), printable(doc.text("inputs.engine"))
    known = {field.name for field in fields(EngineArgs)}
    args = doc.table("inputs.args")
    for name in (*(name for name in args if name in known), *(name for name in args if name not in known)):
        yield ("argument", "--" + printable(name, 60).replace("_", "-")), value_text(args[name])
    for name, value in doc.table("inputs.workload").items():
        yield ("workload", "--" + printable(name, 60).replace("_", "-")), value_text(value)
    for name in SETTINGS:
        yield ("setting", name), value_text(doc.value(f"inputs.settings.{name}"))


def _layers_text(doc: Reader) -> str:
    """Layers that share a block table, as text: "32 full_attention, 24 sliding_window of 1,024"."""
    parts = []
    for group in doc.rows("kv.groups"):
        window = f" of {group.whole('window'):,}" if group.has("window") else ""
        parts.append(f"{group.whole('num_layers')} {printable(group.text('kind'), 60)}{window}")
    return ", ".join(parts)


def _target_side(target: Reader) -> Side:
    return Side(
        key=printable(target.text("id"), 200),
        title=f"{printable(target.text('id'), 200)}: {printable(target.text('title'), 400)}",
        fits=target.flag("figures.fits"),
        inputs={},
        figures={
            path: target.number(f"figures.{name}") if path in FLOATS else target.whole(f"figures.{name}")
            for name, path in CHECKED.items()
            if path not in MAY_BE_NULL or target.table("figures").get(name) is not None
        }
        | headroom_figures(target.whole("figures.headroom")),
    )


# --- as sentences -----------------------------------------------------------------------------------------------------


def explanation(comparison: Comparison) -> list[str]:
    """Sentences derived from the rows: why the pool changed, and why concurrency did."""
    return [
        *_fits_words(comparison), *_token_words(comparison), *_pool_words(comparison), *_room_words(comparison),
        *_user_words(comparison),
    ]  # fmt: skip


def _fits_words(pair: Comparison) -> Iterator[str]:
    if pair.old.fits and not pair.new.fits:
        short = _value(pair.new, "deficit")
        yield "OLD fits, NEW does not" + (f": {format_size(int(short))} short" if short else "")
    elif pair.new.fits and not pair.old.fits:
        yield "NEW fits, OLD does not"


def ratio_text(old: Number, new: Number) -> str:
    """ "halves it", "makes it 4 times as large", "multiplies it by 0.75"; for positive numbers only."""
    if new * 2 == old:
        return "halves it"
    if old * 2 == new:
        return "doubles it"
    if old % new == 0:
        return f"reduces it to 1/{old // new}"
    if new % old == 0:
        return f"makes it {new // old} times as large"
    return f"multiplies it by {new / old:.4g}"


def _token_words(pair: Comparison) -> Iterator[str]:
    """Effect of each change on KV bytes per token, only if each change was planned separately."""
    path = "kv.bytes_per_token"
    for step in pair.steps or ():
        before, after = step.before[path] or 0, step.after[path] or 0
        if before and after and before != after:
            did = ratio_text(before, after)
            yield f"KV per token: {changes_text(step.changes)} {did} ({before:,} to {after:,} bytes)"


def changes_text(changes: Sequence[InputChange]) -> str:
    return " with ".join(map(change_text, changes))


def change_text(change: InputChange) -> str:
    return f"{change.name} {text_of(change.old)} -> {text_of(change.new)}"


def text_of(value: str | None) -> str:
    return "(none)" if value is None else value


def _pool_words(pair: Comparison) -> Iterator[str]:
    """The pool is the total minus the other rows: its change is the sum of theirs."""
    by_name = {row.name: int(row.delta or 0) for row in pair.memory}
    pool = by_name.pop("memory.kv_cache", 0)
    if pool and pair.old.fits and pair.new.fits:
        causes = sorted((name for name, delta in by_name.items() if delta), key=lambda name: -abs(by_name[name]))
        yield f"KV cache {signed_size(pool)}: {', '.join(_cause(name, by_name[name]) for name in causes)}"


def _room_words(pair: Comparison) -> Iterator[str]:
    """Workspaces, where a backend changed: the terms that only one side has, and what its server's rules say."""
    if not any(change.name.endswith("backend") for change in pair.changes):
        return
    for side, other, word in ((pair.old, pair.new, "OLD"), (pair.new, pair.old, "NEW")):
        if side.rooms is not None and other.rooms is not None:
            low, high, terms = side.rooms
            if own := [term for term in terms if term not in other.rooms[2]]:
                yield f"buffers of {word} ({low / GIB:.2f}-{high / GIB:.2f} GiB): {' + '.join(own)}"
        yield from (f"{word}: {note}" for note in side.notes if note not in other.notes and "workspace" in note)


def _cause(name: str, delta: int) -> str:
    subject = "the GPU has" if name == "memory.total" else f"{LABELS[name]} {'is' if name in SINGULAR else 'are'}"
    return f"{subject} {format_size(abs(delta))} {'more' if delta > 0 else 'less'}"


LABELS: Final = {
    **{name: name.partition(".")[2] for name in MEMORY},
    "memory.cuda_graphs": "CUDA graphs",
    "memory.non_torch": "non-torch",
    "memory.lora": "LoRA",
    "memory.kv_cache": "KV cache",
}
SINGULAR: Final = ("memory.non_torch", "memory.lora", "memory.unused", "memory.missing")


def signed_size(size: int) -> str:
    """ "+512 MiB", "-4 KiB", "0 B"."""
    return f"{'+' if size > 0 else '-' if size < 0 else ''}{format_size(abs(size))}"


def _user_words(pair: Comparison) -> Iterator[str]:
    rows = {row.name: row for row in pair.figures}
    users, user_bytes = rows.get("concurrency.users"), rows.get("kv.bytes_per_request")
    if users is None or not users.delta or users.old is None or users.new is None:
        return
    if user_bytes is None or user_bytes.old is None or user_bytes.new is None or not (pair.old.fits and pair.new.fits):
        yield f"{users.old:,} to {users.new:,} users"
        return
    pools = [int(_value(side, "memory.kv_cache")) for side in (pair.old, pair.new)]
    cost = f"{format_size(int(user_bytes.new))} of KV cache each, " + (
        "as before" if user_bytes.old == user_bytes.new else f"instead of {format_size(int(user_bytes.old))}"
    )
    pool = f"a pool of {format_size(pools[1])}, " + (
        "as before" if pools[0] == pools[1] else f"instead of {format_size(pools[0])}"
    )
    yield f"{users.old:,} to {users.new:,} users: {cost}, in {pool}"
