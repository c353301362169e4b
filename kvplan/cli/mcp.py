"""`kvplan mcp`: tools for agents over standard input and output, by the Model Context Protocol.

A tool runs the command of its name in a process of its own: its text for reading, its document as structured content,
by the document's schema.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvplan.cli import output
from kvplan.cli.serve_options import McpOptions
from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import split_list
from kvplan.servers.base import SERVERS

if TYPE_CHECKING:
    import mcp_types
    from mcp.server import Server

LIMIT_S: Final = 600
MORE: Final = "options"  # words of the command line that no property of a tool has
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A command as a tool.

    when       what it answers and when to use it
    documents  that it prints, as `kvplan schema` names them
    argument   its positional argument, and what that is
    flags      property -> (flag, what it is); `required` are those that must be given
    """

    when: str
    documents: tuple[str, ...]
    argument: tuple[str, str]
    flags: Mapping[str, tuple[str, str]]
    required: tuple[str, ...]

    @property
    def input_schema(self) -> Schema:
        texts = dict([self.argument]) | {name: text for name, (_, text) in self.flags.items()}
        properties: dict[str, Schema] = {
            name: {"type": ["string", "integer"] if name in NUMBERS else "string", "description": text}
            for name, text in texts.items()
        }
        words = "Further options of the command, a word each: see kvplan COMMAND --help-all."
        properties[MORE] = {"type": "array", "items": {"type": "string"}, "description": words}
        return {
            "type": "object",
            "properties": properties,
            "required": list(self.required),
            "additionalProperties": False,
        }

    @property
    def output_schema(self) -> Schema:
        from kvplan.documents.schema import document_schema

        schemas = [document_schema(name) for name in self.documents]
        return schemas[0] if len(schemas) == 1 else {"type": "object", "anyOf": schemas}


NUMBERS: Final = ("ctx", "users", "tp")
PLAN: Final = {
    "gpu": ("--gpu", "One GPU: h100-80g, 4090, 2xl40s, a node label or a cloud instance."),
    "ctx": ("--ctx", "Context length in tokens: 32768 or 32k. Default: the model's maximum."),
    "engine": ("--engine", f"Server ({', '.join(SERVERS)}) and its release, e.g. vllm@0.30. Default: the newest vllm."),
}
MODEL: Final = ("model", "Catalog name, Hub id, or folder with a config.json.")
TOOLS: Final[Mapping[str, Tool]] = {
    "estimate": Tool(
        "Memory of one server on one kind of GPU and the users it holds, row by row with how each number is known. "
        "Use it before a model is downloaded or a flag changed.",
        ("plan",),
        MODEL,
        {
            **PLAN,
            "mean_tokens": ("--mean-tokens", "Mean length of a request, if requests are shorter than the context."),
            "kv_cache_dtype": ("--kv-cache-dtype", "auto, fp8, ..."),
            "tp": ("--tp", "Tensor parallel size."),
            "command": ("--from-command", "A server's command as it is run, in place of model and flags."),
        },
        (),
    ),
    "recommend": Tool(
        "The cheapest GPUs and flags for a number of users; with slo each choice is simulated under the load, which "
        "takes a minute. Use it to choose hardware.",
        ("recommendation", "timed-recommendation"),
        MODEL,
        {
            "users": ("--users", "Users at once."),
            "gpus": ("--gpus", "GPUs to choose from, separated by commas."),
            **PLAN,
            "slo": ("--slo", "Latency targets, ttft.p90=2s,tpot=50ms; needs prompt_tokens and output_tokens."),
            "prompt_tokens": ("--prompt-tokens", "Mean prompt length."),
            "output_tokens": ("--output-tokens", "Mean output length."),
            "prices": ("--prices", "File of dollars per GPU hour."),
        },
        ("users",),
    ),
    "why": Tool(
        "What happened to a server, by its log: the cause and the flags that fix it. Use it when a server did not "
        "start or ran out of memory, before changing flags by trial.",
        ("diagnosis",),
        ("log", "Path of the log, or its text."),
        {"gpu": PLAN["gpu"], "model": ("--model", MODEL[1])},
        ("log",),
    ),
    "check": Tool(
        "Whether deployments keep a policy, or a Kubernetes or compose file's servers start. Use it after a manifest "
        "or a policy was edited.",
        ("check",),
        ("file", "Policy, or Kubernetes or compose file."),
        {"gpu": ("--gpu", "GPU of a manifest that names none."), "base": ("--base", "Git revision to compare with.")},
        ("file",),
    ),
}


