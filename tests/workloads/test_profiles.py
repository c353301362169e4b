"""The named workloads: facts against themselves and their sources, and what is drawn against what is published.

Tolerances are those of sampling: four standard errors, with the spread taken from the published table.
"""

import json
import math
from itertools import accumulate, islice, pairwise
from statistics import NormalDist

import pytest

from kvplan.core import entries
from kvplan.core.errors import UsageError
from kvplan.workloads.profiles import POINTS, Profile, parse_rate, profile, profile_names, tokens_at
from kvplan.workloads.stats import rank_correlation
from kvplan.workloads.trace import TraceRequest
from tests.support.oracle_data import DATA, needs_oracle_data

NAMES = profile_names()
DRAWN = 20_000
ERRORS = 4  # standard errors: a right sampler fails one check in 16,000


def drawn(name: str, number: int = DRAWN) -> list[TraceRequest]:
    return list(islice(profile(name).requests(rate=1.0, seed=7), number))


def steps(lengths: tuple[int, ...]) -> tuple[float, float]:
    """The least and the largest mean that these quantiles allow: all mass low in each step, or all high."""
    shares = [(b - a) / 100 for a, b in pairwise(POINTS)]
    low = math.fsum(share * tokens for share, tokens in zip(shares, lengths[:-1], strict=True))
    high = math.fsum(share * tokens for share, tokens in zip(shares, lengths[1:], strict=True))
    return low, high


