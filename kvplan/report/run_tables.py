"""Tables of one run in a report."""

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from kvplan.core.table import BY_ROW, UNIT, Column, Table, Value
from kvplan.measure.reconcile import Reconciliation
from kvplan.measure.run_capacity import baselines, fragmentation
from kvplan.measure.run_types import Sample, ServedFigures
from kvplan.measure.rundir import Run
from kvplan.measure.techniques import savings
from kvplan.report.run_record import Stage, number, numbers

TIMELINE_ROWS = 40
# Columns of a sample, in order, with their units.
MEASURES = {
    **dict.fromkeys(("device_used", "process_used", "torch_allocated", "torch_reserved", "rss"), "bytes"),
    **dict.fromkeys(
        (
            "num_used_blocks", "num_kv_tokens", "num_filled_slots", "num_requests_running", "num_requests_waiting",
            "num_preemptions", "prompt_tokens", "generation_tokens",
        ),
        "count",
    ),
    "gpu_utilization": "share", "power_w": "W", "sm_clock_mhz": "MHz", "memory_clock_mhz": "MHz",
}  # fmt: skip
ENGINE_PEAKS = ("num_used_blocks", "num_requests_running")  # those of PEAKS that the end of a step sets
PEAKS = (
    "device_used", "process_used", "torch_allocated", "torch_reserved", "rss", "num_used_blocks",
    "num_requests_running", "power_w",
)  # fmt: skip
TOKENS = (
    "prompt_tokens", "output_tokens", "longest", "shared_prefix", "block_size", "max_model_len",
    "max_num_batched_tokens",
)  # fmt: skip
UNITS_OF_FACTS = {
    "total": "bytes", "host_memory": "bytes", "duration_s": "s", "gpu_memory_utilization": "share",
    **dict.fromkeys(TOKENS, "tokens"),
    "max_num_seqs": "requests", "num_requests": "requests", "num_blocks": "blocks", "max_blocks": "blocks",
}  # fmt: skip
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


def outside_table(memory: Reconciliation | None) -> Table:
    """KV in host memory and on disk, which no sum of the device's bytes contains."""
    columns = (
        Column("component"), Column("predicted", "bytes"), Column("measured", "bytes"), Column("relative", "relative"),
        Column("error", "error"),
    )  # fmt: skip
    rows = () if memory is None else memory.outside
    cells = tuple((row.component, row.predicted, row.measured, row.relative, row.error) for row in rows)
    return Table("outside", "Beyond the device", columns, cells)


def savings_table(run: Run) -> Table:
    columns = (
        Column("technique"), Column("saved", BY_ROW), Column("of", BY_ROW), Column(UNIT), Column("share", "share")
    )  # fmt: skip
    units = {"tokens": "tokens", "bytes/token": "bytes"}
    rows = ((row.technique, row.saved, row.base, units[row.unit], row.share) for row in savings(run))
    return Table("savings", "What each technique saved", columns, tuple(rows))


def pool_table(memory: Reconciliation | None) -> Table:
    columns = (Column("name"), Column("predicted", BY_ROW), Column("measured", BY_ROW), Column(UNIT))
    capacity = () if memory is None else memory.capacity
    rows = tuple((row.component, row.predicted, row.measured, row.unit) for row in capacity)
    return Table("pool", "The KV pool", columns, rows)


def allocators_table(run: Run) -> Table:
    """The same workload in the same pool, by allocator; empty if only one ran."""
    columns = (
        Column("allocator"), Column("most_running", "count"), Column("output_tokens_per_s", "tokens/s"),
        Column("allocated_but_unused", "share"), Column("preemptions", "count"), Column("finished", "count"),
        Column("seconds", "s"),
    )  # fmt: skip
    results = run.results
    served: list[tuple[str, ServedFigures]] = [(run.engine.get("allocator", "paged"), results)]
    served += [(str(other.get("allocator")), other) for other in baselines(results)]
    rows = tuple(allocator_row(run, name, figures) for name, figures in served)
    title = " and ".join(name for name, _ in served).capitalize()
    return Table("allocators", title, columns, rows if len(rows) > 1 else ())


def allocator_row(run: Run, name: str, results: ServedFigures) -> tuple[Value, ...]:
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
    """Per stage: number of times, duration, and the largest of each sampled figure.

    A stage is named before its step runs: if no step ended in it, the engine's figures are those of the stage before.
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
        peaks = [None if key in unknown else max(numbers(both, key), default=None) for key in have]
        rows.append((name, len(spans), spans[0].start, lasts, *peaks))
    return Table("stages", "Stages", columns, tuple(rows))


def timeline_table(samples: Sequence[Sample]) -> Table:
    """The last sample of each of TIMELINE_ROWS equal intervals of the run; samples.jsonl has them all."""
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


# --- facts about the run ----------------------------------------------------------------------------------------------


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
    """A fact of the manifest as (name, value, unit); other types are converted to text."""
    label = FACT_NAMES.get(name, name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return label, value, UNITS_OF_FACTS.get(name, "count")
    return label, str(value), "text"


def facts_table(name: str, title: str, facts: Iterable[tuple[str, Value, str]]) -> Table:
    rows = tuple(fact for fact in facts if fact[1] is not None)
    return Table(name, title, (Column("name"), Column("value", BY_ROW), Column(UNIT)), rows)
