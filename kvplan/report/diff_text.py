"""A comparison on one screen, as Markdown and as CSV, with the numbers of kvplan/diff@1."""

from collections.abc import Iterator, Sequence

from kvplan.core.table import Markdown, Table, markdown_text
from kvplan.core.units import GIB, format_gib, format_size, plural
from kvplan.documents.diff import diff_document
from kvplan.planning.attribute import InputChange, InputStep, Kind, Number
from kvplan.planning.diff import (
    LABELS,
    Comparison,
    Difference,
    DiffRow,
    Side,
    change_text,
    changes_text,
    explanation,
    signed_size,
    text_of,
    users_of,
)
from kvplan.report.drawing import Bar, Bars, Figure, Piece
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import Line, Paragraph, Part, line
from kvplan.report.page import Block, bullets, size_of
from kvplan.report.policy_text import MAX_COMMENT_BYTES, NOTE_BYTES

NAMES = {
    **LABELS,
    "kv.bytes_per_token": "KV per token",
    "kv.bytes_per_request": "KV per user",
    "kv.state_bytes_per_request": "states per user",
    "kv.num_blocks": "blocks",
    "kv.tokens": "tokens",
    "concurrency.max": "max concurrency",
    "concurrency.users": "users",
    "concurrency.replicas": "replicas",
    "deficit": "short by",
}
KIND_TITLES: dict[Kind, str] = {
    "model": "model",
    "files": "weight files",
    "draft": "draft model",
    "gpu": "GPU",
    "engine": "release",
    "argument": "engine arguments",
    "workload": "workload",
    "setting": "derived",
}
WORSE = {
    "fits": "NEW does not fit, but OLD does",
    "bytes_per_token": "more KV cache per token",
    "users": "fewer users with NEW",
}
# Columns of the table of steps; the document has every figure.
STEP_FIGURES = ("memory.weights", "memory.kv_cache", "kv.bytes_per_token", "kv.tokens", "concurrency.users")
NOT_PARTS = ("memory.total", "memory.budget", "memory.missing")
MOST_NAMES = 10  # of a list on screen
MOST_KEYS = 100  # of a list in Markdown
SMALL = GIB // 100  # bytes below which two decimals of a GiB are meaningless


# --- numbers ----------------------------------------------------------------------------------------------------------


def value_text(row: DiffRow, value: Number | None) -> str:
    match value:
        case None:
            return "-"
        case int() if row.unit == "bytes" and row.name.startswith("memory.") and abs(value) >= SMALL:
            return format_gib(value)
        case int() if row.unit.startswith("bytes"):
            return format_size(value)
        case int():
            return f"{value:,}"
        case _:
            return f"{value:,.2f}"


def delta_text(row: DiffRow) -> str:
    """ "-512 MiB (-3.3%)"; "=" if nothing changed."""
    if row.delta is None:
        return ""
    if row.delta == 0:
        return "="
    share = 100 * row.delta / abs(row.old) if row.old else 0.0
    share_text = f" ({share:+,.1f}%)" if 0.05 <= abs(share) < 1e6 else ""  # rounds to 0, or is too large to be useful
    return number_delta(row.unit, row.delta) + share_text


def number_delta(unit: str, delta: Number) -> str:
    if not delta:
        return ""
    if unit.startswith("bytes"):
        return signed_size(int(delta))
    return f"{delta:+,}" if isinstance(delta, int) else f"{delta:+,.2f}"


def row_cells(row: DiffRow) -> tuple[str, str, str, str]:
    name = NAMES.get(row.name, f"- {row.name.rpartition('.')[2].replace('_', ' ')}")
    return name, value_text(row, row.old), value_text(row, row.new), delta_text(row)


def memory_rows(pair: Comparison) -> Iterator[DiffRow]:
    """Rows that add up, with the weights' changed groups below them; rows with 0 on both sides are omitted."""
    for row in pair.memory:
        if row.old or row.new:
            yield row
        if row.name == "memory.weights":
            yield from (group for group in pair.groups if group.delta)


