"""Speculation in the engine: the tokens are those of an engine without, and drafts are what vLLM's own code guesses.

tests/facts/ngram.jsonl: texts, and what `_find_longest_matched_ngram_and_propose_tokens` of vLLM 0.33.0 drafts for them
(80 of 400 random ones, all 400 equal).
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, SamplingParams
from engine.directory import read_spec
from engine.draft_rules import SpeculationStats, SpeculativeConfig
from engine.proposer import NgramProposer
from engine.sampler import Sampler, sample
from engine.sequence import Sequence
from engine.speculation import Rows, checked
from kvplan.core.errors import KvplanError, UsageError
from kvplan.serve.real import inputs_of
from kvplan.servers.bundled.rules import Speculation as Planned
from kvplan.servers.bundled.rules import predict
from tests.oracles import read_lines
from tests.support.small_engines import engine_for, greedy, random_tokens, run_dry, saved_model

FACTS = Path(__file__).parents[1] / "facts" / "ngram.jsonl"
NGRAM = SpeculativeConfig("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3)


@pytest.mark.parametrize("row", read_lines(FACTS), ids=lambda row: f"{len(row['text'])}-{len(row['drafts'])}")
def test_ngram_drafts_are_vllms(row: dict[str, Any]) -> None:
    proposer = NgramProposer(row["prompt_lookup_min"], row["prompt_lookup_max"], row["max_model_len"])
    assert proposer.follow(row["text"], row["num_speculative_tokens"]) == row["drafts"]


# --- the same tokens ---------------------------------------------------------------------------------------------


def prompts() -> list[list[int]]:
    """Texts that repeat themselves, so that there is something to guess."""
    return [text + text[:10] for text in random_tokens(20, 33, 7, 25, 12)]


def stats_of(engine: Engine) -> SpeculationStats:
    stats = engine.draft_stats()
    assert stats is not None
    return stats


@pytest.mark.parametrize(
    ("family", "params"),
    [
        ("gemma3_text", greedy(20)),
        ("deepseek_v3", SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)),
        ("llama", SamplingParams(temperature=0.4, top_p=0.9, top_k=20, max_tokens=20, ignore_eos=True)),
    ],
    ids=["greedy", "seeded", "nucleus"],
)
def test_tokens_are_those_of_an_engine_without_speculation(family: str, params: SamplingParams) -> None:
    plain = [output.token_ids for output in engine_for(family).generate(prompts(), params)]
    engine = engine_for(family, speculative_config=NGRAM)
    assert [output.token_ids for output in engine.generate(prompts(), params)] == plain
    assert stats_of(engine).num_accepted_tokens > 0
    assert stats_of(engine).num_draft_tokens > stats_of(engine).num_accepted_tokens


def test_tokens_are_the_same_where_memory_is_short_and_prefixes_are_shared() -> None:
    """Preemptions, prefix hits, chunks of prompts and penalties beside each other."""
    shared = random_tokens(24, seed=3)[0]
    texts = [shared + text for text in prompts()]
    kinds = [
        greedy(20),
        greedy(20, presence_penalty=0.5),
        greedy(20, logprobs=2),
        SamplingParams(seed=2, max_tokens=20),
    ]
    params = [kinds[i % 4] for i in range(len(texts))]
    plain = [output.token_ids for output in engine_for("llama").generate(texts, params)]
    engine = engine_for("llama", speculative_config=NGRAM, num_blocks=40, max_num_batched_tokens=32)
    outputs = engine.generate(texts, params)
    engine.scheduler.check_invariants()
    assert [output.token_ids for output in outputs] == plain
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_cached_tokens > 0
    assert [len(output.logprobs or ()) for output in outputs] == [
        20 if own.logprobs is not None else 0 for own in params
    ]


def test_an_answer_ends_in_the_middle_of_what_held() -> None:
    """At max_tokens, at a stop token, and the callbacks see each token once."""
    text = prompts()[0]
    plain = engine_for("gemma3_text").generate([text], greedy(20))[0].token_ids
    streamed: list[int] = []
    engine = engine_for("gemma3_text", speculative_config=NGRAM)
    for max_tokens in range(1, 9):
        output = engine.generate([text], greedy(max_tokens), on_token=lambda update: streamed.append(update.token_id))[
            0
        ]
        assert (output.token_ids, output.finish_reason) == (plain[:max_tokens], "length")
    assert streamed == [token for max_tokens in range(1, 9) for token in plain[:max_tokens]]
    stop = plain[4]
    output = engine.generate([text], greedy(20, stop_token_ids=(stop,)))[0]
    assert (output.token_ids, output.finish_reason) == (plain[: plain.index(stop) + 1], "stop")


def test_the_end_of_the_context_is_the_same() -> None:
    text = (random_tokens(9)[0] * 10)[:90]  # max_model_len is 96
    plain = engine_for("llama").generate([text], greedy(50))[0]
    output = engine_for("llama", speculative_config=NGRAM).generate([text], greedy(50))[0]
    assert (output.token_ids, output.finish_reason) == (plain.token_ids, "length")


def test_a_request_that_is_given_up_leaves_no_block() -> None:
    engine = engine_for("gemma3_text", speculative_config=NGRAM)
    names = [engine.add_request(text, greedy(40)) for text in prompts()]
    for _ in range(4):
        engine.step()
    engine.abort(names[0])
    outputs = run_dry(engine)
    assert sorted(outputs) == sorted(names[1:])
    assert engine.scheduler.num_used_blocks == 0


# --- the same distribution ---------------------------------------------------------------------------------------

LOGITS = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, 0.3], [0.1, -0.5, 1.5, 0.9, 0.0, -2.0], [0.0] * 6])
DRAFTS = (0, 3)
NUM_DRAWS = 4000
# What vLLM 0.33.0's own rejection_random_sample_kernel and sample_recovered_tokens_kernel gave for the same logits and
# drafts (no draft probabilities), 4,000 draws under Triton's interpreter, seed 7; (0, 3): both drafts held.
VLLM_COUNTS = {
    (0, 2): 906, (1,): 789, (0, 3): 539, (2,): 434, (5,): 338, (3,): 292, (0, 0): 214, (0, 4): 198, (0, 1): 135,
    (4,): 120, (0, 5): 35,
}  # fmt: skip
# Of 11 outcomes: 10 degrees of freedom, of which 1 in 1,000 exceeds this (chi-square tables).
WORST_CHI_SQUARE = 29.59


def chance(outcome: tuple[int, ...]) -> float:
    """Of an outcome where the tokens are drawn one after the other from the model's own distributions."""
    first, second = LOGITS[:2].double().softmax(-1)
    return float(first[outcome[0]] * (second[outcome[1]] if len(outcome) > 1 else 1))


