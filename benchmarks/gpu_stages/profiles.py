"""`kvplan profile` of one model at its real size with random weights, and what `kvplan reconcile` makes of it.

Context, workspaces and graphs have no formula. The first stage measures them (--calibrate), and each later model's
whole total is predicted with the first one's constants: a prediction made before that model ran.

The workload: 128 requests of 512 + 64 tokens, all at once, in a server's configuration. With --baseline the requests
differ in length, which is where reserving the whole context costs, and are served by both allocators in one pool.
"""

import json
import subprocess
import sys
from typing import Any

from benchmarks.gpu_stages.runner import FAILURES
from benchmarks.gpu_stages.stage import Row, Task, config_of, parser, row, task, write_config
from kvplan.models import catalog

SERVER = ("--ctx", "8192", "--max-num-seqs", "256", "--max-num-batched-tokens", "8192")
ALIKE = ("--num-seqs", "128", "--prompt-tokens", "512", "--output-tokens", "64")
MIXED = ("--num-seqs", "256", "--lengths", "uniform:100-1400", "--output-tokens", "128")
ON_CPU = (
    "--ctx", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--num-blocks", "200", "--dtype",
    "float32", "--num-seqs", "3", "--prompt-tokens", "24", "--output-tokens", "4",
)  # fmt: skip
OUT_OF_MEMORY = 4  # exit code of `kvplan profile`: a result, which another try only repeats
GOALS = {"weights": 0.001, "kv_cache": 0.001, "activations": 0.1, "total": 0.01}  # largest relative errors
RUN = "run"
FIRST = "profile-llama-3.1-8b"  # the stage whose constants the later ones are predicted with
CONSTANTS = "calibration.json"


def command(stage: Task, model: str) -> list[str]:
    options = stage.options
    workload = ON_CPU if stage.is_small else (*SERVER, *(MIXED if options.baseline else ALIKE))
    chosen = ["--kv-cache-dtype", options.kv_cache_dtype] if options.kv_cache_dtype else []
    chosen += ["--baseline", options.baseline] if options.baseline else []
    return ["profile", model, "-o", RUN, "--device", str(stage.device), *workload, *chosen, "--timeout", "90s", "-q"]


def kvplan(stage: Task, arguments: list[str]) -> tuple[int, str]:
    """(exit code, standard output) of the command, run in the stage's folder; what it complains of is in the log."""
    done = subprocess.run(
        [sys.executable, "-m", "kvplan", *arguments], cwd=stage.folder, stdout=subprocess.PIPE, text=True, check=False
    )
    return done.returncode, done.stdout


def model_of(stage: Task) -> str:
    """What to call the model: its name, or a folder with a config that differs from the catalog's."""
    name = str(stage.options.model)
    if config_of(name, is_small=stage.is_small) == catalog.expand(catalog.facts(name)["config"]):
        return name
    write_config(name, stage.folder / name, is_small=stage.is_small)
    return f"./{name}"


def reconciled(stage: Task) -> dict[str, Any]:
    """What the run's rows are beside the predicted ones, kept as JSON and Markdown, with the measured constants."""
    code, text = kvplan(stage, ["reconcile", RUN, "--format", "json", "--calibrate", CONSTANTS])
    if code != 0:
        raise SystemExit(f"kvplan reconcile: exit code {code}")
    (stage.folder / "reconciliation.json").write_text(text, encoding="utf-8")
    (stage.folder / "reconciliation.md").write_text(kvplan(stage, ["reconcile", RUN, "--format", "markdown"])[1])
    document: dict[str, Any] = json.loads(text)
    return document


def total_predicted_before(stage: Task) -> dict[str, Any] | None:
    """The total with the first stage's constants; None for that stage itself, or where it left none for this."""
    constants = stage.folder.parent / FIRST / CONSTANTS
    if stage.folder.name == FIRST or not constants.exists():
        return None
    code, text = kvplan(stage, ["reconcile", RUN, "--format", "json", "--calibration", str(constants)])
    if code != 0:
        return None  # of another driver, say, in an earlier call: reconcile has said so in the log
    (stage.folder / "reconciliation-calibrated.json").write_text(text, encoding="utf-8")
    total: dict[str, Any] = json.loads(text)["total"]
    return total


