"""Load on a live server, and how much of it that load used, from two of its /metrics pages.

Counters are compared between the pages, so that earlier load does not count. Means are over requests that finished in
between; time averages follow from the requests' durations (Little's law). Errors of each are in
tests/facts/usage_truth.jsonl: pages that vLLM's own logger wrote for known workloads.
"""

import math
from dataclasses import dataclass
from typing import Final

from kvplan.core.errors import InvalidInputError
from kvplan.measure.server_metrics import MetricsError, page_sums, server_named, server_stats
from kvplan.servers.base import server_of
from kvplan.servers.logs.metrics import Counters

NEEDED: Final = ("ended", "prompt_tokens_ended", "output_tokens_ended")


@dataclass(frozen=True, slots=True)
class Usage:
    """A server between two pages; figures that need the elapsed time are None if it is unknown.

    seconds          between the pages
    restarted        the process restarted in between: everything is since then
    ended            finished requests
    mean_prompt, mean_output   tokens of these
    arrival_rate     requests per second
    mean_running, mean_waiting   requests, averaged over time
    time_used        fraction of the time in which a step ran
    step_s           mean time between two tokens of a request
    ttft_s           mean time to first token
    prefix_share     fraction of prompt tokens found in the prefix cache
    preemptions      of all requests
    pool_tokens      tokens that fit in the KV cache, over all engines, or None if the page does not say
    held_tokens      mean context tokens of running requests; a shared prefix counts once per request
    pool_used        held_tokens as a fraction of pool_tokens
    queue_grows      more requests wait at the second page, by clearly more than the finished requests' mean queue
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
    """Compute a server's usage between two pages.

    Raises MetricsError if the pages' counters cannot be used, InvalidInputError if no request finished in between.
    """
    table = counters_of(first, second)
    counters = table.counters
    names = (*counters.values(), *table.gauges.values(), table.started)
    old, new = page_sums(first, names), page_sums(second, names)
    missing = [counters[field] for field in NEEDED if counters[field] not in new]
    if missing:
        raise MetricsError(f"{missing[0]} is not on the page; {table.since}")
    started = new.get(table.started, -math.inf) > old.get(table.started, -math.inf)
    restarted = started or any(new.get(name, 0.0) < old.get(name, 0.0) for name in counters.values())
    before = {} if restarted else old
    counted = {field: new.get(name, 0.0) - before.get(name, 0.0) for field, name in counters.items()}
    ended = round(counted["ended"])
    if ended < 1:
        raise InvalidInputError("the second page", "no request completed since the first one", "take it later")
    waiting = [page.get(table.gauges["waiting"], 0.0) for page in (old, new)]
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
        # Waiting requests have not reported their wait: while a queue grows, its length is the better measure.
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


def counters_of(first: str, second: str) -> Counters:
    """Counters of the pages' server. Raise MetricsError for pages of two servers, or if the counters cannot be used."""
    names = {server_named(page) for page in (first, second)}
    tables = [metrics.workload for name in sorted(names) if (metrics := server_of(name).outputs().metrics) is not None]
    reason = next((table for table in tables if isinstance(table, str)), None)
    if reason is not None:
        raise MetricsError(reason)
    match tables:
        case [Counters() as table]:
            return table
    raise MetricsError("the pages are of two servers")
