"""Output of `kvplan watch`: a line per reading to a pipe; on a terminal, a view with the history of each figure."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TextIO

from kvplan.cli import output
from kvplan.core.units import GIB, format_gib, format_size
from kvplan.hardware.nvml import DeviceMemory, DeviceSample, Nvml
from kvplan.measure.server_metrics import ServerStats
from kvplan.measure.watch import NO_ANSWER_YET, Rates, Reading, ServerReading, Watched
from kvplan.report.lines import Line, line, takes_blocks, write
from kvplan.report.sparkline import sparkline
from kvplan.servers.base import called

FRESH_S = 1.0  # a page older than this is shown with its age
BAR = 40
LEAST_HISTORY, MOST_HISTORY = 8, 60  # cells, one per reading
BESIDE_HISTORY = 56  # columns for a row's label and figure
NARROW = 80  # minimum columns of the view
Show = Callable[[Reading], None]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan's figures for a server: tokens of one engine's pool, concurrent requests, and tokens of each."""

    tokens: int
    users: int | None = None
    context: int | None = None


@dataclass(frozen=True, slots=True)
class Screen:
    """What every view needs in addition to a reading."""

    watched: Watched
    heading: str
    nvml: Nvml | None = None
    planned: Planned | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        of_driver = () if self.nvml is None else self.nvml.warnings
        return of_driver + (() if self.watched.device is None else self.watched.device.warnings)


# --- lines ------------------------------------------------------------------------------------------------------------


def lines_to(stream: TextIO, screen: Screen) -> Show:
    """Show a line per reading, after a heading line; warnings go to standard error, each once."""
    reported: set[str] = set()
    write([line(screen.heading)], stream)

    def tell_once(kind: str, key: str, text: str) -> None:
        if key not in reported:
            reported.add(key)
            output.tell(kind, text)

    def show(reading: Reading) -> None:
        for warning in screen.warnings:
            tell_once("warning", warning, warning)
        for server in reading.servers:
            for metric, why in left_out(server):
                tell_once("note", metric, left_out_text(metric, why))
        write([line(text) for text in reading_lines(reading, screen.watched, screen.planned)], stream)
        stream.flush()

    return show


def reading_lines(reading: Reading, watched: Watched, planned: Planned | None = None) -> list[str]:
    """A reading as one line of text; with several servers, one more line for each."""
    time, parts = reading.utc[11:19], machine_parts(reading, watched)
    texts = [server_text(server, planned) for server in reading.servers]
    if len(texts) < 2:
        return [f"{time}  {', '.join([*parts, *texts])}"]
    machine = [f"{time}  {', '.join(parts)}"] if parts else []
    return [*machine, *(f"{time}  {name}  {text}" for name, text in zip(watched.names, texts, strict=True))]


def machine_parts(reading: Reading, watched: Watched) -> list[str]:
    """Figures of the GPU, the process and the machine."""
    parts = []
    if reading.sample is not None:
        parts += [memory_text(reading.sample.memory), *share_texts(reading.sample, watched.pid)]
        parts += load_texts(reading.sample)
    if reading.resident is not None:
        parts.append(f"resident {format_size(reading.resident)}")
    if reading.host is not None and (reading.sample is None or not reading.sample.memory.is_host):
        parts.append(
            f"host {(reading.host.total - reading.host.available) / GIB:,.2f} of {format_gib(reading.host.total)} used"
        )
    return parts


def memory_text(memory: DeviceMemory) -> str:
    used = f"{memory.used / GIB:,.2f} of {format_gib(memory.total)} used"
    return f"{used} (host memory)" if memory.is_host else used


def share_texts(sample: DeviceSample, pid: int | None) -> list[str]:
    texts = []
    if pid is not None:
        texts.append(f"pid {pid} {'not listed' if sample.process_used is None else format_gib(sample.process_used)}")
    if sample.others_used is not None:
        texts.append(f"{'others' if pid is not None else 'processes'} {format_gib(sample.others_used)}")
    return texts


def load_texts(sample: DeviceSample) -> list[str]:
    """Utilization, power, clocks and temperature, if the device reports them."""
    figures: tuple[tuple[float | None, str], ...] = (
        (in_percent(sample.gpu_utilization), "{:.0f}% busy"),
        (in_percent(sample.memory_utilization), "memory busy {:.0f}%"),
        (sample.power_w, "{:,.0f} W"),
        (sample.sm_clock_mhz, "SM {:,} MHz"),
        (sample.memory_clock_mhz, "memory {:,} MHz"),
        (sample.temperature_c, "{} C"),
    )
    return [text.format(value) for value, text in figures if value is not None]


