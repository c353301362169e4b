"""The seam between engine and attention kernels: which ones run, and how a step is planned for them.

The kernels of another library become a second subclass of AttentionBackend, and a line in `load`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from engine import kernels
from engine.block_manager import WindowGroup
from engine.kernels.work_list import SplitPlanner
from engine.kv_cache import HeadKV, KVCache, LatentKV, LayerGroup
from engine.tp import TensorParallel
from kvplan.models.spec import FullAttention, ModelSpec, SlidingWindow


class AttentionPlan(NamedTuple):
    """Planners of one KV cache's steps, run on the host once for all layers; empty if the kernels need no plan.

    planners         one per KV group, for decode: `plan` cuts a step's contexts, `capacity` is what a CUDA graph needs
                     room for
    queries_of_tile  for prefill: queries of a program's tile, by the longest chunk of the step
    """

    planners: tuple[SplitPlanner, ...] = ()
    queries_of_tile: Callable[[int], int] | None = None


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """Paged attention kernels. These are plain torch's, which support everything and need no plan.

    run              the module whose paged_decode, paged_prefill and latent_decode run what was planned; a layer's
                     other functions are there too
    compiles         whether a kernel is compiled when first launched, so that a server does that before it serves
    can_be_captured  whether a CUDA graph of it can be recorded: nothing in it asks the device
    """

    run: ModuleType
    compiles: bool = False
    can_be_captured: bool = False

    def supports_cache(self, kv_dtype: torch.dtype, dtype: torch.dtype) -> bool:
        """True if a model that computes in dtype can read a cache of kv_dtype."""
        return True

    def unsupported(
        self, spec: ModelSpec, tp: TensorParallel, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> str | None:
        """The reason, as a phrase, why a rank of this model cannot run; None if it can."""
        return None

    def plan(
        self, spec: ModelSpec, tp: TensorParallel, groups: tuple[LayerGroup, ...], kv: KVCache, dtype: torch.dtype
    ) -> AttentionPlan:
        """The planners for a model's steps on such caches, and the capacity that a CUDA graph needs."""
        return AttentionPlan()


@dataclass(frozen=True, slots=True)
class TritonAttention(AttentionBackend):
    """The kernels of engine/kernels: decode is cut into items of about equal length, prefill into tiles of queries."""

    def supports_cache(self, kv_dtype: torch.dtype, dtype: torch.dtype) -> bool:
        return kv_dtype in (dtype, torch.float8_e4m3fn)

    def unsupported(
        self, spec: ModelSpec, tp: TensorParallel, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> str | None:
        if spec.has_states:
            return "recurrent states have no kernel here; use backend torch"
        match spec.layers[0][0]:
            case FullAttention() | SlidingWindow() as cache:
                kv_heads = tp.share_kv_heads(cache.num_kv_heads)
                group = _num_heads(spec, tp) // (kv_heads.stop - kv_heads.start)
                head_dim: int | None = max(cache.head_dim, cache.head_dim_v)
            case _:
                head_dim, group = None, 1
        reason: str | None = self.run.unsupported(head_dim, group, block_size, dtype, kv_dtype)
        return None if reason is None else f"the Triton kernels cannot run {reason}; use backend torch"

    def plan(
        self, spec: ModelSpec, tp: TensorParallel, groups: tuple[LayerGroup, ...], kv: KVCache, dtype: torch.dtype
    ) -> AttentionPlan:
        num_heads, planners = _num_heads(spec, tp), list[SplitPlanner]()
        for group in groups:
            window = group.rule.window if isinstance(group.rule, WindowGroup) else None
            match next(iter(kv.layers.values())):  # all layers' entries are alike, and a stage may lack a group's
                case HeadKV(k=k, v=v):
                    planners.append(self.run.decode_planner(num_heads, k, v, dtype, window))
                case LatentKV(cache=cache):
                    planners.append(self.run.latent_planner(num_heads, cache))
        return AttentionPlan(tuple(planners), self._queries_of_tile(num_heads, kv, dtype))

    def _queries_of_tile(self, num_heads: int, kv: KVCache, dtype: torch.dtype) -> Callable[[int], int] | None:
        """Queries per prefill tile; None for MLA latents, whose prefill runs in torch."""
        match next(iter(kv.layers.values())):
            case HeadKV(k=k, v=v):
                of = self.run.queries_of_tile
                shapes = (k.to("meta"), v.to("meta"))  # the caches may go before the plan
                return lambda max_query_len: int(of(num_heads, *shapes, dtype, max_query_len))
            case _:
                return None


def _num_heads(spec: ModelSpec, tp: TensorParallel) -> int:
    """Query heads of this rank."""
    mine = tp.share(spec.num_heads, "heads")
    return int(mine.stop - mine.start)


def load(backend: str, device_type: str) -> AttentionBackend:
    """Load the configured backend; "auto" is triton on a GPU and torch elsewhere."""
    module = kernels.load(backend, device_type)
    if not module.IS_PLANNED:
        return AttentionBackend(module)
    return TritonAttention(module, compiles=not module.INTERPRETED, can_be_captured=True)
