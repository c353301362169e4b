"""One request as the scheduler sees it: its tokens, how many are computed, and the blocks that hold them."""

from collections.abc import Hashable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Literal

Status = Literal["waiting", "loading", "running", "preempted", "finished"]
FinishReason = Literal["length", "stop", "abort", "out_of_blocks", "error"]


@dataclass(eq=False, slots=True)
class Sequence:
    """A request's state; it decides nothing and knows no other sequence."""

    request_id: str
    token_ids: list[int]  # prompt, then output
    max_tokens: int
    priority: int = 0  # smaller runs first
    extra_keys: tuple[Hashable, ...] = ()  # adapter name, salt: what else the KV depends on
    adapter: str | None = None  # whose low-rank matrices are added to the model's; None: the model's own alone
    stop_token_ids: frozenset[int] = frozenset()
    skips_cache: bool = False  # every token of its prompt is computed: each one's logits are wanted

    num_prompt_tokens: int = field(init=False)
    arrival: int = 0  # order of add(), set by the scheduler
    status: Status = "waiting"
    finish_reason: FinishReason | None = None
    error: str | None = None  # one line for the user, where finish_reason is "out_of_blocks" or "error"
    num_preemptions: int = 0
    num_loaded_tokens: int = 0  # of its prompt, brought from beyond the device when it was first admitted

    most_tokens: int = 0  # that it ends with at the latest, set by the scheduler
    num_computed_tokens: int = 0  # KV stored, or being stored by a batch in flight
    num_in_flight_tokens: int = 0  # of those, the ones in batches that are not applied yet
    num_placeholders: int = 0  # tokens being sampled by batches in flight
    is_prefill_chunk: bool = False  # its last batch stopped before its last known token
    draft_ids: tuple[int, ...] = ()  # guesses at what follows the known tokens, to be checked in the next batch

    block_table: list[list[int]] = field(default_factory=list)  # block ids in order, per group; 0 where given back
    num_cached_blocks: list[int] = field(default_factory=list)  # leading blocks offered to the prefix cache, per group
    num_tokens_until_change: int = 0  # up to so many tokens in all, its tables stay as they are
    block_hashes: dict[int, list[bytes]] = field(default_factory=dict)  # chained, per block size
    full_attention_hit_len: int = 0  # tokens shared with others that only the full-attention groups still had

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    @property
    def num_settled_tokens(self) -> int:
        """Tokens whose KV no batch in flight still writes or reads around."""
        return max(0, self.num_computed_tokens - self.num_in_flight_tokens)

    def extend(self, token_ids: Several[int]) -> int:
        """Add sampled tokens up to the one that ends it, if one does; returns how many were added."""
        for num_added, token_id in enumerate(token_ids, 1):
            self.token_ids.append(token_id)
            if token_id in self.stop_token_ids:
                self.finish("stop")
                return num_added
            if len(self.token_ids) >= self.most_tokens:
                self.finish("length")
                return num_added
        return len(token_ids)

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self.status, self.finish_reason, self.error = "finished", reason, error
