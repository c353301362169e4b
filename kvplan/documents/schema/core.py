"""The JSON Schemas of kvplan's documents (draft 2020-12): every key named, none beyond them."""

from collections.abc import Mapping
from typing import Any, assert_never

from kvplan.core.errors import ERROR, UsageError
from kvplan.core.files import printable
from kvplan.servers.arguments import ARGUMENTS, DEFAULTS, Argument

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
SIZE: Schema = {"type": "integer", "minimum": 1}
NUMBER: Schema = {"type": "number", "minimum": 0}
TEXTS: Schema = {"type": "array", "items": TEXT}


def maybe(schema: Schema) -> Schema:
    """The same, or null."""
    return {**schema, "type": [schema["type"], "null"]}


def record(description: str = "", **properties: Schema) -> Schema:
    """An object with exactly these keys."""
    plain = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"description": description, **plain} if description else plain


def table(values: Schema, description: str) -> Schema:
    """An object whose keys are names from the data."""
    return {"type": "object", "description": description, "additionalProperties": values}


def rows(items: Schema, description: str) -> Schema:
    return {"type": "array", "description": description, "items": items}


MODEL = record(
    "The model's facts; `id` is what the server loads, `scheme` how its linear layers are stored.",
    name=TEXT,
    id=TEXT,
    architecture=TEXT,
    model_type=TEXT,
    dtype=TEXT,
    quantization=maybe(TEXT),
    scheme=maybe(TEXT),
    num_layers=SIZE,
    max_model_len=SIZE,
    source=TEXT,
)
GPU = record(
    "One GPU; total_memory is what CUDA reports, low and high what was seen or the rule's range.",
    name=TEXT,
    device_name=TEXT,
    total_memory=SIZE,
    total_memory_low=SIZE,
    total_memory_high=SIZE,
    total_memory_kind={"enum": ["logged", "published", "estimated", "given"]},
    total_memory_source=TEXT,
    nominal_memory=maybe(SIZE),
    compute_capability=maybe(TEXT),
)


def engine_argument(row: Argument, default: object) -> Schema:
    """What a plan's document says of an engine argument; null where it was not given."""
    match row.kind:
        case "context":
            return {"anyOf": [SIZE, {"const": "auto"}, {"type": "null"}]}
        case "choice":
            return {"enum": list(row.choices)} if isinstance(default, str) else SIZE
        case "flag":
            plain = FLAG
        case "text" | "limits":
            plain = TEXT
        case "fraction" | "ratio":
            plain = NUMBER
        case "bytes" | "gib":
            plain = COUNT
        case "count" | "tokens":
            plain = COUNT if default == 0 else SIZE
        case _:
            assert_never(row.kind)
    return maybe(plain) if default is None else plain


