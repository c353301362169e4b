"""SGLang's metrics. Source: sglang 0.5 srt/metrics/collector.py."""

from kvplan.servers.logs.metrics import Counted, Metrics

METRICS = Metrics(
    prefix="sglang:",
    figures={
        "kv_usage": ("sglang:token_usage",),
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "hit_rate": ("sglang:cache_hit_rate",),
        # Counted when the request ends, so the rate is bursty; a page with `counted` is more precise.
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "generation_tokens": ("sglang:generation_tokens_total",),
    },
    facts={  # sizes are GiB
        "sglang:max_total_num_tokens": "kv_tokens",
        "sglang:weight_memory_usage_gb": "weights",
        "sglang:kv_cache_memory_usage_gb": "available_kv",
        "sglang:graph_memory_usage_gb": "cuda_graphs",
        "sglang:context_len": "context",
    },
    flags={"sglang:page_size": "page_size"},
    # Decode omits the first token of each request, which comes from prefill.
    counted=Counted(
        "sglang:realtime_tokens_total",
        {"prompt_tokens": ("prefill_compute", "prefill_cache"), "generation_tokens": ("decode",)},
        ("tp_rank", "pp_rank", "moe_ep_rank"),
    ),
    workload="SGLang counts a request's tokens when it ends; its pages are not read for this yet",
)
