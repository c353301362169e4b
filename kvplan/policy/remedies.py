"""Find fixes for a target's failing rules: one change for all of them if there is one, else one for each.

Every change is a computed plan that satisfies the rules it is listed for and keeps the rules that pass now.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvplan.planning import advise, users
from kvplan.planning.plan import Plan
from kvplan.policy.result import Outcome

NOTHING: Final = "no change tried is enough"
ACCEPT: Final = "if intended, accept it with kvplan check --update-baseline"
MOST_STATES_SIMULATED: Final = 4  # a simulation takes a second or more


@dataclass(frozen=True, slots=True)
class Wish:
    """A rule of a target, judged.

    name          of its finding: "min_users.p99"
    outcome       currently
    need          its requirement on a plan
    alone         its best fixes that also meet a further requirement
    figure_text   a plan's value for it
    context       the target's longest request, in tokens
    num_gpus      the target's GPUs, of all ranks
    is_baseline   True if it limits a figure that may be accepted as it is
    is_simulated  True if checking it takes a simulation
    """

    name: str
    outcome: Outcome
    need: advise.Need
    alone: Callable[[advise.Holds], list[advise.FlagCure]]
    figure_text: Callable[[Plan], str]
    context: int
    num_gpus: int
    is_baseline: bool = False
    is_simulated: bool = False


@dataclass(frozen=True, slots=True)
class Remedies:
    """Fixes of failing rules, by finding name; and the change that fixes `cured` without breaking a rule."""

    fixes: dict[str, str]
    cure: advise.FlagCure | None = None
    cured: tuple[str, ...] = ()


def remedies(plan: Plan, wishes: Sequence[Wish], num_unmet: int, start_knobs: advise.Knobs) -> Remedies:
    """Find the fixes of a target.

    num_unmet    failing rules, including those that no change of a plan can fix
    start_knobs  changes that may make its server start
    """
    unmet = [wish for wish in wishes if wish.outcome in ("fail", "warn")]
    if len(unmet) == 1:
        return remedies_of_one(plan, unmet[0], wishes, start_knobs)
    every = "both" if num_unmet == 2 else f"all {num_unmet}"
    fixes = {wish.name: needs(wish, wish.alone(anything)) for wish in unmet if not wish.is_baseline}
    failing = [wish for wish in unmet if wish.outcome == "fail"]
    for group in (unmet, failing) if failing != unmet else (unmet,):
        if len(group) < 2:
            continue
        wishes_kept = [wish for wish in wishes if wish in group or wish.outcome == "pass"]
        cure = together(plan, wishes_kept, start_knobs)
        if cure is not None:
            which = every if len(group) == num_unmet else f"{len(group)} of {num_unmet}"
            for wish in group:
                fixes[wish.name] = f"{needs(wish, [cure])}, which fixes {which}"
                if wish.is_baseline:
                    fixes[wish.name] += f"; {ACCEPT}"
            return Remedies(fixes, cure, tuple(wish.name for wish in group))
    for name, fix in fixes.items():
        if fix != NOTHING:
            fixes[name] = f"{fix}; no change tried fixes {every}"
    return Remedies(fixes)


def anything(plan: Plan) -> bool:
    return True


def remedies_of_one(plan: Plan, unmet: Wish, wishes: Sequence[Wish], start_knobs: advise.Knobs) -> Remedies:
    """Fixes if one rule fails: those that keep the other rules, with a second change if needed; or else any fix."""
    if unmet.is_baseline:
        return Remedies({})
    others = [wish for wish in wishes if wish.outcome == "pass"]
    cures = unmet.alone(lambda answer: all(wish.need.holds(answer) for wish in others))
    if not cures and others:
        cures = [cure for cure in [together(plan, [*others, unmet], start_knobs)] if cure is not None]
    if cures:
        return Remedies({unmet.name: needs(unmet, cures)}, cures[0], (unmet.name,))
    fix = needs(unmet, unmet.alone(anything) if others else [])
    return Remedies({unmet.name: fix if fix == NOTHING else f"{fix}; no change tried keeps the other rules"})


def together(plan: Plan, wishes: Sequence[Wish], start_knobs: advise.Knobs) -> advise.FlagCure | None:
    """Find one change that satisfies all wishes, checking simulated ones last. If the plan does not fit, look for a
    certain fix first, then for a likely one.
    """
    needed = [wish.need for wish in sorted(wishes, key=lambda wish: wish.is_simulated)]
    max_states = MOST_STATES_SIMULATED if any(wish.is_simulated for wish in wishes) else advise.MOST_STATES
    if plan.fits:
        return advise.together(plan, needed, max_states)
    starts = (advise.Need(holds, start_knobs) for holds in (advise.is_sure, lambda answer: answer.fits))
    cures = (advise.together(plan, [start, *needed], max_states) for start in starts)
    return next((cure for cure in cures if cure is not None), None)


def needs(wish: Wish, cures: Iterable[advise.FlagCure]) -> str:
    """Format the changes with their results: use --kv-cache-dtype fp8 (gives 28.2) or --max-num-seqs 64 (gives 30)."""
    texts = [f"{' '.join(cure.server_flags)} (gives {gain_text(wish, cure.plan)})" for cure in cures]
    return f"use {' or '.join(texts)}" if texts else NOTHING


def gain_text(wish: Wish, cured: Plan) -> str:
    """A cured plan's value for a rule; a shorter context is mentioned, as it may be no fix for the users, and so are
    GPUs that a change adds to every data-parallel rank.
    """
    context = cured.capacity.max_model_len
    shorter = f", with a context of {context:,} tokens instead of {wish.context:,}" if context < wish.context else ""
    gpus = users.num_gpus(cured)
    adds = cured.concurrency.replicas > 1 and gpus != wish.num_gpus
    more = f", on {gpus:,} GPUs instead of {wish.num_gpus:,}" if adds else ""
    return f"{wish.figure_text(cured)}{more}{shorter}"
