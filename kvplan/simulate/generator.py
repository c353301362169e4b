"""Translation of a load generator's command line to options of `kvplan simulate`.

Each server's own tool is in servers/<name>/bench.py, server-independent ones in clients.py.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.servers.base import generators
from kvplan.servers.logs.bench import Generator
from kvplan.simulate.clients import CLIENTS
from kvplan.simulate.pasted import OPTION, Grammar, promise, uniform, values_of, whole, words_of

MAX_CHARS: Final = 16 * 1024
SHAREGPT: Final = "sharegpt"
RANDOM: Final = ("random", "random-ids")
# Flags that change neither lengths nor arrivals: those with a value, and switches.
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
READ: Final = {
    name: name
    for name in (
        "model", "dataset-name", "num-prompts", "num-prompt", "random-input-len", "random-output-len",
        "random-input", "random-output", "random-range-ratio", "random-prefix-len", "input-len", "output-len",
        "sharegpt-output-len", "request-rate", "burstiness", "max-concurrency", "seed", "goodput",
        "prefix-repetition-prefix-len", "prefix-repetition-suffix-len", "prefix-repetition-num-prefixes",
        "prefix-repetition-output-len",
    )
}  # fmt: skip
CALLS: Final = [client.is_called for client in CLIENTS]
PROMISES: Final = {"ttft": "ttft", "tpot": "tpot", "e2el": "latency"}


def is_generator(text: str) -> bool:
    return any(re.search(pattern, text) for pattern in [tool.is_called for tool in generators()] + CALLS)


def options_of(text: str) -> dict[str, str]:
    """Return the equivalent options of `kvplan simulate`; raise UsageError if a flag has none."""
    generator = next((tool for tool in generators() if re.search(tool.is_called, text)), None)
    client = next((tool for tool in CLIENTS if re.search(tool.is_called, text)), None)
    if client is not None and len(text) <= MAX_CHARS:
        return client.options(words_of(text))
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
    """Return flag (with dashes) -> value; the last value of a repeated flag wins, as in the tools."""
    values = values_of(words_of(text), Grammar(generator.name, READ, VALUES, SWITCHES, frozenset({"goodput"})))
    return {name: " ".join(words) if name == "goodput" else words[-1] for name, words in values.items()}


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
    """Parse the (prompt, output) range ratios: `0.2`, or `{"input": 0.2, "output": 0.5}`."""
    pair = re.fullmatch(r"\s*\{\s*['\"]input['\"]\s*:\s*([0-9.]+)\s*,\s*['\"]output['\"]\s*:\s*([0-9.]+)\s*\}\s*", text)
    with suppress(ValueError):
        low, high = (float(pair[1]), float(pair[2])) if pair else (float(text), float(text))
        if 0 <= low <= 1 and 0 <= high <= 1:
            return low, high
    raise UsageError(OPTION, f"--random-range-ratio {printable(text, 60)} is no share", "write 0 to 1")


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
        options["slo"] = ",".join(promise(pair, PROMISES, "ttft:2000 tpot:50") for pair in stated["goodput"].split())
    if "model" in stated:
        options["model"] = stated["model"]
    return options


def first(stated: Mapping[str, str], *names: str) -> str:
    return next((name for name in names if name in stated), names[0])
