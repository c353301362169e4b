"""Prefill context parallelism: ranks that divide a prompt's tokens, and each hold the weights and the whole KV cache.

Experts are sharded over tensor x prefill ranks, whole or by their matrices; everything else is repeated. Source:
vLLM 0.33 v1/worker/gpu/pcp_manager.py (validate_config), config/parallel.py, layers/fused_moe/config.py; weights, pools
and concurrency equal its own code (tests/facts/prefill_context.jsonl). Activations, graphs and what NCCL takes are
estimated as without it.
"""

from collections.abc import Iterator

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models.spec import ModelSpec
from kvplan.servers.releases import Version
from kvplan.servers.vllm import rules as vllm
from kvplan.servers.vllm.classes import type_of
from kvplan.servers.words.arguments import EngineArgs

# Sparse attention whose CUDA graphs it supports.


def check(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject what vLLM rejects with it, and what was not compared."""
    flag = f"prefill_context_parallel_size {args.prefill_context_parallel_size}"
    if not release.has("prefill_context"):
        raise UnsupportedModelError(flag, f"is modeled for vllm@0.33, not for {release.label}", "use vllm@0.33")
    if spec.is_compressed_mla or (spec.is_mla and spec.has_states):
        raise UnsupportedModelError(flag, f"the pool of {spec.name} with it was not compared", "remove it")
    if not spec.is_mla:
        raise UsageError(flag, f"vLLM supports it for MLA models only, and {spec.name} is none", "remove it")
    for problem, cure in _problems(spec, args, release):
        raise UsageError(flag, problem, cure)
    for what, is_set in _not_compared(args).items():
        if is_set:
            raise UnsupportedModelError(flag, f"is not modeled with {what}", "remove one of them")


def _problems(spec: ModelSpec, args: EngineArgs, release: Version) -> Iterator[tuple[str, str]]:
    """What vLLM rejects, with the cure."""
    seen = {name for weight in spec.other_weights for name in weight.serves} - vllm.left_out(spec, args, release)
    if seen:
        inputs = ", ".join(sorted(seen))
        yield f"vLLM supports it for text only, and {spec.name} takes {inputs}", "add --language-model-only"
    if args.max_loras:
        yield "vLLM does not support adapters with it", "remove one of them"
    sparse = spec.is_sparse_mla and not type_of(spec).prefill_graphs
    if sparse and not args.enforce_eager:
        yield f"vLLM captures no CUDA graphs of {spec.name} with it", "add --enforce-eager"
    if args.decode_context_parallel_size > 1 and not spec.is_sparse_mla:
        yield "vLLM supports it together with --decode-context-parallel-size for sparse attention only", "remove one"


def _not_compared(args: EngineArgs) -> dict[str, bool]:
    return {
        "--decode-context-parallel-size": args.decode_context_parallel_size > 1,
        "speculative decoding": args.num_speculative_tokens > 0,
        "--enable-eplb": args.enable_eplb,
        "--all2all-backend": args.all2all_backend is not None,
        "--kv-transfer-config": args.kv_transfer_config is not None,
        "--kv-offloading-size": bool(args.kv_offloading_size),
        "--cpu-offload-gb": bool(args.cpu_offload_gb),
        "--offload-group-size": bool(args.offload_group_size),
    }


def notes(args: EngineArgs) -> Iterator[str]:
    yield (
        f"prefill context parallelism: {args.prefill_context_parallel_size} times the GPUs, each with the weights "
        "(experts are divided) and the whole KV cache; activations and graphs are estimated as without it"
    )
