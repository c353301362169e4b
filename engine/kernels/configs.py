"""Launch parameters: how large a tile each kernel works on, with how many warps and pipeline stages.

Nothing tunes itself at run time. Where tiles.json beside this file has an entry for the GPU and the shape, it is used:
benchmarks/tune_kernels.py timed it there. Elsewhere the tables below are: their lines come from compiling for sm_80,
89, 90 and 100, where they fit the shared memory and spill no register (tests/support/compile_kernels.py prints it).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import torch
import triton

from engine.kernels.numerics import INTERPRETED
from engine.kernels.tiles import PROGRAMS_PER_PROCESSOR, AttentionTile, Kind, read_tiles
from kvplan.core.errors import EnvironmentProblem

__all__ = ["PROGRAMS_PER_PROCESSOR", "AttentionTile"]  # what others know by this module's name, besides its own

TILES = Path(__file__).with_name("tiles.json")
ROW_ELEMENTS = 2048  # elements of a row-wise kernel's tile, where rows are shorter

# Shared memory that one program may have, in bytes, by compute capability in tenths (CUDA programming guide, compute
# capabilities): 99, 163 or 227 KiB. The compile check covers 80, 89, 90 and 100.
SHARED_MEMORY = {
    80: 166_912,
    86: 101_376,
    87: 166_912,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    120: 101_376,
    121: 101_376,
}
MAX_HEAD_DIM = 256
SIZES = (101_376, 166_912, 232_448)  # the columns of the tables below


@dataclass(frozen=True, slots=True)
class GemmTile:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


A, G = AttentionTile, GemmTile


def D(block_n: int, num_warps: int, num_stages: int, programs: int, block_m: int = 16) -> AttentionTile:
    """A tile of decode: as many programs as fit a multiprocessor (reports/kernels/compiled.csv), four at most."""
    return A(block_n, num_warps, num_stages, block_m, programs=programs)


# (dtype of KV, head_dim padded to a power of two) -> tile for 99, 163 and 227 KiB of shared memory
DECODE = {
    ("float32", 64): (D(32, 4, 2, 3), D(32, 4, 2, 4), D(32, 4, 2, 3)),
    ("float32", 128): (D(16, 4, 2, 3), D(16, 4, 2, 4), D(16, 4, 2, 4)),
    ("float32", 256): (D(16, 4, 2, 1), D(16, 4, 2, 3), D(16, 4, 2, 3)),
    ("16-bit", 64): (D(64, 4, 3, 2), D(64, 4, 3, 4), D(64, 4, 3, 4)),
    ("16-bit", 128): (D(32, 4, 3, 2), D(64, 4, 3, 2), D(64, 4, 3, 3)),
    ("16-bit", 256): (D(32, 4, 2, 2), D(32, 4, 3, 2), D(32, 4, 3, 3)),
    ("float8", 64): (D(64, 4, 3, 4), D(64, 4, 3, 4), D(64, 4, 3, 4)),
    ("float8", 128): (D(64, 4, 3, 2), D(64, 4, 3, 4), D(64, 4, 3, 4)),
    ("float8", 256): (D(32, 4, 3, 2), D(32, 4, 3, 2), D(32, 4, 3, 4)),
}
PREFILL = {
    ("float32", 64): (A(32, 8, 1, 32, True), A(32, 8, 1, 32, True), A(32, 8, 2, 32, True)),
    ("float32", 128): (A(16, 8, 1, 16, True), A(16, 8, 1, 16, True), A(16, 8, 1, 16, True)),
    ("float32", 256): (A(16, 4, 1, 16, True), A(16, 4, 1, 16, True), A(16, 4, 1, 16, True)),
    ("16-bit", 64): (A(64, 8, 2, 128), A(64, 8, 3, 128), A(64, 8, 2, 128)),
    ("16-bit", 128): (A(32, 8, 3, 128), A(32, 8, 3, 128), A(64, 8, 3, 128)),
    ("16-bit", 256): (A(32, 8, 2, 64), A(32, 8, 2, 64), A(32, 8, 2, 128)),
    ("float8", 64): (A(64, 8, 2, 128), A(64, 8, 3, 128), A(64, 8, 3, 128)),
    ("float8", 128): (A(32, 8, 3, 128), A(32, 8, 3, 128), A(64, 8, 3, 128)),
    ("float8", 256): (A(32, 8, 2, 64), A(32, 8, 2, 64), A(32, 8, 3, 64, True)),
}
# (dtype, heads of one program) -> as above. Few heads fill no larger tile; many share what each program loads.
LATENT = {
    ("float32", 16): (D(16, 8, 1, 1), D(16, 8, 1, 2), D(16, 8, 1, 2)),
    ("float32", 64): (D(16, 8, 1, 1), D(16, 8, 1, 2), D(16, 8, 1, 2)),
    ("16-bit", 16): (D(32, 8, 2, 1), D(32, 8, 3, 1), D(32, 8, 3, 2)),
    ("16-bit", 64): (D(16, 8, 2, 1, 32), D(32, 8, 2, 1, 32), D(32, 8, 3, 1, 64)),
}
# (dtype, most rows per expert) -> as above
GEMM = {
    ("float32", 16): (G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2)),
    ("float32", 64): (G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2)),
    ("float32", 128): (G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2)),
    ("16-bit", 16): (G(16, 64, 64, 4, 3), G(16, 64, 64, 4, 3), G(16, 64, 64, 4, 3)),
    ("16-bit", 64): (G(64, 128, 64, 4, 3), G(64, 128, 64, 4, 3), G(64, 128, 64, 4, 3)),
    ("16-bit", 128): (G(64, 128, 64, 4, 3), G(64, 128, 64, 4, 3), G(128, 128, 64, 8, 3)),
}
# Experts whose weights are widened in registers, likewise: those take what larger tiles would have
WIDENED = {
    ("float32", 16): (G(16, 32, 32, 4, 2), G(16, 32, 32, 4, 2), G(16, 32, 32, 4, 2)),
    ("float32", 64): (G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2)),
    ("16-bit", 16): (G(16, 64, 64, 4, 3), G(16, 64, 64, 4, 3), G(16, 64, 64, 4, 3)),
    ("16-bit", 64): (G(64, 64, 64, 4, 3), G(64, 64, 64, 4, 3), G(64, 64, 64, 4, 3)),
    ("16-bit", 128): (G(128, 64, 64, 8, 2), G(128, 64, 64, 8, 3), G(128, 128, 64, 8, 3)),
}


@cache
def tuned() -> dict[tuple[object, ...], AttentionTile]:
    """The checked-in table by the fields of tiles.Key, read once; raises InvalidInputError for a damaged one."""
    return {tuple(key): entry.tile for key, entry in read_tiles(TILES).items()}  # a launch has no time to name fields


def decode_tile(
    arch: int,
    head_dim: int,
    stored: torch.dtype,
    compute: torch.dtype,
    *,
    group: int | None = None,
    block_size: int | None = None,
) -> AttentionTile:
    """group: query heads that share a KV head; without it or the block size, the tile that was never timed."""
    kind = kind_of(stored, compute)
    if group and block_size and (tile := tuned().get(("decode", arch, head_dim, group, kind, block_size))):
        return tile
    return DECODE[kind, _padded(head_dim)][_column(arch)]


def prefill_tile(
    arch: int,
    head_dim: int,
    stored: torch.dtype,
    compute: torch.dtype,
    rows: int,
    *,
    group: int | None = None,
    block_size: int | None = None,
) -> AttentionTile:
    """rows: queries of the longest chunk, times the heads that share a KV head; the rest as decode_tile has it."""
    kind = kind_of(stored, compute)
    tile = PREFILL[kind, _padded(head_dim)][_column(arch)]
    if group and block_size:
        tile = tuned().get(("prefill", arch, head_dim, group, kind, block_size), tile)
    return replace(tile, block_m=64) if rows <= 64 < tile.block_m else tile


def max_heads_per_kv(arch: int, head_dim: int, stored: torch.dtype, compute: torch.dtype) -> int:
    """Query heads that may share a KV head: prefill's largest tile holds one query of them all."""
    return PREFILL[kind_of(stored, compute), _padded(head_dim)][_column(arch)].block_m