def figure_rows(pair: Comparison) -> Iterator[DiffRow]:
    """All other figures that either side has; replicas and missing memory only if relevant."""
    for row in pair.figures:
        has_value = row.delta if row.name == "concurrency.replicas" else (row.old or row.new)
        if has_value or row.name in ("kv.bytes_per_token", "concurrency.users"):
            yield row


def effects(steps: Sequence[InputStep]) -> tuple[list[InputStep], list[InputChange]]:
    """Steps that changed a figure, and the changes that did not change any."""
    without = [change for step in steps if not step.deltas for change in step.changes]
    return [step for step in steps if step.deltas], without


def step_cells(step: InputStep, units: dict[str, str]) -> tuple[str, ...]:
    deltas = step.deltas
    return changes_text(step.changes), *(number_delta(units[path], deltas.get(path, 0)) for path in STEP_FIGURES)


def _units(pair: Comparison) -> dict[str, str]:
    return {row.name: row.unit for row in pair.rows}


def _sum_cells(pair: Comparison) -> tuple[str, ...]:
    rows = {row.name: row for row in pair.rows}
    return "all together", *(number_delta(rows[path].unit, rows[path].delta or 0) for path in STEP_FIGURES)


STEP_TITLES = ("one change at a time", *(NAMES[path] for path in STEP_FIGURES))


# --- on the screen ----------------------------------------------------------------------------------------------------


def shapes(result: Difference) -> CommandAnswer:
    """The answer for each format."""
    servers = [side.server for pair in result.comparisons for side in (pair.old, pair.new) if side.server]
    return CommandAnswer.of(result, diff_lines, diff_document, diff_table, diff_page, memory_bars, servers)


def diff_lines(result: Difference) -> list[Part]:
    """Lines of the answer, then of each comparison, then what only one side has."""
    if len(result.comparisons) == 1 and not lists(result) and not result.comparisons[0].changes:
        [pair] = result.comparisons
        if pair.is_equal:
            return [line(f"No difference: {title(pair)}", "bold")]
    is_worse = any(pair.worse for pair in result.comparisons)
    parts: list[Part] = [line(answer_text(result), "bold red" if is_worse else "bold")]
    for pair in telling(result):
        parts += [line(), *_comparison_lines(pair)]
    for heading, keys in lists(result):
        parts += [*([line()] if parts else []), line(heading, "bold"), *(line(f"  {key}") for key in listed(keys))]
    return parts


def listed(keys: Sequence[str]) -> list[str]:
    """Names that fit on a screen, and the number of the others."""
    more = len(keys) - MOST_NAMES
    return [*keys] if more < 2 else [*keys[:MOST_NAMES], f"and {more:,} more"]


def telling(result: Difference) -> list[Comparison]:
    """The comparisons to show; if there are several, those without a difference are only listed."""
    differ = [pair for pair in result.comparisons if not pair.is_equal or pair.changes]
    return differ if len(result.comparisons) > 1 else list(result.comparisons)


def lists(result: Difference) -> list[tuple[str, list[str]]]:
    """Headings with the keys that are only listed by name."""
    shown_keys = {pair.new.key for pair in telling(result)}
    equal = [pair.new.key for pair in result.comparisons if pair.new.key not in shown_keys]
    sections = [("Equal", equal), ("Only in OLD", [*result.only_old]), ("Only in NEW", [*result.only_new])]
    return [(heading, keys) for heading, keys in sections if keys]


def title(pair: Comparison) -> str:
    """Title of a comparison; a target's name appears once."""
    if pair.old.title == pair.new.title:
        return pair.new.title
    return f"{pair.old.title}  ->  {pair.new.title.removeprefix(f'{pair.old.key}: ')}"


