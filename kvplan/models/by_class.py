"""A model type that no reader knows, read from transformers' own class on the meta device (`--reader server`).

Parameters and their shapes are the class's; how ranks share them is its own tensor-parallel plan, which vLLM's
Transformers backend follows. Caches are those of plain attention; a class with latents or states is refused.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Final

from kvplan.core.errors import KvplanError, UnsupportedModelError, UsageError
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
NO_PLAIN_CACHE: Final = ("kv_lora_rank", "linear_num_value_heads", "mamba_d_state", "state_size", "conv_L_cache")
Shapes = dict[str, tuple[int, ...]]


def read(config: Config, model_type: str) -> SpecDraft:
    """Read a causal language model from transformers' class of its type."""
    name, shapes, plan = asked_of(config, model_type)
    num_layers, heads = config.num_layers(), heads_of(config)
    layers: list[list[Weight]] = [[] for _ in range(num_layers)]
    other: list[Weight] = []
    for parameter, shape in shapes.items():
        match = LAYER.search(parameter)
        weight = weight_of(parameter, match[2] if match else parameter, shape, plan, heads.num_kv_heads)
        if match is None or int(match[1]) >= num_layers:
            other.append(weight)
        else:
            layers[int(match[1])].append(weight)
    context = rope.context_of(config)
    config.notes.append(
        f"model_type {model_type!r} has no reader: parameters are those of {name}, shared by ranks as its "
        "tensor-parallel plan says; no server's answer was compared"
    )
    return SpecDraft(
        hidden_size=config.count("hidden_size"),
        num_heads=heads.num_heads,
        vocab_size=config.count("vocab_size"),
        context=context,
        layers=list(caches(config, num_layers)),
        layer_weights=[tuple(weights) for weights in layers],
        other_weights=other,
        ropes=rope.tables(config, heads.head_dim, context.positions),
        tied=not any(parameter.startswith("lm_head") for parameter in shapes),
        experts_per_token=config.count(*TOP_K_KEYS, default=0, low=0),
        widest_mlp=config.count("intermediate_size", "moe_intermediate_size", default=0),
    )


def asked_of(config: Config, model_type: str) -> tuple[str, Shapes, dict[str, str]]:
    """(the class and its release, shapes of its parameters, its plan); nothing is allocated."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UsageError(
            "--reader server", f"{error.name} is not installed", "pip install transformers torch"
        ) from error
    values = {key: value for key, value in config.values.items() if key != "model_type" and value is not None}
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            transformers.logging.set_verbosity_error()
            own = transformers.AutoConfig.for_model(model_type, **values)
            model = transformers.AutoModelForCausalLM.from_config(own)
    except KvplanError:
        raise
    except Exception as error:  # whatever a class of another project raises for a config that it does not take
        raise UnsupportedModelError(
            config.where,
            f"transformers {transformers.__version__} makes no model of type {printable(repr(model_type), 60)}: "
            f"{printable(str(error).splitlines()[0] if str(error) else type(error).__name__, 120)}",
            "install the release of transformers that has it",
        ) from error
    shapes = {parameter: tuple(tensor.shape) for parameter, tensor in model.named_parameters()}
    return f"transformers {transformers.__version__}'s {type(model).__name__}", shapes, dict(model._tp_plan or {})


def style_of(module: str, plan: Mapping[str, str]) -> str:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", module), "")


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


def caches(config: Config, num_layers: int) -> Iterator[tuple[LayerCache, ...]]:
    """The cache of each layer; a class that keeps anything but keys and values is refused by the key that says so."""
    for key in NO_PLAIN_CACHE:
        if config.values.get(key):
            raise UnsupportedModelError(
                f"{config.where}: {key}", "its layers keep more than keys and values, which kvplan cannot read",
                "add a reader in kvplan/models/families",
            )  # fmt: skip
    heads, window = heads_of(config), config.maybe_count("sliding_window")
    keys = heads.num_kv_heads, heads.head_dim, heads.head_dim_v
    default = "sliding_attention" if window and config.flag("use_sliding_window", True) else "full_attention"
    for kind in config.per_layer_names("layer_types", num_layers) or [default] * num_layers:
        match kind:
            case "full_attention":
                yield (FullAttention(*keys),)
            case "sliding_attention" if window:
                yield (SlidingWindow(*keys, window),)
            case "chunked_attention":
                yield (ChunkedAttention(*keys, config.count("attention_chunk_size")),)
            case _:
                raise config.fail("layer_types", f"{kind!r:.60} is not a layer that --reader server can size")
