"""vLLM's attention backends: those of each release, what each rejects, and its effect on memory.

A backend determines the smallest block of a cache and, for sparse MLA in fp8, its layout; nothing else that
is sized here. Its workspaces (FlashInfer: VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE, 394 MiB) are made when the first
batch is planned, after the pool is sized, so they use memory outside the budget.

Source: v1/attention/backends and platforms/cuda.py of vLLM 0.8.5, 0.9.2, 0.10.2, 0.11.0, 0.14.0 and 0.16.0 to 0.33;
rejections and block sizes equal vLLM 0.33's own in every compared case (tests/facts/backends.jsonl).
"""

from collections.abc import Iterator, Mapping
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.servers.releases import LAST, Number, Version

SIXTEEN: Final = ("auto", "float16", "bfloat16")
FP8: Final = ("fp8", "fp8_e4m3")


@dataclass(frozen=True, slots=True)
class Backend:
    """An attention backend for NVIDIA GPUs.

    since, until  the first release that has the name, and the first that no longer does
    latent        it computes MLA; sparse: MLA with an indexer
    block         smallest block in tokens; larger ones are multiples
    majors        compute capabilities (major versions); none: all
    heads         supported head widths; none: all
    sinks         compute capabilities on which it supports attention sinks
    ahead         it supports images whose tokens attend bidirectionally
    """

    since: Number
    block: int = 16
    latent: bool = False
    sparse: bool = False
    kv_dtypes: tuple[str, ...] = (*SIXTEEN, *FP8)
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    majors: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    sinks: tuple[int, ...] = ()
    ahead: bool = False
    until: Number = (LAST, 0)


