"""Simulated run of a prefill-first server: the loop over its scheduler, step by step."""

from array import array
from typing import Any, cast

from engine.scheduler import Scheduler
from engine.sequence import Sequence
from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.records import dataclass
from kvplan.core.units import GIB
from kvplan.servers.base import abilities_of, terms_of
from kvplan.servers.plans.plan import Plan
from kvplan.servers.words.arguments import NO_DRAFT
from kvplan.simulate.loop import DecodeLoad, Simulation
from kvplan.simulate.prompts_first import Limits, PromptsFirst
from kvplan.simulate.requests import Content
from kvplan.simulate.scheduling import SimulatedConfig

MAX_PREFILL_TOKENS = 16_384  # default of --max-prefill-tokens; never the limit of a step with chunked prefill
# --prefill-decode-interval is 22 for these models on Hopper (srt/arg_groups/model_overrides/qwen3_vl.py).
PAUSED = frozenset({"Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"})
LOOKED_UP = 10  # branches of drafts from the text: default of --speculative-ngram-max-bfs-breadth
LEAST_STEPS = 4  # of a jump
RUN_BITS = 24  # low bits: a token's place in its run; high bits: the chain or request it belongs to


@dataclass(slots=True)
class PromptsFirstRun(Simulation):
    """A Simulation whose jumps are steps in which the same requests decode."""

    limits: Limits | None = None

    def __post_init__(self) -> None:
        assert self.limits is not None
        self.scheduler = cast("Scheduler", PromptsFirst(self.limits))  # has what the loop uses without jumps
        self._slot_group = None

    def _jump(self) -> int:
        """Run decode steps up to the next one that may do more; return their number, possibly 0."""
        scheduler = cast("PromptsFirst", self.scheduler)
        if not self.jump or self._unanswered:
            return 0
        steps = scheduler.steady_steps()
        if steps < LEAST_STEPS:
            return 0
        next_at = self.arrivals.next_time()
        until = self._until if next_at is None else min(next_at, self._until)
        stored = [seq.num_computed_tokens for seq in scheduler.running]
        load, count = DecodeLoad(self.reaches, [tokens + 1 for tokens in stored]), len(stored)
        pending = self._in_flight[0][1] if self._in_flight else None
        used, total, done = scheduler.blocks.num_usable_blocks - scheduler.blocks.num_free_blocks, sum(stored), 0
        growths = scheduler.growths()
        while done < steps and self.clock < until:
            used += growths[done % len(growths)]
            work, total, done = load.step(count), total + count, done + 1
            run, pending = (work, None) if pending is None else (pending, work)
            seconds = self.step_time.seconds(run)
            self.timeline.add(self.clock, seconds, (count, 0, used, total, 0), count)
            self.clock += seconds
            self._last_step_s = seconds
        scheduler.decode_on(done)
        if pending is not None:
            self._in_flight[0] = (self._in_flight[0][0], pending)
        self.counts.steps += done
        self.counts.jumped += done
        self.counts.output_tokens += done * count
        return done

    def _queue(self, seq: Sequence, content: Content) -> None:
        cast("Any", self.scheduler).add(seq, tokens_of(seq, content))


def tokens_of(seq: Sequence, content: Content) -> "array[int]":
    """Return synthetic token ids of a prompt: equal over shared prefixes, unique to the request after them."""
    ids = array("q")
    for chain in content.chains:
        length = min(content.run_len, content.shared_len - len(ids))
        ids.extend(range(chain << RUN_BITS, (chain << RUN_BITS) + length))
    first = -(content.number << RUN_BITS)
    ids.extend(range(first, first + seq.num_prompt_tokens - len(ids)))
    return ids


def limits_of(plan: Plan) -> Limits:
    settings, capacity = plan.settings, plan.capacity
    chunk = settings.max_num_batched_tokens if plan.request.args.enable_chunked_prefill else None
    return Limits(
        num_tokens=(capacity.num_blocks - 1) * plan.pool.block_size,  # without the block that is never allocated
        max_running=settings.max_num_seqs,
        chunk=chunk,
        max_prefill_tokens=max(MAX_PREFILL_TOKENS, chunk or 0),
        context_len=capacity.max_model_len,
        overlap=plan.request.args.async_scheduling is not False,
        radix=settings.prefix_caching,
        page_size=plan.pool.block_size,
        **drafting_limits(plan),
    )


def drafting_limits(plan: Plan) -> dict[str, int]:
    """Tokens that a decode step verifies, drafts in turn, and slots for them: twice what a step may write.

    Source: the server's srt/mem_cache/allocation_sizing.py (get_alloc_len_per_decode, get_alloc_reserve_per_decode).
    """
    args, page = plan.request.args, plan.pool.block_size
    verified, steps, width = args.speculative_num_draft_tokens, args.num_speculative_tokens, args.speculative_eagle_topk
    if not verified or not steps:
        return {}
    if args.speculative_method in NO_DRAFT:
        return {"verified": verified, "num_drafts": steps, "reserve": 2 * max(LOOKED_UP, verified)}
    width = width or 1
    own = (2 * page - 2 + steps) // page * page if page > 1 and width > 1 else steps  # a branch, on pages of its own
    return {"verified": verified, "num_drafts": steps, "reserve": 2 * max(own * width, verified)}


def config_of(limits: Limits) -> SimulatedConfig:
    """Return the fields of a scheduler's config that the loop reads."""
    assert limits.chunk is not None
    return SimulatedConfig(
        max_num_batched_tokens=limits.chunk,
        max_num_seqs=limits.max_running,
        max_model_len=limits.context_len,
        enable_prefix_caching=limits.radix,
        batch_queue_depth=2 if limits.overlap else 1,
    )


def check(plan: Plan) -> None:
    """Raise an error for releases, models and flags that were not compared with the server's own scheduler."""
    spec, release = plan.request.spec, plan.request.release
    title, compared = terms_of(release.engine).title, abilities_of(release.engine).prompts_first
    label = f"{release.engine}@{compared}"
    if release.label not in (label, label.rpartition(".")[0]):  # without a patch number: the newest
        raise UsageError(
            f"simulate --engine {release.label}",
            f"{title}'s scheduler is that of {compared}; other releases' were not compared",
            f"use --engine {label}",
        )
    gpu = plan.request.gpu
    if spec.architecture in PAUSED and gpu.sm == 90 and gpu.total_memory >= 60 * GIB and not spec.text_only:
        raise UnsupportedModelError(
            f"simulate: {spec.name}",
            f"{title} pauses between its prompts on Hopper GPUs, which is not simulated",
            "use --engine vllm, or another GPU",
        )
    args = plan.request.args
    for flag, is_set in (
        ("--disaggregation-mode", args.disaggregation_mode is not None),
        ("--enable-hierarchical-cache", bool(args.enable_hierarchical_cache)),
    ):
        if is_set:
            raise UsageError(f"simulate {flag}", "changes who runs next in a way that is not simulated", "remove it")
