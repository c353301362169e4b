"""The lines that vLLM would log at start-up for a plan: `kvplan reconcile --log` reads them back."""

from typing import Any

from kvplan.core.units import GIB
from kvplan.servers.plans.plan import Plan
from kvplan.servers.vllm.log_rows import loaded_weights


def log_lines(plan: Plan) -> list[str]:
    """Return the planned server's start-up log."""
    spec, capacity = plan.request.spec, plan.capacity
    major, minor = plan.request.release.number
    weights = loaded_weights(plan.request, plan.settings, plan.stage)
    stated = {"model_tag": spec.name, **stated_args(plan)}
    return [
        f"vLLM API server version {major}.{minor}.0",
        f"non-default args: {stated!r}",
        f"Using max model len {capacity.max_model_len}",
        f"Chunked prefill is enabled with max_num_batched_tokens={plan.settings.max_num_batched_tokens}.",
        f"Model loading took {weights / GIB:.2f} GiB memory and 0.00 seconds",
        f"Available KV cache memory: {plan.available / GIB:.2f} GiB",
        f"GPU KV cache size: {capacity.tokens:,} tokens",
        f"Maximum concurrency for {capacity.max_model_len:,} tokens per request: {capacity.max_concurrency:.2f}x",
    ]


def stated_args(plan: Plan) -> dict[str, Any]:
    """Engine arguments that differ from their defaults."""
    args = plan.request.args
    default = type(args)()
    names = [name for name in args.__dataclass_fields__ if getattr(args, name) != getattr(default, name)]
    return {**({"enable_lora": True} if args.max_loras else {}), **{name: getattr(args, name) for name in names}}
