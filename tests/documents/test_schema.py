"""`kvplan schema NAME` is made from the documents' types, and is what the commands print; jsonschema judges."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import pytest
from jsonschema import Draft202012Validator

from kvplan.core.records import Count, Keyword, Number, Size
from kvplan.documents.schema import DOCUMENTS, NAMES, document_schema, schema_of
from tests.support.cli import Run
from tests.support.cli import run as run

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "examples" / "kvplan.policy.yaml"
PRICES = "examples/prices.yaml"
LLAMA = ("llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "8k")
# Name of a document -> commands that print one.
SMALL_LOAD = ("--profile", "azure-2023-conv", "--num-requests", "30")
TIMED_LOAD = ("--prompt-tokens", "500", "--output-tokens", "20", "--num-requests", "100", "--rate", "2")
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "error": (("estimate", "no-such-model", "--gpu", "a100-80g", "--ctx", "8k"),),
    "plan": (
        ("estimate", *LLAMA),
        ("estimate", "gpt-oss-20b", "--gpu", "h100-80g", "--ctx", "128k", "--kv-offloading-size", "64GiB"),
        ("estimate", "llama-3.1-70b", "--gpu", "a100-80g", "--ctx", "32k"),  # does not fit: fixes, a limit
        ("estimate", "bge-m3", "--gpu", "l40s"),  # an encoder, which has no blocks
        ("estimate", *LLAMA, "--engine", "sglang", "--lengths", "lognormal:mean=1k,p99=3k"),
    ),
    "plans": (("estimate", *LLAMA[:4], "8k,32k"), ("estimate", *LLAMA[:2], "l4,a100-80g", *LLAMA[3:])),
    "trace": (
        ("trace", "stats", "examples/trace.csv"),
        ("trace", "stats", "examples/trace.jsonl"),
        ("trace", "stats", "examples/chats.jsonl"),
    ),
    "workload": (("trace", "stats", "azure-2023-conv"), ("trace", "stats", "clinical-notes")),
    "check": (("check", str(POLICY)),),
    "check-failure": (("check", "no-such.policy.yaml"),),
    "diff": (
        ("diff", "llama-3.1-8b", "llama-3.1-8b-fp8", "--gpu", "h100-80g", "--ctx", "8k"),
        ("diff", "llama-3.1-8b", "gpt-oss-20b", "--gpu", "h100-80g", "--ctx", "8k"),
    ),
    "upgrade": (
        ("upgrade", "qwen3.5-27b", "--gpu", "h100-80g", "--ctx", "8k", "--from", "vllm@0.24"),
        ("upgrade", "deepseek-v2-lite", "--gpu", "h100-80g", "--ctx", "8k", "--from", "vllm@0.9", "--to", "vllm@0.6"),
    ),
    "pack": (
        ("pack", "--gpu", "l40s", "--server", "qwen3-8b --max-model-len 16384", "--server", "qwen3-0.6b"),
    ),
    "packs": (
        ("pack", "qwen3-8b", "qwen3-0.6b", "--gpu", "2xl40s"),
        ("pack", "qwen3-32b", "qwen3-8b", "--gpu", "l40s,h100-80g", "--prices", "l40s=1,h100-80g=3"),
    ),
    "preflight": (
        ("preflight", "vllm serve Qwen/Qwen3-8B --max-model-len 8192", "--gpu", "l40s"),
        ("preflight", "vllm serve meta-llama/Llama-3.1-70B-Instruct", "--gpu", "l40s"),
    ),
    "offers": (
        ("recommend", "qwen3-8b", "--gpu", "rtx-3090", "--users", "1", "--ctx", "8k", "--engine", "vllm,llama.cpp"),
    ),
    "rightsize": (
        ("rightsize", "examples/metrics.1.txt", "examples/metrics.2.txt", "--interval", "630s"),
        ("rightsize", "examples/metrics.1.txt", "examples/metrics.2.txt"),
    ),
    "model": (("models", "llama-3.1-8b"), ("models", "qwen3-next-80b-a3b"), ("models", "gpt-oss-20b")),
    "fitting": (("models", "--gpu", "l40s", "--family", "qwen3-8b"),),
    "models": (("models",),),
    "gpu": (("gpus", "a100-80g"), ("gpus", "mi300x")),
    "gpus": (("gpus",),),
    "workloads": (("trace", "profiles"),),
    "sweep": (
        ("sweep", "llama-3.1-8b", "llama-3.1-70b", "--gpu", "l4,h100-80g", "--ctx", "8k,32k", "--tp", "1,2"),
        ("sweep", "llama-3.1-8b", "--gpu", "l40s,h100-80g", "--ctx", "8k", "--prices", PRICES, "--pareto"),
    ),
    "timed-recommendation": (
        ("recommend", "llama-3.1-8b", "--ctx", "4k", *TIMED_LOAD, "--gpus", "l40s,t4", "--slo", "ttft.p90=2s"),
    ),
    "tune": (
        ("tune", *LLAMA, *TIMED_LOAD, "--slo", "tpot=80ms", "--no-fp8", "--max-num-seqs", "64", "--jobs", "1"),
        ("tune", *LLAMA, *TIMED_LOAD, "--slo", "tpot=1ms", "--no-fp8", "--max-num-seqs", "64", "--jobs", "1"),
    ),
    "recommendation": (
        ("recommend", "llama-3.1-70b", "--users", "20", "--ctx", "8k", "--gpus", "l40s,h100-80g,l4"),
        ("recommend", "llama-3.1-8b", "--users", "20", "--ctx", "32k", "--gpu", "l40s"),
    ),
    "simulation": (
        ("simulate", *LLAMA, "--profile", "azure-2023-conv", "--num-requests", "20", "--baseline", "contiguous"),
        ("simulate", *LLAMA, "--trace", "examples/chats.jsonl", "--tier", "cpu=8GiB@25GB/s", "--num-requests", "20"),
    ),
    "fleet": (
        ("simulate", *LLAMA, *SMALL_LOAD, "--replicas", "2", "--slo", "ttft=2s"),
        ("simulate", *LLAMA, *SMALL_LOAD, "--disaggregate", "1P2D", "--link", "50GB/s"),
    ),
    "bench-reconciliation": (("reconcile", "--bench", "examples/inferencex.json", "--gpu", "h100-80g", "--ctx", "8k"),),
    "diagnosis": (
        ("why", "examples/vllm-did-not-start.log", "--gpu", "rtx-4090"),
        ("why", "examples/vllm-did-not-start.log"),
        ("why", "examples/vllm-0.10.log"),
    ),
    "reconciliation": (("reconcile", "reports/cpu-2core"),),
    "doctor": (("doctor",),),
    "log-reconciliation": (("reconcile", "--log", "examples/vllm-0.10.log", "--gpu", "a100-80g"),),
}  # fmt: skip
# Name of a document -> commands that write one, `FILE` being its place.
WRITTEN: dict[str, tuple[tuple[str, ...], ...]] = {
    "report": (("report", "reports/cpu-2core", "-o", "FILE"),),
    "calibration": (
        ("reconcile", "reports/cpu-2core", "--calibrate", "FILE"),
        (
            "calibrate",
            "llama-3.1-8b",
            "--bench",
            "examples/inferencex.json",
            "--gpu",
            "h100-80g",
            "--ctx",
            "8k",
            "-o",
            "FILE",
        ),
    ),
}
IN_PAGES = {"explorer"}  # tests/report/test_explorer.py reads it back out of the page
OF_SERVERS = {"server-run"}  # tests/serve/test_profile_server.py has a server to measure
CARRIED = {"run": ROOT / "reports" / "cpu-2core" / "run.json"}  # by a run that took minutes


@pytest.mark.parametrize("name", NAMES)
def test_every_schema_is_one_by_the_drafts_own(name: str) -> None:
    schema = document_schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["title"] == f"kvplan/{name}@1"


@pytest.mark.parametrize(("name", "command"), [(name, words) for name, many in COMMANDS.items() for words in many])
def test_what_a_command_prints_is_what_the_schema_says(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(ROOT)
    document = run(*command, "--format", "json").json
    assert document["schema"] == f"kvplan/{name}@1"
    validator = Draft202012Validator(document_schema(name))
    assert [f"{fault.json_path}: {fault.message}" for fault in validator.iter_errors(document)] == []


def test_every_document_is_compared() -> None:
    assert {*COMMANDS, *WRITTEN, *CARRIED, *IN_PAGES, *OF_SERVERS} == set(DOCUMENTS)


def faults(name: str, document: Any) -> list[str]:
    validator = Draft202012Validator(document_schema(name))
    return [f"{fault.json_path}: {fault.message}" for fault in validator.iter_errors(document)]


@pytest.mark.parametrize(("name", "command"), [(name, words) for name, many in WRITTEN.items() for words in many])
def test_what_a_command_writes_is_what_the_schema_says(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "written.json"
    ran = run(*(str(file) if word == "FILE" else word for word in command))
    assert ran.code == 0, ran.err
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["schema"] == f"kvplan/{name}@1"
    assert faults(name, document) == []


@pytest.mark.parametrize("name", CARRIED)
def test_what_a_run_left_is_what_the_schema_says(name: str) -> None:
    document = json.loads(CARRIED[name].read_text(encoding="utf-8"))
    assert faults(name, document) == []
    assert faults(name, {**document, "finished": None}) != []


def without(document: Any) -> Iterator[tuple[str, Any]]:
    """A document without each of its keys in turn, and with each misspelled; the paths of lists end at element 0."""
    match document:
        case dict():
            for key, value in document.items():
                yield f"{key} is missing", {name: own for name, own in document.items() if name != key}
                yield (
                    f"{key} is misspelled",
                    {(f"{name}x" if name == key else name): own for name, own in document.items()},
                )
                for what, changed in without(value):
                    yield f"{key}.{what}", {**document, key: changed}
        case [first, *others]:
            for what, changed in without(first):
                yield f"0.{what}", [changed, *others]


# Tables: their keys are names from the data.
TABLES = ("memory.weight_groups.", "places.0.rows.", "parameters.groups.", "provenance.")


def test_no_key_may_be_missing_or_misspelled(run: Run) -> None:
    document = run("estimate", *LLAMA, "--format", "json").json
    validator = Draft202012Validator(document_schema("plan"))
    allowed = [what for what, changed in without(document) if validator.is_valid(changed)]
    assert [what for what in allowed if not what.startswith(TABLES)] == []


# --- types ------------------------------------------------------------------------------------------------------------


class Part(TypedDict):
    """A part,
    described.
    """

    size: Size


class Whole(TypedDict):
    schema: Literal["a@1"]
    text: str | None
    kind: Literal["x", "y"] | None
    part: Part | None
    parts: Annotated[list[Part], "All of them."]
    counts: dict[str, Count]
    limit: Size | Literal["auto"] | None
    value: float | bool | None
    code: Annotated[str, Keyword("enum", ("A", "B"))]
    share: Annotated[Number | None, "Of all."]


class Cells(NamedTuple):
    model: str
    users: Count | None = None


PART = {
    "description": "A part, described.",
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 1}},
    "required": ["size"],
    "additionalProperties": False,
}


def test_a_record_is_an_object_with_exactly_its_keys() -> None:
    """By the draft: `const` and `enum` need no type, `type` may be a list, alternatives stand in `anyOf`."""
    assert schema_of(Part) == PART
    schema = schema_of(Whole)
    assert schema["required"] == list(Whole.__annotations__)
    assert schema["properties"] == {
        "schema": {"const": "a@1"},
        "text": {"type": ["string", "null"]},
        "kind": {"enum": ["x", "y", None]},
        "part": {"anyOf": [PART, {"type": "null"}]},
        "parts": {"type": "array", "items": PART, "description": "All of them."},
        "counts": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
        "limit": {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}, {"type": "null"}]},
        "value": {"type": ["number", "boolean", "null"]},
        "code": {"enum": ["A", "B"]},
        "share": {"type": ["number", "null"], "minimum": 0, "description": "Of all."},
    }


def test_the_cells_of_a_row_are_its_keys() -> None:
    assert schema_of(Cells)["properties"] == {
        "model": {"type": "string"},
        "users": {"type": ["integer", "null"], "minimum": 0},
    }


@pytest.mark.parametrize("kind", [set[str], object, tuple[int, str]])
def test_a_type_that_json_does_not_have_is_refused(kind: object) -> None:
    with pytest.raises(TypeError, match="is not a type of a document"):
        schema_of(kind)
