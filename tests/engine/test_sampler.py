"""The sampler against transformers' logits processors, probabilities worked out in float64, and numbers by hand."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.config import SamplingParams
from engine.kernels import torch_backend
from engine.sampler import Penalties, Sampler, SamplingBatch, TokenLogprobs, adjust, lowest_kept, mix, sample, uniform
from engine.sequence import Sequence
from kvplan.core.errors import UsageError

VOCAB = 50
EPS = torch.finfo(torch.float32).eps
GREEDY = SamplingParams(temperature=0)


def logits_of(num_rows: int, seed: int = 0, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def request(name: str, *tokens: int, arrival: int = 0) -> Sequence:
    seq = Sequence(name, list(tokens) or [1, 2, 3], 100)
    seq.arrival = arrival
    return seq


def requests(n: int) -> list[Sequence]:
    return [request(f"r{i}", arrival=i) for i in range(n)]


def prepared(
    params: list[SamplingParams], seqs: list[Sequence] | None = None, vocab_size: int = VOCAB
) -> SamplingBatch:
    return Sampler(vocab_size).prepare(seqs or requests(len(params)), params)


def penalize(logits: Tensor, penalties: Penalties) -> Tensor:
    return adjust(logits, SamplingBatch(len(logits), penalties=penalties))


def survivors(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Probabilities of what each row may draw."""
    draws = prepared(params, vocab_size=logits.shape[1]).draws
    assert draws is not None
    best = logits.amax(-1)
    scaled, floors = torch_backend.scaled_logits(logits, best, draws.temperature), lowest_kept(logits, best, draws)
    return (scaled if floors is None else scaled.masked_fill(scaled < floors, -torch.inf)).softmax(-1)


# --- which tokens may come ---------------------------------------------------------------------------------------

FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB + 10},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.7, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.7, "min_p": 0.1},
)


