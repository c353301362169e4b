"""SGLang servers over several nodes. Source: SGLang 0.5.23 srt/server_args.py."""

from typing import Final

from kvplan.servers.plans import several_nodes as nodes
from kvplan.servers.plans.plan import Request

FLAGS: Final = ("--nnodes", "--dist-init-addr")  # of commands that say themselves how they span nodes
PORT: Final = 20000  # any free port of the first node


def spans(request: Request) -> bool:
    return request.args.world_size > request.gpu.node_gpus and not nodes.says(request, *FLAGS)


def words(request: Request) -> list[str]:
    """Flags of the first node's command, if the server spans several."""
    if not spans(request):
        return []
    count = nodes.num_nodes(request)
    return ["--nnodes", str(count), "--node-rank", "0", "--dist-init-addr", f"{nodes.HEAD}:{PORT}"]


def notes(request: Request) -> list[str]:
    """How the other nodes start."""
    last = nodes.num_nodes(request) - 1
    return [nodes.note(f"have --node-rank 1 to {last}")] if spans(request) else []
