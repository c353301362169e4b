"""`kvplan simulate --replicas ...`: many servers behind a router."""

import re
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Final

from kvplan.cli.simulate_options import SimulateOptions
from kvplan.cli.workers import at_work, workers_of
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.processes import Jobs, cores, is_shared
from kvplan.core.units import parse_count, parse_duration, parse_size
from kvplan.planning.plan import Plan
from kvplan.planning.sweep import portable_requests
from kvplan.planning.users import num_gpus
from kvplan.simulate import ranges, slo
from kvplan.simulate.drafts import Acceptance, Drafts, stated_drafts
from kvplan.simulate.fleet import Autoscale, Fleet, Kind, ReplicaFailure, Role
from kvplan.simulate.fleet_result import fleet_result
from kvplan.simulate.handover import Link
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.load import Load
from kvplan.simulate.outcome import FleetAnswer, SimulationAnswer, Variant
from kvplan.simulate.question import refuse_beside_drafts
from kvplan.simulate.routers import router
from kvplan.simulate.setup import Setup, token_bytes
from kvplan.simulate.steptime import step_time

MOST: Final = 4096  # servers
WORTH_PROCESSES: Final = 20_000  # requests: takes seconds in one process; other processes start in less
RULE: Final = "write min=1,max=8,target=20, and every=15s,provision=3m,settle=5m where they differ"


def fleet_answer(
    options: SimulateOptions, plan_of: Callable[[SimulateOptions], Plan], shares: Shares, load: Load,
    stop: Callable[[Fleet], bool],
) -> FleetAnswer:  # fmt: skip
    """Simulate the fleet. Raise KeyboardInterrupt if `stop` ended it before any server finished."""
    promises = () if options.slo is None else slo.parse_slo(options.slo)
    kinds, plans = kinds_of(options, plan_of, shares)
    autoscale = None if options.autoscale is None else parse_autoscale(options.autoscale)
    if autoscale is not None and not autoscale.fewest <= len(kinds) <= autoscale.highest:
        raise UsageError(
            f"--replicas {len(kinds)}",
            f"is not from min={autoscale.fewest} to max={autoscale.highest}",
            "change one of them",
        )
    failures = tuple(parse_failure(text, len(kinds)) for text in options.fail or ())
    name = options.router or "least-loaded"
    fleet = Fleet(
        kinds,
        load.arrivals(),
        router(name, load.seed, load.source.run_len),
        load.source.run_len,
        failures,
        autoscale,
        None if options.link is None else parse_link(options.link),
        router(name, load.seed, load.source.run_len),
        stop,
    )
    jobs = jobs_of(options.jobs, options.ray, fleet, load.source.num_requests)
    with at_work(jobs, quiet=options.quiet):
        fleet.run(jobs)
    if not fleet.replicas:
        raise KeyboardInterrupt
    kinds = kinds[: len(fleet.replicas)]  # fewer if interrupted before the others finished
    figures = fleet_result(fleet, load.skipped, by_clock=not load.is_closed and load.users is None)
    if not figures.total.judged:
        raise UsageError("simulate", "no request is served by the fleet", "give more --num-requests, or fewer failures")
    uncertainty = (
        ranges.widest(tuple(ranges.modeled(plan) for plan in plans))
        if options.calibration is None
        else ranges.calibrated()
    )
    outcomes = slo.outcomes(promises, fleet, load.skipped, uncertainty)
    uncertainty = uncertainty.of(waits=fleet.records.waits(load.skipped))
    good = slo.good_requests(promises, fleet, load.skipped) if promises else None
    steps = "; ".join(dict.fromkeys(step_time(plan, shares, options.calibration).text for plan in plans))
    variant = Variant("fleet", fleet.replicas[0].run, figures.total, outcomes, None, good)
    total = SimulationAnswer(
        plans[0], load.text, steps, f"{load.how} on {servers_text(kinds)}", load.is_closed, promises, (variant,),
        uncertainty,
    )  # fmt: skip
    return FleetAnswer(total, figures, fleet, name, servers_text(kinds))


def jobs_of(text: str | None, ray: str | None, fleet: Fleet, num_requests: int) -> Jobs:
    """Number of processes: as given, or all cores if the servers are independent and have enough work."""
    if ray is None and text is None:
        return cores() if fleet.is_apart and num_requests >= WORTH_PROCESSES else 1
    jobs = workers_of(text, ray)
    if is_shared(jobs) and not fleet.is_apart:
        raise UsageError(
            f"--jobs {text}" if ray is None else f"--ray {ray}",
            "these servers depend on each other (load-aware routing, --fail, --autoscale, --disaggregate or "
            "users who wait), so one process simulates them all",
            "remove it, or use --router round-robin or random and remove the others",
        )
    return jobs


def servers_text(kinds: tuple[Kind, ...]) -> str:
    """ "4 servers (a100-80g)", "2 prefill and 4 decode servers (h100-80g)"."""
    names = list(dict.fromkeys(kind.name for kind in kinds))
    roles = {role: sum(kind.role == role for kind in kinds) for role in ("prefill", "decode")}
    if roles["prefill"]:
        return f"{roles['prefill']} prefill and {roles['decode']} decode servers ({', '.join(names)})"
    if len(names) == 1:
        return f"{len(kinds)} server{'' if len(kinds) == 1 else 's'} ({names[0]})"
    return " and ".join(f"{sum(kind.name == name for kind in kinds)} x {name}" for name in names)


