"""How to launch a plan: the command that starts it, and its host memory."""

from typing import Final

from kvplan.planning.plan import Plan
from kvplan.servers import environment
from kvplan.servers.base import server_of
from kvplan.servers.plans import HostRow
from kvplan.sizing.disk import stored_bytes

NOT_MODELED: Final = (
    "memory of the processes (Python, torch, the CUDA libraries and context), tokenized requests, images, NCCL's "
    "buffers"
)
READ_ONCE: Final = (
    "the files, read through the page cache: freed when others need it, but a container's limit counts it"
)
PUBLISHED: Final = "the sizes of published files (tests/sizing/test_disk.py)"


def serve_command(plan: Plan) -> list[str]:
    """Words of the command that starts exactly the planned server, with its environment variables.

    Settings that the plan depends on are pinned even if they are this release's defaults; what a pasted command of
    the same server says besides stands at the end.
    """
    release, repeated = plan.request.release, plan.request.repeated
    variables = environment.assignments(release, plan.request.args)
    others = repeated.words if repeated is not None and repeated.server == release.engine else ()
    return [*variables, *server_of(release.engine).launch(plan), *others]


def context_word(words: list[str], flag: str) -> str:
    """Context length in a command, exactly as it follows the server's flag."""
    return words[words.index(flag) + 1]


def host_rows(plan: Plan) -> list[HostRow]:
    """Host memory rows: per rank first, then those that a replica has once."""
    rows = list(server_of(plan.request.release.engine).host(plan))
    stored = plan.request.weights_bytes or stored_bytes(plan.request.spec)
    if stored is not None:
        rows.append(HostRow("checkpoint", stored, "replica", READ_ONCE, "kvplan/sizing/disk.py", PUBLISHED))
    return sorted(rows, key=lambda row: row.per != "rank")


def rank_bytes(rows: list[HostRow]) -> int:
    return sum(row.size for row in rows if row.per == "rank")


def kept_rows(plan: Plan) -> list[tuple[HostRow, int]]:
    """Host memory that a server keeps while it runs, each row with the bytes of all its ranks: without the checkpoint,
    which is read once.
    """
    args = plan.request.args
    replicas = 1 if args.enable_dp_attention else args.data_parallel_size
    rows = (row for row in host_rows(plan) if row.name != "checkpoint")
    return [(row, row.size * (args.num_gpus if row.per == "rank" else replicas)) for row in rows]
