"""A model as a GGUF file describes it: its metadata, its tensors and the ModelSpec they state.

From a file (`read_gguf`), whose weights are never read, or made from a config's ModelSpec as llama.cpp's converter and
llama-quantize would (`gguf_of`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvplan.models import gguf_mix
from kvplan.models.ggml_types import tensor_bytes
from kvplan.models.gguf_names import architecture_of, num_nextn, tensors_of
from kvplan.models.spec import FullAttention, LatentAttention, ModelSpec, SlidingWindow

_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: its shape in ggml's order (the row first), its type ("Q4_K", "F32") and its bytes."""

    name: str
    shape: tuple[int, ...]
    kind: str
    nbytes: int

    @property
    def layer(self) -> int | None:
        """Number of its layer; None outside the layers."""
        match = _LAYER.match(self.name)
        return int(match[1]) if match else None


@dataclass(frozen=True, slots=True, eq=False)
class GGUFModel:
    """A model of one or more GGUF files.

    metadata  without the vocabulary's lists; keys of the architecture with its name in front ("llama.block_count")
    tensors   in the file's order, of the language model and of layers for multi-token prediction
    mixed_by  whose choice of types this is: the file's own, or the one that llama-quantize would make
    label     the file's own type ("Q4_K_M"), for the answer
    """

    architecture: str
    metadata: Mapping[str, object]
    tensors: tuple[GGUFTensor, ...]
    spec: ModelSpec
    mixed_by: Literal["file", "llama-quantize"]
    label: str

    def value(self, key: str, default: object = None) -> object:
        """Metadata of the architecture by its key without the architecture's name."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def num_layers(self) -> int:
        """Layers of the file, with those for multi-token prediction."""
        return self.spec.num_layers + self.num_nextn

    @property
    def num_nextn(self) -> int:
        """Layers for multi-token prediction: the last ones; a server loads them only to draft."""
        count = self.value("nextn_predict_layers", 0)
        return count if isinstance(count, int) else 0

    def is_nextn(self, tensor: GGUFTensor) -> bool:
        """True for a tensor of a layer for multi-token prediction."""
        return tensor.layer is not None and tensor.layer >= self.spec.num_layers


def gguf_of(spec: ModelSpec, quantization: str = "Q4_K_M", *, imatrix: bool = False) -> GGUFModel:
    """The file that llama.cpp's converter and llama-quantize would make of a model.

    imatrix  quantized with an importance matrix, as files of about two bits always are
    Raise UnsupportedModelError for a model whose tensors' names are not known, UsageError for an unknown file type.
    """
    kind = gguf_mix.file_type(quantization)
    architecture = architecture_of(spec)
    named = tensors_of(spec)
    layers = spec.num_layers + num_nextn(spec)
    types = gguf_mix.mixed(
        named,
        kind,
        ratio=_ratio(spec),
        experts=max((weight.experts for layer in spec.layer_weights for weight in layer), default=0),
        layers=layers,
        is_70b=_is_70b(spec, architecture),
        imatrix=imatrix or kind in gguf_mix.IMATRIX_ONLY,
    )
    tensors = tuple(GGUFTensor(name, shape, types[name], tensor_bytes(types[name], shape)) for name, shape in named)
    metadata: dict[str, object] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": layers,
        f"{architecture}.nextn_predict_layers": num_nextn(spec),
        f"{architecture}.context_length": spec.context_limit,
    }
    return GGUFModel(architecture, metadata, tensors, spec, "llama-quantize", kind)


def _ratio(spec: ModelSpec) -> int:
    """Query heads per KV head in the first layer, as llama.cpp counts them: a latent has one head, a state none."""
    for cache in spec.layers[0]:
        match cache:
            case FullAttention() | SlidingWindow():
                return spec.num_heads // cache.num_kv_heads
            case LatentAttention():
                return spec.num_heads
    if spec.model_type.startswith("qwen3_"):  # its layers without attention state the heads of the others
        heads = [cache.num_kv_heads for layer in spec.layers for cache in layer if isinstance(cache, FullAttention)]
        return spec.num_heads // heads[0]
    return 0


def _is_70b(spec: ModelSpec, architecture: str) -> bool:
    """True if llama.cpp calls the model's size 70B, by its number of layers."""
    if spec.num_layers != 80:
        return False
    return architecture in ("qwen2", "deci") or (architecture == "llama" and _ratio(spec) > 1)
