"""Fleets: against as many simulations apart, against stepping every replica at every moment, and against theory."""

import random
from dataclasses import fields, replace
from math import exp, factorial, lgamma, log
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.block_manager import FullGroup
from kvplan.core.processes import in_order
from kvplan.simulate.arrivals import Arrivals, Closed, Open
from kvplan.simulate.fleet import Autoscale, Fleet, Kind, ReplicaFailure, Router
from kvplan.simulate.fleet_result import fleet_result
from kvplan.simulate.handover import Link
from kvplan.simulate.host import Host, Intake
from kvplan.simulate.loop import Simulation
from kvplan.simulate.records import Records
from kvplan.simulate.routers import LeastLoaded, Prefix, Random, RoundRobin, RouterName, router
from kvplan.simulate.runs import Run
from kvplan.simulate.scheduling import SimulatedConfig
from kvplan.simulate.steptime import StepTime
from kvplan.simulate.unshared import Unshared
from kvplan.workloads.trace import TraceRequest
from tests.simulate.test_unshared import ODD, REACHES
from tests.support.step_times import Constant

CONFIG = SimulatedConfig(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=256, batch_queue_depth=2)
GROUPS = (FullGroup(4),)
HOST = Host(request=0.01, prompt_token=1e-4)


def by_change(
    arrivals: Arrivals, run_len: int | None, *, config: SimulatedConfig = CONFIG, times: StepTime = ODD
) -> Run:
    return Unshared(config, 60, GROUPS, times, Intake(arrivals, HOST))


def by_scheduler(arrivals: Arrivals, run_len: int | None) -> Run:
    return Simulation(CONFIG, 60, GROUPS, REACHES, ODD, Intake(arrivals, HOST), run_len)


KIND = Kind("small", by_change)


def poisson(count: int, rate: float, seed: int = 0, *, prompt: int = 30, output: int = 30) -> tuple[TraceRequest, ...]:
    rng = random.Random(seed)
    time, drawn = 0.0, []
    for _ in range(count):
        time += rng.expovariate(rate)
        drawn.append(TraceRequest(time, rng.randint(1, prompt), rng.randint(1, output)))
    return tuple(drawn)


def fleet(requests: tuple[TraceRequest, ...], count: int, choice: Router, kind: Kind = KIND, **more: Any) -> Fleet:
    servers = Fleet((kind,) * count, Open(iter(requests)), choice, **more)
    servers.run()
    return servers


