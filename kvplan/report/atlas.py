"""What the pages of an atlas say: of every model on every GPU the users by context and number of GPUs, how each number
is known, and which servers logged it. Every page has a document: the text that the command line prints.
"""

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from kvplan.asked.form import Form, read_form
from kvplan.asked.question import requests
from kvplan.core.errors import KvplanError
from kvplan.core.records import dataclass
from kvplan.core.units import plural
from kvplan.documents.artifact import plan_document
from kvplan.documents.error import error_document
from kvplan.documents.explorer_grid import by_share, default_context
from kvplan.documents.plan import PlanDocument
from kvplan.hardware.gpu import gpu, offered_names
from kvplan.models import catalog, lookup
from kvplan.planning.grid import grid_of, refuse_unusable
from kvplan.planning.plan import Plan, plan
from kvplan.planning.sweep import Grid, SweepRow
from kvplan.report import proof, sweep_text
from kvplan.report.proof import Proof

SPLITS: Final = (1, 2, 4, 8)
CONTEXTS: Final = (4_096, 8_192, 32_768, 131_072)
USUAL: Final = 8_192  # the context of lists and of first lines, or the model's own where that is shorter


def usual_gpus() -> list[str]:
    """Those that are on sale and whose memory a driver reported."""
    return [name for name in offered_names() if gpu(name).total_memory_kind == "logged"]


@dataclass(frozen=True, slots=True)
class Offer:
    """So many GPUs of a kind for one model: users at a context."""

    num_gpus: int
    context: int
    users: int
    low: int
    high: int

    @property
    def text(self) -> str:
        return users_text(self.users, self.low, self.high)


class Summary(NamedTuple):
    """What lists say of a pair. `alone`: users on one GPU at the usual context; `least`: the fewest GPUs that hold one
    there, then their users; `longest`: context that one GPU holds. None: nothing does.
    """

    model: str
    gpu: str
    alone: int | None
    least: int | None
    least_users: int | None
    longest: int | None


@dataclass(frozen=True, slots=True)
class Pair:
    """A model on a GPU.

    rows       of every server, number of GPUs and context
    document   what `command` prints as JSON
    first      the plan that the first line tells of; None if nothing fits
    others     other checkpoints of the model: name, weights of a rank, users of the same plan or why there are none
    """

    model: str
    gpu: str
    answer: str
    rows: tuple[SweepRow, ...]
    command: str
    document: str
    first: PlanDocument | None
    others: tuple[tuple[str, int, str], ...]
    proofs: tuple[Proof, ...]

    @property
    def packed(self) -> bytes:
        return gzip.compress(self.document.encode(), 9, mtime=0)

    @property
    def unit(self) -> str:
        return unit_of(self.first)

    @property
    def engines(self) -> list[str]:
        return list(dict.fromkeys(row.engine for row in self.rows))

    def offers(self, engine: str | None = None) -> list[Offer]:
        """What holds a user, of one server or of the first that does."""
        rows = [row for row in self.rows if row.fits and row.users and engine in (None, row.engine)]
        return [
            Offer(row.num_gpus, row.max_model_len or 0, row.users or 0, row.users_low or 0, row.users_high or 0)
            for row in rows
        ]

    def summary(self, context: int) -> Summary:
        offers = [offer for offer in self.offers() if offer.context == context]
        alone = next((offer.users for offer in offers if offer.num_gpus == 1), None)
        least = min(offers, key=lambda offer: offer.num_gpus, default=None)
        longest = max((offer.context for offer in self.offers() if offer.num_gpus == 1), default=None)
        counted = (None, None) if least is None else (least.num_gpus, least.users)
        return Summary(self.model, self.gpu, alone, *counted, longest)


def unit_of(first: PlanDocument | None) -> str:
    """What is counted: an encoder has no KV cache, so no users."""
    return "users" if first is None or first["kv"]["groups"] else "requests in a step"


