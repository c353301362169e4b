"""Job: one completion that a client waits for, with its parameters, progress and times."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.config import SamplingParams
from engine.detokenizer import Detokenizer
from engine.request import Request


@dataclass(slots=True)
class Timed:
    """Event times of a request on the monotonic clock; 0: not yet."""

    arrived: float = field(default_factory=time.monotonic)
    queued: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0


@dataclass(frozen=True, slots=True)
class Finish:
    """End of a completion: vLLM's finish reason, or an error's text.

    stop_reason  the stop string or the id of the stop token; None at the model's end token and any other end
    """

    reason: str
    error: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Output of a request: at most one token, its text, and the finish if it is the last piece.

    refused  the backend's error if it rejected the request
    prompt_logprobs  log-probabilities of the prompt's tokens, with the first piece, if requested
    """

    token_id: int | None = None
    text: str = ""
    logprobs: Any = None
    finish: Finish | None = None
    num_cached_tokens: int = 0
    refused: Exception | None = None
    prompt_logprobs: Sequence[Any] = ()


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

    answer      token ids of its output; None: a part of the fixed text
    is_pooled   it ends with its prompt, and no token is generated
    """

    answer: tuple[int, ...] | None = None
    is_pooled: bool = False


@dataclass(eq=False, slots=True)
class Job:
    """One requested completion: created in the event loop, run in the backend's thread.

    index  index among the completions of its HTTP request; tags its pieces in their common queue
    group  completions of the same prompt
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
    simulated: Simulated | None = None
    times: Timed = field(default_factory=Timed)
    request: Request | None = None  # the backend's request; used in its thread only
    delay: float = 0.0  # seconds between a token's step and its delivery to the client
    detokenizer: Detokenizer | None = None  # used in the thread that makes texts only
    num_told: int = 0  # tokens passed on; used in the backend's thread only
    has_token: bool = False  # used in the loop only
    has_ended: bool = False  # used in the loop only