def transformers_probs(logits: Tensor, options: dict[str, Any]) -> Tensor:
    """What `generate` with these options draws from; it adds the processors in this order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(options.get("temperature", 1.0)))])
    if "top_k" in options:
        warpers.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        warpers.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        warpers.append(MinPLogitsWarper(options["min_p"]))
    left: Tensor = warpers(torch.LongTensor([[0]] * len(logits)), torch.FloatTensor(logits))
    return left.softmax(-1)


@pytest.mark.parametrize("options", FILTERS, ids=[" ".join(f"{k}={v}" for k, v in f.items()) for f in FILTERS])
def test_the_tokens_left_and_their_probabilities_are_transformers(options: dict[str, Any]) -> None:
    logits = logits_of(20)
    expected = transformers_probs(logits, options)
    got = survivors(logits, [SamplingParams(**options)] * 20)
    assert torch.equal(got > 0, expected > 0)
    # A logit of up to 12 over a temperature of at least 0.3 is rounded by 40 eps, which its exponential multiplies.
    torch.testing.assert_close(got, expected, rtol=100 * EPS, atol=0)


def test_every_row_is_filtered_by_its_own_parameters() -> None:
    logits = logits_of(len(FILTERS))
    got = survivors(logits, [SamplingParams(**options) for options in FILTERS])
    alone = [survivors(row[None], [SamplingParams(**o)]) for row, o in zip(logits, FILTERS, strict=True)]
    assert torch.equal(got, torch.cat(alone))


def test_equal_logits_at_the_edge_stay_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    for options in ({"top_k": 2}, {"top_k": 2, "top_p": 0.99}, {"top_p": 0.6}):
        assert (survivors(logits, [SamplingParams(**options)])[0] > 0).tolist() == [False, True, True, True, False]


def test_the_smallest_temperature_leaves_only_the_best() -> None:
    assert survivors(torch.tensor([[3e38, 1.0, -3e38]]), [SamplingParams(temperature=1e-300)]).tolist() == [[1, 0, 0]]


# --- penalties ---------------------------------------------------------------------------------------------------


def test_a_repetition_penalty_is_transformers() -> None:
    logits = logits_of(3)
    tokens = [[1, 2, 3, 3], [4, 4, 9], [0, VOCAB - 1]]
    params = [SamplingParams(temperature=0, repetition_penalty=r) for r in (1.3, 0.8, 2.0)]
    seqs = [request(f"r{i}", *ids) for i, ids in enumerate(tokens)]
    seqs[0].token_ids.append(17)  # an output token counts like one of the prompt
    penalties = prepared(params, seqs).penalties
    assert penalties is not None
    expected = [
        RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(torch.tensor([seq.token_ids]), row[None])
        for row, seq, p in zip(logits, seqs, params, strict=True)
    ]
    assert torch.equal(penalize(logits, penalties), torch.cat(expected))


def test_presence_and_frequency_lower_what_the_output_has_and_not_the_prompt() -> None:
    seq = request("a", 1, 2)
    seq.token_ids += [3, 4, 4]
    penalties = prepared([SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)], [seq], 6).penalties
    assert penalties is not None
    # 3 once: 0.5 + 0.25; 4 twice: 0.5 + 2 x 0.25
    assert penalize(torch.ones(1, 6), penalties).tolist() == [[1, 1, 1, 0.25, 0, 1]]


def test_repetition_comes_before_presence_and_a_negative_logit_is_multiplied() -> None:
    seq = request("a", 0)
    seq.token_ids += [1, 2]
    penalties = prepared([SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)], [seq], 4).penalties
    assert penalties is not None
    assert penalize(torch.tensor([[4.0, 4.0, -4.0, 4.0]]), penalties).tolist() == [[2.0, 1.0, -9.0, 4.0]]


def test_what_was_seen_follows_its_sequence_while_others_come_and_go() -> None:
    sampler = Sampler(VOCAB)
    seqs = [request(name, i, i + 1) for i, name in enumerate("abcd")]
    params = {
        seq: SamplingParams(temperature=0, presence_penalty=0.5 * (i != 1), frequency_penalty=0.25 * (i != 1))
        for i, seq in enumerate(seqs)
    }
    logits = logits_of(4)
    for step, running in enumerate(["abc", "abc", "cab", "c", "bdc", "adcb", "adcb"]):
        rows = [seqs["abcd".index(name)] for name in running]
        penalties = sampler.prepare(rows, [params[seq] for seq in rows]).penalties
        assert penalties is not None
        got = penalize(logits[: len(rows)], penalties)
        for row, seq in enumerate(rows):
            counts = Counter(seq.token_ids[seq.num_prompt_tokens :])
            expected = logits[row].clone()
            if seq.request_id != "b":  # without penalties
                for token, count in counts.items():
                    expected[token] = expected[token] - 0.5 - 0.25 * count
            assert torch.equal(got[row], expected)
            seq.token_ids.append((step * 7 + row) % 5)


def test_penalties_count_a_token_that_only_the_device_knows() -> None:
    sampler, seqs = Sampler(6), [request("a", 0), request("b", 0), request("c", 0)]
    params = [GREEDY, *[SamplingParams(temperature=0, presence_penalty=1.0, frequency_penalty=0.5)] * 2]
    sampler.prepare(seqs, params)
    last = torch.tensor([3, 4, 5])  # what that step sampled
    for seq in seqs:
        seq.num_computed_tokens, seq.num_placeholders = 2, 2  # the prompt's token, and one that is in flight
    rows = [seqs[2], seqs[1]]
    penalties = sampler.prepare(rows, params[1:], last).penalties
    assert penalties is not None
    seen = [[0, 0, 0, 0, 0, -1.5], [0, 0, 0, 0, -1.5, 0]]
    assert penalize(torch.zeros(2, 6), penalties).tolist() == seen
    for seq, token in ((seqs[1], 4), (seqs[2], 5)):  # it arrives, and is not counted again; the next one is in flight
        seq.token_ids.append(token)
        seq.num_computed_tokens = 3
    penalties = sampler.prepare(rows, params[1:], torch.tensor([5, 1])).penalties
    assert penalties is not None
    # c has 5 twice: 1 + 2 x 0.5; b has 4 and 1.
    assert penalize(torch.zeros(2, 6), penalties).tolist() == [[0, 0, 0, 0, 0, -2], [0, -1.5, 0, 0, -1.5, 0]]


def test_penalties_also_move_the_greedy_choice() -> None:
    seq = request("a", 0)
    seq.token_ids += [2]
    batch = prepared([SamplingParams(temperature=0, presence_penalty=1.5)], [seq], 4)
    assert sample(torch.tensor([[0.0, 1.0, 2.0, 0.5]]), batch).token_ids.tolist() == [1]


# --- biases ------------------------------------------------------------------------------------------------------


def test_biases_are_added_to_the_logits_of_their_rows() -> None:
    """In float64, and as transformers' own processor adds them."""
    logits = logits_of(4)
    biases: list[dict[int, float]] = [{3: 2.5, 49: -100}, {}, {3: -0.1, 0: 100, 7: 1e-3}, {49: 0}]
    batch = prepared([SamplingParams(logit_bias=row_biases) for row_biases in biases])
    expected = logits.double()
    for row, row_biases in zip(expected, biases, strict=True):
        for token, bias in row_biases.items():
            row[token] += bias
    before, got = logits.clone(), adjust(logits, batch)
    # The bias and the sum of at most 128 are rounded to float32.
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=128 * EPS)
    for row, row_biases in enumerate(biases):
        own = {(token,): float(bias) for token, bias in row_biases.items()}
        theirs = SequenceBiasLogitsProcessor(own)(torch.tensor([[1]]), logits[row : row + 1]) if own else logits[row]
        assert torch.equal(got[row], theirs.flatten())
    assert torch.equal(logits, before)


