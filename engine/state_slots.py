"""Where recurrent states lie: in a slot of each running sequence or, where prefixes are cached, in blocks of the pool.

A block of the pool then holds one state of each layer of a group, in the bytes of other groups' keys and values; a
block has as many tokens as that takes (vLLM 0.33's rule, `platforms/interface.py` update_block_size_for_backend). A
layer reads a state from one place and writes it to another: so a state that others are found in stays as it is.
"""

from dataclasses import dataclass, replace
from math import prod

import torch

from engine.config import EngineConfig
from kvplan.models.spec import FullAttention, LatentAttention, ModelSpec, RecurrentState, SlidingWindow

# Kinds that the engine moves on; layers of the others are refused where layers are grouped (engine/kv_cache.py).
KINDS = ("gated_delta_net", "mamba2", "short_conv")


@dataclass(frozen=True, slots=True)
class StateShape:
    """One layer's state of a sequence: the last inputs of its convolution, then its matrices."""

    inputs: tuple[int, int]  # channels, kernel - 1
    states: tuple[int, ...]  # heads, *head_shape
    input_dtype: torch.dtype
    state_dtype: torch.dtype

    @classmethod
    def of(cls, state: RecurrentState, dtype: torch.dtype) -> "StateShape":
        """dtype: the model's."""
        channels = sum(part.units * part.width for part in state.convolution)
        wide = dtype if state.ssm_dtype is None else getattr(torch, state.ssm_dtype)
        return cls((channels, state.conv_kernel - 1), (state.heads, *state.head_shape), dtype, wide)

    @property
    def state_bytes(self) -> int:
        return prod(self.states) * self.state_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.state_bytes + prod(self.inputs) * self.input_dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSlots:
    """One layer's states in slots of their own, one for each sequence that runs; zero at first.

    group  which of a step's lists of slots is this layer's
    """

    inputs: torch.Tensor
    states: torch.Tensor
    group: int = 0

    @classmethod
    def of(cls, shape: StateShape, num_slots: int, device: torch.device | str) -> "StateSlots":
        return cls(
            torch.zeros(num_slots, *shape.inputs, dtype=shape.input_dtype, device=device),
            torch.zeros(num_slots, *shape.states, dtype=shape.state_dtype, device=device),
        )

    @property
    def num_bytes(self) -> int:
        return self.inputs.nbytes + self.states.nbytes

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of (inputs [n, channels, kernel - 1], states [n, heads, *head_shape]) in the slots [n] int64."""
        return self.inputs[slots], self.states[slots]

    def write(self, slots: torch.Tensor, inputs: torch.Tensor, states: torch.Tensor) -> None:
        self.inputs[slots], self.states[slots] = inputs.to(self.inputs.dtype), states.to(self.states.dtype)


class StateBlocks:
    """States in blocks of the pool, a slot being a block: its matrices, its inputs, and bytes that nobody reads."""

    def __init__(self, tensors: list[torch.Tensor], shape: StateShape, group: int) -> None:
        """tensors: the pool's for one layer, [num_blocks, ...] each; a state goes on from one in the next."""
        self.shape, self.group = shape, group
        self._parts = [tensor.view(torch.uint8).flatten(1) for tensor in tensors]

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, split = self.shape, self.shape.state_bytes
        raw = torch.cat([part[slots] for part in self._parts], 1)[:, : shape.num_bytes]
        states = raw[:, :split].contiguous().view(shape.state_dtype).unflatten(1, shape.states)
        return raw[:, split:].contiguous().view(shape.input_dtype).unflatten(1, shape.inputs), states

    def write(self, slots: torch.Tensor, inputs: torch.Tensor, states: torch.Tensor) -> None:
        shape = self.shape
        raw = [
            x.to(dtype).contiguous().flatten(1).view(torch.uint8)
            for x, dtype in ((states, shape.state_dtype), (inputs, shape.input_dtype))
        ]
        whole, start = torch.cat(raw, 1), 0
        for part in self._parts:
            taken = whole[:, start : start + part.shape[1]]
            part[slots, : taken.shape[1]] = taken
            start += taken.shape[1]


States = StateSlots | StateBlocks


def are_in_blocks(spec: ModelSpec, config: EngineConfig) -> bool:
    """Whether a model's states lie in blocks of the pool: where prefixes are to be found in them."""
    return spec.has_states and config.enable_prefix_caching and config.allocator == "paged"


def with_room_for_states(spec: ModelSpec, config: EngineConfig) -> EngineConfig:
    """The config with blocks of so many tokens, a multiple of what it says, that a state fits into one of a layer."""
    if not are_in_blocks(spec, config):
        return config
    dtype = _dtype(spec.dtype if config.dtype == "auto" else config.dtype)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else _dtype(config.kv_cache_dtype)
    caches = {cache for layer in spec.layers for cache in layer}
    states = [StateShape.of(cache, dtype).num_bytes for cache in caches if isinstance(cache, RecurrentState)]
    tokens = [size for cache in caches if (size := _token_size(cache) * kv_dtype.itemsize)]
    if not tokens:  # which is refused where layers are grouped
        return config
    unit = config.block_size * min(tokens)
    return replace(config, block_size=config.block_size * -(-max(states) // unit))


def _token_size(cache: object) -> int:
    """Elements that a layer keeps of each token."""
    match cache:
        case FullAttention() | SlidingWindow():
            return cache.num_kv_heads * (cache.head_dim + cache.head_dim_v)
        case LatentAttention():
            return cache.kv_lora_rank + cache.qk_rope_head_dim
        case _:
            return 0


def _dtype(name: str) -> torch.dtype:
    dtype = torch.float8_e4m3fn if name.startswith("fp8") else getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
