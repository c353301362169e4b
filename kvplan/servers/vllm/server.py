"""vLLM's implementation of kvplan.servers.base.Server."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvplan.hardware.gpu import NODE_GPUS
from kvplan.models.catalog import model_id
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import Explanation, Sources, Starts, Terms
from kvplan.servers.plans.plan import Plan, Request
from kvplan.servers.releases import Version, patch_of
from kvplan.servers.vllm import features, rules
from kvplan.servers.vllm.reading import as_read, reading_of
from kvplan.servers.vllm.size import gate, layout, size
from kvplan.servers.vllm.supported import needs_deprecated
from kvplan.servers.words.arguments import DEFAULTS, EngineArgs, Settings, flag_words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvplan.servers.logs.bench import Generator
    from kvplan.servers.logs.failures import Failures
    from kvplan.servers.logs.log import Logs
    from kvplan.servers.logs.metrics import Metrics
    from kvplan.servers.plans.plan import HostRow
    from kvplan.servers.words.command import Other, ServeCommand, Started, Variable

__all__ = [
    "as_read", "bench", "context", "drafter", "explain", "failures", "flags", "gate", "host", "kept_back", "labels",
    "launch", "layout", "logs", "metrics", "name", "parse", "read_pair", "release", "rest_last", "scheduling",
    "seqs_cure", "settings", "size", "start", "starts", "terms", "variables",
]  # fmt: skip

name = "vllm"
rest_last = False
# Releases whose own code was not compared are modeled from published information.
DESCRIBED = "wheels, release notes, issues and posted start-up logs have them"

terms = Terms(
    title="vLLM",
    engines=("vllm", "vllm@VERSION"),
    example="vllm@0.33 or vllm@0.11.0",
    label_words=True,
    budget="vLLM may use {budget} of it (utilization {share})",
    log='"Maximum concurrency" {concurrency:.2f}x',
    logs_concurrency=True,
    seqs_flag="--max-num-seqs",
    context_flag="--max-model-len",
    share_argument="gpu_memory_utilization",
    slots_flag=None,
    risk="may not start",
    risk_row="may not start",
    shorter="A shorter --max-model-len is safer.",
    checks_start=True,
    keeps_share=False,
    simulated=True,
    recommended=True,
    outside="outside --gpu-memory-utilization",
    uncompared=(
        "{label} by wheels, notes, issues and logs; not compared with its own answers",
        f"{{label}} as its {DESCRIBED}; not compared with that release's own code",
    ),
    known_by="its wheel, release notes and logs",
    sources=Sources(
        charge="vLLM v1/kv_cache_interface.py",
        pool="vLLM v1/core/kv_cache_utils.py",
        budget="vLLM v1/worker/gpu_worker.py: ceil(total x gpu_memory_utilization)",
        users="blocks that decoding requests hold between two steps, after vLLM "
        "v1/core/single_type_kv_cache_manager.py",
        arguments="vLLM engine/arg_utils.py",
        described=f"rules of {{label}} as its {DESCRIBED}",
    ),
    program=("vllm", "serve"),
    needs_drafter=True,
    lean_kernels={"flashinfer_b12x": "marlin"},
    image="vllm/vllm-openai:v{release}",
)
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
    return terms.seqs_flag


def drafter(request: Request) -> tuple[Request, list[str]]:
    request = replace(request, spec=as_read(request.spec, request.args))
    request, notes = with_own_cache(request)
    args = request.args
    if request.spec.quantization is not None or args.quantization or args.disable_sliding_window:
        from kvplan.servers.vllm.loaded import loaded

        request, of_loading = loaded(request)
        notes += of_loading
    if not rules.generates(request.spec, request.args):
        from kvplan.servers.vllm.pooling import pooled

        request, of_pooling = pooled(request)
        notes += of_pooling
    if request.args.enable_eplb:
        from kvplan.servers.vllm.experts import copied

        request, of_experts = copied(request)
        notes += of_experts
    if request.draft is None and request.args.speculative_method is None:
        return request, notes
    from kvplan.servers.plans import speculation

    if request.draft is not None:
        from kvplan.servers.vllm.drafts import check_name

        check_name(request)
    drafted, of_drafts = speculation.drafter(request, terms.title)
    if drafted.draft is not None and not drafted.draft.head:
        drafted = replace(drafted, draft=as_read(drafted.draft, EngineArgs()))  # overrides are its target's alone
    return drafted, [*notes, *of_drafts]


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
    args = plan.request.args
    shares = plan.request.spec.multimodal or args.max_loras or args.world_size > 1 or plan.settings.first_engine
    if not shares and not any(features.of(plan.request)):
        return ()
    from kvplan.servers.vllm.host import rows  # only for what takes such memory

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


# --- the command that starts exactly what was planned: its own flags, plain integers ----------------------------------
# The only non-integer is `auto` for the context of an auto-fitted plan whose range reaches below one user.

MTP_SUFFIX = " (MTP head)"  # models.families.mtp.SUFFIX, which plans without drafts do not import


def launch(plan: Plan) -> list[str]:
    args, settings = plan.request.args, plan.settings
    # An explicitly sized pool does not use a fraction of memory, but the start-up check applies to one that was
    # requested.
    shares = args.kv_cache_memory_bytes is None or args.gpu_memory_utilization is not None
    knows_text_only = plan.request.release.has("language_model_only")
    text_only = args.language_model_only or (plan.request.spec.text_only and knows_text_only)
    stated = {
        "max_model_len": _context(plan),
        "gpu_memory_utilization": settings.gpu_memory_utilization if shares else None,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "language_model_only": text_only or None,
        "allow_deprecated_quantization": args.allow_deprecated_quantization or needs_deprecated(plan.request) or None,
        "limit_mm_per_prompt": _limits(args.limit_mm_per_prompt),
        "max_lora_rank": args.max_lora_rank if args.max_loras else None,
        "fully_sharded_loras": (args.max_loras > 0 and args.fully_sharded_loras) or None,
        **({} if args.max_loras else dict.fromkeys(OF_ADAPTERS)),
    }
    words = flag_words("vllm", plan.request.release, args, stated)
    words += [*_task(plan), *_balance(plan), *_draft(plan)]
    if args.num_gpus > NODE_GPUS:
        from kvplan.servers.vllm import several_nodes

        words += several_nodes.words(plan.request)
    return ["vllm", "serve", model_id(plan.request.spec), *words]


# Arguments that have no effect without adapters.
OF_ADAPTERS = (
    "lora_dtype", "lora_target_modules", "max_cpu_loras", "enable_tower_connector_lora", "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)  # fmt: skip


def _limits(text: str | None) -> str | None:
    if text is None:
        return None
    from kvplan.servers.words.item_limits import limits_of  # only with the flag

    limits = {name: limit.document for name, limit in limits_of(text).items()}
    return json.dumps(limits) if limits else None


def _balance(plan: Plan) -> list[str]:
    args = plan.request.args
    config = {"num_redundant_experts": args.num_redundant_experts} if args.num_redundant_experts else {}
    if args.eplb_window_size != DEFAULTS["eplb_window_size"]:
        config["window_size"] = args.eplb_window_size
    return ["--eplb-config", json.dumps(config)] if config and args.enable_eplb else []


def _context(plan: Plan) -> str:
    """The planned context, or `auto` if it was fitted and would not fit at the low end of the range."""
    if plan.settings.auto_fit and plan.concurrency.low < 1 and plan.request.release.has("auto_context"):
        return "auto"
    return str(plan.capacity.max_model_len)


def _task(plan: Plan) -> list[str]:
    """--task flags for releases before --runner and --convert."""
    args = plan.request.args
    if plan.request.release.has("runner_flag") or (args.runner, args.convert) == ("auto", "auto"):
        return []
    from kvplan.servers.vllm.pooling import converts  # only for such releases

    return ["--task", converts(plan.request.spec, args) or "generate"]


def _draft(plan: Plan) -> list[str]:
    draft, args = plan.request.draft, plan.request.args
    config: dict[str, Any] = {}
    if args.speculative_method is not None:
        config["method"] = args.speculative_method
    if draft is not None and not draft.is_part_of(plan.request.spec):
        config["model"] = model_id(replace(draft, name=draft.name.removesuffix(MTP_SUFFIX)))
    if config and args.num_speculative_tokens:
        config["num_speculative_tokens"] = args.num_speculative_tokens
    if config and plan.request.repeated is not None:
        config |= plan.request.repeated.speculative
    return ["--speculative-config", json.dumps(config)] if config else []


if TYPE_CHECKING:
    from kvplan.servers.base import Server
    from kvplan.servers.vllm import server

    _whole: Server = server  # type check: the module has every name of the protocol
