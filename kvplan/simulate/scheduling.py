"""The simulated scheduler: the engine's, with settings and layers that vLLM has and the bundled engine does not.

Rules as in vLLM 0.33.0 (`v1/core/sched/scheduler.py`, `v1/kv_cache_interface.py`), compared step by step with it.
"""

from engine.block_manager import Group, PrefixHit, cdiv
from engine.extensions import ExtendedConfig, block_manager, extensions
from engine.scheduler import Batch, Extension, Outcome, Scheduler
from engine.sequence import Sequence
from kvplan.core.errors import SettingError
from kvplan.core.records import dataclass
from kvplan.simulate.encoding import EncoderRules, Encoding


@dataclass(frozen=True, slots=True)
class ChunkedGroup(Group):
    """Layers that see their own chunk of `chunk` tokens."""

    chunk: int

    def num_skipped_tokens(self, num_tokens: int) -> int:
        return num_tokens // self.chunk * self.chunk

    def next_drop(self, num_tokens: int) -> int | None:
        return (num_tokens // self.chunk + 1) * self.chunk

    def num_tail_blocks(self) -> int | None:
        return None

    def max_blocks_held(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return cdiv(min(self.chunk + max_in_flight_tokens, max_model_len), self.block_size)


@dataclass(frozen=True, slots=True)
class SimulatedConfig(ExtendedConfig):
    """Settings of a simulated scheduler, by their vLLM names where vLLM has them."""

    encoder: EncoderRules | None = None  # of images
    enable_chunked_prefill: bool = True  # False: a prompt waits until a step has room for all of it
    adaptive_long_prefill_threshold: bool = False  # the threshold is at least an equal share of a step
    prefill_schedule_interval: int = 1  # prefills run in every n-th step only, while others decode
    prefix_match_unit: int | None = None  # with recurrent states: prefixes may end within blocks, at a multiple of it


def simulated_scheduler(
    config: SimulatedConfig, num_blocks: int, groups: tuple[Group, ...], tiers: Extension | None = None
) -> Scheduler:
    """Return the scheduler that a config asks for, with a pool of num_blocks blocks and perhaps KV offloading."""
    others: list[Extension] = []
    if tiers is not None:
        others.append(tiers)
        for name, is_set in (
            ("prefix_match_unit", config.prefix_match_unit is not None),
            ("images in prompts", config.encoder is not None),
        ):
            if is_set:
                raise SettingError("", ("kv_offloading_size",), f"cannot be combined with {name}", "remove it")
    if config.prefill_schedule_interval > 1:
        others.append(PrefillInterval(config.prefill_schedule_interval))
    if not config.enable_chunked_prefill:
        others.append(WholePrefills())
    if config.encoder is not None:
        read_ahead = config.drafts.prefill_lookahead
        others.append(Encoding(config.encoder, read_ahead=read_ahead, is_async=config.is_async))
    blocks = block_manager(config, num_blocks, groups, prefix_match_unit=config.prefix_match_unit)
    scheduler = AdaptiveScheduler if config.adaptive_long_prefill_threshold else Scheduler
    return scheduler(config, blocks, extensions(config, blocks, tuple(others)))


class AdaptiveScheduler(Scheduler):
    """A scheduler whose long-prefill threshold is at least an equal share of a step."""

    def capped(self, n: int) -> int:
        num_seqs, threshold = len(self.running) + self.num_waiting, self.config.long_prefill_token_threshold
        if not threshold or num_seqs == 1:
            return n
        return min(n, max(threshold, self.config.max_num_batched_tokens // num_seqs))


class WholePrefills(Extension):
    """Admits a prompt only if the step has room for all of it."""

    def decide(self, seq: Sequence, hit: PrefixHit, n: int, batch: Batch) -> Outcome | None:
        return "full" if self.scheduler.capped(n) > batch.budget else None


class PrefillInterval(Extension):
    """Runs prefills in every n-th step only, unless nobody decodes or more wait than the last such step could take."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self._num_steps = 0  # steps with tokens
        self._last_prefill_step = -interval
        self._is_behind = False  # the last step that admitted prompts could not take all that waited
        self._holds_prefills = False  # in this step
        self._has_prefill = False
        self._may_admit = False

    def begin_step(self, batch: Batch) -> None:
        is_due = self._num_steps + 1 - self._last_prefill_step >= self.interval
        decodes = any(not seq.is_prefill_chunk for seq in self.scheduler.running)
        self._holds_prefills = not is_due and not self._is_behind and decodes
        self._has_prefill = self._may_admit = False

    def want(self, seq: Sequence, start: int, n: int, batch: Batch) -> int:
        return 0 if self._holds_prefills and seq.status == "running" and seq.is_prefill_chunk else n

    def may_admit(self, batch: Batch) -> bool:
        self._may_admit = True
        return True

    def decide(self, seq: Sequence, hit: PrefixHit, n: int, batch: Batch) -> Outcome | None:
        return "full" if self._holds_prefills and n > 1 else None

    def put(self, seq: Sequence, n: int, batch: Batch) -> None:
        hit_len = batch.hits.get(seq)
        self._has_prefill |= seq.is_prefill_chunk if hit_len is None else hit_len < seq.num_tokens - 1

    def end_step(self, batch: Batch) -> None:
        if self._may_admit and not self._holds_prefills:
            self._is_behind = bool(self.scheduler.waiting)
        if batch.num_tokens:
            self._num_steps += 1
            if self._has_prefill:
                self._last_prefill_step = self._num_steps
