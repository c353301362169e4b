"""Speculative decoding over time: acceptance as stated, the drafter's passes, and runs whose steps verify drafts.

No result says in advance how many drafts a model accepts: rates are stated, as for vLLM's own
`rejection_sample_method: synthetic`, never assumed. Sources: vLLM 0.33 config/speculative.py, v1/spec_decode/utils.py,
v1/spec_decode/eagle.py (a pass over the step's tokens, then one over the sequences for each further draft).
"""

from collections.abc import Mapping
from dataclasses import field, replace
from itertools import pairwise
from random import Random
from typing import Any, Final, NamedTuple, Protocol, TypeGuard

from engine.draft_rules import DraftRules, by_batch_size, draft_rules
from engine.drafting import Drafting, DraftStep
from engine.scheduler import Batch
from engine.sequence import Sequence
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import plural
from kvplan.servers.plans.plan import Plan
from kvplan.servers.words.arguments import NO_DRAFT
from kvplan.simulate.counts import Counts
from kvplan.simulate.host import Host
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.kernels.line import Line
from kvplan.simulate.kernels.step import draft_step
from kvplan.simulate.loop import Simulation
from kvplan.simulate.prompts_first_run import PromptsFirstRun
from kvplan.simulate.steptime import StepTime, attention_kinds
from kvplan.simulate.work import Reach, StepWork, batch_work

CONFIG: Final = "--speculative-config"
METHOD: Final = "rejection_sample_method"
RATES: Final = "synthetic_acceptance_rates"
LENGTH: Final = "synthetic_acceptance_length"
CURE: Final = f'add \'"{METHOD}": "synthetic", "{LENGTH}": 2.5\' to {CONFIG}, with what your server\'s is'
LENGTH_FLAG, RATES_FLAG = "--synthetic-acceptance-length", "--synthetic-acceptance-rates"


class Acceptance(NamedTuple):
    """What is stated of the acceptance, as text; None: not given."""

    length: str | None = None
    rates: str | None = None


NOTHING_STATED: Final = Acceptance()


