"""A simulation as a table, Markdown, CSV and JSON; its timeline and requests as CSV."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import dropwhile
from typing import Any, cast

from kvplan.core.records import from_fields
from kvplan.core.table import Markdown, Table, flattened, markdown_text, percent
from kvplan.core.units import duration as duration
from kvplan.core.units import plural
from kvplan.core.units import rate_text as rate_text
from kvplan.documents import simulation as typed
from kvplan.models.catalog import model_id
from kvplan.planning.users import num_gpus
from kvplan.report import formats
from kvplan.report.drawing import Figure, Svg
from kvplan.report.lines import Part, line
from kvplan.report.page import Block, bold
from kvplan.simulate.outcome import SimulationAnswer, Variant
from kvplan.simulate.ranges import coverage_remark, unseen_remark
from kvplan.simulate.records import METRICS, Metric
from kvplan.simulate.result import Result, Spread
from kvplan.simulate.runs import Run
from kvplan.simulate.slo import Kept
from kvplan.simulate.timeline import LEVELS

VariantRow = tuple[str, list[str]]


def over_time(answer: SimulationAnswer) -> list[Figure]:
    """Requests, the KV pool and first tokens over time; none without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    from kvplan.report.simulate_figures import sheets

    return [Svg("Over time", sheets(answer))]


# --- the table --------------------------------------------------------------------------------------------------------


def rows(answer: SimulationAnswer) -> list[VariantRow]:
    """(label, its text for each variant)."""
    return [*load_rows(answer), *time_rows(answer), *promise_rows(answer)]


def each(answer: SimulationAnswer, what: str, text: Callable[[Result], str]) -> VariantRow:
    return what, [text(variant.result) for variant in answer.variants]


def load_rows(answer: SimulationAnswer) -> list[VariantRow]:
    """Requests and the cache."""
    row, first = partial(each, answer), next((run.result for run in answer.variants if run.result.tiers), None)
    tiers = [
        row(f"tier {tier.name} hits", partial(tier_hits, number))
        for number, tier in enumerate(first.tiers if first is not None else ())
    ]
    return [
        row("running, mean / max", lambda run: f"{run.running_mean:,.1f} / {run.running_peak:,}"),
        row("waiting, mean / max", lambda run: f"{run.waiting_mean:,.1f} / {run.waiting_peak:,}"),
        row("KV cache in use, mean / max", lambda run: f"{percent(run.kv_usage_mean)} / {percent(run.kv_usage_peak)}"),
        row("KV fragmentation (empty slots)", lambda run: "-" if run.empty_slots is None else percent(run.empty_slots)),
        row("prefix cache hits", lambda run: percent(run.hit_rate)),
        *tiers,
        row("preemptions", lambda run: f"{run.preemptions:,} ({percent(run.preempted / max(1, run.finished))})"),
    ]


def time_rows(answer: SimulationAnswer) -> list[VariantRow]:
    """Latencies and rates."""
    row = partial(each, answer)

    def spread(metric: Metric) -> Callable[[Result], str]:
        def text(run: Result) -> str:
            spread: Spread = run.times[metric]
            return f"{duration(spread.p50)} / {duration(spread.p90)} / {duration(spread.p99)}"

        return text

    def between(metric: Metric) -> Callable[[Result], str]:
        def text(run: Result) -> str:
            spread: Spread = run.times[metric]
            return " / ".join(
                span(*answer.ranges.time(metric, value)) for value in (spread.p50, spread.p90, spread.p99)
            )

        return text

    def throughput(run: Result) -> str:
        low, high = rate_range(answer, run, run.output_tokens_per_s)
        likely = f"{run.output_tokens_per_s:,.0f}"
        return likely if low == high else f"{likely} ({low:,.0f}-{high:,.0f})"

    has_tiers = any(variant.result.tiers for variant in answer.variants)
    saved: VariantRow = (
        "time to first token saved, mean",
        [saved_text(answer, variant) for variant in answer.variants],
    )
    return [
        row("time to first token p50 / p90 / p99", spread("ttft")),
        row("  likely range", between("ttft")),
        *([saved] if has_tiers else []),
        row("time per output token", spread("tpot")),
        row("  likely range", between("tpot")),
        row("time in queue", spread("queue")),
        row("end-to-end latency", spread("latency")),
        row("  likely range", between("latency")),
        row("requests per second", lambda run: f"{run.requests_per_s:,.2f}"),
        row("output tokens per second", throughput),
        row("prefill tokens per second", lambda run: f"{run.prompt_tokens_per_s:,.0f}"),
        row("duration", lambda run: duration(run.seconds)),
    ]


