"""The memory that a manifest gives a pod, compared with what its server keeps on the host."""

from typing import Final

from kvplan.asked.manifest import Served
from kvplan.core.units import GIB, format_gib
from kvplan.planning.plan import Plan, kept_rows

NAMES: Final = {
    "kv_offloading": "offloaded KV",
    "kv_transfer": "KV to transfer",
    "weights": "weights",
    "adapters": "adapters",
    "processor_cache": "processed images, videos and sounds",
    "shared_memory": "queues of its processes",
    "swap_space": "swap space",
}


def shortage(plan: Plan, served: Served) -> tuple[str, str] | None:
    """(what the pod lacks, the cure), or None if it has room or states no limit.

    The processes' own memory and NCCL's share of /dev/shm come on top; both are not modeled. Several pods of a server
    divide the rows in ways that a manifest does not state.
    """
    if served.num_pods > 1:
        return None
    rows = kept_rows(plan)
    shared = [(row, size) for row, size in rows if row.in_shm]
    for limit, sizes, place, key, also in (
        (served.shm, shared, "/dev/shm", "the size of /dev/shm", "NCCL"),
        (served.memory, rows, "the memory limit", "the memory limit", "each process"),
    ):
        needed = sum(size for _, size in sizes)
        if limit is not None and limit < needed:
            names = " and ".join(dict.fromkeys(NAMES[row.name] for row, _ in sizes))
            problem = f"{place} is {format_gib(limit)}, less than {format_gib(needed)} for {names}"
            return problem, f"raise {key} above {-(-needed // GIB)}Gi, by a few GiB for {also}"
    return None
