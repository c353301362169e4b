"""A `python -m sglang.launch_server ...` or `sglang serve ...` command in kvplan's terms.

Numbers are plain, as SGLang's argparse takes them, and names may be abbreviated to a unique prefix.
Source: sglang 0.5.23 srt/server_args.py.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from kvplan.core.errors import Faults, UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.servers.base import Starts
from kvplan.servers.sglang import drafts
from kvplan.servers.sglang.arguments import OTHERS, READ
from kvplan.servers.sglang.flags import FLAGS
from kvplan.servers.sglang.variables import VARIABLES
from kvplan.servers.words import images
from kvplan.servers.words.argument_values import read_argument, switch
from kvplan.servers.words.arguments import ARGUMENTS, DEFAULTS, spellings
from kvplan.servers.words.command import (
    EXPERT_RANKS,
    Note,
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
from kvplan.servers.words.shell import framework_note, framework_server

starts = Starts(
    ("python", "-m", "sglang.launch_server"), "model_path", False, ("Engine", ("sgl", "sglang")), {}, ("sgl-dev",),
    ("ServerArgs",),
)  # fmt: skip
flags = READ, OTHERS
variables = VARIABLES
NAMES: Final = spellings("sglang")
BACKEND: Final = "attention_backend"  # for prefill and decode, unless given separately
MODEL: Final = ("model_path", "model")
EXPERTS: Final = "enable_expert_parallel"  # SGLang takes a number of ranks
DRAFT_PATHS: Final = ("speculative_draft_model_path", "speculative_draft_model")
ALGORITHM: Final = "speculative_algorithm"
BLOCKS: Final = {"speculative_dflash_block_size": "DFLASH", "speculative_dspark_block_size": "DSPARK"}
ADAPTERS: Final = ("enable_lora", "lora_paths")
GRAPHS: Final = ("cuda_graph_bs_decode", "cuda_graph_bs")  # their sizes; the largest is what SGLang reserves for
STEP: Final = "max_prefill_tokens"
STEP_FLAG: Final = "--max-prefill-tokens"
NO_GRAPHS: Final = "disable_decode_cuda_graph"
SLOTS: Final = 8  # default of --max-loras-per-batch
STATED: Final = {"max_lora_rank": "--max-lora-rank", "lora_target_modules": "--lora-target-modules"}
KNOWN: Final = frozenset(
    {
        *NAMES, *MODEL, *OTHERS, "revision", BACKEND, ALGORITHM, *DRAFT_PATHS, *BLOCKS, *ADAPTERS, *GRAPHS, NO_GRAPHS,
    }
)  # fmt: skip


NEGATED: Final = frozenset(name for name, argument in NAMES.items() if isinstance(FLAGS[argument].on, str))


def start(words: list[str]) -> Started | None:
    """Words after the server's name, or None if a command does not start SGLang."""
    for index, word in enumerate(words):
        following = words[index + 1 :]
        module = following[0] if word == "-m" and following else ""
        as_module = module == "sglang.launch_server" or framework_server(module) == "sglang"
        if as_module or (word.rpartition("/")[2] == "sglang" and following[:1] == ["serve"]):
            image = images.of_words("sglang", words[:index])
            notes = (*framework_note(module), *filter(None, (image.note,)))
            return Started(following[1:], image.label, notes=notes)
    return None


def is_switch(name: str) -> bool:
    plain = name.removeprefix("no_")
    if name in ("enable_lora", NO_GRAPHS):
        return True
    if name in NAMES:
        return FLAGS[NAMES[name]].on is not None
    if plain in NEGATED:
        return True
    return plain in OTHERS and OTHERS[plain].is_switch


