"""Results of load generators: the load they sent and what they measured.

Supported are files of the servers' own tools (servers/<name>/bench.py; the first writes them with --save-result or
--append-result), guidellm (schemas/generative), aiperf (profile_export_aiperf.json) and InferenceX
(utils/process_result.py, agg_*.json). One file may hold several results.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import path_text, printable, read_text
from kvplan.core.records import dataclass
from kvplan.core.units import MIB
from kvplan.servers.base import generators

MAX_BYTES: Final = 256 * MIB  # detailed results hold every token's time
OWN: Final = "kvplan profile"  # label of the results that it wrote, in the format of the first server's tool
OTHER_TOOLS: Final = "guidellm, aiperf and InferenceX"
FIGURE: Final = "figure"  # subject of an error until the file and row are known
LARGEST: Final = 10**18


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run of a load generator.

    users, rate   the load: one of the two is set; an infinite rate sends all requests at once
    is_constant   requests arrive at even intervals, not as a Poisson process
    prompt, output  mean tokens, or None if the file does not say
    lengths       (prompt, output) of each request, if the file has them
    times         milliseconds by metric and statistic: "ttft_p50"
    """

    source: str
    tool: str
    model: str | None
    users: int | None
    rate: float | None
    is_constant: bool
    num_prompts: int
    prompt: float | None
    output: float | None
    lengths: tuple[tuple[int, int], ...]
    times: Mapping[str, float]
    output_tokens_per_s: float | None
    ranks: int | None = None
    gpu: str | None = None

    @property
    def load(self) -> str:
        if self.users is not None:
            return f"{self.users:,} user{'' if self.users == 1 else 's'}"
        return "all at once" if self.rate == math.inf else f"{self.rate:g} requests/s"

    def stated(self, metric: str) -> tuple[str, float] | None:
        """Return (statistic, milliseconds) of a metric: its median if given, else its mean."""
        for statistic in ("p50", "mean"):
            value = self.times.get(f"{metric}_{statistic}")
            if value:
                return statistic, value
        return None


def read_results(path: Path) -> list[BenchResult]:
    """Return every result in a file. Raise InvalidInputError if it holds none."""
    content = read_text(path, MAX_BYTES)
    rows = list(objects(content, path))
    results: list[BenchResult] = []
    for place, row in enumerate(rows, 1):
        with row_named(path, place if len(rows) > 1 else None, "row"):
            results += results_of(row, path)
    if not results:
        raise InvalidInputError(path_text(path), "contains no result", f"name a file of {tools()}")
    return results


@contextmanager
def row_named(path: Path, place: int | None, kind: str) -> Iterator[None]:
    """Name a row of the file in errors; None: it is the only one."""
    try:
        yield
    except InvalidInputError as error:
        subject = path_text(path) if error.subject == FIGURE else error.subject
        raise error.changed(subject=subject if place is None else f"{subject}, {kind} {place}") from None


