"""A measured run in the form its rules need: its error, its age, and the targets that it applies to."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvplan.core.errors import InvalidInputError, KvplanError
from kvplan.core.files import load_json, path_text, printable
from kvplan.measure.reconcile import RECONCILIATION, reconcile_run
from kvplan.measure.run_manifest import spec_of
from kvplan.measure.rundir import MANIFEST, Run, load_run
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Plan
from kvplan.policy.file import Measured, exists
from kvplan.policy.gauges import Case
from kvplan.policy.judge import Evidence


def read_evidence(measured: Measured, cases: Sequence[Case]) -> Evidence:
    """Read evidence from a run directory, its run.json or a reconciliation. Raise InvalidInputError for other files."""
    try:
        return _read(measured, cases)
    except KvplanError as error:
        raise error.within("measured", measured.mark) from error


def _read(measured: Measured, cases: Sequence[Case]) -> Evidence:
    path = measured.path
    if not exists(path):
        return Evidence(problem=f"{printable(measured.text, 200)} does not exist; create it with kvplan profile")
    if path.name == MANIFEST:
        return of_run(load_run(path.parent), cases)
    if is_directory(path):
        return of_run(load_run(path), cases)
    document: Mapping[str, object] = load_json(path)
    if document.get("schema") != RECONCILIATION:
        raise InvalidInputError(
            path_text(path),
            "is neither a run nor a reconciliation",
            "name a run directory, or JSON output of kvplan reconcile",
        )
    return of_reconciliation(document, path, cases)


def is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # its reader reports the error
        return False


def of_run(run: Run, cases: Sequence[Case]) -> Evidence:
    evidence = facts(run, cases)
    if run.manifest.get("memory") is None:
        return replace(evidence, problem=f"the run ended before its memory was measured ({_cause(run)})")
    environment = run.manifest.get("environment")
    if isinstance(environment, dict) and environment.get("is_wsl"):
        return replace(evidence, no_error="under WSL the driver does not report memory per process")
    worst, error = reconcile_run(run).worst()
    return replace(evidence, error=error, worst=worst)


def _cause(run: Run) -> str:
    return printable(str(run.cause), 200)


def of_reconciliation(document: Mapping[str, object], path: Path, cases: Sequence[Case]) -> Evidence:
    """Evidence with the error that the document states; time and device come from the run.json next to it."""
    worst, error = stated_error(document, path)
    beside = path.parent
    if not (beside / MANIFEST).exists():
        return Evidence(
            subject=f"{printable(str(document.get('model')), 80)} on {printable(str(document.get('device')), 80)}",
            problem=f"{MANIFEST} is missing next to {printable(path.name, 80)}, so its date and GPU are not known",
        )
    return replace(facts(load_run(beside), cases), error=error, worst=worst)


def stated_error(document: Mapping[str, object], path: Path) -> tuple[str, float]:
    """The largest relative error among the predicted rows and the total."""
    rows, total = document.get("rows"), document.get("total")
    if not isinstance(rows, list) or not isinstance(total, dict) or not all(isinstance(row, dict) for row in rows):
        raise InvalidInputError(path_text(path), "has no rows", "the file is damaged")
    errors: dict[str, float] = {}
    for row in (*rows, total):
        match row:
            case {"component": "unattributed", "relative": None | float() | int()}:
                continue
            case {"component": str() as name, "relative": float() | int() as relative} if relative is not True:
                errors[printable(name, 80)] = abs(float(relative))
            case {"component": str(), "relative": None}:
                continue
            case _:
                raise InvalidInputError(path_text(path), "a row has no component or error", "the file is damaged")
    if not errors:
        raise InvalidInputError(path_text(path), "no row was predicted", "reconcile again")
    worst = max(errors, key=lambda name: errors[name])
    return worst, errors[worst]


# --- date and device --------------------------------------------------------------------------------------------------


def facts(run: Run, cases: Sequence[Case]) -> Evidence:
    """Evidence on when the run was made and which targets it applies to."""
    spec, device = spec_of(run), device_of(run)
    matches = [case.target.id for case in cases if is_of(case.plan, spec, device)]
    return Evidence(
        subject=f"{printable(spec.name, 80)} on {printable(device, 80)}",
        started=started(run),
        matches=frozenset(matches),
    )


def device_of(run: Run) -> str:
    environment = run.manifest.get("environment")
    name = environment.get("gpu") if isinstance(environment, dict) else None
    return str(name) if run.manifest.get("device") == "cuda" and name else str(run.manifest.get("device"))


def is_of(plan: Plan, spec: ModelSpec, device: str) -> bool:
    """True if a run of this model on this device applies to a plan."""
    return device.lower() == plan.request.gpu.device_name.lower() and is_same_model(plan.request.spec, spec)


def is_same_model(spec: ModelSpec, other: ModelSpec) -> bool:
    """True if the models are the same by catalog name, else by every fact."""
    known = catalog.find(spec.name)
    if known is not None and known == catalog.find(other.name):
        return True
    return replace(spec, name="", source="", notes=()) == replace(other, name="", source="", notes=())


def started(run: Run) -> datetime.date | None:
    try:
        return datetime.datetime.fromisoformat(str(run.manifest.get("started_utc"))).date()
    except ValueError:
        return None
