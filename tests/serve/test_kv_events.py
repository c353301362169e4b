"""KV events: the same, in the same order, as vLLM's own scheduler emits; on the wire in its three frames; replayed."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine.drafting import Drafting
from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.serve.kv_events import EventLog, EventsConfig, Publisher, events_config
from kvplan.serve.run import listen
from tests import oracles
from tests.support.serving import planned, serving, tokenizer, twin

FACTS = [
    json.loads(line) for line in (Path(__file__).parents[1] / "facts" / "kv_events.jsonl").read_text().splitlines()
]
HASHES = ("block_hashes", "parent_block_hash")


def in_short(events: list[dict[str, Any]], names: dict[bytes, int]) -> list[Any]:
    """Events as the facts have them: hashes by order of appearance, tokens by their number."""

    def number(key: bytes | None) -> int | None:
        return None if key is None else names.setdefault(key, len(names))

    rows = []
    for event in events:
        hashes = [number(key) for key in event.get("block_hashes", ())]
        row = [event["type"], event.get("group_idx"), hashes]
        if event["type"] == "BlockStored":
            row += [number(event["parent_block_hash"]), len(event["token_ids"])]
            row += [event[name] for name in ("block_size", "lora_id", "lora_name", "medium", "kv_cache_spec_kind")]
            row += [event.get("kv_cache_spec_sliding_window"), event.get("extra_keys")]
            row.append([len(tokens) for tokens in event.get("lookahead_token_ids", ())])
        rows.append(row)
    return rows


@pytest.mark.parametrize("trace", FACTS, ids=lambda trace: trace["name"])
def test_events_are_those_of_vllms_scheduler(trace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As recorded from vLLM 0.33's scheduler with events enabled, on the same requests."""
    logs: list[EventLog] = []
    seen: list[Any] = []
    names: dict[bytes, int] = {}
    make, apply = oracles.trace_scheduler, oracles.apply

    def watched(trace: dict[str, Any]) -> Scheduler:
        scheduler = make(trace)
        drafting = scheduler.extension(Drafting)
        lookahead = 0 if drafting is None else drafting.rules.hash_lookahead
        is_latent = trace["groups"][0]["type"] == "MLAAttentionSpec"
        logs.append(EventLog(scheduler.blocks.groups, lookahead, is_latent, {f"a{n}": n for n in range(9)}))
        scheduler.blocks.pool.watcher = logs[0]
        return scheduler

    def named(request: dict[str, Any], number: int) -> Sequence:
        seq = sequence(request, number)
        if request.get("lora"):
            seq.adapter, seq.extra_keys = f"a{request['lora']}", (("lora", request["lora"]),)
        return seq

    def applied(scheduler: Scheduler, player: Any, batch: Batch, row: dict[str, Any]) -> None:
        apply(scheduler, player, batch, row)
        seen.extend(in_short(logs[0].take(), names))

    sequence = oracles.trace_sequence
    monkeypatch.setattr(oracles, "trace_scheduler", watched)
    monkeypatch.setattr(oracles, "trace_sequence", named)
    monkeypatch.setattr(oracles, "apply", applied)
    monkeypatch.setattr(oracles, "adapters_state", lambda scheduler: {})
    for _ in oracles.replay(trace):
        pass
    assert json.loads(json.dumps(seen)) == trace["events"]


def test_a_reset_is_one_event() -> None:
    backend = twin()
    log = EventLog(backend.scheduler.blocks.groups, 0, False, {})
    backend.scheduler.blocks.pool.watcher = log
    backend.submit(list(range(40)), cache_salt="pepper")
    while backend.has_unfinished:
        backend.step()
    (stored, *_) = log.take()
    assert stored["token_ids"] == list(range(32))
    assert stored["extra_keys"] == [("pepper",), None]  # a salt belongs to the first block, as in vLLM
    assert backend.scheduler.blocks.reset_prefix_cache()
    assert log.take() == [{"type": "AllBlocksCleared"}]