def parse(words: list[str]) -> ServeCommand:
    """Parse the words after the server's name; errors as in kvplan.servers.vllm.command.parse."""
    command, faults = ServeCommand(engine="sglang"), Faults()
    index, adapts = 0, False
    while index < len(words):
        word = words[index]
        index += 1
        if is_value(word):
            stray = f"has an argument without a flag ({printable(word, 60)!r})"
            with faults.part():
                raise UsageError(
                    "--from-command", stray, "name the model with --model-path; quote values that contain spaces"
                )
            continue
        name, value = flag_name(word)
        is_known = False
        with faults.part():
            name, is_known = _whole(name, word), True
        adapts = adapts or name in ADAPTERS
        values = [] if value is None else [value]
        while value is None and not is_switch(name) and index < len(words) and is_value(words[index]):
            values.append(words[index])
            index += 1
        if is_known:
            with faults.part():
                _take(command, name, values, word)
    faults.refuse()
    over_experts(command.args, "--from-command --ep-size")
    over_algorithm(command)
    over_adapters(command, adapts=adapts)
    over_chunks(command)
    return command


def over_chunks(command: ServeCommand) -> None:
    """Ignore the tokens of a step's prompts, unless prompts are not cut into chunks: then SGLang reserves for them."""
    stated = command.args.pop(STEP, None)
    if stated is None:
        return
    take_other(command, STEP_FLAG, OTHERS[STEP], [stated])
    if not command.args.get("enable_chunked_prefill", True):
        command.args["max_num_batched_tokens"] = _value(
            "max_num_batched_tokens", literal(stated, STEP_FLAG), f"--from-command {STEP_FLAG}"
        )
        command.repeated = command.repeated[:-2]  # the argument's own words are printed


def over_adapters(command: ServeCommand, *, adapts: bool) -> None:
    """Resolve adapter slots: --enable-lora, or adapter paths, allocate them; without either their number is ignored."""
    if adapts:
        command.args.setdefault("max_loras", SLOTS)
        if unstated := [flag for name, flag in STATED.items() if name not in command.args]:
            command.refused["--enable-lora"] = (
                f"SGLang takes {' and '.join(unstated)} from its adapters, which kvplan does not read; set them"
            )
    elif command.args.pop("max_loras", None) is not None:
        command.notes.append(Note("--max-loras-per-batch without --enable-lora reserves nothing"))


def over_algorithm(command: ServeCommand) -> None:
    """Replace --speculative-algorithm with kvplan's method: EAGLE without a draft uses the model's own head."""
    blocks = {name: command.args.pop(name) for name in BLOCKS if name in command.args}
    algorithm = command.args.pop(ALGORITHM, None)
    if algorithm is None:
        if command.draft_model is not None or blocks or any(name.startswith("speculative_") for name in command.args):
            raise UsageError("--from-command", "drafts need --speculative-algorithm", "add it, or remove the others")
        return
    method = drafts.ALGORITHMS.get(algorithm.upper())
    if method is None:
        known = ", ".join(drafts.ALGORITHMS)
        option = "--from-command --speculative-algorithm"
        raise UnsupportedModelError(option, f"{printable(algorithm, 40)} is not modeled (known: {known})")
    command.args["speculative_method"] = "mtp" if method == "eagle" and command.draft_model is None else method
    if method in drafts.BLOCKS:
        command.args.pop("num_speculative_tokens", None)  # SGLang drafts such a block in one step
        over_block(command, algorithm.upper(), blocks)


def over_block(command: ServeCommand, algorithm: str, blocks: dict[str, int]) -> None:
    """Replace a block's size with the tokens that are verified, with DSpark one more; SGLang ignores the other's."""
    (name,) = (name for name, own in BLOCKS.items() if own == algorithm)
    flag, stated = f"--{name.replace('_', '-')}", command.args.get("speculative_num_draft_tokens")
    if name not in blocks:
        if stated is not None and algorithm == "DSPARK":
            problem = f"SGLang takes {stated} only if the draft's config has a block of {stated - 1}"
            raise UsageError("--from-command --speculative-num-draft-tokens", problem, f"write {flag} {stated - 1}")
        return
    verified = blocks[name] + (algorithm == "DSPARK")
    if stated not in (None, verified):
        problem = f"is {stated}, and SGLang refuses any but {verified} with {flag} {blocks[name]}"
        raise UsageError("--from-command --speculative-num-draft-tokens", problem, "remove it")
    command.args["speculative_num_draft_tokens"] = verified


