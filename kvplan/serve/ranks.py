"""Tensor parallelism: rank 0 serves and broadcasts its engine calls, so that all ranks make the same calls."""

import signal
from collections.abc import Callable
from contextlib import suppress

from engine import Engine
from engine.config import SamplingParams
from engine.request import Request, RequestOutput, TokenUpdate
from kvplan.serve.backend import BackendLostError


class Leader:
    """Rank 0's engine as a backend; every call is broadcast to all ranks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.tokenizer, self.grammars = engine.tokenizer, engine.grammars
        self.scheduler, self.max_model_len = engine.scheduler, engine.max_model_len

    @property
    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished

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
        self._tell("submit")
        return self._engine.submit(
            prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt, adapter=adapter,
            on_token=on_token,
        )  # fmt: skip

    def abort(self, request_id: str) -> object:
        self._tell("abort", request_id)
        return self._engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        self._tell("step")
        return self._engine.step()

    def idle(self) -> None:
        """Send a heartbeat to the other ranks, which otherwise time out."""
        self._tell("wait")

    def close(self) -> None:
        self._tell("end")

    def _tell(self, command: str, request_id: str = "") -> None:
        call_of_rank_0(self._engine, (command, request_id))


def call_of_rank_0(engine: Engine, call: tuple[str, str] = ("", "")) -> tuple[str, str]:
    """Return rank 0's call on every rank; raise BackendLostError if a rank has gone."""
    try:
        return engine.tp.from_first(call)
    except RuntimeError as error:  # of gloo and of NCCL alike
        raise BackendLostError("serve", "another rank has gone; its log says why", "start all ranks again") from error


def follow(engine: Engine) -> None:
    """Repeat rank 0's engine calls until it ends; signals are left to rank 0."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        command, request_id = call_of_rank_0(engine)
        with suppress(Exception):  # all ranks fail alike; rank 0 reports the error to the client
            match command:
                case "submit":
                    engine.submit([])  # replaced by rank 0's prompt
                case "abort":
                    engine.abort(request_id)
                case "step":
                    engine.step()
        if command == "end":
            return
