"""`kvplan simulate`: a plan under a workload over time, and the largest load that meets the latency targets."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, TypeVar

from kvplan.asked.form import refuse_missing
from kvplan.asked.question import MODEL_CURE
from kvplan.cli import fleet, output
from kvplan.cli.drawing import FIGURES, require_libraries
from kvplan.cli.load import Load, load_of
from kvplan.cli.load_options import LoadOptions
from kvplan.cli.options import inputs_of, whole_form
from kvplan.cli.progress import Interruption, Progress, interruptible
from kvplan.cli.simulate_options import SimulateOptions
from kvplan.core.errors import INTERRUPTED, UsageError
from kvplan.core.files import printable
from kvplan.core.table import as_csv
from kvplan.core.units import parse_fraction, parse_size, parse_tokens, plural
from kvplan.planning.plan import Plan, plan
from kvplan.report import request_rows, trace_events
from kvplan.report.drawing import Figure, Svg
from kvplan.servers.base import abilities_of
from kvplan.servers.plans.pool import prefix_notes
from kvplan.simulate import generator, ranges, slo
from kvplan.simulate.fleet import Fleet
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.outcome import SimulationAnswer, Variant
from kvplan.simulate.ranges import unseen_note
from kvplan.simulate.result import result
from kvplan.simulate.runs import Run
from kvplan.simulate.setup import Setup, check, refuse_reordering, timed_tiers
from kvplan.simulate.steptime import step_time
from kvplan.simulate.tiers import TierSpec
from kvplan.simulate.tracks import Tracks, follow

STEADY = 20  # requests above a percentile with which another seed changes little
CSV = {".csv": "csv"}
HTML = {".html": "html"}
ROWS = request_rows.FORMATS
Options = TypeVar("Options", bound=LoadOptions)
Started = TypeVar("Started", bound=Run)


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
        if fleet.is_fleet(options):
            return of_fleet(options, reports, timeline, requests)
        the_plan = planned(options)
        load = load_of(options)
        if options.shared_prefix is not None:
            for note in prefix_notes(load.source.run_len or 0, the_plan.settings, the_plan.pool):
                output.tell("note", note)
        if films:
            from kvplan.simulate.film import check_drawable

            cure = "use a smaller --gpu-memory-utilization or a larger --block-size"
            check_drawable(the_plan.capacity.num_blocks, cure)
        setups = setups_of(the_plan, options)
        with interruptible(quiet=options.quiet) as interruption:
            answer = answered(the_plan, setups, load, options, interruption)
            tracks = tracks_of(setups, load, interruption) if traces else []
        from kvplan.report import simulate_text as text

        response = text.shapes(answer, lambda: over_time(answer))
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
    return int(options.exit_code and not all(outcome.verdict == "kept" for outcome in answer.variants[0].outcomes))


def of_fleet(
    options: SimulateOptions,
    reports: list[output.ReportFile],
    timeline: list[output.ReportFile],
    requests: list[output.ReportFile],
) -> int:
    """Simulate several servers."""
    load = load_of(options)
    with interruptible(quiet=options.quiet) as interruption:
        progress = Progress(load.source.num_requests, load.how, quiet=options.quiet)

        def stop_early(running: Fleet) -> bool:
            progress.show(running.num_finished)
            return interruption.is_asked

        try:
            answer = fleet.fleet_answer(options, planned, shares_of(options.efficiency), load, stop_early)
        finally:
            progress.close()
    from kvplan.report import fleet_text
    from kvplan.report.simulate_text import timeline_table

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


def planned(options: SimulateOptions) -> Plan:
    """The one plan to simulate."""
    sources = (options.trace, options.profile, options.prompt_tokens, options.output_tokens)
    refuse_missing(
        ("MODEL", whole_form(options).names_model, MODEL_CURE),
        ("--gpu", whole_form(options).names_gpu, "name the GPU to simulate"),
        ("workload", any(sources), "give one of --trace, --profile, --prompt-tokens"),
    )
    inputs = inputs_of(options)
    request = inputs.only("simulate", "name one --gpu and one --ctx")
    output.say(inputs, quiet=options.quiet)
    the_plan = plan(request)
    check(the_plan, tiers_of(options.tier or ()))
    if options.from_command is not None:
        refuse_reordering(options.from_command)
    if abilities_of(the_plan.request.release.engine).prompts_first is not None:
        for flag, path in (("--film", options.film), (trace_events.FLAG, options.trace_events)):
            if path is not None:
                raise UsageError(flag, "draws vLLM's blocks only", "use --engine vllm")
    return the_plan


# --- the runs ---------------------------------------------------------------------------------------------------------


def answered(
    the_plan: Plan, setups: Mapping[str, Setup], load: Load, options: SimulateOptions, interruption: Interruption
) -> SimulationAnswer:
    promises = () if options.slo is None else slo.parse_slo(options.slo)
    if not options.quiet:
        say_how_steady(promises, load.source.num_requests - load.skipped)
    uncertainty = ranges.modeled(the_plan) if options.calibration is None else ranges.calibrated()
    variants: list[Variant] = []
    for name, setup in setups.items():
        if not interruption.is_asked:
            variants.append(variant(name, setup, load, promises, uncertainty, interruption))
    if uncertainty.unseen and not options.quiet:
        output.tell("note", unseen_note(uncertainty.unseen))
    if not options.quiet and not interruption.is_asked:
        say_who_joined(load, variants[0].result.seconds)
    times = next(iter(setups.values())).step_time
    return SimulationAnswer(
        the_plan, load.text, times.text, load.how, load.is_closed, promises, tuple(variants), uncertainty
    )


def setups_of(the_plan: Plan, options: SimulateOptions) -> dict[str, Setup]:
    """Setup of the requested server, and those of the servers that it is compared with."""
    tiers = tiers_of(options.tier or ())
    if options.tier_chunk is not None and not tiers:
        raise UsageError("--tier-chunk", "needs --tier", "remove it")
    chunk = None if options.tier_chunk is None else parse_tokens(options.tier_chunk, "--tier-chunk")
    timed_tiers(the_plan, tiers, chunk)  # refuses tiers that hold nothing
    times = step_time(the_plan, shares_of(options.efficiency), options.calibration)
    base = Setup(the_plan, times, tiers, chunk)
    setups = {"with tiers" if tiers else "paged": base}
    if tiers:
        setups["without tiers"] = replace(base, tiers=())
    if options.baseline is not None:
        setups["contiguous"] = replace(base, tiers=(), allocator="contiguous")
    return setups


def over_time(answer: SimulationAnswer) -> list[Figure]:
    """Requests, the KV pool and first tokens over time; none without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    from kvplan.report.simulate_figures import sheets

    return [Svg("Over time", sheets(answer))]


