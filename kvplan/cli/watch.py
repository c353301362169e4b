"""`kvplan watch`: a live view of a GPU, a process and a server; a line per interval where no terminal shows it."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from kvplan.cli import output
from kvplan.cli.run_options import WatchOptions
from kvplan.core.errors import EnvironmentProblem, InvalidInputError, UsageError
from kvplan.core.files import load_json, path_text
from kvplan.core.units import GIB, format_gib, format_size, parse_count, parse_duration
from kvplan.hardware.nvml import Device, DeviceError, DeviceMemory, DeviceSample, HostMemory, Nvml, open_nvml
from kvplan.measure.server_metrics import MetricsPage, ServerStats, shown_url
from kvplan.measure.watch import (
    CsvLog,
    ProcessEnded,
    Reading,
    ServerReading,
    Watched,
    WatchedPage,
    WatchedProcess,
    csv_row,
)
from kvplan.report.lines import Line, line, takes_blocks, write

LIVE_INTERVAL_S = 1.0
LINE_INTERVAL_S = 10.0
LEAST_INTERVAL_S = 0.02
PATIENCE_S = 1.0  # at most, and a quarter of the interval, a reading waits for the server's page
FRESH_S = 1.0  # a page as old as this is shown with its age
MAX_PID = 2**22  # of Linux
TRIES = 5  # readings in a row without a page, of a server that never answered
MAX_TRIES = 10**9
BAR = 40
Show = Callable[[Reading], None]


def watch(options: WatchOptions) -> int:
    """Read and show until the duration is over, the process ends or the user interrupts."""
    is_live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    interval = LIVE_INTERVAL_S if is_live else LINE_INTERVAL_S
    if options.interval is not None:
        interval = parse_duration(options.interval, "--interval", LEAST_INTERVAL_S)
    duration = None if options.duration is None else parse_duration(options.duration, "--duration")
    with ExitStack() as stack:
        page = None if options.metrics is None else watched_page(options.metrics, interval)
        patience = tries_of(options)
        planned = planned_tokens(options)
        pid = None if options.pid is None else parse_count(options.pid, "--pid", MAX_PID)
        log = None if options.csv is None else stack.enter_context(CsvLog(options.csv))
        nvml, device = open_device(options, stack)
        watched = Watched(device, pid, find_process(pid, device), page)
        screen = Screen(watched, heading(nvml, device), nvml, planned)
        stack.enter_context(output.standard_output())
        show = live(stack, screen, options.color) if is_live else lines_to(sys.stdout, screen)
        run(watched, ticks(interval, duration), log, show, patience)
    return 0


@dataclass(frozen=True, slots=True)
class Tries:
    """How often in a row a server's page may fail before watching ends; None: for ever.

    at_first  before its first page
    later     after it
    """

    where: str = "--metrics"
    at_first: int | None = TRIES
    later: int | None = None

    def check(self, page: WatchedPage | None) -> None:
        """Raise EnvironmentProblem once the page has failed as often as that."""
        if page is None:
            return
        most = self.later if page.has_answered else self.at_first
        if most is not None and page.failures >= most:
            times = "1 try" if page.failures == 1 else f"{page.failures:,} tries in a row"
            raise EnvironmentProblem(
                self.where, f"{page.problem} after {times}", "start the server, or wait for it with --tries 0"
            )


def tries_of(options: WatchOptions) -> Tries:
    """The patience that --tries states, else the default."""
    if options.tries is not None and options.metrics is None:
        raise UsageError("--tries", "needs a server's metrics page", "add --metrics URL")
    where = f"--metrics {shown_url(options.metrics or '')}"
    if options.tries is None:
        return Tries(where)
    most = None if options.tries == "0" else parse_count(options.tries, "--tries", MAX_TRIES)
    return Tries(where, most, most)


def run(watched: Watched, elapsed: Iterator[float], log: CsvLog | None, show: Show, tries: Tries | None = None) -> None:
    """A reading at each tick: logged first, then shown."""
    for seconds in elapsed:
        try:
            reading = watched.read(seconds)
        except ProcessEnded:
            output.tell("note", f"process {watched.pid} has ended")
            return
        if log is not None:
            log.add(csv_row(watched, reading))
        show(reading)
        if tries is not None:
            tries.check(watched.page)


def ticks(interval: float, duration: float | None) -> Iterator[float]:
    """Elapsed seconds: 0 at once, then each multiple of the interval up to the duration; a missed one is left out."""
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


def planned_tokens(options: WatchOptions) -> int | None:
    """Tokens of the pool that --plan foresaw; InvalidInputError for a file that holds no plan."""
    if options.plan is None:
        return None
    if options.metrics is None:
        raise UsageError("--plan", "is compared with a server's figures", "add --metrics URL")
    path = Path(options.plan)
    match load_json(path):
        case {"schema": "kvplan/plan@1", "kv": {"tokens": int() as tokens}} if not isinstance(tokens, bool):
            return tokens
    raise InvalidInputError(path_text(path), "is not a plan", "write one with `kvplan estimate ... --format json`")


def open_device(options: WatchOptions, stack: ExitStack) -> tuple[Nvml | None, Device | None]:
    """The GPU asked for, else the first one CUDA would use; none where something else is to be watched."""
    try:
        nvml = stack.enter_context(open_nvml())
        named = options.gpu_index
        if named is None:
            return nvml, nvml.visible_device(0)
        return nvml, nvml.device(int(named) if named.isascii() and named.isdigit() else named)
    except DeviceError as error:
        if options.gpu_index is not None:
            raise
        if options.pid is None and options.metrics is None:
            others = "watch a process with --pid PID or a server with --metrics URL"
            raise error.changed(remedy=f"{error.remedy}; without a GPU, {others}") from error
        if error.reason == "absent":
            output.tell("note", "no GPU: the machine's own memory is shown")
        else:
            output.tell("warning", f"{error}; the machine's own memory is shown")
        return None, None


def find_process(pid: int | None, device: Device | None) -> WatchedProcess | None:
    """The process whose resident memory is shown; beside a GPU's figures one can do without."""
    if pid is None:
        return None
    try:
        return WatchedProcess(pid)
    except EnvironmentProblem as error:
        if device is None:
            raise
        output.tell("note", f"{error}; its resident memory is not shown")
        return None


