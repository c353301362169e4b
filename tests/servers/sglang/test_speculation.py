"""Speculative decoding against SGLang 0.5.23's own code: tokens of a pool shared with a draft, copies of states."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import KvplanError
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog, hf_config
from kvplan.models.spec import ModelSpec
from kvplan.planning.plan import Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.sglang import command
from kvplan.servers.words.arguments import EngineArgs
from kvplan.servers.words.command import refuse
from tests import oracles
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture
from tests.support.oracle_data import DATA, needs_oracle_data

FACTS = Path(__file__).parents[2] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "speculation_sglang.jsonl").read_text().splitlines()]
NOT_LOADED = (
    "minimax-m2.5",
    8,
)  # its experts have 192 columns on a rank, which SGLang's fp8 blocks of 128 refuse later
UNSIZED = "deepseek-v4-flash"  # whose pool under SGLang is refused by name, drafts or not


def name_of(row: dict[str, Any]) -> str:
    inputs = row["inputs"]
    argv = " ".join(inputs["argv"]).replace("--speculative-", "")
    return f"{inputs['model']} {inputs.get('tp', 1)} {inputs.get('gpu', 'H100')} {argv}"


def spec_of(name: str) -> ModelSpec:
    """A model of the catalog, a head of tests/facts, or a config of the oracles' data."""
    if (FACTS / "heads" / name).is_dir():
        return hf_config.load_spec(FACTS / "heads" / name)
    return catalog.load(name) if "__" not in name else hf_config.load_spec(DATA / "models" / name)


def is_ours(row: dict[str, Any]) -> bool:
    return not any("__" in word for word in (row["inputs"]["model"], *row["inputs"]["argv"]))


def answered(row: dict[str, Any]) -> bool:
    inputs = row["inputs"]
    return "failed" not in row and inputs["model"] != UNSIZED and (inputs["model"], inputs.get("tp")) != NOT_LOADED


@pytest.mark.parametrize("row", [row for row in ROWS if is_ours(row) and answered(row)], ids=name_of)
def test_answers_what_sglang_answers(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles, "draft_in", spec_of)
    assert oracles.compare_sglang(row, spec_of) == (oracles.EQUAL, [])


@needs_oracle_data
@pytest.mark.parametrize("row", [row for row in ROWS if not is_ours(row) and answered(row)], ids=name_of)
def test_answers_what_sglang_answers_for_other_configs(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles, "draft_in", spec_of)
    assert oracles.compare_sglang(row, spec_of) == (oracles.EQUAL, [])


@pytest.mark.parametrize("row", [row for row in ROWS if is_ours(row) and not answered(row)], ids=name_of)
def test_what_sglang_refuses_is_refused(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles, "draft_in", spec_of)
    outcome, _ = oracles.compare_sglang(row, spec_of)
    assert outcome == (oracles.EQUAL if "failed" in row else oracles.REFUSED)


def test_many_cases_of_every_algorithm_are_compared() -> None:
    algorithms = [row["inputs"]["argv"][1] for row in ROWS if answered(row)]
    assert len(algorithms) >= 60
    assert {name: algorithms.count(name) >= 2 for name in algorithms} == dict.fromkeys(
        ("EAGLE", "NEXTN", "EAGLE3", "STANDALONE", "NGRAM", "DFLASH", "DSPARK"), True
    ) | {"FROZEN_KV_MTP": False}  # SGLang's name for NEXTN with a Gemma assistant


def drafting(model: str, draft: ModelSpec | None = None, gpu_name: str = "h200", **args: Any) -> Plan:
    return plan(Request(catalog.load(model), gpu(gpu_name), EngineArgs(**args), parse_engine("sglang"), draft=draft))


def test_48_requests_run_at_most_where_drafts_are_made() -> None:
    # sglang 0.5.23 speculative_hook.py: "Max running requests is reset to 48 for speculative decoding."
    assert drafting("deepseek-v3", tensor_parallel_size=8, speculative_method="mtp").settings.max_num_seqs == 48
    more = drafting("deepseek-v3", tensor_parallel_size=8, speculative_method="mtp", max_num_seqs=200)
    assert more.settings.max_num_seqs == 200


