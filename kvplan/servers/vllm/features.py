"""What a request may ask for besides a model on GPUs; a feature is imported by the request that asks for it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from kvplan.core.records import dataclass
from kvplan.servers.plans.plan import EncoderBudget, Estimate, HostRow, Plan, Refusal, Request
from kvplan.servers.plans.pool import Pool
from kvplan.servers.releases import Version
from kvplan.servers.vllm.rules import has_tables, takes_items
from kvplan.servers.words.arguments import DEFAULTS, EngineArgs, Settings


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature's part in a plan; by default none.

    check       rejects what vLLM rejects, and what is not sized
    check_pool  the same once the pool is known
    moved       bytes of a stage's weights, by tensor group, that are not on the GPU
    buffers     the buffers of a stage with those of the feature
    notes       notes for a stage
    host        rows of host memory
    """

    check: Callable[[Request], None] = lambda request: None
    check_pool: Callable[[Request, Pool, Settings], None] = lambda request, pool, settings: None
    moved: Callable[[Request, int], Mapping[str, int]] = lambda request, stage: {}
    buffers: Callable[[Estimate, Request, Settings, int], Estimate] = lambda own, request, settings, stage: own
    notes: Callable[[Request, int], Iterable[str]] = lambda request, stage: ()
    host: Callable[[Plan], Iterable[HostRow]] = lambda plan: ()


def of(request: Request) -> Iterator[Feature]:
    """The features that a request asks for, in the order of their notes."""
    args = request.args
    if has_connector(args):
        from kvplan.servers.vllm import tiers

        yield tiers.FEATURE
    backends = (args.moe_backend, args.all2all_backend)
    if backends != (None, None) or args.enable_eplb or args.num_redundant_experts:
        from kvplan.servers.vllm import experts

        yield experts.FEATURE
    if has_tables(request.spec) or args.engram_config is not None:
        from kvplan.servers.vllm import tables

        yield tables.FEATURE
    if args.cpu_offload_gb or args.offload_group_size or args.offload_backend or args.enable_sleep_mode:
        from kvplan.servers.vllm import offload

        yield offload.FEATURE


class Items(NamedTuple):
    """What images, videos and audio change in a plan; by default nothing."""

    budget: EncoderBudget | None = None
    refusal: Refusal | None = None
    notes: tuple[str, ...] = ()


def items(request: Request, settings: Settings) -> Items:
    """The part of the model's encoder in a plan."""
    if not request.args.mm_processor_kwargs and not takes_items(request.spec, request.args, request.release):
        return Items()
    from kvplan.servers.vllm import encoder

    return encoder.items(request, settings)


def has_connector(args: EngineArgs) -> bool:
    return args.kv_transfer_config is not None or bool(args.kv_offloading_size)


def hybrid_manager_is_off(args: EngineArgs, release: Version) -> bool:
    """True if windows are kept in full: as requested, else if a connector does not support separate groups."""
    if not has_connector(args):
        return bool(args.disable_hybrid_kv_cache_manager)
    from kvplan.servers.vllm import connectors

    return connectors.hybrid_manager_is_off(args, release)


NO_ADAPTERS: Final = Estimate(0, 0, 0, "no adapters", "vLLM lora/model_manager.py", "exact")


def adapters(request: Request, settings: Settings, stage: int) -> Estimate:
    """Adapter slots of a stage."""
    args = request.args
    if not args.max_loras and args.max_lora_rank == DEFAULTS["max_lora_rank"]:
        return NO_ADAPTERS
    from kvplan.servers.vllm.adapters import lora

    return lora(request.spec, settings, args, stage)
