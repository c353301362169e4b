"""Run kernel cases in Triton's interpreter: a case id per line of stdin, a verdict per line of stdout.

Run with TRITON_INTERPRET=1, which triton reads when it is imported. Whatever a kernel must not read is NaN: blocks of
other sequences, targets of unused block-table entries, the memory around tensors, outputs and scratch before they
are written. Whatever it must not write is compared afterwards.
"""

import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from engine.kernels import fp8, grouping, moe_fp8, triton_backend
from engine.kernels.lora_rows import LoraRows, tiles_of
from engine.kernels.matrices import Fp8BlockMatrix, Matrix, Mxfp4Matrix, Nvfp4Matrix
from engine.kernels.query_tiles import QueryTiles, cut_queries
from engine.kernels.work_list import Sizes, WorkList, cut
from tests.support import kernel_reference as reference
from tests.support.fast_interpreter import hurry
from tests.support.interpreter_cases import (
    CASES,
    FULL_CASES,
    Attention,
    Best,
    Case,
    Decode,
    Draw,
    Fp8Block,
    Fp8Rows,
    Gate,
    Group,
    Int4,
    Latent,
    Lora,
    Moe,
    Norm,
    Nucleus,
    Nvfp4,
    Prefill,
    Rotate,
    RotateStore,
    Route,
    Store,
    StoreLatent,
)

GUARD = 64  # elements on each side of an allocation
NAN_BYTE = 0xFF  # every float dtype reads NaN from it


def main() -> None:
    torch.set_num_threads(1)
    hurry()
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), flush=True)


def answer(question: str) -> dict[str, Any]:
    """A case's verdict; "refused WHAT": the error; "planted WHAT": the verdict on a wrong kernel."""
    kind, _, what = question.partition(" ")
    try:
        match kind:
            case "refused":
                return {"error": refusal(what)}
            case "planted":
                return planted(what)
        return run({**CASES, **FULL_CASES}[question])
    except Exception:
        return {"faults": [traceback.format_exc()], "error": 0.0, "tolerance": 0.0}


# --- judging ----------------------------------------------------------------------------------------------------------


def run(case: Case) -> dict[str, Any]:
    """{"error": difference from float64, "tolerance": what rounding allows, "faults": whatever else is wrong}."""
    torch.manual_seed(0)
    with guarded_allocations() as faults:
        match case:
            case Decode():
                error, tolerance = run_decode(case, faults)
            case Prefill():
                error, tolerance = run_prefill(case, faults)
            case Latent():
                error, tolerance = run_latent(case, faults)
            case RotateStore():
                error, tolerance = run_rotate_store(case, faults)
            case Store():
                error, tolerance = run_store(case, faults)
            case StoreLatent():
                error, tolerance = run_store_latent(case)
            case Norm():
                error, tolerance = run_norm(case)
            case Rotate():
                error, tolerance = run_rotate(case, faults)
            case Gate():
                error, tolerance = run_gate(case)
            case Route():
                error, tolerance = run_route(case, faults)
            case Group():
                error, tolerance = run_group(case, faults)
            case Moe():
                error, tolerance = run_moe(case)
            case Nvfp4():
                error, tolerance = run_nvfp4(case, faults)
            case Lora():
                error, tolerance = run_lora(case, faults)
            case Int4():
                error, tolerance = run_int4(case, faults)
            case Fp8Rows():
                error, tolerance = run_fp8(case, faults)
            case Fp8Block():
                error, tolerance = run_fp8_block(case, faults)
            case Draw():
                error, tolerance = run_draw(case, faults)
            case Nucleus():
                error, tolerance = run_nucleus(case, faults)
            case Best():
                error, tolerance = run_best(case, faults)
    return {"error": error, "tolerance": tolerance, "faults": faults}


def against(
    got: torch.Tensor, exact: torch.Tensor, roundings: int = 1, rounded: torch.Tensor | None = None
) -> tuple[float, float]:
    """(error, what it may be) of the worst row: a rounding to got's dtype may cost 1.6 times what it costs the exact.

    2e-6 is for the float32 sums inside, of answers about 1; where a row's largest answer is larger, its sums err by as
    much more. `roundings` counts those to got's dtype on the way. Where an answer is rounded on the way, `rounded` is
    what got is held against, and `exact` says only how much roundings cost.
    """
    assert got.shape == exact.shape
    if not got.float().isfinite().all():
        return float("inf"), 1.0
    rows = [x.double().flatten(1) for x in (got, exact, exact.to(got.dtype), exact if rounded is None else rounded)]
    floors = (rows[2] - rows[1]).abs().amax(1)
    errors = (rows[0] - rows[3]).abs().amax(1)
    tolerances = roundings * 1.6 * floors + 2e-6 * rows[1].abs().amax(1).clamp(min=1)
    worst = int((errors / tolerances).argmax())
    return errors[worst].item(), tolerances[worst].item()


