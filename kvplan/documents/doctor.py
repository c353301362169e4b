"""What `kvplan doctor --format json` prints: kvplan/doctor@1."""

from dataclasses import asdict
from typing import Literal, TypedDict, cast

from kvplan.measure.doctor import Advice, Checkup, Disk, Driver, FactsFile, Host, Package, Setting, Torch


class DoctorDocument(TypedDict):
    """The machine as kvplan sees it; sizes are bytes."""

    schema: Literal["kvplan/doctor@1"]
    kvplan: str | None
    kvplan_path: str
    python: str
    python_path: str
    platform: str
    packages: list[Package]
    torch: Torch | None
    nvml: Driver
    host: Host
    disks: list[Disk]
    facts: list[FactsFile]
    settings: list[Setting]
    advice: list[Advice]


def document(checkup: Checkup) -> DoctorDocument:
    return cast(DoctorDocument, {"schema": "kvplan/doctor@1", **asdict(checkup)})  # its records become objects
