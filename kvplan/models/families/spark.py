"""The DSpark head contained in a DeepSeek-V4 checkpoint, as a separate model.

Its stages are like its model's layers with only a window; in addition, a projection reads hidden states of some of the
model's layers, and there are heads for token transitions and for confidence. Embedding and output head are the model's.
V4.1's has experts of its own number, and neither a merge of the streams nor a copy of the stages' projections.
Source: vLLM 0.33 models/deepseek_v4/nvidia/dspark.py and deepseek_v41's; equal to their parameters
(tests/facts/speculation.jsonl and deepseek_v41.jsonl).
"""

from dataclasses import replace
from functools import lru_cache
from typing import Final

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families.blocks import norm, table, whole
from kvplan.models.families.mtp import hyper_head, joined, text_values
from kvplan.models.spec import ModelSpec, Part, Weight

STAGES: Final = 3  # if the config does not say how many
RANK, LAYERS, EXPERTS = "dspark_markov_rank", "dspark_target_layer_ids", "dspark_n_routed_experts"
TYPES: Final = ("deepseek_v4", "deepseek_v41_text")
SUFFIX: Final = " (DSpark head)"  # of its name


def has_spark(spec: ModelSpec) -> bool:
    """True if the checkpoint includes such a head, by its config."""
    values = text_values(spec)
    return spec.model_type in TYPES and isinstance(values.get(RANK), int) and bool(values.get(LAYERS))


@lru_cache(maxsize=64)
def spark_head(spec: ModelSpec) -> ModelSpec:
    """The head as loaded with its model; the model's own weights that it uses are marked `shared`.

    Raise UnsupportedModelError for a model in which no layer has only a window.
    """
    plain = next((index for index, caches in enumerate(spec.layers) if len(caches) == 1), None)
    if plain is None:
        raise UnsupportedModelError(spec.name, "its head's caches are not modeled", "leave the method dspark out")
    values, hidden = text_values(spec), spec.hidden_size
    stages = values.get("n_mtp_layers") or STAGES
    if spec.is_later_v4:
        stages = values.get("n_mtp_layers") or values.get("num_nextn_predict_layers") or STAGES
    weights, caches = joined(spec, plain)
    if count := values.get(EXPERTS):
        weights = tuple(with_experts(weight, count) for weight in weights)
    return replace(
        spec,
        name=spec.name + SUFFIX,
        layers=(caches,) * stages,
        layer_weights=(weights,) * stages,
        other_weights=_outer(spec, hidden, stages, values[RANK], len(values[LAYERS])),
        first_layer=spec.num_layers,
        head="dspark",
        multimodal=False,
        item_tokens=0,
        notes=(),
    )


def with_experts(weight: Weight, count: int) -> Weight:
    """The weight of a layer with so many experts instead."""
    if weight.experts:
        return replace(weight, experts=count)
    return replace(weight, parts=(Part(count),)) if weight.name.startswith("ffn.gate") else weight


def _outer(spec: ModelSpec, hidden: int, stages: int, rank: int, states: int) -> tuple[Weight, ...]:
    """Weights outside its stages.

    rank    width of the token transition head
    states  number of the model's hidden states that it reads
    """
    vocab = spec.vocab_size
    tables = (table("model.embed_tokens", vocab, hidden), table("lm_head", vocab, hidden, group="lm_head"))
    (entry,) = (w for w in spec.layer_weights[0] if w.name == "attn.fused_wqa_wkv")
    context = stages * entry.parts[-1].size
    confidence = whole("model.confidence_head.proj", hidden + rank, 1, "mlp", quantizable=False, dtype="float32")
    return (
        *(replace(weight, shared=True) for weight in tables),
        whole("model.main_proj", states * hidden, hidden, "mlp"),
        *(() if spec.is_later_v4 else (whole("model.context_wkv_proj", hidden, context, "attention"),)),
        norm("model.main_norm", hidden),
        norm("model.norm", hidden),
        *hyper_head(spec),
        Weight("model.markov_head.markov_w1", "lm_head", rank, (Part(vocab),)),
        Weight("model.markov_head.markov_w2", "lm_head", rank, (Part(-(-vocab // 64) * 64),)),
        *((confidence,) if text_values(spec).get("enable_confidence_head", True) else ()),
    )
