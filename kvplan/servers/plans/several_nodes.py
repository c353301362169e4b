"""Servers over several nodes: how many, and what a printed command says of them."""

from math import ceil
from typing import Final

from kvplan.servers.plans.plan import Request

HEAD: Final = "HEAD_NODE"  # stands for the address of the first node


def num_nodes(request: Request) -> int:
    """Fewest nodes that share a replica's ranks evenly."""
    ranks, most = request.args.world_size, request.gpu.node_gpus
    return next(nodes for nodes in range(ceil(ranks / most), ranks + 1) if ranks % nodes == 0)


def local_replicas(request: Request) -> int:
    """Most replicas on a node, as many on each; 1 if a replica spans nodes."""
    replicas, most = request.args.data_parallel_size, request.gpu.node_gpus // request.args.world_size
    return next((n for n in range(most, 1, -1) if replicas % n == 0), 1)


def says(request: Request, *flags: str) -> bool:
    """True if the pasted command has one of the flags, which printed commands repeat."""
    return request.repeated is not None and any(request.repeated.value(flag) is not None for flag in flags)


def note(others: str) -> str:
    """How to start the other nodes.

    others  what their commands have in addition or in place
    """
    return f"several nodes: the printed command is the first one's, for whose address {HEAD} stands; others {others}"
