"""`kvplan profile --server URL` and `--command '...'`: a load test of a real server, measured from outside."""

import json
import math
import random
import shlex
import statistics
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, get_args
from urllib.parse import urlsplit

from kvplan.asked.form import flag_of
from kvplan.cli import output
from kvplan.cli.profile_load import default_dir, requests_of, seed_of
from kvplan.cli.run_options import ProfileOptions
from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.core.files import path_text, printable
from kvplan.core.table import Table, Value, flattened
from kvplan.core.units import format_gib, parse_count, parse_duration, plural
from kvplan.documents.server_run import Pool, ServerRunDocument, Times
from kvplan.measure import server_run
from kvplan.measure.server_metrics import MetricsError, ServerStats
from kvplan.report.formats import CommandAnswer
from kvplan.report.lines import line
from kvplan.report.page import heading
from kvplan.report.simulate_text import duration
from kvplan.servers.base import SERVERS, server_of
from kvplan.servers.words import shell
from kvplan.workloads.planned import PlannedRequest
from kvplan.workloads.profiles import parse_rate

if TYPE_CHECKING:
    from kvplan.measure.drive import Driven
    from kvplan.report.lines import Part
    from kvplan.report.page import Block

# Options for requests and measurement; all other options of `profile` concern its own engine.
TAKEN: Final = frozenset(
    (
        "model", "run_dir", "server", "command", "num_seqs", "prompt_tokens", "output_tokens", "lengths", "trace",
        "shared_prefix", "rate", "max_concurrency", "seed", "interval", "timeout", "quiet", "format", "color",
    )
)  # fmt: skip
READY_S: Final = 600.0  # for a server to start
Metric = Literal["ttft", "tpot", "e2el"]
METRICS: Final[dict[Metric, str]] = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "e2el": "whole request",
}
Statistic = Literal["mean", "p50", "p90", "p99"]
STATISTICS: Final[tuple[Statistic, ...]] = get_args(Statistic)
Plain = Literal["num_requests", "num_failed", "seconds", "requests_per_s", "output_tokens_per_s", "gpu_used"]
PLAIN: Final[tuple[Plain, ...]] = get_args(Plain)  # figures shown as in the document
EARLY_END: Final = 4


def profile_server(options: ProfileOptions) -> int:
    """Send the requests, measure, print, and return 0, or 4 if no request succeeded."""
    refuse_engine_options(options)
    try:
        from kvplan.measure import drive
    except ImportError:
        raise EnvironmentProblem(
            "profile --server", "httpx2 is not installed", "pip install '.[client]' in kvplan's sources"
        ) from None
    requests, shared = requests_of(options)
    rate = None if options.rate is None else parse_rate(options.rate, "--rate")
    requests = paced(requests, rate, seed_of(options), has_times=options.trace is not None)
    limit = (
        None if options.max_concurrency is None else parse_count(options.max_concurrency, "--max-concurrency", 10**5)
    )
    interval = parse_duration(options.interval or "200ms", "--interval")
    timeout = None if options.timeout is None else parse_duration(options.timeout, "--timeout")
    base = base_of(options)
    if options.command is not None:
        server_run.refuse_taken(base)
    target = server_run.created(Path(options.run_dir) if options.run_dir else default_dir("server"))
    seed = seed_of(options) if options.seed is not None else random.SystemRandom().getrandbits(32)
    driven = drive.Driven(options.model or "", len(requests))
    peaks = server_run.Peaks()
    try:
        with ExitStack() as stack:
            started = None
            if options.command is not None:
                started = stack.enter_context(server_run.running(options.command, target / server_run.LOG))
                tell(options, f"profile: waiting for {base}; it prints to {path_text(target / server_run.LOG)}")
            ready = timeout or READY_S if started else min(timeout or 10.0, READY_S)
            server_run.wait_until_ready(base, started, ready)
            driven.model = driven.model or drive.model_of(base)
            page, before = server_run.page_of(base)
            if page is None:
                output.tell("warning", f"{base}/metrics: {before}; the answer has no figures of the KV cache")
            else:
                (target / server_run.BEFORE).write_text(before, encoding="utf-8")
            gpus, why = stack.enter_context(server_run.local_gpus())
            if why is not None:
                tell(options, f"profile: {why}; memory is not sampled")
            tell(options, f"profile: {plural(len(requests), 'request')} to {printable(driven.model, 100)} at {base}")
            sampler = server_run.Sampler(page, gpus, target / server_run.SAMPLES, interval, peaks)
            with sampler.sampling():
                drive.drive(
                    driven, base, requests, shared_prefix=shared, max_concurrency=limit, seed=seed, timeout_s=timeout,
                    token_ids=drive.token_ids_of(base, driven.model),
                )  # fmt: skip
            if page is not None:
                with suppress(MetricsError):
                    (target / server_run.AFTER).write_text(page.text(), encoding="utf-8")
            if sampler.failure or (sampler.missed and not driven.early):
                missed = sampler.failure or f"{sampler.missed} samples missed ({sampler.reason})"
                output.tell("warning", f"profile: {missed}")
    except BaseException:
        if driven.requests:
            driven.early = driven.early or "interrupted"
            concluded(options, base, target, driven, peaks, rate, limit)
        raise
    return concluded(options, base, target, driven, peaks, rate, limit)


