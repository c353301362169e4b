"""Structured output, tools and masks of the engine behind the server; another library says whether they are right."""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from kvplan.serve.real import cache_config
from kvplan.serve.structured import Calls, forced_calls
from tests.support.constrained import constrained_engine, small_tokenizer
from tests.support.serving import MODEL, Serving, serving
from tests.support.small_models import VOCAB

pytest.importorskip("llguidance", reason="pip install '.[structured]'")
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO: Any = [{"role": "user", "content": "hi"}]
NUMBERS = {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"type": "boolean"}}
POINT = {"type": "object", "properties": NUMBERS, "required": ["n", "b"], "additionalProperties": False}
SIDE = {"type": "object", "properties": {"x": {"enum": ["u}", "v]"]}}, "required": ["x"], "additionalProperties": False}
SCHEMAS = {"place": POINT, "turn": SIDE}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": own}} for name, own in SCHEMAS.items()]
# A random model likes to indent: without this, most outputs would be spaces.
NO_SPACES = {str(token): -100 for token in range(3, VOCAB) if not small_tokenizer().decode([token]).strip()}
BODY = {"logit_bias": NO_SPACES, "max_tokens": 160}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    engine = constrained_engine(max_model_len=400)
    with serving(engine, cache_config(engine)) as running:
        yield running


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}},
        {"structured_outputs": {"json": POINT}},
        {"structured_outputs": {"json": json.dumps(POINT)}},
        {"guided_json": POINT},
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_output_follows_its_schema(server: Serving, path: str, fields: dict[str, Any]) -> None:
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "hi"}
    for choice in server.post(path, **prompt, **BODY, **fields, n=3, seed=1)["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"] if path == CHAT else choice["text"]), POINT)
        assert choice["finish_reason"] == "stop"


def test_an_output_matches_what_else_constrains_it(server: Serving) -> None:
    fields: dict[str, Any]
    for fields, pattern in (
        ({"structured_outputs": {"regex": "[ab]{3}z"}}, "[ab]{3}z"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "b"'}}, "a[0-9]b"),
    ):
        assert re.fullmatch(pattern, server.post(TEXT, prompt="hi", **fields)["choices"][0]["text"])
    body = {"prompt": "hi", "max_tokens": 20, "logit_bias": NO_SPACES}
    text = server.post(TEXT, **body, response_format={"type": "json_object"})["choices"][0]["text"]
    assert text.startswith("{")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_parallel", [False, True])
def test_forced_tools_are_called_whole_and_in_pieces(server: Serving, seed: int, *, is_parallel: bool) -> None:
    body = {"messages": HELLO, **BODY, "seed": seed, "tools": TOOLS, "tool_choice": "required"}
    body["parallel_tool_calls"] = is_parallel
    whole = server.post(CHAT, **body)["choices"][0]
    functions = [call["function"] for call in whole["message"]["tool_calls"]]
    is_whole = whole["finish_reason"] == "tool_calls"  # several calls may come to the limit
    assert is_parallel or (is_whole and len(functions) == 1)
    for function in functions[: None if is_whole else -1]:
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
    rows = [row for part in server.stream(CHAT, **body) for row in part["choices"][0]["delta"].get("tool_calls", [])]
    pieces: dict[int, dict[str, str]] = {}
    for row in rows:
        own = pieces.setdefault(row["index"], {"name": row["function"].get("name", ""), "arguments": ""})
        own["arguments"] += row["function"]["arguments"]
    assert list(pieces.values()) == functions
    assert len({row["id"] for row in rows if "id" in row}) == len(functions)


def test_a_named_tool_is_called_through_openais_client(server: Serving) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    chosen: Any = {"type": "function", "function": {"name": "turn"}}
    bias = {"logit_bias": NO_SPACES}
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=chosen, max_tokens=60, extra_body=bias
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "turn"
    jsonschema.validate(json.loads(call.function.arguments), SIDE)


def test_a_response_has_its_call(server: Serving) -> None:
    tools = [{"type": "function", "name": name, "parameters": own} for name, own in SCHEMAS.items()]
    body = {"input": "hi", "tools": tools, "tool_choice": "required", "logit_bias": NO_SPACES, "max_output_tokens": 120}
    (item,) = server.post(RESPONSES, **body)["output"]
    assert item["type"] == "function_call"
    jsonschema.validate(json.loads(item["arguments"]), SCHEMAS[item["name"]])


WRONG_TOOL = [{"type": "function", "function": {"name": "g", "parameters": {"type": "zz"}}}]
REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}, "response_format",
     "response_format: json: Invalid type: foo; fix or simplify it"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", 'Unimplemented keys: ["not"]'),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex: "),
    ({"structured_outputs": {}}, "structured_outputs", "must have json"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "only use one kind"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag is not supported"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object or json_schema"),
    ({"tools": TOOLS}, "tool_choice", "tool_choice: auto needs a parser"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "name one of"),
    ({"tools": WRONG_TOOL, "tool_choice": "required"}, "tools", "tools: json: Invalid type: zz"),
    ({"min_tokens": 7, "max_tokens": 5}, "min_tokens", "less than or equal to max_tokens=5, got 7"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ({"allowed_token_ids": [999]}, None, "allowed_token_ids: 999 is not a token"),
    ({"bad_words": [""]}, "bad_words", "bad_words must be"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids", "not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line(
    server: Serving, fields: dict[str, Any], param: str | None, words: str
) -> None:
    status, error = server.refusal(CHAT, {"messages": HELLO, **fields})
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]
    assert "\n" not in error["message"]


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = constrained_engine()
    with serving(engine, cache_config(engine)) as running:
        assert running.post(TEXT, prompt="hi", max_tokens=2, min_tokens=2)["usage"]["completion_tokens"] == 2
        status, error = running.refusal(TEXT, {"prompt": "hi", "guided_choice": ["a"]})
    assert status == 400
    assert "pip install '.[structured]'" in error["message"]


def test_masks_of_tokens_are_served(server: Serving) -> None:
    allowed = [*small_tokenizer().encode("ab").ids, 0]
    body = {"prompt": "hi", "max_tokens": 12, "min_tokens": 12, "allowed_token_ids": [*allowed, 2], "seed": 1}
    choice = server.post(TEXT, **body, skip_special_tokens=False, return_token_ids=True)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert set(choice["token_ids"]) <= set(allowed)
    assert choice["text"] == small_tokenizer().decode(choice["token_ids"], skip_special_tokens=False)
    assert "a" not in server.post(TEXT, **body, bad_words=["a"])["choices"][0]["text"]


@pytest.mark.parametrize("step", [1, 2, 5])
def test_calls_are_read_as_they_come(step: int) -> None:
    """Names and arguments of a beginning are beginnings of those of the whole, whatever stands in texts."""
    texts = [json.dumps({"x": '}]{"\\'}), json.dumps({"y": [{"z": "]"}]}), "{}"]
    whole = "[" + ", ".join(f'{{"name": "f{n}", "parameters": {text}}}' for n, text in enumerate(texts)) + "]"
    calls = forced_calls(TOOLS, "required")
    assert isinstance(calls, Calls)
    assert calls.of(whole) == [(f"f{n}", text) for n, text in enumerate(texts)]
    before: list[tuple[str, str]] = []
    for end in range(0, len(whole), step):
        now = calls.of(whole[:end])
        assert all(new[0] == old[0] and new[1].startswith(old[1]) for old, new in zip(before, now, strict=False))
        assert len(now) >= len(before)
        before = now
