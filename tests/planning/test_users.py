"""Users of a pool against the binomial tail, plain enumeration and a slow convolution in floating point."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.errors import UsageError
from kvplan.planning import users
from kvplan.planning.users import most_users, users_for_lengths
from kvplan.workloads.lengths import Lengths, parse_lengths
from tests.support.parts import paired


def paged(tokens: int) -> int:
    return -(-tokens // 16)


def same(tokens: int) -> int:
    return tokens


def of(**weights: float) -> Lengths:
    """of(t10=0.25, t20=0.75)"""
    return Lengths(tuple(sorted((int(name[1:]), weight) for name, weight in weights.items())))


# --- one length ---------------------------------------------------------------------------------------------------


def test_most_users_one_length() -> None:
    assert most_users(paged, 100, 160) == 10
    assert most_users(paged, 109, 160) == 10
    assert most_users(paged, 110, 161) == 10  # the eleventh block is paid in full
    assert most_users(paged, 9, 160) == 0
    assert most_users(paged, 0, 1) == most_users(paged, -1, 1) == 0


def test_a_shared_prefix_is_stored_once() -> None:
    # 900 tokens fill 56 blocks of 16; a request of 2,000 tokens holds 125, 69 of its own
    assert most_users(paged, 10_000, 2000, shared_blocks=56) == (10_000 - 56) // 69
    assert most_users(paged, 56, 2000, shared_blocks=56) == 0
    assert most_users(paged, 60, 896, shared_blocks=56) == 4  # each still needs a block to write its next token


# --- two lengths: the binomial tail -------------------------------------------------------------------------------


def binomial_users(small: int, large: int, p: float, usable: int, overflow: float) -> int:
    """The largest n with P(n small + (large - small) x Binomial(n, p) > usable) <= overflow."""
    n = 0
    while (n + 1) * small <= usable:
        num_large = (usable - (n + 1) * small) // (large - small)
        fits = math.fsum(math.comb(n + 1, k) * p**k * (1 - p) ** (n + 1 - k) for k in range(min(num_large, n + 1) + 1))
        if 1 - fits > overflow + 1e-12:
            break
        n += 1
    return n


@pytest.mark.parametrize("usable", [5, 64, 100, 1000, 3000])
@pytest.mark.parametrize("overflow", [0.001, 0.01, 0.2])
@pytest.mark.parametrize(("small", "large", "p"), [(10, 100, 0.1), (7, 8, 0.5), (1, 50, 0.01), (6, 33, 0.9)])
def test_two_lengths_follow_the_binomial(small: int, large: int, p: float, usable: int, overflow: float) -> None:
    answer = users_for_lengths(same, usable, Lengths(((small, 1 - p), (large, p))), overflow)
    assert answer.users == binomial_users(small, large, p, usable, overflow)
    assert answer.overflow_probability <= overflow
    assert answer.method.startswith("exact")


# --- few users: enumeration ---------------------------------------------------------------------------------------


def enumerated(lengths: Lengths, n: int, usable: int) -> float:
    return math.fsum(
        math.prod(p for _, p in chosen)
        for chosen in itertools.product(lengths.points, repeat=n)
        if sum(t for t, _ in chosen) > usable
    )


@given(
    st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 90),
    st.sampled_from([0.003, 0.05, 0.4]),
)
def test_small_pools_agree_with_enumeration(weights: dict[int, int], usable: int, overflow: float) -> None:
    total = sum(weights.values())
    lengths = Lengths(tuple(sorted((t, w / total) for t, w in weights.items())))
    answer = users_for_lengths(same, usable, lengths, overflow)
    if answer.users <= 6:
        if answer.users:
            expected = enumerated(lengths, answer.users, usable)
            assert expected <= overflow + 1e-12
            assert answer.overflow_probability == pytest.approx(expected, abs=1e-12)
        assert enumerated(lengths, answer.users + 1, usable) > overflow - 1e-12


# --- laws ---------------------------------------------------------------------------------------------------------

DISTRIBUTIONS = st.sampled_from(
    ["uniform:100-3000", "lognormal:median=1000,sigma=1.2", "lognormal:mean=300,p95=900", "const:777", "uniform:1-20"]
)


@given(DISTRIBUTIONS, st.integers(1, 2000), st.integers(0, 300), st.sampled_from([0.001, 0.01, 0.1]))
def test_a_larger_pool_and_a_looser_bound_never_hold_fewer(text: str, usable: int, more: int, overflow: float) -> None:
    lengths = parse_lengths(text, 32_768)
    base = users_for_lengths(paged, usable, lengths, overflow).users
    assert users_for_lengths(paged, usable + more, lengths, overflow).users >= base
    assert users_for_lengths(paged, usable, lengths, overflow * 5).users >= base
    assert most_users(paged, usable, lengths.points[0][0]) >= base >= most_users(paged, usable, lengths.longest)


@given(st.integers(0, 500), st.integers(0, 2000))
def test_a_shared_prefix_only_helps_by_what_it_saves(shared: int, usable: int) -> None:
    lengths = parse_lengths("uniform:8000-12000", 32_768)
    assert (
        users_for_lengths(paged, usable + shared, lengths, 0.01, shared_blocks=shared).users
        >= users_for_lengths(paged, usable, lengths, 0.01).users
    )


@pytest.mark.parametrize(
    ("text", "usable"),
    paired(["uniform:100-3000", "lognormal:median=1000,sigma=1.2", "lognormal:mean=2000,p95=7000"], [4500, 9000]),
)
def test_the_grid_never_promises_more_than_the_exact_answer_and_little_less(
    text: str, usable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = parse_lengths(text, 32_768)
    coarse = users_for_lengths(paged, usable, lengths, 0.01)
    assert "grid" in coarse.method
    monkeypatch.setattr(users, "EXACT_CELLS", 20_000)
    exact = users_for_lengths(paged, usable, lengths, 0.01)
    assert exact.method.startswith("exact")
    assert exact.users - 1 - exact.users // 100 <= coarse.users <= exact.users


@pytest.mark.parametrize("usable", [20_000, 1_000_000])
def test_large_pools_agree_with_the_normal_distribution(usable: int) -> None:
    lengths = parse_lengths("uniform:100-3000", 32_768)
    blocks = [(paged(t), p) for t, p in lengths.points]
    mean = math.fsum(b * p for b, p in blocks)
    spread = math.sqrt(math.fsum((b - mean) ** 2 * p for b, p in blocks))
    n = users_for_lengths(paged, usable, lengths, 0.01).users
    normal = max(k for k in range(usable // int(mean) + 1) if k * mean + 2.3263 * math.sqrt(k) * spread <= usable)
    assert n == pytest.approx(normal, rel=0.005, abs=2)


@pytest.mark.parametrize("usable", [3000, 4096, 5000, 100_000, 1_000_000])
@pytest.mark.parametrize(
    "text", ["uniform:100-30000", "lognormal:mean=2000,p95=7000", "uniform:1-131072", "uniform:1-64"]
)
def test_however_large_the_pool_each_length_is_sized_once_or_twice(text: str, usable: int) -> None:
    lengths = parse_lengths(text, 131_072)
    sized: list[int] = []

    def counted(tokens: int) -> int:
        sized.append(tokens)
        return paged(tokens)

    users_for_lengths(counted, usable, lengths, 0.01)
    assert 0 < len(sized) <= 2 * len(lengths.points)


# --- edges --------------------------------------------------------------------------------------------------------


def test_lengths_in_one_block_count_make_all_users_equal() -> None:
    answer = users_for_lengths(paged, 100, of(t17=0.5, t30=0.5), 0.01)
    assert (answer.users, answer.overflow_probability) == (50, 0.0)


def test_no_overflow_at_all_means_the_longest_for_everyone() -> None:
    assert users_for_lengths(same, 100, of(t10=0.99, t30=0.01), 0.0).users == 3


def test_a_pool_too_small_for_one_user() -> None:
    assert users_for_lengths(same, 29, of(t10=0.9, t30=0.1), 0.01).users == 0
    assert users_for_lengths(same, 9, of(t10=0.9, t30=0.1), 0.5).users == 0
    assert users_for_lengths(same, -1, of(t10=0.9, t30=0.1), 0.01).users == 0
    assert users_for_lengths(same, 0, of(t10=0.9, t30=0.1), 0.01).overflow_probability == 0.0


def test_lengths_far_beyond_the_pool_cost_no_memory() -> None:
    rare = Lengths(((10, 0.9999), (2**30, 0.0001)))
    # P(none of n is long) >= 0.99 up to n = ln 0.99 / ln 0.9999 = 100
    assert users_for_lengths(same, 5000, rare, 0.01).users == 100


def test_impossible_lengths_of_probability_zero_do_not_matter() -> None:
    assert users_for_lengths(same, 100, Lengths(((10, 1.0), (2**30, 0.0))), 0.01).users == 10


@pytest.mark.parametrize("overflow", [-0.1, 1.0, math.nan, 7.0])
def test_overflow_is_a_probability(overflow: float) -> None:
    with pytest.raises(UsageError, match="--overflow"):
        users_for_lengths(same, 100, of(t10=1.0), overflow)