def in_percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def server_text(server: ServerReading, planned: Planned | None = None) -> str:
    """The server's last figures, preceded by the error if the current read failed."""
    texts = [] if server.problem is None else [problem_text(server)]
    if server.stats is not None:
        figures = [*server_parts(server.stats), *rate_texts(server), *plan_parts(server.stats, planned)]
        texts.append(figures_text(server, server.stats, figures))
    return "; ".join(texts)


def problem_text(server: ServerReading) -> str:
    return f"metrics: {server.problem}"


def figures_text(server: ServerReading, stats: ServerStats, figures: Sequence[str]) -> str:
    """Figures after the server's name, with their age if they are not current."""
    age = f"{age_text(server.age_s)} ago " if is_old(server) and server.age_s is not None else ""
    return f"{age}{called(stats.kind)}: {', '.join(figures) or 'no figures'}"


def is_old(server: ServerReading) -> bool:
    return server.age_s is not None and (server.problem is not None or server.age_s >= FRESH_S)


def age_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"


def rate_texts(server: ServerReading) -> list[str]:
    return [f"{rate_text(rate)} {name} tokens/s" for name, rate in rates_told(server)]


def rates_told(server: ServerReading) -> list[tuple[str, float]]:
    rates = (("prompt", server.rates.prompt), ("output", server.rates.output))
    return [(name, rate) for name, rate in rates if rate is not None]


def rate_text(rate: float) -> str:
    return f"{rate:.1f}" if 0 < rate < 10 else f"{rate:,.0f}"


def left_out(server: ServerReading) -> tuple[tuple[str, str], ...]:
    return () if server.stats is None else server.stats.left_out


def left_out_text(metric: str, why: str) -> str:
    return f"{metric}: {why}; left out"


def plan_parts(server: ServerStats, planned: Planned | None) -> list[str]:
    """The plan's pool, and its error compared with the server's."""
    if planned is None:
        return []
    return [f"planned {planned.tokens:,} tokens{off_text(server, planned)}"]


def off_text(server: ServerStats, planned: Planned) -> str:
    return "" if not server.kv_tokens else f" ({planned.tokens / server.kv_tokens - 1:+.1%})"


def server_parts(server: ServerStats) -> list[str]:
    figures: tuple[tuple[float | None, str], ...] = (
        (in_percent(server.kv_usage), f"KV {{:.1f}}%{capacity_text(server)}"),
        (server.running, "{:,} running"),
        (server.waiting, "{:,} waiting"),
        (server.preemptions, "{:,} preemptions"),
        (in_percent(server.hit_rate), "prefix hits {:.1f}%"),
    )
    return [text.format(value) for value, text in figures if value is not None]


def capacity_text(server: ServerStats) -> str:
    if server.kv_tokens is None:
        return ""
    blocks = "" if server.num_blocks is None else f", {server.num_blocks:,} blocks"
    return f" of {server.kv_tokens:,} tokens{blocks}"


# --- the live view ----------------------------------------------------------------------------------------------------