@dataclass(frozen=True, slots=True)
class Passes:
    """Forward passes of a drafter: one over the step's tokens, and one for each further draft token.

    width  tokens of each sequence in a further pass: branches of a tree of drafts
    """

    step_time: StepTime
    reaches: tuple[Reach, ...]
    width: int = 1

    def seconds(self, batch: Batch, work: StepWork, num_drafts: int) -> float:
        """work: the step's, of the same tokens."""
        ends = [seq.num_computed_tokens for seq in batch.samples]
        if not ends or not num_drafts:
            return self.step_time.seconds(work._replace(num_samples=0))
        read = tuple(sum(reach.read(end) for end in ends) for reach in self.reaches)
        pairs, count = tuple(self.width * tokens for tokens in read), self.width * len(ends)
        again = self.step_time.seconds(StepWork(count, count, len(ends), read, pairs))
        return self.step_time.seconds(work._replace(num_samples=len(ends))) + (num_drafts - 1) * again


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft tokens per step, and for each position the probability that all drafts up to it are accepted.

    passes       None: drafting takes no computation
    num_modules  multi-token prediction modules of the served model
    rules        what they change of the schedule
    name         of the acceptance
    """

    method: str
    num_drafts: int
    rates: tuple[float, ...]
    rules: DraftRules
    passes: Passes | None = None
    num_modules: int = 1
    name: str = ""

    def num_accepted(self, source: Random, num_drafts: int) -> int:
        """Draw the number of accepted drafts: those before the first rejected one."""
        before = 1.0
        for place, rate in enumerate(self.rates[:num_drafts]):
            if source.random() >= (rate / before if before else 0.0):
                return place
            before = rate
        return min(num_drafts, len(self.rates))

    @property
    def text(self) -> str:
        how = f"{plural(self.num_drafts, 'draft token')} ({self.method})"
        if self.passes is None:
            return f"{how} at no time of the GPU"
        times = "a pass" if self.num_drafts == 1 else f"{self.num_drafts} passes"
        return f"{how} in {times} of the drafter: {self.passes.step_time.text}"

    def seconds(self, batch: Batch) -> float:
        """Seconds that the drafter adds to a step that has just been scheduled."""
        step = batch.extra(DraftStep)
        if self.passes is None or step.is_last:
            return 0.0
        return self.passes.seconds(batch, batch_work(batch, self.passes.reaches), step.num_next)


def drafts_of(plan: Plan, shares: Shares, stated: Acceptance = NOTHING_STATED) -> tuple[Drafts, ...]:
    """The drafts of a plan: none, those of the stated acceptance, or, where none is stated, two: of the best and the
    worst.
    """
    args = plan.request.args
    count = args.num_speculative_tokens
    if plan.request.draft is None and not count:
        for flag, value in zip((LENGTH_FLAG, RATES_FLAG), stated, strict=True):
            if value is not None:
                raise UsageError(
                    f"{flag} {printable(value, 40)}", "nothing drafts tokens", f"add {CONFIG}, or remove it"
                )
        return ()
    method = args.speculative_method or "draft_model"
    keys: Mapping[str, Any] = {} if plan.request.repeated is None else plan.request.repeated.speculative
    rates = acceptance(keys, stated, count)
    modules = num_modules(plan) if method == "mtp" else 1
    ranges = keys.get("num_speculative_tokens_per_batch_size")
    rules = draft_rules(
        method, count, enable_prefix_caching=plan.settings.prefix_caching, num_modules=modules,
        num_by_batch_size=by_batch_size(ranges, count, plan.settings.max_num_seqs) if ranges else (),
        hashes_look_ahead=not keys.get("disable_lookahead_block_hashes", False),
    )  # fmt: skip
    drafts = Drafts(method, count, (1.0,) * count, rules, passes_of(plan, shares, modules), modules)
    if rates is not None:
        name = f"{1 + sum(rates):.3g} tokens a step of a sequence, as stated"
        return (replace(drafts, rates=rates, name=name),)
    worst = replace(drafts, rates=(0.0,) * count, name="none accepted")
    return replace(drafts, name=f"all {count} accepted"), worst


def stated_drafts(plan: Plan, shares: Shares, stated: Acceptance = NOTHING_STATED) -> Drafts | None:
    """The drafts of a plan where one run has to do: UsageError if their acceptance is not stated."""
    drafts = drafts_of(plan, shares, stated)
    if len(drafts) > 1:
        raise UsageError("speculative decoding", "nobody stated how many draft tokens are accepted", CURE)
    return drafts[0] if drafts else None


def num_modules(plan: Plan) -> int:
    from kvplan.models.families import mtp  # only with this method

    return max(1, mtp.num_layers(plan.request.spec))


def passes_of(plan: Plan, shares: Shares, modules: int) -> Passes | None:
    """The drafter's passes; between two of them the GPU waits as between two steps."""
    draft = plan.request.draft
    if draft is None or plan.request.args.speculative_method in NO_DRAFT:
        return None
    reaches = tuple(kind.reach for kind in attention_kinds(plan, draft))
    return Passes(draft_step(plan, reaches, shares, modules), reaches, plan.request.args.speculative_eagle_topk or 1)


# --- what is stated ---------------------------------------------------------------------------------------------------


def acceptance(keys: Mapping[str, Any], stated: Acceptance, count: int) -> tuple[float, ...] | None:
    """For each draft the probability that it and all before it are accepted; None: not stated.

    Source: vLLM's _resolve_synthetic_acceptance_rates.
    """
    if stated.length is not None or stated.rates is not None:
        if keys.get(METHOD) == "synthetic" or None not in stated:
            flag = LENGTH_FLAG if stated.length is not None else RATES_FLAG
            raise UsageError(flag, "the acceptance is stated twice", "keep one")
        return typed_rates(stated, count)
    if keys.get(METHOD) != "synthetic":
        return None
    rates, length = keys.get(RATES), keys.get(LENGTH)
    if (rates is None) == (length is None):
        raise UsageError(CONFIG, f"synthetic needs either {RATES} or {LENGTH}", "give one")
    return (
        of_length(length, count, f"{CONFIG}: {LENGTH}")
        if rates is None
        else checked(rates, count, f"{CONFIG}: {RATES}")
    )


def typed_rates(stated: Acceptance, count: int) -> tuple[float, ...]:
    text = stated.length if stated.rates is None else stated.rates
    assert text is not None
    try:
        numbers: Any = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = None
    if stated.rates is not None:
        return checked(numbers, count, RATES_FLAG)
    return of_length(numbers[0] if numbers and len(numbers) == 1 else None, count, LENGTH_FLAG)


