"""The most of a repeated prompt that the prefix cache finds, against vLLM's scheduler.

tests/facts/prefix_hits.jsonl: two identical prompts, one after the other, through vLLM 0.33's own scheduler on an empty
pool; `hit` is what it did not compute of the second. `drafts` are MTP's.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.units import GIB
from kvplan.hardware.gpu import gpu
from kvplan.models import catalog
from kvplan.planning.plan import Load, Plan, Request, plan
from kvplan.servers.base import parse_engine
from kvplan.servers.words.arguments import EngineArgs
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FILE = Path(__file__).parents[1] / "facts" / "prefix_hits.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(row) for row in FILE.read_text().splitlines()]
H100 = replace(gpu("h100-80g"), total_memory=4096 * GIB, total_memory_low=4096 * GIB, total_memory_high=4096 * GIB)


def planned(model: str, load: Load, engine: str = "vllm@0.33", **args: Any) -> Plan:
    engine_args = EngineArgs(**{"max_model_len": 32_768, **args})
    return plan(Request(catalog.load(model), H100, engine_args, release=parse_engine(engine), load=load))


def drafted(num_drafts: int) -> dict[str, Any]:
    return {"speculative_method": "mtp", "num_speculative_tokens": num_drafts} if num_drafts else {}


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['model']}-{row['prompt']}-mtp{row['drafts']}" for row in ROWS])
def test_a_repeated_prompt_finds_what_vllms_scheduler_finds(row: dict[str, Any]) -> None:
    args = {"max_model_len": row["max_model_len"], **drafted(row["drafts"])}
    notes = planned(row["model"], Load(mean_tokens=row["prompt"], prompt_tokens=row["prompt"]), **args).notes
    rate = f"{row['hit'] * 1000 // row['prompt'] / 10:.1f}%"
    assert [note for note in notes if "repeated prompt" in note] == [
        note for note in notes if f"at most {rate} of a repeated prompt" in note and f"({row['hit']:,} tokens:" in note
    ]
    assert any("repeated prompt" in note for note in notes)


def test_an_estimate_says_it_for_a_prompt_and_for_a_shared_prefix(run: Run) -> None:
    words = ("estimate", "qwen3-next-80b-a3b", "--gpu", "h200", "--tp", "4", "--ctx", "16k", "--offline")
    prompt = run(*words, "--prompt-tokens", "10000", "--output-tokens", "500").err
    assert "at most 99.2% of a repeated prompt of 10,000 tokens is found" in prompt  # 31 blocks of 320
    prefix = run(*words, "--mean-tokens", "4000", "--shared-prefix", "1000").err
    hits = "(960 tokens: blocks of 320)"
    assert f"at most 96.0% of the prefix of 1,000 tokens is found in the prefix cache {hits}" in prefix
    assert "prefix of" not in run(*words, "--mean-tokens", "4000", "--shared-prefix", "960").err


def test_a_drafter_reads_the_token_after_the_prefix() -> None:
    """The hash of a block covers the next token, too, and that one is each request's own."""
    load = Load(mean_tokens=4000, shared_prefix=960)
    assert not [note for note in planned("deepseek-v3", load).notes if "prefix" in note]
    (note,) = [note for note in planned("deepseek-v3", load, **drafted(1)).notes if "prefix" in note]
    assert "(944 tokens: blocks of 16)" in note


def test_a_page_of_one_token_finds_all_but_the_last(run: Run) -> None:
    notes = planned("llama-3.1-8b", Load(mean_tokens=3274, prompt_tokens=3274), "sglang@0.5").notes
    assert any("(3,273 tokens: blocks of 1)" in note for note in notes)


def test_an_encoder_decoder_caches_no_prefix() -> None:
    notes = planned("whisper-large-v3", Load(mean_tokens=50, prompt_tokens=50), max_model_len=448).notes
    assert not any("repeated prompt" in note for note in notes)
