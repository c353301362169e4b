"""A pasted `vllm serve ...` command, and engine arguments as text: what they say in kvplan's terms.

SGLang's commands are read by kvplan/servers/sglang/command.py.

The text is split as a shell would and never run. Numbers of a pasted command are read as vLLM reads them. A flag that
changes memory in a way kvplan does not size is refused; a misspelt one is refused too, for vLLM would not start.
Sources: vLLM 0.33 engine/arg_utils.py and utils/argparse_utils.py; docs, "vllm serve" command line reference.
"""

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Final

from kvplan.core.errors import NoServerError, UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.servers.arguments import ARGUMENTS, SHORT, limits, read_argument, switch
from kvplan.servers.environment import Environment, given
from kvplan.servers.methods import METHODS, NO_DRAFT, NO_DRAFT_NAMES, REFUSED_KEYS, plain_method

# Flags that change what is held in GPU memory in a way kvplan does not size: refused.
REFUSED: Final[Mapping[str, str]] = {
    "config": "is a file of more flags; write them out",
    "cpu_offload_gb": "moves weights to host memory, which is not modeled; leave it out",
    "hf_overrides": "changes the model's config; pass the changed config.json as MODEL",
    "rope_scaling": "changes the model's config; pass the changed config.json as MODEL",
    "prefill_context_parallel_size": "is not modeled; leave it out",
    "disable_sliding_window": "shortens the context to the window, which is not modeled; give --max-model-len instead",
    "offload_group_size": "moves weights to host memory, which is not modeled; leave it out",
}
# Flags that change memory a little, in a row that is estimated anyway: answered as without them, and said so.
UNMODELLED: Final = frozenset(
    {
        "all2all_backend", "attention_config", "calculate_kv_scales",
        "cuda_graph_sizes", "cudagraph_capture_sizes", "enable_dbo", "enable_eplb", "enable_sleep_mode",
        "kv_offloading_backend", "kv_sharing_fast_prefill", "kv_transfer_config",
        "load_format", "mamba_block_size", "mamba_cache_dtype", "mamba_cache_mode", "max_cudagraph_capture_size",
        "max_seq_len_to_capture", "mm_processor_kwargs", "num_redundant_experts", "skip_mm_profiling",
    }
)  # fmt: skip
# Flags without an effect on GPU memory that take no value, so that the word after them is not taken for one.
SWITCHES: Final = frozenset(
    {
        "allow_credentials", "data_parallel_external_lb", "data_parallel_hybrid_lb", "disable_cascade_attn",
        "disable_chunked_mm_input", "disable_custom_all_reduce", "disable_fastapi_docs",
        "disable_frontend_multiprocessing", "disable_log_requests", "enable_mfu_metrics", "grpc", "kv_cache_metrics",
        "disable_log_stats", "disable_mm_preprocessor_cache", "disable_uvicorn_access_log",
        "enable_auto_tool_choice", "enable_force_include_usage", "enable_log_requests",
        "enable_logging_iteration_details", "enable_lora", "enable_lora_bias", "enable_mm_embeds",
        "enable_offline_docs", "enable_prompt_embeds", "enable_prompt_tokens_details", "enable_reasoning",
        "enable_request_id_headers", "enable_server_load_tracking", "enable_ssl_refresh",
        "enable_tokenizer_info_endpoint", "exclude_tools_when_tool_choice_none", "generation_config_only", "headless",
        "interleave_mm_strings", "log_outputs", "ray_workers_use_nsight", "return_tokens_as_token_ids",
        "skip_tokenizer_init", "trust_remote_code", "use_tqdm_on_load", "use_v2_block_manager",
    }
)  # fmt: skip
# Flags that take values and are of no account for memory; listed so that a near miss of a real one is told apart.
HARMLESS: Final = frozenset(
    {
        "additional_config", "allowed_headers", "allowed_local_media_path", "allowed_methods", "allowed_origins",
        "api_key", "api_server_count", "backend", "batch_size", "chat_template", "chat_template_content_format",
        "code_revision", "collect_detailed_traces", "convert", "data_parallel_address", "data_parallel_backend",
        "data_parallel_rank", "data_parallel_rpc_port", "data_parallel_size_local", "data_parallel_start_rank",
        "dataset", "dataset_name", "dataset_path", "default_chat_template_kwargs", "default_mm_loras", "device",
        "distributed_executor_backend", "download_dir", "eplb_config", "expert_placement_strategy", "generation_config",
        "guided_decoding_backend", "h11_max_header_count", "h11_max_incomplete_event_size", "hf_config_path",
        "hf_token", "host", "ignore_patterns", "input_len", "io_processor_plugin", "kv_events_config",
        "logits_processors", "logprobs_mode", "long_prefill_token_threshold", "lora_dtype", "lora_modules",
        "master_addr", "master_port", "max_cpu_loras", "max_log_len", "max_logprobs", "max_long_partial_prefills",
        "max_num_partial_prefills", "max_parallel_loading_workers", "middleware", "mm_processor_cache_gb",
        "mm_processor_cache_type", "model_impl", "model_loader_extra_config", "moe_backend", "nnodes", "node_rank",
        "num_iters", "num_iters_warmup", "num_prompts", "otlp_traces_endpoint", "output_len",
        "override_generation_config", "pooler_config", "port", "prefix_caching_hash_algo", "quantization_param_path",
        "reasoning_parser", "reasoning_parser_plugin", "response_role", "root_path", "runner",
        "safetensors_load_strategy", "scheduler_cls", "scheduling_policy", "seed", "served_model_name",
        "show_hidden_metrics_for_version", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "stream_interval",
        "structured_outputs_config", "swap_space", "task", "tokenizer", "tokenizer_mode", "tokenizer_revision",
        "tool_call_parser", "tool_parser_plugin", "uds", "uvicorn_log_level", "worker_cls", "worker_extension_cls",
    }
)  # fmt: skip
# Flags that say one key of the speculative config: today's short ones, and those of releases before 0.8.
SPECULATIVE_FLAGS: Final[Mapping[str, str]] = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_model": "model",
    "speculative_model_quantization": "quantization",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_disable_mqa_scorer": "disable_mqa_scorer",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}