def straight(lengths: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of the distribution that is linear between the points.

    A uniform piece from a to b has mean (a + b) / 2 and mean square (a^2 + ab + b^2) / 3.
    """
    pieces = [((q - p) / 100, a, b) for (p, q), (a, b) in zip(pairwise(POINTS), pairwise(lengths), strict=True)]
    mean = math.fsum(share * (a + b) / 2 for share, a, b in pieces)
    square = math.fsum(share * (a * a + a * b + b * b) / 3 for share, a, b in pieces)
    return mean, math.sqrt(square - mean**2)


def unevenness(lengths_profile: Profile) -> float:
    """How far the joint counts' tenths are from tenths, as a share of all requests; a few in 10,000."""
    total = sum(map(sum, lengths_profile.joint))
    margins = [
        [sum(row) for row in lengths_profile.joint],
        [sum(column) for column in zip(*lengths_profile.joint, strict=True)],
    ]
    return max(
        (abs(up_to / total - tenth / 10) for margin in margins for tenth, up_to in enumerate(accumulate(margin), 1)),
        default=0.0,
    )


def grouped_correlation(lengths_profile: Profile) -> float:
    """Spearman's of the tenths' middles, 12 E[(u - 1/2)(v - 1/2)]; 0 for lengths drawn apart."""
    middles = [(tenth + 0.5) / 10 - 0.5 for tenth in range(10)]
    products = [
        count * middles[row] * middles[column]
        for row, counts in enumerate(lengths_profile.joint)
        for column, count in enumerate(counts)
    ]
    return 12 * math.fsum(products) / (sum(map(sum, lengths_profile.joint)) or 1)


# --- facts --------------------------------------------------------------------------------------------------------


def test_there_are_the_workloads_people_ask_for() -> None:
    assert NAMES == [
        "azure-2023-code", "azure-2023-conv", "mooncake-conv", "mooncake-synthetic", "arxiv-summarization",
        "reasoning", "rag", "clinical-notes", "sharegpt",
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_has_its_source_licence_and_a_table_that_rises(name: str) -> None:
    lengths_profile = profile(name)
    assert lengths_profile.kind in ("published", "assumed")
    assert lengths_profile.summary
    assert lengths_profile.source
    assert lengths_profile.licence
    for lengths in (lengths_profile.prompt, lengths_profile.output):
        assert len(lengths) == len(POINTS) == 30
        assert list(lengths) == sorted(lengths)
        assert lengths[0] >= 1
    assert all("assumed" in note or lengths_profile.kind == "published" for note in lengths_profile.notes[:2])


@pytest.mark.parametrize("name", NAMES)
def test_the_published_mean_is_one_that_the_quantiles_allow(name: str) -> None:
    lengths_profile = profile(name)
    for lengths, mean in (
        (lengths_profile.prompt, lengths_profile.prompt_mean),
        (lengths_profile.output, lengths_profile.output_mean),
    ):
        low, high = steps(lengths)
        assert low <= mean <= high


@pytest.mark.parametrize("name", [name for name in NAMES if profile(name).joint])
def test_joint_tenths_have_even_margins_and_the_published_correlation(name: str) -> None:
    lengths_profile = profile(name)
    total = sum(map(sum, lengths_profile.joint))
    assert lengths_profile.num_requests in (total, None)
    for counts in (*lengths_profile.joint, *zip(*lengths_profile.joint, strict=True)):
        assert abs(sum(counts) - total / 10) <= (
            1 if lengths_profile.num_requests else 6
        )  # ten shares rounded to 1/10,000
    # What lies within a tenth (standard deviation 0.1 / sqrt 12) can add at most, by Cauchy-Schwarz, twice its product
    # with that of the tenths' middles, and its square.
    within, between = 0.1 / math.sqrt(12), math.sqrt(math.fsum(((t - 4.5) / 10) ** 2 for t in range(10)) / 10)
    assert lengths_profile.rank_correlation is not None
    assert abs(grouped_correlation(lengths_profile) - lengths_profile.rank_correlation) <= 12 * (
        2 * within * between + within**2
    )
    assert abs(lengths_profile.rank_correlation) > 0.3


def test_those_drawn_apart_have_a_rank_correlation_near_0() -> None:
    apart = [profile(name) for name in NAMES if not profile(name).joint]
    assert len(apart) == 6
    assert all(abs(lengths_profile.rank_correlation or 0) < 0.15 for lengths_profile in apart)


@needs_oracle_data
def test_the_tables_are_those_of_the_traces() -> None:
    published = json.loads((DATA / "traces" / "workload_profiles.json").read_text())
    assert published["quantile_points"] == list(POINTS)
    for theirs, facts in published["profiles"].items():
        lengths_profile = profile(theirs)  # our aliases are their names
        assert (list(lengths_profile.prompt), list(lengths_profile.output)) == (
            facts["prompt_quantiles"],
            facts["output_quantiles"],
        )
        assert (lengths_profile.prompt_mean, lengths_profile.output_mean) == (
            facts["prompt_mean"],
            facts["output_mean"],
        )
        assert (lengths_profile.num_requests, lengths_profile.rank_correlation) == (facts["n"], facts["spearman"])
        assert lengths_profile.rate_per_s == (facts["arrival"] or {}).get("rate_per_s")


def test_reasoning_and_rag_are_as_their_sources_say() -> None:
    # ServeGen's deepseek-r1 clients weighted by rate: p50 208, p90 2,092, p99 23,423 in; 792, 3,432, 12,607 out.
    reasoning = profile("reasoning")
    quantiles = {point: (reasoning.prompt[i], reasoning.output[i]) for i, point in enumerate(POINTS)}
    assert (quantiles[50], quantiles[90], quantiles[99]) == ((208, 792), (2092, 3432), (23_423, 12_607))
    # RAGPulse's page: prompts of 1.05k to 7.71k, outputs of 7 to 2.18k tokens, 7,106 lines.
    rag = profile("rag")
    assert (rag.prompt[0], rag.prompt[-1], rag.output[0], rag.output[-1]) == (1052, 7712, 7, 2183)
    assert rag.num_requests == sum(rag.prefix_requests) == 7106


# --- the assumed workload -------------------------------------------------------------------------------------------


def truncated(median: float, sigma: float, least: int, most: int) -> tuple[list[int], float]:
    """Quantiles at POINTS and mean of a log-normal cut at both ends, the mean by a fine sum."""
    law = NormalDist(math.log(median), sigma)
    below, span = law.cdf(math.log(least)), law.cdf(math.log(most)) - law.cdf(math.log(least))

    def quantile(share: float) -> float:
        return least if share <= 0 else most if share >= 1 else math.exp(law.inv_cdf(below + span * share))

    mean = math.fsum(quantile((step + 0.5) / 100_000) for step in range(100_000)) / 100_000
    return [round(quantile(point / 100)) for point in POINTS], mean


def test_clinical_notes_are_the_stated_law() -> None:
    notes_profile = profile("clinical-notes")
    law = entries.entry(entries.locate("workloads.yaml"), "clinical-notes")["law"]
    notes, mean_note = truncated(**law["note"])
    answers, mean_answer = truncated(**law["answer"])
    assert notes_profile.kind == "assumed"
    assert [tokens - 900 for tokens in notes_profile.prompt] == notes
    assert list(notes_profile.output) == answers
    assert mean_note == pytest.approx(8000, rel=0.001)
    assert notes_profile.prompt_mean == pytest.approx(900 + mean_note, abs=0.05)
    assert notes_profile.output_mean == pytest.approx(mean_answer, abs=0.05)
    assert notes_profile.prompt[-1] + notes_profile.output[-1] == 32_768


def test_sharegpt_has_the_published_means_and_vllms_bounds() -> None:
    """Means of 200 samples with Llama 3's tokenizer (205.845 and 211.61 tokens in io.net's results of vLLM 0.8.5); vLLM
    keeps prompts of 4 to 1,024 tokens. The shape is assumed."""
    sharegpt = profile("ShareGPT")
    law = entries.entry(entries.locate("workloads.yaml"), "sharegpt")["law"]
    prompts, mean_prompt = truncated(**law["prompt"])
    answers, mean_answer = truncated(**law["answer"])
    assert (sharegpt.kind, list(sharegpt.prompt), list(sharegpt.output)) == ("assumed", prompts, answers)
    assert mean_prompt == pytest.approx(205.845, rel=0.005)
    assert mean_answer == pytest.approx(211.61, rel=0.005)
    assert (sharegpt.prompt[0], sharegpt.prompt[-1]) == (4, 1024)


def test_clinical_notes_begin_with_one_instruction() -> None:
    requests = drawn("clinical-notes", 500)
    assert {request.prefix_ids for request in requests} == {(0,)}
    assert profile("clinical-notes").prefix_block == 900
    assert min(request.prompt_tokens for request in requests) >= 900 + 500


# --- drawing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_what_is_drawn_has_the_published_quantiles(name: str) -> None:
    lengths_profile = profile(name)
    requests = drawn(name)
    for lengths, drawn_ in (
        (lengths_profile.prompt, sorted(request.prompt_tokens for request in requests)),
        (lengths_profile.output, sorted(request.output_tokens for request in requests)),
    ):
        assert drawn_[0] >= lengths[0]
        assert drawn_[-1] <= lengths[-1]
        for point, tokens in zip(POINTS, lengths, strict=True):
            share = point / 100
            slack = ERRORS * math.sqrt(share * (1 - share) / DRAWN) + unevenness(lengths_profile)
            assert sum(length < tokens for length in drawn_) / DRAWN <= share + slack
            assert sum(length <= tokens for length in drawn_) / DRAWN >= share - slack


@pytest.mark.parametrize("name", NAMES)
def test_what_is_drawn_has_the_mean_of_straight_pieces_which_lies_by_the_published_one(name: str) -> None:
    """Published and drawn means differ by where in each step the requests lie: by at most the steps' bounds."""
    lengths_profile = profile(name)
    requests = drawn(name)
    for lengths, published, drawn_ in (
        (lengths_profile.prompt, lengths_profile.prompt_mean, [request.prompt_tokens for request in requests]),
        (lengths_profile.output, lengths_profile.output_mean, [request.output_tokens for request in requests]),
    ):
        mean, deviation = straight(lengths)
        low, high = steps(lengths)
        slack = ERRORS * deviation / math.sqrt(DRAWN) + unevenness(lengths_profile) * lengths[-1]
        assert math.fsum(drawn_) / DRAWN == pytest.approx(mean, abs=slack)
        assert abs(mean - published) <= (high - low) / 2 + 0.5  # half a step off at most, and a mean's rounding


@pytest.mark.parametrize("name", NAMES)
def test_what_is_drawn_has_the_correlation_of_the_table(name: str) -> None:
    lengths_profile = profile(name)
    requests = drawn(name)
    seen = rank_correlation(
        [request.prompt_tokens for request in requests], [request.output_tokens for request in requests]
    )
    assert seen == pytest.approx(grouped_correlation(lengths_profile), abs=ERRORS / math.sqrt(DRAWN))


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    times = [request.arrival_s for request in islice(profile("azure-2023-conv").requests(rate=4.0, seed=1), DRAWN)]
    gaps = [b - a for a, b in pairwise(times)]
    mean = math.fsum(gaps) / len(gaps)
    assert times[0] == 0
    assert mean == pytest.approx(1 / 4, rel=ERRORS / math.sqrt(DRAWN))  # an exponential's deviation is its mean
    for bound in (0.05, 0.25, 0.7):  # the share of gaps up to x is 1 - e^(-4x)
        share = 1 - math.exp(-4 * bound)
        slack = ERRORS * math.sqrt(share * (1 - share) / DRAWN)
        assert sum(gap <= bound for gap in gaps) / len(gaps) == pytest.approx(share, abs=slack)


def test_the_published_rate_is_used_where_none_is_said() -> None:
    quick, slow = profile("azure-2023-conv").requests(seed=5), profile("azure-2023-conv").requests(5.53, seed=5)
    assert list(islice(quick, 50)) == list(islice(slow, 50))


def test_a_seed_fixes_what_is_drawn_and_another_changes_it() -> None:
    rag = profile("rag")
    first, again, other = (list(islice(rag.requests(1.0, seed), 100)) for seed in (3, 3, 4))
    assert first == again != other


def test_system_prompts_are_shared_as_published() -> None:
    requests = drawn("rag")
    for family, count in enumerate((5448, 1402, 256)):  # of RAGPulse's 7,106 requests
        share = count / 7106
        seen = sum(request.prefix_ids == (family,) for request in requests) / DRAWN
        assert seen == pytest.approx(share, abs=ERRORS * math.sqrt(share * (1 - share) / DRAWN))


def test_a_shared_prefix_may_be_said_and_prompts_are_longer_than_it() -> None:
    conversations = profile("azure-2023-conv")
    plain = list(islice(conversations.requests(1.0, 2), 1000))
    shared = list(islice(conversations.requests(1.0, 2, shared_prefix=900), 1000))
    assert {request.prefix_ids for request in shared} == {(0,)}
    assert [request.prompt_tokens for request in shared] == [max(request.prompt_tokens, 901) for request in plain]
    assert not any(request.prefix_ids for request in islice(profile("rag").requests(1.0, 2, shared_prefix=0), 100))
    assert conversations.trace(5, 1.0, shared_prefix=900).prefix_block == 900
    assert profile("rag").trace(5, shared_prefix=0).prefix_block is None
    assert profile("rag").trace(5).prefix_block == 512


def test_a_share_falls_on_the_line_between_two_points() -> None:
    lengths = tuple(accumulate([10] + [100] * 29))
    assert tokens_at(lengths, 0) == 10
    assert tokens_at(lengths, 0.005) == 110  # the second point is 0.5%
    assert tokens_at(lengths, 0.0075) == 160  # halfway to the third, 1%
    assert tokens_at(lengths, 0.525) == lengths[POINTS.index(50)] + 50
    assert tokens_at(lengths, 1) == lengths[-1]


# --- refusals -----------------------------------------------------------------------------------------------------


def test_an_unknown_name_is_refused_with_near_misses() -> None:
    with pytest.raises(UsageError, match=r"did you mean azure-2023-code, azure-2023-conv\?"):
        profile("azure-2023")
    with pytest.raises(UsageError, match="`kvplan trace profiles` lists them"):
        profile("weather")


def test_names_and_aliases_are_found_whatever_their_case() -> None:
    assert profile("RAGPulse") is profile("ragpulse") or profile("RAGPulse") == profile("rag")
    assert profile("deepseek-r1").name == "reasoning"


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf, 2e6])
def test_an_impossible_rate_is_refused_before_anything_is_drawn(rate: float) -> None:
    with pytest.raises(UsageError, match="the rate must be above 0"):
        profile("rag").requests(rate)


