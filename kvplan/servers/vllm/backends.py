"""vLLM's attention backends: those of each release, and the effect of each on memory. What each runs: attention.py.

A backend determines the smallest block of a cache and, for sparse MLA in fp8, its layout; nothing else that
is sized here. Its workspaces (FlashInfer: VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE, 394 MiB) are made when the first
batch is planned, after the pool is sized, so they use memory outside the budget.

Source: v1/attention/backends and platforms/cuda.py of vLLM 0.8.5, 0.9.2, 0.10.2, 0.11.0, 0.14.0 and 0.16.0 to 0.33;
block sizes equal vLLM 0.33's own in every compared case (tests/facts/backends.jsonl).
"""

from collections.abc import Mapping
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.servers.releases import LAST, Number, Version


@dataclass(frozen=True, slots=True)
class Backend:
    """An attention backend for NVIDIA GPUs whose effect on memory is modeled.

    since, until  the first release that has the name, and the first that no longer does
    block         smallest block in tokens; larger ones are multiples
    """

    since: Number
    block: int = 16
    until: Number = (LAST, 0)


PAGE_256: Final = 128  # page size in tokens of FlashAttention 4's kernels for 256-wide heads on 10.x
BACKENDS: Final[Mapping[str, Backend]] = {
    "FLASH_ATTN": Backend((0, 6)), "TRITON_ATTN": Backend((0, 8)), "FLASHINFER": Backend((0, 6)),
    "FLEX_ATTENTION": Backend((0, 9)), "TRITON_MLA": Backend((0, 8)), "FLASHMLA": Backend((0, 8), 64),
    "CUTLASS_MLA": Backend((0, 9), 128), "FLASHINFER_MLA": Backend((0, 10), 32), "FLASH_ATTN_MLA": Backend((0, 10)),
    "TOKENSPEED_MLA": Backend((0, 21), 32), "FLASHMLA_SPARSE": Backend((0, 14), 64),
    "FLASHINFER_MLA_SPARSE": Backend((0, 17), 64), "FLASH_ATTN_MLA_SPARSE": Backend((0, 25), 64),
    "FLASHINFER_MLA_SPARSE_SM90": Backend((0, 30), 64), "FLASHINFER_MLA_SPARSE_SM120": Backend((0, 24), 64),
}  # fmt: skip
# Other names that a release has: for other hardware or models, or removed; their effects are not modeled.
OTHERS: Final[Mapping[str, tuple[Number, Number]]] = {
    "XFORMERS": ((0, 6), (0, 12)), "TREE_ATTN": ((0, 10), (0, 21)), "TORCH_SDPA": ((0, 6), (LAST, 0)),
    "DUAL_CHUNK_FLASH_ATTN": ((0, 9), (0, 12)), "FLASH_ATTN_DIFFKV": ((0, 14), (LAST, 0)),
    "CUSTOM": ((0, 14), (LAST, 0)),
    "TRITON_ATTN_DIFFKV": ((0, 24), (LAST, 0)), "TRITON_FLASH_ATTN": ((0, 30), (LAST, 0)), "B12X": ((0, 30), (LAST, 0)),
    "TRITON_FLASHINFER": ((0, 30), (LAST, 0)), "FLASH_ATTN_MLA_SPARSE_FA4": ((0, 33), (LAST, 0)),
    "TURBOQUANT": ((0, 20), (LAST, 0)), "ULTRAQUANT": ((0, 32), (LAST, 0)), "HPC_ATTN": ((0, 25), (LAST, 0)),
    "FLASHMLA_SPARSE_DSV4": ((0, 23), (LAST, 0)), "FLASHINFER_MLA_SPARSE_DSV4": ((0, 23), (LAST, 0)),
    "FLASHMLA_SPARSE_DSV41": ((0, 30), (LAST, 0)), "FLASHINFER_MLA_SPARSE_DSV41": ((0, 30), (LAST, 0)),
    "FLASHMLA_MEGA_ATTN_DSV41": ((0, 31), (LAST, 0)), "MINIMAX_M3_SPARSE": ((0, 24), (LAST, 0)),
    "CUTLASS_MSA": ((0, 27), (LAST, 0)), "TRITON_MSA": ((0, 27), (LAST, 0)), "STEP5_DSA": ((0, 33), (LAST, 0)),
    "ROCM_FLASH": ((0, 6), (0, 12)), "ROCM_ATTN": ((0, 11), (LAST, 0)), "ROCM_AITER_FA": ((0, 10), (LAST, 0)),
    "ROCM_AITER_MLA": ((0, 8), (LAST, 0)), "ROCM_AITER_UNIFIED_ATTN": ((0, 14), (LAST, 0)),
    "ROCM_AITER_TRITON_MLA": ((0, 14), (LAST, 0)), "ROCM_AITER_MLA_SPARSE": ((0, 14), (LAST, 0)),
}  # fmt: skip
V1_SUFFIX: Final = "_VLLM_V1"  # suffix of V1's backends until 0.10
ONLY_V1: Final = ("TRITON_ATTN",)  # had no name without it then


