"""The command that starts exactly the planned vLLM server: its own flags, plain integers.

The only non-integer is `auto` for the context of an auto-fitted plan whose range reaches below one user.
"""

import json
from dataclasses import replace
from typing import Any

from kvplan.models.catalog import model_id
from kvplan.servers.plans.plan import Plan
from kvplan.servers.vllm.supported import needs_deprecated
from kvplan.servers.words.arguments import DEFAULTS, flag_words

program = ("vllm", "serve")
image = "vllm/vllm-openai:v{release}"
port = 8000
worker = 3 * 10**9  # vllm-project/vllm#48436 (two ranks of 3 GB), #57469 (3,131,928 kB of anonymous memory)

MTP_SUFFIX = " (MTP head)"  # models.families.mtp.SUFFIX, which plans without drafts do not import


def words(plan: Plan) -> list[str]:
    args, settings = plan.request.args, plan.settings
    # An explicitly sized pool does not use a fraction of memory, but the start-up check applies to one that was
    # requested.
    shares = args.kv_cache_memory_bytes is None or args.gpu_memory_utilization is not None
    knows_text_only = plan.request.release.has("language_model_only")
    text_only = args.language_model_only or (plan.request.spec.text_only and knows_text_only)
    stated = {
        "max_model_len": _context(plan),
        "gpu_memory_utilization": settings.gpu_memory_utilization if shares else None,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "language_model_only": text_only or None,
        "allow_deprecated_quantization": args.allow_deprecated_quantization or needs_deprecated(plan.request) or None,
        "limit_mm_per_prompt": _limits(args.limit_mm_per_prompt),
        "max_lora_rank": args.max_lora_rank if args.max_loras else None,
        "fully_sharded_loras": (args.max_loras > 0 and args.fully_sharded_loras) or None,
        **({} if args.max_loras else dict.fromkeys(OF_ADAPTERS)),
    }
    flags = flag_words("vllm", plan.request.release, args, stated)
    flags += [*_task(plan), *_balance(plan), *_draft(plan)]
    if args.num_gpus > plan.request.gpu.node_gpus:
        from kvplan.servers.vllm import several_nodes

        flags += several_nodes.words(plan.request)
    return [*program, model_id(plan.request.spec), *flags]


# Arguments that have no effect without adapters.
OF_ADAPTERS = (
    "lora_dtype", "lora_target_modules", "max_cpu_loras", "enable_tower_connector_lora", "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)  # fmt: skip


def _limits(text: str | None) -> str | None:
    if text is None:
        return None
    from kvplan.servers.words.item_limits import limits_of  # only with the flag

    limits = {name: limit.document for name, limit in limits_of(text).items()}
    return json.dumps(limits) if limits else None


def _balance(plan: Plan) -> list[str]:
    args = plan.request.args
    config = {"num_redundant_experts": args.num_redundant_experts} if args.num_redundant_experts else {}
    if args.eplb_window_size != DEFAULTS["eplb_window_size"]:
        config["window_size"] = args.eplb_window_size
    return ["--eplb-config", json.dumps(config)] if config and args.enable_eplb else []


def _context(plan: Plan) -> str:
    """The planned context, or `auto` if it was fitted and would not fit at the low end of the range."""
    if plan.settings.auto_fit and plan.concurrency.low < 1 and plan.request.release.has("auto_context"):
        return "auto"
    return str(plan.capacity.max_model_len)


def _task(plan: Plan) -> list[str]:
    """--task flags for releases before --runner and --convert."""
    args = plan.request.args
    if plan.request.release.has("runner_flag") or (args.runner, args.convert) == ("auto", "auto"):
        return []
    from kvplan.servers.vllm.pooling import converts  # only for such releases

    return ["--task", converts(plan.request.spec, args) or "generate"]


def _draft(plan: Plan) -> list[str]:
    draft, args = plan.request.draft, plan.request.args
    config: dict[str, Any] = {}
    if args.speculative_method is not None:
        config["method"] = args.speculative_method
    if draft is not None and not draft.is_part_of(plan.request.spec):
        config["model"] = model_id(replace(draft, name=draft.name.removesuffix(MTP_SUFFIX)))
    if config and args.num_speculative_tokens:
        config["num_speculative_tokens"] = args.num_speculative_tokens
    if config and plan.request.repeated is not None:
        config |= plan.request.repeated.speculative
    return ["--speculative-config", json.dumps(config)] if config else []
