"""Where the optional oracle data lies: real servers' answers that are not part of this repository."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("KVPLAN_ORACLE_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")

needs_oracle_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no oracle data at {DATA}; set KVPLAN_ORACLE_DATA to run these comparisons"
)