MOST_UNKNOWN: Final = 200  # flags in no list; no server has so many
OWN: Final = frozenset({"model", "revision", "model_tag", "speculative_config", *SPECULATIVE_FLAGS}) - ARGUMENTS.keys()
# Whether there are CUDA graphs at all. Flag -> the key of the compilation config that its value stands for.
COMPILATION: Final[Mapping[str, str]] = {
    "O": "level",
    "optimization_level": "level",
    "cudagraph_mode": "cudagraph_mode",
    "compilation_config": "",
}

_SHORT: Final = SHORT | {
    "cc": "compilation_config", "sc": "speculative_config", "asc": "api_server_count", "n": "nnodes", "r": "node_rank",
    "dpa": "data_parallel_address", "dpb": "data_parallel_backend", "dpe": "data_parallel_external_lb",
    "dph": "data_parallel_hybrid_lb", "dpl": "data_parallel_size_local", "dpn": "data_parallel_rank",
    "dpp": "data_parallel_rpc_port", "dpr": "data_parallel_start_rank", "pcp": "prefill_context_parallel_size",
}  # fmt: skip
_KNOWN: Final = frozenset(ARGUMENTS) | REFUSED.keys() | UNMODELLED | SWITCHES | HARMLESS | OWN | COMPILATION.keys()
# Plain strings, compiled when first used: most commands need none of them.
_ENDS: Final = r"\|\|?|&&?|;"  # the words between two commands of a shell's line
_REDIRECTS: Final = r"(?:\d?>|&>|<)"
_COMMENT: Final = r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?:(?<=\s)|^)#[^\n]*"""  # a quoted part, or a comment
_IMAGE: Final = r"(?:[\w.:-]+/)*[\w.-]*vllm[\w.-]*(?::([\w.-]+))?(?:@sha256:[0-9a-f]+)?"
_VARIABLE: Final = r"\$[A-Za-z_{(]|`|\{\{"
_DOCKER_SWITCHES: Final = ("--rm", "-d", "-it", "-i", "-t", "-ti", "--init", "--privileged", "--detach", "-itd", "-dit")
_SCRIPT: Final = r"-[a-z]*c"
SHELLS: Final = ("sh", "bash", "dash", "ash", "zsh")
MOST_SHELLS: Final = 4  # of one inside the other


