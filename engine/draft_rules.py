"""What a method of speculation asks of the scheduler, as vLLM 0.33.0 derives it (`config/vllm.py`)."""

from dataclasses import dataclass

from kvplan.core.errors import UsageError

READS_TOKENS = ("ngram", "ngram_gpu", "suffix")  # guess from the text alone
READS_HIDDEN_STATES = ("eagle", "eagle3", "mtp")  # run on what the model computes, and read the token after


@dataclass(frozen=True, slots=True)
class DraftRules:
    """How drafts bear on scheduling.

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
    for first, _, wanted in sorted(ranges):
        for size in range(first, max_num_seqs + 1):
            table[size] = min(num_drafts, wanted)
    return tuple(table)
