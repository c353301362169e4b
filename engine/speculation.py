"""Runs batches with draft tokens: verifies them on the device, then drafts the next ones.

The model computes the logits behind a sequence's last known token and behind each of its drafts, and a token is sampled
from each as if no draft had been there: by the same parameters and, seeded by its place in the output, by the same
number. A draft holds where it is that token. So the tokens are those of an engine without speculation, greedy or
sampled, and a draft x of a distribution p holds with probability p(x), the rest falling as p without x does: rejection
sampling (Leviathan et al. 2023) for a drafter that is certain of its token.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass, replace

import numpy as np

from engine.batch import BatchArrays, Longs
from engine.config import EngineConfig, SamplingParams
from engine.draft_model import DraftModel
from engine.drafting import DraftingScheduler
from engine.model_runner import ModelRunner
from engine.proposer import NgramProposer, Proposer
from engine.sampler import SampledAhead, SampledTokens, TokenLogprobs
from engine.scheduler import Batch, Scheduler


class NoSpeculation:
    """One token per sequence of a batch."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def run(self, batch: Batch, arrays: BatchArrays, params: list[SamplingParams]) -> "SampledAhead | CheckedAhead":
        return self._runner.run(arrays, params)

    def propose(self, batch: Batch, arrays: BatchArrays, params: list[SamplingParams]) -> None:
        """Proposes no drafts."""


class Speculation:
    """Runs batches with drafts and proposes the next ones."""

    def __init__(self, runner: ModelRunner, scheduler: DraftingScheduler, proposer: Proposer) -> None:
        self._runner, self._scheduler, self._proposer = runner, scheduler, proposer

    def run(self, batch: Batch, arrays: BatchArrays, params: list[SamplingParams]) -> "SampledAhead | CheckedAhead":
        """Launch a step: the tokens of each of the arrays' sequences, of which the first wrong draft is not one."""
        rows = Rows.of(batch, arrays)
        seqs, of_rows = [arrays.seqs[i] for i in rows.owners], [params[i] for i in rows.owners]
        sampled = self._runner.run_rows(replace(arrays, logit_tokens=rows.tokens), seqs, of_rows, rows.offsets)
        return CheckedAhead(sampled, rows)

    def propose(self, batch: Batch, arrays: BatchArrays, params: list[SamplingParams]) -> None:
        """Give the scheduler the next drafts to verify.

        Not of sequences with penalties, whose logits would have to know which drafts held.
        """
        params_of = dict(zip(arrays.seqs, params, strict=True))
        wanting = [
            seq
            for seq in batch.samples
            if seq.status == "running" and not params_of[seq].has_penalties and not batch.skips_drafts
        ]
        self._scheduler.propose(self._proposer.propose(batch, arrays, wanting))


def sampling_of(config: EngineConfig, runner: ModelRunner, scheduler: Scheduler) -> NoSpeculation | Speculation:
    """The sampling step for a config: with speculation or without."""
    settings = config.speculative_config
    if settings is None or not isinstance(scheduler, DraftingScheduler):
        return NoSpeculation(runner)
    proposer: Proposer = NgramProposer(*settings.lookup, scheduler.config.max_model_len)
    for companion in runner.companions:
        if isinstance(companion, DraftModel):
            proposer = companion
    return Speculation(runner, scheduler, proposer)


def companions_of(config: EngineConfig) -> tuple[DraftModel, ...]:
    """The draft model, if the method has one."""
    settings = config.speculative_config
    if settings is None or settings.model is None:
        return ()
    return (DraftModel(settings.model, config.load_format, config.seed),)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step's logits: for each sequence, in the arrays' order, one behind its last known token and one
    behind each draft.

    tokens   [num_rows] which token of the step each is behind
    owners   which sequence each belongs to, by its place
    offsets  how many drafts of the sequence are before it
    drafts   of each sequence
    """

    tokens: Longs
    owners: list[int]
    offsets: list[int]
    drafts: list[tuple[int, ...]]

    @classmethod
    def of(cls, batch: Batch, arrays: BatchArrays) -> "Rows":
        drafts = [batch.drafts.get(seq, ()) for seq in arrays.seqs]
        counts = np.array([1 + len(own) for own in drafts], np.int64)
        owners = np.repeat(np.arange(len(counts)), counts)
        offsets = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = arrays.last_tokens[owners] - (counts[owners] - 1 - offsets)
        return cls(tokens, owners.tolist(), offsets.tolist(), drafts)


@dataclass(frozen=True, slots=True)
class CheckedTokens:
    """What a step with drafts gave each sequence: its tokens, whether they mean nothing, and their logprobs."""

    is_bad: list[bool]
    by_seq: list[tuple[Several[int], Several[TokenLogprobs | None]]]
    prompts: tuple[()] = ()  # nothing is known of them


@dataclass(frozen=True, slots=True)
class CheckedAhead:
    """A step's sampled rows while they are copied to the host."""

    sampled: SampledAhead
    rows: Rows

    def wait(self) -> CheckedTokens:
        return checked(self.sampled.wait(), self.rows)


def checked(sampled: SampledTokens, rows: Rows) -> CheckedTokens:
    """The accepted drafts and the token after them, for each sequence."""
    is_bad: list[bool] = []
    by_seq: list[tuple[Several[int], Several[TokenLogprobs | None]]] = []
    first = 0
    for drafts in rows.drafts:
        own = slice(first, first + 1 + len(drafts))
        tokens = sampled.token_ids[own]
        count = num_held(drafts, tokens) + 1
        by_seq.append((tokens[:count], sampled.logprobs[own][:count]))
        is_bad.append(any(sampled.is_bad[own]))
        first = own.stop
    return CheckedTokens(is_bad, by_seq)


def num_held(drafts: Several[int], tokens: Several[int]) -> int:
    """Number of accepted drafts: those before the first that differs from the sampled token."""
    return next((i for i, draft in enumerate(drafts) if draft != tokens[i]), len(drafts))
