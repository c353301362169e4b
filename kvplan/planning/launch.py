"""How a plan is launched: the command that starts it, and what it takes of the host's memory."""

from typing import Final

from kvplan.planning.plan import Plan
from kvplan.servers import environment
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


def serve_command(plan: Plan) -> list[str]:
    """The words of the command that starts exactly what was planned, with the variables of its release.

    What the plan depends on is pinned even where it is this release's default.
    """
    variables = environment.assignments(plan.request.release, plan.request.args)
    return [*variables, *server_of(plan.request.release.engine).launch(plan)]


def context_word(words: list[str], flag: str) -> str:
    """The context that a command asks for with its server's flag, as it is written there."""
    return words[words.index(flag) + 1]


def host_rows(plan: Plan) -> list[HostRow]:
    """Rows of each rank first; then what a replica takes once."""
    rows = list(server_of(plan.request.release.engine).host(plan))
    stored = plan.request.weights_bytes or stored_bytes(plan.request.spec)
    if stored is not None:
        rows.append(HostRow("checkpoint", stored, "replica", READ_ONCE, "kvplan/sizing/disk.py", PUBLISHED))
    return sorted(rows, key=lambda row: row.per != "rank")


def rank_bytes(rows: list[HostRow]) -> int:
    return sum(row.size for row in rows if row.per == "rank")
