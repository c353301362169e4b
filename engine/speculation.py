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
from engine.draft_rules import DraftRules, draft_rules
from engine.drafting import Drafting, DraftStep
from engine.masks import TokenMask
from engine.model_runner import ModelRunner
from engine.proposer import NgramProposer, Proposer
from engine.sampler import SampledAhead, SampledTokens, TokenLogprobs
from engine.scheduler import Batch
from engine.sequence import Sequence


class Speculation(Drafting):
    """Runs batches with drafts and proposes the next ones, one batch at a time: drafts need the tokens before them."""

    def __init__(self, rules: DraftRules, runner: ModelRunner, proposer: Proposer) -> None:
        super().__init__(rules, is_async=False)
        self._runner, self._proposer = runner, proposer

    def run(
        self, arrays: BatchArrays, params: list[SamplingParams], masks: Several[TokenMask | None] = ()
    ) -> "CheckedAhead":
        """Launch a step: the tokens of each of the arrays' sequences, of which the first wrong draft is not one."""
        self._arrays, self._params = arrays, params
        rows = Rows.of(self.step.drafts, arrays)
        seqs, of_rows = [arrays.seqs[i] for i in rows.owners], [params[i] for i in rows.owners]
        of_masks = [masks[i] for i in rows.owners] if masks else ()
        placed = replace(arrays, logit_tokens=rows.tokens)
        sampled = self._runner.run_rows(placed, seqs, of_rows, rows.offsets, of_masks)
        return CheckedAhead(sampled, rows)

    def settle(self, batch: Batch) -> None:
        """Propose the next drafts, but not of sequences with penalties or masks: their logits would have to know what
        held."""
        step, params_of = batch.extra(DraftStep), dict(zip(self._arrays.seqs, self._params, strict=True))
        wanting = [] if step.is_last else [seq for seq in batch.samples if seq.status == "running"]
        wanting = [seq for seq in wanting if not (params_of[seq].has_penalties or params_of[seq].has_mask)]
        self.propose(self._proposer.propose(batch, self._arrays, wanting, step.num_next))


def speculation_of(config: EngineConfig, runner: ModelRunner) -> Speculation | None:
    """The speculation that a config asks for; None: one token per sequence of a batch."""
    settings = config.speculative_config
    if settings is None:
        return None
    proposer: Proposer = NgramProposer(*settings.lookup, runner.max_model_len)
    for companion in runner.companions:
        if isinstance(companion, DraftModel):
            proposer = companion
    return Speculation(draft_rules(settings.method, settings.num_speculative_tokens), runner, proposer)


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
    def of(cls, drafts_of: dict[Sequence, tuple[int, ...]], arrays: BatchArrays) -> "Rows":
        drafts = [drafts_of.get(seq, ()) for seq in arrays.seqs]
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
