"""Multi-token prediction: the layers after a model's own that draft for it, as a separate model.

A head's layers are like one of its model's; in addition, a fusion combines the hidden state with the next token's
embedding. Source: vLLM 0.33 models/*_mtp.py; equal to its parameters for every compared head
(tests/facts/speculation.jsonl).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.records import dataclass
from kvplan.models.families.blocks import column, gated_mlp, norm, row, table, whole
from kvplan.models.hf_config import ASSISTANTS
from kvplan.models.spec import FullAttention, LayerCache, ModelSpec, SlidingWindow, SparseIndexer, Weight

Layer = tuple[tuple[Weight, ...], tuple[LayerCache, ...]]


@dataclass(frozen=True, slots=True)
class Head:
    """Structure of a family's head.

    counts   config keys for its number of layers; `most`: the most of them that a server loads
    default  their number if none of the keys is in the config; None: then there are none
    norms    in every layer; outer: those that exist once, outside the layers
    fusion   what combines hidden state and embedding: its name, and whether it is sharded
    numbered whether its layer numbers follow the model's in the checkpoint's names (else they are `mtp.layers.0`)
    """

    counts: tuple[str, ...]
    norms: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()
    fusion: tuple[str, Literal["whole", "split"]] = ("eh_proj", "whole")
    numbered: bool = True
    default: int | None = None
    most: int | None = None


NEXTN = ("num_nextn_predict_layers",)
DEEPSEEK = Head(NEXTN, norms=("enorm", "hnorm", "shared_head.norm"))
QWEN = Head(
    ("mtp_num_hidden_layers", *NEXTN), outer=("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"),
    fusion=("fc", "split"), numbered=False, default=1,
)  # fmt: skip
DEEPSEEK_V4 = Head(NEXTN, norms=DEEPSEEK.norms, fusion=("e_proj", "whole"))
GLM5_NEXT = Head(NEXTN, norms=DEEPSEEK.norms, fusion=("eh_proj", "whole"), most=1)  # without its own output head
MIMO_NORMS = ("token_layernorm", "hidden_layernorm", "final_layernorm")
HEADS: Mapping[str, Head] = {
    **dict.fromkeys(
        ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", "glm_ocr_text"), DEEPSEEK
    ),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), QWEN),
    "deepseek_v4": DEEPSEEK_V4,
    **dict.fromkeys(
        ("minimax_m3", "minimax_m3_vl"),
        Head(("num_mtp_modules",), norms=("enorm", "hnorm", "final_layernorm"), numbered=False, default=1),
    ),
    "glm5_next_text": GLM5_NEXT,
    "mimo": Head(NEXTN, norms=MIMO_NORMS, fusion=("input_proj", "whole")),
    "mimo_v2_flash": Head((), norms=("enorm", "hnorm", "final_layernorm"), numbered=False, default=1, most=1),
    "nemotron_h": Head(NEXTN, norms=("enorm", "hnorm", "final_layernorm"), fusion=("eh_proj", "split"), numbered=False),
}
SUFFIX = " (MTP head)"  # of its name
NO_TABLES = ("nemotron_h",)  # their head is built without embedding and output head: the model's are inserted


def text_values(spec: ModelSpec) -> Mapping[str, Any]:
    """Config keys of the language model, with the outer ones as fallback."""
    inner = spec.config.get("text_config")
    return {**spec.config, **inner} if isinstance(inner, dict) else spec.config


def is_assistant(spec: ModelSpec) -> bool:
    return spec.config.get("model_type") in ASSISTANTS


def num_layers(spec: ModelSpec) -> int:
    """Number of multi-token prediction layers that a server loads, or 0 if the model has none that it supports.

    Gemma 4's assistants run all of theirs for one token.
    """
    if is_assistant(spec):
        return 1
    head = HEADS.get(spec.model_type)
    if head is None:
        return 0
    values = text_values(spec)
    stated = next((values[key] for key in head.counts if isinstance(values.get(key), int)), head.default)
    return min(stated or 0, head.most or stated or 0)


@lru_cache(maxsize=256)
def mtp_head(spec: ModelSpec) -> ModelSpec:
    """The head as a model; the model's own weights that it uses are marked `shared`.

    Raise UnsupportedModelError for a model that has none, by its config, or whose head is not modeled.
    """
    if is_assistant(spec):
        return assistant_head(spec)
    count = num_layers(spec)
    if not count:
        why = "its config names no layers of multi-token prediction that a server loads"
        raise UnsupportedModelError(spec.name, why, "remove the method mtp, or name a draft model")
    head = HEADS[spec.model_type]
    layers = [layer for index in range(count) for layer in step_layers(spec, head, index)]
    if not head.numbered and keeps_plain(spec):
        layers = [
            (tuple(replace(weight, quantizable=False) for weight in weights), caches) for weights, caches in layers
        ]
    return replace(
        spec,
        name=spec.name + SUFFIX,
        layers=tuple(caches for _, caches in layers),
        layer_weights=tuple(weights for weights, _ in layers),
        other_weights=tables(spec, head),
        first_layer=spec.num_layers if head.numbered else 0,
        head="mtp",
        multimodal=False,
        item_tokens=0,
        notes=(),
    )


def assistant_head(spec: ModelSpec) -> ModelSpec:
    """Gemma 4's assistant: layers that read its target's caches, between projections from and to the target's width.

    It keeps its own table as the output head. Source: vLLM 0.33 models/gemma4_mtp.py and
    spec_decode/gemma4/speculator.py (_setup_gemma4_kv_sharing).
    """
    hidden, width = spec.hidden_size, spec.config.get("backbone_hidden_size") or spec.hidden_size
    more = [column("pre_projection", 2 * width, hidden, "mlp"), row("post_projection", hidden, width, "mlp")]
    if spec.config.get("use_ordered_embeddings"):
        more.append(whole("masked_embedding.centroids", hidden, spec.config.get("num_centroids", 2048), "lm_head"))
    return replace(
        spec, name=spec.name + SUFFIX, layers=((),) * spec.num_layers, other_weights=(*spec.other_weights, *more),
        head="mtp", multimodal=False, item_tokens=0, notes=(),
    )  # fmt: skip


def tables(spec: ModelSpec, head: Head) -> tuple[Weight, ...]:
    """Weights outside the head's layers: the tables it shares, and for some its norms and the fusion."""
    hidden = spec.hidden_size
    own: tuple[Weight, ...] = tuple(norm(f"model.{name}", hidden) for name in head.outer)
    if head.outer:
        plain = (spec.quantization is not None and spec.quantization.method == "modelopt") or keeps_plain(spec)
        own += tuple(replace(weight, quantizable=not plain) for weight in fusion(spec, head))
    if spec.model_type in NO_TABLES:
        return own
    shared = [table("model.embed_tokens", spec.vocab_size, hidden)]
    if head not in (DEEPSEEK, DEEPSEEK_V4, GLM5_NEXT):
        shared.append(table("lm_head", spec.vocab_size, hidden, group="lm_head"))
    return own + tuple(replace(weight, shared=True) for weight in shared)


