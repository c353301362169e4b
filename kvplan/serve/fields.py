"""Request fields: one table per kind of body, used to validate bodies and to generate the OpenAPI document."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import Any, Final, Literal

from engine.config import MOST_BIASES

MOST_ANSWERS: Final = 128  # OpenAI's limit of n
MOST_STOPS: Final = 64
MOST_STOP_IDS: Final = 1024
MOST_STOP_CHARS: Final = 1024
MOST_LOGPROBS: Final = 20  # vLLM's default --max-logprobs
MOST_BIAS: Final = 100
TOKEN_ID: Final = re.compile("(0|[1-9][0-9]{0,17})")  # no leading zeros: one spelling per token
MOST_SEED: Final = 2**63 - 1
MOST_NOTED: Final = 1000  # names of fields without effect that are logged
Kind = Literal["integer", "number", "boolean", "string", "strings", "integers", "biases", "object", "any"]


class ApiError(Exception):
    """An error response: HTTP status, OpenAI error type, and the field at fault."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param = message, status, kind, param

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a body.

    strings   a string or a list of strings
    biases    an object: token ids, as strings, to numbers from -100 to 100
    most_items  longest list of integers
    minimum, maximum  inclusive bounds of a number; above: exclusive lower bound
    inert     the only values, without effect, that the engine takes of a field it does not support; None: supported
    simulated  True: a simulated server does what vLLM does; False: it takes any value of an inert field, without effect
    ignored   accepted with any value, without effect on the response
    of_logits  changes logits, which a simulated server has none of: it takes the field without effect
    """

    kind: Kind
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    inert: tuple[Any, ...] | None = None
    simulated: bool = False
    ignored: bool = False
    of_logits: bool = False
    required: bool = False
    most_items: int | None = None

    def schema(self) -> dict[str, Any]:
        """Return the field's JSON Schema; optional fields may be null."""
        own = {} if self.ignored else self._own_schema()
        return own if self.required or not own else {"anyOf": [own, {"type": "null"}]}

    def _own_schema(self) -> dict[str, Any]:
        bounds = {"minimum": self.minimum, "maximum": self.maximum, "exclusiveMinimum": self.above}
        limits = {name: value for name, value in bounds.items() if value is not None}
        match self.kind:
            case "strings":
                text = {"type": "string", "minLength": 1, "maxLength": MOST_STOP_CHARS}
                return {"anyOf": [text, {"type": "array", "items": text, "maxItems": MOST_STOPS}]}
            case "integers":
                limit = {} if self.most_items is None else {"maxItems": self.most_items}
                return {"type": "array", "items": {"type": "integer"}, **limit}
            case "biases":
                return {
                    "type": "object",
                    "propertyNames": {"pattern": f"^{TOKEN_ID.pattern}$"},
                    "additionalProperties": {"type": "number", "minimum": -MOST_BIAS, "maximum": MOST_BIAS},
                    "maxProperties": MOST_BIASES,
                }
            case "any":
                return {}
            case _:
                return {"type": self.kind, **limits}


