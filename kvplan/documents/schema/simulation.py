"""The JSON Schema of what simulate prints (draft 2020-12)."""

from typing import Final

from kvplan.documents.schema.core import COUNT, FLAG, NUMBER, SIZE, TEXT, Schema, maybe, record, rows

_SPREAD: Final = record("Seconds; percentiles by nearest rank.", mean=NUMBER, p50=NUMBER, p90=NUMBER, p99=NUMBER)
_SHARE: Final[Schema] = {"type": "number", "minimum": 0, "maximum": 1}
_VARIANT: Final = record(
    "One way to run the load. Averages are over time, from the first arrival to the last end.",
    name=TEXT,
    requests=record(
        "`judged` are those whose times count: where users wait for answers, not each one's first.",
        arrived=COUNT,
        finished=COUNT,
        judged=COUNT,
        rejected=COUNT,
        failed=COUNT,
        preempted=COUNT,
        arrival_rate=maybe(NUMBER),
    ),
    seconds=NUMBER,
    steps=COUNT,
    times=record(
        "To the first token, per output token after it, in the queue, and of the whole request.",
        ttft=_SPREAD,
        tpot=_SPREAD,
        queue=_SPREAD,
        latency=_SPREAD,
    ),
    running=record("Requests.", mean=NUMBER, peak=COUNT),
    waiting=record("Requests.", mean=NUMBER, peak=COUNT),
    kv_usage=record("Share of the pool's blocks in use.", mean=_SHARE, peak=_SHARE),
    empty_slots=maybe(_SHARE),
    preemptions=COUNT,
    prefix_cache=record("Prompt tokens looked up and found.", hit_rate=_SHARE, hit_tokens=COUNT, looked_up=COUNT),
    tiers=rows(record(name=TEXT, hit_rate=_SHARE, hit_tokens=COUNT), "As given, fastest first."),
    ttft_saved={"type": ["number", "null"], "description": "Seconds, on average; null without tiers."},
    throughput=record(
        "Per second, over the whole run.", requests_per_s=NUMBER, output_tokens_per_s=NUMBER, prompt_tokens_per_s=NUMBER
    ),
    slo=rows(
        record(promise=TEXT, limit=NUMBER, value=maybe(NUMBER), kept=FLAG),
        "Seconds, or shares of the requests; null where the percentile is a request that was not served.",
    ),
    largest={
        "anyOf": [
            record(
                "The largest load that keeps every promise, and the smallest tried that breaks one: requests per "
                "second, or users.",
                keeps=maybe(NUMBER),
                breaks=maybe(NUMBER),
                runs=SIZE,
            ),
            {"type": "null"},
        ]
    },
)
SIMULATION: Final = record(
    "A workload over a plan, in time; the first variant is what was asked for.",
    schema={"const": "kvplan/simulation@1"},
    inputs=record(
        "What was run.",
        model=TEXT,
        id=TEXT,
        engine=TEXT,
        gpu=TEXT,
        num_gpus=SIZE,
        max_model_len=SIZE,
        num_blocks=SIZE,
        block_size=SIZE,
        max_num_seqs=SIZE,
        max_num_batched_tokens=SIZE,
        load=TEXT,
        step_time=TEXT,
    ),
    variants=rows(_VARIANT, "One run for each."),
)
SCHEMAS: Final = {"simulation": SIMULATION}
