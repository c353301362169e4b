"""A server's own paths beside OpenAI's, as its face says: generation from texts or ids, information, the cache."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvplan.serve.answers import Choice, event, matched_stop
from kvplan.serve.bodies import parsed
from kvplan.serve.fields import COMPLETION, ApiError, Door, Field, read
from kvplan.serve.generation import Generation, check_count, prompts_of
from kvplan.serve.jobs import Job
from kvplan.serve.worker import Worker

CONSTRAINED: Final = "structured_outputs"


@dataclass(slots=True)
class NativeShape:
    """Responses of a face's own generation; is_batch: they are a list."""

    face: ModuleType
    is_batch: bool
    prompt_start: int  # of the prompt's log-probabilities; -1: none
    num_top: int | None  # None: no log-probabilities
    text_of: Any  # of a token; None: without texts
    empty: Sequence[bool] = ()  # of each completion: its output is to be no token at all
    prefix: str = ""

    def head(self, model: str, *, stream: bool) -> dict[str, Any]:
        return {}

    def row(self, job: Job, choice: Choice, now: float) -> dict[str, Any]:
        """Return the response of a completion so far."""
        alone = job.request_id.rpartition("-")[0]
        if self.empty[job.index]:
            choice = replace(choice, text="", token_ids=[], logprobs=[], reason=choice.reason and "length")
        meta: dict[str, Any] = {
            "id": job.request_id if self.is_batch else alone,
            "prompt_tokens": len(job.prompt),
            "cached_tokens": choice.num_cached_tokens,
            "num_retractions": 0 if job.request is None else job.request.seq.num_preemptions,
        }
        if self.num_top is not None:
            meta |= self._logprobs(job, choice, self.num_top)
        if choice.reason is not None:
            meta["e2e_latency"] = now - job.times.arrived
        reason = self.face.finish_reason(choice.reason, matched_stop(choice), len(choice.token_ids))
        return cast("dict[str, Any]", self.face.generated(choice.text, choice.token_ids, meta, reason))

    def _logprobs(self, job: Job, choice: Choice, num_top: int) -> dict[str, Any]:
        start = len(job.prompt) if self.prompt_start < 0 else self.prompt_start
        before = [None, *choice.prompt_logprobs[1:]] if choice.prompt_logprobs else []
        sides = {
            "input": list(zip(job.prompt[start:], before[start:], strict=False)),
            "output": list(zip(choice.token_ids, choice.logprobs, strict=True)),
        }
        meta: dict[str, Any] = {}
        for side, pairs in sides.items():
            meta[f"{side}_token_logprobs"] = [self._row(token, row and row.chosen) for token, row in pairs]
        meta["output_token_logprobs_length"] = len(choice.token_ids)
        for side, pairs in sides.items() if num_top else ():
            rows = [row and [self._row(token, value) for token, value in row.top] for _, row in pairs]
            meta[f"{side}_top_logprobs"] = rows
        return meta

    def _row(self, token: int, value: float | None) -> list[Any]:
        return [value, token, None if self.text_of is None else self.text_of(token)]

    def whole(self, head: dict[str, Any], choices: Any) -> dict[str, Any]:
        raise NotImplementedError("its response may be a list: Native.answer")


