"""SGLang's rules against SGLang 0.5.23's own planning, class by class of its registry.

The rows are tests/facts/architectures_sglang.jsonl (benchmarks/architectures_sglang.py): settings, pools and requests
of a config of each class on one H100 and on two.
"""

from collections import Counter

import pytest

from tests import oracles
from tests.support.architectures_sglang import Row, merged, outcome, rows, weights_of

ANSWERED = [row for row in rows() if "ranks" in row]
SIZED = [row for row in ANSWERED if not row.get("refused") and any("weights" in answer for answer in row["ranks"])]


@pytest.mark.parametrize("row", ANSWERED, ids=lambda row: f"{row['architecture']} {row['kind']}")
def test_a_class_is_sized_as_the_server_does_or_refused_by_name(row: Row) -> None:
    state, why = outcome(row)
    assert state == (oracles.REFUSED if row.get("refused") else oracles.EQUAL), why


def test_the_counts_that_the_page_of_models_states() -> None:
    started = [row for row in ANSWERED if all("failed" not in answer for answer in row["ranks"])]
    states = Counter("refused" if row.get("refused") else "compared" for row in started)
    assert (states["compared"], states["refused"], len(ANSWERED) - len(started)) == (171, 19, 2)


def test_a_config_is_changed_key_by_key() -> None:
    config = {"text_config": {"layers": 2, "rope": 1}, "depth": 3}
    assert merged(config, {"text_config": {"rope": None, "width": 4}, "depth": None}) == {
        "text_config": {"layers": 2, "width": 4}
    }
