"""`kvplan simulate`: a plan and a workload -> what happens in time, and the largest load that keeps its promises."""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from kvplan.cli import output
from kvplan.cli.asked import MODEL_CURE, read, refuse_missing, say, says_gpu, says_model
from kvplan.cli.drawing import FIGURES, require_libraries
from kvplan.cli.simulate_options import SimulateOptions
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.table import as_csv
from kvplan.core.units import MAX_TOKENS, parse_count, parse_duration, parse_fraction, parse_size, parse_tokens
from kvplan.planning.plan import Plan, plan
from kvplan.report.formats import rendered
from kvplan.report.simulate_text import rate_text
from kvplan.servers.vllm.size import prefix_notes
from kvplan.simulate import ranges, slo
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.loop import Simulation
from kvplan.simulate.outcome import Answer, Variant
from kvplan.simulate.result import result
from kvplan.simulate.setup import Setup, check
from kvplan.simulate.source import Source, from_lengths, from_profile, from_trace, with_shared_prefix
from kvplan.simulate.steptime import Shares, step_time
from kvplan.simulate.tiers import CHUNK_TOKENS, TierSpec
from kvplan.workloads.lengths import Lengths, parse_lengths
from kvplan.workloads.profiles import parse_rate, profile
from kvplan.workloads.trace import read as read_trace

NUM_REQUESTS = 2000
PER_USER, MOST_BY_DEFAULT = 10, 20_000  # requests of users, where no number is stated
RAMP_S = 60.0
PROGRESS_S = 10.0
STEADY = 20  # requests above a percentile, from which on another seed changes little
CSV = {".csv": "csv"}


def simulate(options: SimulateOptions) -> int:
    """Answer, and return the exit code: 0, or with --exit-code 1 where a promise is not surely kept."""
    with ExitStack() as files:
        reports = files.enter_context(output.report_files(options.report or [], force=options.force))
        timeline = files.enter_context(only(options, options.timeline, "--timeline", CSV))
        requests = files.enter_context(only(options, options.requests, "--requests", CSV))
        figures = files.enter_context(only(options, options.figure, "--figure", FIGURES))
        if options.figure is not None:
            require_libraries("--figure", "matplotlib")
        the_plan = planned(options)
        load = load_of(options)
        if options.shared_prefix is not None:
            for note in prefix_notes(load.source.run_len or 0, the_plan.settings, the_plan.pool):
                output.tell("note", note)
        answer = answered(the_plan, load, options)
        from kvplan.report import simulate_text as text

        given = text.shapes(answer)
        for report in reports:
            report.save(rendered(given, report.format))
        main = answer.variants[0].simulation
        for file in timeline:
            file.save(as_csv(text.timeline_table(main)))
        for file in requests:
            file.save(as_csv(text.requests_table(main)))
        for file in figures:
            from kvplan.report.simulate_figures import drawn

            file.save(drawn(answer, file.format))
        output.answer(given, options.format, options.color)
    return int(options.exit_code and not all(kept.verdict == "kept" for kept in answer.variants[0].kept))


def only(
    options: SimulateOptions, path: str | None, flag: str, suffixes: Mapping[str, str]
) -> AbstractContextManager[list[output.ReportFile]]:
    """The file that a flag names, if it names one."""
    return output.report_files([] if path is None else [path], flag, suffixes, force=options.force)


def planned(options: SimulateOptions) -> Plan:
    """The one plan that is simulated."""
    sources = (options.trace, options.profile, options.prompt_tokens, options.output_tokens)
    refuse_missing(
        ("MODEL", says_model(options), MODEL_CURE),
        ("--gpu", says_gpu(options), "name the GPU to simulate"),
        ("what comes", any(sources), "give one of --trace, --profile, --prompt-tokens"),
    )
    asked = read(options)
    if len(asked.requests) != 1:
        raise UsageError("simulate", f"{len(asked.requests)} plans requested", "name one --gpu and one --ctx")
    say(asked, quiet=options.quiet)
    found = plan(asked.requests[0])
    check(found)
    return found


