"""A backend from a plan or a directory, what its metrics say of its pool, and the lines that its start logs.

The lines are worded as vLLM's are, so that `kvplan reconcile --log` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvplan.core.units import GIB
from kvplan.planning.plan import Plan
from kvplan.serve.backend import Backend
from kvplan.serve.worker import NO_HOOKS, Hooks
from kvplan.servers.vllm.log_rows import loaded_weights

if TYPE_CHECKING:
    from engine.tiers import Tiers


@dataclass(frozen=True, slots=True)
class Start:
    """A backend that is ready, and what is known of it.

    cache_config  labels of cache_config_info
    log           lines of its start
    model         the name it serves under unless told another; num_tokens: of its vocabulary
    adapters      paths by name
    """

    backend: Backend
    cache_config: dict[str, str]
    log: list[str]
    model: str
    num_tokens: int
    hooks: Hooks = NO_HOOKS
    adapters: dict[str, str] = field(default_factory=dict)
    tiers: "Tiers | None" = None  # KV beyond the device


def cache_config(plan: Plan) -> dict[str, str]:
    """The labels of vLLM's cache_config_info that a plan knows."""
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
    """Settings as vLLM writes them into labels."""
    return {name: str(value) for name, value in values.items()}


def twin_log(plan: Plan, version: str) -> list[str]:
    """The start of the server that a plan is of, as its log would say it."""
    spec, capacity = plan.request.spec, plan.capacity
    weights = loaded_weights(plan.request, plan.settings, plan.stage)
    stated = {"model_tag": spec.name, **stated_args(plan)}
    return [
        f"vLLM API server version {version}",
        f"non-default args: {stated!r}",
        f"Using max model len {capacity.max_model_len}",
        f"Chunked prefill is enabled with max_num_batched_tokens={plan.settings.max_num_batched_tokens}.",
        f"Model loading took {weights / GIB:.2f} GiB memory and 0.00 seconds",
        f"Available KV cache memory: {plan.available / GIB:.2f} GiB",
        f"GPU KV cache size: {capacity.tokens:,} tokens",
        f"Maximum concurrency for {capacity.max_model_len:,} tokens per request: {capacity.max_concurrency:.2f}x",
    ]


def stated_args(plan: Plan) -> dict[str, Any]:
    """The engine arguments that are not at their defaults."""
    args = plan.request.args
    default = type(args)()
    names = [name for name in args.__dataclass_fields__ if getattr(args, name) != getattr(default, name)]
    return {name: getattr(args, name) for name in names}
