"""Prefill and decode servers as pairs of simulated ones: kv_transfer_params, leases, and the transfer's time.

Fields, lease and heartbeats as in vLLM 0.33 (kv_connector/v1/nixl: pull_scheduler.py, base_worker.py). Where vLLM's
servers talk over NIXL, these exchange lines of JSON on the same address, so a pair may be two processes.
"""

import json
import os
import queue
import socket
import socketserver
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from engine.block_manager import Group
from engine.scheduler import Batch
from engine.sequence import Sequence
from kvplan.core.errors import EnvironmentProblem, InvalidInputError, UsageError
from kvplan.core.files import printable
from kvplan.core.units import parse_count
from kvplan.servers.plans.plan import Plan
from kvplan.servers.plans.pool import num_ranks
from kvplan.simulate.handover import Handover, Link, Pull

FLAG: Final = "--kv-transfer-config"
HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
CONNECTORS: Final = ("NixlConnector", "NixlPullConnector")
NEEDED: Final = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
LEASE_S: Final = 30  # kv_lease_duration
CALL_S: Final = 5.0  # longest wait for another server, on the machine's clock
EXPIRY_S: Final = 0.5  # how often an idle server looks after its leases
MOST_LINE: Final = 1 << 20
MOST_PORT: Final = 65_535
REST_S: Final = 0.005  # of a step that only another server's read can help
Done = Callable[[], None]


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How a server hands prompts over.

    link        None: it pulls nothing
    lease_s     time for which blocks are kept, without a heartbeat
    recomputes  a prompt that cannot be pulled is computed here; if not, its request fails
    """

    engine_id: str
    role: str
    host: str
    port: int
    link: Link | None
    lease_s: int
    recomputes: bool


def transfer_config(plan: Plan, link: Link | None, number: int, *, is_rank: bool) -> TransferConfig | None:
    """Return the config of a server, by its number in this process; None if it has no connector.

    Raise UsageError for what is not simulated. The plan has checked the JSON as the server does.
    """
    args = plan.request.args
    if args.kv_transfer_config is None:
        if link is not None:
            example = """add --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'"""
            raise UsageError("--link", "is for servers that transfer KV caches to each other", example)
        return None
    stated: dict[str, Any] = json.loads(args.kv_transfer_config)
    name, extra = stated["kv_connector"], stated.get("kv_connector_extra_config") or {}
    if name not in CONNECTORS:
        raise UsageError(FLAG, f"{printable(str(name), 40)} is not simulated", f"use {CONNECTORS[0]}, or remove it")
    if extra.get("bidirectional_kv_xfer"):
        raise UsageError(FLAG, "bidirectional_kv_xfer is not simulated", "remove it")
    lease = extra.get("kv_lease_duration", LEASE_S)
    if type(lease) is not int or lease < 1:
        raise UsageError(FLAG, f"kv_lease_duration is wrong ({printable(str(lease), 40)})", "write seconds, e.g. 30")
    if link is None and stated["kv_role"] != "kv_producer":
        problem = "the time of a transfer depends on the network, whose speed is not stated"
        raise UsageError(FLAG, problem, "add --link with its speed, e.g. 50GB/s")
    port = parse_count(os.environ.get(PORT, "5600"), PORT, MOST_PORT) + number
    engine_id = str(stated.get("engine_id") or uuid.uuid4())
    return TransferConfig(
        f"{engine_id}_dp{number}" if is_rank else engine_id, stated["kv_role"], os.environ.get(HOST, "localhost"), port,
        link, lease, stated.get("kv_load_failure_policy") == "recompute",
    )  # fmt: skip


# --- between servers --------------------------------------------------------------------------------------------------


class SideChannel(socketserver.ThreadingTCPServer):
    """Answers other servers: {"read": engine id}, {"done": request id}, {"alive": request ids}."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, config: TransferConfig, tell: Callable[[str, Any], None], look: Done) -> None:
        self.engine_id, self.tell, self.look = config.engine_id, tell, look
        try:
            super().__init__((config.host, config.port), Answer)
        except OSError as error:
            where = f"{HOST}={config.host} {PORT}={config.port}"
            raise EnvironmentProblem(where, f"cannot be used ({error.strerror})", f"set another {PORT}") from error
        threading.Thread(target=self.serve_forever, args=(EXPIRY_S,), name="kvplan-transfer", daemon=True).start()

    def service_actions(self) -> None:
        self.look()


class Answer(socketserver.StreamRequestHandler):
    """One line of another server, and the answer to it."""

    server: SideChannel
    timeout = CALL_S

    def handle(self) -> None:
        try:
            line = json.loads(self.rfile.readline(MOST_LINE))
            (verb, value) = next(iter(line.items()))
        except (ValueError, AttributeError, StopIteration, OSError, RecursionError):
            return
        if verb in ("done", "alive"):
            self.server.tell(verb, value)
        self.wfile.write(json.dumps({"engine_id": self.server.engine_id}).encode() + b"\n")


def call(source: Mapping[str, Any], verb: str, value: Any) -> None:
    """Tell the server that a request's kv_transfer_params name; raise OSError or ValueError if it is not there."""
    address = (str(source["remote_host"]), int(source["remote_port"]))
    with socket.create_connection(address, CALL_S) as connection, connection.makefile("rb") as answers:
        connection.sendall(json.dumps({verb: value}).encode() + b"\n")
        if json.loads(answers.readline(MOST_LINE))["engine_id"] != source["remote_engine_id"]:
            raise ValueError("another engine answers")


