"""Rendering of chat messages to a prompt: the tokenizer's chat template, or ChatML."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import path_text, read_text
from kvplan.serve.fields import ApiError
from kvplan.serve.rendering import Renderer, TemplateFailure, compiled
from kvplan.serve.text import end_token_of

PLAIN: Final = (  # ChatML, if the model has no template of its own
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_TEMPLATE_BYTES: Final = 1 << 20
SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


RENDERER: Final = Renderer()


class ChatTemplate:
    """A chat template and the special tokens that it may use; a model's own is rendered in another process."""

    def __init__(self, source: str = PLAIN, tokens: Mapping[str, str] | None = None) -> None:
        self._tokens, self._source = dict(tokens or {}), source
        self._plain = compiled(PLAIN) if source == PLAIN else None
        if self._plain is None:
            try:
                RENDERER.text(source, None)
            except TemplateFailure as error:
                raise InvalidInputError("chat template", f"cannot be used ({error})", "fix it") from error

    def end_token(self, tokenizer: Any) -> int | None:
        """Return the id of the end token that the tokenizer's files state, or None."""
        text = self._tokens.get("eos_token")
        if tokenizer is None or text is None:
            return end_token_of(tokenizer)
        token: int | None = tokenizer.token_to_id(text)
        return token

    def prompt(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        """Return the prompt text; options: further template variables. Raise ApiError if the template fails."""
        try:
            if "messages" in options:
                raise TemplateFailure("messages is not an option")
            variables = {**self._tokens, **options, "messages": messages}
            return RENDERER.text(self._source, variables) if self._plain is None else self._plain(**variables)
        except Exception as error:  # a template can raise anything
            raise ApiError(
                f"messages: the chat template rejects them ({str(error)[:200]})", param="messages"
            ) from error


def template_of(directory: Path | None) -> ChatTemplate:
    """Return the template from chat_template.jinja or tokenizer_config.json of a tokenizer's directory, else ChatML."""
    if directory is None:
        return ChatTemplate()
    path = directory / "tokenizer_config.json"
    config: Any = {}
    if path.exists():
        try:
            config = json.loads(read_text(path, MAX_TEMPLATE_BYTES * 16))
        except ValueError as error:
            raise InvalidInputError(f"{path_text(path)}", f"is not JSON ({error})", "fetch it again") from error
    if not isinstance(config, dict):
        raise InvalidInputError(f"{path_text(path)}", "is not a JSON object", "fetch it again")
    tokens = {name: text for name in SPECIAL if (text := _token(config.get(name))) is not None}
    own = directory / "chat_template.jinja"
    if own.exists():
        return ChatTemplate(read_text(own, MAX_TEMPLATE_BYTES), tokens)
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {row.get("name"): row.get("template") for row in source if isinstance(row, dict)}
        source = named.get("default")
    return ChatTemplate(source if isinstance(source, str) else PLAIN, tokens)


def _token(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Return a body's messages with their content as text; raise ApiError if they are malformed."""
    if not isinstance(value, list) or not value:
        raise ApiError("messages must be a list of at least one message", param="messages")
    return [_message(message, number) for number, message in enumerate(value)]


def _message(value: Any, number: int) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ApiError(f"{where} must be an object with a role", param="messages")
    return {**value, "content": _content(value.get("content"), where)}


def _content(value: Any, where: str) -> str:
    match value:
        case None:
            return ""
        case str():
            return value
        case list():
            parts = []
            for part in value:
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    kind = part.get("type") if isinstance(part, dict) else part
                    raise ApiError(f"{where}.content: only text is supported ({str(kind)[:40]})", param="messages")
                parts.append(part["text"])
            return "\n".join(parts)
        case _:
            raise ApiError(f"{where}.content must be a text or a list of parts", param="messages")
