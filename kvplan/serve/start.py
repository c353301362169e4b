"""A ready backend and its metadata, including the labels of its cache_config_info metric."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvplan.planning.plan import Plan
from kvplan.serve.backend import Backend
from kvplan.serve.worker import NO_HOOKS, Hooks

if TYPE_CHECKING:
    from engine.tiers import Tiers
    from kvplan.serve.transfer import Transfer
    from kvplan.serve.twin import Lag


@dataclass(frozen=True, slots=True)
class Start:
    """A ready backend and its metadata.

    cache_config  labels of cache_config_info
    log           lines of the start-up log that are still to be printed
    whole_log     all of them, of all ranks: what /metrics repeats
    model         default served name; num_tokens: vocabulary size
    adapters      adapter name -> path
    """

    backend: Backend
    cache_config: dict[str, str]
    log: list[str]
    model: str
    num_tokens: int
    hooks: Hooks = NO_HOOKS
    adapters: dict[str, str] = field(default_factory=dict)
    tiers: "Tiers[Any] | Transfer | None" = None  # KV offloading tiers, or handovers
    whole_log: tuple[str, ...] = ()
    vector_size: int | None = None  # of a pooling model
    lag: "Lag | None" = None  # of a simulated server
    rank: int = 0  # the data-parallel one
    face: ModuleType | None = None  # of a simulated server
    info: dict[str, Any] = field(default_factory=dict)  # what the face says of the model
    fallbacks: Mapping[str, str] = field(default_factory=dict)  # what the engine's first rank does without, and why


def cache_config(plan: Plan) -> dict[str, str]:
    """Return the labels of vLLM's cache_config_info that a plan determines."""
    settings, args, capacity = plan.settings, plan.request.args, plan.capacity
    return labels(
        {
            "block_size": plan.pool.block_size,
            "user_specified_block_size": args.block_size is not None,
            "cache_dtype": args.kv_cache_dtype or "auto",
            "enable_prefix_caching": settings.prefix_caching,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "num_gpu_blocks": capacity.num_blocks,
            "num_gpu_blocks_override": args.num_gpu_blocks_override,
            "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
            "kv_cache_size_tokens": capacity.tokens,
            "kv_cache_max_concurrency": round(capacity.max_concurrency, 2),
            "mamba_ssm_cache_dtype": args.mamba_ssm_cache_dtype or "auto",
        }
    )


def labels(values: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as label texts, formatted as in vLLM."""
    return {name: str(value) for name, value in values.items()}
