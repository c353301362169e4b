"""A model type that no reader knows, read from transformers' own class on the meta device (`--reader server`).

Parameters and their shapes are the class's; how ranks share them is its own tensor-parallel plan, which vLLM's
Transformers backend follows. Caches are what the class itself writes for one token: keys and values by layer, in full
or in a window. A class that writes others, or none, is refused.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.models.families import rope
from kvplan.models.families.blocks import VOCAB_PAD, SpecDraft
from kvplan.models.families.config import Config
from kvplan.models.families.dense import heads_of
from kvplan.models.families.moe import TOP_K_KEYS
from kvplan.models.spec import (
    ChunkedAttention,
    FullAttention,
    Group,
    LayerCache,
    Part,
    Place,
    Sharing,
    SlidingWindow,
    Weight,
)

LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)$")
REFUSED: Final = (  # what servers keep otherwise than transformers' classes do
    ("kv_lora_rank", "servers keep latents where transformers' class keeps keys and values"),
    ("is_encoder_decoder", "--reader server sizes decoders alone"),
)
UNLIKE: Final = (  # keys of configs whose layers are not all alike, or keep states
    "layer_types", "block_types", "linear_num_value_heads", "mamba_d_state", "state_size", "conv_L_cache",
)  # fmt: skip
Shapes = dict[str, tuple[int, ...]]


class Written(NamedTuple):
    """What a class writes of a token in a layer's cache: keys and values as (heads, width), and their window."""

    kind: str
    keys: tuple[int, int]
    values: tuple[int, int]
    window: int | None


class OwnClass(NamedTuple):
    """What a class says of itself: its name and release, its config's values, parameters, plan and caches."""

    name: str
    values: dict[str, Any]
    shapes: Shapes
    plan: dict[str, str]
    caches: list[Written | None]  # empty: it runs no token without values


def read(config: Config, model_type: str) -> SpecDraft:
    """Read a causal language model from transformers' class of its type."""
    for key, what in REFUSED:
        if config.values.get(key):
            raise UnsupportedModelError(f"{config.where}: {key}", what, "add a reader in kvplan/models/families")
    own = asked_of(config, model_type)
    config.values = own.values  # with the class's defaults, by the names that all classes share
    num_layers = config.num_layers()
    layer_caches = list(caches(config, own, num_layers))  # before heads, which a class that keeps states may lack
    heads = heads_of(config)
    layers: list[list[Weight]] = [[] for _ in range(num_layers)]
    other: list[Weight] = []
    num_kv_heads = next((cache.keys[0] for cache in own.caches if cache is not None), heads.num_kv_heads)
    for parameter, shape in own.shapes.items():
        match = LAYER.search(parameter)
        weight = weight_of(parameter, match[2] if match else parameter, shape, own.plan, num_kv_heads)
        if match is None or int(match[1]) >= num_layers:
            other.append(weight)
        else:
            layers[int(match[1])].append(weight)
    context = rope.context_of(config)
    config.notes.append(
        f"model_type {model_type!r} has no reader: parameters and caches are those of {own.name}, shared by ranks as "
        "its tensor-parallel plan says; no server's answer was compared"
    )
    return SpecDraft(
        hidden_size=config.count("hidden_size"),
        num_heads=heads.num_heads,
        vocab_size=config.count("vocab_size"),
        context=context,
        layers=layer_caches,
        layer_weights=[tuple(weights) for weights in layers],
        other_weights=other,
        ropes=rope.tables(config, heads.head_dim, context.positions),
        tied=not any(parameter.startswith("lm_head") for parameter in own.shapes),
        experts_per_token=config.count(*TOP_K_KEYS, default=0, low=0),
        widest_mlp=config.count("intermediate_size", "moe_intermediate_size", default=0),
    )