def test_without_a_bias_the_logits_are_not_even_copied() -> None:
    logits, batch = logits_of(3), prepared([GREEDY, SamplingParams(logit_bias={}), SamplingParams(top_p=0.5)])
    assert batch.biases is None
    assert adjust(logits, batch) is logits


def test_a_bias_comes_before_penalties() -> None:
    """The values are what vLLM 0.33's own sampler makes of these (Sampler.apply_logits_processors)."""
    seq = request("a", 0, 1)
    seq.token_ids += [2, 2]
    biases = {0: 3.0, 1: -3.0, 2: 5.0}
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=biases)
    # (1 + 3) / 2, (1 - 3) x 2, (1 + 5) / 2 - 0.5 - 2 x 0.25
    assert adjust(torch.ones(1, 4), prepared([params], [seq], 4)).tolist() == [[2.0, -4.0, 2.0, 1.0]]


def test_a_bias_bans_a_token_or_makes_it_come() -> None:
    logits = logits_of(1)
    best = int(logits.argmax())
    for way in (GREEDY, SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.9), SamplingParams(seed=1, min_p=0.1)):
        for seed in range(20):
            banned, forced = (
                replace(way, seed=seed, logit_bias={token: bias}) for token, bias in ((best, -100), (11, 100))
            )
            assert sample(logits, prepared([banned])).token_ids.item() != best
            assert sample(logits, prepared([forced])).token_ids.item() == 11


def test_a_bias_moves_the_odds_by_its_exponential() -> None:
    """OpenAI's meaning: added to the logits before sampling, so the odds against any other token grow e^bias times."""
    logits = logits_of(1)
    batch = prepared([SamplingParams(logit_bias={5: 1.5})])
    plain, moved = (values[0].double().softmax(-1) for values in (logits, adjust(logits, batch)))
    ratio = (moved[5] / moved[6]) / (plain[5] / plain[6])
    assert ratio.item() == pytest.approx(np.exp(1.5), rel=50 * EPS)


def test_biases_follow_their_sequences_while_others_come_and_go() -> None:
    sampler, seqs = Sampler(VOCAB), requests(3)
    params = {seq: SamplingParams(logit_bias={row: row + 1} if row != 1 else {}) for row, seq in enumerate(seqs)}
    for order in ([0, 1, 2], [2, 0], [1], [1, 2]):
        rows = [seqs[i] for i in order]
        got = adjust(torch.zeros(len(rows), VOCAB), sampler.prepare(rows, [params[seq] for seq in rows]))
        expected = [{i: i + 1} if i != 1 else {} for i in order]
        assert [{int(j): row[j].item() for j in row.nonzero()} for row in got] == expected