def concluded(
    options: ProfileOptions,
    base: str,
    target: Path,
    driven: "Driven",
    peaks: server_run.Peaks,
    rate: float | None,
    limit: int | None,
) -> int:
    """Write the measurements, print the answer, and return the exit code."""
    from kvplan.measure import drive

    if driven.answered:
        result = drive.bench_result(driven, rate=rate, max_concurrency=limit)
        (target / server_run.BENCH).write_text(json.dumps(result) + "\n", encoding="utf-8")
    if driven.early:
        ended = f"{len(driven.answered):,} of {plural(driven.num_requests, 'request')} answered"
        output.tell("error", f"profile: {driven.early}, {ended}; what was measured is in {path_text(target)}")
    if driven.requests:
        document = document_of(base, target, driven, peaks)
        output.answer(answer(document, log=options.command is not None), options.format, options.color)
    return 0 if driven.answered and not driven.early else EARLY_END


def tell(options: ProfileOptions, text: str) -> None:
    if not options.quiet:
        output.tell("note", text)


def refuse_engine_options(options: ProfileOptions) -> None:
    """Raise UsageError for an option of the bundled engine: the server has its own."""
    default = ProfileOptions()
    for field in fields(options):
        if field.name not in TAKEN and getattr(options, field.name) != getattr(default, field.name):
            raise UsageError(
                flag_of(field.name),
                "works only with the bundled engine",
                "remove it, or give it to the server's command",
            )


def base_of(options: ProfileOptions) -> str:
    """The server's base address, without a trailing slash: as given, else where the command's server listens."""
    if options.server is not None:
        url = urlsplit(options.server if "://" in options.server else f"http://{options.server}")
        if url.scheme not in ("http", "https") or not url.hostname:
            text = printable(options.server, 100)
            raise UsageError(f"--server {text!r}", "is not an address", "write http://localhost:8000")
        return f"{url.scheme}://{url.netloc}{url.path.rstrip('/').removesuffix('/v1')}"
    assert options.command is not None
    words = server_run.words_of(options.command)
    port = next((value for value in map(port_in, zip(words, [*words[1:], ""], strict=True)) if value), None)
    return f"http://localhost:{port or default_port(options.command)}"


def port_in(pair: tuple[str, str]) -> str | None:
    """Port in two consecutive words: `--port 8001`, `--port=8001`."""
    flag, equals, value = pair[0].partition("=")
    text = value if equals else pair[1]
    return text if flag == "--port" and text.isdecimal() else None


def default_port(command: str) -> int:
    """Default port of the server that a command starts. Raise UsageError if the server is unknown."""
    for words in shell.split(command):
        for name in SERVERS:
            if server_of(name).pasted().start(words) is not None:
                return server_of(name).launch().port
    raise UsageError("--command", "names no port and no server that kvplan knows", "add --server URL")


def paced(
    requests: tuple[PlannedRequest, ...], rate: float | None, seed: int, *, has_times: bool
) -> tuple[PlannedRequest, ...]:
    """The requests at a rate, as a Poisson process; without a rate, at the trace's times or all at once."""
    if rate is None or rate == math.inf:
        return (
            requests if rate is None and has_times else tuple(replace(request, arrival_s=0.0) for request in requests)
        )
    from kvplan.simulate.arrivals import Process

    times = Process().times(((rate, math.inf),), seed)
    return tuple(replace(request, arrival_s=arrival) for request, arrival in zip(requests, times, strict=False))


# --- the answer -------------------------------------------------------------------------------------------------------


def times_of(values: Sequence[float]) -> Times | None:
    from kvplan.measure.drive import percentile

    if not values:
        return None
    p50, p90, p99 = (percentile(values, percent) for percent in (50, 90, 99))
    return {"mean": statistics.fmean(values), "p50": p50, "p90": p90, "p99": p99}


def pool_of(target: Path, peaks: server_run.Peaks) -> Pool | None:
    """Figures of the pool from the pages at both ends and the samples between."""
    first, last = (server_run.stats_of(target / name) for name in (server_run.BEFORE, server_run.AFTER))
    if first is None or last is None:
        return None
    return {
        "tokens": last.kv_tokens,
        "peak_usage": peaks.kv_usage,
        "peak_running": peaks.running,
        "peak_waiting": peaks.waiting,
        "preemptions": grown(first, last, "preemptions"),
        "hit_rate": hit_rate(first, last),
    }


def grown(first: ServerStats, last: ServerStats, figure: str) -> int | None:
    before, after = getattr(first, figure), getattr(last, figure)
    return None if before is None or after is None or after < before else after - before


def hit_rate(first: ServerStats, last: ServerStats) -> float | None:
    hits, queries = (grown(first, last, figure) for figure in ("prefix_hits", "prefix_queries"))
    return hits / queries if hits is not None and queries and hits <= queries else None


