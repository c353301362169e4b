"""Every request field of vLLM 0.33 is taken, and does what it does there as far as no model is needed for it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.config import Constraint
from kvplan.serve.fields import ApiError, Door
from kvplan.serve.filler import matching, text_of, value_of
from kvplan.serve.structured import constraint_of, forced_calls
from tests.support.serving import Serving, serving, tokenizer, twin

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
FIELDS = json.loads((Path(__file__).parents[1] / "facts" / "vllm_request_fields_0.33.json").read_text())["fields"]
CITY = {"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
NEEDED: dict[str, dict[str, Any]] = {TEXT: {"prompt": "a"}, CHAT: {"messages": HELLO}, RESPONSES: {"input": "a"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(twin()) as running:
        yield running


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, fields in FIELDS.items() for name in fields])
def test_every_field_is_taken(server: Serving, path: str, name: str) -> None:
    tools = {"tools": TOOLS} if name == "tool_choice" and path == CHAT else {}  # without them, vLLM refuses it
    status, data = server.ask("POST", path, {**NEEDED[path], **tools, name: FIELDS[path][name]})
    assert status == 200, data


def test_all_fields_at_once_are_taken(server: Serving) -> None:
    for path, fields in FIELDS.items():
        left_out = ("max_tokens", "model", "structured_outputs")  # beside response_format, vLLM too refuses the last
        values = {name: value for name, value in fields.items() if name not in left_out}
        assert server.ask("POST", path, {**values, **NEEDED[path]})[0] == 200


def test_each_name_without_effect_is_logged_once() -> None:
    lines: list[str] = []
    with serving(twin(), door=Door(is_simulated=True, log=lines.append)) as running:
        for _ in range(3):
            running.post(TEXT, prompt="a", nvext={}, bad_words=["x"], min_tokens=2)
    assert [line.partition(":")[0] for line in lines] == ["request field 'nvext'", "request field 'bad_words'"]


@pytest.mark.parametrize(
    ("fields", "count", "reason"),
    [
        ({"max_tokens": 40}, 24, "stop"),  # the server's own length
        ({"max_tokens": 40, "min_tokens": 30}, 31, "stop"),  # the end token may be the 31st at the earliest
        ({"max_tokens": 40, "min_tokens": 40}, 40, "length"),
        ({"max_tokens": 40, "ignore_eos": True}, 40, "length"),
    ],
)
def test_min_tokens_puts_off_the_end(server: Serving, fields: dict[str, Any], count: int, reason: str) -> None:
    answer = server.post(TEXT, prompt="Hello", **fields)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (count, reason)


def test_no_stop_ends_an_answer_before_min_tokens(server: Serving) -> None:
    free = server.post(TEXT, prompt="Hello", max_tokens=12, return_token_ids=True)["choices"][0]
    stop = free["text"][:6]
    cut = server.post(TEXT, prompt="Hello", max_tokens=12, min_tokens=12, stop=stop)["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (free["text"], "length")
    token = free["token_ids"][2]
    longer = server.post(
        TEXT, prompt="Hello", max_tokens=12, min_tokens=12, stop_token_ids=[token], return_token_ids=True
    )
    assert token not in longer["choices"][0]["token_ids"][:11]


def test_min_tokens_above_the_limit_are_refused_in_vllms_words(server: Serving) -> None:
    status, error = server.refusal(TEXT, {"prompt": "a", "max_tokens": 3, "min_tokens": 4})
    problem = "min_tokens must be less than or equal to max_tokens=3, got 4."
    assert (status, error["param"], error["message"]) == (400, "min_tokens", problem)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"truncate_prompt_tokens": 3}, [13, 14, 15]),  # a generating server keeps the end
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [10, 11, 12]),
        ({"truncate_prompt_tokens": -1}, [10, 11, 12, 13, 14, 15]),
        ({"truncate_prompt_tokens": 9}, [10, 11, 12, 13, 14, 15]),
    ],
)
def test_prompts_are_truncated_as_asked(server: Serving, fields: dict[str, Any], expected: list[int]) -> None:
    answer = server.post(TEXT, prompt=list(range(10, 16)), max_tokens=1, return_token_ids=True, **fields)
    assert answer["choices"][0]["prompt_token_ids"] == expected


def test_token_ids_come_whole_and_in_pieces(server: Serving) -> None:
    body = {"prompt": [5, 6], "max_tokens": 4, "return_token_ids": True}
    whole = server.post(TEXT, **body)["choices"][0]
    pieces = [part["choices"][0] for part in server.stream(TEXT, **body)]
    assert [token for piece in pieces for token in piece["token_ids"]] == whole["token_ids"]
    assert [piece["prompt_token_ids"] for piece in pieces] == [[5, 6], None, None, None]
    assert tokenizer().decode(whole["token_ids"]) == whole["text"]


def test_a_stop_string_is_kept_if_that_is_asked(server: Serving) -> None:
    text = server.post(TEXT, prompt="Hello", max_tokens=12)["choices"][0]["text"]
    stop = text[4:7]
    whole = server.post(TEXT, prompt="Hello", max_tokens=12, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert (whole["text"], whole["stop_reason"]) == (text[:7], stop)


def test_prompt_logprobs_have_vllms_form(server: Serving) -> None:
    rows = server.post(TEXT, prompt=[5, 6], max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    assert rows[1]["6"] == {"logprob": 0.0, "rank": 1, "decoded_token": tokenizer().decode([6])}


# --- tools and structured output


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_tool_is_called_with_arguments_of_its_schema(server: Serving, choice: Any) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice}
    whole = server.post(CHAT, **body)["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
    assert whole["finish_reason"] == ("tool_calls" if choice == "required" else "stop")  # as vLLM
    deltas = [part["choices"][0]["delta"].get("tool_calls") for part in server.stream(CHAT, **body)]
    functions = [delta[0]["function"] for delta in deltas if delta]
    assert functions[0]["name"] == "weather"
    assert "".join(function["arguments"] for function in functions) == call["function"]["arguments"]


def test_a_call_that_is_cut_says_so(server: Serving) -> None:
    cut = server.post(CHAT, messages=HELLO, tools=TOOLS, tool_choice="required", max_tokens=2)["choices"][0]
    assert cut["finish_reason"] == "length"


SCHEMAS: list[Any] = [
    CITY,
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a", "b"]},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {"exclusiveMinimum": 0}, "minItems": 2}}},
    {"allOf": [{"required": ["a"], "properties": {"a": {"const": 3}}}, {"type": "object", "required": ["b"]}]},
    {"anyOf": [False, {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}]},
    {"type": "string", "format": "email", "minLength": 3},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "multipleOf": 0.5, "minimum": 0.7},
    {"type": "integer", "maximum": -4},
    {"type": "object", "minProperties": 2, "additionalProperties": {"type": "boolean"}},
    {"type": "array", "prefixItems": [{"type": "null"}, {"enum": ["x"]}], "minItems": 2},
    {"type": ["null", "string"]},
    {"minLength": 2},
    {},
    True,
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_a_value_follows_its_schema(schema: Any) -> None:
    jsonschema.validate(value_of(schema), schema)


NESTED: dict[str, Any] = {}
for _ in range(80):
    NESTED = {"anyOf": [NESTED]}
DOUBLED = {"$ref": "#/a0", **{f"a{n}": {"allOf": [{"$ref": f"#/a{n + 1}"}] * 2} for n in range(40)}}
UNREADABLE: list[Any] = [{"type": "foo"}, {"pattern": "("}, {"type": "array", "minItems": 1, "items": {"type": "x"}}]
UNFILLED: list[Any] = [
    {"$ref": "#"}, {"$ref": "#/x"}, {"$ref": "https://example.com"}, False, {"enum": []},
    {"type": "integer", "minimum": 3, "maximum": 2}, {"type": "array", "minItems": 10**9}, {"minLength": 10**9},
    {"pattern": "(?=a)b"}, {"pattern": "(a{1000}){1000}"}, {"required": 5}, NESTED, DOUBLED,
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(UNFILLED)))
def test_a_schema_without_a_known_value_is_refused(number: int) -> None:
    stated = {"type": "json_schema", "json_schema": {"schema": UNFILLED[number]}}
    constraint = constraint_of({"response_format": stated, "structured_outputs": None})
    assert constraint is not None
    with pytest.raises(ApiError, match="response_format: no value is known"):
        text_of(*constraint)


@pytest.mark.parametrize("schema", UNREADABLE)
def test_a_schema_that_cannot_be_read_is_refused_as_by_vllm(schema: Any) -> None:
    """Which llguidance, vLLM 0.33's library for what xgrammar does not take, refuses too, after "Grammar error: "."""
    library = pytest.importorskip("llguidance")
    assert library.LLMatcher.validate_grammar(library.LLMatcher.grammar_from_json_schema(schema))
    with pytest.raises(ApiError, match=r"^Grammar error: "):
        text_of(Constraint("json", json.dumps(schema)), "response_format")
    with pytest.raises(ApiError, match=r"^Invalid JSON grammar specification[.]$"):
        text_of(Constraint("json", "{"), "structured_outputs")
    with pytest.raises(ApiError, match=r"^Grammar error: "):
        text_of(Constraint("regex", "("), "structured_outputs")
    with pytest.raises(ApiError, match="no value is known for the expression"):
        text_of(Constraint("regex", "(?=a)b"), "structured_outputs")


