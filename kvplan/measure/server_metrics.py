"""A server's own numbers from its /metrics page, over HTTP or from a file: current state and configuration.

The page is read with limits (total time, bytes, redirects); a page that cannot be fetched is a MetricsError.
"""

import http.client
import math
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.core.files import printable, read_text
from kvplan.servers.base import OWN, SERVERS
from kvplan.servers.logs.log import FACTS, Reading, ServerLog, simulated_notes
from kvplan.servers.logs.metrics import SERVED_BY, START_ARGUMENTS, START_FIGURE, START_SERVER, Counted, Metrics

MAX_PAGE_BYTES = 10 * 10**6
MAX_LINES = 5_000  # of the metrics read here; a server with 64 ranks has some hundreds
MAX_LINE_CHARS = 1 << 16
MAX_LABEL_CHARS = 1_000  # of an argument; a partition of 200 layers has 600
MAX_COUNT = 10**15  # of tokens, blocks or requests; larger values are not counts
MAX_REDIRECTS = 3
DEADLINE_S = 5.0

_SHARES = ("kv_usage", "hit_rate")
_START = "process_start_time_seconds"
_OF_PAGE = (_START, START_ARGUMENTS, START_FIGURE)


class MetricsError(Exception):
    """A /metrics page that cannot be fetched or read, and why; `answered`: True if anything was received."""

    def __init__(self, reason: str, *, answered: bool = True) -> None:
        super().__init__(reason)
        self.answered = answered


@dataclass(frozen=True, slots=True)
class ServerStats:
    """A server's statistics over all its engines; None if it does not report them.

    kind            the server's name
    kv_usage        fraction of the KV cache in use, of the fullest engine
    running, waiting, preemptions, prefix_hits, prefix_queries   sums; the prefix figures are tokens since its start
    hit_rate        fraction of prompt tokens found in the prefix cache
    num_blocks, block_size, kv_tokens   one engine's KV cache: blocks, tokens per block, tokens
    prompt_tokens, generation_tokens    sums since its start, prompt tokens found in the prefix cache included
    max_concurrency full-length requests that fit at once by the server's own figure, over all its engines
    started_s       Unix time of its start, if the page has it
    left_out        (metric, why) of each impossible figure, such as a fraction above 1
    """

    kind: str
    kv_usage: float | None = None
    running: int | None = None
    waiting: int | None = None
    preemptions: int | None = None
    prefix_hits: int | None = None
    prefix_queries: int | None = None
    hit_rate: float | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    kv_tokens: int | None = None
    cache_dtype: str | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    max_concurrency: float | None = None
    started_s: float | None = None
    left_out: tuple[tuple[str, str], ...] = ()


def server_stats(page: str) -> ServerStats:
    """Parse the figures of a server's /metrics page. Raise MetricsError if it is no known server's page."""
    name, metrics, samples = _read(page)
    return _stats(name, metrics, samples)


def server_named(page: str) -> str:
    """Name of the page's server. Raise MetricsError if it is no known server's page."""
    return _read(page)[0]


def _read(page: str) -> "tuple[str, Metrics, Samples]":
    """Return a page's server (by its metric prefix), that server's metric names, and the page's samples."""
    known = {name: server().outputs().metrics for name, server in SERVERS.items()}
    tables = {name: metrics for name, metrics in known.items() if metrics is not None}
    samples = _samples(page, (*_OF_PAGE, *(name for metrics in tables.values() for name in metrics.names)))
    for server, metrics in tables.items():
        if any(name.startswith(metrics.prefix) for name, _, _ in samples):
            return server, metrics, samples
    *others, last = (metrics.prefix for metrics in tables.values())
    raise MetricsError(f"no {', '.join(others)} or {last} metrics on it")


