"""The JSON Schemas of what sweep and recommend print (draft 2020-12)."""

from typing import Final

from kvplan.documents.schema.core import COUNT, FLAG, NUMBER, SIZE, TEXT, TEXTS, Schema, maybe, record, rows
from kvplan.planning.sweep import Row

# Field of a sweep's row -> its schema, in the order of the columns.
_CELLS: Final[dict[str, Schema]] = {
    "model": TEXT,
    "gpu": TEXT,
    "engine": TEXT,
    "num_gpus": SIZE,
    "tensor_parallel_size": SIZE,
    "pipeline_parallel_size": SIZE,
    "data_parallel_size": SIZE,
    "max_model_len": maybe(SIZE),
    "mean_tokens": maybe(SIZE),
    "dtype": TEXT,
    "quantization": maybe(TEXT),
    "kv_cache_dtype": TEXT,
    "gpu_memory_utilization": maybe(NUMBER),
    "max_num_seqs": maybe(SIZE),
    "block_size": maybe(SIZE),
    "fits": FLAG,
    "reason": maybe(TEXT),
    "kv_dtype": maybe(TEXT),
    "concurrency": maybe(NUMBER),
    "concurrency_low": maybe(NUMBER),
    "concurrency_high": maybe(NUMBER),
    "users_per_gpu": maybe(NUMBER),
    "price_per_hour": maybe(NUMBER),
    "users_per_dollar": maybe(NUMBER),
}
SWEEP: Final = record(
    "Every combination of a sweep, or with `pareto` the Pareto-optimal ones. Bytes are of one rank, users of all "
    "replicas; null where a combination is impossible (`reason` says why; `deficit` is null too) or was not asked for. "
    "With `pareto`, `alike` counts those left out because they hold as many users as a listed one, with other flags.",
    schema={"const": "kvplan/sweep@1"},
    prices=maybe(TEXT),
    pareto=FLAG,
    rows=rows(
        record("", **{name: _CELLS.get(name, maybe(COUNT)) for name in Row._fields}), "One for each combination."
    ),
    combinations=COUNT,
    fitting=COUNT,
    short=COUNT,
    impossible=COUNT,
    alike=COUNT,
)
_SETTINGS: Final[dict[str, Schema]] = {
    "kv_dtype": TEXT,
    "max_model_len": SIZE,
    "gpu_memory_utilization": NUMBER,
    "max_num_seqs": SIZE,
    "argv": TEXTS,
    "command": TEXT,
}
PLACEMENT: Final = record(
    "`replicas` servers, each started with `command` on tensor x pipeline GPUs; users of all replicas.",
    gpu=TEXT,
    num_gpus=SIZE,
    tensor_parallel_size=SIZE,
    pipeline_parallel_size=SIZE,
    replicas=SIZE,
    changes=rows(TEXT, "What is less precise than the checkpoint, and pipeline stages; empty: nothing."),
    users_low=COUNT,
    users_likely=COUNT,
    total_memory=SIZE,
    price_per_hour=maybe(NUMBER),
    price_per_user=maybe(NUMBER),
    **_SETTINGS,
)
ANSWER: Final = record(
    "Whether a setting holds the users, the most users that it holds, and the plan that does.",
    holds=FLAG,
    value={"type": ["number", "string", "null"]},
    most_users=COUNT,
    users_low=maybe(COUNT),
    users_likely=maybe(COUNT),
    settings={"anyOf": [record("", **_SETTINGS), {"type": "null"}]},
)
CURE: Final = record(
    "A placement that holds the users where the given GPUs do not as asked, and what it changes in words.",
    needs=rows(TEXT, "What it takes, together: fewer bits, other GPUs, a shorter context, a higher utilization."),
    **PLACEMENT["properties"],
)
FIT: Final = record(
    "What given GPUs need: the lowest utilization, the longest context, the KV dtypes; and what would hold the users.",
    gpu=TEXT,
    num_gpus=SIZE,
    total_memory=SIZE,
    replicas=SIZE,
    users_per_replica=SIZE,
    reason={**maybe(TEXT), "description": "Why one server holds nobody as asked; null where it holds some."},
    as_asked=ANSWER,
    utilization={"anyOf": [ANSWER, {"type": "null"}]},
    utilization_is_tight=FLAG,
    context=ANSWER,
    startable_utilization={
        **maybe(NUMBER),
        "description": "The utilization of context and kv_dtypes where the default does not start; null: the default, "
        "or what was stated.",
    },
    kv_dtypes=rows(ANSWER, "One for each dtype."),
    solution={
        "anyOf": [CURE, {"type": "null"}],
        "description": "What holds them on these GPUs at the context and precision asked.",
    },
    cures=rows(
        CURE, "Without a solution: the placements that hold them, the best first; no other one is better in everything."
    ),
)
RECOMMENDATION: Final = record(
    "The cheapest placements that hold so many users, those that change no precision first; or what given GPUs need.",
    schema={"const": "kvplan/recommendation@1"},
    answer={**TEXT, "description": "A sentence that begins with Yes, No, or the GPUs to take."},
    holds={**FLAG, "description": "Whether a placement, or the given GPUs as asked, hold the users."},
    question=record(
        "`end` of the range that holds the users.",
        model=TEXT,
        id=TEXT,
        engine=TEXT,
        users=SIZE,
        max_model_len=SIZE,
        mean_tokens=maybe(SIZE),
        lengths=maybe(TEXT),
        shared_prefix=COUNT,
        end={"enum": ["low", "likely"]},
        prices=maybe(TEXT),
    ),
    placements=rows(PLACEMENT, "The best of each GPU and precision."),
    failures=rows(
        record(
            "Why one server on so many GPUs holds nobody. refused: it cannot be, whatever the memory; has_room: one "
            "user would fit, and the server does not start all the same.",
            gpu=TEXT,
            num_gpus=SIZE,
            reason=TEXT,
            refused=FLAG,
            has_room=FLAG,
        ),
        "",
    ),
    fit={"anyOf": [FIT, {"type": "null"}]},
)
SCHEMAS: Final = {"sweep": SWEEP, "recommendation": RECOMMENDATION}
