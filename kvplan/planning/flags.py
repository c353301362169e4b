"""The command that starts exactly what was planned: plain integers, the server's own flags only.

The one word that is not an integer is the context of an auto-fitted plan whose range reaches below one user: `auto`.
"""

import json
from pathlib import PurePath
from typing import assert_never

from kvplan.core.units import GIB
from kvplan.models import catalog
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Plan
from kvplan.servers import environment
from kvplan.servers.releases import Version
from kvplan.servers.vllm.rules import EngineArgs, mm_limits


def model_id(spec: ModelSpec) -> str:
    """What vLLM is to load: the Hub id or directory as the user named it; a bare catalog name stands for its Hub id."""
    name = spec.served_name
    path = PurePath(name)
    if path.name == "config.json":
        return str(path.parent)
    if "/" in name or catalog.find(name) is None:
        return name
    return str(catalog.facts(name)["id"])


def serve_command(plan: Plan) -> list[str]:
    """The command as a list of words. What the plan depends on is pinned even where it is this release's default."""
    variables = environment.assignments(plan.request.release, plan.request.args)
    match plan.request.release.engine:
        case "vllm":
            return [*variables, *_vllm_command(plan)]
        case "sglang":
            return [*variables, *_sglang_command(plan)]
        case _:
            assert_never(plan.request.release.engine)


def context_word(words: list[str], flag: str) -> str:
    """The context that a command asks for with its server's flag, as it is written there."""
    return words[words.index(flag) + 1]


_SGLANG_KV = {"auto": None, "fp8": "fp8_e4m3", "bfloat16": "bf16", "float16": "auto"}  # SGLang's own names


def _sglang_command(plan: Plan) -> list[str]:
    args, settings = plan.request.args, plan.settings
    page, newer = plan.pool.block_size, plan.request.release.has("decode_graph_flag")
    graphs = "--cuda-graph-max-bs-decode" if newer else "--cuda-graph-max-bs"
    strategy = "--mamba-radix-cache-strategy" if newer else "--mamba-scheduler-strategy"
    values = {
        "--model-path": model_id(plan.request.spec),
        "--context-length": plan.capacity.max_model_len,
        "--tp-size": args.tensor_parallel_size if args.tensor_parallel_size > 1 else None,
        "--pp-size": args.pipeline_parallel_size if args.pipeline_parallel_size > 1 else None,
        "--dp-size": args.data_parallel_size if args.data_parallel_size > 1 else None,
        "--ep-size": args.tensor_parallel_size if args.enable_expert_parallel else None,
        "--mem-fraction-static": settings.gpu_memory_utilization,
        "--max-running-requests": args.max_num_seqs,  # the default follows from the pool, and bounds slots where stated
        "--chunked-prefill-size": settings.max_num_batched_tokens,
        "--max-total-tokens": args.max_total_tokens,
        "--page-size": page if page > 1 else None,
        "--dtype": None if args.dtype == "auto" else args.dtype,
        "--quantization": args.quantization,
        "--kv-cache-dtype": _SGLANG_KV.get(args.kv_cache_dtype, args.kv_cache_dtype),
        "--swa-full-tokens-ratio": args.swa_full_tokens_ratio,
        "--mamba-full-memory-ratio": args.mamba_full_memory_ratio,
        "--mamba-ssm-dtype": args.mamba_ssm_cache_dtype,
        graphs: args.cuda_graph_max_bs,
        "--cuda-graph-max-bs-prefill": args.cuda_graph_max_bs_prefill,
        "--prefill-attention-backend": args.prefill_attention_backend,
        "--decode-attention-backend": args.decode_attention_backend,
        "--max-mamba-cache-size": args.max_mamba_cache_size,
        strategy: args.mamba_radix_cache_strategy,
    }
    words = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
    switches = {
        "--disable-radix-cache": args.enable_prefix_caching is False,
        "--disable-cuda-graph": args.enforce_eager,
        "--disable-prefill-cuda-graph": bool(args.disable_prefill_cuda_graph),
        "--disable-overlap-schedule": not args.async_scheduling,
        "--disable-hybrid-swa-memory": args.disable_hybrid_kv_cache_manager,
        "--enable-multimodal": bool(args.enable_multimodal),
    }
    return ["python", "-m", "sglang.launch_server", *words, *(flag for flag, on in switches.items() if on)]


def _vllm_command(plan: Plan) -> list[str]:
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
