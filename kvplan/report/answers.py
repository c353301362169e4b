"""Answers for Python: what a command prints and writes, with the figures that people want as attributes.

Every answer is read-only, can be pickled, and equals another if their documents, notes and warnings are equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes

    from kvplan.documents.cure import CureDocument
    from kvplan.documents.explorer import ExplorerDocument
    from kvplan.documents.plan import PlanDocument
    from kvplan.documents.recommendation import Placement
    from kvplan.documents.simulation import Variant
    from kvplan.documents.timed import TimedPlacement, TimedRecommendationDocument
    from kvplan.documents.tune import TuneDocument, TunedSetting
    from kvplan.measure.diagnosis import Diagnosis as DiagnosisFacts
    from kvplan.planning.choice import Chosen
    from kvplan.planning.diff import Difference
    from kvplan.planning.plan import MemoryBreakdown, Plan, PlanTable
    from kvplan.policy.result import CheckResult, Finding
    from kvplan.report.formats import CommandAnswer
    from kvplan.simulate.outcome import SimulationAnswer

Row = TypeVar("Row", "Placement", "TimedPlacement", "TunedSetting")


class Result:
    """What a command answers: `str()` is its text, `to_dict()` its JSON document.

    notes     what was derived or assumed while reading the model and the options
    warnings  what was read otherwise than it was written
    """

    __slots__ = ("_facts", "notes", "warnings")
    _facts: Any
    _report: ClassVar[str]  # the module whose `shapes` shows the facts
    _shown: ClassVar[tuple[int, ...]] = ()  # and how many of their rows
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def __init__(self, facts: Any, notes: Iterable[str] = (), warnings: Iterable[str] = ()) -> None:
        self.__setstate__((facts, tuple(dict.fromkeys(notes)), tuple(dict.fromkeys(warnings))))

    def __getstate__(self) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
        return self._facts, self.notes, self.warnings

    def __setstate__(self, state: tuple[Any, tuple[str, ...], tuple[str, ...]]) -> None:
        for name, value in zip(("_facts", "notes", "warnings"), state, strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a result is read-only: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or not isinstance(other, Result):
            return NotImplemented
        return (self.to_dict(), self.notes, self.warnings) == (other.to_dict(), other.notes, other.warnings)

    def __hash__(self) -> int:
        return hash(self.headline)

    def __repr__(self) -> str:
        return f"<kvplan.{type(self).__name__}: {self.headline}>"

    def __str__(self) -> str:
        """The answer as the terminal shows it, without color."""
        from kvplan.report.formats import as_text

        return as_text(self._shapes()).rstrip("\n")

    def _repr_html_(self) -> str:
        """The answer in a notebook."""
        from html import escape

        headline, _, details = str(self).partition("\n")
        return f"<p><b>{escape(headline)}</b></p><pre>{escape(details.lstrip(chr(10)))}</pre>"

    def _shapes(self) -> CommandAnswer:
        """The answer for each format, by `shapes` of its report."""
        shapes = import_module(f"kvplan.report.{self._report}").shapes
        answer: CommandAnswer = shapes(self._facts, *self._shown)
        return answer

    @property
    def headline(self) -> str:
        """The answer in a sentence."""
        return str(self).partition("\n")[0]

    def to_dict(self) -> Any:
        """The document of `--format json`, which `kvplan schema` describes."""
        return self._shapes().document()

    def to_json(self) -> str:
        """The text of `--format json`."""
        from kvplan.report.formats import as_json

        return as_json(self._shapes()).removesuffix("\n")

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the chart of the answer's HTML page with matplotlib, on `ax` or a new figure."""
        from kvplan.report.plots import plotted

        return plotted(self._shapes().figures(), ax)