def fusion(spec: ModelSpec, head: Head) -> tuple[Weight, ...]:
    name, split = head.fusion
    hidden = spec.hidden_size
    if head is DEEPSEEK_V4:
        return tuple(whole(each, hidden, hidden, "mlp") for each in ("e_proj", "h_proj")) + hyper_head(spec)
    if split == "split":
        return (column(name, 2 * hidden, hidden, "mlp"),)
    return (whole(name, 2 * hidden, hidden, "mlp", quantizable=False),)


def hyper_head(spec: ModelSpec) -> tuple[Weight, ...]:
    """Weights that merge DeepSeek-V4's residual streams, in the head as in its model."""
    return tuple(weight for weight in spec.other_weights if weight.name.startswith("model.hc_head"))


def step_layers(spec: ModelSpec, head: Head, index: int) -> list[Layer]:
    """Layers of one prediction step; most families have one."""
    hidden = spec.hidden_size
    parts = template(spec)
    extra = tuple(norm(name, hidden) for name in head.norms)
    if not head.outer:
        extra += fusion(spec, head)
    if head in (DEEPSEEK, DEEPSEEK_V4):  # every layer has an output head, which is replaced by the model's
        own = table("shared_head.head", spec.vocab_size, hidden, group="lm_head")
        extra += (replace(own, shared=True),)
    first, *rest = parts
    own_weights = first[0]
    if head is GLM5_NEXT:  # one residual stream
        own_weights = tuple(weight for weight in own_weights if not weight.name.startswith("hc_"))
    return [(own_weights + extra, first[1]), *rest]


