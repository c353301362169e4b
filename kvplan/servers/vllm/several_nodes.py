"""vLLM servers over several nodes. Source: vLLM 0.33 config/parallel.py."""

from typing import Final

from kvplan.servers.plans import several_nodes as nodes
from kvplan.servers.plans.plan import Request

# Flags of commands that say themselves how they span nodes.
FLAGS: Final = (
    "--nnodes", "--distributed-executor-backend", "--data-parallel-size-local", "--data-parallel-address",
)  # fmt: skip


def words(request: Request) -> list[str]:
    """Flags of the first node's command, if the server spans several."""
    args = request.args
    if nodes.says(request, *FLAGS):
        return []
    flags = []
    if args.data_parallel_size > 1 and args.num_gpus > request.gpu.node_gpus:
        local = nodes.local_replicas(request)
        flags = ["--data-parallel-size-local", str(local), "--data-parallel-address", nodes.HEAD]
    if args.world_size <= request.gpu.node_gpus:
        return flags
    if not request.release.is_compared:
        return [*flags, "--distributed-executor-backend", "ray"]
    count = nodes.num_nodes(request)
    return [*flags, "--nnodes", str(count), "--node-rank", "0", "--master-addr", nodes.HEAD]


def notes(request: Request) -> list[str]:
    """How the other nodes start."""
    args = request.args
    if args.num_gpus <= request.gpu.node_gpus or nodes.says(request, *FLAGS):
        return []
    if args.world_size <= request.gpu.node_gpus:
        step = nodes.local_replicas(request)
        return [nodes.note(f"have --headless and --data-parallel-start-rank in steps of {step}")]
    if not request.release.is_compared:
        return ["several nodes: the printed command starts on the head of a Ray cluster of them"]
    return [nodes.note(f"have --headless and --node-rank 1 to {nodes.num_nodes(request) - 1}")]