def test_a_profile_without_a_rate_needs_one() -> None:
    without = [name for name in NAMES if profile(name).rate_per_s is None]
    assert without == ["arxiv-summarization", "clinical-notes", "sharegpt"]
    for name in without:
        with pytest.raises(UsageError, match="no rate is published"):
            profile(name).requests()


def test_a_negative_prefix_is_refused() -> None:
    with pytest.raises(UsageError, match="shared prefix"):
        profile("rag").requests(1.0, shared_prefix=-1)


@pytest.mark.parametrize(
    "text", ["0", "-1", "nan", "1e7", "1e", "1e999", "0e1", "", "2/s", "1000001", "٣", "1_0", " 2"]
)
def test_text_that_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--rate: not requests per second"):
        parse_rate(text, "--rate")


def test_rates_are_numbers_per_second() -> None:
    assert [parse_rate(text, "--rate") for text in ("2", "0.25", "1000000")] == [2.0, 0.25, 1e6]
    # as guidellm and JSON write them
    assert [parse_rate(text, "--rate") for text in ("0.6439466687238412", "1e1", "2.5E-1")] == [
        0.6439466687238412, 10.0, 0.25,
    ]  # fmt: skip


def test_profiles_are_values() -> None:
    assert isinstance(hash(profile("rag")), int)
    assert isinstance(profile("rag"), Profile)
