"""What the engine and its kernels are meant to reach on a GPU, and what was measured: reports/goals.md.

    python -m benchmarks.goals [SUMMARY]

Writes reports/goals.md from reports/goals.json. SUMMARY, the summary.json that benchmarks/gpu.py leaves, first puts
what its stages measured into reports/goals.json, under its GPU: each GPU has a table of its own. A stage that was run
anew loses all that it said before. Where several stages measured the same thing, the worst of it counts that the newest
commit has shown. What no GPU has measured stays "never run on a GPU", with what its stage has run on instead.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from benchmarks.gpu import STAGES
from benchmarks.gpu_stages.evidence import write_json, write_whole
from kvplan.core.errors import InvalidInputError, KvplanError, UsageError
from kvplan.core.files import load_json, path_text, printable

SCHEMA, SUMMARY_SCHEMA = "kvplan/goals@2", "kvplan/gpu@1"
REPORTS = Path(__file__).resolve().parents[1] / "reports"
EVIDENCE, PAGE = REPORTS / "goals.json", REPORTS / "goals.md"
NOT_RUN, NOT_MEASURED = "never run on a GPU", "not measured"
KERNELS = ("kernels", "kernels-grid")
# What each stage of benchmarks/gpu.py has run on without a GPU, where it says nothing of a goal.
ON_A_CPU = "on a CPU with tiny models"
INTERPRETED = "on a CPU, in Triton's interpreter with tiny shapes; compiled for 8.0, 8.9, 9.0 and 10.0"
TRIED = {
    "smoke": "on a CPU: one kernel in Triton's interpreter, the model in plain torch",
    "tests": "on a CPU, where they are only collected",
    "kernels": INTERPRETED,
    "kernels-grid": INTERPRETED,
    "tune": "on a CPU, in Triton's interpreter",
}


@dataclass(frozen=True, slots=True)
class Need:
    """One number and where it must lie; without limits it is told and not judged.

    name  as stages report it in numbers["goals"]
    form  how it reads
    """

    name: str
    form: str
    least: float | None = None
    most: float | None = None

    def is_met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclass(frozen=True, slots=True)
class Goal:
    """stages: of benchmarks/gpu.py, which measure it."""

    what: str
    goal: str
    needs: tuple[Need, ...]
    stages: tuple[str, ...]


# Tokens per second depend on the GPU's bandwidth: the goal is 25,000 of the 35,600 that an H200 could reach at most.
# Another GPU has another bound, of which it is to reach the same share.
NANO_VLLM_SHARE = 25_000 / 35_600
NANO_VLLM = Goal(
    "nano-vllm's workload, Qwen3-0.6B",
    "≥ 25,000 output tokens/s (bound 35,600)",
    (Need("nano-vllm", "{:,.0f} tokens/s", least=25_000), Need("nano-vllm-share", "{:.0%} of the measured bound")),
    ("nano-vllm",),
)
NANO_VLLM_ELSEWHERE = Goal(
    NANO_VLLM.what,
    "≥ 70% of the bound at the measured bandwidth, as 25,000 of 35,600 output tokens/s are on an H200",
    (
        Need("nano-vllm", "{:,.0f} tokens/s"),
        Need("nano-vllm-share", "{:.0%} of the measured bound", least=NANO_VLLM_SHARE),
    ),
    NANO_VLLM.stages,
)
GOALS = (
    Goal(
        "paged decode attention, Llama-8B shape, two sequences or more with 64 MB of KV per layer or more",
        "≥ 85% of the measured copy bandwidth; ≥ 1.0x of the best importable peer",
        (Need("decode-bandwidth", "{:.0%}", least=0.85), Need("decode-peer", "{:.2f}x", least=1.0)),
        KERNELS,
    ),
    Goal(
        "the same with fp8 KV",
        "≥ 75%; relative error on top of the cache 3e-4",
        (
            Need("decode-fp8-bandwidth", "{:.0%}", least=0.75),
            Need("decode-fp8-error", "{:.1e}", most=3.5e-4),  # 3e-4 has one digit
        ),
        KERNELS,
    ),
    Goal(
        "one sequence of 8k to 128k",
        "within 1.2x of the best peer; ≥ 60% of the copy bandwidth at 128k",
        (
            Need("decode-single-peer", "{:.2f}x the time", most=1.2),
            Need("decode-single-bandwidth", "{:.0%}", least=0.6),
        ),
        KERNELS,
    ),
    Goal(
        "prefill attention, 8k",
        "≥ 50% of the measured matmul rate",
        (Need("prefill-matmul", "{:.0%}", least=0.5),),
        KERNELS,
    ),
    Goal(
        "decode, Llama-3.1-8B, 64 sequences of 2048",
        "≥ 80% of the roofline",
        (Need("decode-roofline", "{:.0%}", least=0.8),),
        ("decode",),
    ),
    NANO_VLLM,
    Goal(
        "requests/s against transformers' generate one by one, Llama-3.1-8B, 64 requests of 512 in, 128 out",
        "≥ 24x; the ratio to its best static batch beside it",
        (Need("transformers-single", "{:.1f}x", least=24), Need("transformers-batch", "{:.1f}x its best batch")),
        ("generate",),
    ),
    Goal(
        "paged against contiguous in the same pool, max_model_len 8192, azure-2023-conv lengths",
        "≥ 3.5x requests/s; waste < 4% against > 60%",
        (
            Need("paged-contiguous", "{:.2f}x", least=3.5),
            Need("paged-waste", "{:.1%} waste", most=0.04),
            Need("contiguous-waste", "against {:.0%}", least=0.6),
        ),
        ("allocators",),
    ),
    Goal(
        "900 shared prefix tokens, clinical notes",
        "≥ 45% lower time to first token for later requests",
        (Need("prefix", "{:.1%} lower", least=0.45), Need("prefix-bound", "{:.1%} of the prompt tokens are shared")),
        ("prefix",),
    ),
    Goal(
        "900 shared prefix tokens before 300 of each request's own",
        "none; told beside the clinical notes",
        (
            Need("prefix-short", "{:.1%} lower"),
            Need("prefix-short-bound", "{:.1%} of the prompt tokens are shared"),
        ),
        ("prefix",),
    ),
)
NAMES = tuple(need.name for goal in GOALS for need in goal.needs)
LEAST_IS_BEST = {need.name for goal in GOALS for need in goal.needs if need.most is not None}
ROWS = {"decode-roofline": ("decode", "decode B=64 L=2048: of the limit")}  # goals whose number is a stage's row


def goals_for(gpu: str | None) -> tuple[Goal, ...]:
    """The goals of a GPU by torch's name for it; None: of an H200, which they were made for."""
    if gpu is None or "H200" in gpu:
        return GOALS
    return tuple(NANO_VLLM_ELSEWHERE if goal is NANO_VLLM else goal for goal in GOALS)


