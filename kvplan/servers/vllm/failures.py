"""vLLM's words for why it did not start, ran out of memory or stopped, by release."""

from typing import Final

from kvplan.servers.failures import Wording

WORDINGS: Final[tuple[Wording, ...]] = (
    Wording(
        "kv_too_small_for_max_len", "To serve at least one request with the model", "0.8-0.33 (V1)",
        "vLLM v1/core/kv_cache_utils.py",
        (
            r"max seq len \(<context>\)",
            r"\(<needed_bytes> KV cache is needed",
            r"available KV cache memory \(<available_bytes>\)",
            r"estimated maximum model length is <estimated_max_len>",
        ),
        phase="pool",
    ),
    Wording(
        "kv_too_small_for_max_len", "is larger than the maximum number of tokens that can be stored in KV cache",
        "0.2-0.10 (V0)", "vLLM 0.6 worker/worker.py",
        (r"can be stored in KV cache \(<kv_tokens>\)", r"max seq len \(<context>\)"),
        phase="pool",
    ),
)  # fmt: skip
