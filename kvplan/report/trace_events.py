"""Events over time for ui.perfetto.dev: tracks of slices, counters and instants, in Perfetto's format or as JSON."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal

from kvplan.core.errors import EnvironmentProblem
from kvplan.core.records import dataclass

if TYPE_CHECKING:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

    from kvplan.measure.rundir import Run
    from kvplan.simulate.tracks import RequestTrack, Tracks

FORMATS: Final = {".pftrace": "pftrace", ".json": "json"}
GENERATOR: Final = "written by kvplan"
Sampled = Literal[
    "rss",
    "torch_allocated",
    "torch_reserved",
    "device_used",
    "process_used",
    "num_kv_tokens",
    "num_filled_slots",
    "generation_tokens",
    "power_w",
    "sm_clock_mhz",
]
SAMPLED: Final[dict[Sampled, str]] = {  # sampled values of a run that steps do not report, and their units
    "rss": "bytes",
    "torch_allocated": "bytes",
    "torch_reserved": "bytes",
    "device_used": "bytes",
    "process_used": "bytes",
    "num_kv_tokens": "",
    "num_filled_slots": "",
    "generation_tokens": "",
    "power_w": "W",
    "sm_clock_mhz": "MHz",
}
FLAG: Final = "--trace-events"
SEQUENCE: Final = 1  # of packets: all are from one writer


@dataclass(frozen=True, slots=True)
class Slice:
    """An interval; seconds."""

    name: str
    start: float
    end: float
    figures: Mapping[str, int | float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Track:
    """A line of the page: consecutive slices, optionally inside one that spans them, and instants."""

    name: str
    slices: Sequence[Slice]
    whole: Slice | None = None
    instants: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, slots=True)
class Counter:
    """A figure over time: (seconds, value)."""

    name: str
    unit: str
    points: Sequence[tuple[float, int | float]]


@dataclass(frozen=True, slots=True)
class Process:
    """Tracks drawn together: a server's, or a run's samples. `kind` is the heading of its tracks."""

    name: str
    counters: Sequence[Counter]
    kind: str
    tracks: Sequence[Track]


def require_perfetto() -> None:
    """Raise EnvironmentProblem if perfetto is missing."""
    if find_spec("perfetto") is None:
        raise EnvironmentProblem(
            FLAG, "perfetto is not installed", "pip install '.[trace]' in kvplan's sources, or write .json"
        )


def written(processes: Iterable[Process], form: str) -> Iterator[bytes]:
    """Yield the file's bytes, piece by piece."""
    return as_pftrace(processes) if form == "pftrace" else as_json(processes)


# --- contents ---------------------------------------------------------------------------------------------------------


def server(tracks: "Tracks") -> Process:
    """A server: its counters at every step, and a track per request in order of arrival."""
    begin = tracks.begin_s
    counters = [
        Counter(name, "", [(begin + seconds, value) for seconds, value in points])
        for name, points in tracks.counters.items()
    ]
    requests = sorted(tracks.requests, key=lambda request: request.arrival)
    return Process(tracks.name, counters, "requests", [_request(request, begin) for request in requests])


def _request(request: "RequestTrack", begin: float) -> Track:
    return Track(
        request.name,
        [Slice(name, begin + start, begin + end) for name, start, end in request.phases],
        Slice(request.name, begin + request.arrival, begin + request.end, request.figures),
        [("preempted", begin + seconds) for seconds in request.preempted],
    )


def samples(run: "Run") -> Process:
    """A run's stages, and the values sampled between steps."""
    counters = [Counter(name, unit, points) for name, unit in SAMPLED.items() if (points := _sampled(run, name))]
    stages = [(event["t"], str(event["stage"])) for event in run.events if event.get("event") == "stage"]
    ends = [start for start, _ in stages[1:]] + [run.samples[-1]["t"] if run.samples else 0.0]
    slices = [Slice(name, start, max(start, end)) for (start, name), end in zip(stages, ends, strict=True)]
    return Process("samples", counters, "run", [Track("stages", slices)])


def _sampled(run: "Run", name: Sampled) -> list[tuple[float, int | float]]:
    points = []
    for sample in run.samples:
        value: object = sample.get(name)  # from a file: may be anything
        if isinstance(value, int | float):
            points.append((sample["t"], value))
    return points


# --- Perfetto's protobuf ----------------------------------------------------------------------------------------------