def rows(records: Records, names: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    return {field.name: list(getattr(records, field.name)) for field in fields(Records) if field.name not in names}


def test_random_routing_is_as_many_simulations_apart() -> None:
    requests = poisson(300, 6.0)
    together = fleet(requests, 3, Random(7))
    rng = random.Random("router 7")
    shares: list[list[TraceRequest]] = [[], [], []]
    for request in requests:
        shares[rng.choice((0, 1, 2))].append(request)
    for share, replica in zip(shares, together.replicas, strict=True):
        alone = by_scheduler(Open(iter(share)), None)
        alone.run()
        assert rows(replica.run.records) == rows(alone.records)
        assert replica.run.timeline.buckets == alone.timeline.buckets
    assert len(together.records) == 300


@pytest.mark.parametrize(("name", "runs"), [("random", "shared"), ("round-robin", "own")])
def test_processes_answer_as_one(name: RouterName, runs: str) -> None:
    """Every record, level and count, over the scheduler and by what changes, with two kinds of servers."""
    kinds = (KIND, Kind("scheduler", by_scheduler), KIND)
    requests = poisson(240, 6.0)
    if runs == "shared":
        requests = tuple(replace(request, prefix_ids=(i % 5,) * 2) for i, request in enumerate(requests))
        kinds = (Kind("scheduler", by_scheduler),) * 3
    run_len = 8 if runs == "shared" else None
    single, many = (Fleet(kinds, Open(iter(requests)), router(name, 3, run_len), run_len) for _ in range(2))
    single.run()
    many.run(2)
    assert rows(single.records) == rows(many.records)
    assert len(single.records) == 240
    assert (single.clock, single.num_arrived, single.counts, single.sizes) == (
        many.clock,
        many.num_arrived,
        many.counts,
        many.sizes,
    )
    for alone, by_process in zip(single.runs, many.runs, strict=True):
        assert alone.timeline.buckets == by_process.timeline.buckets
    assert fleet_result(single) == fleet_result(many)
    assert (fleet_result(single).total.hit_tokens > 0) == (runs == "shared")


def test_servers_that_depend_on_each_other_are_one_process() -> None:
    requests = poisson(30, 3.0)
    for choice, more in ((LeastLoaded(), {}), (Random(0), {"failures": (ReplicaFailure(0, 2.0),)})):
        servers = Fleet((KIND,) * 2, Open(iter(requests)), choice, **more)  # type: ignore[arg-type]
        assert not servers.is_apart
        servers.run(2)
        assert len(servers.records) == 30


def test_stopped_between_servers_the_fleet_is_those_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(do: Any, shared: Any, tasks: Any, jobs: int, *, name: str) -> Any:
        return in_order(do, shared, tasks, 1, name=name)

    monkeypatch.setattr("kvplan.simulate.fleet.in_order", here)
    servers = Fleet(
        (KIND,) * 3, Open(iter(poisson(90, 6.0))), RoundRobin(), stop=lambda running: running.num_finished > 0
    )
    servers.run(2)
    assert list(servers.records.number) == list(range(1, 91, 3))
    assert servers.counts.arrived == len(servers.records) == 30
    assert fleet_result(servers).size_peak == 1


@pytest.mark.parametrize("choice", [RoundRobin(), LeastLoaded(), Prefix(None), Random(0)])
def test_a_fleet_of_one_is_the_server(choice: Router) -> None:
    requests = poisson(120, 3.0)
    alone = by_scheduler(Open(iter(requests)), None)
    alone.run()
    assert rows(fleet(requests, 1, choice).replicas[0].run.records) == rows(alone.records)


class EveryMoment:
    """Least loaded, by replicas that are all brought up to the moment of each request: what Fleet does by bounds."""

    def __init__(self, count: int) -> None:
        self.ends: list[list[float]] = [[] for _ in range(count)]
        self.sent = [0] * count

    def run(self, requests: tuple[TraceRequest, ...]) -> list[int]:
        from kvplan.simulate.fleet import Inbox

        count = len(self.sent)
        inboxes = [Inbox(self.ends[index].append) for index in range(count)]
        servers = [by_scheduler(inbox, None) for inbox in inboxes]
        last, chosen = [0] * count, []
        for number, request in enumerate(requests, 1):
            for server in servers:
                server.run(request.arrival_s)
            loads = [
                sent - sum(end <= request.arrival_s for end in ends)
                for sent, ends in zip(self.sent, self.ends, strict=True)
            ]
            index = min(range(count), key=lambda index: (loads[index], last[index]))
            last[index] = number
            self.sent[index] += 1
            inboxes[index].put(request.arrival_s, request)
            chosen.append(index)
        return chosen


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 4), st.floats(0.2, 20.0), st.integers(0, 99))
def test_the_least_loaded_is_known_without_stepping_every_replica(count: int, rate: float, seed: int) -> None:
    requests = poisson(40, rate, seed)
    for start in (by_change, by_scheduler):
        servers = fleet(requests, count, LeastLoaded(), Kind("", start))
        chosen = {
            number: replica.index for replica in servers.replicas for life in replica.lives for number in life.numbers
        }
        assert [chosen[number] for number in sorted(chosen)] == EveryMoment(count).run(requests)


# --- theory -----------------------------------------------------------------------------------------------------------


def erlang_wait(servers: int, load: float, service: float) -> float:
    """Mean wait of M/M/c by Erlang's formula; load = arrivals x service."""
    rho = load / servers
    top = load**servers / factorial(servers) / (1 - rho)
    chance = top / (sum(load**k / factorial(k) for k in range(servers)) + top)
    return chance * service / (servers * (1 - rho))


def waits(servers: Fleet) -> float:
    records = servers.records
    return sum(a - b for a, b in zip(records.admitted, records.arrival, strict=True)) / len(records)