class Answer(Result):
    """What kvplan answers for one model on one GPU: the figures of `kvplan estimate`; `plan` has everything, typed."""

    __slots__ = ()
    _facts: Plan

    def __init__(self, plan: Plan, notes: Iterable[str] = (), warnings: Iterable[str] = ()) -> None:
        super().__init__(plan, (*notes, *plan.notes), warnings)

    def _shapes(self) -> CommandAnswer:
        from kvplan.report.console import shapes

        return shapes([[(self.plan.request.gpu, self.plan)]])

    def _repr_html_(self) -> str:
        """The answer in a notebook: the headline, where the memory goes, and the command that serves it."""
        from html import escape

        from kvplan.core.units import GIB
        from kvplan.report.console import LABELS, memory_rows
        from kvplan.report.plots import COLORS, OTHER

        memory = self.to_dict()["memory"]
        sizes = memory_rows(memory)
        style = "display:inline-block;height:1em;border:0;background:"
        rows = [
            f"<tr><th style='text-align:left'>{escape(LABELS.get(name, name))}</th><td>{size / GIB:,.2f} GiB</td></tr>"
            for name, size in (sizes | {"total": memory["total"]}).items()
            if size
        ]
        pieces = (
            f"<span title='{escape(LABELS.get(name, name))}' style='{style}{COLORS.get(name, OTHER)};"
            f"width:{100 * size / memory['total']:.2f}%'></span>"
            for name, size in sizes.items()
            if size > 0 and name != "missing"
        )
        bar = f"<div style='width:30em;white-space:nowrap;overflow:hidden;font-size:1rem'>{''.join(pieces)}</div>"
        command = f"<pre>{escape(self.serve_command)}</pre>" if self.fits else ""
        return f"<p><b>{escape(self.headline)}</b></p>{bar}<table>{''.join(rows)}</table>{command}"

    @property
    def plan(self) -> Plan:
        return self._facts

    @property
    def headline(self) -> str:
        """The answer in a sentence."""
        from kvplan.report.console import headline

        return headline(self.to_dict())

    @property
    def fits(self) -> bool:
        """Whether the server starts and holds at least one request of the full context."""
        return self.plan.fits

    @property
    def users(self) -> int:
        """Requests served at once, over all replicas: the number to buy by."""
        return self.plan.concurrency.all_users.likely

    @property
    def users_low(self) -> int | None:
        """The fewest that `users` may be; None for a distribution of lengths."""
        return self.plan.concurrency.all_users.low

    @property
    def users_high(self) -> int | None:
        """The most that `users` may be; None for a distribution of lengths."""
        return self.plan.concurrency.all_users.high

    @property
    def memory(self) -> MemoryBreakdown:
        """Bytes of the fullest rank by component; the rows less `missing` add up to `memory.total`."""
        return self.plan.memory

    @property
    def serve_command(self) -> str:
        """The command that starts this very server."""
        return self.to_dict()["flags"]["command"]

    def explain(self) -> str:
        """Every formula with its numbers and sources, as `--explain` prints them."""
        from kvplan.planning.explain import explain
        from kvplan.report import lines
        from kvplan.report.console import explain_lines

        return "\n".join(map(lines.plain, explain_lines(explain(self.plan)))).strip()

    if TYPE_CHECKING:

        def to_dict(self) -> PlanDocument: ...


class Estimates(Result):
    """`kvplan estimate` without a GPU: one answer for each of six common ones, by name.

    failures  GPU -> why there is no plan
    """

    __slots__ = ()
    _facts: PlanTable

    def _shapes(self) -> CommandAnswer:
        from kvplan.report.console import shapes

        return shapes([self._facts])

    def __iter__(self) -> Iterator[Answer]:
        return iter(self.by_gpu.values())

    def __len__(self) -> int:
        return len(self.by_gpu)

    def __getitem__(self, gpu: str) -> Answer:
        return self.by_gpu[gpu]

    @property
    def by_gpu(self) -> dict[str, Answer]:
        from kvplan.planning.plan import plans_of

        return {plan.request.gpu.name: Answer(plan, self.notes, self.warnings) for plan in plans_of([self._facts])}

    @property
    def failures(self) -> dict[str, str]:
        from kvplan.core.errors import KvplanError

        return {gpu.name: str(reply) for gpu, reply in self._facts if isinstance(reply, KvplanError)}


