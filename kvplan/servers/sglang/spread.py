"""Placement of weights outside the layers by SGLang's classes: on pipeline stages and on the ranks of a stage.

A spec follows vLLM's classes. Source: the parameters of sglang 0.5.23's own classes (srt/models) on torch's meta
device, stage by stage (tests/facts/stages_sglang.jsonl); its model_runner.py starts pipeline stages only for classes
that pass hidden states on.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.families.blocks import VOCAB_PAD
from kvplan.models.spec import ModelSpec, Place, Weight
from kvplan.servers.plans.plan import Request
from kvplan.servers.releases import Version
from kvplan.servers.sglang.models import outer_type, takes_images
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.weights import up

# Model types whose stages were compared: the embedding is on the first, final norm and output head on the last.
DIVIDED: Final = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "gemma4", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v",
        "glm4v_moe", "glm_moe_dsa", "glm_ocr", "gpt_oss", "internvl", "kimi_k2", "kimi_k25", "laguna", "llama",
        "llava_next", "llava_onevision", "minimax_m2", "mistral", "mistral3", "mixtral", "opt", "phi3", "qwen2",
        "qwen2_5_vl", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_omni_moe",
        "qwen3_vl", "qwen3_vl_moe", "smollm3",
    }
)  # fmt: skip
# Of these: a separate head on every stage; such classes share a tied embedding, which the last stage then lacks.
HEAD_EVERYWHERE: Final = frozenset(
    {
        "glm4_moe", "glm4_moe_lite", "gpt_oss", "llama", "mistral", "mistral3", "mixtral", "phi3", "qwen2_moe",
        "qwen3_moe",
    }
)  # fmt: skip
EVERYTHING_EVERYWHERE: Final = ("opt",)
EMBEDDING_EVERYWHERE: Final = ("minimax_m2",)
TOWER_ON_FIRST: Final = ("gemma4",)
BUILT_ON_REQUEST: Final = ("llama4",)  # its tower, with --enable-multimodal
# Each rank holds the whole table; the last stage has a shard of it as its head.
EMBEDDING_WHOLE: Final = ("gemma3", "gemma3_text", "gemma4")
EMBEDDING_WHOLE_BY_RANK: Final = ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")  # with DP attention
WIDE_HEAD: Final = ("falcon_h1",)  # in float32, and so is a table used as head and embedding
TWO_TABLES: Final = ("lfm2", "lfm2_moe")  # a separate head although its values are the embedding's
# Architectures that do not pass hidden states on, so that SGLang does not start stages of them.
UNDIVIDED: Final = frozenset(
    {
        "BertModel", "ChatGLMModel", "Cohere2ForCausalLM", "CohereForCausalLM", "DbrxForCausalLM",
        "FalconH1ForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration", "Gemma3nForConditionalGeneration", "GemmaForCausalLM",
        "GraniteForCausalLM", "GraniteMoeForCausalLM", "InternLM2ForCausalLM", "KimiVLForConditionalGeneration",
        "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Llama4ForConditionalGeneration", "LlavaLlamaForCausalLM",
        "MambaForCausalLM", "MiMoForCausalLM", "MllamaForConditionalGeneration", "Olmo2ForCausalLM",
        "Olmo3ForCausalLM", "OlmoeForCausalLM", "OrionForCausalLM", "Phi4MMForCausalLM", "PhiForCausalLM",
        "PhiMoEForCausalLM", "QWenLMHeadModel", "Qwen2AudioForConditionalGeneration", "Qwen2VLForConditionalGeneration",
        "Qwen3NextForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "VoxtralForConditionalGeneration",
        "XverseForCausalLM", "XverseMoeForCausalLM",
    }
)  # fmt: skip
PER_LAYER: Final = "model.embed_tokens_per_layer"
WHOLE: Final = ("blip-2", "internvl", "llava_next", "llava_onevision")  # towers built from Transformers' own classes

Change = Callable[[Weight], Weight]


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


EIGHT: Final = 8  # inner widths are padded to multiples of this


def _padded_outputs(weight: Weight) -> Weight:
    return replace(weight, parts=tuple(replace(part, units=up(part.units, EIGHT)) for part in weight.parts))


def _padded_inputs(weight: Weight) -> Weight:
    return replace(weight, inputs=up(weight.inputs, EIGHT))


POSITIONS: Final[Mapping[str, Change]] = {"visual.pos_embed": _table}
MERGER: Final[Mapping[str, Change]] = {"visual.merger.proj": _whole}
# Parts of a tower that are sharded differently than in vLLM, by name prefix.
TOWERS: Final[Mapping[str, Mapping[str, Change]]] = {
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
    "kimi_k25": {"vision_tower.layers.mlp.": _whole},
    "llama4": {"multi_modal_projector.": _whole},
    "mistral3": {"multi_modal_projector.": _whole},
    "mllama": {"vision_model.patch_embedding": _columns, "vision_tower.layers.attn.": _biased},
    "qwen2_5_vl": {"vision_tower.layers.mlp.up": _padded_outputs, "vision_tower.layers.mlp.down": _padded_inputs},
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr"), MERGER),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe"), POSITIONS),
    **{kind: {"": _whole} for kind in WHOLE},
}  # fmt: skip


def check(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject pipeline stages that SGLang does not start, and those of classes that were not compared."""
    stages, kind = args.pipeline_parallel_size, outer_type(spec)
    if stages == 1 or not release.has("own_stages"):
        return
    flag = f"--pp-size {stages}"
    if spec.architecture in UNDIVIDED:
        raise UnsupportedModelError(flag, f"SGLang's class {spec.architecture} has no pipeline stages", "use --tp")
    if any(weight.name == PER_LAYER for weight in spec.other_weights):
        raise UnsupportedModelError(flag, f"SGLang refuses them for inputs of each layer ({spec.name})", "use --tp")
    if kind not in DIVIDED:
        problem = f"what each stage of SGLang's class of {kind} holds is not compared with its own code"
        raise UnsupportedModelError(flag, problem, "use --tp")
    if kind in HEAD_EVERYWHERE and spec.tied:
        problem = f"SGLang's class of {kind} has no output head on its last stage where it is the embedding's table"
        raise UnsupportedModelError(flag, problem, "use --tp")