def document_of(base: str, target: Path, driven: "Driven", peaks: server_run.Peaks) -> ServerRunDocument:
    answered, times = driven.answered, driven.times()
    outputs = sum(request.output_tokens for request in answered)
    return {
        "schema": "kvplan/server-run@1",
        "url": base,
        "model": driven.model,
        "directory": str(target),
        "num_requests": len(driven.requests),
        "num_failed": len(driven.failed),
        "failures": list(dict.fromkeys(request.error for request in driven.failed))[:3],
        "seconds": driven.seconds,
        "prompt_tokens": sum(request.prompt_tokens for request in answered),
        "output_tokens": outputs,
        "requests_per_s": len(answered) / driven.seconds,
        "output_tokens_per_s": outputs / driven.seconds,
        "ttft": times_of(times["ttft"]),
        "tpot": times_of(times["tpot"]),
        "e2el": times_of(times["e2el"]),
        "pool": pool_of(target, peaks),
        "gpu_used": peaks.gpu_used,
    }


def headline(doc: ServerRunDocument) -> str:
    who = f"{printable(doc['model'], 100)} at {doc['url']}"
    answered = doc["num_requests"] - doc["num_failed"]
    if not answered:
        reason = printable(doc["failures"][0], 200)
        return f"{who}: none of {plural(doc['num_requests'], 'request')} was answered ({reason})"
    of = f" of {doc['num_requests']:,}" if doc["num_failed"] else ""
    text = f"{who}: {answered:,}{of} requests in {duration(doc['seconds'])}, "
    text += f"{doc['output_tokens_per_s']:,.0f} output tokens/s"
    pool = doc["pool"]
    if pool is not None and pool["peak_usage"] is not None:
        text += f"; KV cache up to {pool['peak_usage']:.0%} full"
    return text


def rows_of(doc: ServerRunDocument) -> list[tuple[str, str]]:
    """Figures other than times, as text."""
    rows = [
        ("requests per second", f"{doc['requests_per_s']:,.2f}"),
        ("tokens", f"{doc['prompt_tokens']:,} in, {doc['output_tokens']:,} out"),
    ]
    pool = doc["pool"]
    if pool is not None:
        tokens = "" if pool["tokens"] is None else f" of {pool['tokens']:,} tokens"
        named: list[tuple[str, str | None]] = [
            ("KV cache, highest sample", None if pool["peak_usage"] is None else f"{pool['peak_usage']:.1%}{tokens}"),
            ("running, highest sample", None if pool["peak_running"] is None else f"{pool['peak_running']:,}"),
            ("waiting, highest sample", None if pool["peak_waiting"] is None else f"{pool['peak_waiting']:,}"),
            ("preemptions", None if pool["preemptions"] is None else f"{pool['preemptions']:,}"),
            ("prefix cache hits", None if pool["hit_rate"] is None else f"{pool['hit_rate']:.0%} of tokens"),
        ]
        rows += [(name, text) for name, text in named if text is not None]
    if doc["gpu_used"] is not None:
        rows.append(("GPU memory, highest sample", format_gib(doc["gpu_used"])))
    if doc["num_failed"]:
        rows.append(("failed", f"{doc['num_failed']:,}: {printable('; '.join(doc['failures']), 200)}"))
    return rows


def tables(doc: ServerRunDocument) -> list[Table]:
    timed = [(name, doc[key]) for key, name in METRICS.items()]
    cells = ((name, *(duration(times[part]) for part in STATISTICS)) for name, times in timed if times is not None)
    return [Table.of(("time", *STATISTICS), cells), Table.of(("figure", "measured"), rows_of(doc), left=2)]


def next_steps(doc: ServerRunDocument, *, log: bool) -> list[str]:
    """Commands that can analyze the run."""
    name = shlex.quote(doc["directory"])
    steps = []
    if doc["num_requests"] > doc["num_failed"]:
        steps.append(
            f"kvplan reconcile --bench {name}/{server_run.BENCH} --gpu NAME   # compared with the planned times"
        )
    if doc["pool"] is not None:
        pages = f"{name}/{server_run.BEFORE} {name}/{server_run.AFTER}"
        steps.append(f"kvplan rightsize {pages} --interval {doc['seconds']:.3g}s   # how much of it was used")
    if log:
        steps.append(f"kvplan reconcile --log {name}/{server_run.LOG}   # memory, planned and logged")
    return steps


def answer(doc: ServerRunDocument, *, log: bool) -> CommandAnswer:
    steps = next_steps(doc, log=log)

    def screen(_: bool) -> "list[Part]":
        parts: list[Part] = [line(headline(doc), "bold"), line()]
        for table in tables(doc):
            parts += [table, line()]
        return [*parts, *(line(step, "dim") for step in steps)]

    def page() -> "list[Block]":
        return [heading(2, headline(doc)), *tables(doc)]

    def rows() -> Table:
        values: list[tuple[str, Value]] = [
            (f"{key}_{part}", times[part]) for key in METRICS if (times := doc[key]) is not None for part in STATISTICS
        ]
        values += [(key, doc[key]) for key in PLAIN]
        values += flattened(doc["pool"] or {})
        return Table.of(("figure", "value"), values)

    return CommandAnswer(screen, lambda: doc, rows, page)
