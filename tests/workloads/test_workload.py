"""Lengths from text and files, against statistics worked by hand, and every way a file can be wrong."""

import gzip
import math
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.errors import EnvironmentProblem, InvalidInputError, KvplanError, UsageError
from kvplan.workloads.lengths import Lengths, grid, in_flight, lognormal_parameters, parse_lengths, read_csv
from tests.support.oracle_data import DATA, needs_oracle_data

LIMIT = 131_072


def share_up_to(lengths: Lengths, tokens: float) -> float:
    return math.fsum(p for t, p in lengths.points if t <= tokens)


# --- distributions ------------------------------------------------------------------------------------------------


def test_const() -> None:
    assert parse_lengths("const:4096", LIMIT).points == ((4096, 1.0),)
    assert parse_lengths("const:4k", LIMIT).mean == 4096


def test_uniform_below_200_is_every_token_equally() -> None:
    lengths = parse_lengths("uniform:11-110", LIMIT)
    assert [t for t, _ in lengths.points] == list(range(11, 111))
    assert all(p == pytest.approx(0.01) for _, p in lengths.points)


def test_uniform_on_the_grid_keeps_the_mean_within_half_a_percent() -> None:
    assert 15_050 <= parse_lengths("uniform:100-30000", LIMIT).mean <= 15_050 * 1.005


def test_lognormal_by_mean_and_percentile_hits_both() -> None:
    lengths = parse_lengths("lognormal:mean=2000,p95=7000", 10_000_000)
    assert 2000 <= lengths.mean <= 2000 * 1.006
    assert share_up_to(lengths, 7000 * 1.005) >= 0.95 >= share_up_to(lengths, 7000 / 1.006)


def test_lognormal_by_median_and_sigma() -> None:
    lengths = parse_lengths("lognormal:median=1000,sigma=1.2", 10_000_000)
    mean = 1000 * math.exp(1.2**2 / 2)
    assert mean <= lengths.mean <= mean * 1.006
    assert share_up_to(lengths, 1005) >= 0.5 >= share_up_to(lengths, 994)


@pytest.mark.parametrize(
    ("settings", "mu", "sigma"),
    [
        ({"median": 1000.0, "sigma": 0.5}, math.log(1000), 0.5),
        ({"mean": math.exp(7 + 0.5), "sigma": 1.0}, 7.0, 1.0),
        ({"mean": math.exp(7 + 0.5), "median": math.exp(7)}, 7.0, 1.0),
        ({"p50": 100.0, "p95": 100 * math.exp(1.6448536269514722)}, math.log(100), 1.0),
        ({"mean": math.exp(7 + 0.125), "p99": math.exp(7 + 0.5 * 2.3263478740408408)}, 7.0, 0.5),
    ],
)
def test_two_numbers_fix_a_lognormal(settings: dict[str, float], mu: float, sigma: float) -> None:
    assert lognormal_parameters(settings, "") == pytest.approx((mu, sigma))


def test_lengths_above_the_limit_count_as_the_limit_and_are_noted() -> None:
    lengths = parse_lengths("lognormal:median=1000,sigma=1", 2000)
    above = 0.5 * math.erfc(math.log(2) / math.sqrt(2))  # 24.4%
    assert lengths.longest == 2000
    assert lengths.notes == (f"{above:.2%} of the lengths are above 2,000 tokens and count as 2,000",)
    assert parse_lengths("const:9000", 2000).points == ((2000, 1.0),)


@pytest.mark.parametrize(
    "text",
    [
        "const:", "const:0", "const:x", "const:1.5.5k", "uniform:5", "uniform:9-3", "uniform:-5-3", "lognormal:",
        "lognormal:mean=5", "lognormal:mean=2000,p95=8000", "lognormal:mean=2000,p95=1000", "lognormal:mean=1,median=2",
        "lognormal:sigma=1", "lognormal:median=1000,sigma=0", "lognormal:median=1000,sigma=99",
        "lognormal:median=nan,sigma=1", "lognormal:median=1e3,sigma=1", "lognormal:median=10,median=10",
        "lognormal:p50=9,p95=3", "lognormal:mode=3,sigma=1", "normal:mean=3", "", "\0", "poisson",
        "lognormal:median=10,sigma=1,mean=3",
    ],
)  # fmt: skip
def test_text_that_is_no_distribution_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_lengths(text, LIMIT)
    assert "\n" not in str(error.value)


def test_why_a_percentile_may_be_impossible_is_said() -> None:
    # e^(1.645^2 / 2) = 3.87: no log-normal has its 95th percentile at 4 times the mean
    with pytest.raises(UsageError, match=r"at most 3\.87 times"):
        parse_lengths("lognormal:mean=2000,p95=8000", LIMIT)