def markov(count: int, rate: float, *, fixed: bool, mean: int = 20) -> tuple[TraceRequest, ...]:
    """Poisson arrivals; answers of `mean` tokens, or exponential of that mean."""
    rng = random.Random(5)
    time, drawn = 0.0, []
    for _ in range(count):
        time += rng.expovariate(rate)
        drawn.append(TraceRequest(time, 1, mean if fixed else max(1, round(rng.expovariate(1 / mean)))))
    return tuple(drawn)


def long_station(arrivals: Arrivals, seats: int) -> Run:
    config = SimulatedConfig(max_num_batched_tokens=64, max_num_seqs=seats, max_model_len=1 << 20)
    return Unshared(config, 1 << 20, (FullGroup(16),), Constant(0.05), arrivals)


@pytest.mark.parametrize(("seats", "rho"), [(1, 0.6), (4, 0.8)])
def test_a_server_of_c_seats_waits_as_erlang_says(seats: int, rho: float) -> None:
    """M/M/c: a step is 50 ms, an answer 1 s on average."""
    requests = markov(8_000, rho * seats, fixed=False)
    servers = fleet(requests, 1, RoundRobin(), Kind("", lambda arrivals, _: long_station(arrivals, seats)))
    assert waits(servers) == pytest.approx(
        erlang_wait(seats, rho * seats, 1.0), rel=0.12
    )  # 20,000 arrivals: 2 of 3 in 6%


def test_random_routing_waits_as_pollaczek_and_khinchine_say_and_the_least_loaded_waits_less() -> None:
    """c x M/D/1: rho / 2(1 - rho) services; M/D/c is half of M/M/c, about, and no router does better than it."""
    rho, count = 0.7, 4
    requests = markov(6_000, rho * count, fixed=True)
    kind = Kind("", lambda arrivals, _: long_station(arrivals, 1))
    apart = waits(fleet(requests, count, Random(3), kind))
    assert apart == pytest.approx(rho / (2 * (1 - rho)), rel=0.2)
    joined = waits(fleet(requests, count, LeastLoaded(), kind))
    turns = waits(fleet(requests, count, RoundRobin(), kind))
    assert 0.45 * erlang_wait(count, rho * count, 1.0) < joined <= turns < apart


def crommelin_wait(servers: int, load: float) -> float:
    """Mean wait of M/D/c in services: after each all that were served are gone, and a Poisson number has come."""
    max_queue = 60
    come = [exp(-load + k * log(load) - lgamma(k + 1)) for k in range(max_queue + 1)]
    there = np.full(max_queue + 1, 1 / (max_queue + 1))
    left = [max(0, n - servers) for n in range(max_queue + 1)]
    moves = np.array(
        [[come[n - left[m]] if n >= left[m] else 0.0 for m in range(max_queue + 1)] for n in range(max_queue + 1)]
    )
    for _ in range(400):
        there = moves @ there
        there /= there.sum()
    return float(there @ np.arange(max_queue + 1)) / load - 1


def shortest_queue_wait(load: float) -> float:
    """Mean wait, in services, of two exponential servers whose arrivals join the shorter queue: its Markov chain."""
    max_queue = 24
    moves = np.zeros(((max_queue + 1) ** 2, (max_queue + 1) ** 2))  # [to, from]

    def move(a: int, b: int, to: tuple[int, int], rate: float) -> None:
        here, there = a * (max_queue + 1) + b, to[0] * (max_queue + 1) + to[1]
        moves[there, here] += rate
        moves[here, here] -= rate

    for a in range(max_queue + 1):
        for b in range(max_queue + 1):
            if a < max_queue and a <= b:
                move(a, b, (a + 1, b), load if a < b else load / 2)
            if b < max_queue and b <= a:
                move(a, b, (a, b + 1), load if b < a else load / 2)
            if a:
                move(a, b, (a - 1, b), 1.0)
            if b:
                move(a, b, (a, b - 1), 1.0)
    moves[0] = 1.0  # the chances add up to one
    chances = np.linalg.solve(moves, np.eye(1, len(moves))[0])
    inside = sum(float(chance) * sum(divmod(place, max_queue + 1)) for place, chance in enumerate(chances))
    return inside / load - 1