class Ranked(Result, Generic[Row]):
    """An answer of several rows, the best first."""

    __slots__ = ()
    _ranked: ClassVar[str] = "placements"

    @property
    def best(self) -> Row | None:
        """The first row: its command, and the figures that it is chosen by."""
        return next(iter(getattr(self, self._ranked)), None)

    @property
    def serve_command(self) -> str | None:
        """The command that starts each server of the best row."""
        return None if self.best is None else self.best["command"]


class Recommendation(Ranked["Placement"]):
    """What `kvplan recommend` answers: the cheapest placements, or what the GPUs that are there need.

    best  the first placement: its gpu, num_gpus, users_low, users_likely, command and price_per_hour
    """

    __slots__ = ()
    _facts: Chosen

    def _shapes(self) -> CommandAnswer:
        from kvplan.report.recommend_text import document_of, shapes

        return shapes(document_of(self._facts), 10, self._facts)

    @property
    def holds(self) -> bool:
        """Whether a placement, or the given GPUs as asked, hold the users."""
        return bool(self.to_dict()["holds"])

    @property
    def placements(self) -> list[Placement]:
        """The placements that hold the users, the best first: of the search, or for the given GPUs."""
        document = self.to_dict()
        fit = document["fit"]
        if fit is None:
            return list(document["placements"])
        return [fit["solution"]] if fit["solution"] is not None else list(fit["cures"])


class Offers(Recommendation):
    """What it answers for several servers, or for one with files of many types: a row for each."""

    __slots__ = ()
    _facts: Any

    def _shapes(self) -> CommandAnswer:
        from kvplan.report.offers_text import document, shapes

        return shapes(document(self._facts))

    @property
    def placements(self) -> list[Any]:
        """The offers that hold the users, as the table has them."""
        return [offer for offer in self.to_dict()["offers"] if offer["holds"]]


class TimedRecommendation(Ranked["TimedPlacement"]):
    """What `kvplan recommend --slo` answers: the cheapest servers that keep latency targets, each of them simulated.

    best  the first placement: its gpu, num_gpus, targets, command and price_per_hour
    """

    __slots__ = ()
    _report = "timed_text"
    _facts: TimedRecommendationDocument
    _shown = (10,)

    @property
    def headline(self) -> str:
        return self._facts["answer"]

    @property
    def holds(self) -> bool:
        """Whether a placement keeps every target."""
        return self._facts["holds"]

    @property
    def placements(self) -> list[TimedPlacement]:
        """The placements that keep the targets, the cheapest first."""
        return list(self._facts["placements"])


class Tuning(Ranked["TunedSetting"]):
    """What `kvplan tune` answers: the flags with the highest throughput that keep the targets.

    best  the chosen setting: its flags, requests_per_s, output_tokens_per_s, targets and command
    """

    __slots__ = ()
    _ranked = "settings"
    _report = "tune_text"
    _facts: TuneDocument
    _shown = (10,)

    @property
    def headline(self) -> str:
        return self._facts["answer"]

    @property
    def verdict(self) -> str | None:
        """Of the load that must be served: "kept", "broken" or "too close"; None where no rate is stated."""
        return self._facts["verdict"]

    @property
    def settings(self) -> list[TunedSetting]:
        """Every setting that was simulated, the chosen one first, then by what they serve."""
        return list(self._facts["settings"])


class Diagnosis(Result):
    """What `kvplan why` answers: what happened to a server, and what to do."""

    __slots__ = ()
    _report = "why_text"
    _facts: DiagnosisFacts

    @property
    def outcome(self) -> str:
        """How the last start ended: started, stopped, finished, failed, died, cut or unknown."""
        return self._facts.failure.outcome

    @property
    def cause(self) -> str | None:
        """The cause by its short name, such as kv_cache_too_small; None if the log does not show it."""
        return self._facts.failure.cause

    @property
    def cures(self) -> list[CureDocument]:
        """The fixes, the best first: their flags, text, effect and command."""
        return list(self.to_dict()["cures"])


