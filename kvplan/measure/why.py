"""Finding the cause in a failed server's log, and fixes planned with the log's own figures."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from kvplan.asked.form import Form, source_of
from kvplan.asked.log import check_model, completed, engine_of, machines_of, model_of
from kvplan.asked.question import requests, resolve
from kvplan.core.errors import KvplanError
from kvplan.core.files import printable
from kvplan.core.units import MIB, TIB, format_gib
from kvplan.hardware.gpu import GpuSpec, custom_gpu, of_total, with_memory
from kvplan.measure.diagnosis import Diagnosis, Inference
from kvplan.measure.failure import Failure, read_failure
from kvplan.measure.serverlog.asked import asked_words, cured
from kvplan.measure.serverlog.drafts import with_draft
from kvplan.measure.serverlog.log import parse_log
from kvplan.planning import cures as planning
from kvplan.planning.case import Case
from kvplan.planning.cures import Anchor
from kvplan.planning.plan import Request, plan
from kvplan.servers.base import OWN, failures_of_servers, parse_engine
from kvplan.servers.logs.log import ServerLog

AFTER_LOAD: Final = ("profile", "pool", "capture", "warmup", "serving")
PREEMPTION: Final = "preemption"  # cause of a server that runs but preempts requests


def diagnose(form: Form, lines: Sequence[str]) -> Diagnosis:
    """Find what happened, and the fixes.

    form  of what the log does not state
    """
    failure = read_failure(lines)
    log = failure.log or parse_log("\n".join(lines), bare=True)
    named = next((name for name, own in failures_of_servers().items() if failure.cause in own.causes), None)
    server = failure.server or named or log.engine
    if server in OWN:
        return diagnose_own(form, failure, log)
    setup = Setup(form, failure, log, server)
    cause = failure.cause or kind_of(failure)
    request = setup.request() if cause not in ("unknown", planning.OUT_OF_MEMORY) else None
    weights, free, before = log.first("weights"), log.least("free_after_load"), log.least("free_mib")
    case = Case(server, cause, failure.figures, gpu_known=setup.gpu_known, args=settings_of(failure, log),
        evidence=" ".join(line.text for line in failure.evidence), total=total_of(failure, log),
        gpu=next((machine.name for machine in setup.logged()), None),
        weights=None if weights is None else weights.size, free_after_load=None if free is None else free.size,
        free_before_load=None if before is None else round(before.value * MIB),
    )  # fmt: skip
    base, anchor, differs = None, planning.Anchor({}), setup.problem
    if request is not None:
        differs = disagreement(failure, request)
        if differs is None:
            pool, anchor, differs = anchored(failure, request, log)
            base = anchor.plan(request)
            case = replace(case, request=request, pool=pool)
        if differs is not None:
            base, case = None, replace(case, request=None)
    results = tuple(planning.cures(case))
    words = asked_words(lines, log.engine)
    commands = tuple(cured(case, cure, words) for cure in results)
    return Diagnosis(
        failure,
        log,
        case,
        request,
        base,
        anchor,
        results,
        commands,
        tuple(setup.inferred),
        tuple(setup.missing),
        differs,
    )


def diagnose_own(form: Form, failure: Failure, log: ServerLog) -> Diagnosis:
    """The bundled engine's start: its log states its settings, and its rules are its own."""
    from kvplan.planning.own_cures import own_cures

    inferred, spec = list[Inference](), None
    name, note = (form.text("model"), None) if form.text("model") is not None else model_of(log)
    if name is not None:
        if note is not None:
            inferred.append(Inference("model", name, f"its name in the log, {printable(log.model or '', 100)}"))
        with suppress(KvplanError):
            spec = resolve(name, source_of(form, form.text("revision"))).spec
    cause = failure.cause or kind_of(failure)
    evidence = " ".join(line.text for line in failure.evidence)
    case = Case("kvplan", cause, failure.figures, evidence=evidence, total=total_of(failure, log))
    results = tuple(own_cures(cause, failure.figures, evidence, log, spec)) if failure.outcome != "started" else ()
    none = tuple(None for _ in results)
    return Diagnosis(failure, log, case, None, None, Anchor({}), results, none, tuple(inferred), (), None)


