"""A fleet of replicas behind a router on one clock: one or several kinds, with autoscaling and failures.

Every replica is a run of its own (kvplan.simulate.runs), coupled to the others only by the requests that the router
sends it. So a replica is simulated up to a time only when it gets a request, or when a load-aware router might see one
of its requests end. If the router ignores loads, the replicas are independent simulations, each with its share of the
requests, and can run in separate processes.

With disaggregation, `prefill` replicas hand prompts to `decode` replicas over a link: each prefill replica sends one
prompt's KV at a time. The decode replica recomputes the last prompt token, as vLLM's does.
Not modeled: the network latency of requests and responses, and the blocks that a prompt occupies until it is sent.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import field, replace
from heapq import heapify, heappop, heappush
from math import inf, nextafter
from typing import Literal, Protocol

from kvplan.core.errors import UsageError
from kvplan.core.processes import Jobs, at_most, in_order, is_shared
from kvplan.core.records import dataclass
from kvplan.simulate.apart import Share, Task, finished
from kvplan.simulate.arrivals import Arrivals, Open
from kvplan.simulate.counts import Counts
from kvplan.simulate.handover import Link
from kvplan.simulate.records import Records
from kvplan.simulate.runs import Run
from kvplan.simulate.unshared import HandedOver, Unshared
from kvplan.workloads.trace import TraceRequest

Role = Literal["server", "prefill", "decode"]
State = Literal["starting", "serving", "draining", "down", "gone"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A group of identical replicas.

    start        makes a run from arrivals and the tokens per prefix id
    token_bytes  KV bytes per token, over all ranks
    num_gpus     GPUs per replica
    """

    name: str
    start: Callable[[Arrivals, int | None], Run]
    role: Role = "server"
    token_bytes: int = 0
    num_gpus: int = 1


@dataclass(slots=True)
class Sent:
    """A routed request: its number in the fleet, its arrival time at the fleet, and the request itself."""

    number: int
    arrival: float
    request: TraceRequest


class Inbox:
    """Arrivals of one replica: the requests that the router sends it."""

    def __init__(self, on_end: Callable[[float], None]) -> None:
        self._queue: deque[tuple[float, TraceRequest]] = deque()
        self._on_end = on_end

    def put(self, time: float, request: TraceRequest) -> None:
        self._queue.append((time, request))

    def next_time(self) -> float | None:
        return self._queue[0][0] if self._queue else None

    def peek(self) -> TraceRequest:
        return self._queue[0][1]

    def pop(self) -> tuple[float, TraceRequest]:
        return self._queue.popleft()

    def ended(self, time: float) -> None:
        self._on_end(time)

    def numbers(self, count: int) -> range:
        """Return the numbers of the requests still queued, of the `count` that were put in."""
        return range(count - len(self._queue) + 1, count + 1)


@dataclass(slots=True)
class Life:
    """A replica between two failures: its run, and the fleet number of each of its requests."""

    run: Run
    inbox: Inbox
    numbers: "array[int]" = field(default_factory=lambda: array("q"))
    sent: list[Sent] = field(default_factory=list)
    num_handed: int = 0  # records handed over to decode replicas


@dataclass(slots=True)
class Replica:
    """One server of the fleet.

    load      requests sent to it that have not finished
    begun, ended  seconds between which it is paid for
    down_s        seconds of those before down_since in which it was starting or down
    down_since    since when it has been starting or down, or None
    """

    index: int
    kind: Kind
    state: State = "serving"
    begun: float = 0.0
    ended: float | None = None
    down_s: float = 0.0
    down_since: float | None = None
    load: int = 0
    lives: list[Life] = field(default_factory=list)
    link_free: float = 0.0
    failures: int = 0

    @property
    def run(self) -> Run:
        return self.lives[-1].run


class Router(Protocol):
    """Chooses one of the serving replicas; `looks` is True if it reads loads, which must then be current."""

    looks: bool

    def choose(self, replicas: list[Replica], request: TraceRequest) -> Replica: ...


