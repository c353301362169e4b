"""Sentences of a report: a run's result, why it is incomplete, and what each figure shows."""

import re
from collections.abc import Sequence

from kvplan.core.table import Table, Value, text, words
from kvplan.measure.reconcile import Reconciliation, sums
from kvplan.measure.run_types import Sample
from kvplan.measure.rundir import BASELINES, Run
from kvplan.report.run_record import having, memory_key, number, numbers, reading, usable_blocks
from kvplan.servers.logs.measurement import ComponentRow


def answer(run: Run, model: str, device: str, memory: Reconciliation | None, tables: dict[str, Table]) -> str:
    """What fits and how far the prediction was off, in one sentence."""
    size = number(run.inputs, "tensor_parallel_size") or 1
    where = device if size == 1 else f"{device}, rank 0 of {size:,}"  # the one rank that writes a run
    if memory is None:
        why = "failed to start" if run.status == "failed" else "ended before its memory was measured"
        return f"{model} on {where} {why}: there is nothing to compare."
    return f"{model} on {where}: {capacity_text(run, tables)}{accuracy(memory)}."


def capacity_text(run: Run, tables: dict[str, Table]) -> str:
    """Number of requests of the run's own context that the pool holds."""
    own = run.manifest["inputs"]["max_model_len"]
    contexts = tables["contexts"].rows if "contexts" in tables else ()
    requests = next((row[-1] for row in contexts if row[0] == own), None)
    if requests is None:
        return ""
    size = text(run.manifest["memory"]["kv_cache"], "bytes")
    peak = number(run.results, "most_running")
    shorter = f" ({peak:,.0f} ran at once while they were shorter)" if peak and peak > int(requests) else ""
    return f"the KV pool of {size} holds {plural(requests, 'request')} of {own:,} tokens{shorter}; "


def accuracy(memory: Reconciliation) -> str:
    rows = {row.component: row for row in memory.rows}
    return (
        f"predicted against measured, the weights are {deviation(rows['weights'])}, the KV cache is "
        f"{deviation(rows['kv_cache'])}, and the predicted rows together are {deviation(memory.total)}"
    )


def deviation(row: ComponentRow) -> str:
    """Difference between predicted and measured bytes, with the tables' sign: "exact", "3 MiB (0.3%) above"."""
    if row.error is None or row.relative is None:
        return "not comparable"
    if row.error == 0:
        return "exact"
    side = "above" if row.error > 0 else "below"
    return f"{text(abs(row.error), 'bytes')} ({text(abs(row.relative), 'share')}) {side}"


def plural(count: Value, noun: str) -> str:
    return f"{text(count, 'count')} {noun}{'' if count == 1 else 's'}"


def banner(run: Run, samples: Sequence[Sample]) -> str | None:
    """One sentence on an incomplete run, or None."""
    last = f" The last sample was taken {text(samples[-1]['t'], 's')} after it began." if samples else ""
    cause = f": {run.cause}" if run.cause else ""
    match run.status:
        case "complete":
            return None
        case "running":
            return f"This run has not ended: the report shows what it has measured so far.{last}"
        case "partial" if run.recovered:
            return f"Recovered: this run did not end by itself; the report shows what it had measured.{last}"
        case "partial":
            return f"This run ended early{cause}.{last}"
        case "failed":
            return f"This run failed to start{cause}.{last}"


# --- what figures show ------------------------------------------------------------------------------------------------


def findings(
    run: Run, samples: Sequence[Sample], memory: Reconciliation | None, tables: dict[str, Table]
) -> dict[str, str]:
    """What each figure shows, as a sentence, by the figure's name."""
    sentences = {
        "memory": memory_finding(memory),
        "sums": "" if memory is None else " ".join(words_in(sentence) for sentence in sums(memory)),
        "over_time": peak_finding(run, samples),
        "kv": kv_finding(run, samples),
        "throughput": throughput_finding(run),
        "gpu": gpu_finding(samples),
        "contexts": contexts_finding(run, tables.get("contexts")),
        "outside": outside_finding(tables.get("outside"), run),
        "pool": pool_finding(tables.get("pool")),
        "allocators": allocators_finding(tables.get("allocators")),
    }
    return {name: sentence for name, sentence in sentences.items() if sentence}


def words_in(sentence: str) -> str:
    """Rename components as in the tables."""
    return re.sub(r"\w*_\w*", lambda name: words(name[0]), sentence)


