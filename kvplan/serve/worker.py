"""The thread that owns the backend: requests arrive in a queue, outputs go back to the event loop."""

import asyncio
import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from engine.request import Request, RequestOutput, TokenUpdate
from kvplan.core.errors import KvplanError, SettingError
from kvplan.serve.backend import Backend, BackendLostError
from kvplan.serve.jobs import Finish, Job, Piece
from kvplan.serve.metrics import ServerMetrics

IDLE_S: Final = 30.0
PATIENCE_S: Final = 0.002  # for which tokens are gathered while nobody waits by the clock
MOST_FAILURES: Final = 3  # consecutive failed steps after which /health reports 503


T = TypeVar("T")
CLIENT_WORDS: Final = {"prompt_logprobs": "logprobs with echo", "speculative_config": "speculation"}


def do_nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Hooks:
    """Optional callbacks of a backend, called in its thread.

    delay  seconds between a request's step and its tokens' delivery to the client; called at the first token
    idle   called periodically while there is no work; close: called at the end
    now    the clock of all times; is_virtual: nobody waits by it
    """

    delay: Callable[[Request], float] = lambda _: 0.0
    idle: Callable[[], None] = do_nothing
    close: Callable[[], None] = do_nothing
    now: Callable[[], float] = time.monotonic
    is_virtual: bool = False


NO_HOOKS: Final = Hooks()


