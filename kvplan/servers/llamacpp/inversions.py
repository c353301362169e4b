"""The other way round: the longest context, the most layers on devices and the fewest experts on the host that fit."""

from collections.abc import Callable
from dataclasses import replace

from kvplan.servers.llamacpp.measure import Server
from kvplan.servers.llamacpp.settings import CELLS, Override, Settings

EXPERTS_OF_LAYER = r"blk\.{}\.ffn_(up|down|gate_up|gate)_(ch|)exps"


def room(server: Server, settings: Settings, margin: int = 0) -> int:
    """Bytes left on the fullest device beside a margin; negative: as many are missing."""
    measured = server.allocate(settings)
    if not measured.placement.devices:
        return 0
    return min(server.devices[i].free - measured.places[i].total for i in measured.placement.devices) - margin


def largest(low: int, high: int, left: Callable[[int], int]) -> int | None:
    """The largest number from low to high that leaves no less than nothing; None: none does.

    `left` falls as the number grows, nearly in a line: false position finds it in a few steps.
    """
    high_left = left(high)
    if high_left >= 0:
        return high
    low_left = left(low)
    if low_left < 0:
        return None
    while high - low > 1:
        guess = low + (high - low) * low_left // (low_left - high_left)
        guess = min(max(guess, low + 1), high - 1)
        guess_left = left(guess)
        if guess_left >= 0:
            low, low_left = guess, guess_left
        else:
            high, high_left = guess, guess_left
    return low


def longest_context(server: Server, settings: Settings, margin: int = 0) -> int | None:
    """The largest -c with which the devices have room, at most what the model was trained for in each slot's cache."""
    streams = 1 if settings.is_unified else settings.num_slots
    step = CELLS * streams
    best = largest(1, max(1, server.shape.trained_ctx * streams // step),
                lambda runs: room(server, replace(settings, ctx=runs * step), margin))  # fmt: skip
    return None if best is None else best * step


def most_layers(server: Server, settings: Settings, margin: int = 0) -> int | None:
    """The largest -ngl with which the devices have room; the output is a layer."""
    total = server.shape.num_blocks + 1
    return largest(0, total, lambda layers: room(server, replace(settings, gpu_layers=layers), margin))


def fewest_host_experts(server: Server, settings: Settings, margin: int = 0) -> int | None:
    """The smallest -ncmoe with which the devices have room; None: not even with every layer's experts on the host."""
    layers = server.shape.num_layers

    def left(on_devices: int) -> int:
        moved = tuple(Override(EXPERTS_OF_LAYER.format(i), None) for i in range(layers - on_devices))
        return room(server, replace(settings, overrides=(*moved, *settings.overrides)), margin)

    best = largest(0, layers, left)
    return None if best is None else layers - best
