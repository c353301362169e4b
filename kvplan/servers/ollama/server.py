"""Ollama's implementation of kvplan.servers.base.Server: its settings, and llama.cpp's rules for what it starts."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvplan.core.errors import UsageError
from kvplan.servers.base import Abilities, Terms, later
from kvplan.servers.llamacpp import server as started_server
from kvplan.servers.llamacpp.server import (
    as_read,
    asleep,
    context,
    drafter,
    explain,
    gate,
    host,
    kept_back,
    layout,
    rest_last,
    seqs_cure,
)
from kvplan.servers.ollama.changes import RELEASES, SOURCE
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import EngineArgs, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvplan.servers.base import Launch, Outputs, Pasted
    from kvplan.servers.plans.plan import Plan, Request, Sized

__all__ = [
    "abilities", "as_read", "asleep", "context", "drafter", "explain", "gate", "host", "kept_back", "labels", "launch",
    "layout", "name", "outputs", "pasted", "release", "remedies", "rest_last", "seqs_cure", "settings", "size", "terms",
]  # fmt: skip

name = "ollama"
terms: Terms = replace(
    started_server.terms,
    title="Ollama",
    engines=("ollama",),
    example="ollama@0.30",
    shorter="A smaller --num-ctx is safer.",
    uncompared=("{label} by Ollama's source and the rules of llama.cpp 0.5.0, which was compared", SOURCE),
    own_flags={
        "max_model_len": "--num-ctx",
        "max_num_seqs": "--num-parallel",
        "max_num_batched_tokens": "--num-batch",
        "quantization": "--quant",
        "gpu_layers": "--num-gpu",
    },
    sources=replace(started_server.terms.sources, arguments=SOURCE, described="{label} by Ollama's source"),
)
abilities: Abilities = replace(started_server.abilities, library=True)


def release(numbers: tuple[int, ...] | None, words: list[str]) -> Version:
    stated = numbers or RELEASES.newest
    if stated[:2] < RELEASES.oldest:
        number = ".".join(map(str, stated))
        cure = "write ollama@0.30, which runs llama-server"
        raise UsageError(f"--engine ollama@{number}", "has an engine of its own, which is not planned", cure)
    return Version((stated[0], stated[1]), name)


def labels() -> tuple[str, ...]:
    return ("ollama", "ollama@0.30")


def settings(request: "Request") -> Settings:
    return size(request).settings


def size(request: "Request") -> "Sized":
    from kvplan.servers.llamacpp import asked
    from kvplan.servers.ollama import rules

    asked.check(request)
    below = rules.started(request)
    result = started_server.size(below)
    own = replace(result.settings, version=request.release)
    return replace(result, settings=own, notes=(*notes(request.args, below.args), *result.notes))


def notes(args: EngineArgs, below: EngineArgs) -> tuple[str, ...]:
    """What Ollama passes on, and what no variable of `ollama serve` sets."""
    batch, kind = below.max_num_batched_tokens, args.cache_type_k
    flags = f"-c {below.max_model_len} -np {below.max_num_seqs} -b {batch} -ub {batch}"
    flags += f" -ctk {kind} -ctv {kind}" if kind else ""
    flags += "" if args.gpu_layers is None else f" -ngl {args.gpu_layers}"
    less = "" if args.max_num_batched_tokens else "; where it predicts little room, a smaller -b"
    stated = {"num_gpu": args.gpu_layers, "num_batch": args.max_num_batched_tokens, "main_gpu": args.main_gpu}
    lines = [f"`PARAMETER {name} {value}`" for name, value in stated.items() if value is not None]
    unset = f"no variable sets it: write {' and '.join(lines)} in the model's Modelfile"
    return (f"Ollama starts llama-server {flags}{less}", *([unset] if lines else []))


def remedies(plan: "Plan") -> "Iterable[tuple[str, dict[str, Any]]]":
    from kvplan.servers.llamacpp import remedies as below
    from kvplan.servers.ollama import rules

    return below.remedies(replace(plan, request=rules.started(plan.request)), name)


outputs: "Callable[[], Outputs]" = later("ollama.outputs")
pasted: "Callable[[], Pasted]" = later("ollama.command")
launch: "Callable[[], Launch]" = later("ollama.launch")

if TYPE_CHECKING:
    from kvplan.servers.base import Server
    from kvplan.servers.ollama import command, server
    from kvplan.servers.ollama import launch as own_launch
    from kvplan.servers.ollama import outputs as own_outputs

    # Type check: each module has every name of its protocol.
    _whole: tuple[Server, Outputs, Pasted, Launch] = (server, own_outputs, command, own_launch)