def latent_tile(
    arch: int, num_heads: int, dtype: torch.dtype, *, width: int | None = None, block_size: int | None = None
) -> AttentionTile:
    """width: of a stored row; without it or the block size, the tile that was never timed."""
    kind = kind_of(dtype, dtype)
    if width and block_size and (tile := tuned().get(("latent", arch, width, num_heads, kind, block_size))):
        return tile
    return LATENT[kind, 16 if num_heads <= 16 else 64][_column(arch)]


def gemm_tile(arch: int, rows_per_expert: int, dtype: torch.dtype) -> GemmTile:
    return _sized(GEMM, arch, rows_per_expert, dtype)


def widened_tile(arch: int, rows_per_expert: int, dtype: torch.dtype) -> GemmTile:
    return _sized(WIDENED, arch, rows_per_expert, dtype)


def _sized(table: Mapping[tuple[str, int], tuple[GemmTile, ...]], arch: int, rows: int, dtype: torch.dtype) -> GemmTile:
    """The tile of the smallest size in the table that holds so many rows; of the largest where none does."""
    kind = "float32" if dtype == torch.float32 else "16-bit"
    sizes = [size for name, size in table if name == kind]
    bucket = next((size for size in sizes if rows <= size), sizes[-1])
    return table[kind, bucket][_column(arch)]


