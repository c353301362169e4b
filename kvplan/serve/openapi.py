"""The OpenAPI page, made of the tables that bodies are read by."""

from collections.abc import Mapping
from typing import Any

from kvplan.serve.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Field

TEXT = {"type": "string"}
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT = {"anyOf": [{**TEXT, "minLength": 1}, TOKENS]}
MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": TEXT},
    "required": ["role", "content"],
    "additionalProperties": False,
}
OWN = {
    "prompt": PROMPT,
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1},
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": {"type": "boolean"}, "continuous_usage_stats": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "chat_template_kwargs": {"type": "object"},
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
ANSWERS = {"4XX": "What is wrong with the request.", "5XX": "What the server cannot do now."}


def body(table: Mapping[str, Field], model: str) -> dict[str, Any]:
    """The schema of a body."""
    properties = {
        name: OWN.get(name, {"const": model} if name == "model" else field.schema())
        for name, field in table.items()
        if field.inert is None
    }
    required = [name for name, field in table.items() if field.required]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def openapi(model: str, version: str) -> dict[str, Any]:
    """The page for a server of this model."""
    errors = {
        status: {"description": text, "content": {"application/json": {"schema": ERROR}}}
        for status, text in ANSWERS.items()
    }

    def post(name: str, table: Mapping[str, Field], kind: str) -> dict[str, Any]:
        content = {"application/json": {"schema": body(table, model)}}
        schema: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if kind == "answer":
            schema["text/event-stream"] = {"schema": TEXT}
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
        "/v1/completions": {"post": post("completions", COMPLETION, "answer")},
        "/v1/chat/completions": {"post": post("chat", CHAT, "answer")},
        "/tokenize": {"post": post("tokenize", TOKENIZE, "object")},
        "/detokenize": {"post": post("detokenize", DETOKENIZE, "object")},
        "/v1/models": {"get": get("models", "application/json")},
        "/health": {"get": get("health", "")},
        "/version": {"get": get("version", "application/json")},
        "/metrics": {"get": get("metrics", "text/plain")},
    }
    return {"openapi": "3.1.0", "info": {"title": "kvplan serve", "version": version}, "paths": paths}