NOT_SERVED: Final = {
    "prompt_logprobs": Field("integer", inert=(), minimum=0, maximum=MOST_LOGPROBS, simulated=True),
    "kv_transfer_params": Field("object", inert=({},), simulated=True),
    "use_beam_search": Field("boolean", inert=(False,)),
    "length_penalty": Field("number", inert=(1,)),
    "spaces_between_special_tokens": Field("boolean", inert=(True,)),
    "logprob_token_ids": Field("integers", inert=([],)),
    "thinking_token_budget": Field("any", inert=()),
    "repetition_detection": Field("object", inert=()),
    "prompt_embeds": Field("any", inert=()),
    "watermarking": Field("boolean", inert=(False,)),
}
IGNORED: Final = {
    name: Field("any", ignored=True)
    for name in ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id")
}
COMMON: Final = {
    "model": Field("string"),
    "n": Field("integer", 1, minimum=1, maximum=MOST_ANSWERS),
    "stream": Field("boolean", False),
    "stream_options": Field("object"),
    "stop": Field("strings", ()),
    "stop_token_ids": Field("integers", (), most_items=MOST_STOP_IDS),
    "seed": Field("integer", minimum=-MOST_SEED - 1, maximum=MOST_SEED),
    "temperature": Field("number", 1.0, minimum=0),
    "top_p": Field("number", 1.0, above=0, maximum=1),
    "top_k": Field("integer", 0, minimum=-1),
    "min_p": Field("number", 0.0, minimum=0, maximum=1),
    "frequency_penalty": Field("number", 0.0, minimum=-2, maximum=2),
    "presence_penalty": Field("number", 0.0, minimum=-2, maximum=2),
    "repetition_penalty": Field("number", 1.0, above=0),
    "ignore_eos": Field("boolean", False),
    "priority": Field("integer", 0, minimum=-(2**31), maximum=2**31),
    "cache_salt": Field("string"),
    "logit_bias": Field("biases", of_logits=True),
    "allowed_token_ids": Field("integers", of_logits=True),
    "bad_words": Field("strings", (), of_logits=True),
    "min_tokens": Field("integer", 0, minimum=0),
    "skip_special_tokens": Field("boolean", True),
    "structured_outputs": Field("object"),
    "response_format": Field("object"),
    "include_stop_str_in_output": Field("boolean", False),
    "truncate_prompt_tokens": Field("integer", minimum=-1),
    "truncation_side": Field("string"),
    "return_token_ids": Field("boolean", False),
    "return_tokens_as_token_ids": Field("boolean", False),
    **NOT_SERVED,
    **IGNORED,
}
COMPLETION: Final = {
    "prompt": Field("any", required=True),
    "max_tokens": Field("integer", 16, minimum=0),
    "logprobs": Field("integer", minimum=0, maximum=MOST_LOGPROBS),
    "echo": Field("boolean", False),
    "suffix": Field("string", inert=("",)),
    "best_of": Field("integer", inert=(1,)),
    "add_special_tokens": Field("boolean", True),
    **COMMON,
}
CHAT: Final = {
    "messages": Field("any", required=True),
    "max_tokens": Field("integer", minimum=1),
    "max_completion_tokens": Field("integer", minimum=1),
    "logprobs": Field("boolean", False),
    "top_logprobs": Field("integer", 0, minimum=0, maximum=MOST_LOGPROBS),
    "add_generation_prompt": Field("boolean", True),
    "add_special_tokens": Field("boolean", False),
    "chat_template_kwargs": Field("object"),
    "continue_final_message": Field("boolean", inert=(False,)),
    "echo": Field("boolean", inert=(False,)),
    "chat_template": Field("string", inert=()),
    "documents": Field("any"),
    "tools": Field("any", ()),
    "tool_choice": Field("any"),
    "functions": Field("any", inert=([],)),
    "parallel_tool_calls": Field("boolean"),
    "modalities": Field("any", inert=(["text"],)),
    "audio": Field("object", inert=()),
    "prediction": Field("object", inert=()),
    "reasoning_effort": Field("string", inert=()),
    **COMMON,
}
GUIDED: Final = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}  # an older vLLM's names
LOGITS: Final = "a simulated server has no logits: its output is a fixed text"
TOKENIZE: Final = {
    "model": Field("string"),
    "prompt": Field("string"),
    "messages": Field("any"),
    "add_special_tokens": Field("boolean"),
    "add_generation_prompt": Field("boolean", True),
    "chat_template_kwargs": Field("object"),
    "return_token_strs": Field("boolean", False),
}
DETOKENIZE: Final = {"model": Field("string"), "tokens": Field("integers", required=True)}


@dataclass(frozen=True, slots=True)
class Door:
    """Which fields a server takes.

    is_simulated  True: no model runs, so that a field for a model's tokens alone is taken without effect
    is_strict     True: unknown fields, and those without effect, are errors
    log           takes a line about each name without effect, the first time
    """

    is_simulated: bool = False
    is_strict: bool = False
    log: Callable[[str], None] = lambda line: None
    names: set[str] = field(default_factory=set)

    def note(self, name: str, why: str) -> None:
        """Log a name that has no effect, once."""
        if name not in self.names and len(self.names) < MOST_NOTED:
            self.names.add(name)
            self.log(f"request field {name[:80]!r}: {why}")

    def is_inert(self, row: Field) -> bool:
        """True for a field of which only values without effect are taken."""
        return row.inert is not None and (not self.is_simulated or (self.is_strict and not row.simulated))