def objects(content: str, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file: a single one, or one per line."""
    try:
        parts = [json.loads(content)]
    except ValueError:
        try:
            parts = [json.loads(line) for line in content.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            raise InvalidInputError(path_text(path), "is not JSON", f"name a file of {tools()}") from None
    except RecursionError:
        raise InvalidInputError(path_text(path), "is nested too deeply", f"name a file of {tools()}") from None
    for part in parts:
        if not isinstance(part, dict):
            raise InvalidInputError(path_text(path), "contains no JSON object", f"name a file of {tools()}")
        yield part


def results_of(row: dict[str, Any], path: Path) -> list[BenchResult]:
    if isinstance(row.get("benchmarks"), list):
        parts = [part for part in row["benchmarks"] if isinstance(part, dict)]
        results = []
        for place, part in enumerate(parts, 1):
            with row_named(path, place if len(parts) > 1 else None, "benchmark"):
                results.append(guidellm(part, row, path))
        return results
    if "tput_per_gpu" in row:
        return [inferencex(row, path)]
    if "mean_ttft_ms" in row:
        return [serving(row, path)]
    records = row.get("records") if isinstance(row.get("records"), dict) else row
    if isinstance(records, dict) and isinstance(records.get("time_to_first_token"), dict):
        return [aiperf(records, row, path)]
    raise InvalidInputError(path_text(path), "is not in a known result format", f"name a file of {tools()}")


# --- values ---------------------------------------------------------------------------------------------------------


def number(value: Any, name: str) -> float | None:
    """Return a number >= 0, infinity among them, or None for anything else. Raise InvalidInputError if it is negative,
    not a number (NaN) or beyond LARGEST.
    """
    if value in ("inf", "Infinity"):
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not (0 <= value <= LARGEST or value == math.inf):
        raise InvalidInputError(FIGURE, f"{name} is {printable(str(value), 40)}", "leave that run out, or run it again")
    return float(value)


def milliseconds(value: Any, name: str) -> float | None:
    seconds = number(value, name)
    return None if seconds is None else 1000 * seconds


def count(value: Any, name: str, path: Path) -> int:
    stated = number(value, name)
    if not stated or stated > 1e9 or stated != int(stated):
        raise InvalidInputError(
            path_text(path), f"{name} is not a number of requests ({printable(repr(value), 40)})", "run again"
        )
    return int(stated)


def inner(row: Mapping[str, Any], *names: str) -> Any:
    """Look up a value in nested objects, or return None if there is none."""
    value: Any = row
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def traffic(users: Any, rate: Any, path: Path) -> tuple[int | None, float | None]:
    """Return (users, rate), of which one is set; an infinite limit counts as no limit."""
    limit, pace = number(users, "the concurrency"), number(rate, "the request rate")
    if limit is not None and 0 < limit < math.inf:
        if pace not in (None, math.inf):
            raise InvalidInputError(
                path_text(path), "has both a rate and a maximum concurrency", "run with one of them"
            )
        return count(users, "the concurrency", path), None
    if pace is None or pace == 0:
        raise InvalidInputError(
            path_text(path), "does not state a rate or a concurrency", "run with a rate or a concurrency"
        )
    return None, pace


def positive_times(times: Mapping[str, Any], path: Path) -> dict[str, float]:
    read = {name: number(raw, name) for name, raw in times.items()}
    positive = {name: value for name, value in read.items() if value}
    if math.inf in positive.values():
        name = next(name for name, value in positive.items() if value == math.inf)
        raise InvalidInputError(FIGURE, f"{name} is infinite", "leave that run out, or run it again")
    if not positive:
        raise InvalidInputError(path_text(path), "contains no times", "use streaming, so that times can be measured")
    return positive


# --- the tools' own files -------------------------------------------------------------------------------------------


def tools() -> str:
    """Supported tools, as listed in a message."""
    return ", ".join((*(tool.name for tool in generators()), OTHER_TOOLS))


def serving(row: dict[str, Any], path: Path) -> BenchResult:
    """Parse a result of a server's own tool (times in ms: `median_ttft_ms`); the first has no key of its own."""
    usual, *others = generators()
    tool = next((tool for tool in others if any(key in row for key in tool.marks)), usual)
    completed = count(row.get("completed"), "completed", path)
    users, rate = traffic(row.get("max_concurrency"), row.get("request_rate"), path)
    names = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}
    per_token = "tpot" if number(row.get("mean_tpot_ms"), "mean_tpot_ms") else "itl"
    parts = {"ttft": "ttft", "tpot": per_token, "latency": tool.whole}
    times = {
        f"{metric}_{name}": row.get(f"{word}_{part}_ms")
        for metric, part in parts.items()
        for name, word in names.items()
    }
    prompts, answers = (number(row.get(name), name) for name in ("total_input_tokens", "total_output_tokens"))
    return BenchResult(
        path_text(path),
        OWN if row.get("label") == OWN else tool.name,
        text(row.get("model_id")) or text(row.get("model")),
        users,
        rate,
        number(row.get("burstiness"), "burstiness") == math.inf,
        max(completed, int(number(row.get("num_prompts"), "num_prompts") or 0)),
        None if prompts is None else prompts / completed,
        None if answers is None else answers / completed,
        pairs(row.get("input_lens"), row.get("output_lens")),
        positive_times(times, path),
        number(row.get("output_throughput"), "output_throughput"),
    )


def pairs(prompts: Any, answers: Any) -> tuple[tuple[int, int], ...]:
    """Lengths of each request, if both lists hold whole numbers; failed requests have no response."""
    if not isinstance(prompts, list) or not isinstance(answers, list) or len(prompts) != len(answers):
        return ()
    for length in (*prompts, *answers):
        number(length, "a request's length")
    both = zip(prompts, answers, strict=True)
    return tuple((a, b) for a, b in both if isinstance(a, int) and isinstance(b, int) and a > 0 and b > 0)


