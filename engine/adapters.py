"""Adapters: what requests add to a model's linear layers, each request its own, in one batch.

The seam between a model and engine/lora.py: with max_loras 0 the layers are the plain Builder's, and nothing else runs.
"""

from collections.abc import Hashable
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch

from engine.batch import BatchArrays
from engine.layers import Builder
from engine.loader import WeightSource
from engine.staging import UploadRing
from engine.tp import TensorParallel
from kvplan.core.errors import InvalidInputError, UsageError
from kvplan.models.spec import Quantization


class Adapters(Protocol):
    """A model's adapters on one rank."""

    @property
    def num_bytes(self) -> int:
        """Of the device, whatever the adapters hold."""

    def builder(
        self, source: WeightSource, tp: TensorParallel, kernels: ModuleType, dtype: torch.dtype, device: torch.device,
        quantization: Quantization | None,
    ) -> Builder:  # fmt: skip
        """What builds the model's layers."""

    def add(self, name: str, path: Path) -> None:
        """Read an adapter, which requests may then name. Raises what is wrong with it."""

    def cache_keys(self, name: str) -> tuple[Hashable, ...]:
        """What keeps the KV of an adapter's requests apart from others'; InvalidInputError for one not known."""

    def begin(self, arrays: BatchArrays, uploads: UploadRing | None = None) -> None:
        """Have the adapters of a step's sequences on the device, and say which tokens are whose."""


class NoAdapters:
    """A model's own weights alone."""

    num_bytes = 0

    def builder(
        self, source: WeightSource, tp: TensorParallel, kernels: ModuleType, dtype: torch.dtype, device: torch.device,
        quantization: Quantization | None,
    ) -> Builder:  # fmt: skip
        return Builder(source, tp, kernels, dtype, device, quantization)

    def add(self, name: str, path: Path) -> None:
        raise UsageError(f"adapter {name!r}: the engine has no slots for adapters; set max_loras to 1 or more")

    def cache_keys(self, name: str) -> tuple[Hashable, ...]:
        raise InvalidInputError(f"adapter: the engine has none ({name!r:.60}); leave it out")

    def begin(self, arrays: BatchArrays, uploads: UploadRing | None = None) -> None:
        return
