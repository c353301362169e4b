"""The speculative config, and what a method needs of the scheduler, as vLLM 0.33.0 derives it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvplan.core.errors import SettingError, UsageError

if TYPE_CHECKING:
    from kvplan.models.spec import ModelSpec

DRAFT_METHODS = ("ngram", "draft_model")  # that the engine has; its scheduler plays others' too
READS_TOKENS = ("ngram", "ngram_gpu", "suffix")  # guess from the text alone
READS_HIDDEN_STATES = ("eagle", "eagle3", "mtp")  # run on what the model computes, and read the token after


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The speculation settings, with vLLM's names.

    method                  "ngram": what followed the last tokens before; "draft_model": what a small model says
    num_speculative_tokens  guessed at a time, at most
    model                   of draft_model: its directory, or a ModelSpec where weights are random
    prompt_lookup_min, prompt_lookup_max  of ngram: tokens of the ending that has to come again; None: as the other, or
                            both 5
    """

    method: str
    num_speculative_tokens: int
    model: "ModelSpec | str | Path | None" = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    def __post_init__(self) -> None:
        def need(name: str, ok: bool, what: str) -> None:
            if not ok:
                text = f"{getattr(self, name)!r:.80}".replace("{", "{{").replace("}", "}}")
                raise SettingError("speculative_config", (name,), f"must be {what} ({text})")

        need("method", self.method in DRAFT_METHODS, " or ".join(DRAFT_METHODS))
        need("num_speculative_tokens", _is_count(self.num_speculative_tokens), "a whole number of at least 1")
        is_ngram = self.method == "ngram"
        need("model", (self.model is None) == is_ngram, "left out with ngram" if is_ngram else "named with draft_model")
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            need(name, value is None or (is_ngram and _is_count(value)), "a whole number of at least 1, with ngram")
        need("prompt_lookup_min", self.lookup[0] <= self.lookup[1], f"at most prompt_lookup_max ({self.lookup[1]})")

    @property
    def lookup(self) -> tuple[int, int]:
        """The shortest and longest n-gram to look up."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        return low or high or DEFAULT_LOOKUP, high or low or DEFAULT_LOOKUP


DEFAULT_LOOKUP = 5  # vLLM's


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, slots=True)
class DraftRules:
    """The effects of drafts on scheduling.

    num_drafts         tokens guessed at a time, at most
    lookahead          slots of KV past the scheduled tokens, in which a drafter with KV writes its guesses
    extra_slots        tokens of a step's budget that each sequence takes beside its own
    prefill_lookahead  tokens of a prompt that the drafter reads ahead: no chunk stops within so many of its end
    hash_lookahead     tokens after a block that its hash covers too, because the drafter's KV depends on them
    drops_last_block   without such hashes: the last block of a prefix hit is computed again
    num_by_batch_size  drafts wanted after a batch, by its sequences (the first entry is of none); (): num_drafts
    """

    num_drafts: int
    lookahead: int = 0
    extra_slots: int = 0
    prefill_lookahead: int = 0
    hash_lookahead: int = 0
    drops_last_block: bool = False
    num_by_batch_size: tuple[int, ...] = ()

    @property
    def num_read_again(self) -> int:
        """Last computed tokens that several modules of multi-token prediction may still change, so that no block with
        one is found yet."""
        return max(0, self.prefill_lookahead - 1)


NO_DRAFTS = DraftRules(0)


@dataclass(slots=True)
class SpeculationStats:
    """Drafts verified since the start, as vLLM counts them."""

    num_drafts: int = 0  # times that a sequence had drafts in a batch
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)  # how often the first draft held, the second, ...

    @property
    def counts(self) -> tuple[int, ...]:
        """All counters, in this order."""
        return self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens, *self.accepted_per_position

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Add one sequence's drafts of one batch."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1


def draft_rules(
    method: str,
    num_drafts: int,
    *,
    enable_prefix_caching: bool = True,
    num_modules: int = 1,
    num_by_batch_size: tuple[int, ...] = (),
    hashes_look_ahead: bool = True,
) -> DraftRules:
    """The rules of a method.

    num_modules        of a model's own multi-token prediction, used in turn
    hashes_look_ahead  False as with disable_lookahead_block_hashes
    """
    if method in READS_TOKENS:
        return DraftRules(num_drafts, num_by_batch_size=num_by_batch_size)
    if method == "draft_model":
        return DraftRules(num_drafts, lookahead=num_drafts, extra_slots=1, num_by_batch_size=num_by_batch_size)
    if method in READS_HIDDEN_STATES:
        ahead = num_drafts if min(num_modules, num_drafts) > 1 else 1
        hashed = ahead if enable_prefix_caching and hashes_look_ahead else 0
        return DraftRules(
            num_drafts,
            lookahead=num_drafts,
            prefill_lookahead=ahead,
            hash_lookahead=hashed,
            drops_last_block=hashed == 0,
            num_by_batch_size=num_by_batch_size,
        )
    known = ", ".join((*READS_TOKENS, "draft_model", *READS_HIDDEN_STATES))
    raise UsageError(f"speculation method {method!r}: is not one the scheduler knows; use one of {known}")


def by_batch_size(ranges: list[list[int]], num_drafts: int, max_num_seqs: int) -> tuple[int, ...]:
    """[first, last, drafts] of batch sizes as a table by size; between and after the ranges the one before holds."""
    table = [0] * (max_num_seqs + 1)
    for first, _, drafts in sorted(ranges):
        for size in range(first, max_num_seqs + 1):
            table[size] = min(num_drafts, drafts)
    return tuple(table)
