"""The K and V tensors, and how the layers of a model share one pool of blocks.

Layers that remember alike (all tokens, or the same window) form groups of equal size. A block belongs to one group at
a time and holds its tokens' KV of all the group's layers, so one pool serves models whose layers differ.
"""

from dataclasses import dataclass

import torch

from engine.block_manager import FullGroup, Group, WindowGroup, cdiv
from engine.state_slots import KINDS, StateBlocks, States, StateShape, StateSlots
from engine.states import MambaGroup
from engine.tp import TensorParallel
from kvplan.core.errors import UnsupportedModelError
from kvplan.models.spec import FullAttention, LatentAttention, LayerCache, ModelSpec, RecurrentState, SlidingWindow


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share block tables, and their rule for freeing blocks."""

    rule: Group
    layers: tuple[int, ...]


def group_layers(spec: ModelSpec, block_size: int, *, with_states: bool = False) -> tuple[LayerGroup, ...]:
    """Layers by kind, kinds cut into groups of about equal size, so that every group's block has the same bytes.

    The size is that of the smallest kind, or of the largest where that is less than half as large again: then the
    smaller groups' blocks stay partly empty. (The rule of vLLM 0.33, `v1/core/kv_cache_utils.py`.)

    with_states  recurrent states lie in blocks too, not in slots of their own
    """
    kinds: dict[Group, list[int]] = {}
    paged = [i for i, caches in enumerate(spec.layers) if caches and not is_state(caches)]
    if not paged:
        raise UnsupportedModelError(f"{spec.name}: has no attention layers, which the engine cannot run")
    for i in paged:
        kinds.setdefault(_rule(spec, i, spec.layers[i], block_size), []).append(i)
    states = [i for i, caches in enumerate(spec.layers) if with_states and is_state(caches)]
    if states:
        kinds[MambaGroup(block_size)] = states
    if len({_page(spec.layers[i]) for i in paged}) > 1:
        raise UnsupportedModelError(
            f"{spec.name}: its layers differ in KV heads or head_dim, which the engine cannot run"
        )
    smallest, largest = min(map(len, kinds.values())), max(map(len, kinds.values()))
    size = largest if largest < 1.5 * smallest else smallest
    groups: list[LayerGroup] = []
    for rule, layers in kinds.items():
        count = cdiv(len(layers), size)
        groups += [LayerGroup(rule, tuple(layers[i::count])) for i in range(count)]
    return tuple(groups)


def is_state(caches: tuple[LayerCache, ...]) -> bool:
    """Whether a layer keeps a state per sequence that the engine moves on, in place of keys and values."""
    match caches:
        case (RecurrentState(kind=kind),):
            return kind in KINDS
        case _:
            return False


def first_paged(spec: ModelSpec) -> LayerCache:
    """The cache of the first layer that keeps something of every token: all others' entries are laid out alike."""
    return next(caches[0] for caches in spec.layers if caches and not is_state(caches))


def _rule(spec: ModelSpec, layer: int, caches: tuple[LayerCache, ...], block_size: int) -> Group:
    match caches:
        case (FullAttention(),) | (LatentAttention(sparse=False),):
            return FullGroup(block_size)
        case (SlidingWindow(window=window),):
            return WindowGroup(block_size, window)
        case _:
            kinds = " and ".join(map(_kind, caches)) or "no cache of its own"
            raise UnsupportedModelError(f"{spec.name}: layer {layer} keeps {kinds}, which the engine cannot run")


def _kind(cache: LayerCache) -> str:
    return f"a {cache.kind} state" if isinstance(cache, RecurrentState) else type(cache).__name__


def _page(caches: tuple[LayerCache, ...]) -> tuple[int, ...]:
    """The layout of a token's entry, for the kinds that _rule accepts."""
    match caches[0]:
        case FullAttention() | SlidingWindow() as cache:
            return (cache.num_kv_heads, cache.head_dim, cache.head_dim_v)
        case LatentAttention() as cache:
            return (1, cache.kv_lora_rank + cache.qk_rope_head_dim)
        case other:
            raise AssertionError(f"{other} passed _rule")