def log_of_page(page: str) -> ServerLog:
    """The constants of a server's /metrics page as a log: of several replicas the one with the fewest blocks; a page
    that repeats its server's log gives that. Raise MetricsError if it is no known server's page.
    """
    server, metrics, samples = _read(page)
    if (start := _start(samples)) is not None:
        return start
    name = next((labels["model_name"] for _, labels, _ in samples if labels.get("model_name")), None)
    constants, num_engines = _metrics_as_constants(samples), 1
    if metrics.info is not None:
        constants, num_engines = _labels_as_constants(metrics.info, samples)
    server = constants.get(SERVED_BY, server) if constants.get(SERVED_BY) in OWN else server
    facts = {fact: constants[key] for key, fact in metrics.facts.items() if _is_figure(fact, constants.get(key, ""))}
    flags = {} if name is None else {"model": name[:300]}  # its served name, which need not be the model's id
    flags |= {flag: constants[key] for key, flag in metrics.flags.items() if _is_flag(metrics, key, constants)}
    notes: tuple[str, ...] = ()
    if num_engines > 1:
        notes = (f"{num_engines} replicas on the page have a pool of their own each; the smallest is compared",)
        flags["data_parallel_size"] = str(num_engines)
    readings = tuple(Reading(fact, text, "", 0) for fact, text in facts.items())
    return ServerLog(server, flags, readings, 1, 1, notes, called="page")


def _start(samples: "Samples") -> ServerLog | None:
    """The start-up log that a page repeats. Raise MetricsError if there are several."""
    starts = [labels for name, labels, _ in samples if name == START_ARGUMENTS]
    if not starts:
        return None
    if len(starts) > 1:
        raise MetricsError(f"{len(starts)} servers on one page")
    flags = {name: text[:MAX_LABEL_CHARS] for name, text in starts[0].items()}
    server = flags.pop(START_SERVER, "")
    if server not in (*SERVERS, *OWN):
        raise MetricsError(f"a page of an unknown server ({printable(server, 40)!r})")
    readings = [
        Reading(labels["figure"], labels["logged"], printable(labels.get("rank", ""), 60), 0)
        for name, labels, _ in samples
        if name == START_FIGURE and _is_logged(labels.get("figure", ""), labels.get("logged", ""))
    ]
    return ServerLog(server, flags, tuple(readings), 1, 1, tuple(simulated_notes(readings)[:1]), called="page")


def _is_logged(fact: str, text: str) -> bool:
    """True if a figure is one of a log, in its form."""
    return fact in FACTS and len(text) <= MAX_LABEL_CHARS and re.fullmatch(FACTS[fact], text) is not None


def _is_flag(metrics: Metrics, key: str, constants: Mapping[str, str]) -> bool:
    """True if a constant is on the page and was set explicitly; constants that are metrics are whole numbers."""
    if metrics.info is None:
        return constants.get(key, "").isdigit()
    return key in constants and (key not in metrics.chosen or constants.get(metrics.chosen[key]) == "True")


def _labels_as_constants(info: str, samples: "Samples") -> tuple[dict[str, str], int]:
    """Labels of the engine with the fewest blocks, and the number of engines."""
    configs = [labels for metric, labels, _ in samples if metric == info]
    engines = {labels.get("engine", ""): labels for labels in configs}
    labels = min(engines.values(), key=lambda engine: _number(engine, "num_gpu_blocks") or math.inf, default={})
    texts = {label: text[:100] for label, text in labels.items() if text not in ("None", "auto", "")}
    return texts, max(1, len(engines))


def _metrics_as_constants(samples: "Samples") -> dict[str, str]:
    """First value of every metric, as text."""
    return {metric: f"{value:.12g}" for metric, _, value in reversed(samples) if math.isfinite(value)}


COUNTS = ("num_blocks", "kv_tokens", "context")


def _is_figure(fact: str, text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,15}" if fact in COUNTS else _FIGURE, text) is not None


_FIGURE = r"[0-9]{1,15}(?:\.[0-9]{1,12})?"

Samples = Sequence[tuple[str, dict[str, str], float]]  # (name, labels, value)


