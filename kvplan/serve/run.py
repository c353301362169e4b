"""Runs the application on a socket until it is told to stop; what runs then is finished first."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvplan.core.errors import EnvironmentProblem
from kvplan.serve.app import Api

MAX_HEADER_BYTES: Final = 64 << 10
HEADER_S: Final = 10.0  # in which a connection must send its first request's headers
KEEP_ALIVE_S: Final = 5
BACKLOG: Final = 2048
MOST_CONNECTIONS: Final = 10_000


class Protocol(H11Protocol):
    """HTTP/1.1 that does not wait for ever for a connection's first request."""

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
    """uvicorn's, which tells the application that it is to end."""

    def __init__(self, config: uvicorn.Config, api: Api) -> None:
        super().__init__(config)
        self._api = api

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._api.is_draining = True
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0: one that the system chooses. EnvironmentProblem where it cannot."""
    where = f"--host {host} --port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise EnvironmentProblem(where, f"cannot be used ({error.strerror})", "name another host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise EnvironmentProblem(where, f"cannot be used ({error.strerror})", "choose another --port") from error
    return listener


def server(api: Api, drain_s: int) -> Server:
    """uvicorn's server of the application, with its limits."""
    config = uvicorn.Config(
        api.app(),
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=drain_s,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        limit_concurrency=MOST_CONNECTIONS,
    )
    return Server(config, api)


def serve(api: Api, listener: socket.socket, drain_s: int, on_ready: Callable[[], None]) -> None:
    """Answer until SIGTERM or SIGINT; requests that run then have drain_s seconds to end."""
    running = server(api, drain_s)

    async def main() -> None:
        task = asyncio.create_task(running.serve(sockets=[listener]))
        while not running.started and not task.done():
            await asyncio.sleep(0.01)
        if running.started:
            on_ready()
        await task

    asyncio.run(main())
