"""Paged attention of Llama-3.1-8B's shape beside torch's own on contiguous KV, as a share of the device's best.

Decode reads every key and value once: its bytes over its time are held against the measured copy bandwidth. Prefill
computes: 4 * head_dim operations per head and visible pair of tokens, against the measured matrix rate. Pages lie in
random order; successive calls read different ones, so that no cache is measured.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F

from benchmarks.gpu_stages.stage import Row, Task, parser, row, task
from benchmarks.gpu_stages.timing import Call, copy_bandwidths, matmul_rates, seconds_per_call
from engine import kernels

SHAPE = "32 heads, 8 KV heads, head_dim 128"
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5
Job = Callable[[], list[Row]]
ROTATED = 512 * 2**20  # bytes that are read before any is read again: several times the largest L2


@dataclass(frozen=True, slots=True)
class Shapes:
    """(sequences, tokens of each) for decode and for prefill."""

    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int], ...]


FULL = Shapes(
    ((32, 4096), (64, 2048), (8, 4096), (1, 8192), (1, 131_072), (256, 512), (8, 32_768)), ((1, 8192), (4, 2048))
)
TINY = Shapes(((2, 64), (1, 128)), ((1, 64),))


@dataclass(frozen=True, slots=True)
class Context:
    """KV of some sequences in pages of a pool; the fields are the kernels' arguments."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor


