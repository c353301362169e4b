"""What people paste of Ollama: `ollama run MODEL`, `ollama serve` with its variables, a Modelfile, `ollama show`.

Source: Ollama fb30760 cmd/cmd.go, parser/parser.go, envconfig/config.go.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.files import exists, printable
from kvplan.models import catalog
from kvplan.servers.base import Starts
from kvplan.servers.llamacpp import command as below
from kvplan.servers.ollama.changes import RELEASES, SOURCE
from kvplan.servers.ollama.flags import FLAGS, PARAMETERS, VARIABLES
from kvplan.servers.words.argument_values import read_argument
from kvplan.servers.words.arguments import ARGUMENTS, spellings
from kvplan.servers.words.command import Note, ServeCommand, Started, Variable, literal, take_other, take_unknown
from kvplan.servers.words.standing import others

NAMES: Final = spellings("ollama")
OTHERS: Final = others(
    "ollama",
    {"one conversation": "verbose! insecure! nowordwrap! hidethinking! think format dimensions truncate! keepalive"},
    {"kvplan sizes GGUF files in llama-server; remove it": "experimental!"},
    {},
)
IMAGE: Final = re.compile(r"(?:[\w.:-]+/)*ollama/ollama(?::[\w.-]+)?(?:@sha256:[0-9a-f]+)?")
_TYPE: Final = re.compile(r"(?i)^(?:fp16|f16|bf16|mxfp4|i?q\d\w*)$")
_LIBRARY: Final = r"^(?:https?://)?(?:registry\.ollama\.ai/library|ollama\.com/library|library)/"
flags = {"the model": "model"}, OTHERS
scheduling = below.scheduling
variables: Mapping[str, Variable] = {
    name: Variable("ollama", argument, kind, f"as --{argument.replace('_', '-')}", SOURCE, RELEASES.oldest)
    for name, (argument, kind) in VARIABLES.items()
} | {
    "OLLAMA_GPU_OVERHEAD": Variable(
        "ollama", "", "size", "keeps memory of each GPU free", SOURCE, RELEASES.oldest, concerns=lambda spec, args: True
    )
}  # fmt: skip


def start(words: list[str]) -> Started | None:
    """`ollama run MODEL`, `ollama serve`, or its image, which serves; None if a command does not start it."""
    for index, (word, following) in enumerate(pairwise([*words, ""])):
        if word.rpartition("/")[2] in ("ollama", "ollama.exe") and following in ("run", "serve", "start"):
            return Started(words[index + 2 :])
        if IMAGE.fullmatch(word) and "run" in words[:index]:
            return Started(words[index + 1 :])
    return None


def is_switch(name: str) -> bool:
    return name in OTHERS and OTHERS[name].is_switch


def parse(words: list[str]) -> ServeCommand:
    """Parse the words after `ollama run`, or those that `reading` makes of a text."""
    command, following = ServeCommand(engine="ollama"), iter(words)
    for word in following:
        if not word.startswith("--"):
            if command.model is None:  # what follows is the prompt
                name_model(command, literal(word, "the model"))
            continue
        flag, _, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        value = value or ("" if is_switch(name) else next(following, ""))
        if name == "model":
            name_model(command, literal(value, "the model"))
        elif name in NAMES:
            argument = NAMES[name]
            text = (FLAGS[argument].values or {}).get(value, value)
            command.args[argument] = read_argument(argument, text, f"--from-command {flag}")
        elif name in OTHERS:
            take_other(command, flag, OTHERS[name], [value] if value else [])
        else:
            take_unknown(command, flag)
    return command


def name_model(command: ServeCommand, text: str) -> None:
    """The model of a file, of a repository of the Hub, or of a name in Ollama's library."""
    name = re.sub(_LIBRARY, "", text)
    hub = re.sub(r"^(?:https?://)?(?:hf\.co|huggingface\.co)/", "", name)
    is_file = name.endswith(".gguf") or exists(name)
    if hub != name or is_file:
        file = below.parse(["--model" if is_file else "--hf-repo", hub])
        command.model, command.args, command.notes = file.model, {**file.args, **command.args}, file.notes
        return
    base, _, tag = name.partition(":")
    kind = next((part for part in re.split("-(?=[^-]*$)", tag) if _TYPE.match(part)), None)
    size = re.sub(r"-(?:instruct|chat|it)$", "", tag.removesuffix(kind or "").strip("-"))
    command.model = next(catalog_names(base, size), name if "/" in name else None)
    if command.model is None:
        raise unknown(name, size)
    if command.model == name:
        return
    if kind is not None:
        command.args.setdefault("quantization", {"FP16": "F16"}.get(kind.upper(), kind.upper()))
    mix = "Ollama's own mix of types may differ: name the file for its own"
    command.notes.append(Note(f"{printable(name, 80)}: sized as {command.model}; {mix}"))