@dataclass(slots=True)
class ServeCommand:
    """What a pasted command says.

    args       field of EngineArgs -> value, only those that were given
    engine     "vllm@0.33.0" where an image's tag says it
    ignored    flags of no account for GPU memory, by name: their values may be secrets
    unmodelled flags whose effect on memory is not sized
    unknown    flags that stand in no list: what they do to memory cannot be said
    readings   notes of numbers that kvplan's own flags would read differently
    notes      other notes
    environment  variables that the server's process finds set, with the values of those that change its memory
    """

    model: str | None = None
    revision: str | None = None
    draft_model: str | None = None
    engine: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    unmodelled: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    readings: list[str] = field(default_factory=list)
    environment: Environment = field(default_factory=dict)


def limit_of(found: ServeCommand, name: str, values: list[str], option: str) -> None:
    """Add what a dotted flag says (--limit-mm-per-prompt.image 0, --limit-mm-per-prompt.image.count 0)."""
    modality, _, key = name.partition(".")[2].partition(".")
    before = found.args.get("limit_mm_per_prompt") or ""
    if key in ("", "count"):
        added = limits(f"{modality}={one(values, option)}", option)
        kept = [pair for pair in before.split(",") if pair and pair.partition("=")[0] != modality]
        found.args["limit_mm_per_prompt"] = ",".join([*kept, added or ""])


def pair_name(text: str) -> str:
    """The key of `--engine-arg k=v` as arguments are called."""
    name = text.partition("=")[0].strip().lstrip("-").replace("-", "_")
    return _SHORT.get(name, name)


def read_pair(text: str) -> tuple[str, Any]:
    """`--engine-arg k=v` as (field, value); a key that is no engine argument is an error with near misses.

    The flags that turn a switch off are taken as well: no_async_scheduling=true.
    """
    key, equals, value = text.partition("=")
    name, option = pair_name(text), f"--engine-arg {printable(key, 60)}"
    if not equals:
        raise UsageError(option, "has no value", "write key=value, for example block_size=32")
    negated = name.removeprefix("no_")
    if name != negated and negated in ARGUMENTS and ARGUMENTS[negated].kind == "flag":
        return negated, not switch(value.strip(), option)
    if name == "speculative_config":
        flags = "--draft-model, --speculative-method and --num-speculative-tokens"
        raise UsageError(option, "names another model", f"write {flags}")
    if name not in ARGUMENTS:
        import difflib

        near = difflib.get_close_matches(name, ARGUMENTS, n=3, cutoff=0.6)
        hint = f"did you mean {', '.join(near)}?" if near else f"kvplan knows {', '.join(ARGUMENTS)}"
        raise UsageError(option, "is not an engine argument kvplan models", hint)
    return name, read_argument(name, value.strip(), option)


# --- a whole command --------------------------------------------------------------------------------------------------


MAX_COMMAND_CHARS = 16 * 1024  # room for every flag of vLLM at once


def too_long(text: str) -> str:
    return f"is longer than {MAX_COMMAND_CHARS:,} characters ({len(text):,}); paste the server's command alone"


