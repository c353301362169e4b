"""Everything a GPU is needed for, in one command: tests, measured memory beside predicted, prefix reuse, speed.

    PYTHONPATH=. python3 benchmarks/gpu.py OUT --minutes 9 | --budget 480 [--resume DIR] [--only smoke,tests]
                                           [--again tests] [--commit COMMIT] [--device cuda:0]

Stages run in the order of --list, the biggest news first, each in a process of its own and within the seconds of the
budget. After each stage OUT holds summary.json, at most six archives of evidence, and Triton's compiled kernels; while
one is under way, its numbers and the kernels are kept there every 20 seconds. A call with --resume (whose DIR may be
OUT itself) runs what was skipped, crashed or was cut off, and goes on with what is partial. A stage that came to its
own end is done, also with failures, which its headline tells; --again names stages to be run all the same.

Where a GPU is lent for a quarter of an hour, --minutes plans the call: smoke, kernels, decode, prefill, tests and the
first profile get what they need before any other stage gets anything, and all that is planned adds up to the minutes.
A call with --minutes 9 and one with --minutes 4 --resume take 13 minutes at most; `--list --minutes 9` prints the plan.

Where every call gets a fresh copy of the checkout, what the last one left must travel with it: lay the files of its OUT
into build/gpu of the checkout and give `--resume build/gpu`. Git ignores that folder, so its files cannot be committed
by accident; nor does a copy that leaves ignored files out take it along unless it is told to. Such a copy may have no
.git to ask for the commit: give --commit, the same words for the same code, in every call. Ask for the same kind of GPU
in every call, by its name: what another one has shown is not taken over.

With --device cpu the same stages run on tiny models, to try the script; what they say then says nothing about a GPU.

Exit codes: 0 all stages are ok, 1 one failed or has failures, 2 usage, 3 no GPU, 4 the budget ended first.
"""

import argparse
import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu_stages.plan import line, plan, to_run
from benchmarks.gpu_stages.runner import (
    CLOSING_S,
    ROOT,
    SUMMARY,
    Machine,
    Session,
    Stage,
    resume,
    run_stages,
    table,
)
from kvplan.core.errors import EnvironmentProblem, KvplanError, UsageError
from kvplan.core.files import path_text, printable
from kvplan.core.git import checkout
from kvplan.hardware.nvml import DeviceError, open_nvml

MODULES = "benchmarks.gpu_stages"
PROFILE = ("-m", f"{MODULES}.profiles")
PACKAGES = (
    "kvplan", "torch", "triton", "numpy", "safetensors", "nvidia-ml-py", "typer", "rich", "transformers", "pytest",
    "hypothesis",
)  # fmt: skip
PROBE = """
import json, sys, torch
device = torch.device(sys.argv[1])
print(json.dumps(torch.cuda.get_device_name(device) if torch.cuda.is_available() else None))
"""
PROBE_S = 120.0  # torch's first import on a machine that was just started
MOST_MINUTES = 24 * 60
FAILED, BUDGET_ENDED, INTERRUPTED, TERMINATED = 1, 4, 130, 143


def profile_stage(model: str, *arguments: str, name: str = "", group: str = "models", most_s: float = 50) -> Stage:
    """The memory of one model, measured beside predicted."""
    shows = f"{model}: measured memory beside predicted {' '.join(arguments)}".strip()
    argv = (*PROFILE, model, *arguments)
    return Stage(name or f"profile-{model}", group, shows, argv, 30, most_s)


def fp8_stage(model: str, group: str = "models") -> Stage:
    """The same with an fp8 KV cache."""
    arguments = ("--kv-cache-dtype", "fp8_e4m3")
    return profile_stage(model, *arguments, name=f"profile-{model}-fp8", group=group, most_s=45)


def kernels_stage(
    name: str, shows: str, *arguments: str, least_s: float, most_s: float, goes_on: bool = False
) -> Stage:
    """A search among kernels, which ends 20 s before it is ended: a last case may be under way."""
    argv = ("-m", f"{MODULES}.{'tune' if name == 'tune' else 'kernels'}", *arguments, "--limit", f"{most_s - 20:.0f}")
    return Stage(name, "kernels", shows, argv, least_s, most_s, goes_on)