def _shape(caches: tuple[LayerCache, ...], dtype: torch.dtype) -> StateShape:
    """The state of a layer that is_state is true of."""
    (state,) = caches
    assert isinstance(state, RecurrentState)
    return StateShape.of(state, dtype)


@dataclass(frozen=True, slots=True)
class HeadKV:
    """One layer's K and V: [num_blocks, block_size, num_kv_heads, head_dim]; stored = value / scale."""

    k: torch.Tensor
    v: torch.Tensor
    group: int
    scale: float


@dataclass(frozen=True, slots=True)
class LatentKV:
    """One layer's latents: [num_blocks, block_size, kv_lora_rank + rope dim]."""

    cache: torch.Tensor
    group: int


LayerKV = HeadKV | LatentKV | States


class KVCache:
    """The pool's tensors, zero at first; it knows layers and groups, never sequences."""

    def __init__(
        self,
        spec: ModelSpec,
        groups: tuple[LayerGroup, ...],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        tp: TensorParallel,
        scale: float = 1.0,
    ) -> None:
        """Raises UnsupportedModelError for an fp8 cache of latents, whose rope part would need scales of its own."""
        self.num_blocks = num_blocks
        self.tensors: list[torch.Tensor] = []
        self.layers: dict[int, LayerKV] = {}

        def pool(*entry: int) -> torch.Tensor:
            # Zeros are written, on a CPU too: the whole pool is resident from here on, whatever is used of it.
            self.tensors.append(torch.zeros(num_blocks, block_size, *entry, dtype=dtype, device=device))
            return self.tensors[-1]

        # Blocks of different groups never have the same id, so their n-th layers can share a tensor.
        for n in range(max(len(group.layers) for group in groups)):
            sharers = [(g, group.layers[n]) for g, group in enumerate(groups) if n < len(group.layers)]
            match first_paged(spec):
                case LatentAttention() as cache:
                    if dtype == torch.float8_e4m3fn:
                        raise UnsupportedModelError(
                            f"{spec.name}: the engine keeps no latents in fp8; use kv_cache_dtype auto"
                        )
                    latents = pool(cache.kv_lora_rank + cache.qk_rope_head_dim)
                    self.layers |= {layer: LatentKV(latents, g) for g, layer in sharers}
                case FullAttention() | SlidingWindow() as cache:
                    heads = tp.share_kv_heads(cache.num_kv_heads)
                    count = heads.stop - heads.start
                    k, v = pool(count, cache.head_dim), pool(count, cache.head_dim_v)
                    self.layers |= {layer: HeadKV(k, v, g, scale) for g, layer in sharers}
                case other:
                    raise AssertionError(f"{other} passed group_layers")

    def add_states(
        self, spec: ModelSpec, groups: tuple[LayerGroup, ...], num_slots: int, dtype: torch.dtype,
        device: torch.device | str,
    ) -> int:  # fmt: skip
        """Give layers with recurrent states their blocks, or slots of their own; bytes of those."""
        blocks = [group for group in groups if isinstance(group.rule, MambaGroup)]
        of_layer = len(self.tensors) // max(len(group.layers) for group in groups)
        for g, group in enumerate(blocks):
            for n, layer in enumerate(group.layers):
                own = self.tensors[n * of_layer : (n + 1) * of_layer]
                self.layers[layer] = StateBlocks(own, _shape(spec.layers[layer], dtype), g)
        if blocks:
            return 0
        states = {i: _shape(caches, dtype) for i, caches in enumerate(spec.layers) if is_state(caches)}
        slots = {layer: StateSlots.of(shape, num_slots, device) for layer, shape in states.items()}
        self.layers.update(slots)
        return sum(layer.num_bytes for layer in slots.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks on this rank."""
        return sum(tensor.nbytes for tensor in self.tensors)
