"""Checks on what a run's manifest needs for comparison with a plan: the model that ran, its inputs, and sizes."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import path_text
from kvplan.measure.rundir import BASELINES, Run
from kvplan.models import catalog, hf_config
from kvplan.models.spec import ModelSpec
from kvplan.servers.bundled.rules import DTYPE_BYTES, EngineInputs, Prediction, Speculation, predict

SIZES = ("weights", "buffers", "activations", "kv_cache", "cuda_graphs", "non_torch", "num_blocks", "block_bytes")
LATER_SIZES = ("workspaces", "graph_tensors", "lora")  # not in runs of older versions


def check_objects(run: Run) -> None:
    """Reject a run.json whose sections have the wrong types, however far the run got."""
    for name in ("environment", "engine", "workload"):
        if not isinstance(run.manifest.get(name), dict | None):
            raise InvalidInputError(
                f"{path_text(run.path)}: run.json", f"{name} must be an object", "the file is damaged"
            )
    if not isinstance(run.manifest.get("cause"), str | None):
        raise InvalidInputError(f"{path_text(run.path)}: run.json", "cause must be text", "the file is damaged")


def check_manifest(run: Run) -> None:
    """Reject a run.json with values that no run writes; the error names the first."""
    manifest: Mapping[str, Any] = run.manifest  # as read: nothing is known of it yet
    model, memory, inputs = (manifest.get(name) for name in ("model", "memory", "inputs"))

    def need(ok: bool, name: str, what: str) -> None:
        if not ok:
            raise InvalidInputError(f"{path_text(run.path)}: run.json", f"{name} must be {what}", "the file is damaged")

    need(isinstance(model, dict) and isinstance(model.get("name"), str), "model.name", "a name")
    need(manifest.get("device") in ("cpu", "cuda"), "device", "cpu or cuda")
    need(isinstance(memory, dict), "memory", "an object")
    for name in SIZES:
        need(is_size((memory or {}).get(name)), f"memory.{name}", "a whole number")
    for name in LATER_SIZES:
        need(is_size((memory or {}).get(name, 0)), f"memory.{name}", "a whole number")
    need((memory or {}).get("block_bytes") != 0, "memory.block_bytes", "above 0")
    need(isinstance(inputs, dict), "inputs", "an object")
    for name, value in (inputs or {}).items():
        match name:
            case "dtype":
                need(value in DTYPE_BYTES, "inputs.dtype", f"one of {', '.join(DTYPE_BYTES)}")
            case "kv_cache_dtype":
                need(value in (*DTYPE_BYTES, "fp8", "fp8_e4m3"), "inputs.kv_cache_dtype", "a dtype of the engine")
            case "backend":
                need(value in ("torch", "triton"), "inputs.backend", "torch or triton")
            case "gpu_memory_utilization":
                need(isinstance(value, float | int) and 0 < value <= 1, f"inputs.{name}", "above 0 and at most 1")
            case "fully_sharded_loras":
                need(isinstance(value, bool), f"inputs.{name}", "true or false")
            case "max_loras":
                need(is_size(value), f"inputs.{name}", "a whole number")
            case "num_blocks" | "max_blocks":
                need(value is None or (is_size(value) and value > 0), f"inputs.{name}", "null or at least 1")
            case _:
                need(is_size(value) and value > 0, f"inputs.{name}", "a whole number of at least 1")
    graphs = manifest.get("graph_bytes") or {}
    need(isinstance(graphs, dict) and all(map(is_size, graphs.values())), "graph_bytes", "whole numbers by size")
    groups, peaks = manifest.get("groups", 1), manifest.get("peaks") or {}
    need(is_size(groups) and groups > 0, "groups", "a whole number of at least 1")
    is_flat = isinstance(peaks, dict) and all(
        isinstance(stage, dict) and all(is_size(value) for value in stage.values()) for stage in peaks.values()
    )
    need(is_flat, "peaks", "whole numbers by stage")
    for name in ("results", *(f"results.{baseline}" for baseline in BASELINES)):
        _check_results(_inside(manifest, name), name, need)


def _check_results(results: Any, name: str, need: Callable[[bool, str, str], None]) -> None:
    if results is None:
        return
    need(isinstance(results, dict), name, "an object")
    for part in ("densest", "stats"):
        figures = results.get(part) or {}
        is_numeric = isinstance(figures, dict) and all(is_number(value) for value in figures.values())
        need(is_numeric, f"{name}.{part}", "numbers by name")
    for figure in ("most_running", "output_tokens_per_s", "seconds", "num_finished", "num_failed"):
        need(figure not in results or is_number(results[figure]), f"{name}.{figure}", "a number")
    offload = results.get("offload")
    is_whole = offload is None or (isinstance(offload, dict) and all(map(is_size, offload.values())))
    need(is_whole and (offload is None or "memory" in offload), f"{name}.offload", "whole numbers by name")


def _inside(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values.get(key) if isinstance(values, dict) else None
    return values


def is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def spec_of(run: Run) -> ModelSpec:
    """Build the model of a run from its manifest only, so that a laptop can do it."""
    return _spec_at(run, "model")


def _spec_at(run: Run, key: Literal["model", "draft"]) -> ModelSpec:
    model = run.manifest.get(key)
    if not isinstance(model, dict) or not isinstance(model.get("config"), dict):
        raise InvalidInputError(path_text(run.path), f"run.json does not say which {key} ran", "the file is damaged")
    return hf_config.read_config(catalog.expand(model["config"]), f"{path_text(run.path)}: {key}", str(model["name"]))


def speculation_of(run: Run) -> Speculation:
    """Read a run's speculation from its manifest; of a run without any, no drafts."""
    settings = run.engine.get("speculative_config")
    if settings is None:
        return Speculation()
    num_drafts: Any = settings.get("num_speculative_tokens") if isinstance(settings, dict) else None
    if not is_size(num_drafts):
        where, problem = f"{path_text(run.path)}: run.json", "engine.speculative_config does not say how many tokens"
        raise InvalidInputError(where, problem, "the file is damaged")
    return Speculation(int(num_drafts), _spec_at(run, "draft") if settings.get("model") is not None else None)


def predicted_of(run: Run, *, non_torch: int = 0, activation_coefficient: float = 1.0) -> Prediction:
    """Predict a run's memory for exactly its inputs."""
    return predict(
        spec_of(run), inputs_of(run), non_torch=non_torch, activation_coefficient=activation_coefficient,
        speculation=speculation_of(run),
    )  # fmt: skip


def inputs_of(run: Run) -> EngineInputs:
    inputs = run.manifest.get("inputs")
    try:
        return EngineInputs(**inputs)  # type: ignore[arg-type] # a TypeError is caught
    except TypeError as error:
        raise InvalidInputError(f"{path_text(run.path)}: run.json", f"inputs cannot be read ({error})") from error
