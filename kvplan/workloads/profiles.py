"""Named workloads: published statistics of request traces (workloads.yaml), and requests drawn from them.

Lengths are drawn by inverting the published distribution, linear between its quantile points. Prompt and output are
drawn independently if their rank correlation is near 0, else by the joint counts of their deciles. Requests arrive as a
Poisson process: a real trace's rate and lengths are reproduced, its bursts are not.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, Literal

from kvplan.core import entries
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import plural
from kvplan.workloads.trace import Trace, TraceRequest

if TYPE_CHECKING:
    import random

FILE = "workloads.yaml"
MAX_RATE = 1_000_000
RATE = r"[0-9]{1,9}(?:\.[0-9]{1,30})?(?:[eE][+-]?[0-9]{1,2})?"  # as JSON and Python write it
# Percentiles at which workloads.yaml states lengths.
POINTS = tuple(map(float, (0, 0.5, 1, 2, *range(5, 95, 5), 92.5, 95, 97, 98, 99, 99.5, 99.9, 100)))


@dataclass(frozen=True, slots=True)
class Profile:
    """Statistics of a workload. Lengths in tokens, times in seconds; None if not published.

    kind              published | assumed (not from a trace)
    prompt, output    lengths at the percentiles POINTS
    joint             requests by decile of the prompt (rows) and of the output (columns); empty: independent
    rank_correlation  Spearman's, of prompt and output lengths
    rate_per_s        requests per second, the mean of the trace
    shared_prefix     tokens of the shared prefix, included in the prompt
    prefix_requests   number of requests that share each prefix
    """

    name: str
    kind: Literal["published", "assumed"]
    summary: str
    source: str
    licence: str
    num_requests: int | None
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    prompt_mean: float
    output_mean: float
    joint: tuple[tuple[int, ...], ...]
    rank_correlation: float | None
    rate_per_s: float | None
    span_s: float | None
    interarrival_cv: float | None
    peak_minute_per_s: float | None
    peak_second: int | None
    shared_prefix: int | None
    prefix_requests: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def prefix_block(self) -> int | None:
        """Tokens per prefix id of its requests: one id for the whole shared prefix."""
        return self.shared_prefix

    def requests(
        self, rate: float | None = None, seed: int = 0, shared_prefix: int | None = None
    ) -> Iterator[TraceRequest]:
        """Yield endless requests: one at 0 s, then a Poisson process of `rate` per second (None: as published).

        shared_prefix  tokens of a prefix of all prompts, in place of the published one; 0 for none. A prompt that is
                       not longer is extended to one token more.
        """
        import random

        per_s = self.rate_per_s if rate is None else rate
        if per_s is None:
            raise UsageError(f"profile {self.name}", "no rate is published", "set the requests per second")
        if not 0 < per_s <= MAX_RATE:
            raise UsageError(f"profile {self.name}", f"the rate must be above 0 and at most {MAX_RATE:,} ({per_s:g})")
        if shared_prefix is not None and shared_prefix < 0:
            raise UsageError(f"profile {self.name}", f"the shared prefix is negative ({shared_prefix})")
        prefix = (self.shared_prefix or 0, self.prefix_requests) if shared_prefix is None else (shared_prefix, (1,))
        return self._drawn(per_s, *prefix, random.Random(seed))

    def _drawn(
        self, per_s: float, shared: int, sharers: tuple[int, ...], rng: "random.Random"
    ) -> Iterator[TraceRequest]:
        shares, families = self._shares(rng), range(len(sharers))
        arrival = 0.0
        for of_prompt, of_output in shares:
            family = rng.choices(families, sharers) if len(sharers) > 1 else [0]
            prompt = max(tokens_at(self.prompt, of_prompt), shared + 1)
            yield TraceRequest(arrival, prompt, tokens_at(self.output, of_output), tuple(family) if shared else ())
            arrival -= math.log(1 - rng.random()) / per_s  # not expovariate: same numbers in all Pythons

    def _shares(self, rng: "random.Random") -> Iterator[tuple[float, float]]:
        """Yield the quantiles, from 0 to 1, of each prompt and output in their distributions."""
        if not self.joint:
            while True:
                yield rng.random(), rng.random()
        width = len(self.joint)
        sums = list(accumulate(count for row in self.joint for count in row))
        while True:
            cell = bisect_right(sums, rng.random() * sums[-1])
            yield (cell // width + rng.random()) / width, (cell % width + rng.random()) / width

    def trace(
        self, num_requests: int, rate: float | None = None, seed: int = 0, shared_prefix: int | None = None
    ) -> Trace:
        """Return the first requests as a trace."""
        requests = tuple(islice(self.requests(rate, seed, shared_prefix), num_requests))
        per_s = self.rate_per_s if rate is None else rate
        block = self.prefix_block if shared_prefix is None else shared_prefix or None
        return Trace(requests, f"{self.name} ({plural(num_requests, 'request')} at {per_s:g}/s, seed {seed})", block)


def tokens_at(lengths: tuple[int, ...], share: float) -> int:
    """Return the length at a quantile (0 to 1), linear between the points."""
    after = min(bisect_right(POINTS, share * 100), len(POINTS) - 1)
    low, high = POINTS[after - 1], POINTS[after]
    return round(lengths[after - 1] + (lengths[after] - lengths[after - 1]) * (share * 100 - low) / (high - low))


def parse_rate(text: str, option: str) -> float:
    """Parse requests per second: "2", "0.5", "0.6439466687238412", "1e1"."""
    if not re.fullmatch(RATE, text) or not 0 < float(text) <= MAX_RATE:
        raise UsageError(
            option,
            f"not requests per second ({printable(repr(text), 60)})",
            f"write a number above 0 and at most {MAX_RATE:,}: 2, 0.5",
        )
    return float(text)


@cache
def profile(name: str) -> Profile:
    """Return the profile of a name or alias, ignoring case; raise UsageError with suggestions if there is none."""
    path = entries.locate(FILE)
    known = entries.resolve(path, name.strip())
    if known is None:
        near = entries.suggestions(path, name)
        hint = f"did you mean {', '.join(near)}?" if near else "`kvplan trace profiles` lists them"
        raise UsageError(f"profile {printable(repr(name))}", "no such profile", hint)
    return _read(known, entries.entry(path, known))


def has_profile(name: str) -> bool:
    return entries.resolve(entries.locate(FILE), name.strip()) is not None


def profile_names() -> list[str]:
    """Return the names of all profiles (without aliases), in the file's order."""
    return list(entries.sections(entries.locate(FILE)))


def _read(name: str, facts: dict[str, Any]) -> Profile:
    arrivals, prefix = facts.get("arrivals", {}), facts.get("prefix", {})
    return Profile(
        name=name,
        kind=facts["kind"],
        summary=facts["summary"],
        source=facts["source"],
        licence=facts["licence"],
        num_requests=facts.get("num_requests"),
        prompt=tuple(facts["prompt"]),
        output=tuple(facts["output"]),
        prompt_mean=facts["prompt_mean"],
        output_mean=facts["output_mean"],
        joint=tuple(tuple(row) for row in facts.get("joint", ())),
        rank_correlation=facts.get("rank_correlation"),
        rate_per_s=arrivals.get("rate_per_s"),
        span_s=arrivals.get("span_s"),
        interarrival_cv=arrivals.get("interarrival_cv"),
        peak_minute_per_s=arrivals.get("peak_minute_per_s"),
        peak_second=arrivals.get("peak_second"),
        shared_prefix=prefix.get("tokens"),
        prefix_requests=tuple(prefix.get("requests", ())),
        notes=tuple(facts.get("notes", ())),
    )
