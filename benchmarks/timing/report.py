"""The scoreboard of time as text, JSON and pages."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.timing.facts import Fact
from benchmarks.timing.kinds import form, has_tables, is_recent
from benchmarks.timing.predict import OWN
from benchmarks.timing.scores import GOALS, GROUPS, METRICS, UNITS, VERDICTS, Line, Point, goals, line, table
from kvplan.core.errors import InvalidInputError
from kvplan.core.units import plural

COMMAND = (
    "python -m benchmarks.timing.silicon FOLDER; python benchmarks/timeboard.py tests/facts/time_cases.csv "
    "tests/facts/time_cases_unseen.csv FOLDER/facts.jsonl --report --ranges"
)
BEGIN, END = f"<!-- time: written by `{COMMAND}` -->", "<!-- time: end -->"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column, and those named in WORDS, are text."""
    cells = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    rule = "".join("---|" if name in WORDS or index == 0 else "---:|" for index, name in enumerate(header))
    return "\n".join([cells[0], "|" + rule, *cells[1:]]) + "\n"


WORDS = ("on", "source")
# What others publish of themselves, and what a third party measured of them.
PEERS = (
    ("kvplan, without their kind", "68 closed loops, B200, B300, H100", "8.0%", "22%", "timeboard --peer, 2026-11-29"),
    ("aiconfigurator 0.12", "the same 68, without InferenceX's flags", "14.0%", "56%", "benchmarks/timing/peer.py"),
    ("aiconfigurator 0.12", "41 closed loops, H100, H200, B200", "15.0%", "49%", "run on the same results, 2026-11"),
    ("aiconfigurator", "up to 106 stages, 38 experiments", "12.5%", "711%", "inference-sim's sim-to-real validation"),
    ("BLIS trained-physics", "the same", "6.9%", "18%", "its own publication; trained on such runs"),
    ("BLIS roofline", "the same", "45%", "493%", "its own publication"),
    ("llm-optimizer", "the same", "59%", "351%", "the same publication"),
    ("Vidur", "the same", "215%", "11,718%", "the same; it states below 9% itself, for what it profiled"),
)
PEER_HEADER = ("who", "on", "TPOT median", "TTFT median", "source")


@dataclass(frozen=True, slots=True)
class Board:
    """All points of a file; those of servers that kvplan knows stand apart."""

    name: str
    constants: str
    every: int
    num_facts: int
    points: tuple[Point, ...]
    refused: Counter[str]
    malformed: int
    peer: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # aiconfigurator's times, by id

    @property
    def own(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.fact.engine in OWN)

    @property
    def others(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.fact.engine not in OWN)


def percent(value: float) -> str:
    return f"{100 * value:.1f}%" if abs(value) < 0.1995 else f"{100 * value:.0f}%"


HEADER = ("", "n", "median error", "9 in 10 within", "bias", "in its range")


def cells(name: str, line_shown: Line) -> list[str]:
    return [
        name,
        f"{line_shown.n:,}",
        percent(line_shown.median),
        percent(line_shown.p90),
        percent(line_shown.bias),
        percent(line_shown.within),
    ]


def of_metric(points: Iterable[Point], metric: str) -> list[Point]:
    return [point for point in points if point.metric == metric]


def summary_rows(points: Sequence[Point], name: str = "") -> list[list[str]]:
    return [
        cells(f"{name}{UNITS[metric]}", line(chosen)) for metric in METRICS if (chosen := of_metric(points, metric))
    ]


def goal_rows(points: Sequence[Point]) -> list[list[str]]:
    counts = goals(points)
    rows = []
    for real in ("kept", "broken"):
        each = [counts[real, called] for called in VERDICTS]
        rows.append([f"{real} by the server", *(f"{count:,}" for count in each), f"{sum(each):,}"])
    return rows


GOAL_HEADER = ("goal", *(f"kvplan: {called}" for called in VERDICTS), "n")


def goal_text(points: Sequence[Point]) -> str:
    counts = goals(points)
    broken = sum(counts["broken", called] for called in VERDICTS)
    close, total = counts["kept", "too close"] + counts["broken", "too close"], sum(counts.values())
    if not total or not broken:
        return "No goal was broken.\n"
    limits = ", ".join(
        f"{name.upper()} {' and '.join(f'{goal:g} ms' for goal in each)}" for name, each in GOALS.items()
    )
    return (
        f"Of {broken:,} goals that the server broke kvplan calls {counts['broken', 'kept']:,} kept "
        f"({percent(counts['broken', 'kept'] / broken)}); {close:,} of {total:,} are too close to call "
        f"({percent(close / total)}). Goals: {limits}.\n"
    )


def sections(board: Board) -> list[tuple[str, str]]:
    """(title, Markdown) of the whole page."""
    parts = [("All servers that kvplan plans", markdown(HEADER, summary_rows(board.own)))] if board.own else []
    if board.others:
        text = "TensorRT-LLM and others have no plan here; their results are predicted as if vLLM ran.\n\n"
        parts.append(("Other servers", text + markdown(HEADER, summary_rows(board.others))))
    own = board.own or board.points
    parts.append(("Goals", goal_text(own) + "\n" + markdown(GOAL_HEADER, goal_rows(own))))
    for name, group in GROUPS.items():
        rows: list[list[str]] = []
        for metric in METRICS:
            rows += [
                cells(f"{metric}, {key}", lines[metric]) for key, lines in table(own, group).items() if metric in lines
            ]
        parts.append((f"By {name}", markdown(HEADER, rows)))
    if beside := beside_peer(board):
        parts.append((f"Beside {PEER}", beside))
    parts.append(("What others publish", markdown(PEER_HEADER, PEERS)))
    if board.refused:
        rows = [[why.replace("|", "/"), str(count)] for why, count in board.refused.most_common()]
        parts.append(("Refused", markdown(("why", "n"), rows)))
    return parts


