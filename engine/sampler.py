"""Samples the next token of every sequence on the device, each row with its own parameters.

Order as in vLLM and transformers' generate: biases, penalties, temperature, top_k, top_p (of what top_k left), min_p. A
token whose logit equals the last one kept is kept too, so that the result does not depend on how a sort breaks ties.

Randomness: one number u in [0, 1) per row, a hash of (the request's seed, the index of its output token); the token is
where u falls in the running sum of the row's probabilities. It needs no generator's state, so a row draws the same
whatever runs beside it, after a preemption, and on every device but for the rounding of exponentials (1e-7); and it
needs one number per row where a race of exponentials needs one per token of the vocabulary.
"""

from collections import abc
from dataclasses import dataclass, replace
from itertools import chain, compress
from math import log
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.config import SamplingParams
from engine.kernels import torch_backend
from engine.masks import TokenMask, bits_of
from engine.sequence import Sequence
from engine.staging import AsyncCopy, DownloadRing, UploadRing
from engine.step import on_device

# splitmix64 (Steele, Lea, Flood 2014): stream `key` at step n is mix(key + n * GAMMA).
GAMMA = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
Words = NDArray[np.uint64]
TINY = torch.finfo(torch.float32).tiny  # smallest temperature: dividing by it still gives 0 for the best token


