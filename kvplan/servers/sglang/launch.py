"""The command that starts exactly the planned SGLang server: its own flags, plain integers."""

from dataclasses import replace

from kvplan.models.catalog import model_id
from kvplan.models.families import mtp
from kvplan.servers.plans.plan import Plan
from kvplan.servers.sglang import drafts, several_nodes
from kvplan.servers.words.arguments import NO_DRAFT, EngineArgs, flag_words

program = ("python3", "-m", "sglang.launch_server")
image = "lmsysorg/sglang:v{release}"
port = 30000  # srt/server_args.py
worker = 0

KV_DTYPES = {"auto": None, "fp8": "fp8_e4m3", "bfloat16": "bf16", "float16": "auto"}  # SGLang's own names

DRAFT_NUMBERS = ("num_speculative_tokens", "speculative_eagle_topk", "speculative_num_draft_tokens")


def words(plan: Plan) -> list[str]:
    args, settings, page = plan.request.args, plan.settings, plan.pool.block_size
    context = plan.capacity.max_model_len
    stated = {
        # A default beyond the draft's is left to SGLang: stated, its draft's config decides (check_context).
        "max_model_len": None if drafts.outlasts_draft(plan.request, context) else context,
        "enable_expert_parallel": args.tensor_parallel_size if args.enable_expert_parallel else None,
        "mem_fraction_static": settings.gpu_memory_utilization,
        "max_num_seqs": args.max_num_seqs,  # the default follows from the pool, and bounds slots if given
        # SGLang divides it among the ranks of DP attention itself.
        "max_num_batched_tokens": settings.max_num_batched_tokens
        * (args.data_parallel_size if args.enable_dp_attention else 1)
        if args.enable_chunked_prefill
        else -1,
        "block_size": page if page > 1 else None,
        **({"max_lora_rank": args.max_lora_rank} if args.max_loras else {}),  # SGLang's default is its adapters' rank
        **_numbers(args),
        "kv_cache_dtype": KV_DTYPES.get(args.kv_cache_dtype, args.kv_cache_dtype),
    }
    flags = flag_words("sglang", plan.request.release, args, stated)
    if not args.enable_chunked_prefill and args.max_num_batched_tokens is not None:
        flags += ["--max-prefill-tokens", str(args.max_num_batched_tokens)]
    flags += [*_draft(plan), *several_nodes.words(plan.request)]
    return ["python", *program[1:], "--model-path", model_id(plan.request.spec), *flags]


def _numbers(args: EngineArgs) -> dict[str, None]:
    """Draft numbers left to SGLang, which takes all of EAGLE's or none."""
    if args.speculative_method in NO_DRAFT:
        return {"num_speculative_tokens": None}
    if args.speculative_method == "dspark":
        return dict.fromkeys(DRAFT_NUMBERS)
    return {} if args.speculative_eagle_topk else dict.fromkeys(DRAFT_NUMBERS)


def _draft(plan: Plan) -> list[str]:
    """The algorithm and the draft; its numbers are ordinary arguments."""
    args, draft = plan.request.args, plan.request.draft
    if args.speculative_method is None:
        return []
    words = ["--speculative-algorithm", drafts.NAMES[args.speculative_method]]
    if draft is None or args.speculative_method == "mtp":
        return words
    plain = replace(draft, name=draft.name.removesuffix(mtp.SUFFIX))
    if args.speculative_method == "dspark" and args.speculative_num_draft_tokens:
        words += ["--speculative-dspark-block-size", str(args.speculative_num_draft_tokens - 1)]
    return [*words, "--speculative-draft-model-path", model_id(plain)]
