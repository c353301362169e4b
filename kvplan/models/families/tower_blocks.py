"""Weights of vision and audio towers, as loaded by a server.

Published quantized checkpoints leave towers in 16 bits; where a config does not, `towers.QUANTIZED` has the names.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from kvplan.models.families.config import MAX_LAYERS, Config
from kvplan.models.spec import Part, Weight

Split = Literal["outputs", "inputs", "none"]
PROJECTOR = "multi_modal_projector"


def with_defaults(config: Config, **values: object) -> Config:
    stated = {key: value for key, value in config.values.items() if value is not None}
    return Config({**values, **stated}, config.where, config.notes)


def linear(
    name: str, inputs: int, outputs: int | tuple[Part, ...], split: Split = "none", *, bias: bool = False
) -> Weight:
    """A linear layer or a convolution (its `inputs` are input channels x kernel positions)."""
    parts = (Part(outputs),) if isinstance(outputs, int) else outputs
    return Weight(name, "vision_audio", inputs, parts, split, bias)


def column(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Weight:
    return linear(name, inputs, outputs, "outputs", bias=bias)


def row(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Weight:
    return linear(name, inputs, outputs, "inputs", bias=bias)


def vector(name: str, size: int, *, bias: bool = False) -> Weight:
    """A norm, a scale or a gate: replicated on every rank."""
    return linear(name, 1, size, bias=bias)


def linears(name: str, *shapes: tuple[int, int], bias: bool = False) -> tuple[Weight, ...]:
    """Linear layers of a module, each of (inputs, outputs), on every rank."""
    return tuple(linear(name, inputs, outputs, bias=bias) for inputs, outputs in shapes)


def layer_norm(name: str, size: int) -> Weight:
    return vector(name, size, bias=True)


def not_held(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Mark layers as present in the checkpoint but not loaded by a server."""
    return tuple(replace(weight, is_loaded=False) for weight in weights)


def whole(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """The weights on every rank."""
    return tuple(replace(weight, split="none") for weight in weights)


def block(
    config: Config, hidden: int, heads: int, inner: int, *, attention_bias: bool = True, mlp_bias: bool = True,
    norm_bias: bool = True, gated: bool = False,
) -> tuple[Weight, ...]:  # fmt: skip
    """One pre-norm transformer layer, sharded like the language model's: fused QKV, MLP, two norms."""
    head = Part(check_heads(config, hidden, heads), hidden // heads)
    name, up = "vision_tower.layers", Part(inner)
    return (
        linear(f"{name}.attn.qkv", hidden, (head, head, head), "outputs", bias=attention_bias),
        row(f"{name}.attn.proj", hidden, hidden, bias=attention_bias),
        linear(f"{name}.mlp.up", hidden, (up, up) if gated else (up,), "outputs", bias=mlp_bias),
        row(f"{name}.mlp.down", inner, hidden, bias=mlp_bias),
        vector(f"{name}.norm1", hidden, bias=norm_bias),
        vector(f"{name}.norm2", hidden, bias=norm_bias),
    )


def check_heads(config: Config, hidden: int, heads: int) -> int:
    if hidden % heads:
        raise config.fail("num_attention_heads", f"does not divide the tower's hidden_size ({heads}, {hidden})")
    return heads


def depth_of(config: Config, *keys: str, default: int) -> int:
    """Number of layers of a tower."""
    return config.count(*keys, default=default, high=MAX_LAYERS)


def patches(config: Config, image_default: int, patch: int) -> int:
    """Patches of one image of the position table's size."""
    return (config.count("image_size", default=image_default) // patch) ** 2


def text_hidden(outer: Config, default: int | None = None) -> int:
    """The language model's width, which is a projector's output width."""
    for key in ("text_config", "llm_config", "language_config"):
        if "hidden_size" in outer.sub(key):
            return outer.sub(key).count("hidden_size")
    return outer.count("hidden_size") if default is None else outer.count("hidden_size", default=default)


def whole_projector(inputs: int, middle: int, out: int, *, bias: bool = True) -> tuple[Weight, ...]:
    """Two layers, replicated on every rank."""
    return (
        linear(f"{PROJECTOR}.linear_1", inputs, middle, bias=bias),
        linear(f"{PROJECTOR}.linear_2", middle, out, bias=bias),
    )
