"""The load that is asked for: which requests, and how they arrive."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from math import inf, isinf
from pathlib import Path
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import MAX_TOKENS, parse_count, parse_duration, parse_tokens, rate_text
from kvplan.models.spec import ModelSpec
from kvplan.simulate.arrivals import Arrivals, Closed, Open, Process, Stages
from kvplan.simulate.slo import Promise, may_miss
from kvplan.simulate.source import Source, from_lengths, from_profile, from_trace, with_shared_prefix
from kvplan.workloads.lengths import Lengths, parse_lengths
from kvplan.workloads.profiles import parse_rate, profile
from kvplan.workloads.trace import TraceRequest
from kvplan.workloads.trace import read as read_trace

NUM_REQUESTS: Final = 2000
ONE_LOAD: Final = "give one of --trace, --profile, --prompt-tokens: --prompt-tokens 1k --output-tokens 256"
PER_USER, MOST_BY_DEFAULT = 10, 20_000  # requests of users, if no number is given
RAMP_S: Final = 60.0
MAX_SHAPE: Final = 1e6
STAGES_FORM: Final = "write 4, inf, or rates with how long each lasts: 2:60s,8:120s"
ARRIVALS_FORM: Final = "write constant, poisson or gamma:0.5 (less than 1: in bursts)"


Tell = Callable[[str, str], None]  # takes a warning or a note: its kind, its text


@dataclass(frozen=True, slots=True)
class LoadWords:
    """A load as it is written; None: not given."""

    trace: str | None = None
    profile: str | None = None
    prompt_tokens: str | None = None
    output_tokens: str | None = None
    shared_prefix: str | None = None
    num_requests: str | None = None
    seed: str | None = None
    rate: str | None = None
    arrivals: str | None = None
    max_concurrency: str | None = None
    users: str | None = None
    think: str | None = None
    ramp: str | None = None

    @classmethod
    def names(cls) -> frozenset[str]:
        return frozenset(field.name for field in fields(cls))

    @property
    def names_source(self) -> bool:
        return any((self.trace, self.profile, self.prompt_tokens, self.output_tokens))


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and how they arrive: at given rates, or from users.

    stages   requests per second, and how long each rate lasts; empty if users send them
    users    users who each wait for a response; with stages: the most concurrent requests
    process  None: as in the source
    is_judged_whole  True if each user's first request counts as well
    """

    source: Source
    stages: Stages
    users: int | None = None
    think_s: float = 0.0
    ramp_s: float = RAMP_S
    process: Process | None = None
    seed: int = 0
    is_judged_whole: bool = False

    @property
    def skipped(self) -> int:
        """Number of requests that are not judged: each user's first."""
        return 0 if self.is_judged_whole or self.users is None else self.users

    @property
    def is_closed(self) -> bool:
        """True if requests come as fast as users receive responses."""
        return not self.stages

    @property
    def peak(self) -> float:
        """The highest rate of the stages."""
        return max((rate for rate, _ in self.stages), default=0.0)

    @property
    def amount(self) -> float | None:
        """Quantity that a search varies: users, or the highest rate, or None if all requests come at once."""
        if self.is_closed:
            return float(self.users or 0)
        return None if isinf(self.peak) else self.peak

    def scaled(self, amount: float) -> "Load":
        if self.is_closed:
            return replace(self, users=int(amount))
        return replace(self, stages=tuple((rate * amount / self.peak, seconds) for rate, seconds in self.stages))

    def arrivals(self) -> Arrivals:
        source = self.source
        if self.is_closed:
            return source.closed(self.users or 1, self.think_s, self.ramp_s, first_counts=self.is_judged_whole)
        [(rate, _), *later] = self.stages
        if self.process is None and self.users is None and not later and not isinf(rate):
            return source.open(rate)
        requests = source.timed(self.stages, self.process or Process(), self.seed)
        return Open(requests) if self.users is None else Closed(requests, self.users, timed=True)

    @property
    def how(self) -> str:
        if self.is_closed:
            return f"{self.users:,} user{'' if self.users == 1 else 's'}"
        limit = "" if self.users is None else f", at most {self.users:,} at once"
        if isinf(self.peak):
            return "all requests at once"
        rates = ", then ".join(rate_text(rate) for rate, _ in self.stages)
        kind = "" if self.process is None or self.process.shape == 1.0 else f", {process_text(self.process)}"
        return f"{rates} request{'' if rates == '1' else 's'}/s{kind}{limit}"

    @property
    def text(self) -> str:
        count = self.source.num_requests
        return f"{self.source.name}, {count:,} request{'' if count == 1 else 's'}, {self.how}"


