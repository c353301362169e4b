"""What `recommend` is asked: users to serve, and GPUs to choose from or those that are there; and its answer."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from kvplan.asked.form import COMMON_GPUS, Form, load_of, read_form, refuse_missing, stated_except
from kvplan.asked.question import MODEL_CURE, Context, Inputs, requests
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import parse_count
from kvplan.hardware import prices as price_file
from kvplan.hardware.gpu import gpu, size_note, split_count
from kvplan.hardware.prices import Prices
from kvplan.models.spec import ModelSpec
from kvplan.planning.recommend import MOST_USERS, Fit, Placement, Question, Recommendation, fit, recommend, with_args
from kvplan.servers.base import abilities_of, titles
from kvplan.servers.plans.plan import Load, Request, check_load

# Options that the search decides, or that would make every GPU hold the same.
SOUGHT = {
    "data_parallel_size": "the number of replicas is computed, each without ranks (`kvplan tune` times those)",
    "kv_cache_memory_bytes": "the size of the pool is computed",
    "num_gpu_blocks_override": "the size of the pool is computed",
}


@dataclass(frozen=True, slots=True)
class Goal:
    """What is asked in addition to a plan, as text; None: not given."""

    users: str | None = None
    gpus: list[str] | None = None
    num_gpus: str | None = None
    prices: str | None = None
    fp8: bool = True
    fp8_weights: bool = False
    optimistic: bool = False

    def question(self, users: int, stated: frozenset[str], prices: Prices | None) -> Question:
        end: Literal["low", "likely"] = "likely" if self.optimistic else "low"
        return Question(users, stated, self.fp8, self.fp8_weights, end, prices.per_hour if prices else None)

    def read_prices(self) -> Prices | None:
        return None if self.prices is None else price_file.read(Path(self.prices))


@dataclass(frozen=True, slots=True)
class Choice:
    """A question for `recommend`, read; `answer` searches.

    is_fixed  True if the GPUs are there, and False if they are to be chosen
    """

    question: Question
    inputs: Inputs
    goal: Goal
    prices: Prices | None
    is_fixed: bool

    def answer(self) -> "Chosen":
        question, first = self.question, self.inputs.requests[0]
        check_supported(first)
        source = self.prices.source if self.prices else None
        if self.is_fixed:
            request, replicas = given_gpus(self.goal, first, question.stated)
            needs = fit(question, request, replicas)
            return Chosen(question, request, source, None, needs)
        recommendation = recommend(question, self.inputs.requests)
        errors = [failure.error for failure in recommendation.failures if failure.error is not None]
        if not recommendation.placements and errors and len(errors) == len(recommendation.failures):
            reason = errors[0]  # impossible on every GPU
            raise UsageError(reason.subject, reason.problem, reason.remedy)
        return Chosen(question, first, source, recommendation, None)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The answer: placements of a search, or what the GPUs that are there need."""

    question: Question
    request: Request
    price_source: str | None
    search: Recommendation | None
    needs: Fit | None

    @property
    def placement(self) -> Placement | None:
        """The best one, or None if nothing holds the users."""
        if self.needs is not None:
            return self.needs.solution or next(iter(self.needs.cures), None)
        return None if self.search is None else next(iter(self.search.placements), None)


def choice_of(form: Form, goal: Goal) -> Choice:
    """Read a question. Raises UsageError for what contradicts itself, and for servers that cannot be searched."""
    fitting = ", ".join(f"`kvplan models --gpu {name}`" for name in form.texts("gpu") or ())
    refuse_missing(
        ("MODEL", form.names_model, MODEL_CURE + (f"; {fitting} lists those that fit" if fitting else "")),
        ("--users", goal.users is not None, "add the number of concurrent users, e.g. --users 200"),
    )
    assert goal.users is not None
    users = parse_count(goal.users, "--users", MOST_USERS)
    gpus, num_gpus = counted(form.texts("gpu"), goal.num_gpus)
    form, goal = form.changed(gpu=gpus), replace(goal, num_gpus=num_gpus)
    check_together(form, goal)
    prices = goal.read_prices()
    question = goal.question(users, stated_except(form, SOUGHT), prices)
    inputs = requests_of(form, goal, prices)
    without = {request.gpu.name for request in inputs.requests} - (prices.per_hour.keys() if prices else set())
    if prices is not None and without:
        inputs.notes.append(f"--prices: none for {', '.join(sorted(without))}, shown as -")
    return Choice(question, inputs, goal, prices, form.names_gpu)


def check_supported(request: Request) -> None:
    """Refuse a server whose placements cannot be searched by memory alone."""
    if not abilities_of(request.release.engine).recommended:
        names, _ = titles(lambda can: can.recommended)
        problem = f"without --slo, recommend supports only {names}"
        if abilities_of(request.release.engine).fits_context:
            raise UsageError(
                "--engine", problem, "size it with `kvplan estimate`, whose --parallel is the number of users"
            )
        raise UsageError(
            "--engine", problem, "add --slo ttft.p90=2s with a load, or compare servers with `kvplan sweep --engine`"
        )
    if request.spec.is_encoder:
        name = request.spec.name
        raise UsageError(
            "recommend", f"{name} is an encoder, which serves no users at once", "`kvplan estimate` sizes it"
        )