@dataclass(frozen=True, slots=True)
class ReplicaFailure:
    """Loss of a replica and its requests, from `start` for `seconds`."""

    replica: int
    start: float
    seconds: float = inf


@dataclass(frozen=True, slots=True)
class Autoscale:
    """Autoscaling as Kubernetes does for an average value: ceil(total / target) replicas, unless within tolerance.

    target     unfinished requests per replica
    every      seconds between two decisions, and the age of the reading that a decision uses
    provision  seconds until a new replica serves
    settle     seconds over which the highest decision counts before replicas are removed
    tolerance  deviation of the ratio from 1 that changes nothing

    Source: the documentation of Kubernetes' HorizontalPodAutoscaler: every 15 s, 10%, 300 s.
    """

    fewest: int
    highest: int
    target: float
    every: float = 15.0
    provision: float = 180.0
    settle: float = 300.0
    tolerance: float = 0.1


Event = tuple[float, int, Callable[[float], None]]


@dataclass(slots=True)
class Fleet:
    """All replicas, serving one stream of arrivals.

    kinds  kind of each initial replica, in order
    stop   polled; True ends the run early
    """

    kinds: tuple[Kind, ...]
    arrivals: Arrivals
    router: Router
    run_len: int | None = None
    failures: tuple[ReplicaFailure, ...] = ()
    autoscale: Autoscale | None = None
    link: Link | None = None
    decode_router: Router | None = None
    stop: Callable[["Fleet"], bool] | None = None

    clock: float = 0.0
    replicas: list[Replica] = field(default_factory=list)
    num_arrived: int = 0
    num_finished: int = 0
    num_resent: int = 0  # sent again because a replica failed
    records: Records = field(default_factory=Records)
    sizes: list[tuple[float, int]] = field(default_factory=list)  # (seconds, serving replicas) at each change
    origin: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _events: list[Event] = field(default_factory=list)
    _num_events: int = 0
    _ends: list[tuple[float, int, int]] = field(default_factory=list)  # finished requests that users have not seen yet
    _bounds: list[tuple[float, int, int]] = field(default_factory=list)  # heap of lower bounds of each next end
    _held: deque[Sent] = field(default_factory=deque)  # requests that wait for a serving replica
    _readings: deque[tuple[float, int]] = field(default_factory=deque)
    _decisions: deque[tuple[float, int]] = field(default_factory=deque)
    _looks: bool = False  # whether loads must be current
    _is_tied: bool = False  # whether a finished request may trigger the next one
    _arrivals_of: "array[float]" = field(default_factory=lambda: array("d"))
    _versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._is_tied = self.link is not None or not isinstance(self.arrivals, Open)
        self._looks = self.router.looks or self.autoscale is not None or self._is_tied
        for kind in self.kinds:
            self._start(kind, 0.0)
        for failure in self.failures:
            self._at(failure.start, lambda time, failure=failure: self._fail(failure, time))  # type: ignore[misc]
        if self.autoscale is not None:
            self._at(self.autoscale.every, self._scale)
        self._note_size(0.0)

    # --- time ---------------------------------------------------------------------------------------------------

    @property
    def is_apart(self) -> bool:
        """True if nothing that happens on one replica changes the requests of another."""
        return not self._looks and not self.failures

    def run(self, jobs: Jobs = 1) -> None:
        """Run until the last request ends or `stop` returns True; in `jobs` processes if replicas are independent."""
        if is_shared(jobs) and self.is_apart:
            self._run_apart(jobs)
        else:
            while self._advance():
                if self.stop is not None and self.stop(self):
                    break
        self._finish()

    def _run_apart(self, jobs: Jobs) -> None:
        """Run the replicas in processes, with the same results; if stopped early, drop those that are not done."""
        shares = self._shares()
        tasks = [
            Task(replica.kind.start, self.run_len, share) for replica, share in zip(self.replicas, shares, strict=True)
        ]
        done = 0
        with closing(in_order(finished, None, tasks, at_most(jobs, len(tasks)), name="simulate")) as results:
            for replica, share, result in zip(self.replicas, shares, results, strict=False):
                result.give(replica.run)
                done += 1
                self.num_finished += len(share)
                if self.stop is not None and self.stop(self):
                    break
        if done < len(self.replicas):
            self.replicas, self.sizes, self.clock = self.replicas[:done], [(0.0, done)], 0.0
            self.num_arrived = self.num_finished

    def _shares(self) -> list[Share]:
        """Route all arrivals; return the requests of each replica."""
        shares = [Share() for _ in self.replicas]
        serving = self._serving("server")
        while (time := self.arrivals.next_time()) is not None:
            _, request = self.arrivals.pop()
            self.num_arrived += 1
            self._arrivals_of.append(time)
            replica = self.router.choose(serving, request)
            replica.lives[-1].numbers.append(self.num_arrived)
            shares[replica.index].put(time, request, has_prefixes=self.run_len is not None)
            self.clock = time
        return shares

    def _advance(self) -> bool:
        """Process the next event: a response seen by its user, a replica's change, an arrival, or steps of a run."""
        next_at = self.arrivals.next_time()
        arrival = inf if next_at is None else next_at
        event = self._events[0][0] if self._events else inf
        seen = self._ends[0][0] if self._ends else inf
        bounds = self._bounds
        while bounds and bounds[0][2] != self._versions[bounds[0][1]]:
            heappop(bounds)
        bound = bounds[0][0] if bounds else inf
        first = min(arrival, event, seen)
        if bound < first:
            self._bring_up(first)
        elif first == inf or (self.autoscale is not None and next_at is None and not self._is_busy()):
            if not self._looks:
                for replica in self.replicas:
                    replica.run.run()
            return False
        else:
            self.clock = max(self.clock, first)
            if seen == first:
                _, index, _ = heappop(self._ends)
                self.replicas[index].load -= 1
                self._see(self.replicas[index], seen)
            elif event == first:
                heappop(self._events)[2](event)
            else:
                _, request = self.arrivals.pop()
                self.num_arrived += 1
                self._arrivals_of.append(arrival)
                self._route(Sent(self.num_arrived, arrival, request), arrival)
        return True

    def _bring_up(self, first: float) -> None:
        """Run the replica with the earliest possible end, up to the next time something outside can affect it."""
        bound, index, _ = heappop(self._bounds)
        run = self.replicas[index].run
        if self._is_tied:  # its own end may bring it a request
            first = min(first, nextafter(bound, inf))
        run.run(first)
        self._note_bound(index, run.earliest_end())

    def _note_bound(self, index: int, bound: float) -> None:
        self._versions[index] += 1
        if bound < inf:
            heappush(self._bounds, (bound, index, self._versions[index]))

    def _is_busy(self) -> bool:
        return bool(self._held) or any(replica.load for replica in self.replicas)

    def _see(self, replica: Replica, time: float) -> None:
        if replica.kind.role == "prefill":
            self._hand_over(replica, time)
        else:
            self.num_finished += 1
            self.arrivals.ended(time)
        if replica.state == "draining" and not replica.load:
            self._leave(replica, time)

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        self._num_events += 1
        heappush(self._events, (time, self._num_events, action))

    # --- requests -----------------------------------------------------------------------------------------------

    def _serving(self, role: Role) -> list[Replica]:
        return [replica for replica in self.replicas if replica.state == "serving" and replica.kind.role == role]

    def _route(self, sent: Sent, time: float) -> None:
        first: Role = "server" if self.link is None else "prefill"
        serving = self._serving(first)
        if not serving:
            self._held.append(sent)
            return
        request = sent.request
        if first == "prefill":
            request = replace(request, arrival_s=time, output_tokens=1)
        self._send(self.router.choose(serving, request), sent, request, time)

    def _send(self, replica: Replica, sent: Sent, request: TraceRequest, time: float) -> None:
        life = replica.lives[-1]
        life.numbers.append(sent.number)
        if self.failures or self.link is not None:
            life.sent.append(sent)
        life.run.run(time)
        life.inbox.put(time, request)
        replica.load += 1
        if self._looks:
            self._note_bound(replica.index, max(time, life.run.clock))

    def _hand_over(self, replica: Replica, time: float) -> None:
        """Send the prompts that a prefill replica has computed to decode replicas."""
        assert self.link is not None
        life = replica.lives[-1]
        numbers = life.run.records.number
        while life.num_handed < len(numbers) and life.run.records.ended[life.num_handed] <= time:
            sent = life.sent[numbers[life.num_handed] - 1]
            life.num_handed += 1
            size = sent.request.prompt_tokens * replica.kind.token_bytes
            replica.link_free, arrival = self.link.send(replica.link_free, time, size)
            self._at(arrival, lambda now, sent=sent: self._decode(sent, now))  # type: ignore[misc]

    def _decode(self, sent: Sent, time: float) -> None:
        serving = self._serving("decode")
        if not serving:
            self._held.append(sent)
            return
        original = sent.request
        request = HandedOver(time, original.prompt_tokens, original.output_tokens)
        self._send((self.decode_router or self.router).choose(serving, request), sent, request, time)

    # --- replicas -----------------------------------------------------------------------------------------------

    def _start(self, kind: Kind, time: float, state: State = "serving") -> Replica:
        replica = Replica(len(self.replicas), kind, state, begun=time, down_since=time if state == "starting" else None)
        self.replicas.append(replica)
        self._versions.append(0)
        self._renew(replica, time)
        return replica

    def _renew(self, replica: Replica, time: float) -> None:
        """Give a replica a fresh run."""

        def on_end(seen: float) -> None:
            if self._looks:
                self._num_events += 1
                heappush(self._ends, (seen, replica.index, self._num_events))
            else:
                self.num_finished += 1

        inbox = Inbox(on_end)
        run = replica.kind.start(inbox, self.run_len)
        if replica.kind.role != "server" and not isinstance(run, Unshared):
            raise UsageError(
                "--disaggregate",
                "prompts that share prefixes, and layers with windows or states, cannot be handed over in a simulation",
                "remove it, or use a model that keeps every token and a load without shared prefixes",
            )
        if replica.kind.role == "decode":  # its front end sees no request: that of the prefill replica took it in
            run.arrivals = inbox
        run.clock = time
        replica.lives.append(Life(run, inbox))

    def _leave(self, replica: Replica, time: float) -> None:
        replica.state, replica.ended = "gone", time

    def _note_size(self, time: float) -> None:
        count = sum(replica.state == "serving" for replica in self.replicas)
        if self.sizes and self.sizes[-1][0] == time:
            self.sizes.pop()
        if not self.sizes or self.sizes[-1][1] != count:
            self.sizes.append((time, count))

    def _fail(self, failure: ReplicaFailure, time: float) -> None:
        if failure.replica >= len(self.replicas):
            return
        replica = self.replicas[failure.replica]
        if replica.state in ("down", "gone"):
            return
        run, life = replica.run, replica.lives[-1]
        run.run(time)
        for seen, index, _ in sorted(self._ends):  # complete responses on their way to users
            if index == replica.index:
                self._see(replica, seen)
        self._ends = [end for end in self._ends if end[1] != replica.index]
        heapify(self._ends)
        replica.state, replica.load = "down", 0
        replica.failures += 1
        replica.down_since = time if replica.down_since is None else replica.down_since
        self._versions[replica.index] += 1
        lost = sorted([*run.live(), *life.inbox.numbers(len(life.numbers))])
        self._renew(replica, time)
        self._note_size(time)
        if failure.seconds < inf:
            self._at(time + failure.seconds, lambda now: self._return(replica, now))
        for number in lost:
            self.num_resent += 1
            self._route(life.sent[number - 1], time)

    def _return(self, replica: Replica, time: float) -> None:
        if replica.state in ("down", "starting"):
            replica.state = "serving"
            replica.down_s, replica.down_since = replica.down_s + time - (replica.down_since or 0.0), None
            replica.run.clock = max(replica.run.clock, time)
            self._note_size(time)
            stranded, self._held = self._held, deque()
            for sent in stranded:
                self._route(sent, time)

    def _scale(self, time: float) -> None:
        """Take a load reading, and decide on the previous one."""
        scale = self.autoscale
        assert scale is not None
        total = sum(replica.load for replica in self.replicas if replica.state == "serving") + len(self._held)
        self._readings.append((time, total))
        self._at(time + scale.every, self._scale)
        if len(self._readings) < 2:
            return
        _, seen = self._readings.popleft()
        present = [replica for replica in self.replicas if replica.state in ("starting", "serving")]
        count = len(present)
        ratio = seen / (scale.target * count) if count else inf
        needed = count if abs(ratio - 1) <= scale.tolerance else -(-seen // scale.target)
        needed = int(min(scale.highest, max(scale.fewest, needed)))
        self._decisions.append((time, needed))
        while self._decisions[0][0] < time - scale.settle:
            self._decisions.popleft()
        highest = max(decision for _, decision in self._decisions)
        if needed > count:
            for _ in range(needed - count):
                replica = self._start(self.kinds[0], time, "starting")
                self._at(time + scale.provision, lambda now, replica=replica: self._return(replica, now))  # type: ignore[misc]
        elif highest < count:
            for replica in sorted(present, key=lambda replica: (replica.state == "serving", replica.load))[
                : count - highest
            ]:
                if replica.state == "starting" or not replica.load:
                    self._leave(replica, time)
                else:
                    replica.state = "draining"
            self._note_size(time)

    # --- the end ------------------------------------------------------------------------------------------------

    @property
    def runs(self) -> Iterator[Run]:
        for replica in self.replicas:
            for life in replica.lives:
                yield life.run

    @property
    def num_held(self) -> int:
        """Number of requests that wait for a serving replica."""
        return len(self._held)

    @property
    def counts(self) -> Counts:
        """Counts over all replicas; requests that no replica could take count as failed."""
        parts = [run.counts for run in self.runs]
        return Counts(
            arrived=self.num_arrived,
            rejected=sum(counts.rejected for counts in parts),
            failed=sum(counts.failed for counts in parts) + len(self._held),
            steps=sum(counts.steps for counts in parts),
            jumped=sum(counts.jumped for counts in parts),
            prompt_tokens=sum(counts.prompt_tokens for counts in parts),
            output_tokens=sum(self.records.output),
        )

    def _finish(self) -> None:
        """Merge all records, with the fleet's request numbers and arrival times."""
        prompts: dict[int, tuple[float, int, int]] = {}
        rows: list[tuple[int, Records, int]] = []
        for replica in self.replicas:
            for life in replica.lives:
                records, numbers = life.run.records, life.numbers
                for row, number in enumerate(records.number):
                    if replica.kind.role == "prefill":
                        prompts[numbers[number - 1]] = (
                            records.admitted[row],
                            records.cached[row],
                            records.preemptions[row],
                        )
                    else:
                        rows.append((numbers[number - 1], records, row))
        rows.sort(key=lambda entry: entry[0])
        merged = self.records = Records()
        for number, records, row in rows:
            admitted, cached, preemptions = prompts.get(number) or (records.admitted[row], records.cached[row], 0)
            merged.number.append(number)
            merged.arrival.append(self._arrivals_of[number - 1])
            merged.admitted.append(admitted)
            merged.first_token.append(records.first_token[row])
            merged.ended.append(records.ended[row])
            merged.prompt.append(records.prompt[row])
            merged.output.append(records.output[row])
            merged.cached.append(cached)
            merged.loaded.append(records.loaded[row])
            merged.preemptions.append(records.preemptions[row] + preemptions)
        self.clock = max([self.clock, *self.records.ended])
