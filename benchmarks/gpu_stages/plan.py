"""Which stages a call of so many minutes runs, and how long each may take: those that say most are not cut for others.

The figures that everything else is held against come first: each of them gets the least that it needs, then what it may
take at most. What is left after that goes to the other stages in their order, each as long as it may take.
"""

from collections.abc import Sequence

from benchmarks.gpu_stages.runner import DONE, Session, Stage

# By worth: where not even the least of all of them fits, the last ones are left out.
ANCHORS = ("smoke", "kernels", "decode", "prefill", "tests", "profile-llama-3.1-8b")


def plan(stages: Sequence[Stage], seconds: float) -> dict[str, float]:
    """Seconds by stage, which add up to `seconds` at most; a stage without any is not planned."""
    by_name = {stage.name: stage for stage in stages}
    anchors = [by_name[name] for name in ANCHORS if name in by_name]
    shares: dict[str, float] = {}
    left = seconds
    for stage in anchors:
        if stage.minimum_s <= left:
            shares[stage.name] = stage.minimum_s
            left -= stage.minimum_s
    for stage in anchors:
        if stage.name in shares:
            more = min(stage.timeout_s - stage.minimum_s, left)
            shares[stage.name] += more
            left -= more
    for stage in stages:
        if stage.name not in ANCHORS and stage.minimum_s <= left:
            shares[stage.name] = min(stage.timeout_s, left)
            left -= shares[stage.name]
    return {stage.name: shares[stage.name] for stage in stages if stage.name in shares}


def to_run(stages: Sequence[Stage], session: Session) -> list[Stage]:
    """Those that are not done, or are asked for again."""
    done = {name for name, result in session.results.items() if result.status in DONE}
    return [stage for stage in stages if stage.name not in done or stage.name in session.again]


def line(shares: dict[str, float], closing_s: float) -> str:
    """The plan in a line, with the seconds that are kept for the end."""
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in shares.items())
    return f"planned, at most: {stages or 'no stage'}; {closing_s:.0f} s for the end"
