"""What an engine adds to the core, put together: settings, block manager, and extensions in their order."""

from dataclasses import dataclass
from typing import Literal, assert_never

from engine.block_manager import BlockManager, Group
from engine.contiguous import ContiguousManager
from engine.draft_rules import NO_DRAFTS, DraftRules
from engine.drafting import Drafting
from engine.scheduler import Batch, Extension, Scheduler, SchedulerConfig
from engine.sequence import Sequence
from engine.states import KeptStates, MambaGroup, StateBlockManager
from kvplan.core.errors import InvalidInputError, UsageError


@dataclass(frozen=True, slots=True)
class ExtendedConfig(SchedulerConfig):
    """A scheduler's settings and those of its extensions."""

    # contiguous: max_model_len each at admission, no prefix cache; static: and nobody joins a batch that has begun
    allocator: Literal["paged", "contiguous", "static"] = "paged"
    max_loras: int = 0  # adapters that sequences may run with at once
    drafts: DraftRules = NO_DRAFTS  # speculation
    pipeline_stages: int = 1  # of the batches in flight; one more than there are stages: async scheduling

    @property
    def is_async(self) -> bool:
        """Whether a step may be scheduled for a token that is still being sampled."""
        return self.batch_queue_depth > self.pipeline_stages


def scheduler_of(config: ExtendedConfig, num_blocks: int, groups: tuple[Group, ...], *others: Extension) -> Scheduler:
    """The scheduler that a config asks for, with a pool of num_blocks blocks, the null block included.

    others  extensions that need more than the config: tiers of memory, or what proposes drafts
    """
    blocks = block_manager(config, num_blocks, groups)
    return Scheduler(config, blocks, extensions(config, blocks, others))


def extensions(config: ExtendedConfig, blocks: BlockManager, others: tuple[Extension, ...]) -> tuple[Extension, ...]:
    """A config's extensions and others, in the order in which they are asked.

    First whoever cuts chunks where states are stored: the next cut what is left. Adapters come before loads, which wait
    for slots too. Stages come last: a sequence that waits for them gets nothing, drafts included.
    """
    steps: list[Extension] = []
    if isinstance(blocks, StateBlockManager):
        steps.append(KeptStates())
    if config.allocator == "static":
        steps.append(StaticBatches())
    steps.append(AdapterSlots(config.max_loras) if config.max_loras else NoAdapterSlots())
    steps += others
    if config.drafts.num_drafts and not any(isinstance(extension, Drafting) for extension in others):
        steps.append(Drafting(config.drafts, is_async=config.is_async))
    if config.pipeline_stages > 1:
        steps.append(Stages(config.pipeline_stages, is_async=config.is_async))
    return tuple(steps)


def block_manager(
    config: ExtendedConfig, num_blocks: int, groups: tuple[Group, ...], *, prefix_match_unit: int | None = None
) -> BlockManager:
    """The block manager that a config names; prefix_match_unit: see StateBlockManager."""
    match config.allocator:
        case "paged":
            pass
        case "contiguous" | "static":
            return ContiguousManager(num_blocks, groups, max_model_len=config.max_model_len)
        case _:
            assert_never(config.allocator)
    max_in_flight_tokens = config.max_num_batched_tokens * config.batch_queue_depth
    if not config.enable_prefix_caching or not any(isinstance(group, MambaGroup) for group in groups):
        return BlockManager(
            num_blocks,
            groups,
            max_model_len=config.max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            max_step_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            hash_lookahead=config.drafts.hash_lookahead,
            num_read_again=config.drafts.num_read_again,
            drops_last_block=config.drafts.drops_last_block,
        )
    if config.drafts.drops_last_block:
        raise UsageError("speculation: with recurrent states block hashes have to look ahead; let them")
    return StateBlockManager(
        num_blocks,
        groups,
        max_model_len=config.max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        max_step_tokens=config.max_num_batched_tokens,
        hash_lookahead=config.drafts.hash_lookahead,
        prefix_match_unit=prefix_match_unit,
    )


class NoAdapterSlots(Extension):
    """Refuses adapters, which there are no slots for."""

    def check(self, seq: Sequence) -> None:
        if seq.adapter is not None:
            raise InvalidInputError(
                f"{seq.request_id}: there is no slot for adapter {seq.adapter!r} (max_loras 0); raise max_loras"
            )


class AdapterSlots(Extension):
    """Lets no more adapters run at once than there are slots."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._adapters: set[str] = set()  # of those that run, whether or not they have a part in this step

    def may_admit(self, batch: Batch) -> bool:
        self._adapters = {seq.adapter for seq in self.scheduler.running if seq.adapter is not None}
        return True

    def is_ready(self, seq: Sequence) -> bool:
        return seq.adapter is None or seq.adapter in self._adapters or len(self._adapters) < self.num_slots

    def put(self, seq: Sequence, n: int, batch: Batch) -> None:
        if seq.adapter is not None:
            self._adapters.add(seq.adapter)


class StaticBatches(Extension):
    """Admits nobody while a batch runs: it forms when nobody runs, and then runs until its last sequence ends."""

    def __init__(self) -> None:
        self._is_forming = True  # whoever waits may still join it
        self._is_open = False  # in this step

    def may_admit(self, batch: Batch) -> bool:
        self._is_open = self._is_forming or not self.scheduler.running
        return self._is_open

    def end_step(self, batch: Batch) -> None:
        if self._is_open:
            self._is_forming = batch.budget <= 0  # prompts filled the step; else the batch is full, or nobody waits
            self._is_open = False


class Stages(Extension):
    """Lets a sequence's next token wait while the one before it is in a pipeline's stages."""

    def __init__(self, num_stages: int, *, is_async: bool) -> None:
        self.num_stages, self.is_async = num_stages, is_async
        self._num_steps = 0
        self._next_steps: dict[Sequence, int] = {}  # of each sequence, the step from which it may decode on

    def begin_step(self, batch: Batch) -> None:
        self._num_steps += 1

    def want(self, seq: Sequence, start: int, n: int, batch: Batch) -> int:
        is_in_pipeline = not self.is_async or self._num_steps < self._next_steps.get(seq, 0)
        return 0 if seq.num_placeholders and is_in_pipeline else n

    def end_step(self, batch: Batch) -> None:
        for seq in batch.samples:
            self._next_steps[seq] = self._num_steps + self.num_stages

    def retire(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._next_steps.pop(seq, None)
