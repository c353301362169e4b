"""Conversion of a plan to a simulation: scheduler limits, pool and groups as in the server."""

from typing import Any, Final, Literal, assert_never

from engine.block_manager import FullGroup, Group, WindowGroup
from engine.states import MambaGroup
from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass, replace
from kvplan.core.units import GIB, format_size
from kvplan.models.spec import LatentAttention
from kvplan.planning.plan import Plan, lack_text
from kvplan.servers.base import abilities_of, flag_of, titles
from kvplan.servers.plans.pool import KVGroup, chunk_bytes, offloaded_bytes
from kvplan.servers.words.command import ServeCommand
from kvplan.simulate import prompts_first_run
from kvplan.simulate.adapters import AdapterRun, Adapters
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.drafts import Drafts, MoreTime, PromptsFirstDrafts, SpeculativeRun
from kvplan.simulate.host import Intake
from kvplan.simulate.kernels.layers import peers_of
from kvplan.simulate.loop import Simulation
from kvplan.simulate.prompts_first_run import PromptsFirstRun
from kvplan.simulate.runs import Run
from kvplan.simulate.scheduling import ChunkedGroup, SimulatedConfig, simulated_scheduler
from kvplan.simulate.steptime import StepTime, attention_kinds
from kvplan.simulate.tiers import MOST_TIERS, TierSpec, TimedTiers
from kvplan.simulate.unshared import Unshared, is_unshared
from kvplan.simulate.whole_prompts import NUM_SPARE_BLOCKS, runs_whole_prompts, whole_prompts


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a run needs except arrivals; it can be run any number of times.

    chunk_tokens  tokens per chunk of the tiers; None: one block
    """

    plan: Plan
    step_time: StepTime
    tiers: tuple[TierSpec, ...] = ()
    chunk_tokens: int | None = None
    allocator: Literal["paged", "contiguous"] = "paged"
    drafts: Drafts | None = None
    adapters: Adapters | None = None

    def run(self, arrivals: Arrivals, run_len: int | None = None, *, caches: bool = True) -> Run:
        """Return a new run over these arrivals; event-driven (with the same figures) if requests share no prefix.

        caches  False: the step-by-step run of requests that share no prefix does not follow what blocks hold, which
                is the same, and faster, until one is preempted
        """
        by_step = self.simulation(arrivals, run_len)
        others = by_step.tiers is not None or self.drafts or self.adapters or runs_whole_prompts(self.plan)
        if isinstance(by_step, PromptsFirstRun) or others:
            return by_step
        if not is_unshared(by_step.config, by_step.groups, by_step.reaches, run_len):
            if caches or run_len is not None or any(isinstance(group, MambaGroup) for group in by_step.groups):
                return by_step
            return replace(by_step, config=replace(by_step.config, enable_prefix_caching=False))
        return Unshared(by_step.config, by_step.num_blocks, by_step.groups, by_step.step_time, by_step.arrivals)

    def simulation(self, arrivals: Arrivals, run_len: int | None = None) -> Simulation:
        """Return a new step-by-step run over these arrivals; run_len: tokens per prefix id."""
        if self.step_time.host is not None:
            arrivals = Intake(arrivals, self.step_time.host)
        if abilities_of(self.plan.request.release.engine).prompts_first is not None:
            if self.tiers or self.allocator != "paged":
                flag = "--tier" if self.tiers else "--baseline"
                raise UsageError(flag, "needs vLLM's scheduler", "use --engine vllm, or remove it")
            limits = prompts_first_run.limits_of(self.plan)
            common: dict[str, Any] = {
                "config": prompts_first_run.config_of(limits),
                "num_blocks": limits.num_tokens,
                "groups": (),
                "reaches": tuple(kind.reach for kind in attention_kinds(self.plan)),
                "arrivals": arrivals,
                "run_len": run_len,
                "limits": limits,
            }
            if self.drafts is None:
                return PromptsFirstRun(step_time=self.step_time, **common)
            times = MoreTime(self.step_time, self.drafts.text)
            return PromptsFirstDrafts(step_time=times, drafts=self.drafts, **common)
        if self.drafts is not None or self.adapters is not None:
            return self._step_by_step(arrivals, run_len)
        is_whole = runs_whole_prompts(self.plan)
        return Simulation(
            config=scheduler_config(self.plan, self.allocator),
            num_blocks=self.plan.capacity.num_blocks,
            groups=groups(self.plan),
            reaches=tuple(kind.reach for kind in attention_kinds(self.plan)),
            step_time=self.step_time,
            arrivals=arrivals,
            run_len=run_len,
            tiers=timed_tiers(self.plan, self.tiers, self.chunk_tokens),
            make_scheduler=whole_prompts if is_whole else simulated_scheduler,
            num_spare_blocks=NUM_SPARE_BLOCKS if is_whole else 0,
        )

    @property
    def does(self) -> str:
        """What a step does beside the model's own work, as text."""
        other = self.drafts or self.adapters
        return "" if other is None else other.text

    def _step_by_step(self, arrivals: Arrivals, run_len: int | None) -> Simulation:
        """A run with drafts or adapters, whose steps differ."""
        common: dict[str, Any] = {
            "num_blocks": self.plan.capacity.num_blocks,
            "groups": groups(self.plan),
            "reaches": tuple(kind.reach for kind in attention_kinds(self.plan)),
            "step_time": MoreTime(self.step_time, self.does),
            "arrivals": arrivals,
            "run_len": run_len,
            "jump": False,
        }
        config = scheduler_config(self.plan, "paged")
        if self.drafts is None:
            return AdapterRun(config=config, adapters=self.adapters, **common)
        return SpeculativeRun(config=replace(config, drafts=self.drafts.rules), drafts=self.drafts, **common)


