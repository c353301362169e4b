"""Effect of another server release on a plan: figures before and after, and the effect of each change on them.

The release changes first, without any of its changes; then they are enabled one after another, oldest first. Each step
is planned again, so the effects add up to the difference exactly; another order can change a change's share, but not
the sum.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvplan.core.errors import KvplanError
from kvplan.planning.attribute import Figures, Number, figures_of
from kvplan.planning.diff import Comparison, compare, plan_side
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.releases import ReleaseChange, Version

Outcome = Literal[
    "as before", "more users", "fewer users", "starts", "does not start", "starts with neither", "refused"
]  # fmt: skip
WORSE: Final[tuple[Outcome, ...]] = ("fewer users", "does not start", "refused")


@dataclass(frozen=True, slots=True)
class Effect:
    """Effect of one change between two releases; `change` None: the rest of the release's effect."""

    change: ReleaseChange | None
    before: Figures
    after: Figures

    @property
    def deltas(self) -> dict[str, Number]:
        """Figures of kvplan/plan@1 that it changed, and by how much."""
        moved = {path: (after or 0) - (self.before[path] or 0) for path, after in self.after.items()}
        return {path: delta for path, delta in moved.items() if delta}


@dataclass(frozen=True, slots=True)
class Upgraded:
    """One server with both releases.

    new         its plan, or why none can be made
    comparison  None if there is no plan of the new release
    effects     the changes that moved a figure, in the order of `steps`
    """

    key: str
    old: Plan
    new: Plan | KvplanError
    release: Version
    comparison: Comparison | None = None
    effects: tuple[Effect, ...] = ()

    @property
    def outcome(self) -> Outcome:
        if isinstance(self.new, KvplanError):
            return "refused"
        if not self.old.fits:
            return "starts" if self.new.fits else "starts with neither"
        if not self.new.fits:
            return "does not start"
        before, after = users(self.old), users(self.new)
        return "as before" if after == before else "more users" if after > before else "fewer users"


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Servers and the release they are upgraded to.

    old     the release they run, or None if each names its own
    others  requested servers of another server program
    """

    old: str | None
    new: str
    servers: tuple[Upgraded, ...]
    others: tuple[str, ...] = ()


def users(the_plan: Plan) -> int:
    """Whole users over all replicas."""
    return the_plan.concurrency.all_users.likely


def upgraded(key: str, old: Request, new: Request | KvplanError, release: Version) -> Upgraded:
    """Compare a server before and after. Raise KvplanError if it cannot be planned as it is."""
    before = plan(old)
    try:
        if isinstance(new, KvplanError):
            raise new
        after = plan(new)
    except KvplanError as error:
        return Upgraded(key, before, error, release)
    sides = plan_side(before, key or None), plan_side(after, key or None)
    return Upgraded(key, before, after, release, compare(*sides), tuple(effects(old, new)))


def effects(old: Request, new: Request) -> Iterator[Effect]:
    """Yield the effect of each change between the two releases that moves a figure."""
    path = list(steps(old.release, new.release))
    figures: dict[int, Figures | None] = {0: figures_of(plan(old)), len(path): figures_of(plan(new))}

    def figures_after(step: int) -> Figures | None:
        """Figures of the plan after this many steps, or None if there is none."""
        if step not in figures:
            release, _ = path[step - 1]
            try:
                figures[step] = figures_of(plan(replace(new, release=release)))
            except KvplanError:
                figures[step] = None
        return figures[step]

    def search(first: int, last: int) -> Iterator[Effect]:
        """Bisect a run of steps to isolate those that move a figure: most changes concern other models."""
        before, after = figures_after(first), figures_after(last)
        assert before is not None
        assert after is not None
        if before == after:
            return
        inner = sorted(range(first + 1, last), key=lambda step: abs(2 * step - first - last))
        middle = next((step for step in inner if figures_after(step) is not None), None)
        if middle is None:  # one step, or no plan between several: named after the last one
            yield Effect(path[last - 1][1], before, after)
        else:
            yield from search(first, middle)
            yield from search(middle, last)

    yield from search(0, len(path))


def steps(old: Version, new: Version) -> Iterator[tuple[Version, ReleaseChange | None]]:
    """Releases on the way, and the change that leads to each; None: only the version number and unnamed differences.

    To a newer release the version changes first, then each change is enabled; to an older one they are disabled first,
    newest first.
    """
    if new.fields >= old.fields:
        changes = new.since(old)
        off = list(changes)
        yield replace(new, without=frozenset(off)), None
        while off:
            yield replace(new, without=frozenset(off[1:])), changes[off.pop(0)]
    else:
        changes = old.since(new)
        names = list(changes)
        for number in range(len(names) - 1, -1, -1):
            yield replace(old, without=frozenset(names[number:])), changes[names[number]]
        yield new, None