def film_page(answer: SimulationAnswer, setups: Mapping[str, Setup], load: Load) -> str:
    """The pool step by step, and that of --baseline."""
    from kvplan.report.film_html import film_html
    from kvplan.report.simulate_text import title
    from kvplan.simulate.film import filmed

    films = filmed(setups.items(), load.source, load.arrivals)
    return film_html(films, title(answer), "planned", [answer.plan.request.release.label])


def tracks_of(setups: Mapping[str, Setup], load: Load, interruption: Interruption) -> list[Tracks]:
    """Every request and step of each server, from separate runs: the answer's runs take several steps at once."""
    tracks = []
    for name, setup in setups.items():
        if not interruption.is_asked:
            simulation, followed = follow(name, setup, load.arrivals(), load.source.run_len)
            run(simulation, load, interruption)
            tracks.append(followed.complete(simulation))
    return tracks


def say_how_steady(promises: tuple[slo.Promise, ...], judged: int) -> None:
    """Note percentiles that rest on a handful of requests: another seed would change them."""
    for promise in promises:
        above = judged * (1 - promise.share)
        if promise.metric is not None and above < STEADY:
            output.tell(
                "note",
                f"--slo: {promise.name} of {judged:,} requests depends on the {max(1, round(above)):,} slowest; "
                "raise --num-requests for a steadier figure",
            )


def say_who_joined(load: Load, seconds: float) -> None:
    """Note a run that ends before all its users have joined: they never run together."""
    from kvplan.report.simulate_text import duration

    if load.is_closed and seconds < load.ramp_s:
        ramp = duration(load.ramp_s)
        output.tell(
            "note",
            f"the run ends after {duration(seconds)}, before all {load.how} have joined, which takes {ramp}; "
            "raise --num-requests, or use --ramp 0s to start them together",
        )


