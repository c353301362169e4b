"""Names on a server's /metrics page: a table that each server fills in (vllm/metrics.py, sglang/metrics.py)."""

from collections.abc import Mapping
from dataclasses import field
from typing import Final

from kvplan.core.records import dataclass

SERVED_BY: Final = "served_by"  # label of the constants, on a page of the bundled engine: it has vLLM's names
# On a page of `kvplan serve`, what its start-up log states:
START_ARGUMENTS: Final = "kvplan:start_arguments_info"  # labels: the server whose log it is, and its arguments
START_SERVER: Final = "server"
START_FIGURE: Final = "kvplan:start_figure"  # labels: figure, rank, and its text in the log


@dataclass(frozen=True, slots=True)
class Counted:
    """Tokens counted by one metric as they are computed, by its label `mode`.

    modes  figure -> the modes whose tokens it sums
    ranks  labels of ranks within a replica: figures of several ranks count the same tokens
    """

    metric: str
    modes: Mapping[str, tuple[str, ...]]
    ranks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Counters:
    """Metrics that measure a workload between two pages: field of measure/usage.py -> counter, or the sum of a
    histogram.

    started  metric with the Unix time at which counting began
    since    the first release that has them all, in words
    """

    counters: Mapping[str, str]
    gauges: Mapping[str, str]
    started: str
    since: str


@dataclass(frozen=True, slots=True)
class Metrics:
    """A server's names for the metrics that kvplan reads.

    prefix    prefix of each of its metrics
    figures   figure of measure/server_metrics.py -> the metric's names, the newest first
    facts     constant -> the log fact it corresponds to; flags: -> the engine argument
    info      metric whose labels are the constants; None: each is a metric
    chosen    constant -> the label that says "True" if the user set it; otherwise it is no flag
    counted   tokens counted as they are computed, if the page has them
    workload  counters of a workload, or why there are none
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
        """Every metric that describes the server's state and configuration."""
        constants = (*self.facts, *self.flags) if self.info is None else (self.info,)
        counted = () if self.counted is None else (self.counted.metric,)
        return (*constants, *counted, *(name for names in self.figures.values() for name in names))
