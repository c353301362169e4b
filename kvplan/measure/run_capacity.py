"""What a run's pool held: blocks, tokens and requests, empty slots, and what each allocator served of the workload."""

from dataclasses import dataclass
from typing import Any

from kvplan.measure.run_manifest import inputs_of
from kvplan.measure.rundir import Run
from kvplan.servers.bundled.rules import Prediction


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """A number of the pool that is not bytes of a component."""

    name: str
    predicted: float | None
    measured: float | None
    unit: str


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """What the blocks in use held at the densest moment: bytes for each token in them, and the share without one."""

    bytes_per_token: float
    waste: float


def fragmentation(run: Run, results: dict[str, Any]) -> Fragmentation | None:
    """None where a run does not say how many slots were filled: tokens of requests that share blocks do not tell."""
    densest, stats = results.get("densest") or {}, results.get("stats") or {}
    groups, block_size = int(run.manifest.get("groups") or 1), int(run.manifest["inputs"]["block_size"])
    used, filled = densest.get("num_used_blocks"), densest.get("num_filled_slots")
    if filled is None and groups == 1 and not stats.get("prefix_cache_hits"):
        filled = densest.get("num_kv_tokens")
    if not used or not filled:
        return None
    held = used * run.manifest["memory"]["block_bytes"] * groups / filled
    return Fragmentation(held, 1 - filled / (used * block_size))


def capacity_rows(run: Run, predicted: Prediction) -> tuple[CapacityRow, ...]:
    """Blocks, tokens, and what the densest moment of the run says about bytes per token and fragmentation."""
    memory, results = run.manifest["memory"], run.manifest.get("results") or {}
    inputs, stats = inputs_of(run), results.get("stats") or {}
    found = fragmentation(run, results)
    groups = int(run.manifest.get("groups") or 1)
    queries, hits = stats.get("prefix_cache_queries"), stats.get("prefix_cache_hits")

    def pool_tokens(num_blocks: int) -> float:
        return max(0, num_blocks - 1) // groups * inputs.block_size

    return (
        CapacityRow("num_blocks", predicted.num_blocks, memory["num_blocks"], "blocks"),
        CapacityRow("block_bytes", predicted.block_bytes, memory["block_bytes"], "bytes"),
        CapacityRow("pool_tokens", pool_tokens(predicted.num_blocks), pool_tokens(memory["num_blocks"]), "tokens"),
        CapacityRow(
            "kv_bytes_per_token", predicted.bytes_per_token, None if found is None else found.bytes_per_token, "bytes"
        ),
        CapacityRow("allocated_but_unused", None, None if found is None else found.waste, "share"),
        CapacityRow("most_running", None, results.get("most_running"), "requests"),
        CapacityRow("preemptions", None, stats.get("num_preemptions"), "times"),
        CapacityRow("prefix_hits", None, hits / queries if queries and hits is not None else None, "share"),
        CapacityRow("output_tokens_per_s", None, results.get("output_tokens_per_s"), "tokens/s"),
    )


@dataclass(frozen=True, slots=True)
class Served:
    """How one allocator served the workload in the run's pool.

    waste  share of the blocks handed out that held no token, at the densest moment; None: the run does not tell
    """

    allocator: str
    most_running: int
    output_tokens_per_s: float
    preemptions: int
    waste: float | None


def served(run: Run) -> tuple[Served, ...]:
    """The run's own allocator and, where the workload was served again, the other."""
    results = run.manifest.get("results") or {}
    own = str((run.manifest.get("engine") or {}).get("allocator", "paged"))
    pairs = [
        (own, results),
        *([(str(results["baseline"].get("allocator")), results["baseline"])] if results.get("baseline") else []),
    ]
    return tuple(_served(name, one, run) for name, one in pairs if one)


def _served(name: str, results: dict[str, Any], run: Run) -> Served:
    found = fragmentation(run, results)
    return Served(
        name,
        int(results.get("most_running") or 0),
        float(results.get("output_tokens_per_s") or 0.0),
        int((results.get("stats") or {}).get("num_preemptions") or 0),
        None if found is None else found.waste,
    )
