"""SGLang's model-specific rules: attention backends and their pages, windows, states, images.

SGLang decides by the first entry of `architectures`; a config without one is matched by its model_type.
Source: sglang 0.5.23 srt/configs/model_config.py, srt/arg_groups/overrides.py and srt/arg_groups/model_overrides.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models.hf_config import language_path, text_of
from kvplan.models.quant import SIDE_FILE
from kvplan.models.spec import ChunkedAttention, FullAttention, ModelSpec, RecurrentState, SlidingWindow
from kvplan.servers.plans.plan import Refusal, unsupported
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import EngineArgs

# Model types and architectures without a class in SGLang that Transformers cannot run in its place either: what its own
# registry and resolver (srt/models/registry.py, srt/model_loader/utils.py) answer for the catalog's and other configs.
NO_CLASS = ("jamba", "falcon", "bloom", "mpt", "minimax", "minimax_m1", "minimax_text_01")
NO_CLASS_NAMED = ("ChatGLMForConditionalGeneration", "NemotronHModel", "Qwen2_5OmniModel")
# Models with a separate window pool; all others keep all tokens in sliding-window layers (is_hybrid_swa_model).
WINDOW_POOLS = frozenset(
    {
        "GptOssForCausalLM", "GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM", "IQuestQ1ForCausalLM",
        "MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration",
        "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
        "LagunaForCausalLM", "MellumForCausalLM", "MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration",
        "Llama4ForConditionalGeneration",
    }
)  # fmt: skip
WINDOW_POOL_TYPES = ("gpt_oss", "mimo_v2_flash", "laguna", "gemma4_text", "llama4_text")  # without `architectures`
# Their class counts only the tokens before the current one: a window of 128 is 127 there.
WHOLE_WINDOWS = ("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM", "LagunaForCausalLM", "Step3p5ForCausalLM",
                 "Step3p7ForConditionalGeneration", "Llama4ForConditionalGeneration")  # fmt: skip
IMAGES_ON_REQUEST = (
    "Gemma3ForConditionalGeneration", "Llama4ForConditionalGeneration", "Step3VLForConditionalGeneration",
    "InklingForConditionalGeneration",
)  # fmt: skip
# Image models whose prefill is captured nevertheless.
CAPTURED_WITH_IMAGES = (
    "Cohere2VisionForConditionalGeneration", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
    "KimiK25ForConditionalGeneration", "KimiK3ForConditionalGeneration", "PaddleOCRVLForConditionalGeneration",
    "Glm5NextForConditionalGeneration", "InternS2MobiusForConditionalGeneration", "Qwen4ExpForConditionalGeneration",
    "MuseGlimmerForConditionalGeneration", "MuseSparkForConditionalGeneration", "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
)  # fmt: skip
DEEPSEEK = (
    "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "MistralLarge3ForCausalLM",
    "PixtralForConditionalGeneration", "HYV4ForCausalLM", "LongcatFlashForCausalLM", "Dots3NoteForCausalLM",
)  # fmt: skip
QWEN_HYBRIDS = (
    "Qwen3NextForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration", "InternS2MobiusForConditionalGeneration",
)  # fmt: skip
# Backend on compute capability 10.x if not the usual one (trtllm_mha; flashinfer for MLA).
DATACENTER_BACKENDS: Mapping[str, str] = {
    **dict.fromkeys(DEEPSEEK, "trtllm_mla"), "KimiK3ForConditionalGeneration": "trtllm_mla",
    **dict.fromkeys(
        ("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"), "fa4"
    ),
    **dict.fromkeys(("GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"), "flashinfer"),
    **dict.fromkeys(("FalconH1ForCausalLM", "JetNemotronForCausalLM", "JetVLMForConditionalGeneration"), "triton"),
}  # fmt: skip
# Of these, and of NemotronH's, only if neither phase's backend is given (is_attention_backend_not_set).
CHOSEN_ALONE = (
    *DEEPSEEK, "KimiK3ForConditionalGeneration", "MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM", "Step3p5ForCausalLM",
    "Step3p7ForConditionalGeneration",
)  # fmt: skip
# Their class itself selects trtllm_mha, with drafts or without.
PAGED_ALWAYS = frozenset(
    {
        "GptOssForCausalLM", "Llama4ForConditionalGeneration", "Llama4ForCausalLM", "Gemma4ForConditionalGeneration",
        "Gemma4ForCausalLM", "Gemma4UnifiedForConditionalGeneration", "Exaone4ForCausalLM", "Olmo2ForCausalLM",
    }
)  # fmt: skip
# Hybrids whose states the prefix cache keeps, and those of them that support extra buffers.
CACHED_STATES = frozenset(
    {
        "KimiLinearForCausalLM", "KimiK3ForConditionalGeneration", "Qwen3NextForCausalLM",
        "Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM",
        "Qwen3_5ForCausalLM", "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Omni_Reasoning_V3",
        "FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM",
    }
)  # fmt: skip
GRANITE = "GraniteMoeHybridForCausalLM"  # with states or without
NOT_TRACKED = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
STRATEGIES = ("auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")
FP4 = 100  # compute capability with kernels for NVFP4
LARGE_HOPPER_MIB = 60 * 1024
QWEN3_VL = ("qwen3_vl", "qwen3_vl_moe")
# Their class reads --mm-enable-dp-encoder (srt/models/*.py); model types compared with its parameters.
TOWERS_BY_DATA = frozenset(
    {
        "glm4v", "glm4v_moe", "glm_ocr", "kimi_k25", "kimi_vl", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl",
        "qwen3_vl_moe",
    }
)  # fmt: skip


def outer_type(spec: ModelSpec) -> str:
    """The model_type of the whole config, which its inner language model's may differ from."""
    return str(spec.config.get("model_type", spec.model_type))


