"""What clients see of SGLang 0.5.23: its own paths, fields, responses and metrics, as plain data.

Source: srt/entrypoints/http_server.py and openai/protocol.py, managers/io_struct.py and tokenizer_manager.py,
sampling/sampling_params.py, constrained/grammar_manager.py, observability/metrics_collector.py.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Final

OWNER: Final = "sglang"
WEIGHTS: Final = "default"  # weight_version
MOST_NEW: Final = 128  # max_new_tokens
# Field of a native request -> kind; others have no effect on a simulated server.
FIELDS: Final = {
    "rid": "any", "text": "any", "input_ids": "any", "sampling_params": "any", "return_logprob": "any",
    "logprob_start_len": "any", "top_logprobs_num": "any", "return_text_in_logprobs": "boolean", "stream": "boolean",
}  # fmt: skip
# Sampling parameter -> field of a completion with the same effect.
SAMPLING: Final = {
    "max_new_tokens": "max_tokens", "stop": "stop", "stop_token_ids": "stop_token_ids", "temperature": "temperature",
    "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty", "repetition_penalty": "repetition_penalty", "min_new_tokens": "min_tokens",
    "n": "n", "ignore_eos": "ignore_eos", "sampling_seed": "seed", "no_stop_trim": "include_stop_str_in_output",
    "skip_special_tokens": "skip_special_tokens", "spaces_between_special_tokens": "spaces_between_special_tokens",
    "logit_bias": "logit_bias",
}  # fmt: skip
# Bounds of sampling parameters: their name, what holds of a value, the server's words where it does not. Source:
# sampling/sampling_params.py (verify).
BOUNDS: Final[tuple[tuple[str, Callable[[float], bool], str], ...]] = (
    ("temperature", lambda x: 0 <= x < inf, "must be a non-negative finite number, got {}."),
    ("top_p", lambda x: 0 < x <= 1, "must be in (0, 1], got {}."),
    ("min_p", lambda x: 0 <= x <= 1, "must be in [0, 1], got {}."),
    ("top_k", lambda x: x == -1 or x >= 1, "must be -1 (disable) or at least 1, got {}."),
    ("frequency_penalty", lambda x: -2 <= x <= 2, "must be in [-2, 2], got {}."),
    ("presence_penalty", lambda x: -2 <= x <= 2, "must be in [-2, 2], got {}."),
    ("repetition_penalty", lambda x: 0 < x <= 2, "must be in (0, 2] (1.0 = no penalty), got {}."),
    ("min_new_tokens", lambda x: x >= 0, "must be in [0, max_new_tokens], got {}."),
    ("max_new_tokens", lambda x: x >= 0, "must be at least 0, got {}."),
)
CONSTRAINTS: Final = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
OPEN: Final = ("/health", "/metrics")  # paths that need no key, by their beginning
ROOT: Final = "SGLang is running"
FLUSHED: Final = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the "
    "operation will not be performed.)\n"
)
NOT_FLUSHED: Final = "Flush cache failed.\n"
PREFIX: Final = "sglang:"
LABELS: Final = {"engine_type": "unified"}
RANKS: Final = {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
# Family -> (help, what it shows). Gauges and counters of the scheduler have labels of its rank.
GAUGES: Final = {
    "num_running_reqs": ("The number of running requests.", "running"),
    "num_queue_reqs": ("The number of requests in the waiting queue.", "waiting"),
    "num_grammar_queue_reqs": ("The number of requests in the grammar waiting queue.", "none"),
    "num_used_tokens": ("The number of used tokens.", "used"),
    "token_usage": ("The token usage.", "usage"),
    "full_token_usage": ("The token usage for full attention layers.", "usage"),
    "kv_available_tokens": ("The number of free tokens in the KV cache.", "free"),
    "kv_evictable_tokens": ("The number of evictable tokens in the KV cache.", "evictable"),
    "kv_used_tokens": ("The number of used tokens in the KV cache.", "used"),
    "gen_throughput": ("The generation throughput (token/s).", "throughput"),
    "cache_hit_rate": ("The prefix cache hit rate.", "hit_rate"),
    "new_token_ratio": ("The new token ratio.", "ratio"),
    "num_retracted_reqs": ("The number of retracted requests.", "retracted_now"),
    "max_total_num_tokens": ("Maximum total number of tokens in the KV cache pool.", "capacity"),
    "page_size": ("Page size of the KV cache pool.", "page_size"),
    "num_pages": ("Number of pages of the KV cache pool.", "num_pages"),
    "context_len": ("Context length.", "context_len"),
}
RETRACTED: Final = ("num_retracted_requests", "Total number of retracted requests.")
QUEUE_S: Final = (
    0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, *range(1, 6), 10, 15, *range(20, 101, 10), *range(200, 1001, 100),
    *range(1200, 2001, 200), 2500, 3000,
)  # fmt: skip
FIRST_S: Final = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
WHOLE_S: Final = (*FIRST_S, 600, 1200, 1800, 2400)
TOKEN_S: Final = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2,
    4, 6, 8,
)  # fmt: skip
# Family -> (help, buckets, whether its label says if the request streams).
HISTOGRAMS: Final = {
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", FIRST_S, True),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", TOKEN_S, False),
    "request_time_per_output_token_seconds": ("Time per output token of a request in seconds.", TOKEN_S, True),
    "e2e_request_latency_seconds": ("Histogram of End-to-end request latency in seconds", WHOLE_S, True),
    "queue_time_seconds": ("Histogram of queueing time in seconds.", QUEUE_S, False),
}
# Family -> (help, further label).
COUNTERS: Final = {
    "prompt_tokens": ("Number of prefill tokens processed.", "is_streaming"),
    "generation_tokens": ("Number of generation tokens processed.", "is_streaming"),
    "num_requests": ("Number of requests processed.", "is_streaming"),
    "cached_tokens": ("Number of cached prompt tokens by source (device/host/storage).", "cache_source"),
    "num_aborted_requests": ("Number of requests aborted.", ""),
}


def sampling_problem(params: Mapping[str, Any]) -> str | None:
    """Return what is wrong with sampling parameters, in the server's words, or None; their types are not checked."""
    numbers = {name: value for name, value in params.items() if isinstance(value, int | float)}
    for name, holds, words in BOUNDS:
        if name in numbers and not holds(numbers[name]):
            return f"{name} {words.format(numbers[name])}"
    least, limit = numbers.get("min_new_tokens", 0), numbers.get("max_new_tokens", MOST_NEW)
    if least > limit and params.get("max_new_tokens", MOST_NEW) is not None:
        return f"min_new_tokens must be in [0, max_new_tokens({limit})], got {least}."
    if sum(params.get(name) is not None for name in CONSTRAINTS) > 1:
        return "Only one of json_schema, regex, ebnf, or structural_tag can be set."
    return None


