"""Reasons why a server does not start: what it refuses however much memory there is, and what its memory check lacks.

Source: vLLM 0.33 v1/worker/utils.py (request_memory) and config/compilation.py (resolve_cudagraph_mode_and_sizes);
SGLang 0.5.23 srt/mem_cache/kv_cache_configurator.py (_profile_available_bytes).
"""

from math import ceil, floor
from typing import Literal

from kvplan.core.records import dataclass
from kvplan.core.units import format_apart, format_gib


@dataclass(frozen=True, slots=True)
class Refusal:
    """A server's refusal to start.

    by        what is missing, or "unsupported": no memory would help, so it comes before missing memory
    text      the reason in words
    argument  the engine argument that fixes it, and `values` with which it starts: likely, and certainly; if
    unsupported, values to try in order
    deficit   bytes missing on each GPU
    """

    by: Literal["free_memory", "state_blocks", "stated_pool", "kept_back", "whole_item", "unsupported"]
    text: str
    argument: str
    values: tuple[float | int | str, ...]
    deficit: int

    @property
    def numbers(self) -> tuple[float | int, ...]:
        """Its values that are numbers."""
        return tuple(value for value in self.values if not isinstance(value, str))

    @property
    def flags(self) -> tuple[str, ...]:
        """The argument with each value, as flags: "--max-num-seqs 64", or for a switch its name, or that of its
        negation.
        """
        name = self.argument.replace("_", "-")
        switches = {True: f"--{name}", False: f"--no-{name}"}
        return tuple(switches[value] if isinstance(value, bool) else f"--{name} {value}" for value in self.values)

    @property
    def flag(self) -> str:
        """The likely fix; empty if there is none, or none that is known to suffice."""
        return self.flags[0] if self.flags and self.by != "unsupported" else ""


def unsupported(text: str, argument: str = "", values: tuple[float | int | str, ...] = ()) -> Refusal:
    """Return a refusal of what the server does not run on this GPU or with this model, whatever the memory.

    text      the reason in one line, without the server's name: "no attention backend keeps ..."
    argument  the argument to change, to one of `values` in order; each is planned before it is proposed
    """
    return Refusal("unsupported", text, argument, values, 0)


def smaller(ranks: int) -> tuple[int, ...]:
    """Smaller rank counts, the largest first."""
    return tuple(n for n in (16, 8, 4, 2, 1) if n < ranks and ranks % n == 0)


def free_memory(total: int, utilization: float, free: int, least_free: int, in_use: int) -> Refusal | None:
    """Return a refusal if less memory is free than vLLM may use: it does not start then.

    free        bytes of `total` left by the CUDA context and `in_use` bytes of the host and other processes
    least_free  the same if those hold the most they may
    """
    needed = ceil(total * utilization)
    if needed <= free:
        return None
    others = f"; other processes use {format_gib(in_use)}" if in_use else ""
    wants, has = format_apart(needed, max(0, free))
    text = f"it needs {wants} free ({utilization:g} of {format_gib(total)}) but only {has} is free{others}"
    shares = dict.fromkeys(floor(100 * room / total) / 100 for room in (free, least_free) if 100 * room >= total)
    return Refusal("free_memory", text, "gpu_memory_utilization", tuple(shares), needed - free)


def state_blocks(max_num_seqs: int, num_blocks: int, least_blocks: int, bytes_per_block: int) -> Refusal | None:
    """Return a refusal if sequences outnumber blocks, which vLLM rejects with recurrent states and CUDA graphs."""
    if max_num_seqs <= num_blocks:
        return None
    text = f"each of {max_num_seqs:,} sequences needs a block for its state, but the pool has {num_blocks:,}"
    counts = dict.fromkeys(count for count in (num_blocks, least_blocks) if count > 0)
    return Refusal("state_blocks", text, "max_num_seqs", tuple(counts), (max_num_seqs - num_blocks) * bytes_per_block)


def stated_pool(stated: int, room: int, most_room: int, argument: str, unit: int) -> Refusal | None:
    """Return a refusal if a pool of explicit size, which is allocated without further checks, exceeds the GPU.

    stated    its bytes
    room      bytes that weights, activations and the rest likely leave on the GPU; most_room: if they take least
    argument  the argument that sizes it, in units of so many bytes
    """
    if stated <= most_room:
        return None
    takes, left = format_apart(stated, max(0, room))
    text = f"the stated pool needs {takes}, but only {left} is free"
    return Refusal("stated_pool", text, argument, (room // unit,) if room >= unit else (), stated - room)


def whole_item(name: str, tokens: int, most: int) -> Refusal | None:
    """Return a refusal if a step has no room for the largest image, video or audio that may not be split."""
    if tokens <= most:
        return None
    text = f"the largest {name} has {tokens:,} tokens, which must fit in one step of {most:,}"
    return Refusal("whole_item", text, "max_num_batched_tokens", (tokens,), 0)


def kept_back(fraction: float, reserved: int, needed: int, usual: float | None) -> Refusal | None:
    """Return a refusal if SGLang's reserve is smaller than what it allocates outside the pool.

    SGLang does not check this: the GPU runs out of memory before the server listens.

    reserved  bytes that the fraction reserves, and what the pool rounds off
    needed    lower bound of bytes allocated outside the pool, before CUDA graphs and activations
    usual     the fraction from SGLang's own rule of thumb
    """
    if needed <= reserved:
        return None
    needs, has = format_apart(needed, reserved)
    text = (
        f"a fraction of {fraction:g} reserves {has} of the memory free at start-up, but SGLang's request table and "
        f"unusable pages take {needs}, before CUDA graphs and activations"
    )
    values = () if usual is None or usual >= fraction else (floor(1000 * usual) / 1000,)
    return Refusal("kept_back", text, "mem_fraction_static", values, needed - reserved)