def _comparison_lines(pair: Comparison) -> list[Part]:
    lines: list[Part] = [line(f"{title(pair)}{_verdict(pair)}", "bold red" if pair.worse else "bold")]
    if pair.is_equal and not pair.changes:
        return lines
    if pair.changes:
        lines += [line(), line("What changed", "bold"), *_change_lines(pair)]
    if pair.is_equal:
        return lines + _why_lines(pair)
    if pair.memory:
        lines += [line(), _table("Memory of each GPU", memory_rows(pair))]
    lines += [line(), _table(figures_title(pair), figure_rows(pair))]
    lines += _why_lines(pair)
    lines += [part for table in _step_tables(pair) for part in (line(), table)]
    return lines


def figures_title(pair: Comparison) -> str:
    """Title of the figures; those of a check include memory."""
    return "KV cache and users" if pair.memory else "Each GPU"


def _table(title: str, rows: Iterator[DiffRow]) -> Table:
    return Table.of((title, "old", "new", "change"), map(row_cells, rows))


def _verdict(pair: Comparison) -> str:
    if pair.worse:
        return f": {', '.join(WORSE[name] for name in pair.worse)}"
    if pair.is_equal:
        return ": no difference" + (" in memory or users" if pair.changes else "")
    return ""


def _change_lines(pair: Comparison) -> list[Line]:
    """The changes by kind; those without effect on one line per kind."""
    _, without = effects(pair.steps or ())
    lines = []
    for kind, heading in KIND_TITLES.items():
        of_kind = [change for change in pair.changes if change.kind == kind]
        telling = [change for change in of_kind if change not in without]
        lines += [line(f"  {heading}: {change_text(change).removeprefix(f'{heading} ')}") for change in telling]
        if quiet := [change.name for change in of_kind if change in without]:
            lines.append(line(f"  {heading}, without effect: {_some(quiet)}"))
    return lines