DRAFTED: Final = "remove it, or ask `kvplan simulate`, which takes a stated acceptance"
OFFLOADED: Final = "remove it: the time to fetch weights from the host is not modeled"


def check(
    plan: Plan, specs: tuple[TierSpec, ...] = (), *, drafts: bool = False, ranks: bool = False, hands_over: bool = False
) -> None:
    """Raise an error with a remedy if the simulation does not model the plan or the server does not start.

    specs   offloading tiers
    drafts  True if drafts are simulated
    ranks   True if each data-parallel rank is simulated
    hands_over  True if prompts are handed over to other servers
    """
    name = plan.request.spec.name
    refuse_unmodeled(plan, specs, drafts=drafts, ranks=ranks, hands_over=hands_over)
    if not plan.fits:
        where = f"{name} on {plan.request.gpu.name}"
        cure = "see what would fit with `kvplan estimate`"
        if plan.refusal is not None and plan.refusal.flag:
            from kvplan.planning.cures import flag_text  # only for the error

            flag = flag_text(plan.request.release.engine, plan.refusal.argument, plan.refusal.values[0])
            cure = f"use {flag}, or {cure}"
        raise UsageError("simulate", f"{where} {lack_text(plan)}", cure)


def refuse_unmodeled(
    plan: Plan, specs: tuple[TierSpec, ...] = (), *, drafts: bool = False, ranks: bool = False, hands_over: bool = False
) -> None:
    args, name = plan.request.args, plan.request.spec.name
    if not abilities_of(plan.request.release.engine).simulated:
        names, engines = titles(lambda can: can.simulated)
        raise UsageError("simulate", f"only {names}'s scheduler can be simulated", f"use --engine {engines}")
    if plan.request.spec.is_encoder:
        raise UsageError(
            "simulate", f"{name} is an encoder, whose steps are not simulated", "`kvplan estimate` sizes it"
        )
    refused = {
        "pipeline_parallel_size": args.pipeline_parallel_size > 1,
        "data_parallel_size": args.data_parallel_size > 1 and not ranks,
        "decode_context_parallel_size": args.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": args.prefill_context_parallel_size > 1,
        "--draft-model": plan.request.draft is not None and not drafts,
        "num_speculative_tokens": args.num_speculative_tokens > 0 and not drafts,
        "cpu_offload_gb": bool(args.cpu_offload_gb),
        "offload_group_size": (args.offload_group_size or 0) > 0,
    }
    cures = {
        "data_parallel_size": data_parallel_cure(plan),
        "cpu_offload_gb": OFFLOADED,
        "offload_group_size": OFFLOADED,
        "--draft-model": DRAFTED,
        "num_speculative_tokens": DRAFTED,
    }
    for name_or_flag, is_set in refused.items():
        if is_set:
            raise UsageError(
                "simulate", f"{name_or_flag} cannot be simulated", cures.get(name_or_flag, "use tensor_parallel_size")
            )
    if abilities_of(plan.request.release.engine).prompts_first is not None:
        prompts_first_run.check(plan)
        return
    check_tiers(plan, specs, hands_over=hands_over)
    if runs_whole_prompts(plan) and args.num_speculative_tokens:
        raise UsageError("simulate", "drafts of vLLM's first engine cannot be simulated", "use vllm@0.10 or newer")
    if plan.request.spec.is_compressed_mla:
        raise UnsupportedModelError(f"simulate: {name}", "pages of several sizes in one pool cannot be simulated")
    if not args.enable_chunked_prefill and plan.settings.max_num_batched_tokens < plan.capacity.max_model_len:
        raise UsageError(
            "simulate",
            "without chunked prefill a step must hold a whole prompt",
            f"raise {flag_of(plan.request.release.engine, 'max_num_batched_tokens')} to {plan.capacity.max_model_len}",
        )


