"""Server-independent load generators: guidellm, aiperf and its predecessor genai-perf.

Sources: guidellm 0.3.0 to 0.6.0 (`guidellm benchmark`: __main__.py, benchmark/profile.py, dataset/synthetic.py) and
0.8.1 (`guidellm run`: schemas/benchmark, schemas/data); aiperf 0.13.0 (config/flags/cli_config.py and its converters,
common/random_generator.py); genai-perf 0.0.16 (parser.py, utils.py).
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.simulate.pasted import OPTION, Grammar, promise, uniform, values_of, whole


@dataclass(frozen=True, slots=True)
class Client:
    """One tool: a pattern of its command, and the translation of its arguments to options of `kvplan simulate`."""

    is_called: str
    options: Callable[[list[str]], dict[str, str]]


def refused(what: str, cure: str) -> UsageError:
    return UsageError(OPTION, what, cure)


def last(values: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: words[-1] for name, words in values.items()}


def after(words: list[str], *names: str) -> list[str]:
    """Return the words after these words of the command."""
    for name in names:
        words = words[words.index(name) + 1 :] if name in words else words
    return words


def number(text: str, flag: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", text) or float(text) == 0:
        raise refused(f"{flag} {printable(text, 60)} is not a single number above 0", "simulate one rate at a time")
    return float(text)


def counted(rate: str, flag: str, count: int | None, seconds: float | None, ends: tuple[str, str]) -> int:
    """Return the number of requests: `count`, or those sent in `seconds` at the rate; ends: the two flags' names."""
    if seconds is None and count is None:
        raise refused(f"the command does not say how many requests it sends ({ends[0]} is missing)", f"add {ends[0]}")
    if seconds is None:
        return count or 0
    if rate == "inf":
        raise refused(f"how many requests {ends[1]} allows depends on the server", f"use {ends[0]} instead")
    within = math.ceil(number(rate, flag) * seconds)
    return within if count is None else min(within, count)


# --- guidellm ---------------------------------------------------------------------------------------------------------

OLD_GUIDELLM: Final = Grammar(
    "guidellm",
    {
        "profile": "profile", "rate-type": "profile", "rate": "rate", "data": "data", "model": "model",
        "max-seconds": "max-seconds", "max-requests": "max-requests", "random-seed": "random-seed",
    },
    frozenset(
        {
            "target", "backend", "backend-type", "backend-args", "backend-kwargs", "processor", "processor-args",
            "output-path", "output-extras", "output-sampling", "output-dir", "outputs", "request-format",
            "request-type", "sample-requests", "data-num-workers", "dataloader-kwargs", "max-errors",
            "max-error-rate", "max-global-error-rate",
        }
    ),
    frozenset(
        {
            "disable-progress", "display-scheduler-stats", "disable-console-outputs", "disable-console",
            "disable-console-interactive",
        }
    ),
)  # fmt: skip
GUIDELLM: Final = Grammar(
    "guidellm",
    {name: name for name in ("profile", "data", "backend", "constraint", "seed", "metrics")},
    frozenset({"label", "-l", "tokenizer", "output", "data-loader"}),
    frozenset(
        {"disable-console", "disable-console-outputs", "disable-console-interactive", "disable-progress"}
    ),
)  # fmt: skip
SYNTHETIC: Final = {"kind", "source", "samples", "prefix_tokens", "prefix_count", "turns"} | {
    f"{side}_tokens{part}" for side in ("prompt", "output") for part in ("", "_stdev", "_min", "_max")
}


