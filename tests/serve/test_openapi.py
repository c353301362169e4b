"""The OpenAPI page says of a body what the server says of it."""

import json
import re
from typing import Any

import jsonschema
import pytest

from kvplan.serve.openapi import openapi
from tests.serve.test_server import BAD, CHAT, HELLO, TEXT
from tests.support.serving import MODEL

PAGE = openapi(MODEL, "0", 128_256)
HALF_A_LETTER = re.compile(r"\\ud[89a-f]..(?!\\ud[c-f])")  # none of the bodies has a whole pair
GOOD: list[tuple[str, Any]] = [
    (TEXT, {"prompt": "a"}),
    (TEXT, {"prompt": [1, 2], "max_tokens": 5, "n": 2, "stop": ["a", "b"], "seed": -1, "temperature": 0}),
    (TEXT, {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}, "logprobs": 0, "user": "me"}),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 5, "stream_options": None, "top_k": -1}),
    (TEXT, {"prompt": "a", "logit_bias": {"5": 1, "0": -99.5}}),
    (CHAT, {"messages": HELLO, "logit_bias": {}}),
    ("/tokenize", {"prompt": "a"}),
    ("/tokenize", {"messages": HELLO}),
    ("/detokenize", {"tokens": [1]}),
]


def is_valid(path: str, body: Any) -> bool:
    schema = PAGE["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return bool(jsonschema.Draft202012Validator(schema).is_valid(body))


@pytest.mark.parametrize(("path", "body"), GOOD)
def test_what_is_served_is_valid(path: str, body: Any) -> None:
    assert is_valid(path, body)


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, body, status, _ in BAD if status in (400, 404)])
def test_what_is_refused_is_not(path: str, body: Any) -> None:
    text = json.dumps(body)
    # What no schema says: half a letter, a prompt beyond the context, answers in all, what a template refuses.
    if len(text) > 15_000 or HALF_A_LETTER.search(text) or body.get("n") == 100 or "chat_template_kwargs" in body:
        return
    if path not in PAGE["paths"]:
        return
    if body.get("max_tokens") == 0 and path.endswith("/completions") and "prompt" in body:  # it goes with echo
        return
    assert not is_valid(path, body)