def spread(request: Request) -> Request:
    """The request with the model's weights placed as in SGLang's class."""
    if not request.release.has("own_stages"):
        return request
    args = request.args
    sees = takes_images(request.spec, args.enable_multimodal)
    spec = _spread(request.spec, args.pipeline_parallel_size, sees)
    if args.enable_dp_attention and outer_type(spec) in EMBEDDING_WHOLE_BY_RANK:
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
    kind = outer_type(spec)
    changed: dict[int, tuple[Weight, ...]] = {}  # the layers of a tower are one object each, and must stay so
    for weight in spec.other_weights:
        if id(weight) not in changed:
            changed[id(weight)] = (
                (_of_tower(weight, kind, sees=sees),) if weight.serves else _of_text(weight, kind, spec.tied, stages)
            )
    return replace(spec, other_weights=tuple(part for weight in spec.other_weights for part in changed[id(weight)]))


def _of_tower(weight: Weight, kind: str, *, sees: bool) -> Weight:
    place = Place.FIRST if kind in TOWER_ON_FIRST else Place.EVERY
    if kind in BUILT_ON_REQUEST and not sees:
        return replace(weight, is_loaded=False)
    weight = replace(weight, place=place, is_loaded=weight.is_loaded or kind in WHOLE)
    return next(
        (change(weight) for name, change in TOWERS.get(kind, {}).items() if weight.name.startswith(name)), weight
    )


def _of_text(weight: Weight, kind: str, tied: bool, stages: int) -> tuple[Weight, ...]:
    """The language model's weights outside its layers, on the stages that hold them."""
    if kind in EVERYTHING_EVERYWHERE:
        return (replace(weight, place=Place.EVERY),)
    match weight.group:
        case "embedding" if weight.name == PER_LAYER:
            return (_whole(weight),)
        case "lm_head" | "embedding" if kind in WIDE_HEAD and (tied or weight.group == "lm_head"):
            return (replace(weight, dtype="float32"),)
        case "embedding" if kind in EMBEDDING_WHOLE:
            table = replace(_whole(weight), place=Place.FIRST)
            return (table, replace(weight, place=Place.LAST)) if tied and stages > 1 else (table,)
        case "embedding" if kind in EMBEDDING_EVERYWHERE:
            return (replace(weight, place=Place.EVERY),)
        case "embedding" if kind in TWO_TABLES and tied:
            return (weight, replace(weight, name="lm_head"))
        case "embedding":
            return (replace(weight, place=Place.FIRST_AND_LAST if tied else Place.FIRST),)
        case "lm_head" if kind in HEAD_EVERYWHERE:
            return (replace(weight, place=Place.EVERY),)
        case _:
            return (replace(weight, place=Place.LAST),)
