"""HTTP API: routes, request size and time limits, complete or streamed responses, errors in OpenAI's format."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any, Final, cast

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvplan.serve.admin import Admin
from kvplan.serve.answers import DONE, Choice, Chunks, StreamShape, event, matched_stop, usage
from kvplan.serve.bodies import SMALL
from kvplan.serve.cancellation import SHUTTING_DOWN, Cancellation
from kvplan.serve.fields import ApiError
from kvplan.serve.generation import Generation, started
from kvplan.serve.intake import Intake, Made, Prepared
from kvplan.serve.intake import ServedModel as ServedModel  # with which an Api is made
from kvplan.serve.native import Native, NativeShape
from kvplan.serve.openapi import openapi
from kvplan.serve.responses import ResponseShape
from kvplan.serve.worker import Worker

BODY_S: Final = 30.0  # timeout for receiving a request body
Handler = Callable[[Request], Awaitable[Response]]


class EventStream(StreamingResponse):
    """A stream whose generator itself watches for the client's disconnection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


class Api:
    """HTTP handlers over one worker."""

    def __init__(self, worker: Worker, served: ServedModel) -> None:
        self.worker, self.served = worker, served
        worker.end_token = served.template.end_token(worker.backend.tokenizer)
        backend = worker.backend
        self._intake = Intake(served, backend.tokenizer, backend.max_model_len, backend.grammars)
        self._admin = Admin(worker, served, self._small_body)
        self.is_draining = False
        self._created = int(time.time())
        self._spec = openapi(served.names[0], served.version, served.num_tokens)

    def app(self) -> Starlette:
        """Return the ASGI application, whose lifespan starts and stops the worker's thread."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.worker.start()
            try:
                yield
            finally:
                self._intake.close()
                await asyncio.to_thread(self.worker.close)

        face = self.served.face
        posts: dict[str, Handler] = {
            **{path: self._asked(read_body) for path, read_body in self._readers().items()},
            **(self._admin.posts() if face is None else {"/faults": self._admin.change_faults}),
            "/tokenize": self._reader(self._intake.tokenize),
            "/detokenize": self._reader(self._intake.detokenize),
        }
        gets: dict[str, Handler] = {
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/health": self.health,
            "/ping": self.health,
            "/version": self.version,
            "/metrics": self.metrics,
            "/openapi.json": self.openapi,
            **(self._admin.gets() if face is None else {"/faults": self._admin.faults}),
        }
        methods = {"POST": posts, "GET": gets}
        if face is not None:
            del gets["/openapi.json"]
            for method, handlers in self._native(face).routes().items():
                methods[method] |= handlers
        routes = [
            Route(path, self._guarded(handler), methods=[method])
            for method, handlers in methods.items()
            for path, handler in handlers.items()
        ]
        refusals: Mapping[Any, Any] = {HTTPException: _http_error}
        middleware = [Middleware(Cancellation, _error(SHUTTING_DOWN))]
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers=refusals, middleware=middleware)

    def _native(self, face: ModuleType) -> Native:
        served = self.served
        return Native(
            face, self.worker, served.names[0], served.info.get("release", ""),
            {name: value for name, value in served.info.items() if name != "release"},
            lambda: self.worker.is_well and not self.is_draining, self._small_body,
        )  # fmt: skip

    def _readers(self) -> dict[str, Callable[[bytes], Prepared]]:
        """Return the readers of requests that run in the backend, by path."""
        intake = self._intake
        if self.served.face is not None:
            return {
                "/v1/completions": intake.completion,
                "/v1/chat/completions": intake.chat,
                "/generate": intake.native,
            }
        if self.served.vector_size is None:
            return {
                "/v1/completions": intake.completion,
                "/v1/chat/completions": intake.chat,
                "/v1/responses": intake.response,
            }
        scores = dict.fromkeys(("/score", "/v1/score"), intake.score)
        return {"/v1/embeddings": intake.embeddings, "/pooling": intake.pooling, **scores}

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except ApiError as error:
                return self._error(error, request)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                self.worker.metrics.failed(error)
                problem = ApiError(f"internal error ({type(error).__name__})", status=500, kind="InternalServerError")
                return self._error(problem, request)

        return guarded

    def _check_key(self, request: Request) -> None:
        keys = self.served.api_keys
        if not keys or not self._is_keyed(request):
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key_given = token.strip().encode("utf-8", "replace")
        if scheme.lower() != "bearer" or not any([hmac.compare_digest(key_given, key.encode()) for key in keys]):  # noqa: C419 -- constant time: compare every key
            raise ApiError("Incorrect API key provided", status=401, kind="AuthenticationError")

    def _is_keyed(self, request: Request) -> bool:
        """True for a path that needs the key, by the path that was routed: a URL also depends on the client's Host
        header. Those under /v1, or all but a face's open ones.
        """
        path: str = request.scope["path"]
        return path.startswith("/v1/") if self.served.face is None else not path.startswith(self.served.face.OPEN)

    def _error(self, error: ApiError, request: Request) -> Response:
        """Return an error response in the format of its path."""
        face = self.served.face
        if face is None:
            return _error(error)
        is_native = not request.scope["path"].startswith("/v1/")
        facts = (error.message, error.kind, error.param, error.status)
        body = face.native_error(error.message) if is_native else face.openai_error(*facts)
        return JSONResponse(body, status_code=error.status)

    async def _body(self, request: Request, turn: AsyncExitStack) -> bytes:
        """Receive a body. A large one waits for its turn first, which it keeps until the stack is closed."""
        max_bytes = self.served.max_body_bytes
        too_large = ApiError(
            f"the body has more than {max_bytes:,} bytes", status=413, kind="RequestEntityTooLargeError"
        )
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > max_bytes:
            raise too_large
        data, has_turn = bytearray(), False
        try:
            async with asyncio.timeout(BODY_S) as limit:
                async for part in request.stream():
                    data += part
                    if len(data) > max_bytes:
                        raise too_large
                    if len(data) > SMALL and not has_turn:
                        limit.reschedule(None)
                        await turn.enter_async_context(self._intake.turns[self._is_keyed(request)])
                        limit.reschedule(asyncio.get_running_loop().time() + BODY_S)
                        has_turn = True
        except TimeoutError as error:
            raise ApiError(f"no whole body within {BODY_S:g} s", status=408, kind="RequestTimeoutError") from error
        return bytes(data)

    async def _small_body(self, request: Request) -> bytes:
        async with AsyncExitStack() as turn:
            return await self._body(request, turn)

    async def _read(self, request: Request, read_body: Callable[[bytes], Made]) -> Made:
        async with AsyncExitStack() as turn:
            data = await self._body(request, turn)
            return await self._intake.run(read_body, data, is_keyed=self._is_keyed(request))

    def _reader(self, read_body: Callable[[bytes], Response]) -> Handler:
        async def answered(request: Request) -> Response:
            return await self._read(request, read_body)

        return answered

    # --- generation ---------------------------------------------------------------------------------------------

    def _asked(self, read_body: Callable[[bytes], Prepared]) -> Handler:
        async def answered(request: Request) -> Response:
            return await self._answer(request, await self._read(request, read_body))

        return answered

    async def _answer(self, request: Request, prepared: Prepared) -> Response:
        if self.is_draining:
            raise SHUTTING_DOWN
        self.served.faults.strike()
        model, values, shape = prepared.model, prepared.values, prepared.shape
        with_usage, each_usage = _stream_options(values, is_strict=self.served.door.is_strict)
        adapter = model if model in self.served.adapters else None
        generation = started(self.worker, self.served.limits, prepared, adapter)
        if self.served.face is not None and not shape.prefix:
            return await self._answer_natively(request, generation, prepared)
        name = generation.jobs[0].request_id.rpartition("-")[0]
        if self.served.face is not None:
            name = name.rpartition("-")[2]
        head = {"id": name, **shape.head(model, stream=bool(values["stream"]))}
        if values["stream"]:
            if isinstance(shape, ResponseShape):
                lines = self._events(request, generation, shape, head)
            else:
                shape = cast("StreamShape", shape)
                lines = self._stream(request, generation, shape, head, with_usage=with_usage, each_usage=each_usage)
            first = await anext(lines)  # a rejected request raises here and gets an error status
            return EventStream(_chained(first, lines), media_type="text/event-stream")
        choices = [Choice(job.index) for job in generation.jobs]
        async with _watched(request, generation, self.served.request_timeout_s):
            async for several in generation.pieces():
                for index, piece in several:
                    choices[index].take(piece)
        if any(choice.reason is None for choice in choices):
            raise ClientDisconnect
        moved = {} if choices[0].transfer is None else {"kv_transfer_params": choices[0].transfer}
        document = {"usage": usage(generation.jobs, choices), **shape.whole(head, choices), **moved}
        return JSONResponse(self._faced(document, choices))

    def _faced(self, document: dict[str, Any], choices: list[Choice], *, is_chunk: bool = False) -> dict[str, Any]:
        """Return a document of OpenAI's as the server writes it."""
        face = self.served.face
        if face is None:
            return document
        rows = []
        for row in document["choices"]:
            choice = choices[row["index"]]
            rows.append(face.choice(row, matched_stop(choice) if row["finish_reason"] is not None else None))
        changed: dict[str, Any] = face.document({**document, "choices": rows}, is_chunk=is_chunk)
        return changed

    async def _answer_natively(self, request: Request, generation: Generation, prepared: Prepared) -> Response:
        assert self.served.face is not None
        native, shape = self._native(self.served.face), cast("NativeShape", prepared.shape)
        if not prepared.values["stream"]:
            async with _watched(request, generation, self.served.request_timeout_s):
                response = await native.whole(generation, shape)
            if response is None:
                raise ClientDisconnect
            return response

        async def lines() -> AsyncIterator[bytes]:
            has_begun = False
            try:
                async with _watched(request, generation, self.served.request_timeout_s):
                    async for line in native.stream(generation, shape):
                        has_begun = True
                        yield line
            except ApiError as error:
                if not has_begun:
                    raise
                yield event(native.face.native_error(error.message))
            yield DONE

        events = lines()
        return EventStream(_chained(await anext(events), events), media_type="text/event-stream")

    async def _events(
        self, request: Request, generation: Generation, shape: ResponseShape, head: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        has_begun = False
        try:
            async with _watched(request, generation, self.served.request_timeout_s):
                async for lines in shape.stream(generation, head):
                    has_begun = True
                    yield lines
        except ApiError as error:
            if not has_begun:
                raise
            yield event({"type": "error", **error.body()["error"]})

    async def _stream(
        self, request: Request, generation: Generation, shape: StreamShape, head: dict[str, Any], *, with_usage: bool,
        each_usage: bool,
    ) -> AsyncIterator[bytes]:  # fmt: skip
        """Yield a stream's events, the first one with the first piece, so that a rejected request can raise before."""
        faced = partial(self._faced, is_chunk=True)
        chunks = Chunks(shape, head, generation.jobs, faced, with_usage=with_usage, each_usage=each_usage)
        has_begun = False
        try:
            async with _watched(request, generation, self.served.request_timeout_s):
                async for several in generation.pieces():
                    has_begun = True
                    yield b"".join([chunks.lines(index, piece) for index, piece in several])
            if with_usage:
                yield event(self._faced({**head, "choices": [], "usage": chunks.usage()}, [], is_chunk=True))
        except ApiError as error:
            if not has_begun:
                raise
            yield event(error.body())
        yield DONE

    # --- the rest -----------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        names = (*self.served.names, *self.served.adapters)
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name, face = request.path_params["name"], self.served.face
        if face is not None and name not in (*self.served.names, *self.served.adapters):
            return JSONResponse(face.unknown_model(name[:200]), status_code=404)
        return JSONResponse(self._model(self._intake.model(name)))

    def _model(self, name: str) -> dict[str, Any]:
        path = self.served.adapters.get(name)  # an adapter's card matches vLLM's
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvplan" if self.served.face is None else self.served.face.OWNER,
            "root": path or self.served.names[0],
            "parent": self.served.names[0] if path else None,
            "max_model_len": None if path else self.worker.backend.max_model_len,
        }

    async def health(self, request: Request) -> Response:
        is_well = self.worker.is_well and not self.is_draining
        return Response(status_code=200 if is_well else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self.served.version})

    async def metrics(self, request: Request) -> Response:
        return Response(self.worker.metrics.page(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._spec)


def _stream_options(values: dict[str, Any], *, is_strict: bool) -> tuple[bool, bool]:
    """Return (whether usage comes at the end, whether it comes in every chunk)."""
    options = values["stream_options"] or {}
    if options and not values["stream"]:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    for name, value in options.items():
        if is_strict and name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise ApiError(f"stream_options.{name[:60]}: unknown field", param="stream_options")
        if not isinstance(value, bool | None):
            raise ApiError(f"stream_options.{name[:60]} must be true or false", param="stream_options")
    with_usage = bool(options.get("include_usage"))
    return with_usage, with_usage and bool(options.get("continuous_usage_stats"))


@asynccontextmanager
async def _watched(request: Request, generation: Generation, timeout_s: float | None) -> AsyncIterator[None]:
    """Abort the request when its client disconnects, it times out, or the block exits."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        generation.abandon()

    watcher = asyncio.create_task(watch())
    alarm = None if timeout_s is None else asyncio.get_running_loop().call_later(timeout_s, generation.expire)
    try:
        yield
    finally:
        generation.close()
        if alarm is not None:
            alarm.cancel()
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


async def _chained(first: bytes, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for line in lines:
            yield line
    finally:
        await lines.aclose()  # type: ignore[attr-defined] # an async generator


def _error(error: ApiError) -> Response:
    headers = {"retry-after": "1"} if error.status == 503 else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    kind = "NotFoundError" if error.status_code == 404 else "BadRequestError"
    problem = ApiError(str(error.detail), status=error.status_code, kind=kind)
    return JSONResponse(problem.body(), status_code=error.status_code, headers=error.headers)
