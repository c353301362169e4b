"""The server's /metrics page, with vLLM's names, types, labels and buckets (0.33, v1/metrics/loggers.py).

Metrics that do not apply to this server (other nodes, images) are omitted rather than served as 0. Its own, which
vLLM does not have, begin with `kvplan:`.
"""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from engine.drafting import Drafting
from engine.extensions import AdapterSlots
from engine.scheduler import Scheduler
from kvplan.servers.logs.log import FACTS, NUMBERS, ServerLog
from kvplan.servers.logs.metrics import START_ARGUMENTS, START_FIGURE, START_SERVER

if TYPE_CHECKING:
    from engine.tiers import Tiers
    from kvplan.serve.jobs import Job
    from kvplan.serve.transfer import Transfer
    from kvplan.serve.twin import Lag

REASONS: Final = ("stop", "length", "abort", "error", "repetition")
LIMITS: Final = ("max_num_queued_reqs", "max_num_queued_tokens")
SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHES: Final = ("device", "host", "p2p", "disk", "external_unspecified")
SLEEP_STATES: Final = ("awake", "weights_offloaded", "discard_all")
REQUEST_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
TOKEN_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
STEP_TOKENS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ANSWERS: Final = (1, 2, 5, 10, 20)
PREEMPTIONS: Final = (1, 2, 3, 4, 5, 10, 20)
NIXL_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
NIXL_BYTES: Final = tuple(2.0**power for power in range(11, 35, 2))
NIXL_COUNTS: Final = {
    "failed_transfers": "Number of failed NIXL KV Cache transfers, with handshakes and notifications.",
    "failed_notifications": "Number of failed NIXL KV Cache notifications.",
    "kv_expired_reqs": "Number of requests that had their KV expire, on the prefill server.",
    "notifications_after_expiry": "Number of notifications for requests that were no longer kept.",
}
TRANSFER_BYTES: Final = (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)