def data_parallel_cure(plan: Plan) -> str:
    """How to plan for a server with data-parallel ranks where only one server is simulated."""
    if peers_of(plan) > 1:
        return "ranks that share experts or attention exchange tokens in every step, which `kvplan simulate` times"
    size = plan.request.args.data_parallel_size
    return f"replace it with --replicas {size} --router least-loaded: each rank is a replica"


def refuse_reordering(command: ServeCommand | None) -> None:
    """Raise UsageError for the first flag of a pasted server command that changes scheduling and is not modeled."""
    for flag, reason in (command.reordering if command else {}).items():
        problem, _, remedy = reason.partition("; ")
        raise UsageError(f"simulate {printable(flag, 60)}", problem, remedy)


def scheduler_config(plan: Plan, allocator: Literal["paged", "contiguous"]) -> SimulatedConfig:
    settings = plan.settings
    return SimulatedConfig(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=plan.capacity.max_model_len,
        enable_prefix_caching=settings.prefix_caching,
        batch_queue_depth=settings.batches,
        allocator=allocator,
        max_loras=plan.request.args.max_loras,
    )


def groups(plan: Plan) -> tuple[Group, ...]:
    """Return the pool's groups as the engine's types."""
    return tuple(_group(group, plan.request.spec.name) for group in plan.pool.groups)


def _group(group: KVGroup, name: str) -> Group:
    first = group.first
    match first.kind:
        case "full" | "latent":
            return FullGroup(first.block_size)
        case "sliding":
            assert first.bound is not None
            return WindowGroup(first.block_size, first.bound)
        case "chunked":
            assert first.bound is not None
            return ChunkedGroup(first.block_size, first.bound)
        case "state" if first.blocks is None:
            raise UnsupportedModelError(
                f"simulate: {name}",
                "a state for every block, as vLLM kept them until 0.27, cannot be simulated",
                "use --no-enable-prefix-caching, or vllm@0.28 or newer",
            )
        case "state":
            return MambaGroup(first.block_size, first.extra, first.checkpoint_alignment)
        case "ring":
            raise UnsupportedModelError(f"simulate: {name}", "a ring of index keys cannot be simulated")
        case "cross":
            raise UnsupportedModelError(f"simulate: {name}", "an encoder's tokens cannot be simulated")
        case _:
            assert_never(first.kind)


def token_bytes(plan: Plan) -> int:
    """Return KV bytes per token over all ranks; replicated latents count once."""
    shared = any(isinstance(cache, LatentAttention) for caches in plan.request.spec.layers for cache in caches)
    return plan.bytes_per_token * (1 if shared else plan.request.args.tensor_parallel_size)


