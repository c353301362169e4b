"""Log-probabilities of prompts: transformers' own, whatever the step is cut into, from one pass."""

from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.memory import PeakMeter
from kvplan.core.errors import UsageError
from tests.support.small_engines import ROUNDING, engine_for, greedy, random_tokens, reference_logits, run_dry


def expected(family: str, prompt: list[int]) -> torch.Tensor:
    """[num_tokens - 1, vocab_size] log-probabilities of what comes after each token of the prompt but its last."""
    return reference_logits(family, prompt, len(prompt) - 1).float().log_softmax(dim=-1)


def check(family: str, prompt: list[int], rows: Any, num_top: int) -> None:
    assert rows[0] is None  # nothing comes before it
    assert len(rows) == len(prompt)
    if len(prompt) == 1:
        return
    truth = expected(family, prompt)
    chosen = truth[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    torch.testing.assert_close(torch.tensor([row.chosen for row in rows[1:]]), chosen, atol=ROUNDING, rtol=0)
    for row, own in zip(rows[1:], truth, strict=True):
        assert len(row.top) == num_top
        values = torch.tensor([value for _, value in row.top])
        torch.testing.assert_close(values, own.topk(num_top).values, atol=ROUNDING, rtol=0)
        ids = [token for token, _ in row.top]
        torch.testing.assert_close(own[ids], values, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("llama", {"max_num_batched_tokens": 16}), ("llama", {"async_scheduling": True}), ("gemma2", {})],
)
def test_each_prompt_token_has_the_models_log_probability(family: str, changes: dict[str, Any]) -> None:
    """Beside requests that want none, or fewer; a prompt that others have cached is computed whole."""
    engine = engine_for(family, **changes)
    prompts = random_tokens(30, 17, 30, 1)
    engine.generate([prompts[0]], greedy(2))
    params = [greedy(4, prompt_logprobs=num, logprobs=1) for num in (3, 0, 2)]
    outputs = engine.generate([prompts[0], prompts[1], prompts[3], prompts[2]], [*params, greedy(4)])
    for output, num in zip(outputs, (3, 0, 2), strict=False):
        check(family, output.prompt_token_ids, output.prompt_logprobs, num)
        assert output.num_cached_tokens == 0
        assert len(output.logprobs or []) == 4
    assert outputs[3].prompt_logprobs is None
    plain = engine.generate([prompts[0], prompts[1]], greedy(4))
    assert [output.token_ids for output in plain] == [output.token_ids for output in outputs[:2]]


def test_a_preempted_prompt_is_told_once() -> None:
    engine = engine_for("llama", num_blocks=26, max_num_batched_tokens=64)
    prompts = random_tokens(40, 40, seed=3)
    for number, prompt in enumerate(prompts):
        engine.add_request(prompt, greedy(16, prompt_logprobs=1), request_id=str(number))
    outputs = run_dry(engine)
    assert engine.stats().num_preemptions > 0
    for number, prompt in enumerate(prompts):
        check("llama", prompt, outputs[str(number)].prompt_logprobs, 1)


def test_the_cache_of_others_is_neither_read_nor_lost() -> None:
    """A prompt whose log-probabilities are wanted stores its blocks as any; its lookups are not counted, as in vLLM."""
    engine = engine_for("llama")
    (prompt,) = random_tokens(40)
    engine.generate([prompt], greedy(2, prompt_logprobs=0))
    assert engine.stats().prefix_cache_queries == 0
    assert engine.generate([prompt], greedy(2))[0].num_cached_tokens > 0


def test_speculation_refuses_by_name() -> None:
    from engine.draft_rules import SpeculativeConfig

    engine = engine_for("llama", speculative_config=SpeculativeConfig("ngram", 2))
    with pytest.raises(UsageError, match="prompt_logprobs cannot be combined with speculative_config; use only one"):
        engine.generate([[1, 2, 3]], SamplingParams(prompt_logprobs=1))
    with pytest.raises(UsageError, match="prompt_logprobs must be from 0 to"):
        SamplingParams(prompt_logprobs=-1)


def test_a_step_takes_no_more_memory_than_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 64 tokens: the start keeps memory for the logits of two sequences, and so many are there at a time."""
    (prompt,) = random_tokens(64)
    peaks, rows = [], []
    for changes in ({}, {"prompt_logprobs": 20, "logprobs": 20}):
        engine = engine_for("llama", max_num_batched_tokens=64, max_num_seqs=2, num_blocks=60)
        head = engine.runner.model.logits

        def noted(hidden: torch.Tensor, head: Any = head) -> Any:
            rows.append(len(hidden))
            return head(hidden)

        monkeypatch.setattr(engine.runner.model, "logits", noted)
        with PeakMeter(engine.device) as meter:
            engine.generate([prompt], greedy(1, **changes))
        peaks.append(meter.peak)
    assert peaks[1] == peaks[0]
    assert max(rows) <= 2
    assert sum(rows) == 1 + 63 + 1
