"""`kvplan mcp` as the protocol's own client sees it: tools, schemas, answers that are the command line's, errors."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvplan.cli.mcp import TOOLS
from kvplan.documents.schema import document_schema
from tests.support.cli import Run
from tests.support.cli import run as run

anyio = pytest.importorskip("anyio")
sdk = pytest.importorskip("mcp")
ROOT = Path(__file__).resolve().parents[2]
Call = Callable[[str, dict[str, Any]], Any]


def asked_in_one_session(
    calls: list[tuple[str, dict[str, Any]]], words: tuple[str, ...] = ()
) -> tuple[list[Any], list[Any]]:
    """(the tools, the results of the calls) of one server that the client starts. The client itself refuses structured
    content that is not by its schema.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    server = sdk.StdioServerParameters(
        command=sys.executable,
        args=["-m", "kvplan", "mcp", *words],
        env={"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
    )

    async def session() -> tuple[list[Any], list[Any]]:
        async with sdk.Client(server) as client:
            tools = (await client.list_tools()).tools
            return tools, [await client.call_tool(name, arguments) for name, arguments in calls]

    result: tuple[list[Any], list[Any]] = anyio.run(session)
    return result


ANSWERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "estimate": (
        {"model": "llama-3.1-8b", "gpu": "l40s", "ctx": 8192, "options": ["--enforce-eager"]},
        ["llama-3.1-8b", "--gpu", "l40s", "--ctx", "8192", "--enforce-eager"],
    ),
    "recommend": (
        {"model": "llama-3.1-8b", "users": 50, "ctx": "8k", "gpus": "l40s,h200"},
        ["llama-3.1-8b", "--users", "50", "--ctx", "8k", "--gpus", "l40s,h200"],
    ),
    "why": ({"log": "examples/vllm-did-not-start.log"}, ["examples/vllm-did-not-start.log"]),
    "check": ({"file": "examples/kvplan.policy.yaml"}, ["examples/kvplan.policy.yaml"]),
}


def test_a_client_gets_what_the_command_line_prints(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    tools, results = asked_in_one_session([(name, arguments) for name, (arguments, _) in ANSWERS.items()])
    assert [tool.name for tool in tools] == list(ANSWERS) == list(TOOLS)
    for (name, (_, words)), result in zip(ANSWERS.items(), results, strict=True):
        assert not result.is_error, result.content[0].text
        assert result.structured_content == run(name, *words, "--format", "json").json, name
        assert run(name, *words).out.splitlines()[0] in result.content[0].text


def test_what_cannot_be_answered_is_an_error_with_the_command_lines_words() -> None:
    log = "INFO vLLM API server version 0.10.2\nINFO nothing else\n"
    _, results = asked_in_one_session(
        [
            ("estimate", {"model": "nosuch", "gpu": "l40s"}),
            ("estimate", {"model": "llama-3.1-8b"}),
            ("estimate", {"modell": "llama-3.1-8b"}),
            ("why", {"log": log}),
            ("estimate", {"model": "llama-3.1-8b", "gpu": "l40s", "options": ["--no-such-flag"]}),
        ]
    )
    texts = [result.content[0].text for result in results]
    assert "model 'nosuch': not in the catalog" in texts[0]
    assert "name one `gpu` and one `ctx`" in texts[1]
    assert "'modell' is no argument of this tool" in texts[2]
    assert "no such option" in texts[4]
    assert [result.is_error for result in (*results[:3], results[4])] == [True] * 4


def test_only_the_tools_that_are_named_are_offered() -> None:
    tools, results = asked_in_one_session([("why", {"log": "x"})], ("--tools", "estimate,check"))
    assert [tool.name for tool in tools] == ["estimate", "check"]
    assert results[0].is_error
    assert "use estimate, check" in results[0].content[0].text


def test_schemas_are_those_of_the_documents(run: Run) -> None:
    listing = json.loads(run("mcp", "--list").out)
    outputs = {tool["name"]: tool["outputSchema"] for tool in listing}
    assert outputs["estimate"] == document_schema("plan")
    assert outputs["why"] == document_schema("diagnosis")
    assert outputs["recommend"]["anyOf"] == [document_schema("recommendation"), document_schema("timed-recommendation")]
    jsonschema = pytest.importorskip("jsonschema")
    for tool in listing:
        for name in ("inputSchema", "outputSchema"):
            jsonschema.Draft202012Validator.check_schema(tool[name])
            assert tool[name]["type"] == "object"


def test_every_flag_of_a_tool_is_one_of_its_command(run: Run) -> None:
    for name, tool in TOOLS.items():
        text = run(name, "--help-all").out
        for flag, _ in tool.flags.values():
            assert flag in text, (name, flag)


def test_an_unknown_tool_is_refused(run: Run) -> None:
    ran = run("mcp", "--tools", "nosuch")
    assert (ran.code, "use estimate, recommend, why, check" in ran.err) == (2, True)


def test_the_skill_names_commands_that_there_are(run: Run) -> None:
    import re
    import shlex

    text = (ROOT / "SKILL.md").read_text(encoding="utf-8")
    assert re.match(r"---\nname: kvplan\ndescription: .{40,1024}\n---\n", text)
    commands = [line.partition("  #")[0] for line in re.findall(r"^kvplan .*$", text, re.MULTILINE)]
    assert len(commands) >= 6
    for command in commands:
        words = shlex.split(command)[1:]
        assert run(words[0], "--help").code == 0
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert all(flag in run(words[0], "--help-all").out for flag in flags), command
