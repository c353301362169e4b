"""vLLM's implementation of kvplan.servers.base.Server."""

from dataclasses import replace
from typing import TYPE_CHECKING

from kvplan.models.spec import ModelSpec
from kvplan.servers.base import Abilities, Explanation, Sources, Terms, later
from kvplan.servers.plans.plan import Plan, Request
from kvplan.servers.releases import Version, patch_of
from kvplan.servers.vllm import features, rules
from kvplan.servers.vllm.classes import as_read, type_of
from kvplan.servers.vllm.size import gate, layout, size
from kvplan.servers.words.arguments import EngineArgs, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvplan.servers.base import Launch, Outputs, Pasted
    from kvplan.servers.plans.plan import Estimate, HostRow

__all__ = [
    "abilities", "as_read", "asleep", "context", "drafter", "explain", "gate", "host", "kept_back", "labels", "launch",
    "layout", "name", "outputs", "pasted", "release", "remedies", "rest_last", "seqs_cure", "settings", "size", "terms",
]  # fmt: skip

name = "vllm"
rest_last = False
# Releases whose own code was not compared are modeled from published information.
DESCRIBED = "wheels, release notes, issues and posted start-up logs have them"

terms = Terms(
    title="vLLM",
    engines=("vllm", "vllm@VERSION"),
    example="vllm@0.33 or vllm@0.11.0",
    budget="vLLM may use {budget} of it (utilization {share})",
    log='"Maximum concurrency" {concurrency:.2f}x',
    share_argument="gpu_memory_utilization",
    slots_flag=None,
    risk="may not start",
    risk_row="may not start",
    shorter="A shorter --max-model-len is safer.",
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
)
abilities = Abilities(
    label_words=True,
    logs_concurrency=True,
    checks_start=True,
    simulated=True,
    recommended=True,
    needs_drafter=True,
    lean_kernels={"flashinfer_b12x": "marlin"},
    shares_experts=True,
)


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
    return "--max-num-seqs"


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
    if stated == "auto" or not type_of(spec).own_cache:
        return request, []
    note = f"--kv-cache-dtype {stated} is ignored: vLLM's class keeps the KV of {spec.name} in its own dtype"
    return replace(request, args=replace(request.args, kv_cache_dtype="auto")), [note]


def settings(request: Request) -> Settings:
    return rules.resolve(request.spec, request.gpu, request.args, request.release)


def kept_back(plan: Plan) -> int:
    """Return 0: its profile run measures the peak, and its budget has a row for it."""
    return 0


def asleep(plan: Plan) -> "dict[str, Estimate]":
    """What its allocator's pools do not hold: the context, graphs, libraries, and buffers that no pool has.

    Buffers of the model are in the pool of its weights; workspaces in one of their own from 0.32 on.
    """
    from kvplan.servers.vllm.overheads import outside_pools  # only for a server that sleeps

    rows = {name: plan.estimates[name] for name in ("context", "cuda_graphs", "non_torch")}
    return rows | {"buffers": outside_pools(plan.estimates["buffers"], plan.request, plan.settings, plan.stage)}


def remedies(plan: Plan) -> tuple[()]:
    return ()


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


outputs: "Callable[[], Outputs]" = later("vllm.outputs")
pasted: "Callable[[], Pasted]" = later("vllm.command")
launch: "Callable[[], Launch]" = later("vllm.launch")

if TYPE_CHECKING:
    from kvplan.servers.base import Server
    from kvplan.servers.vllm import command, server
    from kvplan.servers.vllm import launch as own_launch
    from kvplan.servers.vllm import outputs as own_outputs

    # Type check: each module has every name of its protocol.
    _whole: tuple[Server, Outputs, Pasted, Launch] = (server, own_outputs, command, own_launch)
