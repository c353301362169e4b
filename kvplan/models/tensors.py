"""Contents of a checkpoint's headers: its tensors, their dtypes, shapes and sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

LFS_POINTER = b"version https://git-lfs"  # placeholder for a file that was not pulled


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor.

    `dtype` is the format's own name ("BF16", "Q4_K"). `shape` is in torch's order, slowest axis first, for GGUF too.
    `num_bytes` is what its data takes on disk.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights of one model directory.

    `total_bytes` is the sum over `tensors`. `tensors` is empty if only sizes are known: for pickles, and for a Hub
    cache that has the index of the weights but not the weights. `notes` are warnings for the user. `metadata` is what a
    GGUF file says of its model.
    """

    format: Literal["safetensors", "gguf", "pickle-sizes"]
    tensors: tuple[TensorInfo, ...]
    total_bytes: int
    files: tuple[str, ...]
    notes: tuple[str, ...]
    metadata: Mapping[str, object] = field(default_factory=dict)