def live(stack: ExitStack, screen: Screen, color: str) -> Show:
    """Return a view that redraws in place, until `stack` closes."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    plain = color == "never" or (color == "auto" and bool(os.environ.get("NO_COLOR")))
    console = Console(markup=False, emoji=False, highlight=False, no_color=plain)
    view = stack.enter_context(Live(console=console, auto_refresh=False, vertical_overflow="crop"))
    blocks = takes_blocks(console) and os.environ.get("TERM") != "linux"  # its font lacks the low block characters
    readings: deque[Reading] = deque(maxlen=MOST_HISTORY)

    def show(reading: Reading) -> None:
        readings.append(reading)
        styled = view_lines(readings, screen, blocks=blocks, width=console.width, height=console.height)
        texts = [Text.assemble(*((text, "" if plain else style) for text, style in pieces)) for pieces in styled]
        view.update(Text("\n").join(texts), refresh=True)

    return show


def view_lines(
    readings: Sequence[Reading], screen: Screen, *, blocks: bool = True, width: int = NARROW, height: int | None = None
) -> list[Line]:
    """One screen of the last reading, with the history of the earlier ones; one line per server if more would not fit
    the height.
    """
    reading, chart = readings[-1], Chart(min(MOST_HISTORY, max(LEAST_HISTORY, width - BESIDE_HISTORY)), blocks)
    lines = [((screen.heading, "bold"),), line(f"{reading.utc[11:19]} UTC, {elapsed_text(reading.elapsed_s)}", "dim")]
    if reading.sample is not None:
        now, *parts = device_lines(reading.sample, screen.watched.pid, blocks)
        lines += [line(), now, memory_history(readings, blocks), *parts]
    if reading.host is not None and (reading.sample is None or not reading.sample.memory.is_host):
        lines += [line(), *host_lines(reading, blocks)]
    warnings = [line(f"warning: {warning}", "yellow") for warning in screen.warnings]
    names = screen.watched.names or ("",) * len(reading.servers)
    histories = [[past.servers[index] for past in readings] for index in range(len(reading.servers))]
    full = [
        part
        for name, history in zip(names, histories, strict=True)
        for part in [line(), *server_lines(name, history, chart, screen.planned)]
    ]
    if len(histories) > 1 and height is not None and len(lines) + len(full) + len(warnings) > height:
        rows = [server_row(name, history, blocks) for name, history in zip(names, histories, strict=True)]
        full = [line(), *rows]
    return [*lines, *full, *warnings]


@dataclass(frozen=True, slots=True)
class Chart:
    """Format of a history: number of cells, block characters or ASCII."""

    cells: int
    blocks: bool

    def row(self, label: str, values: Sequence[float | None], top: float | None, text: str, style: str) -> Line:
        """A label, the history of its figure up to `top`, and the current value."""
        drawn = sparkline(values, self.cells, top=top, blocks=self.blocks)
        return ((f"  {label:<11}", ""), (drawn, style or "green"), (f"  {text}", style))


def elapsed_text(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02} watched"


def device_lines(sample: DeviceSample, pid: int | None, blocks: bool) -> list[Line]:
    memory = sample.memory
    rows = memory_rows(sample, pid)
    lines = [
        labeled("memory", bar([(size, style) for _, size, style in rows], memory.total, blocks), memory_text(memory)),
        *(((f"  {name:<12}", ""), (f"{size / GIB:>9,.2f} GiB", style)) for name, size, style in rows),
    ]
    if pid is not None and sample.process_used is None:
        lines.append(line(f"  pid {pid} is not in the driver's list (another PID namespace, or nothing held)", "dim"))
    if sample.gpu_utilization is not None:
        lines.append(labeled("busy", bar([(sample.gpu_utilization, "green")], 1, blocks), ""))
    return [*lines, line(f"  {', '.join(load_texts(sample))}")]


def memory_history(readings: Sequence[Reading], blocks: bool) -> Line:
    """The device's used memory, reading by reading, and its range."""
    memories = [None if past.sample is None else past.sample.memory for past in readings]
    used = [None if memory is None else memory.used for memory in memories][-BAR:]
    known = [size for size in used if size is not None]
    total = max((memory.total for memory in memories if memory is not None), default=0)
    drawn = sparkline(used, BAR, top=total, blocks=blocks)
    text = f"{min(known) / GIB:,.2f} to {max(known) / GIB:,.2f} GiB"
    return labeled("history", ((drawn, "green"),), text)


def memory_rows(sample: DeviceSample, pid: int | None) -> list[tuple[str, int, str]]:
    """(name, bytes, style) of parts of the device's memory, which add up to its total."""
    memory, others = sample.memory, sample.others_used
    rows = []
    if sample.process_used is not None:
        rows.append((f"pid {pid}", sample.process_used, "green"))
    if others is not None:
        rows.append(("others" if pid is not None else "processes", others, "yellow"))
    rest = memory.used - sum(size for _, size, _ in rows)
    if rest < 0:  # each process that shares memory is listed with all of it
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
    lines = [labeled("host", bar(parts, host.total, blocks), f"{used / GIB:,.2f} of {format_gib(host.total)} used")]
    if reading.resident is not None:
        lines.append(((f"  {'resident':<12}", ""), (f"{format_size(mine):>13}", "green")))
    return lines


def server_lines(name: str, history: Sequence[ServerReading], chart: Chart, planned: Planned | None) -> list[Line]:
    """The figures of the last page with their history, dim and below the error if it is not current."""
    server = history[-1]
    stats = server.stats
    lines: list[Line] = [((server_heading(name, server), "bold"),)]
    if server.problem is not None:
        lines.append(line(f"  {problem_text(server)}", "yellow"))
    if stats is None:
        return lines
    style = "" if server.problem is None else "dim"
    users = stats.max_concurrency if planned is None or planned.users is None else planned.users
    rows = (
        ("KV", lambda s, _: s.kv_usage, 1.0, kv_text(stats)),
        ("running", lambda s, _: s.running, users, running_text(stats, planned)),
        ("waiting", lambda s, _: s.waiting, None, count_text(stats.waiting)),
        ("preempted", lambda _, r: r.preemptions, None, preempted_text(server)),
        ("prompt", lambda _, r: r.prompt, None, token_rate(server.rates.prompt)),
        ("output", lambda _, r: r.output, None, token_rate(server.rates.output)),
    )
    for label, value, top, text in rows:
        if text is not None:
            values = [figure_of(past, value) for past in history]
            least = None if top is None else max([top, *(figure for figure in values if figure is not None)])
            lines.append(chart.row(label, values, least, text, style))
    if stats.hit_rate is not None:
        lines.append(line(f"  {'hits':<11}{100 * stats.hit_rate:.1f}% of prompt tokens from the prefix cache", style))
    if planned is not None:
        lines.append(line(f"  {'plan':<11}{planned_text(stats, planned)}", style))
    return [*lines, *(line(f"  {left_out_text(metric, why)}", "yellow") for metric, why in stats.left_out)]


