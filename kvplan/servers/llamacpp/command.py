"""A `llama-server ...` command in kvplan's terms.

Flags have one value or none, which is the next word whatever it looks like; `-` and `_` are the same in a name.
Source: llama.cpp 0c1e57098 common/arg.cpp.
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from kvplan.core.errors import Faults, UsageError
from kvplan.core.files import exists, printable
from kvplan.models import catalog
from kvplan.models.gguf_mix import BASE
from kvplan.servers.base import Starts
from kvplan.servers.llamacpp.arguments import OTHERS, READ, SHORT
from kvplan.servers.llamacpp.flags import FLAGS, NEGATED
from kvplan.servers.llamacpp.lmstudio import reading
from kvplan.servers.llamacpp.variables import VARIABLES
from kvplan.servers.words.argument_values import read_argument, switch
from kvplan.servers.words.arguments import ARGUMENTS, short_flags, spellings
from kvplan.servers.words.command import (
    Note,
    ServeCommand,
    Started,
    flag_text,
    literal,
    near_flag,
    pair_name,
    take_other,
    take_unknown,
)

starts = Starts(
    ("llama-server",), "model", False, ("Llama", ("llama_cpp",)), {}, ("llama.cpp", "llama-cpp", "llama-server"),
    reading=reading,
)  # fmt: skip
flags = READ, OTHERS
variables = VARIABLES
NAMES: Final = {name: argument for name, argument in spellings("llamacpp").items() if FLAGS[argument].printed}
SHORTS: Final = {
    **SHORT,
    **{short: (FLAGS[name].names or (name,))[0] for short, name in short_flags("llamacpp").items()},
}
NAMING: Final = {"LLAMA_ARG_MODEL": "--model", "LLAMA_ARG_HF_REPO": "--hf-repo"}  # variables that name the model
PROGRAMS: Final = ("llama-server", "llama-server.exe")
IMAGE: Final = re.compile(r"(?:[\w.:-]+/)*llama[._-]?cpp[\w.-]*:[\w.-]*server[\w.-]*(?:@sha256:[0-9a-f]+)?")
_QUANT: Final = re.compile(rf"(?i)[-._](?:UD-)?({'|'.join(sorted(BASE, key=len, reverse=True))})(?=$|[-._])")
_PART: Final = re.compile(r"-\d{5}-of-\d{5}$")


# Of the fork ik_llama.cpp, and not in llama.cpp's arg.cpp. Source: the compose files of noonghunna/club-3090.
FORKED: Final = ("khad", "vhad", "fit_margin", "merge_qkv", "recurrent_ckpt_mode")


def start(words: list[str]) -> Started | None:
    """Words after the server's name, or after its image, which starts it; None if a command does not start it."""
    for index, word in enumerate(words):
        following, before = words[index + 1 :], words[index - 1] if index else ""
        is_value = before.startswith("-") and before != "--"  # `kubectl logs -c llama-server`, `--target llama-server`
        own = [
            f"{NAMING[name]}={value}" for name, _, value in (part.partition("=") for part in words) if name in NAMING
        ]
        if (word.rpartition("/")[2] in PROGRAMS and not is_value) or (
            IMAGE.fullmatch(word) and (own or (following[:1] and following[0].startswith("-")))
        ):
            return Started([*own, *following])
    return None


def is_switch(name: str) -> bool:
    plain = name.removeprefix("no_")
    for known in (name, plain):
        if known in NAMES:
            return FLAGS[NAMES[known]].on is not None or ARGUMENTS[NAMES[known]].kind == "flag"
        if known in OTHERS:
            return OTHERS[known].is_switch
    return name in NEGATED


