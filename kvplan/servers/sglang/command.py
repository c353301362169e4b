"""A `python -m sglang.launch_server ...` or `sglang serve ...`: what it says in kvplan's terms.

Numbers are read as SGLang's argparse takes them, plain, and names as it does, by their beginnings too.
Source: sglang 0.5.23 srt/server_args.py.
"""

import re
from typing import Any, Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.servers import images
from kvplan.servers.arguments import ARGUMENTS, DEFAULTS, Flag, read_argument, spellings, switch
from kvplan.servers.sglang import drafts
from kvplan.servers.sglang.arguments import OTHERS
from kvplan.servers.words import (
    EXPERT_RANKS,
    ServeCommand,
    Started,
    flag_name,
    flag_text,
    is_value,
    literal,
    near_flag,
    only_value,
    over_experts,
    pair_name,
    take_other,
    take_unknown,
)

NAMES: Final = spellings("sglang")
BACKEND: Final = "attention_backend"  # of prefills and decodes, where those are not given apart
MODEL: Final = ("model_path", "model")
EXPERTS: Final = "enable_expert_parallel"  # SGLang gives a number of ranks
DRAFT_PATHS: Final = ("speculative_draft_model_path", "speculative_draft_model")
ALGORITHM: Final = "speculative_algorithm"
ADAPTERS: Final = ("enable_lora", "lora_paths")
SLOTS: Final = 8  # --max-loras-per-batch by default
STATED: Final = {"max_lora_rank": "--max-lora-rank", "lora_target_modules": "--lora-target-modules"}
KNOWN: Final = frozenset({*NAMES, *MODEL, *OTHERS, "revision", BACKEND, ALGORITHM, *DRAFT_PATHS, *ADAPTERS})


def flag_of(argument: str) -> Flag:
    """SGLang's flag of an argument that it has."""
    flag = ARGUMENTS[argument].sglang
    assert flag is not None
    return flag


NEGATED: Final = frozenset(name for name, argument in NAMES.items() if isinstance(flag_of(argument).on, str))


def start(words: list[str]) -> Started | None:
    """What stands after the server's name; None where a command starts none of SGLang's."""
    for index, word in enumerate(words):
        following = words[index + 1 :]
        as_module = word == "-m" and following[:1] == ["sglang.launch_server"]
        if as_module or (word.rpartition("/")[2] == "sglang" and following[:1] == ["serve"]):
            image = images.of_words("sglang", words[:index])
            return Started(following[1:], image.label, notes=() if image.note is None else (image.note,))
    return None


def is_switch(name: str) -> bool:
    plain = name.removeprefix("no_")
    if name == "enable_lora":
        return True
    if name in NAMES:
        return flag_of(NAMES[name]).on is not None
    if plain in NEGATED:
        return True
    return plain in OTHERS and OTHERS[plain].is_switch


def parse(words: list[str]) -> ServeCommand:
    """What the words after the server's name ask for; errors as of kvplan.servers.vllm.command.parse."""
    command = ServeCommand(engine="sglang")
    index, adapts = 0, False
    while index < len(words):
        word = words[index]
        index += 1
        if is_value(word):
            stray = f"has an argument without a flag ({printable(word, 60)!r})"
            raise UsageError(
                "--from-command", stray, "name the model with --model-path; quote values that contain spaces"
            )
        name, value = flag_name(word)
        name = _whole(name, word)
        adapts = adapts or name in ADAPTERS
        values = [] if value is None else [value]
        while value is None and not is_switch(name) and index < len(words) and is_value(words[index]):
            values.append(words[index])
            index += 1
        _take(command, name, values, word)
    over_experts(command.args, "--from-command --ep-size")
    over_algorithm(command)
    over_adapters(command, adapts=adapts)
    return command


def over_adapters(command: ServeCommand, *, adapts: bool) -> None:
    """--enable-lora, or paths of adapters, make slots; without either their number counts for nothing."""
    if adapts:
        command.args.setdefault("max_loras", SLOTS)
        if unstated := [flag for name, flag in STATED.items() if name not in command.args]:
            command.refused["--enable-lora"] = (
                f"SGLang takes {' and '.join(unstated)} from its adapters, which are not read; state them"
            )
    elif command.args.pop("max_loras", None) is not None:
        command.notes.append("--from-command: --max-loras-per-batch without --enable-lora sets nothing aside")


def over_algorithm(command: ServeCommand) -> None:
    """Put kvplan's method in place of --speculative-algorithm: EAGLE without a draft is the model's own head."""
    algorithm = command.args.pop(ALGORITHM, None)
    if algorithm is None:
        if command.draft_model is not None or any(name.startswith("speculative_") for name in command.args):
            raise UsageError("--from-command", "drafts need --speculative-algorithm", "add it, or leave the others out")
        return
    method = drafts.ALGORITHMS.get(algorithm.upper())
    if method is None:
        known = ", ".join(drafts.ALGORITHMS)
        option = "--from-command --speculative-algorithm"
        raise UnsupportedModelError(option, f"{printable(algorithm, 40)} is not modeled (known: {known})")
    command.args["speculative_method"] = "mtp" if method == "eagle" and command.draft_model is None else method


