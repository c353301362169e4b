"""Responses in OpenAI's format: complete responses, stream chunks, usage, log-probabilities."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from types import MappingProxyType
from typing import Any, Final, Protocol

from kvplan.serve.filler import Call
from kvplan.serve.generation import finite
from kvplan.serve.jobs import Job, Piece

MARK: Final = "\0text\0"  # no name of a model has it
MARKED: Final = Piece([0], [MARK])


@dataclass(slots=True)
class Choice:
    """One completion, accumulated piece by piece."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[Any] = ()

    def take(self, piece: Piece) -> None:
        self.text += "".join(piece.texts)
        self.num_cached_tokens = piece.num_cached_tokens
        self.prompt_logprobs = self.prompt_logprobs or piece.prompt_logprobs
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        if piece.finish is not None:
            self.reason, self.stop_reason = piece.finish.reason, piece.finish.stop_reason


def usage(jobs: Sequence[Job], choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the usage object: prompt tokens, each prompt counted once, and tokens of all completions."""
    prompts = {id(job.prompt): len(job.prompt) for job in jobs}
    cached = {id(job.prompt): choice.num_cached_tokens for job, choice in zip(jobs, choices, strict=True)}
    prompt, answer = sum(prompts.values()), sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


@dataclass(frozen=True, slots=True)
class PromptIds:
    """Prompts of a request that returns token ids; n: completions per prompt."""

    prompts: list[list[int]]
    n: int

    def of(self, index: int) -> list[int]:
        return self.prompts[index // self.n]


class Shape(Protocol):
    """Response format of an endpoint."""

    prefix: str

    def whole(self, head: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]: ...

    def head(self, model: str, *, stream: bool) -> dict[str, Any]: ...


class StreamShape(Shape, Protocol):
    """One whose stream is of chunks: completions and chat."""

    ids: PromptIds | None

    @property
    def is_plain(self) -> bool:
        """True if chunks after the first differ in their text alone, up to the last."""

    def opening(self, index: int) -> dict[str, Any] | None: ...

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]: ...


@dataclass(slots=True)
class Texts:
    """Converter of token ids to texts, for log-probabilities."""

    tokenizer: Any

    def __call__(self, token_id: int) -> str:
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text


@dataclass(frozen=True, slots=True)
class Echo:
    """Prompts to be echoed in their completions.

    prompts   (text, token ids); n: completions per prompt
    is_alone  True if only the prompts were requested (max_tokens 0)
    """

    prompts: list[tuple[str, list[int]]]
    n: int
    is_alone: bool

    def of(self, choice: Choice) -> tuple[str, list[int]]:
        return self.prompts[choice.index // self.n]


@dataclass(slots=True)
class CompletionShape:
    """`text_completion` responses and their chunks."""

    texts: Texts
    with_logprobs: bool
    echo: Echo | None = None
    ids: PromptIds | None = None
    echoed: set[int] = field(default_factory=set)
    offsets: dict[int, int] = field(default_factory=dict)  # choice -> text offset of its next token
    prefix: str = "cmpl"

    @property
    def is_plain(self) -> bool:
        return not self.with_logprobs and self.ids is None

    def head(self, model: str, *, stream: bool) -> dict[str, Any]:
        return {"object": "text_completion", "created": int(time.time()), "model": model}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def whole(self, head: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]:
        rows = [self._choice(choice, choice.text, choice.token_ids, choice.logprobs) for choice in choices]
        return {**head, "choices": rows}

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return self._choice(choice, "".join(piece.texts), piece.token_ids, piece.logprobs)

    def _choice(self, choice: Choice, text: str, ids: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any]:
        if self.echo is not None and choice.index not in self.echoed:
            self.echoed.add(choice.index)
            prompt, prompt_ids = self.echo.of(choice)
            before = choice.prompt_logprobs or [None] * len(prompt_ids)
            if self.echo.is_alone:
                text, ids, logprobs = prompt, prompt_ids, before
            else:
                text, ids, logprobs = prompt + text, [*prompt_ids, *ids], [*before, *logprobs]
        rows = self._logprobs(choice.index, ids, logprobs) if self.with_logprobs else None
        ends: dict[str, Any] = {"finish_reason": choice.reason, "stop_reason": choice.stop_reason}
        if self.ids is not None:
            is_first = len(ids) == len(choice.token_ids)
            ends |= {"token_ids": ids, "prompt_token_ids": self.ids.of(choice.index) if is_first else None}
        if choice.prompt_logprobs and self.echo is None:
            ends["prompt_logprobs"] = prompt_rows(choice, self.texts)
        return {"index": choice.index, "text": text, "logprobs": rows, **ends}

    def _logprobs(self, index: int, ids: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any]:
        rows: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, row in zip(ids, logprobs, strict=True):
            text, offset = self.texts(token), self.offsets.get(index, 0)
            rows["text_offset"].append(offset)
            rows["tokens"].append(text)
            if row is None:  # a prompt's first token has no log-probability
                rows["token_logprobs"].append(None)
                rows["top_logprobs"].append(None)
            else:
                top = {self.texts(other): finite(value) for other, value in row.top}
                rows["token_logprobs"].append(finite(row.chosen))
                rows["top_logprobs"].append({text: finite(row.chosen), **top})
            self.offsets[index] = offset + len(text)
        return rows


def prompt_rows(choice: Choice, texts: Texts) -> list[Any]:
    """Return the prompt's log-probabilities as vLLM does: for each token an object by token id."""
    return [
        row
        and {
            str(token): {"logprob": finite(value), "rank": rank, "decoded_token": texts(token)}
            for rank, (token, value) in enumerate(row.top, 1)
        }
        for row in choice.prompt_logprobs
    ]


@dataclass(slots=True)
class ChatShape:
    """`chat.completion` responses and their chunks."""

    texts: Texts
    num_top: int | None  # None: no log-probabilities
    call: Call | None = None  # of a tool, which the output is
    ids: PromptIds | None = None
    prefix: str = "chatcmpl"

    @property
    def is_plain(self) -> bool:
        return self.num_top is None and self.call is None and self.ids is None

    def head(self, model: str, *, stream: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"object": kind, "created": int(time.time()), "model": model}

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def whole(self, head: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]:
        document = {**head, "choices": [self._whole(choice) for choice in choices]}
        if self.ids is not None:
            document["prompt_token_ids"] = self.ids.prompts[0]
        if choices[0].prompt_logprobs:
            document["prompt_logprobs"] = prompt_rows(choices[0], self.texts)
        return document

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if self.call is not None:
            function = {"name": self.call.name, "arguments": self.call.argued(len(choice.text))}
            message |= {"content": None, "tool_calls": [{"id": call_id(), "type": "function", "function": function}]}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": self._reason(choice),
            "stop_reason": choice.stop_reason,
            **({} if self.ids is None else {"token_ids": choice.token_ids}),
        }

    def _reason(self, choice: Choice) -> str | None:
        """Return the finish reason: "tool_calls" for a whole call of a tool that the request did not name, as vLLM."""
        is_call = self.call is not None and not self.call.is_named
        return "tool_calls" if is_call and choice.reason == "stop" else choice.reason

    def _delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return what a piece adds to the message; the choice has it already."""
        text = "".join(piece.texts)
        if self.call is None:
            return {"content": text}
        before = self.call.argued(len(choice.text) - len(text))
        function: dict[str, Any] = {"arguments": self.call.argued(len(choice.text))[len(before) :]}
        row: dict[str, Any] = {"index": 0, "function": function}
        if len(choice.token_ids) == 1:
            row |= {"id": call_id(), "type": "function"}
            function["name"] = self.call.name
        elif not function["arguments"]:
            return {}
        return {"tool_calls": [row]}

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return {
            "index": choice.index,
            "delta": self._delta(choice, piece),
            "logprobs": self._logprobs(piece.token_ids, piece.logprobs),
            "finish_reason": self._reason(choice),
            **({} if choice.reason is None else {"stop_reason": choice.stop_reason}),
            **({} if self.ids is None else {"token_ids": piece.token_ids}),
        }

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any] | None:
        if self.num_top is None:
            return None
        rows = []
        for token, row in zip(ids, logprobs, strict=True):
            if row is not None:
                top = [self._row(other, value) for other, value in row.top[: self.num_top]]
                rows.append({**self._row(token, row.chosen), "top_logprobs": top})
        return {"content": rows, "refusal": None}

    def _row(self, token: int, value: float) -> dict[str, Any]:
        text = self.texts(token)
        return {"token": text, "logprob": finite(value), "bytes": list(text.encode("utf-8", "replace"))}


class Chunks:
    """Events of a stream: an opening of each completion if its shape has one, then one event per token."""

    def __init__(
        self, shape: StreamShape, head: dict[str, Any], jobs: Sequence[Job], *, with_usage: bool, each_usage: bool
    ) -> None:
        self._choices = [Choice(job.index) for job in jobs]
        self._shape, self._head, self._jobs, self._each_usage = shape, head, jobs, each_usage
        self._last = {"usage": None} if with_usage else {}
        self._frames: dict[int, list[bytes] | None] = {}  # of completions that have begun: what surrounds a plain text

    def usage(self) -> dict[str, Any]:
        return usage(self._jobs, self._choices)

    def lines(self, index: int, several: Piece) -> bytes:
        """Return the events of a completion's next tokens."""
        frame = self._frames.get(index)
        if frame is None or several.finish is not None:
            return b"".join([line for piece in several.singles() for line in self._general(index, piece)])
        before, after = frame
        self._choices[index].token_ids += several.token_ids
        return b"".join([before + quoted(text) + after for text in several.texts])

    def _general(self, index: int, piece: Piece) -> Iterator[bytes]:
        choice, shape, is_first = self._choices[index], self._shape, index not in self._frames
        opening = shape.opening(index) if is_first else None
        choice.take(piece)
        if opening is not None:
            yield self._event(opening, {} if shape.ids is None else {"prompt_token_ids": shape.ids.prompts[0]})
        yield self._event(shape.chunk(choice, piece))
        if is_first:
            is_plain = shape.is_plain and not self._each_usage and piece.finish is None
            line = self._event(shape.chunk(choice, MARKED)) if is_plain else b""
            self._frames[index] = line.split(quoted(MARK)) if is_plain else None

    def _event(self, part: dict[str, Any], also: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        last = {"usage": self.usage()} if self._each_usage else self._last
        return event({**self._head, "choices": [part], **also, **last})


def call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def event(document: dict[str, Any]) -> bytes:
    """Return a document as a server-sent event."""
    return (
        b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"
    )


def quoted(text: str) -> bytes:
    """Return a text as JSON."""
    return encode_basestring(text).encode("utf-8", "replace")


DONE = b"data: [DONE]\n\n"
