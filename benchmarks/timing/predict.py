"""What kvplan says of a published result, from its inputs alone: the plan of that server, and its load simulated."""

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from benchmarks.timing.facts import Fact, spec_of
from benchmarks.timing.kinds import kind_of, regime
from benchmarks.timing.recipes import with_recipe
from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from kvplan.simulate.bench_load import DRIFT, BenchLoad, figures
from kvplan.simulate.host import HOSTS, Host
from kvplan.simulate.kernels.library import Shares
from kvplan.simulate.kernels.step import KernelStep, kernel_step
from kvplan.simulate.ranges import Ranges, modeled
from kvplan.simulate.setup import check
from kvplan.simulate.steptime import StepTime, attention_kinds
from kvplan.workloads.trace import TraceRequest

OWN = ("vllm", "sglang")  # servers kvplan knows; others are predicted as if they were vLLM, and scored apart
SIGMA = {"prompt": 1.0, "output": 0.8}  # of chat: log-normal with the published means
CUT_SIGMA = 0.66  # of AccelMark's prompts, of 64 to 592 tokens (its datasets/sharegpt_standard_v1 at 5797fc4)


SHARES = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
SHARED = 0.8  # of memory that a GPU shares with its host, where the usual share does not start and none is stated
FOLDS = Path(__file__).with_name("folds.json")


@dataclass(frozen=True, slots=True)
class Predicted:
    """Milliseconds by statistic, output tokens per second of the whole server, and what ranges kvplan states."""

    times: dict[str, float]
    out_tps: float
    ranges: Ranges
    waits: bool = False

    def range(self, metric: str, value: float | None = None) -> tuple[float, float]:
        """Low and high as kvplan states them."""
        if value is None:
            return self.ranges.rate(self.out_tps, arrivals=None)
        return self.ranges.time(metric, value)

    def target(self, metric: str, value: float) -> tuple[float, float]:
        """Values between which kvplan does not say whether a goal is met."""
        return self.ranges.target(metric, value)


