"""Explain why two plans differ: change one input at a time and record the effect on every figure.

Inputs change in a fixed order, as far as a plan exists for each step: the model's facts in the order of the new
config.json, its weight files, the draft model, the GPU, the release, the engine's arguments, the workload. Each step
is planned again, so the effects add up to the whole difference exactly; another order can change a step's share, but
not the sum.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import combinations, islice
from typing import Any, Final, Literal

from kvplan.core.errors import KvplanError
from kvplan.core.files import printable
from kvplan.core.units import format_gib
from kvplan.hardware.gpu import GIVEN, GpuSpec
from kvplan.models.hf_config import read_config
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Load, MemoryBreakdown, Plan, Request, plan
from kvplan.servers.words.arguments import EngineArgs

Kind = Literal["model", "files", "draft", "gpu", "engine", "argument", "setting", "workload"]
Number = int | float
Figures = Mapping[str, Number | None]  # path in kvplan/plan@1 -> value; None: not applicable

ORDER_TEXT: Final = (
    "inputs are changed one after the other, in the order the steps are listed; the steps add up to the difference"
)

Unit = Literal["bytes", "bytes/token", "tokens", "blocks", "requests", "replicas"]
# Path of kvplan/plan@1 -> its unit. The memory rows minus memory.missing add up to memory.total.
MEMORY: Final[dict[str, Unit]] = {f"memory.{row}": "bytes" for row in (*MemoryBreakdown.ROWS, "missing", "total")}
CAPACITY: Final[dict[str, Unit]] = {
    "kv.bytes_per_token": "bytes/token",
    "kv.bytes_per_request": "bytes",
    "kv.state_bytes_per_request": "bytes",
    "kv.num_blocks": "blocks",
    "kv.tokens": "tokens",
    "concurrency.max": "requests",
    "concurrency.users": "requests",
    "concurrency.replicas": "replicas",
    "deficit": "bytes",
}

MOST_MOVES = 100  # keys of a config changed one by one; with more differences they are two models
MOST_TRIED = 300  # groups of changes to try for one step before all remaining ones become one step
WHOLE_MODEL = ("model_type",)  # selects the reader: a config with only this key changed would be neither model


@dataclass(frozen=True, slots=True)
class InputChange:
    """An input that differs, as text; None: not set on that side."""

    kind: Kind
    name: str
    old: str | None
    new: str | None


@dataclass(frozen=True, slots=True)
class InputStep:
    """Inputs changed together because no plan exists in between, with every figure before and after."""

    changes: tuple[InputChange, ...]
    before: Figures
    after: Figures

    @property
    def deltas(self) -> dict[str, Number]:
        """The step's effect on the figures that it changed; None counts as 0."""
        deltas = {path: (after or 0) - (self.before[path] or 0) for path, after in self.after.items()}
        return {path: delta for path, delta in deltas.items() if delta}


def figures_of(plan_: Plan) -> Figures:
    """Every compared figure, by its path in kvplan/plan@1."""
    memory, capacity, answer = plan_.memory, plan_.capacity, plan_.concurrency
    return {
        **{path: getattr(memory, path.partition(".")[2]) for path in MEMORY},
        "kv.bytes_per_token": plan_.bytes_per_token,
        "kv.bytes_per_request": plan_.bytes_per_request,
        "kv.state_bytes_per_request": plan_.state_bytes,
        "kv.num_blocks": capacity.num_blocks if plan_.fits else 0,
        "kv.tokens": capacity.tokens if plan_.fits else 0,
        "concurrency.max": answer.max,
        "concurrency.users": answer.users,
        "concurrency.replicas": answer.replicas,
        "deficit": plan_.deficit,
    }


def attribution(old: Plan, new: Plan) -> tuple[InputStep, ...]:
    """Steps from one plan's request to the other's, including those that change no figure.

    An input that cannot be changed on its own waits for those after it, then changes with as few others as possible.
    """
    current, before = old.request, figures_of(old)
    left, steps = list(moves(old.request, new.request)), []
    while left:
        for group in _groups(len(left)):
            if len(group) == len(left):  # the last step ends at the requested input, whatever was read before
                between, after = new.request, figures_of(new)
                break
            tried = _tried(current, [left[index] for index in group])
            if tried is not None:
                between, after = tried
                break
        steps.append(InputStep(tuple(change for index in group for change in left[index].changes), before, after))
        left = [move for index, move in enumerate(left) if index not in group]
        current, before = between, after
    return tuple(steps)


def _groups(count: int) -> Iterator[tuple[int, ...]]:
    """Yield groups of the remaining moves to try: each on its own, in order, then small groups, then all."""
    together = (group for size in range(1, count) for group in combinations(range(count), size))
    yield from islice(together, count + MOST_TRIED)
    yield tuple(range(count))


@dataclass(frozen=True, slots=True)
class Move:
    """One step toward the new request."""

    changes: tuple[InputChange, ...]
    apply: Callable[[Request], Request]


def _tried(request: Request, taken: list[Move]) -> tuple[Request, Figures] | None:
    """The request with these changes and its figures, or None if they alone give no readable model or no plan."""
    try:
        for move in taken:
            request = move.apply(request)
        return request, figures_of(plan(request))
    except KvplanError:
        return None


