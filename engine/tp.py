"""Tensor parallelism: which part of a layer this rank holds, and the few sums and gathers between ranks.

Every rank runs the whole engine with rank 0's requests; the scheduler is deterministic, so all ranks step alike.
"""

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from kvplan.core.errors import UnsupportedModelError, UsageError

T = TypeVar("T")

# A rank that has died is noticed after so long; loading weights and compiling kernels keep ranks apart for less.
GROUP_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This rank among `size`; size 1 needs no process group and every method is then the identity."""

    rank: int = 0
    size: int = 1

    def share(self, units: int, what: str) -> slice:
        """This rank's equal share of `units` heads, channels or rows."""
        if units % self.size:
            raise UnsupportedModelError(
                f"tensor_parallel_size: {units} {what} cannot be shared by {self.size} ranks; use a divisor of {units}"
            )
        local = units // self.size
        return slice(self.rank * local, (self.rank + 1) * local)

    def share_kv_heads(self, num_kv_heads: int) -> slice:
        """This rank's KV heads; with more ranks than heads, neighboring ranks hold the same one."""
        if self.size <= num_kv_heads:
            return self.share(num_kv_heads, "KV heads")
        if self.size % num_kv_heads:
            raise UnsupportedModelError(
                f"tensor_parallel_size: {self.size} ranks cannot copy {num_kv_heads} KV heads evenly; "
                f"use a multiple or a divisor of {num_kv_heads}"
            )
        head = self.rank // (self.size // num_kv_heads)
        return slice(head, head + 1)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' x side by side along the last dimension."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, in place: ranks may differ in the last bit, and must not in what they sampled."""
        if self.size > 1:
            dist.broadcast(x, 0)
        return x

    def from_first(self, value: T) -> T:
        """Rank 0's value, whatever this rank has: anything that can be pickled."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def smallest(self, value: int) -> int:
        """The least of the ranks' values."""
        if self.size == 1:
            return value
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        least = torch.tensor(value, dtype=torch.int64, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


def _leave() -> None:
    """End the group before the interpreter ends: its threads would abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def local_rank() -> int:
    """This process's number on its machine, as torchrun says it."""
    return int(os.environ.get("LOCAL_RANK", 0))


def join(size: int, device: torch.device) -> TensorParallel:
    """This process's place among `size` ranks; under torchrun the process group is made here, unless it exists.

    device  this rank's own: it becomes the current one first, so that no rank makes a context on another's GPU
    """
    if size == 1:
        return TensorParallel()
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise UsageError(
                f"tensor_parallel_size: {size} ranks need {size} processes; "
                f"start with: torchrun --nproc-per-node {size} ..."
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", timeout=GROUP_TIMEOUT, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        atexit.register(_leave)
    if dist.get_world_size() != size:
        raise UsageError(
            f"tensor_parallel_size: {size} asked for, {dist.get_world_size()} processes run; make them equal"
        )
    return TensorParallel(dist.get_rank(), size)
