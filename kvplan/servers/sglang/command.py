"""A pasted `python -m sglang.launch_server ...` or `sglang serve ...`: what it says in kvplan's terms.

Read like vLLM's (command.py): split as a shell would, never run; numbers as SGLang's argparse takes them, plain.
Source: sglang 0.5.23 srt/server_args.py.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.servers.arguments import ARGUMENTS, read_argument, switch
from kvplan.servers.command import (
    MOST_UNKNOWN,
    ServeCommand,
    flag_name,
    flag_text,
    is_value,
    literal,
    one,
    pair_name,
)

ENGINE: Final = "sglang"
# SGLang's name -> kvplan's, which is vLLM's where vLLM has one.
NAMES: Final[Mapping[str, str]] = {
    "context_length": "max_model_len",
    "tp_size": "tensor_parallel_size", "tensor_parallel_size": "tensor_parallel_size", "tp": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size", "pipeline_parallel_size": "pipeline_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp_size": "data_parallel_size", "data_parallel_size": "data_parallel_size", "dp": "data_parallel_size",
    "mem_fraction_static": "mem_fraction_static", "max_total_tokens": "max_total_tokens",
    "max_running_requests": "max_num_seqs", "chunked_prefill_size": "max_num_batched_tokens",
    "page_size": "block_size", "kv_cache_dtype": "kv_cache_dtype", "dtype": "dtype", "quantization": "quantization",
    "swa_full_tokens_ratio": "swa_full_tokens_ratio", "mamba_full_memory_ratio": "mamba_full_memory_ratio",
    "mamba_ssm_dtype": "mamba_ssm_cache_dtype", "cuda_graph_max_bs": "cuda_graph_max_bs",
    "cuda_graph_max_bs_decode": "cuda_graph_max_bs", "cuda_graph_max_bs_prefill": "cuda_graph_max_bs_prefill",
    "prefill_attention_backend": "prefill_attention_backend",
    "decode_attention_backend": "decode_attention_backend", "max_mamba_cache_size": "max_mamba_cache_size",
    "mamba_radix_cache_strategy": "mamba_radix_cache_strategy",
    "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
}  # fmt: skip
BACKEND: Final = "attention_backend"  # of prefills and decodes, where those are not given apart
# Spellings of earlier releases -> the one of 0.5.23, which refuses them.
EARLIER: Final[Mapping[str, str]] = {
    "cuda_graph_max_bs": "--cuda-graph-max-bs-decode", "mamba_scheduler_strategy": "--mamba-radix-cache-strategy",
}  # fmt: skip
MODEL: Final = ("model_path", "model")
EXPERTS: Final = ("ep_size", "expert_parallel_size", "ep")
EP: Final = "ep"  # their place among the arguments, until the tensor ranks are known
SWITCHED: Final[Mapping[str, tuple[str, bool]]] = {
    "disable_radix_cache": ("enable_prefix_caching", False),
    "disable_cuda_graph": ("enforce_eager", True),
    "disable_prefill_cuda_graph": ("disable_prefill_cuda_graph", True),
    "disable_overlap_schedule": ("async_scheduling", False),
    "disable_hybrid_swa_memory": ("disable_hybrid_kv_cache_manager", True),
    "enable_multimodal": ("enable_multimodal", True),
}
REFUSED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("enable_dp_attention", "attn_dp_size"),
        "divides attention over data-parallel ranks inside --tp-size, which is not modeled; use vllm",
    ),
    "speculative_algorithm": "drafts in SGLang are not modeled; leave it out",
    "cpu_offload_gb": "moves weights to host memory, which is not modeled; leave it out",
    "json_model_override_args": "changes the model's config; pass the changed config.json as MODEL",
    "enable_lora": "adapters in SGLang are not modeled; leave it out",
    "lora_paths": "adapters in SGLang are not modeled; leave it out",
    "config": "is a file of more flags; write them out",
    "disaggregation_mode": "changes what is kept back, which is not modeled; leave it out",
}
UNMODELLED: Final = frozenset(
    {
        "cuda_graph_backend_decode", "cuda_graph_backend_prefill", "cuda_graph_bs", "cuda_graph_bs_decode",
        "cuda_graph_bs_prefill", "cuda_graph_config", "disable_decode_cuda_graph", "dsa_decode_backend",
        "dsa_prefill_backend", "enable_hierarchical_cache", "enable_memory_saver", "enable_symm_mem",
        "enable_torch_compile", "enable_unified_memory", "hicache_ratio", "hicache_size", "language_model_only",
        "load_format", "max_prefill_tokens", "moe_a2a_backend", "moe_runner_backend",
    }
)  # fmt: skip
# Flags of no account for GPU memory; those of SWITCHES take no value.
SWITCHES: Final = frozenset(
    {
        "disable_custom_all_reduce", "disable_decode_cuda_graph", "enable_cache_report", "enable_metrics",
        "enable_mixed_chunk", "enable_p2p_check", "enable_torch_compile", "enable_hierarchical_cache",
        "enable_memory_saver", "enable_symm_mem", "enable_unified_memory", "language_model_only", "log_requests",
        "show_time_cost",
        "skip_server_warmup", "skip_tokenizer_init", "trust_remote_code",
    }
)  # fmt: skip
HARMLESS: Final = frozenset(
    {
        "api_key", "base_gpu_id", "chat_template", "decode_log_interval", "device", "dist_init_addr", "dist_timeout",
        "download_dir", "file_storage_path", "gpu_id_step", "grammar_backend", "host", "load_balance_method",
        "log_level", "log_level_http", "nccl_init_addr", "nccl_port", "nnodes", "node_rank",
        "num_continuous_decode_steps", "port",
        "random_seed", "reasoning_parser", "sampling_backend", "schedule_conservativeness", "schedule_policy",
        "served_model_name", "stream_interval", "tokenizer_mode", "tokenizer_path", "tool_call_parser",
        "watchdog_timeout",
    }
)  # fmt: skip
KNOWN: Final = (
    frozenset(NAMES) | frozenset(MODEL) | frozenset(EXPERTS) | SWITCHED.keys() | REFUSED.keys() | UNMODELLED | SWITCHES
    | HARMLESS | {"revision", BACKEND}
)  # fmt: skip
KV_DTYPES: Final = {"bf16": "bfloat16"}


def start(words: list[str]) -> list[str] | None:
    """The words after the server's name; None where a command starts none of SGLang's."""
    for at, word in enumerate(words):
        following = words[at + 1 :]
        if word == "-m" and following and following[0] == "sglang.launch_server":
            return following[1:]
        if word.rpartition("/")[2] == "sglang" and following[:1] == ["serve"]:
            return following[1:]
    return None


def read(words: list[str]) -> ServeCommand:
    """What the words after the server's name ask for; errors as of kvplan.servers.command.read_command."""
    found = ServeCommand(engine=ENGINE)
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if is_value(word):
            raise UsageError("--from-command", f"a word without a flag ({printable(word, 60)!r})", "quote values")
        name, value = flag_name(word)
        name = _whole(name, word)
        values = [] if value is None else [value]
        while value is None and name not in SWITCHES | SWITCHED.keys() and at < len(words) and is_value(words[at]):
            values.append(words[at])
            at += 1
        _take(found, name, values, word)
    over_experts(found.args, "--from-command --ep-size")
    return found