STRICT: Final = Door(is_strict=True)


def read(body: Mapping[str, Any], table: Mapping[str, Field], door: Door = STRICT) -> dict[str, Any]:
    """Return every field of a table with its value or default; raise ApiError for values that are wrong or unsupported,
    and for unknown fields of a strict server.
    """
    if not door.is_simulated and "structured_outputs" in table:
        body = modern(body)
    for name in body:
        if name not in table:
            if door.is_strict:
                raise ApiError(f"{name[:80]}: unknown field; remove it", param=name[:80])
            door.note(name, "not known here; accepted without effect")
    values = {}
    for name, row in table.items():
        value = body.get(name)
        if value is None:
            if row.required:
                raise ApiError(f"{name} is required", param=name)
            values[name] = row.default
        else:
            values[name] = _checked(name, row, value, door)
    return values


def modern(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a body with its `guided_` fields as `structured_outputs`. vLLM 0.33 ignores them, as does a simulated
    server; from a model, an output that should be constrained and is not would be worse.
    """
    guided = {GUIDED[name]: value for name, value in body.items() if name in GUIDED and value is not None}
    stated = body.get("structured_outputs")
    if not guided or not isinstance(stated, dict | None):
        return body
    others = {name: value for name, value in body.items() if name not in GUIDED}
    return {**others, "structured_outputs": {**(stated or {}), **guided}}


def _checked(name: str, row: Field, value: Any, door: Door) -> Any:
    if row.ignored:
        return None
    if not _is_kind(row.kind, value):
        raise ApiError(f"{name} must be {WORDS[row.kind]} ({_shown(value)})", param=name)
    if door.is_inert(row):
        if value not in (row.inert or ()):
            raise ApiError(f"{name}: not supported ({_shown(value)}); remove it", param=name)
        return row.default
    if row.of_logits and door.is_simulated and value:
        if door.is_strict:
            raise ApiError(f"{name}: {LOGITS}", param=name)
        door.note(name, f"accepted without effect; {LOGITS}")
        return row.default
    if row.inert is not None and not row.simulated and value not in row.inert:
        door.note(name, "accepted without effect, as no model runs")
    for fits, words in (
        (row.most_items is None or len(value) <= row.most_items, f"at most {row.most_items} of them"),
        (row.minimum is None or value >= row.minimum, f"at least {row.minimum}"),
        (row.maximum is None or value <= row.maximum, f"at most {row.maximum}"),
        (row.above is None or value > row.above, f"above {row.above}"),
    ):
        if not fits:
            raise ApiError(f"{name} must be {words} ({_shown(value)})", param=name)
    return (value,) if row.kind == "strings" and isinstance(value, str) else value


WORDS: Final = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "strings": f"a text, or up to {MOST_STOPS} texts, of 1 to {MOST_STOP_CHARS} characters",
    "integers": "a list of whole numbers",
    "biases": f"an object of up to {MOST_BIASES} token ids to numbers from -{MOST_BIAS} to {MOST_BIAS}",
    "object": "an object",
}


def _is_kind(kind: Kind, value: Any) -> bool:
    match kind:
        case "integer":
            return is_whole(value)
        case "number":
            return is_whole(value) or (isinstance(value, float) and isfinite(value))
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "strings":
            texts = [value] if isinstance(value, str) else value
            return (
                isinstance(texts, list)
                and len(texts) <= MOST_STOPS
                and all(isinstance(text, str) and 0 < len(text) <= MOST_STOP_CHARS for text in texts)
            )
        case "integers":
            return isinstance(value, list) and all(map(is_whole, value))
        case "biases":
            return (
                isinstance(value, dict)
                and len(value) <= MOST_BIASES
                and all(TOKEN_ID.fullmatch(token) for token in value)
                and all(_is_kind("number", bias) and -MOST_BIAS <= bias <= MOST_BIAS for bias in value.values())
            )
        case "object":
            return isinstance(value, dict)
        case _:
            return True


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """The beginning of a value as JSON; the rest is not encoded."""
    return "".join(islice(json.JSONEncoder().iterencode(value), 60))[:60]
