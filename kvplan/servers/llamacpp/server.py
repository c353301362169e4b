"""llama.cpp's implementation of kvplan.servers.base.Server."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from kvplan.core.units import MIB
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import Abilities, Explanation, Sources, Terms
from kvplan.servers.llamacpp.changes import RELEASES, SOURCE, TYPES
from kvplan.servers.plans.plan import Plan, Request
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.weights import Layout

if TYPE_CHECKING:
    from kvplan.servers.base import Launch, Outputs, Pasted
    from kvplan.servers.plans.plan import Estimate, HostRow, Sized

__all__ = [
    "abilities", "as_read", "asleep", "context", "drafter", "explain", "gate", "host", "kept_back", "labels", "launch",
    "layout", "name", "outputs", "pasted", "release", "remedies", "rest_last", "seqs_cure", "settings", "size", "terms",
]  # fmt: skip

name = "llamacpp"
rest_last = False
terms = Terms(
    title="llama.cpp",
    engines=("llama.cpp",),
    example="llama.cpp@0.5",
    budget="--fit fills {budget} of it",
    log="n_ctx = {tokens}",
    share_argument="fit_target",
    slots_flag=None,
    risk="may not load",
    risk_row="may not load",
    shorter="A smaller --ctx-size is safer.",
    outside="kept free by --fit-target",
    uncompared=("{label} by the rules of 0.5.0, the only release that was compared", SOURCE),
    known_by="its source",
    own_flags={
        "max_model_len": "--ctx-size",
        "max_num_seqs": "--parallel",
        "max_num_batched_tokens": "--batch-size",
        "micro_batch_size": "--ubatch-size",
        "quantization": "--quant",
    },
    sources=Sources(
        charge=f"{SOURCE} src/llama-kv-cache.cpp",
        pool=f"{SOURCE} common/fit.cpp",
        budget=f"free memory less --fit-target, {SOURCE} common/fit.cpp",
        users=f"{SOURCE} tools/server",
        arguments=f"{SOURCE} common/arg.cpp",
        described=None,
    ),
)
abilities = Abilities(
    keeps_share=True, fits_context=True, one_machine=True, file_types=TYPES,
    vendors=("nvidia", "amd", "apple", "intel")
)  # fmt: skip


def release(numbers: tuple[int, ...] | None, words: list[str]) -> Version:
    stated = RELEASES.newest if numbers is None else numbers
    return Version((stated[0], stated[1]), name, patch=stated[2] if len(stated) > 2 else None)


def labels() -> tuple[str, ...]:
    return ("llama.cpp", "llama.cpp@0.5")


def context(spec: ModelSpec) -> int:
    return spec.context_limit


def seqs_cure(spec: ModelSpec, args: EngineArgs, max_num_seqs: int) -> str:
    return terms.own_flags["max_num_seqs"]


def as_read(spec: ModelSpec, args: EngineArgs) -> ModelSpec:
    return spec


def drafter(request: Request) -> tuple[Request, list[str]]:
    return request, []


def gate(plan: Plan, end: Literal["low", "likely"]) -> None:
    return None  # a buffer that does not fit fails by itself


def settings(request: Request) -> Settings:
    return size(request).settings


def layout(request: Request, spec: ModelSpec) -> Layout:
    return Layout(dtype="float16")


def size(request: Request) -> "Sized":
    from kvplan.servers.llamacpp.size import size as own  # its graphs are only built for a plan

    return own(request)


def kept_back(plan: Plan) -> int:
    """Bytes that --fit leaves free on a GPU."""
    stated = plan.request.args.fit_target
    return int(float(stated.split(",")[0]) * MIB) if stated else 1024 * MIB


def asleep(plan: Plan) -> "dict[str, Estimate]":
    return {}


def remedies(plan: Plan) -> "Iterable[tuple[str, dict[str, Any]]]":
    from kvplan.servers.llamacpp import remedies as own  # only for a plan that does not fit

    return own.remedies(plan, plan.request.release.engine)


def host(plan: Plan) -> "tuple[HostRow, ...]":
    from kvplan.servers.llamacpp.host import rows  # only imported on request

    return rows(plan)


def explain(plan: Plan) -> Explanation:
    from kvplan.servers.llamacpp import explain as own  # only imported on request

    return own.explain(plan)


def outputs() -> "Outputs":
    from kvplan.servers.llamacpp import outputs  # only loaded if a text of the server is read

    return outputs


def pasted() -> "Pasted":
    from kvplan.servers.llamacpp import command  # only loaded if a command is read

    return command


def launch() -> "Launch":
    from kvplan.servers.llamacpp import launch

    return launch


if TYPE_CHECKING:
    from kvplan.servers.base import Server
    from kvplan.servers.llamacpp import server

    _whole: Server = server  # type check: the module has every name of the protocol