def test_in_turn_a_fleet_of_equal_answers_waits_as_crommelin_says() -> None:
    """Where all services are alike, one queue for c servers is served in turn: round-robin is M/D/c."""
    rho, count = 0.7, 4
    requests = markov(6_000, rho * count, fixed=True)
    servers = fleet(requests, count, RoundRobin(), Kind("", lambda arrivals, _: long_station(arrivals, 1)))
    assert waits(servers) == pytest.approx(crommelin_wait(count, rho * count), rel=0.12)


@pytest.mark.parametrize("rho", [0.5, 0.75])
def test_the_least_loaded_waits_as_the_chain_of_the_shorter_queue_says(rho: float) -> None:
    requests = markov(6_000, rho * 2, fixed=False)
    servers = fleet(requests, 2, LeastLoaded(), Kind("", lambda arrivals, _: long_station(arrivals, 1)))
    assert waits(servers) == pytest.approx(shortest_queue_wait(rho * 2), rel=0.12)


def test_little_holds_over_the_fleet() -> None:
    """Mean number inside = rate x mean time inside, exactly, from two counts that know nothing of each other."""
    requests = markov(2_000, 2.5, fixed=False)
    servers = fleet(requests, 4, LeastLoaded(), Kind("", lambda arrivals, _: long_station(arrivals, 1)))
    inside = sum(sum(bucket.sums[:2]) for run in servers.runs for bucket in run.timeline.buckets)
    times = sum(b - a for a, b in zip(servers.records.arrival, servers.records.ended, strict=True))
    assert inside == pytest.approx(times, rel=1e-3)


# --- what happens to replicas -----------------------------------------------------------------------------------------


def test_a_failed_replicas_requests_are_answered_by_others() -> None:
    requests = poisson(200, 12.0)
    time = requests[100].arrival_s
    for choice in (RoundRobin(), LeastLoaded()):
        servers = fleet(requests, 3, choice, failures=(ReplicaFailure(1, time, 10.0),))
        assert sorted(servers.records.number) == list(range(1, 201))
        assert list(servers.records.arrival) == [request.arrival_s for request in requests]
        assert servers.num_resent > 0
        assert not [sent for sent in servers.replicas[1].lives[1].run.records.arrival if sent < time + 10.0]
        assert servers.sizes == [(0.0, 3), (time, 2), (time + 10.0, 3)]


def test_requests_wait_at_the_router_while_nobody_serves() -> None:
    requests = poisson(50, 4.0)
    servers = fleet(requests, 1, RoundRobin(), failures=(ReplicaFailure(0, 2.0, 5.0),))
    assert len(servers.records) == 50
    assert not [ended for ended in servers.records.first_token if 2.5 < ended < 7.0]
    lost = fleet(requests, 1, RoundRobin(), failures=(ReplicaFailure(0, 2.0),))
    assert lost.counts.failed == 50 - len(lost.records) > 0
    result = fleet_result(lost)  # down from 2 s to the end: up for 2 s of what is paid for
    assert (result.replicas[0].seconds, result.gpu_hours) == (2.0, lost.clock / 3600)
    assert result.size_mean == pytest.approx(2.0 / lost.clock)
    assert fleet_result(servers).replicas[0].seconds == pytest.approx(servers.clock - 5.0)


def test_a_fleet_grows_by_the_autoscalers_rule_a_reading_and_a_start_late() -> None:
    """One seat each, 8 requests at once: at 15 s a reading of 8 inside, acted on at 30 s: ceil(8 / 2) = 4; they serve
    20 s later."""
    requests = tuple(TraceRequest(0.1 * number, 1, 1_200) for number in range(8))
    scale = Autoscale(1, 6, 2.0, provision=20.0)
    servers = Fleet(
        (Kind("", lambda arrivals, _: long_station(arrivals, 1)),), Open(iter(requests)), LeastLoaded(), autoscale=scale
    )
    servers.run()
    assert servers.sizes[:2] == [(0.0, 1), (50.0, 4)]
    assert [replica.begun for replica in servers.replicas[:4]] == [0.0, 30.0, 30.0, 30.0]
    rented = servers.clock if servers.replicas[1].ended is None else servers.replicas[1].ended
    assert fleet_result(servers).replicas[1].seconds == rented - 50.0
    assert len(servers.records) == 8