def total_of(failure: Failure, log: ServerLog) -> int | None:
    """The GPU's memory in bytes according to the log."""
    stated, started = failure.figures.total_bytes, log.first("total_memory")
    return stated.bytes if stated is not None else None if started is None else started.size


def kind_of(failure: Failure) -> str:
    """Kind of problem to fix if there is no known cause."""
    if failure.figures.preemptions:
        return PREEMPTION
    return planning.OUT_OF_MEMORY if failure.memory_question and failure.phase is None else "unknown"


SHARES: Final = ("gpu_memory_utilization", "mem_fraction_static")


def settings_of(failure: Failure, log: ServerLog) -> dict[str, Any]:
    """The server's arguments according to the log; utilizations as numbers."""
    shares: dict[str, float] = {}
    for name in SHARES:
        with suppress(ValueError):
            shares[name] = float(log.flags.get(name, ""))
    others = {name: text for name, text in log.flags.items() if name not in SHARES}
    return {**others, **dict.fromkeys(failure.settings, True), **shares}


def other_estimate(failure: Failure, request: Request) -> str | None:
    """A note if the server's own estimate of the longest request differs from the plan's by a block or more."""
    stated, within = failure.figures.estimated_max_len, planning.estimate_range(failure.figures, request)
    if not stated or within is None or within[0] <= stated <= within[1]:
        return None
    return (
        f"the log estimates {stated:,} tokens at most, and the plan of {request.spec.name} {within[0]:,} to "
        f"{within[1]:,} for as many bytes: it may be another release, or other flags"
    )


def anchored(failure: Failure, request: Request, log: ServerLog) -> tuple[int | None, Anchor, str | None]:
    """(the logged pool, the shift of the plan to the log, why there is none)."""
    if failure.phase in AFTER_LOAD and planning.is_too_heavy(request):
        return (
            None,
            Anchor({}),
            (
                f"its weights were loaded, but by the plan those of {request.spec.name} are more than a GPU of "
                f"{format_gib(request.gpu.total_memory)} has: say over how many they were split with --tp N"
            ),
        )
    logged = log.least("available_kv")
    stated = None if logged is None else logged.size - logged.rounding
    pool = planning.stated_pool(failure.figures, request, failure.cause or "", stated)
    anchor = planning.anchor_of(request, pool)
    if anchor.beyond and pool is not None:
        return (
            None,
            Anchor({}),
            (
                f"the log has {format_gib(pool)} for the KV cache, {format_gib(anchor.beyond)} more than the weights "
                f"of {request.spec.name} leave by the plan: it may be another checkpoint, or other flags"
            ),
        )
    return pool, anchor, None


def disagreement(failure: Failure, request: Request) -> str | None:
    """Why the request cannot be the logged server's, because one request needs other bytes, or None if the bytes agree
    with all logged digits.
    """
    needed, context = failure.figures.needed_bytes, failure.figures.context
    if needed is None or context is None:
        return None
    try:
        by_plan = plan(replace(request, args=replace(request.args, max_model_len=context))).bytes_per_request
    except KvplanError as error:
        return f"{error}"
    if needed.low <= by_plan <= needed.high:
        return other_estimate(failure, request)
    return (
        f"by the plan of {request.spec.name} one request of {context:,} tokens needs {by_plan / 2**30:,.2f} GiB, and "
        f"the log says {needed.bytes / 2**30:,.2f} GiB: it may be another model, or other flags"
    )


