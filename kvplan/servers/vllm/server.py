"""vLLM's implementation of kvplan.servers.base.Server."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvplan.models.spec import ModelSpec
from kvplan.servers import speculation
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.base import Explanation, Starts
from kvplan.servers.plans import Plan, Request
from kvplan.servers.releases import Version, patch_of
from kvplan.servers.settings import Settings
from kvplan.servers.vllm import experts, rules
from kvplan.servers.vllm.launch import command as launch
from kvplan.servers.vllm.reading import as_read, reading_of
from kvplan.servers.vllm.size import gate, layout, size
from kvplan.servers.vllm.terms import TERMS

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

name = "vllm"
rest_last = False
terms = TERMS
starts = Starts(("vllm", "serve"), "model", True, ("LLM", (None, "vllm")), {"usage": "offline"})


def release(numbers: tuple[int, ...] | None, words: list[str]) -> Version:
    given = rules.NEWEST if numbers is None else numbers
    version = rules.version((given[0], given[1]))
    plain = replace(version, patch=patch_of(name, given))
    if not words:
        return plain
    from kvplan.servers.vllm.labels import with_words  # only imported for a label with words

    return with_words(plain, words)


def labels() -> tuple[str, ...]:
    """Labels of all releases, newest first."""
    minors = range(rules.NEWEST[1], rules.OLDEST[1] - 1, -1)
    return ("vllm", *(f"vllm@0.{minor}" for minor in minors))


def context(spec: ModelSpec) -> int:
    return spec.max_model_len


def seqs_cure(spec: ModelSpec, args: EngineArgs, max_num_seqs: int) -> str:
    return TERMS.seqs_flag


def drafter(request: Request) -> tuple[Request, list[str]]:
    from kvplan.servers.vllm.pooling import pooled

    request = replace(request, spec=as_read(request.spec, request.args))
    request, notes = with_own_cache(request)
    args = request.args
    if request.spec.quantization is not None or args.quantization or args.disable_sliding_window:
        from kvplan.servers.vllm.loaded import loaded

        request, of_loading = loaded(request)
        notes += of_loading
    request, of_pooling = pooled(request)
    request, of_experts = experts.copied(request)
    if request.draft is not None:
        from kvplan.servers.vllm.drafts import check_name

        check_name(request)
    drafted, of_drafts = speculation.drafter(request, TERMS.title)
    if drafted.draft is not None and not drafted.draft.head:
        drafted = replace(drafted, draft=as_read(drafted.draft, EngineArgs()))  # overrides are its target's alone
    return drafted, [*notes, *of_pooling, *of_experts, *of_drafts]


def with_own_cache(request: Request) -> tuple[Request, list[str]]:
    """The request with the KV dtype that the model's class gives its attention, and a note; usually unchanged."""
    spec, stated = request.spec, request.args.kv_cache_dtype
    if stated == "auto" or not reading_of(spec).own_cache:
        return request, []
    note = f"--kv-cache-dtype {stated} is ignored: vLLM's class keeps the KV of {spec.name} in its own dtype"
    return replace(request, args=replace(request.args, kv_cache_dtype="auto")), [note]


def settings(request: Request) -> Settings:
    return rules.resolve(request.spec, request.gpu, request.args, request.release)


def kept_back(plan: Plan) -> int:
    """Return 0: its profile run measures the peak, and its budget has a row for it."""
    return 0


def host(plan: Plan) -> "tuple[HostRow, ...]":
    from kvplan.servers.vllm.host import rows  # only imported on request

    return tuple(rows(plan))


def explain(plan: Plan) -> Explanation:
    from kvplan.servers.vllm import explain as own  # only imported on request

    return own.explain(plan)


def failures() -> "Failures":
    from kvplan.servers.vllm.failures import FAILURES  # only imported if a log is read

    return FAILURES


def metrics() -> "Metrics":
    from kvplan.servers.vllm.metrics import METRICS  # only imported if a page is read

    return METRICS


def start(words: list[str]) -> "Started | None":
    from kvplan.servers.vllm import command  # only imported if a command is pasted

    return command.start(words)


def parse(words: list[str]) -> "ServeCommand":
    from kvplan.servers.vllm import command

    return command.parse(words)


def logs() -> "Logs":
    from kvplan.servers.vllm.log import LOGS

    return LOGS


def bench() -> "Generator":
    from kvplan.servers.vllm.bench import GENERATOR

    return GENERATOR


def flags() -> "tuple[Mapping[str, str], Mapping[str, Other]]":
    from kvplan.servers.vllm.arguments import OTHERS, READ

    return READ, OTHERS


def scheduling() -> "tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]":
    from kvplan.servers.vllm import scheduling as lists  # only imported on request

    return lists.MODELED, lists.NO_EFFECT, lists.REFUSED


def variables() -> "Mapping[str, Variable]":
    from kvplan.servers.vllm.variables import VARIABLES

    return VARIABLES


def read_pair(text: str) -> tuple[str, Any] | None:
    return None  # its own names are those of the table


if TYPE_CHECKING:
    from kvplan.servers.base import Server
    from kvplan.servers.vllm import server

    _whole: Server = server  # type check: the module has every name of the protocol
