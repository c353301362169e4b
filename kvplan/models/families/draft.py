"""Result of a family reader; kvplan.models.hf_config adds the name, dtype and quantization."""

from dataclasses import dataclass

from kvplan.models.spec import LayerCache, Rope, Weight


@dataclass(slots=True)
class SpecDraft:
    """A model's facts from its family reader; see kvplan.models.spec.ModelSpec for the fields."""

    hidden_size: int
    num_heads: int
    vocab_size: int
    max_model_len: int
    context_limit: int
    layers: list[tuple[LayerCache, ...]]
    layer_weights: list[tuple[Weight, ...]]
    other_weights: list[Weight]
    ropes: tuple[Rope, ...] = ()
    tied: bool = False
    experts_per_token: int = 0
    widest_mlp: int = 0
    multimodal: bool = False
    item_tokens: int = 0
