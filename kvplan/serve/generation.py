"""From a body to answers: prompts and parameters, jobs for the worker, and their pieces until the last."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from engine.config import SamplingParams
from kvplan.core.errors import KvplanError
from kvplan.serve.fields import ApiError, is_whole
from kvplan.serve.jobs import Group, Job, Piece
from kvplan.serve.worker import Worker, refusal_text

MOST_ANSWERS: Final = 1024  # of one HTTP request
GONE, EXPIRED = -1, -2  # in place of an answer's index: the client has left; the request's time is over
BUSY: Final = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
BACKLOG: Final = (
    "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the queue: unfinished requests, and prompt tokens without an answer yet; None: nothing."""

    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None = None


def params_of(values: dict[str, Any], max_tokens: int, logprobs: int | None, index: int) -> SamplingParams:
    """The parameters of one answer of several; each draws by a seed of its own, as vLLM's do."""
    seed = values["seed"]
    try:
        return SamplingParams(
            temperature=values["temperature"],
            top_p=values["top_p"],
            top_k=values["top_k"],
            min_p=values["min_p"],
            max_tokens=max_tokens,
            ignore_eos=values["ignore_eos"],
            seed=seed if seed is None else seed + index,
            stop=tuple(values["stop"]),
            stop_token_ids=tuple(values["stop_token_ids"]),
            logprobs=logprobs,
            repetition_penalty=values["repetition_penalty"],
            presence_penalty=values["presence_penalty"],
            frequency_penalty=values["frequency_penalty"],
            logit_bias={int(token): bias for token, bias in (values["logit_bias"] or {}).items()},
        )
    except KvplanError as error:
        raise ApiError(str(error)) from error


def encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    """A text's tokens."""
    if tokenizer is None:
        raise ApiError("prompt: the model has no tokenizer; send token ids", param="prompt")
    try:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    except (UnicodeError, TypeError) as error:  # half of a surrogate pair, which JSON can write
        raise ApiError("prompt: contains text that is not Unicode; mend it", param="prompt") from error
    return ids


def prompts_of(value: Any, tokenizer: Any, *, special: bool) -> list[list[int]]:
    """One prompt or several, texts or token ids, as token ids."""
    if isinstance(value, str):
        return [encode(tokenizer, value, special=special)]
    if not isinstance(value, list) or not value:
        raise ApiError("prompt: must be a text, a list of token ids, or a list of these", param="prompt")
    if all(map(is_whole, value)):
        return [value]
    prompts = []
    for prompt in value:
        if isinstance(prompt, str):
            prompts.append(encode(tokenizer, prompt, special=special))
        elif isinstance(prompt, list) and prompt and all(map(is_whole, prompt)):
            prompts.append(prompt)
        else:
            raise ApiError("prompt: must be a text, a list of token ids, or a list of these", param="prompt")
    return prompts


def checked_lengths(prompts: Sequence[Sequence[int]], max_tokens: int | None, context: int) -> list[int]:
    """The longest answer to each prompt; ApiError where prompt and answer exceed the context, as vLLM refuses them."""
    answers = []
    for prompt in prompts:
        if not prompt:
            raise ApiError("prompt: has no tokens; send at least one", param="prompt")
        if len(prompt) >= context or (max_tokens is not None and len(prompt) + max_tokens > context):
            completion = "" if max_tokens is None else f" and {max_tokens} in the completion"
            raise ApiError(
                f"This model's maximum context length is {context} tokens. However, you requested {len(prompt)} tokens "
                f"in the messages{completion}. Please reduce the length of the messages or completion.",
                param="max_tokens" if max_tokens is not None and len(prompt) < context else "prompt",
            )
        answers.append(context - len(prompt) if max_tokens is None else max_tokens)
    return answers


class Generation:
    """The answers of one HTTP request, while they run."""

    def __init__(self, worker: Worker, jobs: list[Job], pieces: "asyncio.Queue[tuple[int, Piece]]") -> None:
        self.jobs = jobs
        self._worker, self._pieces = worker, pieces
        self._left = len(jobs)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(index of the answer, what it got) until all have ended; ApiError where one is refused or goes wrong."""
        while self._left:
            index, piece = await self._pieces.get()
            if index == GONE:
                return
            if index == EXPIRED:
                raise ApiError("not answered in time", status=504, kind="GatewayTimeoutError")
            if piece.refused is not None:
                is_own = isinstance(piece.refused, KvplanError)
                raise ApiError(
                    refusal_text(piece.refused),
                    status=400 if is_own else 500,
                    kind="BadRequestError" if is_own else "InternalServerError",
                )
            if piece.finish is not None and piece.finish.reason == "error":
                raise ApiError(piece.finish.error or "the request went wrong", status=500, kind="InternalServerError")
            self._left -= piece.finish is not None
            yield index, piece
            await asyncio.sleep(0)  # a queue that is full would keep the loop from everybody else

    def abandon(self) -> None:
        """Give up what still runs, and let nobody wait for it."""
        self._worker.abort(self.jobs)
        self._pieces.put_nowait((GONE, Piece()))

    def expire(self) -> None:
        """Give up what still runs: its time is over."""
        self._worker.abort(self.jobs)
        self._pieces.put_nowait((EXPIRED, Piece()))

    def close(self) -> None:
        self._worker.abort(self.jobs)


def started(
    worker: Worker, limits: Limits, prompts: list[list[int]], values: dict[str, Any], answers: list[int],
    logprobs: int | None, prefix: str, adapter: str | None = None,
) -> Generation:  # fmt: skip
    """Hand the jobs of a request to the worker; ApiError (503) where its queue is full."""
    n = values["n"]
    if len(prompts) * n > MOST_ANSWERS:
        raise ApiError(f"n: {len(prompts)} prompts x {n} answers; at most {MOST_ANSWERS} in one request", param="n")
    check_admission(worker, limits, len(prompts) * n)
    pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
    name, jobs = f"{prefix}-{uuid.uuid4().hex}", []
    for number, (prompt, max_tokens) in enumerate(zip(prompts, answers, strict=True)):
        group = Group(n)
        for child in range(n):
            params = params_of(values, max_tokens, logprobs, child)
            index = number * n + child
            jobs.append(
                Job(
                    f"{name}-{index}",
                    prompt,
                    params,
                    pieces,
                    index,
                    group,
                    values["priority"],
                    values["cache_salt"],
                    adapter,
                )
            )
    for job in jobs:
        worker.submit(job)
    return Generation(worker, jobs, pieces)


def check_admission(worker: Worker, limits: Limits, num: int) -> None:
    """Refuse what the queue has no room for, with vLLM's status and words, and count it."""
    max_reqs, max_tokens = limits.max_num_queued_reqs, limits.max_num_queued_tokens
    if max_reqs is not None and len(worker.jobs) + num > max_reqs:
        worker.metrics.rejected("max_num_queued_reqs")
        raise ApiError(BUSY, status=503, kind="ServiceUnavailableError")
    if max_tokens is not None and worker.num_queued_tokens >= max_tokens:
        worker.metrics.rejected("max_num_queued_tokens")
        raise ApiError(BACKLOG, status=503, kind="ServiceUnavailableError")


def finite(value: float) -> float:
    """A log-probability as JSON can write it, with vLLM's least."""
    return max(value, -9999.0) if isfinite(value) else -9999.0
