"""Placement of weights outside the layers by SGLang's classes: on pipeline stages and on the ranks of a stage.

A spec follows vLLM's classes. Source: the parameters of sglang 0.5.23's own classes (srt/models) on torch's meta
device, stage by stage (tests/facts/stages_sglang.jsonl); its model_runner.py starts pipeline stages only for classes
that pass hidden states on.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache, partial
from typing import Final

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families.blocks import VOCAB_PAD
from kvplan.models.spec import ModelSpec, Part, Place, Weight
from kvplan.servers.plans.plan import Request
from kvplan.servers.releases import Version
from kvplan.servers.sglang.classes import NO_TYPE, TYPES, ModelType, class_of, outer_of, outer_type, type_of
from kvplan.servers.sglang.models import takes_images
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.weights import up

PER_LAYER: Final = "model.embed_tokens_per_layer"

WeightChange = Callable[[Weight], Weight | tuple[Weight, ...]]


def _whole(weight: Weight) -> Weight:
    return replace(weight, split="none")


def _columns(weight: Weight) -> Weight:
    return replace(weight, split="outputs")


def _rows(weight: Weight) -> Weight:
    return replace(weight, split="inputs")


def _biased(weight: Weight) -> Weight:
    return replace(weight, bias=True)


def _table(weight: Weight) -> Weight:
    """A position table that is sharded like a vocabulary, and only on the first stage."""
    return replace(weight, split="outputs", pad_rows=VOCAB_PAD, place=Place.FIRST)


def _with_packed(weight: Weight) -> tuple[Weight, ...]:
    """A second table, of the positions of packed patches."""
    return weight, replace(weight, name="visual.packing_position_embedding", parts=(Part(32768),))


def _narrow(weight: Weight) -> Weight:
    """In the model's dtype, where vLLM has it in float32."""
    return replace(weight, dtype=None)


def _wide(weight: Weight) -> Weight:
    return replace(weight, dtype="float32")


def _index_key(weight: Weight, dtype: str | None = None) -> tuple[Weight, ...]:
    """An index's key projection apart from its heads' weights, and quantized, where vLLM has one layer."""
    key = replace(weight, name="self_attn.indexer.wk", parts=weight.parts[:1], quantizable=True)
    return key, replace(weight, name="self_attn.indexer.weights_proj", parts=weight.parts[1:], dtype=dtype)


def _wide_bias(weight: Weight) -> tuple[Weight, ...]:
    """Experts with biases in float32."""
    bias = replace(weight, name=f"{weight.name}_bias", inputs=1, quantizable=False, bias=False, dtype="float32")
    return replace(weight, bias=False), replace(bias, split=weight.split if weight.split == "outputs" else "none")


EIGHT: Final = 8  # inner widths are padded to multiples of this


def _padded_outputs(weight: Weight) -> Weight:
    return replace(weight, parts=tuple(replace(part, units=up(part.units, EIGHT)) for part in weight.parts))


def _padded_inputs(weight: Weight) -> Weight:
    return replace(weight, inputs=up(weight.inputs, EIGHT))


