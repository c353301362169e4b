"""Runs as the tables and sentences that a report shows: HTML, Markdown, JSON and CSV are all written from these.

A cell holds the number itself (bytes, seconds, counts); what a unit looks like in text is `text` alone.
"""

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kvplan.errors import InvalidInputError, KvplanError
from kvplan.files import printable, shown
from kvplan.reconcile import SOURCES, Reconciliation, Row, check_manifest, inputs_of, reconcile, spec_of
from kvplan.rules.bundled import group_sizes, kind_of
from kvplan.rundir import Run
from kvplan.units import format_size

Value = int | float | str | None
Sample = dict[str, Any]

BY_ROW = "by row"  # a column whose units stand in the row's cell named `unit`
BASELINE = "baseline"  # the stage in which the other allocator runs
TIMELINE_ROWS = 40
SENTENCE = 2000  # characters
SMALLEST_CONTEXT = 1024
# What a sample may hold, in the order of columns, with its unit.
MEASURES = {
    "device_used": "bytes",
    "process_used": "bytes",
    "torch_allocated": "bytes",
    "torch_reserved": "bytes",
    "rss": "bytes",
    "num_used_blocks": "count",
    "num_kv_tokens": "count",
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
PEAKS = (
    "device_used", "process_used", "torch_allocated", "torch_reserved", "rss", "num_used_blocks",
    "num_requests_running", "power_w",
)  # fmt: skip
ALLOCATED = ("weights", "buffers", "kv_cache", "activations", "cuda_graphs")  # rows the engine measures by itself
DEVICES = {"cpu": "the CPU"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column's name and the unit of its cells: text, bytes, error, relative, share, count, s, ... or BY_ROW."""

    name: str
    unit: str = "text"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of values; the cell in the first column names the row."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]

    def unit(self, row: tuple[Value, ...], i: int) -> str:
        """The unit of the i-th cell of a row."""
        unit = self.columns[i].unit
        return str(row[[column.name for column in self.columns].index("unit")]) if unit == BY_ROW else unit


@dataclass(frozen=True, slots=True)
class Stage:
    """One stretch of a run, in seconds since it began."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RunData:
    """One run as a report shows it.

    label     its directory's name, unique in the report
    answer    one sentence: what fits, and how far the prediction was off
    banner    what must be read first: killed, interrupted, failed; None for a complete run
    notes     what was odd in the files
    tables    by name, in the order shown; those without rows are left out
    findings  what a figure shows, by the figure's name
    memory    the reconciliation, where there is one
    samples   those with a time, in its order
    """

    run: Run
    label: str
    model: str
    device: str
    answer: str
    banner: str | None
    notes: tuple[str, ...]
    tables: dict[str, Table]
    findings: dict[str, str]
    memory: Reconciliation | None
    samples: list[Sample]
    stages: list[Stage]


@dataclass(frozen=True, slots=True)
class ReportData:
    """Everything a report shows; `comparison` sets several runs side by side and is None for one."""

    title: str
    runs: tuple[RunData, ...]
    comparison: Table | None
    method: Table


def report_data(runs: Sequence[Run], title: str | None = None) -> ReportData:
    """Turn runs into what a report shows.

    Raises InvalidInputError for a manifest that kvplan cannot have written.
    """
    data = tuple(run_data(run, label) for run, label in zip(runs, labels(runs), strict=True))
    comparison = comparison_table(data) if len(data) > 1 else None
    return ReportData(title or default_title(data), data, comparison, method_table(data))


def default_title(runs: Sequence[RunData]) -> str:
    models = list(dict.fromkeys(data.model for data in runs))
    return f"Predicted and measured: {', '.join(models)}"


def labels(runs: Sequence[Run]) -> list[str]:
    """The runs' directory names; where two are alike, numbered in the order given."""
    names = [run.path.resolve().name or "run" for run in runs]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)
    ]


