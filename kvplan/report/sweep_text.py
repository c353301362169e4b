"""A sweep's rows as CSV and JSON, written in parts, and as a table of the columns that vary."""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvplan.core.files import printable
from kvplan.core.table import Markdown, Table
from kvplan.core.units import format_bytes, format_gib, plural
from kvplan.planning.sweep import Grid, SweepRow
from kvplan.report.console import format_kib
from kvplan.report.drawing import Figure, bars
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import Part, line
from kvplan.report.page import Block, bold
from kvplan.servers.base import terms_of

SWEEP = "kvplan/sweep@1"
MOST_REASONS = 1_000  # distinct reasons to count
SHOWN_REASONS = 3

Key = Callable[[SweepRow], tuple[Any, ...]]


# --- part by part -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Tally:
    """Number of combinations of each kind, why some are impossible, and why servers refuse others."""

    fitting: int = 0
    short: int = 0
    impossible: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, rows: Iterable[SweepRow]) -> None:
        for row in rows:
            if row.fits:
                self.fitting += 1
            elif row.is_possible:
                self.short += 1
                if row.refused_by == "unsupported":
                    count_reason(self.refusals, row.reason)
            else:
                self.impossible += 1
                count_reason(self.reasons, row.reason)

    @property
    def combinations(self) -> int:
        return self.fitting + self.short + self.impossible


def count_reason(reasons: Counter[str], reason: str | None) -> None:
    assert reason is not None
    if reason in reasons or len(reasons) < MOST_REASONS:
        reasons[reason] += 1


def json_head(prices: str | None, *, pareto: bool) -> str:
    head = {"schema": SWEEP, "prices": prices, "pareto": pareto}
    return json.dumps(head)[:-1] + ', "rows": ['


def json_rows(rows: Iterable[SweepRow], *, first: bool) -> str:
    """One line per row; `first`: no row precedes."""
    encode = json.JSONEncoder(allow_nan=False).encode
    lines = [encode(dict(zip(SweepRow._fields, row, strict=True))) for row in rows]
    if not lines:
        return ""
    return ("\n" if first else ",\n") + ",\n".join(lines)


def json_tail(tally: Tally, alike: int = 0) -> str:
    names = ("combinations", "fitting", "short", "impossible")
    counts = {name: getattr(tally, name) for name in names} | {"alike": alike}
    return "\n], " + json.dumps(counts)[1:] + "\n"


# --- the best of them -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Best:
    """The first `limit` rows by a key, without impossible combinations."""

    limit: int
    key: Key
    rows: list[SweepRow] = field(default_factory=list)

    def add(self, rows: Iterable[SweepRow]) -> None:
        possible = [row for row in rows if row.is_possible]
        self.rows = heapq.nsmallest(self.limit, [*self.rows, *possible], key=self.key)


def key_of(sort: str, models: Sequence[str]) -> Key:
    """Sort key of a table: fitting rows first, then by context, or by a figure, the largest first."""
    order = {name: i for i, name in enumerate(models)}
    match sort:
        case "users":
            return lambda row: (not row.fits, -(row.users or 0), row.num_gpus)
        case "users-per-gpu":
            return lambda row: (not row.fits, -(row.users_per_gpu or 0), row.num_gpus)
        case "users-per-dollar":
            return lambda row: (not row.fits, -(row.users_per_dollar or 0), row.num_gpus)
    return lambda row: (
        not row.fits,
        order[row.model],
        row.max_model_len or 0,
        row.mean_tokens or 0,
        -(row.users or 0),
        row.num_gpus,
        row.price_per_hour or 0.0,
    )


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its header, the field whose values vary, and the cell's text."""

    header: str
    field: str
    text: Callable[[SweepRow], str]


def count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def stored(row: SweepRow) -> str:
    return row.quantization or row.file_type or "as stored"