def mcp(options: McpOptions) -> int:
    """Serve until standard input ends."""
    names = list(TOOLS) if options.tools is None else split_list(options.tools, "--tools")
    for name in names:
        if name not in TOOLS:
            raise UsageError(f"--tools {printable(name, 60)}", "does not exist", f"use {', '.join(TOOLS)}")
    if options.listing:
        output.write(json.dumps([listing_of(name) for name in names], indent=2))
        return 0
    if find_spec("mcp") is None:
        raise EnvironmentProblem("mcp", "the mcp package is not installed", "pip install '.[mcp]' in kvplan's sources")
    import anyio
    from mcp.server.stdio import stdio_server

    async def serve() -> None:
        server = server_of_tools(names)
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())

    anyio.run(serve)
    return 0


def listing_of(name: str) -> Schema:
    """A tool as a client is told of it."""
    tool = TOOLS[name]
    return {
        "name": name, "description": tool.when, "inputSchema": tool.input_schema, "outputSchema": tool.output_schema
    }  # fmt: skip


def server_of_tools(names: Sequence[str]) -> Server[Any]:
    import anyio.to_thread
    import mcp_types as types
    from mcp.server import Server

    from kvplan.report.templates import kvplan_version

    async def listed(context: Any, params: Any) -> mcp_types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool.model_validate(listing_of(name)) for name in names])

    async def called(context: Any, params: mcp_types.CallToolRequestParams) -> mcp_types.CallToolResult:
        text, document = await anyio.to_thread.run_sync(answer, params.name, params.arguments or {}, names)
        content: list[Any] = [types.TextContent(type="text", text=text)]
        return types.CallToolResult(content=content, structured_content=document, is_error=document is None)

    return Server("kvplan", version=kvplan_version(), on_list_tools=listed, on_call_tool=called)


def answer(name: str, arguments: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """(what the command prints, its document); None in place of a document: the text is an error."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "answer.json"
        try:
            if name not in names:
                raise UsageError(f"tool {printable(name, 60)!r}", "is not offered", f"use {', '.join(names)}")
            words = words_of(name, arguments, Path(folder))
        except UsageError as error:
            return str(error), None
        command = [sys.executable, "-m", "kvplan", *words, "--report", str(report)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"{name} took longer than {LIMIT_S} s; ask for fewer GPUs or requests", None
        document = json.loads(report.read_text(encoding="utf-8")) if report.exists() else None
    if document is None:
        return ran.stderr.strip() or ran.stdout, None
    kinds = {f"kvplan/{kind}@1" for kind in TOOLS[name].documents}
    if document["schema"] not in kinds:
        return f"{name} answers for one GPU and one context at a time; name one `gpu` and one `ctx`", None
    return "\n".join(part for part in (ran.stdout.rstrip(), ran.stderr.rstrip()) if part), document


def words_of(name: str, arguments: Mapping[str, Any], folder: Path) -> list[str]:
    """Words of a tool's command line."""
    tool = TOOLS[name]
    place = tool.argument[0]
    for key in arguments:
        if key not in (place, MORE, *tool.flags):
            raise UsageError(
                f"{name}: {printable(key, 60)!r}", "is no argument of this tool", f"put further options into {MORE!r}"
            )
    words = [name]
    if place in arguments:
        words.append(placed(str(arguments[place]), folder) if place == "log" else str(arguments[place]))
    for key, (flag, _) in tool.flags.items():
        if arguments.get(key) not in (None, ""):
            words.append(f"{flag}={arguments[key]}")
    return [*words, *map(str, arguments.get(MORE, ()))]


def placed(log: str, folder: Path) -> str:
    """Path of a log; its text is written to a file."""
    if "\n" not in log:
        return log
    path = folder / "server.log"
    path.write_text(log, encoding="utf-8")
    return str(path)