def memory_finding(memory: Reconciliation | None) -> str:
    if memory is None:
        return ""
    rows = [row for row in memory.rows if row.error is not None and row.component != "unattributed"]
    exact = [words(row.component) for row in rows if row.error == 0 and row.measured]
    sentences = [f"Exact: {', '.join(exact)}."] if exact else []
    worst = max(rows, key=lambda row: abs(row.error or 0))
    if worst.error:
        sentences.append(f"Furthest off: {words(worst.component)}, predicted {deviation(worst)}.")
    remainder = sum(row.size for row in memory.rows if row.component == "unattributed")
    if remainder > 0:
        sentences.append(f"{text(remainder, 'bytes')} of what the device reports are not attributed.")
    elif remainder < 0:
        sentences.append(f"The rows are {text(-remainder, 'bytes')} more than the device reports.")
    return " ".join(sentences)


def peak_finding(run: Run, samples: Sequence[Sample]) -> str:
    key = memory_key(run)
    have = having(samples, key)
    if not have:
        return ""
    peak = max(have, key=lambda sample: reading(sample, key))
    what = "resident memory" if key == "rss" else "device memory in use"
    when = f"{text(peak['t'], 's')} after the start, in the stage {peak.get('stage')}"
    others = numbers((sample for sample in have if sample.get("stage") not in BASELINES), key)
    own = ""
    if peak.get("stage") in BASELINES and others:
        own = f"; the figure compared with the plan excludes that stage: {text(max(others), 'bytes')}"
    return f"Most {what}: {text(reading(peak, key), 'bytes')}, {when}{own}."


def kv_finding(run: Run, samples: Sequence[Sample]) -> str:
    """Peak of the samples and of the engine's per-step counters: steps run between two samples."""
    own = [sample for sample in samples if sample.get("stage") not in BASELINES]
    results = run.results
    used = numbers([*own, results.get("densest") or {}], "num_used_blocks")
    if not used:
        return ""
    usable = usable_blocks(run)
    of = f" of {usable:,} ({text(max(used) / usable, 'share')})" if usable else ""
    preemptions = max(numbers([*own, results.get("stats") or {}], "num_preemptions"), default=0)
    often = "no request was preempted" if not preemptions else f"requests were preempted {plural(preemptions, 'time')}"
    return f"At most {max(used):,} blocks{of} were in use; {often}."


def throughput_finding(run: Run) -> str:
    results = run.results
    rate, seconds = number(results, "output_tokens_per_s"), number(results, "seconds")
    if rate is None or seconds is None:
        return ""
    tokens = number(results.get("stats") or {}, "generation_tokens")
    total_text = "" if tokens is None else f"{tokens:,} tokens in {text(seconds, 's')}: "
    return f"{total_text}{text(rate, 'tokens/s')} of output on average, prompts included in the time."


def gpu_finding(samples: Sequence[Sample]) -> str:
    power, clocks = numbers(samples, "power_w"), numbers(samples, "sm_clock_mhz")
    parts = [f"The GPU drew at most {text(max(power), 'W')}."] if power else []
    span = dict.fromkeys(text(clock, "count") for clock in (min(clocks), max(clocks))) if clocks else ()
    parts += [f"Its SM clock ran at {' to '.join(span)} MHz."] if clocks else []
    return " ".join(parts)


def contexts_finding(run: Run, table: Table | None) -> str:
    if table is None:
        return ""
    max_seqs = run.manifest["inputs"]["max_num_seqs"]
    longest = max(int(row[0]) for row in table.rows if isinstance(row[0], int))
    return (
        f"The longest request the pool holds alone has {longest:,} tokens. The scheduler of this run was limited to "
        f"at most {plural(max_seqs, 'request')} at once; the table counts blocks only."
    )


def outside_finding(table: Table | None, run: Run) -> str:
    if table is None:
        return ""
    if run.manifest.get("device") != "cpu":
        return "No sum of the device's memory contains these."
    return "On a CPU the host memory that is in use is resident too: above it is part of what is not attributed."


def pool_finding(table: Table | None) -> str:
    if table is None or not any(row[0] == "kv_bytes_per_token" and row[2] is not None for row in table.rows):
        return ""
    return "Measured KV bytes per token: allocated blocks, with their empty slots, divided by the tokens in them."


def allocators_finding(table: Table | None) -> str:
    if table is None:
        return ""
    own, *others = table.rows
    counts = [f"{other[0]} ones {text(other[1], 'count')}" for other in others]
    ran = f"In the same pool, {own[0]} blocks ran {plural(own[1], 'request')} at once and {' and '.join(counts)}"
    if any(row[3] is None for row in table.rows):
        return f"{ran}."
    shares = " and ".join(text(row[3], "share") for row in table.rows)
    return f"{ran}; {shares} of the allocated slots were empty."