def bodies_of(data: bytes, face: ModuleType, door: Door, context: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (fields of a native request, for each sampling_params the body of a completion with the same effect)."""
    fields = {name: Field(kind) for name, kind in face.FIELDS.items()}
    values = read(parsed(data, context), fields, door)
    stated = values["sampling_params"]
    several = stated if isinstance(stated, list) else [{} if stated is None else stated]
    if not several or not all(isinstance(params, dict) for params in several):
        raise ApiError("sampling_params must be an object, or a list of one for each prompt", param="sampling_params")
    return values, [body_of(params, face, door) for params in several]


def body_of(params: Mapping[str, Any], face: ModuleType, door: Door) -> dict[str, Any]:
    """Return sampling parameters as the body of a completion."""
    if (problem := face.sampling_problem(params)) is not None:
        raise ApiError(problem, param="sampling_params")
    body: dict[str, Any] = {"prompt": "", "max_tokens": face.MOST_NEW}
    for name, value in params.items():
        if name in face.SAMPLING:
            if value is not None or name == "max_new_tokens":
                body[face.SAMPLING[name]] = value
        elif name not in face.CONSTRAINTS:
            door.note(f"sampling_params.{name}", "accepted without effect")
        elif value is not None:
            body[CONSTRAINED] = {face.CONSTRAINTS[name]: value}
    return body


def prompts_and_batch(values: dict[str, Any], tokens: Any) -> tuple[list[list[int]], bool]:
    """Return the prompts of a native request, and whether there are several."""
    text, ids = values["text"], values["input_ids"]
    if (text is None) == (ids is None):
        raise ApiError("Either text, input_ids or input_embeds should be provided.")
    prompts = prompts_of(text if ids is None else ids, tokens, "text" if ids is None else "input_ids")
    is_batch = isinstance(text, list) or (isinstance(ids, list) and isinstance(ids[0], list))
    return prompts, is_batch


def of_prompt(value: Any, default: int, name: str) -> int:
    """Return a whole number that a request states for all its prompts."""
    value = value[0] if isinstance(value, list) and value else value
    if value is None or isinstance(value, bool):
        return default
    if not isinstance(value, int):
        raise ApiError(f"{name} must be a whole number", param=name)
    return value


def checked_values(body: dict[str, Any], face: ModuleType, door: Door) -> dict[str, Any]:
    """Return a completion's fields; max_tokens may be None. Errors have the names of the face's own fields."""
    is_open = body["max_tokens"] is None
    try:
        values = read({name: value for name, value in body.items() if value is not None}, COMPLETION, door)
    except ApiError as error:
        own = {ours: theirs for theirs, ours in face.SAMPLING.items()}.get(error.param or "", error.param)
        raise ApiError(error.message.replace(error.param or "", own or "", 1), param=own) from error
    return values | ({"max_tokens": None} if is_open else {})


def check_several(values: list[dict[str, Any]], num_prompts: int) -> None:
    """Refuse lists of sampling parameters whose differences a simulated server does not take apart."""
    if len(values) not in (1, num_prompts):
        raise ApiError("sampling_params must be one object, or one for each prompt", param="sampling_params")
    for name in ("n", "min_tokens", CONSTRAINED):
        if any(own[name] != values[0][name] for own in values):
            raise ApiError(f"{name} must be the same in all sampling_params", param="sampling_params")
    check_count(num_prompts, values[0]["n"])


@dataclass(slots=True)
class Native:
    """Handlers of a face's own paths.

    info     what /model_info says of the model
    is_well  whether requests are taken; body: receives a request's body
    """

    face: ModuleType
    worker: Worker
    name: str
    version: str
    info: Mapping[str, Any]
    is_well: Callable[[], bool]
    body: Callable[[Request], Awaitable[bytes]]

    def routes(self) -> dict[str, dict[str, Callable[[Request], Awaitable[Response]]]]:
        """Return the handlers by method and path; those of generation are the application's."""
        informing = dict.fromkeys(("/get_model_info", "/model_info"), self.model_info)
        informing |= dict.fromkeys(("/get_server_info", "/server_info"), self.server_info)
        healthy = dict.fromkeys(("/health", "/health_generate", "/ready", "/ping"), self.health)
        return {
            "GET": {**informing, **healthy, "/": self.root, "/flush_cache": self.flush},
            "POST": {"/flush_cache": self.flush, "/abort_request": self.abort},
        }

    async def model_info(self, request: Request) -> Response:
        return JSONResponse(self.face.model_info(self.name, **self.info))

    async def server_info(self, request: Request) -> Response:
        figures = self.worker.metrics.figures()  # type: ignore[attr-defined] # of FaceMetrics
        return JSONResponse(self.face.server_info(self.name, self.version, figures))

    async def health(self, request: Request) -> Response:
        """Answer once the backend's thread does."""
        if not self.is_well():
            return Response(status_code=503)
        await self.worker.call(lambda backend: None)
        return Response()

    async def flush(self, request: Request) -> Response:
        if await self.worker.call(lambda backend: backend.scheduler.flush()):
            return Response(self.face.FLUSHED)
        return Response(self.face.NOT_FLUSHED, status_code=400)

    async def abort(self, request: Request) -> Response:
        stated = parsed(await self.body(request))
        jobs = list(self.worker.jobs.values())
        rid = stated.get("rid")
        if not stated.get("abort_all"):
            jobs = [job for job in jobs if rid and job.request_id.startswith(str(rid))]
        self.worker.cancel(jobs)
        return Response()

    async def root(self, request: Request) -> Response:
        return JSONResponse(self.face.ROOT)

    async def stream(self, generation: Generation, shape: NativeShape) -> AsyncIterator[bytes]:
        """Yield a stream's events: each has the whole text so far."""
        choices = [Choice(job.index) for job in generation.jobs]
        async for several in generation.pieces():
            for index, piece in [(index, single) for index, whole in several for single in whole.singles()]:
                choices[index].take(piece)
                row = shape.row(generation.jobs[index], choices[index], self.worker.now())
                yield event(row | ({"index": index} if shape.is_batch else {}))

    async def whole(self, generation: Generation, shape: NativeShape) -> Response | None:
        """Return a whole response; None: the client has gone."""
        choices = [Choice(job.index) for job in generation.jobs]
        async for several in generation.pieces():
            for index, piece in several:
                choices[index].take(piece)
        if any(choice.reason is None for choice in choices):
            return None
        pairs = zip(generation.jobs, choices, strict=True)
        rows = [shape.row(job, choice, self.worker.now()) for job, choice in pairs]
        return JSONResponse(rows if shape.is_batch else rows[0])
