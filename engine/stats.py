"""Engine statistics: totals since the start, and current use."""

import time
from dataclasses import dataclass

from engine.draft_rules import SpeculationStats
from engine.drafting import Drafting
from engine.loading import Loading
from engine.scheduler import PrefixCacheStats, Scheduler
from engine.states import MambaGroup


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine now and since it started; names as in vLLM's metrics where vLLM has them.

    kv_cache_usage_perc   share of the pool's blocks in use, 0 to 1
    num_cached_tokens     prompt tokens that requests found in the prefix cache
    num_cached_blocks     blocks in which a prefix can be found, in use or free
    num_kv_tokens         tokens whose KV the running sequences have, shared ones counted in each, and those that a
                          window has passed; num_used_blocks: blocks they hold, shared ones counted once
    num_filled_slots      slots of those blocks, over all groups of layers, that hold a computed token; of
                          num_used_blocks x block_size
    prefix_cache_hits     of prefix_cache_queries, tokens not computed because a block of the pool holds them
    external_prefix_cache_hits  likewise of host memory and files: tokens looked up there, and loaded
    num_accepted_tokens   of num_draft_tokens that speculation guessed; num_drafts: times that a sequence had guesses
    generation_tokens, prompt_tokens  computed since the start; busy_s: seconds spent in steps
    """

    kv_cache_usage_perc: float
    num_used_blocks: int
    num_cached_blocks: int
    num_kv_tokens: int
    num_filled_slots: int
    num_requests_running: int
    num_requests_waiting: int
    num_preemptions: int
    num_cached_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    external_prefix_cache_queries: int
    external_prefix_cache_hits: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int
    prompt_tokens: int
    generation_tokens: int
    busy_s: float


@dataclass(slots=True)
class Counters:
    """Totals over the steps."""

    num_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_cached_tokens: int = 0
    busy_s: float = 0.0

    def count_step(self, start: float) -> None:
        """Count a step that began at `start`, in time.perf_counter's clock."""
        self.num_steps += 1
        self.busy_s += time.perf_counter() - start

    def stats(self, scheduler: Scheduler) -> Stats:
        """The statistics, with the scheduler's current state."""
        loading, drafting = scheduler.extension(Loading), scheduler.extension(Drafting)
        cache = scheduler.prefix_cache_stats
        external = PrefixCacheStats() if loading is None else loading.external_cache_stats
        drafts = SpeculationStats() if drafting is None else drafting.stats
        return Stats(
            kv_cache_usage_perc=scheduler.blocks.usage,
            num_used_blocks=scheduler.num_used_blocks,
            num_cached_blocks=scheduler.blocks.num_cached_blocks,
            num_kv_tokens=sum(seq.num_computed_tokens for seq in scheduler.running),
            num_filled_slots=num_filled_slots(scheduler),
            num_requests_running=len(scheduler.running),
            num_requests_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            num_cached_tokens=self.num_cached_tokens,
            prefix_cache_queries=cache.queries + cache.preempted_queries,
            prefix_cache_hits=cache.hits + cache.preempted_hits,
            external_prefix_cache_queries=external.queries + external.preempted_queries,
            external_prefix_cache_hits=external.hits + external.preempted_hits,
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_tokens=drafts.num_accepted_tokens,
            num_steps=self.num_steps,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            busy_s=self.busy_s,
        )


def num_filled_slots(scheduler: Scheduler) -> int:
    """Token slots of the used blocks whose token is computed (or being computed), over all groups of layers.

    All slots of the used blocks but those behind each sequence's last computed token: only full blocks are shared, so
    no slot is left out twice; a block with a recurrent state is full. For groups of one block size.
    """
    groups = scheduler.blocks.groups
    size = groups[0].block_size
    num_slots = scheduler.num_used_blocks * size
    for seq in scheduler.running:
        for group, table in zip(groups, seq.block_table, strict=True):
            num_slots -= 0 if isinstance(group, MambaGroup) else len(table) * size - seq.num_computed_tokens
    return num_slots
