"""What servers logged, beside what kvplan predicts from their inputs alone: the proof that the atlas shows."""

import csv
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

PROOF: Final = Path(__file__).with_name("proof.csv")  # written by benchmarks/proof.py
WHAT: Final = {
    "available_kv": "GiB for KV",
    "tokens": "tokens",
    "blocks": "blocks",
    "concurrency": "requests at full length",
    "free_after_pool": "GiB free after the pool",
    "weights": "GiB of weights",
    "context": "longest context",
}


class Proof(NamedTuple):
    """A figure that a server logged, and the same predicted.

    kind      "log": of a start-up log; "published": of a thread that compares a planner, whose own figure is `theirs`
    case      of a log: two figures of one server have the same
    model     catalog name; empty if the catalog has no entry for exactly that checkpoint
    predicted with constants fitted without the thread it comes from
    remark    such as inputs that the source does not state
    """

    kind: str
    case: str
    source: str
    url: str
    name: str
    model: str
    gpu: str
    server: str
    num_gpus: int
    what: str
    logged: str
    predicted: str
    theirs: str
    planner: str
    remark: str

    @property
    def error(self) -> float:
        """Signed, as a share of what was logged."""
        return float(self.predicted) / float(self.logged) - 1

    @property
    def their_error(self) -> float | None:
        return float(self.theirs) / float(self.logged) - 1 if self.theirs else None

    @property
    def is_pool(self) -> bool:
        return self.what != "weights"


@cache
def proofs() -> tuple[Proof, ...]:
    with PROOF.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return tuple(Proof(**{**row, "num_gpus": int(row["num_gpus"])}) for row in rows)  # type: ignore[arg-type]


def of_model(model: str, gpu: str | None = None) -> list[Proof]:
    """Figures of one model, on one GPU if named."""
    return [row for row in proofs() if row.model == model and gpu in (None, row.gpu)]
