"""SGLang's implementation of kvplan.servers.base.Server."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from kvplan.core.units import MIB
from kvplan.models.spec import ModelSpec
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.base import Explanation, Starts
from kvplan.servers.plans import Plan, Request
from kvplan.servers.releases import Version
from kvplan.servers.settings import Settings
from kvplan.servers.sglang import drafts, rules
from kvplan.servers.sglang.launch import command as launch
from kvplan.servers.sglang.models import context_length
from kvplan.servers.sglang.reading import as_read
from kvplan.servers.sglang.rules import LEAST_REQUESTS
from kvplan.servers.sglang.size import layout, size
from kvplan.servers.sglang.terms import TERMS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvplan.servers.bench import Generator
    from kvplan.servers.failures import Failures
    from kvplan.servers.logs import Logs
    from kvplan.servers.metrics import Metrics
    from kvplan.servers.plans import HostRow
    from kvplan.servers.words import Other, ServeCommand, Started, Variable

__all__ = [
    "as_read", "bench", "context", "drafter", "explain", "failures", "flags", "gate", "host", "kept_back", "labels",
    "launch", "layout", "logs", "metrics", "name", "parse", "read_pair", "release", "rest_last", "scheduling",
    "seqs_cure", "settings", "size", "start", "starts", "terms", "variables",
]  # fmt: skip

name = "sglang"
rest_last = True
terms = TERMS
starts = Starts(
    ("python", "-m", "sglang.launch_server"), "model_path", False, ("Engine", ("sgl", "sglang")), {}, ("sgl-dev",)
)


def release(numbers: tuple[int, ...] | None, words: list[str]) -> Version:
    return rules.version(rules.NEWEST if numbers is None else numbers)


def labels() -> tuple[str, ...]:
    return ("sglang", "sglang@0.5", "sglang@0.4")


def context(spec: ModelSpec) -> int:
    return context_length(spec)


def seqs_cure(spec: ModelSpec, args: EngineArgs, max_num_seqs: int) -> str:
    """The flag that allows more requests: slots_flag if states have too few slots for the batch, else seqs_flag."""
    needed = LEAST_REQUESTS if args.max_num_seqs is None else args.max_num_seqs
    if spec.has_states and max_num_seqs < needed:
        return f"{TERMS.slots_flag}, which gives their states more slots"
    return TERMS.seqs_flag


def drafter(request: Request) -> tuple[Request, list[str]]:
    return drafts.drafter(replace(request, spec=as_read(request.spec, request.args)))


def gate(plan: Plan, end: Literal["low", "likely"]) -> None:
    return None  # it takes a fraction of the free memory


def settings(request: Request) -> Settings:
    return rules.resolve(request.spec, request.gpu, request.args, request.release)


def kept_back(plan: Plan) -> int:
    """Bytes that its rule of thumb reserves for activations and graphs (server_args.py,
    _handle_gpu_memory_settings).
    """
    request = plan.request
    return int(rules.reserved_mib(request.spec, request.gpu, request.args, request.release) * MIB)


def host(plan: Plan) -> "tuple[HostRow, ...]":
    from kvplan.servers.sglang.host import rows  # only imported on request

    return tuple(rows(plan))


def explain(plan: Plan) -> Explanation:
    from kvplan.servers.sglang import explain as own  # only imported on request

    return own.explain(plan)


def failures() -> "Failures":
    from kvplan.servers.sglang.failures import FAILURES  # only imported if a log is read

    return FAILURES


def metrics() -> "Metrics":
    from kvplan.servers.sglang.metrics import METRICS  # only imported if a page is read

    return METRICS


def start(words: list[str]) -> "Started | None":
    from kvplan.servers.sglang import command  # only imported if a command is pasted

    return command.start(words)


def parse(words: list[str]) -> "ServeCommand":
    from kvplan.servers.sglang import command

    return command.parse(words)


def logs() -> "Logs":
    from kvplan.servers.sglang.log import LOGS

    return LOGS


def bench() -> "Generator":
    from kvplan.servers.sglang.bench import GENERATOR

    return GENERATOR


def flags() -> "tuple[Mapping[str, str], Mapping[str, Other]]":
    from kvplan.servers.sglang.arguments import OTHERS, READ

    return READ, OTHERS


def scheduling() -> "tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]":
    from kvplan.servers.sglang import scheduling as lists  # only imported on request

    return lists.MODELED, lists.NO_EFFECT, lists.REFUSED


def variables() -> "Mapping[str, Variable]":
    from kvplan.servers.sglang.variables import VARIABLES

    return VARIABLES


def read_pair(text: str) -> tuple[str, Any] | None:
    from kvplan.servers.sglang import command

    return command.read_pair(text)


if TYPE_CHECKING:
    from kvplan.servers.base import Server
    from kvplan.servers.sglang import server

    _whole: Server = server  # type check: the module has every name of the protocol
