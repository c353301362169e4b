"""Overhead of torch's allocators on top of a server's tensors: they allocate whole blocks.

A server's log counts the allocator's blocks, not its tensors, and the pool gets what the blocks leave. Source:
torch 2.x c10/cuda/CUDACachingAllocator.cpp: sizes are rounded to 512 bytes; up to 1 MiB they come from segments of
2 MiB, below 10 MiB from segments of 20 MiB, larger ones from segments of their own, in multiples of 2 MiB. The
remainder of a block is split off only if it is 512 bytes (small) or more than 1 MiB (large); otherwise it stays with
the block. For Qwen2.5-7B that is 57 MiB in total, by which the logs of vLLM 0.6 to 0.10 exceed its parameters.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from functools import lru_cache

from kvplan.core.units import MIB
from kvplan.models.spec import ModelSpec, Weight
from kvplan.sizing import weights

ROUND = 512
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
LARGE, LARGE_SEGMENT = 10 * MIB, 20 * MIB


def pinned(size: int) -> int:
    """Bytes of page-locked host memory that torch takes for a tensor.

    Source: torch 2.13 ATen/core/CachingHostAllocator.h (allocate), with its default settings; equal to that code for
    600 sizes (tests/facts/pinned.csv).
    """
    return 1 << (size - 1).bit_length() if size else 0


def blocks(sizes: Iterable[int]) -> tuple[int, list[int]]:
    """(bytes of blocks beyond the tensors, bytes of each segment) for tensors allocated in this order and kept."""
    free: tuple[list[int], list[int]] = ([], [])  # free ends of the small and of the large segments, by size
    added, segments = 0, []
    for size in sizes:
        if size <= 0:
            continue
        rounded = -(-size // ROUND) * ROUND
        small = rounded <= SMALL
        ends = free[0] if small else free[1]
        index = bisect_left(ends, rounded)
        if index < len(ends):
            block = ends.pop(index)
        else:
            block = segment(rounded)
            segments.append(block)
        remainder = block - rounded
        if remainder >= ROUND if small else remainder > SMALL:
            insort(ends, remainder)
            block = rounded
        added += block - size
    return added, segments


def segment(size: int) -> int:
    """Bytes of the new segment that a block of `size` bytes comes from."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT


def excess(sizes: Iterable[int]) -> int:
    """Bytes of blocks beyond the tensors, allocated in this order and kept."""
    return blocks(sizes)[0]


WIDE_SCALE = 2  # bytes of a scale of Marlin's kernels, one per output and block of inputs
HOPPER_MXFP4 = 256  # Triton's layout of MXFP4 values on compute capability 9.x pads inputs to a multiple of this


def loaded(spec: ModelSpec, weight: Weight, layer: int | None, layout: weights.Layout) -> list[tuple[int, int]]:
    """(bytes in the kernels' layout, bytes as created) of each tensor of a weight.

    gpt-oss on H100 with vLLM 0.11 loads as 13.47 and 64.38 GiB while its parameters are 12.83 and 60.78 GiB: 7 % of the
    values of each expert (llm-d-benchmark, empirical-vllm-memory-results.md).
    """
    values, scales, bias = weights.weight_tensors(spec, weight, layer, layout)
    loaded_bytes, loaded_scales = values, scales
    scheme = weights.scheme_for(spec, weight, layer, layout.online)
    if scheme is not None and scheme.kind == "mxfp4" and in_triton(layout):
        inputs, _ = weights.local_shape(weight, weights.expert_tp(layout))
        loaded_bytes = values * weights.up(inputs, HOPPER_MXFP4) // inputs
    if scheme is not None and scheme.kind == "fp8_block" and in_marlin(weight, layout):
        loaded_scales = WIDE_SCALE * values // (scheme.block or (128, 128))[1]  # one byte for each value
    return [(loaded_bytes, values), (loaded_scales, scales), (bias, bias)]


def in_triton(layout: weights.Layout) -> bool:
    """True if Triton's kernels for compute capability 9.x read MXFP4 experts."""
    is_chosen = layout.expert_kernel in ("auto", "triton", "triton_unfused")
    return layout.sm // 10 == 9 and is_chosen and weights.expert_units(layout, "mxfp4") == (64, 1)


def in_marlin(weight: Weight, layout: weights.Layout) -> bool:
    """True if Marlin's kernels read fp8 blocks."""
    if weight.experts and layout.expert_kernel != "auto":
        return layout.expert_kernel == "marlin"
    return layout.wide_scales


def tensors(spec: ModelSpec, layout: weights.Layout) -> Iterator[tuple[int, int]]:
    """Each tensor of one rank as (bytes in the kernels' layout, bytes as created), in about the order a server creates
    them: towers, embedding, rotary tables, layers, head.
    """
    others = [weight for weight in spec.other_weights if weights.on_stage(weight.place, layout)]
    last = [weight for weight in others if weight.group in ("norm", "lm_head")]
    towers = [weight for weight in others if weight.group == "vision_audio"]
    first = [weight for weight in others if weight.group not in ("norm", "lm_head", "vision_audio")]
    for weight in (*towers, *first):
        yield from loaded(spec, weight, None, layout)
    for rope in spec.ropes:
        if rope.served:  # as long as the context, which is unknown here
            continue
        table = rope.positions * rope.dim * weights.BYTES[layout.dtype or spec.dtype]
        yield table, table
    by_kind: dict[int, list[tuple[int, int]]] = {}
    kinds = weights.equals(spec, layout.online)
    for index in weights.layers_on(spec, layout):
        key = kinds[index]
        if key not in by_kind:
            by_kind[key] = [
                sizes
                for weight in spec.layer_weights[index]
                for sizes in loaded(spec, weight, spec.first_layer + index, layout)
                if any(sizes)
            ]
        yield from by_kind[key]
    for weight in last:
        yield from loaded(spec, weight, None, layout)


@lru_cache(maxsize=4096)
def weights_excess(spec: ModelSpec, layout: weights.Layout) -> int:
    """Bytes of a rank's loaded weights and rotary tables beyond the tensors themselves."""
    pairs = list(tensors(spec, layout))
    return excess(final for final, _ in pairs) + sum(final - created for final, created in pairs)


def weights_segments(spec: ModelSpec, layout: weights.Layout) -> list[int]:
    """Bytes of each segment for a rank's weights and rotary tables."""
    return blocks(final for final, _ in tensors(spec, layout))[1]


@lru_cache(maxsize=4096)
def weights_reserved(spec: ModelSpec, layout: weights.Layout) -> int:
    """Bytes of the segments for a rank's weights and rotary tables: the device's loss of free memory."""
    return sum(weights_segments(spec, layout))
