"""What `tune` would choose of published sweeps of users and ranks, beside what was measured as best."""

import math

import pytest

from benchmarks.timing.sweeps import Point, choices, point, summary, sweeps, usable
from tests.support.time_facts import FACTS


def of(users: int, measured: tuple[float, float], predicted: tuple[float, float], ranks: int = 1) -> Point:
    return Point("a server", ranks, users, measured, predicted)


SWEEP = [
    of(8, (0.012, 600.0), (0.011, 650.0)),
    of(16, (0.018, 800.0), (0.014, 1000.0)),
    of(32, (0.028, 1000.0), (0.021, 1400.0)),
]


def test_a_choice_is_the_most_that_is_predicted_to_keep_the_limit() -> None:
    """By hand. 10 ms: nothing keeps it, nothing is chosen. 15: 16 users are chosen, measured at 18. 20: 16 users, the
    best that keeps it. 30 and more: 32."""
    by_limit = {choice.limit: choice for choice in choices({"a server": SWEEP})}
    assert by_limit[0.010].is_empty
    assert by_limit[0.010].is_near
    assert (by_limit[0.015].is_kept, by_limit[0.015].is_near, by_limit[0.015].is_bound) == (False, False, True)
    assert (by_limit[0.020].share, by_limit[0.020].is_kept, by_limit[0.020].is_near) == (1.0, True, True)
    assert (by_limit[0.030].share, by_limit[0.030].is_bound) == (1.0, False)
    assert by_limit[math.inf].is_near


def test_a_margin_is_on_the_safe_side() -> None:
    """14 ms x 1.4 are 19.6: of the limits, 20 is the first that 16 users keep; under 15 nothing is chosen."""
    by_limit = {choice.limit: choice for choice in choices({"a server": SWEEP}, 1.4)}
    assert by_limit[0.015].share is None
    assert by_limit[0.020].share == 1.0
    assert by_limit[0.030].share == 1.0  # 21 x 1.4 = 29.4


def test_sweeps_are_of_one_server_or_of_several_numbers_of_ranks() -> None:
    points = [*SWEEP, of(8, (0.01, 300.0), (0.01, 300.0), ranks=2)]
    assert list(sweeps(points, by_ranks=False)) == ["a server TP 1"]
    assert [len(group) for group in sweeps(points, by_ranks=True).values()] == [4]
    assert not sweeps(SWEEP, by_ranks=True)


def published(source: str) -> list[Point]:
    points = (point(fact, simulate=False) for fact in usable(FACTS) if fact.src == source)
    return [point for point in points if point is not None]


def test_without_a_limit_the_most_users_on_the_right_ranks_are_chosen() -> None:
    """gpt-oss-120b by InferenceMAX; the constants were fitted without it."""
    groups = sweeps(published("inferencemax"), by_ranks=True)
    free = [choice for choice in choices(groups) if choice.limit == math.inf]
    assert len(free) == 9
    assert summary(free)["near"] == 1.0


@pytest.mark.full
@pytest.mark.parametrize(("by_ranks", "count", "every", "bound"), [(False, 79, 0.80, 0.58), (True, 29, 0.65, 0.55)])
def test_the_share_near_the_best_is_what_docs_say(by_ranks: bool, count: int, every: float, bound: float) -> None:
    """docs/tune.md has the shares; here they may only be a little less."""
    points = [
        point for source in ("aic-silicon", "inferencemax", "accelmark", "tenstorrent") for point in published(source)
    ]
    groups = sweeps(points, by_ranks=by_ranks)
    assert len(groups) == count
    all_choices = list(choices(groups))
    assert summary(all_choices)["near"] >= every
    assert summary([choice for choice in all_choices if choice.is_bound])["near"] >= bound
