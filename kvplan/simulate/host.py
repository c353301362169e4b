"""The host of a server: its front end, scheduler and output as queues with one server each.

front end  reads, checks and tokenizes each request, one at a time, before the scheduler sees it
scheduler  prepares each step and takes in its tokens: after the GPU's step, or beside it with async scheduling
output     turns tokens into text and sends them, one at a time: the shortest a step of so many sequences can be

What they can do in a second bounds requests and tokens per second, however idle the GPU is.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from kvplan.core.records import dataclass
from kvplan.servers.base import abilities_of
from kvplan.servers.plans.plan import Plan
from kvplan.simulate.arrivals import Arrivals
from kvplan.workloads.trace import TraceRequest


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of a server's host, and what it does to the GPU's.

    request, prompt_token  front end: for each request, and each token of its prompt
    delay                  between a request and the scheduler, and back; any number of requests can be on their way
    gap, gap_sequence      between two steps, in which the GPU waits, and for each sequence
    step, sequence         scheduler: for each step, and each sequence in it
    is_hidden              the scheduler works while the GPU does
    token                  output: for each token
    prompt                 factor on what prompts add to a step: alone, as they were measured, kernels are faster than
                           in a step of a loaded server
    """

    request: float = 0.0
    prompt_token: float = 0.0
    delay: float = 0.0
    gap: float = 0.0
    gap_sequence: float = 0.0
    step: float = 0.0
    sequence: float = 0.0
    is_hidden: bool = False
    token: float = 0.0
    prompt: float = 1.0

    def scheduling(self, num_seqs: int) -> tuple[float, float]:
        """(seconds that come on top of the GPU's, least seconds of a step) of so many sequences."""
        gap = self.gap + self.gap_sequence * num_seqs
        own, output = self.step + self.sequence * num_seqs, self.token * num_seqs
        return (gap, max(own, output)) if self.is_hidden else (gap + own, output)

    def seconds(self, gpu: float, num_seqs: int) -> float:
        """Seconds of a step whose kernels take `gpu` seconds."""
        added, least = self.scheduling(num_seqs)
        return max(gpu + added, least)

    def scaled(self, factor: float) -> "Host":
        """The same host, so many times as slow."""
        times = {name: factor * getattr(self, name) for name in TIMES}
        return replace(self, **times)


TIMES: Final = ("request", "prompt_token", "delay", "gap", "gap_sequence", "step", "sequence", "token")
IN_TURN: Final = "vllm in turn"  # vLLM whose scheduler waits for each step's tokens
# Fitted by `python -m benchmarks.timing.fit` to published results on GPUs with tables, but request and prompt_token:
# 248 requests of 128 tokens a second, the most of three hosts in bursts of 1,000; 2 us a token, as tokenizers take.
HOSTS: Final[Mapping[str, Host]] = {
    "vllm": Host(
        request=3.8e-3, prompt_token=2e-6, delay=14.3e-3, gap=0.223e-3, gap_sequence=9.8e-6, step=0.985e-3,
        sequence=40.9e-6, is_hidden=True, token=10e-6, prompt=1.21,
    ),
    IN_TURN: Host(
        request=3.8e-3, prompt_token=2e-6, delay=13.1e-3, gap=0.231e-3, gap_sequence=10.9e-6, step=0.983e-3,
        sequence=43.2e-6, token=10e-6, prompt=1.22,
    ),
    "sglang": Host(
        request=3.8e-3, prompt_token=2e-6, delay=14.3e-3, gap=0.235e-3, gap_sequence=11.7e-6, step=0.984e-3,
        sequence=40.6e-6, is_hidden=True, token=10e-6, prompt=1.32,
    ),
}  # fmt: skip


def regime_of(plan: Plan) -> str:
    """The key in HOSTS of a plan's server: how its scheduler takes turns with the GPU decides what a step costs."""
    engine = plan.request.release.engine
    if abilities_of(engine).prompts_first is not None:
        return engine
    return "vllm" if plan.settings.batches > 1 else IN_TURN


def host_of(plan: Plan) -> Host:
    """The host of a plan's server."""
    regime = regime_of(plan)
    if regime in HOSTS and plan.request.args.async_scheduling is False:
        return replace(HOSTS[regime], is_hidden=False)
    return HOSTS.get(regime, HOSTS["vllm"])


class Intake:
    """Arrivals as the scheduler sees them: after the front end, which takes one request at a time."""

    def __init__(self, arrivals: Arrivals, host: Host) -> None:
        self._arrivals, self._host = arrivals, host
        self._free = 0.0  # when the front end has dealt with the requests before
        self._next: tuple[float, float] | None = None  # when the next request is sent, and when the scheduler sees it

    def next_time(self) -> float | None:
        arrival = self._arrivals.next_time()
        if arrival is None:
            return None
        if self._next is None or self._next[0] != arrival:
            taken_in = max(arrival, self._free) + self._service(self._arrivals.peek())
            self._next = arrival, taken_in + self._host.delay
        return self._next[1]

    def peek(self) -> TraceRequest:
        return self._arrivals.peek()

    def _service(self, request: TraceRequest) -> float:
        return self._host.request + self._host.prompt_token * request.prompt_tokens

    def pop(self) -> tuple[float, TraceRequest]:
        """Return the next request and when it was sent."""
        arrival, request = self._arrivals.pop()
        self._free, self._next = max(arrival, self._free) + self._service(request), None
        return arrival, request

    def ended(self, time: float) -> None:
        self._arrivals.ended(time)
