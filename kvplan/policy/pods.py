"""The memory that a manifest gives a pod, compared with what its server keeps on the host."""

from math import floor
from typing import TYPE_CHECKING, Final

from kvplan.core.units import GIB, format_gib
from kvplan.planning.plan import Plan, kept_rows
from kvplan.servers.base import flag_of, server_of, terms_of

if TYPE_CHECKING:
    from kvplan.asked.manifest import ServedContainer

NAMES: Final = {
    "kv_offloading": "offloaded KV",
    "kv_transfer": "KV to transfer",
    "weights": "weights",
    "adapters": "adapters",
    "processor_cache": "processed images, videos and sounds",
    "shared_memory": "queues of its processes",
    "swap_space": "swap space",
    "buffers": "buffers",
}


def shortage(plan: Plan, served: "ServedContainer") -> tuple[str, str] | None:
    """(what the pod lacks, the cure), or None if it has room or states no limit. Several pods of a server divide the
    rows in ways that a manifest does not state.
    """
    return None if served.num_pods > 1 else lacking(plan, shm=served.shm, memory=served.memory)


def lacking(
    plan: Plan, *, shm: int | None = None, memory: int | None = None, name: str = "the memory limit"
) -> tuple[str, str] | None:
    """(what the host lacks for what a server keeps there, the cure), or None; None: a size is not known.

    The workers' own memory is the least that was measured; the other processes' and NCCL's share of /dev/shm come on
    top. A GPU that shares the host's memory takes its part of the same bytes; its budget has room for the workers.
    """
    rows = kept_rows(plan)
    resident = [(NAMES[row.name], size) for row, size in rows]
    shared = [(NAMES[row.name], size) for row, size in rows if row.in_shm]
    if plan.request.gpu.unified:
        own = ("what the GPU takes of the same memory", plan.memory.budget + plan.estimates["context"].likely)
    else:
        own = ("its workers", plan.request.args.num_gpus * server_of(plan.request.release.engine).launch().worker)
    for limit, parts, place, key, also in (
        (shm, shared, "/dev/shm", "the size of /dev/shm", "NCCL"),
        (memory, [*resident, own], name, name, "each process"),
    ):
        needed = sum(size for _, size in parts)
        if limit is not None and limit < needed:
            names = " and ".join(dict.fromkeys(name for name, size in parts if size))
            problem = f"{place} is {format_gib(limit)}, less than {format_gib(needed)} for {names}"
            if parts[-1] is own and plan.request.gpu.unified:
                return problem, lower_share(plan, needed - limit)
            return problem, f"raise {key} above {-(-needed // GIB)}Gi, by a few GiB for {also}"
    return None


def lower_share(plan: Plan, excess: int) -> str:
    """The remedy where GPU and host share one memory: a smaller fraction for the server, or a smaller file."""
    if plan.slots is not None:
        return "what does not fit is read from the disk for each token; take a smaller file (--quant)"
    engine, total = plan.request.release.engine, plan.request.gpu.total_memory
    share = max(0, floor(100 * (plan.memory.budget - excess) / total)) / 100
    return f"lower {flag_of(engine, terms_of(engine).share_argument)} to {share:.2f} or less"
