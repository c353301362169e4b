"""Policies to check, and what a check found in them."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from kvplan.documents.schema import document_schema
from tests.support.cli import Ran
from tests.support.readme_blocks import ROOT

EXAMPLE = ROOT / "examples" / "kvplan.policy.yaml"
EXAMPLE_DAY = "2027-01-31"  # its waiver holds then, and ends within a year
LLAMA_8B = "  model: llama-3.1-8b\n  gpu: a100-80g\n  max_model_len: 32k\n"
SCHEMA = jsonschema.Draft202012Validator(document_schema("policy"))


def policy(folder: Path, target: str = LLAMA_8B, rules: str = "fits: true", more: str = "") -> Path:
    """A policy of one target in a folder; `target` and `rules` are its own, `more` stands below."""
    path = folder / "kvplan.policy.yaml"
    path.write_text(f"version: 1\ntargets:\n- id: chat\n{target}  rules: {{{rules}}}\n{more}", encoding="utf-8")
    return path


def findings(ran: Ran) -> dict[str, dict[str, Any]]:
    """What a check answered in JSON, by the rule; of several targets the last one's."""
    return {finding["rule"]: finding for target in ran.json["targets"] for finding in target["findings"]}


def follows_schema(path: Path) -> bool:
    """Whether a policy does, as another YAML reader reads it, whose dates become text again."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    return bool(SCHEMA.is_valid(json.loads(json.dumps(values, default=str))))
