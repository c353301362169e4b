"""The command of SGLang that starts exactly what was planned: its own flags, plain integers."""

from kvplan.servers.arguments import flag_words
from kvplan.servers.names import model_id
from kvplan.servers.plans import Plan

KV_DTYPES = {"auto": None, "fp8": "fp8_e4m3", "bfloat16": "bf16", "float16": "auto"}  # SGLang's own names


def command(plan: Plan) -> list[str]:
    args, settings, page = plan.request.args, plan.settings, plan.pool.block_size
    stated = {
        "max_model_len": plan.capacity.max_model_len,
        "enable_expert_parallel": args.tensor_parallel_size if args.enable_expert_parallel else None,
        "mem_fraction_static": settings.gpu_memory_utilization,
        "max_num_seqs": args.max_num_seqs,  # the default follows from the pool, and bounds slots where stated
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "block_size": page if page > 1 else None,
        "kv_cache_dtype": KV_DTYPES.get(args.kv_cache_dtype, args.kv_cache_dtype),
    }
    words = flag_words("sglang", plan.request.release, args, stated)
    return ["python", "-m", "sglang.launch_server", "--model-path", model_id(plan.request.spec), *words]