def counted(gpus: list[str] | None, num_gpus: str | None) -> tuple[list[str] | None, str | None]:
    """--gpu and --num-gpus, with 2xl40s as two of l40s."""
    count, name = split_count(gpus[0]) if gpus is not None and len(gpus) == 1 else (None, "")
    if count is None:
        return gpus, num_gpus
    if num_gpus is not None and parse_count(num_gpus, "--num-gpus", 1024) != count:
        raise UsageError("--gpu", f"says {count} GPUs, and --num-gpus {num_gpus}", "use only one")
    return [name], str(count)


def check_together(form: Form, goal: Goal) -> None:
    is_fixed = form.names_gpu
    if is_fixed and goal.gpus is not None:
        raise UsageError(
            "--gpu and --gpus", "the first asks what one GPU needs, the second which GPU to choose", "use only one"
        )
    if is_fixed and len(",".join(form.texts("gpu") or []).split(",")) > 1:
        raise UsageError("--gpu", "takes one GPU here", "use --gpus to choose among several")
    if goal.num_gpus is not None and not is_fixed:
        raise UsageError("--num-gpus", "counts GPUs of one kind", "name it with --gpu")
    if is_fixed and goal.prices is not None:
        raise UsageError("--prices", "rank several GPUs", "remove it, or use --gpus instead of --gpu")


def requests_of(form: Form, goal: Goal, prices: Prices | None) -> Inputs:
    """One request per candidate GPU, or for the given one; their lengths are not yet truncated to the context."""

    def load(context: Context, spec: ModelSpec) -> Load:
        return load_of(form, spec.context_limit if form.names_gpu else context, spec)

    query = read_form(form if form.names_gpu else form.changed(gpu=gpu_names(goal, prices)))
    inputs = requests(replace(query, load=load))
    contexts = {request.args.max_model_len for request in inputs.requests}
    if len(contexts) > 1 or "auto" in contexts:
        raise UsageError("--ctx", "recommend takes one context", "write one number, for example --ctx 16k")
    context = inputs.requests[0].args.max_model_len
    if context is None:
        context = inputs.requests[0].spec.max_model_len
    assert isinstance(context, int)
    inputs.requests = [with_args(request, max_model_len=context) for request in inputs.requests]
    check_load(inputs.requests[0], context)
    names = [name.strip() for text in goal.gpus or () for name in text.split(",")]
    inputs.notes += [note for name in names if (note := size_note(name, gpu(name), "--gpus")) is not None]
    return inputs


def gpu_names(goal: Goal, prices: Prices | None) -> list[str]:
    """Candidate GPUs: those named, else those with a price, else the common ones."""
    if goal.gpus is None:
        return list(prices.per_hour) if prices else list(COMMON_GPUS)
    names = [name.strip() for text in goal.gpus for name in text.split(",")]
    if "" in names:
        raise UsageError("--gpus", "contains an empty name", "write one, or several separated by commas: a100-80g,h200")
    counted = next((name for name in names if split_count(name)[0] is not None), None)
    if counted is not None:
        raise UsageError(
            "--gpus", f"recommend finds the number of GPUs itself ({printable(counted, 60)!r})", "use --gpu for it"
        )
    return list(dict.fromkeys(gpu(name).name for name in names))


def given_gpus(goal: Goal, request: Request, stated: frozenset[str]) -> tuple[Request, int]:
    """(request of one server, number of servers): --num-gpus divided by --tp x --pp; without --tp, one server."""
    args = request.args
    ranks = args.world_size
    if goal.num_gpus is None:
        return request, 1
    count = parse_count(goal.num_gpus, "--num-gpus", 1024)
    if "tensor_parallel_size" not in stated:
        if count % args.pipeline_parallel_size:
            raise UsageError(
                f"--num-gpus {count}", f"is not a multiple of --pp {args.pipeline_parallel_size}", "change one of them"
            )
        check_heads(request, count, count // args.pipeline_parallel_size)
        return with_args(request, tensor_parallel_size=count // args.pipeline_parallel_size), 1
    if count % ranks:
        raise UsageError(f"--num-gpus {count}", f"is not a multiple of --tp x --pp, {ranks}", "change one of them")
    return request, count // ranks


def check_heads(request: Request, count: int, tp: int) -> None:
    """Refuse one server whose tensor parallel ranks do not divide the heads, and name ways to use so many GPUs."""
    spec, stages = request.spec, request.args.pipeline_parallel_size
    if not spec.has_attention or spec.num_heads % tp == 0:
        return
    divisors = [size for size in range(1, spec.num_heads + 1) if spec.num_heads % size == 0]
    split = max(size for size in divisors if tp % size == 0)
    ways = [f"add --tp {split} --pp {tp // split} for one server with pipeline stages"] if stages == 1 else []
    ways.append(f"add --tp {split} for {tp // split} servers")
    near = [max(size for size in divisors if size < tp), *[size for size in divisors if size > tp][:1]]
    raise UsageError(
        f"--num-gpus {count}",
        f"--tp {tp} does not divide the {spec.num_heads} attention heads of {spec.name}",
        f"{', or '.join(ways)}, or take {' or '.join(str(size * stages) for size in near)} GPUs",
    )
