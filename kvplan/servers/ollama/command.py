"""What people paste of Ollama: `ollama run MODEL`, `ollama serve` with its variables, a Modelfile, `ollama show`.

Source: Ollama fb30760 cmd/cmd.go, parser/parser.go.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.files import exists, printable
from kvplan.models import catalog
from kvplan.servers.base import Starts
from kvplan.servers.llamacpp import command as below
from kvplan.servers.ollama.flags import FLAGS, PARAMETERS
from kvplan.servers.ollama.variables import VARIABLES
from kvplan.servers.words.argument_values import read_argument
from kvplan.servers.words.arguments import ARGUMENTS, spellings
from kvplan.servers.words.command import Note, Other, ServeCommand, Started, flag_text, literal, take_other, take_unknown
from kvplan.servers.words.standing import others

NAMES: Final = {name: argument for name, argument in spellings("ollama").items()}
OTHERS: Final[Mapping[str, Other]] = others(
    "ollama",
    {"one conversation": "verbose! insecure! nowordwrap! hidethinking! think format dimensions truncate! keepalive"},
    {"kvplan sizes GGUF files in llama-server; remove it": "experimental! experimental_yolo! experimental_websearch!"},
    {},
)
VERBS: Final = ("run", "serve", "start")
IMAGE: Final = re.compile(r"(?:[\w.:-]+/)*ollama/ollama(?::[\w.-]+)?(?:@sha256:[0-9a-f]+)?")
_TYPE: Final = re.compile(r"(?i)^(?:fp16|f16|bf16|mxfp4|i?q\d\w*)$")
SUFFIXES: Final = ("", "-instruct")
flags = {"the model": "model"}, OTHERS
variables = VARIABLES


def start(words: list[str]) -> Started | None:
    """`ollama run MODEL`, `ollama serve`, or its image, which serves; None if a command does not start it."""
    for index, word in enumerate(words):
        following = words[index + 1 :]
        if word.rpartition("/")[2] in ("ollama", "ollama.exe") and following[:1] and following[0] in VERBS:
            return Started(following[1:])
        if IMAGE.fullmatch(word) and "run" in words[:index]:
            return Started(following)
    return None


def is_switch(name: str) -> bool:
    return name in OTHERS and OTHERS[name].is_switch


def parse(words: list[str]) -> ServeCommand:
    """Parse the words after `ollama run`, or those that `reading` makes of a text."""
    command, index = ServeCommand(engine="ollama"), 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--"):
            if command.model is None:  # what follows is the prompt
                name_model(command, literal(word, "the model"))
            continue
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        stated = [value] if equals else []
        if not equals and not is_switch(name) and index < len(words) and not words[index].startswith("--"):
            stated, index = [words[index]], index + 1
        if name == "model" and stated:
            name_model(command, literal(stated[0], "the model"))
        elif name in NAMES and stated:
            take(command, NAMES[name], stated[0], f"--from-command {flag_text(word)}")
        elif name in OTHERS:
            take_other(command, flag, OTHERS[name], stated)
        else:
            take_unknown(command, flag)
    return command


def take(command: ServeCommand, argument: str, text: str, option: str) -> None:
    value = read_argument(argument, (FLAGS[argument].values or {}).get(text, text), option)
    if value is not None:
        command.args[argument] = value


def name_model(command: ServeCommand, text: str) -> None:
    """The model of a file, of a repository of the Hub, or of a name in Ollama's library."""
    name = re.sub(r"^(?:https?://)?(?:registry\.ollama\.ai/library|ollama\.com/library|library)/", "", text)
    hub = re.sub(r"^(?:https?://)?(?:hf\.co|huggingface\.co)/", "", name)
    if hub != name or name.endswith(".gguf") or exists(name):
        found = below.parse(["--model" if name.endswith(".gguf") or exists(name) else "--hf-repo", hub])
        command.model, command.args, command.notes = found.model, {**found.args, **command.args}, found.notes
        return
    base, _, tag = name.partition(":")
    kind = next((part for part in re.split("-(?=[^-]*$)", tag) if _TYPE.match(part)), None)
    size = tag.removesuffix(kind or "").strip("-")
    known = next(catalog_names(base, size), None)
    command.model = known or name
    if known is None:
        if re.fullmatch(r"[\w.-]+(?::[\w.-]+)?", name) and catalog.find(name) is None:
            raise unknown(name, size)
        return
    if kind is not None:
        command.args.setdefault("quantization", {"FP16": "F16"}.get(kind.upper(), kind.upper()))
    text = f"{printable(name, 80)}: sized as {known}; Ollama's own mix of types may differ: name the file for its own"
    command.notes.append(Note(text))


