"""`kvplan recommend`: find GPUs and flags that hold a number of users, or what given GPUs need to hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplan.asked.form import refuse_missing
from kvplan.asked.question import MODEL_CURE
from kvplan.cli import output
from kvplan.cli.options import stated_by, whole_form
from kvplan.cli.output import report_files
from kvplan.cli.recommend_timed import check_alone
from kvplan.cli.sweep_options import RecommendOptions
from kvplan.core.errors import UsageError
from kvplan.core.units import parse_count
from kvplan.planning import offers
from kvplan.planning.choice import SOUGHT, Goal, choice_of, requests_of
from kvplan.planning.recommend import Placement
from kvplan.report import recommend_text as text
from kvplan.report.formats import CommandAnswer, rendered

if TYPE_CHECKING:
    from kvplan.documents.recommendation import RecommendationDocument

PLACEMENTS = 10


def recommend_command(options: RecommendOptions) -> int:
    """Recommend and return the exit code: 0, or with --exit-code 1 if the answer is no."""
    with report_files(options.report or [], force=options.force) as reports:
        limit = parse_count(options.limit, "--limit") if options.limit is not None else PLACEMENTS
        check_alone(options)
        if options.slo is None and offers.compares(whole_form(options)):
            holds, response, written = by_server(options)
        else:
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
    choice = choice_of(whole_form(options), goal_of(options))
    output.say(choice.inputs, quiet=options.quiet)
    chosen = choice.answer()
    doc = text.document_of(chosen)
    if choice.is_fixed and not doc["holds"] and options.engine is None and not options.quiet:
        output.tell("note", f"--engine {offers.EVERY} asks every server, also those that load quantized files")
    written = None if options.output is None else manifest_of(options, doc, chosen.placement)
    return doc["holds"], text.shapes(doc, limit, chosen), written


def by_server(options: RecommendOptions) -> tuple[bool, CommandAnswer, str | None]:
    """Which of several servers, or which type of file, holds the users."""
    from kvplan.report import offers_text

    if options.output is not None:
        raise UsageError("--output", "writes the manifest of one server", "name it with --engine, or remove --output")
    answer, inputs = offers.offers_of(whole_form(options), goal_of(options))
    output.say(inputs, quiet=options.quiet)
    doc = offers_text.document(answer)
    return doc["holds"], offers_text.shapes(doc), None


def goal_of(options: RecommendOptions) -> Goal:
    return Goal(
        options.users, options.gpus, options.num_gpus, options.prices, options.fp8, options.fp8_weights,
        options.optimistic,
    )  # fmt: skip


def by_time(options: RecommendOptions, limit: int) -> tuple[bool, CommandAnswer, str | None]:
    """The same question with latency targets: each placement is simulated."""
    from kvplan.cli.recommend_timed import timed
    from kvplan.report.timed_text import shapes

    refuse_missing(("MODEL", whole_form(options).names_model, MODEL_CURE))
    goal = goal_of(options)
    prices = goal.read_prices()
    question = goal.question(1, stated_by(options, SOUGHT), prices)
    form = whole_form(options).changed(prompt_tokens=None, output_tokens=None, shared_prefix=None)
    doc = timed(options, question, requests_of(form, goal, prices), prices.source if prices else None)
    return doc["holds"], shapes(doc, limit), None


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