POSITIONS: Final[Mapping[str, WeightChange]] = {"visual.pos_embed": _table}
PROJECTOR: Final[Mapping[str, WeightChange]] = {"multi_modal_projector.": _whole}
MERGER: Final[Mapping[str, WeightChange]] = {
    "visual.merger.proj": _whole, "visual.merger.post_projection_norm": _wide,
}  # fmt: skip
# Weights that a class keeps in another dtype or shape than vLLM's, by model_type and name.
TEXTS: Final[Mapping[str, Mapping[str, WeightChange]]] = {
    "afmoe": {"mlp.gate": _narrow},
    "deepseek_v32": {"self_attn.indexer.wk_weights_proj": _index_key},
    "ernie4_5_moe": {"mlp.gate": _narrow, "mlp.gate.e_score_correction_bias": _narrow},
    "glm_moe_dsa": {"self_attn.indexer.wk_weights_proj": _index_key},
    "glm5_next_text": {"self_attn.indexer.wk_weights_proj": partial(_index_key, dtype="float32")},
    "gemma3n_text": {"model.altup_*": _columns, "model.per_layer_model_projection": _columns},
    "kimi_linear": {"mlp.gate.e_score_correction_bias": _narrow, "block_sparse_moe.experts.*": _biased},
    "minimax_m3": {"mlp.gate": _narrow},
    "gpt_oss": {"mlp.experts.w13": _wide_bias, "mlp.experts.w2": _wide_bias},
    "laguna": {"mlp.gate": _wide},
}
HIDDEN: Final = -1
# Layers on every rank that pooling classes have in place of an output head: their outputs (0: the config's labels).
SCORES: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys((
        "EmbeddingGemmaModel", "Lfm2BidirectionalModel", "LlamaEmbeddingModel", "MistralModel", "Qwen3Model",
        "TransformersEmbeddingModel", "TransformersForSequenceClassification", "TransformersMoEEmbeddingModel",
        "TransformersMoEForSequenceClassification"
    ), ()),
    **dict.fromkeys((
        "Gemma2ForSequenceClassification", "LlamaForSequenceClassification", "Qwen2ForSequenceClassification",
        "Qwen3ForSequenceClassification"
    ), (0,)),
    "InternLM2ForRewardModel": (1,),
    "LlamaForSequenceClassificationWithNormal_Weights": (0, HIDDEN, HIDDEN),
    **dict.fromkeys(("Qwen2ForRewardModel", "Qwen3ForRewardModel"), (HIDDEN, 1)),
}  # fmt: skip
BIASED: Final = ("Qwen2", "Qwen3")
# Parts of a tower that are sharded differently than in vLLM, by name prefix.
TOWERS: Final[Mapping[str, Mapping[str, WeightChange]]] = {
    "gemma3": {"vision_tower.position_embedding": _table},
    "gemma4": {
        "vision_tower.layers.self_attn.qkv_proj": _columns, "vision_tower.layers.self_attn.o_proj": _rows,
        "vision_tower.layers.mlp.gate_up_proj": _columns, "vision_tower.layers.mlp.down_proj": _rows,
        "audio_tower.subsample.input_proj_linear": _rows, "audio_tower.layers.ffw.ffw_layer_1": _columns,
        "audio_tower.layers.ffw.ffw_layer_2": _rows, "audio_tower.layers.attn.qkv": _columns,
        "audio_tower.layers.attn.relative_k_proj": _columns, "audio_tower.layers.attn.post": _rows,
        "audio_tower.layers.lconv1d.linear_start": _columns, "audio_tower.layers.lconv1d.depthwise_conv1d": _columns,
        "audio_tower.layers.lconv1d.conv_norm": _columns, "audio_tower.layers.lconv1d.linear_end": _rows,
        "audio_tower.output_proj": _rows,
    },
    "dots_ocr": {"vision_tower.layers.mlp.": _whole, "vision_tower.merger.": _whole},
    "kimi_k25": {"vision_tower.layers.mlp.": _whole},
    "kimi_k3": {"vision_tower.encoder.": _whole},
    "lfm2_vl": {"mlp.1": _columns, "mlp.2": _rows},
    "muse_glimmer": {
        "vision_tower.layers.mlp.up": _columns, "vision_tower.layers.mlp.down": _rows,
        "vision_adapter.c_fc": _columns, "vision_adapter.c_proj": _rows,
    },
    **dict.fromkeys(("lightonocr", "llama4", "mistral3"), PROJECTOR),
    "mllama": {"vision_model.patch_embedding": _columns, "vision_tower.layers.attn.": _biased},
    "paddleocr_vl": {"vision_tower.position_embedding": _with_packed},
    "qwen2_5_vl": {"vision_tower.layers.mlp.up": _padded_outputs, "vision_tower.layers.mlp.down": _padded_inputs},
    "voxtral": {"audio_tower.embed_positions": _narrow},
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm5_next", "glm_ocr"), MERGER),
    **dict.fromkeys((
        "cosmos3_omni", "interns2_mobius", "intern_s2_preview", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe",
        "qwen3_vl", "qwen3_vl_moe",
    ), POSITIONS),
}  # fmt: skip


