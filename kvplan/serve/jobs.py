"""Job: one completion that a client waits for, with its parameters, progress and times."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.config import SamplingParams
from engine.request import Request


@dataclass(slots=True)
class Timed:
    """Event times of a request on the monotonic clock; 0: not yet."""

    arrived: float = field(default_factory=time.monotonic)
    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0  # in the backend


@dataclass(frozen=True, slots=True)
class Finish:
    """End of a completion: vLLM's finish reason, or an error's text.

    stop_reason  the stop string or the id of the stop token; None at the model's end token and any other end
    """

    reason: str
    error: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Piece:
    """Output of a request: its tokens since the last piece with a text each, and the finish if it is the last piece.

    logprobs  one entry per token if requested
    refused  the backend's error if it rejected the request
    prompt_logprobs  log-probabilities of the prompt's tokens, with the first piece, if requested
    """

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: Finish | None = None
    num_cached_tokens: int = 0
    refused: Exception | None = None
    prompt_logprobs: Sequence[Any] = ()

    def singles(self) -> Iterator["Piece"]:
        """Yield pieces of one token each, with the finish in the last; the piece itself if it has no more than one."""
        last = len(self.token_ids) - 1
        if last <= 0:
            yield self
            return
        for place, (token, text) in enumerate(zip(self.token_ids, self.texts, strict=True)):
            finish = self.finish if place == last else None
            logprobs, prompt = self.logprobs[place : place + 1], () if place else self.prompt_logprobs
            yield Piece([token], [text], logprobs, finish, self.num_cached_tokens, prompt_logprobs=prompt)


class Mailbox:
    """Pieces on their way to an HTTP request, each with its completion's index; used in the loop only."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Piece]] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, index: int, piece: Piece) -> None:
        self._pieces.append((index, piece))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[tuple[int, Piece]]:
        """Return all pieces that are there, at least one."""
        while not self._pieces:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        return pieces


@dataclass(slots=True)
class Group:
    """The completions of one prompt, which vLLM's metrics count once, at the end of the last."""

    n: int = 1
    most_tokens: int = 0
    num_ended: int = 0

    def ended(self, num_tokens: int) -> bool:
        """Count an ended completion; return True if it is the last."""
        self.num_ended += 1
        self.most_tokens = max(self.most_tokens, num_tokens)
        return self.num_ended == self.n


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a request asks of a simulated server alone.

    min_tokens  generated tokens before which it does not end, except at its limit
    answer      token ids of its output; None: a part of the fixed text
    is_pooled   it ends with its prompt, and no token is generated
    is_whole    nobody reads its output before its end
    """

    min_tokens: int = 0
    answer: tuple[int, ...] | None = None
    is_pooled: bool = False
    is_whole: bool = False


@dataclass(eq=False, slots=True)
class Job:
    """One requested completion: created in the event loop, run in the backend's thread.

    index  index among the completions of its HTTP request; tags its pieces in their common mailbox
    is_streamed  False: all its output comes in one piece
    group  completions of the same prompt
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    pieces: Mailbox
    index: int = 0
    group: Group = field(default_factory=Group)
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    simulated: Simulated | None = None
    is_streamed: bool = True
    times: Timed = field(default_factory=Timed)
    request: Request | None = None  # the backend's request; used in its thread only
    delay: float = 0.0  # seconds between a token's step and its delivery to the client
    num_told: int = 0  # tokens counted; used in the backend's thread only
    has_token: bool = False  # set in the backend's thread
    has_ended: bool = False  # used in the loop only