def variant(
    name: str,
    setup: Setup,
    load: Load,
    promises: tuple[slo.Promise, ...],
    uncertainty: ranges.Ranges,
    interruption: Interruption,
) -> Variant:
    simulation = run(setup.run(load.arrivals(), load.source.run_len), load, interruption)
    if interruption.is_asked and not len(simulation.records):
        raise KeyboardInterrupt
    figures = result(simulation, load.skipped, by_clock=not load.is_closed and load.users is None)
    if not figures.judged and setup.allocator == "paged":
        capacity = setup.plan.capacity
        reasons, cures = list[str](), list[str]()
        if figures.rejected:
            context = f"the context ({capacity.max_model_len:,} tokens)"
            are = "is" if figures.rejected == 1 else "are"
            reasons.append(f"{plural(figures.rejected, 'prompt')} {are} longer than {context}")
            cures.append("raise --ctx")
        if figures.failed:
            pool = f"the pool ({capacity.num_blocks:,} blocks)"
            reasons.append(f"{plural(figures.failed, 'request')} larger than {pool}")
            cures.append("use a larger GPU, or more of them")
        raise UsageError("simulate", f"no request is served: {', '.join(reasons)}", "; ".join(cures))
    if not promises:
        return Variant(name, simulation, figures)
    outcomes = slo.outcomes(promises, simulation, load.skipped, uncertainty)
    good = slo.good_requests(promises, simulation, load.skipped)
    return Variant(name, simulation, figures, outcomes, largest(setup, load, promises, interruption), good)


def run(
    simulation: Started, load: Load, interruption: Interruption, stop: Callable[[Run], bool] | None = None
) -> Started:
    progress = Progress(load.source.num_requests, load.how, quiet=interruption.quiet)

    def stop_early(simulation: Run) -> bool:
        progress.show(len(simulation.records))
        return interruption.is_asked or (stop is not None and stop(simulation))

    simulation.stop = stop_early
    try:
        simulation.run()
    finally:
        progress.close()
    return simulation


def largest(
    setup: Setup, load: Load, promises: tuple[slo.Promise, ...], interruption: Interruption
) -> slo.Largest | None:
    """The largest rate, or number of users, that meets every target, or None if all requests come at once."""
    if load.amount is None or interruption.is_asked:
        return None

    def keeps(amount: float) -> bool:
        scaled = load.scaled(amount)
        broken = slo.Broken(promises, scaled.source.num_requests, scaled.skipped)
        simulation = run(setup.run(scaled.arrivals(), scaled.source.run_len), scaled, interruption, broken)
        return not broken(simulation) and all(
            outcome.is_kept for outcome in slo.outcomes(promises, simulation, scaled.skipped)
        )

    if not load.is_closed:
        limit = slo.largest_rate(load.amount, keeps)
    else:  # every user is judged by some of their own requests
        limit = slo.largest_users(int(load.amount), keeps, max(1, load.source.num_requests // 2))
    return None if interruption.is_asked else limit


# --- reading ----------------------------------------------------------------------------------------------------------


def tiers_of(texts: Sequence[str]) -> tuple[TierSpec, ...]:
    tiers = tuple(map(parse_tier, texts))
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names):
        raise UsageError("--tier", f"two tiers have one name ({', '.join(names)})", "give each tier its own name")
    return tiers


def parse_tier(text: str) -> TierSpec:
    """Parse `cpu=512GiB@25GB/s`."""
    match = re.fullmatch(r"([A-Za-z][A-Za-z0-9_-]{0,30})=([^@]+)@([^@]+)/s", text)
    if match is None:
        raise UsageError(
            f"--tier {printable(repr(text), 80)}", "is not a tier", "write name=size@speed: cpu=512GiB@25GB/s"
        )
    name, size, speed = match.groups()
    return TierSpec(name, parse_size(size, "--tier"), parse_size(speed, "--tier"))


def shares_of(text: str | None) -> Shares:
    shares: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        name, _, share = part.partition("=")
        if name not in ("weights", "kv", "flops") or name in shares:
            raise UsageError(
                "--efficiency", f"{printable(repr(part), 60)} is not understood", "write weights=0.7,kv=0.9,flops=0.6"
            )
        shares[name] = parse_fraction(share, "--efficiency")
    return Shares(**shares)