def kinds_of(
    options: SimulateOptions, plan_of: Callable[[SimulateOptions], Plan], shares: Shares
) -> tuple[tuple[Kind, ...], tuple[Plan, ...]]:
    """The servers in order, and the plan of each kind."""
    plans: dict[str, Plan] = {}

    def kind(some: SimulateOptions, role: Role = "server") -> Kind:
        label = ",".join(some.gpu or ()) or "gpu"
        if label not in plans:
            plans[label] = plan_of(some)
        plan = plans[label]
        [request] = portable_requests([plan.request])
        setup = Setup(
            replace(plan, request=request), step_time(plan, shares, options.calibration),
            drafts=drafts_stated(options, plan, shares),
        )  # fmt: skip
        token = token_bytes(plan) if role != "server" else 0
        gpus = num_gpus(plan) // request.args.data_parallel_size
        return Kind(request.gpu.name, setup.run, role, token, gpus)

    def servers(some: SimulateOptions, count: int, role: Role = "server") -> list[Kind]:
        """Servers, each as its data-parallel ranks: they have a scheduler and a pool of their own."""
        own = kind(some, role)
        return [own] * count * plans[",".join(some.gpu or ()) or "gpu"].request.args.data_parallel_size

    kinds: list[Kind] = []
    if options.disaggregate is not None:
        prefill, decode = parse_split(options.disaggregate)
        kinds += servers(options, prefill, "prefill") + servers(options, decode, "decode")
    if options.replicas is not None:
        kinds += servers(options, parse_count(options.replicas, "--replicas", most=MOST))
    elif options.autoscale is not None:
        kinds += servers(options, parse_autoscale(options.autoscale).fewest)
    if options.autoscale is not None and next(iter(plans.values())).request.args.data_parallel_size > 1:
        raise UsageError("--autoscale", "scales whole servers, not data-parallel ranks", "remove one of them")
    for text in options.pool or ():
        name, _, count = text.partition("=")
        if not name or not count:
            raise UsageError(f"--pool {printable(repr(text), 60)}", "is not understood", "write l40s=4")
        kinds += servers(replace(options, gpu=[name]), parse_count(count, "--pool", most=MOST))
    if len(kinds) > MOST:
        raise UsageError("--pool", f"{len(kinds):,} servers in all", f"name {MOST:,} at most")
    return tuple(kinds), tuple(plans.values())


def drafts_stated(options: SimulateOptions, plan: Plan, shares: Shares) -> Drafts | None:
    """The drafts of a fleet's servers, whose acceptance must be stated."""
    stated = Acceptance(options.synthetic_acceptance_length, options.synthetic_acceptance_rates)
    if plan.request.draft is not None or plan.request.args.num_speculative_tokens:
        apart, calibrated = options.disaggregate is not None, options.calibration is not None
        refuse_beside_drafts({"--disaggregate": apart, "--calibration": calibrated})
    return stated_drafts(plan, shares, stated)


def parse_split(text: str) -> tuple[int, int]:
    """Parse `1P2D`."""
    match = re.fullmatch(r"([1-9][0-9]{0,3})[pP]([1-9][0-9]{0,3})[dD]", text)
    if match is None or int(match[1]) + int(match[2]) > MOST:
        raise UsageError(
            f"--disaggregate {printable(repr(text), 40)}", "is not understood",
            "write the number of prefill and decode servers, e.g. 1P2D",
        )  # fmt: skip
    return int(match[1]), int(match[2])


def parse_link(text: str) -> Link:
    """Parse `50GB/s`, or with a latency `50GB/s,2ms`."""
    speed, comma, latency = text.partition(",")
    if not speed.endswith("/s"):
        raise UsageError(f"--link {printable(repr(text), 40)}", "is not a speed", "write 50GB/s, or 50GB/s,2ms")
    seconds = parse_duration(latency, "--link") if comma else 0.0
    return Link(float(parse_size(speed.removesuffix("/s"), "--link")), seconds)


def parse_failure(text: str, count: int) -> ReplicaFailure:
    """Parse `3@10m`, `3@10m:5m`."""
    match = re.fullmatch(r"([0-9]{1,4})@([^:]+)(?::(.+))?", text)
    if match is None:
        raise UsageError(
            f"--fail {printable(repr(text), 60)}", "is not understood",
            "write the server's number (0-based) and the time: 3@10m, or 3@10m:5m if it comes back",
        )  # fmt: skip
    if int(match[1]) >= count:
        raise UsageError(f"--fail {text}", f"there are servers 0 to {count - 1}", "name one of them")
    seconds = inf if match[3] is None else parse_duration(match[3], "--fail")
    return ReplicaFailure(int(match[1]), parse_duration(match[2], "--fail", least=0.0), seconds)


def parse_autoscale(text: str) -> Autoscale:
    """Parse `min=1,max=8,target=20,every=15s,provision=3m,settle=5m`."""
    settings: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in ("min", "max", "target", "every", "provision", "settle") or not equals or name in settings:
            raise UsageError("--autoscale", f"{printable(repr(part), 60)} is not understood", RULE)
        settings[name] = value
    missing = [name for name in ("max", "target") if name not in settings]
    if missing:
        raise UsageError("--autoscale", f"{' and '.join(missing)} is missing", RULE)
    fewest, highest = (parse_count(settings.get(name, "1"), "--autoscale", most=MOST) for name in ("min", "max"))
    if fewest > highest:
        raise UsageError("--autoscale", f"min={fewest} is more than max={highest}", RULE)
    try:
        target = float(settings["target"])
    except ValueError:
        target = 0.0
    if not 0 < target < 1e6:
        raise UsageError("--autoscale", f"target is not a number above 0 ({printable(settings['target'], 40)})", RULE)
    rule = Autoscale(fewest, highest, target)
    times = {
        name: parse_duration(settings[name], "--autoscale")
        for name in ("every", "provision", "settle")
        if name in settings
    }
    return replace(rule, **times)  # type: ignore[arg-type]
