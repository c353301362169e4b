"""What a server loads beside its model: LoRA adapters, a draft model and a tower.

Source: llama.cpp at commit 0c1e57098: `llama_adapter_lora_init_impl` (an adapter's pair lies where its base tensor
does), `common_base_params_to_speculative` (a draft has the server's settings, but its own layers and cache types),
tools/mtmd/clip.cpp (a tower is whole on the first GPU, or on the host).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvplan.core.errors import InvalidInputError, UnsupportedModelError
from kvplan.core.units import MIB
from kvplan.models.gguf_model import PROJECTOR
from kvplan.models.tensors import Checkpoint
from kvplan.servers.llamacpp.placement import Placement, buffer_bytes
from kvplan.servers.llamacpp.settings import Settings
from kvplan.servers.llamacpp.shape import FileLike, TensorLike

PARTS: Final = (".lora_a", ".lora_b")
# MiB of a tower's graph. Lines "alloc_compute_meta" of public logs: 3.0 (Qwen3-VL-30B's, not warmed up), 195.2 (LFM2.5
# Audio), 248.1 (887.99 MiB of weights, an image of 1,472 x 1,472 as at the start); 1,024 is what Ollama keeps for it.
TOWER_COMPUTE: Final = (3, 248, 1024)


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """Files beside the model's.

    adapters      tensors of each adapter's file
    draft_layers  -ngld: layers of the draft on GPUs; None: all
    tower         tensors of --mmproj; on the first GPU if `on_gpu`
    """

    adapters: tuple[tuple[TensorLike, ...], ...] = ()
    draft: FileLike | None = None
    draft_layers: int | None = None
    tower: tuple[TensorLike, ...] = ()
    on_gpu: bool = True

    def tower_bytes(self) -> tuple[int, int]:
        """Bytes of a tower's weights and, likely, of its graph."""
        weights = sum(buffer_bytes(tensor, 0 if self.on_gpu else None) for tensor in self.tower)
        return weights, TOWER_COMPUTE[1] * MIB if self.tower else 0


def tower_tensors(stored: Checkpoint, tensors: tuple[TensorLike, ...], where: str) -> tuple[TensorLike, ...]:
    """The tensors of a tower's file."""
    if stored.metadata.get("general.architecture") != PROJECTOR:
        raise InvalidInputError(where, "is not a tower in GGUF (mmproj)", "name the file that holds it")
    return tensors


def draft_settings(settings: Settings, ctx: int, layers: int | None) -> Settings:
    """A draft's settings: the context of its target, one output per slot, its own layers, overrides and cache types."""
    return replace(settings, ctx=ctx, gpu_layers=layers, cache_k="F16", cache_v="F16", overrides=(), outputs=None)


def adapter_tensors(stored: Checkpoint, tensors: tuple[TensorLike, ...], architecture: str,
                    where: str) -> tuple[TensorLike, ...]:  # fmt: skip
    """The tensors of an adapter's file that are loaded; raise an error for what the server refuses."""
    metadata = stored.metadata
    if metadata.get("general.type") != "adapter" or metadata.get("adapter.type") != "lora":
        raise InvalidInputError(where, "is not a LoRA adapter in GGUF", "make one with convert_lora_to_gguf.py")
    if (own := metadata.get("general.architecture")) != architecture:
        raise InvalidInputError(where, f"is an adapter for {own}, and the model is {architecture}", "name another")
    return tuple(tensor for tensor in tensors if not tensor.name.endswith("_norm.weight"))


def placed(adapters: Sequence[tuple[TensorLike, ...]], placement: Placement) -> Placement:
    """The placement with the adapters' tensors, each where its base tensor lies."""
    by_name = {tensor.name: (tensor, where) for tensor, where in reversed(placement.tensors)}
    return replace(placement, adapters=tuple(tuple(_pairs(tensors, by_name)) for tensors in adapters))


def _pairs(tensors: Sequence[TensorLike], base: dict[str, tuple[TensorLike, int | None]]) -> Iterator[
    tuple[TensorLike, int | None]
]:  # fmt: skip
    sizes = {tensor.name: tensor.shape for tensor in tensors}
    for tensor in tensors:
        name = tensor.name[: -len(PARTS[0])]
        if not tensor.name.endswith(PARTS) or not all(name + part in sizes for part in PARTS):
            raise InvalidInputError("--lora", f"{tensor.name} is not one of a pair of LoRA tensors", "fetch it again")
        if name not in base:
            raise InvalidInputError("--lora", f"the model has no {name}", "name an adapter of this model")
        if name == "token_embd.weight":
            raise UnsupportedModelError("--lora", "kvplan does not size adapters of the embedding", "remove it")
        shape, first, second = base[name][0].shape, sizes[name + PARTS[0]], sizes[name + PARTS[1]]
        if (shape[0], shape[1], first[1]) != (first[0], second[1], second[0]):
            raise InvalidInputError("--lora", f"{tensor.name} does not fit {name}", "name an adapter of this model")
        yield tensor, base[name][1]