def asked_of(config: Config, model_type: str) -> OwnClass:
    """What the class of a type says of a config; nothing is allocated."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UsageError(
            "--reader server", f"{error.name} is not installed", "pip install transformers torch"
        ) from error
    label = f"transformers {transformers.__version__}"
    if model_type not in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModelError(
            config.where, f"{label} has no causal language model of type {printable(repr(model_type), 60)}",
            "install the release of transformers that has it",
        )  # fmt: skip
    stated = {key: value for key, value in config.values.items() if key != "model_type" and value is not None}
    failure: Exception | None = None
    with warnings.catch_warnings(), torch.device("meta"), torch.no_grad():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        try:
            own = transformers.AutoConfig.for_model(model_type, **stated)
            # Experts without loops over tokens, which have no values here.
            model = transformers.AutoModelForCausalLM.from_config(own, experts_implementation="batched_mm").eval()
        except Exception as error:  # whatever a class of another project raises for a config that it does not take
            raise not_run(config, f"{label}'s class of type {model_type!r} takes no such config", error) from error
        cache = transformers.DynamicCache(config=own)
        try:
            model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
        except Exception as error:  # where a class reads values, as of the experts chosen for a token
            failure = error
    values = {**own.to_dict(), "model_type": model_type}
    values |= {name: values[key] for name, key in own.attribute_map.items() if key in values}
    shapes = {parameter: tuple(tensor.shape) for parameter, tensor in model.named_parameters()}
    name, layers = f"{label}'s {type(model).__name__}", [written(layer) for layer in cache.layers]
    if failure is not None:
        if any(values.get(key) for key in UNLIKE):
            raise not_run(config, f"{name} runs no token without values", failure) from failure
        layers = []
    return OwnClass(name, values, shapes, dict(model._tp_plan or {}), layers)


def not_run(config: Config, what: str, error: Exception) -> UnsupportedModelError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    remedy = "correct the config, or add a reader in kvplan/models/families"
    return UnsupportedModelError(config.where, f"{what}: {printable(reason, 120)}", remedy)


def written(layer: Any) -> Written | None:
    """What a layer of transformers' cache got of a token, None if nothing."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return None
    own, other = ((int(tensor.shape[1]), int(tensor.shape[3])) for tensor in (keys, values))
    return Written(type(layer).__name__, own, other, getattr(layer, "sliding_window", None))


def style_of(module: str, plan: Mapping[str, str]) -> str:
    """How ranks share a module: by the plan; gate, up and down of a multilayer perceptron without one as others are.

    Source: vLLM 0.33 model_executor/models/transformers/fusers/glu.py.
    """
    style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", module), "")
    if style or (match := re.search(r"mlp\.(?:.*\.)?(gate|up|down)_proj$", module)) is None:
        return style
    return "rowwise" if match[1] == "down" else "colwise"


def weight_of(parameter: str, name: str, shape: tuple[int, ...], plan: Mapping[str, str], kv_heads: int) -> Weight:
    """One parameter: a matrix as (outputs, inputs), with its experts first where it has them; else a vector."""
    module, _, kind = parameter.rpartition(".")
    if kind not in ("weight", "bias"):
        module = parameter
    style = style_of(module, plan)
    *experts, outputs, inputs = shape if len(shape) > 1 else (*shape, 1)
    count = experts[0] if experts else 0
    if module.endswith(("embed_tokens", "lm_head", "wte")) and count == 0:
        head = module.endswith("lm_head")
        return Weight(
            name.removesuffix(".weight"), "lm_head" if head else "embedding", inputs, (Part(outputs),), "outputs",
            pad_rows=VOCAB_PAD, place=Place.LAST if head else Place.FIRST,
        )  # fmt: skip
    group: Group = "experts" if count else "norm" if len(shape) == 1 else "attention" if "attn" in name else "mlp"
    parts: tuple[Part, ...] = (Part(outputs),)
    if style.startswith("packed_colwise") and outputs % 2 == 0:
        parts = (Part(outputs // 2), Part(outputs // 2))
    if re.search(r"\b[kv]_proj$", module) and outputs % kv_heads == 0:
        parts = (Part(kv_heads, outputs // kv_heads, Sharing.KV_HEADS),)
    if style.startswith(("colwise", "packed_colwise")):
        return Weight(name, group, inputs, parts, "outputs", experts=count)
    if style.startswith("rowwise") and len(shape) > 1:
        return Weight(name, group, inputs, parts, "inputs", experts=count)
    return Weight(name, group, inputs, parts, experts=count)


def caches(config: Config, own: OwnClass, num_layers: int) -> Iterator[tuple[LayerCache, ...]]:
    """The cache of each layer, as its class writes it."""
    if not own.caches:
        stated, window = heads_of(config), config.maybe_count("sliding_window")
        keys = stated.num_kv_heads, stated.head_dim, stated.head_dim_v
        config.notes.append(f"{own.name} runs no token without values: its caches are by the config's heads")
        yield from [(SlidingWindow(*keys, window) if window else FullAttention(*keys),)] * num_layers
        return
    kinds = config.per_layer_names("layer_types", num_layers) or [""] * num_layers
    layers = [*own.caches, *[None] * num_layers][:num_layers]
    for index, (kind, layer) in enumerate(zip(kinds, layers, strict=True)):
        match layer:
            case Written("DynamicLayer", (heads, dim), (_, dim_v), _):
                yield (FullAttention(heads, dim, dim_v),)
            case Written("DynamicSlidingWindowLayer", (heads, dim), (_, dim_v), int(size)):
                cache = ChunkedAttention if kind == "chunked_attention" else SlidingWindow
                yield (cache(heads, dim, dim_v, size),)
            case _:
                what = "no keys and values" if layer is None else f"more than keys and values ({layer.kind})"
                raise UnsupportedModelError(
                    f"{config.where}: layer {index}",
                    f"{own.name} keeps {what} of it, which --reader server cannot size",
                    "add a reader in kvplan/models/families",
                )