def catalog_names(base: str, size: str) -> Iterator[str]:
    """The catalog's models that a name of the library may stand for: "llama3.1" and "8b-instruct"."""
    plain = size.removesuffix("-instruct").removesuffix("-chat").removesuffix("-it")
    bases = [base, re.sub(r"^([a-z]+)(?=\d)", r"\1-", base), base.replace("-r1", "-r1-0528-qwen3"),
             base.replace("-r1", "-r1-distill-qwen"),
             base.replace("-r1", "-r1-distill-llama")]  # fmt: skip
    for name in dict.fromkeys(bases):
        for suffix in SUFFIXES:
            known = catalog.find(f"{name}-{plain}{suffix}" if plain else f"{name}{suffix}")
            if known is not None:
                yield known


def unknown(name: str, size: str) -> UsageError:
    if not size or size == "latest":
        base = name.partition(":")[0]
        return UsageError(f"model {printable(name, 80)!r}", "names no size", f"write the tag: {base}:8b")
    if name.endswith("cloud"):
        return UsageError(f"model {printable(name, 80)!r}", "runs in Ollama's cloud", "nothing of it is loaded here")
    cure = "name the model (`kvplan models`), its file, or hf.co/OWNER/NAME-GGUF"
    return UsageError(f"model {printable(name, 80)!r}", "is of Ollama's library, and not in the catalog", cure)


# --- texts that are no commands ---------------------------------------------------------------------------------------


def reading(text: str) -> list[str] | None:
    """Words for `parse` of a Modelfile or of what `ollama show` prints; None for another text."""
    source = re.search(r"(?mi)^[ \t]*FROM[ \t]+(\S+)[ \t]*$", text)
    if source is not None and not re.search(r"(?m)^[ \t]*(?:RUN|CMD|ENTRYPOINT|COPY|ENV|ARG|EXPOSE|WORKDIR)\b", text):
        if re.search(r"(?mi)^[ \t]*ADAPTER\b", text):
            raise UsageError("Modelfile: ADAPTER", "kvplan does not read adapters of llama.cpp", "remove the line")
        return ["--model", source[1], *parameters(re.findall(r"(?mi)^[ \t]*PARAMETER[ \t]+(\w+)[ \t]+(\S+)", text))]
    if re.search(r"(?m)^[ \t]*quantization[ \t]+\S+", text) and re.search(r"(?m)^[ \t]*architecture[ \t]+\S+", text):
        model = re.search(r"\bollama show (?:--?\w+ )*([\w./:-]+)", text)
        kind = re.search(r"(?m)^[ \t]*quantization[ \t]+(\S+)", text)
        words = parameters(re.findall(r"(?m)^[ \t]*(\w+)[ \t]+(\S+)[ \t]*$", text))
        named = ["--model", model[1]] if model else []
        return [*named, *(["--quant", kind[1]] if kind else []), *words]
    return None


def parameters(pairs: list[tuple[str, str]]) -> list[str]:
    return [word for name, value in pairs if name in PARAMETERS and value != "-1" for word in (f"--{name}", value)]


def read_pair(text: str) -> tuple[str, Any] | None:
    """Parse `--engine-arg k=v` if k is a name that only Ollama has, else return None."""
    key, equals, value = text.partition("=")
    name = key.strip().replace("-", "_")
    if not equals or name in ARGUMENTS or name not in NAMES:
        return None
    return NAMES[name], read_argument(NAMES[name], value.strip(), f"--engine-arg {printable(key, 60)}")


def scheduling() -> tuple[Mapping[str, str], Mapping[str, str], Mapping[str, str]]:
    return {}, {}, {}


starts = Starts(("ollama", "run"), "model", False, ("Ollama", ("ollama",)), {}, ("ollama",), reading=reading)
