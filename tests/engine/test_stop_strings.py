"""Stop strings, beside vLLM's own function on random texts of a few letters, where several match at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import first_stop

FACTS = Path(__file__).parents[1] / "facts" / "stop_strings.jsonl"
CASES = [json.loads(line) for line in FACTS.read_text(encoding="utf-8").splitlines()]
TEXTS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr((case["text"], case["new"], case["stop"])))
def test_a_text_is_cut_where_vllm_cuts_it(case: dict[str, Any]) -> None:
    match = first_stop(case["text"], len(case["text"]) - case["new"], case["stop"])
    assert match == (None if case["match"] is None else tuple(case["match"]))


@given(old=TEXTS, new=TEXTS, stops=STOPS)
def test_a_token_of_many_letters_ends_where_its_letters_one_by_one_would(old: str, new: str, stops: list[str]) -> None:
    """The first end in the text that a stop string has, looked for letter by letter."""
    text = old + new
    ends = [n for n in range(len(old) + 1, len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
    match = first_stop(text, len(old), stops)
    if not ends:
        assert match is None
    else:
        stop = next(stop for stop in stops if text[: ends[0]].endswith(stop))
        assert match == (stop, ends[0] - len(stop))
