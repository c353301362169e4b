"""Compare predicted with measured memory, component by component: the planner's formulas and a run directory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import path_text, printable
from kvplan.core.git import checkout, release
from kvplan.core.units import format_size
from kvplan.measure.run_capacity import capacity, capacity_predictions
from kvplan.measure.run_manifest import check_manifest, check_objects, inputs_of, is_size, predicted_of, spec_of
from kvplan.measure.rundir import BASELINES, Run
from kvplan.measure.techniques import Saving, outside_rows, savings
from kvplan.servers.bundled.rules import Prediction as Sized
from kvplan.servers.logs.measurement import ComponentRow, Figure, Measurement, Prediction, compared, reconcile
from kvplan.servers.plans.calibration import Calibration, run_id

RECONCILIATION = "kvplan/reconciliation@1"
COMPONENTS = (
    "weights", "buffers", "kv_cache", "activations", "cuda_graphs", "non_torch", "lora", "context", "allocator_slack",
    "unattributed",
)  # fmt: skip
# The source of each row's two numbers, on any device.
SOURCES: dict[str, tuple[str, str]] = {
    "weights": ("parameters x dtype, by the config", "the engine's tensors"),
    "buffers": ("rotary tables: positions x dim x 4; fp8 scales: rows x 4", "the engine's tensors"),
    "kv_cache": ("num_blocks x bytes per block", "the pool's tensors"),
    "activations": (
        "what one layer holds at once, or a constant counted on the sampler",
        "the largest step's tensors at their peak, in the profile run",
    ),
    "lora": ("slots x the matrices of max_lora_rank; 0 without slots", "the slots' tensors"),
}
UNKNOWN = "not predicted without a calibration"
SOURCES_ON_GPU = {
    "cuda_graphs": (UNKNOWN, "what capturing took of the device, and the graphs' inputs"),
    "non_torch": (UNKNOWN, "device memory outside torch and libraries' workspaces, less the context"),
    "context": (UNKNOWN, "device memory once CUDA is up, less what was held before"),
    "allocator_slack": (UNKNOWN, "reserved by torch at its peak, less the rows that torch holds"),
    "unattributed": ("0", "what the device reports less all rows above"),
}
SOURCES_ON_CPU = {
    "cuda_graphs": ("none on a CPU", "none on a CPU"),
    "non_torch": ("part of the context", "part of the context"),
    "context": (UNKNOWN, "resident size before the model"),
    "allocator_slack": ("part of what is unattributed", "part of what is unattributed"),
    "unattributed": ("0", "the largest resident size less all rows above"),
}


def sources_of(component: str, device: str) -> tuple[str, str]:
    """Return (source of the prediction, source of the measurement) of a row on "cpu" or "cuda"; empty for the total."""
    own = SOURCES_ON_CPU if device == "cpu" else SOURCES_ON_GPU
    return SOURCES.get(component) or own.get(component, ("", ""))


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The comparison of one run.

    reported     the run's peak by the device, minus what other processes held before it
    unreached    part of the rows not in use at that peak: the profile run's peak is freed, and serving need not reach
                 it again. The measured rows add up to reported + unreached
    held_before  bytes of other processes on the device before the run
    calibration  file whose constants replace rows without a formula, or None if none was used
    gaps         what could not be compared, and why
    outside      KV in host memory and on disk, in no sum of the device's bytes
    savings      what each technique saved
    ended        the gap that says how an incomplete run ended; "" if it is complete
    """

    run: Run
    model: str
    device: str
    rows: tuple[ComponentRow, ...]
    reported: int
    capacity: tuple[ComponentRow, ...]
    gaps: tuple[str, ...] = field(default=())
    unreached: int = 0
    held_before: int = 0
    calibration: str | None = None
    ended: str = ""
    outside: tuple[ComponentRow, ...] = ()
    savings: tuple[Saving, ...] = ()

    @property
    def total(self) -> ComponentRow:
        """Total of the rows that have a prediction, only."""
        known = [row for row in self.rows if row.predicted is not None]
        return ComponentRow("total", "bytes", sum(row.predicted or 0 for row in known), sum(row.size for row in known))

    @property
    def activation_coefficient(self) -> float:
        """Ratio of the measured activation peak to the predicted one; 1 if either is 0."""
        row = next(row for row in self.rows if row.component == "activations")
        return row.measured / row.predicted if row.predicted and row.measured else 1.0

    @property
    def compared(self) -> list[ComponentRow]:
        """Rows with both numbers, their total, and those beyond the device; "unattributed" has no prediction."""
        both = compared((*self.rows, self.total, *self.outside))
        return [row for row in both if row.component != "unattributed"]

    def worst(self) -> tuple[str, float]:
        """The largest relative error among the predicted rows and the total."""
        errors = [(row.component, row.relative) for row in (*self.rows, self.total) if row.component != "unattributed"]
        return max(((name, abs(value)) for name, value in errors if value is not None), key=lambda pair: pair[1])


