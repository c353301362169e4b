"""Model classes of vLLM, a row each, and a model's config as its class reads it.

What vLLM decides by model_type, or what was compared by it, is in `TYPES`. A class without a row has every default.
Source: vLLM 0.33 model_executor/models, compared with its own answers, and where a field names another.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.records import dataclass
from kvplan.models.hf_config import TIED, text_of
from kvplan.models.spec import FullAttention, LayerCache, ModelSpec, Quantization, Scheme, SlidingWindow
from kvplan.servers.plans.plan import Refusal, Request, unsupported
from kvplan.servers.releases import Number, Version, names_in, number_text
from kvplan.servers.words.arguments import EngineArgs

HEAD_DIM: Final = ("head_dim",)  # heads are hidden_size / num_attention_heads wide
UNLIMITED: Final = 2**31
BIAS: Final = ("attention_bias",)
EMBEDDING, BOTH = ("embed_tokens",), ("embed_tokens", "lm_head")
REGISTRY: Final = Path(__file__).with_name("registry.txt")  # names in 0.33's registry, by benchmarks/registries.py
# The last release read whose registry lacks a name, and the first that has it: of 0.7.3 to 0.33, by the same script.
SINCE: Final = Path(__file__).with_name("since.txt")


@dataclass(frozen=True, slots=True)
class ModelClass:
    """What vLLM's class of an architecture does."""

    absent: bool = False  # no release has it
    plugin: str = ""  # whose package registers it
    first_sized: Number = (0, 0)  # releases before page its caches differently, or lack it
    # The first and the last 0.x that run model runner V2 for its name, and V1 on AMD for it (config/vllm.py of 0.22 to
    # 0.28, DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES, all read; of 0.29 to 0.32, ROCM_DEFAULT_MRV1_...).
    runner_v2: tuple[int, int] = (0, -1)
    runner_v1_on_amd: tuple[int, int] = (0, -1)
    adapters: bool = True  # it has SupportsLoRA
    maps_names: bool = True  # it takes `model.layers.` in a list for its language model's layers (hf_to_vllm_mapper)
    generates: bool = False  # although its name is that of a model without a head, which embeds
    keeps_head: bool = False  # it scores beside the output head


@dataclass(frozen=True, slots=True)
class ModelType:
    """How the class of a language model's type reads its config, what it lacks, and how its experts are built."""

    ignores: tuple[str, ...] = ()  # keys without an effect
    blocks_by_head_dim: bool = False  # blocks of states follow head_dim all the same
    # The tie_word_embeddings that counts: the outer config's, that of the text's own part, or none.
    tied: Literal["outside", "inside", "never", "always"] = "outside"
    # Layers that slide: those of the config; "every" one by sliding_window, unless layer_types lists them; "every if
    # flagged" by use_sliding_window, likewise, and none of a list; "all or none": no mix starts, but for one whose
    # max_window_layers is all of them; "none if mixed".
    windows: Literal["as stated", "every", "every if flagged", "all or none", "none if mixed"] = "as stated"
    no_float16: bool = False  # it is rejected in float16 (config/model.py)
    no_stages: bool = False  # it has no SupportsPP
    one_rank: bool = False  # it refuses tensor parallelism
    hides_experts: bool = False  # vLLM's model config does not find the number of its experts
    own_cache: bool = False  # its attention gets no cache settings: K and V stay in the model's dtype
    # It runs without its window. vLLM 0.33 fails for Gemma 3n and 4, Laguna and MiMo (their configs must have one) and
    # for Cohere 2 (which adds to it); others were not asked.
    without_windows: bool = False
    scaled_already: bool = False  # its positions in the config are
    alibi: bool = False  # whatever its config says
    fp8_on_blackwell: bool = False  # its latents, by default (model_executor/models/config.py)
    prefill_graphs: bool = False  # captured with prefill context parallelism
    whole_shared: bool = False  # shared experts are kept whole where ranks compute their own tokens (SHARES_TOKENS)
    # EPLB: refused; ignored, as the class builds its experts without it; or its copies are made, and the server stops.
    balances: Literal["", "refused", "ignored", "copied"] = ""
    activation: str = ""  # of its experts, if the config does not tell
    renormalizes: bool = False  # its router, unless norm_topk_prob says: Transformers 5's default, or always
    adapters: bool = False  # slots were compared (tests/facts/adapters.jsonl)
    adapted_tables: tuple[str, ...] = ()  # that get adapters (embedding_modules)
    in_one: tuple[str, ...] = ()  # fused layers that share one A: packed_modules_mapping does not list them
    fused_experts: bool = False  # gate and up of experts share one A (is_3d_moe_weight)


