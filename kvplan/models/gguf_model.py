"""A model as a GGUF file describes it: its metadata, its tensors and the ModelSpec they state.

From a file (`read_gguf`), whose weights are never read, or made from a config's ModelSpec as llama.cpp's converter and
llama-quantize would (`gguf_of`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import path_text, printable
from kvplan.models import gguf_mix
from kvplan.models.ggml_types import tensor_bytes
from kvplan.models.gguf_keys import config_of, metadata_of
from kvplan.models.gguf_names import architecture_of, num_nextn, tensors_of
from kvplan.models.hf_config import read_config
from kvplan.models.spec import FullAttention, LatentAttention, ModelSpec, SlidingWindow
from kvplan.models.tensors import Checkpoint, TensorInfo

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


def gguf_of(spec: ModelSpec, quantization: str = "Q4_K_M", *, imatrix: bool = False,
            drafts: bool = False) -> GGUFModel:  # fmt: skip
    """The file that llama.cpp's converter and llama-quantize would make of a model.

    imatrix  quantized with an importance matrix, as files of about two bits always are
    drafts   with the model's layers for multi-token prediction
    Raise UnsupportedModelError for a model whose tensors' names are not known, UsageError for an unknown file type.
    """
    kind = gguf_mix.file_type(quantization)
    architecture = architecture_of(spec)
    named = tensors_of(spec, drafts)
    layers = spec.num_layers + num_nextn(spec, drafts)
    types = gguf_mix.mixed(
        named,
        kind,
        ratio=_ratio(spec),
        experts=max((weight.experts for layer in spec.layer_weights for weight in layer), default=0),
        layers=layers,
        is_70b=_is_70b(spec, architecture),
        imatrix=imatrix or kind in gguf_mix.IMATRIX_ONLY,
    )
    number = next(number for number, name in FILE_TYPES.items() if name == kind)
    metadata = metadata_of(spec, drafts) | {"general.file_type": number}
    tensors = tuple(GGUFTensor(name, shape, types[name], tensor_bytes(types[name], shape)) for name, shape in named)
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


# --- from a file ----------------------------------------------------------------------------------------------------

# Number of a file's own type -> its name (llama.cpp, include/llama.h, llama_ftype).
FILE_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
}  # fmt: skip
PROJECTOR: Final = "clip"  # architecture of a file that holds a model's tower (mmproj)


def read_gguf(path: Path, name: str | None = None) -> GGUFModel:
    """Read the header of a GGUF file, or of every part of a split one, whichever part is named.

    Raise InvalidInputError for a damaged file and for one that is not a language model's, UnsupportedModelError for an
    architecture that kvplan does not read.
    """
    return gguf_stored(stored_in(path), path_text(path), name or printable(str(path), 1000))


def stored_in(path: Path) -> Checkpoint:
    """The headers of a GGUF file's parts."""
    from kvplan.models.checkpoint import read_checkpoint

    stored = read_checkpoint(path)
    if stored is None or stored.format != "gguf":
        raise InvalidInputError(path_text(path), "not a GGUF file", "name a file that ends in .gguf")
    return stored


def gguf_stored(stored: Checkpoint, where: str, name: str) -> GGUFModel:
    """The model of a file whose headers were read."""
    metadata = stored.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise InvalidInputError(where, "its metadata has no general.architecture", "fetch the file again")
    _check_kind(where, architecture, metadata, stored.tensors)
    tensors = ggml_tensors(stored)
    config = config_of(architecture, metadata, {tensor.name: tensor.shape for tensor in tensors}, where)
    spec = replace(read_config(config, where, name), notes=())
    return GGUFModel(architecture, metadata, tensors, spec, "file", _label(metadata, tensors))


def gguf_beside(stored: Checkpoint, spec: ModelSpec) -> GGUFModel:
    """The model of a file whose facts are known from elsewhere: its config.json, or the file itself."""
    tensors = ggml_tensors(stored)
    architecture = str(stored.metadata.get("general.architecture", ""))
    return GGUFModel(architecture, stored.metadata, tensors, spec, "file", _label(stored.metadata, tensors))


def ggml_tensors(stored: Checkpoint) -> tuple[GGUFTensor, ...]:
    return tuple(GGUFTensor(info.name, info.shape[::-1], info.dtype, info.num_bytes) for info in stored.tensors)


def _label(metadata: Mapping[str, object], tensors: tuple[GGUFTensor, ...]) -> str:
    """The file's own type; of a file without one, the type that most of its bytes have."""
    file_type = metadata.get("general.file_type")
    label = FILE_TYPES.get(file_type, "") if isinstance(file_type, int) else ""
    return label or _commonest(tensors)


def _check_kind(where: str, architecture: str, metadata: Mapping[str, object], infos: Sequence[TensorInfo]) -> None:
    """Refuse files of llama.cpp that are not a language model, by what they are."""
    kind = metadata.get("general.type")
    if architecture == PROJECTOR or kind == "mmproj":
        raise InvalidInputError(where, "the tower of a model (mmproj), not a language model", "name the model's file")
    if kind == "adapter":
        raise InvalidInputError(where, "a LoRA adapter, not a model", "name the model's file")
    if not any(info.name == "token_embd.weight" for info in infos):
        raise InvalidInputError(where, "has no token_embd.weight: not a language model", "name the model's file")


def _commonest(tensors: tuple[GGUFTensor, ...]) -> str:
    """The type that most of the bytes have, for a file without a type of its own."""
    totals: dict[str, int] = {}
    for tensor in tensors:
        totals[tensor.kind] = totals.get(tensor.kind, 0) + tensor.nbytes
    return max(totals, key=lambda kind: totals[kind])