def run_data(run: Run, label: str) -> RunData:
    try:
        return _run_data(run, label)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, ZeroDivisionError, AssertionError) as error:
        raise InvalidInputError(
            f"{shown(run.path)}: run.json cannot be read ({type(error).__name__}: {error}); the file is damaged"
        ) from error


def _run_data(run: Run, label: str) -> RunData:
    samples = timed(run.samples)
    stages = stages_of(run, samples)
    memory, gaps = compared(run)
    model = str((run.manifest.get("model") or {}).get("name") or "unknown model")
    device = device_of(run)
    built = [
        memory_table(memory),
        pool_table(memory),
        contexts_table(run),
        allocators_table(run),
        stages_table(run, samples, stages),
        run_table(run, model, device),
        environment_table(run),
        timeline_table(samples),
    ]
    tables = {table.name: table for table in built if table.rows}
    said = banner(run, samples)
    found = findings(run, samples, memory, tables)
    return RunData(
        run=run,
        label=label,
        model=model,
        device=device,
        answer=printable(answer(run, model, device, memory, tables), SENTENCE),
        banner=None if said is None else printable(said, SENTENCE),
        notes=tuple(dict.fromkeys(printable(note, SENTENCE) for note in (*run.notes, *gaps))),
        tables=tables,
        findings={name: printable(sentence, SENTENCE) for name, sentence in found.items()},
        memory=memory,
        samples=samples,
        stages=stages,
    )


# --- reading a run ----------------------------------------------------------------------------------------------------


def timed(samples: Iterable[Sample]) -> list[Sample]:
    """The samples that have a time, in its order."""
    return sorted((sample for sample in samples if number(sample, "t") is not None), key=lambda sample: sample["t"])


def number(values: Sample, key: str) -> int | float | None:
    """A finite number of a record, else None."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def numbers(samples: Iterable[Sample], key: str) -> list[int | float]:
    return [value for sample in samples if (value := number(sample, key)) is not None]


def device_of(run: Run) -> str:
    """The device for a sentence: the GPU's name, or the CPU."""
    kind = str(run.manifest.get("device") or "an unknown device")
    return str((run.manifest.get("environment") or {}).get("gpu") or DEVICES.get(kind, kind))


def stages_of(run: Run, samples: Sequence[Sample]) -> list[Stage]:
    """Every stretch of the run from its events; from the samples where the events are missing."""
    begun = [
        (float(event["t"]), str(event.get("stage")))
        for event in run.events
        if event.get("event") == "stage" and number(event, "t") is not None
    ]
    if not begun:
        begun = [(float(b["t"]), str(b.get("stage"))) for a, b in pairwise(samples) if a.get("stage") != b.get("stage")]
    first = str(samples[0].get("stage", "before")) if samples else "before"
    begun = sorted(begun if begun and min(begun)[0] <= 0 else [(0.0, first), *begun])
    end = max([begun[-1][0], *(float(sample["t"]) for sample in samples[-1:])])
    ends = [start for start, _ in begun[1:]] + [end]
    return [Stage(name, start, stop) for (start, name), stop in zip(begun, ends, strict=True)]


def compared(run: Run) -> tuple[Reconciliation | None, list[str]]:
    """The reconciliation, or none and why.

    Without a sample the device's own figure is unknown: only what the engine measured by itself is compared.
    """
    if run.manifest.get("memory") is not None:
        check_manifest(run)
    unsampled = not run.manifest.get("peaks") and not run.samples
    try:
        if not unsampled:
            result = reconcile(run)
            return result, [gap for gap in result.gaps if not gap.startswith("the run is ")]
        result = reconcile(replace(run, manifest={**run.manifest, "peaks": {"before": {}}}))
    except KvplanError as error:
        return None, [str(error).removeprefix(f"{shown(run.path)}: ")]
    rows = tuple(row for row in result.rows if row.component in ALLOCATED)
    only = replace(result, rows=rows, reported=sum(row.measured for row in rows))
    return only, ["no sample was taken: what the device itself reported is unknown"]