@pytest.mark.parametrize(
    ("biases", "words"),
    [
        ({1: 100.5}, "from -100 to 100"),
        ({1: -101}, "from -100 to 100"),
        ({1: float("nan")}, "from -100 to 100"),
        ({1: True}, "from -100 to 100"),
        ({"1": 1}, "mapping of token ids"),
        ({True: 1}, "mapping of token ids"),
        ([(1, 1)], "mapping of token ids"),
        (dict.fromkeys(range(1025), 1), "1025 tokens; at most 1024"),
    ],
)
def test_a_bias_out_of_bounds_is_refused(biases: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SamplingParams(logit_bias=biases)


# --- which token comes -------------------------------------------------------------------------------------------


def test_greedy_rows_take_the_most_likely_token_and_need_nothing_prepared() -> None:
    logits = logits_of(8)
    batch = prepared([GREEDY] * 8)
    assert batch == SamplingBatch(8)
    assert sample(logits, batch).token_ids.tolist() == [row.index(max(row)) for row in logits.tolist()]


def test_a_row_has_the_values_that_change_nothing_where_others_ask_for_more() -> None:
    """vLLM's neutral values: temperature 0 for a greedy row, the vocabulary for top_k, -inf for the log of min_p."""
    params = [GREEDY, SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.5, min_p=1.0)]
    draws = prepared(params).draws
    assert draws is not None
    assert draws.nucleus is not None
    assert draws.log_min_p is not None
    assert draws.temperature.tolist() == [[0.0], [1.0], [1.0], [1.0]]
    assert draws.log_min_p.tolist() == [[-torch.inf], [-torch.inf], [-torch.inf], [0.0]]
    assert draws.nucleus.top_k.tolist() == [[VOCAB], [VOCAB], [3], [VOCAB]]
    assert (draws.nucleus.top_p >= 1).flatten().tolist() == [True, True, True, False]
    logits = logits_of(4)
    floors = lowest_kept(logits, logits.amax(-1), draws)
    assert floors is not None
    assert floors.isinf().flatten().tolist() == [True, True, False, False]


@pytest.mark.parametrize("others", [[], [GREEDY], [SamplingParams(temperature=0, top_p=0.5, top_k=2, min_p=0.1)]])
def test_what_no_row_asks_for_launches_nothing(others: list[SamplingParams]) -> None:
    draws = prepared([SamplingParams(), *others]).draws
    assert draws is not None
    assert (draws.nucleus, draws.log_min_p) == (None, None)
    assert lowest_kept(logits_of(1 + len(others)), torch.zeros(1 + len(others)), draws) is None


def test_a_row_draws_the_same_beside_any_others() -> None:
    """One at a time is the oracle: nothing beside the row could be taken for its own."""
    ways = [SamplingParams(seed=4, **options) for options in FILTERS] + [GREEDY]
    logits = logits_of(len(ways))
    alone = [sample(logits[i : i + 1], prepared([way], [request("a")])).token_ids.item() for i, way in enumerate(ways)]
    assert sample(logits, prepared(ways)).token_ids.tolist() == alone
    order = [*range(len(ways) - 1, -1, -2), *range(0, len(ways), 2)][: len(ways)]
    together = sample(logits[order], prepared([ways[i] for i in order])).token_ids.tolist()
    assert together == [alone[i] for i in order]


def drawn(scaled: Tensor, uniforms: Tensor) -> Tensor:
    """Of logits whose largest is 0, at temperature 1."""
    m = len(scaled)
    return torch_backend.draw(scaled, torch.zeros(m), torch.ones(m, 1), uniforms)


def test_a_token_takes_as_much_of_the_unit_interval_as_its_probability() -> None:
    probs = torch.tensor([0.05, 0.0, 0.5, 0.25, 0.0, 0.2, 0.0])
    n = 1000
    middles = (torch.arange(n, dtype=torch.float64)[:, None] + 0.5) / n
    scaled = (probs / probs.max()).log().expand(n, -1).clone()
    counts = drawn(scaled, middles).bincount(minlength=7)
    assert counts.tolist() == [50, 0, 500, 250, 0, 200, 0]


@pytest.mark.parametrize("end", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_interval_are_tokens_that_may_come(end: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -1.3, -torch.inf]])
    assert drawn(logits, torch.tensor([[end]], dtype=torch.float64)).item() == (1 if end == 0 else 2)


@pytest.mark.parametrize("part", [0.1, 0.37, 0.5, 0.93])
def test_a_long_tail_of_unlikely_tokens_keeps_its_share(part: float) -> None:
    """200,000 tokens of 1e-9 each beside one of nearly 1: float32 sums would merge a hundred of them into one."""
    tail = 200_000
    scaled = torch.cat([torch.zeros(1), torch.tensor(1e-9).log().expand(tail)])[None]
    u = (1 + part * tail * 1e-9) / (1 + tail * 1e-9)
    token = drawn(scaled, torch.tensor([[u]], dtype=torch.float64)).item()
    # log and exp of -21 round by up to 21 eps = 2.5e-6 of 200,000.
    assert abs(token - part * tail) <= 1.5