def _some(names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _why_lines(pair: Comparison) -> list[Part]:
    sentences = explanation(pair)
    if not sentences:
        return []
    return [line(), line("Why", "bold"), *(Paragraph("  ", text, indent=4) for text in sentences)]


def _step_tables(pair: Comparison) -> list[Table]:
    """A table of the effect of each change, in order; none if no change has an effect."""
    steps, _ = effects(pair.steps or ())
    if not steps:
        return []
    units = _units(pair)
    rows = [step_cells(step, units) for step in steps]
    return [Table.of(STEP_TITLES, [*rows, _sum_cells(pair)] if len(rows) > 1 else rows)]


# --- Markdown ---------------------------------------------------------------------------------------------------------


def diff_page(result: Difference) -> list[Block]:
    """The comparison in at most the size of a GitHub comment; a last line counts the omitted ones."""
    heading = f"### {markdown_text(answer_text(result))}: {markdown_text(result.old)} → {markdown_text(result.new)}"
    parts: list[Block] = [Markdown(heading)]
    for title, keys in lists(result):
        more = [Markdown(f"and {len(keys) - MOST_KEYS:,} more")] if len(keys) > MOST_KEYS else []
        parts += [Markdown(f"{title}:"), bullets([*keys[:MOST_KEYS], *more])]
    room = MAX_COMMENT_BYTES - sum(map(size_of, parts)) - NOTE_BYTES
    differing = telling(result)
    for number, pair in enumerate(differing):
        blocks = list(_comparison_blocks(pair))
        room -= sum(map(size_of, blocks))
        if room < 0:
            more_text = f"{len(differing) - number:,} more with a difference"
            parts.append(Markdown(f"*Shortened to GitHub's limit: {more_text}; `--format json` has them all.*"))
            break
        parts += blocks
    return parts


def answer_text(result: Difference) -> str:
    """What NEW changes, in short: "27 users instead of 21", "2 of 5 differ, worse: agents"."""
    pairs = result.comparisons
    if not pairs:
        return "Nothing in common"
    if len(pairs) == 1:
        return pair_text(pairs[0])
    differ = [pair for pair in pairs if not pair.is_equal]
    if not differ:
        return f"No difference in {len(pairs):,} plans"
    worse = [f"{pair.new.key} ({pair_text(pair)})" for pair in differ if pair.worse]
    more = f" and {len(worse) - 3:,} more" if len(worse) > 3 else ""
    return f"{len(differ):,} of {len(pairs):,} differ" + (f", worse: {', '.join(worse[:3])}{more}" if worse else "")


def pair_text(pair: Comparison) -> str:
    if pair.is_equal:
        return "No difference" + (" in memory or users" if pair.changes else "")
    if not pair.new.fits:
        return ("No longer fits" if pair.old.fits else "Fits neither before nor after") + reason_text(pair.new)
    if not pair.old.fits:
        return "Fits now"
    old, new = (users_of(side, "concurrency.users") for side in (pair.old, pair.new))
    if "concurrency.users" not in pair.new.figures:
        return "Other sizes"
    if old == new:
        return f"{plural(new, 'user')} as before"
    return f"{plural(new, 'user')} instead of {old:,}"


def reason_text(side: Side) -> str:
    """Why a side's server does not start, if it is not for memory of the KV cache; empty for a document."""
    refusal = None if side.plan is None else side.plan.refusal
    return "" if refusal is None else f": {refusal.text}"


def memory_bars(result: Difference) -> list[Figure]:
    """Old and new memory of the first six comparisons that differ."""
    drawn: list[Bar] = []
    for pair in telling(result)[:6]:
        for side, number in ((pair.old, "old"), (pair.new, "new")):
            sizes = {row.name: getattr(row, number) or 0 for row in pair.memory}
            parts = [Piece(NAMES.get(name, name), size, format_gib(int(size)), name.rpartition(".")[2])
                     for name, size in sizes.items() if size > 0 and name not in NOT_PARTS]  # fmt: skip
            drawn.append(Bar(f"{number}: {side.title}", tuple(parts)))
    return [Bars("Where the memory of each GPU goes", tuple(drawn))] if any(bar.size for bar in drawn) else []


def _comparison_blocks(pair: Comparison) -> Iterator[Block]:
    yield Markdown(f"**{markdown_text(title(pair))}**{markdown_text(_verdict(pair))}")
    if pair.changes:
        _, without = effects(pair.steps or ())
        effect = {change: "no effect" if change in without else KIND_TITLES[change.kind] for change in pair.changes}
        rows = [(change.name, text_of(change.old), text_of(change.new), effect[change]) for change in pair.changes]
        yield Table.of(("changed", "old", "new", ""), rows, left=4)
    for table in (_table("Memory of each GPU", memory_rows(pair)), _table(figures_title(pair), figure_rows(pair))):
        if table.rows and not pair.is_equal:
            yield table
    if sentences := explanation(pair):
        yield bullets(sentences)
    yield from _step_tables(pair)


# --- CSV --------------------------------------------------------------------------------------------------------------

COLUMNS = ("comparison", "part", "name", "unit", "old", "new", "delta")


def diff_table(result: Difference) -> Table:
    """A row per change, figure and step effect, by `part`; keys of only one side have their own rows."""
    rows: list[tuple[object, ...]] = []
    for comparison in result.comparisons:
        rows += ((comparison.new.key, *row) for row in _csv_rows(comparison))
    for name, keys in (("only_old", result.only_old), ("only_new", result.only_new)):
        rows += ((key, name, *[""] * 5) for key in keys)
    return Table.of(COLUMNS, rows)


def _csv_rows(pair: Comparison) -> Iterator[tuple[object, ...]]:
    yield "fits", "fits", "", _word(pair.old), _word(pair.new), ""
    for change in pair.changes:
        yield change.kind, change.name, "", change.old, change.new, ""
    for part, rows in (("memory", pair.memory), ("weight_group", pair.groups), ("figure", pair.figures)):
        for row in rows:
            yield part, row.name, row.unit, row.old, row.new, row.delta
    units = _units(pair)
    for step in pair.steps or ():
        for path, delta in step.deltas.items():
            name = f"{path} by {', '.join(change.name for change in step.changes)}"
            yield "step", name, units[path], step.before[path], step.after[path], delta


def _word(side: Side) -> str:
    return str(side.fits).lower()
