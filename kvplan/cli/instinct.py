"""What people type before they know the commands, as the command that answers it.

Read only after a line was refused: the line as it is meant is run in its place, and a note says which it is.
"""

import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import typer

from kvplan.core.errors import KvplanError
from kvplan.core.files import exists
from kvplan.servers.base import SERVERS

# Typer's exception for a bad line: in click or in typer's copy of it.
ParserError: Final[type[Any]] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def spelled(rows: str) -> dict[str, tuple[str, ...]]:
    """Each word on the right of a row -> the words on its left."""
    parts = (row.partition(":") for row in rows.strip().splitlines())
    return {word: tuple(meaning.split()) for meaning, _, words in parts for word in words.split()}


# Words of other tools, and of everyday speech, for a command.
OTHER_NAMES: Final = spelled("""
    estimate: fit fits size calc calculate mem memory vram plan run users capacity kv kvcache kv-cache context
    recommend: cost price buy choose suggest rent quote cheapest
    why: explain debug diagnose oom crash
    simulate: sim speed latency throughput load
    tune: optimize autotune
    watch: monitor top metrics
    pack: share colocate
    check: lint validate test
    models: list ls model catalog search
    gpus: gpu cards
    diff: compare
    reconcile: verify
    explore: ui
""")
# Names of other tools for an option; taken only where the command has none of that name.
OTHER_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = spelled("""
    --format json: --json
    --format csv: --csv
    --format markdown: --markdown --md
    --report: --html --save
    --explain: --verbose --details --breakdown --kv-per-token
    --strict: --fail-on-warning --fail-on-warnings
    --ctx: --context --context-size --ctx-size --ctx-len --seq-len --n-ctx --tokens
    --ctx auto: --max-ctx --max-context --longest
    --users: --concurrency --num-users --concurrent-users --n-users --max-users
    --quantization: --quant --quantize
    --quantization fp8: --fp8
    --prompt-tokens: --isl --input --input-len --input-tokens --prompt-len --random-input-len --prompt --avg-input
    --output-tokens: --osl --output --output-len --max-tokens --random-output-len --avg-output
    --num-requests: --num-prompts --n-requests
    --rate: --qps --rps --request-rate
    --engine: --server --backend --runtime --framework
    --gpu: --gpus --hardware --accelerator --gpu-type --card --instance
    --gpu-memory: --vram --gpu-mem
    --gpu-memory-utilization: --gpu-util --util --utilization
    --max-num-seqs: --batch-size --max-batch
    --enable-sleep-mode: --colocate --colocated --sleep-mode --sleep
    --prices: --price-file --cost-file
    --kv-cache-dtype: --kv-dtype --kv-cache-type --kv-quant
    --tp: --tensor-parallel
    --pp: --pipeline-parallel
    --slo: --slos
""")
FILLERS: Final = ("on", "with", "at", "for", "using", "and")  # between a model and its GPU
BUDGET: Final = "prices rank GPUs: `kvplan recommend llama-3.1-8b --users 10 --prices h100-80g=3.80,l4=0.80`"
METHOD: Final = r"(?:fp8|int[48]|w\d+a\d+|awq|gptq|nvfp4|mxfp[48]|bitsandbytes|[iI]?[qQ]\d)"
# Of a server, and without effect on what a client of `kvplan serve` sees; ! takes no value.
COUNTS: Final = ("--num-gpus", "--n-gpus", "--gpu-count", "--gpus-per-node", "--gpus")  # of the GPU that --gpu names
TARGETS: Final = "\0--(ttft|tpot|itl|latency)[\0=]([0-9.]+m?s)(?=\0|$)"  # of --slo; a number alone may be either unit
IDLE_FLAGS: Final = (
    "trust_remote_code!", "disable_log_requests!", "enable_log_requests!", "disable_log_stats!", "max_log_len",
    "disable_uvicorn_access_log!", "uvicorn_log_level", "enable_server_load_tracking!", "enable_auto_tool_choice!",
    "tool_call_parser", "reasoning_parser", "enable_prompt_tokens_details!", "download_dir", "tokenizer_mode",
    "tokenizer_revision", "hf_token", "generation_config", "disable_frontend_multiprocessing!", "api_server_count",
    "distributed_executor_backend", "disable_custom_all_reduce!", "otlp_traces_endpoint", "collect_detailed_traces",
    "show_hidden_metrics_for_version", "swap_space", "data_parallel_external_lb!", "structured_outputs_config",
)  # fmt: skip
ASKS: Final = {"--users": "recommend", "--slo": "simulate"}  # answer an option that `estimate` lacks
PIPED: Final = {"LOG": ("-",), "RUN_DIR": ("--log", "-")}  # operand that is missing -> its words
MANIFESTS: Final = (".yaml", ".yml")
LOGS: Final = (".log", ".out", ".err")
TRACES: Final = (".csv", ".jsonl")