# --- the backend's part -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Moving:
    """A pull under way, until `end` once the other server has answered."""

    pull: Pull
    answer: "Future[None]"
    end: float | None = None


@dataclass(slots=True)
class Counts:
    """What /metrics shows: transfers as (seconds, bytes of a rank), and what went wrong."""

    moved: "deque[tuple[float, int]]" = field(default_factory=deque)
    failed: int = 0
    unnotified: int = 0
    expired: int = 0
    late: int = 0


class Transfer(Handover):
    """A simulated server's handovers, in the plan's seconds.

    now         the plan's clock; is_virtual: nobody waits by it, and no lease runs out
    fail        ends a request with an error
    wake        makes the backend's thread call `look`, from any thread
    """

    def __init__(self, plan: Plan, groups: tuple[Group, ...], config: TransferConfig) -> None:
        super().__init__(groups, defers=config.role != "kv_producer")
        self.config, self.counts = config, Counts()
        self.num_ranks = num_ranks(plan.request.args)
        self.block_bytes = plan.pool.stage_bytes[0]  # of a rank
        self.now: Callable[[], float] = lambda: 0.0
        self.is_virtual = False
        self.fail: Callable[[str, str], None] = lambda request_id, why: None
        self.wake: Done = lambda: None
        args = plan.request.args
        self._sizes = {"tp_size": args.tensor_parallel_size, "dcp_size": 1, "pp_size": 1}
        self._moving: dict[int, Moving] = {}
        self._leases: dict[str, float] = {}  # of kept requests
        self._free_at: dict[str, float] = {}  # engine id -> when its link is free
        self._alive: dict[Sequence, Mapping[str, Any]] = {}  # requests whose prompt is kept elsewhere
        self._beat = 0.0
        self._messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._answers: dict[str, dict[str, Any]] = {}
        self._callers = ThreadPoolExecutor(4, "kvplan-transfer")
        self._channel = SideChannel(config, self._tell, self._look_idly)

    # --- requests -----------------------------------------------------------------------------------------------

    def check_params(self, params: Mapping[str, Any], num_tokens: int) -> None:
        """Raise InvalidInputError for kv_transfer_params that name no server, for which vLLM would wait without end, or
        that are of a shorter prompt, after whose blocks vLLM would compute on some that nothing has filled.
        """
        if not params.get("do_remote_prefill"):
            return
        lacking = [name for name in NEEDED if not params.get(name)]
        if lacking:
            why = f"do_remote_prefill needs {lacking[0]}"
            raise InvalidInputError("kv_transfer_params", why, "send those of the prefill server's response")
        if self.config.link is None:
            why = "this server has no link to pull prompts over"
            raise InvalidInputError("kv_transfer_params", why, "start it with --link, e.g. 50GB/s")
        if type(params["remote_port"]) is not int or not 0 < params["remote_port"] <= MOST_PORT:
            raise InvalidInputError("kv_transfer_params", "remote_port is not a port", "send the prefill server's")
        length, size = params.get("remote_num_tokens"), self.remote.groups[0].block_size
        if type(length) is int and length > 0 and -(-num_tokens // size) > -(-length // size):
            why = f"are of a prompt of {length:,} tokens, and this one has {num_tokens:,}"
            raise InvalidInputError("kv_transfer_params", why, "send the prompt of the prefill server's request")

    def expect(self, seq: Sequence, params: Mapping[str, Any]) -> None:
        """Note the kv_transfer_params of a request that is queued."""
        if params.get("do_remote_decode"):
            self.keep(seq)
        if params.get("do_remote_prefill"):
            self.remote.sources[seq] = self._alive[seq] = dict(params)

    def take_answer(self, request_id: str) -> dict[str, Any] | None:
        """Return the kv_transfer_params of an ended request's response, once."""
        return self._answers.pop(request_id, None)

    def detain(self, seq: Sequence) -> bool:
        num_cached = self.hits.get(seq)
        is_kept = super().detain(seq)
        if seq.request_id in self.pinned and seq.request_id not in self._leases:
            self._leases[seq.request_id] = self.now() + self.config.lease_s
            self._answers[seq.request_id] = self._answer(seq)
            if seq.num_output_tokens == 1:  # the step of its first token, whose statistics have the hits
                self._answers[seq.request_id]["remote_prefill_cached_tokens"] = num_cached
        return is_kept

    def _answer(self, seq: Sequence) -> dict[str, Any]:
        config = self.config
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": self.block_ids(seq),
            "remote_engine_id": config.engine_id, "remote_request_id": seq.request_id, "remote_host": config.host,
            "remote_port": config.port, **self._sizes, "remote_num_tokens": seq.num_computed_tokens,
            "remote_blocks_expiry_time": None, "remote_registration_generation": 1, "transfer_mode": "pull",
        }  # fmt: skip

    # --- what the backend's loop calls --------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return bool(self._moving or self.remote.pulls)

    @property
    def next_end(self) -> float | None:
        """When the next transfer ends, or, if another server has not answered yet, now."""
        return min((self.now() if move.end is None else move.end for move in self._moving.values()), default=None)

    def begin_at(self, now: float, batch: Batch) -> float:
        """Begin the pulls that a step orders, and renew leases."""
        pulls, self.remote.pulls = self.remote.pulls, []
        for pull in pulls:
            if pull.number is None:
                self._alive.pop(pull.seq, None)
                self._notify(pull.source)
            else:
                answer = self._callers.submit(call, pull.source, "read", self.config.engine_id)
                self._moving[pull.number] = Moving(pull, answer)
        if self._alive and not self.is_virtual and now - self._beat >= self.config.lease_s // 6:
            self._beat = now
            ids: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
            for source in self._alive.values():
                ids.setdefault(source["remote_engine_id"], (source, []))[1].append(source["remote_request_id"])
            for source, alive in ids.values():
                self._callers.submit(call, source, "alive", alive)
        self.look()
        if self.pinned and not (batch.num_tokens or self._moving or self.scheduler.running):
            time.sleep(REST_S)
        return now

    def take_in_at(self, now: float) -> None:
        """Report the transfers that are done by `now` to the scheduler."""
        for number, move in list(self._moving.items()):
            if move.end is None and (self.is_virtual or move.answer.done()):
                self._begin(number, move, now)
            if move.end is not None and move.end <= now:
                del self._moving[number]
                self._alive.pop(move.pull.seq, None)
                self._notify(move.pull.source)
                self.complete([number])

    def _begin(self, number: int, move: Moving, now: float) -> None:
        """Start the time of a transfer whose source has answered, or fail it."""
        link, engine, rank_bytes = (
            self.config.link,
            move.pull.source["remote_engine_id"],
            move.pull.num_blocks * self.block_bytes,
        )
        assert link is not None
        try:
            move.answer.result()
        except (OSError, ValueError, KeyError, TypeError) as error:
            del self._moving[number]
            self._alive.pop(move.pull.seq, None)
            self.counts.failed += 1
            if self.config.recomputes:
                self.give_up(number)
            else:
                why = f"the KV cache of the prompt could not be pulled ({type(error).__name__})"
                self.fail(move.pull.seq.request_id, why)
                self.complete([number])
            return
        num_bytes = rank_bytes * self.num_ranks
        self._free_at[engine], move.end = link.send(self._free_at.get(engine, 0.0), now, num_bytes)
        seconds = num_bytes / link.bandwidth + link.latency
        self.counts.moved += [(seconds, rank_bytes)] * self.num_ranks

    def _notify(self, source: Mapping[str, Any]) -> None:
        """Let another server free a prompt's blocks."""

        def over(done: "Future[None]") -> None:
            if not done.cancelled() and done.exception() is not None:
                self._tell("unnotified", None)

        self._callers.submit(call, source, "done", source["remote_request_id"]).add_done_callback(over)

    def retire(self, seqs: list[Sequence]) -> None:
        super().retire(seqs)
        for seq in seqs:
            if seq not in self.loading and seq not in self._orphans:
                self._alive.pop(seq, None)

    # --- other servers' messages --------------------------------------------------------------------------------

    def _tell(self, verb: str, value: Any) -> None:
        self._messages.put((verb, value))
        self.wake()

    def _look_idly(self) -> None:
        if self._leases and not self.is_virtual:
            self.wake()

    def look(self) -> None:
        """Take in messages, and free what nobody has read in time."""
        now = self.now()
        while not self._messages.empty():
            verb, value = self._messages.get()
            if verb == "unnotified":
                self.counts.unnotified += 1
                self.counts.failed += 1
            elif verb == "done" and isinstance(value, str):
                self._leases.pop(value, None)
                self.counts.late += not self.release(value)
            elif verb == "alive" and isinstance(value, list):
                for name in value:
                    if isinstance(name, str) and name in self._leases:
                        self._leases[name] = max(self._leases[name], now + self.config.lease_s * 2 // 3)
        for name in [name for name, end in self._leases.items() if end <= now and not self.is_virtual]:
            del self._leases[name]
            self.counts.expired += self.release(name)

    def attach_to(self, post: Callable[[Done], None]) -> None:
        """Let the backend's thread look after what other servers tell, when it is idle."""
        self.wake = lambda: post(self.look)

    def shut(self) -> None:
        self._channel.shutdown()
        self._channel.server_close()
        self._callers.shutdown(wait=False, cancel_futures=True)
