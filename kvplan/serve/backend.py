"""Backend interface of the server, implemented by the engine and its twin."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from engine.config import SamplingParams
from engine.request import Request, RequestOutput, TokenUpdate
from engine.scheduler import Scheduler
from kvplan.core.errors import EnvironmentProblem

if TYPE_CHECKING:
    from engine.masks import Grammars


class BackendLostError(EnvironmentProblem):
    """The backend cannot run another step: the server has to be started again."""


class Backend(Protocol):
    """An engine owned by one thread: `engine.Engine` or `kvplan.serve.twin.Twin`.

    tokenizer      a tokenizers.Tokenizer; None if prompts can only be token ids
    grammars       compiler of the constraints of outputs; None: no model runs
    scheduler      source of the queue and block figures in /metrics
    """

    @property
    def tokenizer(self) -> Any: ...

    @property
    def grammars(self) -> "Grammars | None": ...

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def has_unfinished(self) -> bool:
        """True if step() has work to do or an output to return."""

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
        """Queue a request; on_token is called for each of its tokens. Raise an error if it is rejected."""

    def abort(self, request_id: str) -> object:
        """End a request now and free its blocks; no effect if it has ended."""

    def step(self) -> list[RequestOutput]:
        """Run a batch; return the outputs of the requests that ended since the last call."""
