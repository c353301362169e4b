"""From a plan to a simulation: the scheduler's limits, the pool and its groups as the server would have them."""

from dataclasses import dataclass
from typing import Final, Literal, assert_never

from engine.block_manager import ChunkedGroup, FullGroup, Group, MambaGroup, WindowGroup
from engine.scheduler import SchedulerConfig
from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models.spec import LatentAttention
from kvplan.planning.plan import Plan
from kvplan.servers.base import terms_of, titles
from kvplan.servers.vllm.deepseek_v4 import is_v4
from kvplan.servers.vllm.pool import KVGroup
from kvplan.simulate import prompts_first_run
from kvplan.simulate.arrivals import Arrivals
from kvplan.simulate.loop import Simulation
from kvplan.simulate.prompts_first_run import PromptsFirstRun
from kvplan.simulate.runs import Run
from kvplan.simulate.steptime import StepTime, attention_kinds, outside
from kvplan.simulate.tiers import Tiers, TierSpec, tiers
from kvplan.simulate.unshared import Unshared, is_unshared


@dataclass(frozen=True, slots=True)
class Setup:
    """What a run is made of, whatever comes in: it can be run any number of times.

    chunk_tokens  of the tiers
    """

    plan: Plan
    step_time: StepTime
    tiers: tuple[TierSpec, ...] = ()
    chunk_tokens: int = 256
    allocator: Literal["paged", "contiguous"] = "paged"

    def run(self, arrivals: Arrivals, run_len: int | None = None) -> Run:
        """A fresh run over these arrivals, by what changes where requests share nothing: the figures are the same."""
        by_step = self.simulation(arrivals, run_len)
        if isinstance(by_step, PromptsFirstRun) or by_step.tiers is not None:
            return by_step
        if not is_unshared(by_step.config, by_step.groups, by_step.reaches, run_len):
            return by_step
        return Unshared(
            by_step.config,
            by_step.num_blocks,
            by_step.groups,
            by_step.step_time,
            arrivals,
            request_s=by_step.request_s,
            crowd_s=by_step.crowd_s,
            prompt_token_s=by_step.prompt_token_s,
        )

    def simulation(self, arrivals: Arrivals, run_len: int | None = None) -> Simulation:
        """A fresh run over these arrivals; `run_len` tokens stand behind one prefix id."""
        request_s, crowd_s, prompt_token_s = outside(self.step_time)
        if terms_of(self.plan.request.release.engine).prompts_first is not None:
            if self.tiers or self.allocator != "paged":
                raise UsageError("simulate", "--tier and --baseline are of vLLM's scheduler", "use --engine vllm")
            limits = prompts_first_run.limits_of(self.plan)
            return PromptsFirstRun(
                config=prompts_first_run.config_of(limits),
                num_blocks=limits.num_tokens,
                groups=(),
                reaches=tuple(kind.reach for kind in attention_kinds(self.plan)),
                step_time=self.step_time,
                arrivals=arrivals,
                run_len=run_len,
                request_s=request_s,
                crowd_s=crowd_s,
                prompt_token_s=prompt_token_s,
                limits=limits,
            )
        return Simulation(
            config=scheduler_config(self.plan, self.allocator),
            num_blocks=self.plan.capacity.num_blocks,
            groups=groups(self.plan),
            reaches=tuple(kind.reach for kind in attention_kinds(self.plan)),
            step_time=self.step_time,
            arrivals=arrivals,
            run_len=run_len,
            request_s=request_s,
            crowd_s=crowd_s,
            prompt_token_s=prompt_token_s,
            tiers=empty_tiers(self.plan, self.tiers, self.chunk_tokens) if self.tiers else None,
        )


DRAFTED: Final = "leave it out: how many drafted tokens are accepted is not modeled"
OFFLOADED: Final = "leave it out: the time in which weights come from the host is not modeled"


def check(plan: Plan) -> None:
    """Refuse what the simulation does not model, with what to do instead, and a server that does not start."""
    name = plan.request.spec.name
    refuse_unmodeled(plan)
    if not plan.fits:
        raise UsageError(
            "simulate", f"{name} does not fit on {plan.request.gpu.name}", "see what would fit with `kvplan estimate`"
        )


def refuse_unmodeled(plan: Plan) -> None:
    args, name = plan.request.args, plan.request.spec.name
    if not terms_of(plan.request.release.engine).simulated:
        names, engines = titles(lambda terms: terms.simulated)
        raise UsageError("simulate", f"only {names}'s scheduler can be simulated", f"use --engine {engines}")
    if plan.request.spec.is_encoder:
        raise UsageError(
            "simulate", f"{name} is an encoder, whose steps are not simulated", "`kvplan estimate` sizes it"
        )
    refused = {
        "--pipeline-parallel-size": args.pipeline_parallel_size > 1,
        "--data-parallel-size": args.data_parallel_size > 1,
        "--decode-context-parallel-size": args.decode_context_parallel_size > 1,
        "--draft-model": plan.request.draft is not None,
        "--num-speculative-tokens": args.num_speculative_tokens > 0,
        "--cpu-offload-gb": bool(args.cpu_offload_gb),
        "--offload-group-size": (args.offload_group_size or 0) > 0,
    }
    cures = {
        "--data-parallel-size": "simulate one replica at its share of the rate",
        "--cpu-offload-gb": OFFLOADED,
        "--offload-group-size": OFFLOADED,
        "--draft-model": DRAFTED,
        "--num-speculative-tokens": DRAFTED,
    }
    for flag, is_set in refused.items():
        if is_set:
            raise UsageError(
                "simulate", f"{flag} cannot be simulated", f"{cures.get(flag, 'use --tensor-parallel-size')}"
            )
    if terms_of(plan.request.release.engine).prompts_first is not None:
        prompts_first_run.check(plan)
        return
    if is_v4(plan.request.spec):
        raise UnsupportedModelError(f"simulate: {name}", "pages of several sizes in one pool cannot be simulated")
    if not args.enable_chunked_prefill and plan.settings.max_num_batched_tokens < plan.capacity.max_model_len:
        raise UsageError(
            "simulate",
            "without chunked prefill a step must hold a whole prompt",
            f"raise --max-num-batched-tokens to {plan.capacity.max_model_len}",
        )


def scheduler_config(plan: Plan, allocator: Literal["paged", "contiguous"]) -> SchedulerConfig:
    settings = plan.settings
    return SchedulerConfig(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=plan.capacity.max_model_len,
        enable_prefix_caching=settings.prefix_caching,
        batch_queue_depth=settings.batches,
        allocator=allocator,
        max_loras=plan.request.args.max_loras,
    )


def groups(plan: Plan) -> tuple[Group, ...]:
    """The pool's groups in the engine's terms."""
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
            return MambaGroup(first.block_size)
        case "ring":
            raise UnsupportedModelError(f"simulate: {name}", "a ring of index keys cannot be simulated")
        case "cross":
            raise UnsupportedModelError(f"simulate: {name}", "an encoder's tokens cannot be simulated")
        case _:
            assert_never(first.kind)


def empty_tiers(plan: Plan, specs: tuple[TierSpec, ...], chunk_tokens: int) -> Tiers:
    """Tiers for this model's KV: a token costs what all ranks hold of it, latents once."""
    shared = any(isinstance(cache, LatentAttention) for caches in plan.request.spec.layers for cache in caches)
    return tiers(specs, chunk_tokens, plan.bytes_per_token * (1 if shared else plan.request.args.tensor_parallel_size))
