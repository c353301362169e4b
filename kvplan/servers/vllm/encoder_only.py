"""Encoder-only models under vLLM: no KV cache, whole prompts in a step, weights and the peak of the largest step.

vLLM allocates no cache for a model without causal attention, disables chunked prefill and the prefix cache, and raises
the default step to the context. Source: vLLM 0.33 engine/arg_utils.py (_set_default_chunked_prefill_...,
_set_default_max_num_seqs_and_batched_tokens_args) and v1/core/kv_cache_planning.py.
"""

from dataclasses import replace
from math import ceil
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.records import dataclass
from kvplan.core.units import format_gib
from kvplan.models.spec import FullAttention, ModelSpec
from kvplan.servers.plans.plan import BUDGET_ROWS, Budget, Estimate, PoolShare, Request, Sized, check_load
from kvplan.servers.plans.pool import Capacity, Pool
from kvplan.servers.plans.weights import own_layout, rank_weights
from kvplan.servers.releases import Version
from kvplan.servers.vllm import activations, overheads, supported
from kvplan.servers.vllm import pages as vllm_pages
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.words.arguments import EngineArgs, Settings

SOURCE: Final = "vLLM 0.33 v1/worker/gpu_model_runner.py (profile_run), as for a decoder's forward pass"
# Arguments for caches, generation or adapters that mean nothing here, or were not compared.
NOT_TAKEN: Final = (
    "kv_cache_memory_bytes", "num_gpu_blocks_override", "max_loras", "speculative_method", "kv_transfer_config",
    "kv_offloading_size", "cpu_offload_gb", "offload_group_size", "enable_sleep_mode", "decode_context_parallel_size",
    "prefill_context_parallel_size", "pipeline_parallel_size", "enable_prefix_caching",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class StepPool(Pool):
    """The tokens of a step, used in place of a pool: whole prompts share them, and nothing is cached."""

    @property
    def block_size(self) -> int:
        return 1

    @property
    def hit_tokens(self) -> int:
        return 1

    def charged(self, context: int, settings: Settings) -> int:
        return context

    def allocated_blocks(self, num_tokens: int) -> int:
        return num_tokens

    def in_flight(self, num_tokens: int, context: int, settings: Settings) -> int:
        return 0

    def prefilling(self, num_tokens: int, context: int, settings: Settings) -> int:
        return num_tokens

    def shared(self, num_tokens: int) -> int:
        return 0


def as_attending(spec: ModelSpec) -> ModelSpec:
    """Give the encoder's layers head attention, for rules that derive it from caches."""
    width = spec.hidden_size // spec.num_heads
    return replace(spec, layers=((FullAttention(spec.num_heads, width, width),),) * spec.num_layers)


def check(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject what means nothing for an encoder, and what is not sized for one."""
    usual = EngineArgs()
    for name in NOT_TAKEN:
        value = getattr(args, name)
        if value not in (getattr(usual, name), None, False):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(flag, f"is not modeled for {spec.name}, an encoder without a KV cache", "remove it")
    if args.runner == "generate":
        raise UsageError("--runner generate", f"{spec.name} is an encoder, which generates no tokens", "remove it")
    if not release.has("encoders_in_v1"):
        raise UnsupportedModelError(
            f"--engine {release.label}", "encoders are sized from vLLM 0.10 on", "use a newer release"
        )


def settings_of(request: Request) -> Settings:
    spec, args = as_attending(request.spec), request.args
    whole = replace(
        args, enable_chunked_prefill=False, enable_prefix_caching=False, async_scheduling=False, block_size=None
    )
    return replace(vllm.resolve(spec, request.gpu, whole, request.release), prefix_caching=False, auto_fit=False)


def graphs_of(request: Request, settings: Settings) -> Estimate:
    """Only piecewise graphs: vLLM captures no full ones if attention is not causal."""
    args = request.args
    if args.enforce_eager or args.max_cudagraph_capture_size is not None or args.compilation_config is not None:
        return overheads.cuda_graphs(as_attending(request.spec), settings, args, request.release, sm=request.gpu.sm)
    largest = overheads.largest_graph(request.release, request.gpu.sm)
    graphs = overheads.piecewise_graphs(settings.max_num_seqs, largest)
    likely = overheads.GRAPHS_BASE + graphs * overheads.GRAPH
    low, high = (int(likely * factor) for factor in overheads.GRAPHS_RANGE)
    formula = f"0.25 GiB + {graphs} piecewise graphs x 6 MiB, as fitted on decoders' logs"
    return Estimate(low, likely, high, formula, overheads.GRAPHS_SOURCE, "formula")


def budget_of(request: Request, settings: Settings) -> Budget:
    spec, args, gpu = as_attending(request.spec), request.args, request.gpu
    width = overheads.widths(spec, args.tensor_parallel_size, 1).layer
    element, tokens = overheads.element_bytes(settings), settings.max_num_batched_tokens
    groups = rank_weights(request, 0)
    forward = element * tokens * (2 * spec.hidden_size + width)
    low, likely, high = (int(forward * factor) for factor in activations.FORWARD_RANGE)
    how = f"{tokens:,} tokens x (2 x {spec.hidden_size:,} hidden + {width:,} widest) x {element} B"
    none = Estimate(0, 0, 0, "none", SOURCE, "exact")
    estimates = {
        **dict.fromkeys(BUDGET_ROWS, none),
        # There is no sampling: no row of logits is kept for a request.
        "buffers": overheads.buffers(
            replace(spec, vocab_size=0), settings, args, own_layout(request, 0), stage=0, gpu=gpu
        ),
        "activations": Estimate(low, likely, high, f"{how} x {activations.FORWARD_RANGE[1]}", SOURCE, "formula"),
        "cuda_graphs": graphs_of(request, settings),
        "non_torch": overheads.non_torch(spec, settings, args, gpu, weights=sum(groups.values())),
        "context": overheads.context(gpu, args),
        "in_use": overheads.in_use(gpu, request.memory_in_use),
        **request.measured,
    }
    budget = ceil(gpu.total_memory * settings.gpu_memory_utilization)
    rows = [estimates[name] for name in BUDGET_ROWS]
    room = budget - sum(groups.values())
    available = (room - sum(row.high for row in rows), room - sum(row.likely for row in rows), room)
    return Budget(budget, groups, estimates, available)


def size(request: Request) -> Sized:
    spec, args = request.spec, request.args
    check(spec, args, request.release)
    settings = settings_of(request)
    supported.check_architecture(spec, request.release, request.gpu.sm)
    supported.check_sized(request, settings)
    vllm.check_parallel(as_attending(spec), args, flat=False)
    check_load(request, settings.max_model_len)
    pool = StepPool((), (0,), vllm_pages.paging(as_attending(spec), settings, args, request.gpu.sm))
    stage = budget_of(request, settings)
    tokens, context = settings.max_num_batched_tokens, settings.max_model_len
    room = stage.available[1]
    fits = room >= 0
    capacity = Capacity(
        num_blocks=tokens + 1 if fits else 0,  # as in pools, including a block that is never used
        bytes_per_block=0,
        stage=0,
        max_model_len=context,
        blocks_per_request=context,
        max_concurrency=tokens / context,
        tokens=tokens if fits else 0,
        fits=fits,
        deficit=max(0, -room),
    )
    low = tokens + 1 if stage.available[0] >= 0 else 0
    note = (
        f"an encoder keeps nothing of a request after its step: {format_gib(max(0, room))} of the budget stay "
        "unused, and vLLM checks only that they are free. Its weights equal vLLM's own; its peak and its CUDA graphs "
        "follow those of decoders, compared with no encoder's log"
    )
    return Sized(
        settings, pool, [stage], capacity, (low, tokens + 1), (max(0, low - 1) / context, tokens / context),
        (PoolShare(0, 0),), (note,),
    )  # fmt: skip