def kind_of(stored: torch.dtype, compute: torch.dtype) -> Kind:
    """Products of float32 take no tensor cores and most registers, whatever is stored."""
    if compute == torch.float32:
        return "float32"
    return "float8" if stored == torch.float8_e4m3fn else "16-bit"


def _padded(head_dim: int) -> int:
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim: the kernels have no tile above {MAX_HEAD_DIM} ({head_dim}); add one to configs.py")
    return max(64, 1 << (head_dim - 1).bit_length())


def _column(arch: int) -> int:
    if arch not in SHARED_MEMORY:
        known = ", ".join(f"sm_{known}" for known in SHARED_MEMORY)
        raise EnvironmentProblem(
            f"sm_{arch}: the Triton kernels have no tiles for it (they have {known}); use the torch backend"
        )
    return SIZES.index(SHARED_MEMORY[arch])


def row_warps(elements: int) -> int:
    """Warps for a tile of so many elements: 16 elements or fewer to a thread."""
    return min(16, 1 << (max(elements - 1, 0) // 512).bit_length())


def arch() -> int:
    """The current GPU's compute capability in tenths: 90 for 9.0. The interpreter takes the tiles of 9.0."""
    if INTERPRETED:
        return 90
    driver = triton.runtime.driver.active
    return _arch_of(driver, driver.get_current_device())


@lru_cache(maxsize=64)
def _arch_of(driver: object, device: int) -> int:
    return int(driver.get_current_target().arch)  # type: ignore[attr-defined]  # a Triton driver, untyped


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# --- products with 4-bit weights --------------------------------------------------------------------------------------

# (dtype, most tokens) -> tile for 99, 163 and 227 KiB of shared memory; block_k counts words, of eight inputs each.
INT4 = {
    ("float32", 16): (G(16, 32, 16, 4, 2), G(16, 32, 16, 4, 2), G(16, 32, 16, 4, 2)),
    ("float32", 64): (G(32, 32, 16, 4, 2), G(32, 32, 16, 4, 2), G(32, 32, 16, 4, 2)),
    ("float32", 128): (G(32, 32, 16, 4, 2), G(32, 32, 16, 4, 2), G(32, 32, 16, 4, 2)),
    ("16-bit", 16): (G(16, 64, 32, 4, 3), G(16, 64, 64, 4, 3), G(16, 64, 64, 4, 3)),
    ("16-bit", 64): (G(64, 64, 32, 4, 3), G(64, 64, 32, 4, 3), G(64, 64, 32, 4, 3)),
    ("16-bit", 128): (G(64, 64, 32, 4, 3), G(128, 64, 32, 8, 2), G(128, 64, 32, 8, 2)),
}


def int4_tile(arch: int, num_tokens: int, dtype: torch.dtype) -> GemmTile:
    return _sized(INT4, arch, num_tokens, dtype)


# --- products with fp8 weights in blocks ------------------------------------------------------------------------------

# As above. Of GPUs with 163 KiB none has fp8. In float32 no more than 32 outputs: the compiler gives 64 to Blackwell's
# tensor cores, which cut them to TF32. Up to 512 tokens small tiles make enough programs.
FP8_BLOCK = {
    ("float32", 16): (G(16, 32, 32, 4, 2), G(16, 32, 32, 4, 2), G(16, 32, 32, 4, 2)),
    ("float32", 512): (G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2)),
    ("float32", 2048): (G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2), G(32, 32, 32, 4, 2)),
    ("16-bit", 16): (G(16, 64, 128, 4, 3), G(16, 64, 128, 4, 3), G(16, 64, 128, 4, 4)),
    ("16-bit", 512): (G(64, 64, 64, 4, 3), G(64, 64, 64, 4, 3), G(64, 64, 64, 4, 4)),
    ("16-bit", 2048): (G(128, 128, 64, 8, 3), G(128, 128, 64, 8, 3), G(128, 128, 64, 8, 3)),
}


def fp8_block_tile(arch: int, num_tokens: int, dtype: torch.dtype) -> GemmTile:
    """block_n counts outputs, block_k inputs."""
    return _sized(FP8_BLOCK, arch, num_tokens, dtype)