def promise_rows(answer: SimulationAnswer) -> list[VariantRow]:
    """Rejected requests, targets, and the largest load that meets them."""
    table_rows: list[VariantRow] = []
    if any(variant.result.rejected or variant.result.failed for variant in answer.variants):
        table_rows.append(each(answer, "rejected (prompt too long)", lambda run: f"{run.rejected + run.failed:,}"))
    for number, promise in enumerate(answer.promises):
        table_rows.append(
            (
                f"{promise.name} at most {limit_text(answer.variants[0].outcomes[number])}",
                [kept_text(variant.outcomes[number]) for variant in answer.variants],
            )
        )
    if any(promise.metric is not None for promise in answer.promises):
        table_rows.append(("requests that meet every target", [good_text(variant) for variant in answer.variants]))
    if answer.variants[0].largest is not None:
        what = "largest number of users" if answer.by_users else "largest rate per second"
        table_rows.append((what, [largest_text(variant, users=answer.by_users) for variant in answer.variants]))
    return table_rows


def tier_hits(tier: int, run: Result) -> str:
    return percent(run.tiers[tier].hit_rate) if run.tiers else "-"


def good_text(variant: Variant) -> str:
    """Fraction of the requests within the targets, and their rate (goodput, as load generators count it)."""
    run, good = variant.result, variant.good or 0
    judged = run.judged + run.rejected + run.failed
    return f"{percent(good / max(1, judged))} ({rate_text(goodput(variant) or 0.0)}/s)"


def goodput(variant: Variant) -> float | None:
    if variant.good is None:
        return None
    return variant.good / variant.result.seconds if variant.result.seconds else 0.0


def verdict_line(answer: SimulationAnswer) -> str:
    """The answer in a sentence: whether the targets are met, or without targets the latency."""
    main, outcomes = answer.variants[0], answer.outcomes
    if main.result.queue_grows and not any(outcome.verdict == "broken" for outcome in outcomes):
        return queue_grows(answer)
    if not outcomes:
        return bounds_line(answer) if answer.is_bounded else figures_line(answer)
    broken = [outcome for outcome in outcomes if outcome.verdict == "broken"]
    close = [outcome for outcome in outcomes if outcome.verdict == "too close to call"]
    named = ", ".join(promise_text(outcome) for outcome in broken or close or outcomes)
    if broken:
        why = f" {queue_grows(answer)}" if main.result.queue_grows else ""
        return f"No: with {answer.how}, {named}.{best_load(answer, main)}{why}"
    if close:
        return f"Too close to call with {answer.how}: {named}.{best_load(answer, main)}"
    return f"Yes: with {answer.how}, {named}."


def promise_text(outcome: Kept) -> str:
    """ "ttft p99 is 0.3-1.4 s (target 2 s)"."""
    if outcome.value is None:
        return f"{outcome.promise.name} is not reached (target {limit_text(outcome)})"
    if outcome.low is None or outcome.high is None or outcome.low == outcome.high:
        return f"{outcome.promise.name} is {value_text(outcome, outcome.value)} (target {limit_text(outcome)})"
    return f"{outcome.promise.name} is {span(outcome.low, outcome.high)} (target {limit_text(outcome)})"


