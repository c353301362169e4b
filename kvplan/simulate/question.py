"""What `simulate` is asked: one plan under a load, with the servers that it is compared with; and its answer."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from kvplan.asked.form import Form, read_form, refuse_missing
from kvplan.asked.question import MODEL_CURE, Inputs, requests
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.units import duration, parse_fraction, parse_size, parse_tokens, plural
from kvplan.planning.plan import Plan, plan
from kvplan.simulate import ranges, slo
from kvplan.simulate.adapters import FLAG, adapters_of
from kvplan.simulate.drafts import CONFIG, NOTHING_STATED, Acceptance, MoreTime, drafts_of
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.load import ONE_LOAD, Load, LoadWords, Tell
from kvplan.simulate.outcome import SimulationAnswer, Variant
from kvplan.simulate.ranges import unseen_note
from kvplan.simulate.result import result
from kvplan.simulate.runs import Run
from kvplan.simulate.setup import Setup, check, refuse_reordering, timed_tiers
from kvplan.simulate.steptime import step_time
from kvplan.simulate.tiers import TierSpec

NOT_STATED: Final = "drafts whose acceptance is not stated (best and worst)"
STEADY = 20  # requests above a percentile with which another seed changes little
Started = TypeVar("Started", bound=Run)


class Onlooker:
    """Who looks on while a simulation runs: hears its notes, sees its progress, and may ask it to end early."""

    is_asked = False

    def __init__(self) -> None:
        self.notes: list[tuple[str, str]] = []

    def tell(self, kind: str, text: str) -> None:
        self.notes.append((kind, text))

    def begin(self, load: Load) -> None:
        """A run of this load begins."""

    def end(self) -> None:
        """The run is over."""

    def is_over(self, finished: int) -> bool:
        """Hear that so many of its requests are finished; whether the run is to end now."""
        return self.is_asked


def planned(
    form: Form, words: LoadWords, tiers: Sequence[str], say: Callable[[Inputs], None], *, ranks: bool = True
) -> Plan:
    """The one plan to simulate; `say` takes the notes from reading it; ranks: whether each data-parallel rank is
    simulated.
    """
    refuse_missing(
        ("MODEL", form.names_model, MODEL_CURE),
        ("--gpu", form.names_gpu, "name the GPU to simulate"),
        ("workload", words.names_source, ONE_LOAD),
    )
    inputs = requests(read_form(form))
    request = inputs.only("simulate", "name one --gpu and one --ctx")
    say(inputs)
    the_plan = plan(request)
    check(the_plan, tiers_of(tiers), drafts=True, ranks=ranks)
    refuse_reordering(form.command())
    return the_plan


def answered(
    the_plan: Plan,
    setups: Mapping[str, Setup],
    load: Load,
    promises: tuple[slo.Promise, ...],
    onlooker: Onlooker,
    *,
    is_calibrated: bool,
) -> SimulationAnswer:
    say_how_steady(promises, load.source.num_requests - load.skipped, onlooker.tell)
    uncertainty = ranges.calibrated() if is_calibrated else ranges.modeled(the_plan)
    variants: list[Variant] = []
    if (ranks := the_plan.request.args.data_parallel_size) > 1:
        from kvplan.simulate.ranked import ranks_of  # only with ranks

        onlooker.tell("note", f"{ranks} data-parallel ranks are simulated as servers behind a router")
        onlooker.begin(load)
        variants.append(ranks_of(the_plan, setups, load, promises, uncertainty, onlooker.is_over))
        onlooker.end()
    else:
        for name, setup in setups.items():
            if not onlooker.is_asked:
                variants.append(variant(name, setup, load, promises, uncertainty, onlooker))
    if uncertainty.unseen:
        onlooker.tell("note", unseen_note(uncertainty.unseen))
    if not onlooker.is_asked:
        say_who_joined(load, variants[0].result.seconds, onlooker.tell)
    if variants:
        uncertainty = uncertainty.of(waits=variants[0].simulation.records.waits(load.skipped))
    setup = next(iter(setups.values()))
    drafts = [other.drafts.name for other in setups.values() if other.drafts is not None]
    is_bounded = len(drafts) > 1
    how = load.how if not drafts else f"{load.how} and {NOT_STATED if is_bounded else drafts[0]}"
    times = MoreTime(setup.step_time, setup.does) if setup.does else setup.step_time
    return SimulationAnswer(
        the_plan, load.text, times.text, how, load.is_closed, promises, tuple(variants), uncertainty, is_bounded
    )


def setups_of(
    the_plan: Plan,
    *,
    tier: Sequence[str] = (),
    tier_chunk: str | None = None,
    efficiency: str | None = None,
    calibration: str | None = None,
    baseline: str | None = None,
    acceptance: Acceptance = NOTHING_STATED,
    adapters: str | None = None,
) -> dict[str, Setup]:
    """Setup of the requested server, and those of the servers that it is compared with."""
    tiers = tiers_of(tier)
    if tier_chunk is not None and not tiers:
        raise UsageError("--tier-chunk", "needs --tier", "remove it")
    chunk = None if tier_chunk is None else parse_tokens(tier_chunk, "--tier-chunk")
    timed_tiers(the_plan, tiers, chunk)  # refuses tiers that hold nothing
    times = step_time(the_plan, shares_of(efficiency), calibration)
    base = Setup(the_plan, times, tiers, chunk)
    drafts = drafts_of(the_plan, shares_of(efficiency), acceptance)
    named = adapters_of(adapters, the_plan)
    if named is not None:
        refuse_beside({"--tier": bool(tiers), "--baseline": bool(baseline), CONFIG: bool(drafts)}, f"with {FLAG}")
        return {"paged": replace(base, adapters=named)}
    if drafts:
        refuse_beside_drafts({"--tier": bool(tiers), "--baseline": bool(baseline), "--calibration": bool(calibration)})
        return {some.name if len(drafts) > 1 else "paged": replace(base, drafts=some) for some in drafts}
    setups = {"with tiers" if tiers else "paged": base}
    if tiers:
        setups["without tiers"] = replace(base, tiers=())
    if baseline is not None:
        setups["contiguous"] = replace(base, tiers=(), allocator="contiguous")
    return setups


BESIDE: Final = {
    "--tier": "a draft's KV is not kept with the model's",
    "--baseline": "only paged memory is simulated with drafts",
    "--calibration": "was measured without drafts",
    "--disaggregate": "drafts are not handed over",
    "--kv-transfer-config": "drafts are not handed over",
}


def refuse_beside(stated: Mapping[str, bool], what: str) -> None:
    for flag, is_stated in stated.items():
        if is_stated:
            raise UsageError(flag, f"is not simulated {what}", "use only one")


def refuse_beside_drafts(stated: Mapping[str, bool]) -> None:
    for flag, is_stated in stated.items():
        if is_stated:
            raise UsageError(flag, BESIDE[flag], "remove it, or the speculative decoding")


def say_how_steady(promises: tuple[slo.Promise, ...], judged: int, tell: Tell) -> None:
    """Note percentiles that rest on a handful of requests: another seed would change them."""
    for promise in promises:
        above = judged * (1 - promise.share)
        if promise.metric is not None and above < STEADY:
            tell(
                "note",
                f"--slo: {promise.name} of {judged:,} requests depends on the {max(1, round(above)):,} slowest; "
                "raise --num-requests for a steadier figure",
            )


def say_who_joined(load: Load, seconds: float, tell: Tell) -> None:
    """Note a run that ends before all its users have joined: they never run together."""
    if load.is_closed and seconds < load.ramp_s:
        ramp = duration(load.ramp_s)
        tell(
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
    onlooker: Onlooker,
) -> Variant:
    simulation = run(setup.run(load.arrivals(), load.source.run_len), load, onlooker)
    if onlooker.is_asked and not len(simulation.records):
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
    return Variant(name, simulation, figures, outcomes, largest(setup, load, promises, onlooker), good)


def run(simulation: Started, load: Load, onlooker: Onlooker, stop: Callable[[Run], bool] | None = None) -> Started:
    onlooker.begin(load)

    def stop_early(simulation: Run) -> bool:
        return onlooker.is_over(len(simulation.records.number)) or (stop is not None and stop(simulation))

    simulation.stop = stop_early
    try:
        simulation.run()
    finally:
        onlooker.end()
    return simulation


def largest(setup: Setup, load: Load, promises: tuple[slo.Promise, ...], onlooker: Onlooker) -> slo.Largest | None:
    """The largest rate, or number of users, that meets every target, or None if all requests come at once."""
    if load.amount is None or onlooker.is_asked:
        return None

    def keeps(amount: float) -> bool:
        scaled = load.scaled(amount)
        broken = slo.Broken(promises, scaled.source.num_requests, scaled.skipped)
        simulation = run(setup.run(scaled.arrivals(), scaled.source.run_len), scaled, onlooker, broken)
        return not broken(simulation) and all(
            outcome.is_kept for outcome in slo.outcomes(promises, simulation, scaled.skipped)
        )

    if not load.is_closed:
        limit = slo.largest_rate(load.amount, keeps)
    else:  # every user is judged by some of their own requests
        limit = slo.largest_users(int(load.amount), keeps, max(1, load.source.num_requests // 2))
    return None if onlooker.is_asked else limit


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