def moves(old: Request, new: Request) -> Iterator[Move]:
    """Yield the moves from one request to the other, input by input, in the order stated in this module's docstring."""
    yield from _model_moves(old.spec, new.spec)
    if old.memory_in_use != new.memory_in_use:
        change = InputChange("gpu", "--memory-in-use", _size(old.memory_in_use), _size(new.memory_in_use))
        yield Move((change,), lambda base: replace(base, memory_in_use=new.memory_in_use))
    if old.weights_bytes != new.weights_bytes:
        change = InputChange("files", "--weights-bytes", _size(old.weights_bytes), _size(new.weights_bytes))
        yield Move((change,), lambda base: replace(base, weights_bytes=new.weights_bytes))
    if old.checkpoint != new.checkpoint:
        change = InputChange("files", "weight files", _files(old), _files(new))
        yield Move((change,), lambda base: replace(base, checkpoint=new.checkpoint))
    if not same_model(old.draft, new.draft):
        change = InputChange("draft", "draft model", _name(old.draft), _name(new.draft))
        yield Move((change,), lambda base: replace(base, draft=new.draft, draft_checkpoint=new.draft_checkpoint))
    if old.gpu != new.gpu:
        change = InputChange("gpu", "GPU", gpu_text(old.gpu), gpu_text(new.gpu))
        yield Move((change,), lambda base: replace(base, gpu=new.gpu))
    if old.measured != new.measured:
        change = InputChange("gpu", "--calibration", _measured(old), _measured(new))
        yield Move((change,), lambda base: replace(base, measured=new.measured))
    if old.release != new.release:
        change = InputChange("engine", "--engine", old.release.label, new.release.label)
        yield Move((change,), lambda base: replace(base, release=new.release))
    yield from _argument_moves(old.args, new.args)
    yield from _workload_moves(old.load, new.load)


def _argument_moves(old: EngineArgs, new: EngineArgs) -> Iterator[Move]:
    for field in fields(EngineArgs):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before != after:
            change = InputChange("argument", "--" + field.name.replace("_", "-"), value_text(before), value_text(after))
            yield Move((change,), _argument_move(field.name, after))


def _argument_move(name: str, value: Any) -> Callable[[Request], Request]:
    return lambda base: replace(base, args=replace(base.args, **{name: value}))


def _workload_moves(old: Load, new: Load) -> Iterator[Move]:
    for field in fields(Load):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before != after:
            if field.name == "lengths":
                texts = (before and before.source, after and after.source)
            else:
                texts = (value_text(before), value_text(after))
            change = InputChange("workload", "--" + field.name.replace("_", "-"), *texts)
            yield Move((change,), _workload_move(field.name, after))


def _workload_move(name: str, value: Any) -> Callable[[Request], Request]:
    return lambda base: replace(base, load=replace(base.load, **{name: value}))


# --- the model --------------------------------------------------------------------------------------------------------


def same_model(old: ModelSpec | None, new: ModelSpec | None) -> bool:
    if old is None or new is None:
        return old is new
    return old is new or bool(old.config and old.config == new.config)


def _model_moves(old: ModelSpec, new: ModelSpec) -> Iterator[Move]:
    if same_model(old, new):
        return
    changed = config_changes(old.config, new.config)
    is_split = old.config and new.config and len(changed) <= MOST_MOVES
    if not is_split or any(path[-1] in WHOLE_MODEL for path in changed):
        change = InputChange("model", "model", printable(old.name), printable(new.name))
        yield Move((change,), lambda base: replace(base, spec=new))
        return
    for path in changed:
        change = InputChange("model", ".".join(path), *(value_text(_at(spec.config, path)) for spec in (old, new)))
        yield Move((change,), _config_move(path, new))


def _config_move(path: tuple[str, ...], new: ModelSpec) -> Callable[[Request], Request]:
    def apply(base: Request) -> Request:
        config = with_key(base.spec.config, path, new.config)
        # An unknown type was accepted for both or for neither, because both have the same one.
        return replace(
            base,
            spec=read_config(
                config, base.spec.name, base.spec.served_name, assume_dense=True, text_only=base.spec.text_only
            ),
        )

    return apply


_ABSENT: Final = object()


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Paths of the keys that differ, in the order of the new config, then of the old one; nested objects are compared
    key by key, lists as a whole.
    """
    paths: list[tuple[str, ...]] = []
    for key in dict.fromkeys((*new, *old)):
        before, after = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if isinstance(before, dict) and isinstance(after, dict):
            paths += [(key, *tail) for tail in config_changes(before, after)]
        elif before != after or type(before) is not type(after):
            paths.append((key,))
    return paths


def with_key(config: Mapping[str, Any], path: tuple[str, ...], source: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `config` with one key as in `source`, or without it if `source` lacks it."""
    key, *tail = path
    changed = dict(config)
    if tail:
        changed[key] = with_key(config[key], tuple(tail), source[key])
    elif key in source:
        changed[key] = source[key]
    else:
        del changed[key]
    return changed


def _at(config: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = config
    for key in path:
        value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
    return value


# --- as text ----------------------------------------------------------------------------------------------------------


def value_text(value: Any) -> str | None:
    """Format a value as a user would type it, shortened if long; None: not given."""
    match value:
        case None:
            return None
        case str():
            return printable(value, 100)
        case _ if value is _ABSENT:
            return None
        case _:
            return printable(json.dumps(value), 100)


def gpu_text(gpu: GpuSpec) -> str:
    """ "h100-80g", with its memory if that was given."""
    return f"{gpu.name} of {format_gib(gpu.total_memory)}" if gpu.total_memory_kind == GIVEN else gpu.name


def _size(size: int | None) -> str | None:
    return None if size is None else f"{size:,} bytes"


def _name(spec: ModelSpec | None) -> str | None:
    return None if spec is None else printable(spec.name)


def _files(request: Request) -> str | None:
    checkpoint = request.checkpoint
    return (
        None
        if checkpoint is None
        else f"{len(checkpoint.tensors):,} tensors of {checkpoint.total_bytes:,} bytes ({checkpoint.format})"
    )


def _measured(request: Request) -> str | None:
    return ", ".join(f"{name} {measurement.likely:,} B" for name, measurement in request.measured.items()) or None
