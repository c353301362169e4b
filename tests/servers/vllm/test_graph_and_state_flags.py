"""Flags that leave the pool as it is, or change it by rule, against vLLM 0.33's own planning code on an H100.

tests/facts/kept_flags.jsonl: one flag set per row over dense, windowed, hybrid, MoE and MLA models; `failed` is vLLM's
own refusal. kept_flags_sglang.jsonl: the same of SGLang 0.5.23. A flag is read as a pasted command, and repeated by the
printed one.
"""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvplan.asked.pasted import read_command
from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Request, plan
from kvplan.servers.vllm import compilation, overheads
from kvplan.servers.words.arguments import EngineArgs
from tests import oracles
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

FACTS = Path(__file__).parents[2] / "facts"
SGLANG = [json.loads(line) for line in (FACTS / "kept_flags_sglang.jsonl").read_text("utf-8").splitlines()]
ROWS = [json.loads(line) for line in (FACTS / "kept_flags.jsonl").read_text("utf-8").splitlines()]


def request(inputs: dict[str, Any]) -> Request:
    command = read_command(shlex.join(oracles.serve_words(inputs)))
    draft = catalog.load(command.draft_model) if command.draft_model else None
    return Request(catalog.load(inputs["model"]), gpu("h100-80g"), EngineArgs(**command.args), draft=draft)


def name(row: dict[str, Any]) -> str:
    inputs = row["inputs"]
    return f"{inputs['model']} tp{inputs['tp']} {json.dumps(inputs['engine_args'])}"


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_the_plan_is_the_servers_own(row: dict[str, Any]) -> None:
    if "failed" in row:
        with pytest.raises(KvplanError):
            plan(request(row["inputs"]))
        return
    question = request(row["inputs"])
    settings = plan(question).settings
    wrong = [text for expected in row["results"] for text in oracles.result_differences(question, expected)]
    wrong += oracles.weight_differences(question, row["weights"])
    wrong += oracles.draft_differences(question, row.get("draft_weights"))
    assert wrong == []
    assert settings.max_model_len == row["resolved"]["max_model_len"]


@pytest.mark.parametrize(
    "row", SGLANG, ids=lambda row: f"{row['inputs']['model']} {' '.join(row['inputs']['argv'][2:])}"
)
def test_the_plan_is_sglangs_own(row: dict[str, Any]) -> None:
    assert oracles.compare_sglang(row, catalog.load) == (oracles.EQUAL, [])


OWN_RANKS = '{"model": "qwen3-0.6b", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}'
GRAPHS = [row for row in ROWS if {"compilation_config", "optimization_level"} & row["inputs"]["engine_args"].keys()]


@pytest.mark.parametrize("row", GRAPHS, ids=name)
def test_the_graphs_are_those_that_the_server_captures(row: dict[str, Any]) -> None:
    question, resolved = request(row["inputs"]), row["resolved"]
    settings = plan(question).settings
    assert question.args.enforce_eager or compilation.of_args(question.args).mode == resolved["cudagraph_mode"]
    formula = overheads.cuda_graphs(question.spec, settings, question.args, settings.version, sm=90).formula
    sizes, mode = resolved["num_cudagraph_sizes"], resolved["cudagraph_mode"]
    both = 2 if mode == "FULL_AND_PIECEWISE" else 1  # with 1,024 sequences every size may be a batch of decodes
    assert ("none" if mode == "NONE" else f" {both * sizes} graphs ") in formula


def test_other_graphs_have_a_wider_range() -> None:
    question = request(GRAPHS[0]["inputs"])
    usual = plan(Request(question.spec, question.gpu)).estimates["cuda_graphs"]
    other = plan(question).estimates["cuda_graphs"]
    assert GRAPHS[0]["inputs"]["engine_args"] == {"compilation_config": {"cudagraph_mode": "PIECEWISE"}}
    assert other.low == 0 < usual.low
    assert other.likely < usual.likely < usual.high < other.high


@pytest.mark.parametrize(
    "flags",
    [
        """--compilation-config '{"cudagraph_mode": "PIECEWISE", "pass_config": {"fuse_norm_quant": true}}'""",
        "--cudagraph-capture-sizes 1 2 4 8",
        "-O1",
        "--mamba-cache-dtype float32 --mamba-ssm-cache-dtype auto",
        "--disable-sliding-window",
        "--max-num-scheduled-tokens 1024 --kv-sharing-fast-prefill",
        f"--speculative-config {shlex.quote(OWN_RANKS)}",
    ],
)
def test_a_printed_command_repeats_them(run: Run, flags: str) -> None:
    words = ("estimate", "--gpu", "2xh100-80g", "--format", "json", "--from-command")
    first = run(*words, f"vllm serve qwen3-8b --max-model-len 8192 {flags}")
    assert first.code == 0, first.err
    command = first.json["flags"]["command"]
    again = run(*words, command).json
    assert again["flags"]["command"] == command
    assert again["memory"] == first.json["memory"]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("""-cc '{"cudagraph_mm_encoder": true}'""", "captures graphs of the encoder"),
        (
            """-cc '{"cudagraph_capture_size": [1]}'""",
            "has no key 'cudagraph_capture_size' that kvplan knows; remove it",
        ),
        ("""-cc '{"cudagraph_mode": "ALL"}'""", "use one of NONE, PIECEWISE"),
        ("""-cc '{"cudagraph_capture_sizes": [0]}'""", "write [1, 2, 4, 8]"),
        (
            "-tp 4 --speculative-config "
            """'{"model": "qwen3-0.6b", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}'""",
            "draft_tensor_parallel_size 2 is refused by vLLM with 4 of the model; write 4, or remove it",
        ),
    ],
)
def test_what_vllm_refuses_is_one_line(run: Run, flags: str, fault: str) -> None:
    ran = run("estimate", "--gpu", "h100-80g", "--from-command", f"vllm serve qwen3-8b --max-model-len 8192 {flags}")
    assert fault in refused(ran)


def test_runner_v1_refuses_a_draft_with_ranks_of_its_own(run: Run) -> None:
    """vLLM 0.33 v1/spec_decode/draft_model.py (_raise_if_draft_tp_mismatch)."""
    words = ("estimate", "qwen3-8b", "--gpu", "h100-80g", "--tp", "2", "--ctx", "8k", "--speculative-config", OWN_RANKS)
    assert run(*words).code == 0
    ran = run(*words, "--engine", "vllm@0.33+runner-v1", "--exit-code")
    assert ran.code == 1
    assert "model runner V1 refuses draft_tensor_parallel_size 1" in ran.out.splitlines()[0]


def test_a_context_ends_at_the_window_that_is_disabled(run: Run) -> None:
    ran = run("estimate", "mistral-7b-v0.1", "--gpu", "h100-80g", "--disable-sliding-window")
    assert "at 4,096 tokens each" in ran.out.splitlines()[0]
    assert "maximum of 4,096 tokens" in ran.err