def users_text(users: int, low: int | None, high: int | None) -> str:
    return f"{users:,}" if low == users == high else f"{users:,} ({low:,}-{high:,})"


# --- a page -----------------------------------------------------------------------------------------------------------


def contexts_of(model: str) -> list[int]:
    """The usual contexts below the model's own, then that."""
    request = requests(read_form(Form({"model": model, "gpu": ["h200"], "offline": True}))).requests[0]
    longest = default_context(request)
    return [*(tokens for tokens in CONTEXTS if tokens < longest), longest]


def usual_context(contexts: Sequence[int]) -> int:
    return max((tokens for tokens in contexts if tokens <= USUAL), default=contexts[0])


def pair_of(model: str, gpu_name: str, contexts: Sequence[int], engines: Sequence[str] = ()) -> Pair:
    """Plan a model on a GPU; what cannot be planned has a page that says why."""
    engines, splits = tuple(engines) or tuple(by_share()), SPLITS
    logged = tuple(proof.of_model(model, gpu_name))
    try:
        _, grid, _ = grid_of(form_of(gpu_name, engines, splits, contexts), [model], None)
    except KvplanError as error:
        return refused(model, gpu_name, engines, contexts, error, logged)
    every = grid.rows(0, grid.count)
    numbered = [(number, row) for number, row in enumerate(every) if row.is_possible]
    if not numbered:
        return refused(model, gpu_name, engines, contexts, None, logged)
    engines = tuple(name for name in engines if any(row.engine.partition("@")[0] == name for _, row in numbered))
    splits = tuple(sorted({row.tensor_parallel_size for _, row in numbered}))
    releases = {row.engine for _, row in numbered}
    rows = [row for row in every if row.tensor_parallel_size in splits and row.engine in releases]
    first = first_plan(grid, numbered, usual_context(contexts))
    document = None if first is None else plan_document(first)
    answer = answer_of(model, gpu_name, [row for _, row in numbered], first, unit_of(document))
    return Pair(
        model, gpu_name, answer, tuple(rows),
        command_of(model, gpu_name, engines, splits, contexts), sweep_json(rows), document,
        tuple(others_of(model, first)) if first is not None else (), logged,
    )  # fmt: skip


def form_of(gpu_name: str, engines: Iterable[str], splits: Iterable[int], contexts: Iterable[int]) -> Form:
    lists = {"engine": ",".join(engines), "tensor_parallel_size": ",".join(map(str, splits))}
    return Form({"gpu": [gpu_name], "max_model_len": [str(tokens) for tokens in contexts], "offline": True, **lists})


def command_of(
    model: str, gpu_name: str, engines: Iterable[str], splits: Iterable[int], contexts: Iterable[int]
) -> str:
    """The command that prints the page's document."""
    lists = [",".join(engines), ",".join(map(str, splits)), ",".join(map(str, contexts))]
    return f"kvplan sweep {model} --gpu {gpu_name} --engine {lists[0]} --tp {lists[1]} --ctx {lists[2]} --format json"


def sweep_json(rows: Sequence[SweepRow]) -> str:
    """kvplan/sweep@1 as the command line writes it."""
    tally = sweep_text.Tally()
    tally.add(rows)
    return "".join(
        (sweep_text.json_head(None, pareto=False), sweep_text.json_rows(rows, first=True), sweep_text.json_tail(tally))
    )


def refused(
    model: str, gpu_name: str, engines: Sequence[str], contexts: Sequence[int], error: KvplanError | None,
    logged: tuple[Proof, ...],
) -> Pair:  # fmt: skip
    """A page whose document is the error that the command line prints."""
    question = (model, gpu_name, engines, SPLITS[:1], contexts[:1])
    try:
        _, grid, _ = grid_of(form_of(*question[1:]), [model], None)
        refuse_unusable(grid)
    except KvplanError as problem:
        error = problem
    assert error is not None
    text = json.dumps(error_document(error, error.exit_code), indent=2) + "\n"
    answer = f"{model} on {gpu_name} cannot be planned: {error}"
    return Pair(model, gpu_name, answer, (), command_of(*question), text, None, (), logged)