def keeps_towers_whole(spec: ModelSpec, args: EngineArgs) -> bool:
    """True if each rank loads the whole tower, because of --mm-enable-dp-encoder and a class that reads it."""
    return args.mm_encoder_tp_mode == "data" and outer_type(spec) in TOWERS_BY_DATA


def keeps_scales_twice(spec: ModelSpec, sm: int, release: Version) -> bool:
    """True if ModelOpt's NVFP4 experts keep a second copy of their block scales, which no kernel reads.

    Before Blackwell, Marlin's kernels take the first copy; llm-compressor's experts have no second.
    Source: sglang 0.5.23 modelopt_quant.py (ModelOptNvFp4FusedMoEMethod) and srt/layers/quantization/utils.py
    (swizzle_blockscale); sgl-project/sglang#38073.
    """
    return has_modelopt_fp4(spec) and sm < FP4 and release.has("fp4_before_blackwell")


def has_modelopt_fp4(spec: ModelSpec) -> bool:
    by_modelopt = spec.quantization is not None and spec.quantization.method != "compressed-tensors"
    return by_modelopt and "nvfp4" in spec.scheme_kinds


def caches_prefixes(args: EngineArgs) -> bool:
    """True if the radix cache is on: it is unless switched off, or the server is the decode side of a
    disaggregated pair.
    """
    return args.enable_prefix_caching is not False and args.disaggregation_mode != "decode"


def is_hopper(sm: int) -> bool:
    return 90 <= sm < 100


def is_datacenter_blackwell(sm: int) -> bool:
    return 100 <= sm < 110


ENCODER_DECODERS = ("whisper",)  # 17,262 tokens on SGLang 0.5.23; counting every layer twice gives 25,894


def check_class(spec: ModelSpec) -> None:
    """Reject a model whose pool in SGLang is not modeled."""
    if spec.is_pooled:
        raise UnsupportedModelError(spec.name, "SGLang's pool of pooled index keys is not modeled", "use vllm")
    if spec.model_type in ENCODER_DECODERS:
        raise UnsupportedModelError(spec.name, "SGLang's pool for an encoder's tokens is not modeled", "use vllm")


# Their class supports DP attention, compared with its parameters (srt/models/*.py).
DIVIDED = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "kimi_k2",
        "kimi_k25", "llama4", "minimax_m2", "nemotron_h", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
        "qwen3_moe", "qwen3_vl", "qwen3_vl_moe",
    }
)  # fmt: skip
UNDIVIDED = frozenset(
    {
        "cohere", "cohere2", "dbrx", "gemma", "gemma2", "gemma4", "glm4", "gpt2", "granite", "granitemoehybrid",
        "llama", "llava", "mamba", "mistral", "mixtral", "olmo2", "phi", "phi3", "qwen2", "starcoder2",
    }
)  # fmt: skip


