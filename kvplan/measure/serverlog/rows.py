"""What a server's figures are called, and what they count."""

from typing import Final, Literal

from kvplan.measure.measurement import Figure, Source, not_in
from kvplan.measure.serverlog.log import Reading, ServerLog
from kvplan.servers.plans import Plan, Request
from kvplan.servers.vllm import adapters, overheads
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.weights import own_layout, rank_weights

Unit = Literal["bytes", "blocks", "tokens", "requests"]
PARTS: Final = ("weights", "activations", "non_torch", "cuda_graphs", "kv_cache")
POOL: Final = ("blocks", "tokens", "concurrency")
RUNNING: Final = "max_running_requests"  # of SGLang alone, which logs it
ENCODER: Final = "encoder_tokens"  # of vLLM alone, where it encodes images, videos or sounds
UNITS: Final[dict[str, Unit]] = {
    "blocks": "blocks", "tokens": "tokens", "concurrency": "requests", RUNNING: "requests", ENCODER: "tokens"
}  # fmt: skip


def sized(component: str, logged: Reading | None, source: Source, note: str = "") -> Figure:
    """A logged size."""
    if logged is None:
        return Figure(component, "bytes", None, note=not_in(source))
    return Figure(component, "bytes", logged.size, logged.rounding, note)


def difference(component: str, whole: Reading, part: Reading, note: str) -> Figure:
    """One logged size less another."""
    return Figure(component, "bytes", whole.size - part.size, whole.rounding + part.rounding, note)


def counted(component: str, value: float | None, source: Source, rounding: float = 0.0) -> Figure:
    """A logged number of blocks, tokens or requests."""
    return Figure(component, UNITS[component], value, rounding, not_in(source) if value is None else "")


def missing(component: str, why: str) -> Figure:
    return Figure(component, UNITS.get(component, "bytes"), None, note=why)


def smallest_kv(log: ServerLog) -> Reading | None:
    """The pool's GiB on the rank with least, which decides how many blocks all have."""
    return log.least("available_kv") or log.least("kv_in_use")


def loaded_weights(request: Request, settings: vllm.Settings, stage: int) -> int:
    """Bytes that a server's "Model loading took" counts: weights, the buffers that come with them, and adapter slots.

    Source of the last: vLLM 0.8.5 worker/model_runner.py and v1/worker/gpu_model_runner.py, 0.28 and 0.33
    v1/worker/gpu/model_runner.py, whose load_model makes the slots before it takes the difference.
    """
    weights = sum(rank_weights(request, stage).values())
    slots = 0
    if request.release.has("v1"):
        slots = adapters.lora(request.spec, settings, request.args, stage).likely
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
