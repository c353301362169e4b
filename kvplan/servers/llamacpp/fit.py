"""`--fit`: how llama.cpp changes what is not given until a model fits into the free memory of its devices.

Source: llama.cpp at commit 0c1e57098, `common_params_fit_impl`: first a smaller context, then fewer layers on devices
(for a mixture of experts: layers without their experts), then experts back where there is room, part by part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from kvplan.core.errors import UsageError
from kvplan.servers.llamacpp.measure import Measured, Server
from kvplan.servers.llamacpp.settings import CELLS, Override, Settings
from kvplan.servers.llamacpp.shape import Shape

Part = Literal["experts", "attention", "up", "gate"]
# What of a layer overflows to the next device or to the host, by what stays.
OVERFLOW: Final[dict[Part, str]] = {
    "attention": r"blk\.{}\.ffn_(gate|up|gate_up|down).*",
    "up": r"blk\.{}\.ffn_(gate|gate_up|down).*",
    "gate": r"blk\.{}\.ffn_down.*",
    "experts": r"blk\.{}\.ffn_(up|down|gate_up|gate)_(ch|)exps",
}
ALL_EXPERTS: Final = Override(r"blk\.\d+\.ffn_(up|down|gate_up|gate)_(ch|)exps", None)
UNSIGNED: Final = 1 << 32


class Fit(NamedTuple):
    """What `--fit` chose.

    settings  the settings with the context, layers and overrides that it chose
    changed   whether it had to choose any
    problem   why it gave up; the server then starts with these settings all the same
    """

    settings: Settings
    changed: bool
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """A device's layers: how many, and how many of them lack their experts; of the first of these, what it keeps."""

    layers: int = 0
    partial: int = 0
    keeps: Part = "experts"
    overflow: int | None = None

    @property
    def full(self) -> int:
        return self.layers - self.partial


def quotient(numerator: int, denominator: int) -> int:
    """Integer division as C does it, towards zero."""
    result = abs(numerator) // abs(denominator)
    return result if (numerator < 0) == (denominator < 0) else -result


def fit(server: Server, settings: Settings, host_memory: int | None = None) -> Fit:
    """What `--fit` makes of the settings; `host_memory` is asked for only without a device."""
    fitting = Fitting(server, settings, host_memory)
    try:
        return fitting.run()
    except _GaveUp as problem:
        return Fit(fitting.settings, fitting.settings != settings, str(problem))


class _GaveUp(Exception):
    """llama.cpp warns, and loads with what it has so far."""


