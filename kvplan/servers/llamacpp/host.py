"""Host memory of a llama.cpp server: the layers and caches that are not on a GPU, and its own buffers."""

from kvplan.servers.llamacpp.changes import SOURCE
from kvplan.servers.plans.plan import HostRow, Plan

COMPARED = "the answers of llama.cpp's own code"


def rows(plan: Plan) -> tuple[HostRow, ...]:
    assert plan.slots is not None
    place = next(place for place in plan.slots.places if place.name == "host")
    sized = (
        ("weights", place.weights, "tensors that stay on the host; mapped from the file, unless --no-mmap"),
        ("kv_offloading", place.context, "caches of the layers on the host"),
        ("buffers", place.compute, "the host's part of the graph"),
    )
    return tuple(HostRow(name, size, "replica", text, SOURCE, COMPARED) for name, size, text in sized if size)