@dataclass(frozen=True, slots=True)
class Nucleus:
    """top_k and top_p of each row; without them vocab_size and 2, so that rounding cannot cut the tail."""

    top_k: Tensor  # [num_seqs, 1] int64, 1..vocab_size
    top_p: Tensor  # [num_seqs, 1] float64
    num_sorted: int  # how many of the largest logits decide: the largest top_k of a row that has either, or all


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters of each row; None for those that no row uses."""

    temperature: Tensor  # [num_seqs, 1] float32; 0: the row takes its best token
    log_min_p: Tensor | None  # [num_seqs, 1] float32; -inf of a row without
    nucleus: Nucleus | None


@dataclass(frozen=True, slots=True)
class Penalties:
    """The p rows with penalties and their token counts: 5 bytes per row and vocabulary entry."""

    seqs: tuple[Sequence, ...]
    rows: Tensor  # [p] int64
    repetition: Tensor  # [p, 1] float32; presence and frequency alike
    presence: Tensor
    frequency: Tensor
    seen: Tensor  # [p, vocab_size] bool: in prompt or output
    counts: Tensor  # [p, vocab_size] int32: times in the output
    num_counted: list[int]  # tokens of each sequence that seen and counts know


@dataclass(frozen=True, slots=True)
class Biases:
    """logit_bias entries, each (row, token) at most once: 20 bytes each."""

    rows: Tensor  # [num_biases] int64
    tokens: Tensor  # [num_biases] int64
    values: Tensor  # [num_biases] float32


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens the m rows with masks may get: a bit per vocabulary entry."""

    rows: Tensor  # [m] int64
    bits: Tensor  # [m, words] int32, as in masks.Bits


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The q rows that want log-probabilities."""

    rows: Tensor  # [q] int64
    nums: tuple[int, ...]  # how many of the most likely tokens, per row
    order: tuple[int, ...]  # `rows` on the host


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling inputs of num_seqs rows of logits, on their device; all None means greedy."""

    num_seqs: int
    draws: Draws | None = None
    uniforms: Tensor | None = None  # [num_seqs, 1] float64 in [0, 1): where in its distribution each row is drawn
    penalties: Penalties | None = None
    logprobs: LogprobRows | None = None
    biases: Biases | None = None
    masks: Masks | None = None
    logprob_bits: Tensor | None = None  # [q, words] int32, what grammars allow in the rows of `logprobs`


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the model itself, before biases, penalties and temperature; of what its grammar allows."""

    chosen: float
    top: tuple[tuple[int, float], ...]  # (token, log-probability), the most likely first


class PromptScores(Protocol):
    """What a step says of prompts, on the device: see prompt_logprobs."""

    def wait(self) -> "abc.Iterable[tuple[Sequence, int, TokenLogprobs]]": ...


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One step's tokens on the host, in the order of the rows."""

    token_ids: list[int]
    is_bad: list[bool]  # no token: see Sampled
    logprobs: list[TokenLogprobs | None]
    prompts: "abc.Iterable[tuple[Sequence, int, TokenLogprobs]]" = ()  # log-probabilities of prompts, by place

    def wait(self) -> "SampledTokens":
        """Does nothing: the tokens are on the host."""
        return self

    @property
    def by_seq(self) -> "list[tuple[abc.Sequence[int], abc.Sequence[TokenLogprobs | None]]]":
        """The token of each row and its log-probabilities."""
        return [((token,), (row,)) for token, row in zip(self.token_ids, self.logprobs, strict=True)]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's tokens on the device, not waited for.

    token_ids  [num_seqs] int64
    is_bad     [num_seqs] bool: a logit is nan or +inf, or all are -inf, so the token means nothing
    chosen     [q] float32, the chosen token's log-probability in the rows of `logprob_rows`
    top_ids    [q, n] int32 and top [q, n] float32: the n most likely tokens of these rows
    """

    token_ids: Tensor
    is_bad: Tensor
    logprob_rows: LogprobRows | None = None
    chosen: Tensor | None = None
    top_ids: Tensor | None = None
    top: Tensor | None = None

    def to_host(self) -> SampledTokens:
        """Wait for the device and copy everything."""
        return self.read(self.words().cpu())

    def download(self, downloads: DownloadRing, prompts: PromptScores | None = None) -> "SampledAhead":
        """Start copying everything to the host, without waiting; what the step says of prompts is copied later."""
        return SampledAhead(self, downloads.download(self.words()), prompts)

    def words(self) -> Tensor:
        """Everything as one tensor of int32 words."""
        words = [self.token_ids.int(), self.is_bad.int()]
        if self.chosen is not None and self.top_ids is not None and self.top is not None:
            words += [self.chosen.view(torch.int32), self.top_ids.flatten(), self.top.flatten().view(torch.int32)]
        return torch.cat(words)

    def read(self, words: Tensor) -> SampledTokens:
        """Decode the words once they are on the host."""
        n = self.token_ids.numel()
        token_ids, is_bad, logprobs = words.split([n, n, len(words) - 2 * n])
        return SampledTokens(token_ids.tolist(), is_bad.bool().tolist(), self._host_logprobs(logprobs))

    def _host_logprobs(self, words: Tensor) -> list[TokenLogprobs | None]:
        rows: list[TokenLogprobs | None] = [None] * self.token_ids.numel()
        if self.logprob_rows is None:
            return rows
        q = len(self.logprob_rows.order)
        num_top = (words.numel() // q - 1) // 2
        chosen, top_ids, top = words.split([q, q * num_top, q * num_top])
        columns = (
            chosen.view(torch.float32).tolist(),
            top_ids.view(q, num_top).tolist(),
            top.view(torch.float32).view(q, num_top).tolist(),
        )
        for row, n, value, ids, values in zip(self.logprob_rows.order, self.logprob_rows.nums, *columns, strict=True):
            rows[row] = TokenLogprobs(value, tuple(zip(ids[:n], values[:n], strict=True)))
        return rows


@dataclass(frozen=True, slots=True)
class SampledAhead:
    """One step's tokens on their way to the host."""

    sampled: Sampled
    copy: AsyncCopy
    prompts: PromptScores | None = None

    def wait(self) -> SampledTokens:
        tokens = self.sampled.read(self.copy.wait())
        return tokens if self.prompts is None else replace(tokens, prompts=self.prompts.wait())


