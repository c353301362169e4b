"""The answer of a server that places a model's layers and allocates its cache whole: tokens, layers, places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from kvplan.core.table import Table
from kvplan.core.units import GIB, format_size, plural
from kvplan.report.lines import Line, Part, line

if TYPE_CHECKING:
    from kvplan.documents.plan import PlanDocument, Rate, SlotCache


ENDS: Final[tuple[Literal["low", "likely", "high"], ...]] = ("low", "likely", "high")


def answer_text(doc: PlanDocument, cache: SlotCache, several: str) -> str:
    """Tokens or users, and layers: "16,128 tokens for one user, all 65 layers on the GPU".

    several  the users at the lengths that were asked for; empty: they were not
    """
    tokens = f"{cache['cells']:,} tokens"
    whole = f"{tokens} for one user" if cache["caches"] == 1 else f"{cache['caches']} users at {tokens} each"
    return f"{several or whole}, {layers_text(doc, cache)}"


def layers_text(doc: PlanDocument, cache: SlotCache) -> str:
    """Where the layers are: "43 of 81 layers on the GPU"."""
    count, total = cache["gpu_layers"], cache["num_layers"]
    gpus = "the GPU" if doc["inputs"]["num_gpus"] == 1 else "the GPUs"
    if not count:
        return "all layers on the host"
    text = f"all {total} layers on {gpus}" if count == total else f"{count} of {total} layers on {gpus}"
    experts = cache["host_experts"]
    return f"{text}, the experts of {experts} on the host" if experts else text


def shared_text(cache: SlotCache) -> str:
    """How slots share a cache: "4 slots share 16,128 tokens: 1 user at 16,128, or 4 at 4,032"; empty if none do."""
    if cache["caches"] > 1 or cache["slots"] == 1:
        return ""
    cells, slots = cache["cells"], cache["slots"]
    return f"{slots} slots share {cells:,} tokens: 1 user at {cells:,}, or {slots} at {cells // slots:,}."


def place_table(cache: SlotCache) -> Table:
    """A row for each GPU and for the host."""
    rows = []
    for place in cache["places"]:
        free = place["free"]
        sizes = (place["weights"], place["context"], place["compute"], place["total"])
        left = f"{(free - place['total']) / GIB:,.2f} of {free / GIB:,.2f}" if free else ""
        rows.append([place["name"], *(f"{size / GIB:,.2f}" for size in sizes), left])
    return Table.of(("GiB", "weights", "caches", "compute", "total", "left of what is free"), rows, left=1)


def place_lines(doc: PlanDocument, cache: SlotCache, engine: str) -> list[Part]:
    return [line(f"Where the memory goes ({engine})", "bold"), place_table(cache)]


def speed_lines(cache: SlotCache) -> list[Line]:
    """Tokens per second with their ranges, and how they are known."""
    speed = cache["speed"]
    text = f"Speed  {speed_text(cache)}"
    if speed["full"] is not None:
        text += f" for one user, {rate_text(speed['full'], '')} with {speed['tokens']:,} tokens in the cache"
        text += "" if speed["prompt"] is None else f"; prompts {rate_text(speed['prompt'], '')}"
    return [line(text), *([line(f"  {speed['how']}")] if speed["how"] else [])]


def speed_text(cache: SlotCache) -> str:
    """Of one user with an empty cache: "39 tokens/s (27-45)"."""
    speed = cache["speed"]
    return f"not known: {speed['lacks']}" if speed["empty"] is None else rate_text(speed["empty"])


def rate_text(rate: Rate, unit: str = " tokens/s") -> str:
    """A rate with its range, in two digits or more."""
    low, likely, high = (f"{rate[end]:,.0f}" if rate[end] >= 10 else f"{rate[end]:.1f}" for end in ENDS)
    return f"{likely}{unit} ({low}-{high})"


def cache_lines(doc: PlanDocument, cache: SlotCache) -> list[Line]:
    kv = doc["kv"]
    lines = [line(f"Cache ({kv['dtype']})", "bold"), line(f"  per token   {format_size(kv['bytes_per_token'])}")]
    if kv["state_bytes_per_request"]:
        lines.append(line(f"  per slot    {format_size(kv['state_bytes_per_request'])} of states, whatever the length"))
    whose = "shared by" if cache["caches"] == 1 else "one for each of"
    cells = f"{cache['cells']:,} tokens, {whose} {plural(cache['slots'], 'slot')}"
    return [*lines, line(f"  allocated   {cells}; whole at the start")]