def text(board: Board) -> str:
    which = "" if board.every == 1 else f" (every {board.every}th)"
    head = f"{board.name}{which}, constants {board.constants}: "
    head += f"{board.num_facts:,} results, {len(board.points):,} figures compared, "
    head += f"{sum(board.refused.values()):,} refused, {board.malformed:,} unreadable\n"
    return head + "".join(f"\n## {title}\n\n{content}" for title, content in sections(board))


def as_json(line_shown: Line) -> dict[str, float]:
    return {
        "n": line_shown.n,
        "median": line_shown.median,
        "p90": line_shown.p90,
        "bias": line_shown.bias,
        "within": line_shown.within,
    }


def document(board: Board) -> dict[str, Any]:
    """The scoreboard as JSON values."""
    return {
        "schema": "kvplan/timeboard@1",
        "facts": board.name,
        "constants": board.constants,
        "every": board.every,
        "num_facts": board.num_facts,
        "summary": {
            name: {metric: as_json(line(each)) for metric in METRICS if (each := of_metric(points, metric))}
            for name, points in {"own": board.own, "others": board.others}.items()
        },
        "groups": {
            name: {
                key: {metric: as_json(each) for metric, each in lines.items()}
                for key, lines in table(board.own, group).items()
            }
            for name, group in GROUPS.items()
        },
        "goals": {f"{real}, called {called}": count for (real, called), count in sorted(goals(board.own).items())},
        "refused": dict(board.refused),
        "points": [
            {
                "id": point.fact.id, "metric": point.metric, "predicted": point.predicted, "low": point.low,
                "high": point.high, "measured": point.measured,
            }
            for point in board.points
        ],
    }  # fmt: skip


PEER = "aiconfigurator 0.12"


def beside_peer(board: Board) -> str:
    """Both planners on the results that aiconfigurator answered, by class."""
    mine = [point for point in board.own if point.metric in board.peer.get(point.fact.id, ())]
    if not mine:
        return ""
    theirs = [replace(point, predicted=board.peer[point.fact.id][point.metric]) for point in mine]
    rows = []
    for name in dict.fromkeys(name for point in mine for name in reversed(classes(point.fact))):
        for metric in METRICS[:2]:
            for who, points in (("kvplan", mine), (PEER, theirs)):
                chosen = [point for point in points if name in classes(point.fact) and point.metric == metric]
                if chosen:
                    rows.append([f"{who}, {name.removeprefix('- ')}: {UNITS[metric]}", *cells("", line(chosen))[1:5]])
    num = len({point.fact.id for point in mine})
    text = f"{plural(num, 'result')} of vLLM and SGLang that both answer, kvplan's host fitted without their kind:\n\n"
    return text + markdown(HEADER[:5], rows)


def between(root: Path, begin: str, end: str, text: str) -> None:
    """Put the text between the marks of docs/accuracy.md."""
    place = root / "docs" / "accuracy.md"
    content = place.read_text(encoding="utf-8")
    if content.count(begin) != 1 or content.count(end) != 1:
        raise InvalidInputError("docs/accuracy.md", "has no marks for the times", f"put {begin!r} and {end!r}")
    head, _, rest = content.partition(begin)
    place.write_text(f"{head}{begin}\n\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


MEASURED = "GPUs with measured kernels, servers of the last year"


def classes(fact: Fact) -> tuple[str, ...]:
    """Rows of the page in which a result counts."""
    if not (has_tables(fact) and is_recent(fact)):
        return ("all others (older servers, GPUs without measured kernels, AMD)", "all")
    stored = form(fact)
    models = "models in blocks of fp8" if "fp8_block" in stored else f"{stored.split()[0]} models"
    return (MEASURED, f"- {models}", "all")


def class_rows(points: Sequence[Point]) -> list[list[str]]:
    by_class: dict[str, list[Point]] = {}
    for point in points:
        for name in classes(point.fact):
            by_class.setdefault(name, []).append(point)
    order = [MEASURED, *sorted(name for name in by_class if name.startswith("-")), *sorted(by_class, reverse=True)]
    return [
        cells(f"{name}: {UNITS[metric]}", line(chosen))
        for name in dict.fromkeys(order)
        for metric in (METRICS if name[0] != "-" else METRICS[:1])
        if (chosen := of_metric(by_class.get(name, ()), metric))
    ]


def write(board: Board, root: Path) -> None:
    """reports/accuracy/time.md whole, and the table between the marks of docs/accuracy.md."""
    page = f"# Times beside those of real servers\n\nWritten by `{COMMAND}`.\n\n{text(board)}"
    (root / "reports" / "accuracy" / "time.md").write_text(page, encoding="utf-8")
    which = "" if board.every == 1 else f" (every {board.every}th)"
    num_refused = sum(board.refused.values())
    first = f"{board.num_facts:,} results{which}, {board.num_facts - num_refused:,} answered, {num_refused} refused:\n"
    short = "\n".join(
        [
            first, markdown(HEADER, class_rows(board.own)), goal_text(board.own),
            markdown(GOAL_HEADER, goal_rows(board.own)),
            *([f"Beside {PEER}: {beside}"] if (beside := beside_peer(board)) else []),
            "What others publish, and what was measured of them:\n", markdown(PEER_HEADER, PEERS),
        ]
    )  # fmt: skip
    between(root, BEGIN, END, short)
