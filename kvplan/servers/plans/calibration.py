"""Constants measured by a run on one machine, kept in a file (kvplan/calibration@1) and used in place of modeled ones.

They apply only to the device and software they were measured with and are rejected for any other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import load_json, path_text, printable
from kvplan.hardware.gpu import GpuSpec
from kvplan.servers.plans.plan import Estimate

CALIBRATION = "kvplan/calibration@1"
COMPONENTS = ("context", "non_torch", "cuda_graphs", "allocator_slack")
# What another server uses on the same GPU and driver: not CUDA graphs, which depend on its own kernels.
FOR_SERVERS = ("context", "non_torch")
SAME_TOTAL = 0.01  # a GPU's total differs by less between drivers


class FittedSteps(TypedDict):
    """Factors on a step's modeled time, fitted to benchmark runs; errors are medians, left_out those of each run under
    a fit of the others.
    """

    model: str
    factors: dict[str, float]
    runs: int
    median_error: float
    median_error_left_out: float | None


class MeasuredSteps(TypedDict):
    """Seconds of one model's step: a constant part, and per token and per byte of KV."""

    model: str
    seconds: dict[str, float]
    num_intervals: int
    median_error: float


_REQUIRED = TypedDict(  # `for` is a Python keyword
    "_REQUIRED",
    {
        "schema": Literal["kvplan/calibration@1"],
        "for": dict[str, str | None],
        "device_total": int,
        "measured": dict[str, int],
        "model": str | None,
    },
)


class CalibrationDocument(_REQUIRED, total=False):
    """Constants of one device and its software: bytes and step times measured by a run, or factors on step times fitted
    to benchmark results, which `tools` wrote.
    """

    tensor_parallel_size: int
    graph_bytes: dict[str, int]
    activation_coefficient: float
    run: str
    run_id: str | None
    step_time: MeasuredSteps | FittedSteps | None
    tools: list[str]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured constants, in bytes by component, and the machine they were measured on.

    key                     device, driver and software
    device_total            bytes of the device as given to the run
    activation_coefficient  measured over predicted activation peak
    step_time               measured step times, or None if the run had too few steps
    model                   that ran, or None if the file does not say
    graph_bytes             by batch size, as text
    run_id                  of the measured run
    tensor_parallel_size    its ranks
    """

    key: dict[str, Any]
    device_total: int
    measured: dict[str, int]
    activation_coefficient: float
    origin: str
    step_time: "StepSeconds | None" = None
    model: str | None = None
    graph_bytes: Mapping[str, int] = field(default_factory=dict)
    run_id: str | None = None
    tensor_parallel_size: int = 1


TERMS = ("step", "prompt_token", "output_token", "kv_byte")


FACTORS = ("device", "link", "host")


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of one model's step: a constant part, and per prompt token, output token and byte of KV; or factors on
    the modeled ones, with the number of benchmark runs they were fitted to.
    """

    model: str
    seconds: dict[str, float]
    factors: Mapping[str, float] = field(default_factory=dict)
    runs: int = 0


def key_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Device and software that a run's constants apply to."""
    environment = manifest.get("environment") or {}
    packages = environment.get("packages") or {}
    return {
        "device": environment.get("gpu") or manifest.get("device"),
        "driver": environment.get("driver"),
        "torch": packages.get("torch"),
        "triton": packages.get("triton"),
        "kvplan": environment.get("kvplan"),
    }


def document(
    manifest: Mapping[str, Any], status: str, measured: Mapping[str, int], activation_coefficient: float, run: str
) -> CalibrationDocument:
    """Return a run's constants as JSON values; none for an incomplete run or a device that emulates a smaller one."""
    if status != "complete":
        raise InvalidInputError("--calibrate", f"the run is {status}", "use a completed run")
    if (manifest.get("engine") or {}).get("memory_limit") is not None:
        raise InvalidInputError("--calibrate", "the run had a --memory-limit", "measure without one")
    return {
        "schema": "kvplan/calibration@1",
        "for": key_of(manifest),
        "device_total": manifest["inputs"]["total"],
        "measured": {name: measured[name] for name in COMPONENTS},
        "model": (manifest.get("model") or {}).get("name"),
        "tensor_parallel_size": manifest["inputs"].get("tensor_parallel_size", 1),
        "graph_bytes": dict(manifest.get("graph_bytes") or {}),
        "activation_coefficient": activation_coefficient,
        "run": run,
        "run_id": run_id(manifest),
    }


def run_id(manifest: Mapping[str, Any]) -> str | None:
    """A run's unique name, independent of its directory, or None if its manifest says too little."""
    parts = [manifest.get(name) for name in ("host", "pid", "started_utc")]
    return None if None in parts else " ".join(map(str, parts))