def request_ids(stated: Any, num_prompts: int, *, is_batch: bool) -> list[str] | str | None:
    """Return the id of a request, or those of a batch's; raise ValueError, in the server's words, for others."""
    if stated is None or (isinstance(stated, str) and not is_batch):
        return stated
    if isinstance(stated, str):
        return [f"{stated}_{number}" for number in range(num_prompts)]
    if not isinstance(stated, list) or not is_batch or not all(isinstance(name, str) for name in stated):
        raise ValueError("The rid should be a string or a list of strings.")
    if len(stated) != num_prompts:
        raise ValueError("The specified rids length mismatch with the batch_size for batch processing.")
    if twice := sorted({name for name in stated if stated.count(name) > 1}):
        raise ValueError(f"Duplicate request IDs detected within the request: {twice}")
    return stated


def unreadable(kind: str, why: str) -> str:
    """Return the error for a constraint that does not compile."""
    return f"Failed to compile {kind or 'json'} grammar: {why}"


def unknown_model(name: str) -> dict[str, Any]:
    message = f"The model '{name}' does not exist"
    return {"error": {"message": message, "type": "invalid_request_error", "param": "model", "code": "model_not_found"}}


def finish_reason(reason: str | None, matched: int | str | None, num_tokens: int) -> dict[str, Any] | None:
    """Return a native response's finish_reason; matched: the stop string or the token that ended it."""
    match reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": num_tokens}
        case "stop":
            return {"type": "stop", "matched": matched}
        case _:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def generated(text: str, ids: Sequence[int], meta: dict[str, Any], reason: dict[str, Any] | None) -> dict[str, Any]:
    """Return one native response; meta: id, prompt_tokens, cached_tokens, and what else the server knows."""
    info = {
        "id": meta["id"],
        "finish_reason": reason,
        "prompt_tokens": meta["prompt_tokens"],
        "weight_version": WEIGHTS,
        **{name: value for name, value in meta.items() if name not in ("id", "prompt_tokens", "cached_tokens")},
        "reasoning_tokens": 0,
        "completion_tokens": len(ids),
        "cached_tokens": meta["cached_tokens"],
    }
    return {"text": text, "output_ids": list(ids), "meta_info": info}


