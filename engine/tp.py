"""Tensor parallelism: this rank's part of a layer, and the collectives between ranks.

Every rank runs the whole engine with rank 0's requests; the scheduler is deterministic, so all ranks step alike.
"""

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist

from kvplan.core.errors import UnsupportedModelError, UsageError

T = TypeVar("T")

# A rank that has died is noticed after so long; loading weights and compiling kernels keep ranks apart for less.
GROUP_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This rank of `size` that share their layers; alone, without a process group, every method is the identity.

    stage, num_stages  the part of the model that these ranks hold, of so many (stages.py)
    group              the ranks of this stage; None: all ranks
    """

    rank: int = 0
    size: int = 1
    stage: int = 0
    num_stages: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return self.size * self.num_stages

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
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' x, concatenated along the last dimension."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, -1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Overwrite x with that of the first rank, in place: logits may differ in a bit, sampled tokens must not."""
        if self.size > 1:
            dist.broadcast(x, self.stage * self.size, group=self.group)
        return x

    def from_first(self, value: T) -> T:
        """Rank 0's value, which must be picklable, on the ranks of all stages."""
        if self.num_ranks == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, which must be picklable, in the order of the ranks of all stages."""
        if self.num_ranks == 1:
            return [value]
        values = [value] * self.num_ranks
        dist.all_gather_object(values, value)
        return values

    def smallest(self, value: int) -> int:
        """The minimum over the ranks of all stages."""
        if self.num_ranks == 1:
            return value
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        least = torch.tensor(value, dtype=torch.int64, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


def _leave() -> None:
    """Destroy the process group before the interpreter exits; its threads would abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def local_rank() -> int:
    """This process's local rank, set by torchrun."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_size(size: int) -> int:
    """How many of `size` ranks run on this machine, set by torchrun; all where nothing says so."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size)) if size > 1 else 1


def join(size: int, device: torch.device, num_stages: int = 1) -> TensorParallel:
    """Join `size` ranks per stage; under torchrun this creates the process group unless it exists.

    device  this rank's own: it becomes the current one first, so that no rank makes a context on another's GPU
    """
    count = size * num_stages
    if count == 1:
        return TensorParallel()
    name = "tensor_parallel_size" if num_stages == 1 else "tensor_parallel_size x pipeline_parallel_size"
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise UsageError(
                f"{name}: {count} ranks need {count} processes; start with: torchrun --nproc-per-node {count} ..."
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", timeout=GROUP_TIMEOUT, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        atexit.register(_leave)
    if dist.get_world_size() != count:
        raise UsageError(f"{name}: {count} requested, {dist.get_world_size()} processes run; make them equal")
    stage, rank = divmod(dist.get_rank(), size)
    return TensorParallel(rank, size, stage, num_stages, stage_group(size, num_stages, stage))


@cache
def stage_group(size: int, num_stages: int, stage: int) -> dist.ProcessGroup | None:
    """The ranks of a stage, neighbors as in vLLM; None where they are all ranks. Every rank creates all groups."""
    if num_stages == 1:
        return None
    groups = [dist.new_group(list(range(i * size, (i + 1) * size)), timeout=GROUP_TIMEOUT) for i in range(num_stages)]
    group: dist.ProcessGroup = groups[stage]
    return group
