"""Score `kvplan preflight` on failed starts and on servers that started: would it have said no, and to whom?

    python benchmarks/preflights.py FAILURES.jsonl ... --logs LOGS.jsonl ... [--cases tests/facts/server_cases.csv]
        [--models FOLDER] [--json FILE] [--show] [--runs 20]

A failure (as benchmarks/diagnoses.py reads them) counts if memory explains it and the server was starting. It is asked
with what could be known before: its flags, model, release and GPU, and of its log the list of arguments, the GPU's size
and what was free before it loaded; never what failed. A log counts by its state, a case as started if its pool held a
request. Starts whose model, GPU or flags nobody stated cannot be asked, and are counted apart. `risk` is "may not
start", which only --strict refuses. The last line is the command's processor time in bare interpreters.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from accuracy import cases as accuracy
from diagnoses import OUTCOMES, cure_kinds, kinds_of, lines_of

from kvplan.asked.form import Form
from kvplan.asked.log import completed, machines_of
from kvplan.asked.question import requests
from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import GpuSpec, custom_gpu, gpu, gpu_names, offered_names, with_memory
from kvplan.hardware.nvml import DeviceMemory
from kvplan.measure.failure import HEALTHY, read_failure
from kvplan.measure.machine import LiveGpu, Machine
from kvplan.measure.preflight import Limits, Verdict, verdict
from kvplan.measure.serverlog.log import parse_log
from kvplan.models import catalog
from kvplan.planning.live import fixes
from kvplan.planning.plan import Request
from kvplan.servers.logs.failures import MEMORY_CAUSES
from kvplan.servers.logs.log import ServerLog
from kvplan.servers.vllm import rules as vllm

GIB = 1 << 30
SERVING = ("oom_runtime", "sglang_oom_prefill", "sglang_oom_decode_retract")  # these servers had started
OF_STARTS = (*MEMORY_CAUSES, "too_few_gpus", "host_memory_or_shm")
NAMES = {"tp": "tensor_parallel_size", "tp_size": "tensor_parallel_size", "dp_size": "data_parallel_size",
         "dp": "data_parallel_size", "ep_size": "expert_parallel_size"}  # fmt: skip


VERDICTS = {"starts": "started", "may not start": "risk", "does not start": "refused"}


class NotAsked(Exception):
    """Nobody stated what a pre-flight needs."""


def gpu_named(text: str | None) -> GpuSpec | None:
    """The GPU of a note such as "H100 80GB", of several the one of that size; else a GPU of the stated memory."""
    if text is None:
        return None
    words = re.findall(r"[a-z]+|\d+", re.sub(r"\(.*|tesla|nvidia|amd|x\d+$|[\d.]+ ?gi?b", "", text.lower()))
    size = re.search(r"([\d.]+) ?Gi?B", text.partition("(")[2] or text)
    nominal = float(size[1]) if size else None
    near = [spec for spec in map(gpu, gpu_names()) if words and is_called(spec, words)]
    if nominal is not None:
        near = [spec for spec in near if abs((spec.nominal_memory or spec.total_memory) / GIB - nominal) < 2]
        if not near and "Arc" not in text and "Ascend" not in text and "TPU" not in text:
            return custom_gpu(round(nominal * GIB))
    return min(near, key=lambda spec: len(spec.name), default=None)


def is_called(spec: GpuSpec, words: list[str]) -> bool:
    own = re.findall(r"[a-z]+|\d+", f"{spec.name} {spec.device_name}".lower())
    return all(word in own for word in words) and ("laptop" in own) == ("laptop" in words)


def model_named(text: str | None) -> str | None:
    """A catalog name for a model as a thread calls it."""
    if text is None:
        return None
    plain = re.sub(r"\s+(?:0731|w4a16)$|\s*\(.*", "", text.strip()).replace(" ", "-")
    last = plain.rpartition("/")[2]
    for name in (text, plain, last, f"{last}-instruct", last.removesuffix("-Instruct")):
        known = [catalog.find(name), *catalog.same_names(name)]
        if any(known):
            return next(filter(None, known))
    return None


def question(record: dict[str, Any], *, started: bool = False) -> tuple[Request, Machine]:
    """What could be asked before the start, and the machine as it was. Raises NotAsked, or KvplanError.

    started  the log is of a server that started, so that its pool says which GPU it had at least
    """
    lines = lines_of(record)
    log, failure = parse_log("\n".join(lines), bare=True), read_failure(lines)
    flags = {NAMES.get(name, name): value for name, value in (record.get("flags") or {}).items()}
    flags = {name: value for name, value in flags.items() if log.flags.get(name) is None}
    count = re.search(r" x(\d+)$", str(record.get("gpu") or ""))
    ranks = record.get("n_gpus") or (int(count[1]) if count else 1)
    if ranks > 1 and not any("parallel_size" in name for name in {**flags, **log.flags}):
        flags["tensor_parallel_size"] = ranks  # a thread that names its GPUs uses them
    values: dict[str, Any] = {"engine_arg": [f"{name}={value}" for name, value in flags.items()]} if flags else {}
    name = model_named(record.get("model"))
    if name is not None:
        values["model"] = name
    server, version = record.get("engine") or record.get("server"), str(record.get("engine_version") or "")
    number = re.match(r"\d+\.\d+(?:\.\d+)?(?![\d.]*dev)", version)
    values["engine"] = f"{server}@{number[0]}" if number else log.engine if log.text("version") else server
    if log.text("version"):
        del values["engine"]
    logged = completed(Form(values, several=False), log)
    stated = record.get("gpu")
    named = [gpu_named(text) for text in ([stated] if isinstance(stated, str) else stated or ())]
    machines = machines_of(logged.form, log)[0] or [spec for spec in named if spec is not None]
    total = failure.figures.total_bytes
    stated_total = (record.get("figures") or {}).get("total_gib")
    size = total.bytes if total is not None else round(stated_total * GIB) if stated_total else None
    if size and not log.first("total_memory"):
        machines = [with_memory(machines[0], size) if machines else custom_gpu(size)]
    if not size and not log.first("total_memory") and not isinstance(stated, str):
        machines = smallest(log, machines) if started else []
    if not machines:
        raise NotAsked("no GPU")
    query = replace(logged.query(machines[:1]), context_of=None)
    request = requests(query).requests[0]
    free = log.first("free_at_start")
    is_stated = failure.cause == "free_memory_below_utilization" and failure.figures.free_bytes is not None
    free_now = failure.figures.free_bytes.bytes if is_stated else None if free is None else free.size
    count = record.get("n_gpus") or (failure.figures.gpus if failure.cause == "too_few_gpus" else None)
    return request, played(request, free_now, min(count or 64, 64))


def smallest(log: ServerLog, hinted: list[GpuSpec]) -> list[GpuSpec]:
    """The smallest GPU of those named beside a log, or of all, that holds the weights and the pool that it states."""
    weights, pool = log.first("weights"), log.least("available_kv")
    if weights is None or pool is None:
        return []
    offered = [spec for spec in map(gpu, offered_names()) if spec.vendor == "nvidia" and not spec.unified]
    known = hinted or offered
    room = [spec for spec in known if spec.total_memory * share_of(log) >= weights.size + pool.size]
    return sorted(room, key=lambda spec: spec.total_memory)[:1]


def share_of(log: ServerLog) -> float:
    try:
        return float(log.flags.get("gpu_memory_utilization", ""))
    except ValueError:
        return 0.9


def played(request: Request, free: int | None, count: int) -> Machine:
    """A machine with so many GPUs of the request's kind, idle but for what the log says."""
    total = request.gpu.total_memory
    context = 0 if free is None else 500 << 20  # the line is written with the server's own context on the GPU
    left = total if free is None else min(total, free + context)
    memory = DeviceMemory(total, 0, total - left, left, is_host=request.gpu.unified)
    card = LiveGpu(0, request.gpu.device_name, False, request.gpu.compute_capability, memory)
    return Machine(gpus=(card,) * max(1, count))