def meant(line: Sequence[str], names: Collection[str], context: Any) -> list[str] | None:
    """The line that a refused one stands for, or None.

    names    of the commands
    context  the parser's, of the command that refused the line; the group's if there is no such command
    """
    first = next((word for word in line if not word.startswith("-")), None)
    if first is None:
        return None
    if first not in names:
        return as_command(list(line), first)
    if context is None or context.parent is None:
        return None
    return in_command(list(line), first, context)


def as_command(line: list[str], first: str) -> list[str] | None:
    """A line without a command: a word for one, a server's command, a file, a model or a GPU."""
    if line[0] != first:
        return None
    others = line[1:]
    if first == "help":
        return [*others[:1], "--help"]
    if first == "version":
        return ["--version"]
    named = [*takewhile(lambda word: not word.startswith("-"), others)]
    if first == "compare" and len(named) == 1:
        return ["sweep", *others]  # one model, over several GPUs, servers or flags
    if first == "compare" and named and all(map(is_gpu, named)):
        return ["sweep", "--gpu", ",".join(named), *others[len(named) :]]
    if first in OTHER_NAMES:
        if first == "explain" and others and is_model(others[0]) and not exists(others[0]):
            return ["estimate", *others, "--explain"]
        return [*OTHER_NAMES[first], *others]
    if is_server_command(first, others):
        return pasted(line)
    if exists(first):
        return of_file(first, others)
    if is_gpu(first) and not others:
        return ["gpus", first]
    return ["estimate", *line] if is_model(first) else None


def is_server_command(first: str, others: Sequence[str]) -> bool:
    from kvplan.asked.pasted import is_command

    words = [first, *others]
    if " " in first.strip():
        with suppress(ValueError):
            words = shlex.split(first)
    return is_command(words)


def pasted(line: Sequence[str]) -> list[str]:
    """`kvplan 'vllm serve MODEL' --gpu l40s`, or without the quotes: then --gpu and --format are kvplan's own."""
    if " " in line[0].strip():
        return ["estimate", "--from-command", line[0], *line[1:]]
    words, own = list(line), list[str]()
    for flag in ("--gpu", "--format"):
        while flag in words[:-1]:
            start = words.index(flag)
            own += words[start : start + 2]
            del words[start : start + 2]
    return ["estimate", "--from-command", shlex.join(words), *own]


def of_file(path: str, others: Sequence[str]) -> list[str]:
    """The command for a file or a folder, by the ending of its name."""
    name = path.lower()
    if name.endswith(MANIFESTS):
        return ["check", path, *others]
    if name.endswith(LOGS):
        return ["why", path, *others]
    if name.endswith(TRACES):
        return ["trace", "stats", path, *others]
    if Path(path, "manifest.json").is_file():  # a run of `kvplan profile`
        return ["reconcile", path, *others]
    return ["estimate", path, *others]


def is_gpu(word: str) -> bool:
    from kvplan.hardware.gpu import gpu, split_count

    try:
        return gpu(split_count(word)[1]) is not None
    except KvplanError:
        return False


def is_model(word: str) -> bool:
    """True for a name of the catalog or one much like it, and for what looks like a Hub id."""
    from kvplan.core.near import near_names
    from kvplan.models import catalog

    if re.fullmatch(r"[\w.-]+/[\w.-]+", word) or catalog.find(word) is not None:
        return True
    return any(symbol.isdigit() for symbol in word) and bool(near_names(word, catalog.model_names()))


def in_command(line: list[str], name: str, context: Any) -> list[str] | None:
    """A line whose command does not know an option or takes fewer words."""
    options = {option for param in context.command.params for option in (*param.opts, *param.secondary_opts)}
    line = with_values(line, name, options)
    if name not in line:  # another command answers it
        return line
    if name == "report" and "--gpu" in line:
        return ["estimate" if word == name else word for word in line]
    is_burst = "--num-prompts" in line and "--rate" in options
    line = list(renamed(targeted(counted(line, options)), options))
    if is_burst and not {"--rate", "--users"} & {word.partition("=")[0] for word in line}:
        line += ["--rate", "inf"]  # as `vllm bench serve` sends them
    if name == "serve":
        line = list(without_idle(line, options))
    for option, answers in ASKS.items():
        if option not in options and any(word.partition("=")[0] == option for word in line):
            return [answers if word == name else word for word in line] if name == "estimate" else None
    try:
        _, words, _ = context.command.make_parser(context).parse_args(line[line.index(name) + 1 :])
    except ParserError:  # another option is unknown
        return None
    for word in words:
        if word in FILLERS:
            line.remove(word)
            continue
        flag = "--gpu" if is_gpu(word) else "--ctx" if re.fullmatch("[0-9]+k", word) else None
        flag = "--metrics" if re.match("https?://", word) else flag
        if flag is None or flag not in options:
            return None
        position = len(line) - 1 - line[::-1].index(word)
        line[position : position + 1] = [flag, word]
    return line


