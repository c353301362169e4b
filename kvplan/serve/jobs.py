"""One answer that a client waits for: what it asks, what it got so far, and when."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from engine.config import SamplingParams
from engine.request import Request


@dataclass(slots=True)
class Timed:
    """When things happened to a request, on the monotonic clock; 0: not yet."""

    arrived: float = field(default_factory=time.monotonic)
    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended: by vLLM's reasons, or with an error's text."""

    reason: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What a request got in one step: a token at most, its text, and the end where it is that.

    refused  it never ran: what the backend had against it
    """

    token_id: int | None = None
    text: str = ""
    logprobs: Any = None
    finish: Finish | None = None
    num_cached_tokens: int = 0
    refused: Exception | None = None


@dataclass(slots=True)
class Group:
    """The answers to one prompt, as vLLM's metrics count them: at the end of the last."""

    n: int = 1
    most_tokens: int = 0
    num_ended: int = 0

    def ended(self, num_tokens: int) -> bool:
        """Count one that has ended; True for the last."""
        self.num_ended += 1
        self.most_tokens = max(self.most_tokens, num_tokens)
        return self.num_ended == self.n


@dataclass(eq=False, slots=True)
class Job:
    """One answer that is wanted: made in the event loop, run in the backend's thread.

    index  of the answer among those of its HTTP request; pieces go to their common queue with it
    group  those to the same prompt
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    pieces: "asyncio.Queue[tuple[int, Piece]]"
    index: int = 0
    group: Group = field(default_factory=Group)
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    times: Timed = field(default_factory=Timed)
    request: Request | None = None  # the backend's, in its thread only
    delay: float = 0.0  # seconds by which its client sees tokens later than the backend gives them
    num_told: int = 0  # tokens passed on, in its thread only
    has_token: bool = False  # in the loop only
    has_ended: bool = False  # in the loop only