GOOD = '{"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557", "topic": "kv"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("{}", None),
        ('{"enable_kv_cache_events": true, "publisher": "null"}', None),
        (GOOD, EventsConfig(enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:5557", topic="kv")),
    ],
)
def test_the_argument_is_vllms(text: str | None, expected: EventsConfig | None) -> None:
    assert events_config(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "[]", "5", '{"x": 1}', '{"hwm": 0}', '{"hwm": true}', '{"topic": 5}', '{"endpoint": "tcp://*"}',
     '{"enable_kv_cache_events": 1}', '{"publisher": "kafka"}', '{"replay_endpoint": 5}'],
)  # fmt: skip
def test_a_wrong_argument_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="--kv-events-config"):
        events_config(text)


def test_ranks_have_ports_in_a_row() -> None:
    config = EventsConfig(enable_kv_cache_events=True, replay_endpoint="tcp://*:6000").of_rank(3)
    assert (config.endpoint, config.replay_endpoint, config.publisher) == ("tcp://*:5560", "tcp://*:6003", "zmq")
    assert EventsConfig(endpoint="inproc://kv").of_rank(2).endpoint == "inproc://kv_dp2"


# --- on the wire


@pytest.fixture
def config(tmp_path: Path) -> EventsConfig:
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    endpoint, replay = (f"ipc://{tmp_path}/{name}" for name in ("live", "replay"))
    return EventsConfig(enable_kv_cache_events=True, topic="kv", endpoint=endpoint, replay_endpoint=replay)


def batches(socket: Any, number: int) -> Iterator[tuple[bytes, int, Any]]:
    """So many messages: (topic, sequence number, decoded payload)."""
    import msgspec

    for _ in range(number):
        assert socket.poll(60_000), "a message is missing"
        topic, place, payload = socket.recv_multipart()[-3:]
        yield topic, int.from_bytes(place, "big"), msgspec.msgpack.decode(payload)


def test_a_client_reads_and_has_what_it_missed_replayed(config: EventsConfig) -> None:
    import zmq

    publisher = Publisher(config, rank=1)
    backend = twin_with(publisher)
    context = zmq.Context()
    with context.socket(zmq.SUB) as reader, context.socket(zmq.DEALER) as late:
        reader.connect(config.endpoint)
        reader.subscribe(b"kv")
        with serving(backend) as server:
            prompts = count(1000, 40)
            while not reader.poll(10):  # a subscription is not acknowledged
                server.post("/v1/completions", prompt=list(range(start := next(prompts), start + 40)), max_tokens=2)
            server.post("/reset_prefix_cache")
            server.post("/v1/completions", prompt=list(range(start, start + 40)), max_tokens=2)
            live = [next(batches(reader, 1))]
            while live[-1][2][1][0]["type"] != "AllBlocksCleared":
                live += batches(reader, 1)
            sources = server.get("/kv_event_sources")
        assert sources["1"]["endpoint"] == config.endpoint
        (_, _, before), (topic, number, (moment, events, rank)) = live[-2:]
        assert [row[1] for row in live] == list(range(live[0][1], live[0][1] + len(live)))
        assert (topic, rank, before[1][0]["type"]) == (b"kv", 1, "BlockStored")
        assert abs(moment - time.time()) < 600
        assert events[1]["token_ids"] == list(range(start, start + 32))
        assert events[1]["block_hashes"] == before[1][0]["block_hashes"]
        assert config.replay_endpoint is not None
        late.connect(config.replay_endpoint)
        late.send_multipart([b"", number.to_bytes(8, "big")])
        assert next(batches(late, 1)) == live[-1]
        assert late.poll(60_000)
        assert late.recv_multipart() == [b"", b"", b"\xff" * 8, b""]  # -1: that was all
    context.destroy(linger=0)
    publisher.close()


def twin_with(publisher: Publisher) -> Any:
    from kvplan.serve.twin import Twin
    from kvplan.simulate.kernels.library import Shares
    from kvplan.simulate.steptime import step_time

    return Twin(planned(), step_time(planned(), Shares(), None), tokenizer(), speed=1e4, publisher=publisher)


def test_an_endpoint_in_use_is_named(config: EventsConfig) -> None:
    with listen("127.0.0.1", 0) as listener:
        endpoint = f"tcp://*:{listener.getsockname()[1]}"
        with pytest.raises(EnvironmentProblem, match=r"^--kv-events-config: tcp://.* cannot be used"):
            Publisher(replace(config, endpoint=endpoint))