def read_pair(text: str) -> tuple[str, Any] | None:
    """`--engine-arg k=v` where k is a name that SGLang alone has; None where it is none, or has no value.

    --ep-size is the pair (EP, ranks), for `over_experts`.
    """
    name, (key, equals, value) = pair_name(text), text.partition("=")
    option = f"--engine-arg {printable(key, 60)}"
    if not equals or name in ARGUMENTS:
        return None
    if name in SWITCHED:
        argument, on = SWITCHED[name]
        return argument, on == switch(value.strip(), option)
    if name in EXPERTS:
        return EP, read_argument("tensor_parallel_size", value.strip(), option)
    if name in NAMES:
        return NAMES[name], _value(NAMES[name], value.strip(), option)
    return None


def over_experts(args: dict[str, Any], option: str) -> None:
    """Put --enable-expert-parallel in place of --ep-size, which must be the tensor ranks."""
    ranks = args.pop(EP, 1)
    if ranks > 1:
        if ranks != args.get("tensor_parallel_size", 1):
            raise UnsupportedModelError(option, "only experts over all tensor ranks are modeled")
        args["enable_expert_parallel"] = True


def _whole(name: str, word: str) -> str:
    """The flag that a name stands for, as argparse takes the beginning of one. Refuses vLLM's and misspelt ones."""
    if name in KNOWN:
        return name
    option = f"--from-command {printable(flag_text(word), 60)}"
    longer = {NAMES.get(one, one) for one in KNOWN if one.startswith(name)}
    if len(longer) == 1:
        return next(one for one in KNOWN if one.startswith(name))
    if name.removeprefix("no_") in ARGUMENTS:
        other = "; its --mem-fraction-static counts otherwise" if name == "gpu_memory_utilization" else ""
        raise UsageError(option, f"is a flag of vLLM, not of SGLang{other}", "write SGLang's")
    import difflib

    near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.85)
    if near and near[0] not in SWITCHES | HARMLESS:
        raise UsageError(option, "is not a flag of SGLang", f"did you mean --{near[0].replace('_', '-')}?")
    return name