def banner(run: Run, samples: Sequence[Sample]) -> str | None:
    """One sentence on a run that is not complete."""
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


# --- sentences --------------------------------------------------------------------------------------------------------


def answer(run: Run, model: str, device: str, memory: Reconciliation | None, tables: dict[str, Table]) -> str:
    """What fits and how far the prediction was off, in one sentence."""
    if memory is None:
        why = "failed to start" if run.status == "failed" else "ended before its memory was measured"
        return f"{model} on {device} {why}: there is nothing to compare."
    return f"{model} on {device}: {held(run, tables)}{accuracy(memory)}."


def held(run: Run, tables: dict[str, Table]) -> str:
    """How many requests of the run's own context the pool holds."""
    own = run.manifest["inputs"]["max_model_len"]
    contexts = tables["contexts"].rows if "contexts" in tables else ()
    requests = next((row[-1] for row in contexts if row[0] == own), None)
    if requests is None:
        return ""
    size = text(run.manifest["memory"]["kv_cache"], "bytes")
    return f"the KV pool of {size} holds {plural(requests, 'request')} of {own:,} tokens; "


def accuracy(memory: Reconciliation) -> str:
    rows = {row.component: row for row in memory.rows}
    return (
        f"measured against predicted, the weights are {deviation(rows['weights'])}, the KV cache is "
        f"{deviation(rows['kv_cache'])}, and the total is {deviation(memory.total)}"
    )


def deviation(row: Row) -> str:
    """How far the measured bytes lie from the predicted: "exact", "3 MiB (0.3 %) above", "not comparable"."""
    if row.error is None or row.relative is None:
        return "not comparable"
    if row.error == 0:
        return "exact"
    side = "below" if row.error > 0 else "above"
    return f"{text(abs(row.error), 'bytes')} ({text(abs(row.relative), 'share')}) {side}"


def plural(count: Value, noun: str) -> str:
    return f"{text(count, 'count')} {noun}{'' if count == 1 else 's'}"


def findings(
    run: Run, samples: Sequence[Sample], memory: Reconciliation | None, tables: dict[str, Table]
) -> dict[str, str]:
    """What each figure shows, in a sentence; by the figure's name."""
    found = {
        "memory": memory_finding(memory),
        "over_time": peak_finding(run, samples),
        "kv": kv_finding(run, samples),
        "throughput": throughput_finding(run),
        "gpu": gpu_finding(samples),
        "contexts": contexts_finding(run, tables.get("contexts")),
        "allocators": allocators_finding(tables.get("allocators")),
    }
    return {name: sentence for name, sentence in found.items() if sentence}


def memory_finding(memory: Reconciliation | None) -> str:
    if memory is None:
        return ""
    rows = [row for row in memory.rows if row.error is not None and row.component != "unattributed"]
    exact = [words(row.component) for row in rows if row.error == 0 and row.measured]
    sentences = [f"Exact: {', '.join(exact)}."] if exact else []
    worst = max(rows, key=lambda row: abs(row.error or 0))
    if worst.error:
        sentences.append(f"Furthest off: {words(worst.component)}, measured {deviation(worst)}.")
    rest = sum(row.measured for row in memory.rows if row.component == "unattributed")
    if rest:
        sentences.append(f"{text(rest, 'bytes')} of what the device reports belong to no row.")
    return " ".join(sentences)


def memory_key(run: Run) -> str:
    """The sample's figure of all memory: resident size on a CPU, the device's own on a GPU."""
    return "rss" if run.manifest.get("device") == "cpu" else "device_used"


def peak_finding(run: Run, samples: Sequence[Sample]) -> str:
    key = memory_key(run)
    have = [sample for sample in samples if number(sample, key) is not None]
    if not have:
        return ""
    peak = max(have, key=lambda sample: float(sample[key]))
    what = "resident memory" if key == "rss" else "device memory in use"
    when = f"{text(peak['t'], 's')} after the start, in the stage {peak.get('stage')}"
    return f"Most {what}: {text(peak[key], 'bytes')}, {when}."


