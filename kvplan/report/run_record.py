"""A run's records in the form a report needs: its samples in order, its stages, and the comparison with its plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from kvplan.core.errors import KvplanError
from kvplan.core.files import path_text
from kvplan.measure.reconcile import Reconciliation, reconcile_run
from kvplan.measure.run_manifest import check_manifest, check_objects
from kvplan.measure.run_types import Sample
from kvplan.measure.rundir import Run

ALLOCATED = ("weights", "buffers", "kv_cache", "activations", "cuda_graphs")  # rows that the engine measures itself
LARGEST = 2**63  # larger than any byte, token or nanosecond count; keeps computed values finite
DEVICES = {"cpu": "the CPU"}
Values = TypeVar("Values", bound=Mapping[str, object])


@dataclass(frozen=True, slots=True)
class Stage:
    """An interval of a run, in seconds since it began."""

    name: str
    start: float
    end: float


def num_groups(run: Run) -> int:
    """Number of groups of layers that share a block table."""
    return int(run.manifest.get("groups") or 1)


def timed(samples: Iterable[Sample]) -> list[Sample]:
    """The samples that have a time, in time order."""
    return sorted(having(samples, "t"), key=lambda sample: reading(sample, "t"))


def having(samples: Iterable[Values], key: str) -> list[Values]:
    """The samples with a finite number at a key."""
    return [sample for sample in samples if number(sample, key) is not None]


def number(values: Mapping[str, object], key: str) -> int | float | None:
    """A plausible number of a record, or None."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if -LARGEST <= value <= LARGEST else None  # false for NaN


def reading(sample: Mapping[str, object], key: str) -> int | float:
    """A number of a sample that is known to have it."""
    value = number(sample, key)
    assert value is not None, key
    return value


def numbers(samples: Iterable[Mapping[str, object]], key: str) -> list[int | float]:
    return [value for sample in samples if (value := number(sample, key)) is not None]


def stages_of(run: Run, samples: Sequence[Sample]) -> list[Stage]:
    """Every stage of the run from its events, or from the samples if the events are missing."""
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


def device_of(run: Run) -> str:
    """Name of the device in a sentence: the GPU's name, or the CPU."""
    kind = str(run.manifest.get("device") or "an unknown device")
    return str(run.environment.get("gpu") or DEVICES.get(kind, kind))


def memory_key(run: Run) -> str:
    """Key of a sample's total memory: resident size on a CPU, the device's own figure on a GPU."""
    return "rss" if run.manifest.get("device") == "cpu" else "device_used"


def usable_blocks(run: Run) -> int:
    """Blocks of the pool available to requests: all but the reserved one."""
    return max(0, int(run.memory.get("num_blocks", 0)) - 1)


def compared(run: Run) -> tuple[Reconciliation | None, list[str]]:
    """The reconciliation, or None and why.

    Without a sample, the device's own figure is unknown: only what the engine measured itself is compared.
    """
    check_objects(run)
    if run.manifest.get("memory") is not None:
        check_manifest(run)
    unsampled = not run.manifest.get("peaks") and not run.samples
    try:
        if not unsampled:
            result = reconcile_run(run)
            return result, [gap for gap in result.gaps if gap != result.ended]
        result = reconcile_run(replace(run, manifest={**run.manifest, "peaks": {"before": {}}}))
    except KvplanError as error:
        return None, [str(error.renamed(path_text(run.path), ""))]
    rows = tuple(row for row in result.rows if row.component in ALLOCATED)
    only = replace(result, rows=rows, reported=sum(row.size for row in rows))
    return only, ["no sample was taken, so the usage that the device reported is unknown"]
