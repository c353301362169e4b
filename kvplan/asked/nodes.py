"""Nodes: the GPU that a Kubernetes node label stands for.

Sources: NVIDIA's GPU feature discovery (nvidia.com/gpu.product is the device's name with dashes), Google's list of
accelerators (cloud.google.com/gke-accelerator), Karpenter's instance-gpu-name, and the clouds' lists of machine types.
"""

import re
from collections.abc import Iterable
from typing import Final

from kvplan.core import entries

PRODUCT: Final = "nvidia.com/gpu.product"
GKE: Final[dict[str, str]] = {
    "nvidia-tesla-t4": "t4", "nvidia-tesla-v100": "v100-16g", "nvidia-l4": "l4", "nvidia-tesla-a100": "a100-40g",
    "nvidia-a100-80gb": "a100-80g", "nvidia-h100-80gb": "h100-80g", "nvidia-h100-mega-80gb": "h100-80g",
    "nvidia-h200-141gb": "h200", "nvidia-b200": "b200", "nvidia-gb200": "gb200", "nvidia-rtx-pro-6000": "rtx-pro-6000",
}  # fmt: skip
KARPENTER: Final[dict[str, str]] = {
    "t4": "t4", "a10g": "a10g", "l4": "l4", "l40s": "l40s", "v100": "v100-16g", "h100": "h100-80g", "h200": "h200",
    "b200": "b200", "b300": "b300",
}  # fmt: skip
# Prefix of a machine type's name, longer prefixes first if one begins with another.
MACHINES: Final[dict[str, str]] = {
    "g4dn.": "t4", "g5.": "a10g", "g6.": "l4", "g6e.": "l40s", "p3.": "v100-16g", "p4d.": "a100-40g",
    "p4de.": "a100-80g", "p5.": "h100-80g", "p5e.": "h200", "p5en.": "h200", "p6-b200.": "b200", "p6-b300.": "b300",
    "a2-highgpu-": "a100-40g", "a2-ultragpu-": "a100-80g", "a2-megagpu-": "a100-40g", "a3-highgpu-": "h100-80g",
    "a3-megagpu-": "h100-80g", "a3-ultragpu-": "h200", "a4-highgpu-": "b200", "g2-standard-": "l4",
    "Standard_ND96isr_H100_v5": "h100-80g", "Standard_ND96isr_H200_v5": "h200",
    "Standard_NC40ads_H100_v5": "h100-nvl-94g",
    "Standard_NC80adis_H100_v5": "h100-nvl-94g", "Standard_ND96amsr_A100_v4": "a100-80g",
    "Standard_ND96asr_v4": "a100-40g",
}  # fmt: skip
INSTANCE_LABELS: Final = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
FAMILY_LABELS: Final = ("karpenter.k8s.aws/instance-family",)


def gpu_of_labels(labels: Iterable[tuple[str, list[str]]]) -> tuple[str | None, str]:
    """(GPU, the label that names it); None if no label names it or they are ambiguous."""
    known: dict[str, str] = {}
    for key, values in labels:
        names = {gpu_of(key, value) for value in values}
        for name in names - {None}:
            known.setdefault(str(name), f"{key}: {', '.join(values)}")
    if len(known) != 1:
        return None, ""
    return next(iter(known.items()))


def gpu_of(key: str, value: str) -> str | None:
    """GPU named by one label."""
    if key in (PRODUCT, "gpu.nvidia.com/model"):
        return gpu_of_product(value)
    if key == "cloud.google.com/gke-accelerator":
        return GKE.get(value)
    if key == "karpenter.k8s.aws/instance-gpu-name":
        return KARPENTER.get(value)
    machine = value + "." if key in FAMILY_LABELS else value
    if key in (*INSTANCE_LABELS, *FAMILY_LABELS):
        return next((gpu for start, gpu in MACHINES.items() if machine.startswith(start)), None)
    return None


def gpu_of_product(product: str) -> str | None:
    """GPU by its device name with dashes: "NVIDIA-H100-80GB-HBM3", "Tesla-T4-SHARED"; None for a MIG slice."""
    if "-MIG-" in product:
        return None
    product_name = plain(product.removesuffix("-SHARED"))
    path = entries.locate("gpus.yaml")
    for name in entries.sections(path):
        facts = entries.entry(path, name)
        aliases = facts.get("aliases")
        names = [name, str(facts.get("device_name", "")), *(aliases if isinstance(aliases, list) else ())]
        if product_name in {plain(str(each)) for each in names}:
            return name
    return None


def product_of(device_name: str) -> str:
    """Node label for such GPUs."""
    return re.sub(r"\s+", "-", device_name)


def plain(name: str) -> str:
    return re.sub(r"[\s-]+", "", name).lower()