def load_of(fact: Fact) -> BenchLoad:
    """The load of a server; of several data-parallel ranks that of one."""
    if fact.dp > 1:
        users = None if fact.users is None else max(1, fact.users // fact.dp)
        rate = None if fact.rate is None else fact.rate / fact.dp
        return load_of(replace(fact, dp=1, users=users, rate=rate, num_prompts=max(1, fact.num_prompts // fact.dp)))
    run_len = max(1, math.ceil(fact.input_len) - 1) if fact.limits.get("unique_prompts") else None
    return BenchLoad(fact.users, fact.rate, fact.num_prompts, partial(requests, fact), run_len)


def requests(fact: Fact, num_requests: int) -> Iterator[TraceRequest]:
    """Lengths and arrivals as the source describes them; a seed of its own, so that they are the same each time."""
    rng = random.Random(f"{fact.input_len} {fact.output_len} {fact.lengths}")
    arrival, unique = 0.0, fact.limits.get("unique_prompts")
    for number in range(num_requests):
        prompt, output = drawn(fact, "prompt", fact.input_len, rng), drawn(fact, "output", fact.output_len, rng)
        prefix = (number % unique,) if unique else ()
        yield TraceRequest(arrival, prompt, output, prefix)
        if fact.rate is not None and fact.rate != math.inf:
            arrival += 1 / fact.rate if fact.arrivals == "constant" else rng.expovariate(fact.rate)


def drawn(fact: Fact, part: str, mean: float, rng: random.Random) -> int:
    match fact.lengths:
        case "chat" if part == "output" and fact.least:  # up to so many tokens, where an answer does not end before
            most = fact.least
            if mean <= most / 2:
                return max(1, round(rng.uniform(1, 2 * mean)))
            return round(most if rng.random() < 2 * mean / most - 1 else rng.uniform(1, most))
        case "random":
            return max(1, round(rng.uniform(fact.least * mean, mean)))
        case "chat":
            sigma = CUT_SIGMA if fact.least else SIGMA[part]
            return max(4, min(4 * round(mean), round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))
        case _ if part == "output" and (fact.users or 1) > 1 and not keeps_step(fact):
            return max(1, round(mean * rng.uniform(1 - DRIFT, 1 + DRIFT)))  # users drift apart over many waves
        case _:
            return max(1, round(mean))


def planned(fact: Fact) -> Plan:
    """The server of a fact; UsageError or UnsupportedModelError where kvplan has none."""
    fact = with_recipe(fact)
    release = parse_engine(engine_of(fact))
    longest = 1.0 if fact.lengths != "chat" else 4.0
    needed = math.ceil(longest * (fact.input_len + fact.output_len)) + 64
    spec = spec_of(fact.model)
    context = max(fact.limits.get("max_model_len", 0), min(needed, spec.max_model_len or needed))
    kv = "fp8" if fact.kv_dtype == "fp8" else "auto"
    first: KvplanError | None = None
    stated = fact.limits.get("memory_percent")
    for utilization in (None if stated is None else stated / 100, 0.95, 0.97, SHARED):
        args = EngineArgs(
            max_model_len=context,
            tensor_parallel_size=fact.tp,
            data_parallel_size=fact.dp,
            enable_expert_parallel=fact.ep > 1,
            dtype="float16" if fact.dtype == "float16" else "auto",
            kv_cache_dtype=kv,
            **{SHARES[release.engine]: utilization},
            max_num_seqs=fact.limits.get("max_num_seqs"),
            max_num_batched_tokens=fact.limits.get("max_num_batched_tokens"),
        )
        try:
            made = plan(Request(spec, gpu(fact.gpu), args, release))
            check(made, ranks=True)
        except KvplanError as error:
            first = first or error
            continue
        return made
    assert first is not None
    raise first


def engine_of(fact: Fact) -> str:
    """vLLM's release by its number; of SGLang the one whose scheduler is simulated; other servers and builds of no
    release are read as vLLM's newest.
    """
    number = fact.version.split(".")
    if fact.engine == "vllm" and len(number) >= 2 and number[0] == "0" and number[1].isdigit():
        return f"vllm@0.{number[1]}"
    return "sglang" if fact.engine == "sglang" else "vllm"


def keeps_step(fact: Fact) -> bool:
    """Whether users of one length who begin together stay together: prompts that go first wait for each other's."""
    return fact.engine == "sglang"


def predict(fact: Fact, made: Plan, times: StepTime) -> Predicted:
    result = figures(made, times, load_of(fact))
    polled = poll_of(fact) * result.times.get("tpot_p50", 0.0)
    waited = {name: value + polled * name.startswith("ttft") for name, value in result.times.items()}
    ranges = modeled(made)
    return Predicted(waited, fact.dp * result.output_tokens_per_s, ranges.of(waits=result.waits), result.waits)


def stepped(fact: Fact, made: Plan, host: Host) -> KernelStep:
    """The kernels of a fact's server with a host."""
    narrow = True if with_recipe(fact).limits.get("narrow_inputs") else None
    return kernel_step(made, tuple(kind.reach for kind in attention_kinds(made)), Shares(), host=host, narrow=narrow)


def poll_of(fact: Fact) -> float:
    """Steps that pass on average until the scheduler looks at a new request, where it does not after each."""
    poll = with_recipe(fact).limits.get("recv_interval", 1)
    return poll / 2 if poll > 1 and (fact.users or 2) > 1 else 0.0


@cache
def folds() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    """Constants of hosts by regime and by the kind that was left out."""
    content: dict[str, dict[str, dict[str, float]]] = json.loads(FOLDS.read_text(encoding="utf-8"))
    return content


def host_without_kind(fact: Fact) -> Host:
    """The host as fitted without the fact's kind; as shipped where nothing of it was fitted."""
    name = regime(fact)
    values = folds().get(name, {}).get(kind_of(fact))
    return HOSTS.get(name, HOSTS["vllm"]) if values is None else replace(HOSTS[name], **values)


def predicted_by_kvplan(fact: Fact, *, as_shipped: bool) -> Predicted:
    made = planned(fact)
    host = HOSTS.get(regime(fact), HOSTS["vllm"]) if as_shipped else host_without_kind(fact)
    return predict(fact, made, stepped(fact, made, host))