def kv_finding(run: Run, samples: Sequence[Sample]) -> str:
    own = [sample for sample in samples if sample.get("stage") != BASELINE]
    used = numbers(own, "num_used_blocks")
    if not used:
        return ""
    usable = usable_blocks(run)
    of = f" of {usable:,} ({text(max(used) / usable, 'share')})" if usable else ""
    preemptions = max(numbers(own, "num_preemptions"), default=0)
    often = "no request was preempted" if not preemptions else f"requests were preempted {plural(preemptions, 'time')}"
    return f"At most {max(used):,} blocks{of} were in use; {often}."


def throughput_finding(run: Run) -> str:
    results = run.manifest.get("results") or {}
    rate, seconds = number(results, "output_tokens_per_s"), number(results, "seconds")
    if rate is None or seconds is None:
        return ""
    tokens = number(results.get("stats") or {}, "generation_tokens")
    made = "" if tokens is None else f"{tokens:,} tokens in {text(seconds, 's')}: "
    return f"{made}{text(rate, 'tokens/s')} of output on average, prompts included in the time."


def gpu_finding(samples: Sequence[Sample]) -> str:
    power, clocks = numbers(samples, "power_w"), numbers(samples, "sm_clock_mhz")
    parts = [f"The GPU drew at most {text(max(power), 'W')}."] if power else []
    span = dict.fromkeys(text(clock, "count") for clock in (min(clocks), max(clocks))) if clocks else ()
    parts += [f"Its SM clock ran at {' to '.join(span)} MHz."] if clocks else []
    return " ".join(parts)


def contexts_finding(run: Run, table: Table | None) -> str:
    if table is None:
        return ""
    most = run.manifest["inputs"]["max_num_seqs"]
    longest = max(int(row[0]) for row in table.rows if isinstance(row[0], int))
    return (
        f"The longest request the pool holds alone has {longest:,} tokens. The scheduler of this run was told to run "
        f"at most {plural(most, 'request')} at once; the table counts blocks only."
    )


