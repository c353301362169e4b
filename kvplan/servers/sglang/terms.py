"""SGLang's own wording."""

from kvplan.servers.base import Sources, Terms
from kvplan.servers.sglang.changes import SOURCE

READ = "0.4.4, 0.4.9, 0.5.2, 0.5.5, 0.5.9, 0.5.12, 0.5.15 and 0.5.23"

TERMS = Terms(
    title="SGLang",
    engines=("sglang",),
    example="sglang@0.5 or sglang@0.4.3",
    label_words=False,
    budget="weights and KV may take {budget} (mem_fraction_static {share})",
    log="max_total_num_tokens={tokens}",
    logs_concurrency=False,
    seqs_flag="--max-running-requests",
    context_flag="--context-length",
    share_argument="mem_fraction_static",
    slots_flag="--mamba-full-memory-ratio",
    risk="may not hold it",  # it starts, and rejects longer requests
    risk_row="may not hold one",
    shorter="A shorter context is safer.",
    checks_start=False,
    keeps_share=True,
    simulated=True,
    recommended=False,
    outside="reserved for activations and graphs",
    uncompared=(
        f"{{label}} as the code of {READ} was read; compared with posted logs, not with its own answers",
        f"{SOURCE}; posted start-up logs (tests/servers/test_sglang.py)",
    ),
    program=("python3", "-m", "sglang.launch_server"),
    image="lmsysorg/sglang:v{release}",
    share="mem_fraction_static",
    own_flags={
        "max_model_len": "--context-length",
        "tensor_parallel_size": "--tp-size",
        "pipeline_parallel_size": "--pp-size",
        "data_parallel_size": "--dp-size",
        "max_num_seqs": "--max-running-requests",
        "max_loras": "--max-loras-per-batch",
        "max_cpu_loras": "--max-loaded-loras",
        "max_num_batched_tokens": "--chunked-prefill-size",
        "enforce_eager": "--disable-cuda-graph",
    },
    kv_dtype_names={"fp8": "fp8_e4m3"},
    own_kv_dtypes=True,
    prompts_first="0.5.23",
    adapter_slots=8,  # --max-loras-per-batch
    port=30000,  # srt/server_args.py
    known_by="its wheel, release notes and logs",
    sources=Sources(
        charge=SOURCE,
        pool=SOURCE,
        budget="free before loading x mem_fraction_static, sglang srt/mem_cache/kv_cache_configurator.py",
        users=SOURCE,
        arguments=SOURCE,
        described=None,
    ),
)