# All of them take 24 minutes at most. What nobody can say without a GPU comes first, what says least last.
STAGES = (
    Stage("smoke", "tests", "versions, device, one kernel, a 2-layer model", ("-m", f"{MODULES}.smoke"), 10, 60),
    Stage("tests", "tests", "all tests marked gpu", ("-m", f"{MODULES}.checks"), 90, 165, goes_on=True),
    Stage("decode", "engine", "tokens/s beside the physical limit", ("-m", f"{MODULES}.decode"), 35, 70),
    Stage("prefill", "engine", "prompt tokens/s beside the matrix rate", ("-m", f"{MODULES}.prefill"), 20, 45),
    kernels_stage("kernels", "kernels: share of the copy bandwidth, peers", least_s=40, most_s=110),
    profile_stage("llama-3.1-8b", group="llama"),
    Stage("nano-vllm", "engine", "nano-vllm's workload, output tokens/s", ("-m", f"{MODULES}.nano_vllm"), 30, 70),
    profile_stage("llama-3.1-8b", "--baseline", "contiguous", name="contiguous", group="serving"),
    profile_stage("qwen2.5-7b"),
    profile_stage("qwen3-30b-a3b"),
    profile_stage("gemma-3-12b"),
    profile_stage("gpt-oss-20b"),
    profile_stage("deepseek-v2-lite"),  # with no fp8 stage: the engine keeps latents in the model's dtype
    Stage("allocators", "serving", "paged against contiguous, one pool", ("-m", f"{MODULES}.allocators"), 40, 90),
    Stage("generate", "engine", "requests/s against transformers", ("-m", f"{MODULES}.generate"), 35, 75),
    Stage("overhead", "engine", "what the host adds to a step", ("-m", f"{MODULES}.overhead"), 25, 40),
    Stage("prefix", "serving", "first and later requests with a shared prefix", ("-m", f"{MODULES}.prefix"), 25, 40),
    kernels_stage("tune", "launch parameters for engine/kernels/tiles.json", least_s=40, most_s=60),
    # It takes what time it gets, call after call.
    kernels_stage(
        "kernels-grid", "kernels: the cases left, 1-256 sequences of 512-131,072 tokens", "--rest",
        least_s=35, most_s=40, goes_on=True,
    ),
    fp8_stage("llama-3.1-8b", group="llama"),
    fp8_stage("qwen2.5-7b"),
    fp8_stage("qwen3-30b-a3b"),
    fp8_stage("gemma-3-12b"),
    fp8_stage("gpt-oss-20b"),
)  # fmt: skip


# --- the machine ------------------------------------------------------------------------------------------------------


def machine(device: str, commit: str | None) -> Machine:
    """What this runs on; raises EnvironmentProblem where torch cannot use the GPU."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {name: installed(name) for name in PACKAGES}
    if device == "cpu":
        return Machine("cpu", None, commit or checkout(ROOT), versions)
    return Machine(gpu_name(device), driver(), commit or checkout(ROOT), versions)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def gpu_name(device: str) -> str:
    """The name torch has for it; asked in a process that ends, so that nothing is held on the GPU here."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", PROBE, device], capture_output=True, text=True, timeout=PROBE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentProblem(f"--device {device}: torch did not answer within {PROBE_S:g} s; try again") from error
    name = json.loads(probe.stdout) if probe.returncode == 0 else None
    if name is None:
        why = (probe.stderr.strip().splitlines() or ["torch finds no GPU"])[-1]
        raise EnvironmentProblem(f"--device {device}: {why}; use --device cpu to try the script")
    return str(name)


def driver() -> str | None:
    """The driver's version; None where NVML cannot say."""
    try:
        with open_nvml() as nvml:
            return nvml.driver_version
    except DeviceError:
        return None