def check(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject pipeline stages that SGLang does not start, and those of classes that were not compared."""
    stages, kind, row = args.pipeline_parallel_size, outer_type(spec), outer_of(spec)
    if stages == 1 or not release.has("own_stages"):
        return
    flag = f"--pp-size {stages}"
    if not class_of(spec).stages:
        raise UnsupportedModelError(flag, f"SGLang's class {spec.architecture} has no pipeline stages", "use --tp")
    if any(weight.name == PER_LAYER for weight in spec.other_weights):
        raise UnsupportedModelError(flag, f"SGLang refuses them for inputs of each layer ({spec.name})", "use --tp")
    if not row.stages:
        problem = f"what each stage of SGLang's class of {kind} holds is not compared with its own code"
        raise UnsupportedModelError(flag, problem, "use --tp")
    if row.everywhere == "lm_head" and spec.tied:
        problem = f"SGLang's class of {kind} has no output head on its last stage where it is the embedding's table"
        raise UnsupportedModelError(flag, problem, "use --tp")


def spread(request: Request) -> Request:
    """The request with the model's weights placed as in SGLang's class."""
    if not request.release.has("own_stages"):
        return request
    args = request.args
    sees = takes_images(request.spec, args.enable_multimodal)
    spec = _spread(request.spec, args.pipeline_parallel_size, sees)
    if args.enable_dp_attention and outer_of(spec).embedding == "whole by rank":
        spec = _whole_embedding(spec)
    draft = request.draft
    if draft is not None and draft.head == "mtp":
        draft = replace(draft, other_weights=tuple(map(_of_head, draft.other_weights)))
    return replace(request, spec=spec, draft=draft)


FUSION: Final = "fc"  # of the heads of Qwen3-Next and Qwen3.5: a plain linear layer on every rank


def _of_head(weight: Weight) -> Weight:
    return replace(weight, split="none", quantizable=False) if weight.name == FUSION else weight


@lru_cache(maxsize=64)
def _whole_embedding(spec: ModelSpec) -> ModelSpec:
    whole = tuple(_whole(weight) if weight.group == "embedding" else weight for weight in spec.other_weights)
    return replace(spec, other_weights=whole)


@lru_cache(maxsize=256)
def _spread(spec: ModelSpec, stages: int, sees: bool) -> ModelSpec:
    kind, row = outer_type(spec), outer_of(spec)
    changes = TEXTS.get(spec.model_type, {})
    loads = not class_of(spec).text_only and (sees or row.tower_place != "on request")
    changed: dict[int, tuple[Weight, ...]] = {}  # the layers of a tower are one object each, and must stay so
    for weight in spec.other_weights:
        if id(weight) not in changed and weight.serves:
            changed[id(weight)] = _of_tower(weight, kind, loads=loads)
        elif id(weight) not in changed:
            placed = _of_text(weight, row, spec.tied, stages)
            changed[id(weight)] = tuple(part for own in placed for part in _parts(changes, own))
    others = tuple(part for weight in spec.other_weights for part in changed[id(weight)])
    if spec.architecture in SCORES:
        bodies = (weight for weight in others if weight.group != "lm_head" and weight.name != "lm_head")
        others = (*bodies, *_scores(spec))
    return replace(spec, other_weights=others, layer_weights=_layers(spec))


def _scores(spec: ModelSpec) -> tuple[Weight, ...]:
    from kvplan.models.families.config import Config
    from kvplan.models.families.encoders import labels  # only classifiers need it

    sizes = {0: labels(Config(spec.config, spec.source)), HIDDEN: spec.hidden_size}
    biased = spec.architecture.startswith(BIASED)
    return tuple(
        Weight("score", "lm_head", spec.hidden_size, (Part(sizes.get(count, count)),), bias=biased, place=Place.LAST)
        for count in SCORES[spec.architecture]
    )


def _layers(spec: ModelSpec) -> tuple[tuple[Weight, ...], ...]:
    """The weights of each layer; equal layers stay one object."""
    changes = TEXTS.get(spec.model_type)
    if spec.model_type == "gpt_oss" and spec.quantization is not None:  # MXFP4's method has them in the model's dtype
        changes = None
    if changes is None and not type_of(spec).shares_caches:
        return spec.layer_weights
    seen: dict[int, tuple[Weight, ...]] = {}
    projections: dict[object, tuple[Weight, ...]] = {}  # of the last layer with keys of its own, by its queries
    layers = []
    for weights in spec.layer_weights:
        if id(weights) not in seen:
            seen[id(weights)] = tuple(part for own in weights for part in _parts(changes or {}, own))
            for weight in weights:
                if weight.name in KEYS:
                    projections[weight.parts[0]] = tuple(key for key in weights if key.name in KEYS)
                elif weight.name == "self_attn.q_proj" and weight.parts[0] in projections:  # it projects keys, too
                    rest = tuple(other for other in weights if other is not weight)
                    seen[id(weights)] = projections[weight.parts[0]] + rest
        layers.append(seen[id(weights)])
    return tuple(layers)


KEYS: Final = ("self_attn.qkv_proj", "self_attn.qk_proj", "self_attn.v_slice", "self_attn.k_norm")


def _parts(changes: Mapping[str, WeightChange], weight: Weight) -> tuple[Weight, ...]:
    change = next((change for name, change in changes.items() if fnmatchcase(weight.name, name)), None)
    parts = weight if change is None else change(weight)
    return parts if isinstance(parts, tuple) else (parts,)


def _of_tower(weight: Weight, kind: str, *, loads: bool) -> tuple[Weight, ...]:
    where = TYPES.get(kind, NO_TYPE).tower_place
    if not loads:
        return (replace(weight, is_loaded=False),)
    place = Place.FIRST if where == "first" else Place.EVERY
    weight = replace(weight, place=place, is_loaded=weight.is_loaded or where == "whole")
    if where == "whole":
        return (_whole(weight),)
    return _parts({f"{name}*": change for name, change in TOWERS.get(kind, {}).items()}, weight)


def _of_text(weight: Weight, row: ModelType, tied: bool, stages: int) -> tuple[Weight, ...]:
    """The language model's weights outside its layers, on the stages that hold them."""
    if row.everywhere in ("all", weight.group):
        return (replace(weight, place=Place.EVERY),)
    match weight.group:
        case "embedding" if weight.name == PER_LAYER:
            return (_whole(weight),)
        case "lm_head" | "embedding" if row.head == "wide" and (tied or weight.group == "lm_head"):
            return (replace(weight, dtype="float32"),)
        case "embedding" if row.embedding == "whole":
            table = replace(_whole(weight), place=Place.FIRST)
            return (table, replace(weight, place=Place.LAST)) if tied and stages > 1 else (table,)
        case "embedding" if row.head == "twice" and tied:
            return (weight, replace(weight, name="lm_head"))
        case "lm_head" if row.head == "doubled":
            return (weight, replace(weight, name="language_model.lm_head"))
        case "embedding":
            return (replace(weight, place=Place.FIRST_AND_LAST if tied else Place.FIRST),)
        case _:
            return (replace(weight, place=Place.LAST),)
