"""Where the optional oracle data lies: real servers' answers that are not part of this repository."""

import os
from functools import cache
from pathlib import Path

import pytest

from kvplan.models import catalog, hf_config
from kvplan.models.spec import ModelSpec

DATA = Path(os.environ.get("KVPLAN_ORACLE_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")

needs_oracle_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no oracle data at {DATA}; set KVPLAN_ORACLE_DATA to run these comparisons"
)


def spec_named(name: str) -> ModelSpec:
    """A model of the catalog, or a config of the oracles' data (two underlines stand in its name)."""
    return catalog.load(name) if "__" not in name else _read(name)


@cache
def _read(name: str) -> ModelSpec:
    return hf_config.load_spec(DATA / "models" / name)
