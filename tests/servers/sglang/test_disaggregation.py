"""SGLang's halves (--disaggregation-mode prefill, decode) against SGLang 0.5.23's own settings, pools and requests.

tests/facts/halves.jsonl: its answers, as kvplan's oracle rows have them. A model stands for its catalog entry.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kvplan.models import catalog
from tests import oracles
from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

FACTS = Path(__file__).parents[2] / "facts"
ROWS = [json.loads(line) for line in (FACTS / "halves.jsonl").read_text().splitlines()]
START = "python -m sglang.launch_server --model-path"


def name_of(row: dict[str, Any]) -> str:
    inputs = row["inputs"]
    return f"{inputs['model']} {inputs.get('tp', 1)} {inputs.get('gpu', 'H100')} {' '.join(inputs['argv'])}"


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_answers_what_sglang_answers(row: dict[str, Any]) -> None:
    assert oracles.compare_sglang(row, catalog.load) == (oracles.EQUAL, [])


def test_both_halves_are_compared_on_several_gpus() -> None:
    assert {row["inputs"]["argv"][1] for row in ROWS} == {"prefill", "decode"}
    assert len({row["inputs"].get("gpu") for row in ROWS}) >= 4
    assert len(ROWS) >= 30


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (f"{START} qwen3-next-80b-a3b --tp 4 --disaggregation-mode decode", "is not modeled with recurrent states"),
        (
            f"{START} llama-3.1-8b --disaggregation-mode prefill --enable-hierarchical-cache",
            "is not modeled with --enable-hierarchical-cache",
        ),
        (f"{START} llama-3.1-8b --disaggregation-mode both", "is not one of prefill, decode"),
        (
            f"{START} llama-3.1-8b --disaggregation-mode decode --disaggregation-decode-enable-radix-cache",
            "changes the reserved memory, which is not modeled",
        ),
    ],
)
def test_what_is_not_sized_is_refused_by_name(run: Run, words: str, fault: str) -> None:
    ran = run("estimate", "--from-command", words, "--gpu", "h200")
    assert ran.code == 2
    assert fault in ran.err


def test_a_decoding_half_keeps_less_back_and_its_command_says_what_it_is(run: Run) -> None:
    words = f"{START} llama-3.1-8b --context-length 8192 --disaggregation-transfer-backend nixl"
    whole = run("estimate", "--from-command", words, "--gpu", "h100", "--format", "json").json
    half = run(
        "estimate", "--from-command", f"{words} --disaggregation-mode decode", "--gpu", "h100", "--format", "json"
    ).json
    assert half["memory"]["kv_cache"] > whole["memory"]["kv_cache"]
    assert "--disaggregation-mode decode" in half["flags"]["command"]


def test_null_is_a_whole_server(run: Run) -> None:
    words = f"{START} llama-3.1-8b --context-length 8192"
    plain, null = (
        run("estimate", "--from-command", f"{words}{more}", "--gpu", "h100", "--format", "json").json
        for more in ("", " --disaggregation-mode null")
    )
    assert plain == null
