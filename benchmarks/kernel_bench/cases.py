"""Which cases are timed, the most telling first."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from benchmarks.kernel_bench.problems import GEMMA_12B, GPT_OSS, V2_LITE, V3, Case, Heads, Kind

FP8 = torch.float8_e4m3fn
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (512, 2048, 4096, 8192, 32_768, 131_072)


def cases(device: torch.device) -> list[Case]:
    """All of them, the most telling first, none twice."""
    return list(dict.fromkeys(_tiny() if device.type == "cpu" else [*_told(), *_variants(), *_grid()]))


def _case(kind: Kind, num_seqs: int, length: int, **more: Any) -> Case:
    return Case(kind, num_seqs, length, **{"compute": torch.bfloat16, "stored": torch.bfloat16, **more})


def _told() -> Iterator[Case]:
    """What the goals are about."""
    for num_seqs, length in ((32, 4096), (1, 131_072), (64, 2048), (1, 8192)):
        yield _case("decode", num_seqs, length)
        yield _case("decode", num_seqs, length, stored=FP8)
    yield _case("prefill", 1, 8192)
    yield _case("decode", 8, 4096, compute=torch.float16, stored=FP8)  # its error is not hidden by bfloat16's
    yield _case("decode", 1, 32_768)
    yield _case("latent", 64, 4096, heads=V2_LITE, block_size=64)
    yield _case("store", 256, 1)
    yield _case("rope+store", 256, 1)
    for num_seqs, length in ((256, 512), (8, 32_768), (8, 4096)):
        yield _case("decode", num_seqs, length)
        yield _case("decode", num_seqs, length, stored=FP8)
    yield _case("latent", 32, 4096, heads=V3, block_size=64)
    yield _case("latent", 1, 32_768, heads=V2_LITE, block_size=64)
    yield _case("prefill", 4, 2048)
    for num_tokens in (8192, 1):
        yield _case("store", num_tokens, 1)
        yield _case("store", num_tokens, 1, stored=FP8)
        yield _case("rope+store", num_tokens, 1)


def _variants() -> Iterator[Case]:
    """Block sizes, dtypes and what models add to attention."""
    for block_size, (num_seqs, length), stored in product(
        (32, 64, 128), ((32, 4096), (1, 32_768)), (torch.bfloat16, FP8)
    ):
        yield _case("decode", num_seqs, length, stored=stored, block_size=block_size)
    yield _case("decode", 32, 4096, compute=torch.float16, stored=torch.float16)
    yield _case("decode", 32, 8192, heads=GEMMA_12B, window=1024)
    yield _case("decode", 32, 4096, softcap=50.0)
    yield _case("decode", 64, 4096, heads=GPT_OSS, window=128, sinks=True)
    yield _case("decode", 64, 4096, heads=GPT_OSS, sinks=True)
    yield _case("prefill", 1, 8192, stored=FP8)
    yield _case("prefill", 1, 8192, block_size=64)
    yield _case("prefill", 1, 8192, heads=GEMMA_12B, window=1024)
    yield _case("prefill", 1, 32_768)
    yield _case("prefill", 16, 512)


def _grid() -> Iterator[Case]:
    for stored, num_seqs, length in product((torch.bfloat16, FP8), BATCHES, LENGTHS):
        yield _case("decode", num_seqs, length, stored=stored)
    for num_seqs, length in product(BATCHES[::2], LENGTHS):
        yield _case("latent", num_seqs, length, heads=V2_LITE, block_size=64)


def _tiny() -> Iterator[Case]:
    """One of each kind, in float32, which a CPU is right in."""
    plain: dict[str, Any] = {"compute": torch.float32, "stored": torch.float32}
    small = Heads("small", 4, 2, 32)
    yield Case("decode", 2, 64, heads=small, **plain)
    yield Case("decode", 1, 100, heads=small, block_size=32, **plain)
    yield Case("decode", 2, 70, torch.float32, FP8, heads=small)
    yield Case("decode", 2, 64, heads=small, window=24, **plain)
    yield Case("decode", 2, 64, heads=small, softcap=20.0, sinks=True, **plain)
    yield Case("prefill", 2, 48, heads=small, **plain)
    yield Case("store", 5, 1, heads=small, **plain)
    yield Case("rope+store", 5, 1, heads=small, **plain)
    yield Case("latent", 2, 64, heads=Heads("small-mla", 4, 1, 576), block_size=64, **plain)