def best_load(answer: SimulationAnswer, main: Variant) -> str:
    largest = main.largest
    if largest is None:
        return ""
    if largest.keeps is None:
        return " No load tried meets the targets." if main.outcomes[0].verdict == "broken" else ""
    load = load_text(largest.keeps, users=answer.by_users)
    worst = answer.variants[-1].largest
    if answer.is_bounded and worst is not None and worst.keeps != largest.keeps:
        load = f"{load_text(worst.keeps or 0.0, users=answer.by_users)} to {load}"
    return f" The targets are likely met up to {load} {'users' if answer.by_users else 'requests/s'}."


def queue_grows(answer: SimulationAnswer) -> str:
    run = answer.variants[0].result
    come, served = (rate_text(float(f"{rate:.3g}")) for rate in (run.arrival_rate or 0.0, run.requests_per_s))
    return f"Overloaded: {come} requests/s arrive, {served} are served; the queue keeps growing."


def figures_line(answer: SimulationAnswer) -> str:
    run, ranges = answer.variants[0].result, answer.ranges
    first, slowest, token = (
        f"{name} {ranged(value, *ranges.time(metric, value))}"
        for name, metric, value in (
            ("TTFT p50", "ttft", run.times["ttft"].p50),
            ("p99", "ttft", run.times["ttft"].p99),
            ("TPOT p50", "tpot", run.times["tpot"].p50),
        )
    )
    low, high = rate_range(answer, run, run.output_tokens_per_s)
    tokens = f"{run.output_tokens_per_s:,.0f} output tokens/s"
    tokens += "" if low == high else f" ({low:,.0f}-{high:,.0f})"
    refused = run.rejected + run.failed
    lost = f"; {refused:,} of {run.num_requests:,} requests rejected" if refused else ""
    return f"With {answer.how}: {first}, {slowest}, {token}, {tokens}{lost}."


def bounds_line(answer: SimulationAnswer) -> str:
    """The figures from all drafts accepted to none."""
    best, worst = (answer.variants[place].result for place in (0, -1))

    def between(metric: Metric, share: str) -> str:
        low, high = (getattr(run.times[metric], share) for run in (best, worst))
        return span(answer.ranges.time(metric, low)[0], answer.ranges.time(metric, high)[1])

    low, _ = rate_range(answer, worst, worst.output_tokens_per_s)
    _, high = rate_range(answer, best, best.output_tokens_per_s)
    tokens = f"{low:,.0f}" if f"{low:,.0f}" == f"{high:,.0f}" else f"{low:,.0f}-{high:,.0f}"
    return (
        f"With {answer.how}: TTFT p50 {between('ttft', 'p50')}, p99 {between('ttft', 'p99')}, "
        f"TPOT p50 {between('tpot', 'p50')}, {tokens} output tokens/s."
    )


def ranged(value: float, low: float, high: float) -> str:
    """Format a time and its range in one unit, that of the upper end: "0.92 s (0.46-2.13 s)"."""
    if low == high:
        return duration(value)
    return f"{span(value, value, of=high)} ({span(low, high)})"


def ttft_saved(answer: SimulationAnswer, variant: Variant) -> float | None:
    """Mean reduction of the time to first token by the tiers, in seconds, or None for a run without them."""
    without = next((other.result for other in answer.variants if other.name == "without tiers"), None)
    if without is None or not variant.result.tiers:
        return None
    return without.times["ttft"].mean - variant.result.times["ttft"].mean


def saved_text(answer: SimulationAnswer, variant: Variant) -> str:
    saved = ttft_saved(answer, variant)
    if saved is None:
        return "-"
    return duration(saved) if saved >= 0 else f"-{duration(-saved)}"


def value_text(outcome: Kept, value: float) -> str:
    return percent(value) if outcome.promise.metric is None else duration(value)


def limit_text(outcome: Kept) -> str:
    return value_text(outcome, outcome.promise.limit)


