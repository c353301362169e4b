"""Responses to requests that are canceled when the server stops before they have finished."""

import asyncio
from contextlib import suppress
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvplan.serve.answers import DONE, event
from kvplan.serve.fields import ApiError

Canceled = asyncio.CancelledError
SHUTTING_DOWN: Final = ApiError("the server is shutting down", status=503, kind="ServiceUnavailableError")


class Cancellation:
    """ASGI middleware that ends a canceled request with status 503, or a stream with an error event."""

    def __init__(self, app: ASGIApp, refusal: ASGIApp) -> None:
        self._app, self._refusal = app, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: Message | None = None

        async def noted(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Canceled:
            with suppress(Canceled):  # the second time: the client does not read
                if start is None:
                    await self._refusal(scope, receive, send)
                elif _is_stream(start):
                    await send({"type": "http.response.body", "body": event(SHUTTING_DOWN.body()) + DONE})


def _is_stream(start: Message) -> bool:
    return any(value.startswith(b"text/event-stream") for name, value in start["headers"] if name == b"content-type")
