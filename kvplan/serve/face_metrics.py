"""The /metrics page with the families of a server's face; figures of a prefill-first scheduler."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final, cast

import prometheus_client as prometheus

from engine.scheduler import Scheduler
from kvplan.serve.jobs import Job
from kvplan.serve.metrics import ServerMetrics
from kvplan.serve.prompts_first import ServedPromptsFirst

INTERVAL: Final = 40  # decode steps after which the throughput is counted anew: --decode-log-interval
STREAMS: Final = {True: "true", False: "false"}


class FaceMetrics(ServerMetrics):
    """Metrics of a server with a face, updated like those of any other; now: the clock of all times."""

    def __init__(self, face: ModuleType, model_name: str, scheduler: Scheduler, now: Callable[[], float]) -> None:
        self.registry = prometheus.CollectorRegistry()
        prometheus.GCCollector(self.registry)
        prometheus.PlatformCollector(self.registry)
        self._labels = {"model_name": model_name, **face.LABELS}
        self.last_error = ""
        self._face, self._clock, self._scheduler = face, now, cast("ServedPromptsFirst", scheduler)
        self._throughput = self._hit_rate = 0.0
        self._interval = (0, 0, now())  # decode steps and tokens since the last count, and its time
        self._looked_up = (0, 0)
        self._retracted = self._retracted_now = self._num_tokens = 0
        ranked = {**self._labels, **face.RANKS}
        name, text = face.RETRACTED
        self._retractions = self._family(prometheus.Counter, name, text, tuple(ranked)).labels(**ranked)
        self._gauges: dict[str, list[Any]] = {source: [] for _, source in face.GAUGES.values()}  # by what they show
        for name, (text, source) in face.GAUGES.items():
            self._gauges[source].append(self._family(prometheus.Gauge, name, text, tuple(ranked)).labels(**ranked))
        self._seconds = {
            name: self._family(
                prometheus.Histogram,
                name,
                text,
                (*self._labels, *(["is_streaming"] if splits else [])),
                buckets=buckets,
            )
            for name, (text, buckets, splits) in face.HISTOGRAMS.items()
        }
        self._counters_of = {
            name: self._family(prometheus.Counter, name, text, (*self._labels, *([label] if label else [])))
            for name, (text, label) in face.COUNTERS.items()
        }
        self.levels(scheduler)

    def _family(self, kind: Any, name: str, text: str, labels: tuple[str, ...], **settings: Any) -> Any:
        return kind(f"{self._face.PREFIX}{name}", text, labels, registry=self.registry, **settings)

    def figures(self) -> dict[str, float]:
        """Return what the gauges show, by its name in the face."""
        scheduler, limits = self._scheduler, self._scheduler.limits
        pool = scheduler.blocks
        return {
            "none": 0, "running": len(scheduler.running), "waiting": scheduler.num_waiting,
            "used": limits.num_tokens - pool.reachable, "usage": pool.usage, "free": pool.free,
            "evictable": pool.tree.num_evictable, "throughput": self._throughput, "hit_rate": self._hit_rate,
            "ratio": scheduler.ratio, "retracted_now": self._retracted_now, "capacity": limits.num_tokens,
            "page_size": limits.page_size, "num_pages": limits.num_tokens // limits.page_size,
            "context_len": limits.context_len, "max_running": limits.max_running,
            "chunk": -1 if limits.chunk is None else limits.chunk,
        }  # fmt: skip

    def page(self) -> bytes:
        return prometheus.generate_latest(self.registry)

    def rejected(self, limit: str) -> None: ...

    def tokens(self, counts: Mapping[Job, int], now: float) -> None:
        for job in counts:
            times = job.times
            if times.last_token:
                self._observe("inter_token_latency_seconds", job, now - times.last_token)
            else:
                times.first_token = now + job.delay
                self._observe("time_to_first_token_seconds", job, times.first_token - times.arrived)
            times.last_token = now
        self._num_tokens += sum(counts.values())

    def _observe(self, name: str, job: Job, seconds: float) -> None:
        labels = {"is_streaming": STREAMS[job.is_streamed]} if self._face.HISTOGRAMS[name][2] else {}
        self._seconds[name].labels(**self._labels, **labels).observe(seconds)

    def _count(self, name: str, label: str, value: float) -> None:
        labels = {self._face.COUNTERS[name][1]: label} if label else {}
        self._counters_of[name].labels(**self._labels, **labels).inc(value)

    def step(self, scheduler: Scheduler) -> None:
        steps, tokens, since = self._interval
        now, stats = self._clock(), self._scheduler.prefix_cache_stats
        if self._num_tokens:
            steps, tokens = steps + 1, tokens + self._num_tokens
        if steps >= INTERVAL and now > since:
            self._throughput, steps, tokens, since = tokens / (now - since), 0, 0, now
        self._interval, self._num_tokens = (steps, tokens, since), 0
        queries, hits = stats.queries - self._looked_up[0], stats.hits - self._looked_up[1]
        if queries:
            self._hit_rate, self._looked_up = hits / queries, (stats.queries, stats.hits)
        self._retracted_now = self._scheduler.num_preemptions - self._retracted
        self._retracted = self._scheduler.num_preemptions
        self._retractions.inc(self._retracted_now)
        self.levels(scheduler)

    def levels(self, scheduler: Scheduler) -> None:
        figures = self.figures()
        for source, gauges in self._gauges.items():
            for gauge in gauges:
                gauge.set(figures[source])

    def ended(self, job: Job, reason: str, now: float) -> None:
        times, request, now = job.times, job.request, now + job.delay
        assert request is not None
        streams, num_tokens = STREAMS[job.is_streamed], request.seq.num_output_tokens
        if reason == "abort":
            self._count("num_aborted_requests", "", 1)
        self._count("prompt_tokens", streams, len(job.prompt))
        self._count("generation_tokens", streams, num_tokens)
        self._count("num_requests", streams, 1)
        if request.num_cached_tokens:
            self._count("cached_tokens", "device", request.num_cached_tokens)
        self._observe("e2e_request_latency_seconds", job, now - times.arrived)
        self._observe("queue_time_seconds", job, max(0.0, (times.scheduled or now) - times.queued))
        if num_tokens > 1:
            per_token = (times.last_token + job.delay - times.first_token) / (num_tokens - 1)
            self._observe("request_time_per_output_token_seconds", job, per_token)