def contexts(num_seqs: int, length: int, dtype: torch.dtype, device: torch.device) -> list[Context]:
    """Equal ones that share no page, as many as it takes to fill ROTATED bytes (on a CPU two)."""
    blocks_each = num_seqs * length // BLOCK_SIZE
    size = blocks_each * BLOCK_SIZE * KV_HEADS * HEAD_DIM * 2 * dtype.itemsize
    count = max(2, -(-ROTATED // size)) if device.type == "cuda" else 2
    shape = (1 + count * blocks_each, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    k_cache, v_cache = (torch.rand(shape, device=device).sub_(0.5).to(dtype) for _ in range(2))
    pages = (1 + torch.randperm(count * blocks_each, device=device)).int().view(count, num_seqs, -1)
    lens = torch.full((num_seqs,), length, dtype=torch.int32, device=device)
    return [Context(k_cache, v_cache, tables, lens) for tables in pages]


def compute_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


# --- decode -----------------------------------------------------------------------------------------------------------


def paged_decode_calls(
    backend: ModuleType, num_seqs: int, length: int, stored: torch.dtype, device: torch.device
) -> list[Call]:
    q = torch.randn(num_seqs, HEADS, HEAD_DIM, device=device).to(compute_dtype(device))
    return [
        partial(backend.paged_decode, q, c.k_cache, c.v_cache, c.block_tables, c.context_lens, SCALE)
        for c in contexts(num_seqs, length, stored, device)
    ]


def torch_decode_calls(num_seqs: int, length: int, device: torch.device) -> list[Call]:
    """torch's attention on keys and values that lie in one piece."""
    dtype = compute_dtype(device)
    size = num_seqs * length * KV_HEADS * HEAD_DIM * 2 * dtype.itemsize
    count = max(2, -(-ROTATED // size)) if device.type == "cuda" else 2
    q = torch.randn(num_seqs, HEADS, 1, HEAD_DIM, device=device).to(dtype)
    shape = (count, num_seqs, KV_HEADS, length, HEAD_DIM)
    k, v = (torch.rand(shape, device=device).sub_(0.5).to(dtype) for _ in range(2))
    return [partial(F.scaled_dot_product_attention, q, k[i], v[i], scale=SCALE, enable_gqa=True) for i in range(count)]


def decode_rows(
    name: str, build: Callable[[], list[Call]], num_bytes: int, best: float, device: torch.device
) -> list[Row]:
    times = seconds_per_call(build(), device)
    return [
        row(name, "us", [s * 1e6 for s in times], SHAPE),
        row(f"{name}: bandwidth", "share of copy", [num_bytes / s / best for s in times], SHAPE),
    ]


# --- prefill ----------------------------------------------------------------------------------------------------------


def prefill_rows(backend: ModuleType, num_seqs: int, length: int, best: float, device: torch.device) -> list[Row]:
    """A whole prompt at once, paged and torch's own."""
    dtype = compute_dtype(device)
    q = torch.randn(num_seqs * length, HEADS, HEAD_DIM, device=device).to(dtype)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * length
    paged: list[Call] = [
        partial(
            backend.paged_prefill, q, c.k_cache, c.v_cache, c.block_tables, starts, c.context_lens, SCALE,
            max_query_len=length,
        )
        for c in contexts(num_seqs, length, dtype, device)[:2]
    ]  # fmt: skip
    whole = q.view(num_seqs, length, HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    k, v = (torch.rand(num_seqs, KV_HEADS, length, HEAD_DIM, device=device).to(dtype) for _ in range(2))
    plain: list[Call] = [
        partial(F.scaled_dot_product_attention, whole, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    ]
    operations = num_seqs * HEADS * 4 * HEAD_DIM * length * (length + 1) / 2
    rows = []
    for name, calls in (("paged prefill", paged), ("torch prefill", plain)):
        metric = f"{name} B={num_seqs} L={length}"
        times = seconds_per_call(calls, device)
        rows.append(row(metric, "us", [s * 1e6 for s in times], SHAPE))
        rows.append(row(f"{metric}: rate", "share of matmul", [operations / s / best for s in times], SHAPE))
    return rows


# --- all of them ------------------------------------------------------------------------------------------------------


def jobs(stage: Task, best: float, matmul: float) -> Iterator[tuple[str, Job]]:
    """What is measured, by name, the most telling first."""
    device, backend = stage.device, kernels.load("auto", stage.device.type)
    shapes = TINY if stage.is_small else FULL
    own = compute_dtype(device)
    for num_seqs, length in shapes.decode:
        where, slots = f"B={num_seqs} L={length}", num_seqs * length * KV_HEADS * HEAD_DIM * 2
        for dtype in (own,) if stage.is_small else (own, torch.float8_e4m3fn):
            name = f"paged decode {where} {str(dtype).removeprefix('torch.')}"
            build = partial(paged_decode_calls, backend, num_seqs, length, dtype, device)
            yield name, partial(decode_rows, name, build, slots * dtype.itemsize, best, device)
        build = partial(torch_decode_calls, num_seqs, length, device)
        name = f"torch decode {where}"
        yield name, partial(decode_rows, name, build, slots * own.itemsize, best, device)
    for num_seqs, length in shapes.prefill:
        yield f"prefill B={num_seqs} L={length}", partial(prefill_rows, backend, num_seqs, length, matmul, device)


def headline(rows: list[Row], best: float) -> str:
    shares = [entry.value for entry in rows if entry.metric.startswith("paged decode") and "share" in entry.unit]
    told = f"paged decode {min(shares):.0%} to {max(shares):.0%} of the copy bandwidth" if shares else "no decode"
    return f"{told} ({best / 1e12:.2f} TB/s)"


def run(stage: Task) -> int:
    """1 where something could not be measured; the rest is still worth having."""
    best = row("copy bandwidth", "bytes/s", copy_bandwidths(stage.device))
    matmul = row("bfloat16 matrix rate", "FLOP/s", matmul_rates(stage.device))
    rows, failures = [best, matmul], dict[str, str]()
    for name, measure in jobs(stage, best.value, matmul.value):
        try:
            rows += measure()
        except (RuntimeError, ValueError) as error:  # out of memory, or a shape that a kernel does not take
            failures[name] = str(error).splitlines()[0]
            print(f"{name}: {error}", flush=True)
        if stage.device.type == "cuda":
            torch.cuda.empty_cache()
        numbers = {"copy_bytes_per_s": best.value, "matmul_flops": matmul.value, "failures": failures}
        stage.save(headline(rows, best.value), numbers, rows)
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(run(task(parser(__doc__))))