@pytest.mark.parametrize("pattern", [r"\d{3}-\d{4}", "[^@]+@[a-z]+[.]com", r"(?:foo){2,}\w*", "^(yes|no)$", "[^a]b?"])
def test_a_text_matches_its_pattern(pattern: str) -> None:
    import re

    assert re.fullmatch(pattern, matching(pattern))


def test_structured_output_is_the_whole_text(server: Serving) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    answer = server.post(CHAT, messages=HELLO, response_format=schema)["choices"][0]
    jsonschema.validate(json.loads(answer["message"]["content"]), CITY)
    assert answer["finish_reason"] == "stop"
    chosen = server.post(TEXT, prompt="a", structured_outputs={"choice": ["yes", "no"]})["choices"][0]
    assert (chosen["text"], chosen["finish_reason"]) == ("yes", "stop")
    assert (
        server.refusal(TEXT, {"prompt": "a", "structured_outputs": {"grammar": "x"}})[1]["param"]
        == "structured_outputs"
    )


@pytest.mark.parametrize(
    ("tools", "choice"),
    [([], "required"), (TOOLS, "never"), (TOOLS, {"function": {"name": "x"}}), ([5], "auto"), (5, "auto")],
)
def test_tools_that_disagree_are_refused(tools: Any, choice: Any) -> None:
    with pytest.raises(ApiError):
        forced_calls(tools, choice)