def reconcile_run(run: Run, calibration: Calibration | None = None) -> Reconciliation:
    """Compare a run with the prediction for exactly its inputs.

    Raises InvalidInputError if the run ended before its pool was sized, or if its manifest lacks its inputs.
    """
    manifest = run.manifest
    check_objects(run)
    memory = manifest.get("memory")
    if memory is None:
        raise InvalidInputError(
            path_text(run.path), f"the run ended before its memory was measured ({run.cause})", "nothing to compare"
        )
    check_manifest(run)
    spec = spec_of(run)
    inputs = inputs_of(run)
    measured = measured_bytes(run)
    known = dict[str, int]()
    gaps = [*run.notes, *(str(event["text"]) for event in run.events if event.get("event") == "warning")]
    if calibration is None:
        predicted = predicted_of(run, non_torch=memory["non_torch"])
        if inputs.num_blocks is None and memory["non_torch"]:
            gaps.append("num_blocks is predicted with the measured non_torch; a calibration would predict that too")
    else:
        known, calibrated = calibrated_bytes(calibration, run)
        gaps += calibrated
        # Memory outside torch when the engine sizes the pool: all three; it is not measured on a CPU.
        outside = known["context"] + known["non_torch"] + measured.held_before
        predicted = predicted_of(
            run, non_torch=0 if manifest["device"] == "cpu" else outside,
            activation_coefficient=calibration.activation_coefficient if is_of_model(calibration, run) else 1.0,
        )  # fmt: skip
    predictions = {name: Prediction(_predicted(name, predicted, known, run)) for name in COMPONENTS}
    rows = reconcile(predictions, measured.measurement)
    of_pool = reconcile(capacity_predictions(run, predicted), capacity(run))
    ended = "" if run.status == "complete" else f"the run {ending(run)}"
    gaps += [*elsewhere(run), *([ended] if ended else [])]
    return Reconciliation(
        run, spec.name, str(manifest["device"]), rows, measured.reported, of_pool, tuple(gaps),
        measured.unreached, measured.held_before, None if calibration is None else calibration.origin, ended,
        outside_rows(run), savings(run),
    )  # fmt: skip


def is_of_model(calibration: Calibration, run: Run) -> bool:
    """True if it was measured with the run's model, split over as many ranks."""
    name, inputs = (run.manifest.get("model") or {}).get("name"), run.manifest.get("inputs") or {}
    return (calibration.model, calibration.tensor_parallel_size) == (name, inputs.get("tensor_parallel_size", 1))


