"""A small share of benchmarks/random_files.py, the same on every run."""

import pytest

from benchmarks.random_files import READERS, attack


@pytest.mark.parametrize("name", READERS)
def test_no_damaged_file_breaks_its_reader(name: str) -> None:
    counts, faults = attack(name, 100, seed=1)
    assert faults == []
    assert counts["read"] > 0
    assert counts["refused"] > 0
