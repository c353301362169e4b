"""Tensor parallelism: rank 0 serves, and tells the others what it does with its engine, so that all do it alike."""

import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from engine import Engine
from engine.config import SamplingParams
from engine.request import Request, RequestOutput, TokenUpdate
from engine.scheduler import Scheduler


class Leader:
    """Rank 0's engine as a backend; every call is one of all ranks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def tokenizer(self) -> Any:
        return self._engine.tokenizer

    @property
    def scheduler(self) -> Scheduler:
        return self._engine.scheduler

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

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
        """Let the others know that rank 0 is there: they give it up after a while."""
        self._tell("wait")

    def close(self) -> None:
        self._tell("end")

    def _tell(self, command: str, request_id: str = "") -> None:
        self._engine.tp.from_first((command, request_id))


def follow(engine: Engine) -> None:
    """Do what rank 0 does until it ends; signals are rank 0's to act on."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        command, request_id = engine.tp.from_first(("", ""))
        with suppress(Exception):  # what one rank refuses, or fails at, all do; rank 0 tells the client
            match command:
                case "submit":
                    engine.submit([])  # rank 0's prompt comes in its place
                case "abort":
                    engine.abort(request_id)
                case "step":
                    engine.step()
        if command == "end":
            return