def chi_square(counts: dict[tuple[int, ...], int]) -> float:
    total = sum(counts.values())
    return sum((count - total * chance(key)) ** 2 / (total * chance(key)) for key, count in counts.items())


def drawn_counts(seed: int) -> dict[tuple[int, ...], int]:
    """Outcomes of 4,000 requests that each had both drafts checked once."""
    seqs = [Sequence(str(i), [1], 9, arrival=i) for i in range(NUM_DRAWS)]
    rows = Rows(torch.arange(3 * NUM_DRAWS).numpy(), [], [], [DRAFTS] * NUM_DRAWS)
    owners = [seq for seq in seqs for _ in range(3)]
    batch = Sampler(6, seed=seed).prepare(owners, [SamplingParams()] * len(owners), offsets=[0, 1, 2] * NUM_DRAWS)
    tokens = checked(sample(LOGITS.repeat(NUM_DRAWS, 1), batch).to_host(), rows)
    return Counter(tuple(own[:2]) for own, _ in tokens.by_seq)


def test_drafts_leave_the_distribution_as_it_is_as_vllms_do() -> None:
    assert sum(VLLM_COUNTS.values()) == NUM_DRAWS
    assert sum(chance(key) for key in VLLM_COUNTS) == pytest.approx(1)
    assert chi_square(VLLM_COUNTS) < WORST_CHI_SQUARE
    for seed in range(3):
        counts = drawn_counts(seed)
        assert counts.keys() == VLLM_COUNTS.keys()
        assert chi_square(counts) < WORST_CHI_SQUARE


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "eagle"}, "speculative_config: method must be ngram or draft_model ('eagle')"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be a whole number of at least 1 (0)"),
        ({"model": "x"}, "speculative_config: model must be left out with ngram ('x')"),
        ({"method": "draft_model"}, "speculative_config: model must be named with draft_model (None)"),
        (
            {"prompt_lookup_min": 4, "prompt_lookup_max": 2},
            "prompt_lookup_min must be at most prompt_lookup_max (2) (4)",
        ),
    ],
)
def test_a_wrong_speculative_config_is_refused(options: dict[str, Any], message: str) -> None:
    config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3} | options
    with pytest.raises(UsageError) as error:
        SpeculativeConfig(**config)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"), [("async_scheduling", True), ("allocator", "contiguous"), ("kv_offloading_size", 1.0)]
)
def test_what_does_not_go_with_speculation_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match="speculative_config"):
        engine_for("llama", speculative_config=NGRAM, **{name: value})


