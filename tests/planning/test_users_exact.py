"""Users of a pool against the engine's scheduler, which takes vLLM's decisions step by step (engine/test_scheduler.py).

The scheduler is the oracle: it is run with real requests on real pools, and says how many it holds without preempting
one or making one wait.
"""

import random
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_manager import FullGroup, Group, WindowGroup
from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence
from engine.states import MambaGroup
from kvplan.planning.users import users_held
from kvplan.servers.plans.plan import Load
from kvplan.servers.plans.pool import Capacity, KVGroup, KVSpec, Paging, Pool
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import Settings
from kvplan.simulate.scheduling import ChunkedGroup, SimulatedConfig, simulated_scheduler
from tests.support.parts import some


@dataclass(frozen=True, slots=True)
class Server:
    """A scheduler's limits and groups, and the same pool as the planner has it."""

    groups: tuple[Group, ...]
    budget: int
    depth: int
    context: int

    @property
    def settings(self) -> Settings:
        return Settings(
            Version((0, 33)), self.context, False, self.budget, 1024, self.budget * self.depth, 0.9,
            "bfloat16", "bfloat16", batches=self.depth,
        )  # fmt: skip

    @property
    def pool(self) -> Pool:
        paging = Paging(
            0, "bfloat16", "bfloat16", 1, 1, 1, None, prefix_caching=True, flat=False, first_engine=False,
            checkpoints=frozenset(), every_block=frozenset(), spec_tokens=0, ssm_dtype=None, context=0, encoder=0,
        )  # fmt: skip
        specs = [spec_of(group) for group in self.groups]
        return Pool(tuple(KVGroup(((0, spec),), (spec,)) for spec in specs), (1,), paging)

    def users(self, num_blocks: int, tokens: int) -> int:
        pool, settings = self.pool, self.settings
        charged = pool.charged(self.context, settings)
        if num_blocks <= charged:
            return 0  # vLLM does not start
        capacity = Capacity(num_blocks, 1, 0, self.context, charged, num_blocks / charged, 0, True, 0)
        return users_held(pool, settings, capacity, Load(mean_tokens=tokens), num_blocks).users

    def fewest_blocks(self, users: int, tokens: int) -> int:
        """The smallest pool that the planner says holds so many."""
        start = self.pool.charged(self.context, self.settings) + 1
        return next(count for count in range(start, 10**6) if self.users(count, tokens) >= users)

    def scheduler(self, num_blocks: int) -> Scheduler:
        config = SimulatedConfig(self.budget, 1024, self.context, batch_queue_depth=self.depth)
        return simulated_scheduler(config, num_blocks, self.groups)


def spec_of(group: Group) -> KVSpec:
    match group:
        case FullGroup(block):
            return KVSpec("full", block, 1)
        case WindowGroup(block, window):
            return KVSpec("sliding", block, 1, window)
        case ChunkedGroup(block, chunk):
            return KVSpec("chunked", block, 1, chunk)
        case MambaGroup(block):  # the state before a step and the one after it
            return KVSpec("state", block, 1, blocks=2)
    raise AssertionError(group)


def request(number: int, prompt: int, total: int) -> Sequence:
    """A request whose tokens nobody else has."""
    return Sequence(f"r{number}", [10_000 * number + i for i in range(prompt)], total - prompt)


class Run:
    """A scheduler driven step by step, as many batches in flight as its depth."""

    def __init__(self, server: Server, num_blocks: int) -> None:
        self.scheduler = server.scheduler(num_blocks)
        self.depth = server.depth
        self.in_flight: deque[Batch] = deque()
        self.waited = False

    def step(self) -> None:
        batch = self.scheduler.schedule()
        self.waited |= bool(self.scheduler.waiting or batch.failed)
        self.in_flight.append(batch)
        if len(self.in_flight) == self.depth:
            done = self.in_flight.popleft()
            self.scheduler.update(done, {seq.request_id: [0] for seq in done.samples})

    @property
    def is_smooth(self) -> bool:
        """Whether nobody waited, gave way or failed so far."""
        return not self.waited and not self.scheduler.num_preemptions

    def admit(self, seq: Sequence) -> int:
        """Run until its prompt is computed; returns the steps that took."""
        self.scheduler.add(seq)
        for steps in range(1, 1000):
            self.step()
            if not self.is_smooth or seq.num_settled_tokens >= seq.num_prompt_tokens:
                return steps
        raise AssertionError("a prompt is never computed")


# --- never too many ---------------------------------------------------------------------------------------------------


