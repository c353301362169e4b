"""HTTP API: routes, request size and time limits, complete or streamed responses, errors in OpenAI's format."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvplan.serve.answers import DONE, ChatShape, Choice, CompletionShape, Echo, Shape, Texts, event, usage
from kvplan.serve.cancellation import SHUTTING_DOWN, Cancellation
from kvplan.serve.chat import ChatTemplate, messages_of
from kvplan.serve.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, ApiError, parsed, read
from kvplan.serve.generation import Generation, Limits, checked_lengths, encode, prompts_of, started, texts_of
from kvplan.serve.openapi import openapi
from kvplan.serve.worker import Worker

BODY_S: Final = 30.0  # timeout for receiving a request body
MAX_BODY_BYTES: Final = 16 << 20
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Served:
    """Served model and server settings.

    names     model names; responses and metrics use the first
    num_tokens  vocabulary size of the model
    version   version of kvplan
    adapters  adapter name -> path; clients use the name in place of the model's
    api_keys  keys accepted under /v1; if empty, no key is required
    """

    names: tuple[str, ...]
    num_tokens: int
    version: str
    limits: Limits
    template: ChatTemplate
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    request_timeout_s: float | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)


class Api:
    """HTTP handlers over one worker."""

    def __init__(self, worker: Worker, served: Served) -> None:
        self.worker, self.served = worker, served
        worker.end_token = served.template.end_token(worker.backend.tokenizer)
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
                await asyncio.to_thread(self.worker.close)

        posts: dict[str, Handler] = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        gets: dict[str, Handler] = {
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/health": self.health,
            "/ping": self.health,
            "/version": self.version,
            "/metrics": self.metrics,
            "/openapi.json": self.openapi,
        }
        routes = [Route(path, self._guarded(handler), methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(path, self._guarded(handler), methods=["GET"]) for path, handler in gets.items()]
        handlers: Mapping[Any, Any] = {HTTPException: _http_error}
        middleware = [Middleware(Cancellation, _error(SHUTTING_DOWN))]
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=middleware)

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except ApiError as error:
                return _error(error)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                self.worker.metrics.failed(error)
                return _error(
                    ApiError(f"internal error ({type(error).__name__})", status=500, kind="InternalServerError")
                )

        return guarded

    def _check_key(self, request: Request) -> None:
        keys = self.served.api_keys
        if not keys or not request.url.path.startswith("/v1/"):
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip().encode("utf-8", "replace")
        if scheme.lower() != "bearer" or not any([hmac.compare_digest(given, key.encode()) for key in keys]):  # noqa: C419 -- constant time: compare every key
            raise ApiError("Incorrect API key provided", status=401, kind="AuthenticationError")

    async def _body(self, request: Request) -> dict[str, Any]:
        max_bytes = self.served.max_body_bytes
        too_large = ApiError(
            f"the body has more than {max_bytes:,} bytes", status=413, kind="RequestEntityTooLargeError"
        )
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > max_bytes:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    data += part
                    if len(data) > max_bytes:
                        raise too_large
        except TimeoutError as error:
            raise ApiError(f"no whole body within {BODY_S:g} s", status=408, kind="RequestTimeoutError") from error
        return parsed(bytes(data))

    def _check_model(self, name: str | None) -> str:
        names = self.served.names
        if name is not None and name not in names and name not in self.served.adapters:
            raise ApiError(f"The model `{name[:200]}` does not exist.", status=404, kind="NotFoundError", param="model")
        return name or names[0]

    # --- generation ---------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        values = read(await self._body(request), COMPLETION)
        model = self._check_model(values["model"])
        special = True if values["add_special_tokens"] is None else values["add_special_tokens"]
        prompts = prompts_of(values["prompt"], self.worker.backend.tokenizer, special=special)
        max_tokens, tokenizer = values["max_tokens"], self.worker.backend.tokenizer
        echo = None
        if values["echo"]:
            texts = texts_of(values["prompt"], prompts, tokenizer)
            echo = Echo(list(zip(texts, prompts, strict=True)), values["n"], is_alone=max_tokens == 0)
        elif not max_tokens:
            raise ApiError("max_tokens must be at least 1, or 0 with echo", param="max_tokens")
        shape = CompletionShape(Texts(tokenizer), values["logprobs"] is not None, echo)
        return await self._answer(request, shape, model, values, prompts, max(1, max_tokens), values["logprobs"])

    async def chat(self, request: Request) -> Response:
        values = read(await self._body(request), CHAT)
        model = self._check_model(values["model"])
        prompt = self._chat_prompt(values, values["messages"])
        if values["top_logprobs"] and not values["logprobs"]:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        num_top = values["top_logprobs"] if values["logprobs"] else None
        shape = ChatShape(Texts(self.worker.backend.tokenizer), num_top)
        max_tokens = values["max_completion_tokens"]
        if max_tokens is None:
            max_tokens = values["max_tokens"]
        return await self._answer(request, shape, model, values, [prompt], max_tokens, num_top)

    def _chat_prompt(self, values: dict[str, Any], messages: Any) -> list[int]:
        options = {"add_generation_prompt": values["add_generation_prompt"], **(values["chat_template_kwargs"] or {})}
        text = self.served.template.prompt(messages_of(messages), options)
        return encode(self.worker.backend.tokenizer, text, special=bool(values["add_special_tokens"]), param="messages")

    async def _answer(
        self, request: Request, shape: Shape, model: str, values: dict[str, Any], prompts: list[list[int]],
        max_tokens: int | None, logprobs: int | None,
    ) -> Response:  # fmt: skip
        if self.is_draining:
            raise SHUTTING_DOWN
        if values["stop"] and self.worker.backend.tokenizer is None:
            raise ApiError("stop: the model has no tokenizer; use stop_token_ids", param="stop")
        param = "messages" if "messages" in values else "prompt"
        answers = checked_lengths(prompts, max_tokens, self.worker.backend.max_model_len, param)
        with_usage, each_usage = _stream_options(values)
        adapter = model if model in self.served.adapters else None
        generation = started(self.worker, self.served.limits, prompts, values, answers, logprobs, shape.prefix, adapter)
        name = generation.jobs[0].request_id.rpartition("-")[0]
        head = {"id": name, **shape.head(model, stream=bool(values["stream"]))}
        if values["stream"]:
            lines = self._stream(request, generation, shape, head, with_usage=with_usage, each_usage=each_usage)
            first = await anext(lines)  # a rejected request raises here and gets an error status
            return StreamingResponse(_chained(first, lines), media_type="text/event-stream")
        choices = [Choice(job.index) for job in generation.jobs]
        async with _watched(request, generation, self.served.request_timeout_s):
            async for index, piece in generation.pieces():
                choices[index].take(piece)
        if any(choice.reason is None for choice in choices):
            raise ClientDisconnect
        return JSONResponse({**shape.whole(head, choices), "usage": usage(generation.jobs, choices)})

    async def _stream(
        self, request: Request, generation: Generation, shape: Shape, head: dict[str, Any], *, with_usage: bool,
        each_usage: bool,
    ) -> AsyncIterator[bytes]:  # fmt: skip
        """Yield a stream's events, the first one with the first piece, so that a rejected request can raise before."""
        choices = [Choice(job.index) for job in generation.jobs]
        opened: set[int] = set()
        try:
            async with _watched(request, generation, self.served.request_timeout_s):
                async for index, piece in generation.pieces():
                    choice, lines = choices[index], []
                    opening = None if index in opened else shape.opening(index)
                    opened.add(index)
                    choice.take(piece)
                    for part in (opening, shape.chunk(choice, piece)):
                        if part is not None:
                            chunk = {**head, "choices": [part]}
                            if each_usage:
                                chunk["usage"] = usage(generation.jobs, choices)
                            elif with_usage:
                                chunk["usage"] = None
                            lines.append(event(chunk))
                    yield b"".join(lines)
            if with_usage:
                yield event({**head, "choices": [], "usage": usage(generation.jobs, choices)})
        except ApiError as error:
            if not opened:
                raise
            yield event(error.body())
        yield DONE

    # --- the rest -----------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        values = read(await self._body(request), TOKENIZE)
        self._check_model(values["model"])
        if (values["prompt"] is None) == (values["messages"] is None):
            raise ApiError("tokenize needs either prompt or messages", param="prompt")
        tokenizer = self.worker.backend.tokenizer
        if values["messages"] is not None:
            tokens = self._chat_prompt(values, values["messages"])
        else:
            special = values["add_special_tokens"]
            tokens = encode(tokenizer, values["prompt"], special=special is None or special)
        strings = [tokenizer.id_to_token(token) for token in tokens] if values["return_token_strs"] else None
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": self.worker.backend.max_model_len,
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        values = read(await self._body(request), DETOKENIZE)
        self._check_model(values["model"])
        tokenizer = self.worker.backend.tokenizer
        if tokenizer is None:
            raise ApiError("detokenize: the model has no tokenizer", param="tokens")
        if any(not 0 <= token < self.served.num_tokens for token in values["tokens"]):
            raise ApiError("tokens must be token ids of the model", param="tokens")
        return JSONResponse({"prompt": tokenizer.decode(values["tokens"], skip_special_tokens=False)})

    async def models(self, request: Request) -> Response:
        names = (*self.served.names, *self.served.adapters)
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._model(self._check_model(request.path_params["name"])))

    def _model(self, name: str) -> dict[str, Any]:
        path = self.served.adapters.get(name)  # an adapter's card matches vLLM's
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvplan",
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


def _stream_options(values: dict[str, Any]) -> tuple[bool, bool]:
    """Return (whether usage comes at the end, whether it comes in every chunk)."""
    options = values["stream_options"] or {}
    if options and not values["stream"]:
        raise ApiError("stream_options needs stream to be true", param="stream_options")
    for name, value in options.items():
        if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
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