class Setup:
    """The server's request, combined from the options, the log, and what follows from them."""

    def __init__(self, form: Form, failure: Failure, log: ServerLog, server: str) -> None:
        self.form, self.failure, self.log, self.server = form, failure, log, server
        self.inferred: list[Inference] = []
        self.missing: list[str] = []
        self.gpu_known = True
        self.problem: str | None = None
        self.draft: str | None = None  # what is known of its drafts, if it speculates

    def request(self) -> Request | None:
        """The request, or None if no plan can be made; `missing` or `problem` then says why."""
        model, machine = self.model(), self.machine()
        if model is None:
            self.missing.insert(0, "--model NAME")
            return None
        if machine is None and self.failure.figures.available_bytes is None:
            return None
        figures = self.failure.figures
        stated: dict[str, Any] = {"model": model or None, "engine": self.engine()}
        if figures.context is not None:
            stated |= {"max_model_len": [str(figures.context)]}
        if figures.max_num_seqs is not None:
            stated |= {"max_num_seqs": str(figures.max_num_seqs)}
        if figures.utilization is not None and figures.utilization <= 1:
            stated |= {"gpu_memory_utilization": str(figures.utilization)}
        try:
            logged = completed(self.form.changed(**{**stated, **self.form.values}), self.log)
            plain = requests(logged.query([machine or custom_gpu(TIB)])).requests[0]
            check_model(self.log, plain.spec)
            request, notes = with_draft(self.log, plain)
            self.gpu_known = machine is not None
            if notes:
                self.draft = notes[0]
                if request.args is plain.args:
                    self.problem = notes[0]
                    return None
                plan(request)  # drafts with its other flags may be refused
            return request
        except KvplanError as error:
            self.problem = (
                f"{error}" if self.draft is None else f"the server drafts tokens, which is not sized: {error}"
            )
            return None

    def model(self) -> str | None:
        if self.form.names_model:
            return self.form.text("model") or ""
        name, note = model_of(self.log)
        if name is not None and note is not None:
            logged = printable(self.log.model or "", 100)
            self.inferred.append(Inference("model", name, f"its name in the log, {logged}"))
        return name

    def engine(self) -> str:
        if (engine := self.form.text("engine")) is not None:
            return engine
        logged = engine_of(self.log) if self.log.text("version") else None
        if logged is not None:
            return logged
        newest, words = parse_engine(self.server), self.failure.releases
        source = "the log names no release; the newest known is assumed"
        if words is not None:
            with suppress(KvplanError):
                last = parse_engine(f"{self.server}@{words[1]}")
                source = f"its wording matches {words[0]} to {words[1]}; the newest of these is assumed"
                newest = min(newest, last, key=lambda release: release.number)
        self.inferred.append(Inference("engine", newest.label, source))
        self.missing.append(f"--engine {newest.label.partition('@')[0]}@RELEASE")
        return newest.label

    def logged(self) -> list[GpuSpec]:
        """The GPU that is given or that the log names, if either."""
        return list(machines_of(self.form, self.log)[0])

    def machine(self) -> GpuSpec | None:
        """The GPU that is given, or that the log names, or that has the logged capacity."""
        is_stated = self.form.names_gpu
        machines = self.logged()
        if not machines:
            machines = self.of_capacity()
        if not machines:
            self.missing.append("--gpu NAME")
            return None
        if len(machines) > 1 or (not is_stated and self.log.text("gpu") is None):
            names = " or ".join(machine.name for machine in machines)
            total = machines[0].total_memory / 2**30
            self.inferred.append(Inference("gpu", names, f"a capacity of {total:,.2f} GiB"))
        return machines[0]

    def of_capacity(self) -> list[GpuSpec]:
        total = self.failure.figures.total_bytes
        if total is None or total.bytes <= 0:
            return []
        near = of_total(lambda spec: spec.total_memory_low <= total.high and total.low <= spec.total_memory_high)
        return [with_memory(candidate, total.bytes) for candidate in near] or [custom_gpu(total.bytes)]
