"""Chat messages as a prompt: the tokenizer's own template, run in a sandbox, or a plain one."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import path_text, read_text
from kvplan.serve.fields import ApiError

PLAIN: Final = (  # where the model's own is not known: ChatML
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_TEMPLATE_BYTES: Final = 1 << 20
MAX_PROMPT_CHARS: Final = 1 << 26
SPECIAL: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """A template and the names of special tokens that it may use."""

    def __init__(self, source: str = PLAIN, tokens: Mapping[str, str] | None = None) -> None:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}`, which marks an answer for training and changes no text."""

            tags = {"generation"}  # noqa: RUF012 -- jinja2's own form

            def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
                parser.stream.expect("name:generation")
                body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return body

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": datetime.now().strftime}
        self._tokens = dict(tokens or {})
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidInputError("chat template", f"is not a jinja2 template ({error})", "mend it") from error

    def prompt(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        """The text of a conversation, `options` being what else the template may use; ApiError for what it refuses."""
        try:
            text = self._template.render(messages=messages, **{**self._tokens, **options})
        except Exception as error:  # a template is a program of its own
            raise ApiError(
                f"messages: the chat template refuses them ({str(error)[:200]})", param="messages"
            ) from error
        if len(text) > MAX_PROMPT_CHARS:
            raise ApiError("messages: too long", param="messages")
        return text


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise ValueError(message)


def template_of(directory: Path | None) -> ChatTemplate:
    """The template beside a tokenizer: chat_template.jinja, or in tokenizer_config.json; else the plain one."""
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
    if isinstance(source, list):  # several by name
        named = {row.get("name"): row.get("template") for row in source if isinstance(row, dict)}
        source = named.get("default")
    return ChatTemplate(source if isinstance(source, str) else PLAIN, tokens)


def _token(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def messages_of(value: Any) -> list[dict[str, Any]]:
    """The messages of a body, their content as text."""
    if not isinstance(value, list) or not value:
        raise ApiError("messages: must be a list of at least one message", param="messages")
    return [_message(message, number) for number, message in enumerate(value)]


def _message(value: Any, number: int) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ApiError(f"{where}: must be an object with a role", param="messages")
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
                    raise ApiError(f"{where}.content: only text can be served ({str(kind)[:40]})", param="messages")
                parts.append(part["text"])
            return "\n".join(parts)
        case _:
            raise ApiError(f"{where}.content: must be a text or a list of parts", param="messages")
