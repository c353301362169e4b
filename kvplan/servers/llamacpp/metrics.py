"""llama-server's metrics (--metrics). Source: llama.cpp 0c1e57098 tools/server/server-task.cpp, and earlier pages."""

from kvplan.servers.logs.metrics import Metrics

METRICS = Metrics(
    prefix="llamacpp:",
    figures={
        "kv_usage": ("llamacpp:kv_cache_usage_ratio",),  # until 2025; later pages do not say it
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "prompt_tokens": ("llamacpp:prompt_tokens_total",),
        "generation_tokens": ("llamacpp:tokens_predicted_total",),
    },
    facts={},
    flags={},
    workload="llama-server counts no requests and no lengths",
)