def process_text(process: Process) -> str:
    return "evenly spaced" if isinf(process.shape) else f"gamma gaps of shape {process.shape:g}"


def load_of(words: LoadWords, tell: Tell) -> Load:
    source = source_of(words, tell)
    for note in source.notes:
        tell("warning", note)
    seed = 0 if words.seed is None else int(parse_seed(words.seed))
    if words.users is not None:
        return from_users(words, source, seed)
    for flag, text in {"--think": words.think, "--ramp": words.ramp}.items():
        if text is not None:
            raise UsageError(flag, "works only with --users", "remove it, or add --users N")
    limit = None
    if words.max_concurrency is not None:
        limit = parse_count(words.max_concurrency, "--max-concurrency", most=1_000_000)
    process = None if words.arrivals is None else parse_process(words.arrivals)
    if words.rate is None and source.rate is None and limit is None:
        raise UsageError(
            "--rate", f"is required: {printable(source.name, 100)} has no arrival rate", "add --rate N or --users N"
        )
    stages = parse_stages(words.rate) if words.rate is not None else ((source.rate or inf, inf),)
    if isinf(stages[0][0]):
        if process is not None:
            raise UsageError("--arrivals", "does not apply to requests that all come at once", "remove it")
        if limit is not None:  # each sends its next request after a response: users without a ramp
            users = min(limit, source.num_requests)
            return Load(source, (), users, ramp_s=0.0, seed=seed, is_judged_whole=True)
    return Load(source, stages, limit, process=process, seed=seed, is_judged_whole=True)


def check_lengths(
    rows: Iterable[TraceRequest], context: int, model: ModelSpec, promises: Sequence[Promise], tell: Tell
) -> None:
    """Refuse a load that mostly exceeds the context, so that times would be meaningless; note the rejected requests."""
    count = longer = needed = 0
    for row in rows:
        count += 1
        longer += row.prompt_tokens >= context
        needed = max(needed, row.prompt_tokens + row.output_tokens)
    if not longer:
        return
    longest = model.context_limit or model.max_model_len
    cure = f"raise it: {needed:,} is enough for every request"
    if needed > longest:
        cure = f"remove requests longer than the {longest:,} of {model.name}, or use a model with a longer context"
    if longer == count:
        raise UsageError("--ctx", f"no prompt fits in the context of {context:,} tokens", cure)
    text = f"{longer:,} of {count:,} prompts exceed the context of {context:,} tokens"
    for promise in promises:
        if longer > may_miss(promise, count):
            raise UsageError("--ctx", f"{text}, so no server can meet {promise.name}", cure)
    tell("note", f"{text} and miss every target; {needed:,} is enough for every request")


def from_users(words: LoadWords, source: Source, seed: int) -> Load:
    for flag, text in {
        "--rate": words.rate, "--arrivals": words.arrivals, "--max-concurrency": words.max_concurrency,
    }.items():  # fmt: skip
        if text is not None:
            raise UsageError("--users", f"wait for each response, so {flag} does not apply", "use only one")
    users = parse_count(words.users or "", "--users", most=1_000_000)
    think = 0.0 if words.think is None else parse_duration(words.think, "--think", least=0.0)
    ramp = RAMP_S if words.ramp is None else parse_duration(words.ramp, "--ramp", least=0.0)
    return Load(source, (), users, think, ramp, seed=seed)


