"""A load generator's command line as the load it sends, in the words of `kvplan simulate`.

Each server's own tool stands in servers/<name>/bench.py.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.servers.base import generators
from kvplan.servers.bench import Generator

OPTION: Final = "--bench-command"
MAX_CHARS: Final = 16 * 1024
SHAREGPT: Final = "sharegpt"
RANDOM: Final = ("random", "random-ids")
# What changes neither lengths nor arrivals: names of flags that take a value, and of switches.
VALUES: Final = frozenset(
    {
        "label", "backend", "base-url", "host", "port", "endpoint", "header", "tokenizer", "tokenizer-mode",
        "logprobs", "num-warmups", "metadata", "result-dir", "result-filename", "percentile-metrics",
        "metric-percentiles", "request-id-prefix", "top-p", "top-k", "min-p", "temperature", "frequency-penalty",
        "presence-penalty", "repetition-penalty", "served-model-name", "ready-check-timeout-sec",
        "chat-template-kwargs", "extra-body", "dataset-path", "random-batch-size", "output-file", "plot-timeline",
        "timeline-itl-thresholds", "warmup-requests", "tag", "extra-request-body", "apply-chat-template-kwargs",
    }
)  # fmt: skip
SWITCHES: Final = frozenset(
    {
        "trust-remote-code", "disable-tqdm", "profile", "save-result", "save-detailed", "append-result",
        "ignore-eos", "insecure", "skip-tokenizer-init", "skip-chat-template", "disable-shuffle", "no-oversample",
        "no-stream", "use-beam-search", "plot-dataset-stats", "disable-stream", "disable-ignore-eos",
        "return-logprob", "apply-chat-template", "flush-cache", "tokenize-prompt", "output-details", "random-ids",
    }
)  # fmt: skip
READ: Final = frozenset(
    {
        "model", "dataset-name", "num-prompts", "num-prompt", "random-input-len", "random-output-len",
        "random-input", "random-output", "random-range-ratio", "random-prefix-len", "input-len", "output-len",
        "sharegpt-output-len", "request-rate", "burstiness", "max-concurrency", "seed", "goodput",
        "prefix-repetition-prefix-len", "prefix-repetition-suffix-len", "prefix-repetition-num-prefixes",
        "prefix-repetition-output-len",
    }
)  # fmt: skip


def is_generator(text: str) -> bool:
    return any(re.search(generator.is_called, text) for generator in generators())


def options_of(text: str) -> dict[str, str]:
    """The options of `kvplan simulate` that say the same; UsageError where a flag has no such option."""
    generator = next((tool for tool in generators() if re.search(tool.is_called, text)), None)
    if generator is None or len(text) > MAX_CHARS:
        raise UsageError(OPTION, "no command of a load generator is found", "paste `vllm bench serve ...`")
    stated = flags(text, generator)
    dataset = stated.get("dataset-name", generator.dataset)
    options = {"num_requests": stated.get("num-prompts", stated.get("num-prompt", str(generator.num_prompts)))}
    if dataset in RANDOM:
        options |= random_lengths(stated, generator)
    elif dataset == SHAREGPT:
        options["profile"] = SHAREGPT
        if "sharegpt-output-len" in stated:
            raise UsageError(
                OPTION, "--sharegpt-output-len has no counterpart", "state --prompt-tokens, --output-tokens"
            )
    elif dataset == "prefix_repetition" and stated.get("prefix-repetition-num-prefixes") == "1":
        prefix = whole(stated, "prefix-repetition-prefix-len", 256)
        options["prompt_tokens"] = str(prefix + whole(stated, "prefix-repetition-suffix-len", 256))
        options["output_tokens"] = str(whole(stated, "prefix-repetition-output-len", 128))
        options["shared_prefix"] = str(prefix)
    else:
        raise UsageError(
            OPTION, f"--dataset-name {printable(dataset, 60)}: its lengths are not known here",
            "write them to a --trace, or state --prompt-tokens and --output-tokens",
        )  # fmt: skip
    return options | arrivals(stated)


def flags(text: str, generator: Generator) -> dict[str, str]:
    """Flag -> value, dashes between words; a flag that is given twice counts last, as for the tools."""
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text), comments=True)
    except ValueError as error:
        raise UsageError(OPTION, f"the quotes do not match ({str(error).lower()})", "paste the whole command") from None
    values: dict[str, str] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("_", "-")
            if name in SWITCHES:
                name = None
            elif name not in VALUES | READ:
                raise UsageError(
                    OPTION, f"--{printable(name, 60)} of {generator.name} has no counterpart in a simulation",
                    "leave it out of the command",
                )  # fmt: skip
            elif equals:
                values[name], name = value, None
        elif name is not None:
            values[name] = f"{values[name]} {word}" if name in values and name == "goodput" else word
            name = name if name == "goodput" else None
    return values


def random_lengths(stated: Mapping[str, str], generator: Generator) -> dict[str, str]:
    prompt = whole(stated, first(stated, "random-input-len", "random-input", "input-len"), generator.input_len)
    answer = whole(stated, first(stated, "random-output-len", "random-output", "output-len"), generator.output_len)
    prefix = whole(stated, "random-prefix-len", 0)
    prompt_ratio, answer_ratio = ratios(stated.get("random-range-ratio", "0.0"))
    low, high = generator.spread(prompt, prompt_ratio)
    lengths = {
        "prompt_tokens": uniform(low + prefix, high + prefix),
        "output_tokens": uniform(*generator.spread(answer, answer_ratio)),
    }
    return lengths | ({"shared_prefix": str(prefix)} if prefix else {})


def ratios(text: str) -> tuple[float, float]:
    """Of prompts and of answers: `0.2`, or `{"input": 0.2, "output": 0.5}`."""
    pair = re.fullmatch(r"\s*\{\s*['\"]input['\"]\s*:\s*([0-9.]+)\s*,\s*['\"]output['\"]\s*:\s*([0-9.]+)\s*\}\s*", text)
    try:
        low_high = (float(pair[1]), float(pair[2])) if pair else (float(text), float(text))
    except ValueError:
        low_high = (-1.0, -1.0)
    if not all(0 <= ratio <= 1 for ratio in low_high):
        raise UsageError(OPTION, f"--random-range-ratio {printable(text, 60)} is no share", "write 0 to 1")
    return low_high


def arrivals(stated: Mapping[str, str]) -> dict[str, str]:
    options = {"rate": stated.get("request-rate", "inf")}
    if "max-concurrency" in stated:
        options["max_concurrency"] = stated["max-concurrency"]
    burstiness = stated.get("burstiness", "1.0")
    if options["rate"] != "inf" and burstiness not in ("1", "1.0"):
        options["arrivals"] = "constant" if burstiness == "inf" else f"gamma:{burstiness}"
    if "seed" in stated:
        options["seed"] = stated["seed"]
    if "goodput" in stated:
        options["slo"] = ",".join(promise(pair) for pair in stated["goodput"].split())
    if "model" in stated:
        options["model"] = stated["model"]
    return options


def promise(text: str) -> str:
    """`ttft:2000` of milliseconds as `ttft=2000ms`."""
    name, _, limit = text.partition(":")
    names = {"ttft": "ttft", "tpot": "tpot", "e2el": "latency"}
    if name not in names or not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", limit):
        raise UsageError(OPTION, f"--goodput {printable(text, 60)} is not understood", "write ttft:2000 tpot:50")
    return f"{names[name]}={limit}ms"


def first(stated: Mapping[str, str], *names: str) -> str:
    return next((name for name in names if name in stated), names[0])


def whole(stated: Mapping[str, str], name: str, default: int) -> int:
    text = stated.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(OPTION, f"--{name} {printable(text, 60)} is no whole number", "write plain digits")
    return int(text)


def uniform(low: int, high: int) -> str:
    return str(low) if low == high else f"uniform:{low}-{high}"
