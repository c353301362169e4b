"""The seam to LoRA adapters: each request of a batch may add its own to the model's linear layers.

The seam between a model and engine/lora.py: with max_loras 0 the layers are the plain Builder's, and nothing else runs.
"""

from collections.abc import Hashable
from pathlib import Path

from engine.batch import BatchArrays
from engine.layers import Builder
from engine.staging import UploadRing
from kvplan.core.errors import InvalidInputError, UsageError


class Adapters:
    """A model's adapters on one rank. These are none: the layers are the model's own weights."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots on the device, full or empty."""
        return 0

    def builder(self, plain: Builder) -> Builder:
        """The builder of the model's layers, made of the plain one."""
        return plain

    def add(self, name: str, path: Path) -> None:
        """Read an adapter that requests may then name; raises if it is invalid or unsupported."""
        raise UsageError(f"adapter {name!r}: the engine has no slots for adapters; set max_loras to 1 or more")

    def cache_keys(self, name: str) -> tuple[Hashable, ...]:
        """Extra prefix-cache keys of an adapter's requests; raises InvalidInputError for an unknown adapter."""
        raise InvalidInputError(f"adapter: the engine has none ({name!r:.60}); remove it")

    def begin(self, arrays: BatchArrays, uploads: UploadRing | None = None) -> None:
        """Load the adapters of a step's sequences into slots, and map tokens to adapters."""