class Comparison(Result):
    """What `kvplan diff` answers."""

    __slots__ = ()
    _report = "diff_text"
    _facts: Difference

    @property
    def is_worse(self) -> bool:
        """Whether the new side no longer fits, needs more bytes per token, or serves fewer users."""
        return self._facts.is_worse

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs, including what was asked."""
        return self._facts.is_equal


class Check(Result):
    """What `kvplan check` answers: each rule of a policy, judged."""

    __slots__ = ()
    _report = "check_text"
    _facts: CheckResult

    @property
    def passes(self) -> bool:
        """Whether no rule failed, as the exit code of the command says."""
        return self._facts.exit_code(strict=False) == 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every rule of every target, with its outcome: pass, note, warn, fail or skip."""
        return self._facts.findings


class Listing(Result):
    """What `kvplan models` or `kvplan gpus` lists: its rows, by name."""

    __slots__ = ()
    _facts: tuple[str, dict[str, Any]]

    def _shapes(self) -> CommandAnswer:
        from kvplan.report import listing_text

        what, options = self._facts
        return listing_text.models(**options) if what == "models" else listing_text.gpus(**options)[0]

    def read(self) -> Listing:
        """The listing itself, after what it is asked has been read: raises what the command refuses."""
        self._shapes()
        return self

    @property
    def rows(self) -> list[dict[str, Any]]:
        document = self.to_dict()
        rows: list[dict[str, Any]] = document.get(self._facts[0], [document])
        return rows

    @property
    def names(self) -> list[str]:
        return [row["name"] for row in self.rows]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


class Explorer(Result):
    """What `kvplan explore` writes: a page whose sliders select answers from a grid of plans."""

    __slots__ = ()
    _facts: ExplorerDocument

    def _shapes(self) -> CommandAnswer:
        from kvplan.core.table import Table
        from kvplan.report.explorer_html import summary
        from kvplan.report.formats import CommandAnswer
        from kvplan.report.lines import line
        from kvplan.report.page import bold

        text = summary(self._facts)
        table = Table.of(("model", "server"), ((chart["model"], chart["server"]) for chart in self._facts["charts"]))
        return CommandAnswer(lambda _: [line(text)], lambda: self._facts, lambda: table, lambda: [bold(text)])

    def _repr_html_(self) -> str:
        """The page in a notebook."""
        from html import escape

        return f"<iframe srcdoc='{escape(self.html)}' style='width:100%;height:50em;border:0'></iframe>"

    @property
    def html(self) -> str:
        """The page, which needs no network."""
        from kvplan.report.explorer_html import explorer_html

        return explorer_html(self._facts)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the page, over a file of that name."""
        from pathlib import Path

        Path(path).write_text(self.html, encoding="utf-8")


class Simulation(Result):
    """What `kvplan simulate` answers: a plan under a load over time."""

    __slots__ = ()
    _facts: SimulationAnswer

    def __getstate__(self) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
        raise TypeError("a simulation holds every request of its run and cannot be pickled; keep its to_dict()")

    def _shapes(self) -> CommandAnswer:
        from kvplan.report.simulate_text import over_time, shapes

        return shapes(self._facts, lambda: over_time(self._facts))

    @property
    def run(self) -> Variant:
        """The figures of the requested server's run: times, throughput, requests."""
        variant: Variant = self.to_dict()["variants"][0]
        return variant

    @property
    def keeps(self) -> bool | None:
        """Whether every target is kept over its whole range; None without targets."""
        outcomes = self._facts.outcomes
        return all(outcome.verdict == "kept" for outcome in outcomes) if outcomes else None

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw running and waiting requests over time, on `ax` or a new figure."""
        from kvplan.report.plots import new_axes

        ax = ax or new_axes((8, 4))
        from kvplan.report.simulate_figures import draw, panels

        draw(ax, panels(self._facts)[0])
        return ax