def test_a_fleet_shrinks_only_after_the_settling_time() -> None:
    requests = (*(TraceRequest(0.1 * n, 1, 400) for n in range(8)), TraceRequest(900.0, 1, 10))
    scale = Autoscale(1, 6, 2.0, provision=20.0, settle=300.0)
    servers = Fleet(
        (Kind("", lambda arrivals, _: long_station(arrivals, 8)),) * 3, Open(iter(requests)), LeastLoaded(),
        autoscale=scale,
    )  # fmt: skip
    servers.run()
    # 8 inside till about 20 s: 4 replicas; the last reading with them is acted on at 30 s, so 300 s later they go.
    down = next(time for time, count in servers.sizes if count == 1)
    assert 330.0 <= down <= 345.0
    assert len(servers.records) == 9


def test_users_who_wait_for_answers_are_served_by_all() -> None:
    requests = poisson(100, 1.0)
    servers = Fleet((KIND,) * 2, Closed(iter(requests), 6, 0.1, 1.0), LeastLoaded())
    servers.run()
    assert len(servers.records) == 100
    alone = Fleet((KIND,), Closed(iter(requests), 6, 0.1, 1.0), LeastLoaded())
    alone.run()
    server = by_scheduler(Closed(iter(requests), 6, 0.1, 1.0), None)
    server.run()
    assert sorted(alone.records.ended) == sorted(server.records.ended)
    assert servers.clock < alone.clock


def test_a_router_that_looks_at_prefixes_sends_them_where_they_are() -> None:
    requests = tuple(TraceRequest(float(n), 40, 4, (n % 3,)) for n in range(30))
    servers = Fleet((Kind("", by_scheduler),) * 3, Open(iter(requests)), router("prefix", 0, 32), 32)
    servers.run()
    hits = sum(run.prefix_cache_stats.hits for run in servers.runs)
    assert hits == 27 * 32  # all but each prefix's first
    apart = Fleet((Kind("", by_scheduler),) * 3, Open(iter(requests)), RoundRobin(), 32)
    apart.run()
    assert len(apart.records) == 30


# --- prompts computed elsewhere ---------------------------------------------------------------------------------------


def test_a_prompt_is_computed_once_sent_and_decoded_elsewhere() -> None:
    """Steps of 1 s. The prompt: 0-1 s (and the batch after it). 40 tokens of 10 bytes over 100 bytes/s: 4 s."""
    config = SimulatedConfig(max_num_batched_tokens=64, max_num_seqs=4, max_model_len=256)

    def start(arrivals: Arrivals, run_len: int | None) -> Run:
        return Unshared(config, 60, GROUPS, Constant(1.0), arrivals)

    kinds = (Kind("p", start, "prefill", 10), Kind("d", start, "decode", 10))
    servers = Fleet(kinds, Open(iter((TraceRequest(0.0, 40, 3),))), RoundRobin(), link=Link(100.0, 0.5))
    servers.run()
    assert rows(servers.records, ("cached", "number", "preemptions")) == {
        "arrival": [0.0], "admitted": [0.0], "first_token": [1.0 + 4.0 + 0.5 + 1.0], "ended": [8.5], "prompt": [40],
        "output": [3], "loaded": [39],
    }  # fmt: skip
    assert servers.counts.prompt_tokens == 41  # the last one twice


def test_a_link_sends_one_prompt_after_another() -> None:
    config = SimulatedConfig(max_num_batched_tokens=256, max_num_seqs=4, max_model_len=256)

    def start(arrivals: Arrivals, run_len: int | None) -> Run:
        return Unshared(config, 60, GROUPS, Constant(1.0), arrivals)

    kinds = (Kind("p", start, "prefill", 10), Kind("d", start, "decode", 10), Kind("d", start, "decode", 10))
    requests = (TraceRequest(0.0, 40, 3), TraceRequest(0.0, 40, 3))
    servers = Fleet(kinds, Open(iter(requests)), RoundRobin(), link=Link(100.0))
    servers.run()
    assert sorted(servers.records.first_token) == [6.0, 10.0]
