"""A logged figure beside its prediction, and what a server's figures count."""

from dataclasses import dataclass
from typing import Final, Literal

from kvplan.measure.serverlog.log import Reading, ServerLog
from kvplan.servers.plans import Plan, Request
from kvplan.servers.vllm import overheads
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.vllm.overheads import Kind
from kvplan.servers.weights import own_layout, rank_weights

Unit = Literal["bytes", "blocks", "tokens", "requests"]
PARTS: Final = ("weights", "activations", "non_torch", "cuda_graphs", "kv_cache")
POOL: Final = ("blocks", "tokens", "concurrency")
RUNNING: Final = "max_running_requests"  # of SGLang alone, which logs it
UNITS: Final[dict[str, Unit]] = {"blocks": "blocks", "tokens": "tokens", "concurrency": "requests", RUNNING: "requests"}


@dataclass(frozen=True, slots=True)
class LogRow:
    """A figure, predicted and logged; None where there is none, and then `why` says so.

    low, high  what the prediction may be, where the log's rounding of its inputs leaves it open
    rounding   half of the last digit that was logged
    kind       how it was predicted
    why        the reason for a difference, where it is known, or for a missing figure
    """

    name: str
    unit: Unit
    predicted: float | None
    logged: float | None
    rounding: float = 0.0
    kind: Kind | None = None
    why: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float | None:
        return None if self.predicted is None or self.logged is None else self.predicted - self.logged

    @property
    def relative(self) -> float | None:
        """Error over logged; None where the logged figure is 0 and the error is not."""
        if self.error is None or not self.logged:
            return None if self.error else (None if self.error is None else 0.0)
        return self.error / abs(self.logged)

    @property
    def is_exact(self) -> bool | None:
        """Whether the two agree as far as the log's digits go; None where one is missing."""
        if self.predicted is None or self.logged is None:
            return None
        low = self.predicted if self.low is None else self.low
        high = self.predicted if self.high is None else self.high
        return low - self.rounding <= self.logged <= high + self.rounding


def missing(name: str, why: str, predicted: float | None = None, kind: Kind | None = None) -> LogRow:
    return LogRow(name, UNITS.get(name, "bytes"), predicted, None, kind=kind, why=why)


def sized(name: str, predicted: float, logged: Reading, kind: Kind, why: str = "") -> LogRow:
    return LogRow(name, "bytes", predicted, logged.size, logged.rounding, kind, why)


def difference(whole: Reading, part: Reading) -> tuple[int, int]:
    """(bytes, half of the last digit) of one logged size less another."""
    return whole.size - part.size, whole.rounding + part.rounding


NOT_LOGGED: Final = "not in the log"


def smallest_kv(log: ServerLog) -> Reading | None:
    """The pool's GiB on the rank with least, which decides how many blocks all have."""
    return log.least("available_kv") or log.least("kv_in_use")


def loaded_weights(request: Request, settings: vllm.Settings, stage: int) -> int:
    """Bytes that a server's "Model loading took" counts: weights, the buffers that come with them, and adapter slots.

    Source of the last: vLLM 0.8.5 worker/model_runner.py and v1/worker/gpu_model_runner.py, 0.28 and 0.33
    v1/worker/gpu/model_runner.py, whose load_model makes the slots before it takes the difference.
    """
    weights = sum(rank_weights(request, stage).values())
    slots = overheads.lora(request.spec, settings, request.args).likely if request.release.has("v1") else 0
    return weights + slots + overheads.loaded(request.spec, settings, request.args, own_layout(request, stage)).total


def activation_peak(found: Plan) -> int:
    """Bytes that a log of the plan's release calls the activation peak."""
    release, peak = found.request.release, found.estimates["activations"].likely
    if not release.has("consumed_memory"):
        own = overheads.loaded(
            found.request.spec, found.settings, found.request.args, own_layout(found.request, found.stage)
        )
        return peak + found.estimates["buffers"].likely - own.total
    return peak + (found.estimates["cuda_graphs"].likely if found.settings.graphs_in_budget else 0)