def read(path: Path) -> Calibration:
    """Read a calibration file. Raise InvalidInputError if it is not one."""
    content = load_json(path)
    measured, key, total = (content.get(name) for name in ("measured", "for", "device_total"))
    if content.get("schema") != CALIBRATION or not isinstance(measured, dict) or not isinstance(key, dict):
        raise InvalidInputError(
            path_text(path), f"is not a calibration ({CALIBRATION})", "write one with reconcile --calibrate"
        )
    model, graphs, run = (content.get(name) for name in ("model", "graph_bytes", "run_id"))
    graphs = {} if graphs is None else graphs
    if not isinstance(graphs, dict) or not isinstance(model, str | None) or not isinstance(run, str | None):
        raise InvalidInputError(path_text(path), "model, graph_bytes or run_id cannot be read", "the file is damaged")
    ranks = content.get("tensor_parallel_size", 1)
    if isinstance(ranks, bool) or not isinstance(ranks, int):
        raise InvalidInputError(path_text(path), "tensor_parallel_size must be a whole number", "the file is damaged")
    steps = _step_time(content.get("step_time"), path)
    missing = [name for name in COMPONENTS if name not in measured]
    if missing and (measured or steps is None or not steps.factors):
        raise InvalidInputError(path_text(path), f"measured.{missing[0]} is missing", "the file is damaged")
    sizes = [total, *measured.values(), *graphs.values()]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in sizes):
        raise InvalidInputError(path_text(path), "must hold bytes (whole numbers)", "the file is damaged")
    coefficient = content.get("activation_coefficient", 1.0)
    if isinstance(coefficient, bool) or not isinstance(coefficient, int | float) or not 0 < coefficient < 1000:
        raise InvalidInputError(
            path_text(path), "activation_coefficient must be a number above 0", "the file is damaged"
        )
    sizes_by_name = {str(name): int(size) for name, size in measured.items()}
    return Calibration(
        key, int(str(total)), sizes_by_name, float(coefficient), path_text(path), steps, model, graphs, run, ranks
    )  # fmt: skip


def _step_time(content: Any, path: Path) -> StepSeconds | None:
    if content is None:
        return None
    if isinstance(content, dict) and "factors" in content:
        return _factors(content, path)
    seconds = content.get("seconds") if isinstance(content, dict) else None
    if not isinstance(seconds, dict) or set(seconds) != set(TERMS) or not isinstance(content.get("model"), str):
        raise InvalidInputError(path_text(path), "step_time must hold a model and seconds", "the file is damaged")
    values = [seconds[term] for term in TERMS]
    if any(isinstance(value, bool) or not isinstance(value, int | float) or value < 0 for value in values):
        raise InvalidInputError(path_text(path), "step_time must hold seconds (0 or more)", "the file is damaged")
    if not any(values):
        raise InvalidInputError(path_text(path), "step_time is 0 for a step", "the file is damaged")
    return StepSeconds(content["model"], {term: float(seconds[term]) for term in TERMS})


def _factors(content: Mapping[str, Any], path: Path) -> StepSeconds:
    factors, runs = content.get("factors"), content.get("runs")
    if not isinstance(factors, dict) or set(factors) != set(FACTORS) or not isinstance(content.get("model"), str):
        raise InvalidInputError(path_text(path), "step_time must hold a model and factors", "the file is damaged")
    if any(
        isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 100
        for value in factors.values()
    ):
        raise InvalidInputError(path_text(path), "a factor of step_time is not above 0", "the file is damaged")
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
        raise InvalidInputError(path_text(path), "step_time does not say how many runs", "the file is damaged")
    return StepSeconds(str(content["model"]), {}, {name: float(factors[name]) for name in FACTORS}, runs)


def check_run(calibration: Calibration, manifest: Mapping[str, Any]) -> None:
    """Reject constants for a run on a different device or with different software."""
    differing = [
        f"{name} {calibration.key.get(name)!r} there, {value!r} here"
        for name, value in key_of(manifest).items()
        if calibration.key.get(name) != value
    ]
    if differing:
        raise InvalidInputError(
            calibration.origin, f"was measured on a different setup ({'; '.join(differing)})", "calibrate here"
        )


def for_gpu(calibration: Calibration, gpu: GpuSpec) -> dict[str, Estimate]:
    """Return the constants that a plan uses, if measured on such a GPU."""
    device = printable(str(calibration.key.get("device")), 80)
    if device == "cpu":
        raise InvalidInputError(calibration.origin, "was measured on a CPU", f"calibrate on a {gpu.name}")
    if abs(calibration.device_total - gpu.total_memory) > SAME_TOTAL * gpu.total_memory:
        raise InvalidInputError(
            calibration.origin,
            f"was measured on {device} with {calibration.device_total:,} bytes, {gpu.name} has {gpu.total_memory:,}",
            "calibrate on this GPU",
        )
    return {
        name: Estimate(size, size, size, f"{size:,} bytes measured on {device}", calibration.origin, "measured")
        for name, size in calibration.measured.items()
        if name in FOR_SERVERS
    }


def step_seconds(calibration: Calibration, gpu: GpuSpec, model: str) -> StepSeconds:
    """Step times or factors, if measured with this model on such a GPU."""
    if calibration.step_time is None:
        raise InvalidInputError(
            calibration.origin,
            "holds no step times",
            "write one with reconcile --calibrate from a run that served requests",
        )
    for_gpu(calibration, gpu)
    if calibration.step_time.model != model:
        raise InvalidInputError(
            calibration.origin,
            f"its step times are of {printable(calibration.step_time.model, 100)}, not of {printable(model, 100)}",
            "calibrate with this model",
        )
    return calibration.step_time