def template(spec: ModelSpec) -> list[Layer]:
    """The model's own layers that those of a step are like."""

    def own(index: int) -> Layer:
        return spec.layer_weights[index], spec.layers[index]

    match spec.model_type:
        case "nemotron_h":
            return [own(nemotron_like(spec, kind)) for kind in nemotron_step(spec)]
        case "mimo_v2_flash":  # a windowed layer's attention followed by the dense layers' MLP
            windowed = next(i for i, caches in enumerate(spec.layers) if isinstance(caches[0], SlidingWindow))
            inner = text_values(spec)["intermediate_size"]
            attention = tuple(
                replace(weight, quantizable=weight.quantizable and not weight.name.endswith("o_proj"))
                for weight in spec.layer_weights[windowed]
                if weight.group in ("attention", "norm")
            )
            return [(attention + gated_mlp(spec.hidden_size, inner), spec.layers[windowed])]
        case "deepseek_v4":  # a layer with only its window
            plain = next((i for i, caches in enumerate(spec.layers) if len(caches) == 1), None)
            if plain is None:
                raise UnsupportedModelError(spec.name, "its head's caches are not modeled", "remove the method mtp")
            return [joined(spec, plain)]
    indexed = [i for i, caches in enumerate(spec.layers) if any(isinstance(c, SparseIndexer) for c in caches)]
    if not indexed:
        return [own(spec.num_layers - 1)]
    return [joined(spec, max(indexed))]


FEED_FORWARD = ("mlp", "experts", "shared_expert", "router")


NEMOTRON_KINDS = {"*": "attention", "E": "moe", "full_attention": "attention", "attention": "attention", "moe": "moe"}


def nemotron_step(spec: ModelSpec) -> list[str]:
    """Kinds of a step's layers, from either of the config keys in use."""
    values = text_values(spec)
    stated = values.get("mtp_hybrid_override_pattern") or values.get("mtp_layers_block_type")
    kinds = [NEMOTRON_KINDS.get(str(each), "") for each in stated] if isinstance(stated, str | list) else []
    if not kinds or "" in kinds:
        why = f"the layers of its head are {str(stated)[:40]!r}, which is not modeled"
        raise UnsupportedModelError(spec.name, why, "remove the method mtp")
    return kinds


def nemotron_like(spec: ModelSpec, kind: str) -> int:
    """Index of the first layer of a kind."""
    for index, (weights, caches) in enumerate(zip(spec.layer_weights, spec.layers, strict=True)):
        is_attention = any(isinstance(cache, FullAttention) for cache in caches)
        if is_attention if kind == "attention" else any(weight.experts for weight in weights):
            return index
    raise UnsupportedModelError(spec.name, f"no layer of its own is of {kind}, as its head's are", "not modeled")


def joined(spec: ModelSpec, index: int) -> Layer:
    """One layer's attention combined with the last layer's feed-forward part."""
    feed_forward = tuple(w for w in spec.layer_weights[-1] if w.group in FEED_FORWARD)
    others = tuple(w for w in spec.layer_weights[index] if w.group not in FEED_FORWARD)
    return others + feed_forward, spec.layers[index]


def keeps_plain(spec: ModelSpec) -> bool:
    """True if the checkpoint's lists exclude the whole head from quantization (`mtp*`), or name all else."""
    if spec.quantization is None:
        return False
    if spec.quantization.mixed and not any("mtp" in name for name in spec.quantization.names):
        return True
    plain_names = [name for name, scheme in spec.quantization.names.items() if scheme is None]
    plain_names += [pattern for pattern, scheme in spec.quantization.patterns if scheme is None]
    return any("mtp" in name for name in plain_names)