def answer(request: Request, machine: Machine) -> Verdict:
    if request.gpu.unified and machine.gpus[0].memory.used == 0:
        raise NotAsked("what the host used of a memory that it shares")
    return verdict(request, machine, Limits())


def score_failures(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for record in records:
        if "state" in record:
            if record["state"] not in ("never started", "offline run failed") or "ut of memory" not in str(
                record["cause"]
            ):
                continue
            record = {"cure": (), "engine": record["server"], **record, "model": None}
        elif record["cause"] not in OF_STARTS or record["cause"] in SERVING:
            continue
        row = {"id": record["id"], "cause": record["cause"], "model": record["model"], "gpu": record["gpu"]}
        try:
            result = answer(*question(record))
        except (NotAsked, KvplanError) as error:
            yield {**row, "verdict": "not asked", "why": str(error)[:160], "cure": None}
            continue
        labels = cure_kinds({**record, "cure_confirmed": True})
        cures = [] if result.outcome == "starts" else fixes(result.plan, None)[1]
        kinds = [kinds_of(cure) for cure in cures]
        cure = None if not labels else "right" if any(set(labels) & kind for kind in kinds) else "wrong"
        why = result.decisive.text[:160] if result.decisive is not None else ""
        planned = any(cure.starts for cure in cures)
        yield {**row, "verdict": VERDICTS[result.outcome], "why": why, "cure": cure,
               "labels": labels, "planned": planned, "cures": [list(cure.flags) for cure in cures]}  # fmt: skip


def score_started(starts: Iterable[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    for name, start in starts:
        try:
            result = start()
        except (NotAsked, accuracy.Unscorable, accuracy.NotAsked, accuracy.NotStated, KvplanError) as error:
            yield {"id": name, "verdict": "not asked", "why": str(error)[:160]}
            continue
        why = "" if result.decisive is None else f"{result.plan.request.release.label}: {result.decisive.text[:160]}"
        yield {"id": name, "verdict": VERDICTS[result.outcome], "why": why}


def of_logs(records: Iterable[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    for record in records:
        served = OUTCOMES.get(record["state"], ("failed",))[0]
        if served in HEALTHY or record["state"] == "crashed while serving":
            yield record["id"], lambda record=record: answer(*question(without_labels(record), started=True))


def without_labels(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "engine": record["server"], "model": None}


def of_cases(file: Path, models: Path | None) -> Iterator[tuple[str, Any]]:
    for case in accuracy.read_cases(file):
        if isinstance(case, accuracy.Malformed) or (case.measured.get("max_concurrency") or 0) < 1:
            continue  # a log of a pool that held less than a request is of no server that started

        def start(case: accuracy.Case = case) -> Verdict:
            inputs = accuracy.inputs_of(case, accuracy.Models(models))
            if inputs.gpu is None or inputs.number < vllm.OLDEST:
                raise NotAsked("no GPU, or a release that is not modeled")
            request = Request(inputs.spec, inputs.gpu, inputs.args, inputs.release, draft=inputs.draft)
            return answer(request, played(request, None, 64))

        yield f"case {case.id}", start


def show(title: str, rows: list[dict[str, Any]], *, every: bool) -> None:
    counts = Counter(row["verdict"] for row in rows)
    print(
        f"{title:22}{len(rows):6}{counts['refused']:9}{counts['risk']:6}{counts['started']:9}{counts['not asked']:11}",
        end="",
    )
    cures = Counter(row["cure"] for row in rows if row.get("cure"))
    refused = [row for row in rows if row["verdict"] in ("refused", "risk")]
    with_fix = sum(row.get("planned", False) for row in refused)
    print(f"{with_fix:8}{cures['right']:5} of {cures.total()}" if "cure" in rows[0] else "")
    for row in rows if every else ():
        print("   ", row["verdict"], row["id"], row.get("cause", ""), row.get("model", ""), "|", row["why"], "|",
              row.get("labels", ""), row.get("cures", ""))  # fmt: skip


def processor_ratio(runs: int) -> float:
    """Median processor time of the command over a bare interpreter's, both run in turn."""
    words = [
        sys.executable,
        "-m",
        "kvplan",
        "preflight",
        "-q",
        "vllm serve Qwen/Qwen3-8B --max-model-len 8192",
        "--gpu",
        "l40s",
    ]
    ratios = []
    for _ in range(runs + 1):
        times = []
        for argv in ([sys.executable, "-c", "pass"], words):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(argv, check=True, capture_output=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""})
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        ratios.append(times[1] / times[0])
    return sorted(ratios[1:])[runs // 2]


def records_of(files: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(text) for file in files for text in file.read_text("utf-8").splitlines() if text.strip()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="*")
    parser.add_argument("--logs", type=Path, nargs="*", default=[], help="whole logs with their state")
    parser.add_argument("--cases", type=Path, help="servers that started, as the scoreboard reads them")
    parser.add_argument("--models", type=Path, help="folders of configs that the catalog lacks")
    parser.add_argument("--json", type=Path, help="write every row to this file")
    parser.add_argument("--show", action="store_true", help="list every row")
    parser.add_argument("--runs", type=int, default=0, help="measure the command's processor time so many times")
    args = parser.parse_args()
    tables = {
        "failed starts": list(score_failures(records_of([*args.file, *args.logs]))),
        "logs of started ones": list(score_started(of_logs(records_of(args.logs)))),
        "cases of started ones": list(score_started(of_cases(args.cases, args.models))) if args.cases else [],
    }
    print(f"{'':22}{'all':>6}{'refused':>9}{'risk':>6}{'started':>9}{'not asked':>11}{'fixed':>8}{'  cure':>5}")
    for title, rows in tables.items():
        if rows:
            show(title, rows, every=args.show)
    if args.runs:
        print(f"processor time: {processor_ratio(args.runs):.1f} times a bare interpreter's")
    if args.json:
        args.json.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