def heading(nvml: Nvml | None, device: Device | None) -> str:
    if nvml is None or device is None:
        return "no GPU"
    cuda = "" if nvml.cuda_version is None else f", CUDA {nvml.cuda_version}"
    return f"{device.label}: {device.name}, driver {nvml.driver_version}{cuda}"


@dataclass(frozen=True, slots=True)
class Screen:
    """What every view needs beside a reading."""

    watched: Watched
    heading: str
    nvml: Nvml | None = None
    planned: int | None = None  # tokens of the server's pool by the plan

    @property
    def warnings(self) -> tuple[str, ...]:
        of_driver = () if self.nvml is None else self.nvml.warnings
        return of_driver + (() if self.watched.device is None else self.watched.device.warnings)


# --- lines ------------------------------------------------------------------------------------------------------------


def lines_to(stream: TextIO, screen: Screen) -> Show:
    """A line per reading, after one that says what is watched; warnings go to standard error, each once."""
    reported: set[str] = set()
    write([line(screen.heading)], stream)

    def tell_once(kind: str, key: str, text: str) -> None:
        if key not in reported:
            reported.add(key)
            output.tell(kind, text)

    def show(reading: Reading) -> None:
        for warning in screen.warnings:
            tell_once("warning", warning, warning)
        for metric, why in left_out(reading.server):
            tell_once("note", metric, left_out_text(metric, why))
        write([line(one_line(reading, screen.watched, screen.planned))], stream)
        stream.flush()

    return show


def one_line(reading: Reading, watched: Watched, planned: int | None = None) -> str:
    """A reading as one line of text."""
    parts = [reading.utc[11:19]]
    if reading.sample is not None:
        parts += [memory_text(reading.sample.memory), *share_texts(reading.sample, watched.pid)]
        parts += load_texts(reading.sample)
    if reading.resident is not None:
        parts.append(f"resident {format_size(reading.resident)}")
    if reading.host is not None and (reading.sample is None or not reading.sample.memory.is_host):
        parts.append(host_text(reading.host))
    if reading.server is not None:
        parts.append(server_text(reading.server, planned))
    return f"{parts[0]}  {', '.join(parts[1:])}"


def memory_text(memory: DeviceMemory) -> str:
    used = f"{memory.used / GIB:,.2f} of {format_gib(memory.total)} used"
    return f"{used} (the machine's)" if memory.is_host else used


def host_text(host: HostMemory) -> str:
    return f"machine {(host.total - host.available) / GIB:,.2f} of {format_gib(host.total)} used"


