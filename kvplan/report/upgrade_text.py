"""Effect of another release on servers: on a screen, as Markdown, as CSV and as kvplan/upgrade@1."""

from collections.abc import Iterable, Iterator
from typing import Any

from kvplan.core.errors import KvplanError
from kvplan.core.files import printable
from kvplan.core.table import Markdown, Table, markdown_text
from kvplan.core.units import format_gib, plural
from kvplan.documents.diff import row_document
from kvplan.documents.upgrade import UpgradeDocument, UpgradedServer, UpgradeSide
from kvplan.planning.attribute import CAPACITY, MEMORY
from kvplan.planning.diff import plan_side
from kvplan.planning.plan import Plan
from kvplan.planning.upgrade import WORSE, Effect, Upgrade, Upgraded, users
from kvplan.report.diff_text import figure_rows, memory_rows, number_delta, row_cells
from kvplan.report.lines import Paragraph, Part, laid_out, line
from kvplan.report.page import Block, heading
from kvplan.servers.base import terms_of
from kvplan.servers.releases import Version, number_text, patches_of

UNITS = {**MEMORY, **CAPACITY}
# Figures that a change may move -> column titles; where a plan does not fit, those that it has nevertheless.
EFFECT_FIGURES = {
    "memory.kv_cache": "KV cache", "kv.tokens": "tokens", "concurrency.max": "max concurrency",
    "concurrency.users": "users",
}  # fmt: skip
SHORT_FIGURES = {"kv.bytes_per_request": "KV per user", "deficit": "short by", **EFFECT_FIGURES}
REST = "all other differences"


def title(server: Upgraded) -> str:
    """Title of a server: "chat: qwen3-8b on l40s, 32,768 tokens"."""
    subject = plan_side(server.old).title
    return f"{printable(server.key, 100)}: {subject}" if server.key else subject


def sentence(server: Upgraded) -> str:
    """One server's result as a sentence without its subject."""
    old, new, after = server.old.request.release.label, server.release.label, server.new
    if isinstance(after, KvplanError):
        return f"cannot be planned with {new}: {after}"
    counted = users(server.old)
    match server.outcome:
        case "does not start":
            return f"does not start with {new}: {why(server)}"
        case "starts with neither":
            return f"starts with neither {old} nor {new}: {why(server)}"
        case "starts":
            return f"starts with {new}, but not with {old}: {plural(users(after), 'user')}"
        case "as before" if old == new:
            return (
                f"{old} is the release to upgrade from and to: it serves {plural(counted, 'user')}; choose another --to"
            )
        case "as before":
            return f"starts with {new} and serves {plural(counted, 'user')}, as with {old}"
        case _:
            return f"starts with {new} and serves {plural(users(after), 'user')} instead of {counted:,} with {old}"


def why(server: Upgraded) -> str:
    """Why the new plan does not start."""
    after = server.new
    assert not isinstance(after, KvplanError)
    return after.refusal.text if after.refusal is not None else f"{format_gib(after.deficit)} short on each GPU"


def first_line(result: Upgrade) -> str:
    if len(result.servers) == 1:
        return f"{title(result.servers[0])}: {sentence(result.servers[0])}"
    worse = [server for server in result.servers if server.outcome in WORSE]
    if not worse:
        return f"All {len(result.servers)} servers start with {result.new}, or are no worse off than before"
    names = ", ".join(printable(server.key, 80) for server in worse[:5]) + (", ..." if len(worse) > 5 else "")
    return f"{len(worse)} of {len(result.servers)} servers would be worse off with {result.new}: {names}"


# --- on the screen ----------------------------------------------------------------------------------------------------


def upgrade_lines(result: Upgrade) -> list[Part]:
    """The answer, then for each server what changes and which change causes it."""
    is_bad = any(server.outcome in WORSE for server in result.servers)
    lines: list[Part] = [line(first_line(result), "bold red" if is_bad else "bold")]
    for server in result.servers:
        if len(result.servers) > 1:
            lines += [line(), line(f"{title(server)}: {sentence(server)}", "red" if server.outcome in WORSE else "")]
        lines += _server_lines(server)
    if result.others:
        names = ", ".join(printable(name, 80) for name in result.others)
        lines += [line(), Paragraph("", f"Skipped (another server): {names}")]
    return lines


def _server_lines(server: Upgraded) -> list[Part]:
    pair = server.comparison
    if pair is None:
        return []
    lines: list[Part] = []
    if rows := [row_cells(row) for row in (*memory_rows(pair), *figure_rows(pair)) if row.delta]:
        old, new = server.old.request.release.label, server.release.label
        lines += [line(), Table.of(("", old, new, "change"), rows)]
    columns = effect_columns(server)
    telling = [effect for effect in server.effects if any(path in effect.deltas for path in columns)]
    if telling:
        moved = [effect_cells(server, effect, columns)[:-1] for effect in telling]
        head, *cells = laid_out([Table.of(("since", *columns.values()), moved)])
        lines += [line(), head]
        for row, effect in zip(cells, telling, strict=True):
            lines += [row, Paragraph("  ", effect_cells(server, effect, columns)[-1])]
    between = changes_between(server)
    quiet = between - sum(effect.change is not None for effect in telling)
    if quiet:
        which = f"{quiet} of the {between}" if quiet < between else f"None of the {between}"
        does = "affect neither KV cache nor users" if quiet < between else "affects KV cache or users"
        lines += [line(), Paragraph("", f"{which} known changes between these releases {does}.")]
    for release in dict.fromkeys((server.old.request.release, server.release)):
        if not release.is_compared:
            text = f"{release.label}: rules come from {terms_of(release.label).known_by} and have not been checked "
            lines.append(Paragraph("", text + "against a running server."))
        if (note := patch_note(release)) is not None:
            lines.append(Paragraph("", note))
    return lines


