"""Host memory of a llama.cpp server: the layers and caches that are not on a GPU, and its own buffers."""

from kvplan.servers.llamacpp.changes import SOURCE
from kvplan.servers.plans.plan import HostRow, Plan

COMPARED = "the answers of llama.cpp's own code"


def rows(plan: Plan) -> tuple[HostRow, ...]:
    assert plan.slots is not None
    place = next(place for place in plan.slots.places if place.name == "host")
    mapped = "tensors that stay on the host; mapped from the file, unless --no-mmap"
    sized = (
        HostRow("weights", place.weights, "replica", mapped, SOURCE, COMPARED),
        HostRow("kv_offloading", place.context, "replica", "caches of the layers on the host", SOURCE, COMPARED),
        HostRow("buffers", place.compute, "replica", "the host's part of the graph", SOURCE, COMPARED),
    )
    return tuple(row for row in sized if row.size)
