"""The JSON Schemas of a policy file, as an editor reads it, and of what `kvplan check --format json` says."""

from typing import Any, Final, assert_never

from kvplan.documents.schema.core import COUNT, FLAG, NUMBER, SIZE, TEXT, TEXTS, WHOLE, Schema, maybe, record, rows
from kvplan.policy.file import (
    DROP,
    ENGINE_KEYS,
    GROWTH,
    LENGTH_KEYS,
    MAX_TARGETS,
    SWITCH_KEYS,
    TARGET_RULES,
    WORKLOAD_KEYS,
)
from kvplan.policy.result import CHANGE_KINDS, CHECK, FAILURE, OUTCOMES, OWN_RULES, RULES
from kvplan.servers.arguments import ARGUMENTS, Argument

# --- what a check says ------------------------------------------------------------------------------------------------

VALUE: Final[Schema] = {"type": ["number", "boolean", "null"]}
FIGURES: Final = record(
    "What a target's plan says, in bytes of one rank, tokens and requests of one replica; what the pool holds is 0 "
    "where it does not fit. concurrency is the server's own figure, users those served at once (null: not known).",
    fits=FLAG,
    weights=COUNT,
    kv_cache=COUNT,
    kv_bytes_per_token=COUNT,
    kv_tokens=COUNT,
    concurrency=NUMBER,
    headroom=WHOLE,
    lora=COUNT,
    users=maybe(COUNT),
)
FINDING: Final = record(
    "One rule, judged. limit and actual are numbers in `unit`; null: not known.",
    code={"enum": [code for code, _ in RULES.values()]},
    rule={"enum": list(RULES)},
    outcome={"enum": list(OUTCOMES)},
    message=TEXT,
    fix=maybe(TEXT),
    line=SIZE,
    column=SIZE,
    limit=VALUE,
    actual=VALUE,
    unit=TEXT,
    key={"enum": ["", "mean", "p99"]},
    waiver=maybe(TEXT),
)
CURE: Final = record(
    "One change after which the target keeps every rule that it keeps now, and those named (findings' names).",
    flags=TEXTS,
    keys={
        "type": "object",
        "description": "The change as keys of the policy's target.",
        "additionalProperties": {"type": ["string", "number", "boolean"]},
    },
    rules=TEXTS,
)
MAYBE_FIGURES: Final[Schema] = {"anyOf": [FIGURES, {"type": "null"}]}
CHECK_SCHEMA: Final = record(
    "A policy, judged (kvplan check --format json; also what a baseline file holds).",
    schema={"const": CHECK},
    policy=TEXT,
    counts=record("Findings by outcome.", **dict.fromkeys(OUTCOMES, COUNT)),
    targets=rows(
        record(
            "A target with its rules; figures is null for findings about the measurement itself.",
            id=TEXT,
            line=SIZE,
            title=TEXT,
            figures=MAYBE_FIGURES,
            baseline=MAYBE_FIGURES,
            cure={"anyOf": [CURE, {"type": "null"}]},
            findings=rows(FINDING, "In the order of the file."),
        ),
        "In the order of the file.",
    ),
    warnings=TEXTS,
)

FAILURE_SCHEMA: Final = record(
    "A check that could not be made (kvplan check --format json, exit code 2, 3 or 70): no rule was judged.",
    schema={"const": FAILURE},
    policy=TEXT,
    file=TEXT,
    line=maybe(SIZE),
    column=maybe(SIZE),
    message=TEXT,
    exit_code=COUNT,
)

# --- a policy file ----------------------------------------------------------------------------------------------------


def either(number: Schema, pattern: str, description: str = "") -> Schema:
    """A plain number, or text of a form."""
    found: Schema = {"anyOf": [number, {"type": "string", "pattern": pattern}]}
    return {"description": description, **found} if description else found


def keys(description: str, *required: str, **properties: Schema) -> Schema:
    """A table that may leave keys out but for the required ones, and has no others."""
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


WORD: Final[Schema] = {"type": ["string", "number"]}
TOKENS: Final = either(SIZE, "^[0-9]+([kKmM]i?)?$", "Tokens: 32768, or 32k (binary).")
BYTES_FORM: Final = r"^[0-9]+(\.[0-9]+)? ?([KkMmGgTt][Ii]?)?[Bb]?$"
BYTES_OR_NONE: Final = either(COUNT, BYTES_FORM, "Bytes: 16GiB (binary), 16GB (decimal); 0 where there are none.")
BYTES: Final = either(SIZE, BYTES_FORM, "Bytes: 16GiB (binary), 16GB (decimal).")
SHARE: Final = either({"type": "number", "minimum": 0, "maximum": 1}, r"^[0-9]{1,6}(\.[0-9]{1,6})?%?$", "A share: 5%.")
ABOVE_0: Final[Schema] = {"type": "number", "exclusiveMinimum": 0}
SEVERITY: Final[Schema] = {"enum": ["warn", "fail"]}