def as_pftrace(processes: Iterable[Process]) -> Iterator[bytes]:
    """A perfetto.protos.Trace in pieces, one per track: their concatenation is the whole message."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TracePacket, TrackDescriptor

    uuid = 0

    def packed(packets: Iterable[TracePacket]) -> bytes:
        return bytes(Trace(packet=packets).SerializeToString())

    def described(**values: object) -> TracePacket:
        nonlocal uuid
        uuid += 1
        descriptor = TrackDescriptor(uuid=uuid, **values)
        return TracePacket(trusted_packet_sequence_id=SEQUENCE, track_descriptor=descriptor)

    for number, process in enumerate(processes, 1):
        names = {"pid": number, "process_name": process.name}
        yield packed([described(process=names, description=GENERATOR)])
        parent = uuid
        for counter in process.counters:
            unit = {"unit": "UNIT_SIZE_BYTES"} if counter.unit == "bytes" else {"unit_name": counter.unit or "count"}
            packets = [described(name=counter.name, parent_uuid=parent, counter=unit)]
            packets += counted(counter, uuid)
            yield packed(packets)
        yield packed([described(name=process.kind, parent_uuid=parent, child_ordering="CHRONOLOGICAL")])
        group = uuid
        for track in process.tracks:
            packets = [described(name=track.name, parent_uuid=group)]
            packets += drawn(track, uuid)
            yield packed(packets)


def counted(counter: Counter, uuid: int) -> Iterator["TracePacket"]:
    """Yield a packet for each value."""
    for seconds, value in counter.points:
        packet = _packet(seconds, uuid, "TYPE_COUNTER")
        if isinstance(value, int):
            packet.track_event.counter_value = value
        else:
            packet.track_event.double_counter_value = value
        yield packet


def drawn(track: Track, uuid: int) -> Iterator["TracePacket"]:
    """Begin and end of each slice, in order; if one ends as the next begins, the end comes first."""
    if track.whole is not None:
        yield _begin(track.whole, uuid)
    for part in track.slices:
        yield _begin(part, uuid)
        yield _packet(part.end, uuid, "TYPE_SLICE_END")
    for name, seconds in track.instants:
        packet = _packet(seconds, uuid, "TYPE_INSTANT")
        packet.track_event.name = name
        yield packet
    if track.whole is not None:
        yield _packet(track.whole.end, uuid, "TYPE_SLICE_END")


def _begin(part: Slice, uuid: int) -> "TracePacket":
    packet = _packet(part.start, uuid, "TYPE_SLICE_BEGIN")
    packet.track_event.name = part.name
    for name, value in part.figures.items():
        annotation = packet.track_event.debug_annotations.add(name=name)
        match value:
            case int():
                annotation.int_value = value
            case float():
                annotation.double_value = value
            case str():
                annotation.string_value = value
    return packet


def _packet(seconds: float, uuid: int, kind: str) -> "TracePacket":
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackEvent

    return TracePacket(
        timestamp=nanoseconds(seconds),
        trusted_packet_sequence_id=SEQUENCE,
        track_event=TrackEvent(type=kind, track_uuid=uuid),
    )


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


# --- Chrome's JSON ----------------------------------------------------------------------------------------------------


def as_json(processes: Iterable[Process]) -> Iterator[bytes]:
    """Trace events in microseconds: a process per process, a thread per track."""
    separator = f'{{"otherData": {{"generator": "{GENERATOR}"}}, "traceEvents": ['
    for pid, process in enumerate(processes, 1):
        for event in _events(process, pid):
            yield f"{separator}\n{json.dumps(event)}".encode()
            separator = ","
    yield b"\n]}\n"


def _events(process: Process, pid: int) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process.name}}
    for counter in process.counters:
        for seconds, value in counter.points:
            yield {"ph": "C", "name": counter.name, "pid": pid, "ts": _microseconds(seconds), "args": {"value": value}}
    for tid, track in enumerate(process.tracks, 1):
        place = {"pid": pid, "tid": tid}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": track.name}}
        for part in (*([track.whole] if track.whole else []), *track.slices):
            duration = (nanoseconds(part.end) - nanoseconds(part.start)) / 1000
            times = {"ts": _microseconds(part.start), "dur": duration}
            yield {"ph": "X", "name": part.name, **place, **times, "args": dict(part.figures)}
        for name, seconds in track.instants:
            yield {"ph": "i", "s": "t", "name": name, **place, "ts": _microseconds(seconds)}


def _microseconds(seconds: float) -> float:
    return nanoseconds(seconds) / 1000
