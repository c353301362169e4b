"""What a plan takes of the host's memory."""

from typing import Final

from kvplan.planning.plan import Plan
from kvplan.servers.base import server_of
from kvplan.servers.plans import HostRow
from kvplan.sizing.disk import stored_bytes

NOT_MODELED: Final = (
    "the processes themselves (Python, torch, the CUDA libraries and context), tokenized requests, images, NCCL's "
    "buffers"
)
READ_ONCE: Final = (
    "the files, read through the page cache: given back when others need it, but a container's limit counts it"
)
PUBLISHED: Final = "the sizes of published files (tests/sizing/test_disk.py)"


def host_rows(plan: Plan) -> list[HostRow]:
    """Rows of each rank first; then what a replica takes once."""
    rows = list(server_of(plan.request.release.engine).host(plan))
    stored = plan.request.weights_bytes or stored_bytes(plan.request.spec)
    if stored is not None:
        rows.append(HostRow("checkpoint", stored, "replica", READ_ONCE, "kvplan/sizing/disk.py", PUBLISHED))
    return sorted(rows, key=lambda row: row.per != "rank")


def rank_bytes(rows: list[HostRow]) -> int:
    return sum(row.size for row in rows if row.per == "rank")