def span(low: float, high: float, of: float | None = None) -> str:
    """Format a range of seconds: "22-61 ms", "0.4-1.3 s" in its upper end's unit; a single value in that of `of`."""
    if low == high and of is None:
        return duration(low)
    top = of or high
    unit, scale = ("ms", 1000.0) if top < 0.9995 else ("s", 1.0)
    digits = 2 if top * scale < 9.995 else 1 if top * scale < 99.95 and unit == "s" else 0
    ends = (low,) if low == high else (low, high)
    return f"{'-'.join(f'{end * scale:,.{digits}f}' for end in ends)} {unit}"


def rate_range(answer: SimulationAnswer, run: Result, value: float) -> tuple[float, float]:
    """(low, high) of a rate; if the server keeps up with arrivals, the rate is theirs."""
    if not answer.by_users and run.arrival_rate is not None and run.requests_per_s >= 0.95 * run.arrival_rate:
        return value, value
    return answer.ranges.rate(value, arrivals=None)


def kept_text(outcome: Kept) -> str:
    if outcome.value is None:
        return "not served MISSED"
    verdict = {"kept": "met", "broken": "MISSED"}.get(outcome.verdict, outcome.verdict)
    value = value_text(outcome, outcome.value)
    if outcome.low is None or outcome.high is None or outcome.low == outcome.high or verdict == "met":
        return f"{value} {verdict}"
    return f"{value} {verdict} ({span(outcome.low, outcome.high)})"


def largest_text(variant: Variant, *, users: bool) -> str:
    """The largest load that meets the targets, and the smallest tried that does not."""
    largest = variant.largest
    assert largest is not None
    if largest.keeps is None:
        return f"none ({load_text(largest.breaks or 0.0, users=users)} fails)"
    if largest.breaks is None:
        return "not found: too few requests"
    return f"{load_text(largest.keeps, users=users)} ({load_text(largest.breaks, users=users)} fails)"


def load_text(load: float, *, users: bool) -> str:
    return f"{load:,.0f}" if users else rate_text(float(f"{load:.3g}"))


def title(answer: SimulationAnswer) -> str:
    request, plan = answer.plan.request, answer.plan
    count = num_gpus(plan)
    where = request.gpu.name if count == 1 else f"{count} x {request.gpu.name}"
    return f"{request.spec.name} on {where}, {plan.capacity.max_model_len:,} tokens: {answer.load}"


def facts(answer: SimulationAnswer) -> list[tuple[str, str]]:
    plan, settings = answer.plan, answer.plan.settings
    pool = (
        f"{plan.capacity.num_blocks:,} blocks of {plural(plan.pool.block_size, 'token')}, "
        f"up to {settings.max_num_seqs:,} concurrent requests, {settings.max_num_batched_tokens:,} tokens per step"
    )
    return [("Pool", pool), ("Step", answer.step_time)]


# benchmarks/timing/bounds.py (TARGETS)
TARGET_ENDS = "A target's range leaves out the lowest 3 in 10 results and the highest 1 in 25."


def range_text(answer: SimulationAnswer) -> str:
    """How often ranges held on results of this kind, and what no result is like."""
    ranges = answer.ranges
    wider = f" {unseen_remark(ranges.unseen)}" if ranges.unseen else ""
    is_judged = ranges.targets and any(variant.outcomes for variant in answer.variants)
    ends = f" {TARGET_ENDS}" if is_judged else ""
    return f"{coverage_remark(ranges.coverage)}{ends}{wider}"


def figures_table(answer: SimulationAnswer) -> Table:
    """A row per figure, a column per variant."""
    names = ["", *(variant.name for variant in answer.variants)]
    return Table.of(names, ([what, *texts] for what, texts in rows(answer)))


def lines(answer: SimulationAnswer) -> list[Part]:
    return [
        line(verdict_line(answer), "bold"),
        line(range_text(answer)),
        line(title(answer)),
        line(),
        figures_table(answer),
        line(),
        *(line(f"{name:<6}{text}") for name, text in facts(answer)),
    ]


# --- other forms ------------------------------------------------------------------------------------------------------


def shapes(answer: SimulationAnswer, figures: Callable[[], Sequence[Figure]] = tuple) -> formats.CommandAnswer:
    servers = [answer.plan.request.release.label]
    return formats.CommandAnswer.of(answer, lines, document, metrics_table, page, lambda _: figures(), servers)


