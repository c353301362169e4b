"""`kvplan simulate`: a plan under a workload over time, and the largest load that meets the latency targets."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvplan.cli import output
from kvplan.cli.drawing import FIGURES, require_libraries
from kvplan.cli.options import whole_form
from kvplan.cli.progress import Interruption, Progress, interruptible
from kvplan.cli.simulate_options import LoadOptions, SimulateOptions, is_fleet, words_of
from kvplan.core.errors import INTERRUPTED, UsageError
from kvplan.core.table import as_csv
from kvplan.core.units import plural
from kvplan.planning.plan import Plan
from kvplan.report import request_rows, trace_events
from kvplan.servers.base import abilities_of
from kvplan.servers.plans.pool import prefix_notes
from kvplan.simulate import slo
from kvplan.simulate.drafts import Acceptance
from kvplan.simulate.load import Load, load_of
from kvplan.simulate.outcome import SimulationAnswer
from kvplan.simulate.question import answered, planned, run, setups_of, shares_of
from kvplan.simulate.setup import Setup

if TYPE_CHECKING:
    from kvplan.simulate.fleet import Fleet
    from kvplan.simulate.tracks import Tracks

CSV = {".csv": "csv"}
HTML = {".html": "html"}
ROWS = request_rows.FORMATS
Options = TypeVar("Options", bound=LoadOptions)


def simulate(options: SimulateOptions) -> int:
    """Simulate and return the exit code: 0, or with --exit-code 1 if a target may be missed."""
    options = with_generator(options)
    with ExitStack() as files:
        reports = files.enter_context(output.report_files(options.report or [], force=options.force))
        timeline = files.enter_context(only(options, options.timeline, "--timeline", CSV))
        requests = files.enter_context(only(options, options.requests, "--requests", ROWS))
        figures = files.enter_context(only(options, options.figure, "--figure", FIGURES))
        films = files.enter_context(only(options, options.film, "--film", HTML))
        traces = files.enter_context(only(options, options.trace_events, trace_events.FLAG, trace_events.FORMATS))
        if options.figure is not None:
            require_libraries("--figure", "matplotlib")
        if requests and requests[0].format == "parquet":
            request_rows.require_parquet()
        if traces and traces[0].format == "pftrace":
            trace_events.require_perfetto()
        if is_fleet(options):
            return of_fleet(options, reports, timeline, requests, planned_of)
        the_plan = planned_of(options)
        if (size := the_plan.request.args.data_parallel_size) > 1:
            ranks = replace(options, replicas="1")
            is_fleet(ranks)
            output.tell("note", f"{size} data-parallel ranks are simulated as servers behind a router")
            return of_fleet(ranks, reports, timeline, requests, lambda _: the_plan)
        load = load_of(words_of(options), output.tell)
        if options.shared_prefix is not None:
            for note in prefix_notes(load.source.run_len or 0, the_plan.settings, the_plan.pool):
                output.tell("note", note)
        setups = setups_of(
            the_plan, tier=options.tier or (), tier_chunk=options.tier_chunk, efficiency=options.efficiency,
            calibration=options.calibration, baseline=options.baseline, acceptance=acceptance_of(options),
            adapters=options.adapters,
        )  # fmt: skip
        promises = () if options.slo is None else slo.parse_slo(options.slo)
        with interruptible(quiet=options.quiet) as interruption:
            answer = answered(
                the_plan, setups, load, promises, interruption, is_calibrated=options.calibration is not None
            )
            tracks = tracks_of(setups, load, interruption) if traces else []
        from kvplan.report import simulate_text as text

        response = text.shapes(answer, lambda: text.over_time(answer))
        main = answer.variants[0].simulation
        for file in timeline:
            file.save(as_csv(text.timeline_table([(0, main)])))
        for file in requests:
            file.save(request_rows.written(main, file.format))
        for file in figures:
            from kvplan.report.simulate_figures import drawn

            file.save(drawn(answer, file.format))
        for file in films:
            file.save(film_page(answer, setups, load))
        for file in traces:
            file.save(trace_events.written(map(trace_events.server, tracks), file.format))
        output.answer(response, options.format, options.color, reports)
    if interruption.is_asked:
        return interrupted(answer.variants[0].result.finished, load)
    return int(options.exit_code and not all(outcome.verdict == "kept" for outcome in answer.outcomes))


def of_fleet(
    options: SimulateOptions,
    reports: list[output.ReportFile],
    timeline: list[output.ReportFile],
    requests: list[output.ReportFile],
    plan_of: Callable[[SimulateOptions], Plan],
) -> int:
    """Simulate several servers, or the data-parallel ranks of one."""
    from kvplan.cli.fleet import fleet_answer

    load = load_of(words_of(options), output.tell)
    with interruptible(quiet=options.quiet) as interruption:
        progress = Progress(load.source.num_requests, load.how, quiet=options.quiet)

        def stop_early(running: "Fleet") -> bool:
            progress.show(running.num_finished)
            return interruption.is_asked

        try:
            answer = fleet_answer(options, plan_of, shares_of(options.efficiency), load, stop_early)
        finally:
            progress.close()
    from kvplan.report import fleet_text
    from kvplan.report.simulate_text import timeline_table

    if late := sum(replica.state == "starting" for replica in answer.fleet.replicas):
        output.tell(
            "note", f"{plural(late, 'server')} not up before the end; more --num-requests show what they change"
        )

    response = fleet_text.shapes(answer)
    main = answer.total.variants[0]
    for file in timeline:
        runs = [(replica.index, life.run) for replica in answer.fleet.replicas for life in replica.lives]
        file.save(as_csv(timeline_table(runs)))
    for file in requests:
        file.save(request_rows.written(answer.fleet, file.format))
    output.answer(response, options.format, options.color, reports)
    if interruption.is_asked:
        return interrupted(main.result.finished, load)
    return int(options.exit_code and not all(outcome.verdict == "kept" for outcome in main.outcomes))


def interrupted(finished: int, load: Load) -> int:
    """Warn that the figures are partial, and return the exit code."""
    output.tell("warning", f"interrupted: the figures cover {finished:,} of {load.source.num_requests:,} requests")
    return INTERRUPTED


def with_generator(options: Options) -> Options:
    """Fill options that are not given from a load generator's command."""
    text = options.bench_command
    if text is None and options.from_command is None:
        return options
    from kvplan.simulate import generator

    if text is None and options.from_command is not None and generator.is_generator(options.from_command):
        text, options = options.from_command, replace(options, from_command=None)
    if text is None:
        return options
    options_said = generator.options_of(text)
    if options.from_command is not None:  # it names the model
        options_said.pop("model", None)
    for source in ("trace", "profile", "prompt_tokens", "output_tokens"):
        if getattr(options, source) is not None:  # another source
            options_said = {
                name: value
                for name, value in options_said.items()
                if name not in ("profile", "prompt_tokens", "output_tokens")
            }
    if options.users is not None:
        options_said = {
            name: value for name, value in options_said.items() if name not in ("rate", "arrivals", "max_concurrency")
        }
    taken: dict[str, Any] = {name: value for name, value in options_said.items() if getattr(options, name) is None}
    if not options.quiet:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in taken.items() if name != "model")
        output.tell("note", f"flags read from the load generator's command: {flags}")
    return replace(options, **taken)


