"""Serving of the application on a socket, with graceful shutdown."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvplan.core.errors import EnvironmentProblem
from kvplan.serve.app import Api

MAX_HEADER_BYTES: Final = 64 << 10
HEADER_S: Final = 10.0  # timeout for the headers of a connection's first request
KEEP_ALIVE_S: Final = 5
BACKLOG: Final = 2048
MOST_CONNECTIONS: Final = 10_000
CLOSING_S: Final = 0.1  # from the beginning of the end to waiting, in uvicorn
FORCED_S: Final = 1.0  # from a second signal to the end, for clients to get their errors
MOST_ENDING_S: Final = 3  # the end of the drain time, in which clients get their errors


class Connection(h11.Connection):
    """HTTP/1.1 connection that frames the chunks of a stream itself, of which there is one per token."""

    _is_chunked = False

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        if self._is_chunked and type(event) is h11.Data:
            return [b"%x\r\n%b\r\n" % (len(event.data), event.data)] if event.data else []
        parts = super().send_with_data_passthrough(event)
        if type(event) is h11.Response:
            self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in b"".join(parts or ()).lower()
        return parts


class Protocol(H11Protocol):
    """HTTP/1.1 protocol with a timeout for a connection's first request."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = Connection(h11.SERVER, MAX_HEADER_BYTES)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._patience = self.loop.call_later(HEADER_S, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None and self.transport is not None and not self.transport.is_closing():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._patience.cancel()
        super().connection_lost(exc)


class Server(uvicorn.Server):
    """uvicorn server that marks the API as draining on an exit signal, and ends at once on a second one.

    on_signal  called with the first signal's number; on_forced: with a second one's
    """

    def __init__(self, config: uvicorn.Config, apis: Sequence[Api]) -> None:
        super().__init__(config)
        self._apis = apis
        self._signal_s: float | None = None
        self.on_signal: Callable[[int], None] = ignore
        self.on_forced: Callable[[int], None] = ignore

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:  # uvicorn takes a second SIGINT alone
            self.force_exit = True
            self.on_forced(sig)
        else:
            self._signal_s = time.monotonic()
            self.on_signal(sig)
        for api in self._apis:
            api.is_draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        limit = self.config.timeout_graceful_shutdown
        if self._signal_s is not None and limit is not None:  # an event loop with many clients comes to it late
            passed_s = time.monotonic() - self._signal_s + CLOSING_S
            self.config.timeout_graceful_shutdown = max(0, limit - passed_s)  # type: ignore[assignment]
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves the requests and the lifespan to the event loop's end
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()


def ignore(signal_number: int) -> None: ...


def end_within(seconds: float) -> Callable[[int], None]:
    """Return what ends the process in so many seconds after a signal, whatever it is doing by then: a step, a copy, a
    file, or an event loop with too many clients.
    """

    def on_signal(signal_number: int) -> None:
        timer = threading.Timer(seconds, os._exit, (128 + signal_number,))
        timer.daemon = True
        timer.start()

    return on_signal


def time_to_finish(drain_s: int) -> int:
    """Return the part of the drain time in which requests may finish: a tenth of it, rounded up, is for errors."""
    return drain_s - min(MOST_ENDING_S, -(-drain_s // 10))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket (port 0: chosen by the system); raise EnvironmentProblem if that fails."""
    listener = bind(host, port)
    begin(listener)
    return listener


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that does not listen yet: clients are refused; raise EnvironmentProblem if that fails."""
    where = f"--host {host} --port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise EnvironmentProblem(where, f"cannot be used ({error.strerror})", "name another host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise EnvironmentProblem(where, f"cannot be used ({error.strerror})", "choose another --port") from error
    return listener


def begin(listener: socket.socket) -> None:
    """Listen; raise EnvironmentProblem if another process has begun to, on the same port."""
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        where = f"--host {host} --port {port}"
        raise EnvironmentProblem(where, f"cannot be used ({error.strerror})", "choose another --port") from error


class ByPort:
    """ASGI application of several servers in one process: a request goes to the one whose port it came to."""

    def __init__(self, apps: Mapping[int, Starlette]) -> None:
        self._apps = apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._apps[scope["server"][1]](scope, receive, send)
            return
        async with AsyncExitStack() as stack:
            await receive()
            for app in self._apps.values():
                await stack.enter_async_context(app.router.lifespan_context(app))
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


def server(apis: Mapping[int, Api], drain_s: int) -> Server:
    """Return the uvicorn server of the applications, by port, with its limits."""
    apps = {port: api.app() for port, api in apis.items()}
    config = uvicorn.Config(
        next(iter(apps.values())) if len(apps) == 1 else ByPort(apps),
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=time_to_finish(drain_s),
        limit_concurrency=MOST_CONNECTIONS,
    )
    return Server(config, list(apis.values()))


def serve(apis: Sequence[Api], listeners: Sequence[socket.socket], drain_s: int, on_ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; the process then ends within drain_s seconds, or FORCED_S after a second signal.

    If the backend is lost, fail what is unfinished and raise its error.
    """
    ports = [listener.getsockname()[1] for listener in listeners]
    running = server(dict(zip(ports, apis, strict=True)), drain_s)
    running.on_signal = end_within(max(FORCED_S, drain_s - min(1.0, drain_s / 20)))  # a busy machine's timers are late
    running.on_forced = end_within(FORCED_S)

    def leave() -> None:
        running.should_exit = True
        for api in apis:
            api.is_draining = True

    for api in apis:
        api.worker.on_lost = leave

    async def main() -> None:
        task = asyncio.create_task(running.serve(sockets=list(listeners)))
        while not running.started and not task.done():
            await asyncio.sleep(0.01)
        if running.started:
            on_ready()
        await task

    asyncio.run(main())
    for api in apis:
        if api.worker.lost is not None:
            raise api.worker.lost
