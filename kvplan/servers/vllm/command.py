"""A `vllm serve ...` command in kvplan's terms.

Numbers are parsed as in vLLM. A misspelled flag is rejected, as vLLM would not start.
Sources: vLLM 0.33 engine/arg_utils.py and utils/argparse_utils.py; docs, "vllm serve" command line reference.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from kvplan.core.errors import Faults, UsageError
from kvplan.core.files import printable
from kvplan.servers.base import Starts
from kvplan.servers.vllm.arguments import OTHERS, READ
from kvplan.servers.vllm.flags import FLAGS
from kvplan.servers.vllm.pooling import TASKS
from kvplan.servers.vllm.variables import VARIABLES
from kvplan.servers.words import images
from kvplan.servers.words.argument_values import read_argument
from kvplan.servers.words.arguments import ARGUMENTS, NO_DRAFT
from kvplan.servers.words.command import (
    Note,
    ServeCommand,
    Started,
    flag_name,
    flag_text,
    is_value,
    literal,
    near_flag,
    only_value,
    take_other,
    take_unknown,
)
from kvplan.servers.words.environment import CONTAINERS
from kvplan.servers.words.item_limits import limits, limits_of
from kvplan.servers.words.shell import framework_note, is_shell, names_server
from kvplan.servers.words.speculative_config import parse_config
from kvplan.sizing.layout import check_kv_dtype

starts = Starts(
    ("vllm", "serve"), "model", True, ("LLM", (None, "vllm")), {"usage": "offline"},
    classes=("EngineArgs", "AsyncEngineArgs"),
)  # fmt: skip
flags = READ, OTHERS
variables = VARIABLES
OWN: Final = frozenset({"model", "model_tag", "revision", "enable_lora", "task"})
# Flags that set one key of the speculative config: today's short ones, and those of releases before 0.8.
SPECULATIVE: Final[Mapping[str, str]] = {
    "speculative_config": "",
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
CONFIG: Final = "compilation_config"
SIZES: Final = "cudagraph_capture_sizes"
# Flags that set a key of the compilation config.
COMPILATION: Final[Mapping[str, str]] = {
    "O": "level",
    "optimization_level": "level",
    "cudagraph_mode": "cudagraph_mode",
    SIZES: SIZES,
    "cuda_graph_sizes": SIZES,
    CONFIG: "",
}
ROPE_FLAGS: Final = ("rope_scaling", "rope_theta")  # of earlier releases: parts of --hf-overrides
BALANCING: Final = "eplb_config"
BALANCING_KEYS: Final[Mapping[str, str]] = {
    "num_redundant_experts": "num_redundant_experts", "window_size": "eplb_window_size",
}  # fmt: skip
BALANCING_OTHERS: Final = (
    "step_interval", "log_balancedness", "log_balancedness_interval", "use_async", "policy", "communicator",
    "enable_migration_batching",
)  # fmt: skip
ATTENTION: Final = "attention_config"
# Its keys that choose kernels; others may change the cache or keep workspaces. Source: vLLM 0.33 config/attention.py.
ATTENTION_KERNELS: Final = (
    "flash_attn_version", "flash_attn_max_num_splits_for_cuda_graph", "tokenspeed_mla_min_split_kv",
    "use_trtllm_attention", "disable_flashinfer_q_quantization", "mla_prefill_backend",
    "use_prefill_query_quantization", "trtllm_ragged_backend",
)  # fmt: skip
LARGEST_GRAPH: Final = "max_cudagraph_capture_size"  # also a separate flag
SHORTS: Final = {short: name for name, flag in FLAGS.items() for short in flag.short} | {
    "cc": CONFIG, "sc": "speculative_config", "ac": "attention_config", "dc": "diffusion_config",
    "asc": "api_server_count", "n": "nnodes", "r": "node_rank", "pcp": "prefill_context_parallel_size",
    "dpa": "data_parallel_address", "dpb": "data_parallel_backend", "dpe": "data_parallel_external_lb",
    "dph": "data_parallel_hybrid_lb", "dpl": "data_parallel_size_local", "dpm": "data_parallel_multi_port_external_lb",
    "dpn": "data_parallel_rank", "dpp": "data_parallel_rpc_port", "dpr": "data_parallel_start_rank",
}  # fmt: skip
EARLIER: Final = {  # other names of arguments
    "device_memory_utilization": "gpu_memory_utilization",
    "dcp_kv_cache_interleave_size": "cp_kv_cache_interleave_size",
}
LISTS: Final = (SIZES, "cuda_graph_sizes")
ARGUMENT_NAMES: Final = frozenset({*ARGUMENTS, *OWN, *SPECULATIVE, *COMPILATION, *ROPE_FLAGS, BALANCING, ATTENTION})
# Flags that vLLM completes from a unique prefix, as argparse does: without kvplan's own, and those that set one key of
# the speculative config before 0.8.
COMPLETED: Final = (
    {name for name, flag in FLAGS.items() if flag.printed}
    | {name for name in SPECULATIVE if name.startswith("spec_")} | {*OWN, *COMPILATION, *OTHERS, BALANCING, ATTENTION}
    | {"speculative_config"}
)  # fmt: skip
ALIASES: Final = {  # what is no flag of vLLM behind two dashes -> the flag that is meant: --tp, --ctx
    word: name
    for name, flag in FLAGS.items()
    for option in (*ARGUMENTS[name].options, *(f"--{short}" for short in flag.short))
    if (word := option.partition("/")[0].lstrip("-").replace("-", "_")) not in COMPLETED
}
_DOCKER_SWITCHES: Final = ("--rm", "-d", "-it", "-i", "-t", "-ti", "--init", "--privileged", "--detach", "-itd", "-dit")


def start(words: list[str]) -> Started | None:
    """Words after `vllm serve`, `python -m vllm.entrypoints...` or an image's name, regardless of what precedes
    them.
    """
    for index, word in enumerate(words):
        following = words[index + 1 :]
        if word.rpartition("/")[2] == "vllm" and following[:1] == ["serve"]:
            return started(following[1:], words[:index])
        if word.rpartition("/")[2] == "vllm" and following[:1] == ["bench"] and len(following) > 1:
            if following[1] not in ("throughput", "latency"):
                break
            return Started(following[2:], args={"usage": "offline"})
        if word == "-m" and following[:1] and re.fullmatch(r"vllm\.entrypoints\..*|\w+\.vllm", following[0]):
            return started(following[1:], words[:index], framework_note(following[0]))
    if names_server(words):  # another server's
        return None
    containers = [index for index, word in enumerate(words) if word.rpartition("/")[2] in CONTAINERS]
    candidates = range(containers[0] + 1 if containers else len(words), len(words))
    named = [(index, words[index]) for index in candidates if images.tagged("vllm", words[index]) is not None]
    for index, image in named:
        flag_before = words[index - 1].startswith("-") and "=" not in words[index - 1]
        if not flag_before or words[index - 1] in _DOCKER_SWITCHES or (index, image) == named[-1]:
            return after_image(words[index + 1 :], image)
    return None


def started(words: list[str], front: list[str], notes: tuple[str, ...] = ()) -> Started:
    """Return the started server; an image in the preceding words implies its release."""
    image = images.of_words("vllm", front)
    return Started(words, image.label, notes=notes if image.note is None else (*notes, image.note))


def after_image(words: list[str], image: str) -> Started:
    if words and is_shell(words[0]):
        raise UsageError(
            "--from-command",
            f"the image runs {printable(' '.join(words[:2]), 60)!r}, not a server",
            "paste its `vllm serve MODEL ...`",
        )
    if words[:1] == ["launch"]:  # its frontend: vLLM 0.21 entrypoints/cli/launch.py
        part = printable(" ".join(words[:2]), 60)
        raise UsageError("--from-command", f"`vllm {part}` loads no model on a GPU", "paste its `vllm serve MODEL ...`")
    return started(words[1:] if words[:1] == ["serve"] else words, [image])


def plain_name(name: str) -> tuple[str, bool]:
    """(the flag that a name stands for, whether it negates it): --no-X, and --disable-X for --enable-X."""
    head = name.partition(".")[0]
    if head in ARGUMENT_NAMES or head in OTHERS:
        return name, False
    if head in EARLIER:
        return EARLIER[head], False
    other = {"no_": "", "disable_": "enable_", "enable_": "disable_"}
    for prefix, replacement in other.items():
        plain = replacement + head.removeprefix(prefix)
        if head.startswith(prefix) and is_switch(plain):
            return plain, True
    return name, False


def is_switch(name: str) -> bool:
    if name in ARGUMENTS:
        return ARGUMENTS[name].kind == "flag"
    return name == "enable_lora" or (name in OTHERS and OTHERS[name].is_switch)


def takes_value(name: str) -> bool:
    plain = plain_name(name)[0].partition(".")[0]
    if plain in ARGUMENT_NAMES or plain in OTHERS:
        return not is_switch(plain)
    return not name.startswith(("enable_", "disable_", "no_", "skip_"))


def name_of(word: str) -> tuple[str, str | None]:
    """(name, value after =) of a flag; -O3 is the flag O with the value 3."""
    if re.fullmatch(r"-O\d", word):
        return "O", word[2:]
    return flag_name(word, SHORTS)


def completed(name: str, word: str) -> str:
    """Complete an abbreviated flag; UsageError for one that vLLM does not take, or cannot tell from others."""
    head, dot, key = name.partition(".")
    plain = plain_name(head)[0]
    if not word.startswith("--") or plain in ARGUMENT_NAMES or plain in OTHERS:
        return name
    if head in ALIASES:
        meant = f"did you mean --{ALIASES[head].replace('_', '-')}?"
        raise UsageError(option_of(word), "is not a flag of vLLM", meant)
    longer = sorted(known for known in spellings() if known.startswith(head))
    if len({plain_name(known) for known in longer}) > 1:
        flags = ", ".join("--" + known.replace("_", "-") for known in longer[:4])
        raise UsageError(
            option_of(word), f"is ambiguous to vLLM ({flags}{', ...' * (len(longer) > 4)})", "write it whole"
        )
    return longer[0] + dot + key if longer else name


@cache
def spellings() -> frozenset[str]:
    """Every flag that may be abbreviated, with those that turn a switch off."""
    switches = {name for name in COMPLETED if is_switch(name)}
    swapped = {name.replace("disable_", "enable_", 1) for name in switches if name.startswith("disable_")}
    return frozenset(COMPLETED | {f"no_{name}" for name in switches} | swapped)


def parse(words: list[str]) -> ServeCommand:
    """Parse the words after the server's name.

    Raise UsageError for a misspelled flag and a value that vLLM would reject.
    """
    command, faults = ServeCommand(), Faults()
    speculative: dict[str, Any] = {}
    compilation: dict[str, Any] | None = None
    lora = False
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if is_value(word):
            with faults.part():
                if command.model is not None:
                    raise stray(word, words[index - 2] if index > 1 else "")
                command.model = literal(word, "the model")
            continue
        name, value = name_of(word)
        is_known = False
        with faults.part():
            name = completed(name, word)
            is_known = True
        values = [] if value is None else [value]
        if value is None and takes_value(name):
            plain = plain_name(name)[0].partition(".")[0]
            many = (
                plain not in ARGUMENT_NAMES
                or (plain in ARGUMENTS and ARGUMENTS[plain].kind == "names")
                or plain in LISTS
            )
            while index < len(words) and is_value(words[index]) and (not values or many):
                values.append(words[index])
                index += 1
        if not is_known:
            continue
        head = name.partition(".")[0]
        with faults.part():
            if plain_name(name) == ("enable_lora", False):
                lora = True
            elif head in SPECULATIVE:
                speculative |= read_json(SPECULATIVE[head] or name.partition(".")[2], values, word)
            elif head == BALANCING:
                balance(command, read_json(name.partition(".")[2], values, word), word)
            elif head == ATTENTION:
                attend(command, read_json(name.partition(".")[2], values, word), word)
            elif head in COMPILATION:
                compilation = (compilation or {}) | compile_config(name, values, word)
            else:
                take(command, name, values, word)
    faults.refuse()
    finish(command, speculative, lora)
    if compilation is not None:
        compile_with(command, compilation)
    return command


def compile_config(name: str, values: list[str], word: str) -> dict[str, Any]:
    """Parse a flag that sets parts of the compilation config."""
    if name in LISTS:
        return {SIZES: [read_argument(LARGEST_GRAPH, size, option_of(word)) for size in values or [""]]}
    return read_json(name.partition(".")[2] or COMPILATION[name], values, word)


def in_json(value: Any) -> Any:
    """Parse the value of a dotted flag as vLLM does: JSON if it is any, else text."""
    import json

    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def compile_with(command: ServeCommand, stated: dict[str, Any]) -> None:
    """Apply the compilation config; the largest graph is an argument of its own."""
    import json

    from kvplan.servers.vllm import compilation

    stated = {key: in_json(value) for key, value in stated.items() if value is not None}
    largest = stated.pop(LARGEST_GRAPH, None)
    if largest is not None:
        take_argument(command, LARGEST_GRAPH, [str(largest)], f"--from-command {LARGEST_GRAPH}", negated=False)
    refused = compilation.unmodeled(stated)
    if refused is not None:
        command.refused.setdefault(compilation.OPTION, refused)
        return
    graphs = compilation.parsed(stated)
    if graphs.mode == "NONE":
        command.args["enforce_eager"] = True
        command.notes.append(Note("CUDA graphs are off; sized as with --enforce-eager"))
        return
    is_level = stated.pop("level", None) is not None  # a flag of its own in newer releases
    if is_level and not graphs.is_plain:
        stated.setdefault("cudagraph_mode", graphs.mode)
    if stated or not (is_level or largest):
        command.args[CONFIG] = json.dumps(stated)


def option_of(word: str) -> str:
    return f"--from-command {printable(flag_text(word), 60)}"


def stray(word: str, before: str) -> UsageError:
    """Error for a word that no flag takes; `before` is the preceding word."""
    name, value = name_of(before)
    plain = plain_name(name)[0].partition(".")[0]
    if not is_value(before) and value is None and plain not in ARGUMENT_NAMES and plain not in OTHERS:
        flag = printable(flag_text(before), 60)
        return UsageError(f"--from-command {flag}", "is not a flag that kvplan knows", "correct it, or remove it")
    stray_word = f"has an argument without a flag ({printable(word, 60)!r})"
    return UsageError("--from-command", stray_word, "quote values that contain spaces")


def take(command: ServeCommand, name: str, values: list[str], word: str) -> None:
    """Store one flag in the field it sets."""
    flag = flag_text(word)
    option = option_of(word)
    plain, negated = plain_name(name)
    if plain in ARGUMENTS:
        take_argument(command, plain, values, option, negated=negated)
    elif name.startswith("limit_mm_per_prompt."):
        limit_of(command, name, values, option)
    elif "." in name and (row := ARGUMENTS.get(name.partition(".")[0])) is not None and row.kind == "json":
        json_part(command, name, values, option)
    elif plain in ROPE_FLAGS:
        rope_part(command, plain, values, option)
    elif plain in ("model", "model_tag", "revision"):
        setattr(command, "revision" if plain == "revision" else "model", literal(only_value(values, option), flag))
    elif plain == "task":
        task_of(command, literal(only_value(values, option), flag))
    elif (other := OTHERS.get(plain.partition(".")[0])) is not None:
        if plain == "load_format" and values == ["bitsandbytes"]:  # the format implies the method
            command.args.setdefault("quantization", "bitsandbytes")
        take_other(command, flag, other, values, negated=negated)
    elif plain != "enable_lora":
        if near := near_flag(name, ARGUMENT_NAMES, OTHERS):
            raise UsageError(option, "is not a flag of vLLM", f"did you mean {near}?")
        take_unknown(command, flag)


def task_of(command: ServeCommand, task: str) -> None:
    """Translate --task of earlier releases to --runner and --convert."""
    if task in ("auto", "generate", "transcription"):
        command.args["runner"] = "generate" if task == "transcription" else task
    elif task in TASKS:
        command.args |= {"runner": "pooling", "convert": TASKS[task]}
    else:
        known = ", ".join(("auto", "generate", "transcription", *TASKS))
        command.refused.setdefault("--task", f"{printable(task, 40)!r} is not modeled; kvplan knows {known}")


def take_argument(command: ServeCommand, name: str, values: list[str], option: str, *, negated: bool) -> None:
    if ARGUMENTS[name].kind == "flag":
        if values:
            raise UsageError(option, f"takes no value ({printable(values[0], 40)!r})", "remove it")
        command.args[name] = not negated
        return
    if name == "num_redundant_experts" and values == ["0"]:
        return
    raw = " ".join(values) if values and ARGUMENTS[name].kind == "names" else only_value(values, option)
    flag = option.removeprefix("--from-command ")
    text = literal(raw, flag)
    value = read_argument(name, text, option, vllm=True)
    if name == "kv_cache_dtype":
        check_kv_dtype(value)
    command.args[name] = value
    if (
        isinstance(value, int)
        and re.search(r"[kmgt]$", text)
        and ARGUMENTS[name].kind in ("context", "tokens", "bytes")
    ):
        binary = f"{text[:-1]}{text[-1].upper()}"
        command.readings.append(Note(f"is {value:,} as in vLLM; {binary} would be binary", f"{flag} {text}"))


def limit_of(command: ServeCommand, name: str, values: list[str], option: str) -> None:
    """Merge a dotted flag (--limit-mm-per-prompt.image 0, --limit-mm-per-prompt.video.num_frames 8) into the limits."""
    import json

    modality, _, key = name.partition(".")[2].partition(".")
    before = {name: limit.document for name, limit in limits_of(command.args.get("limit_mm_per_prompt")).items()}
    text = only_value(values, option)
    value: Any = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else text
    earlier = before.get(modality, {})
    if key:
        value = {**(earlier if isinstance(earlier, dict) else {"count": earlier}), key: value}
    command.args["limit_mm_per_prompt"] = limits(json.dumps({**before, modality: value}), option)


def json_part(command: ServeCommand, name: str, values: list[str], option: str) -> None:
    """Merge a dotted flag (--kv-transfer-config.kv_connector NixlConnector) into a JSON object."""
    import json

    argument, *keys = name.split(".")
    config = json.loads(command.args.get(argument) or "{}")
    inner = config
    for key in keys[:-1]:
        if not isinstance(inner, dict):
            break
        inner = inner.setdefault(key, {})
    if not isinstance(inner, dict) or not all(keys):
        raise UsageError(option, "is not a part of a JSON object", f"write the object behind {flag_text(argument)}")
    text = literal(only_value(values, option), option.removeprefix("--from-command "))
    try:
        inner[keys[-1]] = json.loads(text)
    except (ValueError, RecursionError):
        inner[keys[-1]] = text
    command.args[argument] = json.dumps(config)


def rope_part(command: ServeCommand, name: str, values: list[str], option: str) -> None:
    """Add a flag of earlier releases to --hf-overrides, which took its place."""
    import json

    flag = option.removeprefix("--from-command ")
    text = literal(only_value(values, option), flag)
    value: Any = (
        json.loads(read_argument("hf_overrides", text, option)) if name == "rope_scaling" else number(text, option)
    )
    config = {**json.loads(command.args.get("hf_overrides") or "{}"), name: value}
    command.args["hf_overrides"] = json.dumps(config)
    command.notes.append(Note("vLLM 0.33 does not start with it; it is printed as a part of --hf-overrides", flag))


def number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(option, f"is not a number ({printable(text, 40)!r})", "write 1000000") from error


def read_json(key: str, values: list[str], word: str) -> dict[str, Any]:
    """Parse parts of a config given as one JSON object, or as a value for one of its keys."""
    option = option_of(word)
    stated, flag = only_value(values, option), option.removeprefix("--from-command ")
    # A revision moves no memory: nothing is lost if the text does not say it.
    text = literal(re.sub(r'"(?:code_|tokenizer_)?revision"\s*:\s*"[^"]*\$[^"]*"\s*,?', "", stated), flag)
    if key:
        return {key.replace("-", "_"): text}
    import json

    if re.fullmatch(r"\d", text):  # older releases took a plain level
        return {"level": text}
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise UsageError(option, f"is not a JSON object ({printable(text, 60)!r})", "quote it with '...'")
    return parsed


def balance(command: ServeCommand, stated: Mapping[str, Any], word: str) -> None:
    """Apply the parts of --eplb-config that affect memory. Source: vLLM 0.33 config/parallel.py (EPLBConfig)."""
    option = option_of(word)
    for key, value in stated.items():
        if key in BALANCING_KEYS:
            if key == "num_redundant_experts" and str(value) == "0":
                continue
            command.args[BALANCING_KEYS[key]] = read_argument(BALANCING_KEYS[key], str(value), f"{option} {key}")
        elif key not in BALANCING_OTHERS:
            raise UsageError(option, f"has no key {printable(key, 40)!r}", f"it has {', '.join(BALANCING_KEYS)}")


def attend(command: ServeCommand, stated: Mapping[str, Any], word: str) -> None:
    """Apply the backend of --attention-config; keys that choose kernels are repeated, others refused."""
    import json

    stated = {key: in_json(value) for key, value in stated.items() if value is not None}
    backend = stated.pop("backend", None)
    others = [key for key in stated if key not in ATTENTION_KERNELS]
    if others:
        name = printable(others[0], 40)
        command.refused.setdefault(flag_text(word), f"sets {name}, which is not modeled; remove it")
        return
    if backend is not None:
        take_argument(command, "attention_backend", [str(backend)], option_of(word), negated=False)
    if stated:
        command.repeated += [f"--{ATTENTION.replace('_', '-')}", json.dumps(stated)]


def finish(command: ServeCommand, speculative: dict[str, Any], lora: bool) -> None:
    """Resolve flags that depend on each other: LoRA slots count only with --enable-lora."""
    if lora:
        command.args.setdefault("max_loras", 1)  # vLLM's default
    elif command.args.pop("max_loras", None) is not None:
        command.notes.append(Note("--max-loras without --enable-lora reserves nothing"))
    if speculative:
        speculate(command, speculative)


def speculate(command: ServeCommand, stated: Mapping[str, Any]) -> None:
    """Apply a speculative config."""
    option = "--from-command"
    config = parse_config(stated, option)
    config.check_ranks(command.args.get("tensor_parallel_size", 1), option)
    if config.method is not None:
        command.args["speculative_method"] = config.method
    if config.method in NO_DRAFT:
        command.notes.append(Note(f"{config.method} speculation holds no GPU memory of its own"))
    command.speculative = dict(config.unsized)
    command.draft_model = config.model
    if config.tokens is not None:
        command.args["num_speculative_tokens"] = config.tokens


def scheduling() -> tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]:
    from kvplan.servers.vllm import scheduling as lists  # only the simulation asks

    return lists.MODELED, lists.NO_EFFECT, lists.REFUSED


def read_pair(text: str) -> tuple[str, Any] | None:
    return None  # its own names are those of the table