def allocators_finding(table: Table | None) -> str:
    if table is None:
        return ""
    paged, other = table.rows
    return (
        f"In the same pool, {paged[0]} blocks ran {plural(paged[1], 'request')} at once and {other[0]} ones "
        f"{text(other[1], 'count')}; {text(paged[3], 'share')} and {text(other[3], 'share')} of what was allocated "
        "held no token."
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def memory_table(memory: Reconciliation | None) -> Table:
    columns = (
        Column("component"), Column("predicted", "bytes"), Column("measured", "bytes"), Column("relative", "relative"),
        Column("error", "error"),
    )  # fmt: skip
    rows: list[tuple[Value, ...]] = []
    if memory is not None:
        both = (*memory.rows, memory.total)
        rows = [(row.component, row.predicted, row.measured, row.relative, row.error) for row in both]
        rows.append(("reported", None, memory.reported, None, None))
    return Table("memory", "Memory, predicted and measured", columns, tuple(rows))


def pool_table(memory: Reconciliation | None) -> Table:
    columns = (Column("name"), Column("predicted", BY_ROW), Column("measured", BY_ROW), Column("unit"))
    capacity = () if memory is None else memory.capacity
    rows = tuple((row.name, row.predicted, row.measured, row.unit) for row in capacity)
    return Table("pool", "The KV pool", columns, rows)


def usable_blocks(run: Run) -> int:
    """Blocks of the pool that requests may have: all but the one that stands for no block."""
    return max(0, int((run.manifest.get("memory") or {}).get("num_blocks", 0)) - 1)


def windows_of(run: Run) -> list[int]:
    """One entry per group of layers that share a block table: its window in tokens, 0 for all tokens."""
    groups = int(run.manifest.get("groups") or 1)
    try:
        spec = spec_of(run)
        size = max(group_sizes(spec))
        kinds = [kind_of(caches) for caches in spec.layers]
    except KvplanError:
        return [0] * groups
    counted = {kind: -(-kinds.count(kind) // size) for kind in dict.fromkeys(kinds)}
    windows = [window for (_, window), count in counted.items() for _ in range(count)]
    return windows if len(windows) == groups else [0] * groups


def blocks_per_request(tokens: int, windows: Iterable[int], block_size: int, in_flight: int) -> int:
    """Blocks of one request of so many tokens: in each group all of them, or what a window and one step span."""
    whole = -(-tokens // block_size)
    # A window need not start on a block boundary: one more block.
    spans = [-(-min(window - 1 + in_flight, tokens) // block_size) + 1 if window else whole for window in windows]
    return sum(min(whole, span) for span in spans)


def contexts_table(run: Run) -> Table:
    """How many requests the measured pool holds, by their length: powers of two, the run's own, the longest."""
    columns = (
        Column("context", "tokens"), Column("blocks_per_request", "count"), Column("bytes_per_request", "bytes"),
        Column("requests", "count"),
    )  # fmt: skip
    memory, usable = run.manifest.get("memory"), usable_blocks(run)
    rows: list[tuple[Value, ...]] = []
    if isinstance(memory, dict) and usable:
        inputs = inputs_of(run)
        is_contiguous = (run.manifest.get("engine") or {}).get("allocator") == "contiguous"
        windows = [0] * len(windows_of(run)) if is_contiguous else windows_of(run)

        in_flight = inputs.batches_in_flight * inputs.max_num_batched_tokens

        def blocks(tokens: int) -> int:
            return blocks_per_request(tokens, windows, inputs.block_size, in_flight)

        for tokens in contexts(blocks, usable, inputs.block_size, inputs.max_model_len, context_limit(run)):
            rows.append((tokens, blocks(tokens), blocks(tokens) * memory["block_bytes"], usable // blocks(tokens)))
    return Table("contexts", "Requests the pool holds, by context", columns, tuple(rows))


def context_limit(run: Run) -> int | None:
    """The longest context the model was made for, where its facts say."""
    try:
        return spec_of(run).context_limit
    except KvplanError:
        return None


def contexts(blocks: Callable[[int], int], usable: int, block_size: int, own: int, limit: int | None) -> list[int]:
    """The lengths to show: 1k, 2k, 4k, ... as far as one request fits, the run's own and the longest possible."""
    most = limit or 2**31 - 1
    longest = most if blocks(most) <= usable else _longest(blocks, usable, block_size, most)
    powers: list[int] = []
    while (tokens := SMALLEST_CONTEXT << len(powers)) < longest:
        powers.append(tokens)
    return sorted({*powers, longest, *([own] if own <= longest else [])} - {0})


def _longest(blocks: Callable[[int], int], usable: int, block_size: int, most: int) -> int:
    """The most tokens, in whole blocks, of which one request fits; blocks never fall with the length."""
    low, high = 0, most // block_size + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if blocks(middle * block_size) <= usable else (low, middle)
    return low * block_size


def allocators_table(run: Run) -> Table:
    """The same workload in the same pool, by allocator; empty where only one ran."""
    columns = (
        Column("allocator"), Column("most_running", "count"), Column("output_tokens_per_s", "tokens/s"),
        Column("allocated_but_unused", "share"), Column("preemptions", "count"), Column("finished", "count"),
        Column("seconds", "s"),
    )  # fmt: skip
    results = run.manifest.get("results") or {}
    other = results.get("baseline")
    served = [((run.manifest.get("engine") or {}).get("allocator", "paged"), results)]
    served += [(other.get("allocator"), other)] if other else []
    rows = tuple(allocator_row(run, str(name), each) for name, each in served)
    return Table("allocators", "Paged beside contiguous", columns, rows if other else ())


def allocator_row(run: Run, name: str, results: Sample) -> tuple[Value, ...]:
    preemptions = number(results.get("stats") or {}, "num_preemptions")
    return (
        name,
        number(results, "most_running"),
        number(results, "output_tokens_per_s"),
        unused_share(run, results),
        preemptions,
        number(results, "num_finished"),
        number(results, "seconds"),
    )


def unused_share(run: Run, results: Sample) -> float | None:
    """Share of the slots handed out that held no token when the pool held most; never below 0."""
    densest = results.get("densest") or {}
    used, tokens = number(densest, "num_used_blocks"), number(densest, "num_kv_tokens")
    if not used or tokens is None:
        return None
    slots = used / int(run.manifest.get("groups") or 1) * int(run.manifest["inputs"]["block_size"])
    return max(0.0, 1 - tokens / slots)


def stages_table(run: Run, samples: Sequence[Sample], stages: Sequence[Stage]) -> Table:
    """Per stage: how often and how long, and the largest of each figure that was sampled."""
    recorded = run.manifest.get("peaks") or {}
    have = [key for key in PEAKS if numbers(samples, key) or any(key in peaks for peaks in recorded.values())]
    most_of = (Column(f"most_{key}", MEASURES[key]) for key in have)
    columns = (Column("stage"), Column("times", "count"), Column("begins", "s"), Column("lasts", "s"), *most_of)
    rows: list[tuple[Value, ...]] = []
    for name in dict.fromkeys(stage.name for stage in stages) if samples or recorded else ():
        spans = [stage for stage in stages if stage.name == name]
        lasts = round(sum(stage.end - stage.start for stage in spans), 6)
        inside = [sample for sample in samples if sample.get("stage") == name]
        most = [max(numbers([*inside, recorded.get(name) or {}], key), default=None) for key in have]
        rows.append((name, len(spans), spans[0].start, lasts, *most))
    return Table("stages", "Stages", columns, tuple(rows))


def run_table(run: Run, model: str, device: str) -> Table:
    manifest = run.manifest
    source = str((manifest.get("model") or {}).get("source") or "")
    argv = (manifest.get("environment") or {}).get("argv")
    command = f"kvplan {shlex.join(str(word) for word in argv)}" if isinstance(argv, list) else None
    facts: list[tuple[str, Value, str]] = [
        ("model", model, "text"),
        ("source", source or None, "text"),
        ("device", device, "text"),
        ("status", run.status, "text"),
        ("cause", run.cause, "text"),
        ("directory", str(run.path), "text"),
        ("started", manifest.get("started_utc"), "text"),
        ("ended", manifest.get("finished_utc"), "text"),
        ("command", command, "text"),
    ]
    facts += [described(name, value) for name, value in (manifest.get("workload") or {}).items()]
    facts += [described(name, value) for name, value in (manifest.get("inputs") or {}).items()]
    facts += [
        described(name, (manifest.get("engine") or {}).get(name)) for name in ("allocator", "load_format", "seed")
    ]
    return facts_table("run", "The run", facts)


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


def described(name: str, value: Any) -> tuple[str, Value, str]:
    """A fact of the manifest as (name, value, unit); what is neither number nor text is written as text."""
    label = FACT_NAMES.get(name, name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return label, value, UNITS_OF_FACTS.get(name, "count")
    return label, str(value), "text"


def environment_table(run: Run) -> Table:
    environment = run.manifest.get("environment") or {}
    names = ("gpu", "driver", "cuda", "kvplan", "commit", "python", "platform")
    facts: list[tuple[str, Value, str]] = [described(name, environment.get(name)) for name in names]
    facts += [described(str(name), value) for name, value in (environment.get("packages") or {}).items()]
    facts += [described(name, environment.get(name)) for name in ("cpu_cores", "torch_threads", "host_memory")]
    return facts_table("environment", "Environment", facts)


def facts_table(name: str, title: str, facts: Iterable[tuple[str, Value, str]]) -> Table:
    rows = tuple(fact for fact in facts if fact[1] is not None)
    return Table(name, title, (Column("name"), Column("value", BY_ROW), Column("unit")), rows)


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


def comparison_table(runs: Sequence[RunData]) -> Table:
    """Several runs side by side, one row each."""
    columns = (
        Column("run"), Column("model"), Column("device"), Column("status"),
        Column("weights", "bytes"), Column("weights_error", "relative"),
        Column("kv_cache", "bytes"), Column("kv_cache_error", "relative"),
        Column("total", "bytes"), Column("total_error", "relative"),
        Column("num_blocks", "count"), Column("most_running", "count"), Column("output_tokens_per_s", "tokens/s"),
    )  # fmt: skip
    return Table("comparison", "Side by side", columns, tuple(comparison_row(data) for data in runs))


def comparison_row(data: RunData) -> tuple[Value, ...]:
    rows = {str(row[0]): row for row in data.tables["memory"].rows} if "memory" in data.tables else {}
    bytes_and_errors: list[Value] = []
    for name in ("weights", "kv_cache", "total"):
        bytes_and_errors += [rows[name][2], rows[name][3]] if name in rows else [None, None]
    results = data.run.manifest.get("results") or {}
    return (
        data.label,
        data.model,
        data.device,
        data.run.status,
        *bytes_and_errors,
        number(data.run.manifest.get("memory") or {}, "num_blocks"),
        number(results, "most_running"),
        number(results, "output_tokens_per_s"),
    )


def method_table(runs: Sequence[RunData]) -> Table:
    """What the two numbers of each row are."""
    columns = (Column("component"), Column("predicted_from"), Column("measured_by"))
    rows = tuple((name, *sources) for name, sources in SOURCES.items())
    is_compared = any(data.memory is not None for data in runs)
    return Table("method", "What each row is", columns, rows if is_compared else ())


# --- as text ----------------------------------------------------------------------------------------------------------


def text(value: Value, unit: str) -> str:
    """A cell for a reader: "513.13 MiB", "+0.31 %", "3,328"; a dash where there is no value."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return printable(value, 1000)
    match unit:
        case "bytes":
            return format_size(round(value))
        case "error":
            return f"{value:+,} B" if value else "0 B"
        case "relative":
            return signed_percent(float(value))
        case "share":
            return percent(float(value))
        case "s":
            return f"{value:,.2f} s"
        case "count" | "text" | "":
            return plain(value)
        case _:
            return f"{plain(value)} {unit.removesuffix('s') if value == 1 and '/' not in unit else unit}"


def plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def percent(share: float) -> str:
    """A share in percent; one too small for a decimal is not written as zero."""
    value = 100 * share
    return "under 0.1 %" if 0 < value < 0.05 else f"{value:,.1f} %"


def signed_percent(share: float) -> str:
    value = 100 * share
    if value == 0:
        return "0 %"
    return f"{value:+,.2f} %" if abs(value) >= 0.005 else f"{value:+.1g} %"


def words(name: str) -> str:
    """A column's or a component's name for a reader: "kv_cache" -> "KV cache"."""
    if name == "non_torch":
        return "non-torch"
    spelled = {"kv": "KV", "cuda": "CUDA", "lora": "LoRA", "gpu": "GPU", "rss": "resident", "sm": "SM", "num": ""}
    found = [spelled.get(word, word) for word in name.removesuffix("_w").removesuffix("_mhz").split("_")]
    return " ".join(word for word in found if word)


# Tables whose first column holds names of kvplan's own, which read better as words.
NAMED = ("memory", "pool", "stages", "run", "environment", "method")


def cell_text(table: Table, row: tuple[Value, ...], i: int) -> str:
    """The i-th cell of a row for a reader."""
    shown_text = text(row[i], table.unit(row, i))
    return words(shown_text) if i == 0 and table.name in NAMED else shown_text
