"""Why a server whose KV cache has room does not start all the same.

Source: vLLM 0.33 v1/worker/utils.py (request_memory) and config/compilation.py (resolve_cudagraph_mode_and_sizes);
SGLang 0.5.23 srt/mem_cache/kv_cache_configurator.py (_profile_available_bytes).
"""

from math import ceil, floor
from typing import Literal

from kvplan.core.records import dataclass
from kvplan.core.units import format_apart, format_gib


@dataclass(frozen=True, slots=True)
class Refusal:
    """What the server refuses.

    by        what it lacks
    text      the reason in words
    argument  the engine argument that cures it, and `values` with which it starts: likely, and surely
    deficit   bytes that are missing on each GPU
    """

    by: Literal["free_memory", "state_blocks", "stated_pool", "kept_back", "whole_item"]
    text: str
    argument: str
    values: tuple[float | int, ...]
    deficit: int

    @property
    def flag(self) -> str:
        """The likely cure; empty where there is none."""
        return f"--{self.argument.replace('_', '-')} {self.values[0]}" if self.values else ""


def free_memory(total: int, utilization: float, free: int, least_free: int, in_use: int) -> Refusal | None:
    """vLLM starts only where as much is free as it may use.

    free        bytes of `total` that are left beside the CUDA context and `in_use` bytes of the host and others
    least_free  the same where those hold the most they may
    """
    needed = ceil(total * utilization)
    if needed <= free:
        return None
    others = f" (others hold {format_gib(in_use)})" if in_use else ""
    wants, has = format_apart(needed, max(0, free))
    text = f"it wants {wants} free at the start ({utilization:g} of {format_gib(total)}), of which {has} are{others}"
    shares = dict.fromkeys(floor(100 * room / total) / 100 for room in (free, least_free) if 100 * room >= total)
    return Refusal("free_memory", text, "gpu_memory_utilization", tuple(shares), needed - free)


def state_blocks(max_num_seqs: int, num_blocks: int, least_blocks: int, bytes_per_block: int) -> Refusal | None:
    """With recurrent states and CUDA graphs vLLM wants a block for every sequence that it may run."""
    if max_num_seqs <= num_blocks:
        return None
    text = f"each of {max_num_seqs:,} sequences needs a block for its state, and the pool has {num_blocks:,}"
    counts = dict.fromkeys(count for count in (num_blocks, least_blocks) if count > 0)
    return Refusal("state_blocks", text, "max_num_seqs", tuple(counts), (max_num_seqs - num_blocks) * bytes_per_block)


def stated_pool(stated: int, room: int, most_room: int, argument: str, unit: int) -> Refusal | None:
    """A pool that was stated is allocated as it is, whatever the checks before it: the GPU may run out of memory.

    stated    its bytes
    room      bytes that weights, activations and the rest leave of the GPU, likely; most_room: where they take least
    argument  what stated it, in units of so many bytes
    """
    if stated <= most_room:
        return None
    takes, left = format_apart(stated, max(0, room))
    text = f"the pool that was stated takes {takes}, and the rest leaves {left}"
    return Refusal("stated_pool", text, argument, (room // unit,) if room >= unit else (), stated - room)


def whole_item(name: str, tokens: int, most: int) -> Refusal | None:
    """vLLM starts only where a step has room for the largest image, video or sound that may not be split."""
    if tokens <= most:
        return None
    text = f"the largest {name} takes {tokens:,} tokens, which one step computes, and a step has {most:,}"
    return Refusal("whole_item", text, "max_num_batched_tokens", (tokens,), 0)


def kept_back(fraction: float, reserved: int, needed: int, usual: float | None) -> Refusal | None:
    """SGLang checks nothing, and turns all but what the fraction keeps back into its pool: where that is less than
    what is allocated beside the pool, the GPU runs out of memory before the server listens.

    reserved  bytes that the fraction keeps back, and what the pool rounds off
    needed    bytes allocated beside what the pool gives out, at least: CUDA graphs and activations come on top
    usual     the fraction that SGLang's own rule of thumb gives
    """
    if needed <= reserved:
        return None
    needs, has = format_apart(needed, reserved)
    text = (
        f"a fraction of {fraction:g} keeps back {has} of what is free at the start, and SGLang's table of requests and "
        f"the pages it never gives out take {needs}, before CUDA graphs and activations"
    )
    values = () if usual is None or usual >= fraction else (floor(1000 * usual) / 1000,)
    return Refusal("kept_back", text, "mem_fraction_static", values, needed - reserved)