def worst_of(*many: Mapping[str, float]) -> dict[str, float]:
    """Of the goals' numbers by name the worst."""
    by_name: dict[str, list[float]] = {}
    for values in many:
        for name, value in values.items():
            by_name.setdefault(name, []).append(value)
    return {name: (max if name in LEAST_IS_BEST else min)(values) for name, values in by_name.items()}


# --- what was measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """A number, the stage and the commit (None: unknown) that it is from, and when it was taken."""

    value: float
    stage: str
    commit: str | None
    utc: str


@dataclass(frozen=True, slots=True)
class Shown:
    """What one GPU has shown: by name, a number of each stage that measured it; and when each stage ran last."""

    measured: Mapping[str, tuple[Measured, ...]]
    ran: Mapping[str, str] = field(default_factory=dict)

    @property
    def counted(self) -> dict[str, list[Measured]]:
        """By name the numbers of one commit, the newest: what other code did is neither better nor worse of it."""
        return {name: of_newest_commit(measured) for name, measured in self.measured.items()}

    @property
    def values(self) -> dict[str, float]:
        return worst_of(
            *({name: measurement.value} for name, measured in self.counted.items() for measurement in measured)
        )

    @property
    def sources(self) -> list[str]:
        every = {
            (measurement.stage, measurement.commit or "unknown", measurement.utc)
            for measured in self.counted.values()
            for measurement in measured
        }
        return [f"stage {stage}, commit {commit}, {utc}" for stage, commit, utc in sorted(every)]


def of_newest_commit(measurements: Sequence[Measured]) -> list[Measured]:
    """The numbers of the commit that was measured last; one of an unknown commit stands alone."""
    newest = max(measurements, key=lambda measurement: measurement.utc)
    if newest.commit is None:
        return [newest]
    return [measurement for measurement in measurements if measurement.commit == newest.commit]