@dataclass(slots=True)
class Deferred:
    """One step's tokens, which are chosen once those before them are known: masks depend on them."""

    choose: abc.Callable[[], SampledAhead]
    ahead: SampledAhead | None = None

    def begin(self) -> SampledAhead:
        """Choose the tokens, without waiting for the device; no effect if that is done."""
        if self.ahead is None:
            self.ahead = self.choose()
        return self.ahead

    def wait(self) -> SampledTokens:
        return self.begin().wait()


# --- on the device -----------------------------------------------------------------------------------------------


def sample(logits: Tensor, batch: SamplingBatch, kernels: ModuleType = torch_backend) -> Sampled:
    """Choose a token per row; the logits stay as they are, and the host does not wait.

    logits [num_seqs, vocab_size] float32, or of another dtype that the kernels read. Scratch beside them, per token of
    the vocabulary: 4 bytes in every row where one has biases or penalties. What torch sorts, sums or penalizes is so
    many rows at a time as PART_ELEMENTS hold.
    """
    adjusted = adjust(logits, batch)
    best, token_ids, is_bad = kernels.best_tokens(adjusted)
    if batch.draws is not None and batch.uniforms is not None:
        floors = lowest_kept(adjusted, best, batch.draws, kernels)
        kernels.draw(adjusted, best, batch.draws.temperature, batch.uniforms, floors, out=token_ids)
    sampled = Sampled(token_ids, is_bad)
    return sampled if batch.logprobs is None else _with_logprobs(sampled, logits, batch.logprobs, batch.logprob_bits)