def split(text: str, depth: int = 0) -> list[list[str]]:
    """The commands of a shell's line, each as words; comments go, lines join, nothing is expanded or run.

    A command that hands a script to a shell (`docker run IMAGE bash -c '...'`) is the script's commands.
    """
    import shlex

    uncommented = re.sub(_COMMENT, lambda match: match.group(1) or "", text.strip())
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", uncommented))
    except ValueError as error:
        raise UsageError(
            "--from-command", f"the quotes do not match ({str(error).lower()})", "paste the whole command"
        ) from None
    commands: list[list[str]] = [[]]
    for word in words:
        if re.fullmatch(_ENDS, word):
            commands.append([])
        elif word.endswith(";"):
            commands[-1].append(word.removesuffix(";"))
            commands.append([])
        else:
            commands[-1].append(word)
    return [each for command in commands for each in scripted(until_redirect(command), depth)]


def scripted(words: list[str], depth: int) -> list[list[str]]:
    """The commands of the script that the words hand to a shell, after an export of what they set; else the words."""
    flag = script_flag(words)
    if flag is None or depth == MOST_SHELLS:
        return [words]
    front = words[:flag]
    variables = [name if value is None else f"{name}={value}" for name, value in given([], front).items()]
    images = [word for word in front if "sglang" in word or re.fullmatch(_IMAGE, word)]
    commands = [
        [*images, *each] if names_server(each) else each for each in split(words[flag + 1], depth + 1)
    ]  # the image says which release it is
    return [["export", *variables], *commands] if variables else commands


def script_flag(words: list[str]) -> int | None:
    """Where the flag is whose value is a script for a shell: `bash -lc SCRIPT`, `--entrypoint bash IMAGE -c SCRIPT`."""
    shell = next((at for at, word in enumerate(words) if is_shell(word)), len(words))
    flags = (at for at in range(shell + 1, len(words) - 1) if re.fullmatch(_SCRIPT, words[at]))
    return next(flags, None)


def is_shell(word: str) -> bool:
    return word.removeprefix("--entrypoint=").rpartition("/")[2] in SHELLS


def names_server(words: list[str]) -> bool:
    """Whether the words start a server themselves, and are not arguments of an image's own."""
    pairs = zip(words, [*words[1:], ""], strict=True)
    return any(
        (word.rpartition("/")[2] in ("vllm", "sglang") and following in ("serve", "bench"))
        or (word == "-m" and following.startswith(("vllm.", "sglang.")))
        for word, following in pairs
    )


def until_redirect(words: list[str]) -> list[str]:
    for end, word in enumerate(words):
        if re.match(_REDIRECTS, word):
            return words[:end]
    return words


def server(commands: list[list[str]], found: ServeCommand) -> list[str]:
    """The server's words from the first command that starts one; what else stands in the line is of no account."""
    for number, words in enumerate(commands):
        following = start(words, found)
        if following is not None:
            found.environment = given(commands[:number], words[: len(words) - len(following)])
            return following
    raise NoServerError(
        "--from-command",
        f"has no server in it ({printable(' '.join(commands[0]), 60)!r})",
        "paste a `vllm serve MODEL ...`, a `python -m vllm.entrypoints.openai.api_server ...`, a `docker run ... "
        "vllm/vllm-openai ...` or a `python -m sglang.launch_server ...`",
    )


def start(words: list[str], found: ServeCommand) -> list[str] | None:
    """The words after `vllm serve`, `python -m vllm.entrypoints...` or an image's name, whatever comes before."""
    for at, word in enumerate(words):
        following = words[at + 1 :]
        if word.rpartition("/")[2] == "vllm" and following[:1] == ["serve"]:
            of_image(words[:at], found)
            return following[1:]
        if word.rpartition("/")[2] == "vllm" and following[:1] == ["bench"] and len(following) > 1:
            if following[1] not in ("throughput", "latency"):
                break
            found.args["usage"] = "offline"
            return following[2:]
        if word == "-m" and following and following[0].startswith("vllm.entrypoints."):
            of_image(words[:at], found)
            return following[1:]
    containers = [at for at, word in enumerate(words) if word.rpartition("/")[2] in ("docker", "podman", "nerdctl")]
    candidates = range(containers[0] + 1 if containers else len(words), len(words))
    images = [(at, image) for at in candidates if (image := re.fullmatch(_IMAGE, words[at]))]
    for at, image in images:
        flag_before = words[at - 1].startswith("-") and "=" not in words[at - 1]
        if not flag_before or words[at - 1] in _DOCKER_SWITCHES or (at, image) == images[-1]:
            return after_image(words[at + 1 :], image.group(1), found)
    return None


