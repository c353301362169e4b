"""Paths that operate a server: sleep, the prefix cache, adapters, faults; vLLM's as in its development mode."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.extensions import AdapterSlots
from engine.scheduler import Scheduler
from kvplan.core.errors import KvplanError
from kvplan.serve.bodies import parsed
from kvplan.serve.fields import ApiError, Field, read
from kvplan.serve.intake import ServedModel
from kvplan.serve.worker import Worker

ADAPTER: Final = {
    "lora_name": Field("string", ""),
    "lora_path": Field("string", ""),
    "load_inplace": Field("boolean", False),
    **{name: Field("any", ignored=True) for name in ("lora_int_id", "is_3d_lora_weight")},
}
PARTS: Final = ("weights", "kv_cache", "scheduling")  # what a sleeping server wakes, by tag
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class Admin:
    """Handlers over one worker.

    body    receives a request's body
    asleep  parts that are not awake
    """

    worker: Worker
    served: ServedModel
    body: Callable[[Request], Awaitable[bytes]]
    asleep: set[str] = field(default_factory=set)

    def posts(self) -> dict[str, Handler]:
        adapters: dict[str, Handler] = {
            "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": self.unload_adapter,
        }
        if not self.served.door.is_simulated:
            return adapters
        nothing: dict[str, Handler] = dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), self.reset_nothing)
        sleep: dict[str, Handler] = {"/sleep": self.sleep, "/wake_up": self.wake_up}
        return {**adapters, **nothing, **sleep, "/reset_prefix_cache": self.reset, "/faults": self.change_faults}

    def gets(self) -> dict[str, Handler]:
        own: dict[str, Handler] = {
            "/is_sleeping": self.is_sleeping,
            "/faults": self.faults,
            "/kv_event_sources": self.event_sources,
        }
        return {"/load": self.load, **(own if self.served.door.is_simulated else {})}

    async def load(self, request: Request) -> Response:
        names = {job.request_id.rpartition("-")[0] for job in self.worker.jobs.values()}
        return JSONResponse({"server_load": len(names)})

    async def faults(self, request: Request) -> Response:
        return JSONResponse(self.served.faults.rates)

    async def change_faults(self, request: Request) -> Response:
        self.served.faults.change(parsed(await self.body(request)))
        return JSONResponse(self.served.faults.rates)

    async def event_sources(self, request: Request) -> Response:
        publisher = getattr(self.worker.backend, "publisher", None)
        return JSONResponse({} if publisher is None else {str(publisher.rank): asdict(publisher.config)})

    # --- sleep --------------------------------------------------------------------------------------------------

    async def sleep(self, request: Request) -> Response:
        """Run no more steps: mode "abort" ends what is unfinished, "wait" waits for it, "keep" goes on after it."""
        level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
        if level not in ("0", "1", "2") or mode not in ("abort", "wait", "keep"):
            raise ApiError("level must be 0, 1 or 2, and mode abort, wait or keep", param="level")
        self.worker.refuses = mode != "keep"
        if mode == "abort":
            self.worker.cancel(list(self.worker.jobs.values()))
        while mode == "wait" and self.worker.jobs:
            await asyncio.sleep(0.01)
        await self.worker.pause()
        if level != "0":
            await self.worker.call(lambda backend: forget(backend.scheduler, preempts=True))
        self.asleep = {"scheduling"} if level == "0" else set(PARTS)
        self.worker.metrics.sleeping(int(level))
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        if not set(tags or ()) <= set(PARTS):
            raise ApiError(f"tags must be of {', '.join(PARTS)}", param="tags")
        self.asleep -= set(PARTS if tags is None else tags)
        if self.asleep <= {"scheduling"}:
            self.asleep = set()
            self.worker.metrics.sleeping(None)
            self.worker.resume()
        return JSONResponse({"status": "sleeping" if self.asleep else "awake", "tags": tags})

    async def is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": bool(self.asleep)})

    # --- caches and adapters ------------------------------------------------------------------------------------

    async def reset(self, request: Request) -> Response:
        preempts = request.query_params.get("reset_running_requests", "").lower() in ("true", "1")
        success = await self.worker.call(lambda backend: forget(backend.scheduler, preempts=preempts))
        return JSONResponse({"success": success})

    async def reset_nothing(self, request: Request) -> Response:
        return Response()  # a text model has no such cache

    async def load_adapter(self, request: Request) -> Response:
        values = read(parsed(await self.body(request)), ADAPTER, self.served.door)
        name, path = values["lora_name"], values["lora_path"]
        problem = None
        if not name or not path:
            problem = "Both 'lora_name' and 'lora_path' must be provided."
        elif name in self.served.names:
            problem = f"The lora adapter '{name[:200]}' conflicts with a served base model."
        elif name in self.served.adapters and not values["load_inplace"]:
            problem = f"The lora adapter '{name[:200]}' has already been loaded; set 'load_inplace' to load it again."
        if problem is not None:
            raise ApiError(problem, kind="InvalidUserInput")
        try:
            await self.worker.call(lambda backend: add_adapter(backend, name, path))
        except KvplanError as error:
            raise ApiError(str(error), kind="InvalidUserInput", param="lora_path") from error
        self.served.adapters[name] = path
        return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")

    async def unload_adapter(self, request: Request) -> Response:
        name = read(parsed(await self.body(request)), ADAPTER, self.served.door)["lora_name"]
        if self.served.adapters.pop(name, None) is None:
            raise ApiError(f"The lora adapter '{name[:200]}' cannot be found.", status=404, kind="NotFoundError")
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")


# --- in the backend's thread ------------------------------------------------------------------------------------------


def forget(scheduler: Scheduler, *, preempts: bool) -> bool:
    """Empty the prefix cache; False if a request still has blocks. preempts: take those of running requests first."""
    for seq in list(scheduler.running) if preempts else ():
        scheduler.preempt(seq.request_id)
    return scheduler.blocks.reset_prefix_cache()


def add_adapter(backend: Any, name: str, path: str) -> None:
    """Load an adapter; the twin needs its name alone."""
    if backend.scheduler.extension(AdapterSlots) is None:
        problem = "LoRA is not enabled. Use --enable-lora to enable LoRA."
        raise ApiError(problem, status=500, kind="InternalServerError")
    if not hasattr(backend, "load_adapter"):
        raise ApiError("adapters cannot be loaded while several ranks run; name them with --lora-modules")
    backend.load_adapter(name, path)