def catalog_names(base: str, size: str) -> Iterator[str]:
    """The catalog's models that a name of the library may stand for: "llama3.1" and "8b"."""
    kinds = ("-r1", "-r1-0528-qwen3", "-r1-distill-qwen", "-r1-distill-llama")  # of deepseek-r1, by size
    bases = [base, re.sub(r"^([a-z]+)(?=\d)", r"\1-", base), *(base.replace("-r1", kind) for kind in kinds)]
    for name in dict.fromkeys(f"{own}-{size}{suffix}".strip("-") for own in bases for suffix in ("", "-instruct")):
        if (known := catalog.find(name)) is not None:
            yield known


def unknown(name: str, size: str) -> UsageError:
    problem, cure = "is of Ollama's library, and not in the catalog", "name its file, or hf.co/OWNER/NAME-GGUF"
    if size in ("", "latest"):
        problem, cure = "names no size", f"write the tag: {name.partition(':')[0]}:8b"
    elif name.endswith("cloud"):
        problem, cure = "runs in Ollama's cloud", "nothing of it is loaded here"
    return UsageError(f"model {printable(name, 80)!r}", problem, cure)


def reading(text: str) -> list[str] | None:
    """Words for `parse` of a Modelfile or of what `ollama show` prints; None for another text."""
    source = re.search(r"(?mi)^[ \t]*FROM[ \t]+(\S+)[ \t]*$", text)
    if source is not None and not re.search(r"(?m)^[ \t]*(?:RUN|CMD|ENTRYPOINT|COPY|ENV|ARG|EXPOSE|WORKDIR)\b", text):
        if re.search(r"(?mi)^[ \t]*ADAPTER\b", text):
            raise UsageError("Modelfile: ADAPTER", "kvplan does not read adapters of llama.cpp", "remove the line")
        return ["--model", source[1], *parameters(re.findall(r"(?mi)^[ \t]*PARAMETER[ \t]+(\w+)[ \t]+(\S+)", text))]
    kind = re.search(r"(?m)^[ \t]*quantization[ \t]+(\S+)", text)
    if kind is None or not re.search(r"(?m)^[ \t]*architecture[ \t]+\S+", text):
        return None
    model = re.search(r"\bollama show (?:--?\w+ )*([\w./:-]+)", text)
    stated = parameters(re.findall(r"(?m)^[ \t]*(\w+)[ \t]+(\S+)[ \t]*$", text))
    return [*(["--model", model[1]] if model else []), "--quant", kind[1], *stated]


def parameters(pairs: list[tuple[str, str]]) -> list[str]:
    return [word for name, value in pairs if name in PARAMETERS and value != "-1" for word in (f"--{name}", value)]


def read_pair(text: str) -> tuple[str, Any] | None:
    """Parse `--engine-arg k=v` if k is a name that only Ollama has, else return None."""
    key, equals, value = text.partition("=")
    name = key.strip().replace("-", "_")
    if not equals or name in ARGUMENTS or name not in NAMES:
        return None
    return NAMES[name], read_argument(NAMES[name], value.strip(), f"--engine-arg {printable(key, 60)}")


starts = Starts(
    ("ollama", "run"), "model", False, ("Ollama", ("ollama",)), {}, ("ollama",), reading=reading, alone=True
)  # fmt: skip
