"""The command of vLLM that starts exactly what was planned: its own flags, plain integers.

The one word that is not an integer is the context of an auto-fitted plan whose range reaches below one user: `auto`.
"""

import json

from kvplan.core.units import GIB
from kvplan.servers.names import model_id
from kvplan.servers.plans import Plan
from kvplan.servers.releases import Version
from kvplan.servers.vllm.rules import EngineArgs, mm_limits


def command(plan: Plan) -> list[str]:
    args, settings = plan.request.args, plan.settings
    words = ["vllm", "serve", model_id(plan.request.spec), "--max-model-len", _context(plan)]
    words += _parallel(args)
    if (
        args.kv_cache_memory_bytes is None or args.gpu_memory_utilization is not None
    ):  # the start looks at it all the same
        words += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    words += ["--max-num-seqs", str(settings.max_num_seqs)]
    words += ["--max-num-batched-tokens", str(settings.max_num_batched_tokens)]
    return words + _cache(args, plan.request.release) + _switches(args) + _inputs(plan) + _lora(args) + _draft(plan)


def takes_auto_context(release: Version) -> bool:
    """Whether the release knows --max-model-len auto."""
    return release.has("auto_context")


def _context(plan: Plan) -> str:
    """The planned context; `auto` where it was fitted and the low end of the range would not hold it."""
    if plan.settings.auto_fit and plan.concurrency.low < 1 and takes_auto_context(plan.request.release):
        return "auto"
    return str(plan.capacity.max_model_len)


def _parallel(args: EngineArgs) -> list[str]:
    sizes = {
        "--tensor-parallel-size": args.tensor_parallel_size,
        "--pipeline-parallel-size": args.pipeline_parallel_size,
        "--data-parallel-size": args.data_parallel_size,
        "--decode-context-parallel-size": args.decode_context_parallel_size,
    }
    words = [word for flag, size in sizes.items() if size > 1 for word in (flag, str(size))]
    return [*words, "--enable-expert-parallel"] if args.enable_expert_parallel else words


def _cache(args: EngineArgs, release: Version) -> list[str]:
    values = {
        "--dtype": None if args.dtype == "auto" else args.dtype,
        "--quantization": args.quantization,
        "--kv-cache-dtype": None if args.kv_cache_dtype == "auto" else args.kv_cache_dtype,
        "--block-size": args.block_size,
        "--attention-backend": args.attention_backend if release.has("attention_backend_flag") else None,
        "--kv-cache-memory-bytes": args.kv_cache_memory_bytes,
        "--num-gpu-blocks-override": args.num_gpu_blocks_override,
        "--mamba-ssm-cache-dtype": args.mamba_ssm_cache_dtype,
        "--performance-mode": None if args.performance_mode == "balanced" else args.performance_mode,
        "--kv-offloading-size": f"{args.kv_offloading_size / GIB:.9g}" if args.kv_offloading_size else None,  # in GiB
    }
    return [word for flag, value in values.items() if value is not None for word in (flag, str(value))]


def _switches(args: EngineArgs) -> list[str]:
    switches = {
        "--enable-prefix-caching": args.enable_prefix_caching is True,
        "--no-enable-prefix-caching": args.enable_prefix_caching is False,
        "--no-enable-chunked-prefill": not args.enable_chunked_prefill,
        "--disable-hybrid-kv-cache-manager": args.disable_hybrid_kv_cache_manager,
        "--no-async-scheduling": not args.async_scheduling,
        "--enforce-eager": args.enforce_eager,
    }
    return [flag for flag, on in switches.items() if on]


def _inputs(plan: Plan) -> list[str]:
    args, text_only = plan.request.args, plan.request.spec.text_only
    text_only = args.language_model_only or (text_only and plan.request.release.has("language_model_only"))
    words = ["--language-model-only"] if text_only else []
    if limits := mm_limits(args):
        words += ["--limit-mm-per-prompt", json.dumps(limits)]
    return words + (["--mm-encoder-tp-mode", "data"] if args.mm_encoder_tp_mode == "data" else [])


def _lora(args: EngineArgs) -> list[str]:
    if not args.max_loras:
        return []
    words = ["--enable-lora", "--max-loras", str(args.max_loras), "--max-lora-rank", str(args.max_lora_rank)]
    return [*words, "--fully-sharded-loras"] if args.fully_sharded_loras else words


def _draft(plan: Plan) -> list[str]:
    draft, tokens = plan.request.draft, plan.request.args.num_speculative_tokens
    if draft is None:
        return []
    config: dict[str, str | int] = {"model": model_id(draft)}
    if tokens:
        config["num_speculative_tokens"] = tokens
    return ["--speculative-config", json.dumps(config)]