def openais(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a request in OpenAI's format without this server's own names of fields."""
    constraints = {CONSTRAINTS[name]: body[name] for name in CONSTRAINTS if body.get(name) is not None}
    own = {name: value for name, value in body.items() if name not in ("rid", "no_stop_trim", *CONSTRAINTS)}
    if body.get("no_stop_trim"):
        own["include_stop_str_in_output"] = True
    return own | ({"structured_outputs": constraints} if constraints else {})


def too_long(num_tokens: int, max_tokens: int | None, context: int) -> str | None:
    """Return the error for a prompt and an output that the context does not hold, or None."""
    if num_tokens >= context:
        return f"The input ({num_tokens} tokens) is longer than the model's context length ({context} tokens)."
    total = num_tokens + (max_tokens or 0)
    if total <= context:
        return None
    return (
        f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total "
        f"of {total} tokens: {num_tokens} tokens from the input messages and {max_tokens} tokens for the completion. "
        "Please reduce the number of tokens in the input messages or the completion to fit within the limit."
    )


def choice(row: Mapping[str, Any], matched: int | str | None) -> dict[str, Any]:
    """Return a choice of OpenAI's responses as this server writes it."""
    changed = {name: value for name, value in row.items() if name not in ("stop_reason", "matched_stop")}
    if "message" in changed:
        message = changed["message"]
        own = {"role": message["role"], "content": message["content"], "reasoning_content": None}
        calls = message.get("tool_calls")
        changed["message"] = own if calls is None else own | {"tool_calls": calls}
    if "delta" in changed:
        changed["delta"] = {"role": None, "content": None, "reasoning_content": None} | changed["delta"]
    return changed | {"matched_stop": matched}


def usage(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usage object: cached tokens are left out without --enable-cache-report."""
    names = ("prompt_tokens", "total_tokens", "completion_tokens")
    unset = {"prompt_tokens_details": None, "reasoning_tokens": 0, "completion_tokens_details": None}
    return {name: row[name] for name in names} | unset


def document(row: dict[str, Any], *, is_chunk: bool) -> dict[str, Any]:
    """Return a whole response or a chunk as this server writes it; its choices are changed already."""
    changed = {name: value for name, value in row.items() if name not in ("kv_transfer_params", "usage")}
    stated = row.get("usage")
    changed["usage"] = None if stated is None else usage(stated)
    return changed if is_chunk else changed | {"metadata": {"weight_version": WEIGHTS}}


def openai_error(message: str, kind: str, param: str | None, status: int) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind, "param": param, "code": status}


def native_error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


def model_info(name: str, tokenizer: str | None, architecture: str | None, model_type: str | None) -> dict[str, Any]:
    return {
        "model_path": name, "served_model_name": name, "tokenizer_path": tokenizer or name, "is_generation": True,
        "preferred_sampling_params": None, "weight_version": WEIGHTS, "load_format": "auto", "reasoning_parser": None,
        "tool_call_parser": None, "disaggregation_mode": "null", "has_image_understanding": False,
        "has_audio_understanding": False, "model_type": model_type,
        "architectures": None if architecture is None else [architecture],
    }  # fmt: skip


def server_info(name: str, version: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of /server_info: the pool, the limits, and the live state of the only rank."""
    capacity, max_running = figures["capacity"], figures["max_running"]
    state = {"last_gen_throughput": figures["throughput"], "memory_usage": {"token_capacity": capacity}}
    return {
        "model_path": name, "served_model_name": name, "page_size": figures["page_size"],
        "context_length": figures["context_len"], "max_running_requests": max_running,
        "max_total_num_tokens": capacity, "chunked_prefill_size": figures["chunk"], "version": version,
        "frontend": "python", "internal_states": [state | {"effective_max_running_requests_per_dp": max_running}],
    }  # fmt: skip
