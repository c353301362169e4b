"""Which server for so many users on these GPUs: what each would serve, whether it holds them, and how fast.

A server that loads files of many types is asked for the largest type that it keeps on its GPUs, the others for the
checkpoint as it is, quantized while loading, or a quantized one of the catalog.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvplan.asked.form import COMMON_GPUS, Form, load_of, read_form, refuse_missing, stated_except
from kvplan.asked.question import MODEL_CURE, Asked, Inputs, requests
from kvplan.core.errors import KvplanError, UsageError
from kvplan.core.records import dataclass
from kvplan.core.units import format_gib, parse_count, plural
from kvplan.hardware.gpu import split_count
from kvplan.models import catalog
from kvplan.models.quant import scheme_name
from kvplan.planning.choice import SOUGHT, Goal
from kvplan.planning.plan import Plan
from kvplan.planning.recommend import MOST_USERS, Question, failure, holding, planned, serves, starts, with_args
from kvplan.servers.base import SERVERS, abilities_of, parse_engine, server_of, terms_of
from kvplan.servers.plans.plan import Rate, Request
from kvplan.servers.words.arguments import flags_of

EVERY = "any"  # of --engine: each server
Pace = Callable[[Plan, int], Rate | None]  # tokens per second of each of so many users while all decode
USUAL_CONTEXT = 8_192  # tokens of a user, if none are stated


@dataclass(frozen=True, slots=True)
class Offer:
    """What one server would serve on one machine.

    server   its name in prose
    serves   the file's type, or the checkpoint's format
    users    at once, at the context; context: tokens of each that the server chooses if none are stated, 0: not asked
    alone    tokens per second of one user alone; together: of each while all decode; None: not known
    remark   why it does not hold them, or where the layers are
    """

    server: str
    request: Request
    serves: str
    holds: bool
    users: int
    context: int
    alone: Rate | None
    together: Rate | None
    remark: str
    plan: Plan | None


@dataclass(frozen=True, slots=True)
class Offers:
    """Offers for a number of users, each with so many tokens, in the order of the servers."""

    users: int
    context: int
    offers: tuple[Offer, ...]

    @property
    def best(self) -> Offer | None:
        """Of the first type of each server that holds the users, the fastest for one of them."""
        first = {offer.server: offer for offer in reversed(self.offers) if offer.holds}
        return max(reversed(first.values()), key=lambda offer: offer.alone.likely if offer.alone else 0.0, default=None)


def compares(form: Form) -> bool:
    """True if several servers are asked for, or one whose file types are to be chosen."""
    text = form.text("engine") or ""
    if "," in text or text == EVERY:
        return True
    try:
        return bool(text) and bool(server_of(text).abilities.file_types)
    except KeyError:
        return False


def offers_of(form: Form, goal: Goal, pace: Pace) -> tuple[Offers, Inputs]:
    """Ask every server that is named; raise what the first one refuses if none can be asked.

    pace  speed of a plan's users by the step times that are simulated
    """
    refuse_missing(
        ("MODEL", form.names_model, MODEL_CURE),
        ("--users", goal.users is not None, "add the number of concurrent users, e.g. --users 1"),
    )
    if goal.prices is not None:
        raise UsageError("--prices", "rank GPUs of one server", "remove it, or name one server with --engine")
    assert goal.users is not None
    users = parse_count(goal.users, "--users", MOST_USERS)
    text = form.text("engine") or EVERY
    engines = list(SERVERS) if text == EVERY else [name.strip() for name in text.split(",")]
    for engine in engines:
        parse_engine(engine)
    form = form.changed(gpu=machines(form, goal))
    results, contexts, notes, errors = list[Offer](), list[int](), Inputs([], 0), list[KvplanError]()
    for engine in engines:
        try:
            inputs = requests(_read(form.changed(engine=engine)))
            stated = stated_except(form.changed(engine=engine), SOUGHT)
            for request in inputs.requests:
                contexts.append(_context(request))
                results += list(_offers(goal.question(users, stated, None), request, contexts[-1], pace))
            notes.notes += [note for note in inputs.notes if note not in notes.notes]
        except KvplanError as error:
            errors.append(error)
    if not results:
        raise errors[0]
    notes.warnings += [f"skipped: {error}" for error in errors]
    if not _states_context(form):
        notes.notes.append(f"no --ctx: {USUAL_CONTEXT:,} tokens for each user; add --ctx 32k for more")
    return Offers(users, contexts[0], tuple(results)), notes


def machines(form: Form, goal: Goal) -> list[str]:
    """GPUs as they are written, with their number."""
    named = form.texts("gpu") or goal.gpus or list(COMMON_GPUS)
    if goal.num_gpus is None:
        return list(named)
    count = parse_count(goal.num_gpus, "--num-gpus", 1024)
    return [name if split_count(name)[0] else f"{count}x{name}" for name in named]


def _states_context(form: Form) -> bool:
    return "max_model_len" in form.values or "from_command" in form.values


def _read(form: Form) -> Asked:
    form = form if _states_context(form) else form.changed(max_model_len=[str(USUAL_CONTEXT)])
    return replace(read_form(form), load=lambda context, spec: load_of(form, context, spec))


def _context(request: Request) -> int:
    context = request.args.max_model_len
    return min(context, request.spec.context_limit) if isinstance(context, int) else request.spec.context_limit


def _offers(question: Question, request: Request, context: int, pace: Pace) -> Iterator[Offer]:
    request = with_args(request, max_model_len=context)
    types = abilities_of(request.release.engine).file_types
    if not types:
        yield _of_checkpoint(question, request, pace)
    elif request.args.quantization is not None or request.checkpoint is not None:
        yield _of_file(question, request, context)
    else:
        yield from _by_type(question, request, context, types)


# --- a server that loads files of many types --------------------------------------------------------------------------


def _by_type(question: Question, request: Request, context: int, types: tuple[str, ...]) -> Iterator[Offer]:
    """The largest type that is whole on the GPUs, between the next larger and the next smaller one."""
    known: dict[int, Offer] = {}

    def offer(index: int) -> Offer:
        if index not in known:
            known[index] = _of_file(question, with_args(request, quantization=types[index]), context)
        return known[index]

    low, high = 0, len(types)  # types from `high` on are whole
    while low < high:
        middle = (low + high) // 2
        if offer(middle).holds:
            high = middle
        else:
            low = middle + 1
    for index in range(max(0, low - 1), min(len(types), low + 2)):
        yield offer(index)


def _of_file(question: Question, request: Request, context: int) -> Offer:
    """A file for so many users: each has a cache of its own; `holds` if all layers and experts are on the GPUs."""
    slots = question.users if "kv_unified" in flags_of(request.release.engine) else 1  # else of one slot
    several = with_args(request, max_num_seqs=question.users, max_model_len=context * slots)
    answer = planned(several)
    name = terms_of(request.release.engine).title
    if not isinstance(answer, Plan) or answer.slots is None:
        return Offer(name, request, "", False, 0, 0, None, None, str(answer), None)
    cache = answer.slots
    whole = answer.fits and cache.gpu_layers == cache.num_layers and not cache.host_experts
    size = sum(place.weights for place in cache.places)
    remark = f"{cache.gpu_layers} of {cache.num_layers} layers on the GPU"
    if cache.host_experts:
        remark = f"the experts of {plural(cache.host_experts, 'layer')} on the host"
    if cache.speed.lacks:
        remark += "; --host-bandwidth 90GB/s gives its speed" * (not whole and answer.fits)
    if not answer.fits:
        remark = f"{format_gib(answer.capacity.deficit)} short"
    chosen = 0
    if whole:
        free = planned(with_args(several, max_model_len=None))
        if isinstance(free, Plan) and free.slots is not None and free.slots.gpu_layers == cache.num_layers:
            chosen = free.slots.cells
    return Offer(
        name, several, f"{cache.file_type} ({format_gib(size)})", whole, question.users if whole else 0, chosen,
        cache.speed.empty if answer.fits else None, cache.speed.empty if whole and question.users == 1 else None,
        "" if whole else remark, answer if answer.fits else None,
    )  # fmt: skip


# --- a server that loads a checkpoint ---------------------------------------------------------------------------------


def _of_checkpoint(question: Question, request: Request, pace: Pace) -> Offer:
    """The first format that holds the users, else why the checkpoint as it is does not."""
    name = terms_of(request.release.engine).title
    for change, candidate in _formats(question, request):
        answer = _held(question, candidate)
        if answer is not None:
            users, text = answer.concurrency.users, change or _format_of(answer)
            alone, together = (pace(answer, count) for count in (1, question.users))
            return Offer(name, candidate, text, True, users, 0, alone, together, "", answer)
    reason, unchanged = failure(question, request).reason, planned(request)
    text = _format_of(unchanged) if isinstance(unchanged, Plan) else ""
    return Offer(name, request, text, False, 0, 0, None, None, reason, None)


def _formats(question: Question, request: Request) -> Iterator[tuple[str, Request]]:
    """The request as it is, with weights quantized while loading, and with quantized checkpoints of the catalog."""
    yield "", request
    if "quantization" in question.stated or request.spec.quantization is not None:
        return
    yield "fp8 while loading", with_args(request, quantization="fp8")
    name = request.spec.name
    for other in catalog.model_names():
        if other.startswith(f"{name}-"):
            spec = catalog.load(other)
            if spec.quantization is not None and spec.num_layers == request.spec.num_layers:
                yield other, replace(request, spec=spec)


def _format_of(answer: Plan) -> str:
    quantization = answer.request.spec.quantization
    return answer.settings.dtype if quantization is None else scheme_name(quantization)


def _held(question: Question, request: Request) -> Plan | None:
    """A plan that holds the users; a server that `recommend` does not change runs as it is asked to."""
    if abilities_of(request.release.engine).recommended:
        return holding(question, request, question.users)
    answer = planned(request)
    if not isinstance(answer, Plan) or not starts(answer, question.end):
        return None
    return answer if serves(question, request, answer, question.users) else None