def only(
    options: SimulateOptions, path: str | None, flag: str, suffixes: Mapping[str, str]
) -> AbstractContextManager[list[output.ReportFile]]:
    """Report file of a flag, if given."""
    return output.report_files([] if path is None else [path], flag, suffixes, force=options.force)


def planned_of(options: SimulateOptions) -> Plan:
    """The one plan to simulate."""
    the_plan = planned(
        whole_form(options),
        words_of(options),
        options.tier or (),
        lambda inputs: output.say(inputs, quiet=options.quiet),
    )
    if abilities_of(the_plan.request.release.engine).prompts_first is not None:
        for flag, path in (("--film", options.film), (trace_events.FLAG, options.trace_events)):
            if path is not None:
                raise UsageError(flag, "draws vLLM's blocks only", "use --engine vllm")
    return the_plan


def acceptance_of(options: SimulateOptions) -> Acceptance:
    return Acceptance(options.synthetic_acceptance_length, options.synthetic_acceptance_rates)


def film_page(answer: SimulationAnswer, setups: Mapping[str, Setup], load: Load) -> str:
    """The pool step by step, and that of --baseline."""
    from kvplan.report.film_html import film_html
    from kvplan.report.simulate_text import title
    from kvplan.simulate.film import filmed

    films = filmed(setups.items(), load.source, load.arrivals)
    return film_html(films, title(answer), "planned", [answer.plan.request.release.label])


def tracks_of(setups: Mapping[str, Setup], load: Load, interruption: Interruption) -> "list[Tracks]":
    """Every request and step of each server, from separate runs: the answer's runs take several steps at once."""
    from kvplan.simulate.tracks import follow

    tracks = []
    for name, setup in setups.items():
        if not interruption.is_asked:
            simulation, followed = follow(name, setup, load.arrivals(), load.source.run_len)
            run(simulation, load, interruption)
            tracks.append(followed.complete(simulation))
    return tracks