Labels = tuple[str, tuple[str, ...]]  # a label of a family beside the server's, and its values
PLAIN: Final[Labels] = ("", ("",))
# Families in the order of the page: name -> (text, label).
GAUGES: Final[Mapping[str, tuple[str, Labels]]] = {
    "num_requests_running": ("Number of requests in model execution batches.", PLAIN),
    "num_requests_waiting": ("Number of requests waiting to be processed.", PLAIN),
    "num_requests_waiting_by_reason": (
        "Number of waiting requests by reason.", ("reason", ("capacity", "deferred"))
    ),
    "kv_cache_usage_perc": ("KV-cache usage. 1 means 100 percent usage.", PLAIN),
    "engine_sleep_state": (
        "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
        "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
        ("sleep_state", SLEEP_STATES),
    ),
}  # fmt: skip
EXTERNAL: Final = "External prefix cache {} from KV connector cross-instance cache sharing, in terms of number of {}."
ESTIMATED: Final = (
    "Estimated number of {} (for Model Flops Utilization calculations)."  # 0 without --enable-mfu-metrics
)
COUNTERS: Final[Mapping[str, tuple[str, Labels]]] = {
    "prefix_cache_queries": ("Prefix cache queries, in terms of number of queried tokens.", PLAIN),
    "prefix_cache_hits": ("Prefix cache hits, in terms of number of cached tokens.", PLAIN),
    "num_preemptions": ("Cumulative number of preemption from the engine.", PLAIN),
    "prompt_tokens": ("Number of prefill tokens processed.", PLAIN),
    "prompt_tokens_by_source": ("Number of prompt tokens by source.", ("source", SOURCES)),
    "prompt_tokens_cached": ("Number of cached prompt tokens (local + external).", PLAIN),
    "prompt_tokens_cached_by_source": (
        "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), "
        "disk, p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission; sums to "
        "vllm:prefix_cache_hits + vllm:external_prefix_cache_hits.",
        ("source", CACHES),
    ),
    "external_prefix_cache_queries": (EXTERNAL.format("queries", "queried tokens"), PLAIN),
    "external_prefix_cache_hits": (EXTERNAL.format("hits", "cached tokens"), PLAIN),
    # of images: a text model has none
    "mm_cache_queries": ("Multi-modal cache queries, in terms of number of queried items.", PLAIN),
    "mm_cache_hits": ("Multi-modal cache hits, in terms of number of cached items.", PLAIN),
    "estimated_flops_per_gpu": (ESTIMATED.format("floating point operations per GPU"), PLAIN),
    "estimated_read_bytes_per_gpu": (ESTIMATED.format("bytes read from memory per GPU"), PLAIN),
    "estimated_write_bytes_per_gpu": (ESTIMATED.format("bytes written to memory per GPU"), PLAIN),
    "generation_tokens": ("Number of generation tokens processed.", PLAIN),
    "request_success": ("Count of successfully processed requests.", ("finished_reason", REASONS)),
}  # fmt: skip
PHASE: Final = "Histogram of time spent in {} phase for request."
# Name -> (text, buckets); None: those of tokens up to the context.
HISTOGRAMS: Final[Mapping[str, tuple[str, tuple[float, ...] | None]]] = {
    "request_prompt_tokens": ("Number of prefill tokens processed.", None),
    "request_generation_tokens": ("Number of generation tokens processed.", None),
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", STEP_TOKENS),
    "request_max_num_generation_tokens": ("Histogram of maximum number of requested generation tokens.", None),
    "request_params_n": ("Histogram of the n request parameter.", ANSWERS),
    "request_params_max_tokens": ("Histogram of the max_tokens request parameter.", None),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", FIRST_TOKEN_S),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", TOKEN_S),
    "request_time_per_output_token_seconds": ("Histogram of time_per_output_token_seconds per request.", TOKEN_S),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", REQUEST_S),
    "request_queue_time_seconds": (PHASE.format("WAITING"), REQUEST_S),
    "request_inference_time_seconds": (PHASE.format("RUNNING"), REQUEST_S),
    "request_prefill_time_seconds": (PHASE.format("PREFILL"), REQUEST_S),
    "request_decode_time_seconds": (PHASE.format("DECODE"), REQUEST_S),
    "request_num_preemptions": ("Histogram of the number of times a request was preempted.", PREEMPTIONS),
    "request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).", None
    ),
}  # fmt: skip