def timed_tiers(plan: Plan, specs: tuple[TierSpec, ...], chunk_tokens: int | None = None) -> TimedTiers | None:
    """Return empty tiers for this model's blocks, in chunks of vLLM's connector, or None without specs."""
    if not specs:
        return None
    request, blocks = plan.request, chunk_blocks(plan, chunk_tokens)
    _, block_bytes = offloaded_bytes(request.args, request.release, plan.pool)
    chunk = chunk_bytes(blocks * block_bytes, request.release)
    for spec in specs:
        if spec.capacity < chunk:
            raise UsageError(f"--tier {spec.name}", f"{spec.capacity:,} bytes hold no chunk of {chunk:,}", "raise it")
    return TimedTiers(
        specs,
        groups(plan),
        block_bytes,
        chunk,
        blocks_per_chunk=blocks,
        enable_prefix_caching=plan.settings.prefix_caching,
    )


def chunk_blocks(plan: Plan, chunk_tokens: int | None) -> int:
    """Return the number of blocks per chunk; raise UsageError if the chunk is not a multiple of the block size."""
    sizes = {group.first.block_size for group in plan.pool.groups}
    if chunk_tokens is None:
        return 1
    if len(sizes) > 1:
        raise UsageError("--tier-chunk", "the groups of the KV cache have blocks of several sizes", "remove it")
    (size,) = sizes
    if chunk_tokens % size:
        raise UsageError(
            "--tier-chunk",
            f"must be a multiple of the block of {size} tokens ({chunk_tokens:,})",
            f"use {-(-chunk_tokens // size) * size}",
        )
    return chunk_tokens // size


def check_tiers(plan: Plan, specs: tuple[TierSpec, ...], *, hands_over: bool = False) -> None:
    """Raise an error for tiers that the server cannot have, and for the server's own tiers without a --tier."""
    args, name = plan.request.args, plan.request.spec.name
    if args.kv_transfer_config is not None and not hands_over:
        drafts = args.num_speculative_tokens or plan.request.draft  # neither is simulated with them
        remedy = "remove it" if drafts else "remove it, or use --tier or --disaggregate"
        raise UsageError("simulate", "--kv-transfer-config cannot be simulated", remedy)
    if args.kv_offloading_backend == "lmcache":
        raise UsageError("simulate", "LMCache cannot be simulated", "remove --kv-offloading-backend")
    if args.kv_offloading_size and not specs:
        size = f"cpu={args.kv_offloading_size / GIB:g}GiB@25GB/s"
        problem = "how fast host memory is copied depends on the host, and nobody stated it"
        raise UsageError("--kv-offloading-size", problem, f"write --tier {size} with its speed")
    if args.kv_offloading_size and specs[0].capacity != args.kv_offloading_size:
        stated = format_size(args.kv_offloading_size)
        problem = f"{format_size(specs[0].capacity)}, and --kv-offloading-size is {stated}"
        raise UsageError(f"--tier {specs[0].name}", problem, "give them one size")
    if len(specs) > MOST_TIERS:
        raise UsageError("--tier", f"{len(specs)} tiers", "name host memory, and files below it")
    if specs and runs_whole_prompts(plan):
        raise UsageError("--tier", "vLLM's first engine kept no KV beyond the GPU", "use vllm@0.10 or newer")
    if specs and plan.state_bytes and not plan.settings.prefix_caching:
        problem = f"{name} has recurrent states, which are offloaded only with prefix caching"
        raise UsageError("--tier", problem, "add --enable-prefix-caching, or remove it")
    if specs and plan.state_bytes and not plan.request.release.is_compared:
        problem = f"{name} has recurrent states, whose offloading was compared with vLLM 0.33 only"
        raise UsageError("--tier", problem, "use vllm@0.33")
    if specs and any(group.first.kind == "chunked" for group in plan.pool.groups):
        raise UsageError("--tier", f"{name} has chunked layers, which cannot be offloaded", "remove it")
