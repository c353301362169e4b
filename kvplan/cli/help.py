"""Plain-text help: a command's options in panels, and the commands in groups with an example each."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Final, get_args

import typer.core

from kvplan.servers.base import SERVERS, terms_of
from kvplan.servers.words.arguments import ARGUMENTS, COMMON, Panel, flags_of

GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "Plan": {
        "estimate": "kvplan estimate llama-3.1-8b --gpu a100-80g --ctx 32k",
        "recommend": "kvplan recommend qwen3-8b --users 100 --ctx 8k",
        "sweep": "kvplan sweep qwen3-8b --gpu l40s,h100-80g --ctx 8k,32k",
        "explore": "kvplan explore qwen3-8b --gpu l40s --ctx 8k,32k",
        "atlas": "kvplan atlas --models qwen3-8b,llama-3.1-8b --gpus l40s,h100-80g -o site",
        "simulate": "kvplan simulate qwen3-8b --gpu l40s --ctx 8k --profile azure-2023-conv --rate 2",
        "tune": "kvplan tune qwen3-8b --gpu l40s --ctx 8k --profile azure-2023-conv --slo ttft.p90=2s,tpot=80ms",
        "diff": "kvplan diff qwen3-8b qwen3-8b-fp8 --gpu l40s --ctx 8k",
        "pack": "kvplan pack --gpu l40s --server 'qwen3-8b --max-model-len 16384' --server 'qwen3-0.6b --users 4'",
        "upgrade": "kvplan upgrade qwen3-8b --gpu l40s --ctx 8k --from vllm@0.24",
    },
    "Validate": {
        "calibrate": "kvplan calibrate qwen3-8b --gpu l40s --ctx 8k --bench 'results/*.json' -o calibration.json",
        "profile": "kvplan profile",
        "reconcile": "kvplan reconcile --log server.log --gpu a100-80g",
        "report": "kvplan report runs/smollm2-135m-1",
    },
    "Troubleshoot": {
        "preflight": "kvplan preflight 'vllm serve Qwen/Qwen3-8B --max-model-len 8192' --gpu l40s",
        "why": "kvplan why server.log",
    },
    "Inspect": {
        "models": "kvplan models qwen3-8b",
        "gpus": "kvplan gpus h100-80g",
        "trace": "kvplan trace profiles",
        "serve": "kvplan serve llama-3.1-8b --simulate h100-80g",
        "mcp": "kvplan mcp",
        "rightsize": "kvplan rightsize examples/metrics.1.txt examples/metrics.2.txt --interval 630s",
        "watch": "kvplan watch --pid 1234",
        "doctor": "kvplan doctor",
    },
    "CI": {"check": "kvplan check --init qwen3-8b --gpu l40s --ctx 8k", "schema": "kvplan schema plan"},
}
MORE: Final[Mapping[str, tuple[str, ...]]] = {
    "estimate": (
        "kvplan estimate qwen2.5-32b --quantization awq --gpu 2xl40s --ctx 16k",
        "kvplan estimate --from-command 'vllm serve Qwen/Qwen3-8B --max-model-len 8192' --gpu l40s",
    ),
    "recommend": (
        "kvplan recommend qwen3-8b --users 100 --ctx 8k --gpus l40s,h100-80g",
        "kvplan recommend qwen3-8b --users 100 --ctx 8k --gpu 2xl40s",
    ),
    "atlas": (
        "kvplan atlas --models qwen3-8b --gpus l40s -o site --prices examples/prices.yaml",
        "kvplan atlas --models qwen3-0.6b --gpus rtx-4090 -o site --url https://example.org/atlas",
    ),
    "tune": (
        "kvplan tune qwen3-8b --gpu 2xl40s --ctx 8k --prompt-tokens 1k --output-tokens 200 --rate 4 --slo tpot=80ms",
        "kvplan tune qwen3-8b --gpu l40s --ctx 8k --prompt-tokens 500 --output-tokens 100 --rate inf",
    ),
    "sweep": (
        "kvplan sweep qwen3-8b --gpu h100-80g --tp 1,2,4 --ctx 32k",
        "kvplan sweep qwen3-8b qwen3-8b-fp8 --gpu l40s --ctx 8k --format csv",
    ),
    "explore": (
        "kvplan explore qwen3-8b qwen3-8b-fp8 --gpu h100-80g --tp 1,2 --ctx 32k -o qwen.html",
        "kvplan explore llama-3.1-8b --gpu a100-80g --engine vllm --tp 1 --ctx 4k,16k",
    ),
    "why": (
        "kvplan why - < server.log",
        'kvplan why --command "docker logs vllm"',
        "vllm serve Qwen/Qwen3-8B 2>&1 | kvplan why --follow -",
    ),
    "preflight": (
        "kvplan preflight --gpu l40s vllm serve Qwen/Qwen3-8B --max-model-len 8192",
        "kvplan preflight 'vllm serve Qwen/Qwen3-8B --max-model-len 8192' --gpu l40s --format json",
    ),
    "rightsize": (
        "kvplan rightsize http://localhost:8000/metrics --interval 5m",
        "kvplan rightsize monday.txt friday.txt --interval 96h --growth 2",
    ),
    "pack": (
        "kvplan pack --gpu rtx-4090 --memory-in-use 1GiB --server 'chat=qwen3-8b-awq --max-model-len 8192 --users 2'",
        "kvplan pack qwen3-32b qwen3-8b qwen3-0.6b --gpu 2xl40s,h100-80g",
        "kvplan pack --gpu h100-80g --server 'old=vllm serve Qwen/Qwen3-8B' --server 'new=qwen3-8b-fp8' --rest new",
    ),
    "upgrade": (
        "kvplan upgrade qwen3.5-27b --gpu h100-80g --ctx 32k --from vllm@0.26 --to vllm@0.33",
        "kvplan upgrade 'vllm serve Qwen/Qwen3-8B --max-model-len 8192' --gpu l40s --from vllm@0.20",
    ),
    "mcp": ("kvplan mcp --list", "kvplan mcp --tools estimate,why"),
    "models": ("kvplan models", "kvplan models --family qwen3"),
    "gpus": ("kvplan gpus", "kvplan gpus l40s --format json"),
    "schema": ("kvplan schema sweep", "kvplan schema diff"),
    "simulate": (
        "kvplan simulate qwen3-8b --gpu l40s --ctx 8k --trace examples/trace.csv --slo ttft=2s,tpot=80ms",
        "kvplan simulate qwen3-8b --gpu l40s --ctx 8k --users 8 --prompt-tokens 1k --output-tokens 100",
    ),
    "diff": ("kvplan diff before.json after.json", "kvplan diff main:kvplan.policy.yaml kvplan.policy.yaml"),
    "check": (
        "kvplan check kvplan.policy.yaml --strict",
        "kvplan check kvplan.policy.yaml --base origin/main --format github",
    ),
    "calibrate": (
        "kvplan calibrate qwen3-8b --gpu l40s --ctx 8k --bench bench.json --prompt-tokens 1000 --output-tokens 200",
        "kvplan calibrate --from-command 'vllm serve Qwen/Qwen3-8B' --gpu l40s --bench a.json --bench b.json",
    ),
    "profile": (
        "kvplan profile smollm2-135m --device cpu --num-seqs 8 -o runs/smollm2",
        "kvplan profile --server http://localhost:8000 --num-seqs 100 --rate 4 -o runs/live",
    ),
    "reconcile": (
        "kvplan reconcile --log examples/vllm-0.10.log --max-error 15%",
        "kvplan reconcile --metrics http://localhost:8000/metrics --model qwen3-8b --gpu l40s",
    ),
    "report": (
        "kvplan report runs/smollm2-135m-1 -o report.html",
        "kvplan report runs/before runs/after --title 'Paged against contiguous' -o report.md",
    ),
    "serve": (
        "kvplan serve models/smollm2-135m --device cpu --port 8001",
        "kvplan serve qwen3-8b --simulate l40s --ctx 8k --speed 10",
    ),
    "watch": (
        "kvplan watch --metrics http://localhost:8000 --metrics http://localhost:8001 --interval 5s",
        "kvplan watch --gpu-index 0 --duration 10m --csv gpu.csv",
    ),
    "doctor": ("kvplan doctor --format json", "kvplan doctor --color never"),
    "trace": ("kvplan trace stats examples/trace.csv", "kvplan trace sample examples/trace.csv --span 10s -o part.csv"),
    "trace stats": (
        "kvplan trace stats examples/trace.csv",
        "kvplan trace stats examples/chats.jsonl --format json",
        "kvplan trace stats azure-2023-conv",
    ),
    "trace profiles": (
        "kvplan trace profiles",
        "kvplan trace profiles --format json",
        "kvplan trace profiles --format csv",
    ),
    "trace convert": (
        "kvplan trace convert azure-2023-conv --num-requests 200 --rate 2 -o requests.csv",
        "kvplan trace convert examples/chats.jsonl -o chats.csv",
        "kvplan trace convert examples/trace.csv -o trace.jsonl.gz",
    ),
    "trace sample": (
        "kvplan trace sample examples/trace.csv --span 10s -o part.csv",
        "kvplan trace sample examples/trace.csv --share 50% --seed 1 -o half.csv",
        "kvplan trace sample examples/trace.csv --num-requests 20 -o few.jsonl",
    ),
}
NEEDS: Final = (
    "calibrate",
    "mcp",
    "profile",
    "reconcile",
    "report",
    "rightsize",
    "serve",
    "tune",
    "watch",
    "why",
)  # commands that need a run, a log, a GPU or time
PANELS: Final[Mapping[str, tuple[str, ...]]] = {  # for options that are not engine arguments
    "Quantization": ("weights_bytes",),
    "Adapters and drafts": ("enable_lora", "draft_model", "speculative_config"),
    "Output": (
        "format", "color", "report", "quiet", "explain", "exit_code", "force", "output", "figure", "film",
        "trace_events", "help",
    ),
}  # fmt: skip


# Options that come first in the help of commands with many, besides their own; --help-all lists the others.
FIRST: Final = (
    "gpu", "gpu_memory", "max_model_len", "tensor_parallel_size", "quantization", "kv_cache_dtype",
    "gpu_memory_utilization", "max_num_seqs", "mean_tokens", "prompt_tokens", "output_tokens", "engine",
    "from_command", "explain", "format", "help",
)  # fmt: skip
MANY: Final = 60  # options from which a command's help is in two parts
ALL: Final = "--help-all"


def panel_of(name: str, common: frozenset[str]) -> str:
    """Panel of an option: server-specific options have their own. `common` are the options of every plan."""
    for panel, names in PANELS.items():
        if name in names:
            return panel
    if name not in common:
        return "Options"
    if name not in ARGUMENTS or ARGUMENTS[name].panel != COMMON:
        return ARGUMENTS[name].panel if name in ARGUMENTS else COMMON
    owners = [server for server in SERVERS if name in flags_of(server)]
    return terms_of(owners[0]).title if len(owners) == 1 else COMMON


def write_options(command: typer.core.TyperCommand, ctx: Any, formatter: Any) -> None:
    """Write a command's own options first, then those of every plan, by topic; of many, those that are used first."""
    from kvplan.asked.form import LENGTH_KEYS
    from kvplan.cli.options import PlanOptions
    from kvplan.cli.output import command_line

    common = frozenset(field.name for field in fields(PlanOptions)) | set(LENGTH_KEYS)
    own = (terms_of(server).title for server in SERVERS)
    order = ("Arguments", "Options", *get_args(Panel), *own, "Output")
    panels: dict[str, list[tuple[str, str]]] = {name: [] for name in order}
    params = command.get_params(ctx)
    is_whole = len(params) < MANY or ALL in command_line()
    if any(param.name == "mean_tokens" for param in params):  # lengths of every plan's requests: after own options
        params = sorted(params, key=lambda param: str(param.name) in LENGTH_KEYS)
    for param in params:
        record = param.get_help_record(ctx)
        name = str(param.name)
        is_argument = param.param_type_name == "argument"
        if record is not None and (is_whole or is_argument or name in FIRST or name not in common):
            panels["Arguments" if is_argument else panel_of(name, common - set(LENGTH_KEYS))].append(record)
    for title, rows in panels.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)
    if not is_whole:
        formatter.write(f"\nAll {len(params)} options: {ctx.command_path} {ALL}\n")


def examples_of(name: str) -> tuple[str, ...]:
    """Examples of a command (`estimate`, `trace stats`), starting with the overview's."""
    first = (group[name] for group in GROUPS.values() if name in group)
    return (*first, *MORE.get(name, ()))


def write_examples(ctx: Any, formatter: Any) -> None:
    lines = examples_of(ctx.command_path.partition(" ")[2])
    if lines:
        formatter.write("\nExamples:\n" + "".join(f"  {line}\n" for line in lines))


def overview(helps: Mapping[str, str]) -> Iterator[str]:
    """Yield the commands by group: their purpose, and an example."""
    yield "Plan GPU memory for LLM serving: how many users fit, and why."
    for title, examples in GROUPS.items():
        yield ""
        yield title
        for name, example in examples.items():
            yield f"  {name:<10} {helps[name].partition(chr(10))[0]}"
            yield f"  {'':<10}   {example}"
    yield ""
    yield "`kvplan COMMAND --help` lists a command's options."
