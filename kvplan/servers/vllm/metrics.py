"""vLLM's metrics. Source: vLLM 0.33 v1/metrics/loggers.py; older names from earlier releases."""

from kvplan.servers.logs.metrics import Counters, Metrics

METRICS = Metrics(
    prefix="vllm:",
    figures={
        "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "preemptions": ("vllm:num_preemptions_total",),
        "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        "prompt_tokens": ("vllm:prompt_tokens_total",),
        "generation_tokens": ("vllm:generation_tokens_total",),
    },
    info="vllm:cache_config_info",
    facts={
        "num_gpu_blocks": "num_blocks",
        "kv_cache_size_tokens": "kv_tokens",
        "kv_cache_max_concurrency": "max_concurrency",
    },
    flags={
        "gpu_memory_utilization": "gpu_memory_utilization",
        "cache_dtype": "kv_cache_dtype",
        "enable_prefix_caching": "enable_prefix_caching",
        "kv_cache_memory_bytes": "kv_cache_memory_bytes",
        "num_gpu_blocks_override": "num_gpu_blocks_override",
        "mamba_ssm_cache_dtype": "mamba_ssm_cache_dtype",
        "block_size": "block_size",
    },
    chosen={"block_size": "user_specified_block_size"},
    workload=Counters(
        counters={
            "ended": "vllm:request_prompt_tokens_count",
            "prompt_tokens_ended": "vllm:request_prompt_tokens_sum",
            "output_tokens_ended": "vllm:request_generation_tokens_sum",
            "first_tokens": "vllm:time_to_first_token_seconds_count",
            "first_token_s": "vllm:time_to_first_token_seconds_sum",
            "tokens_after_first": "vllm:inter_token_latency_seconds_count",
            "token_s": "vllm:inter_token_latency_seconds_sum",
            "prefill_s": "vllm:request_prefill_time_seconds_sum",
            "queue_s": "vllm:request_queue_time_seconds_sum",
            "steps": "vllm:iteration_tokens_total_count",
            "prompt_tokens": "vllm:prompt_tokens_total",
            "output_tokens": "vllm:generation_tokens_total",
            "prefix_queries": "vllm:prefix_cache_queries_total",
            "prefix_hits": "vllm:prefix_cache_hits_total",
            "preemptions": "vllm:num_preemptions_total",
        },
        gauges={"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting"},
        started="vllm:prompt_tokens_created",
        since="vLLM before 0.6 counts no requests",
    ),
)
