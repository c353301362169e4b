"""How many users an LLM server's GPU memory holds, and why: kvplan from Python.

    import kvplan

    answer = kvplan.estimate("llama-3.1-8b", gpu="a100-80g", max_model_len=32768)
    answer.users, answer.memory.kv_cache, answer.serve_command

Keywords are the command line's options by their long names (`tensor_parallel_size=2`, `kv_cache_dtype="fp8"`,
`mean_tokens="4k"`, `engine="vllm@0.30"`); numbers may be numbers. What the command line refuses is raised as a
`KvplanError` with the same words. Nothing is loaded before it is asked for.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvplan.core.errors import (
    EnvironmentProblem,
    InvalidInputError,
    KvplanError,
    UnsupportedModelError,
    UsageError,
)

if TYPE_CHECKING:
    import pandas

    from kvplan.documents.plan import PlanDocument
    from kvplan.planning.plan import MemoryBreakdown, Plan

__all__ = (
    "Answer",
    "EnvironmentProblem",
    "InvalidInputError",
    "KvplanError",
    "UnsupportedModelError",
    "UsageError",
    "estimate",
    "sweep",
    "sweep_frame",
)

Value = str | int | float | bool | dict[str, Any] | None


class Answer:
    """What kvplan answers for one model on one GPU: the figures of `kvplan estimate`.

    plan      everything, typed
    notes     what was derived or assumed while reading the model and the options
    warnings  what was read otherwise than it was written

    Read-only; can be pickled. Two answers are equal if their documents, notes and warnings are.
    """

    __slots__ = ("notes", "plan", "warnings")
    plan: "Plan"
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def __init__(self, plan: "Plan", notes: Iterable[str] = (), warnings: Iterable[str] = ()) -> None:
        self.__setstate__((plan, tuple(dict.fromkeys((*notes, *plan.notes))), tuple(dict.fromkeys(warnings))))

    def __getstate__(self) -> tuple["Plan", tuple[str, ...], tuple[str, ...]]:
        return self.plan, self.notes, self.warnings

    def __setstate__(self, state: tuple["Plan", tuple[str, ...], tuple[str, ...]]) -> None:
        for name, value in zip(("plan", "notes", "warnings"), state, strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an Answer is read-only: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Answer):
            return NotImplemented
        return (self.to_dict(), self.notes, self.warnings) == (other.to_dict(), other.notes, other.warnings)

    def __hash__(self) -> int:
        return hash(self.headline)

    def __repr__(self) -> str:
        return f"<kvplan.Answer: {self.headline}>"

    def __str__(self) -> str:
        """The answer as the terminal shows it, without color."""
        from kvplan.report import lines
        from kvplan.report.console import plan_lines

        return "\n".join(map(lines.plain, lines.laid_out(plan_lines(self.to_dict()))))

    def _repr_html_(self) -> str:
        """The answer in a notebook: the headline, where the memory goes, and the command that serves it."""
        from html import escape

        from kvplan.core.units import GIB
        from kvplan.report.console import LABELS, memory_rows

        memory = self.to_dict()["memory"]
        sizes = memory_rows(memory) | {"total": memory["total"]}
        rows = (
            f"<tr><th style='text-align:left'>{escape(LABELS.get(name, name))}</th><td>{size / GIB:,.2f} GiB</td></tr>"
            for name, size in sizes.items()
            if size
        )
        command = f"<pre>{escape(self.serve_command)}</pre>" if self.fits else ""
        return f"<p><b>{escape(self.headline)}</b></p><table>{''.join(rows)}</table>{command}"

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
        return self.plan.concurrency.users * self.plan.concurrency.replicas

    @property
    def memory(self) -> "MemoryBreakdown":
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

    def to_dict(self) -> "PlanDocument":
        """The document of `--format json` (`kvplan schema estimate` describes it)."""
        from kvplan.documents.artifact import plan_document

        return plan_document(self.plan)

    def to_json(self) -> str:
        import json

        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)


def estimate(
    model: str | None = None, *, gpu: str | None = None, command: str | None = None, **options: Value
) -> Answer:
    """The memory of a server and the users it holds: one model, one kind of GPU, one context.

    model    a catalog name, a path, or a Hub id; may be left out where `command` names one
    gpu      "a100-80g"; "8xh100-80g" splits every layer over eight
    command  a pasted command of a server, such as `vllm serve ...`, over which keywords win
    options  as on the command line: max_model_len=32768, tensor_parallel_size=2, mean_tokens="4k", ...

    Raises UsageError for what contradicts itself, UnsupportedModelError for what kvplan cannot size.
    """
    from kvplan.asked.call import form_of
    from kvplan.asked.form import read_form
    from kvplan.asked.question import requests
    from kvplan.core.units import plural
    from kvplan.planning.plan import plan

    form = form_of(options, model=model, gpu=gpu, from_command=command)
    if not form.names_gpu:
        raise UsageError("gpu", "missing", "name one (`kvplan gpus` lists them)")
    inputs = requests(read_form(form))
    if len(inputs.requests) != 1:
        raise UsageError("estimate", f"{plural(len(inputs.requests), 'plan')} requested", "kvplan.sweep takes several")
    return Answer(plan(inputs.requests[0]), inputs.notes, inputs.warnings)


def sweep(models: str | Iterable[str], **options: "Value | Iterable[Value]") -> list[dict[str, Any]]:
    """One row for each combination, in the order of `kvplan sweep --format csv`: `pandas.DataFrame(rows)` takes them.

    models   one or several
    options  as on the command line; a list where several are tried: gpu=["l40s", "h100-80g"]

    A combination that cannot run has a row with its `reason`. Raises what `estimate` raises where none can.
    """
    from kvplan.asked.call import KEYWORDS, form_of
    from kvplan.planning.grid import grid_of, refuse_unusable
    from kvplan.planning.sweep import SweepRow, all_rows

    form = form_of(options, KEYWORDS | {"prices"}, models=models)
    _, grid, _ = grid_of(form, form.texts("models") or [], form.text("prices"))
    refuse_unusable(grid)
    rows = (row for chunk in all_rows(grid, jobs=1) for row in chunk)
    return [dict(zip(SweepRow._fields, row, strict=True)) for row in rows]


def sweep_frame(models: str | Iterable[str], **options: "Value | Iterable[Value]") -> "pandas.DataFrame":
    """The rows of `sweep` as a pandas DataFrame: counts are whole numbers, what a row lacks is <NA>.

    Raises EnvironmentProblem where pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        remedy = "pip install '.[report]' in kvplan's sources"
        raise EnvironmentProblem("sweep_frame", "pandas is not installed", remedy) from None

    return pandas.DataFrame(sweep(models, **options)).convert_dtypes()


def __dir__() -> list[str]:
    return sorted(__all__)
