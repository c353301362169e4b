"""What an explorer page holds: kvplan/explorer@1, every plan of some grids by the JSON paths of kvplan/plan@1."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Annotated, Any, Final, Literal, TypedDict

from kvplan.core.errors import KvplanError
from kvplan.core.records import Count
from kvplan.documents.artifact import concurrency_document, kv_document, limits_of, memory_document
from kvplan.planning.plan import Load, MemoryBreakdown, Plan, Request, plan, serve_command, with_load
from kvplan.planning.sweep import Grid
from kvplan.servers.words.arguments import option_words

EXPLORER: Final = "kvplan/explorer@1"
# What the page has of each part of a plan's document.
FIGURES: Final[Mapping[str, tuple[str, ...]]] = {
    "memory": ("total", "budget", *MemoryBreakdown.ROWS, "missing"),
    "kv": (
        "dtype", "bytes_per_token", "bytes_per_request", "blocks_per_request", "block_size", "num_blocks", "tokens",
    ),
    "concurrency": ("max_num_seqs", "replicas", "max"),
}  # fmt: skip
FULL: Final = "full context"  # the mean length of requests as long as the context
ERROR: Final = "error"  # the column that says why a combination cannot be planned
# What the mean length of requests changes: the other columns are of the server.
BY_LOAD: Final = (ERROR, "concurrency.users", "concurrency.users_low", "concurrency.users_high", "limits.0.text")
Record = dict[str, Any]  # figures of a plan, by JSON path


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


def chart(model: str, server_label: str, grid: Grid, axes: list[Axis]) -> Chart:
    """Plan every combination of a grid whose innermost axis is the mean length; `axes` name those of grid.sizes that
    are more than one value or have a name."""
    by_mean = [replace(grid.requests[0].load, mean_tokens=tokens) for tokens in grid.means]
    servers: list[Record] = []
    loads: list[Record] = []
    for start in range(0, grid.count, len(grid.means)):
        server, of_means = records_from(grid, start, by_mean)
        servers.append(server)
        loads += of_means
    texts: dict[str, int] = {}
    sizes = sizes_of(axes)
    columns = {}
    for name in (ERROR, *dict.fromkeys(name for record in (*servers, *loads) for name in record)):
        of_load = name in BY_LOAD
        values = [shared_text(record.get(name, MISSING), texts) for record in (loads if of_load else servers)]
        columns[name] = packed(values, sizes if of_load else sizes[:-1])
    return {"model": model, "server": server_label, "axes": axes, "columns": columns, "texts": list(texts)}


def sizes_of(axes: Iterable[Axis]) -> list[int]:
    return [len(axis["values"]) for axis in axes]


def records_from(grid: Grid, start: int, by_mean: Sequence[Load]) -> tuple[Record, list[Record]]:
    """Figures by JSON path from combination `start` on, whose mean lengths follow one another: those of the server,
    which is planned once, and for each mean length those that it changes, or the error.
    """
    try:
        base = plan(grid.request(start + len(by_mean) - 1))  # at the full context
    except KvplanError:
        return {}, [{ERROR: error_of(plan, grid.request(start + place))} for place in range(len(by_mean))]
    loads = []
    for load in by_mean:
        try:
            loads.append(load_figures(base if load == base.request.load else with_load(base, load)))
        except KvplanError as error:
            loads.append({ERROR: in_words(error)})
    return figures(base), loads


def error_of(function: Callable[[Request], object], request: Request) -> str | None:
    try:
        function(request)
    except KvplanError as error:
        return in_words(error)
    return None


def in_words(error: KvplanError) -> str:
    return str(error.in_words(_options()))


_options = cache(option_words)


def load_figures(answer: Plan) -> Record:
    """What the mean length changes."""
    users = answer.concurrency
    return {
        ERROR: None,
        "concurrency.users": users.users,
        "concurrency.users_low": users.users_low,
        "concurrency.users_high": users.users_high,
        "limits.0.text": next(limits_of(answer))[1],
    }


def figures(answer: Plan) -> Record:
    """What the page shows of a plan whatever the mean length, by JSON path in its document."""
    documents: dict[str, Callable[[Plan], Any]] = {
        "memory": memory_document,
        "kv": kv_document,
        "concurrency": concurrency_document,
    }
    record: Record = {"fits": answer.fits, "deficit": answer.deficit}
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
    record["flags.command"] = shlex.join(serve_command(answer)) if answer.fits else None
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
    is_mixed = len({*map(type, values)} & {bool, int, float}) > 1  # JSON tells 1, 1.0 and true apart
    for start in range(0, len(values), size * inner):
        first = values[start : start + inner]
        for offset in range(start + inner, start + size * inner, inner):
            line = values[offset : offset + inner]
            if line == first and not is_mixed:
                continue
            known = [(a, b) for a, b in zip(first, line, strict=True) if a is not MISSING and b is not MISSING]
            if any(a != b or type(a) is not type(b) for a, b in known):
                return None
            first = [b if a is MISSING else a for a, b in zip(first, line, strict=True)]
        merged += first
    return merged