def read_pair(text: str) -> tuple[str, Any] | None:
    """`--engine-arg k=v` where k is a name that SGLang alone has; None where it is none, or has no value.

    --ep-size is the pair (EXPERT_RANKS, ranks), for `over_experts`.
    """
    name, (key, equals, value) = pair_name(text), text.partition("=")
    option = f"--engine-arg {printable(key, 60)}"
    if not equals or name in ARGUMENTS:
        return None
    argument = NAMES.get(name)
    if argument is None:
        return None
    if argument == EXPERTS:
        return EXPERT_RANKS, read_argument("tensor_parallel_size", value.strip(), option)
    on = flag_of(argument).on
    if on is not None:
        stated = switch(value.strip(), option)
        return argument, on == stated if isinstance(on, bool) else on if stated else DEFAULTS[argument]
    return argument, _value(argument, value.strip(), option)


def _whole(name: str, word: str) -> str:
    """The flag that a name stands for, as argparse takes the beginning of one. Refuses vLLM's and misspelt ones."""
    if name in KNOWN or name.removeprefix("no_") in (*OTHERS, *NEGATED):
        return name
    option = f"--from-command {printable(flag_text(word), 60)}"
    longer = {NAMES.get(known, known): known for known in sorted(KNOWN) if known.startswith(name)}
    if len(longer) == 1:
        return next(iter(longer.values()))
    if name.removeprefix("no_") in ARGUMENTS:
        other = "; its --mem-fraction-static counts otherwise" if name == "gpu_memory_utilization" else ""
        raise UsageError(option, f"is a flag of vLLM, not of SGLang{other}", "write SGLang's")
    if near := near_flag(name, frozenset({*NAMES, *MODEL, BACKEND}), OTHERS):
        raise UsageError(option, "is not a flag of SGLang", f"did you mean {near}?")
    return name


def _take(command: ServeCommand, name: str, values: list[str], word: str) -> None:
    flag = flag_text(word)
    option = f"--from-command {printable(flag, 60)}"
    plain = name.removeprefix("no_")
    argument, other = NAMES.get(plain if plain in NEGATED else name), OTHERS.get(plain)
    if name in MODEL:
        command.model = literal(only_value(values, option), "the model")
    elif name == "revision":
        command.revision = literal(only_value(values, option), flag)
    elif name == BACKEND:
        for phase in ("prefill", "decode"):
            key = f"{phase}_{BACKEND}"
            command.args.setdefault(key, _value(key, literal(only_value(values, option), flag), option))
    elif name == ALGORITHM:
        command.args[ALGORITHM] = literal(only_value(values, option), flag)
    elif name in DRAFT_PATHS:
        command.draft_model = literal(only_value(values, option), flag)
    elif name in ADAPTERS:
        pass
    elif argument is not None:
        _take_argument(command, argument, name, values, option)
    elif other is not None:
        take_other(command, flag, other, values, negated=name not in OTHERS)
    else:
        take_unknown(command, flag)


def _take_argument(command: ServeCommand, argument: str, name: str, values: list[str], option: str) -> None:
    spelling = flag_of(argument)
    if argument == EXPERTS:
        command.args[EXPERT_RANKS] = read_argument("tensor_parallel_size", only_value(values, option), option)
        return
    if spelling.on is not None:
        if values:
            raise UsageError(option, f"takes no value ({printable(values[0], 40)!r})", "leave it out")
        command.args[argument] = spelling.on if name in NAMES else DEFAULTS[argument]
        return
    if name == spelling.earlier:
        newest = "--" + spelling.names[0].replace("_", "-")
        command.notes.append(f"{option}: SGLang 0.5.23 does not start with it; write {newest} there")
    if spelling.off and values == [spelling.off]:
        return
    text = " ".join(values) if values and ARGUMENTS[argument].kind == "names" else only_value(values, option)
    command.args[argument] = _value(argument, literal(text, option.rpartition(" ")[2]), option)


def _value(name: str, text: str, option: str) -> Any:
    if name == "max_num_batched_tokens" and text == "-1":
        raise UnsupportedModelError(f"{option} -1", "SGLang without chunked prefill is not modeled", "give a size")
    if ARGUMENTS[name].kind in ("context", "tokens", "count") and not re.fullmatch("[0-9]+", text):
        raise UsageError(
            option, f"is not a whole number ({printable(text, 40)!r}), as SGLang wants it", "write digits only"
        )
    if ARGUMENTS[name].kind == "fraction" and text.endswith("%"):
        raise UsageError(option, f"is not a number ({printable(text, 40)!r}), as SGLang wants it", "write 0.9")
    return read_argument(name, (flag_of(name).values or {}).get(text, text), option)
