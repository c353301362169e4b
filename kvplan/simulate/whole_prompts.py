"""Scheduler of vLLM V0: whole prompts in steps of their own, else one decode step of all running requests.

Rules as in vLLM 0.7.3 (core/scheduler.py: _schedule_default) without chunked prefill, V0's default for contexts up to
32,768 tokens; compared step by step with its own code (tests/facts/first_engine_schedules.jsonl).
"""

from dataclasses import replace

from engine.block_manager import Group
from engine.extensions import block_manager
from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from kvplan.servers.plans.plan import Plan
from kvplan.simulate.scheduling import SimulatedConfig, WholePrefills

NUM_SPARE_BLOCKS = 1  # blocks that must be free during decode
WATERMARK = 0.01  # share of the pool kept free when a prompt is admitted: block_manager.py
CHUNKED_FROM = 32_768  # longer contexts have chunked prefill by default: engine/arg_utils.py


class WholePrompts(Scheduler):
    """A scheduler whose steps are prefill-only or decode-only; waiting requests go first.

    A decoding request requires a free block even if its next token needs none (block_table.py:
    get_num_blocks_touched_by_append_slots).
    """

    def schedule(self) -> Batch:
        """Schedule as many waiting prompts as fit into one step, or one token of each running request if none do."""
        batch = Batch(self.config.max_num_batched_tokens)
        self._schedule_waiting(batch)
        if not batch.num_tokens and not batch.failed:
            self._schedule_running(batch)
        self._launch(batch)
        return batch

    def _make_room(self, seq: Sequence, num_tokens: int, batch: Batch) -> bool:
        while not self.blocks.num_free_blocks and len(self.running) > 1:
            victim = self._victim()
            self._preempt(victim, batch)
            if victim is seq:
                return False
        return super()._make_room(seq, num_tokens, batch)

    def _schedule_running(self, batch: Batch) -> None:
        for seq in tuple(self.running):
            if seq.status == "running" and self._make_room(seq, seq.num_computed_tokens + 1, batch):
                self._put(seq, 1, batch)


def whole_prompts(config: SimulatedConfig, num_blocks: int, groups: tuple[Group, ...]) -> WholePrompts:
    """Return the scheduler for a config and a pool of num_blocks blocks."""
    blocks = block_manager(config, num_blocks, groups)
    return WholePrompts(replace(config, watermark=WATERMARK), blocks, (WholePrefills(),))


def runs_whole_prompts(plan: Plan) -> bool:
    """True if a plan's server prefills whole prompts in steps without decode."""
    return plan.request.release.runs_first_engine and plan.capacity.max_model_len <= CHUNKED_FROM
