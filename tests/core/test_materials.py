"""What is installed is listed, hashed and tested at its lower bounds."""

import re
from importlib.metadata import distributions, version
from pathlib import Path

from tests.support.lowest import lowest
from tests.support.materials import hashed, normalized, sbom

ROOT = Path(__file__).resolve().parents[2]


def test_the_bill_of_materials_has_every_distribution_once() -> None:
    document = sbom(list(distributions()))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    components = {row["name"]: row for row in document["components"]}
    assert len(components) == len(document["components"])
    assert components["pyyaml"]["purl"] == f"pkg:pypi/pyyaml@{version('PyYAML')}"
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@\S+", row["purl"]) for row in components.values())


def test_hashes_are_those_of_pips_report() -> None:
    """The fields of pip's installation report, version 1 (pip.pypa.io/en/stable/reference/installation-report)."""
    metadata = {"name": "Some.Name", "version": "1.0"}
    archive = {"url": "https://host/x.whl", "archive_info": {"hashes": {"sha256": "ab" * 32}}}
    local = {"url": "file:///project", "dir_info": {"editable": True}}
    report = {
        "version": "1",
        "install": [
            {"metadata": metadata, "download_info": archive},
            {"metadata": {"name": "kvplan", "version": "0.1.0"}, "download_info": local},
        ],
    }
    assert hashed(report) == [f"some-name==1.0 --hash=sha256:{'ab' * 32}"]


def test_every_recorded_version_has_a_hash() -> None:
    """What `make hashes` writes is of the versions that `make constraints` wrote."""
    folder = ROOT / "constraints"
    recorded, lines = (
        [line for line in (folder / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        for name in ("py311.txt", "py311.hashes.txt")
    )
    names = (requirement.partition("==") for requirement in recorded)
    versions = sorted(f"{normalized(name)}=={version}" for name, _, version in names)
    assert [line.partition(" ")[0] for line in lines] == versions
    assert all(re.fullmatch(r"\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_the_lower_bounds_are_tested_with_every_requirement() -> None:
    requirements = lowest((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = {requirement.partition("==")[0] for requirement in requirements}
    assert {"typer", "rich", "pyyaml", "nvidia-ml-py", "google-re2", "starlette", "uvicorn", "tokenizers"} <= names
    assert "tokenizers==0.22" in requirements  # the first whose DecodeStream begins within a text


def test_the_checks_of_a_change_include_the_lower_bounds() -> None:
    assert "make test-lowest" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