def guidellm(words: list[str]) -> dict[str, str]:
    """Translate `guidellm run` (0.7 and newer) or `guidellm benchmark` (before)."""
    if "benchmark" in words:
        return guidellm_benchmark(last(values_of(after(words, "benchmark"), OLD_GUIDELLM)))
    values = values_of(after(words, "run"), GUIDELLM)
    if len(values.get("data", [])) > 1:
        raise refused("several --data are mixed", "simulate one at a time")
    profile = pairs(values.get("profile", [""])[-1], "--profile")
    kind = profile.pop("kind", "")
    known = {"rate", "streams", "max_concurrency", "rampup_duration"}
    for key in profile.keys() - known:
        raise refused(f"{key} of --profile has no counterpart in a simulation", "remove it from the command")
    if profile.get("rampup_duration", "0") not in ("0", "0.0"):
        raise refused("rampup_duration of --profile cannot be simulated", "remove it from the command")
    options = profile_options(kind, profile.get("rate", profile.get("streams")), profile.get("max_concurrency"))
    ends = constraints(values.get("constraint", []))
    count = whole(ends, "max_requests", 0) if "max_requests" in ends else None
    seconds = number(ends["max_duration"], "max_duration") if "max_duration" in ends else None
    names = ("--constraint kind=max_requests,count=N", "max_duration")
    options["num_requests"] = str(counted(options["rate"], "rate", count, seconds, names))
    metrics = pairs(values.get("metrics", [""])[-1], "--metrics")
    limits = {"ttft_ms": "ttft", "tpot_ms": "tpot", "e2el_ms": "latency"}
    goals = [f"{limits[key[4:]]}={text}ms" for key, text in metrics.items() if key[4:] in limits and key[:4] == "slo."]
    options |= {"slo": ",".join(goals)} if goals else {}
    seed = pairs(values.get("seed", [""])[-1], "--seed").get("value")
    model = pairs(values.get("backend", [""])[-1], "--backend").get("model")
    stated = {name: text for name, text in (("seed", seed), ("model", model)) if text}
    return options | synthetic(values.get("data", [""])[-1]) | stated


def guidellm_benchmark(stated: Mapping[str, str]) -> dict[str, str]:
    kind, rate = stated.get("profile", "sweep"), stated.get("rate")
    options = profile_options(kind, rate, rate if kind == "throughput" else None)
    data = synthetic_pairs(stated.get("data", ""))
    count = whole(stated, "max-requests", 0) if "max-requests" in stated else None
    if "samples" in data:  # the run ends when its data does
        count = min(whole(data, "samples", 0), count or 10**9)
    seconds = number(stated["max-seconds"], "--max-seconds") if "max-seconds" in stated else None
    options["num_requests"] = str(
        counted(options["rate"], "--rate", count, seconds, ("--max-requests", "--max-seconds"))
    )
    options |= synthetic(stated.get("data", ""))
    if "random-seed" in stated:
        options["seed"] = stated["random-seed"]
    return options | ({"model": stated["model"]} if "model" in stated else {})


def profile_options(kind: str, rate: str | None, limit: str | None) -> dict[str, str]:
    """Return the arrival options; each stream of a concurrent profile sends as soon as its last request ends."""
    options = {"rate": "inf"}
    match kind:
        case "synchronous":
            return options | {"max_concurrency": "1"}
        case "concurrent" if rate is not None:
            return options | {"max_concurrency": streams(rate)}
        case "throughput":
            return options | {"max_concurrency": "512" if limit is None else streams(limit)}  # 0.3's own limit
        case "constant" | "async" | "poisson" if rate is not None:
            number(rate, "rate")
            options = {"rate": rate} | ({} if kind == "poisson" else {"arrivals": "constant"})
            return options | ({} if limit is None else {"max_concurrency": streams(limit)})
        case "constant" | "async" | "poisson" | "concurrent":
            raise refused(f"the profile {kind} of guidellm needs a rate", "add it to the command")
        case _:
            raise refused(
                f"the profile {printable(kind, 40) or '(none)'} of guidellm finds its own rates",
                "name one of constant, poisson, concurrent, synchronous or throughput, with a rate",
            )


def streams(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]{0,8}(\.0)?", text):
        raise refused(f"{printable(text, 60)} is not a single number of requests at once", "simulate one at a time")
    return text.removesuffix(".0")


