"""The command of SGLang that starts exactly what was planned: its own flags, plain integers."""

from kvplan.servers.names import model_id
from kvplan.servers.plans import Plan

KV_DTYPES = {"auto": None, "fp8": "fp8_e4m3", "bfloat16": "bf16", "float16": "auto"}  # SGLang's own names


def command(plan: Plan) -> list[str]:
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
        "--kv-cache-dtype": KV_DTYPES.get(args.kv_cache_dtype, args.kv_cache_dtype),
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
