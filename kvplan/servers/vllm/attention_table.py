"""Which of vLLM's attention backends run a layer, looked up in a table of the server's own answers.

attention.json holds what each backend of 0.33 answered on each compute capability, axis by axis, with the combinations
that it refuses (benchmarks/start_attention.py asks, and compares it with fresh answers). Only plans that need it read
it.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

from kvplan.core.records import dataclass

Runs = tuple[tuple[int, int, int], ...]  # first, last and step of runs of numbers
MOST_BLOCK: Final = 1024  # largest block asked; a run that ends here goes on


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer needs of its backend.

    kv      KV dtype as vLLM names it; "auto" is the model's
    width   of a head; for MLA, of the latent with its rope key
    block   block size in tokens, if it was stated
    latent  it is MLA; sparse: with an indexer
    flags   further needs: sinks, ahead (an image's tokens attend bidirectionally), window, dcp, by_head (scales of each
            head)
    encodes nothing is cached: every token attends to every other
    """

    kv: str
    width: int
    dtype: str
    block: int | None = None
    latent: bool = False
    sparse: bool = False
    flags: frozenset[str] = frozenset()
    encodes: bool = False


@dataclass(frozen=True, slots=True)
class Answers:
    """One backend's answers on some compute capabilities; see benchmarks/start_attention.py for the axes.

    why     reasons for which nothing runs there
    unless  refused combinations: values of several axes, and the reason
    uneven  the backend takes heads whose keys are wider than their values: without sinks, and with
    """

    backend: str
    sm: tuple[int, ...]
    latent: bool
    sparse: bool
    kv: tuple[str, ...]
    dtypes: tuple[str, ...]
    widths: Runs
    blocks: Runs
    flags: tuple[str, ...]
    encodes: bool
    layouts: tuple[str, ...] | None
    why: tuple[str, ...]
    unless: tuple[Mapping[str, Any], ...]
    uneven: tuple[bool, ...]

    def reasons(self, layer: Layer) -> Iterator[str]:
        """Why the backend does not run a layer, in vLLM's words and order."""
        if not within(layer.width, self.widths):
            yield "head_size not supported"
        if layer.dtype not in self.dtypes:
            yield "dtype not supported"
        if layer.kv not in self.kv:
            yield "kv_cache_dtype not supported"
        if layer.block is not None and not within(layer.block, self.blocks):
            yield "block_size not supported"
        if layer.latent != self.latent:
            yield "MLA not supported" if layer.latent else "non-MLA not supported"
        yield from (text for flag, text in FLAG_REASONS.items() if flag in layer.flags and flag not in self.flags)
        if layer.sparse != self.sparse:
            yield "sparse not supported" if layer.sparse else "non-sparse not supported"
        if layer.encodes and not self.encodes:
            yield "attention type encoder_only not supported"
        yield from self.why
        for item in self.unless:
            if all(holds(layer, axis, values) for axis, values in item.items() if axis != "why"):
                yield item["why"]


FLAG_REASONS: Final = {
    "ahead": "partial multimodal token full attention not supported", "sinks": "attention sinks not supported",
    "by_head": "per-head quant scales not supported", "window": "sliding window not supported",
    "dcp": "DCP not supported",
}  # fmt: skip


def within(value: int, runs: Runs) -> bool:
    return any(
        first <= value and (value <= last or last == MOST_BLOCK) and (value - first) % step == 0
        for first, last, step in runs
    )


def holds(layer: Layer, axis: str, values: list[Any]) -> bool:
    """True if a layer's value on an axis is among those of a refused combination."""
    match axis:
        case "width":  # a width that was not asked in combinations is taken for the next wider one that was
            return next((answers for answers in _table().widths if answers >= layer.width), layer.width) in values
        case "kv":
            return layer.kv in values
        case "dtype":
            return layer.dtype in values
        case "block":  # likewise, for the largest block asked that divides it
            divides = [size for size in _table().blocks if layer.block and layer.block % size == 0]
            return max(divides, default=None) in values
        case _:
            return (axis in layer.flags) in values


@dataclass(frozen=True, slots=True)
class Table:
    """The stored answers: capabilities asked, widths and blocks asked in combinations, and the order in which vLLM
    tries backends where none is requested.
    """

    capabilities: tuple[int, ...]
    widths: tuple[int, ...]
    blocks: tuple[int, ...]
    answers: Mapping[tuple[str, int], Answers]
    orders: Mapping[tuple[int, bool, bool], tuple[str, ...]]


@cache
def _table() -> Table:
    data = json.loads(resources.files(__package__).joinpath("attention.json").read_text())
    answers, orders = dict[tuple[str, int], Answers](), dict[tuple[int, bool, bool], tuple[str, ...]]()
    for row in data["backends"]:
        item = _answers(row)
        answers |= {(item.backend, sm): item for sm in item.sm}
    for row in data["orders"]:
        orders |= {(sm, row["latent"], row["ahead"]): tuple(row["order"]) for sm in row["sm"]}
    return Table(tuple(data["asked"]), tuple(data["widths"]), tuple(data["blocks"]), answers, orders)


def _answers(row: Mapping[str, Any]) -> Answers:
    return Answers(
        backend=row["backend"],
        sm=tuple(row["sm"]),
        latent=row["latent"],
        sparse=row["sparse"],
        kv=tuple(row["kv"]),
        dtypes=tuple(row["dtypes"]),
        widths=tuple((first, last, step) for first, last, step in row["widths"]),
        blocks=tuple((first, last, step) for first, last, step in row["blocks"]),
        flags=tuple(row["flags"]),
        encodes=row["encodes"],
        layouts=None if row["layouts"] is None else tuple(row["layouts"]),
        why=tuple(row.get("why", ())),
        unless=tuple(row.get("unless", ())),
        uneven=tuple(row.get("uneven", ())),
    )


def capability_for(sm: int) -> int:
    """The capability whose answers hold for one: itself, or the nearest older one that was asked."""
    return max((item for item in _table().capabilities if item <= sm), default=_table().capabilities[0])


def answers(name: str, sm: int) -> Answers | None:
    """A backend's answers on a capability; None for one that was not asked (another vendor's)."""
    return _table().answers.get((name, capability_for(sm)))


def chosen(layer: Layer, sm: int, names: frozenset[str]) -> Answers | None:
    """The first backend, of those that a release has, which vLLM finds for a layer; None if there is none."""
    order = _table().orders[capability_for(sm), layer.latent, layer.latent < ("ahead" in layer.flags)]
    rows = (answers(name, sm) for name in order if name in names)
    return next((row for row in rows if row is not None and not any(row.reasons(layer))), None)


def share_layout(rows: list[Answers]) -> bool:
    """True if one layout of the KV cache suits all backends of a model; None as layouts is any."""
    stated = [set(row.layouts) for row in rows if row.layouts is not None]
    return not stated or bool(set.intersection(*stated))