def read_pair(text: str) -> tuple[str, Any] | None:
    """Parse `--engine-arg k=v` if k is a name that only SGLang has, else return None; None also without a value.

    --ep-size becomes the pair (EXPERT_RANKS, ranks), for `over_experts`.
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
    on = FLAGS[argument].on
    if on is not None:
        stated = switch(value.strip(), option)
        return argument, on == stated if isinstance(on, bool) else on if stated else DEFAULTS[argument]
    return argument, _value(argument, value.strip(), option)


def _whole(name: str, word: str) -> str:
    """Resolve an abbreviated flag as argparse does. Reject vLLM's flags and misspelled ones."""
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
    elif name in BLOCKS:
        command.args[name] = read_argument("speculative_num_draft_tokens", only_value(values, option), option)
    elif name in GRAPHS:
        sizes = [read_argument("cuda_graph_max_bs", size, option) for size in values or [""]]
        command.args["cuda_graph_max_bs"] = max(sizes)
        if name != GRAPHS[0]:
            command.notes.append(Note("SGLang 0.5.23 does not start with it; write --cuda-graph-bs-decode there", flag))
    elif name == NO_GRAPHS:
        command.args.setdefault("cuda_graph_backend_decode", "disabled")
    elif name in ADAPTERS:
        pass
    elif argument is not None:
        _take_argument(command, argument, name, values, option)
    elif other is not None:
        if name == STEP:
            command.args[STEP] = only_value(values, option)
            return
        take_other(command, flag, other, values, negated=name not in OTHERS)
    else:
        take_unknown(command, flag)


def _take_argument(command: ServeCommand, argument: str, name: str, values: list[str], option: str) -> None:
    spelling = FLAGS[argument]
    if argument == EXPERTS:
        command.args[EXPERT_RANKS] = read_argument("tensor_parallel_size", only_value(values, option), option)
        return
    if spelling.on is not None:
        if values:
            raise UsageError(option, f"takes no value ({printable(values[0], 40)!r})", "remove it")
        command.args[argument] = spelling.on if name in NAMES else DEFAULTS[argument]
        return
    if name == spelling.earlier:
        newest = "--" + spelling.names[0].replace("_", "-")
        command.notes.append(
            Note(f"SGLang 0.5.23 does not start with it; write {newest} there", option.rpartition(" ")[2])
        )
    if spelling.off and values == [spelling.off]:
        return
    if argument == "max_num_batched_tokens" and values == ["-1"]:
        command.args["enable_chunked_prefill"] = False
        return
    text = " ".join(values) if values and ARGUMENTS[argument].kind == "names" else only_value(values, option)
    command.args[argument] = _value(argument, literal(text, option.rpartition(" ")[2]), option)


def _value(name: str, text: str, option: str) -> Any:
    if ARGUMENTS[name].kind in ("context", "tokens", "count") and not re.fullmatch("[0-9]+", text):
        raise UsageError(
            option, f"is not a whole number ({printable(text, 40)!r}), as SGLang requires", "write digits only"
        )
    if ARGUMENTS[name].kind == "fraction" and text.endswith("%"):
        raise UsageError(option, f"is not a number ({printable(text, 40)!r}), as SGLang requires", "write 0.9")
    return read_argument(name, (FLAGS[name].values or {}).get(text, text), option)


def scheduling() -> tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]:
    from kvplan.servers.sglang import scheduling as lists  # only the simulation asks

    return lists.MODELED, lists.NO_EFFECT, lists.REFUSED