def numbers_of(reconciliation: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Measured, predicted and relative error of every row, the pool, and what the two allocators did."""
    numbers = {
        name: {key: entry[key] for key in ("predicted", "measured", "relative")}
        for name, entry in ((entry["component"], entry) for entry in (*reconciliation["rows"], reconciliation["total"]))
    }
    numbers["reported"] = reconciliation["reported"]
    numbers["capacity"] = {
        entry["name"]: {"predicted": entry["predicted"], "measured": entry["measured"]}
        for entry in reconciliation["capacity"]
    }
    baseline = results.get("baseline")
    for name, served in (("paged", results), *([(baseline["allocator"], baseline)] if baseline else [])):
        numbers[name] = {key: served[key] for key in ("most_running", "output_tokens_per_s", "seconds", "num_finished")}
    return numbers


def headline(numbers: dict[str, Any]) -> str:
    if "contiguous" in numbers:
        paged, other = numbers["paged"], numbers["contiguous"]
        return (
            f"running at once {paged['most_running']} against {other['most_running']}, "
            f"{paged['num_finished'] / paged['seconds'] / (other['num_finished'] / other['seconds']):.2f}x requests/s"
        )
    entries = numbers | ({"total": numbers["total_predicted_before"]} if "total_predicted_before" in numbers else {})
    shares = {name: entries[name]["relative"] for name in GOALS}
    texts = ", ".join(f"{name} {share:+.2%}" for name, share in shares.items() if share is not None)
    missed = [name for name, share in shares.items() if share is None or abs(share) > GOALS[name]]
    return f"{texts}; {'beyond the goal: ' + ', '.join(missed) if missed else 'all within the goals'}"


def rows_of(model: str, numbers: dict[str, Any]) -> list[Row]:
    sizes = [
        row(f"{kind} {name}", "bytes", [value[kind]], model)
        for name, value in numbers.items()
        if isinstance(value, dict) and "relative" in value
        for kind in ("measured", "predicted")
        if value[kind] is not None
    ]
    speeds = [
        row(f"output tokens, {name}", "tokens/s", [numbers[name]["output_tokens_per_s"]], model)
        for name in ("paged", "contiguous")
        if name in numbers
    ]
    return sizes + speeds


def run(stage: Task) -> int:
    """The exit code of `kvplan profile`; a run that ended early is compared as far as it went.

    One for which the memory did not do, but of which rows were measured, is done: FAILURES.
    """
    code, _ = kvplan(stage, command(stage, model_of(stage)))
    path = stage.folder / RUN / "run.json"
    if not path.exists():
        return code
    manifest = json.loads(path.read_text(encoding="utf-8"))
    ending = {key: manifest.get(key) for key in ("status", "cause")}
    early = f"the run ended early: {ending['cause'] or ending['status']}"
    stage.save(
        early if code else "the run is complete, and not compared yet", ending
    )  # before reconciling, which may fail and must not hide it
    if "memory" not in manifest:  # it ended before the engine stood
        return code
    reconciliation = reconciled(stage)
    results = manifest.get("results") or {}
    if not results:
        stage.save(early, {**ending, "rows": reconciliation["rows"], "gaps": reconciliation["gaps"]})
        return FAILURES if code == OUT_OF_MEMORY else code
    numbers = ending | numbers_of(reconciliation, results)
    before = total_predicted_before(stage)
    if before is not None:
        numbers["total_predicted_before"] = {key: before[key] for key in ("predicted", "measured", "relative", "of")}
    summary = headline(numbers)
    stage.save(summary if code == 0 else f"{early}; {summary}", numbers, rows_of(stage.options.model, numbers))
    return FAILURES if code == OUT_OF_MEMORY else code


def options_of(description: str | None) -> Task:
    own = parser(description)
    own.add_argument("model", help="a name of models.yaml")
    own.add_argument("--kv-cache-dtype")
    own.add_argument("--baseline", choices=("contiguous",))
    return task(own, computes=False)


if __name__ == "__main__":
    sys.exit(run(options_of(__doc__)))
