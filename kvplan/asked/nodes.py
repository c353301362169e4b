"""Nodes: the GPU that a Kubernetes node's labels stand for."""

import re
from collections.abc import Iterable
from typing import Final

from kvplan.hardware.names import gpu_of_label

PRODUCT: Final = "nvidia.com/gpu.product"


def gpu_of_labels(labels: Iterable[tuple[str, list[str]]]) -> tuple[str | None, str]:
    """(GPU, the label that names it); None if no label names it or they are ambiguous."""
    known: dict[str, str] = {}
    for key, values in labels:
        names = {gpu_of_label(key, value) for value in values}
        for name in names - {None}:
            known.setdefault(str(name), f"{key}: {', '.join(values)}")
    if len(known) != 1:
        return None, ""
    return next(iter(known.items()))


def product_of(device_name: str) -> str:
    """Node label for such GPUs."""
    return re.sub(r"\s+", "-", device_name)
