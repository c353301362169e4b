"""`kvplan tune`: find the flags with the highest throughput on given GPUs under a load and latency targets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvplan.cli import output
from kvplan.cli.options import whole_form
from kvplan.cli.simulate import with_generator
from kvplan.cli.simulate_options import TuneOptions, words_of
from kvplan.cli.workers import at_work, workers_of
from kvplan.core.units import parse_count
from kvplan.planning.choice import counted
from kvplan.report.formats import rendered
from kvplan.simulate.tuned import Listener, TuneQuestion, tuned

if TYPE_CHECKING:
    from kvplan.documents.tune import TuneDocument

ROWS: Final = 10


def tune_command(options: TuneOptions) -> int:
    """Tune and return the exit code: 0, or with --exit-code 1 if the load may not be served."""
    with output.report_files(options.report or [], force=options.force) as reports:
        limit = parse_count(options.limit, "--limit") if options.limit is not None else ROWS
        try:
            doc = answered(options)
        except KeyboardInterrupt:
            output.tell("warning", "interrupted: no setting was chosen")
            raise
        from kvplan.report.tune_text import shapes

        response = shapes(doc, limit)
        for report in reports:
            report.save(rendered(response, report.format))
        output.answer(response, options.format, options.color)
    return int(options.exit_code and doc["verdict"] not in (None, "kept"))


def answered(options: TuneOptions) -> TuneDocument:
    from kvplan.report.tune_text import document

    gpus, num_gpus = counted(options.gpu, options.num_gpus)
    options = with_generator(replace(options, gpu=gpus, num_gpus=num_gpus))
    jobs = workers_of(options.jobs, options.ray)
    question = TuneQuestion(
        whole_form(options), words_of(options), options.num_gpus, options.slo, options.tier, options.fp8
    )
    listener = Listener(lambda inputs: output.say(inputs, quiet=options.quiet), output.tell, quiet=options.quiet)
    return document(*tuned(question, jobs, listener, at_work(jobs, quiet=options.quiet)))