def of_image(words: list[str], found: ServeCommand) -> None:
    """Take the release from the image that stands in front of a server's own command."""
    for word in words:
        image = re.fullmatch(_IMAGE, word)
        if image is not None:
            tagged(image.group(1), found)


def tagged(tag: str | None, found: ServeCommand) -> None:
    version = re.match(r"v?(\d+\.\d+(?:\.\d+)?)", tag or "")
    if version:
        found.engine = f"vllm@{version.group(1)}"


def after_image(words: list[str], tag: str | None, found: ServeCommand) -> list[str]:
    if words and is_shell(words[0]):
        raise UsageError(
            "--from-command",
            f"the image runs {printable(' '.join(words[:2]), 60)!r}, not a server",
            "paste the `vllm serve MODEL ...` that stands there",
        )
    tagged(tag, found)
    return words[1:] if words[:1] == ["serve"] else words


def is_value(word: str) -> bool:
    """Whether a word after a flag belongs to it: it is no flag itself (-1 is a value)."""
    return not word.startswith("-") or re.fullmatch(r"-\d+", word) is not None or word == "-"


def flag_name(word: str) -> tuple[str, str | None]:
    """(name with underscores, value behind =) of a flag; dotted parts of a JSON flag stay in the name."""
    flag, equals, value = word.partition("=")
    name = flag.lstrip("-").replace("-", "_")
    if not flag.startswith("--") and re.fullmatch(r"O\d", name):
        return "O", name[1:]
    if not flag.startswith("--"):
        head, dot, key = name.partition(".")
        name = _SHORT.get(head, head) + dot + key
    return name, value if equals else None


def read_command(text: str) -> ServeCommand:
    """What a pasted server command asks for.

    Raises UsageError for a command without a server, a misspelt flag, a value vLLM would not read, and for flags
    whose effect on memory kvplan does not size.
    """
    if len(text) > MAX_COMMAND_CHARS:
        raise UsageError(f"--from-command: {too_long(text)}")
    found = ServeCommand()
    return read_words(server(split(text), found), found)


def read_words(words: list[str], found: ServeCommand) -> ServeCommand:
    """What the words behind the server's name ask for; errors as of read_command."""
    speculative: dict[str, Any] = {}
    compilation: dict[str, Any] = {}
    lora = False
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if is_value(word):
            if found.model is not None:
                raise stray(word, words[at - 2] if at > 1 else "")
            found.model = literal(word, "the model")
            continue
        name, value = flag_name(word)
        values = [] if value is None else [value]
        if value is None and takes_value(name):
            while at < len(words) and is_value(words[at]) and (not values or name not in ARGUMENTS.keys() | OWN):
                values.append(words[at])
                at += 1
        if name == "enable_lora":
            lora = True
        elif name.startswith("speculative_config") or name in SPECULATIVE_FLAGS:
            speculative |= read_json(speculative_key(name), values, word)
        elif name.partition(".")[0] in COMPILATION:
            said = read_json(name.partition(".")[2] or COMPILATION[name], values, word)
            compilation |= said
            if not without_graphs(said):
                found.unmodelled.append(flag_text(word))
        else:
            take(found, name, values, word)
    finish(found, speculative, lora)
    if without_graphs(compilation):
        found.args["enforce_eager"] = True
        found.notes.append("--from-command: no CUDA graphs are asked for; sized as with --enforce-eager")
    return found