def of_length(length: object, count: int, option: str) -> tuple[float, ...]:
    """Whole drafts first, then what is left of a mean number of tokens a step."""
    if not is_share(length, 1, count + 1):
        raise UsageError(option, f"must be from 1 to {count + 1}", "correct it")
    return tuple(min(1.0, max(0.0, length - 1 - place)) for place in range(count))


def checked(rates: object, count: int, option: str) -> tuple[float, ...]:
    if not isinstance(rates, list) or len(rates) != count or not all(is_share(rate, 0, 1) for rate in rates):
        raise UsageError(option, f"must be {plural(count, 'number')} from 0 to 1", "correct them")
    if any(later > rate for rate, later in pairwise(rates)):
        raise UsageError(option, "must not rise: each holds with all before it", "correct them")
    return tuple(map(float, rates))


def is_share(value: object, low: int, high: int) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


# --- a run ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MoreTime:
    """Another step time, with what else is done in a step; does: that, as text."""

    base: StepTime
    does: str

    @property
    def text(self) -> str:
        return f"{self.base.text}; {self.does}"

    @property
    def host(self) -> Host | None:
        return self.base.host

    def seconds(self, work: StepWork) -> float:
        return self.base.seconds(work) + work.more

    def line(self, count: int, read: int) -> Line | None:
        return None


class DraftingRun(Protocol):
    """A run that drafts."""

    drafts: Drafts | None
    luck: Random
    counts: Counts
    reaches: tuple[Reach, ...]


def drafted_work(run: DraftingRun, batch: Batch) -> StepWork:
    """The work of a batch that has just been scheduled."""
    assert run.drafts is not None
    for seq, n in batch.num_tokens.items():
        start = seq.num_computed_tokens - n
        run.counts.prompt_tokens += max(0, min(n, seq.num_prompt_tokens - start))
    return batch_work(batch, run.reaches)._replace(more=run.drafts.seconds(batch))


def accepted_tokens(run: DraftingRun, batch: Batch) -> tuple[Mapping[str, tuple[int, ...]], int]:
    """(the accepted drafts of each sequence and the token after them, how many tokens these are up to their ends)."""
    assert run.drafts is not None
    step, tokens, total = batch.extra(DraftStep), dict[str, tuple[int, ...]](), 0
    for seq in batch.samples:
        num_drafts = 0 if seq in step.padded else len(step.drafts.get(seq, ()))
        num = 1 + (run.drafts.num_accepted(run.luck, num_drafts) if num_drafts else 0)
        tokens[seq.request_id] = (0,) * num
        if seq.status != "finished":
            total += min(num, seq.num_prompt_tokens + seq.max_tokens - len(seq.token_ids))
    return tokens, total


@dataclass(slots=True)
class SpeculativeRun(Simulation):
    """A Simulation whose steps verify drafts, each accepted with its stated probability."""

    drafts: Drafts | None = None

    luck: Random = field(default_factory=lambda: Random(0))
    _num_sampled: int = 0  # tokens of the last batch

    def _work(self, batch: Batch) -> StepWork:
        return drafted_work(self, batch)

    def _run(self, batch: Batch, work: StepWork) -> list[Sequence]:
        done = Simulation._run(self, batch, work)
        drafting, step = self.scheduler.extension(Drafting), batch.extra(DraftStep)
        if drafting is not None and not drafting.is_async and not step.is_last:
            ids = [0] * step.num_next  # which ones does not matter
            drafting.propose({seq: ids for seq in batch.samples if seq.status == "running"})
        return done

    def _sampled(self, batch: Batch) -> Mapping[str, tuple[int, ...]]:
        tokens, self._num_sampled = accepted_tokens(self, batch)
        return tokens

    def _note(self, seconds: float, num_tokens: int) -> None:
        Simulation._note(self, seconds, self._num_sampled)


@dataclass(slots=True)
class PromptsFirstDrafts(PromptsFirstRun):
    """A PromptsFirstRun whose decode steps verify drafts."""

    drafts: Drafts | None = None

    luck: Random = field(default_factory=lambda: Random(0))
    _num_sampled: int = 0

    def _work(self, batch: Batch) -> StepWork:
        return drafted_work(self, batch)

    def _sampled(self, batch: Batch) -> Mapping[str, tuple[int, ...]]:
        tokens, self._num_sampled = accepted_tokens(self, batch)
        return tokens

    def _note(self, seconds: float, num_tokens: int) -> None:
        PromptsFirstRun._note(self, seconds, self._num_sampled)