def parse(words: list[str]) -> ServeCommand:
    """Parse the words after the server's name; errors as in kvplan.servers.vllm.command.parse."""
    command, faults = ServeCommand(engine="llamacpp"), Faults()
    index, file, repository, files = 0, None, None, dict[str, str]()
    if forked := next((word for word in words if word.startswith("-") and _name(word)[0] in FORKED), None):
        raise UsageError(
            f"--from-command {flag_text(forked)}",
            "is a flag of ik_llama.cpp, a fork of llama.cpp whose buffers are not modeled",
            "leave out the fork's flags for what llama.cpp itself would take",
        )
    while index < len(words):
        word = words[index]
        index += 1
        if not re.match(r"--?[A-Za-z]", word):
            stray = f"has an argument without a flag ({printable(word, 60)!r})"
            with faults.part():
                raise UsageError("--from-command", stray, "name the model with --model; quote values with spaces")
            continue
        name, value = _name(word)
        if value is None and not is_switch(name) and index < len(words) and _follows(name, words[index]):
            value = words[index]
            index += 1
        with faults.part():
            if name == "model":
                file = literal(_only(value, word), "the model")
            elif name == "hf_repo":
                repository = literal(_only(value, word), "the repository")
            elif name in BESIDE:
                files[BESIDE[name]] = literal(_only(value, word), "a file in addition to the model")
            elif name in ("lora", "lora_scaled"):
                _add_adapters(command, literal(_only(value, word), "an adapter"), name == "lora_scaled")
            elif name == "device":
                command.args["tensor_parallel_size"] = _devices(_only(value, word))
            elif name != "hf_file":
                _take(command, name, value, word)
    faults.refuse()
    shares = re.split("[,/]", str(command.args.get("tensor_split") or ""))
    if len(shares) > 1 and "tensor_parallel_size" not in command.args:
        command.args["tensor_parallel_size"] = len(shares)
        command.notes.append(Note(f"--tensor-split divides the model over {len(shares)} GPUs"))
    name_model(command, file, repository)
    _take_draft(command, files)
    if repository is not None and file is None and "speculative_method" in command.args:
        command.notes.append(Note("where the repository has an mtp-*.gguf, llama-server loads it instead: not sized"))
    return command