def calibrated_bytes(calibration: Calibration, run: Run) -> tuple[dict[str, int], list[str]]:
    """Return (bytes by component that a calibration has for this run, notes on them).

    Context and workspaces depend on the machine. Graphs, the allocator's cache and the ratio of the activation peak to
    its formula depend on the model: they apply to a run of the same model on as many ranks, graphs size by size.
    """
    same_model = is_of_model(calibration, run)
    known = {name: calibration.measured[name] for name in ("context", "non_torch")}
    names = ["context", *([] if run.manifest["device"] == "cpu" else ["non_torch"])]
    texts = [f"{' and '.join(names)}: predicted as {calibration.origin} measured them"]
    if same_model:
        texts.append(
            f"activations: the formula, times {calibration.activation_coefficient:.4g} by {calibration.origin}"
        )
    else:
        of = calibration.model or "a model it does not name"
        texts.append(
            f"activations: the formula alone; {calibration.origin} is of {printable(of, 100)}, or of other ranks"
        )
    if calibration.run_id is not None and calibration.run_id == run_id(run.manifest):
        texts = [f"{calibration.origin} was measured on this very run: its rows agree whatever they are"]
    if run.manifest["device"] == "cpu":
        return known, texts
    left_out = []
    if same_model:
        known["allocator_slack"] = calibration.measured["allocator_slack"]
    else:
        left_out.append("allocator_slack")
    sizes = {str(size) for size in run.manifest.get("graph_bytes") or {}}
    if same_model and sizes == calibration.graph_bytes.keys():
        known["cuda_graphs"] = calibration.measured["cuda_graphs"]
    elif same_model and sizes and sizes <= calibration.graph_bytes.keys():
        shared = calibration.measured["cuda_graphs"] - sum(calibration.graph_bytes.values())  # by all graph sizes
        known["cuda_graphs"] = max(0, shared) + sum(calibration.graph_bytes[size] for size in sizes)
    elif not (run.manifest.get("engine") or {}).get("enforce_eager"):
        left_out.append("cuda_graphs")
    if left_out:
        why = "for other sizes of a batch" if same_model else f"with {calibration.model or 'a model it does not name'}"
        texts.append(f"{' and '.join(left_out)}: not predicted; {calibration.origin} measured them {why}")
    return known, texts


def elsewhere(run: Run) -> list[str]:
    """Return a note if the run's code differs from the code of the formulas it is compared with."""
    environment = run.manifest.get("environment") or {}
    there, here = environment.get("commit"), checkout(Path(__file__).resolve().parents[2])
    if not isinstance(there, str):
        there, here = environment.get("kvplan"), release()
    elif here is None:
        return [f"measured with kvplan {shortened(there)}, predicted by formulas whose commit is not known"]
    if not isinstance(there, str) or here is None or there == here:
        return []
    return [f"measured with kvplan {shortened(there)}, predicted by the formulas of {shortened(here)}"]


def shortened(commit: str) -> str:
    """Shorten a commit to its first 12 digits and whether it was modified; a version stays as it is."""
    digits, dash, state = printable(commit, 80).partition("-")
    return digits[:12] + dash + state


def ending(run: Run) -> str:
    """How an incomplete run ended: "is partial: interrupted"."""
    return f"is {run.status}" + ("" if run.cause is None else f": {run.cause}")


