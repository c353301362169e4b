"""A run's samples as counters that ui.perfetto.dev draws (Chrome trace events, microseconds)."""

import json

from kvplan.measure.rundir import Run

COUNTERS = (
    "rss", "torch_allocated", "torch_reserved", "device_used", "process_used", "num_used_blocks", "num_kv_tokens",
    "num_filled_slots", "num_requests_running", "num_requests_waiting", "num_preemptions", "generation_tokens",
    "power_w", "sm_clock_mhz",
)  # fmt: skip


def counters(run: Run) -> str:
    """The file's text: one counter track per figure and one slice per stage."""
    events: list[dict[str, object]] = []
    for sample in run.samples:
        time_us = round(sample["t"] * 1e6)
        events += [
            {"name": name, "ph": "C", "ts": time_us, "pid": 1, "args": {"value": sample.get(name)}}
            for name in COUNTERS
            if isinstance(sample.get(name), int | float)
        ]
    stages = [(event["t"], str(event["stage"])) for event in run.events if event.get("event") == "stage"]
    ends = [start for start, _ in stages[1:]] + [run.samples[-1]["t"] if run.samples else 0.0]
    for (start, name), end in zip(stages, ends, strict=True):
        events.append(
            {"name": name, "ph": "X", "ts": round(start * 1e6), "dur": round((end - start) * 1e6), "pid": 1, "tid": 1}
        )
    return json.dumps({"traceEvents": events})
