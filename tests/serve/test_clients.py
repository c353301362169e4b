"""What load generators, gateways and routers send, as their requests were read on the way to a simulated server.

Fields as sent, with prompts of our own. Whether the clients themselves were content is in docs/twin.md.
"""

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplan.serve.run import begin, bind
from tests.support.serving import Serving, serving, twin

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
PARTS: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
WITH_USAGE = {"include_usage": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm bench serve 0.33.0": (
        TEXT,
        {
            "prompt": "Hello", "repetition_penalty": 1.0, "max_tokens": 16, "logprobs": None,
            "stream_options": WITH_USAGE, "ignore_eos": True,
        },
    ),
    "guidellm 0.8.1": (
        CHAT,
        {
            "messages": PARTS, "stream_options": {**WITH_USAGE, "continuous_usage_stats": True},
            "max_completion_tokens": 16, "ignore_eos": True,
        },
    ),
    "aiperf 0.13.0": (
        CHAT,
        {
            "messages": HELLO, "stream_options": WITH_USAGE, "max_completion_tokens": 16, "ignore_eos": True,
            "min_tokens": 16,
        },
    ),
    "litellm 1.110.2": (
        CHAT, {"messages": HELLO, "stream_options": WITH_USAGE, "max_tokens": 16, "ignore_eos": True}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(twin()) as running:
        yield running


@pytest.mark.parametrize("client", STREAMS)
def test_a_load_generators_stream_has_a_chunk_per_token(server: Serving, client: str) -> None:
    path, body = STREAMS[client]
    events = server.stream(path, model="llama-3.1-8b", **body)
    chunks = [event["choices"][0] for event in events if event["choices"]]
    texts = [chunk.get("text", chunk.get("delta", {}).get("content")) for chunk in chunks]
    assert len([text for text in texts if text]) == 16
    assert [chunk["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
    assert events[-1]["usage"]["completion_tokens"] == 16
    assert events[-1]["choices"] == []
    counts = [event["usage"]["completion_tokens"] for event in events if event["choices"] and event["usage"]]
    is_continuous = "continuous_usage_stats" in body["stream_options"]
    assert counts == ([1, *range(1, 17)] if is_continuous else [])


@pytest.mark.parametrize("client", STREAMS)
def test_a_stream_is_the_whole_answer(server: Serving, client: str) -> None:
    path, body = STREAMS[client]
    events = server.stream(path, model="llama-3.1-8b", **body)
    chunks = [event["choices"][0] for event in events if event["choices"]]
    text = "".join(chunk.get("text") or chunk.get("delta", {}).get("content") or "" for chunk in chunks)
    whole = server.post(path, **{name: value for name, value in body.items() if name != "stream_options"})
    choice = whole["choices"][0]
    assert text == (choice["text"] if path == TEXT else choice["message"]["content"])
    assert whole["usage"]["completion_tokens"] == 16


def test_what_else_they_ask(server: Serving) -> None:
    """vllm bench serve tokenizes and scrapes, aiperf looks for a page of metrics first, litellm sends tools, vLLM's
    router asks /health, /v1/models and /tokenize.
    """
    assert server.post("/tokenize", model="llama-3.1-8b", prompt="a", add_special_tokens=False)["count"] == 1
    assert server.ask("HEAD", "/metrics") == (200, b"")
    assert server.ask("GET", "/health")[0] == 200
    assert server.get("/v1/models")["data"][0]["id"] == "llama-3.1-8b"
    called = server.post(CHAT, messages=HELLO, tool_choice="required", tools=[TOOL])["choices"][0]
    assert called["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 0}'}


def test_clients_are_refused_until_the_server_has_started() -> None:
    listener = bind("127.0.0.1", 0)
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(listener.getsockname(), timeout=10)
        begin(listener)
        socket.create_connection(listener.getsockname(), timeout=10).close()
    finally:
        listener.close()


def test_the_tests_that_the_table_names_exist() -> None:
    root = Path(__file__).parents[2]
    names = set(re.findall(r"test_\w+\.py", (root / "docs/twin.md").read_text()))
    assert len(names) > 5
    assert names <= {path.name for path in (root / "tests").rglob("test_*.py")}