def test_draws_come_as_often_as_their_probabilities() -> None:
    """Pearson's chi-square of 40,000 draws; with 7 degrees of freedom it exceeds 40.5 once in a million samples."""
    n, steps = 4_000, 10
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 1.5, -2.0, 0.0])
    for seeds in (range(n), [None] * n):
        params = [SamplingParams(seed=seed) for seed in seeds]
        seqs, sampler = requests(n), Sampler(8, seed=1)
        counts = torch.zeros(8, dtype=torch.float64)
        for _ in range(steps):
            tokens = sample(logits.expand(n, 8), sampler.prepare(seqs, params)).token_ids
            counts += tokens.bincount(minlength=8)
            for seq, token in zip(seqs, tokens.tolist(), strict=True):
                seq.token_ids.append(token)
        expected = logits.double().softmax(-1) * n * steps
        assert ((counts - expected) ** 2 / expected).sum() < 40.5


def test_uniforms_are_splitmix64s() -> None:
    """Seed 1234567 has these first outputs in its authors' reference code."""
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    got = uniform(np.full(4, 1234567, np.uint64), np.arange(4, dtype=np.uint64))
    assert got.tolist() == [(word >> 11) / 2**53 for word in first]


def test_mixing_wraps_like_unsigned_64_bit_numbers() -> None:
    def by_hand(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    values = [0, 1, 2**64 - 1, 2**63 - 1, 2**63, 0x123456789ABCDEF]
    assert mix(np.array(values, np.uint64)).tolist() == [by_hand(x) for x in values]


def run(sampler: Sampler, rows: list[tuple[Sequence, SamplingParams]], logits: Tensor) -> None:
    """One step; each sequence gets its token."""
    seqs, params = [seq for seq, _ in rows], [p for _, p in rows]
    for seq, token in zip(seqs, sample(logits, sampler.prepare(seqs, params)).to_host().token_ids, strict=True):
        seq.token_ids.append(token)


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.05, "temperature": 3.0}, {"repetition_penalty": 1.5, "top_k": 30}],
    ids=str,
)
def test_a_seeded_request_draws_the_same_alone_and_in_any_company(options: dict[str, Any]) -> None:
    mine = SamplingParams(seed=42, **options)
    others = [GREEDY, SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(seed=42, presence_penalty=1.0)]
    alone, among = request("alone"), request("among", arrival=9)
    alone_sampler, sampler = Sampler(VOCAB), Sampler(VOCAB, seed=5)
    for step in range(12):
        row = logits_of(1, seed=step)
        run(alone_sampler, [(alone, mine)], row)
        place = step % 4
        rows = [(request(f"o{step}{i}"), params) for i, params in enumerate(others)]
        rows.insert(place, (among, mine))
        run(sampler, rows, torch.cat([logits_of(place, seed=100 + step), row, logits_of(4 - place, seed=200 + step)]))
    assert among.token_ids == alone.token_ids
    assert len(set(alone.token_ids[3:])) > 1


def test_unseeded_requests_follow_the_engines_seed() -> None:
    def tokens(seed: int) -> list[list[int]]:
        seqs, sampler = requests(3), Sampler(VOCAB, seed=seed)
        for step in range(8):
            run(
                sampler, [(seq, SamplingParams(temperature=3.0)) for seq in seqs], logits_of(1, seed=step).expand(3, -1)
            )
        return [seq.token_ids for seq in seqs]

    assert tokens(0) == tokens(0)
    assert tokens(0) != tokens(1)
    assert len({tuple(ids) for ids in tokens(0)}) == 3  # the same logits, and each its own draws


@pytest.mark.parametrize("seed", [0, -1, 2**63, 10**30])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    uniforms = prepared([SamplingParams(seed=seed), SamplingParams(seed=seed + 1)]).uniforms
    assert uniforms is not None
    (first,), (other,) = uniforms.tolist()
    assert 0 <= first < 1
    assert first != other


def test_a_token_sampled_while_another_is_in_flight_has_its_own_number() -> None:
    """With two batches in flight the second is prepared before the first one's token is known."""
    sampler, seq, params = Sampler(VOCAB), request("a"), [SamplingParams(seed=3)]
    seq.num_placeholders = 1
    first = sampler.prepare([seq], params).uniforms
    seq.num_placeholders = 2
    second = sampler.prepare([seq], params).uniforms
    seq.token_ids.append(7)
    seq.num_placeholders = 1
    assert first is not None
    assert second is not None
    assert first.item() != second.item()
    assert sampler.prepare([seq], params).uniforms == second


