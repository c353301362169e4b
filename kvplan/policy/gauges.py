"""What the rules measure of a plan, and the changes that may fix a failure.

Changes are planned: whether they satisfy the rule is computed, never guessed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvplan.core.errors import InvalidInputError, KvplanError, UsageError
from kvplan.core.files import path_text, printable
from kvplan.core.strict_yaml import wrong
from kvplan.core.units import format_bytes, format_count, format_gib, format_size, plural
from kvplan.planning import advise, users
from kvplan.planning.advise import FlagChange, Knob
from kvplan.planning.plan import Plan
from kvplan.policy.file import Rule, Target, Workload, exists
from kvplan.servers.base import abilities_of, flag_of, terms_of

if TYPE_CHECKING:
    from kvplan.asked.manifest import ServedContainer
    from kvplan.workloads.lengths import Lengths
    from kvplan.workloads.trace import Trace, TraceRequest

Number = int | float


@dataclass(frozen=True, slots=True)
class Case:
    """A target, its plan, and the distribution of its request lengths if it has one.

    The plan itself has at most a mean: users for a distribution require a convolution, which no rule needs.
    served is the container of a manifest.
    """

    target: Target
    plan: Plan
    lengths: "Lengths | None" = None
    served: "ServedContainer | None" = None


Knobs = Callable[[Rule, Plan], Iterator[Knob]]  # changes that may fix a failure, the cheapest first


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number of a plan that a rule limits.

    value     of a plan, or a text that says why there is none
    describe  the sentence that states it
    knobs     changes that may fix a failure
    """

    value: Callable[[Plan], Number | str]
    unit: str
    is_floor: bool
    text: Callable[[Number], str]
    describe: Callable[[Plan], str]
    knobs: Knobs

    def limit(self, rule: Rule, plan: Plan) -> Number:
        """The limit in the gauge's unit: a headroom fraction becomes whole bytes of the GPU's memory."""
        if rule.is_share and self.unit == "bytes":
            return -(-round(rule.limit * 10**12) * plan.memory.total // 10**12)
        return rule.limit

    def limit_text(self, rule: Rule, plan: Plan) -> str:
        text = self.text(self.limit(rule, plan))
        return f"{text} ({printable(rule.text, 20)})" if rule.is_share and self.unit == "bytes" else text

    def holds(self, rule: Rule, plan: Plan) -> bool:
        actual, limit = self.value(plan), self.limit(rule, plan)
        if isinstance(actual, str):
            return False
        return actual >= limit if self.is_floor else actual <= limit


def number(value: Number | str) -> Number:
    """A value that is known not to be text."""
    assert not isinstance(value, str)
    return value


def plain(value: Number) -> str:
    """Format a concurrency with two decimals, without trailing zeros."""
    return f"{value:,.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else format_count(value)


def share_text(value: Number) -> str:
    return f"{100 * value:,.2f}".rstrip("0").rstrip(".") + "%"


def kv_tokens(plan: Plan) -> int:
    return plan.capacity.tokens if plan.fits else 0


def logged_figure(plan: Plan) -> str:
    answer, engine, context = plan.concurrency, plan.request.release.engine, plan.capacity.max_model_len
    text = f"the log will say {terms_of(engine).log.format(concurrency=answer.max, tokens=kv_tokens(plan))}"
    text += (
        f" for {context:,} tokens"
        if abilities_of(engine).logs_concurrency
        else f": {answer.max:.2f}x {context:,} tokens"
    )
    return f"{text} ({answer.low:.1f}-{answer.high:.1f})" if plan.fits else text


def seqs_flag(plan: Plan) -> str:
    return flag_of(plan.request.release.engine, "max_num_seqs")


def free_bytes(plan: Plan) -> int:
    """Unused bytes of a GPU. Raise UsageError if the server keeps memory back for unknown purposes."""
    engine = plan.request.release.engine
    if abilities_of(engine).keeps_share:
        raise UsageError(
            "min_headroom",
            f"is not modeled for {terms_of(engine).title}, which reserves a share of the memory",
            "use min_concurrency",
        )
    return plan.memory.headroom


def headroom(plan: Plan) -> str:
    left = plan.memory.headroom
    if left < 0:
        return f"{format_bytes(-left)} more planned than the GPU's {format_gib(plan.memory.total)}"
    return f"{format_bytes(left)} ({share_text(left / plan.memory.total)}) of {format_gib(plan.memory.total)} free"


def users_gauge(tokens: int, name: str, prefix: int) -> Gauge:
    """Gauge of requests of `tokens` at once, a length of this name; the first `prefix` tokens are shared."""

    def value(plan: Plan) -> int:
        return served(plan, tokens, prefix)

    def describe(plan: Plan) -> str:
        length = min(tokens, plan.capacity.max_model_len)
        text = f"{plural(value(plan), 'concurrent request')} of {length:,} tokens ({name}){of_ranks(plan, value(plan))}"
        if shared_blocks(plan, prefix):
            text += f", their shared prefix of {min(prefix, length):,} tokens stored once"
        pool = users.users_at(plan, tokens, prefix)
        return text if pool == value(plan) else f"{text}, limited by {seqs_flag(plan)} (the pool holds {pool:,})"

    return Gauge(value, "requests", True, plain, describe, more_users)


def served(plan: Plan, tokens: int, prefix: int, end: users.End = "likely") -> int:
    """Requests of `tokens` that one replica serves at once: those that fit in the pool and that the scheduler runs."""
    return min(users.users_at(plan, tokens, prefix, end), users.seqs_at(plan, end))


def of_ranks(plan: Plan, count: int) -> str:
    """ " on each of 16 data-parallel ranks, 448 in all"; the rule's limit is of one rank."""
    ranks = plan.concurrency.replicas
    return f"{on_ranks(plan)}, {count * ranks:,} in all" if ranks > 1 else ""


def on_ranks(plan: Plan) -> str:
    ranks = plan.concurrency.replicas
    return f" on each of {ranks:,} data-parallel ranks" if ranks > 1 else ""


def concurrency_gauge(tokens: int, prefix: int) -> Gauge:
    """Gauge of requests of the full context of `tokens` at once, counted as in every command."""

    def describe(plan: Plan) -> str:
        count, pool = served(plan, tokens, prefix), users.users_at(plan, tokens, prefix)
        text = f"{plural(count, 'concurrent request')} of {min(tokens, plan.capacity.max_model_len):,} tokens"
        text += of_ranks(plan, count)
        if not plan.fits:
            return text
        low, high = served(plan, tokens, prefix, "low"), served(plan, tokens, prefix, "high")
        spread = f"{low:,}-{high:,}" if low != high else f"{low:,}"
        capped = f"; limited by {seqs_flag(plan)}, the pool holds {pool:,}" if pool != count else ""
        size_text = f"{format_gib(plan.memory.kv_cache)} of KV cache, {format_size(plan.bytes_per_request)} each"
        return f"{text} ({spread}{capped}; {size_text})"

    return Gauge(lambda plan: served(plan, tokens, prefix), "requests", True, plain, describe, more_requests)


def shared_blocks(plan: Plan, prefix: int) -> int:
    return plan.pool.shared(min(prefix, plan.capacity.max_model_len))


# --- how long requests are --------------------------------------------------------------------------------------------


def states_a_length(case: Case) -> bool:
    """True if the target states its request lengths; otherwise each request is as long as the context."""
    load, workload = case.plan.request.load, case.target.workload
    has_requests = workload is not None and (workload.profile is not None or workload.trace is not None)
    return load.mean_tokens is not None or case.lengths is not None or has_requests


def length_name(case: Case, key: str) -> str:
    if not states_a_length(case):
        return "full context"
    return "mean" if key == "mean" else "p99"


def request_tokens(case: Case, key: str) -> int | str:
    """Mean or p99 length in tokens: the target's, else its workload's, else the context; a text if it is missing."""
    load, workload = case.plan.request.load, case.target.workload
    if not states_a_length(case):
        return case.plan.capacity.max_model_len
    if key == "mean" and load.mean_tokens is not None:
        return load.mean_tokens
    if case.lengths is not None:
        return ceil(case.lengths.mean) if key == "mean" else quantile(case.lengths.points, 0.99)
    if workload is not None and workload.trace is not None and not exists(workload.trace):
        return f"the trace {printable(str(workload.trace), 200)} does not exist"
    if workload is not None and (workload.profile is not None or workload.trace is not None):
        with located(workload, case.target):
            return _workload_tokens(workload)[key]
    return f"the target states neither lengths nor a workload, so its {key} length is not known"


def prefix_tokens(case: Case) -> int:
    """Tokens that all requests share: the target's, else those of its workload's profile.

    A profile counts only if all its requests share one prefix and the server caches prefixes.
    """
    target, workload, request = case.target, case.target.workload, case.plan.request
    is_stated = "shared_prefix" in target.own or "shared_prefix" in target.defaults
    if is_stated or workload is None or workload.profile is None or not case.plan.settings.prefix_caching:
        return request.load.shared_prefix
    from kvplan.workloads import profiles

    with located(workload, target):
        profile = profiles.profile(workload.profile)
    return profile.shared_prefix or 0 if len(profile.prefix_requests) == 1 else 0


@contextmanager
def located(workload: Workload, target: Target) -> Iterator[None]:
    """Add the position in the policy to errors about a workload."""
    try:
        yield
    except KvplanError as error:
        raise wrong(workload.mark, f"target {target.id}: workload: {error.unquoted}") from error


def quantile(points: Sequence[tuple[int, float]], share: float) -> int:
    """The smallest length that at least this fraction of the requests does not exceed."""
    mass = 0.0
    for tokens, probability in points:
        mass += probability
        if mass >= share - 1e-12:  # probabilities are sums of floats
            return tokens
    return points[-1][0]


# Of a trace, which a pull request names and CI simulates: 20 s of processor time.
MAX_TRACE_REQUESTS: Final = 100_000
MAX_TRACE_TOKENS: Final = 200_000_000
DRAWN: Final = 10_000  # requests of a profile; determines its p99 to about a percent


def _workload_tokens(workload: Workload) -> dict[str, int]:
    """Mean and p99 of prompt + output tokens."""
    if workload.profile is not None:
        return _profile_tokens(workload.profile)
    assert workload.trace is not None
    try:
        path = workload.trace.resolve()  # a relative path means another file in another directory
        status = path.stat()
    except (OSError, ValueError):
        return _trace_lengths(workload.trace)  # the reader's error says why
    return _trace_tokens(path, status.st_mtime_ns, status.st_size)


@cache
def _profile_tokens(name: str) -> dict[str, int]:
    from itertools import islice

    from kvplan.workloads import profiles

    return _mean_and_p99(islice(profiles.profile(name).requests(rate=1.0, seed=0), DRAWN))


@cache
def _trace_tokens(path: Path, mtime_ns: int, size: int) -> dict[str, int]:
    """Cached trace lengths; modification time and size are part of the key, so that a replaced file is read again."""
    return _trace_lengths(path)


def _trace_lengths(path: Path) -> dict[str, int]:
    return _mean_and_p99(read_trace(path).requests)


def read_trace(path: Path) -> "Trace":
    """Read a workload's trace within the budget of a check."""
    from kvplan.workloads import trace as traces

    trace = traces.read(path, MAX_TRACE_REQUESTS)
    num_tokens = sum(request.prompt_tokens + request.output_tokens for request in trace.requests)
    if num_tokens > MAX_TRACE_TOKENS:
        problem = f"its requests have {num_tokens:,} tokens; a check simulates at most {MAX_TRACE_TOKENS:,}"
        raise InvalidInputError(path_text(path), problem, "sample the rows")
    return trace


def _mean_and_p99(requests: Iterable["TraceRequest"]) -> dict[str, int]:
    lengths = sorted(request.prompt_tokens + request.output_tokens for request in requests)
    return {"mean": ceil(sum(lengths) / len(lengths)), "p99": lengths[ceil(0.99 * len(lengths)) - 1]}


# --- changes that may fix a failure -----------------------------------------------------------------------------------


def switch(flag: str, **args: int | float | str | bool) -> Knob:
    return Knob([FlagChange(flag, args)], "switch")


def more_kv(rule: Rule, plan: Plan) -> Iterator[Knob]:
    """Changes it needs to start; smaller KV entries, more ranks, a larger GPU."""
    yield from advise.start_knobs(plan, is_sure=True)
    yield advise.fp8_cache(plan.request.args)
    yield advise.more_ranks(plan.request)
    yield advise.larger_gpu(plan.request)
    yield advise.more_sharing_ranks(plan.request.args)


def next_kv(rule: Rule, plan: Plan) -> Iterator[Knob]:
    """Only the next sizes, each on its own: a simulation of each takes a second or more."""
    yield Knob(advise.fp8_cache(plan.request.args).changes)
    yield Knob(advise.more_ranks(plan.request).changes[:2])


def more_users(rule: Rule, plan: Plan) -> Iterator[Knob]:
    if plan.settings.max_num_seqs < rule.limit:
        yield switch(f"--max-num-seqs {rule.limit}", max_num_seqs=int(rule.limit))
    yield from more_kv(rule, plan)


CONTEXT_STEP: Final = 1024


def more_requests(rule: Rule, plan: Plan) -> Iterator[Knob]:
    """More KV cache, or shorter requests: the longest context, in steps of 1,024 tokens, that satisfies the rule."""
    if plan.settings.max_num_seqs < rule.limit and rule.name == "min_concurrency":  # the server's own figure ignores it
        seqs = ceil(rule.limit)
        yield switch(f"--max-num-seqs {seqs}", max_num_seqs=seqs)
    yield from advise.start_knobs(plan, is_sure=True)
    yield advise.fp8_cache(plan.request.args)
    yield advise.more_ranks(plan.request)
    yield advise.shorter_context(plan.capacity.max_model_len, CONTEXT_STEP)
    yield advise.larger_gpu(plan.request)
    yield advise.more_sharing_ranks(plan.request.args)


def less_weight(rule: Rule, plan: Plan) -> Iterator[Knob]:
    yield advise.more_ranks(plan.request)
    yield advise.more_sharing_ranks(plan.request.args)
    if plan.request.spec.quantization is None and plan.request.args.quantization is None:
        yield switch("--quantization fp8", quantization="fp8")


def smaller_entries(rule: Rule, plan: Plan) -> Iterator[Knob]:
    yield advise.fp8_cache(plan.request.args)
    yield advise.more_ranks(plan.request)


LORA_RANKS: Final = (512, 320, 256, 128, 64, 32, 16, 8, 1)


def fewer_adapters(rule: Rule, plan: Plan) -> Iterator[Knob]:
    args = plan.request.args
    if args.tensor_parallel_size > 1 and not args.fully_sharded_loras:
        yield switch("--fully-sharded-loras", fully_sharded_loras=True)
    max_slots = min(args.max_loras - 1, 64)
    yield Knob([FlagChange(f"--max-loras {slots}", {"max_loras": slots}) for slots in range(max_slots, 0, -1)])
    yield Knob(
        [
            FlagChange(f"--max-lora-rank {rank}", {"max_lora_rank": rank})
            for rank in LORA_RANKS
            if rank < args.max_lora_rank
        ]
    )
    yield advise.more_ranks(plan.request)


def more_left(rule: Rule, plan: Plan) -> Iterator[Knob]:
    """A smaller fraction of the GPU for the server, or a larger GPU."""
    args = plan.request.args
    if args.kv_cache_memory_bytes is None and args.num_gpu_blocks_override is None:
        percents = range(ceil(100 * plan.settings.gpu_memory_utilization) - 1, 0, -1)
        yield Knob(
            [
                FlagChange(f"--gpu-memory-utilization {share / 100}", {"gpu_memory_utilization": share / 100})
                for share in percents
            ]
        )
    elif args.kv_cache_memory_bytes is not None:
        short = max(0, int(GAUGES["min_headroom"].limit(rule, plan)) - plan.memory.headroom)
        less = args.kv_cache_memory_bytes - short
        if less > 0:
            yield Knob([FlagChange(f"--kv-cache-memory-bytes {less}", {"kv_cache_memory_bytes": less})])
    if not plan.fits:
        yield advise.more_ranks(plan.request)
    yield advise.larger_gpu(plan.request)


def tokens_text(plan: Plan) -> str:
    return f"the KV cache holds {kv_tokens(plan):,} tokens{of_ranks(plan, kv_tokens(plan))}"


def ceiling(value: Callable[[Plan], int], unit: str, text: Callable[[int], str], what: str, knobs: Knobs) -> Gauge:
    """Gauge of bytes that a rule limits from above."""
    return Gauge(value, unit, False, lambda n: text(int(n)), lambda plan: f"{text(value(plan))} {what}", knobs)


GAUGES: Final[Mapping[str, Gauge]] = {
    "min_headroom": Gauge(free_bytes, "bytes", True, lambda n: format_bytes(int(n)), headroom, more_left),
    "min_logged_concurrency": Gauge(
        lambda plan: plan.concurrency.max, "requests", True, plain, logged_figure, more_requests
    ),
    "min_kv_tokens": Gauge(kv_tokens, "tokens", True, plain, tokens_text, more_kv),
    "max_weights": ceiling(
        lambda plan: plan.memory.weights, "bytes", format_bytes, "of weights on each GPU", less_weight
    ),
    "max_kv_bytes_per_token": ceiling(
        lambda plan: plan.bytes_per_token, "bytes/token", format_size, "of KV cache per token on each GPU",
        smaller_entries,
    ),
    "max_lora_bytes": ceiling(
        lambda plan: plan.memory.lora, "bytes", format_bytes, "of adapter slots on each GPU", fewer_adapters
    ),
}  # fmt: skip


# Changes that may fix a figure worse than the baseline's, by the rule that limits the same figure.
BASELINE_KNOBS: Final[Mapping[str, Knobs]] = {
    "baseline.weights": less_weight,
    "baseline.kv_bytes_per_token": smaller_entries,
    "baseline.lora": fewer_adapters,
    "baseline.kv_cache": more_kv,
    "baseline.kv_tokens": more_kv,
    "baseline.users": more_kv,
    "baseline.concurrency": more_requests,
    "baseline.headroom": more_left,
}
