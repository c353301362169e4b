"""The names on a server's /metrics page: a table that each server fills in (vllm/metrics.py, sglang/metrics.py)."""

from collections.abc import Mapping
from dataclasses import field

from kvplan.core.records import dataclass


@dataclass(frozen=True, slots=True)
class Counted:
    """Tokens that one metric counts as they are computed, by its label `mode`.

    modes  figure -> the modes that are its tokens
    ranks  labels of one replica: where several of its ranks say a figure, these are the same tokens
    """

    metric: str
    modes: Mapping[str, tuple[str, ...]]
    ranks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Counters:
    """What counts a workload between two pages: field of measure/usage.py -> counter, or the sum of a histogram.

    started  metric that says when the counting began, in Unix time
    since    the first release that has them all, in words
    """

    counters: Mapping[str, str]
    gauges: Mapping[str, str]
    started: str
    since: str


@dataclass(frozen=True, slots=True)
class Metrics:
    """A server's names of what kvplan reads.

    prefix    what each of its metrics begins with
    figures   figure of measure/server_metrics.py -> the metric's names, the newest first
    facts     constant -> the fact of a log it stands for; flags: -> the engine argument
    info      metric whose labels the constants are; None: each is a metric
    chosen    constant -> the label that says "True" where the user chose it; else it is no flag
    counted   tokens that are counted as they are computed, where the page has that
    workload  what counts a workload, or why nothing does
    """

    prefix: str
    figures: Mapping[str, tuple[str, ...]]
    facts: Mapping[str, str]
    flags: Mapping[str, str]
    workload: Counters | str
    info: str | None = None
    chosen: Mapping[str, str] = field(default_factory=dict)
    counted: Counted | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every metric of a page that says how the server is doing and was set up."""
        constants = (*self.facts, *self.flags) if self.info is None else (self.info,)
        counted = () if self.counted is None else (self.counted.metric,)
        return (*constants, *counted, *(name for names in self.figures.values() for name in names))
