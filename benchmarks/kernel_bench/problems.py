"""Kernel problems with random data: what is asked, what it must move or compute at least, and the right answer.

Pages lie in random order. Successive contexts of a problem share no memory and are together larger than any cache, so
that calls on them in turn measure the device's memory.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from tests.support import kernel_reference as reference

Kind = Literal["decode", "prefill", "store", "rope+store", "latent"]

ROTATED = 512 * 2**20  # bytes that are read before any is read again: several times the largest L2
CHECKED_QUERIES = 128  # of a prefill's last ones: float64 scores of all would not fit


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention: heads of one layer. For latents kv_heads is 1 and head_dim a stored row."""

    model: str
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


LLAMA_8B = Heads("llama-3.1-8b", 32, 8, 128)
GEMMA_12B = Heads("gemma-3-12b", 16, 8, 256)
GPT_OSS = Heads("gpt-oss-20b", 64, 8, 64)
V2_LITE = Heads("deepseek-v2-lite", 16, 1, 576)
V3 = Heads("deepseek-v3", 128, 1, 576)
LATENT_DIM = 512  # of both: the rest of a row is the rotary key


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time.

    num_seqs  sequences, each of `length` tokens; of a store, tokens (length is then 1)
    compute   dtype of queries and answers; stored: of KV
    """

    kind: Kind
    num_seqs: int
    length: int
    compute: torch.dtype
    stored: torch.dtype
    block_size: int = 16
    heads: Heads = LLAMA_8B
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        size = f"T={self.num_seqs}" if "store" in self.kind else f"B={self.num_seqs} L={self.length}"
        words = [self.kind, size, _name(self.stored)]
        words += [f"queries {_name(self.compute)}"] if self.compute == torch.float16 != self.stored else []
        words += [self.heads.model] if self.heads is not LLAMA_8B else []
        words += [f"block {self.block_size}"] if self.block_size != 16 else []
        words += [f"window {self.window}"] if self.window else []
        words += [f"softcap {self.softcap:g}"] if self.softcap else []
        return " ".join([*words, *(["sinks"] if self.sinks else [])])

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.softcap is None and not self.sinks

    @property
    def token_bytes(self) -> int:
        """What one token stores in one layer."""
        sides = 1 if self.kind == "latent" else 2
        return sides * self.heads.kv_heads * self.heads.head_dim * self.stored.itemsize

    @property
    def kv_bytes(self) -> int:
        """What the sequences store."""
        return self.num_seqs * self.length * self.token_bytes

    @property
    def moved_bytes(self) -> int:
        """What must be read and written at least; of attention the keys and values that are seen, and no more."""
        if "store" not in self.kind:
            return self.num_seqs * min(self.length, self.window or self.length) * self.token_bytes
        new = 2 * self.heads.kv_heads * self.heads.head_dim * self.compute.itemsize
        queries = self.heads.heads * self.heads.head_dim * self.compute.itemsize
        turned = 2 * queries if self.kind == "rope+store" else 0
        return self.num_seqs * (new + turned + self.token_bytes)

    @property
    def operations(self) -> float:
        """Of a causal prefill: 4 * head_dim per head and visible pair of tokens."""
        pairs = self.length * (self.length + 1) / 2
        return self.num_seqs * self.heads.heads * 4 * self.heads.head_dim * pairs


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Context:
    """One call's own memory.

    caches   [num_blocks, block_size, kv_heads, head_dim] of keys and of values; of latents one without the heads
    tables   [num_seqs, blocks of each] int32; of a store none
    lens     [num_seqs] int32
    new      of a store: queries, keys and values of the new tokens; slots: where they go
    """

    caches: tuple[torch.Tensor, ...]
    tables: torch.Tensor
    lens: torch.Tensor
    new: tuple[torch.Tensor, ...] = ()
    slots: torch.Tensor | None = None

    def rows(self, cache: torch.Tensor) -> torch.Tensor:
        """[num_seqs, length, ...]: a cache's pages in order, in one piece."""
        length = int(self.lens[0])
        return (
            cache.view(torch.uint8 if cache.dtype.itemsize == 1 else cache.dtype)[self.tables.long()]
            .view(cache.dtype)
            .flatten(1, 2)[:, :length]
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """A case with data. q: [num_seqs, heads, head_dim], of a prefill [tokens, ...]."""

    case: Case
    q: torch.Tensor
    contexts: list[Context]
    sinks: torch.Tensor | None
    scale: float

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def starts(self) -> torch.Tensor:
        """Where each sequence of a prefill begins in q."""
        case = self.case
        return torch.arange(case.num_seqs + 1, dtype=torch.int32, device=self.device) * case.length


def problem_of(case: Case, device: torch.device) -> Problem:
    """Random data; raises torch's OutOfMemoryError where it does not fit."""
    num_queries = case.num_seqs * (case.length if case.kind == "prefill" else 1)
    q = torch.randn(num_queries, case.heads.heads, case.heads.head_dim, device=device).to(case.compute)
    sinks = torch.randn(case.heads.heads, device=device) if case.sinks else None
    contexts = _stores(case, device) if "store" in case.kind else _contexts(case, device)
    return Problem(case, q, contexts, sinks, case.heads.head_dim**-0.5)


def num_contexts(size: int, device: torch.device) -> int:
    """How many of this size fill ROTATED bytes; on a CPU, where no time means anything, two."""
    return max(1, -(-ROTATED // size)) if device.type == "cuda" else 2


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Between -1 / 2 and 1 / 2, drawn in pieces: float32 of all of it may not fit beside it."""
    out = torch.empty(shape, dtype=dtype, device=device)
    for piece in out.split(max(1, 2**28 // max(1, out[0].numel()))):
        piece.copy_(torch.rand(piece.shape, device=device).sub_(0.5))
    return out


def _contexts(case: Case, device: torch.device) -> list[Context]:
    """Equal ones that share no page but the null block."""
    blocks_each = -(-case.length // case.block_size)
    count = num_contexts(case.kv_bytes, device)
    blocks = count * case.num_seqs * blocks_each
    shape = (1 + blocks, case.block_size, case.heads.kv_heads, case.heads.head_dim)
    caches = tuple(_random(shape, case.stored, device) for _ in range(1 if case.kind == "latent" else 2))
    if case.kind == "latent":
        caches = (caches[0][:, :, 0],)
    pages = (1 + torch.randperm(blocks, device=device)).int().view(count, case.num_seqs, -1)
    lens = torch.full((case.num_seqs,), case.length, dtype=torch.int32, device=device)
    return [Context(caches, tables, lens) for tables in pages]


def _stores(case: Case, device: torch.device) -> list[Context]:
    """New tokens for random slots of a pool; no two contexts share a slot or a token."""
    count = min(num_contexts(case.moved_bytes, device), 256)
    slots_each = -(-case.num_seqs // case.block_size) * case.block_size
    shape = (1 + count * slots_each // case.block_size, case.block_size, case.heads.kv_heads, case.heads.head_dim)
    caches = tuple(_random(shape, case.stored, device) for _ in range(2))
    slots = case.block_size + torch.randperm(count * slots_each, device=device)
    wide = (case.num_seqs, case.heads.heads, case.heads.head_dim)
    narrow = (case.num_seqs, *shape[2:])
    empty = torch.empty(0, dtype=torch.int32, device=device)
    return [
        Context(
            caches, empty, empty, tuple(_random(width, case.compute, device) for width in (wide, narrow, narrow)),
            slots[i * slots_each :][: case.num_seqs].contiguous(),
        )
        for i in range(count)
    ]  # fmt: skip


# --- the right answer -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expected:
    """What the first context's answer must be in these rows of it, in float64."""

    rows: slice | list[int]
    exact: torch.Tensor

    def error(self, answer: torch.Tensor) -> float:
        """Relative L2 error; infinite where any of the answer is not finite, or for one of another size."""
        got = answer[self.rows].double()
        if got.numel() != self.exact.numel() or not bool(answer.isfinite().all()):
            return float("inf")
        return float((got.view_as(self.exact) - self.exact).norm() / self.exact.norm())

    def rounding(self, dtype: torch.dtype) -> float:
        """What rounding the right answer to a dtype costs."""
        return float((self.exact.to(dtype).double() - self.exact).norm() / self.exact.norm())


# Relative L2 errors that a right answer stays below: operands of 16 bits cost between 1e-3 and 1e-2, of float8 as much
# as float16 on top of the cache, tf32 about 3e-4.
MOST_WRONG = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 1e-2}


def cos_sin(case: Case, device: torch.device) -> torch.Tensor:
    """[tokens, head_dim] float32: a position's cosines, then its sines."""
    angles = torch.arange(case.num_seqs, device=device)[:, None] / 10_000 ** (
        torch.arange(0, case.heads.head_dim, 2, device=device) / case.heads.head_dim
    )
    return torch.cat([angles.cos(), angles.sin()], 1)


def expected_of(problem: Problem) -> Expected:
    """The first context's answer; of a store, the stored rows, keys before values."""
    case, first = problem.case, problem.contexts[0]
    more = {"window": case.window, "softcap": case.softcap, "sinks": problem.sinks}
    match case.kind:
        case "decode" | "latent":
            rows = sorted({0, case.num_seqs - 1})
            q, tables, lens = problem.q[rows].double(), first.tables[rows], first.lens[rows]
            args = (q, *first.caches, tables, lens, problem.scale)
            if case.kind == "latent":
                return Expected(rows, reference.latent_decode(*args, latent_dim=LATENT_DIM))
            return Expected(rows, reference.paged_decode(*args, **more))
        case "prefill":
            count = min(case.length, CHECKED_QUERIES)
            last = slice(case.length - count, case.length)
            starts = torch.tensor([0, count], dtype=torch.int32, device=problem.device)
            exact = reference.paged_prefill(
                problem.q[last].double(), *first.caches, first.tables[:1], starts, first.lens[:1], problem.scale,
                max_query_len=count, **more,
            )  # fmt: skip
            return Expected(last, exact)
        case "store" | "rope+store":
            q, k, v = (x.double() for x in first.new)
            if case.kind == "rope+store":
                positions = torch.arange(case.num_seqs, device=problem.device)
                q, k = reference.rotate(q, k, cos_sin(case, problem.device), positions)
            return Expected(slice(0, 2 * case.num_seqs), torch.cat([k, v]).to(case.compute).to(case.stored).double())


def stored_rows(context: Context) -> torch.Tensor:
    """What lies in a store's slots: keys, then values."""
    k, v = (cache.flatten(0, 1).float()[context.slots] for cache in context.caches)
    return torch.cat([k, v])
