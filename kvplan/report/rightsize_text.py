"""A live server's load and its use of resources: on a screen, as Markdown, as CSV and as kvplan/rightsize@1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from kvplan.core.records import dataclass, from_fields
from kvplan.core.table import Table
from kvplan.documents.rightsize import Needed, RightsizeDocument, Use
from kvplan.measure.usage import Usage
from kvplan.report.lines import Paragraph, Part, line
from kvplan.report.page import Block, heading

# Mean held tokens are 18% below to 1% above the truth if no prefix is shared, because longer requests run longer
# (11 workloads of vLLM 0.33's own pages, tests/facts/usage_truth.jsonl); a shared prefix lowers the true value.
HELD_LOW, HELD_HIGH = 0.99, 1.22
FULL = 0.9  # fraction of a pool above which bursts are preempted; a margin, not a measurement
MARGIN = 1.25  # over the minimum that keeps up: busy four fifths of the time; a margin, not a measurement
IDLE = 0.5  # of its servers needed at most, where each is mostly idle
MOST_ROOM = 1000  # times the load, beyond which the exact number tells nothing
SHARED = 0.05  # fraction of cached prompt tokens above which the pool is assumed to hold them once


@dataclass(frozen=True, slots=True)
class Need:
    """Required multiple of today's servers, and what determines it."""

    low: float
    high: float
    by: Literal["queue", "memory"]
    text: str


def need(used: Usage, growth: float) -> Need | None:
    """Required capacity, or None if the time between the pages is unknown or it cannot be determined."""
    if used.arrival_rate is None or used.seconds is None or used.pool_used is None:
        return None
    if used.queue_grows and used.mean_running:
        served = used.ended / used.seconds
        factor = growth * used.arrival_rate / served
        return Need(factor, factor * MARGIN, "queue", f"{_span(factor, factor * MARGIN)} times the current servers")
    is_shared = (used.prefix_share or 0.0) > SHARED
    low = growth * used.pool_used * (0.0 if is_shared else HELD_LOW) / FULL
    high = growth * used.pool_used * HELD_HIGH / FULL
    times = f"at most {high:.2f}" if is_shared else _span(low, high)
    room = _room(low / growth, high / growth)
    text = f"room for {room} times the load" if high <= IDLE else f"{times} times the current servers"
    return Need(low, high, "memory", text)


def _span(low: float, high: float) -> str:
    return f"{low:.2f} to {high:.2f}"


def _room(low: float, high: float) -> str:
    """Return how many times the load fits on servers of which the load needs `low` to `high`."""
    if high * MOST_ROOM < 1:
        return f"over {MOST_ROOM:,}"
    least = int(1 / high)
    return f"{least:,} to {int(1 / low):,}" if low * MOST_ROOM >= 1 else f"at least {least:,}"


def first_line(used: Usage, growth: float) -> str:
    needed = need(used, growth)
    load = f" for {growth:g} times the load," if growth != 1 else ""
    if needed is None:
        why = (
            "the server restarted between the two /metrics pages"
            if used.restarted
            else "add --interval with the time between the /metrics pages"
        )
        return f"{used.ended:,} requests of {used.mean_prompt:,.0f} + {used.mean_output:,.0f} tokens completed; {why}"
    if needed.by == "queue":
        return (
            f"The server cannot keep up: {rate(used.arrival_rate)} arrive, {rate(used.ended / (used.seconds or 1))} "
            f"are served;{load} {needed.text} are enough"
        )
    in_use = f"with {share(used.pool_used)} of its KV cache in use"
    if needed.high <= IDLE:
        return f"The server is mostly idle, {in_use};{load} one is enough: by memory alone, it has {needed.text}"
    preempted = " but preempts requests" if used.preemptions > used.ended / 20 else ""
    return f"The server keeps up{preempted}, {in_use};{load} by memory alone, {needed.text} are enough"


def rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f} requests/s"


def share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f}%"


def number(value: float | None, unit: str = "", digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def rows(used: Usage) -> list[tuple[str, str]]:
    milliseconds = None if used.step_s is None else 1000 * used.step_s
    return [
        ("completed requests", f"{used.ended:,}"),
        ("arrivals", rate(used.arrival_rate)),
        ("mean prompt", number(used.mean_prompt, " tokens", 0)),
        ("mean output", number(used.mean_output, " tokens", 0)),
        ("output", number(used.output_rate, " tokens/s", 1)),
        ("prefix cache hits", share(used.prefix_share)),
        ("running, mean", number(used.mean_running)),
        ("waiting, mean", number(used.mean_waiting) + (", and growing" if used.queue_grows else "")),
        ("preemptions", f"{used.preemptions:,}"),
        ("time with a step running", share(used.time_used)),
        ("time per output token", number(milliseconds, " ms", 1)),
        ("time to first token", number(used.ttft_s, " s")),
        ("KV cache", "–" if used.pool_tokens is None else f"{used.pool_tokens:,} tokens"),
        ("KV cache in use, mean", share(used.pool_used) + " (true value up to 18% higher; less with shared prefixes)"),
    ]


def rightsize_lines(used: Usage, growth: float) -> list[Part]:
    """The answer, the measurements, and their limitations."""
    lines: list[Part] = [line(first_line(used, growth), "bold"), line(), Table.of(("measured", ""), rows(used), left=2)]
    return [*lines, line(), *(Paragraph("", text) for text in remarks(used))]


def remarks(used: Usage) -> Iterator[str]:
    if used.seconds is None:
        return
    if used.queue_grows and (used.pool_used or 0) < FULL / 2:
        yield (
            f"Requests wait while the KV cache has room: {used.mean_running:.0f} run at once. If the server allows no "
            "more, raise that limit before adding servers."
        )
    if used.preemptions > used.ended / 20:
        yield ("The KV cache is too small for the running requests: let fewer run at once or add memory.")
    if not used.queue_grows:
        yield (
            "This considers memory only. To check that fewer servers are fast enough: kvplan simulate MODEL --gpu GPU "
            f"--rate {used.arrival_rate:.2f} --prompt-tokens {used.mean_prompt:.0f} --output-tokens "
            f"{used.mean_output:.0f}"
        )


def rightsize_page(used: Usage, growth: float) -> Iterator[Block]:
    yield heading(3, first_line(used, growth))
    yield Table.of(("measured", "value"), rows(used), left=2)
    yield from remarks(used)


def rightsize_table(used: Usage) -> Table:
    """One row per figure."""
    document = rightsize_document(used, 1.0)
    values = [*document["workload"].items(), *document["use"].items()]
    return Table.of(("figure", "value"), values)


def rightsize_document(used: Usage, growth: float) -> RightsizeDocument:
    """Build kvplan/rightsize@1."""
    needed = need(used, growth)
    return {
        "schema": "kvplan/rightsize@1",
        "seconds": used.seconds,
        "restarted": used.restarted,
        "growth": growth,
        "workload": {
            "ended": used.ended,
            "mean_prompt_tokens": used.mean_prompt,
            "mean_output_tokens": used.mean_output,
            "arrivals_per_second": used.arrival_rate,
            "output_tokens_per_second": used.output_rate,
            "prefix_share": used.prefix_share,
        },
        "use": from_fields(Use, used, seconds_per_token=used.step_s, mean_ttft_seconds=used.ttft_s),
        "needed": None if needed is None else from_fields(Needed, needed),
        "answer": first_line(used, growth),
    }
