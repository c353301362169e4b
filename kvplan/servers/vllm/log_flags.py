"""Contents of vLLM's argument lists: engine arguments, drafts, variables; and the equivalent command."""

import ast
import json
import re
from contextlib import suppress
from typing import Final

from kvplan.servers.logs.log import NOT_ASKED, Drafting, ServerLog
from kvplan.servers.logs.text import arguments
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import ARGUMENTS, plain_method
from kvplan.servers.words.command import Environment
from kvplan.servers.words.environment import variables

# Resolved values under other names.
RESOLVED_NAMES: Final = {"max_seq_len": "max_model_len", "chunked_prefill_enabled": "enable_chunked_prefill"}
# Values in a list that no command should show, or that no command takes.
LEFT_OUT: Final = frozenset(
    {"api_key", "hf_token", "usage_context", "model_tag", "model", "dispatch_function", "subparser"}
)
CONFIG: Final = "compilation_config"
SAMPLER_WITHOUT_A_SORT: Final = "Using FlashInfer"
LOGGED_VARIABLES: Final = {  # a log message -> the variable that causes it
    "first_engine": ("VLLM_USE_V1", "0", "1"),
    "flashinfer": ("VLLM_USE_FLASHINFER_SAMPLER", "1", "0"),
    "estimates_graphs": ("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "1", "0"),
}


def flags(log: ServerLog) -> dict[str, str]:
    listed = {RESOLVED_NAMES.get(name, name): text for name, text in log.flags.items() if name in RESOLVED_NAMES}
    listed |= {name: text for name, text in log.flags.items() if name not in RESOLVED_NAMES}
    facts = {
        "max_model_len": log.first("context"),
        "max_num_batched_tokens": log.first("max_batched_tokens"),
        "decode_context_parallel_size": log.first("context_parallel"),
    }
    values = {name: reading.text.replace(",", "") for name, reading in facts.items() if reading is not None}
    if (share := utilization_of(log)) is not None:
        values["gpu_memory_utilization"] = share
    values |= {name: _plain(text) for name, text in listed.items() if name in ARGUMENTS and name not in NOT_ASKED}
    values |= {name: constructed(text) for name, text in values.items() if ARGUMENTS[name].kind == "json"}
    served = log.first("concurrency_context")  # value that -1 (auto) resolved to
    if served is not None:
        values["max_model_len"] = served.text.replace(",", "")
    elif "max_seq_len" in log.flags:
        values["max_model_len"] = log.flags["max_seq_len"]
    if (graphs := values.pop(CONFIG, None)) is not None and (stated := _stated(graphs)):
        values[CONFIG] = json.dumps(stated)
    if listed.get("block_size") == "16":  # the default, which older servers list along with all others
        del values["block_size"]
    if listed.get("quantization") == "fp8":
        values["quantization"] = "fp8"
    if listed.get("enable_lora") == "True":
        values |= {name: listed[name] for name in ("max_loras", "max_lora_rank") if name in listed}
        values.setdefault("max_loras", "1")
    tokens = drafting(log).get("num_speculative_tokens") or listed.get("num_speculative_tokens")
    if tokens is not None:
        values["num_speculative_tokens"] = tokens
    return {name: text for name, text in values.items() if text not in ("auto", "")}


def utilization_of(log: ServerLog) -> str | None:
    """The logged --gpu-memory-utilization; from the budget if it is logged too, for two more digits."""
    share, budget, total = (log.first(fact) for fact in ("utilization", "budget", "total_memory"))
    if share is None or budget is None or total is None or not total.size:
        return None if share is None else share.text
    exact = budget.size / total.size
    return f"{exact:.5f}" if abs(exact - share.value) <= 1.1 * share.half_digit else share.text


def _stated(text: str) -> dict[str, object]:
    """What a user set of the compilation config; empty for a resolved one, whose repr names members of enumerations, or
    before 0.11 has a key of the server's own.
    """
    try:
        config = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    if not isinstance(config, dict) or "max_capture_size" in config:
        return {}
    return {key: value for key, value in config.items() if value is not None}


def _plain(text: str) -> str:
    return text.removeprefix("torch.")


def constructed(text: str) -> str:
    """Convert a config shown as its constructor's call, `KVTransferConfig(kv_connector='X', ...)`, to JSON."""
    call = re.fullmatch(r"\w{1,60}\((.*)\)", text, re.DOTALL)
    if call is None:
        return text
    values: dict[str, object] = dict(arguments(call[1]))
    for name, value in values.items():
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # a string, whose quotes are removed
            values[name] = ast.literal_eval(str(value))
    return json.dumps(values, default=str)


# --- drafts -----------------------------------------------------------------------------------------------------------


def drafting(log: ServerLog) -> dict[str, str]:
    """Return the logged speculative settings, or an empty dict if there are none."""
    text = log.flags.get("speculative_config", "")
    config = arguments(re.sub(r"^(?:SpeculativeConfig)?[({]", "", text)) if text else {}
    if "num_spec_tokens" in config:
        config["num_speculative_tokens"] = config["num_spec_tokens"]
    if "speculative_model" in log.flags:
        config.setdefault("method", log.flags["speculative_model"])
    return config


def is_drafting(log: ServerLog) -> bool:
    """True if a draft model or head is used."""
    config = drafting(log)
    return bool(config) and config.get("method", "") not in ("ngram", "[ngram]")


def draft(log: ServerLog) -> Drafting | None:
    """Return the logged speculative decoding; a server that names a model and no method uses that as the draft
    model.
    """
    config = drafting(log)
    if not config:
        return None
    method = plain_method(config.get("method", "draft_model").lower())
    return Drafting(method, config.get("method", config.get("model", "speculation")))


# --- variables --------------------------------------------------------------------------------------------------------


def environment(log: ServerLog, release: Version) -> Environment:
    """Infer variables from lines about engine, sampler and profile, unless the release always logs the same."""
    known, stated = variables(), Environment()
    kinds = {reading.text for reading in log.all("engine_kind")}
    sampler, profiling = log.text("sampler"), log.text("graph_profiling")
    says = {
        "first_engine": bool(kinds - {"V1"}) if kinds else None,
        "flashinfer": None if sampler is None else sampler == SAMPLER_WITHOUT_A_SORT,
        "estimates_graphs": None if profiling is None else profiling == "enabled",
    }
    for name, value in says.items():
        variable, yes, no = LOGGED_VARIABLES[name]
        if value is not None and known[variable].is_read_by(release):
            stated[variable] = yes if value else no
    return stated


# --- a list as a command ----------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Convert `{'model_tag': 'Qwen/Qwen3-8B', 'max_model_len': 16384, ...}` to a command's words."""
    stated = arguments(text)
    model = stated.get("model_tag") or stated.get("model")
    if model is None:
        return []
    command = ["vllm", "serve", model]
    for name, value in stated.items():
        if name not in LEFT_OUT:
            command += _flag(name, value)
    return command


def _flag(name: str, text: str) -> list[str]:
    """Convert one listed argument to words; empty for a value that no command can have."""
    flag = f"--{name.replace('_', '-')}"
    if text in ("True", "False"):
        return [flag] if text == "True" else [f"--no-{flag[2:]}"]
    if text[:1] not in "[{(":
        return [] if re.search(r"[<>()]", text) else [flag, text]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    if isinstance(value, list | tuple):
        return [flag, *map(str, value)] if all(isinstance(item, str | int) for item in value) and value else []
    try:
        return [flag, json.dumps(value, allow_nan=False)]
    except (TypeError, ValueError, RecursionError):  # a set, or non-string keys: a damaged log
        return []
