"""Adapters of --lora-modules, checked before a model is loaded, and for a simulated server too: by headers only."""

from pathlib import Path
from typing import Final

from engine.adapter_config import check_fit, read_config, shapes_of, weights_file
from kvplan.core.errors import InvalidInputError, UnsupportedModelError
from kvplan.models.safetensors_header import safetensors_tensors
from kvplan.models.spec import ModelSpec

FLOATS: Final = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
ROUTERS: Final = ("mlp.gate", "mlp.router", "block_sparse_moe.gate")  # by family


def check_adapter(path: Path, spec: ModelSpec, max_lora_rank: int) -> None:
    """Refuse an adapter that the bundled engine would not load, as it does."""
    config = read_config(path)
    file = weights_file(path)
    try:
        tensors = list(safetensors_tensors(file))
    except InvalidInputError as error:
        raise InvalidInputError(
            f"{file}", f"is damaged or truncated ({error.problem})", "export the adapter again"
        ) from error
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise UnsupportedModelError(
                f"{file}: tensor {tensor.name!r}", f"is {tensor.dtype}", "the engine reads floats"
            )
    layers = shapes_of(path, config, {tensor.name: tensor.shape for tensor in tensors})
    check_fit(path, layers, max_lora_rank, linear_layers(spec))


def linear_layers(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the decoder's linear layers, experts apart, by their names in a checkpoint."""
    layers: dict[str, tuple[int, int]] = {}
    for number, weights in enumerate(spec.layer_weights):
        for weight in weights:
            if weight.inputs == 1 or weight.experts or weight.name.endswith("kv_b_proj"):  # 1: norms, sinks
                continue
            if weight.group == "router":
                layers |= {f"model.layers.{number}.{name}": (weight.inputs, weight.parts[0].units) for name in ROUTERS}
                continue
            names = weight.sources or (weight.name,)
            if len(names) == len(weight.parts):
                outputs = [part.units * part.width for part in weight.parts]
            else:
                outputs = [sum(part.units * part.width for part in weight.parts)]
            layers |= {
                f"model.layers.{number}.{name}": (weight.inputs, size)
                for name, size in zip(names, outputs, strict=False)
            }
    return layers