def adjust(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The logits [num_seqs, vocab_size] themselves where no row has masks, biases or penalties, else a float32 copy
    with them, in this order, as in vLLM."""
    if batch.biases is None and batch.penalties is None and batch.masks is None:
        return logits
    adjusted = logits.to(torch.float32, copy=True)
    if batch.masks is not None:
        for part in torch_backend.parts_of(len(batch.masks.rows), adjusted.shape[1]):
            rows = batch.masks.rows[part]
            adjusted.index_copy_(0, rows, masked(adjusted[rows], batch.masks.bits[part]))
    if batch.biases is not None:
        adjusted[batch.biases.rows, batch.biases.tokens] += batch.biases.values
    if batch.penalties is not None:
        _penalize(adjusted, batch.penalties)
    return adjusted


def masked(logits: Tensor, bits: Tensor) -> Tensor:
    """The logits [n, vocab_size] with -inf where a bit of bits [n, words] int32 is 0."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    is_allowed = (bits[:, :, None] >> shifts & 1).flatten(1)[:, : logits.shape[1]].bool()
    return logits.masked_fill(~is_allowed, -torch.inf)


def _penalize(adjusted: Tensor, penalties: Penalties) -> None:
    """Apply penalties to the float32 logits [num_seqs, vocab_size] in place, some rows at a time.

    repetition (Keskar et al. 2019): seen tokens' positive logits are divided by it, negative ones multiplied;
    presence is subtracted once from tokens in the output, frequency as often as they are there (OpenAI's API).
    """
    for part in torch_backend.parts_of(len(penalties.seqs), adjusted.shape[1]):
        rows = penalties.rows[part]
        adjusted.index_copy_(0, rows, _penalized(adjusted[rows], penalties, part))


def _penalized(old: Tensor, penalties: Penalties, part: slice) -> Tensor:
    """The penalized logits [n, vocab_size] float32 of these rows."""
    counts, repetition = penalties.counts[part], penalties.repetition[part]
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = torch.where(penalties.seen[part], new, old)
    new -= penalties.presence[part] * (counts > 0)
    new -= penalties.frequency[part] * counts
    return new


def lowest_kept(logits: Tensor, best: Tensor, draws: Draws, kernels: ModuleType = torch_backend) -> Tensor | None:
    """The smallest scaled logit [num_seqs, 1] float32 that each row may draw; None: all may come.

    logits [num_seqs, vocab_size], best [num_seqs] float32 their maxima
    """
    floors, nucleus = draws.log_min_p, draws.nucleus  # p >= min_p * p_best, as logarithms
    if nucleus is None:
        return floors
    cut: Tensor = kernels.nucleus_floors(
        logits, best, draws.temperature, nucleus.top_k, nucleus.top_p, num_sorted=nucleus.num_sorted
    )
    return cut if floors is None else torch.maximum(floors, cut)


def _with_logprobs(sampled: Sampled, logits: Tensor, rows: LogprobRows, bits: Tensor | None) -> Sampled:
    num_top = min(max(rows.nums), logits.shape[1])
    parts = []
    for part in torch_backend.parts_of(len(rows.order), logits.shape[1]):
        own = logits[rows.rows[part]].float()
        own = own if bits is None else masked(own, bits[part])
        parts.append(logprobs_part(own, sampled.token_ids[rows.rows[part], None], num_top))
    chosen, top_ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return replace(sampled, logprob_rows=rows, chosen=chosen, top_ids=top_ids, top=top)


def logprobs_part(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the chosen tokens [q], and the most likely tokens [q, num_top] with theirs."""
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    top, top_ids = logits.topk(num_top, dim=-1)
    chosen = logits.gather(1, token_ids) - log_total
    return chosen.squeeze(1), top_ids.int(), top - log_total


# --- on the host -------------------------------------------------------------------------------------------------


def mix(x: Words) -> Words:
    """splitmix64's output function; products wrap."""
    x = (x ^ (x >> np.uint64(30))) * MULTIPLIERS[0]
    x = (x ^ (x >> np.uint64(27))) * MULTIPLIERS[1]
    return x ^ (x >> np.uint64(31))


def uniform(keys: Words, positions: Words) -> NDArray[np.float64]:
    """A number in [0, 1) for each (key, position): the upper 53 bits of the stream's number."""
    bits = mix(keys + (positions + np.uint64(1)) * GAMMA) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


class Sampler:
    """Keeps the running requests' parameters and penalty counts on the device from step to step."""

    def __init__(
        self, vocab_size: int, *, device: torch.device | str = "cpu", seed: int = 0, uploads: UploadRing | None = None
    ) -> None:
        """uploads: where what goes to the device waits for the copy, if it moves on at every step."""
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.uploads = uploads
        self._own_key = int(mix(np.array([seed % 2**64], np.uint64))[0])
        self._seqs: list[Sequence] = []
        self._batch = SamplingBatch(0)
        self._drawn_seqs: list[Sequence] = []  # those that are not greedy
        self._is_drawn = np.zeros(0, bool)  # which rows they are
        self._keys: Words = np.zeros(0, np.uint64)
        self._all_tokens = bits_of(range(vocab_size), vocab_size)

    def prepare(
        self,
        seqs: list[Sequence],
        params: list[SamplingParams],
        last: Tensor | None = None,
        offsets: list[int] | None = None,
        masks: abc.Sequence[TokenMask | None] = (),
    ) -> SamplingBatch:
        """What sample() needs for one row per sequence, whose parameters never change.

        Call it after the scheduler has put the step together and before it puts together the next one: the index of
        the token to sample counts those still in flight. Penalties know the tokens that the sequences know, and one
        in flight: `last` [rows] int64 is what the rows of the call before this one sampled.

        offsets  with several rows of a sequence and nothing of it in flight: the place of each behind its known tokens
        masks    of each row, which know the known tokens; none of which may be in flight if they depend on them
        """
        before = self._seqs
        if seqs != self._seqs:
            self._seqs, self._batch = list(seqs), self._build(seqs, params)
        if self._batch.penalties is not None:
            self._count(self._batch.penalties)
            if last is not None:
                self._count_in_flight(self._batch.penalties, before, last)
        batch = self._batch if not any(masks) else self._masked(seqs, masks)
        return batch if batch.draws is None else replace(batch, uniforms=self._uniforms(offsets))

    def _masked(self, seqs: list[Sequence], masks: abc.Sequence[TokenMask | None]) -> SamplingBatch:
        """The batch with the masks of this step."""
        rows = [row for row, mask in enumerate(masks) if mask is not None]
        bits, of_grammars = (np.tile(self._all_tokens, (len(masks), 1)) for _ in range(2))
        for row in rows:
            mask = masks[row]
            assert mask is not None
            mask.write(seqs[row], bits[row], of_grammars[row])
        logprobs, of_logprobs = self._batch.logprobs, None
        if logprobs is not None and any(mask is not None and mask.matcher for mask in masks):
            of_logprobs = self._for_now(of_grammars[list(logprobs.order)].view(np.int32))
        return replace(
            self._batch,
            masks=Masks(self._for_now(np.array(rows, np.int64)), self._for_now(bits[rows].view(np.int32))),
            logprob_bits=of_logprobs,
        )

    def _uniforms(self, offsets: list[int] | None) -> Tensor:
        if offsets is None:
            positions = [seq.num_output_tokens + max(0, seq.num_placeholders - 1) for seq in self._drawn_seqs]
        else:
            drawn = zip(self._drawn_seqs, compress(offsets, self._is_drawn), strict=True)
            positions = [seq.num_output_tokens + offset for seq, offset in drawn]
        uniforms = np.zeros(len(self._seqs))
        uniforms[self._is_drawn] = uniform(self._keys, np.array(positions, np.uint64))
        return self._for_now(uniforms)[:, None]

    def _build(self, seqs: list[Sequence], params: list[SamplingParams]) -> SamplingBatch:
        is_drawn = [p.temperature > 0 for p in params]
        self._is_drawn, self._drawn_seqs = np.array(is_drawn), list(compress(seqs, is_drawn))
        seeds = map(self._seed, self._drawn_seqs, compress(params, is_drawn))
        self._keys = mix(np.fromiter(seeds, np.uint64, len(self._drawn_seqs)))
        return SamplingBatch(
            len(seqs),
            draws=self._draws(params) if any(is_drawn) else None,
            penalties=self._penalties(seqs, params),
            logprobs=self.logprob_rows(params),
            biases=self._biases(params),
        )

    def _seed(self, seq: Sequence, params: SamplingParams) -> int:
        """The seed of a request, its own (low 64 bits) or one derived from the engine's and its arrival."""
        return (self._own_key + seq.arrival if params.seed is None else params.seed) % 2**64

    def _draws(self, params: list[SamplingParams]) -> Draws:
        temperatures = [p.temperature and max(p.temperature, TINY) for p in params]
        min_ps = [log(p.min_p) if p.min_p and p.temperature else -torch.inf for p in params]
        return Draws(
            temperature=self._column(temperatures, np.float32),
            log_min_p=self._column(min_ps, np.float32) if max(min_ps) > -torch.inf else None,
            nucleus=self._nucleus(params),
        )

    def _nucleus(self, params: list[SamplingParams]) -> Nucleus | None:
        size = self.vocab_size
        top_ks = [p.top_k if 0 < p.top_k < size and p.temperature else size for p in params]
        top_ps = [p.top_p if p.top_p < 1 and p.temperature else 2.0 for p in params]
        cuts = [top_k for top_k, top_p in zip(top_ks, top_ps, strict=True) if top_k < size or top_p < 1]
        if not cuts:
            return None
        return Nucleus(self._column(top_ks, np.int64), self._column(top_ps, np.float64), num_sorted=max(cuts))

    def _penalties(self, seqs: list[Sequence], params: list[SamplingParams]) -> Penalties | None:
        rows = [i for i, p in enumerate(params) if p.has_penalties]
        if not rows:
            return None
        penalties = Penalties(
            seqs=tuple(seqs[i] for i in rows),
            rows=self._tensor(rows, np.int64),
            repetition=self._column([params[i].repetition_penalty for i in rows], np.float32),
            presence=self._column([params[i].presence_penalty for i in rows], np.float32),
            frequency=self._column([params[i].frequency_penalty for i in rows], np.float32),
            seen=torch.zeros(len(rows), self.vocab_size, dtype=torch.bool, device=self.device),
            counts=torch.zeros(len(rows), self.vocab_size, dtype=torch.int32, device=self.device),
            num_counted=[0] * len(rows),
        )
        if self._batch.penalties is not None:
            self._carry_over(self._batch.penalties, penalties)
        return penalties

    def _carry_over(self, old: Penalties, new: Penalties) -> None:
        """Carry over the counts of sequences that stay."""
        row_of = {seq: row for row, seq in enumerate(old.seqs)}
        stay = [(row_of[seq], row) for row, seq in enumerate(new.seqs) if seq in row_of]
        if not stay:
            return
        old_rows, new_rows = (self._tensor(list(rows), np.int64) for rows in zip(*stay, strict=True))
        new.seen[new_rows] = old.seen[old_rows]
        new.counts[new_rows] = old.counts[old_rows]
        for old_row, new_row in stay:
            new.num_counted[new_row] = old.num_counted[old_row]

    def _biases(self, params: list[SamplingParams]) -> Biases | None:
        entries = [(row, token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias.items()]
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return Biases(
            self._tensor(list(rows), np.int64),
            self._tensor(list(tokens), np.int64),
            self._tensor(list(values), np.float32),
        )

    def logprob_rows(self, params: list[SamplingParams]) -> LogprobRows | None:
        asking = [(i, p.logprobs) for i, p in enumerate(params) if p.logprobs is not None]
        if not asking:
            return None
        order, nums = zip(*asking, strict=True)
        return LogprobRows(self._tensor(list(order), np.int64), nums, order)

    def _column(self, values: Any, dtype: type[np.generic]) -> Tensor:
        """A value for each row [rows, 1], to be kept."""
        return self._tensor(values, dtype)[:, None]

    def _tensor(self, values: Any, dtype: type[np.generic]) -> Tensor:
        """To be kept."""
        return on_device(np.array(values, dtype), self.device)

    def _for_now(self, array: NDArray[Any]) -> Tensor:
        """A tensor for this step only."""
        return on_device(array, self.device, self.uploads)

    def _count(self, penalties: Penalties) -> None:
        """Bring seen and counts up to the tokens that the sequences know by now."""
        fresh = [seq.token_ids[known:] for seq, known in zip(penalties.seqs, penalties.num_counted, strict=True)]
        rows = [row for row, tokens in enumerate(fresh) for _ in tokens]
        if not rows:
            return
        is_output = [
            known + i >= seq.num_prompt_tokens
            for seq, known, tokens in zip(penalties.seqs, penalties.num_counted, fresh, strict=True)
            for i in range(len(tokens))
        ]
        owners, tokens, output = self._for_now(np.array([rows, list(chain(*fresh)), is_output], np.int64))
        penalties.seen[owners, tokens] = True
        penalties.counts.index_put_((owners, tokens), output.int(), accumulate=True)
        penalties.num_counted[:] = [seq.num_tokens for seq in penalties.seqs]

    def _count_in_flight(self, penalties: Penalties, before: list[Sequence], last: Tensor) -> None:
        """Count the last step's tokens that the host has not seen yet, by their rows."""
        ahead = [
            row
            for row, seq in enumerate(penalties.seqs)
            if seq.num_computed_tokens > seq.num_tokens == penalties.num_counted[row]
        ]
        if not ahead:
            return
        row_of = {seq: row for row, seq in enumerate(before)}
        owners, source = self._for_now(np.array([ahead, [row_of[penalties.seqs[row]] for row in ahead]], np.int64))
        tokens = last[source]
        penalties.seen[owners, tokens] = True
        penalties.counts[owners, tokens] += 1  # a row occurs once
        for row in ahead:
            penalties.num_counted[row] += 1