# --- a draft model -----------------------------------------------------------------------------------------------


def drafted_by(family: str, count: int = 3) -> SpeculativeConfig:
    return SpeculativeConfig("draft_model", count, model=saved_model(family))


def test_a_draft_that_is_the_model_itself_is_always_right() -> None:
    """Its KV is complete in every block, whoever computed it: chunks of prompts, shared prefixes, after preemptions."""
    shared = random_tokens(24, seed=3)[0]
    texts = [shared + text for text in prompts()]
    plain = [output.token_ids for output in engine_for("llama").generate(texts, greedy(20))]
    engine = engine_for("llama", speculative_config=drafted_by("llama"), num_blocks=48, max_num_batched_tokens=32)
    outputs = engine.generate(texts, greedy(20))
    engine.scheduler.check_invariants()
    assert [output.token_ids for output in outputs] == plain
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_cached_tokens > 0
    stats = stats_of(engine)
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 60
    assert engine.stats().num_steps < 60


@pytest.mark.parametrize("params", [greedy(20), SamplingParams(seed=4, max_tokens=20, ignore_eos=True)])
def test_tokens_are_the_models_whatever_the_draft_says(params: SamplingParams) -> None:
    plain = [output.token_ids for output in engine_for("deepseek_v3").generate(prompts(), params)]
    engine = engine_for("deepseek_v3", speculative_config=drafted_by("llama"))
    assert [output.token_ids for output in engine.generate(prompts(), params)] == plain
    stats = stats_of(engine)
    assert stats.num_accepted_tokens < stats.num_draft_tokens / 4


@pytest.mark.parametrize(("family", "draft"), [("llama", "mixtral"), ("deepseek_v3", "llama"), ("gemma3_text", None)])
def test_memory_is_the_planners(family: str, draft: str | None) -> None:
    """Weights, buffers and KV to the byte, of both models; the peak of a step as without speculation, where it is."""
    config = drafted_by(draft) if draft else NGRAM
    engine = engine_for(family, speculative_config=config, num_blocks=50)
    memory = engine.memory_report()
    draft_spec = read_spec(saved_model(draft)) if draft else None
    planned = predict(engine.spec, inputs_of(engine), speculation=Planned(3, draft_spec))
    assert (memory.weights, memory.buffers, memory.kv_cache, memory.block_bytes) == (
        planned.weights, planned.buffers, planned.kv_cache, planned.block_bytes
    )  # fmt: skip
    drafts = [tensor.nbytes for companion in engine.runner.companions for tensor in companion.tensors]
    assert engine.runner.kv.num_bytes + sum(drafts) == memory.kv_cache
    assert memory.activations == pytest.approx(planned.activations, rel=0.05)


@pytest.mark.parametrize(
    ("family", "draft", "message"),
    [
        ("llama", "gemma3_text", "a draft model works where every layer of both keeps all tokens"),
        ("gemma3_text", "llama", "a draft model works where every layer of both keeps all tokens"),
        ("llama", "llama_250", "has 250 tokens in its vocabulary, llama 256"),
    ],
)
def test_a_draft_that_does_not_go_with_the_model_is_refused(family: str, draft: str, message: str) -> None:
    with pytest.raises(KvplanError) as error:
        engine_for(family, speculative_config=drafted_by(draft))
    assert message in str(error.value)