CLASSES: Final[Mapping[str, ModelClass]] = {
    **dict.fromkeys((
        "AriaForConditionalGeneration", "BloomForCausalLM", "DbrxForCausalLM", "FalconForCausalLM",
        "FalconMambaForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM", "Gemma3nForCausalLM",
        "KimiLinearForCausalLM", "KimiVLForConditionalGeneration", "LlavaOnevisionForConditionalGeneration",
        "Mamba2ForCausalLM", "MambaForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM",
        "MiMoV2OmniForCausalLM", "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration",
        "OrionForCausalLM", "Phi3VForCausalLM", "StableLmForCausalLM", "Step1ForCausalLM", "Step3TextForCausalLM",
        "Step3VLForConditionalGeneration", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration",
        "Zamba2ForCausalLM"
    ), ModelClass(adapters=False)),
    **dict.fromkeys((
        "ChatGLMModel", "Gemma2Model", "LlamaModel", "MiDashengLMModel", "MistralModel", "MossAudioModel", "Qwen2Model",
        "Qwen2_5OmniModel", "UltravoxModel",
    ),
        ModelClass(generates=True)),
    "CosyVoice2ForCausalLM": ModelClass(plugin="FunAudioLLM/CosyVoice"),
    **dict.fromkeys(("DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "Qwen2MoeForCausalLM"),
        ModelClass(runner_v2=(24, 28))),
    "DeepseekV32ForCausalLM": ModelClass(runner_v1_on_amd=(29, 31)),
    "DeepseekV4ForCausalLM": ModelClass(runner_v2=(28, 28), runner_v1_on_amd=(29, 31)),
    **dict.fromkeys((
        "Gemma3ForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"
    ), ModelClass(maps_names=False)),
    **dict.fromkeys(("Gemma3nForConditionalGeneration", "KimiK25ForConditionalGeneration"),
        ModelClass(adapters=False, maps_names=False)),
    **dict.fromkeys(("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration"), ModelClass(first_sized=(0, 31))),
    "GlmMoeDsaForCausalLM": ModelClass(runner_v1_on_amd=(30, 31)),
    **dict.fromkeys(("InklingForCausalLM", "InklingForConditionalGeneration", "LongcatFlashNgramForCausalLM"),
        ModelClass(runner_v2=(26, 28))),
    "JambaForSequenceClassification": ModelClass(keeps_head=True),
    "KimiK3ForConditionalGeneration": ModelClass(runner_v2=(27, 28)),
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM"), ModelClass(runner_v2=(23, 24))),
    "LlavaLlamaForCausalLM": ModelClass(absent=True),
    **dict.fromkeys(("MiniMaxForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM"),
        ModelClass(first_sized=(0, 11))),
    "Qwen3ForCausalLM": ModelClass(runner_v2=(22, 24)),
}  # fmt: skip
TYPES: Final[Mapping[str, ModelType]] = {
    **dict.fromkeys(("apertus", "exaone4", "nemotron", "solar"), ModelType(adapted_tables=BOTH)),
    "bloom": ModelType(ignores=HEAD_DIM, windows="every", alibi=True),
    "chatglm": ModelType(ignores=HEAD_DIM, windows="every", adapters=True, in_one=("query_key_value", "dense_h_to_4h")),
    "cohere": ModelType(ignores=BIAS, tied="always", windows="every", adapted_tables=EMBEDDING),
    "cohere2": ModelType(ignores=BIAS, tied="always", adapters=True, adapted_tables=EMBEDDING),
    "dbrx": ModelType(ignores=HEAD_DIM, windows="every", hides_experts=True, balances="refused"),
    **dict.fromkeys(("deepseek_v2", "kimi_k2"),
        ModelType(ignores=BIAS, tied="never", whole_shared=True, adapters=True)),
    "deepseek_v3": ModelType(ignores=BIAS, tied="never", whole_shared=True, renormalizes=True, adapters=True),
    "deepseek_v32": ModelType(ignores=BIAS, tied="never", prefill_graphs=True, whole_shared=True, adapters=True),
    **dict.fromkeys(("deepseek_v4", "deepseek_v41_text"), ModelType(tied="never", whole_shared=True, adapters=True)),
    **dict.fromkeys(("exaone_moe", "granitemoeshared", "lfm2_moe"), ModelType(renormalizes=True, adapted_tables=BOTH)),
    "dory": ModelType(one_rank=True),
    "falcon": ModelType(ignores=HEAD_DIM, own_cache=True),
    "falcon_h1": ModelType(ignores=("attention_bias", "mlp_bias"), adapters=True, adapted_tables=BOTH),
    "gemma": ModelType(ignores=BIAS, windows="every", adapters=True),
    "gemma2": ModelType(tied="always", no_float16=True, without_windows=True, adapters=True),
    "gemma3": ModelType(without_windows=True, scaled_already=True),
    "gemma3_text": ModelType(no_float16=True, without_windows=True, scaled_already=True, adapters=True),
    **dict.fromkeys(("gemma3n_text", "phi4mm"), ModelType(no_stages=True)),
    "gemma4": ModelType(activation="gelu_tanh"),
    "gemma4_text": ModelType(balances="ignored", activation="gelu_tanh", adapters=True),
    **dict.fromkeys(("glm", "glm4v_moe_text", "glm4v_text", "glm_ocr_text", "internlm3"), ModelType(windows="every")),
    "glm4": ModelType(windows="every", no_float16=True, adapters=True),
    "glm4_moe": ModelType(tied="never", windows="every", renormalizes=True, adapters=True),
    "glm4_moe_lite": ModelType(ignores=BIAS, tied="never", balances="copied", renormalizes=True, adapters=True),
    **dict.fromkeys(("glm5_next", "glm5_next_text"), ModelType(fp8_on_blackwell=True)),
    "glm_moe_dsa": ModelType(ignores=BIAS, tied="never", fp8_on_blackwell=True, prefill_graphs=True,
        whole_shared=True, adapters=True),
    **dict.fromkeys(("gpt2", "gptj", "opt", "stablelm"), ModelType(ignores=HEAD_DIM, windows="every")),
    **dict.fromkeys(("gpt_bigcode", "gpt_neox", "olmo", "olmo3", "seed_oss", "smollm3"),
        ModelType(adapted_tables=EMBEDDING)),
    "gpt_oss": ModelType(tied="never", without_windows=True, balances="refused", activation="swigluoai",
        adapters=True, fused_experts=True),
    **dict.fromkeys(("granite", "llama", "nemotron-nas", "qwen3_vl_text"),
        ModelType(windows="every", adapters=True, adapted_tables=BOTH)),
    "granitemoe": ModelType(ignores=HEAD_DIM, windows="every", balances="ignored", renormalizes=True,
        adapted_tables=BOTH),
    "granitemoehybrid": ModelType(ignores=HEAD_DIM, blocks_by_head_dim=True, balances="ignored", renormalizes=True,
        adapters=True, adapted_tables=BOTH, in_one=("shared_mlp.gate_up_proj",)),
    "internlm2": ModelType(ignores=HEAD_DIM, windows="every", adapters=True, in_one=("self_attn.qkv_proj",)),
    "jamba": ModelType(ignores=HEAD_DIM, blocks_by_head_dim=True, tied="never", balances="ignored", adapters=True,
        adapted_tables=BOTH, in_one=("mamba.in_proj",)),
    "kimi_k3": ModelType(activation="situ"),
    "kimi_linear": ModelType(balances="ignored"),
    **dict.fromkeys(("laguna", "ministral3"), ModelType(adapters=True)),
    "lfm2": ModelType(ignores=HEAD_DIM, blocks_by_head_dim=True, adapted_tables=BOTH),
    "llama4_text": ModelType(whole_shared=True, adapters=True, adapted_tables=BOTH),
    **dict.fromkeys(("mimo", "qwen2_5_vl"), ModelType(ignores=HEAD_DIM, windows="all or none", adapters=True)),
    "mimo_v2_flash": ModelType(tied="never"),
    "minimax_m2": ModelType(tied="never", windows="every", balances="ignored", adapters=True),
    "minimax_m3": ModelType(tied="never", balances="ignored", activation="swigluoai_uninterleave"),
    "minimax_m3_vl": ModelType(tied="never", activation="swigluoai_uninterleave"),
    "mistral": ModelType(without_windows=True, adapters=True),
    "mixtral": ModelType(renormalizes=True, adapters=True, adapted_tables=BOTH),
    "mpt": ModelType(ignores=HEAD_DIM, alibi=True),
    "nemotron_h": ModelType(ignores=BIAS, tied="never", windows="every", whole_shared=True, renormalizes=True,
        adapters=True, adapted_tables=BOTH),
    **dict.fromkeys(("olmo2", "phi"), ModelType(windows="every", adapted_tables=EMBEDDING)),
    "olmoe": ModelType(ignores=HEAD_DIM, tied="never", windows="every", balances="ignored"),
    "phi3": ModelType(without_windows=True, adapters=True, adapted_tables=BOTH, in_one=("qkv_proj", "gate_up_proj")),
    "phimoe": ModelType(tied="never", balances="ignored", adapted_tables=BOTH),
    **dict.fromkeys(("qwen", "stablelm_epoch"), ModelType(ignores=HEAD_DIM)),
    "qwen2": ModelType(ignores=HEAD_DIM, windows="all or none", without_windows=True, adapters=True),
    **dict.fromkeys(("qwen2_5_omni_text", "qwen2_vl"), ModelType(ignores=HEAD_DIM, windows="all or none")),
    "qwen2_moe": ModelType(ignores=HEAD_DIM, windows="none if mixed", balances="ignored"),
    "qwen3": ModelType(windows="all or none", without_windows=True, adapters=True, adapted_tables=BOTH),
    "qwen3_5_moe_text": ModelType(ignores=BIAS, tied="inside", whole_shared=True, renormalizes=True, adapters=True,
        adapted_tables=BOTH, in_one=("conv1d",), fused_experts=True),
    "qwen3_5_text": ModelType(ignores=BIAS, tied="inside", adapters=True, adapted_tables=BOTH, in_one=("conv1d",)),
    "qwen3_moe": ModelType(windows="every if flagged", adapters=True, adapted_tables=BOTH),
    "qwen3_next": ModelType(ignores=BIAS, tied="never", whole_shared=True, renormalizes=True, adapters=True,
        in_one=("in_proj_qkvz", "in_proj_ba", "conv1d")),
    "qwen4_exp_text": ModelType(ignores=BIAS, tied="never", whole_shared=True, renormalizes=True),
    "qwen3_vl_moe_text": ModelType(windows="every", adapters=True, adapted_tables=BOTH, fused_experts=True),
    "solar_open": ModelType(renormalizes=True),
    "starcoder2": ModelType(without_windows=True, adapters=True, adapted_tables=EMBEDDING),
}  # fmt: skip
NO_CLASS: Final = ModelClass()
NO_TYPE: Final = ModelType()


# A class of the same stem stands for another. Source: vLLM 0.33 config/model.py (_SUFFIX_TO_DEFAULTS), in its order.
ENDINGS: Final = (
    "ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "ForTextEncoding", "EmbeddingModel",
    "ForSequenceClassification", "ForTokenClassification", "ForAudioClassification", "ForImageClassification",
    "ForVideoClassification", "ClassificationModel", "ForRewardModeling", "RewardModel", "Model",
)  # fmt: skip


def class_of(spec: ModelSpec) -> ModelClass:
    return CLASSES.get(spec.architecture, NO_CLASS)


def type_of(spec: ModelSpec) -> ModelType:
    return TYPES.get(spec.model_type, NO_TYPE)


def standing(request: Request) -> Refusal | str:
    """A refusal of a model without a class, or a note on one that was not compared; empty for most."""
    names, name, row = names_in(REGISTRY), request.spec.architecture, class_of(request.spec)
    if names.get(name, "").startswith("compared"):
        return ""
    from kvplan.servers.plans import model_classes  # few models need it

    ending = next((ending for ending in ENDINGS if name.endswith(ending)), None)
    others = [] if ending is None else [name.removesuffix(ending) + other for other in ENDINGS]
    return model_classes.standing(request, names, others, settable=True, absent=row.absent, plugin=row.plugin)


def too_early(spec: ModelSpec, release: Version) -> str:
    """The first release that has the model's class, if an earlier one is asked; "" also if Transformers' may run."""
    fields = release.fields
    words = names_in(SINCE).get(spec.architecture)
    if words is None or spec.cache_kinds <= {FullAttention, SlidingWindow}:
        return ""
    last, first = (tuple(map(int, word.split("."))) for word in words.split())
    return number_text(first) if fields < first and fields[: len(last)] <= last else ""


def notes(request: Request) -> list[str]:
    answer = standing(request)
    return [answer] if answer and isinstance(answer, str) else []


def as_read(spec: ModelSpec, args: EngineArgs) -> ModelSpec:
    """The model as vLLM reads its config: usually as it is."""
    if args.hf_overrides is not None:
        from kvplan.servers.vllm import hf_overrides  # only if the config is changed

        spec = hf_overrides.applied(spec, args.hf_overrides)
    changes = by_class(spec)
    if changes:
        from kvplan.servers.plans.overrides import changed

        spec = changed(spec, changes)
    if args.quantization == "bitsandbytes" and spec.quantization is None:
        spec = replace(spec, quantization=ON_LOAD)
    elif args.quantization is None and spec.quantization is ON_LOAD:  # a remedy without the flag
        spec = replace(spec, quantization=None)
    return windowed(spec)


# What --quantization bitsandbytes makes of an unquantized checkpoint: NF4 whose scales are quantized as well. A log of
# vLLM 0.5.0 (issue 5569: Llama 3 8B, 5.3128 GiB of weights) agrees; with scales in fp32 it would be 5.61.
ON_LOAD: Final = Quantization("bitsandbytes", Scheme("nf4_double", 64))


def check_hybrid(text: Mapping[str, Any], name: str) -> None:
    """Reject a hybrid whose blocks are sized by a head_dim that its attention ignores: vLLM starts, with pages of
    states padded to those of its heads.
    """
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    stated = text.get("head_dim")
    if stated and isinstance(hidden, int) and hidden != stated * (heads or 0):
        problem = f"blocks follow head_dim ({stated}) and heads hidden_size / num_attention_heads, which is not modeled"
        raise UnsupportedModelError(f"{name} on vLLM", problem, "remove head_dim from the config, or correct it")


def by_class(spec: ModelSpec) -> dict[str, bool | None]:
    """Keys of the config that the model's class reads otherwise: None if it ignores them."""
    row, text = type_of(spec), text_of(spec.config)
    if row.blocks_by_head_dim:
        check_hybrid(text, spec.name)
    changes: dict[str, bool | None] = {key: None for key in row.ignores if text.get(key)}
    tied = spec.tied
    match row.tied:
        case "never" | "always":
            tied = row.tied == "always"
        case "inside" if text is not spec.config:
            tied = bool(text.get(TIED))
    return changes | ({TIED: tied} if tied != spec.tied else {})


def takes_one_kind(spec: ModelSpec) -> bool:
    """True if the config mixes windows with full attention for a class that has either in all layers."""
    return type_of(spec).windows == "all or none" and is_mixed(spec)


def is_mixed(spec: ModelSpec) -> bool:
    return spec.cache_kinds == {FullAttention, SlidingWindow}


def refusal(spec: ModelSpec) -> Refusal | None:
    """Return a refusal of windows in some layers, or of image positions that do not fill a rotary table.

    Source: vLLM 0.33 model_executor/models/qwen2.py (Qwen2Model), layers/rotary_embedding/mrope.py.
    """
    text = text_of(spec.config)
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    match rope.get("mrope_section") if isinstance(rope, Mapping) else None:
        case [int(t), int(h), int(w)] if spec.ropes and t + h + w != spec.ropes[0].dim // 2:
            pairs, others = t + h + w, spec.ropes[0].dim // 2
            return unsupported(f"mrope_section of {spec.name} has {pairs} pairs of rotated values, a head {others}")
    if not takes_one_kind(spec):
        return None
    stated = text.get("max_window_layers")
    return unsupported(
        f"windows for some but all layers are not supported (max_window_layers {stated} of {spec.num_layers} layers); "
        "without use_sliding_window in the config they are for none"
    )


@lru_cache(maxsize=64)
def windowed(spec: ModelSpec) -> ModelSpec:
    """The model with the windows that vLLM gives its layers.

    Source: vLLM 0.33 engine/arg_utils.py (create_engine_config), model_executor/models/qwen2.py (Qwen2Model).
    """
    text = text_of(spec.config)
    window, listed = text.get("sliding_window"), text.get("layer_types") is not None
    if not isinstance(window, int) or window < 1:
        return spec
    match type_of(spec).windows:
        case "all or none" if is_mixed(spec) and text.get("max_window_layers") == spec.num_layers:
            return with_caches(spec, None)
        case "none if mixed" if is_mixed(spec):
            return with_caches(spec, None)
        case "every if flagged" if listed and is_mixed(spec):
            return with_caches(spec, None)
        case "every if flagged" if not listed and text.get("use_sliding_window") is True:
            return with_caches(spec, window)
        case "every" if not listed:
            return with_caches(spec, window)
    return spec


def with_caches(spec: ModelSpec, window: int | None) -> ModelSpec:
    """The model with the same window in all layers of attention, or none."""

    def cache_of(cache: LayerCache) -> LayerCache:
        if not isinstance(cache, FullAttention | SlidingWindow):
            return cache
        shape = cache.num_kv_heads, cache.head_dim, cache.head_dim_v
        return FullAttention(*shape) if window is None else SlidingWindow(*shape, window)

    return replace(spec, layers=tuple(tuple(map(cache_of, caches)) for caches in spec.layers))


def context_limits(spec: ModelSpec, release: Version) -> tuple[int, int]:
    """(default context, largest accepted one): with YaRN, earlier releases multiply the original length."""
    if not release.has("yarn_length_stated"):
        text = text_of(spec.config)
        rope = text.get("rope_parameters") or text.get("rope_scaling")
        if isinstance(rope, Mapping) and "yarn" in (rope.get("rope_type"), rope.get("type")):
            original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
            if isinstance(original, int) and isinstance(factor, int | float):
                return int(original * factor), int(original * factor)
    unlimited = not spec.lengths and release.is_compared  # any that is stated (config/model.py)
    return spec.max_model_len, UNLIMITED if unlimited else spec.context_limit