def test_while_the_same_sequences_run_nothing_is_built_again() -> None:
    sampler, seqs = Sampler(VOCAB), requests(3)
    greedy = sampler.prepare(seqs, [GREEDY] * 3)
    assert sampler.prepare(list(seqs), [GREEDY] * 3) is greedy
    assert sampler.prepare(seqs[:2], [GREEDY] * 2).num_seqs == 2


# --- rows without a token ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0}, {}, {"top_p": 0.9, "presence_penalty": 1.0}, {"logprobs": 2}, {"top_k": 5, "min_p": 0.1}],
    ids=str,
)
def test_rows_that_are_no_numbers_are_flagged_and_leave_the_others_alone(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    logits = logits_of(5)
    good = sample(logits, prepared([params] * 5)).token_ids
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    logits[3, 0] = torch.inf
    logits[4, :-1] = -torch.inf  # one token is left
    got = sample(logits, prepared([params] * 5)).to_host()
    assert got.is_bad == [False, True, True, True, False]
    assert (got.token_ids[0], got.token_ids[4]) == (good[0].item(), VOCAB - 1)
    assert all(0 <= token < VOCAB for token in got.token_ids)


# --- log-probabilities -------------------------------------------------------------------------------------------


def test_logprobs_are_the_models_own_of_the_chosen_and_the_most_likely() -> None:
    logits = logits_of(4)
    before = logits.clone()
    params = [
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(seed=1),
        SamplingParams(seed=1, temperature=0.5, top_k=2, repetition_penalty=1.9, logprobs=0),
        SamplingParams(seed=2, temperature=5.0, logprobs=VOCAB + 5),
    ]
    got = sample(logits, prepared(params)).to_host()
    expected = torch.log_softmax(logits.double(), -1)
    assert got.logprobs[1] is None
    for row, num in ((0, 3), (2, 0), (3, VOCAB)):
        entry = got.logprobs[row]
        assert isinstance(entry, TokenLogprobs)
        # A difference of two float32 numbers of at most 16: each is rounded by 16 eps / 2, and so is the result.
        bound = 24 * EPS
        assert abs(entry.chosen - expected[row, got.token_ids[row]].item()) <= bound
        ranked = expected[row].sort(descending=True)
        assert [token for token, _ in entry.top] == ranked.indices[:num].tolist()
        assert all(abs(v - e) <= bound for (_, v), e in zip(entry.top, ranked.values.tolist(), strict=False))
    assert torch.equal(logits, before)


def test_logits_of_16_bits_are_widened_before_anything_is_computed_with_them() -> None:
    """Kernels that read them in the head's own dtype get float32 where a row was changed."""
    logits = logits_of(2).bfloat16()
    before, batch = logits.clone(), prepared([SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=3)] * 2)
    got, expected = sample(logits, batch).to_host(), sample(logits.float(), batch).to_host()
    assert got == expected
    assert torch.equal(logits, before)
    assert batch.penalties is not None
    assert penalize(logits, batch.penalties).dtype == torch.float32


def test_sampling_never_asks_the_device_for_a_value() -> None:
    """Tensors on the meta device have none: whatever would wait for one fails there."""
    params = [
        GREEDY,
        SamplingParams(top_k=3, top_p=0.5),
        SamplingParams(min_p=0.1, logprobs=2),
        SamplingParams(repetition_penalty=1.1, frequency_penalty=0.5, logit_bias={3: 1}),
    ]
    sampler, seqs = Sampler(VOCAB, device="meta"), requests(4)
    sampler.prepare(seqs, params, torch.empty(4, dtype=torch.int64, device="meta"))
    for seq in seqs:
        seq.num_computed_tokens = 4  # the last of them in flight
    batch = sampler.prepare(seqs, params, torch.empty(4, dtype=torch.int64, device="meta"))
    sampled = sample(torch.empty(4, VOCAB, device="meta"), batch)
    assert (sampled.token_ids.shape, sampled.token_ids.device.type) == ((4,), "meta")
    with pytest.raises(NotImplementedError):
        sampled.to_host()