def stray(word: str, before: str) -> UsageError:
    """What is wrong with a word that no flag takes; `before` is the one in front of it."""
    name, value = flag_name(before)
    if not is_value(before) and value is None and name.partition(".")[0] not in _KNOWN and not is_switched(name):
        shown = printable(flag_text(before), 60)
        return UsageError(f"--from-command {shown}", "is no flag kvplan knows", "correct it or leave it out")
    return UsageError("--from-command", f"a word without a flag ({printable(word, 60)!r})", "quote values")


def is_switched(name: str) -> bool:
    """Whether a flag that begins with no- is a switch that is turned off."""
    return name.startswith("no_") and name.removeprefix("no_") in _KNOWN


def takes_value(name: str) -> bool:
    plain = name.removeprefix("no_")
    if plain in ARGUMENTS:
        return ARGUMENTS[plain].kind != "flag"
    return not (plain in SWITCHES or name.startswith(("enable_", "disable_", "no_", "skip_")))


def literal(value: str, what: str) -> str:
    if re.search(_VARIABLE, value):
        kind = "template" if "{{" in value else "shell"
        raise UsageError(
            "--from-command",
            f"{what} is a {kind} variable ({printable(value, 60)!r}), which is not expanded",
            "write its value",
        )
    return value


def flag_text(word: str) -> str:
    """A flag as it was written, without a value behind it, which may be a secret."""
    return word.partition("=")[0]


def take(found: ServeCommand, name: str, values: list[str], word: str) -> None:
    """Put one flag where it belongs."""
    flag = flag_text(word)
    option = f"--from-command {printable(flag, 60)}"
    negated = name.removeprefix("no_")
    if name in ARGUMENTS or (negated in ARGUMENTS and ARGUMENTS[negated].kind == "flag"):
        take_argument(found, name, values, option)
    elif name.startswith("limit_mm_per_prompt."):
        limit_of(found, name, values, option)
    elif name in ("model", "model_tag", "revision"):
        field_name = "revision" if name == "revision" else "model"
        setattr(found, field_name, literal(one(values, option), flag))
    elif name.partition(".")[0] in REFUSED:
        if values not in ([], ["0"], ["1"]) or name not in ("cpu_offload_gb", "prefill_context_parallel_size"):
            raise UsageError(f"{option}: {REFUSED[name.partition('.')[0]]}")
    elif name.partition(".")[0] in UNMODELLED:
        found.unmodelled.append(flag)
    else:
        import difflib

        near = [] if is_harmless(name) else difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.85)
        if near and near[0] not in SWITCHES | HARMLESS:
            raise UsageError(option, "is not a flag of vLLM", f"did you mean --{near[0].replace('_', '-')}?")
        (found.ignored if is_harmless(name) else found.unknown).append(flag)
        if len(found.unknown) > MOST_UNKNOWN:
            raise UsageError(
                option, f"is one of more than {MOST_UNKNOWN} flags kvplan does not know", "is it a vllm command?"
            )


def is_harmless(name: str) -> bool:
    plain = name.partition(".")[0]
    return plain in HARMLESS | SWITCHES or plain.removeprefix("no_") in SWITCHES


def take_argument(found: ServeCommand, name: str, values: list[str], option: str) -> None:
    if name not in ARGUMENTS or ARGUMENTS[name].kind == "flag":
        if values:
            raise UsageError(option, f"takes no value ({printable(values[0], 40)!r})", "leave it out")
        found.args[name.removeprefix("no_") if name not in ARGUMENTS else name] = name in ARGUMENTS
        return
    text = literal(one(values, option), option.removeprefix("--from-command "))
    value = read_argument(name, text, option, vllm=True)
    found.args[name] = value
    if (
        isinstance(value, int)
        and re.search(r"[kmgt]$", text)
        and ARGUMENTS[name].kind in ("context", "tokens", "bytes")
    ):
        found.readings.append(
            f"{option} {text}: is {value:,} as vLLM reads it; {text[:-1]}{text[-1].upper()} would be binary"
        )


def one(values: list[str], option: str) -> str:
    if len(values) != 1:
        raise UsageError(option, "needs one value", "write it behind the flag")
    return values[0]