def exactly(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """The number of bytes that differ, of which there may be none."""
    return float((raw(got) != raw(expected)).sum().item()), 0.0


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@contextmanager
def guarded_allocations() -> Iterator[list[str]]:
    """torch.empty gives NaN between guards; the list tells afterwards which guards a kernel wrote to."""
    plain, buffers, faults = torch.empty, [], list[str]()

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        numel = torch.Size(shape).numel()
        buffer = plain((numel + 2 * GUARD) * dtype.itemsize, dtype=torch.uint8, device=device).fill_(NAN_BYTE)
        buffers.append((buffer, GUARD * dtype.itemsize))
        return buffer.view(dtype)[GUARD : GUARD + numel].view(shape)

    torch.empty = empty  # type: ignore[assignment]  # the launchers call it by this name, with these arguments
    try:
        yield faults
    finally:
        torch.empty = plain
        for buffer, width in buffers:
            if (buffer[:width] != NAN_BYTE).any() or (buffer[-width:] != NAN_BYTE).any():
                faults.append("written beside an allocation")


def unchanged(faults: list[str], call: Callable[[], torch.Tensor], **inputs: torch.Tensor) -> torch.Tensor:
    """call(), with a fault for each input that it wrote to."""
    before = {name: raw(x).clone() for name, x in inputs.items()}
    out = call()
    faults.extend(f"{name} was written to" for name, x in inputs.items() if not torch.equal(raw(x), before[name]))
    return out


# --- inputs -----------------------------------------------------------------------------------------------------------


def dtype_of(name: str, default: str = "float32") -> torch.dtype:
    dtype = getattr(torch, name or default)
    assert isinstance(dtype, torch.dtype)
    return dtype


def strided(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random, a slice of a wider tensor of NaN, as q is of a fused projection."""
    wide = torch.full((shape[0], shape[1] + 2, *shape[2:]), float("nan"), dtype=dtype)
    x = wide[:, 1:-1]
    x.copy_(torch.randn(shape))
    return x


def rows_of_many(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """For results of this shape: rows in the middle of a tensor of NaN, as decodes have them before prefills."""
    return torch.full((shape[0] + 3, *shape[1:]), float("nan"), dtype=dtype)[1:-2]


def rows_beside(out: torch.Tensor | None, got: torch.Tensor) -> list[str]:
    """Faults of a result that was to be written to the rows `out` and nowhere else."""
    if out is None:
        return []
    whole = out._base
    assert whole is not None
    is_there = got.data_ptr() == out.data_ptr() and got.shape == out.shape
    is_alone = bool(whole[:1].isnan().all() and whole[-2:].isnan().all())
    return ["the result is not where it was wanted"] * (not is_there) + ["rows beside were written"] * (not is_alone)


def pool(num_blocks: int, case: Attention | Store, head_dim: int) -> torch.Tensor:
    """A cache of NaN [num_blocks, block_size, kv_heads, head_dim] in the case's layout, with NaN on both sides."""
    stored = dtype_of(case.stored, case.dtype)
    sizes = (case.block_size, case.kv_heads) if case.layout == "NHD" else (case.kv_heads, case.block_size)
    whole = torch.full((num_blocks + 2, *sizes, head_dim), float("nan")).to(stored)[1:-1]
    return whole if case.layout == "NHD" else whole.transpose(1, 2)


def is_overrun(cache: torch.Tensor) -> bool:
    """Whether anything but NaN lies beside a pool."""
    whole = cache._base
    assert whole is not None
    return not all(block.float().isnan().all() for block in (whole[0], whole[-1]))


def fill(cache: torch.Tensor, tables: torch.Tensor, lens: tuple[int, ...]) -> None:
    """Zeros in the null block; values up to 1 in each sequence's slots, stale ones after them in its last block.

    So no answer is larger than 1, for which `against` allows its 2e-6.
    """
    cache[0] = torch.zeros(cache.shape[1:]).to(cache.dtype)
    for table, length in zip(tables.tolist(), lens, strict=True):
        for block in range(-(-length // cache.shape[1])):
            x = torch.rand(cache.shape[1:]) * 2 - 1
            x[max(0, length - block * cache.shape[1]) :] = 100.0
            cache[table[block]] = x.to(cache.dtype)


def block_tables(lens: tuple[int, ...], block_size: int) -> tuple[torch.Tensor, int]:
    """(tables int32, blocks in the pool): blocks in random order; unused entries point at blocks of NaN."""
    needed = [-(-length // block_size) for length in lens]
    ids = (torch.randperm(sum(needed)) + 1).split(needed)
    unused = sum(needed) + 1
    tables = torch.full((len(lens), max(needed) + 2), unused, dtype=torch.int32)
    for table, blocks in zip(tables, ids, strict=True):
        table[: len(blocks)] = blocks
    return tables[:, :-1], unused + 1  # rows further apart than they are wide


def work_of(case: Decode | Latent) -> WorkList | None:
    """The case's lengths in chunks of its size; None: the launcher's own plan."""
    if case.chunk == 0:
        return None
    return padded_work(case.lens, case.chunk, case.window or None if isinstance(case, Decode) else None)


def padded_work(lens: tuple[int, ...], chunk: int, window: int | None, device: str | None = None) -> WorkList:
    """A plan in which rows are not there, as in a CUDA graph's; windows begin anywhere in a kernel's tile."""
    plan = cut(np.array(lens, np.int32), window, chunk, 16)
    gap = np.full((2, 4), -1, np.int32)
    items, merges = (np.concatenate([rows[:1], gap, rows[1:], gap]) for rows in plan.split())
    rows = torch.from_numpy(np.concatenate([items, merges])).to(device or torch.get_default_device())
    return WorkList(rows, Sizes(len(items), len(merges), plan.sizes.num_slots), len(lens), window)


def features(case: Attention) -> dict[str, Any]:
    fp8 = case.stored == "float8_e4m3fn"
    return {
        "window": case.window or None,
        "softcap": case.softcap or None,
        "sinks": torch.randn(case.heads) if case.sinks else None,
        "k_scale": 0.75 if fp8 else 1.0,
        "v_scale": 1.5 if fp8 else 1.0,
    }


# --- one function per kernel ------------------------------------------------------------------------------------------


def run_decode(case: Decode, faults: list[str]) -> tuple[float, float]:
    tables, num_blocks = block_tables(case.lens, case.block_size)
    k, v = (pool(num_blocks, case, dim) for dim in (case.head_dim, case.head_dim_v or case.head_dim))
    fill(k, tables, case.lens)
    fill(v, tables, case.lens)
    q = strided((len(case.lens), case.heads, case.head_dim), dtype_of(case.dtype))
    args = (k, v, tables, torch.tensor(case.lens, dtype=torch.int32), 2 * case.head_dim**-0.5)
    more, work = features(case), work_of(case)
    out = None if work is None else rows_of_many((*q.shape[:2], case.head_dim_v or case.head_dim), q.dtype)
    got = unchanged(faults, lambda: triton_backend.paged_decode(q, *args, **more, work=work, out=out), q=q, k=k, v=v)
    faults += rows_beside(out, got)
    return against(got, reference.paged_decode(q.double(), *args, **more))


def run_prefill(case: Prefill, faults: list[str]) -> tuple[float, float]:
    query_lens, context_lens = zip(*case.queries, strict=True)
    tables, num_blocks = block_tables(context_lens, case.block_size)
    k, v = (pool(num_blocks, case, dim) for dim in (case.head_dim, case.head_dim_v or case.head_dim))
    fill(k, tables, context_lens)
    fill(v, tables, context_lens)
    q = strided((sum(query_lens), case.heads, case.head_dim), dtype_of(case.dtype))
    starts = torch.tensor((0, *query_lens)).cumsum(0).int()
    args = (k, v, tables, starts, torch.tensor(context_lens, dtype=torch.int32), 2 * case.head_dim**-0.5)
    more = {**features(case), "max_query_len": max(query_lens)}
    got = unchanged(faults, lambda: triton_backend.paged_prefill(q, *args, **more), q=q, k=k, v=v)
    queries = triton_backend.queries_of_tile(case.heads, k, v, q.dtype, max(query_lens))
    rows = cut_queries(np.array(query_lens, np.int32), np.array(context_lens, np.int32), queries)
    out = rows_of_many((*q.shape[:2], case.head_dim_v or case.head_dim), q.dtype)
    tiles = QueryTiles(torch.from_numpy(rows), queries)
    planned = triton_backend.paged_prefill(q, *args, **more, tiles=tiles, out=out)
    faults += rows_beside(out, planned)
    if not torch.equal(planned, got):
        faults.append("planned tiles of queries give other answers")
    return against(got, reference.paged_prefill(q.double(), *args, **more))


def run_latent(case: Latent, faults: list[str]) -> tuple[float, float]:
    tables, num_blocks = block_tables(case.lens, case.block_size)
    width = case.latent_dim + case.rope_dim
    rows = pool(num_blocks, Attention(case.dtype, kv_heads=1, block_size=case.block_size), width)
    fill(rows, tables, case.lens)
    cache = rows[:, :, 0]
    q = strided((len(case.lens), case.heads, width), dtype_of(case.dtype))
    args = (cache, tables, torch.tensor(case.lens, dtype=torch.int32), 2 * width**-0.5)
    got = unchanged(
        faults,
        lambda: triton_backend.latent_decode(q, *args, latent_dim=case.latent_dim, work=work_of(case)),
        q=q,
        cache=cache,
    )
    return against(got, reference.latent_decode(q.double(), *args, latent_dim=case.latent_dim))


def run_store(case: Store, faults: list[str]) -> tuple[float, float]:
    head_dim_v = case.head_dim_v or case.head_dim
    k_cache, v_cache = (pool(4, case, dim) for dim in (case.head_dim, head_dim_v))
    k_expected, v_expected = k_cache.clone(), v_cache.clone()
    slots = torch.tensor([0, -1, case.block_size - 1, case.block_size, 4 * case.block_size - 1, -1, 7])
    k, v = (strided((len(slots), case.kv_heads, dim), dtype_of(case.dtype)) for dim in (case.head_dim, head_dim_v))
    # From below float8's smallest step to past its largest value, with ties between two float8 values.
    k[:, 0, :32] = torch.linspace(-20, 9, 32).exp2().to(k.dtype)
    k[:, 0, 32:40] = torch.tensor([0.0, -0.0, 17.0, -19.0, 0.0009765625, 448.0, -1e4, 464.0]).to(k.dtype)
    scales = (0.75, 1.5) if dtype_of(case.stored, case.dtype) == torch.float8_e4m3fn else (1.0, 1.0)
    triton_backend.store_kv(k, v, k_cache, v_cache, slots, *scales)
    reference.store_kv(k, v, k_expected, v_expected, slots, *scales)
    faults += ["written beside a pool"] * any(map(is_overrun, (k_cache, v_cache)))
    return exactly(
        torch.cat([raw(k_cache).flatten(), raw(v_cache).flatten()]),
        torch.cat([raw(k_expected).flatten(), raw(v_expected).flatten()]),
    )


def run_store_latent(case: StoreLatent) -> tuple[float, float]:
    cache = torch.full((6, 16, case.width), float("nan"), dtype=dtype_of(case.stored, case.dtype))
    expected = cache.clone()
    slots = torch.tensor([0, -1, 15, 16, 63])
    latent = strided((len(slots), case.width), dtype_of(case.dtype))
    triton_backend.store_latent(latent, cache[1:-1], slots)
    reference.store_latent(latent, expected[1:-1], slots)
    return exactly(cache, expected)


def run_norm(case: Norm) -> tuple[float, float]:
    dtype = dtype_of(case.dtype)
    x = strided((*case.shape[:-1], case.shape[-1]), dtype)
    weight = (1 + torch.randn(case.shape[-1]) / 4).to(dtype)
    roundings = 1 if case.unit_offset else 2
    if not case.residual:
        got = triton_backend.rms_norm(x, weight, 1e-6, unit_offset=case.unit_offset)
        exact = reference.rms_norm(x.double(), weight, 1e-6, unit_offset=case.unit_offset)
        assert isinstance(got, torch.Tensor)
        assert isinstance(exact, torch.Tensor)
        return against(got, exact, roundings)
    residual = strided(case.shape, dtype)
    got, total = triton_backend.rms_norm(x, weight, 1e-6, residual=residual, unit_offset=case.unit_offset)
    wrong, _ = exactly(total, x + residual)
    exact = reference.rms_norm(total.double(), weight, 1e-6, unit_offset=case.unit_offset)
    assert isinstance(exact, torch.Tensor)
    error, tolerance = against(got, exact, roundings)
    return error + wrong, tolerance


def run_rotate(case: Rotate, faults: list[str]) -> tuple[float, float]:
    dtype = dtype_of(case.dtype)
    q = strided((5, case.heads, case.head_dim), dtype)
    k = strided((5, case.kv_heads, case.head_dim), dtype)
    angles = torch.rand(9, case.rotary_dim // 2) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    positions = torch.tensor([0, 8, 3, 3, 1])
    exact = reference.rotate(q.double(), k.double(), cos_sin, positions, interleaved=case.interleaved)
    got = triton_backend.rotate(q, k, cos_sin, positions, interleaved=case.interleaved)
    if got[0].data_ptr() != q.data_ptr() or got[1].data_ptr() != k.data_ptr():
        faults.append("not in place")
    return against(torch.cat(got, 1), torch.cat(exact, 1))


def run_rotate_store(case: RotateStore, faults: list[str]) -> tuple[float, float]:
    """q and what lies in the slots against float64; elsewhere the caches stay as they are."""
    dtype, head_dim_v = dtype_of(case.dtype), case.head_dim_v or case.head_dim
    slots = torch.tensor([0, -1, case.block_size - 1, case.block_size, 4 * case.block_size - 1])
    q = strided((len(slots), case.heads, case.head_dim), dtype)
    k, v = (strided((len(slots), case.kv_heads, dim), dtype) for dim in (case.head_dim, head_dim_v))
    k_cache, v_cache = (pool(4, case, dim) for dim in (case.head_dim, head_dim_v))
    angles = torch.rand(9, case.rotary_dim // 2) * 6
    cos_sin, positions = torch.cat([angles.cos(), angles.sin()], 1), torch.tensor([0, 8, 3, 3, 1])
    scales = {"k_scale": 0.75, "v_scale": 1.5} if case.stored == "float8_e4m3fn" else {"k_scale": 1.0, "v_scale": 1.0}
    weights = [(1 + torch.randn(case.head_dim) / 4).to(dtype) for _ in range(2)]
    more: dict[str, Any] = {**scales, "interleaved": case.interleaved, "unit_offset": case.unit_offset}
    if case.norm:
        more |= {"q_norm": weights[0], "k_norm": weights[1], "norm_eps": 1e-6}

    k_exact, v_exact = (torch.zeros(cache.shape, dtype=torch.float64) for cache in (k_cache, v_cache))
    wide = (q.double(), k.double(), v.double())
    q_exact = reference.rotate_and_store(*wide, cos_sin, positions, k_exact, v_exact, slots, **more)
    k_before, v_before, q_parts, k_parts = k_cache.clone(), v_cache.clone(), q.clone(), k.clone()
    got = unchanged(
        faults,
        lambda: triton_backend.rotate_and_store(q, k, v, cos_sin, positions, k_cache, v_cache, slots, **more),
        k=k,
        v=v,
    )
    if got.data_ptr() != q.data_ptr():
        faults.append("not in place")
    # With a norm the sum over a head may have another order; a GPU may round a product before a sum or not.
    if not case.norm and q.device.type == "cpu":
        k_apart, v_apart = k_before.clone(), v_before.clone()
        triton_backend.rotate(q_parts, k_parts, cos_sin, positions, interleaved=case.interleaved)
        triton_backend.store_kv(k_parts, v, k_apart, v_apart, slots, **scales)
        apart = ((got, q_parts), (k_cache, k_apart), (v_cache, v_apart))
        faults += ["not what its parts do to the bit" for ours, theirs in apart if exactly(ours, theirs)[0]]
    roundings = 1 + (0 if not case.norm else 1 if case.unit_offset else 2)  # the turn, and a norm with its weight
    verdicts = [against(got, q_exact, roundings)]
    blocks, offsets = slots[slots >= 0] // case.block_size, slots[slots >= 0] % case.block_size
    for cache, before, exact, scale in (
        (k_cache, k_before, k_exact, scales["k_scale"]),
        (v_cache, v_before, v_exact, scales["v_scale"]),
    ):
        new = cache.view(torch.uint8)[blocks, offsets]  # as bytes: float8 cannot be indexed everywhere
        verdicts.append(against(new.contiguous().view(cache.dtype), exact[blocks, offsets] / scale, roundings))
        before.view(torch.uint8)[blocks, offsets] = new
        faults += ["another slot was written to"] * bool(exactly(cache, before)[0])
        faults += ["written beside a pool"] * is_overrun(cache)
    return max(verdicts, key=lambda verdict: verdict[0] / verdict[1])


def run_gate(case: Gate) -> tuple[float, float]:
    x = strided((3, 2 * case.inner), dtype_of(case.dtype))
    x[0, : case.inner] *= 30  # where the gates are flat
    more: dict[str, Any] = {"limit": 7.0, "alpha": 1.702} if case.kind == "clamped_swiglu" else {}
    got = triton_backend.gated_activation(x, case.kind, **more)
    exact = reference.gated_activation(x.double(), case.kind, **more)
    return against(got, exact)


def run_route(case: Route, faults: list[str]) -> tuple[float, float]:
    """The weights, of the experts that float64 chooses."""
    logits = strided((7, case.experts), dtype_of(case.dtype))
    logits[0] = 0.5  # all are as good
    logits[1] = logits[1].round()
    logits[2, 1 :: 2 + case.experts // 8] = -torch.inf
    logits[3, 1:] = -torch.inf
    if case.nan:
        logits[-1, 3] = torch.nan
    correction = torch.randn(case.experts).mul_(0.1) if case.correction else None
    more: dict[str, Any] = {
        name: getattr(case, name) for name in ("top_k", "scoring", "groups", "top_groups", "renormalize", "scale")
    }
    ids, weights = triton_backend.route(logits, correction, **more)
    if not ((ids >= 0) & (ids < case.experts)).all() or any(len(set(row)) < case.top_k for row in ids.tolist()):
        faults.append("not so many experts")
    num_good = len(logits) - case.nan
    expected_ids, expected = reference.route(logits[:num_good], correction, **more)
    faults.extend(
        f"token {token} goes to {got}, not {expected}"
        for token, (got, expected) in enumerate(zip(ids.tolist(), expected_ids.tolist(), strict=False))
        if got != expected
    )
    return against(weights[:num_good], expected)


def run_group(case: Group, faults: list[str]) -> tuple[float, float]:
    """How many tiles have another expert or other rows than a walk through the rows gives them."""
    ids = torch.rand(case.tokens, case.experts).topk(case.top_k).indices.to(dtype_of(case.ids))
    ids[: case.tokens // 2, 0] = case.experts // 2
    ids[ids == case.experts - 2] = 0  # nobody's
    got = grouping.group_rows(ids, case.experts, case.block_m)
    num_rows, tiles, experts = ids.numel(), list[list[int]](), list[int]()
    for expert in range(case.experts):
        rows = [row for row, chosen in enumerate(ids.flatten().tolist()) if chosen == expert]
        while rows:
            tile, rows = rows[: case.block_m], rows[case.block_m :]
            tiles.append(tile + [num_rows] * (case.block_m - len(tile)))
            experts.append(expert)
    unused = len(got.tile_experts) - len(experts)
    if unused < 0 or got.tile_experts.tolist() != experts + [-1] * unused:
        faults.append(f"tiles are of experts {got.tile_experts.tolist()}")
    wrong = sum(a != b for a, b in zip(got.rows.tolist(), tiles, strict=False))
    return float(wrong), 0.0


def run_moe(case: Moe) -> tuple[float, float]:
    dtype = dtype_of(case.dtype)
    x = strided((case.tokens, case.hidden), dtype)
    held13, w13 = experts(case, 2 * case.inner, case.hidden)
    held2, w2 = experts(case, case.hidden, case.inner)
    scores = torch.rand(case.tokens, case.experts)
    scores[:, 1] = -1  # an expert that nobody chooses
    weights, ids = scores.topk(case.top_k)
    more: dict[str, Any] = {"limit": 7.0, "alpha": 1.702} if case.kind == "clamped_swiglu" else {}
    if case.biases:
        more["b13"] = torch.randn(case.experts, 2 * case.inner).to(dtype)
        more["b2"] = torch.randn(case.experts, case.hidden).to(dtype)
    first_fp8_arch, moe_fp8.FIRST_FP8_ARCH = moe_fp8.FIRST_FP8_ARCH, 1000 if case.stored == "fp8 as bytes" else 89
    got = triton_backend.moe_mlp(x, held13, held2, ids, weights.contiguous(), case.kind, **more)
    moe_fp8.FIRST_FP8_ARCH = first_fp8_arch
    doubles: dict[str, Any] = {
        name: value.double() if torch.is_tensor(value) else value for name, value in more.items()
    }
    exact = reference.moe_mlp(x.double(), w13, w2, ids, weights, case.kind, **doubles)
    # The reference rounds where the launcher says so, at the end as well: two answers, each rounded.
    rounded = reference.moe_mlp(x, w13, w2, ids, weights, case.kind, **more)
    return against(got, exact, roundings=2, rounded=rounded)


FP8_BLOCK = (32, 64)


def experts(case: Moe, outputs: int, inputs: int) -> tuple[Matrix, torch.Tensor]:
    """Random matrices as the case stores them, NaN around each; and what they mean, float64. Answers are of about 1."""
    shape, spread = (case.experts, outputs, inputs), inputs**-0.5
    match case.stored:
        case "":
            plain = (torch.randn(shape) * spread).to(dtype_of(case.dtype))
            return plain, plain.double()
        case "mxfp4":
            values = bytes_between(torch.randint(0, 256, (*shape[:2], inputs // 2)), 0x77)  # 6, the largest
            powers = round(math.log2(spread / 3)) + torch.randint(-3, 3, (*shape[:2], inputs // 32))
            scales = bytes_between(127 + powers, 255)
            return Mxfp4Matrix(values, scales), reference.mxfp4(values, scales)
        case "nvfp4":
            values = bytes_between(torch.randint(0, 256, (*shape[:2], inputs // 2)), 0x77)
            codes = torch.randint(0, 127, (*shape[:2], inputs // 16))  # no sign: a scale is none
            scales8 = bytes_between(codes, NAN_BYTE).view(torch.float8_e4m3fn)
            parts = (outputs // 2, outputs - outputs // 2) if outputs != case.hidden else (outputs,)
            part_scales = between_nans((case.experts, len(parts)), torch.float32).abs_().mul_(0.002 * spread)
            matrix = Nvfp4Matrix(values, scales8, part_scales, part_scales, parts)
            return matrix, reference.nvfp4(values, scales8, part_scales, parts)
        case "fp8" | "fp8 as bytes":
            codes = torch.randint(0, 127, shape) + 128 * torch.randint(0, 2, shape)
            values = bytes_between(codes, NAN_BYTE).view(torch.float8_e4m3fn)
            counts = (-(-outputs // FP8_BLOCK[0]), -(-inputs // FP8_BLOCK[1]))
            scales = between_nans((case.experts, *counts), torch.float32).abs_().mul_(0.01 * spread)
            wide_scales = scales.double().repeat_interleave(FP8_BLOCK[0], 1).repeat_interleave(FP8_BLOCK[1], 2)
            return Fp8BlockMatrix(values, scales, FP8_BLOCK), values.double() * wide_scales[:, :outputs, :inputs]
        case _:
            raise AssertionError(case.stored)


def bytes_between(values: torch.Tensor, beside: int) -> torch.Tensor:
    """uint8, contiguous, with the byte `beside` before and after."""
    whole = torch.full((values.numel() + 2 * GUARD,), beside, dtype=torch.uint8)
    return whole[GUARD:-GUARD].view(values.shape).copy_(values)


def run_lora(case: Lora, faults: list[str]) -> tuple[float, float]:
    """Behind an adapter's own rank its slot is NaN, though the engine has 0 there: nothing of it is to be read."""
    dtype, rank, num_slots = dtype_of(case.dtype), max(case.ranks), len(case.ranks)
    slots = np.array([(i + case.first + 1) % (num_slots + 1) - 1 for i in range(case.tokens)], np.int32)
    x, y = strided((case.tokens, case.inputs), dtype), strided((case.tokens, sum(case.outputs)), dtype)
    a = between_nans((num_slots, len(case.outputs), rank, case.inputs), dtype).mul_(case.inputs**-0.5)
    b = between_nans((num_slots, sum(case.outputs), rank), dtype).mul_(rank**-0.5)
    starts = [0, *np.cumsum(case.outputs).tolist()]
    exact = y.double()
    for slot, own in enumerate(case.ranks):
        a[slot, :, own:], b[slot, :, own:] = torch.nan, torch.nan
        for layer, (start, stop) in enumerate(pairwise(starts)):
            product = b[slot, start:stop, :own].double() @ a[slot, layer, :own].double()
            exact[slots == slot, start:stop] += x[slots == slot].double() @ product.T
    rows = LoraRows.empty(case.tokens, num_slots, x.device)
    placed, tile_slots, _ = tiles_of(slots, len(rows.tile_slots))
    rows.rows[: len(placed)], rows.tile_slots[:] = torch.from_numpy(placed), torch.from_numpy(tile_slots)
    rows.ranks[:] = torch.tensor(case.ranks)

    def add() -> torch.Tensor:
        small = triton_backend.lora_shrink(x, a, rows)
        triton_backend.lora_expand(y, small, b, torch.tensor(starts, dtype=torch.int32), max(case.outputs), rows)
        return y

    before = y.clone()
    got = unchanged(faults, add, x=x, a=a, b=b)
    if not torch.equal(raw(got[slots < 0]), raw(before[slots < 0])):
        faults.append("tokens without an adapter were changed")
    return against(got, exact)


def between_nans(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Contiguous and random, of about 1, with NaN before and after."""
    numel = torch.Size(shape).numel()
    x = torch.full((numel + 2 * GUARD,), float("nan"), dtype=dtype)[GUARD : GUARD + numel].view(shape)
    return x.copy_(torch.randn(shape))


def run_nvfp4(case: Nvfp4, faults: list[str]) -> tuple[float, float]:
    """Three parts of unlike sizes."""
    x = strided((case.tokens, case.inputs), dtype_of(case.dtype))
    outputs = sum(case.parts)
    values = bytes_between(torch.randint(0, 256, (outputs, case.inputs // 2)), 0x77)
    scales = bytes_between(torch.randint(0, 127, (outputs, case.inputs // 16)), NAN_BYTE).view(torch.float8_e4m3fn)
    part_scales = between_nans((len(case.parts),), torch.float32).abs_().mul_(0.002 * case.inputs**-0.5)
    args = (x, values, scales, part_scales, case.parts)
    got = unchanged(faults, lambda: triton_backend.nvfp4_linear(*args), x=x, values=values)
    return against(got, x.double() @ reference.nvfp4(values, scales, part_scales, case.parts).T)


def run_int4(case: Int4, faults: list[str]) -> tuple[float, float]:
    x = strided((case.tokens, case.inputs), dtype_of(case.dtype))
    words = torch.randint(-(2**31), 2**31, (case.inputs // 8, case.outputs), dtype=torch.int32)
    zeros = torch.randint(-(2**31), 2**31, (case.groups, case.outputs // 8), dtype=torch.int32)
    scales = between_nans((case.groups, case.outputs), dtype_of(case.scales))
    scales.mul_(0.1 * case.inputs**-0.5)
    args = (x, words, scales, zeros)
    got = unchanged(faults, lambda: triton_backend.int4_linear(*args, num_splits=case.num_splits), x=x, words=words)
    return against(got, reference.int4_linear(x.double(), words, scales, zeros))


def run_fp8(case: Fp8Rows, faults: list[str]) -> tuple[float, float]:
    x = strided((case.tokens, case.inputs), dtype_of(case.dtype))
    x[0] = 0  # a row that nothing brings to 448
    x[1, :2] = torch.tensor([-60.0, 1e-6])
    if case.nan:
        x[-1, 3] = float("nan")
    scale = torch.tensor(0.02) if case.has_scale else None  # -60 is cut
    if not case.outputs:
        got, scales = fp8.fp8_rows(x, scale)
        expected, expected_scales = reference.fp8_rows(x, scale)
        if case.nan:  # of which there are many bit patterns
            differing = [
                (a.isnan() != b.isnan()).sum() for a, b in ((got.float(), expected.float()), (scales, expected_scales))
            ]
            faults.extend(f"{count} are NaN in one alone" for count in differing if count)
            got, expected, scales, expected_scales = got[:-1], expected[:-1], scales[:-1], expected_scales[:-1]
        wrong, _ = exactly(scales, expected_scales)
        error, tolerance = exactly(got, expected)
        return error + wrong, tolerance
    values = (torch.randn(case.outputs, case.inputs) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    row_scales = between_nans((case.outputs,), torch.float32).abs_().mul_(0.01 * case.inputs**-0.5)
    got = unchanged(
        faults, lambda: triton_backend.fp8_linear(x, values, row_scales, input_scale=scale), x=x, values=values
    )
    if case.inputs % 16:  # x as it is
        weight = values.double() * row_scales.double()[:, None]
        return against(got, x.double() @ weight.T, roundings=2, rounded=(x @ weight.to(x.dtype).T).double())
    exact = reference.fp8_linear(x, values, row_scales, input_scale=scale)
    if case.nan:
        if not got[-1].isnan().all():
            faults.append("of NaN came numbers")
        got, exact = got[:-1], exact[:-1]
    return against(got, exact)


def run_fp8_block(case: Fp8Block, faults: list[str]) -> tuple[float, float]:
    """Weights of every bit pattern; answers of about 1."""
    x = strided((case.tokens, case.inputs), dtype_of(case.dtype))
    bits = torch.randint(0, 127, (case.outputs, case.inputs)) + 128 * torch.randint(0, 2, (case.outputs, case.inputs))
    if case.nan:
        bits[-1, 3] = 0xFF
    values = torch.full((bits.numel() + 2 * GUARD,), NAN_BYTE, dtype=torch.uint8)[GUARD:-GUARD].view(bits.shape)
    values = values.copy_(bits).view(torch.float8_e4m3fn)
    counts = [-(-size // side) for size, side in zip(values.shape, case.block, strict=True)]
    scales = between_nans((counts[0], counts[1]), torch.float32).abs_().mul_(0.01 * case.inputs**-0.5)
    args = (x, values, scales, case.block)
    got = unchanged(
        faults, lambda: triton_backend.fp8_block_linear(*args, num_splits=case.num_splits or None), x=x, values=values
    )
    exact = reference.fp8_block_linear(x.double(), values, scales, case.block)
    if case.nan:
        if not got[:, -1].isnan().all():
            faults.append("of NaN came numbers")
        got, exact = got[:, :-1], exact[:, :-1]
    return against(got, exact)


def run_draw(case: Draw, faults: list[str]) -> tuple[float, float]:
    """How far outside its token's share of the unit interval a row's number lies."""
    uniforms = torch.tensor([0.0, 1 - 2.0**-53, 0.5, *torch.rand(9).tolist()], dtype=torch.float64)[:, None]
    num_rows = len(uniforms)
    logits = strided((num_rows, case.vocab), dtype_of(case.dtype)).mul_(case.spread)
    logits[:, :: max(2, case.vocab // 7)] = -torch.inf  # never to come
    logits[:, -1] = 0.0
    temperature = torch.linspace(0.3, 2, num_rows)[:, None]
    floors = torch.full((num_rows, 1), -2.0) if case.floors else None
    if case.nan:
        logits[-1] = float("nan")
    best = logits.float().amax(1)
    initial, out = torch.arange(-num_rows, 0), None
    if case.some:
        temperature[1::3], out = 0.0, initial.clone()
    args = (logits, best, temperature, uniforms, floors)
    got = unchanged(faults, lambda: triton_backend.draw(*args, out=out), logits=logits, best=best)
    if case.some:
        is_drawn = temperature[:, 0] > 0
        if got is not out or (got != initial)[~is_drawn].any():
            faults.append("a row of temperature 0 was drawn")
        logits, best, temperature, uniforms, got = (x[is_drawn] for x in (logits, best, temperature, uniforms, got))
        floors = None if floors is None else floors[is_drawn]
    if not ((got >= 0) & (got < case.vocab)).all():
        return float("inf"), 0.0
    sums = reference.running_sums(logits.float(), temperature, floors)
    ends = sums.gather(1, got[:, None])
    starts = torch.where(got[:, None] > 0, sums.gather(1, (got[:, None] - 1).clamp(min=0)), 0.0)
    chosen = logits.gather(1, got[:, None])
    least = -torch.inf if floors is None else floors * temperature + best[:, None]
    if case.nan:
        ends, starts, uniforms, chosen = ends[:-1], starts[:-1], uniforms[:-1], chosen[:-1]
        least = least[:-1] if isinstance(least, torch.Tensor) else least
    if (chosen == -torch.inf).any() or (chosen < least).any():
        faults.append("a token came that may not")
    outside = torch.maximum(starts - uniforms, uniforms - ends).clamp(min=0).max().item()
    # A weight is rounded by some eps of its exponent, here up to 60 over a temperature of 0.3 where it still counts.
    return outside, 100 * torch.finfo(torch.float32).eps


def run_nucleus(case: Nucleus, faults: list[str]) -> tuple[float, float]:
    """How many rows have another floor than float64's, to the bit, unless rounded exponentials decide."""
    vocab = case.vocab
    options = [
        *(
            (1, 2.0),
            (1, 0.5),
            (min(7, vocab), 2.0),
            (min(7, vocab), 0.8),
            (min(3, vocab), 0.999),
            (max(1, vocab - 1), 0.3),
        ),
        *((vocab, 5e-324), (vocab, 1e-6), (vocab, 0.3), (vocab, 0.9), (vocab, 1 - 2.0**-53), (vocab, 2.0)),
    ]
    if case.some:  # between rows that keep all
        options = [option for pair in options for option in ((vocab, 2.0), pair)]
    num_rows = len(options)
    logits = strided((num_rows, case.vocab), dtype_of(case.dtype)).mul_(case.spread)
    logits[::2] = (logits[::2] * 2).round() / 2  # many are equal
    logits[:, 1 :: max(2, case.vocab // 7)] = -torch.inf
    logits[0, 0] = -0.0
    temperature = torch.linspace(0.3, 2, num_rows)[:, None]
    top_k = torch.tensor([[k] for k, _ in options])
    top_p = torch.tensor([[p] for _, p in options], dtype=torch.float64)
    if case.bad:
        logits[-1], logits[-2], logits[-3, 0], logits[-4, -1] = torch.nan, -torch.inf, torch.inf, torch.nan
    best = logits.float().amax(1)
    args = (logits, best, temperature, top_k)
    got = unchanged(
        faults,
        lambda: triton_backend.nucleus_floors(*args, top_p, num_sorted=vocab),
        logits=logits,
        best=best,
    )
    # Of weights that are each rounded by some eps of their exponents, below 30 where they count.
    more, less = (reference.nucleus_floors(*args, top_p * (1 + side * 4e-6)) for side in (1, -1))
    is_bad = ((got < more) | (got > less))[:-4] if case.bad else (got < more) | (got > less)
    if case.bad:
        more, less = more[:-4], less[:-4]
    # The top_p that is next to 1, and where the numbers fall so with more tokens: a GPU draws other ones.
    if (more != less).sum() > 1 + case.vocab // 2000:
        faults.append("rounding decides more than one row: nothing is tested")
    return float(is_bad.sum()), 0.0


def run_best(case: Best, faults: list[str]) -> tuple[float, float]:
    """How many rows have another best token, or another verdict, than a look at all of their logits finds."""
    logits = strided((9, case.vocab), dtype_of(case.dtype))
    logits[1] = logits[1].round()  # several are the best
    logits[2] = logits[2].abs().neg()
    logits[2, case.vocab // 3 :] = 0.0
    logits[2, case.vocab // 3] = -0.0  # as good as those behind it
    logits[3] = -3.0
    logits[4, -1] = torch.inf
    logits[5] = -torch.inf
    logits[6] = -torch.inf
    logits[6, -1] = torch.finfo(logits.dtype).min
    logits[7, case.vocab // 2] = torch.nan
    logits[8, case.vocab // 2] = -torch.tensor(torch.nan)
    best, tokens, is_bad = triton_backend.best_tokens(logits)
    expected = [max(row, key=lambda x: (x != x, x)) for row in logits.tolist()]
    firsts = [row.index(value) for row, value in zip(logits[:7].tolist(), expected[:7], strict=True)]
    if is_bad.tolist() != [False] * 4 + [True, True, False, True, True]:
        faults.append(f"bad rows are {is_bad.tolist()}")
    if not best[7:].isnan().all() or not ((tokens >= 0) & (tokens < case.vocab)).all():
        faults.append("of a row without a best token came one")
    wrong = sum(
        a != b for a, b in zip([*best[:7].tolist(), *tokens[:7].tolist()], [*expected[:7], *firsts], strict=True)
    )
    return float(wrong), 0.0


# --- that wrong kernels and wrong arguments are seen ------------------------------------------------------------------


def planted(what: str) -> dict[str, Any]:
    """The verdict on a decode kernel with one fault."""
    true_kernel = triton_backend.paged_decode

    def wrong_kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: torch.Tensor,
        lens: torch.Tensor,
        *args: Any,
        **more: Any,
    ) -> torch.Tensor:
        if what == "stale slot":
            more["work"] = padded_work((2, 76), 32, None)
        out = true_kernel(q, k, v, tables, lens, *args, **more)
        if what == "value":
            out[-1, -1, -1] += 1e-3
        if what == "unset":
            out[0, 0, 0] = float("nan")
        if what == "beside":
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0)
        if what == "cache":
            v[0, 0, 0, 0] = 1
        return out

    triton_backend.paged_decode = wrong_kernel  # type: ignore[assignment]  # called with these arguments only
    try:
        return run(Decode(lens=(1, 75), chunk=32))
    finally:
        triton_backend.paged_decode = true_kernel


def refusal(what: str) -> str:
    """The message that a decode launcher refuses one wrong argument with."""
    args: dict[str, Any] = {
        "q": torch.zeros(2, 4, 64),
        "k_cache": torch.zeros(3, 16, 2, 64),
        "v_cache": torch.zeros(3, 16, 2, 64),
        "block_tables": torch.zeros(2, 2, dtype=torch.int32),
        "context_lens": torch.ones(2, dtype=torch.int32),
        "scale": 1.0,
    }
    wrong: dict[str, Any] = {
        "q": args["q"][0],
        "q heads": torch.zeros(2, 3, 64),
        "q strides": torch.zeros(2, 64, 4).mT,
        "k_cache": torch.zeros(3, 16, 2, 80),
        "k_cache dtype": torch.zeros(3, 16, 2, 64, dtype=torch.bfloat16),
        "k_cache block_size": torch.zeros(3, 24, 2, 64),
        "v_cache": torch.zeros(2, 16, 2, 64),
        "block_tables": torch.zeros(3, 2, dtype=torch.int32),
        "context_lens": torch.ones(2, dtype=torch.int64),
        "context_lens device": torch.ones(2, dtype=torch.int32, device="meta"),
        "sinks": torch.zeros(2),
        "window": 0,
        "k_scale": 2.0,
        "work": padded_work((1, 1, 1), 64, None),
        "work window": padded_work((1, 1), 64, 7),
        "work device": padded_work((1, 1), 64, None, "meta"),
        "out": torch.zeros(2, 4, 80),
        "out strides": torch.zeros(4, 2, 64).transpose(0, 1),
        "out dtype": torch.zeros(2, 4, 64, dtype=torch.bfloat16),
        "out device": torch.zeros(2, 4, 64, device="meta"),
    }
    try:
        triton_backend.paged_decode(**{**args, what.split()[0]: wrong[what]})
    except ValueError as error:
        return str(error)
    return "accepted"


if __name__ == "__main__":
    main()