def inferencex(row: dict[str, Any], path: Path) -> BenchResult:
    """Parse InferenceX's agg_*.json: vLLM's fields in seconds without `_ms`; tokens per second per GPU."""
    ranks = count(row.get("tp"), "tp", path)
    users = count(row.get("conc"), "conc", path)
    names = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}
    times = {
        f"{metric}_{name}": milliseconds(row.get(f"{word}_{part}"), f"{word}_{part}")
        for metric, part in {"ttft": "ttft", "tpot": "tpot", "latency": "e2el"}.items()
        for name, word in names.items()
    }
    rate = number(row.get("output_tput_per_gpu"), "output_tput_per_gpu")
    return BenchResult(
        path_text(path), "InferenceX", text(row.get("model")), users, None, False, 10 * users,
        number(row.get("isl"), "isl"), number(row.get("osl"), "osl"), (), positive_times(times, path),
        None if rate is None else rate * ranks, ranks, text(row.get("hw")),
    )  # fmt: skip


def guidellm(part: dict[str, Any], whole: dict[str, Any], path: Path) -> BenchResult:
    """Parse one benchmark of guidellm's report; the strategy is under `args` before 0.4 and under `config` since."""
    strategy = inner(part, "config", "strategy") or inner(part, "args", "strategy") or {}
    kind = str(strategy.get("type_") if isinstance(strategy, dict) else "")
    users: Any = None
    rate: Any = None
    match kind:
        case "synchronous":
            users = 1
        case "concurrent":
            users = strategy.get("streams") or strategy.get("max_concurrency")
        case "throughput":
            rate = math.inf
        case "constant" | "poisson" | "async":
            rate = strategy.get("rate")
        case _:
            raise InvalidInputError(
                path_text(path), f"unknown guidellm strategy ({printable(repr(kind), 40)})", "use concurrent"
            )
    found_users, found_rate = traffic(users, rate, path)
    stated = part.get("metrics")
    metrics: dict[str, Any] = stated if isinstance(stated, dict) else {}

    def figure(name: str, statistic: str) -> Any:
        if statistic in ("mean", "median"):
            return inner(metrics, name, "successful", statistic)
        return inner(metrics, name, "successful", "percentiles", statistic)

    words = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}
    own = {"ttft": "time_to_first_token_ms", "tpot": "inter_token_latency_ms"}
    times = {f"{metric}_{name}": figure(own[metric], word) for metric in own for name, word in words.items()}
    for name, word in words.items():
        times[f"latency_{name}"] = milliseconds(figure("request_latency", word), f"request_latency {word}")
    num_successful = inner(metrics, "request_totals", "successful") or inner(part, "request_totals", "successful")
    model = inner(part, "config", "backend", "model") or inner(whole, "args", "model") or inner(part, "args", "model")
    return BenchResult(
        path_text(path), "guidellm", text(model), found_users, found_rate, kind == "constant",
        count(num_successful, "request_totals.successful", path),
        number(figure("prompt_token_count", "mean"), "prompt_token_count"),
        number(figure("output_token_count", "mean"), "output_token_count"), (), positive_times(times, path),
        number(figure("output_tokens_per_second", "mean"), "output_tokens_per_second"),
    )  # fmt: skip


def aiperf(records: dict[str, Any], whole: dict[str, Any], path: Path) -> BenchResult:
    """Parse aiperf's profile_export_aiperf.json: `avg` and percentiles by metric; the load is under input_config."""
    loadgen = inner(whole, "input_config", "loadgen") or {}
    requests = count(inner(records, "request_count", "avg"), "request_count", path)
    users, rate = traffic(inner(loadgen, "concurrency"), inner(loadgen, "request_rate"), path)
    words = {"mean": "avg", "p50": "p50", "p90": "p90", "p99": "p99"}
    own = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "latency": "request_latency"}
    times = {
        f"{metric}_{name}": inner(records, part, word) for metric, part in own.items() for name, word in words.items()
    }

    def mean(length: str, total: str) -> float | None:
        stated = number(inner(records, length, "avg"), length)
        in_all = number(inner(records, total, "avg"), total)
        return stated if stated is not None else None if in_all is None else in_all / requests

    models = inner(whole, "input_config", "endpoint", "model_names")
    return BenchResult(
        path_text(path), "aiperf", text(models[0]) if isinstance(models, list) and models else None, users, rate,
        inner(loadgen, "request_rate_mode") == "constant", requests, mean("input_sequence_length", "total_isl"),
        mean("output_sequence_length", "total_osl"), (), positive_times(times, path),
        number(inner(records, "output_token_throughput", "avg"), "output_token_throughput"),
    )  # fmt: skip