@st.composite
def servers(draw: st.DrawFn, *, states: bool) -> Server:
    block = draw(st.sampled_from([4, 16]))
    groups: list[Group] = []
    if draw(st.booleans()):
        groups.append(FullGroup(block))
    kind = draw(st.sampled_from(["none", "window", "chunk"]))
    if kind != "none" or not groups:
        bound = draw(st.integers(1, 100))
        other = WindowGroup(block, bound) if kind == "window" else ChunkedGroup(block, bound)
        groups += [other] * draw(st.integers(1, 3))
    if states:
        groups = [FullGroup(16), *[MambaGroup(16)] * draw(st.integers(1, 3))]
    budget = draw(st.integers(20, 120)) if not states else draw(st.integers(40, 120))
    return Server(tuple(groups), budget, draw(st.sampled_from([1, 2])), draw(st.integers(120, 400)))


@given(servers(states=False), st.integers(1, 8), st.floats(0.2, 1), st.integers(0, 10**6))
def test_users_of_any_lengths_never_wait_nor_give_way_while_one_prompt_at_a_time_comes(
    server: Server, users: int, share: float, seed: int
) -> None:
    tokens = max(2, int(server.context * share))
    blocks = server.fewest_blocks(users, tokens)
    users = server.users(blocks, tokens)
    # A bound passed by two in one step takes a block of each, for that step.
    blocks += (users - 1) * sum(group.moving(tokens) for group in server.pool.groups)
    draw, run, number = random.Random(seed), Run(server, blocks), 0
    users = min(users, server.budget // 2)  # in a step of that many tokens
    while number < 10 * users:
        if len(run.scheduler.running) < users:
            number += 1
            total = draw.randint(max(2, tokens // 2), tokens)  # of its tokens all but the last are stored
            run.admit(request(number, draw.randint(1, total - 1), total))
        else:
            run.step()
        assert run.is_smooth, f"request {number} of {users} users at {tokens} tokens in {blocks} blocks"


# --- and not one too few ----------------------------------------------------------------------------------------------


def smooth_ramp(server: Server, num_blocks: int, lengths: list[int], tokens: int) -> tuple[bool, list[int]]:
    """Whether requests that come one after the other, the last with a prompt of `tokens`, are all held until that is
    computed; and the steps that each prompt took."""
    run, steps = Run(server, num_blocks), []
    for number, prompt in enumerate(lengths, 1):
        steps.append(run.admit(request(number, prompt, server.context)))
        if not run.is_smooth:
            return False, steps
    return True, steps


def together(server: Server, users: int, tokens: int) -> list[int]:
    """Prompts with which all but the last request hold about `tokens` when the last one's prompt is computed."""
    last = tokens + 1 - server.depth  # with two batches in flight its first token is scheduled already
    lengths = [last] * users
    for _ in range(6):
        _, steps = smooth_ramp(server, 2000, lengths, tokens)
        lengths = [tokens - 2 - sum(steps[i + 1 :]) for i in range(users - 1)] + [last]
        assert min(lengths) > 0, "too many users to decode together"
    return lengths


BLOCK = 32
CASES = {
    "full": Server((FullGroup(BLOCK),), 100, 1, 700),
    "full, two batches in flight": Server((FullGroup(BLOCK),), 100, 2, 700),
    "window": Server((WindowGroup(BLOCK, 64),), 70, 1, 700),
    "window and full": Server((FullGroup(BLOCK), *[WindowGroup(BLOCK, 96)] * 5), 70, 1, 700),
    "window and full, two in flight": Server((FullGroup(BLOCK), *[WindowGroup(BLOCK, 96)] * 5), 70, 2, 700),
    "a window of one token more": Server((FullGroup(BLOCK), WindowGroup(BLOCK, 97)), 70, 2, 700),
    "chunks and full": Server((FullGroup(BLOCK), *[ChunkedGroup(BLOCK, 160)] * 3), 100, 2, 700),
    "states and full": Server((FullGroup(BLOCK), *[MambaGroup(BLOCK)] * 3), 70, 1, 700),
    "states and full, two in flight": Server((FullGroup(BLOCK), *[MambaGroup(BLOCK)] * 3), 70, 2, 700),
}


@pytest.mark.parametrize("users", some([1, 2, 4, 6], [1, 4]))
@pytest.mark.parametrize("name", CASES)
def test_the_smallest_pool_that_the_scheduler_holds_them_in_is_the_planners(name: str, users: int) -> None:
    server, tokens = CASES[name], 480  # a whole number of blocks and of chunks
    planned = server.fewest_blocks(users, tokens)
    # No state moves on in this ramp: what the planner keeps for that, of those that decode, is not needed.
    moving = sum(group.moving(tokens) for group in server.pool.groups) if users > 1 else 0
    lengths = together(server, users, tokens)
    smallest = next(count for count in range(2, planned + 100) if smooth_ramp(server, count, lengths, tokens)[0])
    least = server.pool.charged(server.context, server.settings) + 1
    assert max(smallest + moving, least) == planned
    assert server.users(planned, tokens) == users
    assert server.users(planned - 1, tokens) < users