# --- the command ------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own.add_argument("out", type=Path, nargs="?", metavar="OUT", help="folder for the summary and the archives")
    limits = own.add_mutually_exclusive_group()
    limits.add_argument("--budget", type=float, default=480, metavar="SECONDS", help="for all of it (%(default)s)")
    limits.add_argument("--minutes", type=minutes, metavar="N", help="for all of it, planned: see above")
    own.add_argument("--resume", type=Path, metavar="DIR", help="go on from an earlier OUT")
    own.add_argument("--only", metavar="STAGE,...", help="these stages alone")
    own.add_argument("--again", metavar="STAGE,...", help="run these although --resume has them done")
    own.add_argument("--device", default="cuda:0", help="cuda:N or cpu (%(default)s)")
    own.add_argument("--commit", help="of the code, where there is no repository to ask; the same in every call")
    own.add_argument("--list", action="store_true", help="print the stages and stop")
    return own


def minutes(text: str) -> float:
    """A number of minutes that holds a stage."""
    value = float(text)
    if not 1 <= value <= MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"{text} is not 1 to {MOST_MINUTES}")
    return value


def chosen(stages: Sequence[Stage], option: str, names: str) -> list[Stage]:
    """The stages that an option names, in the stated order; raises UsageError for a name that is none."""
    names_chosen = names.split(",")
    unknown = [name for name in names_chosen if name not in {stage.name for stage in stages}]
    if unknown:
        raise UsageError(f"{option}: {printable(repr(unknown[0]), 40)} is no stage; --list prints them")
    return [stage for stage in stages if stage.name in names_chosen]


def run(options: argparse.Namespace, stages: Sequence[Stage], started_s: float) -> int:
    """Everything but the reading of the command line; returns the exit code."""
    selected = list(stages) if options.only is None else chosen(stages, "--only", options.only)
    again = [] if options.again is None else chosen(stages, "--again", options.again)
    budget_s = options.budget if options.minutes is None else 60 * options.minutes
    if options.list:
        if options.minutes is not None:
            print(line(plan(selected, budget_s - CLOSING_S), CLOSING_S))
            return 0
        for stage in selected:
            print(f"{stage.name:<25} {stage.minimum_s:4.0f} to {stage.timeout_s:3.0f} s  {stage.shows}")
        return 0
    if options.out is None:
        raise UsageError("OUT: missing; name a folder for the results")
    is_continued = options.resume is not None and options.resume.resolve() == options.out.resolve()
    if (options.out / SUMMARY).exists() and not is_continued:
        raise UsageError(
            f"{path_text(options.out)}: holds an earlier call's results; --resume it, or name another folder"
        )
    where = machine(options.device, options.commit)
    if where.commit is None and options.resume is None:
        print("nobody knows which code this is: without --commit no later call can go on from this one", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="kvplan-gpu-") as work:
        session = Session(options.out, Path(work), options.device, where, budget_s, started_s)
        session.again = frozenset(stage.name for stage in again)
        if options.resume is not None:
            resume(session, options.resume)
        if options.minutes is not None:
            session.plan = plan(to_run(selected, session), session.left_s)
            print(line(session.plan, CLOSING_S), flush=True)
        try:
            run_stages(selected, session)
        finally:
            print(f"\n{session.machine.device}, commit {session.machine.commit}; {path_text(options.out)}:")
            print(table(list(session.results.values())), flush=True)
    return exit_code(session, selected)


def exit_code(session: Session, selected: Sequence[Stage]) -> int:
    results = [session.results[stage.name] for stage in selected]
    statuses = {result.status for result in results}
    has_failures = any(result.numbers.get("failures") for result in results)
    if session.is_unsaved or has_failures or statuses & {"failed", "timeout", "failures"}:
        return FAILED
    return BUDGET_ENDED if statuses & {"skipped", "partial"} or session.not_begun else 0


def main(argv: Sequence[str] | None = None, stages: Sequence[Stage] = STAGES) -> int:
    """Run a command line; what went wrong is one line on standard error."""
    started_s = time.monotonic()
    try:
        return run(parser().parse_args(argv), stages, started_s)
    except KvplanError as error:
        print(f"gpu.py: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"gpu.py: error: {printable(str(error), 200)}; make room for OUT, or name another", file=sys.stderr)
        return KvplanError.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that the stage is ended and its results kept
    sys.exit(main())
