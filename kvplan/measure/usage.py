"""What a live server was asked, and how much of it that used: from two of its /metrics pages.

Counters are compared between the pages, so that what happened before the first does not count. Means are of requests
that ended in between; a mean over time follows from the time that requests took (Little's law). How far each lies from
the truth is said by tests/facts/usage_truth.jsonl: pages that vLLM's own logger wrote over workloads that are known.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvplan.core.errors import InvalidInputError
from kvplan.measure.server_metrics import MetricsError, page_sums, server_stats

# Field -> vLLM's counter or the sum of its histogram.
COUNTERS: Final[Mapping[str, str]] = {
    "ended": "vllm:request_prompt_tokens_count",
    "prompt_tokens_ended": "vllm:request_prompt_tokens_sum",
    "output_tokens_ended": "vllm:request_generation_tokens_sum",
    "first_tokens": "vllm:time_to_first_token_seconds_count",
    "first_token_s": "vllm:time_to_first_token_seconds_sum",
    "tokens_after_first": "vllm:inter_token_latency_seconds_count",
    "token_s": "vllm:inter_token_latency_seconds_sum",
    "prefill_s": "vllm:request_prefill_time_seconds_sum",
    "queue_s": "vllm:request_queue_time_seconds_sum",
    "steps": "vllm:iteration_tokens_total_count",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "output_tokens": "vllm:generation_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}
GAUGES: Final[Mapping[str, str]] = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
}
STARTS: Final = "vllm:prompt_tokens_created"  # Unix time at which this process began to count
NEEDED: Final = ("ended", "prompt_tokens_ended", "output_tokens_ended")


@dataclass(frozen=True, slots=True)
class Usage:
    """A server between two pages; what needs the time between them is None where that is not known.

    seconds          between the pages
    restarted        the process began anew in between: everything is since then
    ended            requests that ended
    mean_prompt, mean_output   tokens of these
    arrival_rate     requests per second that came
    mean_running, mean_waiting   requests, over time
    time_used        share of the time in which a step ran
    step_s           mean time between two tokens of a request
    ttft_s           mean time to first token
    prefix_share     of prompt tokens, found in the prefix cache
    preemptions      of all requests
    pool_tokens      tokens that the KV cache holds, all engines together; None: the page does not say
    held_tokens      tokens of context that running requests hold on average; in a shared prefix each request's count
    pool_used        held_tokens of pool_tokens
    queue_grows      more requests wait at the second page, by more than those that ended waited
    """

    seconds: float | None
    restarted: bool
    ended: int
    mean_prompt: float
    mean_output: float
    arrival_rate: float | None
    output_rate: float | None
    mean_running: float | None
    mean_waiting: float | None
    time_used: float | None
    step_s: float | None
    ttft_s: float | None
    prefix_share: float | None
    preemptions: int
    pool_tokens: int | None
    held_tokens: float | None
    queue_grows: bool

    @property
    def pool_used(self) -> float | None:
        if self.pool_tokens is None or self.held_tokens is None:
            return None
        return self.held_tokens / self.pool_tokens


def usage(first: str, second: str, seconds: float | None) -> Usage:
    """What happened between two pages of one server.

    Raises MetricsError for a page that is not vLLM's, InvalidInputError where nothing ended in between.
    """
    kinds = {server_stats(page).kind for page in (first, second)}
    if kinds != {"vllm"}:
        raise MetricsError("SGLang counts a request's tokens when it ends; its pages are not read for this yet")
    names = (*COUNTERS.values(), *GAUGES.values(), STARTS)
    old, new = page_sums(first, names), page_sums(second, names)
    missing = [COUNTERS[field] for field in NEEDED if COUNTERS[field] not in new]
    if missing:
        raise MetricsError(f"{missing[0]} is not on the page; vLLM before 0.6 counts no requests")
    restarted = began(new) > began(old) or any(new.get(name, 0.0) < old.get(name, 0.0) for name in COUNTERS.values())
    before = {} if restarted else old
    counted = {field: new.get(name, 0.0) - before.get(name, 0.0) for field, name in COUNTERS.items()}
    ended = round(counted["ended"])
    if ended < 1:
        raise InvalidInputError("the second page", "no request ended since the first one", "take it later")
    waiting = [page.get(GAUGES["waiting"], 0.0) for page in (old, new)]
    stats = server_stats(second)
    span = None if restarted else seconds
    running = None if span is None else (counted["token_s"] + counted["prefill_s"]) / span
    mean_prompt, mean_output = counted["prompt_tokens_ended"] / ended, counted["output_tokens_ended"] / ended
    step_s = counted["token_s"] / counted["tokens_after_first"] if counted["tokens_after_first"] else None
    queued = None if span is None else counted["queue_s"] / span
    grows = queued is not None and waiting[1] - waiting[0] > max(4.0, queued / 4)
    return Usage(
        seconds=span,
        restarted=restarted,
        ended=ended,
        mean_prompt=mean_prompt,
        mean_output=mean_output,
        arrival_rate=None if span is None else max(0.0, counted["first_tokens"] + waiting[1] - waiting[0]) / span,
        output_rate=None if span is None else counted["output_tokens"] / span,
        mean_running=running,
        # Those that still wait have not told how long: while a queue grows, its length in between is told better.
        mean_waiting=sum(waiting) / 2 if grows else queued,
        time_used=None if span is None or step_s is None else min(1.0, counted["steps"] * step_s / span),
        step_s=step_s,
        ttft_s=counted["first_token_s"] / counted["first_tokens"] if counted["first_tokens"] else None,
        prefix_share=counted["prefix_hits"] / counted["prefix_queries"] if counted["prefix_queries"] else None,
        preemptions=round(counted["preemptions"]),
        pool_tokens=stats.kv_tokens,
        held_tokens=None if running is None else running * (mean_prompt + mean_output / 2),
        queue_grows=grows,
    )


def began(page: Mapping[str, float]) -> float:
    return page.get(STARTS, -math.inf)