def engine_key(name: str) -> Schema:
    """What a key of a target may hold: strings for what has a unit, plain YAML values else."""
    if name in SWITCH_KEYS:
        return FLAG
    if name in ARGUMENTS:
        return argument(ARGUMENTS[name])
    if name == "engine_arg":
        return {"type": ["string", "array"], "items": TEXT}
    if name in ("gpu_memory", "weights_bytes"):
        return BYTES
    if name == "memory_in_use":
        return BYTES_OR_NONE
    if name in LENGTH_KEYS and name != "lengths":
        return SHARE if name == "overflow" else TOKENS
    return WORD


def argument(how: Argument) -> Schema:
    match how.kind:
        case "flag":
            return FLAG
        case "count":
            return either({**SIZE, "maximum": how.most}, "^[0-9]+$")
        case "context":
            return either({"type": "integer"}, "^(auto|-1|[0-9]+([kKmM]i?)?)$", "Tokens: 32k; auto fits the memory.")
        case "tokens":
            return TOKENS
        case "bytes":
            return BYTES
        case "gib":
            return either(NUMBER, BYTES_FORM, "GiB, or a size with its unit.")
        case "fraction":
            return SHARE
        case "ratio":
            return NUMBER
        case "choice":
            whole = [int(choice) for choice in how.choices if choice.isdigit()]
            return {"enum": [*how.choices, *whole]}
        case "text" | "limits":
            return WORD
    assert_never(how.kind)


ENGINE: Final[dict[str, Schema]] = {name: engine_key(name) for name in ENGINE_KEYS}
RULE_VALUES: Final[dict[str, Schema]] = {
    "fits": {"const": True},
    "min_headroom": {"anyOf": [SHARE, BYTES]},
    "min_concurrency": ABOVE_0,
    "min_logged_concurrency": ABOVE_0,
    "min_users": {"anyOf": [SIZE, keys("By length.", mean=SIZE, p99=SIZE)]},
    "min_kv_tokens": TOKENS,
    "max_weights": BYTES,
    "max_kv_bytes_per_token": BYTES,
    "max_lora_bytes": BYTES,
    "max_preemption_rate": SHARE,
    "max_prediction_error": SHARE,
}
RULE_TABLE: Final = keys(
    "What is promised.", **{name: {"description": RULES[name][1], **RULE_VALUES[name]} for name in TARGET_RULES}
)
RATE: Final = either(ABOVE_0, r"^[0-9]{1,9}(\.[0-9]{1,9})?(/(s|min|h))?$", "Requests: 5.5/s, 90/min, 2000/h.")
WORKLOAD_VALUES: Final[dict[str, Schema]] = {"profile": TEXT, "trace": TEXT, "rate": RATE, "tpot": WORD}
WORKLOAD: Final = keys(
    "What the target serves.", **{name: WORKLOAD_VALUES.get(name) or ENGINE[name] for name in WORKLOAD_KEYS}
)
SEVERITIES: Final = keys("Of a rule that is not met: fail, if nothing is said.", **dict.fromkeys(OWN_RULES, SEVERITY))
TARGET: Final = keys(
    "A server: a model on a GPU with its engine's arguments, or the command that starts it.",
    "id",
    id={"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"},
    command=TEXT,
    **ENGINE,
    workload=WORKLOAD,
    rules=RULE_TABLE,
    severity=SEVERITIES,
)
POLICY_SCHEMA: Final[dict[str, Any]] = keys(
    "A policy of `kvplan check`.",
    "version",
    "targets",
    version={"const": 1},
    defaults=keys("Of every target; what a target says itself wins.", **ENGINE, workload=WORKLOAD, rules=RULE_TABLE),
    targets={"type": "array", "minItems": 1, "maxItems": MAX_TARGETS, "items": TARGET},
    baseline=keys(
        "Figures of an earlier check, and how far from them a change may go.",
        "file",
        file=TEXT,
        max_growth=keys("Shares.", **dict.fromkeys(GROWTH, SHARE)),
        max_drop=keys("Shares.", **dict.fromkeys(DROP, SHARE)),
    ),
    measured=keys(
        "A run of `kvplan profile`.",
        "file",
        file=TEXT,
        max_error=SHARE,
        max_age={"type": "string", "pattern": "^[0-9]{1,5}[dw]$"},
    ),
    severity=SEVERITIES,
    waivers={
        "type": "array",
        "items": keys(
            "A failure that is accepted, through the day it expires.",
            "rule",
            "reason",
            "expires",
            rule={"type": "string", "pattern": "^[^/]+/.+$"},
            reason={"type": "string", "minLength": 1},
            expires={"type": "string", "format": "date"},
        ),
    },
    allow_changes={
        "type": "array",
        "description": "What a later change may weaken under `kvplan check --base`, read at the base revision only.",
        "items": {"enum": list(CHANGE_KINDS)},
    },
)
SCHEMAS: Final[dict[str, Schema]] = {
    "check": CHECK_SCHEMA,
    "check-failure": FAILURE_SCHEMA,
    "policy": POLICY_SCHEMA,
}
