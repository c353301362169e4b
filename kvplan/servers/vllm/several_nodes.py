"""vLLM servers over several nodes. Source: vLLM 0.33 config/parallel.py."""

from typing import Final

from kvplan.hardware.gpu import NODE_GPUS
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
    if args.data_parallel_size > 1 and args.num_gpus > NODE_GPUS:
        local = nodes.local_replicas(args.data_parallel_size, args.world_size)
        flags = ["--data-parallel-size-local", str(local), "--data-parallel-address", nodes.HEAD]
    if args.world_size <= NODE_GPUS:
        return flags
    if not request.release.is_compared:
        return [*flags, "--distributed-executor-backend", "ray"]
    count = nodes.num_nodes(args.world_size)
    return [*flags, "--nnodes", str(count), "--node-rank", "0", "--master-addr", nodes.HEAD]


def notes(request: Request) -> list[str]:
    """How the other nodes start."""
    args = request.args
    if args.num_gpus <= NODE_GPUS or nodes.says(request, *FLAGS):
        return []
    if args.world_size <= NODE_GPUS:
        step = nodes.local_replicas(args.data_parallel_size, args.world_size)
        return [nodes.note(f"have --headless and --data-parallel-start-rank in steps of {step}")]
    if not request.release.is_compared:
        return ["several nodes: the printed command starts on the head of a Ray cluster of them"]
    return [nodes.note(f"have --headless and --node-rank 1 to {nodes.num_nodes(args.world_size) - 1}")]
