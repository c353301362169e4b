"""`kvplan watch`: a live view of a GPU, a process and servers; a line per interval if there is no terminal."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvplan.cli import output
from kvplan.cli.run_options import WatchOptions
from kvplan.cli.watch_view import Planned, Screen, Show, lines_to, live
from kvplan.core.errors import EnvironmentProblem, InvalidInputError, UsageError
from kvplan.core.files import load_json, path_text, printable
from kvplan.core.units import parse_count, parse_duration
from kvplan.hardware.nvml import Device, DeviceError, Nvml, open_nvml
from kvplan.measure.server_metrics import MetricsPage, checked_url, shown_url
from kvplan.measure.watch import CsvLog, ProcessEnded, Watched, WatchedPage, WatchedProcess, columns, csv_rows

LIVE_INTERVAL_S = 1.0
LINE_INTERVAL_S = 10.0
LEAST_INTERVAL_S = 0.02
PATIENCE_S = 1.0  # most that a reading waits for the server's page; also at most a quarter of the interval
MAX_PID = 2**22  # of Linux
TRIES = 5  # consecutive failed readings of a server that never responded
MAX_TRIES = 10**9


def watch(options: WatchOptions) -> int:
    """Read and show until the duration is over, the process exits or the user interrupts."""
    is_live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    interval = LIVE_INTERVAL_S if is_live else LINE_INTERVAL_S
    if options.interval is not None:
        interval = parse_duration(options.interval, "--interval", LEAST_INTERVAL_S)
    duration = None if options.duration is None else parse_duration(options.duration, "--duration")
    with ExitStack() as stack:
        names = server_names(options)
        urls = options.metrics or []
        pages = tuple(watched_page(url, interval / len(urls)) for url in urls)  # they share the patience
        patience = tries_of(options)
        planned = planned_pool(options)
        pid = None if options.pid is None else parse_count(options.pid, "--pid", MAX_PID)
        log = None if options.csv is None else stack.enter_context(CsvLog(options.csv, columns(len(pages))))
        nvml, device = open_device(options, stack)
        watched = Watched(device, pid, find_process(pid, device), pages, names)
        screen = Screen(watched, heading(nvml, device), nvml, planned)
        stack.enter_context(output.standard_output())
        show = live(stack, screen, options.color) if is_live else lines_to(sys.stdout, screen)
        run(watched, ticks(interval, duration), log, show, patience)
    return 0


@dataclass(frozen=True, slots=True)
class Tries:
    """Consecutive failures of every server's page that end watching; None: unlimited.

    at_first  before a page's first response
    later     after it
    """

    where: str = "--metrics"
    at_first: int | None = TRIES
    later: int | None = None

    def check(self, pages: Sequence[WatchedPage]) -> None:
        """Raise EnvironmentProblem once every page has failed that often in a row."""
        if not pages or not all(self._is_over(page) for page in pages):
            return
        problem = f"{pages[0].problem} after {times_text(pages[0].failures)}"
        others = "" if len(pages) == 1 else f", and so with {len(pages) - 1:,} more"
        raise EnvironmentProblem(self.where, f"{problem}{others}", "start the server, or wait for it with --tries 0")

    def _is_over(self, page: WatchedPage) -> bool:
        limit = self.later if page.has_answered else self.at_first
        return limit is not None and page.failures >= limit


def times_text(count: int) -> str:
    return "1 try" if count == 1 else f"{count:,} tries in a row"


def tries_of(options: WatchOptions) -> Tries:
    """Limits from --tries, else the defaults."""
    if options.tries is not None and not options.metrics:
        raise UsageError("--tries", "needs a server's metrics page", "add --metrics URL")
    where = f"--metrics {shown_url((options.metrics or [''])[0])}"
    if options.tries is None:
        return Tries(where)
    limit = parse_count(options.tries, "--tries", MAX_TRIES, least=0) or None
    return Tries(where, limit, limit)


def run(watched: Watched, elapsed: Iterator[float], log: CsvLog | None, show: Show, tries: Tries | None = None) -> None:
    """Take a reading at each tick: log it first, then show it."""
    for seconds in elapsed:
        try:
            reading = watched.read(seconds)
        except ProcessEnded:
            output.tell("note", f"process {watched.pid} has ended")
            return
        if log is not None:
            for row in csv_rows(watched, reading):
                log.add(row)
        show(reading)
        if tries is not None:
            tries.check(watched.pages)


def ticks(interval: float, duration: float | None) -> Iterator[float]:
    """Yield elapsed seconds: 0 at once, then multiples of the interval up to the duration; missed ticks are skipped."""
    start = time.monotonic()
    yield 0.0
    count = 0
    while True:
        now = time.monotonic() - start
        count = max(count + 1, int(now // interval) + 1)
        if duration is not None and count * interval > duration + 1e-9:  # 3 * 0.1 is more than 0.3
            return
        time.sleep(max(0.0, count * interval - now))
        yield time.monotonic() - start


# --- what is watched --------------------------------------------------------------------------------------------------


def watched_page(url: str, interval: float) -> WatchedPage:
    return WatchedPage(MetricsPage(url).read, min(PATIENCE_S, interval / 4))


def server_names(options: WatchOptions) -> tuple[str, ...]:
    """Label of each server: host and port, with its path if that is not /metrics."""
    names = []
    for text in options.metrics or ():
        url = checked_url(text)
        name = printable(f"{url.netloc}{url.path}".removesuffix("/metrics"), 200)
        if name in names:
            raise UsageError(f"--metrics {shown_url(text)}", "is named twice", "name each server once")
        names.append(name)
    return tuple(names)


def planned_pool(options: WatchOptions) -> Planned | None:
    """The --plan, or a plan of --model on --gpu. Raise InvalidInputError for a file that holds no plan."""
    flags = {"--model": options.model, "--gpu": options.gpu, "--ctx": options.max_model_len}
    stated = [flag for flag, value in flags.items() if value is not None]
    if options.plan is None and not stated:
        return None
    if not options.metrics:
        raise UsageError(stated[0] if stated else "--plan", "is compared with a server's figures", "add --metrics URL")
    if options.plan is None:
        return pool_of(plan_of(options), "--model")
    if stated:
        raise UsageError("--plan", f"is a plan already and cannot be combined with {stated[0]}", "use only one")
    path = Path(options.plan)
    return pool_of(load_json(path), path_text(path))


def pool_of(plan: object, where: str) -> Planned:
    match plan:
        case {"schema": "kvplan/plan@1", "kv": {"tokens": int() as tokens, "max_model_len": length}} if not isinstance(
            tokens, bool
        ):
            return Planned(tokens, planned_users(plan), count_of(length))
    raise InvalidInputError(where, "is not a plan", "write one with `kvplan estimate ... --format json`")


def plan_of(options: WatchOptions) -> object:
    """Document that `estimate` writes for this model, GPU and context; its notes go to standard error."""
    from kvplan.asked.form import Form, read_form
    from kvplan.asked.question import requests
    from kvplan.documents.artifact import plan_document
    from kvplan.planning.plan import plan

    if options.model is None or options.gpu is None:
        missing = "--model" if options.model is None else "--gpu"
        raise UsageError(missing, "missing", "a plan needs a model and a GPU: --model qwen3-8b --gpu l40s")
    form = Form({"model": options.model, "gpu": options.gpu})
    answer = requests(read_form(form.changed(max_model_len=options.max_model_len)))
    if len(answer.requests) != 1:
        raise UsageError("--gpu or --ctx", "names several plans", "name one GPU and one context")
    output.say(answer, quiet=False)
    return plan_document(plan(answer.requests[0]))


def planned_users(plan: object) -> int | None:
    """Concurrent requests of a plan, over all its replicas."""
    match plan:
        case {"concurrency": {"users": users, "replicas": replicas}}:
            per_replica, number = count_of(users), count_of(replicas)
            return None if per_replica is None or number is None else per_replica * number
    return None


def count_of(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def open_device(options: WatchOptions, stack: ExitStack) -> tuple[Nvml | None, Device | None]:
    """The requested GPU, else the first one that CUDA would use; None if only other things are watched."""
    try:
        nvml = stack.enter_context(open_nvml())
        named = options.gpu_index
        if named is None:
            return nvml, nvml.visible_device(0)
        return nvml, nvml.device(int(named) if named.isascii() and named.isdigit() else named)
    except DeviceError as error:
        if options.gpu_index is not None:
            raise
        if options.pid is None and not options.metrics:
            others = "watch a process with --pid PID or a server with --metrics URL"
            raise error.changed(remedy=f"{error.remedy}; without a GPU, {others}") from error
        if error.reason == "absent":
            output.tell("note", "no GPU found; showing host memory")
        else:
            output.tell("warning", f"{error}; showing host memory")
        return None, None


def find_process(pid: int | None, device: Device | None) -> WatchedProcess | None:
    """The process whose resident memory is shown; a missing one is only an error if no GPU is watched."""
    if pid is None:
        return None
    try:
        return WatchedProcess(pid)
    except EnvironmentProblem as error:
        if device is None:
            raise
        output.tell("note", f"{error}; not showing its resident memory")
        return None


def heading(nvml: Nvml | None, device: Device | None) -> str:
    if nvml is None or device is None:
        return "no GPU"
    cuda = "" if nvml.cuda_version is None else f", CUDA {nvml.cuda_version}"
    return f"{device.label}: {device.name}, driver {nvml.driver_version}{cuda}"
