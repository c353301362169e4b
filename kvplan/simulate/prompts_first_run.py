"""A run of a server that computes prompts before it decodes: the loop over that scheduler, step by step."""

from array import array
from dataclasses import dataclass
from typing import Any, cast

from engine.scheduler import Scheduler, SchedulerConfig
from engine.sequence import Sequence
from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models.spec import FullAttention, LatentAttention
from kvplan.servers.base import terms_of
from kvplan.servers.plans import Plan
from kvplan.simulate.loop import Simulation
from kvplan.simulate.prompts_first import Limits, PromptsFirst
from kvplan.simulate.requests import Content

MAX_PREFILL_TOKENS = 16_384  # --max-prefill-tokens, where prompts are cut: never what bounds a step
ORDER_FLAGS = frozenset(
    {
        "--schedule-policy", "--schedule-conservativeness", "--enable-mixed-chunk", "--max-prefill-tokens",
        "--prefill-max-requests", "--prefill-decode-interval", "--enable-priority-scheduling", "--retraction-policy",
        "--enable-dynamic-chunking", "--enable-prefill-delayer", "--radix-eviction-policy", "--disaggregation-mode",
        "--speculative-algorithm", "--enable-hierarchical-cache", "--enable-two-batch-overlap",
    }
)  # fmt: skip
ORDER_DEFAULTS = {"--schedule-policy": "fcfs"}  # srt/server_args.py
RUN_BITS = 24  # of a token's place in its run; the others say whose it is


@dataclass(slots=True)
class PromptsFirstRun(Simulation):
    """As Simulation; its steps are never run together."""

    limits: Limits | None = None

    def __post_init__(self) -> None:
        assert self.limits is not None
        self.scheduler = cast("Scheduler", PromptsFirst(self.limits))  # as much of one as the loop asks for by steps
        self._slot_group, self.jump = None, False

    def _queue(self, seq: Sequence, content: Content) -> None:
        cast("Any", self.scheduler).add(seq, tokens_of(seq, content))


def tokens_of(seq: Sequence, content: Content) -> "array[int]":
    """Ids of a prompt's tokens: alike where requests share a prefix, nobody else's beyond."""
    ids = array("q")
    for chain in content.chains:
        length = min(content.run_len, content.shared_len - len(ids))
        ids.extend(range(chain << RUN_BITS, (chain << RUN_BITS) + length))
    first = -(content.number << RUN_BITS)
    ids.extend(range(first, first + seq.num_prompt_tokens - len(ids)))
    return ids


def limits_of(plan: Plan) -> Limits:
    settings, capacity = plan.settings, plan.capacity
    return Limits(
        num_tokens=capacity.num_blocks - 1,  # without the one that is never given out
        max_running=settings.max_num_seqs,
        chunk=settings.max_num_batched_tokens,
        max_prefill_tokens=max(MAX_PREFILL_TOKENS, settings.max_num_batched_tokens),
        context_len=capacity.max_model_len,
        overlap=plan.request.args.async_scheduling is not False,
        radix=settings.prefix_caching,
    )


def config_of(limits: Limits) -> SchedulerConfig:
    """What the loop asks of a scheduler's config."""
    assert limits.chunk is not None
    return SchedulerConfig(
        max_num_batched_tokens=limits.chunk,
        max_num_seqs=limits.max_running,
        max_model_len=limits.context_len,
        enable_prefix_caching=limits.radix,
        batch_queue_depth=2 if limits.overlap else 1,
    )


def refuse_flags(command: str, plan: Plan) -> None:
    """What of a pasted server command changes who runs next, and is not simulated."""
    if terms_of(plan.request.release.engine).prompts_first is None:
        return
    words = command.split()
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if flag in ORDER_FLAGS and (value if equals else following) != ORDER_DEFAULTS.get(flag):
            raise UsageError(f"simulate {flag}", "changes who runs next in a way that is not simulated", "leave it out")


def check(plan: Plan) -> None:
    """Refuse what was not compared with the server's own scheduler."""
    spec, release = plan.request.spec, plan.request.release
    terms = terms_of(release.engine)
    label = f"{release.engine}@{terms.prompts_first}"
    if release.label not in (label, label.rpartition(".")[0]):  # without a patch number it is the newest
        raise UsageError(
            f"simulate --engine {release.label}",
            f"{terms.title}'s scheduler is that of {terms.prompts_first}; other releases' were not compared",
            f"use --engine {label}",
        )
    kinds = {type(cache) for caches in spec.layers for cache in caches}
    if len(kinds) != 1 or not kinds <= {FullAttention, LatentAttention}:
        raise UnsupportedModelError(
            f"simulate: {spec.name}",
            f"{terms.title}'s pools of windows and states cannot be simulated",
            "use --engine vllm",
        )
    args = plan.request.args
    for flag, is_set in (
        ("--disaggregation-mode", args.disaggregation_mode is not None),
        ("--enable-hierarchical-cache", bool(args.enable_hierarchical_cache)),
    ):
        if is_set:
            raise UsageError(f"simulate {flag}", "changes who runs next in a way that is not simulated", "leave it out")
    page = plan.capacity.tokens // (plan.capacity.num_blocks - 1) if plan.fits else 1
    if page != 1:
        raise UsageError("simulate", f"pages of {page} tokens cannot be simulated", "use --block-size 1")