Evidence = Mapping[str, Shown]  # by GPU, as torch names it


def read_evidence(path: Path) -> Evidence:
    """Raises InvalidInputError, in one line, for a file that is no evidence."""
    document = load_json(path)
    gpus = document.get("gpus")
    if document.get("schema") != SCHEMA or not isinstance(gpus, dict):
        raise InvalidInputError(f"{path_text(path)}: is not {SCHEMA}; write it with `python -m benchmarks.goals`")
    try:
        evidence = {
            gpu: Shown(
                {name: tuple(Measured(**value) for value in values) for name, values in measured.items()},
                {str(stage): str(utc) for stage, utc in dict(document.get("ran", {}).get(gpu, {})).items()},
            )
            for gpu, measured in gpus.items()
        }
    except (TypeError, AttributeError) as error:
        raise InvalidInputError(f"{path_text(path)}: gpus cannot be read ({error}); write it anew") from error
    for gpu in evidence.values():
        for name, values in gpu.measured.items():
            if not values:
                raise InvalidInputError(f"{path_text(path)}: {printable(name, 40)} has no number; write it anew")
            for value in values:
                _check(path, name, value)
    return evidence


def _check(path: Path, name: str, measured: Measured) -> None:
    value = measured.value
    if name not in NAMES:
        raise InvalidInputError(f"{path_text(path)}: {printable(name, 40)!r} is no goal; there are {', '.join(NAMES)}")
    if type(value) not in (int, float) or not isfinite(value):
        raise InvalidInputError(
            f"{path_text(path)}: {name} is not a number ({printable(str(value), 40)}); measure it anew"
        )
    if not all(isinstance(text, str) for text in (measured.stage, measured.commit or "", measured.utc)):
        raise InvalidInputError(
            f"{path_text(path)}: {name} has a stage, commit or time that is no text; measure it anew"
        )


def read_summary(path: Path, known: Evidence) -> Evidence:
    """The goals' numbers in a summary.json, in place of all that is known of the same stages on the same GPU.

    A stage that was skipped has measured nothing, and leaves what is known.
    """
    summary = load_json(path)
    stages = summary.get("stages")
    if summary.get("schema") != SUMMARY_SCHEMA or not isinstance(stages, list):
        raise InvalidInputError(
            f"{path_text(path)}: is not {SUMMARY_SCHEMA}; name the summary.json of benchmarks/gpu.py"
        )
    gpu = str(summary.get("device"))
    if gpu == "cpu":
        raise UsageError(f"{path_text(path)}: was measured on a CPU, of which the goals say nothing; run it on a GPU")
    measurements = (
        {name: {value.stage: value for value in many} for name, many in known[gpu].measured.items()}
        if gpu in known
        else {}
    )
    ran = dict(known[gpu].ran) if gpu in known else {}
    for number, stage in enumerate(stages):
        if (
            not isinstance(stage, dict)
            or not isinstance(stage.get("numbers"), dict)
            or type(stage.get("name")) is not str
        ):
            what = f"stage {number} is no stage ({printable(str(stage), 40)})"
            raise InvalidInputError(f"{path_text(path)}: {what}; name the summary.json of benchmarks/gpu.py")
        if stage.get("status") != "skipped":
            ran[stage["name"]] = str(stage.get("utc"))
            for many in measurements.values():
                many.pop(stage["name"], None)
        for name, value in numbers_of(stage).items():
            measurement = Measured(value, stage["name"], stage.get("commit"), str(stage.get("utc")))
            _check(path, name, measurement)
            measurements.setdefault(name, {})[measurement.stage] = measurement
    return {**known, gpu: Shown({name: tuple(many.values()) for name, many in measurements.items() if many}, ran)}


def numbers_of(stage: dict[str, Any]) -> dict[str, float]:
    """What a stage says of the goals, however far it came."""
    numbers: dict[str, float] = dict(stage.get("numbers", {}).get("goals", {}))
    for name, (owner, metric) in ROWS.items():
        for row in stage.get("rows", []) if stage.get("name") == owner else []:
            if row["metric"] == metric:
                numbers[name] = row["value"]
    return numbers


