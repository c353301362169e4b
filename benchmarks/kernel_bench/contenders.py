"""Who solves a problem: this repository's kernels, torch's own, and other libraries where they are installed.

None of the libraries is a dependency. What one does not do, or does not do in the version that is there, costs its own
rows only; so does a wrong answer.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks.gpu_stages.timing import Call
from benchmarks.kernel_bench.problems import LATENT_DIM, Context, Problem, cos_sin, stored_rows
from engine import kernels
from engine.kernels import torch_backend

OWN = "kvplan"


class NotDone(Exception):
    """This contender does not do that."""


@dataclass(frozen=True, slots=True)
class Built:
    """One call per context, and how its answer reads as [queries, heads, head_dim] (not timed)."""

    calls: list[Call]
    answer: Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Contender:
    """build raises NotDone for what it does not do, and anything at all where a library has changed."""

    name: str
    build: Callable[[Problem], Built]


def contenders(device: torch.device, own: Any = None) -> list[Contender]:
    """Those that can be tried here, our own first."""
    backend = own or kernels.load("auto", device.type)
    rivals = [
        Contender(OWN, partial(own_kernels, backend)),
        Contender("torch sdpa", torch_sdpa),
        Contender("torch flex", torch_flex),
        Contender("torch index_put", torch_writes),
    ]
    if device.type == "cuda":
        libraries = (("flashinfer", flashinfer), ("xformers", xformers), ("flash_attn", flash_attn))
        rivals += [Contender(name, build) for name, build in libraries if find_spec(name) is not None]
    return rivals


def same(answer: torch.Tensor) -> torch.Tensor:
    return answer


def need(ok: bool, what: str) -> None:
    if not ok:
        raise NotDone(what)


def poisoned_answer(built: Built) -> torch.Tensor:
    """Our first call's answer, in memory that held NaN: what a kernel does not write shows."""
    plain: Any = torch.empty

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        out: torch.Tensor = plain(*args, **options)
        return out.fill_(float("nan")) if out.dtype.is_floating_point else out

    with mock.patch.object(torch, "empty", empty):  # the launchers call it by this name
        return built.answer(built.calls[0]())


# --- ours -------------------------------------------------------------------------------------------------------------


def own_kernels(backend: Any, problem: Problem) -> Built:
    case = problem.case
    more = {"window": case.window, "softcap": case.softcap, "sinks": problem.sinks}
    match case.kind:
        case "decode":
            attend = partial(backend.paged_decode, problem.q)
            calls = [partial(attend, *c.caches, c.tables, c.lens, problem.scale, **more) for c in problem.contexts]
        case "latent":
            attend = partial(backend.latent_decode, problem.q)
            calls = [
                partial(attend, *c.caches, c.tables, c.lens, problem.scale, latent_dim=LATENT_DIM)
                for c in problem.contexts
            ]
        case "prefill":
            attend = partial(backend.paged_prefill, problem.q)
            more["max_query_len"] = case.length
            calls = [
                partial(attend, *c.caches, c.tables, problem.starts, c.lens, problem.scale, **more)
                for c in problem.contexts
            ]
        case "store" | "rope+store":
            return _writes(problem, backend)
    return Built(calls, same)


def _writes(problem: Problem, backend: Any) -> Built:
    """Keys and values into their slots, on the way turned by their positions' angles."""
    positions = torch.arange(problem.case.num_seqs, device=problem.device)
    table = cos_sin(problem.case, problem.device)

    def store(context: Context) -> None:
        backend.store_kv(*context.new[1:], *context.caches, context.slots)

    def rope_and_store(context: Context) -> None:
        backend.rotate_and_store(*context.new, table, positions, *context.caches, context.slots)

    write = store if problem.case.kind == "store" else rope_and_store
    return Built([partial(write, c) for c in problem.contexts], lambda _: stored_rows(problem.contexts[0]))


# --- torch ------------------------------------------------------------------------------------------------------------


def torch_writes(problem: Problem) -> Built:
    need("store" in problem.case.kind, "writes only")
    need(problem.case.stored == problem.case.compute, "no float8")
    positions = torch.arange(problem.case.num_seqs, device=problem.device)
    table = cos_sin(problem.case, problem.device)

    def write(context: Context) -> None:
        """Without torch_backend's look at the slots, which a CUDA graph does not allow."""
        q, k, v = context.new
        if problem.case.kind == "rope+store":
            _, k = torch_backend.rotate(q, k, table, positions)
        for cache, x in zip(context.caches, (k, v), strict=True):
            cache.flatten(0, 1)[context.slots] = x

    return Built([partial(write, c) for c in problem.contexts], lambda _: stored_rows(problem.contexts[0]))


def _in_one_piece(problem: Problem) -> list[tuple[torch.Tensor, ...]]:
    """(keys, values) of each context as [num_seqs, tokens, kv_heads, head_dim]; of a decode those in the window."""
    case = problem.case
    need("store" not in case.kind, "attention only")
    need(case.stored == case.compute, "KV in the dtype of the queries only")
    if case.kind == "latent":
        rows = [c.rows(c.caches[0])[:, :, None] for c in problem.contexts]
        return [(row, row[..., :LATENT_DIM]) for row in rows]
    seen = slice(-case.window if case.window and case.kind == "decode" else None, None)
    return [tuple(c.rows(cache)[:, seen].contiguous() for cache in c.caches) for c in problem.contexts]


