"""Whether a server loads, and what stops it: buffers are allocated in llama.cpp's own order.

Source: llama.cpp at commit 0c1e57098: `load_tensors` (weights of every place), `llama_context` (caches, then compute
buffers, which are tried again without copies for several devices at work at once).
"""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from kvplan.servers.llamacpp.measure import Measured, Server
from kvplan.servers.llamacpp.settings import Device, Settings

Buffer = Literal["weights", "context", "compute"]
ORDER: Final[tuple[Buffer, ...]] = ("weights", "context", "compute")


class Obstacle(NamedTuple):
    """The first buffer that does not fit: its place (None: the host), its bytes, and those that are left for it."""

    place: int | None
    buffer: Buffer
    size: int
    left: int


def obstacle(measured: Measured, devices: Sequence[Device], host_memory: int | None = None, *,
             mapped: bool = True) -> Obstacle | None:  # fmt: skip
    """What stops the load, or None.

    host_memory  bytes that the host has left; None: enough. A device with the host's memory shares its own.
    mapped       weights of the host stay in their file's pages, which the system can take back
    """
    left: dict[int | None, int | None] = {i: devices[i].free for i in measured.placement.devices}
    shared = next((i for i in measured.placement.devices if devices[i].integrated), None)
    left[None] = host_memory
    for buffer in ORDER:
        for place, memory in measured.places.items():
            size: int = getattr(memory, buffer)
            if place is None and (shared is not None or (buffer == "weights" and mapped)):
                if shared is None:
                    continue
                place = shared
            room = left[place]
            if room is None or not size:
                continue
            if size > room:
                return Obstacle(place, buffer, size, room)
            left[place] = room - size
    return None


def loaded(server: Server, settings: Settings, host_memory: int | None = None) -> tuple[Measured, Obstacle | None]:
    """What the server allocates in the end, and what stops it."""
    first = server.allocate(settings)
    problem = obstacle(first, server.devices, host_memory, mapped=settings.mapped)
    if problem is None or problem.buffer != "compute" or first.copies == 1:
        return first, problem
    again = server.allocate(settings, pipeline=False)
    return again, obstacle(again, server.devices, host_memory, mapped=settings.mapped)