# --- the load ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and how they come: at a rate, or from users.

    skipped  requests that are not judged: each user's first
    """

    source: Source
    rate: float | None
    users: int | None
    think_s: float = 0.0
    ramp_s: float = RAMP_S

    @property
    def skipped(self) -> int:
        return self.users or 0

    @property
    def amount(self) -> float:
        """What a search makes larger or smaller."""
        return float(self.users) if self.users is not None else self.rate or 0.0

    def at(self, amount: float) -> "Load":
        return replace(self, users=int(amount)) if self.users is not None else replace(self, rate=amount)

    def arrivals(self) -> Arrivals:
        if self.users is not None:
            return self.source.closed(self.users, self.think_s, self.ramp_s)
        assert self.rate is not None
        return self.source.open(self.rate)

    @property
    def how(self) -> str:
        if self.users is not None:
            return f"{self.users:,} user{'' if self.users == 1 else 's'}"
        assert self.rate is not None
        return f"{rate_text(self.rate)} requests/s"

    @property
    def text(self) -> str:
        count = self.source.num_requests
        return f"{self.source.name}, {count:,} request{'' if count == 1 else 's'}, {self.how}"


def load_of(options: SimulateOptions) -> Load:
    source = source_of(options)
    for note in source.notes:
        output.tell("warning", note)
    if options.users is None:
        for flag, text in {"--think": options.think, "--ramp": options.ramp}.items():
            if text is not None:
                raise UsageError(flag, "is for --users", "leave it out, or say how many users there are")
        rate = source.rate if options.rate is None else parse_rate(options.rate, "--rate")
        if rate is None:
            raise UsageError("--rate", f"is missing, and {printable(source.name, 100)} has none", "give it, or --users")
        return Load(source, rate, None)
    if options.rate is not None:
        raise UsageError("--users", "send after each answer, so --rate does not apply", "leave one out")
    users = parse_count(options.users, "--users", most=1_000_000)
    think = 0.0 if options.think is None else parse_duration(options.think, "--think", least=0.0)
    ramp = RAMP_S if options.ramp is None else parse_duration(options.ramp, "--ramp", least=0.0)
    return Load(source, None, users, think, ramp)


def source_of(options: SimulateOptions) -> Source:
    """The one source that is named."""
    stated = options.prompt_tokens is not None or options.output_tokens is not None
    named = [
        name
        for name, given in {
            "--trace": options.trace is not None,
            "--profile": options.profile is not None,
            "--prompt-tokens": stated,
        }.items()
        if given
    ]
    if len(named) != 1:
        what = f"{' and '.join(named)} conflict" if named else "no workload is given"
        raise UsageError("simulate", what, "give one of --trace, --profile, --prompt-tokens")
    shared = None if options.shared_prefix is None else shared_prefix(options.shared_prefix)
    count = None if options.num_requests is None else parse_count(options.num_requests, "--num-requests", 10_000_000)
    seed = 0 if options.seed is None else int(parse_seed(options.seed))
    if options.trace is not None:
        found = from_trace(read_trace(Path(options.trace)), count)
        if count is not None and found.num_requests < count:
            output.tell("warning", f"--num-requests {count:,}: the trace has only {found.num_requests:,}; using all")
        return found if not shared else with_shared_prefix(found, shared)
    users = parse_count(options.users, "--users") if options.users else 0
    most = count or max(NUM_REQUESTS, min(PER_USER * users, MOST_BY_DEFAULT))
    if options.profile is not None:
        return from_profile(profile(options.profile), most, seed, shared)
    if options.prompt_tokens is None or options.output_tokens is None:
        raise UsageError("--prompt-tokens and --output-tokens", "must be used together", "give both")
    prompt = lengths(options.prompt_tokens, "--prompt-tokens")
    if shared and prompt.longest <= shared:
        raise UsageError(
            f"--shared-prefix {shared:,}",
            f"leaves nothing of prompts of {prompt.longest:,} tokens",
            "state longer ones",
        )
    return from_lengths(prompt, lengths(options.output_tokens, "--output-tokens"), most, seed, shared or 0)


def shared_prefix(text: str) -> int:
    return 0 if text == "0" else parse_tokens(text, "--shared-prefix")


def parse_seed(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UsageError(
            "--seed", f"not a whole number ({printable(repr(text), 40)})", "write 0 or more in plain digits"
        )
    return text


def lengths(text: str, option: str) -> Lengths:
    """A count, or a distribution."""
    if ":" in text:
        try:
            return parse_lengths(text, MAX_TOKENS)
        except UsageError as error:
            raise error.renamed("--lengths", option) from None
    tokens = parse_tokens(text, option)
    return Lengths(((tokens, 1.0),), f"{tokens:,}")


# --- the runs ---------------------------------------------------------------------------------------------------------


def answered(the_plan: Plan, load: Load, options: SimulateOptions) -> Answer:
    tiers = tuple(parse_tier(text) for text in options.tier or ())
    if options.tier_chunk is not None and not tiers:
        raise UsageError("--tier-chunk", "is for --tier", "leave it out")
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names):
        raise UsageError("--tier", f"two tiers have one name ({', '.join(names)})", "name them apart")
    if tiers and the_plan.state_bytes:
        name = the_plan.request.spec.name
        raise UsageError("--tier", f"{name} has recurrent states, which token chunks cannot store", "leave it out")
    chunk = CHUNK_TOKENS if options.tier_chunk is None else parse_tokens(options.tier_chunk, "--tier-chunk")
    shares = shares_of(options.efficiency)
    promises = () if options.slo is None else slo.parse_slo(options.slo)
    if not options.quiet:
        say_how_steady(promises, load.source.num_requests - load.skipped)
    times = step_time(the_plan, shares, options.calibration, tuple(tier.bandwidth for tier in tiers))
    base = Setup(the_plan, times, tiers, chunk)
    setups = {"with tiers" if tiers else "paged": base}
    if tiers:
        setups["without tiers"] = replace(base, tiers=())
    if options.baseline is not None:
        setups["contiguous"] = replace(base, tiers=(), allocator="contiguous")
    found = ranges.modeled(the_plan) if options.calibration is None else ranges.measured()
    variants = tuple(variant(name, setup, load, promises, found) for name, setup in setups.items())
    if found.unseen and not options.quiet:
        output.tell(
            "note", f"no published result has {' or '.join(found.unseen)}: times are extrapolated, ranges wider"
        )
    return Answer(the_plan, load.text, times.text, load.users is not None, promises, variants, found)


def say_how_steady(promises: tuple[slo.Promise, ...], judged: int) -> None:
    """A note where a percentile rests on a handful of requests: another seed would give another answer."""
    for promise in promises:
        above = judged * (1 - promise.share)
        if promise.metric is not None and above < STEADY:
            output.tell(
                "note",
                f"--slo: {promise.name} of {judged:,} requests depends on the {max(1, round(above)):,} slowest; "
                "raise --num-requests for a steadier figure",
            )


def variant(name: str, setup: Setup, load: Load, promises: tuple[slo.Promise, ...], found: ranges.Ranges) -> Variant:
    simulation = run(setup, load)
    figures = result(simulation, load.skipped)
    if not figures.judged and setup.allocator == "paged":
        capacity = setup.plan.capacity
        raise UsageError(
            "simulate",
            f"no request is served: {figures.rejected:,} prompts are longer than the context "
            f"({capacity.max_model_len:,} tokens), {figures.failed:,} requests larger than the pool "
            f"({capacity.num_blocks:,} blocks)",
            "raise --ctx, or the memory",
        )
    if not promises:
        return Variant(name, simulation, figures)
    kept = slo.kept(promises, simulation, load.skipped, found)
    return Variant(name, simulation, figures, kept, largest(setup, load, promises))


def run(setup: Setup, load: Load, stop: Callable[[Simulation], bool] | None = None) -> Simulation:
    simulation = setup.simulation(load.arrivals(), load.source.run_len)
    progress = Progress(load)

    def told(simulation: Simulation) -> bool:
        progress(simulation)
        return stop is not None and stop(simulation)

    simulation.stop = told
    simulation.run()
    return simulation


class Progress:
    """A line on standard error every 10 s of a run that takes so long."""

    def __init__(self, load: Load) -> None:
        self._load, self._calls, self._told_at = load, 0, time.monotonic()

    def __call__(self, simulation: Simulation) -> None:
        self._calls += 1
        if self._calls % 256 or time.monotonic() - self._told_at < PROGRESS_S:
            return
        self._told_at = time.monotonic()
        done, all_of = len(simulation.records), self._load.source.num_requests
        output.tell("note", f"simulated {done:,} of {all_of:,} requests at {self._load.how}")


def largest(setup: Setup, load: Load, promises: tuple[slo.Promise, ...]) -> slo.Largest:
    """The largest rate, or number of users, that keeps every promise."""

    def keeps(amount: float) -> bool:
        at = load.at(amount)
        broken = slo.Broken(promises, at.source.num_requests, at.skipped)
        simulation = run(setup, at, broken)
        return not broken(simulation) and all(it.is_kept for it in slo.kept(promises, simulation, at.skipped))

    if load.users is None:
        return slo.largest_rate(load.amount, keeps)
    # Every user is judged by some requests of his own.
    return slo.largest_users(load.users, keeps, max(1, load.source.num_requests // 2))


# --- reading ----------------------------------------------------------------------------------------------------------


def parse_tier(text: str) -> TierSpec:
    """`cpu=512GiB@25GB/s`."""
    match = re.fullmatch(r"([A-Za-z][A-Za-z0-9_-]{0,30})=([^@]+)@([^@]+)/s", text)
    if match is None:
        raise UsageError(
            f"--tier {printable(repr(text), 80)}", "is not a tier", "write name=size@speed: cpu=512GiB@25GB/s"
        )
    name, size, speed = match.groups()
    return TierSpec(name, parse_size(size, "--tier"), parse_size(speed, "--tier"))


def shares_of(text: str | None) -> Shares:
    found: dict[str, float] = {}
    for part in [] if text is None else text.split(","):
        name, _, share = part.partition("=")
        if name not in ("weights", "kv", "flops") or name in found:
            raise UsageError(
                "--efficiency", f"{printable(repr(part), 60)} is not understood", "write weights=0.7,kv=0.9,flops=0.6"
            )
        found[name] = parse_fraction(share, "--efficiency")
    return Shares(**found)
