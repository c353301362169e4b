"""SGLang's implementation of kvplan.servers.base.Server."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from kvplan.core.units import MIB
from kvplan.models.catalog import model_id
from kvplan.models.families import mtp
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import Explanation, Sources, Starts, Terms
from kvplan.servers.plans.plan import Plan, Request
from kvplan.servers.releases import Version
from kvplan.servers.sglang import drafts, rules, several_nodes
from kvplan.servers.sglang.changes import SOURCE
from kvplan.servers.sglang.models import context_length
from kvplan.servers.sglang.reading import as_read
from kvplan.servers.sglang.rules import LEAST_REQUESTS
from kvplan.servers.sglang.size import layout, size
from kvplan.servers.words.arguments import NO_DRAFT, EngineArgs, Settings, flag_words

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

name = "sglang"
rest_last = True
READ = "0.4.4, 0.4.9, 0.5.2, 0.5.5, 0.5.9, 0.5.12, 0.5.15 and 0.5.23"

terms = Terms(
    title="SGLang",
    engines=("sglang",),
    example="sglang@0.5 or sglang@0.4.3",
    label_words=False,
    budget="weights and KV may take {budget} (mem_fraction_static {share})",
    log="max_total_num_tokens={tokens}",
    logs_concurrency=False,
    seqs_flag="--max-running-requests",
    context_flag="--context-length",
    share_argument="mem_fraction_static",
    slots_flag="--mamba-full-memory-ratio",
    risk="may not hold it",  # it starts, and rejects longer requests
    risk_row="may not hold one",
    shorter="A shorter context is safer.",
    checks_start=False,
    keeps_share=True,
    simulated=True,
    recommended=False,
    outside="reserved for activations and graphs",
    uncompared=(
        f"{{label}} as the code of {READ} was read; compared with posted logs, not with its own answers",
        f"{SOURCE}; posted start-up logs (tests/servers/test_sglang.py)",
    ),
    program=("python3", "-m", "sglang.launch_server"),
    image="lmsysorg/sglang:v{release}",
    share="mem_fraction_static",
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
    own_kv_dtypes=True,
    prompts_first="0.5.23",
    adapter_slots=8,  # --max-loras-per-batch
    port=30000,  # srt/server_args.py
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
        return f"{terms.slots_flag}, which gives their states more slots"
    return terms.seqs_flag


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


# --- the command that starts exactly what was planned: its own flags, plain integers ----------------------------------

KV_DTYPES = {"auto": None, "fp8": "fp8_e4m3", "bfloat16": "bf16", "float16": "auto"}  # SGLang's own names

DRAFT_NUMBERS = ("num_speculative_tokens", "speculative_eagle_topk", "speculative_num_draft_tokens")


def launch(plan: Plan) -> list[str]:
    args, settings, page = plan.request.args, plan.settings, plan.pool.block_size
    context = plan.capacity.max_model_len
    stated = {
        # A default beyond the draft's is left to SGLang: stated, its draft's config decides (check_context).
        "max_model_len": None if drafts.outlasts_draft(plan.request, context) else context,
        "enable_expert_parallel": args.tensor_parallel_size if args.enable_expert_parallel else None,
        "mem_fraction_static": settings.gpu_memory_utilization,
        "max_num_seqs": args.max_num_seqs,  # the default follows from the pool, and bounds slots if given
        # SGLang divides it among the ranks of DP attention itself.
        "max_num_batched_tokens": settings.max_num_batched_tokens
        * (args.data_parallel_size if args.enable_dp_attention else 1)
        if args.enable_chunked_prefill
        else -1,
        "block_size": page if page > 1 else None,
        **({"max_lora_rank": args.max_lora_rank} if args.max_loras else {}),  # SGLang's default is its adapters' rank
        **_numbers(args),
        "kv_cache_dtype": KV_DTYPES.get(args.kv_cache_dtype, args.kv_cache_dtype),
    }
    words = flag_words("sglang", plan.request.release, args, stated)
    if not args.enable_chunked_prefill and args.max_num_batched_tokens is not None:
        words += ["--max-prefill-tokens", str(args.max_num_batched_tokens)]
    words += [*_draft(plan), *several_nodes.words(plan.request)]
    return ["python", "-m", "sglang.launch_server", "--model-path", model_id(plan.request.spec), *words]


def _numbers(args: EngineArgs) -> dict[str, None]:
    """Draft numbers left to SGLang, which takes all of EAGLE's or none."""
    if args.speculative_method in NO_DRAFT:
        return {"num_speculative_tokens": None}
    if args.speculative_method == "dspark":
        return dict.fromkeys(DRAFT_NUMBERS)
    return {} if args.speculative_eagle_topk else dict.fromkeys(DRAFT_NUMBERS)


def _draft(plan: Plan) -> list[str]:
    """The algorithm and the draft; its numbers are ordinary arguments."""
    args, draft = plan.request.args, plan.request.draft
    if args.speculative_method is None:
        return []
    words = ["--speculative-algorithm", drafts.NAMES[args.speculative_method]]
    if draft is None or args.speculative_method == "mtp":
        return words
    plain = replace(draft, name=draft.name.removesuffix(mtp.SUFFIX))
    if args.speculative_method == "dspark" and args.speculative_num_draft_tokens:
        words += ["--speculative-dspark-block-size", str(args.speculative_num_draft_tokens - 1)]
    return [*words, "--speculative-draft-model-path", model_id(plain)]


if TYPE_CHECKING:
    from kvplan.servers.base import Server
    from kvplan.servers.sglang import server

    _whole: Server = server  # type check: the module has every name of the protocol