def check_dp_attention(spec: ModelSpec, args: EngineArgs) -> None:
    """Reject DP attention for classes that ignore it, and for those whose weights were not compared."""
    kind = outer_type(spec)
    if not args.enable_dp_attention or kind in DIVIDED:
        return
    does = "still splits attention over all ranks" if kind in UNDIVIDED else "has weights that were not compared"
    raise UnsupportedModelError("--enable-dp-attention", f"SGLang's class of {kind} {does}", "remove it")


DP_ENCODER = "--mm-enable-dp-encoder"
SPLIT_TOWERS = frozenset({"gemma3", "gemma4", "llama4", "mistral3", "mllama", "qwen3_omni_moe"})  # ignore this flag


def check_towers(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject data-parallel towers for classes whose code was not read."""
    if args.mm_encoder_tp_mode != "data" or not any(weight.serves for weight in spec.other_weights):
        return
    if not release.has("whole_towers"):
        raise UnsupportedModelError(DP_ENCODER, f"is modeled only for 0.5.23, not for {release.label}", "remove it")
    if outer_type(spec) not in TOWERS_BY_DATA | SPLIT_TOWERS:
        raise UnsupportedModelError(
            DP_ENCODER, f"what SGLang's class of {outer_type(spec)} does with it is not modeled", "remove it"
        )


def tower_notes(spec: ModelSpec, args: EngineArgs) -> Iterator[str]:
    if args.mm_encoder_tp_mode != "data":
        return
    if keeps_towers_whole(spec, args):
        yield f"{DP_ENCODER}: every rank loads the whole encoder and computes its share of the images"
    elif outer_type(spec) in SPLIT_TOWERS:
        yield f"{DP_ENCODER}: SGLang's class of {outer_type(spec)} does not read it; its encoder stays as it is"
    else:
        yield f"{DP_ENCODER}: the model has no encoder"


# --- dtypes and context -----------------------------------------------------------------------------------------------

WIDE = (None, "float32", "float")  # float32 checkpoints, served in half precision


def model_dtype(spec: ModelSpec) -> str:
    """Default dtype of weights: float16 for float32 checkpoints and those that name none, except Gemma."""
    text = text_of(spec.config)
    stated = text.get("dtype") or text.get("torch_dtype") or spec.config.get("dtype") or spec.config.get("torch_dtype")
    if isinstance(stated, str):
        stated = stated.removeprefix("torch.")
    if stated not in WIDE or "mxfp4" in spec.scheme_kinds:
        return spec.dtype
    return "bfloat16" if str(text.get("model_type", spec.model_type)).startswith("gemma") else "float16"


def reads_side_file(nested: Mapping[str, Any]) -> bool:
    """True if ModelOpt's readers take the algorithm of a hf_quant_config.json; others' have no cache.

    Source: sglang 0.5.23 srt/configs/model_config.py (_parse_modelopt_quant_config).
    """
    algorithm, layers = str(nested.get("quant_algo")).upper(), nested.get("quantized_layers")
    if algorithm != "MIXED_PRECISION":
        return algorithm in ("FP8", "MXFP8") or "FP4" in algorithm
    kinds = [layer.get("quant_algo") for layer in layers.values()] if isinstance(layers, Mapping) else []
    return any(str(kind).upper() in ("NVFP4", "W4A16_NVFP4") for kind in kinds)


def has_fp8_cache(spec: ModelSpec) -> bool:
    """True if the checkpoint's config turns `auto` into an fp8 cache, by the rules of SGLang's reader for its
    method.
    """
    config = spec.config.get("quantization_config") or text_of(spec.config).get("quantization_config")
    if not isinstance(config, Mapping):
        return False
    nested = config.get("quantization")
    if isinstance(nested, Mapping) and SIDE_FILE in spec.config:  # in config.json its cache is not read
        return str(nested.get("kv_cache_quant_algo")).upper() == "FP8" and reads_side_file(nested)
    scheme, algo = config.get("kv_cache_scheme"), str(config.get("kv_cache_quant_algo")).upper()
    method = str(config.get("quant_method") or ("modelopt" if "quant_algo" in config else "")).lower()
    is_fp8 = isinstance(scheme, Mapping) and scheme.get("type") == "float" and scheme.get("num_bits") == 8
    if method == "compressed-tensors":
        return (
            isinstance(scheme, Mapping)
            and is_fp8
            and scheme.get("strategy") == "tensor"
            and scheme.get("symmetric", True) is True
            and not scheme.get("dynamic")
        )
    if method.startswith("modelopt"):
        return is_fp8 if isinstance(scheme, Mapping) else algo == "FP8"
    return method == "fp8" and algo == "FP8"


# Its order, and rope types for which transformers states the original length, with which nothing is scaled.
# Source: sglang 0.5.23 utils/hf_transformers/common.py (CONTEXT_LENGTH_KEYS, get_context_length).
LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
UNSCALED_ROPES = ("yarn", "longrope", "su", "llama3")
OWN_ROPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # SGLang's own classes of these do not
ROPE_PER_KIND = ("gemma3_text", "gemma3n_text")  # its class lists them by kind of layer, where SGLang finds no factor


def context_length(spec: ModelSpec) -> int:
    """Default and largest accepted context: the first length in SGLang's order, scaled."""
    length = next((spec.lengths[key] for key in LENGTHS if key in spec.lengths), spec.context_limit)
    text = text_of(spec.config)
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, Mapping) or "original_max_position_embeddings" in rope:
        return length
    kind = rope.get("rope_type") or rope.get("type")
    if spec.model_type in ROPE_PER_KIND or (kind in UNSCALED_ROPES and spec.model_type not in OWN_ROPES):
        return length
    return int(length * (rope.get("factor") or 1))