def plain_name(name: str, release: Version) -> str:
    """Return a backend's name in capitals, without the suffix that V1's had until 0.10."""
    upper = name.upper()
    return upper if release.has("attention_backend_names") else upper.removesuffix(V1_SUFFIX)


def names(release: Version) -> frozenset[str]:
    """Names of attention backends that a release has."""
    known = {key for key, item in BACKENDS.items() if release.is_within(item.since, item.until)}
    return frozenset(known | {key for key, span in OTHERS.items() if release.is_within(*span)})


def resolve(name: str, release: Version) -> str | None:
    """Return the plain name of a requested backend, or None if the server chooses.

    Raise UsageError for one that the release lacks.
    """
    if name.lower() == "auto":
        return None
    plain = plain_name(name, release)
    if plain in ONLY_V1 and plain == name.upper() and not release.has("attention_backend_names"):
        raise UsageError(f"attention_backend {plain}", f"{release.label} calls it {plain}{V1_SUFFIX}", "write that")
    if plain not in names(release):
        raise UsageError(
            f"attention_backend {printable(plain, 40)}",
            f"{release.label} knows no attention backend of that name",
            f"use one of {', '.join(sorted(names(release) & BACKENDS.keys()))}",
        )
    return plain


def smallest_block(name: str | None, heads: frozenset[int], sm: int, release: Version) -> int:
    """Block size in tokens that a release uses with a requested backend, or 0 if none was requested that is modeled."""
    backend = BACKENDS.get(name or "")
    if backend is None:
        return 0
    if name == "FLASH_ATTN" and 256 in heads and sm // 10 == 10 and release.has("flash_attn_pages"):
        return PAGE_256
    forced = name == "FLASHINFER_MLA" and not release.has("backend_checks_blocks")
    return 64 if forced else backend.block


def sparse_layout(name: str | None, kv_dtype: str) -> str:
    """Cache layout of a sparse backend instead of plain or packed fp8: FlashMLA's kernels read the packed one."""
    if kv_dtype in ("fp8", "fp8_ds_mla") and name in SPARSE_LAYOUTS:
        return SPARSE_LAYOUTS[name]
    return kv_dtype


SPARSE_LAYOUTS: Final = {
    "FLASHMLA_SPARSE": "fp8_ds_mla", "FLASHINFER_MLA_SPARSE": "fp8", "FLASHINFER_MLA_SPARSE_SM90": "fp8",
    "FLASHINFER_MLA_SPARSE_SM120": "fp8_ds_mla",
}  # fmt: skip


def note(name: str | None, block: int, usual: int, *, layout: bool = False) -> str | None:
    """Say what a requested backend changes.

    block, usual  block sizes in tokens with it and without
    layout        whether it also changes the cache's layout, which another note says
    """
    if name is None:
        return None
    if name not in BACKENDS:
        return f"attention_backend {name}: its effect on memory is not modeled, so it is ignored"
    workspace = "its workspace (394 MiB) is taken after the pool is sized"
    has_workspace = name.startswith("FLASHINFER")
    later = f"; {workspace}" if has_workspace else ""
    if block == usual and layout:
        return f"attention_backend {name}: {workspace}" if has_workspace else None
    if block == usual:
        return f"attention_backend {name}: no effect on memory{later}"
    return f"attention_backend {name}: blocks of {block:,} tokens instead of {usual:,}{later}"