LATENTS: Final = (320, 512, 576)  # the only latent plus rope key widths in kernels other than Triton's
AMPERE_ON: Final = (8, 9, 10, 11, 12)
FLASH_ATTN_4: Final = (9, 10)  # run FlashAttention 3 and 4
PAGE_256: Final = 128  # page size in tokens of FlashAttention 4's kernels for 256-wide heads on 10.x
BACKENDS: Final[Mapping[str, Backend]] = {
    "FLASH_ATTN": Backend((0, 6), majors=AMPERE_ON, sinks=(9, 10, 11)),
    "TRITON_ATTN": Backend(
        (0, 8), kv_dtypes=(*SIXTEEN, "float32", *FP8, "fp8_e5m2", "int4_per_token_head", "int8_per_token_head",
                           "fp8_per_token_head"),
        dtypes=("float16", "bfloat16", "float32"), sinks=(7, 8, 9, 10, 11, 12), ahead=True,
    ),
    "FLASHINFER": Backend(
        (0, 6), kv_dtypes=(*SIXTEEN, *FP8, "fp8_e5m2", "nvfp4", "nvfp4_4over6"), majors=AMPERE_ON,
        heads=(64, 128, 256, 512), sinks=(9, 10, 12),
    ),
    "FLEX_ATTENTION": Backend((0, 9), kv_dtypes=(*SIXTEEN, "float32"), dtypes=("float16", "bfloat16", "float32"),
                              ahead=True),
    "TRITON_MLA": Backend((0, 8), latent=True),
    "FLASHMLA": Backend((0, 8), 64, latent=True, heads=LATENTS, majors=(9,)),
    "CUTLASS_MLA": Backend((0, 9), 128, latent=True, heads=LATENTS, majors=(10,)),
    "FLASHINFER_MLA": Backend((0, 10), 32, latent=True, heads=LATENTS, majors=(10,)),
    "FLASH_ATTN_MLA": Backend((0, 10), latent=True, heads=LATENTS, kv_dtypes=SIXTEEN, majors=(9,)),
    "TOKENSPEED_MLA": Backend((0, 21), 32, latent=True, heads=LATENTS, kv_dtypes=FP8, majors=(10,)),
    "FLASHMLA_SPARSE": Backend(
        (0, 14), 64, latent=True, sparse=True, kv_dtypes=("auto", "bfloat16", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"),
        dtypes=("bfloat16",), majors=(9, 10),
    ),
    "FLASHINFER_MLA_SPARSE": Backend((0, 17), 64, latent=True, sparse=True, majors=(10,)),
    "FLASH_ATTN_MLA_SPARSE": Backend((0, 25), 64, latent=True, sparse=True, kv_dtypes=SIXTEEN, majors=(9,)),
    "FLASHINFER_MLA_SPARSE_SM90": Backend(
        (0, 30), 64, latent=True, sparse=True, kv_dtypes=("auto", "bfloat16", *FP8), dtypes=("bfloat16",), majors=(9,)
    ),
    "FLASHINFER_MLA_SPARSE_SM120": Backend(
        (0, 24), 64, latent=True, sparse=True, kv_dtypes=("auto", *FP8, "fp8_ds_mla"), dtypes=("bfloat16",),
        majors=(12,),
    ),
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
FLAG: Final = "--attention-backend"


@dataclass(frozen=True, slots=True)
class Need:
    """A model's, GPU's and cache's requirements for a backend.

    cache      the requested KV dtype, or the checkpoint's
    head_dims  head widths; for MLA that of the latent with its rope key
    ahead      an image's tokens attend bidirectionally
    pooled     each index key covers several tokens
    """

    name: str
    latent: bool
    sparse: bool
    dtype: str
    cache: str
    head_dims: frozenset[int]
    sinks: bool
    ahead: bool
    block_size: int | None
    sm: int
    pooled: bool


def plain_name(name: str, release: Version) -> str:
    """Return a backend's name in capitals, without the suffix that V1's had until 0.10."""
    upper = name.upper()
    return upper if release.has("attention_backend_names") else upper.removesuffix(V1_SUFFIX)


def lookup(name: str, release: Version) -> Backend | None:
    """Look up a backend by name; None for one that the release has and kvplan does not model."""
    known = {key for key, each in BACKENDS.items() if each.since <= release.number < each.until}
    others = {key for key, (first, last) in OTHERS.items() if first <= release.number < last}
    if name not in known | others:
        raise UsageError(
            f"attention_backend {printable(name, 40)}",
            f"{release.label} knows no attention backend of that name",
            f"use one of {', '.join(sorted(known))}",
        )
    return BACKENDS.get(name) if name in known else None


def reasons(name: str, backend: Backend, need: Need, release: Version) -> Iterator[str]:
    """Reasons why a backend does not support a model, in vLLM's words and order."""
    widest = 512 if need.sm // 10 in FLASH_ATTN_4 else 256
    too_wide = name == "FLASH_ATTN" and any(dim % 8 or dim > widest for dim in need.head_dims)
    if too_wide or (backend.heads and not need.head_dims <= set(backend.heads)):
        yield "head_size not supported"
    if need.dtype not in backend.dtypes:
        yield "dtype not supported"
    if need.cache not in backend.kv_dtypes or not takes_fp8(name, need):
        yield "kv_cache_dtype not supported"
    if need.block_size is not None and need.block_size % backend.block and release.has("backend_checks_blocks"):
        yield "block_size not supported"
    if need.ahead and not (backend.ahead or (name == "FLASH_ATTN" and need.sm // 10 == 10)):
        yield "partial multimodal token full attention not supported"
    if need.latent != backend.latent:
        yield "MLA not supported" if need.latent else "non-MLA not supported"
    if need.sinks and need.sm // 10 not in backend.sinks:
        yield "attention sinks not supported"
    if need.sparse != backend.sparse:
        yield "sparse not supported" if need.sparse else "non-sparse not supported"
    if backend.majors and need.sm // 10 not in backend.majors:
        yield "compute capability not supported"


def takes_fp8(name: str, need: Need) -> bool:
    """True if the backend reads fp8: FlashAttention only on 9.x and 10.x, Triton's kernels from 8.9 on."""
    if need.cache not in FP8:
        return True
    if name == "FLASH_ATTN":
        return need.sm // 10 in FLASH_ATTN_4
    return need.sm >= 89 or name not in ("TRITON_ATTN", "TRITON_MLA")


def check(name: str, need: Need, release: Version) -> str | None:
    """Return the plain name of the backend in effect, or None if the server chooses.

    Raise UsageError, in vLLM's words, for one that the release lacks or that does not support the model.
    """
    if name.lower() == "auto":
        return None
    plain = plain_name(name, release)
    if plain in ONLY_V1 and plain == name.upper() and not release.has("attention_backend_names"):
        raise UsageError(f"attention_backend {plain}", f"{release.label} calls it {plain}{V1_SUFFIX}", "write that")
    backend = lookup(plain, release)
    if backend is None or not need.sm:
        return plain
    if need.pooled:
        raise UnsupportedModelError(
            f"attention_backend {plain}",
            f"how it lays out the pooled index of {need.name} is not modeled",
            "remove it",
        )
    problems = list(reasons(plain, backend, need, release))
    if problems:
        raise UsageError(
            f"attention_backend {plain}",
            f"is not valid for {need.name} on compute capability {need.sm / 10:.1f}: {', '.join(problems)}",
            "remove it, or choose another",
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
