"""A judged policy as Markdown: the comment on a pull request, worst first, with the change since the baseline."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from kvplan.core.table import Markdown, Table, as_markdown, markdown_text
from kvplan.core.units import format_gib, format_size
from kvplan.policy.result import CheckFailure, CheckResult, Figures, Finding, Outcome, TargetResult
from kvplan.report.drawing import Figure, bars

MAX_PAGE_BYTES: Final = 20_000_000
MAX_COMMENT_BYTES: Final = 65_000  # GitHub allows 65,536 characters; the rest is for what a bot adds
NOTE_BYTES: Final = 400  # reserved for the note on omitted parts
WORDS: Final[dict[Outcome, str]] = {
    "fail": "failed", "warn": "warned", "note": "noted", "skip": "skipped", "pass": "passed",
}  # fmt: skip


Cells = tuple[str, ...]


def markdown(result: CheckResult) -> str:
    """The comment; it begins with `marker(result.path)`, by which a bot finds and replaces an earlier one."""
    return document(result, MAX_COMMENT_BYTES)


MOST_FAILURES: Final = 20


def failure_markdown(failure: CheckFailure) -> str:
    """The comment for a check that could not run; it replaces an earlier one, which is out of date."""
    heading = "### kvplan check: could not run, no rule was checked"
    errors = "\n\n".join(f"**error**: {markdown_text(str(error)[:8000])}" for error in failure.all[:MOST_FAILURES])
    return f"{marker(failure.path)}\n{heading}\n\n{errors}\n"


def html(result: CheckResult) -> str:
    """The whole answer as a page."""
    servers = [target.server for target in result.targets if target.server]
    return page_of(document(result, MAX_PAGE_BYTES), servers, capacity_bars(result))


def failure_html(failure: CheckFailure) -> str:
    return page_of(failure_markdown(failure))


def capacity_bars(result: CheckResult) -> list[Figure]:
    """Number of full-context requests that each target holds."""
    known = [(target.target, target.figures) for target in result.targets if target.figures is not None]
    return bars(
        "Requests of the full context at once",
        ((name, figures.concurrency if figures.fits else 0.0, capacity_text(figures)) for name, figures in known),
    )


def capacity_text(figures: Figures) -> str:
    return f"{figures.concurrency:,.2f}" if figures.fits else "does not fit"


def page_of(comment: str, servers: Sequence[str] = (), figures: Sequence[Figure] = ()) -> str:
    """A comment as a page: its heading is the answer."""
    from kvplan.report.answer_html import markdown_html

    _, heading, *below = comment.split("\n")
    return markdown_html(heading.lstrip("# "), "\n".join(below), figures, servers)


def marker(path: str) -> str:
    """An invisible line that a bot can search for."""
    return f"<!-- kvplan-check: {quote(path[:400], safe='/', errors='replace')} -->"


def document(result: CheckResult, most_bytes: int) -> str:
    """The whole answer in at most this many bytes of UTF-8; a note counts what was omitted."""
    parts, room = [], most_bytes - NOTE_BYTES
    left_out: Counter[str] = Counter()
    for block in blocks(result):
        frame = _size([*block.head, *block.tail]) + 1
        taken = list(_as_many_as_fit(block.rows, room - frame))
        if frame > room or (block.rows and not taken):
            left_out[block.what] += len(block.rows) or 1
            continue
        left_out[block.what] += len(block.rows) - len(taken)
        room -= frame + _size(taken)
        parts.append("\n".join([*block.head, *taken, *block.tail]))
    missing = [f"{count:,} {what}" for what, count in left_out.items() if count]
    if missing:
        parts.append(
            f"*Shortened to GitHub's limit: {' and '.join(missing)} not shown; `kvplan check --format json` shows all.*"
        )
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True)
class Block:
    """Lines that stay together, and rows among them that may be omitted.

    what  name of the rows, or else of the block, when omitted ones are counted
    """

    head: tuple[str, ...]
    rows: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    what: str = "rows"


def blocks(result: CheckResult) -> Iterator[Block]:
    """The comment's parts, the most important first."""
    yield Block((marker(result.path), f"### kvplan check: {counts_text(result)}", "", markdown_text(result.path)))
    if result.warnings:
        yield Block((), tuple(f"- {markdown_text(warning)}" for warning in result.warnings), what="warnings")
    unmet = [
        _unmet_row(finding)
        for outcome in ("fail", "warn", "note")
        for finding in result.findings
        if finding.outcome == outcome
    ]
    unmet += _skipped_rows(result)
    if unmet:
        yield _rows_block((), ("", "rule", "target", "result", "fix"), unmet)
    for target in result.targets:
        if target.figures is not None:
            yield _target_block(target, target.figures)
    met = [finding for finding in result.findings if finding.outcome == "pass"]
    if met:
        opening = ("<details>", f"<summary>{len(met):,} passed</summary>", "")
        yield _rows_block(opening, ("rule", "target", "result"), map(_met_row, met), ("", "</details>"))