def figure_of(reading: ServerReading, value: Callable[[ServerStats, Rates], float | None]) -> float | None:
    """A figure of a reading, or None if the reading has no new page."""
    return None if reading.stats is None or reading.problem is not None else value(reading.stats, reading.rates)


def server_heading(name: str, server: ServerReading) -> str:
    """The server's kind and name, with the age of its figures if they are not current."""
    kind = "server" if server.stats is None else called(server.stats.kind)
    heading = f"{kind} at {name}" if name else kind
    return heading if not is_old(server) or server.age_s is None else f"{heading}, {age_text(server.age_s)} ago"


def kv_text(stats: ServerStats) -> str | None:
    return None if stats.kv_usage is None else f"{100 * stats.kv_usage:.1f}%{capacity_text(stats)}"


def count_text(count: int | None) -> str | None:
    return None if count is None else f"{count:,}"


def running_text(stats: ServerStats, planned: Planned | None) -> str | None:
    """Running requests, and how many the plan or the server says fit."""
    if stats.running is None:
        return None
    if planned is not None and planned.users is not None:
        above = "above " if stats.running > planned.users else "of "
        return f"{stats.running:,} {above}the plan's {planned.users:,}"
    if stats.max_concurrency is not None:
        return f"{stats.running:,} ({stats.max_concurrency:,.1f} of the longest context fit)"
    return f"{stats.running:,}"


def preempted_text(server: ServerReading) -> str | None:
    stats, rate = server.stats, server.rates.preemptions
    if stats is None or stats.preemptions is None:
        return None
    return f"{stats.preemptions:,} in all" if rate is None else f"{rate_text(rate)}/s, {stats.preemptions:,} in all"


def token_rate(rate: float | None) -> str | None:
    return None if rate is None else f"{rate_text(rate)} tokens/s"


def planned_text(stats: ServerStats, planned: Planned) -> str:
    """The plan's pool compared with the server's, its utilization, and its users."""
    texts = [f"{planned.tokens:,} tokens{off_text(stats, planned)}"]
    if stats.kv_tokens is not None and stats.kv_usage is not None and planned.tokens:
        texts.append(f"{100 * stats.kv_usage * stats.kv_tokens / planned.tokens:.1f}% in use")
    if planned.users is not None and planned.context is not None:
        texts.append(f"{planned.users:,} users of {planned.context:,} tokens")
    return ", ".join(texts)


def server_row(name: str, history: Sequence[ServerReading], blocks: bool) -> Line:
    """A server in one line of at most NARROW columns; if its page is late, a blank cell and the previous figures."""
    server = history[-1]
    start = (f"{name[:22]:<22} ", "bold")
    stats = server.stats
    if stats is None or server.problem not in (None, NO_ANSWER_YET):
        age = "" if server.age_s is None else f", page {age_text(server.age_s)} old"
        return (start, (f"{(server.problem or '')[: NARROW - 23 - len(age)]}{age}", "yellow"))
    usage = sparkline([figure_of(past, lambda s, _: s.kv_usage) for past in history], 10, top=1.0, blocks=blocks)
    running = sparkline([figure_of(past, lambda s, _: s.running) for past in history], 8, top=None, blocks=blocks)
    share = "" if stats.kv_usage is None else f"{100 * stats.kv_usage:.0f}%"
    counts = [
        f"{count:,} {word}" for count, word in ((stats.running, "run"), (stats.waiting, "wait")) if count is not None
    ]
    return (
        start,
        ("KV ", ""),
        (usage, "green"),
        (f" {share:>4}  ", ""),
        (running, "green"),
        (f" {', '.join(counts)}", ""),
    )


def labeled(name: str, spans: Line, text: str) -> Line:
    return ((f"{name:<9}", "bold"), *spans, (f"  {text}", ""))


def bar(parts: Sequence[tuple[float, str]], total: float, blocks: bool) -> Line:
    """Parts of a whole as cells, with the last "dim" one and the rest as dots; rounding never adds cells."""
    full, dot = ("█", "·") if blocks else ("#", ".")
    spans, start, end = [], 0, 0.0
    for size, style in parts:
        end += size
        stop = min(BAR, round(BAR * end / total)) if total else 0
        spans.append(((dot if style == "dim" else full) * (stop - start), style))
        start = max(start, stop)
    return (*spans, (dot * (BAR - start), "dim"))