AXES = (
    Column("model", "model", lambda row: printable(row.model)),
    Column("GPU", "gpu", lambda row: row.gpu),
    Column("engine", "engine", lambda row: row.engine),
    Column("weights in", "quantization", stored),
    Column("dtype", "dtype", lambda row: row.dtype),
    Column("context", "max_model_len", lambda row: count(row.max_model_len)),
    Column("mean", "mean_tokens", lambda row: count(row.mean_tokens)),
    Column("TP", "tensor_parallel_size", lambda row: str(row.tensor_parallel_size)),
    Column("PP", "pipeline_parallel_size", lambda row: str(row.pipeline_parallel_size)),
    Column("DP", "data_parallel_size", lambda row: str(row.data_parallel_size)),
    Column("PCP", "prefill_context_parallel_size", lambda row: str(row.prefill_context_parallel_size)),
    Column("DCP", "decode_context_parallel_size", lambda row: str(row.decode_context_parallel_size)),
    Column("KV dtype", "kv_cache_dtype", lambda row: row.kv_dtype or row.kv_cache_dtype),
    Column("utilization", "gpu_memory_utilization", lambda row: f"{row.gpu_memory_utilization}"),
    Column("seqs", "max_num_seqs", lambda row: count(row.max_num_seqs)),
    Column("batched tokens", "max_num_batched_tokens", lambda row: count(row.max_num_batched_tokens)),
    Column("draft tokens", "num_speculative_tokens", lambda row: count(row.num_speculative_tokens)),
    Column("block", "block_size", lambda row: count(row.block_size)),
)
LEFT = ("model", "GPU", "engine", "weights in", "dtype")


def varying(grid: Grid) -> list[Column]:
    """Columns of the axes that have more than one value."""
    models, gpus, contexts = grid.shape
    sizes = {
        "model": models,
        "gpu": gpus,
        "max_model_len": contexts,
        "engine": len(grid.releases),
        "mean_tokens": len(grid.means),
        **{name: len(values) for name, values in grid.arguments.items()},
    }
    return [column for column in AXES if sizes.get(column.field, 1) > 1]


def figures(row: SweepRow, *, prices: bool) -> list[str]:
    spread = "-"
    if row.fits and row.users_low is not None and row.users_high is not None:
        spread = f"{row.users_low:,}-{row.users_high:,}"
    per_gpu = "-" if not row.fits else f"{row.users_per_gpu:,.1f}"
    texts = [
        format_kib(row.kv_bytes_per_token or 0),
        format_gib(row.weights or 0),
        str(row.num_gpus),
        count(row.users),
        spread,
        per_gpu,
    ]
    if prices:
        texts.append("-" if row.price_per_hour is None else f"{row.price_per_hour:,.2f}")
        texts.append("-" if not row.users_per_dollar else f"{row.users_per_dollar:,.1f}")
    return [*texts, verdict(row)]


def verdict(row: SweepRow) -> str:
    if not row.fits and row.refused_by is not None:
        return "does not start"
    if not row.fits:
        return f"{format_bytes(row.deficit or 0)} short"
    if (row.concurrency_low or 0) < 1:
        return terms_of(row.engine).risk_row
    if row.num_layers is not None and row.gpu_layers is not None and row.gpu_layers < row.num_layers:
        return f"yes, {row.gpu_layers} of {row.num_layers} layers on GPUs" if row.gpu_layers else "yes, on the host"
    if row.host_experts:
        return f"yes, the experts of {row.host_experts} layers on the host"
    max_seqs = row.max_num_seqs or 0
    return f"yes, {max_seqs:,} at once" if (row.pool_users or 0) > max_seqs else "yes"


def headers(*, prices: bool) -> list[str]:
    cost = ["$/h", "users per $/h"] if prices else []
    return ["KV per token", "weights", "GPUs", "users", "range", "per GPU", *cost, "fits"]


def subject(grid: Grid, rows: Sequence[SweepRow]) -> str:
    """What all rows have in common: "llama-3.1-8b on a100-80g at 32,768 tokens"."""
    first = grid.requests[0]
    models, gpus, contexts = grid.shape
    text = printable(first.spec.name) if models == 1 else f"{models} models"
    types = {row.file_type for row in rows}
    text += f" as {types.pop()}" if len(types) == 1 and None not in types else ""
    text += f" on {first.gpu.name}" if gpus == 1 else f" on {gpus} GPUs"
    fixed = {row.max_model_len for row in rows}
    if contexts == 1 and len(fixed) == 1:
        text += f" at {count(fixed.pop())} tokens"
    mean = first.load.mean_tokens
    if mean is not None and len(grid.means) < 2:
        text += f", {mean:,} on average"
    if first.load.lengths is not None:
        text += f", lengths {printable(first.load.lengths.source)}"
    return text