class Worker:
    """Owner of a backend and its thread; call `submit`, `abort` and `close` in the event loop."""

    def __init__(self, backend: Backend, metrics: ServerMetrics, hooks: Hooks = NO_HOOKS) -> None:
        self.backend, self.metrics, self._hooks, self.now = backend, metrics, hooks, hooks.now
        self._scheduler = backend.scheduler
        self.end_token: int | None = None  # the tokenizer's own, which is no stop reason
        self.is_well = True
        self.lost: Exception | None = None  # in the loop: what ended the thread before its time
        self.on_lost: Callable[[], None] = do_nothing  # called in the loop
        self.jobs: dict[str, Job] = {}  # in the loop: unfinished jobs
        self.refuses = False  # in the loop: no new requests, as the server sleeps
        self.is_paused = False  # no steps
        self._calls: set[concurrent.futures.Future[Any]] = set()  # that have no result yet
        self._inbox: queue.SimpleQueue[Job | str | Callable[[], None] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="kvplan-engine", daemon=True)
        self._own: dict[str, Job] = {}  # in the thread: jobs submitted to the backend
        self._unscheduled: dict[str, Job] = {}  # in the thread: of those, jobs that have not run
        self._counts: dict[Job, int] = {}  # in the thread: this step's tokens
        self._pieces: dict[Job, Piece] = {}  # in the thread: what is to be sent
        self._sent_at = 0.0  # in the thread
        self._failures = 0

    # --- in the event loop --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, job: Job) -> None:
        self.jobs[job.request_id] = job
        if self.lost is None:
            self._inbox.put(job)
        else:
            self._give(job, failed(self.lost))

    def abort(self, jobs: Iterable[Job]) -> None:
        """Abort the unfinished jobs; their blocks are freed before the next step."""
        for job in jobs:
            if self.jobs.pop(job.request_id, None) is not None:
                job.has_ended = True
                self._inbox.put(job.request_id)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Abort jobs whose clients wait: they get what there is, with finish reason "abort"."""
        for job in jobs:
            self._inbox.put(partial(self._cancel, job))

    async def call(self, run: Callable[[Any], T]) -> T:
        """Run something with the backend in its thread, between two steps; raise what it raises."""
        if self.lost is not None:
            raise self.lost
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def in_thread() -> None:
            if not future.set_running_or_notify_cancel():  # the client is gone
                return
            try:
                future.set_result(run(self.backend))
            except Exception as error:
                future.set_exception(error)

        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._inbox.put(in_thread)
        return await asyncio.wrap_future(future)

    async def pause(self) -> None:
        """Run no step from now on, until `resume`."""
        await self.call(lambda _: setattr(self, "is_paused", True))

    def resume(self) -> None:
        self.refuses = self.is_paused = False
        self._inbox.put(do_nothing)  # ends its wait

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_queued_tokens(self) -> int:
        """Number of prompt tokens of requests without a first token, counted as in vLLM."""
        return sum(len(job.prompt) for job in self.jobs.values() if not job.has_token)

    def close(self) -> None:
        """End the thread after its current step, even if requests are unfinished."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _lose(self, error: Exception) -> None:
        """Fail what is unfinished: the backend's thread has ended by this error."""
        self.lost = error
        for job in list(self.jobs.values()):
            self._give(job, failed(error))
        for future in list(self._calls):
            future.set_exception(error)
        self.on_lost()

    def _deliver(self, pieces: dict[Job, Piece]) -> None:
        late: dict[float, list[tuple[Job, Piece]]] = {}
        for job, piece in pieces.items():
            if job.delay and not self._hooks.is_virtual:
                late.setdefault(job.delay, []).append((job, piece))
            else:
                self._give(job, piece)
        for delay, group in late.items():
            asyncio.get_running_loop().call_later(delay, self._give_all, group)

    def _give_all(self, group: list[tuple[Job, Piece]]) -> None:
        for job, piece in group:
            self._give(job, piece)

    def _give(self, job: Job, piece: Piece) -> None:
        if job.has_ended:  # aborted meanwhile
            return
        job.has_ended = piece.finish is not None or piece.refused is not None
        job.pieces.put(job.index, piece)
        if job.has_ended:
            self.jobs.pop(job.request_id, None)

    # --- in the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # whatever it is, nothing can follow
            self.is_well = False
            self.metrics.failed(error)
            self._pieces.clear()
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop has ended, and nobody waits
                    self._loop.call_soon_threadsafe(self._lose, error)

    def _work(self) -> None:
        while self._take_in():
            if self._has_steps:
                self._step()
            self._send()
        for request_id in list(self._own):
            self._abort(request_id)
        self._hooks.close()

    @property
    def _has_steps(self) -> bool:
        return self.backend.has_unfinished and not self.is_paused

    def _take_in(self) -> bool:
        """Process new submissions, aborts and calls, blocking if the backend is idle; return False on close."""
        wait = not self._has_steps
        while wait or not self._inbox.empty():
            try:
                item = self._inbox.get(block=wait, timeout=IDLE_S)
            except queue.Empty:
                if wait:
                    self._hooks.idle()
                return True
            match item:
                case None:
                    return False
                case str():
                    self._abort(item)
                case Job():
                    self._add(item)
                case _:
                    item()
            wait = False
        return True

    def _add(self, job: Job) -> None:
        try:
            job.request = self.backend.submit(
                job.prompt,
                job.params,
                request_id=job.request_id,
                priority=job.priority,
                cache_salt=job.cache_salt,
                adapter=job.adapter,
                on_token=partial(self._on_token, job),
                **({} if job.simulated is None else {"simulated": job.simulated}),
            )
        except BackendLostError:
            raise
        except Exception as error:  # an invalid request must not affect the others
            self._pieces[job] = Piece(refused=error)
            return
        job.times.queued = self.now()
        self._own[job.request_id] = self._unscheduled[job.request_id] = job

    def _abort(self, request_id: str) -> None:
        job = self._pop(request_id)
        if job is not None:
            self.backend.abort(request_id)
            self._pieces.pop(job, None)
            self.metrics.ended(job, "abort", self.now())
            self.metrics.levels(self._scheduler)

    def _pop(self, request_id: str) -> Job | None:
        self._unscheduled.pop(request_id, None)
        return self._own.pop(request_id, None)

    def _cancel(self, job: Job) -> None:
        """Abort a job whose client gets what there is."""
        if job.request_id not in self._own:
            return
        waits = self._pieces.get(job, Piece())  # of a stream
        self._abort(job.request_id)
        assert job.request is not None
        self._finish(job, job.request.output(), Finish("abort"), waits)

    def _step(self) -> None:
        began = self.now()
        try:
            outputs = self.backend.step()
            self._failures = 0
        except BackendLostError:
            raise
        except Exception as error:  # the engine has ended the batch's requests; their outputs come with the next step
            outputs = []
            self._failures += 1
            self.is_well = self._failures < MOST_FAILURES
            self.metrics.failed(error)
        self._note_admitted(began)
        self.metrics.tokens(self._counts, self.now())
        self._counts.clear()
        for output in outputs:
            self._end(output)
        self.metrics.step(self._scheduler)

    def _note_admitted(self, began: float) -> None:
        for job in list(self._unscheduled.values()):
            if job.request is not None and job.request.seq.status in ("running", "finished"):
                job.times.scheduled = max(began, job.times.queued)
                del self._unscheduled[job.request_id]

    def _on_token(self, job: Job, update: TokenUpdate) -> None:
        self._counts[job] = self._counts.get(job, 0) + 1
        request, place = job.request, job.num_told
        job.num_told += 1
        if not place:
            assert request is not None
            job.delay, job.has_token = self._hooks.delay(request), True
        if not job.is_streamed:
            return
        piece = self._pieces.get(job)
        if piece is None:
            piece = self._pieces[job] = Piece()
        piece.token_ids.append(update.token_id)
        piece.texts.append(update.text)
        if job.params.logprobs is not None:
            assert request is not None
            piece.logprobs.append(request.logprobs[place] if place < len(request.logprobs) else None)

    def _end(self, output: RequestOutput) -> None:
        job = self._pop(output.request_id)
        if job is None:
            return
        reason = output.finish_reason
        assert job.request is not None
        stop = stop_reason(job.request, self.end_token) if reason == "stop" else None
        finish = Finish("error" if reason == "out_of_blocks" else reason, output.error, stop)
        self._finish(job, output, finish, self._pieces.get(job, Piece()))
        self.metrics.ended(job, finish.reason, self.now())

    def _finish(self, job: Job, output: RequestOutput, finish: Finish, piece: Piece) -> None:
        """Add a job's end to its last piece: after a stream's tokens, or all tokens at once."""
        if not job.is_streamed:
            piece = Piece(output.token_ids, [output.text], output.logprobs or [])
        piece.finish = finish
        self._pieces[job] = piece

    def _send(self) -> None:
        if not self._pieces or (self._hooks.is_virtual and self._may_gather()):
            return
        pieces, self._pieces = self._pieces, {}
        for job, piece in pieces.items():
            request = job.request
            if request is not None:
                piece.num_cached_tokens = request.num_cached_tokens
                piece.prompt_logprobs = () if job.params.prompt_logprobs is None else request.prompt_logprobs
        if self._loop is not None:
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._deliver, pieces)

    def _may_gather(self) -> bool:
        """True while the next step may add to what there is to send."""
        now = time.monotonic()
        is_due = now - self._sent_at > PATIENCE_S or not self._has_steps
        self._sent_at = now if is_due else self._sent_at
        return not is_due


def stop_reason(request: Request, end_token: int | None) -> int | str | None:
    """Return what stopped a request, as vLLM does: a string, or a token id other than the tokenizer's end token.

    A model may have further end tokens, whose ids are reasons; if the tokenizer states none, none of them is a reason.
    """
    if request.stop_string is not None:
        return request.stop_string
    params, token = request.params, request.seq.token_ids[-1]
    if token == end_token and not params.ignore_eos:
        return None
    if params.stop:  # a special token named as a stop string: vLLM never stops there
        text: str | None = request.tokenizer.id_to_token(token)
        if text in params.stop:
            return text
    return None if end_token is None and token not in params.stop_token_ids else token


def failed(error: Exception) -> Piece:
    return Piece(finish=Finish("error", refusal_text(error)))


def refusal_text(error: Exception) -> str:
    """Return a client-facing message: the text of a KvplanError, only the type of any other error."""
    if isinstance(error, SettingError):
        error = error.in_words(CLIENT_WORDS)
    return str(error) if isinstance(error, KvplanError) else f"internal error ({type(error).__name__})"
