"""A pasted command of either server, from a shell's line, a compose file or a Kubernetes manifest."""

import re

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.servers import command, environment
from kvplan.servers.command import MAX_COMMAND_CHARS, ServeCommand
from kvplan.servers.engines import parse_engine
from kvplan.servers.sglang import command as sglang_command

_IMAGE = r"(?:[\w.:-]+/)*[\w.-]*sglang[\w.-]*:v?(\d+\.\d+(?:\.\d+)?)(?:\.post\d+)?(?:-[\w.-]+)?"
_VLLM_IMAGE = r"(?:[\w.:-]+/)*[\w.-]*vllm[\w.-]*:v?(\d+\.\d+(?:\.\d+)?)(?:[-.][\w.-]+)?"


def read_command(text: str) -> ServeCommand:
    """What a pasted `vllm serve ...` or `sglang serve ...` asks for; errors as of command.read_command."""
    if len(text) > MAX_COMMAND_CHARS:
        raise UsageError(f"--from-command: {command.too_long(text)}")
    from kvplan.servers import container, snippet  # of no account for most commands

    if snippet.is_snippet(text):
        server, words = snippet.words_of(text)
        if server == "sglang":
            return sglang_command.read(words)
        return command.read_words(words, ServeCommand(args={"usage": "offline"}))
    if not container.is_manifest(text):
        return _read(text)
    line, image = container.shell_line(text)
    result = _read(line)
    if image is not None and re.search("vllm|sglang", text) is None:
        server = "SGLang" if (result.engine or "").startswith("sglang") else "vLLM"
        result.notes.append(f"--from-command: {printable(image, 100)}: its arguments are read as {server}'s")
    for pattern, server in ((_IMAGE, "sglang"), (_VLLM_IMAGE, "vllm")):
        match = re.fullmatch(pattern, image or "")
        if match is not None and result.engine in (None, server):
            result.engine = parse_engine(f"{server}@{match[1]}").label
    return result


def _read(text: str) -> ServeCommand:
    if text.lstrip().startswith("--"):
        from kvplan.servers.container import server_for

        text = f"{server_for(command.split(text)[0])} {text}"
    if "sglang" in text:
        commands = command.split(text)
        for number, words in enumerate(commands):
            following = sglang_command.start(words)
            if following is not None:
                result = sglang_command.read(following)
                result.environment = environment.given(commands[:number], words[: len(words) - len(following)])
                image = next(filter(None, (re.fullmatch(_IMAGE, word) for word in words)), None)
                if image is not None:
                    result.engine = parse_engine(f"sglang@{image[1]}").label
                return result
    return command.read_command(text)