def headline(grid: Grid, rows: Sequence[SweepRow], tally: Tally) -> str:
    fit = "fits" if tally.fitting == 1 else "fit"
    text = f"{tally.fitting:,} of {plural(tally.combinations, 'combination')} {fit}: {subject(grid, rows)}"
    return f"{text} {only_refusal(tally)}".strip()


def only_refusal(tally: Tally) -> str:
    """The reason for which no combination starts; empty if there are several, or other combinations."""
    reasons = list(tally.refusals.items())
    return reasons[0][0] if len(reasons) == 1 and reasons[0][1] == tally.combinations else ""


@dataclass(frozen=True, slots=True)
class Shown:
    """The rows shown of a sweep, and a count of the others."""

    grid: Grid
    rows: Sequence[SweepRow]
    tally: Tally
    left_out: int
    pareto: bool
    alike: int = 0

    @property
    def axes(self) -> list[Column]:
        """The columns that vary; of those that servers choose by themselves, too."""
        axes = varying(self.grid)
        possible = [row for row in self.rows if row.is_possible]
        mixed = {
            "quantization": len({stored(row) for row in possible}) > 1,
            "max_model_len": len({row.max_model_len for row in possible}) > 1,
        }
        return [column for column in AXES if column in axes or mixed.get(column.field)]

    @property
    def table(self) -> Table:
        axes, prices = self.axes, bool(self.grid.prices)
        cells = ([*(column.text(row) for column in axes), *figures(row, prices=prices)] for row in self.rows)
        left = sum(column.header in LEFT for column in axes)
        return Table.of([*(column.header for column in axes), *headers(prices=prices)], cells, left=left)

    @property
    def title(self) -> str:
        return headline(self.grid, self.rows, self.tally)

    def parts(self) -> list[Part]:
        """The rows, with their common values above and a summary of the others below."""
        parts: list[Part] = [line(f"{self.title}; Pareto-optimal rows:" if self.pareto else self.title, "bold"), line()]
        parts += [self.table] if self.rows else []
        return parts + [line(text) for text in footer(self.tally, self.left_out, self.alike)]

    def page(self) -> list[Block]:
        parts: list[Block] = [Markdown(f"{bold(self.title)}{'; Pareto-optimal rows:' if self.pareto else ''}")]
        parts += [self.table] if self.rows else []
        return parts + [text.strip() for text in footer(self.tally, self.left_out, self.alike) if text]

    def answer(self, document: Callable[[], Any]) -> CommandAnswer:
        """The answer for formats that are not written row by row."""
        rows = lambda: Table.of(SweepRow._fields, self.rows)  # noqa: E731
        servers = [row.engine for row in self.rows]
        return CommandAnswer(lambda _: self.parts(), document, rows, self.page, self.figures, servers)

    def figures(self) -> list[Figure]:
        """Number of users that each of the rows serves."""
        axes = self.axes
        rows = (
            (", ".join(column.text(row) for column in axes), row.users or 0, plural(row.users or 0, "user"))
            for row in self.rows
        )
        return bars("Users at once", rows)


def footer(tally: Tally, left_out: int, alike: int) -> list[str]:
    texts = [f"… and {left_out:,} more: --format csv"] if left_out else []
    if alike:
        others = "1 other combination holds" if alike == 1 else f"{alike:,} other combinations hold"
        texts.append(f"{others} the same users on the same GPUs with flags further from the defaults.")
    if tally.refusals and not only_refusal(tally):
        texts += reason_lines("refused by the server whatever the memory", tally.refusals.total(), tally.refusals)
    if tally.impossible:
        texts += reason_lines("not possible", tally.impossible, tally.reasons)
    return texts


def reason_lines(what: str, number: int, reasons: Counter[str]) -> list[str]:
    subject = "1 combination is" if number == 1 else f"{number:,} combinations are"
    texts = ["", f"{subject} {what}:"]
    texts += [f"  {number:,} x {printable(text, 300)}" for text, number in reasons.most_common(SHOWN_REASONS)]
    more = len(reasons) - SHOWN_REASONS
    return texts + ([f"  and {plural(more, 'other reason')}: --format csv"] if more > 0 else [])
