"""The OpenAPI document, generated from the tables that validate request bodies."""

from collections.abc import Mapping
from typing import Any

from kvplan.serve.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Field
from kvplan.serve.generation import MOST_ANSWERS

TEXT = {"type": "string"}
NULL = {"type": "null"}
PART = {"type": "object", "properties": {"type": {"const": "text"}, "text": TEXT}, "required": ["type", "text"]}
MESSAGE = {
    "type": "object",
    "properties": {"role": TEXT, "content": {"anyOf": [TEXT, NULL, {"type": "array", "items": PART}]}},
    "required": ["role"],
}
STREAM_OPTIONS = {
    "type": "object",
    "properties": {"include_usage": {"type": "boolean"}, "continuous_usage_stats": {"type": "boolean"}},
    "additionalProperties": False,
}
ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
# What they may be depends on each other, and on what a compiler of grammars takes.
UNDESCRIBED = ("tools", "tool_choice", "response_format", "structured_outputs")
ANSWERS = {"4XX": "What is wrong with the request.", "5XX": "What the server cannot do now."}


def own_schemas(model: str, num_tokens: int) -> dict[str, Any]:
    """Return the schemas of fields that need more than their kind's schema."""
    tokens = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": num_tokens - 1}}
    kinds = [{**TEXT, "minLength": 1}, {**tokens, "minItems": 1}]
    prompt = {"anyOf": [*kinds, {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, "maxItems": MOST_ANSWERS}]}
    messages = {"type": "array", "items": MESSAGE, "minItems": 1}
    return {
        "model": {"anyOf": [{"const": model}, NULL]},
        "prompt": prompt,
        "messages": messages,
        "tokens": tokens,
        "allowed_token_ids": {"anyOf": [{**tokens, "minItems": 1}, NULL]},
        "stream_options": {"anyOf": [STREAM_OPTIONS, NULL]},
    }


def body(table: Mapping[str, Field], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a request body."""
    described = {name: field for name, field in table.items() if field.inert is None and name not in UNDESCRIBED}
    properties = {name: own.get(name) or field.schema() for name, field in described.items()}
    required = [name for name, field in table.items() if field.required]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    needs = [needed(*pair) for pair in NEEDED.items() if pair[0] in properties]
    return {**schema, "allOf": needs} if needs else schema


NEEDED = {
    "stream_options": "stream",
    "top_logprobs": "logprobs",
}  # fields that have an effect only if another one is true


def needed(name: str, switch: str) -> dict[str, Any]:
    """Return a schema that requires `switch` to be true if field `name` has an effect."""
    nothing: dict[str, Any] = {"properties": {name: {"enum": [None, 0, {}]}}}
    return {"anyOf": [nothing, {"properties": {switch: {"const": True}}, "required": [switch]}]}


def tokenize_body(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a /tokenize body: a prompt or messages."""
    kinds = []
    for name, other in (("prompt", "messages"), ("messages", "prompt")):
        table = {key: field for key, field in TOKENIZE.items() if key != other}
        kinds.append({**body(table, {**own, "prompt": TEXT}), "required": [name]})
    return {"oneOf": kinds}


def openapi(model: str, version: str, num_tokens: int) -> dict[str, Any]:
    """Return the OpenAPI document for a server of this model, with token ids from 0 to num_tokens - 1."""
    own = own_schemas(model, num_tokens)
    errors = {
        status: {"description": text, "content": {"application/json": {"schema": ERROR}}}
        for status, text in ANSWERS.items()
    }

    def post(name: str, schema_of_body: dict[str, Any], kind: str) -> dict[str, Any]:
        content = {"application/json": {"schema": schema_of_body}}
        schema: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if kind == "answer":
            schema["text/event-stream"] = {"schema": {}}
        done = {"description": "The answer.", "content": schema}
        return {
            "operationId": name,
            "requestBody": {"required": True, "content": content},
            "responses": {"200": done, **errors},
        }

    def get(name: str, media: str) -> dict[str, Any]:
        done = {"description": "The answer.", **({"content": {media: {"schema": {}}}} if media else {})}
        return {"operationId": name, "responses": {"200": done, **errors}}

    paths = {
        "/v1/completions": {"post": post("completions", body(COMPLETION, own), "answer")},
        "/v1/chat/completions": {"post": post("chat", body(CHAT, own), "answer")},
        "/tokenize": {"post": post("tokenize", tokenize_body(own), "object")},
        "/detokenize": {"post": post("detokenize", body(DETOKENIZE, own), "object")},
        "/v1/models": {"get": get("models", "application/json")},
        "/health": {"get": get("health", "")},
        "/version": {"get": get("version", "application/json")},
        "/metrics": {"get": get("metrics", "text/plain")},
    }
    return {"openapi": "3.1.0", "info": {"title": "kvplan serve", "version": version}, "paths": paths}
