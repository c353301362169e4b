"""A failure as input to the search for fixes, and a fix."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvplan.core.errors import KvplanError
from kvplan.core.records import dataclass
from kvplan.hardware.gpu import GpuSpec, gpu
from kvplan.planning.plan import Plan, Request
from kvplan.servers.logs.failures import Figures

Args = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cure:
    """A change that helps.

    kind   what is changed: the name of an engine argument, or a word for an action
    args   arguments and their values; empty for an action
    flags  as the server accepts them, "--max-model-len 34720"; only the flag if the kind has no value
    text   what it does
    way    direction of the change, if it has no value
    plan   with the change applied, and starting; None: not checked
    proof  the log's figures that imply its value, if no plan was made
    """

    kind: str
    args: Args
    flags: tuple[str, ...]
    text: str
    way: str
    plan: Plan | None
    proof: str | None = None

    @property
    def starts(self) -> bool | None:
        return None if self.plan is None else self.plan.fits


@dataclass(frozen=True, slots=True)
class Case:
    """A failure, as input to the search for fixes.

    request  what the server was started with, or None if its model is unknown
    pool     logged bytes free for the KV cache on a rank; None: not logged, the plan's own is used
    gpu_known  True if the request's GPU is the server's; else only GPU-independent facts are reported
    args     the log's arguments; settings of which it says only that they are made have the value True
    gpu      name of the GPU in the log
    weights, free_after_load, free_before_load  bytes of a rank in the log
    evidence the lines that show the cause
    total    bytes of the GPU according to the log
    """

    server: str
    cause: str
    figures: Figures
    request: Request | None = None
    pool: int | None = None
    gpu_known: bool = True
    args: Args | None = None
    evidence: str = ""
    total: int | None = None
    gpu: str | None = None
    weights: int | None = None
    free_after_load: int | None = None
    free_before_load: int | None = None

    @property
    def least_share(self) -> float | None:
        """Fraction of a GPU's memory that `mem_fraction_static` must exceed: by the server's word, or its weights."""
        if self.figures.least_share is not None:
            return self.figures.least_share
        if self.figures.mem_fraction is None or not self.weights or self.free_after_load is None:
            return None
        return self.weights / (self.weights + self.free_after_load)

    @property
    def machine(self) -> GpuSpec | None:
        """The GPU that the log or the request names."""
        if self.request is not None and self.gpu_known:
            return self.request.gpu
        with suppress(KvplanError):
            return None if self.gpu is None else gpu(self.gpu)
        return None

    @property
    def is_unified(self) -> bool:
        return self.machine is not None and self.machine.unified

    @property
    def capability(self) -> int:
        """CUDA's number of its architecture, or 0 if unknown."""
        return 0 if self.machine is None else self.machine.sm

    @property
    def lacking(self) -> int:
        """Bytes by which the failed allocation exceeded free memory; 0 if not stated."""
        tried, free = self.figures.tried_bytes, self.figures.free_bytes
        return 0 if tried is None or free is None else max(0, tried.bytes - free.bytes)