def patch_note(release: Version) -> str | None:
    """Which patch a release without one means, if its patches differ in what is planned."""
    patches = [number_text(change.since) for change in patches_of(release)]
    if release.patch is not None or not patches:
        return None
    what = f": {patches_of(release)[0].what}" if len(patches) == 1 else ""
    return (
        f"{release.label} means its newest patch: {', '.join(dict.fromkeys(patches))} changed what is planned{what}. "
        f"For an earlier one write it out, {release.engine}@{number_text(release.number)}.0."
    )


def effect_columns(server: Upgraded) -> dict[str, str]:
    """Figures of a server's table of changes, with titles: those that a change moved."""
    is_short = not server.old.fits or not (isinstance(server.new, KvplanError) or server.new.fits)
    if not is_short:
        return EFFECT_FIGURES
    moved = {path for effect in server.effects for path in effect.deltas}
    return {path: title for path, title in SHORT_FIGURES.items() if path in moved}


def changes_between(server: Upgraded) -> int:
    old, new = server.old.request.release, server.release
    return len(new.since(old) or old.since(new))


def effect_cells(server: Upgraded, effect: Effect, columns: Iterable[str]) -> tuple[str, ...]:
    deltas = effect.deltas
    since = "" if effect.change is None else number_text(effect.change.since)
    moved = (number_delta(UNITS[path], deltas.get(path, 0)) for path in columns)
    return (since, *moved, what_of(server, effect))


def what_of(server: Upgraded, effect: Effect) -> str:
    """What an effect comes from: a change, or what none of them is, such as refusals that were read of one release."""
    if effect.change is not None:
        return effect.change.what
    refusal = None if isinstance(server.new, KvplanError) else server.new.refusal
    old, new = server.old.request.release, server.release
    if refusal is None or refusal.by != "unsupported" or old.is_compared or not new.is_compared:
        return REST
    return (
        f"{new.label} refuses it by its own code, which was not asked of {old.label}: whether that starts is not known"
    )


# --- Markdown, CSV, JSON ----------------------------------------------------------------------------------------------


def upgrade_page(result: Upgrade) -> Iterator[Block]:
    yield heading(3, first_line(result))
    for server in result.servers:
        if len(result.servers) > 1:
            yield Markdown(f"**{markdown_text(title(server))}**: {markdown_text(sentence(server))}")
        if (pair := server.comparison) is not None:
            rows = [row_cells(row) for row in (*memory_rows(pair), *figure_rows(pair)) if row.delta]
            if rows:
                yield Table.of(("figure", server.old.request.release.label, server.release.label, "change"), rows)
        if server.effects:
            columns = effect_columns(server)
            moved = [effect_cells(server, effect, columns) for effect in server.effects]
            yield Table.of(("since", *columns.values(), "what changed"), moved)


def upgrade_table(result: Upgrade) -> Table:
    names = ("server", "from", "to", "outcome", "figure", "unit", "old", "new", "delta", "changes")
    rows: list[tuple[Any, ...]] = []
    for server in result.servers:
        common = (title(server), server.old.request.release.label, server.release.label, server.outcome)
        if server.comparison is None:
            rows.append((*common, "", "", None, None, None, sentence(server)))
            continue
        for row in server.comparison.rows:
            changes = [effect.change.what for effect in server.effects if effect.change and row.name in effect.deltas]
            rows.append((*common, row.name, row.unit, row.old, row.new, row.delta, "; ".join(changes)))
    return Table.of(names, rows)


def upgrade_document(result: Upgrade) -> UpgradeDocument:
    """Build kvplan/upgrade@1."""
    return {
        "schema": "kvplan/upgrade@1",
        "old": result.old,
        "new": result.new,
        "worse": any(server.outcome in WORSE for server in result.servers),
        "servers": [_server_document(server) for server in result.servers],
        "left_out": list(result.others),
    }


def _server_document(server: Upgraded) -> UpgradedServer:
    pair = server.comparison
    return {
        "key": server.key,
        "title": title(server),
        "outcome": server.outcome,
        "answer": sentence(server),
        "old": _side_document(server.old.request.release, server.old),
        "new": _side_document(server.release, None if isinstance(server.new, KvplanError) else server.new),
        "rows": [] if pair is None else [row_document(row) for row in pair.rows],
        "changes": [
            {
                "since": None if effect.change is None else number_text(effect.change.since),
                "what": what_of(server, effect),
                "source": None if effect.change is None else effect.change.evidence,
                "deltas": effect.deltas,
            }
            for effect in server.effects
        ],
    }


def _side_document(release: Version, the_plan: Plan | None) -> UpgradeSide:
    return {
        "release": release.label,
        "starts": the_plan is not None and the_plan.fits,
        "users": None if the_plan is None else users(the_plan),
        "compared": release.is_compared,
    }
