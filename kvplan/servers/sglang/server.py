"""SGLang's implementation of kvplan.servers.base.Server."""

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from kvplan.core.units import MIB
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import Abilities, Explanation, Sources, Terms, later
from kvplan.servers.plans.plan import Estimate, Plan, Request
from kvplan.servers.releases import Version
from kvplan.servers.sglang import drafts, rules
from kvplan.servers.sglang.changes import SOURCE
from kvplan.servers.sglang.classes import as_read, class_of
from kvplan.servers.sglang.models import context_length
from kvplan.servers.sglang.rules import LEAST_REQUESTS
from kvplan.servers.sglang.size import layout, size
from kvplan.servers.words.arguments import EngineArgs, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvplan.servers.base import Launch, Outputs, Pasted
    from kvplan.servers.plans.plan import HostRow

__all__ = [
    "abilities", "as_read", "asleep", "context", "drafter", "explain", "gate", "host", "kept_back", "labels", "launch",
    "layout", "name", "outputs", "pasted", "release", "remedies", "rest_last", "seqs_cure", "settings", "size", "terms",
]  # fmt: skip

name = "sglang"
rest_last = True
READ = "0.4.4, 0.4.9, 0.5.2, 0.5.5, 0.5.9, 0.5.12, 0.5.15 and 0.5.23"

terms = Terms(
    title="SGLang",
    engines=("sglang",),
    example="sglang@0.5 or sglang@0.4.3",
    budget="weights and KV may take {budget} (mem_fraction_static {share})",
    log="max_total_num_tokens={tokens}",
    share_argument="mem_fraction_static",
    slots_flag="--mamba-full-memory-ratio",
    risk="may not hold it",  # it starts, and rejects longer requests
    risk_row="may not hold one",
    shorter="A shorter context is safer.",
    outside="reserved for activations and graphs",
    uncompared=(
        f"{{label}} as the code of {READ} was read; compared with posted logs, not with its own answers",
        f"{SOURCE}; posted start-up logs (tests/servers/sglang/test_rules.py)",
    ),
    own_flags={
        "max_model_len": "--context-length",
        "tensor_parallel_size": "--tp-size",
        "pipeline_parallel_size": "--pp-size",
        "data_parallel_size": "--dp-size",
        "max_num_seqs": "--max-running-requests",
        "max_loras": "--max-loras-per-batch",
        "max_cpu_loras": "--max-loaded-loras",
        "max_num_batched_tokens": "--chunked-prefill-size",
        "enforce_eager": "--disable-cuda-graph",
    },
    kv_dtype_names={"fp8": "fp8_e4m3"},
    known_by="its wheel, release notes and logs",
    sources=Sources(
        charge=SOURCE,
        pool=SOURCE,
        budget="free before loading x mem_fraction_static, sglang srt/mem_cache/kv_cache_configurator.py",
        users=SOURCE,
        arguments=SOURCE,
        described=None,
    ),
)
abilities = Abilities(
    keeps_share=True,
    simulated=True,
    own_kv_dtypes=True,
    prompts_first="0.5.23",
    adapter_slots=8,  # --max-loras-per-batch
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
        return f"{terms.slots_flag}, which gives their states more slots"
    return terms.own_flags["max_num_seqs"]


def drafter(request: Request) -> tuple[Request, list[str]]:
    spec, args, notes = as_read(request.spec, request.args), request.args, []
    if class_of(spec).both_ways:  # arg_groups/model_hook.py, after the fraction is chosen
        fraction = args.mem_fraction_static or rules.default_fraction(spec, request.gpu, args, request.release)
        args = replace(
            args, mem_fraction_static=fraction, enable_chunked_prefill=False, enable_prefix_caching=False,
            enforce_eager=True,
        )  # fmt: skip
        notes = [f"{spec.name} attends to a prompt in both directions: no chunks, no prefix cache, no CUDA graphs"]
    request, others = drafts.drafter(replace(request, spec=spec, args=args))
    return request, [*notes, *others]


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


def asleep(plan: Plan) -> "dict[str, Estimate]":
    """The context, and at most what its rule of thumb reserves for graphs: their memory is released only with
    SGLANG_MEMORY_SAVER_CUDA_GRAPH, which is off by default (srt/environ.py, runner_backend/full_cuda_graph_backend.py).
    """
    request = plan.request
    size = int(rules.graphs_mib(request.spec, request.gpu, request.args, request.release) * MIB)
    source = "sglang 0.5.23 srt/arg_groups/memory_hook.py (reserve_for_graph_mb)"
    graphs = Estimate(0, size, size, f"{size:,} B reserved for graphs", source, "formula")
    return {"context": plan.estimates["context"], "reserved": graphs}


def remedies(plan: Plan) -> tuple[()]:
    return ()


def host(plan: Plan) -> "tuple[HostRow, ...]":
    from kvplan.servers.sglang.host import rows  # only imported on request

    return tuple(rows(plan))


def explain(plan: Plan) -> Explanation:
    from kvplan.servers.sglang import explain as own  # only imported on request

    return own.explain(plan)


outputs: "Callable[[], Outputs]" = later("sglang.outputs")
pasted: "Callable[[], Pasted]" = later("sglang.command")
launch: "Callable[[], Launch]" = later("sglang.launch")

if TYPE_CHECKING:
    from kvplan.servers.base import Server
    from kvplan.servers.sglang import command, server
    from kvplan.servers.sglang import launch as own_launch
    from kvplan.servers.sglang import outputs as own_outputs

    # Type check: each module has every name of its protocol.
    _whole: tuple[Server, Outputs, Pasted, Launch] = (server, own_outputs, command, own_launch)
