"""KV events over ZMQ: what the prefix cache stores and evicts, as vLLM 0.33 publishes it (`--kv-events-config`).

A message has three frames: topic, sequence number, and in msgpack [time, events, data-parallel rank]. Source of the
format, and of the rule for endpoints: vllm/distributed/kv_events.py, vllm/v1/core/block_pool.py.
"""

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from engine.block_manager import BlockKey, FullGroup, Group, WindowGroup
from engine.sequence import Sequence
from engine.states import MambaGroup
from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.core.files import printable

FLAG: Final = "--kv-events-config"
END: Final = (-1).to_bytes(8, "big", signed=True)
POLL_S: Final = 0.05
CLOSING_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """vLLM's KVEventsConfig."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def of_rank(self, rank: int) -> "EventsConfig":
        """Return the endpoints of a data-parallel rank: ports that are higher by its number."""
        return replace(
            self,
            publisher="zmq",
            endpoint=_offset(self.endpoint, rank),
            replay_endpoint=self.replay_endpoint and _offset(self.replay_endpoint, rank),
        )


def _offset(endpoint: str, rank: int) -> str:
    base, _, port = endpoint.rpartition(":")
    if not rank or not endpoint.startswith("tcp://") or port == "0":
        return f"{endpoint}_dp{rank}" if rank and endpoint.startswith("inproc") else endpoint
    return f"{base}:{int(port) + rank}"


def events_config(text: str | None) -> EventsConfig | None:
    """Parse --kv-events-config; None where it publishes nothing. Raise UsageError for what vLLM would reject."""
    if text is None:
        return None
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError):
        stated = None
    if not isinstance(stated, dict):
        remedy = "write '{\"enable_kv_cache_events\": true}'"
        raise UsageError(FLAG, f"is not a JSON object ({printable(text, 60)!r})", remedy)
    kinds = {row.name: str if row.name in ("publisher", "replay_endpoint") else type(row.default)
             for row in fields(EventsConfig)}  # fmt: skip
    for name, value in stated.items():
        if name not in kinds:
            raise UsageError(f"{FLAG}: {printable(name, 40)}", f"is not one of {', '.join(kinds)}", "remove it")
        if type(value) is not kinds[name] or (kinds[name] is int and value < 1):
            raise UsageError(f"{FLAG}: {name}", f"is wrong ({printable(json.dumps(value), 40)})", "correct it")
    config = EventsConfig(**stated)
    if config.publisher not in (None, "zmq", "null"):
        raise UsageError(f"{FLAG}: publisher", f"{printable(str(config.publisher), 40)!r} is not known", "write zmq")
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    for endpoint in (config.endpoint, config.replay_endpoint or "tcp://*:0"):
        if endpoint.startswith("tcp://") and not endpoint.rpartition(":")[2].isdecimal():
            raise UsageError(f"{FLAG}: endpoint", f"{printable(endpoint, 60)!r} has no port", "write tcp://*:5557")
    return config


class EventLog:
    """A pool's watcher: its events since they were last taken, as vLLM's messages have them, without defaults."""

    def __init__(self, groups: tuple[Group, ...], lookahead: int, is_latent: bool, lora_ids: Mapping[str, int]) -> None:
        self._groups, self._lookahead, self._is_latent, self._lora_ids = groups, lookahead, is_latent, lora_ids
        self.events: list[dict[str, Any]] = []

    def stored(self, seq: Sequence, group: int, numbers: range, kept: list[int], hashes: list[bytes]) -> None:
        rule, names = self._groups[group], (seq.adapter,) if seq.adapter is not None else ()
        size, salts = rule.block_size, tuple(key for key in seq.extra_keys if isinstance(key, str))
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [hashes[i] for i in kept],
            "parent_block_hash": hashes[numbers.start - 1] if numbers.start else None,
            "token_ids": seq.token_ids[numbers.start * size : numbers.stop * size],
            "block_size": size,
            "lora_id": None if seq.adapter is None else self._lora_ids.get(seq.adapter),
            "medium": "GPU",
            "lora_name": seq.adapter,
            "group_idx": group,
            "kv_cache_spec_kind": self._kind(rule),
        }
        if kept:  # as vLLM, a salt belongs to the first block alone
            event["extra_keys"] = [(names + salts if i == 0 else names) or None for i in kept]
        if isinstance(rule, WindowGroup):
            event["kv_cache_spec_sliding_window"] = rule.window
        if self._lookahead:
            ends = [(i + 1) * size for i in kept]
            event["lookahead_token_ids"] = [seq.token_ids[end : end + self._lookahead] for end in ends]
        self.events.append(event)

    def _kind(self, rule: Group) -> str:
        if isinstance(rule, FullGroup):
            return "mla_attention" if self._is_latent else "full_attention"
        return "sliding_window" if isinstance(rule, WindowGroup) else "chunked_local_attention"

    def removed(self, key: BlockKey) -> None:
        self.events.append({"type": "BlockRemoved", "block_hashes": [key[0]], "medium": "GPU", "group_idx": key[1]})

    def cleared(self) -> None:
        self.events.append({"type": "AllBlocksCleared"})

    def take(self) -> list[dict[str, Any]]:
        events, self.events = self.events, []
        return events


def require_libraries() -> None:
    from importlib.util import find_spec

    if missing := [name for name, module in (("pyzmq", "zmq"), ("msgspec", "msgspec")) if find_spec(module) is None]:
        remedy = "run `pip install '.[kv-events]'` in kvplan's sources"
        raise EnvironmentProblem(FLAG, f"{', '.join(missing)}: not installed", remedy)


class Publisher:
    """The sockets of one rank and their thread: publishes batches, and replays those that a client missed."""

    def __init__(
        self, config: EventsConfig, number: int = 0, rank: int = 0, now: Callable[[], float] = time.time
    ) -> None:
        """Bind or connect the sockets; raise EnvironmentProblem if that fails.

        number  how much higher the ports are; rank: the data-parallel one; now: seconds since 1970
        """
        import zmq

        self.config, self.rank, self._now = config.of_rank(number), rank, now
        self._queue: queue.Queue[list[Any] | None] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        context = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(config.hwm)
        self._replay = context.socket(zmq.ROUTER) if self.config.replay_endpoint else None
        try:
            endpoint = self.config.endpoint
            binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
            (self._pub.bind if binds else self._pub.connect)(endpoint)
            if self._replay is not None:
                self._replay.setsockopt(zmq.SNDHWM, 2 * (config.buffer_steps + 1))
                self._replay.bind(str(self.config.replay_endpoint))
        except zmq.ZMQError as error:
            where = f"{FLAG}: {self.config.endpoint} {self.config.replay_endpoint or ''}".strip()
            raise EnvironmentProblem(where, f"cannot be used ({error})", "choose other endpoints") from error
        self._thread = threading.Thread(target=self._run, name="kvplan-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[dict[str, Any]]) -> None:
        """Send a step's events; with none nothing is sent."""
        if events:
            self._queue.put([self._now(), events, self.rank])

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._queue.put(None)
        self._thread.join(CLOSING_S)

    def _run(self) -> None:
        import msgspec

        encode, number, topic = msgspec.msgpack.Encoder().encode, 0, self.config.topic.encode()
        while True:
            while self._replay is not None and self._replay.poll(0):
                self._answer(topic)
            try:
                batch = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if batch is None:
                break
            message = (number.to_bytes(8, "big"), encode(batch))
            self._pub.send_multipart((topic, *message))
            self._kept.append(message)
            number += 1
        self._pub.close(linger=int(CLOSING_S * 1000))
        if self._replay is not None:
            self._replay.close(linger=0)

    def _answer(self, topic: bytes) -> None:
        """Replay the batches from a number on to a client, and say that they were all."""
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3:  # not from a REQ socket, and without an address to answer to
            return
        client, _, first = frames
        for number, payload in self._kept:
            if int.from_bytes(number, "big") >= int.from_bytes(first, "big"):
                self._replay.send_multipart((client, b"", topic, number, payload))
        self._replay.send_multipart((client, b"", b"", END, b""))


def check_groups(groups: tuple[Group, ...], name: str) -> None:
    """Refuse a model whose events nobody compared with vLLM's."""
    if any(isinstance(group, MambaGroup) for group in groups):
        raise UsageError(FLAG, f"{name} has recurrent states, whose events are not simulated", "remove it")