def constraints(texts: list[str]) -> dict[str, str]:
    """Return kind -> limit of the constraints; error limits never end a simulated run."""
    ends = {}
    for text in texts:
        stated = pairs(text, "--constraint")
        kind = stated.get("kind", "")
        if kind not in ("max_requests", "max_duration", "max_errors", "max_error_rate", "max_global_error_rate"):
            raise refused(f"--constraint {printable(kind, 40)} cannot be simulated", "use kind=max_requests,count=N")
        ends[kind] = stated.get("count", stated.get("seconds", ""))
    return ends


def pairs(text: str, flag: str) -> dict[str, str]:
    """Parse `a=1,b=2` or a JSON object; values stay text."""
    if text.lstrip().startswith("{"):
        try:
            document = json.loads(text)
        except ValueError:
            raise refused(f"{flag} {printable(text, 60)} is not valid JSON", "check its quotes") from None
        return flat(document, "")
    items = [item.partition("=") for item in text.split(",") if item.strip()]
    if not all(equals for _, equals, _ in items):
        raise refused(f"{flag} {printable(text, 60)} is not a list of key=value", "write prompt_tokens=256,...")
    return {key.strip().replace("-", "_"): value.strip() for key, _, value in items}


def flat(document: dict[str, Any], before: str) -> dict[str, str]:
    pairs_of: dict[str, str] = {}
    for key, value in document.items():
        pairs_of |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": str(value)}
    return pairs_of


def synthetic_pairs(text: str) -> dict[str, str]:
    """Return the key-value pairs of --data, or none if it names a file or a data set."""
    return pairs(text, "--data") if "=" in text or text.lstrip().startswith("{") else {}


def synthetic(text: str) -> dict[str, str]:
    """Return the length options of guidellm's synthetic data; every prompt starts with the shared prefix."""
    data = synthetic_pairs(text)
    if data.get("kind", "synthetic_text") != "synthetic_text" or "prompt_tokens" not in data:
        raise refused(
            f"--data {printable(text, 60) or '(none)'}: its lengths are not known here",
            "write them to a --trace, or state --prompt-tokens and --output-tokens",
        )
    for key in data.keys() - SYNTHETIC:
        raise refused(f"{printable(key, 40)} of --data has no counterpart in a simulation", "remove it")
    for key in ("prefix_count", "turns"):
        if data.get(key, "1") != "1":
            raise refused(f"{key} of --data above 1 cannot be simulated", f"use {key}=1")
    if "output_tokens" not in data:
        raise refused("--data has no output_tokens: outputs end when the model ends them", "state output_tokens")
    prefix = whole(data, "prefix_tokens", 0)
    lengths = {"prompt_tokens": spread(data, "prompt", prefix), "output_tokens": spread(data, "output", 0)}
    return lengths | ({"shared_prefix": str(prefix)} if prefix else {})


def spread(data: Mapping[str, str], side: str, prefix: int) -> str:
    """Return the distribution that IntegerRangeSampler draws from: a clipped normal (default: at 5 standard
    deviations), or uniform without a deviation.
    """
    name = f"{side}_tokens"
    mean, deviation = whole(data, name, 0), whole(data, f"{name}_stdev", 0)
    low = whole(data, f"{name}_min", max(1, mean - 5 * deviation))
    high = whole(data, f"{name}_max", mean + 5 * deviation)
    if mean < 1 or low > high:
        raise refused(f"{name} of --data states no lengths ({low} to {high})", "state a mean above 0 within its ends")
    if low == high or not deviation:
        return uniform(low + prefix, high + prefix)
    return f"normal:mean={mean + prefix},stddev={deviation},min={low + prefix},max={high + prefix}"


# --- aiperf -----------------------------------------------------------------------------------------------------------

