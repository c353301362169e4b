"""kvplan against vLLM 0.33's own code, class by class of its registry (tests/facts/architectures.jsonl)."""

import pytest

from tests import oracles
from tests.support.architectures import Row, outcome, rows

ANSWERED = [row for row in rows() if "results" in row]


@pytest.mark.parametrize("row", ANSWERED, ids=lambda row: f"{row['architecture']} {row['config_kind']}")
def test_a_class_is_sized_as_the_server_does_or_refused_by_name(row: Row) -> None:
    state, why = outcome(row)
    assert (state, why if state == oracles.DIFFERENT else "") == (
        oracles.REFUSED if row.get("refused") else oracles.EQUAL,
        "",
    )
