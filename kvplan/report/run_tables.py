"""The tables that a report shows of one run."""

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from kvplan.core.table import BY_ROW, UNIT, Column, Table, Value
from kvplan.measure.reconcile import Reconciliation
from kvplan.measure.run_capacity import fragmentation
from kvplan.measure.run_types import Sample, Served
from kvplan.measure.rundir import Run
from kvplan.report.run_record import Stage, number, numbers

TIMELINE_ROWS = 40
# What a sample may hold, in the order of columns, with its unit.
MEASURES = {
    "device_used": "bytes",
    "process_used": "bytes",
    "torch_allocated": "bytes",
    "torch_reserved": "bytes",
    "rss": "bytes",
    "num_used_blocks": "count",
    "num_kv_tokens": "count",
    "num_filled_slots": "count",
    "num_requests_running": "count",
    "num_requests_waiting": "count",
    "num_preemptions": "count",
    "prompt_tokens": "count",
    "generation_tokens": "count",
    "gpu_utilization": "share",
    "power_w": "W",
    "sm_clock_mhz": "MHz",
    "memory_clock_mhz": "MHz",
}
ENGINE_PEAKS = ("num_used_blocks", "num_requests_running")  # of PEAKS, those that a step's end sets
PEAKS = (
    "device_used", "process_used", "torch_allocated", "torch_reserved", "rss", "num_used_blocks",
    "num_requests_running", "power_w",
)  # fmt: skip
UNITS_OF_FACTS = {
    "total": "bytes",
    "host_memory": "bytes",
    "duration_s": "s",
    "gpu_memory_utilization": "share",
    "prompt_tokens": "tokens",
    "output_tokens": "tokens",
    "longest": "tokens",
    "shared_prefix": "tokens",
    "block_size": "tokens",
    "max_model_len": "tokens",
    "max_num_batched_tokens": "tokens",
    "max_num_seqs": "requests",
    "num_requests": "requests",
    "num_blocks": "blocks",
    "max_blocks": "blocks",
}
FACT_NAMES = {"total": "memory_given", "longest": "longest_request", "load_format": "weights_from"}


