"""What clients get, in OpenAI's shapes: whole answers, chunks of a stream, usage, log-probabilities."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvplan.serve.generation import finite
from kvplan.serve.jobs import Job, Piece


@dataclass(slots=True)
class Choice:
    """One answer as it grows."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    reason: str | None = None
    num_cached_tokens: int = 0

    def take(self, piece: Piece) -> None:
        self.text += piece.text
        self.num_cached_tokens = piece.num_cached_tokens
        if piece.token_id is not None:
            self.token_ids.append(piece.token_id)
            self.logprobs.append(piece.logprobs)
        if piece.finish is not None:
            self.reason = piece.finish.reason


def usage(jobs: Sequence[Job], choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of the prompts, each once, and of all answers."""
    prompts = {id(job.prompt): len(job.prompt) for job in jobs}
    cached = {id(job.prompt): choice.num_cached_tokens for job, choice in zip(jobs, choices, strict=True)}
    prompt, answer = sum(prompts.values()), sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


class Shape(Protocol):
    """How a kind of answer is written: completions and chat differ in nothing else."""

    prefix: str

    def whole(self, head: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]: ...

    def opening(self, index: int) -> dict[str, Any] | None: ...

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]: ...

    def head(self, model: str, *, stream: bool) -> dict[str, Any]: ...


@dataclass(slots=True)
class Texts:
    """Token ids as texts, for log-probabilities."""

    tokenizer: Any

    def __call__(self, token_id: int) -> str:
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text


@dataclass(slots=True)
class CompletionShape:
    """`text_completion`."""

    texts: Texts
    with_logprobs: bool
    offsets: dict[int, int] = field(default_factory=dict)  # characters written of each choice's log-probabilities
    prefix: str = "cmpl"

    def head(self, model: str, *, stream: bool) -> dict[str, Any]:
        return {"object": "text_completion", "created": int(time.time()), "model": model}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def whole(self, head: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]:
        return {**head, "choices": [self._choice(choice, choice.text, choice.token_ids, choice.logprobs, choice.reason)
                                    for choice in choices]}  # fmt: skip

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        ids = [] if piece.token_id is None else [piece.token_id]
        reason = None if piece.finish is None else piece.finish.reason
        return self._choice(choice, piece.text, ids, [piece.logprobs] * len(ids), reason)

    def _choice(
        self, choice: Choice, text: str, ids: Sequence[int], logprobs: Sequence[Any], reason: str | None
    ) -> dict[str, Any]:
        rows = self._logprobs(choice.index, ids, logprobs) if self.with_logprobs else None
        return {"index": choice.index, "text": text, "logprobs": rows, "finish_reason": reason, "stop_reason": None}

    def _logprobs(self, index: int, ids: Sequence[int], logprobs: Sequence[Any]) -> dict[str, Any]:
        rows: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, row in zip(ids, logprobs, strict=True):
            if row is None:
                continue
            text, offset = self.texts(token), self.offsets.get(index, 0)
            top = {self.texts(other): finite(value) for other, value in row.top}
            rows["text_offset"].append(offset)
            rows["token_logprobs"].append(finite(row.chosen))
            rows["tokens"].append(text)
            rows["top_logprobs"].append({text: finite(row.chosen), **top})
            self.offsets[index] = offset + len(text)
        return rows


@dataclass(slots=True)
class ChatShape:
    """`chat.completion` and its chunks."""

    texts: Texts
    num_top: int | None  # None: no log-probabilities
    prefix: str = "chatcmpl"

    def head(self, model: str, *, stream: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"object": kind, "created": int(time.time()), "model": model}

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def whole(self, head: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]:
        return {**head, "choices": [self._whole(choice) for choice in choices]}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": choice.reason,
            "stop_reason": None,
        }

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        ids = [] if piece.token_id is None else [piece.token_id]
        return {
            "index": choice.index,
            "delta": {"content": piece.text},
            "logprobs": self._logprobs(ids, [piece.logprobs] * len(ids)),
            "finish_reason": None if piece.finish is None else piece.finish.reason,
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


def event(document: dict[str, Any]) -> bytes:
    """A line of a stream of server-sent events."""
    return (
        b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"