# --- windows ----------------------------------------------------------------------------------------------------------


def has_window_pool(spec: ModelSpec) -> bool:
    if not spec.architecture:
        return spec.model_type in WINDOW_POOL_TYPES
    return spec.architecture in WINDOW_POOLS


def counted_window(spec: ModelSpec, window: int) -> int:
    """Tokens of a window as SGLang's scheduler counts them."""
    return window if spec.architecture in WHOLE_WINDOWS else window - 1


# --- images -----------------------------------------------------------------------------------------------------------


def takes_images(spec: ModelSpec, stated: bool | None) -> bool:
    """True if the server takes more than text; stated: --enable-multimodal."""
    if stated is None and spec.architecture in IMAGES_ON_REQUEST:
        return False
    return (spec.multimodal or bool(language_path(spec.config))) and stated is not False


def is_large_hopper_qwen3_vl(spec: ModelSpec, sm: int, memory_mib: int, stated: bool | None) -> bool:
    """True for Qwen3-VL on a Hopper GPU of 60 GiB or more, which has defaults of its own."""
    return (
        is_hopper(sm)
        and memory_mib >= LARGE_HOPPER_MIB
        and spec.config.get("model_type") in QWEN3_VL
        and takes_images(spec, stated)
    )


# model_type -> layers and width of the tower if its vision_config omits them; layers under another key (`depth`) do not
# count. Source: transformers 5's classes and sglang 0.5.23 srt/configs.
TOWER_CLASSES: Mapping[str, tuple[int, int]] = {
    "gemma3": (12, 768), "gemma3n": (24, 2048), "gemma4": (16, 768), "llama4": (34, 768), "llava": (12, 768),
    "mistral3": (24, 1024), "mllama": (32, 1280), "kimi_k25": (27, 1152),
    "kimi_k3": (27, 1024),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), (24, 3584)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), (24, 1152)),
}  # fmt: skip


TOWER_KEYS = ("num_hidden_layers", "hidden_size")
UNREAD_TOWERS = ("minimax_m3_vl",)  # whose class leaves the tower's config a dict (srt/configs/minimax_vl.py)
OWN_TOWER_KEYS = {"kimi_k3": ("vt_num_hidden_layers", "vt_hidden_size")}  # keys that its class maps to the usual names
KDA = {"kda", "bounded_kda"}
CAPTURED_WITH_KDA = "Glm5NextForConditionalGeneration"


