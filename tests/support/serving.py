"""A server in a thread of its own, on a port that the system chooses, and a client that knows HTTP and nothing else."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Plan, Request, plan
from kvplan.serve.app import Api, ServedModel
from kvplan.serve.backend import Backend
from kvplan.serve.chat import ChatTemplate
from kvplan.serve.fields import Door
from kvplan.serve.generation import Limits
from kvplan.serve.metrics import ServerMetrics, features_of
from kvplan.serve.run import listen, server
from kvplan.serve.start import cache_config
from kvplan.serve.text import stand_in
from kvplan.serve.twin import Clock, Twin
from kvplan.serve.worker import Hooks, Worker
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.steptime import step_time

MODEL = "llama-3.1-8b"
WAIT_S = 60.0


@cache
def planned(**changes: Any) -> Plan:
    """Llama 3.1 8B on an H100, 8,192 tokens a request."""
    args = EngineArgs(**{"max_model_len": 8192, **changes})
    return plan(Request(catalog.load(MODEL), gpu("h100-80g"), args, parse_engine("vllm@0.33")))


@cache
def tokenizer() -> Any:
    return stand_in(128_256)


def twin(
    the_plan: Plan | None = None, *, speed: float = 1e4, output_tokens: int = 24, clock: Clock | None = None,
    adapters: dict[str, str] | None = None,
) -> Twin:  # fmt: skip
    the_plan = the_plan or planned()
    return Twin(
        the_plan,
        step_time(the_plan, Shares(), None),
        tokenizer(),
        speed=speed,
        output_tokens=output_tokens,
        clock=clock,
        adapters=adapters,
    )


class Gate:
    """A clock whose every sleep lasts until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        self._opened.wait(WAIT_S)

    def open(self) -> None:
        self._opened.set()


class Serving:
    """A server that runs."""

    def __init__(self, api: Api, host: str, port: int) -> None:
        self.api, self.host, self.port = api, host, port
        self.url = f"http://{host}:{port}"

    @property
    def backend(self) -> Backend:
        return self.api.worker.backend

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=WAIT_S)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        """(status, body) of an answer; a body that is not bytes goes as JSON."""
        connection = self.connect()
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        return json.loads(self.ask("GET", path)[1])

    def post(self, path: str, **body: Any) -> Any:
        """The document of an answer that must be one."""
        status, data = self.ask("POST", path, body)
        assert status == 200, data
        return json.loads(data)

    def refusal(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """(status, error) of an answer that must be an error in OpenAI's shape."""
        status, data = self.ask("POST", path, body)
        error = json.loads(data)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == status
        return status, error

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end as OpenAI's do."""
        status, data = self.ask("POST", path, {**body, "stream": True})
        assert status == 200, data
        lines = data.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def metrics(self) -> str:
        return self.ask("GET", "/metrics")[1].decode()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = (line for line in self.metrics().splitlines() if line.startswith((name + "{", name + " ")))
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def api_of(
    backend: Backend, config: dict[str, str] | None = None, *, limits: Limits | None = None,
    template: ChatTemplate | None = None, strict: bool = False, hooks: Hooks | None = None, tiers: Any = None,
    page: Any = None, **changes: Any,
) -> Api:  # fmt: skip
    """The application over a backend, whose thread does not run yet."""
    changes.setdefault("door", Door(is_simulated=isinstance(backend, Twin), is_strict=strict))
    num_tokens = 128_256 if isinstance(backend, Twin) else 256
    served = ServedModel((MODEL,), num_tokens, "0", limits or Limits(4096), template or ChatTemplate(), **changes)
    metrics = page or ServerMetrics(
        MODEL,
        backend.max_model_len,
        cache_config(planned()) if config is None else config,
        *features_of(backend.scheduler),
        tiers,
    )
    hooks = hooks or (Hooks(backend.delay) if isinstance(backend, Twin) else Hooks())
    return Api(Worker(backend, metrics, hooks), served)


@contextmanager
def serving(
    backend: Backend, config: dict[str, str] | None = None, *, drain_s: int = 30, **changes: Any
) -> Iterator[Serving]:
    """A server over a backend, gone with its threads at the end."""
    api = api_of(backend, config, **changes)
    listener = listen("127.0.0.1", 0)
    running = server({listener.getsockname()[1]: api}, drain_s)
    thread = threading.Thread(target=lambda: asyncio.run(running.serve(sockets=[listener])), name="test-server")
    thread.start()
    try:
        while not running.started and thread.is_alive():
            thread.join(0.01)
        assert thread.is_alive(), "the server did not start"
        yield Serving(api, *listener.getsockname()[:2])
    finally:
        running.should_exit = True
        thread.join()
        listener.close()