def page(answer: SimulationAnswer) -> list[Block]:
    below = "\n".join(f"{name}: {markdown_text(text)}  " for name, text in facts(answer))
    return [
        bold(verdict_line(answer)),
        Markdown(markdown_text(range_text(answer))),
        title(answer),
        figures_table(answer),
        Markdown(below),
    ]


def metrics_table(answer: SimulationAnswer) -> Table:
    """A row per figure and variant."""
    return Table.of(
        ("variant", "metric", "value"),
        (
            (variant.name, name, value)
            for variant in answer.variants
            for name, value in flattened(result_document(answer, variant), lists=False)
            if name != "name"
        ),
    )


def document(answer: SimulationAnswer) -> typed.SimulationDocument:
    """Build kvplan/simulation@1."""
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
            "coverage": answer.ranges.coverage,
        },
        "verdict": verdict_line(answer),
        "variants": [result_document(answer, variant) for variant in answer.variants],
    }


def result_document(answer: SimulationAnswer, variant: Variant) -> typed.Variant:
    run, largest = variant.result, variant.largest
    return {
        "name": variant.name,
        "requests": from_fields(typed.Requests, run, arrived=run.num_requests, good=variant.good),
        "seconds": run.seconds,
        "steps": run.steps,
        "times": cast("typed.Times", {metric: _spread(answer, metric, run) for metric in METRICS}),
        "running": {"mean": run.running_mean, "peak": run.running_peak},
        "waiting": {"mean": run.waiting_mean, "peak": run.waiting_peak},
        "kv_usage": {"mean": run.kv_usage_mean, "peak": run.kv_usage_peak},
        "empty_slots": run.empty_slots,
        "preemptions": run.preemptions,
        "prefix_cache": from_fields(typed.PrefixCache, run, looked_up=run.looked_up_tokens),
        "tiers": [from_fields(typed.Tier, tier) for tier in run.tiers],
        "ttft_saved": ttft_saved(answer, variant),
        "throughput": from_fields(
            typed.Throughput,
            run,
            requests_per_s_range=list(rate_range(answer, run, run.requests_per_s)),
            goodput_per_s=goodput(variant),
            output_tokens_per_s_range=list(rate_range(answer, run, run.output_tokens_per_s)),
        ),
        "slo": [
            from_fields(typed.Slo, row, promise=row.promise.name, limit=row.promise.limit, kept=row.is_kept)
            for row in variant.outcomes
        ],
        "largest": None if largest is None else from_fields(typed.Largest, largest),
    }


def _spread(answer: SimulationAnswer, metric: Metric, run: Result) -> typed.Spread:
    times, names = run.times[metric], ("mean", "p50", "p90", "p99")
    ends = {f"{name}_range": list(answer.ranges.time(metric, getattr(times, name))) for name in names}
    return from_fields(typed.Spread, times, **ends)


def timeline_table(runs: Sequence[tuple[int, Run]]) -> Table:
    """A row per server and time interval: means over the steps that began in it, each level's maximum, output tokens.

    runs  servers' numbers and their runs, one more after each failure; one run has no column `server`
    """
    is_fleet = len(runs) > 1
    names = [*(["server"] if is_fleet else []), "start_s"]
    names += [*(f"{name}_{kind}" for name in LEVELS for kind in ("mean", "most")), "output_tokens"]
    rows = list[list[Any]]()
    for server, run in runs:
        begins = list(dropwhile(lambda row: not any(row[1].peaks), enumerate(run.timeline.buckets)))
        for number, bucket in begins if is_fleet else enumerate(run.timeline.buckets):
            means = [total / bucket.seconds if bucket.seconds else 0.0 for total in bucket.sums]
            cells = [cell for pair in zip(means, bucket.peaks, strict=True) for cell in pair]
            rows.append([*([server] if is_fleet else []), number * run.timeline.width_s, *cells, bucket.tokens])
    return Table.of(names, rows)
