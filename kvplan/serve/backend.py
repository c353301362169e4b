"""What a server needs of whatever answers its requests: the engine and its twin both have these names."""

from collections.abc import Callable
from typing import Any, Protocol

from engine.config import SamplingParams
from engine.request import Request, RequestOutput, TokenUpdate
from engine.scheduler import Scheduler


class Backend(Protocol):
    """An engine that one thread owns: `engine.Engine` is one, `kvplan.serve.twin.Twin` another.

    tokenizer      a tokenizers.Tokenizer; None where prompts can be token ids only
    scheduler      whose queues and blocks are what /metrics shows
    """

    @property
    def tokenizer(self) -> Any: ...

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def has_unfinished(self) -> bool:
        """Whether step() has anything to do, or an output to give."""

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        on_token: Callable[[TokenUpdate], None] | None = None,
    ) -> Request:
        """Queue a request; on_token is called for each of its tokens. Raises what refuses it."""

    def abort(self, request_id: str) -> object:
        """End a request now and take its blocks; no effect on one that has ended."""

    def step(self) -> list[RequestOutput]:
        """Run a batch; the outputs of the requests that ended since the last call."""