def _heads_first(problem: Problem) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    """q [num_seqs, heads, queries, head_dim], and keys and values alike, each in one piece."""
    case = problem.case
    q = problem.q.view(case.num_seqs, -1, *problem.q.shape[1:]).transpose(1, 2).contiguous()
    return q, [tuple(x.transpose(1, 2).contiguous() for x in pair) for pair in _in_one_piece(problem)]


def _tokens_first(answer: torch.Tensor) -> torch.Tensor:
    """[num_seqs, heads, queries, head_dim] as [num_seqs * queries, heads, head_dim]."""
    return answer.transpose(1, 2).flatten(0, 1)


def torch_sdpa(problem: Problem) -> Built:
    case = problem.case
    need(case.softcap is None and not case.sinks, "neither softcap nor sinks")
    need(case.window is None or case.kind == "decode", "no window but a decode's")
    q, pairs = _heads_first(problem)
    attend = partial(
        F.scaled_dot_product_attention, q, is_causal=case.kind == "prefill", scale=problem.scale, enable_gqa=True
    )
    return Built([partial(attend, k, v) for k, v in pairs], _tokens_first)


def torch_flex(problem: Problem) -> Built:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = problem.case
    need(case.kind != "latent", "no rows of keys and values at once")
    need(not case.sinks, "no sinks")
    need(case.window is None or case.kind == "decode", "no window but a decode's")
    q, pairs = _heads_first(problem)
    on_gpu = problem.device.type == "cuda"
    torch.compiler.reset()  # each case is compiled for its own sizes; after a few, torch would stop compiling
    attend: Any = torch.compile(flex_attention, dynamic=False) if on_gpu else _uncompiled(flex_attention)
    mask = None
    if case.kind == "prefill":
        mask = create_block_mask(
            lambda b, h, q_index, k_index: q_index >= k_index, None, None, case.length, case.length,
            device=problem.device.type,
        )  # fmt: skip
    softcap = case.softcap

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    bend = capped if softcap else None
    bound = partial(attend, q, score_mod=bend, block_mask=mask, scale=problem.scale, enable_gqa=True)
    return Built([partial(bound, k, v) for k, v in pairs], _tokens_first)


def _uncompiled(attend: Any) -> Any:
    """Without the warning that it is slow: on a CPU nobody asks how fast it is."""

    def quiet(*args: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return attend(*args, **options)

    return quiet


# --- libraries that may be there --------------------------------------------------------------------------------------


def flashinfer(problem: Problem) -> Built:
    """Its paged wrappers, each context planned before it is timed, as a server plans once for all layers."""
    case = problem.case
    need(case.kind in ("decode", "prefill"), "decode and prefill only")
    need(not case.sinks, "no sinks")
    library: Any = import_module("flashinfer")
    workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=problem.device)
    sizes = (case.heads.heads, case.heads.kv_heads, case.heads.head_dim, case.block_size)
    options = {
        "window_left": -1 if case.window is None else case.window - 1,
        "logits_soft_cap": case.softcap,
        "sm_scale": problem.scale,
        "q_data_type": case.compute,
        "kv_data_type": case.stored,
    }

    def planned(context: Context) -> Call:
        blocks = context.tables.shape[1]
        starts = torch.arange(case.num_seqs + 1, dtype=torch.int32, device=problem.device) * blocks
        last = torch.full_like(context.lens, case.length - (blocks - 1) * case.block_size)
        pages = (starts, context.tables.flatten(), last)
        if case.kind == "prefill":
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(problem.starts, *pages, *sizes, causal=True, **options)
        else:  # tensor cores pay where a few heads share what is read
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=case.heads.group >= 4
            )
            wrapper.plan(*pages, *sizes, **options)
        return partial(wrapper.run, problem.q, context.caches)

    return Built([planned(context) for context in problem.contexts], same)


def xformers(problem: Problem) -> Built:
    """[num_seqs, tokens, kv_heads, group, head_dim] throughout; a group shares its keys by a stride of 0."""
    case = problem.case
    need(case.kind in ("decode", "prefill") and case.is_plain, "plain decode and prefill only")
    fmha: Any = import_module("xformers.ops.fmha")
    bias = fmha.attn_bias.LowerTriangularMask() if case.kind == "prefill" else None
    q = problem.q.view(case.num_seqs, -1, case.heads.kv_heads, case.heads.group, case.heads.head_dim)
    attend = partial(fmha.memory_efficient_attention_forward, q, attn_bias=bias, scale=problem.scale)
    pairs = [
        tuple(x[:, :, :, None].expand(-1, -1, -1, case.heads.group, -1) for x in p) for p in _in_one_piece(problem)
    ]
    return Built([partial(attend, k, v) for k, v in pairs], lambda answer: answer.reshape(problem.q.shape))


def flash_attn(problem: Problem) -> Built:
    case = problem.case
    need(case.kind in ("decode", "prefill") and not case.sinks, "decode and prefill without sinks only")
    library: Any = import_module("flash_attn")
    q = problem.q.view(case.num_seqs, -1, *problem.q.shape[1:])
    left = -1 if case.window is None else case.window - 1
    attend = library.flash_attn_with_kvcache if case.kind == "decode" else library.flash_attn_func
    options = {
        "softmax_scale": problem.scale, "causal": True, "window_size": (left, -1 if left < 0 else 0),
        "softcap": case.softcap or 0.0,
    }  # fmt: skip
    pairs = _in_one_piece(problem)
    return Built([partial(attend, q, k, v, **options) for k, v in pairs], lambda answer: answer.flatten(0, 1))
