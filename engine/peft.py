"""LoRA adapters as peft writes them: a directory with adapter_config.json and adapter_model.safetensors."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.adapter_config import layer_and_matrix, read_config, scale_of, shapes_of, weights_file
from kvplan.core.errors import InvalidInputError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's update of one linear layer, b @ (a @ x): float32, on the host.

    a  [rank, inputs]; b [outputs, rank], its scale in it
    """

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's matrices by layer name ("model.layers.0.self_attn.q_proj")."""

    path: Path
    layers: dict[str, LowRank]

    @property
    def rank(self) -> int:
        return max((low.rank for low in self.layers.values()), default=0)


def read_adapter(path: Path) -> Adapter:
    """Raises InvalidInputError for a missing or damaged directory, UnsupportedModelError for other adapters."""
    config = read_config(path)
    tensors = _read_tensors(path)
    shapes = shapes_of(path, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    matrices = {layer_and_matrix(path, name): tensor for name, tensor in tensors.items()}
    layers = {
        name: LowRank(matrices[name, "A"].float(), matrices[name, "B"].float() * scale_of(config, name, shape.rank))
        for name, shape in shapes.items()
    }
    return Adapter(path, layers)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    file = weights_file(path)
    try:
        with safe_open(file, framework="pt", device="cpu") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (a safe_open is no dict)
    except (SafetensorError, OSError) as error:
        raise InvalidInputError(f"{file}: is damaged or truncated ({error}); export the adapter again") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise UnsupportedModelError(f"{file}: tensor {name!r} is {tensor.dtype}; the engine reads floats")
    return tensors
