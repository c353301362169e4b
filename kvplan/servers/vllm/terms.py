"""vLLM's own wording."""

from kvplan.servers.base import Sources, Terms

# Releases whose own code was not compared are modeled from published information.
DESCRIBED = "wheels, release notes, issues and posted start-up logs have them"

TERMS = Terms(
    title="vLLM",
    engines=("vllm", "vllm@VERSION"),
    example="vllm@0.33 or vllm@0.11.0",
    label_words=True,
    budget="vLLM may use {budget} of it (utilization {share})",
    log='"Maximum concurrency" {concurrency:.2f}x',
    logs_concurrency=True,
    seqs_flag="--max-num-seqs",
    context_flag="--max-model-len",
    share_argument="gpu_memory_utilization",
    slots_flag=None,
    risk="may not start",
    risk_row="may not start",
    shorter="A shorter --max-model-len is safer.",
    checks_start=True,
    keeps_share=False,
    simulated=True,
    recommended=True,
    outside="outside --gpu-memory-utilization",
    uncompared=(
        "{label} by wheels, notes, issues and logs; not compared with its own answers",
        f"{{label}} as its {DESCRIBED}; not compared with that release's own code",
    ),
    known_by="its wheel, release notes and logs",
    sources=Sources(
        charge="vLLM v1/kv_cache_interface.py",
        pool="vLLM v1/core/kv_cache_utils.py",
        budget="vLLM v1/worker/gpu_worker.py: ceil(total x gpu_memory_utilization)",
        users="blocks that decoding requests hold between two steps, after vLLM "
        "v1/core/single_type_kv_cache_manager.py",
        arguments="vLLM engine/arg_utils.py",
        described=f"rules of {{label}} as its {DESCRIBED}",
    ),
    program=("vllm", "serve"),
    needs_drafter=True,
    lean_kernels={"flashinfer_b12x": "marlin"},
    image="vllm/vllm-openai:v{release}",
)