class Fitting:
    """One run of `--fit`."""

    def __init__(self, server: Server, settings: Settings, host_memory: int | None) -> None:
        self.server, self.settings, self.stated, self.host_memory = server, settings, settings, host_memory
        self.numbers = server.measure(settings).placement.devices
        targets = settings.fit_target
        self.margins = [targets[i if i < len(targets) else -1] for i in range(max(1, len(self.numbers)))]
        if len(targets) not in (1, *range(len(self.numbers), len(server.devices) + 1)):
            problem = f"states {len(targets)} margins for {len(self.numbers)} devices"
            raise UsageError("--fit-target", problem, "state one, or one for each")
        self.free = [server.devices[i].free for i in self.numbers]
        self.targets = [free - margin for free, margin in zip(self.free, self.margins, strict=False)]
        self.last = len(self.numbers) - 1

    @property
    def shape(self) -> Shape:
        return self.server.shape

    @property
    def num_layers(self) -> int:
        """Layers that are loaded."""
        return self.shape.num_blocks if self.settings.mtp_tokens else self.shape.num_layers

    def used(self, settings: Settings) -> list[int]:
        """Bytes that the server allocates on each device; without one, on the host."""
        measured: Measured = self.server.measure(settings, replace(self.stated, ctx=settings.ctx))
        return [measured.places[i].total for i in self.numbers or (None,)]

    def run(self) -> Fit:
        stated = self.settings
        streams = 1 if stated.is_unified else stated.num_slots
        if stated.ctx == 0:
            self.settings = replace(stated, ctx=self.shape.trained_ctx * streams)
        used = self.used(self.settings)
        free = self.free or [self.host_memory or sum(used) + self.margins[0]]
        if all(f - u >= margin for f, u, margin in zip(free, used, self.margins, strict=True)):
            return Fit(self.settings, False)
        if sum(free) - sum(used) < sum(self.margins) and stated.ctx == 0 and self.smaller_context(free, used, streams):
            return Fit(self.settings, True)
        self.refuse_stated()
        return Fit(self.spread(), True)

    # --- context -------------------------------------------------------------------------------------------------

    def smaller_context(self, free: Sequence[int], used: Sequence[int], streams: int) -> bool:
        """Interpolate the context between the least and the largest; True if that suffices."""
        largest, lowest = self.shape.trained_ctx * streams, self.settings.fit_ctx * streams
        if largest <= lowest:
            return False
        budget = sum(free) - sum(self.margins)
        devices = len(self.numbers)
        if devices > 1:
            measured = self.server.measure(self.settings)
            weights = sum(measured.places[i].weights for i in self.numbers)
            stated = self.settings.gpu_layers
            layers = self.num_layers if stated is None else min(stated, self.num_layers)
            per_layer = weights // layers
            budget -= (devices + 1) * per_layer // (6 if self.shape.num_experts else 2)
        self.settings = replace(self.settings, ctx=lowest)
        smallest = sum(self.used(self.settings))
        if budget <= smallest:
            return False
        ctx = lowest + (largest - lowest) * (budget - smallest) // (sum(used) - smallest)
        ctx = max(ctx - ctx % (CELLS * streams), lowest)
        self.settings = replace(self.settings, ctx=ctx)
        return devices <= 1

    def refuse_stated(self) -> None:
        """Give up where a value is given that would have to change."""
        settings = self.settings
        if not self.numbers:
            raise _GaveUp("the model does not fit into the system's memory with a smaller context")
        if settings.gpu_layers is not None:
            raise _GaveUp(f"-ngl {settings.gpu_layers} is given, so --fit does not change the layers")
        if len(self.numbers) > 1 and any(settings.split):
            raise _GaveUp("-ts is given, so --fit does not change the layers")
        if settings.overrides:
            raise _GaveUp("-ot, -cmoe or -ncmoe is given, so --fit does not change the layers")

    # --- layers ---------------------------------------------------------------------------------------------------

    def with_shares(self, shares: Sequence[Share]) -> Settings:
        """The settings with so many layers on each device."""
        total = sum(share.layers for share in shares)
        layer = self.num_layers + 1 - total
        overrides = []
        for share in shares:
            layer += share.full
            for i in range(share.partial):
                keeps, where = (share.keeps, share.overflow) if i == 0 else ("experts", None)
                overrides.append(Override(OVERFLOW[keeps].format(layer + i), where))
            layer += share.partial
        split = tuple(float(share.layers) for share in shares) if len(shares) > 1 else ()
        return replace(self.settings, gpu_layers=total, split=split, overrides=tuple(overrides))

    def memory(self, shares: Sequence[Share]) -> list[int]:
        return self.used(self.with_shares(shares))

    def spread(self) -> Settings:
        """Fill the devices from the last to the first, then give experts back from the first to the last."""
        surplus = 0
        if self.shape.num_experts:
            lean = self.used(replace(self.settings, overrides=(ALL_EXPERTS,)))
            surplus = sum(self.targets) - sum(lean)
        shares = [Share()] * len(self.numbers)
        memory = self.memory(shares)
        for device in reversed(range(len(shares))):
            shares, memory = self.fill(device, shares, memory)
        if not self.shape.num_experts or surplus <= 0:
            return self.with_shares(shares)
        return self.with_shares(self.give_back(shares, memory))

    def step(self, device: int, delta: int, memory: Sequence[int], high: Sequence[int]) -> int:
        """Layers to try next by false position; a negative number is a huge one, as in C."""
        guess = quotient(delta * (self.targets[device] - memory[device]), high[device] - memory[device]) % UNSIGNED
        return min(max(guess, 1), delta - 1)

    def fill(self, device: int, shares: list[Share], memory: list[int]) -> tuple[list[Share], list[int]]:
        """As many layers on a device as fit, without experts if the model has any; the last one has the output."""
        experts = bool(self.shape.num_experts)
        unassigned = self.num_layers + 1 - sum(share.layers for share in shares[device + 1 :])
        if not unassigned:
            return shares, memory
        is_last = device == self.last

        def with_share(share: Share) -> list[Share]:
            return [*shares[:device], share, *shares[device + 1 :]]

        low = shares[device]
        high = Share(unassigned, unassigned - is_last if experts else 0)
        high_memory = self.memory(with_share(high))
        if high_memory[device] <= self.targets[device]:
            return with_share(high), high_memory
        while high.layers - low.layers > 1:
            step = self.step(device, high.layers - low.layers, memory, high_memory)
            partial = low.partial + step - (is_last and low.partial == 0) if experts else 0
            test = Share(low.layers + step, partial)
            test_memory = self.memory(with_share(test))
            if test_memory[device] <= self.targets[device]:
                low, memory = test, test_memory
            else:
                high, high_memory = test, test_memory
        return with_share(low), memory

    # --- experts -----------------------------------------------------------------------------------------------------

    def give_back(self, shares: list[Share], memory: list[int]) -> list[Share]:
        """Turn layers without experts into full ones, from the first device on."""
        filled = [all(share.layers for share in shares[i:]) for i in range(len(shares))]
        start = filled.index(True) if any(filled) else len(shares)
        device = 0
        while device <= start < len(shares):
            shares, memory, start = self.convert(device, shares, memory, start)
            shares, memory, start = self.one_more(device, shares, memory, start)
            device += 1
        return shares

    def convert(self, device: int, shares: list[Share], memory: list[int],
                start: int) -> tuple[list[Share], list[int], int]:  # fmt: skip
        """As many full layers on a device as fit, taken from those without experts behind it."""
        high = list(shares)
        for j in range(start, len(shares)):
            moved = high[j].layers - (1 if j == self.last else 0)
            high[device] = replace(high[device], layers=high[device].layers + moved)
            high[j] = replace(high[j], layers=high[j].layers - moved, partial=0)
        high_memory = self.memory(high)
        if high_memory[device] <= self.targets[device]:
            return high, high_memory, self.last
        delta = high[device].full - shares[device].full
        while delta > 1:
            test, test_start = moved_layers(shares, device, start, self.step(device, delta, memory, high_memory))
            test_memory = self.memory(test)
            if test_memory[device] <= self.targets[device]:
                shares, memory, start = test, test_memory, test_start
            else:
                high, high_memory = test, test_memory
            delta = high[device].full - shares[device].full
        return shares, memory, start

    def one_more(self, device: int, shares: list[Share], memory: list[int],
                 start: int) -> tuple[list[Share], list[int], int]:  # fmt: skip
        """A part of one more layer: attention and up, with the gate too, or attention alone."""
        if shares[start].layers <= (1 if device == self.last else 0):
            return shares, memory, start
        test = list(shares)
        test[start] = replace(test[start], layers=test[start].layers - 1, partial=test[start].partial - 1)
        test[device] = replace(test[device], layers=test[device].layers + 1, partial=test[device].partial + 1)
        after = start + 1 if test[start].partial == 0 else start
        overflow = self.numbers[device + 1] if device < self.last else None

        def keeping(part: Part) -> tuple[list[Share], list[int]]:
            trial = list(test)
            trial[device] = replace(trial[device], keeps=part, overflow=overflow)
            return trial, self.memory(trial)

        trial, used = keeping("up")
        if not self.has_room(device, used):
            trial, used = keeping("attention")
            return (trial, used, after) if self.has_room(device, used) else (shares, memory, start)
        more, more_used = keeping("gate")
        return (more, more_used, after) if self.has_room(device, more_used) else (trial, used, after)

    def has_room(self, device: int, used: Sequence[int]) -> bool:
        following = used[device + 1 : device + 2]
        return used[device] < self.targets[device] and all(u < self.targets[device + 1] for u in following)


def moved_layers(shares: Sequence[Share], device: int, start: int, count: int) -> tuple[list[Share], int]:
    """The shares with so many layers made full on a device, and where layers without experts then begin."""
    test, moved = list(shares), 0
    while start < len(test):
        part = min(count - moved, test[start].partial)
        test[start] = replace(test[start], layers=test[start].layers - part, partial=test[start].partial - part)
        test[device] = replace(test[device], layers=test[device].layers + part)
        moved += part
        if test[start].partial > 0:
            break
        start += 1
    return test, start
