"""What an environment consists of: `python -m tests.support.materials sbom|hashes [REPORT]`, printed.

sbom    the installed distributions as CycloneDX 1.6 (cyclonedx.org/docs/1.6/json); needs no network
hashes  requirements with hashes, for `pip install --require-hashes`, from the report of `pip install --report`
"""

import json
import re
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> int:
    match arguments:
        case ["sbom"]:
            print(json.dumps(sbom(list(distributions())), indent=2))
        case ["hashes", report]:
            print("\n".join(hashed(json.loads(Path(report).read_text(encoding="utf-8")))))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


def sbom(installed: list[Distribution]) -> dict[str, Any]:
    """The bill of materials, sorted by name; the same environment gives the same file."""
    components = {normalized(distribution.metadata["Name"]): component(distribution) for distribution in installed}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": [components[name] for name in sorted(components)],
    }


def component(distribution: Distribution) -> dict[str, Any]:
    name, version = normalized(distribution.metadata["Name"]), distribution.version
    row: dict[str, Any] = {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"}
    licenses = distribution.metadata.get_all("License-Expression") or []
    return row | ({"licenses": [{"expression": licenses[0]}]} if licenses else {})


def normalized(name: str) -> str:
    """The name as an index has it (packaging.python.org, "Names and normalization")."""
    return re.sub(r"[-_.]+", "-", name).lower()


def hashed(report: Mapping[str, Any]) -> list[str]:
    """A line for each distribution that pip would install from an index; the project itself has no hash."""
    lines = []
    for item in report["install"]:
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        if "sha256" in hashes:
            metadata = item["metadata"]
            lines.append(f"{normalized(metadata['name'])}=={metadata['version']} --hash=sha256:{hashes['sha256']}")
    return sorted(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
