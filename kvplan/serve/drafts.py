"""Speculative decoding without a model: acceptance rates are stated with vLLM's options, never assumed.

vLLM's `rejection_sample_method: synthetic` accepts draft tokens at given rates regardless of the model; the twin always
works that way. Source: vLLM 0.33 config/speculative.py, v1/spec_decode/utils.py.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any, Final

from engine.drafting import DraftStep
from engine.scheduler import Batch
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.simulate.steptime import StepTime
from kvplan.simulate.work import Reach, StepWork, batch_work

FLAG: Final = "--speculative-config"
RATES: Final = "synthetic_acceptance_rates"
LENGTH: Final = "synthetic_acceptance_length"
KEYS: Final = ("method", "model", "num_speculative_tokens", "rejection_sample_method", RATES, LENGTH)
EXAMPLE: Final = (
    """add '"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5', """
    "with what your server's acceptance is"
)


@dataclass(frozen=True, slots=True)
class Passes:
    """Forward passes of a draft model: one over the step's tokens, and one for each further draft token."""

    step_time: StepTime
    reaches: tuple[Reach, ...]

    def seconds(self, batch: Batch) -> float:
        step = batch.extra(DraftStep)
        if step.is_last:
            return 0.0
        ends = [seq.num_computed_tokens for seq in batch.samples]
        read = tuple(sum(reach.read(end) for end in ends) for reach in self.reaches)
        again = StepWork(len(ends), len(ends), len(ends), read, read)
        later = max(0, step.num_next - 1) if ends else 0
        return self.step_time.seconds(batch_work(batch, self.reaches)) + later * self.step_time.seconds(again)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens per step, and for each position the probability that all drafts up to it are accepted.

    model   name of the draft model; None: no draft model, or layers of the served model
    passes  None: drafting takes no computation; num_modules: multi-token prediction modules of the served model
    """

    method: str
    num_drafts: int
    rates: tuple[float, ...]
    model: str | None = None
    passes: Passes | None = None
    num_modules: int = 1

    def num_accepted(self, source: Random, num_drafts: int) -> int:
        """Draw the number of accepted drafts: those before the first rejected one."""
        before = 1.0
        for place, rate in enumerate(self.rates[:num_drafts]):
            if source.random() >= (rate / before if before else 0.0):
                return place
            before = rate
        return min(num_drafts, len(self.rates))


def drafts_of(text: str) -> Drafts:
    """Parse vLLM's --speculative-config JSON; raise UsageError if vLLM would reject it or acceptance is not stated."""
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError):
        stated = None
    if not isinstance(stated, dict):
        raise UsageError(FLAG, f"is not a JSON object ({printable(text, 60)!r})", 'write \'{"method": "ngram", ...}\'')
    if odd := [name for name in stated if name not in KEYS]:
        raise UsageError(f"{FLAG}: {printable(odd[0], 40)}", f"is not one of {', '.join(KEYS)}", "remove it")
    count = stated.get("num_speculative_tokens")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 1024:
        raise UsageError(f"{FLAG}: num_speculative_tokens", "must be a whole number of at least 1", "write 3")
    method, model = stated.get("method", "draft_model" if "model" in stated else "ngram"), stated.get("model")
    if not isinstance(method, str) or not isinstance(model, str | None):
        raise UsageError(f"{FLAG}: method and model", "must be texts", "write their names")
    return Drafts(method, count, rates_of(stated, count), model)


def rates_of(stated: dict[str, Any], count: int) -> tuple[float, ...]:
    """Return for each draft the probability that it and all before it are accepted.

    Source: vLLM's _resolve_synthetic_acceptance_rates.
    """
    rates, length = stated.get(RATES), stated.get(LENGTH)
    if stated.get("rejection_sample_method") != "synthetic":
        problem = "a server that computes nothing cannot know how many draft tokens are accepted"
        raise UsageError(FLAG, problem, EXAMPLE)
    if (rates is None) == (length is None):
        raise UsageError(FLAG, f"synthetic needs either {RATES} or {LENGTH}", "give one")
    if rates is None:
        if not _is_share(length, 1, count + 1):
            raise UsageError(f"{FLAG}: {LENGTH}", f"must be from 1 to {count + 1}", "correct it")
        return tuple(min(1.0, max(0.0, length - 1 - place)) for place in range(count))  # type: ignore[operator]
    if not isinstance(rates, list) or len(rates) != count or not all(_is_share(rate, 0, 1) for rate in rates):
        raise UsageError(f"{FLAG}: {RATES}", f"must be {count} numbers from 0 to 1", "correct them")
    if any(later > rate for rate, later in pairwise(rates)):
        raise UsageError(f"{FLAG}: {RATES}", "must not rise: each holds with all before it", "correct them")
    return tuple(map(float, rates))


def _is_share(value: object, low: int, high: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