def _predicted(name: str, predicted: Sized, known: dict[str, int], run: Run) -> int | None:
    match name:
        case "weights" | "buffers" | "kv_cache" | "activations" | "lora":
            return int(getattr(predicted, name))
        case "unattributed":
            return 0
        case "cuda_graphs" | "non_torch" if run.manifest["device"] == "cpu":
            return 0
        case "cuda_graphs" if (run.manifest.get("engine") or {}).get("enforce_eager"):
            return 0
        case "allocator_slack" if run.manifest["device"] == "cpu":
            return 0
        case _:
            return known.get(name)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured bytes of a run; Reconciliation describes the fields."""

    measurement: Measurement
    reported: int
    unreached: int
    held_before: int = 0


def measured_bytes(run: Run) -> Measured:
    """Bytes by component; `unattributed` is the remainder."""
    memory = run.manifest["memory"]
    peaks = {
        name: stage for name, stage in (run.manifest.get("peaks") or peaks_of(run)).items() if name not in BASELINES
    }
    rows = {
        "weights": memory.get("weights", 0),
        "buffers": memory.get("buffers", 0),
        "kv_cache": memory.get("kv_cache", 0),
        "activations": memory.get("activations", 0),
        "cuda_graphs": memory.get("cuda_graphs", 0),
        "lora": memory.get("lora", 0),
        "non_torch": 0,
        "allocator_slack": 0,
        "context": 0,
    }
    reserved = max((stage.get("torch_reserved", 0) for stage in peaks.values()), default=0)
    # Libraries keep workspaces in torch's pool, and a graph only its tensors; older runs record neither.
    workspaces = int(memory.get("workspaces", 0))
    graphs = int(memory.get("graph_tensors", rows["cuda_graphs"]))
    in_torch = sum(rows.values()) - rows["cuda_graphs"] + graphs + workspaces
    before = unreached = 0
    if run.manifest["device"] == "cpu":
        reported = max((stage.get("rss", 0) for stage in peaks.values()), default=0)
        rows["context"] = peaks.get("context", {}).get("rss", 0)
        unreached = sum(rows.values()) - reported
    elif any(sample.get("device_is_host") for sample in run.samples[:1]):
        # Unified memory: the device's usage is the whole machine's, so only torch's own counters can be compared.
        reported = reserved
        rows["cuda_graphs"], rows["non_torch"] = graphs, workspaces
        rows["allocator_slack"], unreached = max(0, reserved - in_torch), in_torch - reserved
    else:
        before = peaks.get("before", {}).get("device_used", 0)
        reported = max((stage.get("device_used", 0) for stage in peaks.values()), default=0) - before
        context = peaks.get("context", {})
        rows["context"] = max(0, context.get("device_used", 0) - before - context.get("torch_reserved", 0))
        rows["non_torch"] = max(0, int(memory["non_torch"]) - before - rows["context"])
        rows["allocator_slack"], unreached = max(0, reserved - in_torch), in_torch - reserved
    unreached = min(max(0, unreached), rows["activations"])
    rows["unattributed"] = reported + unreached - sum(rows.values())
    figures = tuple(Figure(name, "bytes", rows[name]) for name in COMPONENTS)
    return Measured(Measurement("run", figures), reported, unreached, before)


def peaks_of(run: Run) -> dict[str, dict[str, int]]:
    """Largest figures by stage, of a run whose manifest is incomplete: from its samples and from torch's own peaks,
    which are in the event that ended the stage.
    """
    peaks: dict[str, dict[str, int]] = {}
    figures_by_stage: list[tuple[str, Mapping[str, Any]]]
    figures_by_stage = [(str(sample.get("stage")), sample) for sample in run.samples if not sample.get("is_foreign")]
    for event in run.events:
        ended = event.get("peaks")
        figures_by_stage += [
            (str(name), figures) for name, figures in (ended if isinstance(ended, dict) else {}).items()
        ]
    for name, figures in figures_by_stage:
        stage = peaks.setdefault(name, {})
        for key in ("rss", "torch_allocated", "torch_reserved", "torch_peak", "device_used", "process_used"):
            if isinstance(figures, dict) and is_size(figures.get(key)):
                stage[key] = max(figures[key], stage.get(key, 0))
    return peaks


# --- as sentences ---------------------------------------------------------------------------------------------------


def sums(result: Reconciliation) -> list[str]:
    """Describe what the total excludes and what the rows add up to, as sentences."""
    left_out = [row.component for row in result.rows if row.predicted is None]
    texts = [f"Total excludes {', '.join(left_out)} (not predicted)."] if left_out else []
    reported = format_size(result.reported)
    if result.held_before:
        reported += f" beyond the {format_size(result.held_before)} in use before the run"
    if result.unreached:
        peak = f"{format_size(result.unreached)} of peak activations not reached again while serving"
        return [*texts, f"The rows add up to what the device reports, {reported}, and {peak}."]
    return [*texts, f"The rows add up to what the device reports: {reported}."]
