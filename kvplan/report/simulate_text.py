"""A simulation as a table, Markdown, CSV and JSON; its timeline and requests as CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvplan.core.table import Markdown, Table, markdown_text
from kvplan.documents.artifact import num_gpus
from kvplan.planning.flags import model_id
from kvplan.report import formats
from kvplan.report.lines import Part, line
from kvplan.report.page import Block, heading
from kvplan.simulate.loop import Simulation
from kvplan.simulate.outcome import Answer, Variant
from kvplan.simulate.records import Metric
from kvplan.simulate.result import Result, Spread
from kvplan.simulate.slo import Kept
from kvplan.simulate.timeline import LEVELS

if TYPE_CHECKING:
    from kvplan.documents import simulation as typed

Row = tuple[str, list[str]]


def duration(seconds: float) -> str:
    """ "0.4 ms", "35 ms", "1.28 s", "6 min 2 s", "1 h 2 min"."""
    if seconds < 0.01:
        return f"{seconds * 1000:.2f} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.995:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def rate_text(rate: float) -> str:
    """Three or four digits, never an exponent: "5.53", "1,000,000", "0.000001"."""
    if rate >= 1000:
        return f"{rate:,.0f}"
    return f"{rate:.4g}" if rate >= 1e-3 else f"{rate:.9f}".rstrip("0").rstrip(".")


def percent(share: float) -> str:
    return f"{share:.1%}"


# --- the table --------------------------------------------------------------------------------------------------------


def rows(answer: Answer) -> list[Row]:
    """(what, its text for each variant)."""
    results = [variant.result for variant in answer.variants]

    def each(what: str, text: Callable[[Result], str]) -> Row:
        return what, [text(one) for one in results]

    def spread(metric: Any) -> Callable[[Result], str]:
        def text(one: Result) -> str:
            found: Spread = one.times[metric]
            return f"{duration(found.p50)} / {duration(found.p90)} / {duration(found.p99)}"

        return text

    def between(metric: Any) -> Callable[[Result], str]:
        def text(one: Result) -> str:
            found: Spread = one.times[metric]
            return " / ".join(span(*answer.ranges.time(metric, value)) for value in (found.p50, found.p90, found.p99))

        return text

    def tokens_text(one: Result) -> str:
        low, high = rate_range(answer, one, one.output_tokens_per_s)
        likely = f"{one.output_tokens_per_s:,.0f}"
        return likely if low == high else f"{likely} ({low:,.0f}-{high:,.0f})"

    found = [
        each("running, mean / max", lambda one: f"{one.running_mean:,.1f} / {one.running_peak:,}"),
        each("waiting, mean / max", lambda one: f"{one.waiting_mean:,.1f} / {one.waiting_peak:,}"),
        each("KV cache in use, mean / max", lambda one: f"{percent(one.kv_usage_mean)} / {percent(one.kv_usage_peak)}"),
        each("allocated slots left empty", lambda one: "-" if one.empty_slots is None else percent(one.empty_slots)),
        each("prefix cache hits", lambda one: percent(one.hit_rate)),
        each("preemptions", lambda one: f"{one.preemptions:,} ({percent(one.preempted / max(1, one.finished))})"),
        each("time to first token p50 / p90 / p99", spread("ttft")),
        each("  likely range", between("ttft")),
        each("time per output token", spread("tpot")),
        each("  likely range", between("tpot")),
        each("time in queue", spread("queue")),
        each("end-to-end latency", spread("latency")),
        each("  likely range", between("latency")),
        each("requests per second", lambda one: f"{one.requests_per_s:,.2f}"),
        each("output tokens per second", tokens_text),
        each("prompt tokens computed per second", lambda one: f"{one.prompt_tokens_per_s:,.0f}"),
        each("duration", lambda one: duration(one.seconds)),
    ]
    for tier in range(max(len(one.tiers) for one in results)):
        name = next(one.tiers[tier].name for one in results if one.tiers)
        found.insert(
            5 + tier,
            each(f"tier {name} hits", lambda one, at=tier: percent(one.tiers[at].hit_rate) if one.tiers else "-"),  # type: ignore[misc]
        )
    if any(one.tiers for one in results):
        found.insert(
            8, ("time to first token saved, mean", [saved_text(answer, variant) for variant in answer.variants])
        )
    if any(one.rejected or one.failed for one in results):
        found.append(each("rejected as too long", lambda one: f"{one.rejected + one.failed:,}"))
    for at, promise in enumerate(answer.promises):
        found.append(
            (
                f"{promise.name} at most {limit_text(answer.variants[0].kept[at])}",
                [kept_text(variant.kept[at]) for variant in answer.variants],
            )
        )
    if any(promise.metric is not None for promise in answer.promises):
        found.append(("requests that meet every target", [good_text(variant) for variant in answer.variants]))
    if answer.variants[0].largest is not None:
        what = "largest number of users" if answer.by_users else "largest rate per second"
        found.append((what, [largest_text(variant, users=answer.by_users) for variant in answer.variants]))
    return found


def good_text(variant: Variant) -> str:
    """Their share and, as load generators count goodput, how many per second."""
    one, good = variant.result, variant.good or 0
    judged = one.judged + one.rejected + one.failed
    return f"{percent(good / max(1, judged))} ({rate_text(goodput(variant) or 0.0)}/s)"


def goodput(variant: Variant) -> float | None:
    if variant.good is None:
        return None
    return variant.good / variant.result.seconds if variant.result.seconds else 0.0


def verdict_line(answer: Answer) -> str:
    """The answer in a sentence: whether the targets are met, else how fast the answers come."""
    main = answer.variants[0]
    if main.result.queue_grows and not any(kept.verdict == "broken" for kept in main.kept):
        return queue_grows(answer)
    if not main.kept:
        return figures_line(answer)
    broken = [kept for kept in main.kept if kept.verdict == "broken"]
    close = [kept for kept in main.kept if kept.verdict == "too close to call"]
    named = ", ".join(promise_text(kept) for kept in broken or close or main.kept)
    if broken:
        why = f" {queue_grows(answer)}" if main.result.queue_grows else ""
        return f"No: with {answer.how}, {named}.{best_load(answer, main)}{why}"
    if close:
        return f"Too close to call with {answer.how}: {named}.{best_load(answer, main)}"
    return f"Yes: with {answer.how}, {named}."


def promise_text(kept: Kept) -> str:
    """ "ttft p99 is 0.3-1.4 s (target 2 s)"."""
    if kept.value is None:
        return f"{kept.promise.name} is not reached (target {limit_text(kept)})"
    if kept.low is None or kept.high is None or kept.low == kept.high:
        return f"{kept.promise.name} is {value_text(kept, kept.value)} (target {limit_text(kept)})"
    return f"{kept.promise.name} is {span(kept.low, kept.high)} (target {limit_text(kept)})"


def best_load(answer: Answer, main: Variant) -> str:
    largest = main.largest
    if largest is None:
        return ""
    if largest.keeps is None:
        return " No load that was tried meets the targets." if main.kept[0].verdict == "broken" else ""
    load = load_text(largest.keeps, users=answer.by_users)
    return f" The targets are likely met up to {load} {'users' if answer.by_users else 'requests/s'}."


def queue_grows(answer: Answer) -> str:
    one = answer.variants[0].result
    come, served = (rate_text(float(f"{rate:.3g}")) for rate in (one.arrival_rate or 0.0, one.requests_per_s))
    return f"The queue grows without end: {come} requests/s come and {served} are served."


def figures_line(answer: Answer) -> str:
    one, ranges = answer.variants[0].result, answer.ranges
    first, token = (
        f"{duration(one.times[metric].p50)} ({span(*ranges.time(metric, one.times[metric].p50))})"
        for metric in ("ttft", "tpot")
    )
    low, high = rate_range(answer, one, one.output_tokens_per_s)
    tokens = f"{one.output_tokens_per_s:,.0f} output tokens/s"
    tokens += "" if low == high else f" ({low:,.0f}-{high:,.0f})"
    return f"With {answer.how}: first token after {first}, then {token} per token (medians), {tokens}."


def ttft_saved(answer: Answer, variant: Variant) -> float | None:
    """Seconds by which the tiers bring the first token forward, on average; None for a run without them."""
    without = next((other.result for other in answer.variants if other.name == "without tiers"), None)
    if without is None or not variant.result.tiers:
        return None
    return without.times["ttft"].mean - variant.result.times["ttft"].mean


def saved_text(answer: Answer, variant: Variant) -> str:
    saved = ttft_saved(answer, variant)
    if saved is None:
        return "-"
    return duration(saved) if saved >= 0 else f"-{duration(-saved)}"


def value_text(kept: Kept, value: float) -> str:
    return percent(value) if kept.promise.metric is None else duration(value)


def limit_text(kept: Kept) -> str:
    return value_text(kept, kept.promise.limit)


def span(low: float, high: float) -> str:
    """A range of seconds: "22-61 ms", "0.4-1.3 s" in the unit of its upper end."""
    if low == high:
        return duration(low)
    unit, scale = ("ms", 1000.0) if high < 0.9995 else ("s", 1.0)
    digits = 2 if high * scale < 9.995 else 1 if high * scale < 99.95 and unit == "s" else 0
    return f"{low * scale:,.{digits}f}-{high * scale:,.{digits}f} {unit}"


def rate_range(answer: Answer, one: Result, value: float) -> tuple[float, float]:
    """Low and high of a rate; where the server answers as many as come, it gives what they ask for."""
    if not answer.by_users and one.arrival_rate is not None and one.requests_per_s >= 0.95 * one.arrival_rate:
        return value, value
    return answer.ranges.rate(value, arrivals=None)


def kept_text(kept: Kept) -> str:
    if kept.value is None:
        return "not served MISSED"
    verdict = kept.verdict
    shown = value_text(kept, kept.value)
    if kept.low is None or kept.high is None or kept.low == kept.high or verdict == "kept":
        return f"{shown} {'MISSED' if verdict == 'broken' else verdict}"
    return f"{shown} {'MISSED' if verdict == 'broken' else verdict} ({span(kept.low, kept.high)})"


def largest_text(variant: Variant, *, users: bool) -> str:
    """The largest load that keeps the promises, and the smallest tried that does not."""
    largest = variant.largest
    assert largest is not None
    if largest.keeps is None:
        return f"none ({load_text(largest.breaks or 0.0, users=users)} fails)"
    if largest.breaks is None:
        return "too few requests to find it"
    return f"{load_text(largest.keeps, users=users)} ({load_text(largest.breaks, users=users)} fails)"


def load_text(load: float, *, users: bool) -> str:
    return f"{load:,.0f}" if users else rate_text(float(f"{load:.3g}"))


def title(answer: Answer) -> str:
    request, plan = answer.plan.request, answer.plan
    count = num_gpus(plan)
    where = request.gpu.name if count == 1 else f"{count} x {request.gpu.name}"
    return f"{request.spec.name} on {where}, {plan.capacity.max_model_len:,} tokens: {answer.load}"


def facts(answer: Answer) -> list[tuple[str, str]]:
    plan, settings = answer.plan, answer.plan.settings
    pool = (
        f"{plan.capacity.num_blocks:,} blocks of {plan.pool.block_size} tokens, up to {settings.max_num_seqs:,} "
        f"concurrent requests, {settings.max_num_batched_tokens:,} tokens per step"
    )
    unseen = answer.ranges.unseen
    like = (
        f"wider, because no published result has {' or '.join(unseen)}" if unseen else "covers 5 in 6 published results"
    )
    return [("Pool", pool), ("Step", answer.step_time), ("Range", f"{like} (docs/accuracy.md)")]


def figures_table(answer: Answer) -> Table:
    """A row for each figure, a column for each variant."""
    names = ["", *(variant.name for variant in answer.variants)]
    return Table.of(names, ([what, *texts] for what, texts in rows(answer)))


def lines(answer: Answer) -> list[Part]:
    return [
        line(verdict_line(answer), "bold"),
        line(title(answer)),
        line(),
        figures_table(answer),
        line(),
        *(line(f"{name:<6}{text}") for name, text in facts(answer)),
    ]


# --- other forms ------------------------------------------------------------------------------------------------------


def shapes(answer: Answer) -> formats.Answer:
    return formats.Answer(
        lambda _: lines(answer), lambda: document(answer), lambda: metrics_table(answer), lambda: page(answer)
    )


def page(answer: Answer) -> list[Block]:
    below = "\n".join(f"{name}: {markdown_text(text)}  " for name, text in facts(answer))
    return [
        heading(2, title(answer)),
        Markdown(markdown_text(verdict_line(answer))),
        figures_table(answer),
        Markdown(below),
    ]


def metrics_table(answer: Answer) -> Table:
    """A row per figure and variant."""
    return Table.of(
        ("variant", "metric", "value"),
        (
            (variant.name, name, value)
            for variant in answer.variants
            for name, value in flat(result_document(answer, variant))
        ),
    )


def flat(document: Mapping[str, object], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        elif not isinstance(value, list) and key != "name":
            yield f"{before}{key}", value


def document(answer: Answer) -> typed.SimulationDocument:
    """kvplan/simulation@1."""
    plan = answer.plan
    return {
        "schema": "kvplan/simulation@1",
        "inputs": {
            "model": plan.request.spec.name,
            "id": model_id(plan.request.spec),
            "engine": plan.request.release.label,
            "gpu": plan.request.gpu.name,
            "num_gpus": num_gpus(plan),
            "max_model_len": plan.capacity.max_model_len,
            "num_blocks": plan.capacity.num_blocks,
            "block_size": plan.pool.block_size,
            "max_num_seqs": plan.settings.max_num_seqs,
            "max_num_batched_tokens": plan.settings.max_num_batched_tokens,
            "load": answer.load,
            "step_time": answer.step_time,
            "unseen": list(answer.ranges.unseen),
        },
        "verdict": verdict_line(answer),
        "variants": [result_document(answer, variant) for variant in answer.variants],
    }


def result_document(answer: Answer, variant: Variant) -> typed.Variant:
    one, largest = variant.result, variant.largest
    return {
        "name": variant.name,
        "requests": {
            "arrived": one.num_requests,
            "finished": one.finished,
            "judged": one.judged,
            "rejected": one.rejected,
            "failed": one.failed,
            "preempted": one.preempted,
            "arrival_rate": one.arrival_rate,
            "queue_grows": one.queue_grows,
            "good": variant.good,
        },
        "seconds": one.seconds,
        "steps": one.steps,
        "times": {
            "ttft": _spread(answer, "ttft", one),
            "tpot": _spread(answer, "tpot", one),
            "queue": _spread(answer, "queue", one),
            "latency": _spread(answer, "latency", one),
        },
        "running": {"mean": one.running_mean, "peak": one.running_peak},
        "waiting": {"mean": one.waiting_mean, "peak": one.waiting_peak},
        "kv_usage": {"mean": one.kv_usage_mean, "peak": one.kv_usage_peak},
        "empty_slots": one.empty_slots,
        "preemptions": one.preemptions,
        "prefix_cache": {"hit_rate": one.hit_rate, "hit_tokens": one.hit_tokens, "looked_up": one.looked_up_tokens},
        "tiers": [{"name": tier.name, "hit_rate": tier.hit_rate, "hit_tokens": tier.hit_tokens} for tier in one.tiers],
        "ttft_saved": ttft_saved(answer, variant),
        "throughput": {
            "requests_per_s": one.requests_per_s,
            "output_tokens_per_s": one.output_tokens_per_s,
            "prompt_tokens_per_s": one.prompt_tokens_per_s,
            "requests_per_s_range": list(rate_range(answer, one, one.requests_per_s)),
            "goodput_per_s": goodput(variant),
            "output_tokens_per_s_range": list(rate_range(answer, one, one.output_tokens_per_s)),
        },
        "slo": [
            {
                "promise": kept.promise.name,
                "limit": kept.promise.limit,
                "value": kept.value,
                "kept": kept.is_kept,
                "low": kept.low,
                "high": kept.high,
                "verdict": kept.verdict,
            }
            for kept in variant.kept
        ],
        "largest": None
        if largest is None
        else {"keeps": largest.keeps, "breaks": largest.breaks, "runs": largest.runs},
    }


def _spread(answer: Answer, metric: Metric, one: Result) -> typed.Spread:
    times, ranges = one.times[metric], answer.ranges
    return {
        "mean": times.mean,
        "p50": times.p50,
        "p90": times.p90,
        "p99": times.p99,
        "mean_range": list(ranges.time(metric, times.mean)),
        "p50_range": list(ranges.time(metric, times.p50)),
        "p90_range": list(ranges.time(metric, times.p90)),
        "p99_range": list(ranges.time(metric, times.p99)),
    }


def timeline_table(simulation: Simulation) -> Table:
    """A row per stretch of time: averages of the steps that began in it, the highest of each, tokens given."""
    names = ["start_s", *(f"{name}_{kind}" for name in LEVELS for kind in ("mean", "most")), "output_tokens"]
    timeline, rows = simulation.timeline, list[list[Any]]()
    for number, bucket in enumerate(timeline.buckets):
        means = [total / bucket.seconds if bucket.seconds else 0.0 for total in bucket.sums]
        cells = [cell for pair in zip(means, bucket.peaks, strict=True) for cell in pair]
        rows.append([number * timeline.width_s, *cells, bucket.tokens])
    return Table.of(names, rows)


def requests_table(simulation: Simulation) -> Table:
    records = simulation.records
    names = (
        "number", "arrival_s", "admitted_s", "first_token_s", "ended_s", "prompt_tokens", "output_tokens",
        "cached_tokens", "loaded_tokens", "preemptions",
    )  # fmt: skip
    rows = zip(
        records.number, records.arrival, records.admitted, records.first_token, records.ended, records.prompt,
        records.output, records.cached, records.loaded, records.preemptions, strict=True,
    )  # fmt: skip
    return Table.of(names, rows)
