"""The constants of a step's time are as far off as is said, on facts they were fitted to and on those they were not."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from benchmarks.timing.facts import Fact, read_facts
from benchmarks.timing.fit import FREE, START, Case, case_of, cases_of, cost, fitted, left_out, log_errors, predicted
from benchmarks.timing.predict import folds
from kvplan.simulate.constants import V1
from tests.support.time_facts import FACTS


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return cases_of(FACTS)


def sizes(errors: list[dict[str, float]], metric: str) -> list[float]:
    return sorted(abs(math.expm1(each[metric])) for each in errors if metric in each)


def test_shipped_constants_are_as_far_off_as_the_log_says(cases: list[Case]) -> None:
    """reports/LOG.md: 8 % per output token in sample, 9 in 10 within 31 %; output tokens/s 9 %."""
    errors = [log_errors(case, V1) for case in cases]
    per_token = sizes(errors, "tpot")
    assert len(per_token) > 600
    assert median(per_token) < 0.10
    assert per_token[int(0.9 * len(per_token))] < 0.35
    assert median(sizes(errors, "out_tps")) < 0.13


def test_constants_are_as_far_off_on_sources_they_have_not_seen(cases: list[Case]) -> None:
    """The goals of the issue: 15 % per output token, 9 in 10 within 40 %; 20 % in tokens/s; 35 % to the first."""
    errors = [found for _, found in left_out(cases, folds(), lambda case: case.fact.src)]
    per_token = sizes(errors, "tpot")
    assert median(per_token) < 0.15
    assert per_token[int(0.9 * len(per_token))] < 0.40
    assert median(sizes(errors, "out_tps")) < 0.20
    assert median(sizes(errors, "ttft")) < 0.35


def test_every_source_of_the_facts_was_left_out_once() -> None:
    assert set(folds()) == {fact.src for fact in read_facts(FACTS) if isinstance(fact, Fact)}


def test_a_fit_finds_the_constants_that_made_the_times(cases: list[Case]) -> None:
    """Times made by other constants than the guesses: a fit comes nearer to them."""
    some = [case for case in cases[::12] if case.tpot is not None]
    truth = replace(START, layer=80e-6, flops=0.45)
    made = [replace(case, tpot=predicted(case, truth)[0], ttft=None, out_tps=None) for case in some]
    found = fitted(made, START, ("layer", "flops"), rounds=6)
    assert found.layer == pytest.approx(80e-6, rel=0.15)
    assert found.flops == pytest.approx(0.45, rel=0.15)


def test_large_errors_count_less_than_their_squares() -> None:
    import numpy as np

    small, large = cost(np.array([0.01]))[0], cost(np.array([10.0]))[0]
    assert small == pytest.approx(0.01**2, rel=0.01)
    assert large < 10.0**2 / 10


def test_a_burst_is_not_fitted(tmp_path: Path) -> None:
    """200 prompts at 32 a second on a slow server: nothing in it is steady."""
    facts = {fact.id: fact for fact in read_facts(FACTS) if isinstance(fact, Fact)}
    assert case_of(facts["ionet-0377"]) is None
    assert set(FREE) == set(next(iter(folds().values())).__dataclass_fields__)