ARGS = record(
    "What was asked for; null: not given, the server decides.",
    **{name: engine_argument(row, DEFAULTS[name]) for name, row in ARGUMENTS.items()},
)
SETTINGS = record(
    "What the server runs with.",
    max_model_len=SIZE,
    auto_fit=FLAG,
    max_num_batched_tokens=SIZE,
    max_num_seqs=SIZE,
    in_flight_tokens=SIZE,
    gpu_memory_utilization=NUMBER,
    kv_dtype=TEXT,
    dtype=TEXT,
)
INPUTS = record(
    "Everything the plan was made from, resolved.",
    model=MODEL,
    engine=TEXT,
    gpu=GPU,
    num_gpus=SIZE,
    args=ARGS,
    settings=SETTINGS,
    weights_bytes=maybe(COUNT),
    memory_in_use=maybe(COUNT),
    draft={"anyOf": [MODEL, {"type": "null"}]},
    workload=record(mean_tokens=maybe(SIZE), lengths=maybe(TEXT), overflow=NUMBER, shared_prefix=COUNT),
)
MEMORY = record(
    "Bytes of one rank. weights + buffers + activations + cuda_graphs + non_torch + lora + kv_cache + unused - missing "
    "= total, where unused or missing is 0; budget is a limit, not a row. Documents of earlier releases have no "
    "missing, over_budget and over_gpu: there unused, slack and outside_budget were negative instead.",
    total=SIZE,
    budget=COUNT,
    weights=COUNT,
    buffers=COUNT,
    activations=COUNT,
    cuda_graphs=COUNT,
    non_torch=COUNT,
    lora=COUNT,
    kv_cache=COUNT,
    unused=COUNT,
    missing=COUNT,
    unused_detail=record(
        "unused - missing = context + outside_budget + slack - over_budget - over_gpu. over_budget: by how much the "
        "rows exceed the budget; over_gpu: by how much budget and context exceed the GPU.",
        context=COUNT,
        outside_budget=COUNT,
        slack=COUNT,
        over_budget=COUNT,
        over_gpu=COUNT,
    ),
    in_use=COUNT,
    load_peak=COUNT,
    weight_groups=table(COUNT, "The weights by tensor group."),
    available=WHOLE,
    available_low=WHOLE,
    available_high=WHOLE,
)
GROUP = record(
    "Layers that share one block table; bytes_per_block of this rank's share of them.",
    kind=TEXT,
    num_layers=COUNT,
    window=maybe(SIZE),
    block_size=SIZE,
    bytes_per_block=COUNT,
    blocks_per_request=COUNT,
)
KV = record(
    "The KV cache of one rank; num_blocks and tokens are 0 where the plan does not fit.",
    max_model_len=SIZE,
    dtype=TEXT,
    bytes_per_token=COUNT,
    bytes_per_request=COUNT,
    state_bytes_per_request=COUNT,
    block_size=SIZE,
    bytes_per_block=SIZE,
    blocks_per_request=SIZE,
    num_blocks=COUNT,
    tokens=COUNT,
    groups=rows(GROUP, "The groups that share the pool's block ids."),
)
CONCURRENCY = record(
    "Requests of one replica. `users` is the number to buy by: served at once, each at the length that the workload "
    "states (else the full context), decoding while one prompt is computed, at most max_num_seqs; users_low and "
    "users_high its range (null for a distribution of lengths); pool_users the same whatever max_num_seqs. `max` is "
    "the server's own figure, which its log prints; low and high its range. `log_differs` says why the two are more "
    "than 1.5x apart.",
    users=COUNT,
    users_low=maybe(COUNT),
    users_high=maybe(COUNT),
    pool_users=COUNT,
    max_num_seqs=SIZE,
    replicas=SIZE,
    max=NUMBER,
    low=NUMBER,
    high=NUMBER,
    log_differs=maybe(TEXT),
)
FIX = record(
    "One change that makes it fit.",
    flag=TEXT,
    users=COUNT,
    users_low=maybe(COUNT),
    max_model_len=SIZE,
    gpu=TEXT,
    num_gpus=SIZE,
    command=TEXT,
)
ASSUMPTION = record(
    "What is modeled, not derived: bytes of one rank, or null for a statement about the facts or rules used.",
    name=TEXT,
    low=maybe(WHOLE),
    likely=maybe(WHOLE),
    high=maybe(WHOLE),
    formula=TEXT,
    source=TEXT,
)
ORIGIN = record(kind={"enum": ["exact", "formula", "calibrated", "measured"]}, source=TEXT)
PLAN = record(
    "One plan of kvplan. Sizes are integer bytes per GPU rank.",
    schema={"const": "kvplan/plan@1"},
    inputs=INPUTS,
    fits=FLAG,
    deficit=COUNT,
    refusal=maybe(
        record("Why the server would not start, and the flag that cures it.", by=TEXT, text=TEXT, flag=maybe(TEXT))
    ),
    memory=MEMORY,
    kv=KV,
    concurrency=CONCURRENCY,
    host_memory=record(
        "Host bytes of one replica that --kv-offloading-size takes, and the full-context requests they hold.",
        kv_offloading=COUNT,
        blocks=COUNT,
        users=COUNT,
    ),
    parameters=record(
        "The model's parameters; `active` counts of the experts those a token uses.",
        total=COUNT,
        active=COUNT,
        groups=table(COUNT, "Parameters by tensor group."),
    ),
    limits=rows(record(by=TEXT, text=TEXT), "What limits the answer, the first one first."),
    fixes=rows(FIX, "What would make it fit, the best first: one change or several together; empty where it fits."),
    assumptions=rows(ASSUMPTION, "What is modeled rather than derived."),
    provenance=table(ORIGIN, "JSON path of each number of memory, kv and concurrency -> where it comes from."),
    flags=record("The command that serves this plan.", argv=TEXTS, command=TEXT),
    notes=TEXTS,
)
PLANS = record(
    "Several plans of kvplan.", schema={"const": "kvplan/plans@1"}, plans=rows(PLAN, "The plans, in the order asked.")
)
LENGTHS = record("Tokens; percentiles by nearest rank.", mean=NUMBER, p50=SIZE, p90=SIZE, p99=SIZE, most=SIZE)
CORRELATION: Schema = {"type": ["number", "null"], "minimum": -1, "maximum": 1}
TRACE = record(
    "What a request trace looks like (kvplan trace stats FILE). Times in seconds, lengths in tokens.",
    schema={"const": "kvplan/trace@1"},
    source=TEXT,
    num_requests=SIZE,
    arrivals={
        "anyOf": [
            record(
                "Null where the file has lengths only.",
                span_s=NUMBER,
                rate_per_s=maybe(NUMBER),
                interarrival_cv=maybe(NUMBER),
                peak_minute_per_s=maybe(NUMBER),
                peak_second=SIZE,
            ),
            {"type": "null"},
        ]
    },
    prompt=LENGTHS,
    output=LENGTHS,
    rank_correlation=CORRELATION,
    prefix={
        "anyOf": [
            record(
                "Shares of all prompt tokens that a prefix cache finds again; `repeated` with everything held.",
                block=SIZE,
                distinct_tokens=COUNT,
                repeated=NUMBER,
                curve=rows(record(tokens=SIZE, share=NUMBER), "By the tokens held, least recently used first out."),
            ),
            {"type": "null"},
        ]
    },
    notes=TEXTS,
)
POINTS = rows(record(percent=NUMBER, tokens=SIZE), "Lengths that a percentage of the requests does not exceed.")
WORKLOAD = record(
    "What is published of a named workload (kvplan trace stats PROFILE); null where nobody states a figure.",
    schema={"const": "kvplan/workload@1"},
    name=TEXT,
    kind={"enum": ["published", "assumed"]},
    summary=TEXT,
    source=TEXT,
    licence=TEXT,
    num_requests=maybe(SIZE),
    prompt=POINTS,
    output=POINTS,
    prompt_mean=NUMBER,
    output_mean=NUMBER,
    joint=rows(rows(COUNT, "By tenth of the output."), "Requests by tenth of the prompt; empty: drawn apart."),
    rank_correlation=CORRELATION,
    rate_per_s=maybe(NUMBER),
    span_s=maybe(NUMBER),
    interarrival_cv=maybe(NUMBER),
    peak_minute_per_s=maybe(NUMBER),
    peak_second=maybe(SIZE),
    shared_prefix=maybe(SIZE),
    prefix_requests=rows(SIZE, "How many requests share each beginning."),
    notes=TEXTS,
)
ERROR_SCHEMA = record(
    "Why a command could not answer (any command with --format json): its line on standard error, field by field.",
    schema={"const": ERROR},
    subject={**TEXT, "description": "What it is about; empty where the mark says it."},
    problem=TEXT,
    remedy={**TEXT, "description": "The next step; may be empty."},
    mark={"anyOf": [record("Its place in a file.", file=TEXT, line=SIZE, column=SIZE), {"type": "null"}]},
    exit_code=COUNT,
)
SCHEMAS = {"error": ERROR_SCHEMA, "plan": PLAN, "plans": PLANS, "trace": TRACE, "workload": WORKLOAD}


# A command by its name stands for what it prints.
OF_COMMANDS = {"estimate": "plan", "recommend": "recommendation", "simulate": "simulation"}


def schema(name: str, more: Mapping[str, Schema] | None = None) -> Schema:
    """The JSON Schema of a kind of document, of these or of `more`; UsageError for one there is not."""
    known = {**SCHEMAS, **(more or {})}
    name = OF_COMMANDS.get(name, name)
    if name not in known:
        raise UsageError(f"schema {printable(name, 60)!r}", "there is none", f"{_near(name, list(known))}")
    return {"$schema": DIALECT, "title": f"kvplan/{name}@1", **known[name]}


def _near(name: str, known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=2, cutoff=0.55)
    return f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(known)}"
