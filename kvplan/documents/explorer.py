"""What an explorer page holds: kvplan/explorer@1, every plan of some grids by the JSON paths of kvplan/plan@1."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Annotated, Any, Final, Literal, TypedDict

from kvplan.core.errors import KvplanError
from kvplan.core.records import Count
from kvplan.documents.artifact import concurrency_document, kv_document, limits_document, memory_document
from kvplan.planning.plan import MemoryBreakdown, Plan, plan, serve_command
from kvplan.planning.sweep import Grid
from kvplan.servers.words.arguments import option_words

EXPLORER: Final = "kvplan/explorer@1"
# What the page has of each part of a plan's document.
FIGURES: Final[Mapping[str, tuple[str, ...]]] = {
    "memory": ("total", "budget", *MemoryBreakdown.ROWS, "missing"),
    "kv": (
        "dtype", "bytes_per_token", "bytes_per_request", "blocks_per_request", "block_size", "num_blocks", "tokens",
    ),
    "concurrency": ("users", "users_low", "users_high", "max_num_seqs", "replicas", "max"),
}  # fmt: skip
FULL: Final = "full context"  # the mean length of requests as long as the context
ERROR: Final = "error"  # the column that says why a combination cannot be planned


class Axis(TypedDict):
    """A setting and its values, as a reader sees them; the page opens at `start`."""

    name: str
    label: str
    values: list[str]
    start: Count


class Column(TypedDict):
    """One figure of every plan. Only the axes it depends on count, the outermost first; texts are indices."""

    axes: list[Count]
    values: list[Any]


class Chart(TypedDict):
    """Every plan of one model on one server."""

    model: str
    server: str
    axes: list[Axis]
    columns: Annotated[dict[str, Column], "By JSON path in kvplan/plan@1; `error`: why there is no plan, or null."]
    texts: Annotated[list[str], "What the columns of text point into."]


class ExplorerDocument(TypedDict):
    """All that an explorer page shows; null prices: none were given."""

    schema: Literal["kvplan/explorer@1"]
    plans: Count
    users: Annotated[Count, "Users at once at which the page opens."]
    charts: list[Chart]
    prices: Annotated[dict[str, float] | None, "Dollars per GPU hour, by GPU."]


def chart(model: str, server: str, grid: Grid, axes: list[Axis]) -> Chart:
    """Plan every combination of a grid whose innermost axis is the mean length; `axes` name those of grid.sizes that
    are more than one value or have a name."""
    records = [*planned_records(grid)]
    names = dict.fromkeys(name for record in records for name in record)
    texts: dict[str, int] = {}
    columns = {
        name: packed([shared_text(record.get(name, MISSING), texts) for record in records], sizes_of(axes))
        for name in (ERROR, *names)
    }
    return {"model": model, "server": server, "axes": axes, "columns": columns, "texts": list(texts)}


def sizes_of(axes: Iterable[Axis]) -> list[int]:
    return [len(axis["values"]) for axis in axes]


def planned_records(grid: Grid) -> Iterable[dict[str, Any]]:
    """For each combination its figures by JSON path, or the error; the command is the same whatever the mean length."""
    means, command = grid.sizes[-1], ""
    for number in range(grid.count):
        if number % means == 0:
            command = ""
        try:
            answer = plan(grid.request(number))
        except KvplanError as error:
            yield {ERROR: str(error.in_words(option_words()))}
            continue
        if answer.fits and not command:
            command = shlex.join(serve_command(answer))
        yield figures(answer, command)


def figures(answer: Plan, command: str) -> dict[str, Any]:
    """What the page shows of a plan, by JSON path in its document."""
    documents: dict[str, Callable[[Plan], Any]] = {
        "memory": memory_document,
        "kv": kv_document,
        "concurrency": concurrency_document,
    }
    record: dict[str, Any] = {ERROR: None, "fits": answer.fits, "deficit": answer.deficit}
    for key, names in FIGURES.items():
        part = documents[key](answer)
        record |= {f"{key}.{name}": part[name] for name in names}
    record["inputs.num_gpus"] = answer.request.args.num_gpus
    if answer.slots is not None:
        speed = answer.slots.speed.empty
        record |= {
            "slots.gpu_layers": answer.slots.gpu_layers,
            "slots.speed.empty.likely": speed and round(speed.likely, 1),
        }
    record["limits.0.text"] = limits_document(answer)[0]["text"]
    record["flags.command"] = command if answer.fits else None
    return record


# --- columns ----------------------------------------------------------------------------------------------------------

MISSING: Final = object()  # of a combination that cannot be planned


def shared_text(value: Any, texts: dict[str, int]) -> Any:
    """A text as its index among all of them; other values as they are."""
    return texts.setdefault(value, len(texts)) if isinstance(value, str) else value


def packed(values: Sequence[Any], sizes: Sequence[int]) -> Column:
    """The values without the axes that change none of them; a missing one is equal to all."""
    axes, remaining, shape = list(range(len(sizes))), list(values), list(sizes)
    for axis in range(len(sizes)):
        place = axes.index(axis)
        merged = without(remaining, shape, place)
        if merged is not None:
            remaining = merged
            del axes[place], shape[place]
    return {"axes": axes, "values": [None if value is MISSING else value for value in remaining]}


def without(values: Sequence[Any], shape: Sequence[int], axis: int) -> list[Any] | None:
    """The values with one axis less; None where two that differ in that axis alone are different."""
    size, inner = shape[axis], prod(shape[axis + 1 :])
    merged: list[Any] = []
    for start in range(0, len(values), size * inner):
        for offset in range(start, start + inner):
            line = [value for value in values[offset : offset + size * inner : inner] if value is not MISSING]
            if any(value != line[0] or type(value) is not type(line[0]) for value in line[1:]):
                return None
            merged.append(line[0] if line else MISSING)
    return merged
