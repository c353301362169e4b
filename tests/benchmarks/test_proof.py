"""The table of logged servers that ships with kvplan is what its script writes."""

from benchmarks import proof as script
from kvplan.report.proof import PROOF, proofs


def test_the_shipped_table_is_current() -> None:
    assert PROOF.read_text(encoding="utf-8") == script.text(), "run: python benchmarks/proof.py --write"


def test_every_row_names_its_source_and_what_was_logged() -> None:
    assert len(proofs()) >= 200
    for row in proofs():
        assert row.source
        assert float(row.logged)
        assert float(row.predicted)
        assert bool(row.theirs) == bool(row.planner)