def write_evidence(path: Path, evidence: Evidence) -> None:
    gpus = {
        gpu: {
            name: [asdict(measurement) for measurement in known.measured[name]]
            for name in NAMES
            if name in known.measured
        }
        for gpu, known in sorted(evidence.items())
    }
    write_json(
        path, {"schema": SCHEMA, "gpus": gpus, "ran": {gpu: known.ran for gpu, known in sorted(evidence.items())}}
    )


# --- the table --------------------------------------------------------------------------------------------------------


def cells(values: Mapping[str, float], gpu: str | None) -> list[tuple[str, str, str, str]]:
    """(what, goal, measured, met) of each goal of a GPU."""
    return [(goal.what, goal.goal, *_judged(goal, values, gpu)) for goal in goals_for(gpu)]


def _judged(goal: Goal, values: Mapping[str, float], gpu: str | None) -> tuple[str, str]:
    """A goal is met when all of its numbers are there and all of them are in bounds; without bounds there is none."""
    if not any(need.name in values for need in goal.needs):
        stage = goal.stages[0]
        return f"{NOT_RUN}; stage {stage}: {_tried(stage)}" if gpu is None else f"{NOT_MEASURED} by stage {stage}", ""
    texts = [need.form.format(values[need.name]) if need.name in values else NOT_MEASURED for need in goal.needs]
    if all(need.least is None and need.most is None for need in goal.needs):
        return "; ".join(texts), ""
    if any(need.name in values and not need.is_met(values[need.name]) for need in goal.needs):
        return "; ".join(texts), "no"
    return "; ".join(texts), "yes" if all(need.name in values for need in goal.needs) else "in part"


def _tried(stage: str) -> str:
    return TRIED.get(stage, ON_A_CPU)


def stage_rows(evidence: Evidence) -> list[tuple[str, ...]]:
    """(stage, what it shows, its goals, where it has run) of every stage."""
    rows: list[tuple[str, ...]] = []
    for stage in STAGES:
        goals = "; ".join(goal.what for goal in GOALS if stage.name in goal.stages)
        gpus = [
            f"on {printable(gpu, 60)}, {record.ran[stage.name]}"
            for gpu, record in sorted(evidence.items())
            if stage.name in record.ran
        ]
        never = f"{NOT_RUN}; {_tried(stage.name)}"
        rows.append((stage.name, stage.shows, goals or "none", "; ".join(gpus) or never))
    return rows


def table(values: Mapping[str, float], gpu: str | None) -> str:
    return _lines(("what", "goal", "measured", "met"), cells(values, gpu))


def _lines(head: tuple[str, ...], body: Sequence[tuple[str, ...]]) -> str:
    rows = [head, ("---",) * len(head), *body]
    return "\n".join("| " + " | ".join(cell or " " for cell in row) + " |" for row in rows)


def page(evidence: Evidence) -> str:
    """reports/goals.md."""
    lines = [
        "# Goals on a GPU",
        "",
        "For one H200, in bfloat16 unless said; another GPU is held to the same shares of what it could do at most.",
        "`python -m benchmarks.goals SUMMARY` makes this page from the summary of a run of `make gpu`. A number that",
        "no GPU has measured is not guessed.",
        "",
    ]
    if not evidence:
        lines += ["Measured on: no GPU yet.", "", table({}, None), ""]
    for gpu, evidence_shown in sorted(evidence.items()):
        lines += [f"## {printable(gpu, 60)}", "", table(evidence_shown.values, gpu), ""]
        lines += [*(f"* {source}" for source in evidence_shown.sources), ""]
    lines += ["## Stages of benchmarks/gpu.py", "", "In the order in which they are run.", ""]
    lines += [_lines(("stage", "what it shows", "goals", "has run"), stage_rows(evidence)), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summary", type=Path, nargs="?", metavar="SUMMARY", help="of benchmarks/gpu.py")
    options = parser.parse_args(argv)
    try:
        evidence = read_evidence(EVIDENCE)
        if options.summary is not None:
            evidence = read_summary(options.summary, evidence)
            write_evidence(EVIDENCE, evidence)
        write_whole(PAGE, page(evidence).encode())
    except KvplanError as error:
        print(f"goals.py: error: {error}", file=sys.stderr)
        return error.exit_code
    print(page(evidence), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
