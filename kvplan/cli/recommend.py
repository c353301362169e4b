"""`kvplan recommend`: find GPUs and flags that hold a number of users, or what given GPUs need to hold them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvplan.asked.form import COMMON_GPUS, Form, load_of, read_form, refuse_missing
from kvplan.asked.question import MODEL_CURE, Context, Inputs, requests
from kvplan.cli import output
from kvplan.cli.options import stated_by, whole_form
from kvplan.cli.output import report_files
from kvplan.cli.recommend_timed import check_alone
from kvplan.cli.sweep_options import RecommendOptions
from kvplan.cli.tune_options import TuneOptions
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.units import parse_count
from kvplan.hardware import prices as price_file
from kvplan.hardware.gpu import gpu, split_count
from kvplan.hardware.prices import Prices
from kvplan.models.spec import ModelSpec
from kvplan.planning.recommend import MOST_USERS, Placement, Question, fit, recommend, with_args
from kvplan.report import recommend_text as text
from kvplan.report.formats import CommandAnswer, rendered
from kvplan.servers.base import abilities_of, titles
from kvplan.servers.plans.plan import Load, Request, check_load

if TYPE_CHECKING:
    from kvplan.documents.recommendation import RecommendationDocument

Options = TypeVar("Options", RecommendOptions, TuneOptions)
PLACEMENTS = 10
# Options that the search decides, or that would make every GPU hold the same.
SOUGHT = {
    "data_parallel_size": "the number of replicas is computed",
    "kv_cache_memory_bytes": "the size of the pool is computed",
    "num_gpu_blocks_override": "the size of the pool is computed",
}


def recommend_command(options: RecommendOptions) -> int:
    """Recommend and return the exit code: 0, or with --exit-code 1 if the answer is no."""
    with report_files(options.report or [], force=options.force) as reports:
        limit = parse_count(options.limit, "--limit") if options.limit is not None else PLACEMENTS
        check_alone(options)
        holds, response, written = by_memory(options, limit) if options.slo is None else by_time(options, limit)
        for report in reports:
            report.save(rendered(response, report.format))
        if written is None:
            output.answer(response, options.format, options.color)
        else:
            output.write(written)
    return int(options.exit_code and not holds)


def by_memory(options: RecommendOptions, limit: int) -> tuple[bool, CommandAnswer, str | None]:
    """(True if the answer is yes, its formats, the requested manifest)."""
    doc, chosen = answered(options)
    written = None if options.output is None else manifest_of(options, doc, chosen)
    return doc["holds"], answer(doc, limit), written


def by_time(options: RecommendOptions, limit: int) -> tuple[bool, CommandAnswer, str | None]:
    """The same question with latency targets: each placement is simulated."""
    from kvplan.cli.recommend_timed import timed
    from kvplan.report.timed_text import shapes

    refuse_missing(("MODEL", whole_form(options).names_model, MODEL_CURE))
    prices = None if options.prices is None else price_file.read(Path(options.prices))
    stated = stated_by(options, SOUGHT)
    question = Question(
        1, stated, options.fp8, options.fp8_weights, "likely" if options.optimistic else "low",
        prices.per_hour if prices else None,
    )  # fmt: skip
    is_fixed = options.gpu is not None or options.gpu_memory is not None
    form = whole_form(options).changed(prompt_tokens=None, output_tokens=None, shared_prefix=None)
    doc = timed(options, question, requests_of(form, options, prices, is_fixed=is_fixed))
    return doc["holds"], shapes(doc, limit), None


def answer(doc: RecommendationDocument, limit: int) -> CommandAnswer:
    return CommandAnswer(
        lambda _: text.table_lines(doc, limit),
        lambda: doc,
        lambda: text.rows_table(doc),
        lambda: text.page(doc, limit),
        lambda: text.cost_bars(doc, limit),
        [doc["question"]["engine"]],
    )


def manifest_of(options: RecommendOptions, doc: RecommendationDocument, chosen: Placement | None) -> str:
    """Manifest of the best answer."""
    from kvplan.report.deployment import manifest

    assert options.output is not None
    if options.format != "table":
        raise UsageError("--output and --format", "are mutually exclusive", "use only one")
    if chosen is None:
        raise UsageError("--output", "no placement fits these users", "rerun without --output to see what would")
    title = text.commands(doc)[0][0]
    return manifest(
        chosen.plan, chosen.servers, options.output, f"{doc['answer']}{f'. This is: {title}' if title else ''}"
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def answered(options: RecommendOptions) -> tuple[RecommendationDocument, Placement | None]:
    """(the answer, its first placement, or None if nothing holds the users)."""
    refuse_missing(
        ("MODEL", whole_form(options).names_model, MODEL_CURE),
        ("--users", options.users is not None, "add the number of concurrent users, e.g. --users 200"),
    )
    assert options.users is not None
    users = parse_count(options.users, "--users", MOST_USERS)
    options = with_num_gpus(options)
    is_fixed = options.gpu is not None or options.gpu_memory is not None
    check_together(options, is_fixed=is_fixed)
    prices = None if options.prices is None else price_file.read(Path(options.prices))
    stated = stated_by(options, SOUGHT)
    question = Question(
        users=users,
        stated=stated,
        fp8_kv=options.fp8,
        fp8_weights=options.fp8_weights,
        end="likely" if options.optimistic else "low",
        prices=prices.per_hour if prices else None,
    )
    inputs = requests_of(whole_form(options), options, prices, is_fixed=is_fixed)
    output.say(inputs, quiet=options.quiet)
    source = prices.source if prices else None
    first = inputs.requests[0]
    if not abilities_of(first.release.engine).recommended:
        names, _ = titles(lambda can: can.recommended)
        problem = f"without --slo, recommend supports only {names}"
        raise UsageError(
            "--engine", problem, "add --slo ttft.p90=2s with a load, or compare servers with `kvplan sweep --engine`"
        )
    if first.spec.is_encoder:
        raise UsageError(
            "recommend", f"{first.spec.name} is an encoder, which serves no users at once", "`kvplan estimate` sizes it"
        )
    if not is_fixed:
        recommendation = recommend(question, inputs.requests)
        errors = [failure.error for failure in recommendation.failures if failure.error is not None]
        if not recommendation.placements and errors and len(errors) == len(recommendation.failures):
            reason = errors[0]  # impossible on every GPU
            raise UsageError(reason.subject, reason.problem, reason.remedy)
        return text.document(question, first, source, recommendation, None), next(iter(recommendation.placements), None)
    request, replicas = given_gpus(options, first, stated)
    needs = fit(question, request, replicas)
    return text.document(question, request, source, None, needs), needs.solution or next(iter(needs.cures), None)


def with_num_gpus(options: Options) -> Options:
    """Rewrite --gpu 2xl40s as --gpu l40s --num-gpus 2."""
    if options.gpu is None or len(options.gpu) != 1:
        return options
    count, name = split_count(options.gpu[0])
    if count is None:
        return options
    if options.num_gpus is not None and parse_count(options.num_gpus, "--num-gpus", 1024) != count:
        raise UsageError("--gpu", f"says {count} GPUs, and --num-gpus {options.num_gpus}", "use only one")
    return replace(options, gpu=[name], num_gpus=str(count))


def check_together(options: RecommendOptions, *, is_fixed: bool) -> None:
    if is_fixed and options.gpus is not None:
        raise UsageError(
            "--gpu and --gpus", "the first asks what one GPU needs, the second which GPU to choose", "use only one"
        )
    if is_fixed and len(",".join(options.gpu or []).split(",")) > 1:
        raise UsageError("--gpu", "takes one GPU here", "use --gpus to choose among several")
    if options.num_gpus is not None and not is_fixed:
        raise UsageError("--num-gpus", "counts GPUs of one kind", "name it with --gpu")
    if is_fixed and options.prices is not None:
        raise UsageError("--prices", "rank several GPUs", "remove it, or use --gpus instead of --gpu")


def requests_of(form: Form, options: RecommendOptions, prices: Prices | None, *, is_fixed: bool) -> Inputs:
    """One request per candidate GPU, or for the given one; their lengths are not yet truncated to the context."""

    def load(context: Context, spec: ModelSpec) -> Load:
        return load_of(form, spec.context_limit if is_fixed else context, spec)

    query = read_form(form if is_fixed else form.changed(gpu=gpu_names(options, prices)))
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
    return inputs


def gpu_names(options: RecommendOptions, prices: Prices | None) -> list[str]:
    """Candidate GPUs: those named, else those with a price, else the common ones."""
    if options.gpus is None:
        return list(prices.per_hour) if prices else list(COMMON_GPUS)
    names = [name.strip() for text in options.gpus for name in text.split(",")]
    if "" in names:
        raise UsageError("--gpus", "contains an empty name", "write one, or several separated by commas: a100-80g,h200")
    counted = next((name for name in names if split_count(name)[0] is not None), None)
    if counted is not None:
        raise UsageError(
            "--gpus", f"recommend finds the number of GPUs itself ({printable(counted, 60)!r})", "use --gpu for it"
        )
    return list(dict.fromkeys(gpu(name).name for name in names))


def given_gpus(options: RecommendOptions, request: Request, stated: frozenset[str]) -> tuple[Request, int]:
    """(request of one server, number of servers): --num-gpus divided by --tp x --pp; without --tp, one server."""
    args = request.args
    ranks = args.world_size
    if options.num_gpus is None:
        return request, 1
    count = parse_count(options.num_gpus, "--num-gpus", 1024)
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