AIPERF_READ: Final = {
    "-m": "model", "model": "model", "model-names": "model",
    "concurrency": "concurrency", "request-rate": "rate", "arrival-pattern": "pattern", "request-rate-mode": "pattern",
    "arrival-smoothness": "smoothness", "vllm-burstiness": "smoothness",
    "request-count": "requests", "num-requests": "requests", "benchmark-duration": "seconds",
    "num-dataset-entries": "entries", "num-prompts": "entries",
    "prompt-input-tokens-mean": "isl", "synthetic-input-tokens-mean": "isl", "isl": "isl",
    "prompt-input-tokens-stddev": "isl-stddev", "synthetic-input-tokens-stddev": "isl-stddev",
    "isl-stddev": "isl-stddev",
    "prompt-output-tokens-mean": "osl", "output-tokens-mean": "osl", "osl": "osl",
    "prompt-output-tokens-stddev": "osl-stddev", "output-tokens-stddev": "osl-stddev", "osl-stddev": "osl-stddev",
    "prompt-prefix-pool-size": "prefixes", "prefix-prompt-pool-size": "prefixes", "num-prefix-prompts": "prefixes",
    "prompt-prefix-length": "prefix", "prefix-prompt-length": "prefix", "shared-system-prompt-length": "system",
    "random-seed": "seed", "goodput": "goodput", "-g": "goodput",
}  # fmt: skip
AIPERF_VALUES: Final = frozenset(
    {
        "endpoint-type", "custom-endpoint", "endpoint", "url", "-u", "url-strategy", "request-timeout-seconds",
        "api-key", "transport", "transport-type", "tokenizer", "tokenizer-revision", "extra-inputs", "header", "-H",
        "output-artifact-dir", "artifact-dir", "profile-export-prefix", "profile-export-file", "export-level",
        "profile-export-level", "ui-type", "ui", "log-level", "workers-max", "max-workers", "server-metrics",
        "gpu-telemetry", "warmup-request-count", "num-warmup-requests", "benchmark-grace-period", "slice-duration",
        "record-processors", "record-processor-service-count", "backend", "server-metrics-url", "grpc-method",
        "generate-plots", "connection-reuse-strategy", "wait-for-model-timeout", "model-selection-strategy",
    }
)  # fmt: skip
AIPERF_SWITCHES: Final = frozenset(
    {
        "streaming", "use-legacy-max-tokens", "use-server-token-count", "tokenizer-trust-remote-code", "verbose", "-v",
        "extra-verbose", "-vv", "no-server-metrics", "no-gpu-telemetry", "output-tokens-mean-deterministic",
        "auto-plot", "no-auto-plot", "export-http-trace", "show-trace-timing", "force-min-tokens",
    }
)  # fmt: skip
AIPERF: Final = Grammar("aiperf", AIPERF_READ, AIPERF_VALUES, AIPERF_SWITCHES, frozenset({"goodput"}))
GENAI_PERF: Final = Grammar("genai-perf", AIPERF_READ, AIPERF_VALUES, AIPERF_SWITCHES, frozenset({"goodput"}))
AIPERF_GOALS: Final = {"time_to_first_token": "ttft", "inter_token_latency": "tpot", "request_latency": "latency"}
INPUT_TOKENS: Final = 550
DATASET_ENTRIES: Final = 100
REQUESTS: Final = 10


def aiperf(words: list[str]) -> dict[str, str]:
    return aiperf_options(after(words, "aiperf", "profile"), AIPERF)


def genai_perf(words: list[str]) -> dict[str, str]:
    """Translate as for aiperf, but with constant gaps (perf_analyzer's default) and 100 prompts by default."""
    return aiperf_options(after(words, "genai-perf", "profile"), GENAI_PERF)


