"""What a run keeps beyond the device, and what each technique of its engine saved."""

from dataclasses import dataclass
from typing import Final, Literal

from kvplan.core.units import GIB
from kvplan.measure.run_capacity import baselines, fragmentation
from kvplan.measure.run_manifest import is_number, predicted_of
from kvplan.measure.rundir import Run
from kvplan.servers.bundled.rules import chunk_bytes, file_bytes
from kvplan.servers.logs.measurement import ComponentRow

Technique = Literal[
    "prefix_caching", "kv_offloading", "speculation", "paging_vs_contiguous", "paging_vs_static",
    "contiguous_vs_static", "static_vs_contiguous",
]  # fmt: skip
SOURCES: Final = {
    "host_memory": ("--kv-offloading-size, in whole chunks of a block", "the tensor that holds them, pinned on a GPU"),
    "disk_space": ("--kv-offloading-disk-size, in whole files", "the files that the engine keeps at most"),
    "disk_files": ("files x (a chunk and its header)", "the sizes of the files after the run"),
}


def outside_rows(run: Run) -> tuple[ComponentRow, ...]:
    """Bytes of KV in host memory and on disk, planned and measured; no part of any sum of the device's.

    host_memory  of --kv-offloading-size, all of it taken at the start
    disk_space   most that files may take; disk_files: what those take that are there at the end
    """
    offload = run.results.get("offload")
    if offload is None:
        return ()
    block = predicted_of(run).block_bytes
    size = run.engine.get("kv_offloading_size") or 0.0
    rows = [ComponentRow("host_memory", "bytes", whole(size, chunk_bytes(block)), offload["memory"])]
    disk_size = run.engine.get("kv_offloading_disk_size")
    if disk_size and "disk_files" in offload:
        file = file_bytes(block)
        rows.append(ComponentRow("disk_space", "bytes", whole(disk_size, file), offload["disk_space"]))
        rows.append(ComponentRow("disk_files", "bytes", offload["num_files"] * file, offload["disk_files"]))
    return tuple(rows)


def whole(gib: float, unit: int) -> int:
    """Bytes of as many whole units as a size in GiB holds."""
    return round(gib * GIB) // unit * unit


@dataclass(frozen=True, slots=True)
class Saving:
    """What one technique saved.

    saved  of `base`, in `unit`:
           prefix caching and offloading, tokens that were not computed, of those looked up;
           speculation, tokens accepted without a step of their own, of those guessed;
           an allocator, bytes of KV blocks per token, of what the other allocator takes
    """

    technique: Technique
    saved: float
    base: float
    unit: Literal["tokens", "bytes/token"]

    @property
    def share(self) -> float:
        return self.saved / self.base


def savings(run: Run) -> tuple[Saving, ...]:
    """The savings of a run: of techniques that it used, and of its allocator over each that served it again."""
    stats = run.results.get("stats") or {}
    counted: tuple[tuple[Technique, object, object, bool], ...] = (
        ("prefix_caching", stats.get("prefix_cache_hits"), stats.get("prefix_cache_queries"), False),
        (
            "kv_offloading", stats.get("external_prefix_cache_hits"), stats.get("external_prefix_cache_queries"),
            run.engine.get("kv_offloading_size") is not None,
        ),
        (
            "speculation", stats.get("num_accepted_tokens"), stats.get("num_draft_tokens"),
            run.engine.get("speculative_config") is not None,
        ),
    )  # fmt: skip
    counts = [
        Saving(technique, saved, base, "tokens")  # type: ignore[arg-type] # checked on the next line
        for technique, saved, base, is_asked_for in counted
        if is_number(saved) and is_number(base) and base and (saved or is_asked_for)
    ]
    return (*counts, *allocator_savings(run))


def allocator_savings(run: Run) -> tuple[Saving, ...]:
    """Bytes of blocks per token at the fullest moment, less than with each other allocator."""
    own, name = fragmentation(run, run.results), run.engine.get("allocator", "paged")
    rows = []
    for other in baselines(run.results):
        theirs = fragmentation(run, other)
        if own is None or theirs is None:
            continue
        technique = f"{'paging' if name == 'paged' else name}_vs_{other.get('allocator')}"
        base = theirs.bytes_per_token
        rows.append(Saving(technique, base - own.bytes_per_token, base, "bytes/token"))  # type: ignore[arg-type]
    return tuple(rows)
