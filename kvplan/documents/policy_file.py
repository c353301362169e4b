"""The JSON Schema of a policy file, as an editor reads it."""

from typing import Any, Final, assert_never

from kvplan.asked.form import LENGTH_KEYS, SWITCHES
from kvplan.policy.file import DROP, ENGINE_KEYS, GROWTH, MAX_TARGETS, TARGET_RULES, WORKLOAD_KEYS
from kvplan.policy.result import CHANGE_KINDS, OWN_RULES, RULES
from kvplan.servers.words.arguments import ARGUMENTS, Argument
from kvplan.workloads.profiles import RATE

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
SIZE: Final[Schema] = {"type": "integer", "minimum": 1}
NUMBER: Final[Schema] = {"type": "number", "minimum": 0}


def either(number: Schema, pattern: str, description: str = "") -> Schema:
    """A plain number, or text of a form."""
    schema: Schema = {"anyOf": [number, {"type": "string", "pattern": pattern}]}
    return {"description": description, **schema} if description else schema


def keys(description: str, *required: str, **properties: Schema) -> Schema:
    """A table that may remove keys but for the required ones, and has no others."""
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
    if name in SWITCHES:
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
            return either({**SIZE, "maximum": how.largest}, "^[0-9]+$")
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
        case "text" | "pattern" | "limits" | "json" | "names":
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
REQUESTS: Final = either(ABOVE_0, rf"^{RATE}(/(s|min|h))?$", "Requests: 5.5/s, 90/min, 2000/h.")
WORKLOAD_VALUES: Final[dict[str, Schema]] = {
    "profile": TEXT, "trace": TEXT, "rate": REQUESTS, "tpot": WORD, "slo": TEXT,
}  # fmt: skip
WORKLOAD: Final = keys(
    "What the target serves.", **{name: WORKLOAD_VALUES.get(name) or ENGINE[name] for name in WORKLOAD_KEYS}
)
SEVERITIES: Final = keys("Of a rule that is not met: fail, if nothing is said.", **dict.fromkeys(OWN_RULES, SEVERITY))
TARGET: Final = keys(
    "A server: a model on a GPU with its engine's arguments, or the command or the manifest that starts it.",
    "id",
    id={"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"},
    command=TEXT,
    manifest=TEXT,
    container=TEXT,
    served_model_name=TEXT,
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
