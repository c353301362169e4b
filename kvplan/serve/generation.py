"""Generation for one HTTP request: prompts, sampling parameters, jobs for the worker, and their pieces."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from random import getrandbits
from typing import TYPE_CHECKING, Any, Final

from engine.config import Constraint, SamplingParams
from kvplan.core.errors import KvplanError
from kvplan.serve.fields import ApiError, is_whole
from kvplan.serve.jobs import Group, Job, Mailbox, Piece
from kvplan.serve.worker import Worker, refusal_text

if TYPE_CHECKING:
    from kvplan.serve.intake import Prepared

MOST_ANSWERS: Final = 1024  # completions per HTTP request
GONE, EXPIRED = -1, -2  # in place of a completion's index: client disconnected; request timed out
POOL, POOL_OPTION = "raise num_blocks", "raise --num-gpu-blocks-override"  # the scheduler's cure, and the server's
BUSY: Final = (
    "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
)
BACKLOG: Final = (
    "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Queue limits: unfinished requests, and prompt tokens of requests without a first token; None: no limit."""

    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None = None


def params_of(
    values: dict[str, Any], max_tokens: int, logprobs: int | None, index: int, constraint: Constraint | None,
    *, is_simulated: bool,
) -> SamplingParams:  # fmt: skip
    """Return the sampling parameters of completion `index` of n; each has its own seed, as in vLLM."""
    seed, of_prompt = values["seed"], values["prompt_logprobs"]
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
            include_stop_str_in_output=values["include_stop_str_in_output"],
            logprobs=logprobs,
            prompt_logprobs=logprobs if values.get("echo") else of_prompt,  # as vLLM
            repetition_penalty=values["repetition_penalty"],
            presence_penalty=values["presence_penalty"],
            frequency_penalty=values["frequency_penalty"],
            logit_bias={int(token): bias for token, bias in (values["logit_bias"] or {}).items()},
            min_tokens=values["min_tokens"],
            bad_words=tuple(values["bad_words"]),
            allowed_token_ids=values["allowed_token_ids"] and tuple(values["allowed_token_ids"]),
            detokenize=is_simulated or bool(values["stop"]),  # else the worker's second thread does it
            skip_special_tokens=values["skip_special_tokens"],
            structured_outputs=constraint,
        )
    except KvplanError as error:
        raise ApiError(str(error)) from error


Encode = Callable[[str], list[int]]  # the token ids of a text; ApiError if it cannot be a prompt


def encode(tokenizer: Any, text: str, *, special: bool, param: str = "prompt") -> list[int]:
    """Tokenize a text of a field of the body; raise ApiError without a tokenizer or for invalid Unicode."""
    if tokenizer is None:
        remedy = "send token ids" if param == "prompt" else "send token ids to /v1/completions"
        raise ApiError(f"{param}: the model has no tokenizer; {remedy}", param=param)
    try:  # a batch, because `encode` holds the interpreter's lock all the while
        ids: list[int] = tokenizer.encode_batch([text], add_special_tokens=special)[0].ids
    except (UnicodeError, TypeError) as error:  # a chat template can make half of a surrogate pair
        raise ApiError(f"{param}: the text is not valid Unicode; fix it", param=param) from error
    return ids


def prompts_of(value: Any, tokens: Encode, param: str = "prompt") -> list[list[int]]:
    """Return one or several prompts, given as texts or token ids, as lists of token ids."""
    problem = ApiError(f"{param} must be a string, a list of token ids, or a list of either", param=param)
    if isinstance(value, str):
        return [tokens(value)]
    if not isinstance(value, list) or not value:
        raise problem
    if all(map(is_whole, value)):
        return [value]
    if len(value) > MOST_ANSWERS:
        raise ApiError(f"{param}: {len(value)} prompts; at most {MOST_ANSWERS} in one request", param=param)
    prompts = []
    for prompt in value:
        if isinstance(prompt, str):
            prompts.append(tokens(prompt))
        elif isinstance(prompt, list) and prompt and all(map(is_whole, prompt)):
            prompts.append(prompt)
        else:
            raise problem
    return prompts


def texts_of(value: Any, prompts: Sequence[list[int]], tokenizer: Any) -> list[str]:
    """Return the prompts as texts for echo."""
    texts = [value] if isinstance(value, str) or all(map(is_whole, value)) else value
    if tokenizer is None:
        raise ApiError("echo: the model has no tokenizer; remove it", param="echo")
    return [
        own if isinstance(own, str) else tokenizer.decode(prompt, skip_special_tokens=False)
        for own, prompt in zip(texts, prompts, strict=True)
    ]


def truncated(prompt: list[int], values: Mapping[str, Any], context: int) -> list[int]:
    """Return the prompt's last tokens, or its first with truncation_side "right", as truncate_prompt_tokens says."""
    limit, side = values["truncate_prompt_tokens"], values["truncation_side"] or "left"
    if side not in ("left", "right"):
        raise ApiError("`truncation_side` must be either 'left' or 'right'.", param="truncation_side")
    if limit is None:
        return prompt
    if limit > context:
        problem = f"truncate_prompt_tokens={limit} cannot be greater than max_model_len={context}; request fewer"
        raise ApiError(problem, param="truncate_prompt_tokens")
    limit = context - 1 if limit < 0 else limit  # -1: all that leaves room for a token
    return prompt[:limit] if side == "right" or not limit else prompt[-limit:]


def check_chars(num_chars: int, context: int, most_chars: int, param: str) -> None:
    """Raise ApiError with vLLM's message if a text of a field of the body has more characters than the context's tokens
    can have: those of the longest token, each.
    """
    if num_chars > most_chars:
        raise ApiError(
            f"This model's maximum context length is {context} tokens. However, your prompt contains {num_chars} "
            f"characters (more than {most_chars} characters, which is the upper bound for {context} input tokens). "
            "Please reduce the length of the input prompt.",
            param=param,
        )