def tower_shape(spec: ModelSpec, usual: tuple[int, int]) -> tuple[int, int] | None:
    """(layers, width) of the vision tower as SGLang reads it, `usual` if no class defines it, or None without a
    tower.
    """
    tower, kind = spec.config.get("vision_config"), str(spec.config.get("model_type"))
    if not isinstance(tower, Mapping):
        return usual if kind == "llava" else None
    if kind in UNREAD_TOWERS:
        return usual
    default = TOWER_CLASSES.get(kind, usual)
    layers, width = (
        tower[key] if isinstance(tower.get(key), int) else other
        for key, other in zip(OWN_TOWER_KEYS.get(kind, TOWER_KEYS), default, strict=True)
    )
    return layers, width


def captures_prefill(spec: ModelSpec, args: EngineArgs) -> bool:
    """True if prefills get CUDA graphs: not with pipeline stages, KDA, images in most models, or if there are no
    prefills.
    """
    decodes = args.disaggregation_mode == "decode"
    if args.cuda_graph_backend_prefill is not None:  # whatever the class and the stages are
        return args.cuda_graph_backend_prefill != "disabled" and not decodes
    if args.enforce_eager or args.disable_prefill_cuda_graph or args.pipeline_parallel_size > 1 or decodes:
        return False
    kinds = {cache.kind for caches in spec.layers for cache in caches if isinstance(cache, RecurrentState)}
    if kinds & KDA and spec.architecture != CAPTURED_WITH_KDA:
        return False
    return not takes_images(spec, args.enable_multimodal) or spec.architecture in CAPTURED_WITH_IMAGES


# --- attention backends and pages -------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def has_uneven_values(spec: ModelSpec) -> bool:
    """True if K and V of a head differ in width."""
    return any(
        cache.head_dim != cache.head_dim_v
        for caches in spec.layers
        for cache in caches
        if isinstance(cache, FullAttention | SlidingWindow | ChunkedAttention)
    )