def page_sums(page: str, names: Sequence[str]) -> dict[str, float]:
    """Sum each of these metrics that is on the page over its labels, ignoring values that are not counts."""
    sums: dict[str, float] = {}
    for name, _, value in _samples(page, tuple(names)):
        if name in names and 0 <= value <= MAX_COUNT:
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _samples(page: str, names: tuple[str, ...]) -> Samples:
    """Parse the wanted samples of a page in Prometheus' text format; skip the other lines."""
    from prometheus_client.parser import text_fd_to_metric_families

    lines = [line for line in page.splitlines() if line.startswith(names)]
    if len(lines) > MAX_LINES or any(len(line) > MAX_LINE_CHARS for line in lines):
        raise MetricsError("not a server's page, its lines are too many or too long")
    try:
        file: Any = _until(time.monotonic() + DEADLINE_S, lines)  # the parser only iterates over the file's lines
        families = list(text_fd_to_metric_families(file))
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise MetricsError(f"not in Prometheus' text format ({printable(str(error), 60)})") from error
    return [(sample.name, sample.labels, _float(sample.value)) for family in families for sample in family.samples]


def _until(deadline: float, lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines until the deadline: labels full of escapes take milliseconds each."""
    for line in lines:
        if time.monotonic() > deadline:
            raise MetricsError(f"not read within {DEADLINE_S:g} s, its labels are too long")
        yield line + "\n"


def _float(value: float) -> float:
    """Convert a value to float: the parser returns whole numbers as int, however long."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _stats(server: str, metrics: Metrics, samples: Samples) -> ServerStats:
    values = _values(samples, metrics.figures)
    counted = metrics.counted
    if counted is not None and any(name == counted.metric for name, _, _ in samples):
        values |= {figure: (counted.metric, _tokens_of(samples, counted, figure)) for figure in counted.modes}
    figures, left_out = _figures(values)
    hits, queries = figures.get("prefix_hits"), figures.get("prefix_queries")
    if hits is not None and queries is not None and hits > queries:
        left_out.append((metrics.figures["prefix_hits"][0], f"{hits:,} of {queries:,} is not a share"))
        del figures["prefix_hits"]
    elif hits is not None and queries:
        figures["hit_rate"] = hits / queries
    config = next((labels for name, labels, _ in samples if name == metrics.info), {})
    num_blocks, block_size = _number(config, "num_gpu_blocks"), _number(config, "block_size")
    product = None if num_blocks is None or block_size is None else num_blocks * block_size
    kv_tokens = _number(config, "kv_cache_size_tokens") or product
    if kv_tokens is not None and kv_tokens > MAX_COUNT:
        left_out.append((str(metrics.info), f"{kv_tokens:.3g} tokens is not a count"))
        kv_tokens = None
    return ServerStats(
        server,
        **figures,
        num_blocks=num_blocks,
        block_size=block_size,
        kv_tokens=kv_tokens,
        cache_dtype=printable(config["cache_dtype"], 40) if "cache_dtype" in config else None,
        max_concurrency=_max_concurrency(samples, metrics),
        started_s=_started(samples),
        left_out=tuple(left_out),
    )


def _tokens_of(samples: Samples, counted: Counted, figure: str) -> list[float]:
    """Tokens of these modes, each replica counted once; a mode appears only after its first token, so never 0."""
    tokens: dict[tuple[tuple[str, str], ...], float] = {}
    for name, labels, value in samples:
        if name == counted.metric and labels.get("mode") in counted.modes[figure]:
            replica = tuple(sorted((label, text) for label, text in labels.items() if label not in counted.ranks))
            tokens[replica] = max(tokens.get(replica, value), value)
    return list(tokens.values()) or [0.0]


def _max_concurrency(samples: Samples, metrics: Metrics) -> float | None:
    """Sum over the engines on the page, each counted once, or None if one does not report it."""
    label = next((label for label, fact in metrics.facts.items() if fact == "max_concurrency"), None)
    engines = {labels.get("engine", ""): labels for name, labels, _ in samples if name == metrics.info}
    texts = [labels.get(label or "", "") for labels in engines.values()]
    if not texts or not all(re.fullmatch(_FIGURE, text) for text in texts):
        return None
    return sum(float(text) for text in texts)


def _started(samples: Samples) -> float | None:
    return next((value for name, _, value in samples if name == _START and math.isfinite(value)), None)


Given = dict[str, tuple[str, list[float]]]  # field -> (metric, its values)


def _values(samples: Samples, table: Mapping[str, tuple[str, ...]]) -> Given:
    """For each field with a sample: its newest metric, and the values."""
    values_of: Given = {}
    for figure, names in table.items():
        for metric in names:
            values = [value for name, _, value in samples if name == metric]
            if values:
                values_of[figure] = metric, values
                break
    return values_of


def _figures(values_of: Given) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return every field (fractions of the fullest engine, counts summed), and (metric, why) of impossible values."""
    figures: dict[str, Any] = {}
    left_out = []
    for figure, (metric, values) in values_of.items():
        kind, limit = ("share", 1) if figure in _SHARES else ("count", MAX_COUNT)
        checked = values if kind == "share" else [*values, sum(values)]
        wrong = next((value for value in checked if not 0 <= value <= limit), None)  # also true for nan
        if wrong is not None:
            left_out.append((metric, f"{wrong:g} is not a {kind}"))
        else:
            figures[figure] = max(0.0, *values) if kind == "share" else round(sum(values))
    return figures, left_out


def _number(labels: dict[str, str], name: str) -> int | None:
    text = labels.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,15}", text) else None


class MetricsPage:
    """A server's /metrics page by its URL. `read` never takes longer than the deadline."""

    def __init__(self, url: str, deadline_s: float = DEADLINE_S) -> None:
        self._url = checked_url(url)
        self._deadline_s = deadline_s
        self._fetch: _Fetch | None = None
        _require_parser()

    def read(self) -> ServerStats:
        """Fetch the server's figures now. Raise MetricsError on failure."""
        return server_stats(self.text())

    def text(self) -> str:
        """Fetch the page now. Raise MetricsError on failure."""
        if self._fetch is not None and self._fetch.is_alive():  # a name lookup cannot be interrupted
            raise MetricsError("the last request is still waiting", answered=False)
        self._fetch = fetch = _Fetch(self._url, self._deadline_s)
        fetch.start()
        fetch.join(self._deadline_s)
        if fetch.is_alive():
            answered = fetch.answered  # read before abort, which looks like the end of a response
            fetch.abort()
            raise MetricsError(f"no whole answer in {self._deadline_s:g} s", answered=answered)
        return fetch.page()


def page_text(source: str) -> str:
    """Read the page at an http or https URL, or from a file.

    Raises UsageError for another kind of URL, EnvironmentProblem if the server does not respond with a page, and
    InvalidInputError if a file is not one.
    """
    if "://" not in source and not source.lower().startswith(("file:", "http:", "https:", "data:", "ftp:")):
        _require_parser()
        return read_text(Path(source), MAX_PAGE_BYTES)
    page = MetricsPage(source)
    try:
        return page.text()
    except MetricsError as error:
        raise EnvironmentProblem(f"--metrics {shown_url(source)}", f"{error}", "check the server") from error


def shown_url(text: str) -> str:
    """A URL without its query, which may hold a token."""
    return printable(text.partition("?")[0], 200)


def _require_parser() -> None:
    try:
        import prometheus_client.parser  # noqa: F401
    except ImportError as error:
        raise EnvironmentProblem(
            "prometheus_client",
            "not installed, but --metrics needs it",
            "run `pip install '.[metrics]'` in kvplan's sources",
        ) from error


def checked_url(text: str) -> SplitResult:
    """Parse an http or https URL with a host; a bare host gets the path /metrics. Raise UsageError for all else."""
    where = f"--metrics {printable(text)}"
    try:
        url = urlsplit(text)
        url.port  # noqa: B018 -- it is parsed when asked for
    except ValueError as error:
        raise UsageError(where, f"not a URL ({error})", "write http://localhost:8000/metrics") from error
    if url.scheme not in ("http", "https") or not url.hostname or re.search(r"[\x00-\x20\x7f]", text):
        raise UsageError(where, "not an http or https URL", "write http://localhost:8000/metrics")
    if url.username is not None:
        raise UsageError("--metrics", "a URL must not contain a password, which other users could read", "remove it")
    return url._replace(path="/metrics") if url.path in ("", "/") else url


class _Fetch(threading.Thread):
    """One GET in a separate thread, so that no server, proxy or name server can block the view."""

    def __init__(self, url: SplitResult, timeout_s: float) -> None:
        super().__init__(daemon=True, name="kvplan-metrics")
        self._url = url
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._aborted = False
        self.answered = False
        self._body = b""
        self._problem: MetricsError | None = None

    def run(self) -> None:
        try:
            self._body = self._get()
        except MetricsError as error:
            self._problem = error
        except http.client.RemoteDisconnected as error:
            self._problem = MetricsError(_reason(error), answered=False)
        except (ssl.SSLError, http.client.HTTPException) as error:  # something was received, but not a page
            self._problem = MetricsError(_reason(error))
        except (OSError, ValueError) as error:
            self._problem = MetricsError(_reason(error), answered=self.answered)
        finally:
            if self._connection is not None:
                self._connection.close()

    def page(self) -> str:
        """Text of the page. Raise MetricsError if the request failed."""
        if self._problem is not None:
            raise self._problem
        return self._body.decode("utf-8", "replace")

    def abort(self) -> None:
        """Abort a request that takes too long: a blocked read returns when its socket is shut down."""
        self._aborted = True
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _get(self) -> bytes:
        url = self._url
        for _ in range(1 + MAX_REDIRECTS):
            with self._answer(url) as answer:
                if answer.status not in (301, 302, 303, 307, 308):
                    return self._body_of(answer)
                url = _redirected(url, answer.headers.get("Location", ""))
        raise MetricsError(f"more than {MAX_REDIRECTS} redirects")

    def _answer(self, url: SplitResult) -> http.client.HTTPResponse:
        if self._connection is not None:
            self._connection.close()
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(url.hostname or "", url.port, timeout=self._timeout_s)
        self._connection.connect()
        if self._aborted:  # during the name lookup, when there was no socket to shut down
            raise MetricsError("given up")
        path = url.path + (f"?{url.query}" if url.query else "")
        self._connection.request("GET", path, headers={"Accept": "text/plain", "User-Agent": "kvplan"})
        answer = self._connection.getresponse()
        self.answered = True
        return answer

    def _body_of(self, answer: http.client.HTTPResponse) -> bytes:
        if answer.status != 200:
            raise MetricsError(f"HTTP {answer.status} {printable(answer.reason, 40)}".rstrip())
        if answer.headers.get_content_type() == "text/html":
            raise MetricsError("a web page (text/html), not metrics")
        body = bytearray()
        while not self._aborted and (chunk := answer.read1(1 << 16)):
            body += chunk
            if len(body) > MAX_PAGE_BYTES:
                raise MetricsError(f"more than {MAX_PAGE_BYTES // 10**6} MB")
        if answer.length:  # a truncated page may end in half a number
            raise MetricsError("cut off before its end")
        return bytes(body)


def _redirected(url: SplitResult, location: str) -> SplitResult:
    """Target of a redirect: another path of the same host and port, or from http to https if neither names a port.
    Raise MetricsError for anything else.
    """
    try:
        target = checked_url(urljoin(url.geturl(), location))
    except (UsageError, ValueError) as error:
        raise MetricsError("redirected to what is not an http or https URL") from error
    is_same = (target.scheme, _port(target)) == (url.scheme, _port(url))
    is_upgrade = (url.scheme, target.scheme, url.port, target.port) == ("http", "https", None, None)
    if target.hostname != url.hostname or not (is_same or is_upgrade):
        raise MetricsError(f"redirected to another host or port ({printable(target.netloc, 80)}), not followed")
    return target


def _port(url: SplitResult) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _reason(error: Exception) -> str:
    match error:
        case TimeoutError():
            return "no answer in time"
        case socket.gaierror() | UnicodeError():
            return "no such host"
        case http.client.RemoteDisconnected():
            return "closed without an answer"
        case OSError():
            return (error.strerror or type(error).__name__).lower()
        case _:
            return f"not an HTTP answer ({type(error).__name__})"