def share_texts(sample: DeviceSample, pid: int | None) -> list[str]:
    texts = []
    if pid is not None:
        texts.append(f"pid {pid} {'not listed' if sample.process_used is None else format_gib(sample.process_used)}")
    if sample.others_used is not None:
        texts.append(f"{'others' if pid is not None else 'processes'} {format_gib(sample.others_used)}")
    return texts


def load_texts(sample: DeviceSample) -> list[str]:
    """Utilisation, power, clocks and temperature, where the device tells them."""
    figures: tuple[tuple[float | None, str], ...] = (
        (percent(sample.gpu_utilization), "{:.0f} % busy"),
        (percent(sample.memory_utilization), "memory busy {:.0f} %"),
        (sample.power_w, "{:,.0f} W"),
        (sample.sm_clock_mhz, "SM {:,} MHz"),
        (sample.memory_clock_mhz, "memory {:,} MHz"),
        (sample.temperature_c, "{} C"),
    )
    return [text.format(value) for value, text in figures if value is not None]


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def server_text(server: ServerReading, planned: int | None = None) -> str:
    """What the server said last, after why it said nothing now, where it did not."""
    texts = [] if server.problem is None else [problem_text(server)]
    if server.stats is not None:
        figures = [*server_parts(server.stats), *rate_texts(server), *plan_parts(server.stats, planned)]
        texts.append(figures_text(server, server.stats, figures))
    return "; ".join(texts)


def problem_text(server: ServerReading) -> str:
    return f"metrics: {server.problem}"


def figures_text(server: ServerReading, stats: ServerStats, figures: Sequence[str]) -> str:
    """Figures under the server's name, with their age where they are not of this reading."""
    is_old = server.age_s is not None and (server.problem is not None or server.age_s >= FRESH_S)
    age = f"{age_text(server.age_s)} ago " if is_old and server.age_s is not None else ""
    return f"{age}{stats.kind}: {', '.join(figures) or 'no figures'}"


def age_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"


def rate_texts(server: ServerReading) -> list[str]:
    return [f"{rate_text(rate)} {name} tokens/s" for name, rate in rates_told(server)]


def rates_told(server: ServerReading) -> list[tuple[str, float]]:
    rates = (("prompt", server.rates.prompt), ("output", server.rates.output))
    return [(name, rate) for name, rate in rates if rate is not None]


def rate_text(rate: float) -> str:
    return f"{rate:.1f}" if 0 < rate < 10 else f"{rate:,.0f}"


def left_out(server: ServerReading | None) -> tuple[tuple[str, str], ...]:
    return () if server is None or server.stats is None else server.stats.left_out


def left_out_text(metric: str, why: str) -> str:
    return f"{metric}: {why}; left out"


def plan_parts(server: ServerStats, planned: int | None) -> list[str]:
    """What the plan said of the pool, and how far off the server's own it was."""
    if planned is None:
        return []
    off = "" if not server.kv_tokens else f" ({planned / server.kv_tokens - 1:+.1%})"
    return [f"planned {planned:,} tokens{off}"]


def server_parts(server: ServerStats) -> list[str]:
    figures: tuple[tuple[float | None, str], ...] = (
        (percent(server.kv_usage), f"KV {{:.1f}} %{capacity_text(server)}"),
        (server.running, "{:,} running"),
        (server.waiting, "{:,} waiting"),
        (server.preemptions, "{:,} preemptions"),
        (percent(server.hit_rate), "prefix hits {:.1f} %"),
    )
    return [text.format(value) for value, text in figures if value is not None]


def capacity_text(server: ServerStats) -> str:
    if server.kv_tokens is None:
        return ""
    blocks = "" if server.num_blocks is None else f", {server.num_blocks:,} blocks"
    return f" of {server.kv_tokens:,} tokens{blocks}"


# --- the live view ----------------------------------------------------------------------------------------------------


