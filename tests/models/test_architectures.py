"""kvplan against vLLM 0.33's own code, class by class of its registry (tests/facts/architectures.jsonl)."""

import pytest

from tests import oracles
from tests.support.architectures import Row, outcome, rows

ANSWERED = [row for row in rows() if "results" in row]
# vLLM runs it by transformers' class, which shares half of it by ranks; kvplan as the class that vLLM had until 0.27.
DIFFERENT = {"GPTBigCodeForCausalLM"}


@pytest.mark.parametrize("row", ANSWERED, ids=lambda row: f"{row['architecture']} {row['config_kind']}")
def test_a_class_is_sized_as_the_server_does_or_refused_by_name(row: Row) -> None:
    state, why = outcome(row)
    if row["architecture"] in DIFFERENT:
        assert state == oracles.DIFFERENT
        return
    assert state == (oracles.REFUSED if row.get("refused") else oracles.EQUAL), why


def test_most_text_and_multimodal_classes_are_compared_and_most_by_configs_of_others() -> None:
    """The counts that docs/models.md states."""
    both = [row for row in ANSWERED if row["section"] in ("text", "multimodal") and not row.get("refused")]
    kinds = [row["config_kind"] for row in both]
    assert (len(kinds), kinds.count("published"), kinds.count("defaults")) == (240, 82, 74)
