"""Paths that operate a server: sleep, the prefix cache, adapters. Formats as in vLLM 0.33's development mode."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.extensions import AdapterSlots
from engine.scheduler import Scheduler
from kvplan.serve.bodies import parsed
from kvplan.serve.fields import ApiError, Field, read
from kvplan.serve.intake import ServedModel
from kvplan.serve.worker import Worker

LOAD: Final = {
    "lora_name": Field("string", ""),
    "lora_path": Field("string", ""),
    "load_inplace": Field("boolean", False),
    "is_3d_lora_weight": Field("boolean", ignored=True),
}
UNLOAD: Final = {"lora_name": Field("string", ""), "lora_int_id": Field("integer", ignored=True)}
ABORT: Final = {"request_ids": Field("any", ())}
MODES: Final = ("abort", "wait", "keep")
PARTS: Final = ("weights", "kv_cache")  # what a sleeping server wakes, by tag


@dataclass(slots=True)
class Admin:
    """Handlers over one worker; `body` receives a request's body."""

    worker: Worker
    served: ServedModel
    body: Callable[[Request], Any]
    asleep: set[str] = field(default_factory=set)  # parts that are not awake

    def posts(self) -> dict[str, Callable[[Request], Any]]:
        adapters = {"/v1/load_lora_adapter": self.load_adapter, "/v1/unload_lora_adapter": self.unload_adapter}
        if not self.served.door.is_simulated:
            return adapters
        return adapters | {
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            "/pause": self.pause,
            "/resume": self.resume,
            "/abort_requests": self.abort_requests,
            "/reset_prefix_cache": self.reset_prefix_cache,
            "/faults": self.change_faults,
            "/reset_mm_cache": self.reset_nothing,
            "/reset_encoder_cache": self.reset_nothing,
        }

    def gets(self) -> dict[str, Callable[[Request], Any]]:
        if not self.served.door.is_simulated:
            return {"/load": self.load}
        own = {"/faults": self.faults, "/kv_event_sources": self.event_sources}
        return {"/load": self.load, "/is_sleeping": self.is_sleeping, "/is_paused": self.is_paused, **own}

    async def faults(self, request: Request) -> Response:
        return JSONResponse(self.served.faults.rates)

    async def change_faults(self, request: Request) -> Response:
        self.served.faults.change(parsed(await self.body(request)))
        return JSONResponse(self.served.faults.rates)

    async def event_sources(self, request: Request) -> Response:
        publisher = getattr(self.worker.backend, "publisher", None)
        return JSONResponse({} if publisher is None else {str(publisher.rank): asdict(publisher.config)})

    async def load(self, request: Request) -> Response:
        names = {job.request_id.rpartition("-")[0] for job in self.worker.jobs.values()}
        return JSONResponse({"server_load": len(names)})

    # --- sleep and pause ----------------------------------------------------------------------------------------

    async def sleep(self, request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in ("0", "1", "2"):
            raise ApiError("level must be 0, 1 or 2", param="level")
        await self._stop(request, clears=level != "0")
        self.asleep = {"scheduling"} | (set(PARTS) if level != "0" else set())
        self.worker.metrics.sleeping(int(level))
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        if wrong := [tag for tag in tags or () if tag not in (*PARTS, "scheduling")]:
            raise ApiError(f"tags must be weights or kv_cache ({wrong[0][:40]!r})", param="tags")
        self.asleep -= self.asleep if tags is None else set(tags)
        if self.asleep <= {"scheduling"}:
            self.asleep = set()
            self.worker.metrics.sleeping(None)
            self.worker.resume()
        return JSONResponse({"status": "sleeping" if self.asleep else "awake", "tags": tags})

    async def is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": bool(self.asleep)})

    async def pause(self, request: Request) -> Response:
        clears = _is_true(request, "clear_cache", default=True) and request.query_params.get("mode") != "keep"
        await self._stop(request, clears=clears)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.worker.resume()
        return JSONResponse({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self.worker.is_paused})

    async def abort_requests(self, request: Request) -> Response:
        names = read(parsed(await self.body(request)), ABORT, self.served.door)["request_ids"]
        if not isinstance(names, list | tuple):
            raise ApiError("request_ids must be a list", param="request_ids")
        jobs = [job for job in self.worker.jobs.values() if not names or job.request_id.rpartition("-")[0] in names]
        self.worker.cancel(jobs)
        return JSONResponse({"status": "aborted", "aborted": len(jobs)})

    async def _stop(self, request: Request, *, clears: bool) -> None:
        """Run no more steps: mode "abort" ends what is unfinished, "wait" waits for it, "keep" goes on at `resume`."""
        mode = request.query_params.get("mode", "abort")
        if mode not in MODES:
            raise ApiError(f"mode must be one of {', '.join(MODES)}", param="mode")
        self.worker.refuses = mode != "keep"
        if mode == "abort":
            self.worker.cancel(list(self.worker.jobs.values()))
        while mode == "wait" and self.worker.jobs:
            await asyncio.sleep(0.01)
        await self.worker.pause()
        if clears:
            await self.worker.call(lambda backend: forget(backend.scheduler, preempts=mode == "keep"))

    # --- caches and adapters ------------------------------------------------------------------------------------

    async def reset_prefix_cache(self, request: Request) -> Response:
        preempts = _is_true(request, "reset_running_requests")
        success = await self.worker.call(lambda backend: forget(backend.scheduler, preempts=preempts))
        return JSONResponse({"success": success})

    async def reset_nothing(self, request: Request) -> Response:
        return Response()  # a text model has no such cache

    async def load_adapter(self, request: Request) -> Response:
        values = read(parsed(await self.body(request)), LOAD, self.served.door)
        name, path = values["lora_name"], values["lora_path"]
        if not name or not path:
            raise _wrong("Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.served.names:
            raise _wrong(f"The lora adapter '{name[:200]}' conflicts with a served base model.")
        if name in self.served.adapters and not values["load_inplace"]:
            problem = "has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."
            raise _wrong(f"The lora adapter '{name[:200]}' {problem}")
        await self.worker.call(lambda backend: add_adapter(backend, name, path))
        self.served.adapters[name] = path
        return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")

    async def unload_adapter(self, request: Request) -> Response:
        name = read(parsed(await self.body(request)), UNLOAD, self.served.door)["lora_name"]
        if not name:
            raise _wrong("'lora_name' needs to be provided to unload a LoRA adapter.")
        if self.served.adapters.pop(name, None) is None:
            raise ApiError(f"The lora adapter '{name[:200]}' cannot be found.", status=404, kind="NotFoundError")
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")


def _wrong(problem: str) -> ApiError:
    return ApiError(problem, kind="InvalidUserInput")


def _is_true(request: Request, name: str, *, default: bool = False) -> bool:
    text = request.query_params.get(name, str(default)).lower()
    if text not in ("true", "false", "1", "0"):
        raise ApiError(f"{name} must be true or false", param=name)
    return text in ("true", "1")


# --- in the backend's thread ------------------------------------------------------------------------------------------


def forget(scheduler: Scheduler, *, preempts: bool) -> bool:
    """Empty the prefix cache; False if a request still has blocks. preempts: take those of running requests first."""
    for seq in list(scheduler.running) if preempts else ():
        scheduler.preempt(seq.request_id)
    return scheduler.blocks.reset_prefix_cache()


def add_adapter(backend: Any, name: str, path: str) -> None:
    if backend.scheduler.extension(AdapterSlots) is None:
        problem = "LoRA is not enabled. Use --enable-lora to enable LoRA."
        raise ApiError(problem, status=500, kind="InternalServerError")
    if not hasattr(backend, "load_adapter"):
        raise ApiError("adapters cannot be loaded while several ranks run; name them with --lora-modules")
    backend.load_adapter(name, path)