def memory_table(memory: Reconciliation | None) -> Table:
    columns = (
        Column("component"), Column("predicted", "bytes"), Column("measured", "bytes"), Column("relative", "relative"),
        Column("error", "error"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    if memory is not None:
        both = (*memory.rows, memory.total)
        rows = [(row.component, row.predicted, row.measured, row.relative, row.error) for row in both]
        sizes = {"reported": memory.reported, "not_reached_again": memory.unreached, "held_before": memory.held_before}
        rows += [(name, None, size, None, None) for name, size in sizes.items() if size or name == "reported"]
    return Table("memory", "Memory, predicted and measured", columns, tuple(rows))


def pool_table(memory: Reconciliation | None) -> Table:
    columns = (Column("name"), Column("predicted", BY_ROW), Column("measured", BY_ROW), Column(UNIT))
    capacity = () if memory is None else memory.capacity
    rows = tuple((row.component, row.predicted, row.measured, row.unit) for row in capacity)
    return Table("pool", "The KV pool", columns, rows)


def allocators_table(run: Run) -> Table:
    """The same workload in the same pool, by allocator; empty where only one ran."""
    columns = (
        Column("allocator"), Column("most_running", "count"), Column("output_tokens_per_s", "tokens/s"),
        Column("allocated_but_unused", "share"), Column("preemptions", "count"), Column("finished", "count"),
        Column("seconds", "s"),
    )  # fmt: skip
    results = run.results
    other = results.get("baseline")
    served: list[tuple[str, Served]] = [(run.engine.get("allocator", "paged"), results)]
    served += [(str(other.get("allocator")), other)] if other else []
    rows = tuple(allocator_row(run, name, each) for name, each in served)
    title = " beside ".join(name for name, _ in served).capitalize()
    return Table("allocators", title, columns, rows if other else ())


def allocator_row(run: Run, name: str, results: Served) -> tuple[Value, ...]:
    fragments = fragmentation(run, results)
    return (
        name,
        number(results, "most_running"),
        number(results, "output_tokens_per_s"),
        None if fragments is None else fragments.waste,
        number(results.get("stats") or {}, "num_preemptions"),
        number(results, "num_finished"),
        number(results, "seconds"),
    )


def stages_table(run: Run, samples: Sequence[Sample], stages: Sequence[Stage]) -> Table:
    """Per stage: how often and how long, and the largest of each figure that was sampled.

    A stage is named before its step runs: where no step ended in it, what the engine says is of the stage before.
    """
    recorded = run.peaks
    have = [key for key in PEAKS if numbers(samples, key) or any(key in peaks for peaks in recorded.values())]
    most_of = (Column(f"most_{key}", MEASURES[key]) for key in have)
    columns = (Column("stage"), Column("times", "count"), Column("begins", "s"), Column("lasts", "s"), *most_of)
    rows: list[tuple[Value, ...]] = []
    for name in dict.fromkeys(stage.name for stage in stages) if samples or recorded else ():
        spans = [stage for stage in stages if stage.name == name]
        lasts = round(sum(stage.end - stage.start for stage in spans), 6)
        inside = [sample for sample in samples if sample.get("stage") == name]
        unknown = ENGINE_PEAKS if len(set(numbers(inside, "num_steps"))) == 1 else ()
        both = [*inside, recorded.get(name) or {}]
        most = [None if key in unknown else max(numbers(both, key), default=None) for key in have]
        rows.append((name, len(spans), spans[0].start, lasts, *most))
    return Table("stages", "Stages", columns, tuple(rows))


def timeline_table(samples: Sequence[Sample]) -> Table:
    """The last sample of each of TIMELINE_ROWS equal stretches of the run; samples.jsonl holds them all."""
    have = [key for key in MEASURES if numbers(samples, key)]
    columns = (Column("at", "s"), Column("stage"), *(Column(key, MEASURES[key]) for key in have))
    last: dict[int, Sample] = {}
    if samples:
        start, span = samples[0]["t"], max(samples[-1]["t"] - samples[0]["t"], 1e-9)
        for sample in samples:
            last[min(TIMELINE_ROWS - 1, int((sample["t"] - start) / span * TIMELINE_ROWS))] = sample
    rows = tuple(
        (sample["t"], str(sample.get("stage")), *(number(sample, key) for key in have)) for sample in last.values()
    )
    return Table("timeline", "Over time", columns, rows if have else ())


# --- what the run was -------------------------------------------------------------------------------------------------


def run_table(run: Run, model: str, device: str) -> Table:
    source = str(run.model.get("source") or "")
    argv = run.environment.get("argv")
    command = f"kvplan {shlex.join(str(word) for word in argv)}" if isinstance(argv, list) else None
    facts: list[tuple[str, Value, str]] = [
        ("model", model, "text"),
        ("source", source or None, "text"),
        ("device", device, "text"),
        ("status", run.status, "text"),
        described("cause", run.cause),
        ("directory", str(run.path), "text"),
        described("started", run.manifest.get("started_utc")),
        described("ended", run.manifest.get("finished_utc")),
        ("command", command, "text"),
    ]
    facts += [described(name, value) for name, value in (run.manifest.get("workload") or {}).items()]
    facts += [described(name, value) for name, value in run.inputs.items()]
    facts += [described(name, run.engine.get(name)) for name in ("allocator", "load_format", "seed")]
    return facts_table("run", "The run", facts)


def environment_table(run: Run) -> Table:
    environment = run.environment
    names = ("gpu", "driver", "cuda", "kvplan", "commit", "python", "platform")
    facts: list[tuple[str, Value, str]] = [described(name, environment.get(name)) for name in names]
    facts += [described(str(name), value) for name, value in (environment.get("packages") or {}).items()]
    facts += [described(name, environment.get(name)) for name in ("cpu_cores", "torch_threads", "host_memory")]
    return facts_table("environment", "Environment", facts)


def described(name: str, value: Any) -> tuple[str, Value, str]:
    """A fact of the manifest as (name, value, unit); what is neither number nor text is written as text."""
    label = FACT_NAMES.get(name, name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return label, value, UNITS_OF_FACTS.get(name, "count")
    return label, str(value), "text"


def facts_table(name: str, title: str, facts: Iterable[tuple[str, Value, str]]) -> Table:
    rows = tuple(fact for fact in facts if fact[1] is not None)
    return Table(name, title, (Column("name"), Column("value", BY_ROW), Column(UNIT)), rows)