def checked_lengths(
    prompts: Sequence[Sequence[int]], max_tokens: int | None, context: int, param: str = "prompt"
) -> list[int]:
    """Return the output limit for each prompt of a field of the body; raise ApiError with vLLM's message if it exceeds
    the context."""
    answers = []
    for prompt in prompts:
        if not prompt:
            raise ApiError(f"{param}: the text has no tokens; send at least one", param=param)
        if len(prompt) >= context or (max_tokens is not None and len(prompt) + max_tokens > context):
            completion = "" if max_tokens is None else f" and {max_tokens} in the completion"
            raise ApiError(
                f"This model's maximum context length is {context} tokens. However, you requested {len(prompt)} tokens "
                f"in the messages{completion}. Please reduce the length of the messages or completion.",
                param="max_tokens" if max_tokens is not None and len(prompt) < context else param,
            )
        answers.append(context - len(prompt) if max_tokens is None else max_tokens)
    return answers


class Generation:
    """The running completions of one HTTP request."""

    def __init__(self, worker: Worker, jobs: list[Job], pieces: Mailbox) -> None:
        self.jobs = jobs
        self._worker, self._pieces = worker, pieces
        self._left = len(jobs)

    async def pieces(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Yield what has come, as (completion index, piece), until all have ended; raise ApiError if one is rejected or
        fails.
        """
        while self._left:
            several, problem = list[tuple[int, Piece]](), None
            for index, piece in await self._pieces.take():
                problem = _problem(index, piece)
                if problem is not None or index == GONE:
                    break
                self._left -= piece.finish is not None
                several.append((index, piece))
            if several:
                yield several
            if problem is not None:
                raise problem
            if index == GONE:
                return

    def abandon(self) -> None:
        """Abort the unfinished completions and end `pieces`: the client has disconnected."""
        self._worker.abort(self.jobs)
        self._pieces.put(GONE, Piece())

    def expire(self) -> None:
        """Abort the unfinished completions: the request has timed out."""
        self._worker.abort(self.jobs)
        self._pieces.put(EXPIRED, Piece())

    def close(self) -> None:
        self._worker.abort(self.jobs)


def _problem(index: int, piece: Piece) -> ApiError | None:
    """Return the error of a request that was rejected or failed, or has no more time."""
    if index == EXPIRED:
        return ApiError("not answered in time", status=504, kind="GatewayTimeoutError")
    if piece.refused is not None:
        is_own = isinstance(piece.refused, KvplanError)
        kind = "BadRequestError" if is_own else "InternalServerError"
        return ApiError(refusal_text(piece.refused), status=400 if is_own else 500, kind=kind)
    if piece.finish is not None and piece.finish.reason == "error":
        problem = (piece.finish.error or "the request failed").replace(POOL, POOL_OPTION)
        return ApiError(problem, status=500, kind="InternalServerError")
    return None


def check_count(num_prompts: int, n: int) -> None:
    if num_prompts * n > MOST_ANSWERS:
        raise ApiError(f"n: {num_prompts} prompts x {n} completions; at most {MOST_ANSWERS} in one request", param="n")


def started(worker: Worker, limits: Limits, prepared: "Prepared", adapter: str | None = None) -> Generation:
    """Submit a request's jobs to the worker; raise ApiError (503) if its queue is full."""
    values = prepared.values
    name, num = values.get("rid"), sum(map(len, prepared.params))
    check_admission(worker, limits, num)
    pieces, jobs = Mailbox(), list[Job]()
    if not isinstance(name, list):  # of each prompt
        name = name or f"{prepared.shape.prefix}-{getrandbits(128):032x}".removeprefix("-")
        name = [f"{name}-{index}" for index in range(num)]
    if twice := next((own for own in name if own in worker.jobs), None):
        raise ApiError(f"Duplicate request ID detected: {twice.removesuffix('-0')[:80]}")
    for prompt, params_of_prompt in zip(prepared.prompts, prepared.params, strict=True):
        group = Group(len(params_of_prompt))
        for params in params_of_prompt:
            index, priority, salt = len(jobs), values["priority"], values["cache_salt"]
            job = Job(name[index], prompt, params, pieces, index, group, priority, salt, adapter)
            job.simulated, job.times.arrived = prepared.simulated, worker.now()
            job.is_streamed = bool(values["stream"])
            jobs.append(job)
    for job in jobs:
        worker.submit(job)
    return Generation(worker, jobs, pieces)


def check_admission(worker: Worker, limits: Limits, num: int) -> None:
    """Raise ApiError with vLLM's status and message if the queue is full, and count the rejection."""
    if worker.refuses:
        raise ApiError("the server sleeps or is paused; retry later", status=503, kind="ServiceUnavailableError")
    max_reqs, max_tokens = limits.max_num_queued_reqs, limits.max_num_queued_tokens
    if max_reqs is not None and len(worker.jobs) + num > max_reqs:
        worker.metrics.rejected("max_num_queued_reqs")
        raise ApiError(BUSY, status=503, kind="ServiceUnavailableError")
    if max_tokens is not None and worker.num_queued_tokens >= max_tokens:
        worker.metrics.rejected("max_num_queued_tokens")
        raise ApiError(BACKLOG, status=503, kind="ServiceUnavailableError")


def finite(value: float) -> float:
    """Return a log-probability that JSON can represent, clipped to vLLM's minimum of -9999."""
    return max(value, -9999.0) if isfinite(value) else -9999.0