def speculative_key(name: str) -> str:
    """The key of the speculative config that a flag stands for; "" for the whole of it."""
    if name.startswith("speculative_config"):
        return name.partition(".")[2]
    return SPECULATIVE_FLAGS.get(name, "")


def read_json(key: str, values: list[str], word: str) -> dict[str, Any]:
    """The parts of a config given as one JSON object, or with a key as one of its values."""
    option = f"--from-command {printable(flag_text(word), 60)}"
    text = literal(one(values, option), option.removeprefix("--from-command "))
    if key:
        return {key.replace("-", "_"): text}
    import json

    if re.fullmatch(r"\d", text):  # older releases took a bare level
        return {"level": text}
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise UsageError(option, f"is not a JSON object ({printable(text, 60)!r})", "quote it with '...'")
    return parsed


def without_graphs(compilation: Mapping[str, Any]) -> bool:
    """Whether a compilation config switches CUDA graphs off, by itself or because nothing is compiled.

    Source: vLLM docs, "Optimization Levels"; config/compilation.py: CUDAGraphMode.NONE is 0, CompilationMode.NONE is 0.
    """

    def off(key: str) -> bool:
        return str(compilation.get(key)).upper() in ("NONE", "0", "FALSE") and compilation.get(key) is not None

    if compilation.get("cudagraph_mode") is not None:
        return off("cudagraph_mode")
    return any(off(key) for key in ("use_cudagraph", "level", "mode"))


def finish(found: ServeCommand, speculative: dict[str, Any], lora: bool) -> None:
    """What flags say together: LoRA slots count only with --enable-lora."""
    if lora:
        found.args.setdefault("max_loras", 1)  # vLLM's default
    elif found.args.pop("max_loras", None) is not None:
        found.notes.append("--from-command: --max-loras without --enable-lora sets nothing aside")
    if speculative:
        speculate(found, speculative)


def speculate(found: ServeCommand, config: Mapping[str, Any]) -> None:
    """What a speculative config asks for. Source: vLLM 0.33 config/speculative.py.

    Raises UsageError for a method or a key whose effect on memory is not sized.
    """
    option = "--from-command"
    method, model = config.get("method"), config.get("model")
    if model is not None and not isinstance(model, str):
        raise UsageError(option, "the speculative config's model is not a name", "write its id")
    if method is not None and not isinstance(method, str):
        raise UsageError(option, "the speculative config's method is not a name", f"use one of {', '.join(METHODS)}")
    if method is None and model in NO_DRAFT_NAMES:
        method = plain_method(str(model))
    if method is not None:
        method = plain_method(method)
        if method not in METHODS:
            raise UnsupportedModelError(
                option, f"speculative method {printable(method, 40)!r} is not modeled", "leave it out"
            )
        found.args["speculative_method"] = method
    if method in NO_DRAFT:
        model = None
        found.notes.append(f"--from-command: {method} speculation holds no GPU memory of its own")
    for key, what in REFUSED_KEYS.items():
        if config.get(key) not in (None, False, "auto"):
            raise UnsupportedModelError(option, f"{key} of the speculative config {what}, which is not modeled")
    if config.get("draft_sample_method") not in (None, "greedy"):
        raise UnsupportedModelError(option, "draft_sample_method keeps the draft's logits, which is not modeled")
    ranks = config.get("draft_tensor_parallel_size")
    if method in (None, "draft_model") and ranks is not None:
        own = str(found.args.get("tensor_parallel_size", 1))
        if str(ranks) != own:  # the heads take their target's in any case
            why = f"draft_tensor_parallel_size {printable(str(ranks), 20)} beside {own} of the model is not modeled"
            raise UnsupportedModelError(option, why, "leave it out")
    found.draft_model = model
    tokens = config.get("num_speculative_tokens")
    if tokens is not None:
        name = "--from-command num_speculative_tokens"
        found.args["num_speculative_tokens"] = read_argument("num_speculative_tokens", str(tokens), name)