def first_plan(grid: Grid, numbered: Sequence[tuple[int, SweepRow]], context: int) -> Plan | None:
    """The plan of the first line: the fewest GPUs, at the usual context if it fits there, else the longest below."""
    fitting = [(number, row) for number, row in numbered if row.fits and row.users]
    if not fitting:
        return None

    def order(match: tuple[int, SweepRow]) -> tuple[Any, ...]:
        number, row = match
        length = row.max_model_len or 0
        return row.num_gpus, length > context, abs(length - context), number

    return plan(grid.request(min(fitting, key=order)[0]))


def answer_of(model: str, gpu_name: str, rows: Sequence[SweepRow], first: Plan | None, unit: str) -> str:
    """The first line: yes or no, for how many, with what."""
    if first is None:
        most, reasons = max(row.num_gpus for row in rows), [row.reason for row in rows if row.reason]
        return f"No: {model} on {most} x {gpu_name}: {reasons[-1]}"
    request, answer = first.request, first.concurrency
    count = first.request.args.num_gpus
    users = users_text(answer.users, answer.users_low, answer.users_high)
    words = unit if answer.users != 1 else unit.replace("users", "user").replace("requests", "request")
    load = f"{users} {words} at {first.capacity.max_model_len:,} tokens each"
    longest = max(row.max_model_len or 0 for row in rows if row.fits and row.users and row.num_gpus == count)
    reach = "" if longest <= first.capacity.max_model_len else f", and a single user {longest:,}"
    if count == 1:
        sure = "Yes" if answer.users_low else "Perhaps (the low end of the range does not start)"
        return f"{sure}: one {gpu_name} holds {model} for {load}{reach} ({request.release.label})"
    alone = next((row.reason for row in rows if row.num_gpus == 1 and row.reason), "it does not fit")
    return f"Not on one {gpu_name} ({alone}); {count} hold {model} for {load}{reach} ({request.release.label})"


def others_of(model: str, first: Plan) -> Iterable[tuple[str, int, str]]:
    """Other checkpoints of the same model on the same GPUs with the same flags."""
    request = first.request
    args, base = request.args, str(catalog.facts(model)["id"])
    for name in lookup.relatives(base):
        if name == model:
            continue
        form = form_of(request.gpu.name, [request.release.engine], [args.num_gpus], [first.capacity.max_model_len])
        try:
            other = plan(requests(read_form(form.changed(model=name))).requests[0])
        except KvplanError as error:
            yield name, 0, f"refused: {error}"
            continue
        answer = other.concurrency
        users = users_text(answer.users, answer.users_low, answer.users_high) if other.fits else "does not fit"
        yield name, other.memory.weights, users


# --- proof ------------------------------------------------------------------------------------------------------------


def proof_text(rows: Sequence[Proof], of: str, absent: str) -> str:
    """ "3 servers of this pair have been logged; KV memory within 0.6%"; or what stands for none."""
    logged = [row for row in rows if row.kind == "log"]
    if not logged:
        return absent
    parts = []
    for name, is_kind in KINDS.items():
        errors = sorted(abs(row.error) for row in logged if is_kind(row))
        if errors:
            median, worst = errors[len(errors) // 2], errors[-1]
            ends = f"within {worst:.2%}" if len(errors) == 1 else f"median error {median:.2%}, worst {worst:.2%}"
            parts.append(f"{name} {ends}")
    count = len({row.case for row in logged})
    return f"{plural(count, 'server')} of this {of} {'has' if count == 1 else 'have'} been logged: {'; '.join(parts)}"


KINDS: Final[dict[str, Callable[[Proof], bool]]] = {
    "the KV cache from the inputs alone": lambda row: row.is_pool,
    "weights": lambda row: not row.is_pool,
}