def _take(found: ServeCommand, name: str, values: list[str], word: str) -> None:
    flag = flag_text(word)
    option = f"--from-command {printable(flag, 60)}"
    if name in MODEL:
        found.model = literal(one(values, option), "the model")
    elif name == "revision":
        found.revision = literal(one(values, option), flag)
    elif name == BACKEND:
        for phase in ("prefill", "decode"):
            key = f"{phase}_{BACKEND}"
            found.args.setdefault(key, _value(key, literal(one(values, option), flag), option))
    elif name in NAMES:
        if name in EARLIER:
            found.notes.append(f"{option}: SGLang 0.5.23 does not start with it; write {EARLIER[name]} there")
        found.args[NAMES[name]] = _value(NAMES[name], literal(one(values, option), flag), option)
    elif name in EXPERTS:
        found.args[EP] = read_argument("tensor_parallel_size", one(values, option), option)
    elif name in SWITCHED:
        if values:
            raise UsageError(option, f"takes no value ({printable(values[0], 40)!r})", "leave it out")
        key, on = SWITCHED[name]
        found.args[key] = on
    elif name in REFUSED or name.startswith("speculative_"):
        raise UsageError(f"{option}: {REFUSED.get(name, REFUSED['speculative_algorithm'])}")
    else:
        listed = ((UNMODELLED, found.unmodelled), (SWITCHES | HARMLESS, found.ignored))
        next((names for known, names in listed if name in known), found.unknown).append(flag)
        if len(found.unknown) > MOST_UNKNOWN:
            raise UsageError(option, f"is one of more than {MOST_UNKNOWN} flags kvplan does not know")


def _value(name: str, text: str, option: str) -> Any:
    if name == "max_num_batched_tokens" and text == "-1":
        raise UnsupportedModelError(f"{option} -1", "SGLang without chunked prefill is not modeled", "give a size")
    if ARGUMENTS[name].kind in ("context", "tokens", "count") and not re.fullmatch("[0-9]+", text):
        raise UsageError(
            option, f"is no whole number ({printable(text, 40)!r}), as SGLang wants it", "write digits only"
        )
    if ARGUMENTS[name].kind == "fraction" and text.endswith("%"):
        raise UsageError(option, f"is no number ({printable(text, 40)!r}), as SGLang wants it", "write 0.9")
    return read_argument(name, KV_DTYPES.get(text, text) if name == "kv_cache_dtype" else text, option)
