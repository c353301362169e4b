"""Start-up messages of vLLM servers: one table, each row with its releases and source.

Every pattern uses bounded repetition. "GB" in these lines is 2^30 bytes. Sources: `vllm#N` is an issue of
github.com/vllm-project/vllm that quotes the line; a file is the server's own, in the named release.
"""

from typing import Final

from kvplan.servers.logs.log import SIZE, Wording

DEVICES: Final = ("GPU", "CUDA", "cuda", "rocm", "hpu", "xpu", "neuron")  # "# cuda blocks: 7054"; not "# CPU blocks"
_V0_PROFILE: Final = ("0.6.5-0.11 (V0)", "vllm#11899; vllm#20069")
_SUMMARY: Final = ("0.10.2-0.26", "vLLM 0.11 v1/worker/gpu_worker.py")

WORDINGS: Final[tuple[Wording, ...]] = (
    # release and model
    Wording("vllm", "vLLM API server version ", "vLLM API server version v?<version>", "0.4-0.14", "vllm#10702"),
    Wording(
        "vllm", "\u2588  version ", r"\u2588  version <version>\s{0,40}$", "0.15-0.33", "vLLM 0.19 entrypoints/utils.py"
    ),
    Wording(
        "vllm", "\u2588  model ", r"\u2588  model {1,4}<model>\s{0,40}$", "0.15-0.33", "vLLM 0.19 entrypoints/utils.py"
    ),
    Wording("vllm", "LLM engine (v", r"LLM engine \(v<version>\) with", "0.2-0.33", "vllm#10702; vllm#16692"),
    # engine, sampler and profile in use
    Wording("vllm", "Initializing a V", "Initializing a <engine_kind> LLM engine", "0.8-0.33", "vllm#20069"),
    Wording("vllm", "model weights take ", "<engine_kind> [0-9]", *_V0_PROFILE),
    *(
        Wording("vllm", f"# {device} blocks: ", "<engine_kind>: [0-9]", "0.2-0.10 (V0)", "vllm#2310; vllm#20069")
        for device in DEVICES
    ),
    Wording(
        "vllm", "FlashInfer for top-p & top-k sampling", "<sampler> for top-p & top-k sampling", "0.8-0.33",
        "vLLM 0.8.5 and 0.10.2 v1/sample/ops/topk_topp_sampler.py",
    ),
    *(
        Wording(
            "vllm", phrase, r"<sampler>\. {1,4}Falling back to", "0.8-0.11",
            "vLLM 0.8.5, 0.10.2, 0.11.0 v1/sample/ops/topk_topp_sampler.py",
        )
        for phrase in ("FlashInfer is ", "FlashInfer version >= ")
    ),
    Wording(
        "vllm", "CUDA graph memory profiling is ", "CUDA graph memory profiling is <graph_profiling> ", "0.18-0.33",
        "vLLM 0.18, 0.21, 0.28 v1/worker/gpu_worker.py",
    ),
    Wording(
        "vllm", "CUDA graph memory profiling will be ", "CUDA graph memory profiling <graph_profiling> enabled by",
        "0.18-0.19", "vLLM 0.18 and 0.19 v1/worker/gpu_worker.py",
    ),
    Wording("vllm", "Starting to load model ", r"Starting to load model <model>\.\.\.", "0.6-0.33", "vllm#16692"),
    Wording("vllm", "Using max model len ", "Using max model len <context>", "0.9-0.33", "vLLM 0.11 config/model.py"),
    Wording(
        "vllm", "enabled with max_num_batched_tokens=", "enabled with max_num_batched_tokens=<max_batched_tokens>",
        "0.5-0.33", "vllm#10702; vLLM 0.11 config/scheduler.py",
    ),
    Wording("vllm", "device_name=", r"device_name=<gpu>(?:,|\.json)", "0.4-0.33", "vllm#26612"),
    Wording(
        "vllm", " has a total capacity of ", "GPU [0-9]{1,2} has a total capacity of <total_memory> GiB", "any",
        "vllm#16712 (torch, out of memory)",
    ),
    Wording("vllm", "GPU 0: ", r"GPU 0: <gpu>(?: \(UUID|\s{0,40}$)", "any", "vLLM collect_env.py, pasted with a log"),
    # weights
    Wording(
        "vllm", "Loading model weights took ", "Loading model weights took <weights> GB", "0.3-0.7.3",
        "vllm#10116; vllm#15004",
    ),
    Wording("vllm", "Model loading took ", "Model loading took <weights> GB", "0.7.4-0.8.2", "vllm#14601; vllm#16378"),
    Wording("vllm", "Model loading took ", "Model loading took <weights> GiB", "0.8.3-0.33", "vllm#16301; vllm#16692"),
    # results of V0's profile run
    Wording(
        "vllm", "Memory profiling results: ",
        rf"Memory profiling results: total_gpu_memory=<total_memory>GiB initial_memory_usage={SIZE}GiB "
        rf"peak_torch_memory=<peak_torch>GiB memory_usage_post_profile={SIZE}GiB non_torch_memory=<non_torch>GiB "
        "kv_cache_size=<available_kv>GiB gpu_memory_utilization=<utilization>",
        "0.6.4", "vllm#10702; vllm#10517",
    ),
    Wording(
        "vllm", "total_gpu_memory (",
        r"total_gpu_memory \(<total_memory>GiB\) x (?:gpu_memory_utilization )?\(?<utilization>\)?(?: = <budget>GiB)?",
        *_V0_PROFILE,
    ),
    Wording("vllm", "model weights take ", "model weights take <weights>GiB", *_V0_PROFILE),
    Wording("vllm", "non_torch_memory ", "non_torch_memory (?:takes )?<non_torch>GiB", *_V0_PROFILE),
    Wording("vllm", "activation peak memory takes ", "activation peak memory takes <activations>GiB", *_V0_PROFILE),
    Wording("vllm", "KV Cache is ", "KV Cache is (?:only )?<available_kv>GiB", *_V0_PROFILE),
    # the pool
    *(
        Wording("vllm", f"# {device} blocks: ", f"# {device} blocks: <num_blocks>", "0.2-0.11", "vllm#2310; vllm#20069")
        for device in DEVICES
    ),
    Wording(
        "vllm", "Available KV cache memory: ", "Available KV cache memory: <available_kv> GiB", "0.9.2-0.33",
        "vllm#27508",
    ),
    Wording(
        "vllm", "GiB memory for KV Cache as specified", "reserved <available_kv> GiB memory for KV Cache as specified",
        "0.11-0.33", "vLLM 0.33 v1/worker/gpu_worker.py",
    ),
    Wording(
        "vllm", "GPU KV cache size", r"GPU KV cache size:? {0,20}\*{0,2}<kv_tokens> tokens", "0.7-0.33",
        "vllm#16301; vllm#19490",
    ),
    Wording(
        "vllm", "Maximum concurrency for ",
        "Maximum concurrency for <concurrency_context> tokens per request: <max_concurrency>x", "0.6.2-0.33",
        "vllm#10116; vllm#16301",
    ),
    Wording(
        "vllm", "Encoder cache will be initialized with a budget of ",
        r"budget of <encoder_tokens> tokens, {1,20}and {1,20}profiled with <encoder_items> ", "0.8-0.33",
        "vLLM 0.8.5 and 0.33 v1/worker/gpu_model_runner.py; vllm#16570",
    ),
    Wording(
        "vllm", "that can be stored in KV cache (", r"that can be stored in KV cache \(<kv_tokens_refused>\)",
        "0.2-0.8", "vllm#4588; vllm#13061",
    ),
    # CUDA graphs
    Wording(
        "vllm", "Graph capturing finished in ", "Graph capturing finished in [0-9]{1,6} secs?, took <cuda_graphs> GiB",
        "0.6.4-0.33", "vllm#10702; vllm#16301",
    ),
    Wording(
        "vllm", "Estimated CUDA graph memory: ", "Estimated CUDA graph memory: <cuda_graphs_estimated> GiB",
        "0.19-0.33", "local-inference-lab/rtx6kpro models/glm5.1",
    ),
    Wording(
        "vllm", "CUDA graph pool memory: ",
        r"CUDA graph pool memory: <cuda_graphs> GiB \(actual\), <cuda_graphs_estimated> GiB \(estimated\)", "0.19-0.33",
        "vLLM 0.33 v1/worker/gpu_worker.py; public logs of 0.19.1 and 0.20",
    ),
    # the summary after start-up
    Wording(
        "vllm", "Free memory on device (",
        r"Free memory on device \(<free_at_start>/<total_memory> GiB\) on startup\. Desired GPU memory utilization is "
        r"\(<utilization>, <budget> GiB\)", "0.10.2-0.33", "vLLM 0.33 v1/worker/gpu_worker.py",
    ),
    Wording(
        "vllm", "Actual usage is ",
        "Actual usage is <weights> GiB for weight, <activations> GiB for peak activation, <non_torch> GiB for "
        "non-torch memory, and <cuda_graphs> GiB for CUDAGraph memory", *_SUMMARY,
    ),
    Wording(
        "vllm", "Actual usage is ",
        r"Actual usage is <consumed> GiB for consumed memory \(weights \+ non-torch\), <activations> GiB for peak "
        r"activation, and <cuda_graphs> GiB for CUDAGraph memory", "0.27-0.33", "vllm#57936",
    ),
    Wording(
        "vllm", "Current kv cache memory in use is ", "Current kv cache memory in use is <kv_in_use> GiB",
        "0.10.2-0.33", "vLLM 0.33 v1/worker/gpu_worker.py",
    ),
    # lines that change the meaning of the figures
    Wording(
        "vllm", "The current --gpu-memory-utilization=", "The current --gpu-memory-utilization=<utilization> is",
        "0.20-0.33", "noonghunna/club-3090#104",
    ),
    Wording(
        "vllm", " padding layers, may waste", "Add <padding_layers> padding layers", "0.8.5-0.33",
        "vLLM 0.10 v1/core/kv_cache_utils.py",
    ),
    Wording(
        "vllm", "Setting attention block size to ", "Setting attention block size to <attention_block_size> tokens",
        "0.10-0.33", "NVIDIA-NeMo/Nemotron usage-cookbook",
    ),
    Wording(
        "vllm", "by the dcp_world_size ", "by the dcp_world_size <context_parallel>", "0.11-0.20",
        "vllm-project/recipes moonshotai/Kimi-K2-Think.md",
    ),
)  # fmt: skip