def aiperf_options(words: list[str], grammar: Grammar) -> dict[str, str]:
    values = values_of(words, grammar)
    stated = last(values)
    is_old = grammar is GENAI_PERF
    options = aiperf_arrivals(stated, "constant" if is_old else "poisson")
    count = whole(stated, "requests", 0) if "requests" in stated else None
    seconds = number(stated["seconds"], "--benchmark-duration") if "seconds" in stated else None
    if count is None and seconds is None and not is_old:
        count = REQUESTS
    ends = ("--request-count", "--benchmark-duration")
    num_requests = counted(options["rate"], "--request-rate", count, seconds, ends)
    entries = whole(stated, "entries", DATASET_ENTRIES if is_old or count is None else count)
    if entries < num_requests:
        raise refused(
            f"{grammar.tool} sends its {entries:,} prompts again and again to make {num_requests:,} requests",
            f"raise --num-dataset-entries to {num_requests}: repeated prompts are not simulated",
        )
    options["num_requests"] = str(num_requests)
    return options | aiperf_lengths(stated, "normal" if is_old else "truncnormal") | aiperf_rest(values)


def aiperf_arrivals(stated: Mapping[str, str], pattern: str) -> dict[str, str]:
    options = {"rate": "inf"}
    if "rate" in stated:
        number(stated["rate"], "--request-rate")
        options["rate"] = stated["rate"]
        pattern = stated.get("pattern", "gamma" if "smoothness" in stated else pattern)
        match pattern:
            case "constant":
                options["arrivals"] = "constant"
            case "gamma":
                options["arrivals"] = f"gamma:{stated.get('smoothness', '1')}"
            case "poisson":
                pass
            case _:
                raise refused(f"--arrival-pattern {printable(pattern, 40)} cannot be simulated", "use poisson")
    if "concurrency" in stated or "rate" not in stated:
        options["max_concurrency"] = streams(stated.get("concurrency", "1"))
    return options


def aiperf_lengths(stated: Mapping[str, str], kind: str) -> dict[str, str]:
    if "osl" not in stated:
        raise refused("without --osl outputs end when the model ends them", "state --osl (--output-tokens-mean)")
    prefix = whole(stated, "system", 0)
    if whole(stated, "prefixes", 0) > 1:
        raise refused("several prefixes, one drawn for each prompt, cannot be simulated", "use --num-prefix-prompts 1")
    if whole(stated, "prefixes", 0) == 1:
        prefix += whole(stated, "prefix", 0)
    lengths = {
        "prompt_tokens": normal(kind, stated, "isl", INPUT_TOKENS, prefix),
        "output_tokens": normal(kind, stated, "osl", 0, 0),
    }
    return lengths | ({"shared_prefix": str(prefix)} if prefix else {})


def normal(kind: str, stated: Mapping[str, str], side: str, default: int, prefix: int) -> str:
    """Return a normal distribution; values below 1 are redrawn (aiperf) or clipped to 1 token (genai-perf)."""
    mean = whole(stated, side, default)
    text = stated.get(f"{side}-stddev", "0")
    if mean < 1:
        raise refused(f"--{side} {mean} states no length", "state 1 or more tokens")
    if text in ("0", "0.0"):
        return str(mean + prefix)
    return f"{kind}:mean={mean + prefix},stddev={number(text, f'--{side}-stddev'):g},min={1 + prefix}"


def aiperf_rest(values: Mapping[str, list[str]]) -> dict[str, str]:
    options = {}
    if "seed" in values:
        options["seed"] = values["seed"][-1]
    if "goodput" in values:
        goals = " ".join(values["goodput"]).split()
        example = "time_to_first_token:2000 inter_token_latency:50"
        options["slo"] = ",".join(promise(goal, AIPERF_GOALS, example) for goal in goals)
    if "model" in values:
        if len(values["model"]) > 1 or "," in values["model"][-1]:
            raise refused("several models share the load", "simulate one at a time")
        options["model"] = values["model"][-1]
    return options


CLIENTS: Final = (
    Client(r"\bguidellm\s+(benchmark|run)\b", guidellm),
    Client(r"\baiperf\s+profile\b", aiperf),
    Client(r"\bgenai-perf\s+profile\b", genai_perf),
)