def test_a_draft_of_another_shape_is_counted_as_the_targets_layers() -> None:
    # One MLA layer of Kimi-K2 is 576 x 2 B a token; the head keeps 8 of its 64 KV heads of 128 on each of 8 ranks.
    got = drafting(
        "kimi-k2", spec_of("eagle3-kimi-k2"), tensor_parallel_size=8, speculative_method="eagle3",
        num_speculative_tokens=3,
    )  # fmt: skip
    assert any(f"{576 * 2:,} B of KV per token" in note and f"{8 * 2 * 128 * 2:,} B" in note for note in got.notes)


@pytest.mark.parametrize(
    ("words", "args", "draft"),
    [
        (
            "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 4",
            {
                "speculative_method": "mtp", "num_speculative_tokens": 3, "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": 4,
            },
            None,
        ),
        (
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path a/b", {"speculative_method": "eagle3"},
            "a/b",
        ),
        ("--speculative-algorithm STANDALONE --speculative-draft-model-path a/b",
         {"speculative_method": "draft_model"}, "a/b"),
    ],
)  # fmt: skip
def test_flags_are_read(words: str, args: dict[str, Any], draft: str | None) -> None:
    got = command.parse(["--model-path", "m", *words.split()])
    assert (got.args, got.draft_model, got.unknown) == (args, draft, [])


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--speculative-algorithm LOOKAHEAD", "LOOKAHEAD is not modeled"),
        ("--speculative-num-draft-tokens 4", "need --speculative-algorithm"),
        ("--speculative-algorithm EAGLE --speculative-token-map x", "changes drafts in a way that is not modeled"),
    ],
)
def test_what_is_not_sized_is_refused_by_name(words: str, match: str) -> None:
    with pytest.raises(KvplanError, match=match):
        refuse(command.parse(["--model-path", "m", *words.split()]))


def test_an_older_release_is_refused_by_name() -> None:
    arguments = EngineArgs(speculative_method="mtp", tensor_parallel_size=8)
    request = Request(catalog.load("deepseek-v3"), gpu("h200"), arguments, parse_engine("sglang@0.4"))
    with pytest.raises(KvplanError, match=r"drafts in sglang@0\.4"):
        plan(request)


def test_the_server_command_asks_for_the_same(run: Run) -> None:
    words = "--engine sglang --gpu h200 --tp 8 --ctx 32k --speculative-method mtp"
    ran = run("estimate", "glm-4.6", *words.split())
    assert ran.code == 0
    assert "--speculative-algorithm EAGLE" in ran.out
    assert "--speculative-num-steps" not in ran.out  # SGLang's own numbers, as planned
    ran = run("estimate", "glm-4.6", *words.split(), "--num-speculative-tokens", "2")
    assert "--speculative-num-steps 2" in ran.out
    assert "--speculative-num-draft-tokens 3" in ran.out


def test_a_head_that_nobody_compared_with_sglang_is_refused(run: Run) -> None:
    words = "estimate glm-ocr --gpu l40s --ctx 8k --speculative-method mtp --engine"
    refused = run(*words.split(), "sglang")
    assert (refused.code, "is not compared with SGLang's own code" in refused.err) == (2, True)
    assert run(*words.split(), "vllm").code == 0


def test_the_context_of_a_short_head_has_a_remedy_and_a_command_that_are_planned(run: Run) -> None:
    """SGLang 0.5.23 configs/model_config.py: the draft takes the target's context, and more than its config's 2,048
    needs SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.
    """
    head = FACTS / "heads" / "eagle3-llama-3.1-8b"
    words = ["estimate", "llama-3.1-8b", "--engine", "sglang", "--gpu", "h100", "--draft-model", str(head)]
    words += ["--speculative-method", "eagle3"]
    refused = run(*words, "--ctx", "32768")
    assert (refused.code, refused.err.strip().endswith("; use --ctx 2048")) == (2, True)
    assert "--context-length 2048" in run(*words, "--ctx", "2048").out
    usual = run(*words)
    assert "only with SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 in its environment" in usual.err
    command = next(line for line in usual.out.splitlines() if line.startswith("Serve  ")).removeprefix("Serve  ")
    assert "--context-length" not in command
    command = shlex.join(str(head) if "eagle3-llama" in word else word for word in shlex.split(command))
    again = run("estimate", "--from-command", command, "--gpu", "h100")
    assert (again.code, "--context-length" in again.out) == (0, False)