def _rows_block(
    head: tuple[str, ...], names: Sequence[str], rows: Iterable[Sequence[str]], tail: tuple[str, ...] = ()
) -> Block:
    """A table of text whose rows may be omitted."""
    lines = as_markdown(Table.of(names, rows, left=len(names))).split("\n")
    return Block((*head, *lines[:2]), tuple(lines[2:]), tail)


def counts_text(result: CheckResult) -> str:
    """ "2 failed, 1 warned, 1 skipped, 12 passed", without zeros."""
    counts = [(result.count(outcome), word) for outcome, word in WORDS.items()]
    return ", ".join(f"{count:,} {word}" for count, word in counts if count) or "nothing to check"


def _unmet_row(finding: Finding) -> Cells:
    word = Markdown(f"**{finding.outcome}**") if finding.outcome == "fail" else finding.outcome
    waived = "" if finding.waiver is None else f" (waived: {markdown_text(finding.waiver)})"
    return word, *_named(finding), Markdown(markdown_text(finding.message) + waived), finding.fix or ""


def _skipped_rows(result: CheckResult) -> list[Cells]:
    """Rows of skipped rules, merged by what is missing: a target's rules, then targets with the same rules."""
    rules: dict[tuple[str, str], list[str]] = {}
    for finding in result.findings:
        if finding.outcome == "skip":
            rules.setdefault((finding.target, finding.message), []).append(
                f"{finding.code} {markdown_text(finding.rule)}"
            )
    targets: dict[tuple[str, str], list[str]] = {}
    for (target, message), names in rules.items():
        targets.setdefault((", ".join(dict.fromkeys(names)), message), []).append(markdown_text(target))
    return [
        ("skip", Markdown(names), Markdown(", ".join(those)), message, "")
        for (names, message), those in targets.items()
    ]


def _met_row(finding: Finding) -> Cells:
    return *_named(finding), finding.message


def _named(finding: Finding) -> tuple[str, str]:
    return f"{finding.code} {finding.rule}", finding.target


# --- figures and their change -----------------------------------------------------------------------------------------


def _target_block(target: TargetResult, now: Figures) -> Block:
    lines = [
        f"#### {markdown_text(target.target)}",
        "",
        markdown_text(target.title) + ("" if now.fits else ": **does not fit**"),
    ]
    before = target.baseline
    if before is None:
        table = Table.of(("", "now"), (row[:2] for row in _rows(now, now)))
    else:
        table = Table.of(("", "now", "baseline", "change"), _rows(now, before))
        if before.fits != now.fits:
            lines.append(f"(at the baseline it {'did' if before.fits else 'did not'} fit)")
    return Block((*lines, "", *as_markdown(table).split("\n")), what="targets")


def _rows(now: Figures, before: Figures) -> Iterator[tuple[str, str, str, str]]:
    sizes = [
        ("weights", now.weights, before.weights),
        ("KV cache", now.kv_cache, before.kv_cache),
        ("LoRA", now.lora, before.lora),
        ("headroom", now.headroom, before.headroom),
    ]
    for label, new, old in sizes:
        if new or old or label != "LoRA":
            yield label, format_gib(new), format_gib(old), change(new, old, format_size(abs(new - old)))
    new, old = now.kv_bytes_per_token, before.kv_bytes_per_token
    yield "KV per token", format_size(new), format_size(old), change(new, old, format_size(abs(new - old)))
    new, old = now.kv_tokens, before.kv_tokens
    yield "tokens", f"{new:,}", f"{old:,}", change(new, old, f"{abs(new - old):,}")
    users = (now.concurrency, before.concurrency)
    difference = f"{abs(now.concurrency - before.concurrency):,.2f}"
    yield "concurrency", f"{users[0]:,.2f}", f"{users[1]:,.2f}", change(*users, difference)


def change(new: float, old: float, difference: str) -> str:
    """ "+512 MiB (+3.3%)"; "=" if nothing changed."""
    if new == old:
        return "="
    sign = "+" if new > old else "-"
    share = 100 * abs(new - old) / abs(old) if old else 0.0
    share_text = f" ({sign}{share:,.1f}%)" if share >= 0.05 else ""  # smaller values would round to 0
    return f"{sign}{difference}{share_text}"


# --- room -------------------------------------------------------------------------------------------------------------


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def _as_many_as_fit(rows: Sequence[str], room: int) -> Iterator[str]:
    for row in rows:
        room -= len(row.encode()) + 1
        if room < 0:
            return
        yield row