def with_values(line: list[str], name: str, options: Collection[str]) -> list[str]:
    """The line with what a model's own flag, a number of images and vLLM's -q stand for."""
    if any(" " in word for word in line):  # a pasted command has words of its own
        return line
    text = shlex.join(line)
    if "--limit-mm-per-prompt" in options:
        text = re.sub(r"--images[ =](\d+)", r"--limit-mm-per-prompt image=\1", text)
    if "--quantization" in options:
        text = re.sub(rf" -q (?={METHOD})", " --quantization ", text)
    if "--model" not in options and " --model" in text:
        text = re.sub(" --model[ =]", " ", text)
        if name == "check" and "--init" not in line:  # without a policy: whether it fits
            text = f"{text.replace(name, 'estimate', 1)} --exit-code"
    return shlex.split(text)


def hint(name: str, options: Collection[str]) -> str | None:
    """What to write for an option of other tools that a command lacks."""
    (other, *values) = OTHER_OPTIONS.get(name, (name,))
    if other != name and other in options:
        return f"use {' '.join((other, *values))}"
    if other in ASKS:
        return f"`kvplan {ASKS[other]}` takes {other}"
    if name in COUNTS and "--gpu" in options:
        return "write the number before the GPU's name: --gpu 8xh100"
    return BUDGET if name == "--budget" else None


def without_idle(line: Sequence[str], options: Collection[str]) -> Iterator[str]:
    """The line without a server's flags that change nothing for clients of `kvplan serve`."""
    idle = {f"--{name.rstrip('!').replace('_', '-')}": not name.endswith("!") for name in IDLE_FLAGS}
    words = iter(line)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in idle or name in options:
            yield word
        elif idle[name] and not equals:
            next(words, None)  # its value


def counted(line: Sequence[str], options: Collection[str]) -> list[str]:
    """The line with a number of GPUs in front of the GPU's name: `--gpu b200 --num-gpus 8` is `--gpu 8xb200`."""
    own = (*COUNTS, "--gpu")
    line = [part for word in line for part in (word.split("=", 1) if word.partition("=")[0] in own else [word])]
    flag = next((name for name in COUNTS if name in line[:-1] and name not in options), None)
    if flag is None or "--gpu" not in line[:-1] or not re.fullmatch("[1-9][0-9]{0,4}", line[line.index(flag) + 1]):
        return line
    if re.search(r",|^[0-9]+ ?x", line[line.index("--gpu") + 1]):  # several, or counted already
        return line
    start = line.index(flag)
    number = line[start + 1]
    del line[start : start + 2]
    place = line.index("--gpu") + 1
    return [*line[:place], f"{number}x{line[place]}", *line[place + 1 :]]


def targeted(line: Sequence[str]) -> list[str]:
    """The line with targets of latency in --slo: `--ttft 2s --tpot 50ms` is `--slo ttft=2s,tpot=50ms`."""
    text = "\0".join(line)
    targets = [f"{'tpot' if name == 'itl' else name}={value}" for name, value in re.findall(TARGETS, text)]
    if not targets or "\0--slo" in text:  # its own targets would be dropped
        return list(line)
    return [*re.sub(TARGETS, "", text).split("\0"), "--slo", ",".join(targets)]


def renamed(line: Sequence[str], options: Collection[str]) -> Iterator[str]:
    """The line with the command's own names of options, unless it has one of these as well."""
    typed = {word.partition("=")[0] for word in line}
    for word, following in zip(line, [*line[1:], "-"], strict=True):
        name, equals, value = word.partition("=")
        other = OTHER_OPTIONS.get(name)
        if name[:2] == "--" and name[2:] in SERVERS:
            other = ("--engine", name[2:])
        elif name == "--output" and following.isdigit() and "--output-tokens" in options:
            name = "--output-len"  # where --output names a form
        elif (
            name in ("-o", "--output", "--out")
            and "-o" not in options
            and re.search(r"\.(?:html|md|csv|json)$", value or following)
        ):
            other = ("--report",)
        is_known = other is not None and other[0] in {*options, *ASKS} and other[0] not in typed
        if other is None or name in options or not is_known:
            yield word
        else:
            yield other[0] + (f"={value}" if equals else "")
            yield from () if len(other) == 1 or (other[0] == "--ctx" and following[:1].isdigit()) else other[1:]


def with_operand(line: Sequence[str], missing: str) -> list[str] | None:
    """A line of a command that lacks its operand: it reads a pipe, and compares one model over a list of settings."""
    if missing == "NEW" and any("," in word for word in line):
        return ["sweep" if word == "diff" else word for word in line]
    return [*line, *PIPED[missing]] if missing in PIPED and is_piped() else None


def is_piped() -> bool:
    """True if standard input is another program's output, or a file."""
    import os
    import stat

    with suppress(OSError, ValueError, AttributeError):
        mode = os.fstat(sys.stdin.fileno()).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
    return False
