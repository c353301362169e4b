"""Cloud instances: which GPU, how many of them, and how much host memory.

Sources of instances.csv: AWS "Amazon EC2 instance types" (accelerated computing), Google Cloud "GPU machine types",
Azure "GPU accelerated virtual machine sizes" (GiB as published; Google writes GB for GiB), Oracle "Compute shapes". A
name is taken in any case, Azure's without `Standard_`, SageMaker's with `ml.`.
"""

import csv
from functools import cache
from pathlib import Path
from typing import Final

from kvplan.core.records import dataclass
from kvplan.core.units import GIB

FILE: Final = Path(__file__).with_name("instances.csv")
PREFIXES: Final = ("standard_", "ml.")


@dataclass(frozen=True, slots=True)
class Instance:
    """A cloud instance; host_memory in bytes."""

    name: str
    gpu: str
    count: int
    host_memory: int

    @property
    def text(self) -> str:
        return f"{self.name} is {self.count} x {self.gpu} with {self.host_memory // GIB:,} GiB of host memory"


@cache
def instances() -> dict[str, Instance]:
    """Every instance, by its name as it is compared."""
    with FILE.open(encoding="utf-8", newline="") as file:
        rows = [
            Instance(row["name"], row["gpu"], int(row["count"]), int(row["host_gib"]) * GIB)
            for row in csv.DictReader(file)
        ]
    return {key(row.name): row for row in rows}


def key(name: str) -> str:
    text = name.strip().lower()
    for prefix in PREFIXES:
        text = text.removeprefix(prefix)
    return text


def instance(name: str) -> Instance | None:
    return instances().get(key(name))


def gpu_of_family(family: str) -> str | None:
    """The GPU of all instances of a family, such as g6e; None: there is no such family, or it has several."""
    gpus = {row.gpu for name, row in instances().items() if name.startswith(f"{key(family)}.")}
    return gpus.pop() if len(gpus) == 1 else None
