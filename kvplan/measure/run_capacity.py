"""Capacity of a run's pool: blocks, tokens and requests, empty slots, and what each allocator served."""

from dataclasses import dataclass

from kvplan.measure.run_manifest import inputs_of
from kvplan.measure.run_types import Results, ServedFigures
from kvplan.measure.rundir import Run
from kvplan.servers.bundled.rules import Prediction
from kvplan.servers.logs import measurement
from kvplan.servers.logs.measurement import Figure, Measurement


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Blocks in use at the fullest moment: bytes per token in them, and the fraction of empty slots."""

    bytes_per_token: float
    waste: float


def fragmentation(run: Run, results: ServedFigures) -> Fragmentation | None:
    """Fragmentation, or None if the run does not say how many slots were filled: requests that share blocks hide it."""
    densest, stats = results.get("densest") or {}, results.get("stats") or {}
    groups, block_size = int(run.manifest.get("groups") or 1), int(run.manifest["inputs"]["block_size"])
    used, filled = densest.get("num_used_blocks"), densest.get("num_filled_slots")
    if filled is None and groups == 1 and not stats.get("prefix_cache_hits"):
        filled = densest.get("num_kv_tokens")
    if not used or not filled:
        return None
    allocated = used * run.manifest["memory"]["block_bytes"] * groups / filled
    return Fragmentation(allocated, 1 - filled / (used * block_size))


def pool_tokens(run: Run, num_blocks: int) -> int:
    """Tokens that fit in a pool of this many blocks, one of which is reserved."""
    return max(0, num_blocks - 1) // int(run.manifest.get("groups") or 1) * inputs_of(run).block_size


def capacity(run: Run) -> Measurement:
    """Blocks, tokens, and bytes per token and fragmentation at the fullest moment of the run."""
    memory, results = run.manifest["memory"], run.manifest.get("results") or {}
    stats, dense = results.get("stats") or {}, fragmentation(run, results)
    queries, hits = stats.get("prefix_cache_queries"), stats.get("prefix_cache_hits")
    return Measurement(
        "run",
        (
            Figure("num_blocks", "blocks", memory["num_blocks"]),
            Figure("block_bytes", "bytes", memory["block_bytes"]),
            Figure("pool_tokens", "tokens", pool_tokens(run, memory["num_blocks"])),
            Figure("kv_bytes_per_token", "bytes", None if dense is None else dense.bytes_per_token),
            Figure("allocated_but_unused", "share", None if dense is None else dense.waste),
            Figure("most_running", "requests", results.get("most_running")),
            Figure("preemptions", "times", stats.get("num_preemptions")),
            Figure("prefix_hits", "share", hits / queries if queries and hits is not None else None),
            Figure("output_tokens_per_s", "tokens/s", results.get("output_tokens_per_s")),
        ),
    )


def capacity_predictions(run: Run, predicted: Prediction) -> dict[str, measurement.Prediction]:
    figures = {
        "num_blocks": predicted.num_blocks,
        "block_bytes": predicted.block_bytes,
        "pool_tokens": pool_tokens(run, predicted.num_blocks),
        "kv_bytes_per_token": predicted.bytes_per_token,
    }
    return {name: measurement.Prediction(figure) for name, figure in figures.items()}


@dataclass(frozen=True, slots=True)
class ServedWorkload:
    """What one allocator served of the workload in the run's pool.

    waste  fraction of the allocated slots without a token, at the fullest moment, or None if the run does not say
    """

    allocator: str
    most_running: int
    output_tokens_per_s: float
    preemptions: int
    waste: float | None


def baselines(results: Results) -> list[ServedFigures]:
    """What other allocators served of the workload in the same pool."""
    return [other for other in (results.get("baseline"), results.get("second_baseline")) if other]


def served(run: Run) -> tuple[ServedWorkload, ...]:
    """Figures of the run's own allocator and, if the workload was served again, of the other."""
    results = run.results
    own = str((run.manifest.get("engine") or {}).get("allocator", "paged"))
    pairs: list[tuple[str, ServedFigures]] = [(own, results)]
    pairs += [(str(other.get("allocator")), other) for other in baselines(results)]
    return tuple(_served(name, results, run) for name, results in pairs if results)


def _served(name: str, results: ServedFigures, run: Run) -> ServedWorkload:
    fragments = fragmentation(run, results)
    return ServedWorkload(
        name,
        int(results.get("most_running") or 0),
        float(results.get("output_tokens_per_s") or 0.0),
        int((results.get("stats") or {}).get("num_preemptions") or 0),
        None if fragments is None else fragments.waste,
    )
