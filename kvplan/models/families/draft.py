"""Result of a family reader; kvplan.models.hf_config adds the name, dtype and quantization."""

from dataclasses import dataclass

from kvplan.models.families.rope import Context
from kvplan.models.spec import LayerCache, Rope, Weight


@dataclass(slots=True)
class SpecDraft:
    """A model's facts from its family reader; see kvplan.models.spec.ModelSpec for the fields."""

    hidden_size: int
    num_heads: int
    vocab_size: int
    context: Context
    layers: list[tuple[LayerCache, ...]]
    layer_weights: list[tuple[Weight, ...]]
    other_weights: list[Weight]
    ropes: tuple[Rope, ...] = ()
    tied: bool = False
    experts_per_token: int = 0
    widest_mlp: int = 0
    multimodal: bool = False
    item_tokens: int = 0