def parse_stages(text: str) -> Stages:
    """Parse `4`, `inf`, `2:60s,8:120s`."""
    if text in ("inf", "infinity"):
        return ((inf, inf),)
    if ":" not in text:
        return ((parse_rate(text, "--rate"), inf),)
    parts = [part.strip().partition(":") for part in text.split(",")]
    if len(parts) > 1000 or not all(colon for _, colon, _ in parts):
        raise UsageError("--rate", f"{printable(repr(text), 60)} is not understood", STAGES_FORM)
    return tuple((parse_rate(rate, "--rate"), parse_duration(seconds, "--rate")) for rate, _, seconds in parts)


def parse_process(text: str) -> Process:
    if text == "constant":
        return Process(inf)
    if text == "poisson":
        return Process()
    match = re.fullmatch(r"gamma:([0-9]{1,7}(?:\.[0-9]{1,6})?)", text)
    if match is None or not 0.001 <= float(match[1]) <= MAX_SHAPE:
        raise UsageError("--arrivals", f"{printable(repr(text), 60)} is not understood", ARRIVALS_FORM)
    return Process(float(match[1]))


def source_of(words: LoadWords, tell: Tell) -> Source:
    """Return the one source that is named."""
    stated = words.prompt_tokens is not None or words.output_tokens is not None
    named = [
        name
        for name, is_given in {
            "--trace": words.trace is not None,
            "--profile": words.profile is not None,
            "--prompt-tokens": stated,
        }.items()
        if is_given
    ]
    if len(named) != 1:
        if named:
            raise UsageError(" and ".join(named), "conflict", "give one of them")
        raise UsageError("workload", "missing", ONE_LOAD)
    shared = None if words.shared_prefix is None else shared_prefix(words.shared_prefix)
    count = None if words.num_requests is None else parse_count(words.num_requests, "--num-requests", 10_000_000)
    seed = 0 if words.seed is None else int(parse_seed(words.seed))
    if words.trace is not None:
        source = from_trace(read_trace(Path(words.trace)), count)
        if count is not None and source.num_requests < count:
            tell("warning", f"--num-requests {count:,}: the trace has only {source.num_requests:,}; using all")
        return source if not shared else with_shared_prefix(source, shared)
    at_once = words.users or words.max_concurrency
    users = parse_count(at_once, "--users" if words.users else "--max-concurrency") if at_once else 0
    num_requests = count or default_requests(users)
    if words.profile is not None:
        return from_profile(profile(words.profile), num_requests, seed, shared)
    if words.prompt_tokens is None or words.output_tokens is None:
        raise UsageError("--prompt-tokens and --output-tokens", "must be used together", "set both")
    prompt = lengths(words.prompt_tokens, "--prompt-tokens")
    if shared and prompt.longest <= shared:
        raise UsageError(
            f"--shared-prefix {shared:,}",
            f"leaves nothing of prompts of {prompt.longest:,} tokens",
            "state longer ones",
        )
    return from_lengths(prompt, lengths(words.output_tokens, "--output-tokens"), num_requests, seed, shared or 0)


def default_requests(users: int) -> int:
    """Requests of a run that states no number; users: at once, 0 where requests come by the clock."""
    return max(NUM_REQUESTS, min(PER_USER * users, MOST_BY_DEFAULT))


def shared_prefix(text: str) -> int:
    return 0 if text == "0" else parse_tokens(text, "--shared-prefix")


def parse_seed(text: str) -> str:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise UsageError(
            "--seed", f"not a whole number ({printable(repr(text), 40)})", "write 0 or more in plain digits"
        )
    return text


def lengths(text: str, option: str) -> Lengths:
    """Parse a count, or a distribution."""
    if ":" in text:
        try:
            return parse_lengths(text, MAX_TOKENS)
        except UsageError as error:
            raise error.renamed("--lengths", option) from None
    tokens = parse_tokens(text, option)
    return Lengths(((tokens, 1.0),), f"{tokens:,}")