BESIDE: Final = {
    "model_draft": "file", "spec_draft_model": "file", "hf_repo_draft": "repository", "spec_draft_hf": "repository",
    "spec_type": "type",
}  # fmt: skip
ALONE: Final = ("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
DRAFTING, OWN_LAYERS = "draft-simple", "draft-mtp"


def _devices(text: str) -> int:
    """The number of GPUs in a list of them; which ones they are makes no difference: all are alike."""
    names = text.split(",")
    if not all(re.fullmatch(r"(?i)[a-z]+\d{1,2}", name) for name in names) or len(set(names)) < len(names):
        problem = f"is not a list of GPUs ({printable(text, 60)!r})"
        raise UsageError("--from-command --device", problem, "write CUDA0,CUDA1; for the host alone --gpu-layers 0")
    return len(names)


def _add_adapters(command: ServeCommand, text: str, scaled: bool) -> None:
    """Adapters add up over flags; a scale moves no memory."""
    names = [name.rpartition(":")[0] or name if scaled else name for name in text.split(",")]
    command.args["lora"] = ",".join(filter(None, (command.args.get("lora"), *names)))


def _take_draft(command: ServeCommand, files: dict[str, str]) -> None:
    """The draft by its file's or repository's name, as the model's."""
    kinds = [kind for kind in files.get("type", "none").split(",") if kind not in ALONE]
    if kinds == [OWN_LAYERS]:
        command.args["speculative_method"] = "mtp"
    elif kinds not in ([], [DRAFTING]):
        known = f"{', '.join(kinds)} is not sized: kvplan knows {DRAFTING}, {OWN_LAYERS} and drafts without memory"
        command.refused["--spec-type"] = f"{known}; without the flag, what the draft takes is not counted"
    if not {"file", "repository"} & files.keys():
        return
    if not kinds and "type" not in files:
        command.notes.append(
            Note(f"-md without --spec-type {DRAFTING}: llama.cpp 0.5 loads the draft and does not use it")
        )
    draft = ServeCommand()
    name_model(draft, files.get("file"), files.get("repository"))
    command.draft_model, command.notes = draft.model, [*command.notes, *draft.notes]
    if "quantization" in draft.args:
        command.args["draft_quant"] = draft.args["quantization"]


def _follows(name: str, word: str) -> bool:
    """True if the next word is the flag's value: always for a flag that has one."""
    known = name in NAMES or name in OTHERS or name in ("model", "hf_repo", "hf_file", "lora_scaled", "device", *BESIDE)
    if name == "flash_attn":  # until 2025 it had no value
        return word in ("on", "off", "auto", *(FLAGS[name].values or {}))
    return known or not word.startswith("-")


def _name(word: str) -> tuple[str, str | None]:
    """(name with underscores, value after =): the name of the long form."""
    flag, equals, value = word.partition("=")
    plain = flag.lstrip("-").replace("-", "_")
    if not flag.startswith("--"):
        plain = SHORTS.get(plain, plain)
    return plain, value if equals else None


def _only(value: str | None, word: str) -> str:
    if value is None:
        raise UsageError(f"--from-command {printable(flag_text(word), 60)}", "needs a value", "write it after the flag")
    return value


def _take(command: ServeCommand, name: str, value: str | None, word: str) -> None:
    flag = flag_text(word)
    option = f"--from-command {printable(flag, 60)}"
    plain = name.removeprefix("no_")
    if name in NEGATED:
        command.args[NEGATED[name]] = False
    elif name in NAMES:
        _take_argument(command, NAMES[name], value, option)
    elif plain in NAMES and ARGUMENTS[NAMES[plain]].kind == "flag":
        command.args[NAMES[plain]] = False
    elif name in OTHERS:
        take_other(command, flag, OTHERS[name], [] if value is None else [value])
    elif near := near_flag(name, frozenset(NAMES), OTHERS):
        raise UsageError(option, "is not a flag of llama-server", f"did you mean {near}?")
    else:
        take_unknown(command, flag)


def _take_argument(command: ServeCommand, argument: str, value: str | None, option: str) -> None:
    flag = FLAGS[argument]
    if ARGUMENTS[argument].kind == "flag":
        command.args[argument] = True if value is None else switch(value, option)
        return
    if value is None and argument == "flash_attn":
        value = "on"
    text = literal(_only(value, option.rpartition(" ")[2]), option.rpartition(" ")[2])
    text = (flag.values or {}).get(text, text)
    if (argument, text) in (("max_model_len", "0"), ("max_num_seqs", "-1")):
        return  # the default
    if argument == "gpu_layers" and re.fullmatch(r"-\d+", text):
        text = "all"
    if (parsed := _value(argument, text, option)) is not None:
        command.args[argument] = parsed


def _value(argument: str, text: str, option: str) -> Any:
    row = ARGUMENTS[argument]
    if row.kind in ("context", "tokens", "count") and not re.fullmatch("[0-9]+", text) and text not in row.usual:
        raise UsageError(option, f"is not a whole number ({printable(text, 40)!r})", "write digits only")
    return read_argument(argument, text, option)


def name_model(command: ServeCommand, file: str | None, repository: str | None) -> None:
    """The model of a file that is here, else the one that a file's or repository's name says, with a note."""
    if file is not None and re.search(r"(?i)-GGUF$|:\w+$", file) and not exists(file):
        file, repository = None, file  # as MODEL of an option
    if file is not None and (exists(file) or not file.endswith(".gguf")):
        command.model = file
        return
    if file is None and repository is None:
        return
    if file is not None:
        path = PurePosixPath(file.replace("\\", "/"))
        stem = _PART.sub("", path.name.removesuffix(".gguf"))
        match = _QUANT.search(stem)
        name, quant = (stem[: match.start()], match[1]) if match else (stem, None)
    else:
        base, _, tag = (repository or "").partition(":")
        quant = match[1] if tag and (match := _QUANT.search(f"-{tag}")) else None
        name = re.sub(r"(?i)-GGUF$", "", base)
    known = catalog_name(name.rpartition("/")[2]) if file is not None else catalog.find(name) or catalog_name(name)
    command.model = (known and catalog.facts(known)["id"]) or file or name
    if quant is not None:
        command.args.setdefault("quantization", quant.upper())
    if known is not None:
        written = printable(file or repository or "", 120)
        command.notes.append(
            Note(f"{written}: sized as {known}; mixes of others than llama-quantize differ: name the file for its own")
        )


def catalog_name(name: str) -> str | None:
    """The catalog's model of a file's name, or of another publisher's repository."""
    last = name.rpartition("/")[2]
    if (own := catalog.find(last) or catalog.find(last.replace("_", "/", 1))) is not None:  # Qwen_Qwen3-8B
        return own
    ids = ((own, catalog.facts(own)["id"]) for own in catalog.model_names())
    return next((own for own, full in ids if full.rpartition("/")[2].lower() == last.lower()), None)


def read_pair(text: str) -> tuple[str, Any] | None:
    """Parse `--engine-arg k=v` if k is a name that only llama.cpp has, else return None; None also without a value."""
    name, (key, equals, value) = pair_name(text), text.partition("=")
    argument = spellings("llamacpp").get(name) or NAMES.get(SHORTS.get(name, ""))
    if not equals or name in ARGUMENTS or argument is None:
        return None
    option = f"--engine-arg {printable(key, 60)}"
    text = (FLAGS[argument].values or {}).get(value.strip(), value.strip())
    return argument, read_argument(argument, text, option)


def scheduling() -> tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]:
    return {}, {}, {}