def default_backend(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> str | None:
    """Default attention backend, as far as its page size depends on it; None: pages of any size."""
    if spec.is_sparse_mla:
        return "dsa"
    if not is_datacenter_blackwell(sm) or not release.has("datacenter_pages"):
        return None
    name = spec.architecture
    if name in QWEN_HYBRIDS:
        followed = args.mamba_radix_cache_strategy in ("extra_buffer", "extra_buffer_lazy")
        paged = followed or not caches_prefixes(args) or args.speculative_method is not None
        return "trtllm_mha" if paged and drafts_in_a_row(args) else "triton"
    stated = args.prefill_attention_backend or args.decode_attention_backend
    if name in DATACENTER_BACKENDS and (name != GRANITE or spec.has_states) and not (stated and name in CHOSEN_ALONE):
        return DATACENTER_BACKENDS[name]
    if spec.is_mla:
        return "flashinfer"
    if name in PAGED_ALWAYS:
        return "trtllm_mha"
    if name.startswith("NemotronH") and not stated:
        return "trtllm_mha" if args.speculative_method is None or args.speculative_eagle_topk in (None, 1) else "triton"
    if not drafts_in_a_row(args):
        return "flashinfer"
    return "fa4" if has_uneven_values(spec) else "trtllm_mha"


def drafts_in_a_row(args: EngineArgs) -> bool:
    """True if nothing is drafted, or if drafting is sequential as far as SGLang knows when it chooses a backend."""
    return args.speculative_method in (None, "dflash") or args.speculative_eagle_topk == 1


def backends(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> tuple[str | None, str | None]:
    """(prefill backend, decode backend)."""
    usual = default_backend(spec, sm, args, release)
    return args.prefill_attention_backend or usual, args.decode_attention_backend or usual


# Backends that a model's class can run with.
BACKENDS_OF: Mapping[str, tuple[str, ...]] = {
    "GptOssForCausalLM": ("triton", "trtllm_mha", "fa3", "fa4"),
    **dict.fromkeys(
        ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
        ("trtllm_mha", "triton", "fa4"),
    ),
    **dict.fromkeys(("Llama4ForConditionalGeneration", "Llama4ForCausalLM"), ("fa3", "triton", "trtllm_mha")),
}  # fmt: skip
NOT_BACKENDS_OF: Mapping[str, str] = {
    "Lfm2ForCausalLM": "triton", "Lfm2MoeForCausalLM": "triton", "Olmo2ForCausalLM": "flashinfer",
}  # fmt: skip
# `--attention-backend` and its two halves in 0.5.23 (srt/arg_groups/choices.py).
NAMES_OF_BACKENDS = frozenset(
    {
        "triton", "torch_native", "flex_attention", "dsa", "nsa", "qsa", "dsv4", "compressed", "fa3", "fa4",
        "flashinfer", "llada2_cfg_flashinfer", "flashmla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "trtllm_mha",
        "hpc_ops", "minicpm_flashattn", "minicpm_flashinfer", "aiter", "wave", "intel_amx", "ascend", "intel_xpu",
    }
)  # fmt: skip
UNKNOWN_BACKEND = "unknown"  # for a log that gives page sizes but no backend
PLAIN_BACKENDS = ("triton", "flashinfer")  # to propose in place of another


def check_backends(spec: ModelSpec, args: EngineArgs, release: Version) -> None:
    """Reject requested attention backends that the release lacks, and one phase without the other."""
    stated = (args.prefill_attention_backend, args.decode_attention_backend)
    if spec.architecture == "GptOssForCausalLM" and any(stated) and not all(stated) and release.has("named_backends"):
        phase = "prefill" if stated[0] is None else "decode"
        raise UsageError(
            f"--{phase}-attention-backend", f"SGLang does not choose one for {spec.architecture}", "state it, too"
        )
    for phase in ("prefill", "decode"):
        name, flag = getattr(args, f"{phase}_attention_backend"), f"--{phase}-attention-backend"
        known = NAMES_OF_BACKENDS | {None, UNKNOWN_BACKEND}
        if name not in known and release.has("named_backends"):
            raise UsageError(f"{flag} {name}", f"{release.label} has no such backend", "choose another backend")


def backend_refusal(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> Refusal | None:
    """Return a refusal of an attention backend that SGLang has but does not start with."""
    for phase in ("prefill", "decode"):
        argument = f"{phase}_attention_backend"
        name = getattr(args, argument)
        if name in (None, UNKNOWN_BACKEND):
            continue
        flag = f"--{phase}-attention-backend {name}"
        known = BACKENDS_OF.get(spec.architecture, (name,))
        others = tuple(other for other in BACKENDS_OF.get(spec.architecture, PLAIN_BACKENDS) if other != name)
        if name == "flex_attention" and args.speculative_method is not None:
            return unsupported(f"{flag} does not run with speculative decoding", argument, others)
        if name not in known or NOT_BACKENDS_OF.get(spec.architecture) == name:
            return unsupported(f"{flag} does not run with {spec.architecture}", argument, others)
        from kvplan.servers.sglang import attention  # only here: few plans name a backend

        if sm and (reason := attention.refused(phase, name, args.kv_cache_dtype, sm, latent=spec.is_mla)) is not None:
            why, by_dtype = reason
            values = ("auto", "fp8_e4m3") if by_dtype else others
            return unsupported(f"{flag}: {why}", "kv_cache_dtype" if by_dtype else argument, values)
    if backends(spec, sm, args, release)[1] == "trtllm_mla" and args.kv_cache_dtype == "fp8_e5m2":
        text = f"its decode attention backend, trtllm_mla, does not take --kv-cache-dtype {args.kv_cache_dtype}"
        return unsupported(text, "kv_cache_dtype", ("auto", "fp8_e4m3"))
    return None


PLAIN_NAMES = {"tokenspeed_mla": "cutedsl_mla"}  # deprecated
PAGES_64 = ("flashmla", "hpc_ops")
PAGES_OF: Mapping[str, tuple[int, ...]] = {
    "trtllm_mla": (32, 64), "cutedsl_mla": (32, 64), "trtllm_mha": (16, 32, 64, 128),
}  # fmt: skip


def page_size(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> int:
    """Tokens per page: as requested, if the attention backend accepts it; sparse attention uses 64."""
    if spec.is_sparse_mla:
        return 64
    prefill, decode = (PLAIN_NAMES.get(name or "", name) for name in backends(spec, sm, args, release))
    size = args.block_size or 1
    if forced := _forced_page(spec, sm, args, release):
        size = forced
    if decode in PAGES_64 or prefill == "hpc_ops":
        size = 64
    for backend in (decode, prefill):
        known = PAGES_OF.get(backend or "")
        if known is not None and size not in known and (backend == decode or backend == "trtllm_mha"):
            size = 64
    in_a_row = (args.speculative_eagle_topk or 0) <= 1  # FA4's kernel of trees takes pages of any size
    if "fa4" in (prefill, decode) and not spec.is_mla and is_datacenter_blackwell(sm) and in_a_row:
        return 128
    return size


def _forced_page(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> int | None:
    """Qwen's hybrids on compute capability 10.x use the page size of their backend, whatever is requested."""
    is_stated = args.prefill_attention_backend and args.prefill_attention_backend == args.decode_attention_backend
    backend = default_backend(spec, sm, args, release)
    if spec.architecture not in QWEN_HYBRIDS or backend is None or is_stated:
        return None
    return 64 if backend == "trtllm_mha" else 1


# --- states -----------------------------------------------------------------------------------------------------------


def keeps_states(spec: ModelSpec) -> bool:
    """True if the prefix cache keeps states of this hybrid."""
    return spec.architecture in CACHED_STATES and spec.has_states


def strategy(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> str:
    """State strategy of the prefix cache: `no_buffer`, `extra_buffer`, `extra_buffer_lazy`, or `auto` if it keeps none.

    Raise UsageError for what SGLang refuses to start with.
    """
    stated = args.mamba_radix_cache_strategy or "auto"
    if stated not in STRATEGIES:
        raise UsageError(
            f"--mamba-radix-cache-strategy {stated!r}", f"is not one of {', '.join(STRATEGIES)}", "use one of them"
        )
    if not caches_prefixes(args):
        return "auto"
    if not keeps_states(spec):
        if stated.startswith("extra_buffer"):
            raise UsageError(
                f"--mamba-radix-cache-strategy {stated}", f"{spec.name} has no states that the cache keeps"
            )
        return "auto"
    tracked = spec.architecture not in NOT_TRACKED
    page = _forced_page(spec, sm, args, release) or args.block_size or 1
    overlap = args.async_scheduling is not False
    chosen = stated
    if stated == "auto":
        follows = tracked and release.has("tracked_states")
        chosen = "extra_buffer" if (overlap or page > 1) and follows else "no_buffer"
        overlap = overlap and chosen != "no_buffer"
    flag = f"--mamba-radix-cache-strategy {stated}"
    if chosen != "no_buffer" and not tracked:
        raise UsageError(flag, f"SGLang has no extra buffer for {spec.architecture}", "use no_buffer")
    if chosen == "extra_buffer_lazy" and (not overlap or args.pipeline_parallel_size > 1):
        raise UsageError(flag, "needs the overlap schedule, which is off here", "use extra_buffer")
    if chosen == "no_buffer" and overlap:
        raise UsageError(flag, "needs --disable-overlap-schedule", "add it")
    if chosen == "no_buffer" and page > 1:
        raise UsageError(f"--page-size {page}", "without an extra buffer for states pages have 1 token", "remove it")
    if chosen == "no_buffer" and "trtllm_mha" in backends(spec, sm, args, release):
        raise UsageError(flag, "does not work with the attention backend trtllm_mha", "choose another backend")
    return chosen


BASE_SLOTS = 3  # the running state, and the cache's copies between prefill and decode


def slots_per_request(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> int:
    """State slots that a running request may take."""
    if not caches_prefixes(args):
        return 1
    match strategy(spec, sm, args, release):
        case "extra_buffer":
            overlap = args.async_scheduling is not False and args.pipeline_parallel_size == 1
            return BASE_SLOTS + (2 if overlap else 1)
        case "extra_buffer_lazy":
            return BASE_SLOTS + 1
        case _:
            return BASE_SLOTS