@given(st.text(max_size=40))
def test_any_text_gives_lengths_or_one_line(text: str) -> None:
    try:
        outcome: Lengths | str = parse_lengths(f"lognormal:{text}", LIMIT)
    except KvplanError as error:
        outcome = str(error)
    assert "\n" not in outcome if isinstance(outcome, str) else math.isfinite(outcome.mean)


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_the_grid_rises_by_half_a_percent_at_most(low: int, span: int) -> None:
    points = list(grid(low, low + span))
    assert points[0] == low
    assert points[-1] == low + span
    for a, b in pairwise(points):
        assert a < b <= max(a + 1, a * 1.005)


@pytest.mark.parametrize("points", [(), ((0, 1.0),), ((5, 0.5), (5, 0.5)), ((5, 0.4),), ((5, 1.5), (6, -0.5))])
def test_a_distribution_is_checked_when_made(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(UsageError):
        Lengths(points)


def test_in_flight_is_the_prompt_and_half_the_output() -> None:
    assert [in_flight(100, output) for output in (0, 1, 2, 7)] == [100, 101, 101, 104]


# --- files --------------------------------------------------------------------------------------------------------


def written(folder: Path, data: bytes, name: str = "lengths.csv") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "data",
    [
        b"tokens\n100\n200\n200\n300\n",
        b"100\n200\n200\n300\n",
        b"tokens\r\n100\r\n200\r\n200\r\n300",
        b"\xef\xbb\xbftokens\n100\n200\n\n200\n300\n",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:01:01,90,10\na,150,50\nb,199,1\nc,300,0\n",
        b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,90,10,100,API log\n"
        b"6,x,0,200,1,y\n7,x,200,0,1,y\n8,\"a, b\",299,1,1,y\n",
        b"prompt_len,output_len\n90,10\n100,100\n150,50\n1,299\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("packed", [False, True])
def test_files_of_every_known_shape(tmp_path: Path, data: bytes, packed: bool) -> None:
    path = written(tmp_path, gzip.compress(data, mtime=0) if packed else data)
    lengths = parse_lengths(str(path), LIMIT)
    assert lengths.points == ((100, 0.25), (200, 0.5), (300, 0.25))
    assert "4 rows" in lengths.source


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "no rows"),
        (b"tokens\n", "no rows"),
        (b"arrival,name\n1,2\n", "line 1: no column of lengths"),
        (b"tokens\n5\n-3\n", "line 3: not a whole number"),
        (b"tokens\n5\n3.5\n", "line 3: not a whole number"),
        (b"tokens\n5\n1e3\n", "line 3: not a whole number"),
        (b"tokens\n5\n1_0\n", "line 3: not a whole number"),
        ("tokens\n5\n٣\n".encode(), "line 3: not a whole number"),
        (b"tokens\n5\n0\n", "line 3: a request of 0 tokens"),
        (b"tokens\n99999999999\n", "line 2: more than"),
        (b"prompt_tokens,output_tokens\n5,6\n7\n", "line 3: too few columns"),
        (b"prompt_tokens,output_tokens\n5,\n", "line 2: not a whole number"),
        (b"tokens\n" + b"1" * 5000 + b"\n", "line 2: longer than"),
        (b"tokens\n\xff\xfe\n", "line 2 is not UTF-8"),
        (b"tokens\n1\0\n", "line 2 holds a NUL"),
        (b'tokens\n"1\n', "line 2 is not CSV"),
        (gzip.compress(b"tokens\n" + b"5\n" * 50, mtime=0)[:-9], "broken gzip"),
        (b"\x1f\x8bgarbage", "broken gzip"),
    ],
)
def test_faults_of_files_are_named_with_their_line(tmp_path: Path, data: bytes, complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint) as error:
        read_csv(written(tmp_path, data), LIMIT)
    assert "\n" not in str(error.value)


def test_a_bomb_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplan.workloads.lengths.MAX_FILE_BYTES", 1000)
    with pytest.raises(InvalidInputError, match="sample the rows"):
        read_csv(written(tmp_path, gzip.compress(b"tokens\n" + b"5\n" * 10_000, mtime=0)), LIMIT)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for path in (tmp_path, tmp_path / "absent.csv", tmp_path / "pipe.csv"):
        with pytest.raises((InvalidInputError, EnvironmentProblem)):
            parse_lengths(str(path), LIMIT)


def test_lengths_of_a_file_above_the_limit_are_noted(tmp_path: Path) -> None:
    lengths = read_csv(written(tmp_path, b"tokens\n10\n20\n30\n40\n"), 20)
    assert lengths.points == ((10, 0.25), (20, 0.75))
    assert lengths.notes == ("50.00% of the lengths are above 20 tokens and count as 20",)


@needs_oracle_data
def test_a_published_trace_has_its_published_shape() -> None:
    lengths = read_csv(DATA / "traces" / "azure2023_conv_300s.csv", LIMIT)
    # the whole trace: mean 1,155 in and 211 out; these are 5 of its 58 minutes
    assert lengths.mean == pytest.approx(1155 + 211, rel=0.2)
    assert lengths.longest < 8192