def steps_125(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 5, 10, 20, ... up to the limit: vLLM's token buckets."""
    return tuple(
        digit * 10**power for power, digit in product(range(len(str(limit))), (1, 2, 5)) if digit * 10**power <= limit
    )


class Several(Histogram):
    """A histogram that takes several equal values at once."""

    def observe_several(self, amount: float, count: int) -> None:
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


def features_of(scheduler: Scheduler) -> tuple[int, int]:
    """Return a scheduler's draft tokens per step and its slots for adapters."""
    drafting, slots = scheduler.extension(Drafting), scheduler.extension(AdapterSlots)
    return 0 if drafting is None else drafting.rules.num_drafts, 0 if slots is None else slots.num_slots


class ServerMetrics:
    """All metrics of one server; updated in the backend's thread, readable from any thread."""

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        cache_config: Mapping[str, str],
        num_drafts: int = 0,
        max_loras: int = 0,
        tiers: "Tiers[Any] | Transfer | None" = None,
        start: ServerLog | None = None,
        rank: int = 0,
        fallbacks: Mapping[str, str] | None = None,
    ) -> None:
        """Register the metrics.

        num_drafts  draft tokens per step; 0: no speculation, and no metrics for it
        max_loras   slots for adapters; 0: no adapter metrics
        tiers       KV offloading tiers, or handovers; None: neither, and no metrics for them
        start       start-up log of all ranks, which the page repeats
        rank        the data-parallel rank
        fallbacks   what the engine does without, and why
        """
        self.registry = CollectorRegistry()
        GCCollector(self.registry)
        PlatformCollector(self.registry)
        ProcessCollector(registry=self.registry)
        self._labels = {"model_name": model_name, "engine": str(rank)}
        self._step_tokens = 0
        self._drafts = self._speculation(num_drafts)
        self._counts = (0,) * (3 + len(self._drafts))  # the scheduler's, as far as they are reported
        self._now = (0, 0, 0, 0.0)  # requests that run, wait and are deferred, and the use of blocks
        self.last_error, self._loaded_from = "", "host"
        self._levels = {name: self._by_label(Gauge, name, *row) for name, row in GAUGES.items()}
        self.sleeping(None)
        self._counts_of = {name: self._by_label(Counter, name, *row) for name, row in COUNTERS.items()}
        text = "Number of admission attempts rejected by a queue limit, by reason."
        rejections = Counter("vllm:admission_rejections", text, ("model_name", "reason"), registry=self.registry)
        self._rejections = {limit: rejections.labels(model_name=model_name, reason=limit) for limit in LIMITS}
        self._offload: OffloadMetrics | TransferMetrics | None = None
        if tiers is not None:
            is_host = hasattr(tiers, "host")
            self._offload = OffloadMetrics(self, tiers) if is_host else TransferMetrics(self, tiers)  # type: ignore[arg-type]
            self._loaded_from = "host" if is_host else "p2p"
        tokens = steps_125(max_model_len)
        self._times = {
            name: self._histogram(name, text, tokens if buckets is None else buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        info = Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            (*cache_config, "engine"),
            registry=self.registry,
        )
        info.labels(**cache_config, engine=str(rank)).set(1)
        self._max_loras = str(max_loras)
        self._adapters: list[str] = []  # adapters with requests, in order of first use
        self._lora_info = self._lora_gauge() if max_loras else None
        if start is not None:
            self._start(start)
        if fallbacks:
            text = "Kernels that plain torch stands for, or CUDA graphs that are not captured."
            replaced = Gauge("kvplan:fallback_info", text, ("name", "reason"), registry=self.registry)
            for name, why in fallbacks.items():
                replaced.labels(name, why).set(1)

    @property
    def external(self) -> tuple[Counter, Counter]:
        """Queries and hits of the prefixes that are kept elsewhere."""
        queries, hits = (self._counts_of[f"external_prefix_cache_{name}"][""] for name in ("queries", "hits"))
        return queries, hits

    def _start(self, log: ServerLog) -> None:
        """State the arguments and the figures of the start, as in its log: `kvplan reconcile --metrics` reads them."""
        arguments = {START_SERVER: log.engine, **log.flags}
        text = "Arguments of the server, as in its start-up log."
        Gauge(START_ARGUMENTS, text, tuple(arguments), registry=self.registry).labels(**arguments).set(1)
        text = "Figures of the start-up log: the value as logged, 1 for a word."
        figures = Gauge(START_FIGURE, text, ("figure", "rank", "logged"), registry=self.registry)
        for reading in log.readings:
            value = reading.value if FACTS[reading.fact] in NUMBERS else 1
            figures.labels(reading.fact, reading.rank, reading.text).set(value)

    def _by_label(self, kind: Any, name: str, text: str, label: Labels = PLAIN) -> dict[str, Any]:
        """A family's metrics by the value of its label."""
        own, values = label
        family = kind(f"vllm:{name}", text, (*self._labels, *filter(None, [own])), registry=self.registry)
        return {value: family.labels(**self._labels, **({own: value} if own else {})) for value in values}

    def _counter(self, name: str, text: str) -> Counter:
        counter: Counter = self._by_label(Counter, name, text)[""]
        return counter

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> "Several":
        histogram = Several(f"vllm:{name}", text, tuple(self._labels), buckets=buckets, registry=self.registry)
        return histogram.labels(**self._labels)

    def sleeping(self, level: int | None) -> None:
        """Set the level of the server's sleep; None: it is awake."""
        for state, is_so in zip(SLEEP_STATES, (level is None, level == 1, level == 2), strict=True):
            self._levels["engine_sleep_state"][state].set(is_so)

    def _lora_gauge(self) -> Gauge:
        names = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        return Gauge("vllm:lora_requests_info", "Running stats on lora requests.", names, registry=self.registry)

    def _adapters_now(self, gauge: Gauge, scheduler: Scheduler) -> None:
        """Set the adapter gauge: both labels list every adapter with a request, as in vLLM 0.33; the value is the time.

        Outdated label sets are removed; vLLM leaves them, with the time when they last applied.
        """
        unfinished = sorted((*scheduler.running, *scheduler.waiting), key=lambda seq: seq.arrival)
        present = dict.fromkeys(seq.adapter for seq in unfinished if seq.adapter is not None)
        known = [name for name in self._adapters if name in present]
        self._adapters = [*known, *(name for name in present if name not in known)]
        names = ",".join(self._adapters)
        gauge.clear()
        gauge.labels(self._max_loras, names, names).set_to_current_time()

    def _speculation(self, num_drafts: int) -> list[Counter]:
        """Return counters of drafts, draft tokens, accepted tokens, and accepted tokens per position; empty without
        speculation.
        """
        if not num_drafts:
            return []
        label, text = ("position", tuple(map(str, range(num_drafts)))), "Accepted tokens per draft position."
        by_place = self._by_label(Counter, "spec_decode_num_accepted_tokens_per_pos", text, label)
        return [
            self._counter("spec_decode_num_drafts", "Number of spec decoding drafts."),
            self._counter("spec_decode_num_draft_tokens", "Number of draft tokens."),
            self._counter("spec_decode_num_accepted_tokens", "Number of accepted tokens."),
            *by_place.values(),
        ]

    def watch(self, lag: "Lag") -> None:
        """Show how far a simulated server is behind its plan."""
        for name, text, read in (
            ("step_lag_seconds", "How late the last step ended, by the plan.", lambda: lag.last),
            ("step_time_factor", "Time that steps take / time that the plan gives them.", lambda: lag.factor),
        ):
            gauge = Gauge(f"kvplan:{name}", text, tuple(self._labels), registry=self.registry)
            gauge.labels(**self._labels).set_function(read)

    # --- events -------------------------------------------------------------------------------------------------

    def rejected(self, limit: str) -> None:
        self._rejections[limit].inc()

    def failed(self, error: Exception) -> None:
        self.last_error = f"{type(error).__name__}: {error}"[:500]

    def tokens(self, counts: "Mapping[Job, int]", now: float) -> None:
        """Record a step's tokens; a request's client sees them after its delay."""
        gaps: dict[float, int] = {}
        for job in counts:
            times = job.times
            if times.last_token:
                gap = now - times.last_token
                gaps[gap] = gaps.get(gap, 0) + 1
            else:
                times.first_token = now + job.delay
                self._times["time_to_first_token_seconds"].observe(times.first_token - times.arrived)
                assert job.request is not None
                loaded = job.request.seq.num_loaded_tokens
                self._prompt_done(len(job.prompt), job.request.num_cached_tokens, loaded)
            times.last_token = now
        for gap, count in gaps.items():
            self._times["inter_token_latency_seconds"].observe_several(gap, count)
        num = sum(counts.values())
        self._add("generation_tokens", num)
        self._step_tokens += num

    def _prompt_done(self, num_tokens: int, num_cached: int, num_loaded: int) -> None:
        self._step_tokens += num_tokens
        self._add("prompt_tokens", num_tokens)
        self._add("prompt_tokens_cached", num_cached)
        sources = (num_tokens - num_cached, num_cached - num_loaded, num_loaded)
        for source, num in zip(SOURCES, sources, strict=True):
            self._add("prompt_tokens_by_source", num, source)
        self._add("prompt_tokens_cached_by_source", num_cached - num_loaded, "device")
        self._add("prompt_tokens_cached_by_source", num_loaded, self._loaded_from)

    def _add(self, name: str, num: float = 1, label: str = "") -> None:
        self._counts_of[name][label].inc(num)

    def step(self, scheduler: Scheduler) -> None:
        """Record the end of a step."""
        stats = scheduler.prefix_cache_stats
        counts = (stats.queries, stats.hits, scheduler.num_preemptions, *self._draft_counts_of(scheduler))
        if counts != self._counts:
            names = ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions")
            counters = (*(self._counts_of[name][""] for name in names), *self._drafts)
            for counter, now, before in zip(counters, counts, self._counts, strict=True):
                counter.inc(now - before)
            self._counts = counts
        if self._step_tokens:  # like vLLM, skip steps that sampled no token
            self._times["iteration_tokens_total"].observe_several(self._step_tokens, 1)
        self._step_tokens = 0
        self.levels(scheduler)

    def _draft_counts_of(self, scheduler: Scheduler) -> tuple[int, ...]:
        drafting = scheduler.extension(Drafting) if self._drafts else None
        return () if drafting is None else drafting.stats.counts

    def levels(self, scheduler: Scheduler) -> None:
        """Record what may change between two steps, too."""
        if self._offload is not None:
            self._offload.step()
        self._now = (len(scheduler.running), scheduler.num_waiting, scheduler.num_deferred, scheduler.blocks.usage)
        if self._lora_info is not None:
            self._adapters_now(self._lora_info, scheduler)

    def ended(self, job: "Job", reason: str, now: float) -> None:
        """Record the end of a request, for whatever reason."""
        times, request, now = job.times, job.request, now + job.delay
        assert request is not None
        num_tokens = request.seq.num_output_tokens
        if job.simulated is not None and job.simulated.is_pooled and reason == "stop":
            self._prompt_done(len(job.prompt), request.num_cached_tokens, request.seq.num_loaded_tokens)
        self._add("request_success", 1, reason)
        scheduled = times.scheduled or now
        # A request's delay counts as prefill time, as it appears to a client.
        first = times.first_token or scheduled
        last = times.last_token + job.delay if times.last_token else scheduled
        figures = {
            "e2e_request_latency_seconds": now - times.arrived,
            "request_prompt_tokens": len(job.prompt),
            "request_generation_tokens": num_tokens,
            "request_num_preemptions": request.seq.num_preemptions,
            "request_params_max_tokens": job.params.max_tokens,
            "request_prefill_kv_computed_tokens": len(job.prompt) - request.num_cached_tokens,
            "request_queue_time_seconds": max(0.0, scheduled - times.queued),
            "request_prefill_time_seconds": max(0.0, first - scheduled),
            "request_decode_time_seconds": last - first,
            "request_inference_time_seconds": max(0.0, last - scheduled),
            "request_time_per_output_token_seconds": (last - first) / (num_tokens - 1) if num_tokens > 1 else 0.0,
        }
        if job.group.ended(num_tokens):
            figures |= {"request_params_n": job.group.n, "request_max_num_generation_tokens": job.group.most_tokens}
        for name, figure in figures.items():
            self._times[name].observe(figure)

    def page(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        running, waiting, deferred, usage = self._now
        reasons = self._levels["num_requests_waiting_by_reason"]
        self._levels["num_requests_running"][""].set(running)
        self._levels["num_requests_waiting"][""].set(waiting)
        reasons["deferred"].set(deferred)
        reasons["capacity"].set(waiting - deferred)
        self._levels["kv_cache_usage_perc"][""].set(usage)
        return generate_latest(self.registry)


class OffloadMetrics:
    """Metrics of KV offloading, with the names of vLLM's offloading connector (v1/offloading/metrics.py)."""

    def __init__(self, page: ServerMetrics, tiers: "Tiers[Any]") -> None:
        self._tiers = tiers
        self._external = page.external
        ways = {"load": "from offload storage to GPU", "store": "from GPU to offload storage"}
        verbs = {"load": "loaded", "store": "stored"}
        self._bytes = {
            kind: page._counter(f"kv_offload_{kind}_bytes", f"Total bytes {verbs[kind]} {way}.")
            for kind, way in ways.items()
        }
        self._times = {
            kind: page._counter(f"kv_offload_{kind}_time", f"Total {kind} time {way}, in seconds.")
            for kind, way in ways.items()
        }
        self._sizes = {
            kind: page._histogram(
                f"kv_offload_{kind}_size", f"Histogram of KV offload {kind} operation size, in bytes.", TRANSFER_BYTES
            )
            for kind in ways
        }
        refused = "Number of KV offload store allocation attempts that failed."
        self._refused = page._counter("kv_offload_allocation_failure", refused)
        self._usage, self._write, self._read = (
            page._by_label(Gauge, f"kv_offload_cpu_cache_{name}usage_perc", f"CPU cache {text}usage, 0 to 1.")[""]
            for name, text in (("", ""), ("write_", "write "), ("read_", "read "))
        )
        self._disk = getattr(tiers.host, "disk", None)
        self._lost = {} if self._disk is None else self._lost_files(page)
        self._seen_lost: dict[str, int] = {}
        self._seen = (0, 0, 0)  # counts reported so far: queries, hits, refused stores

    @staticmethod
    def _lost_files(page: ServerMetrics) -> dict[str, Counter]:
        """Return this server's own counters of lost files; vLLM does not check files."""
        counter = Counter(
            "kvplan:kv_offload_files_lost",
            "Number of KV files that were damaged, or that the disk did not take.",
            (*page._labels, "reason"),
            registry=page.registry,
        )
        return {reason: counter.labels(**page._labels, reason=reason) for reason in ("damaged", "unwritten")}

    def step(self) -> None:
        """Record the end of a step."""
        if self._disk is not None:
            lost = {"damaged": self._disk.num_damaged, "unwritten": self._disk.num_unwritten}
            for reason, count in lost.items():
                self._lost[reason].inc(count - self._seen_lost.get(reason, 0))
            self._seen_lost = lost
        tiers, pool = self._tiers, self._tiers.connector.pool
        stats = tiers.external_cache_stats
        counts = (stats.queries, stats.hits, tiers.connector.num_refused)
        for counter, now, before in zip((*self._external, self._refused), counts, self._seen, strict=True):
            counter.inc(now - before)
        self._seen = counts
        while tiers.host.copies:
            kind, num_bytes, seconds = tiers.host.copies.popleft()
            self._bytes[kind].inc(num_bytes)
            self._times[kind].inc(seconds)
            self._sizes[kind].observe(num_bytes)
        write = pool.num_writing / pool.num_chunks
        self._usage.set(tiers.usage)
        self._write.set(write)
        self._read.set(max(0.0, tiers.usage - write))


class TransferMetrics:
    """Metrics of handovers, with the names of vLLM's NIXL connector (kv_connector/v1/nixl/stats.py).

    Not the time to post a transfer, nor its descriptors: they are NIXL's own.
    """

    def __init__(self, page: ServerMetrics, transfer: "Transfer") -> None:
        self._transfer, self._external = transfer, page.external
        text = "Histogram of {} NIXL KV Cache transfers."
        self._seconds = page._histogram("nixl_xfer_time_seconds", text.format("transfer duration for"), NIXL_S)
        self._bytes = page._histogram("nixl_bytes_transferred", text.format("bytes transferred per"), NIXL_BYTES)
        self._counters = [page._counter(f"nixl_num_{name}", text) for name, text in NIXL_COUNTS.items()]
        self._seen = [0] * 6

    def step(self) -> None:
        counts, stats = self._transfer.counts, self._transfer.external_cache_stats
        now = [counts.failed, counts.unnotified, counts.expired, counts.late, stats.queries, stats.hits]
        for counter, number, before in zip((*self._counters, *self._external), now, self._seen, strict=True):
            counter.inc(number - before)
        self._seen = now
        while counts.moved:
            seconds, num_bytes = counts.moved.popleft()
            self._seconds.observe(seconds)
            self._bytes.observe(num_bytes)