def live(stack: ExitStack, screen: Screen, color: str) -> Show:
    """The view that redraws itself in place, until `stack` ends."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    plain = color == "never" or (color == "auto" and bool(os.environ.get("NO_COLOR")))
    console = Console(markup=False, emoji=False, highlight=False, no_color=plain)
    view = stack.enter_context(Live(console=console, auto_refresh=False, vertical_overflow="crop"))
    blocks = takes_blocks(console)

    def show(reading: Reading) -> None:
        styled = view_lines(reading, screen, blocks=blocks)
        texts = [Text.assemble(*((text, "" if plain else style) for text, style in each)) for each in styled]
        view.update(Text("\n").join(texts), refresh=True)

    return show


def view_lines(reading: Reading, screen: Screen, *, blocks: bool = True) -> list[Line]:
    """One screen: a bar for each memory, and what is in it below."""
    lines = [((screen.heading, "bold"),), line(f"{reading.utc[11:19]} UTC, {elapsed_text(reading.elapsed_s)}", "dim")]
    if reading.sample is not None:
        lines += [line(), *device_lines(reading.sample, screen.watched.pid, blocks)]
    if reading.host is not None and (reading.sample is None or not reading.sample.memory.is_host):
        lines += [line(), *host_lines(reading, blocks)]
    if reading.server is not None:
        lines += [line(), *server_lines(reading.server, blocks, screen.planned)]
    return [*lines, *(line(f"warning: {warning}", "yellow") for warning in screen.warnings)]


def elapsed_text(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02} watched"


def device_lines(sample: DeviceSample, pid: int | None, blocks: bool) -> list[Line]:
    memory = sample.memory
    rows = memory_rows(sample, pid)
    lines = [
        labelled("memory", bar([(size, style) for _, size, style in rows], memory.total, blocks), memory_text(memory)),
        *(((f"  {name:<12}", ""), (f"{size / GIB:>9,.2f} GiB", style)) for name, size, style in rows),
    ]
    if pid is not None and sample.process_used is None:
        lines.append(line(f"  pid {pid} is not in the driver's list (another PID namespace, or nothing held)", "dim"))
    if sample.gpu_utilization is not None:
        lines.append(labelled("busy", bar([(sample.gpu_utilization, "green")], 1, blocks), ""))
    return [*lines, line(f"  {', '.join(load_texts(sample))}")]


def memory_rows(sample: DeviceSample, pid: int | None) -> list[tuple[str, int, str]]:
    """(name, bytes, style): the device's memory in parts that add up to its total."""
    memory, others = sample.memory, sample.others_used
    rows = []
    if sample.process_used is not None:
        rows.append((f"pid {pid}", sample.process_used, "green"))
    if others is not None:
        rows.append(("others" if pid is not None else "processes", others, "yellow"))
    rest = memory.used - sum(size for _, size, _ in rows)
    if rest < 0:  # processes that share memory are each listed with all of it
        rows, rest = [], memory.used
    rows.append(("used" if not rows else "other use", rest, "cyan"))
    if memory.reserved is not None:
        rows.append(("reserved", memory.reserved, "magenta"))
    return [*rows, ("free", memory.free, "dim")]


def host_lines(reading: Reading, blocks: bool) -> list[Line]:
    host = reading.host
    assert host is not None
    used = host.total - host.available
    mine = reading.resident or 0
    parts: list[tuple[float, str]] = [(mine, "green"), (max(0, used - mine), "cyan"), (host.available, "dim")]
    lines = [labelled("machine", bar(parts, host.total, blocks), f"{used / GIB:,.2f} of {format_gib(host.total)} used")]
    if reading.resident is not None:
        lines.append(((f"  {'resident':<12}", ""), (f"{format_size(mine):>13}", "green")))
    return lines


def server_lines(server: ServerReading, blocks: bool, planned: int | None = None) -> list[Line]:
    """The last page, dim where it is not of this reading, below why it is not."""
    lines = [] if server.problem is None else [line(problem_text(server), "yellow")]
    stats = server.stats
    if stats is None:
        return lines
    style = "" if server.problem is None else "dim"
    if stats.kv_usage is not None:
        lines.append(labelled("KV", bar([(stats.kv_usage, "green")], 1, blocks), ""))
    figures = [*server_parts(stats), *plan_parts(stats, planned)]
    lines.append(line(figures_text(server, stats, figures), style))
    lines += [line(f"  {name:<12}{rate_text(rate):>9} tokens/s", style) for name, rate in rates_told(server)]
    return [*lines, *(line(left_out_text(metric, why), "yellow") for metric, why in stats.left_out)]


def labelled(name: str, spans: Line, text: str) -> Line:
    return ((f"{name:<9}", "bold"), *spans, (f"  {text}", ""))


def bar(parts: Sequence[tuple[float, str]], total: float, blocks: bool) -> Line:
    """Parts of a whole as cells, the last "dim" one and what is left as dots; rounding never adds up to more cells."""
    full, dot = ("█", "·") if blocks else ("#", ".")
    spans, start, end = [], 0, 0.0
    for size, style in parts:
        end += size
        stop = min(BAR, round(BAR * end / total)) if total else 0
        spans.append(((dot if style == "dim" else full) * (stop - start), style))
        start = max(start, stop)
    return (*spans, (dot * (BAR - start), "dim"))
