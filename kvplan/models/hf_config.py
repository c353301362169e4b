"""config.json -> ModelSpec: finds the family's reader and adds name, dtype, quantization and towers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, reduce
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

from kvplan.core.errors import InvalidInputError, UnsupportedModelError
from kvplan.core.files import load_json, os_problem, printable
from kvplan.models.families.blocks import SpecDraft, placed
from kvplan.models.families.config import Config, Oddity, is_multimodal
from kvplan.models.families.rope import KEYS as LENGTH_KEYS
from kvplan.models.quant import list_problem, read_quantization, with_side_file
from kvplan.models.spec import (
    TEXT_ONLY,
    ChunkedAttention,
    Decoder,
    FullAttention,
    LatentAttention,
    LayerCache,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
    interned,
    unique,
)

Reader = Callable[[Config, str], SpecDraft]
ASSISTANTS: Final = ("gemma4_assistant", "gemma4_unified_assistant")  # Gemma 4's heads, each with its own checkpoint
SPECULATORS_KIND: Final = "speculators_model_type"  # key in the speculators library's format

# Module of families/ -> the model types it reads. A module is imported when one of its models is needed.
MODULES: dict[str, tuple[str, ...]] = {
    "dense": (
        "llama", "internlm2", "internlm3", "granite", "seed_oss", "smollm3", "mistral", "ministral3", "qwen2", "mimo",
        "qwen2_5_vl", "qwen2_5_omni_text", "qwen2_vl", "qwen3", "qwen3_vl_text", "phi3", "gemma", "gemma2",
        "gemma3_text", "cohere", "cohere2", "olmo2", "olmo3", "starcoder2", "glm", "glm4", "glm4v_text",
        "glm_ocr_text", "exaone4", "arcee", "cwm", "jais2", "ernie4_5", "granite_swa", "orion", "plamo3", "solar",
        "nemotron", "exaone", "minicpm", "PanguEmbedded", "paddleocr_vl_text", "dots_ocr", "phi3_v", "Keye",
        "KeyeVL1_5", "cosmos3_edge_text", "muse_glimmer_text",
    ),
    "classic": (
        "gpt2", "gpt_bigcode", "opt", "bloom", "mpt", "falcon", "phi", "gpt_neox", "gptj", "stablelm",
        "stablelm_epoch", "chatglm", "qwen", "dbrx",
    ),
    "multimodal_text": ("llava", "llava_llama", "minicpmv", "mllama", "mllama_text_model", "phi4mm"),
    "moe": (
        "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "xverse", "olmoe",
        "granitemoe", "phimoe", "gpt_oss", "llama4_text", "glm4_moe", "glm4v_moe_text", "minimax_m2", "minimax_m3",
        "minimax_m3_vl", "mimo_v2_flash", "laguna", "mimo_v2", "aria_text", "deepseek", "exaone_moe",
        "granitemoeshared", "granitemoe_swa",
    ),
    "mla": (
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite", "mistral4", "axk1",
        "pangu_ultra_moe", "sarvam_mla",
    ),
    "renamed": (
        "apertus", "hyperclovax", "step1", "telechat", "iquestloopcoder", "ernie4_5_moe", "bailing_moe", "sarvam_moe",
        "param2moe", "afmoe", "cohere2_moe", "hy_v3", "k2_horizon", "step3_text", "step3p5", "PanguProMoE",
        "interns1_pro_text",
    ),
    "recent": (
        "beam", "flint", "rnj1", "molmo2", "molmo2_text",
        "hrm_text", "molmo", "domyn_edge", "dory",
    ),
    "hybrid": (
        "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "jamba", "mamba", "falcon_h1",
        "granitemoehybrid", "nemotron_h", "lfm2", "lfm2_moe", "falcon_mamba",
    ),
    "ling": ("bailing_hybrid", "alice_ai"),
    "hunyuan4": ("hy_v4",),
    "ernie_vl": ("ernie4_5_moe_vl",),
    "zamba": ("zamba2",),
    "moondream": ("moondream3",),
    "unusual": ("mamba2", "olmo_hybrid", "minicpm3", "longcat_flash", "qwen4_exp_text"),
    "gemma": ("gemma3n_text", "gemma4_text", "diffusion_gemma_text"),
    "nas": ("nemotron-nas", "deci"),
    "deepseek_v4": ("deepseek_v4",),
    "deepseek_v41": ("deepseek_v41_text", "deepseek_v41"),
    "minimax": ("minimax_m1", "minimax_text_01", "minimax"),
    "glm5_next": ("glm5_next_text", "glm5_next"),
    "qwen4_exp": ("qwen4_exp_text", "qwen4_exp"),
    "encoder_decoder": ("whisper", "nemotron_parse"),
    "encoders": ("bert", "roberta", "xlm-roberta", "modernbert"),
}  # fmt: skip
# Servers' classes whose configs have a model type of any name -> the type that their config is read as.
CLASSES: dict[str, str] = {
    "BailingMoeForCausalLM": "bailing_moe", "BailingMoeV2ForCausalLM": "bailing_moe", "ExaoneForCausalLM": "exaone",
    "ExaoneMoEForCausalLM": "exaone_moe", "IQuestCoderForCausalLM": "llama", "InternLM3ForCausalLM": "internlm3",
    "IQuestLoopCoderForCausalLM": "iquestloopcoder", "K2HorizonForCausalLM": "k2_horizon", "LLaMAForCausalLM": "llama",
    "MiniCPMForCausalLM": "minicpm", "OrionForCausalLM": "orion", "PanguEmbeddedForCausalLM": "PanguEmbedded",
    "PanguUltraMoEForCausalLM": "pangu_ultra_moe", "Param2MoEForCausalLM": "param2moe", "Plamo3ForCausalLM": "plamo3",
    "SarvamMLAForCausalLM": "sarvam_mla", "SarvamMoEForCausalLM": "sarvam_moe", "SolarForCausalLM": "solar",
    "Step1ForCausalLM": "step1", "Step3TextForCausalLM": "step3_text", "Step3p5ForCausalLM": "step3p5",
    "MiniCPMO": "qwen2", "Phi4ForCausalLMV": "phi3",
    "MoonshotKimiaForCausalLM": "qwen2",
    "BailingMoeV3ForCausalLM": "bailing_hybrid",
    "DeepseekV2ForCausalLM": "deepseek_v2", "Rnj1ForCausalLM": "rnj1",
    "Molmo2ForConditionalGeneration": "molmo2",
    "TeleChat2ForCausalLM": "telechat", "TeleChat3ForCausalLM": "llama", "TeleFLMForCausalLM": "llama",
}  # fmt: skip
# Types that are another under a name of their own.
READ_AS: dict[str, str] = {
    "cohere_compass_text": "cohere2", "gemma4_unified_text": "gemma4_text",
    "minimax_m3_text": "minimax_m3", "mimo_v2_omni": "mimo_v2", "openpangu_vl": "PanguEmbedded",
    "qwen3_asr_text": "qwen3", "fireredasr2": "qwen2", "funasr": "qwen3",
}  # fmt: skip
MODULE_OF = {model_type: module for module, types in MODULES.items() for model_type in types}


def reader_of(model_type: str) -> Reader:
    reader: Reader = import_module(f"kvplan.models.families.{MODULE_OF[model_type]}").READERS[model_type]
    return reader


FILE_NAME: Final = "config.json"
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
BFLOAT16 = ("gemma3_text",)  # encoders that vLLM refuses to load in float16, in which it loads other float32 ones
TIED = "tie_word_embeddings"
# Its value where the outer config of a model with towers lacks it: its class has one, whatever the inner config says.
# Source: transformers 5.23 models/*/configuration_*.py; vLLM 0.33 config/vllm.py (with_hf_config) passes it inward.
OUTER_TIED = dict.fromkeys(("gemma3", "gemma3n", "gemma4", "hyperclovax_vision_v2", "mistral3"), True) | dict.fromkeys(
    ("glm4v", "glm4v_moe", "glm_ocr", "glm5_next", "llama4", "llava", "minimax_m3_vl", "qwen2_vl", "qwen2_5_vl",
     "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"), False,
)  # fmt: skip
# Nemotron Omni, whose states vLLM 0.33 keeps in the model's dtype, whatever the text's config says (models/config.py).
OMNI = "Omni_Reasoning_V3"
_DTYPES = {"float16": "float16", "half": "float16", "bfloat16": "bfloat16", "float32": "float32", "float": "float32"}


def language_path(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that lead to the part of a config that describes the language model; none if it is the config itself."""
    path: tuple[str, ...] = ()
    while len(path) < 3:
        key = next((key for key in NESTED if isinstance(values.get(key), dict)), None)
        if key is None:
            break
        path, values = (*path, key), values[key]
    return path


def text_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    return reduce(lambda config, key: config[key], language_path(values), values)


def inner_config(outer: Config) -> Config:
    """The part of a config that describes the language model.

    Keys of the outer level fill in missing ones, except lengths; whether the embeddings are tied is the outer level's.
    """
    config = outer
    for key in language_path(outer.values):
        inner = config.values[key]
        for shared in ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads"):
            if shared in inner and shared in config.values and inner[shared] != config.values[shared]:
                note = f"{shared} differs between {key} ({inner[shared]}) and the outer config; {key} wins"
                outer.notes.append(Oddity(note))
        upper = {
            k: v for k, v in config.values.items() if k not in (*NESTED, *LENGTH_KEYS) and not k.endswith("_config")
        }
        tied = config.values.get(TIED)
        if tied is None or str(config.values.get("model_type")).endswith("_thinker"):  # the text's own, of a thinker
            tied = OUTER_TIED.get(str(config.values.get("model_type")), inner.get(TIED))
        states = {"mamba_ssm_cache_dtype": "auto"} if str(config.values.get("model_type")).endswith(OMNI) else {}
        config = Config({**upper, **inner, TIED: tied, **states}, f"{config.where}: {key}", outer.notes)
    return config


def find_reader(outer: Config, inner: Config) -> tuple[Reader, str]:
    """Reader for the inner model_type, else for the outer one; an unknown type is rejected by name."""
    for config in (inner, outer):
        config.text("model_type", "")  # raises an error for anything but text
    kinds = [kind for kind in (inner.values.get("model_type"), outer.values.get("model_type")) if isinstance(kind, str)]
    kinds = [READ_AS.get(kind, kind) for kind in kinds]
    for kind in kinds:
        if kind in MODULE_OF:
            return reader_of(kind), kind
    for config in (inner, outer):
        for name in config.names("architectures") or ():
            if name in CLASSES:
                return reader_of(CLASSES[name]), CLASSES[name]
    encoder = next((kind for kind in kinds if kind in ENCODERS), None)
    if encoder is not None:
        raise UnsupportedModelError(
            outer.where,
            f"model_type {encoder!r} is an encoder that kvplan has no reader for",
            f"of encoders it sizes {', '.join(MODULES['encoders'])}",
        )
    if not kinds:
        raise outer.fail("model_type", "missing", "kvplan sizes a model by its type")
    raise UnsupportedModelError(
        outer.where,
        f"model_type {printable(repr(kinds[0]), 60)} is not supported",
        "use --assume-dense if it is a plain dense transformer, or add a reader in kvplan/models/families",
    )


# Encoders for embedding and reranking that have no reader. vLLM 0.33 model_executor/models/registry.py.
ENCODERS = (
    "nomic_bert", "new", "gte", "distilbert", "albert", "electra",
    "deberta", "deberta-v2", "mpnet", "camembert", "jina_bert", "snowflake-arctic-embed", "clip", "siglip",
)  # fmt: skip


# Keys for caches and layers that a plain dense transformer does not have.
NOT_DENSE = (
    "kv_lora_rank", "q_lora_rank", "index_head_dim", "num_experts", "num_local_experts", "n_routed_experts",
    "moe_intermediate_size", "state_size", "ssm_state_size", "mamba_d_state", "mamba_num_heads", "conv_kernel",
    "linear_num_value_heads", "linear_attn_config", "hybrid_override_pattern", "block_configs", "compress_ratios",
    "cross_attention_layers", "num_kv_shared_layers", "attention_chunk_size", "conv_L_cache", "attn_layer_period",
    "global_head_dim", "sparse_attention_config",
)  # fmt: skip


def check_dense(inner: Config) -> None:
    """Reject a config that contains evidence of not being dense."""
    for key in NOT_DENSE:
        if inner.values.get(key):
            raise UnsupportedModelError(
                inner.where, f"{key} says this is not a plain dense transformer", "--assume-dense would size it wrong"
            )


def model_dtype(outer: Config, inner: Config, wide: str = "bfloat16") -> str:
    """Dtype a server loads the weights in: float32 checkpoints are served in bfloat16 (vLLM `--dtype auto`).

    wide  the dtype for those, if different
    """
    for config in (outer, inner):  # the order of vLLM 0.33 (model_arch_config_convertor.py, get_torch_dtype)
        key = "dtype" if config.values.get("dtype") is not None else "torch_dtype"
        stated = config.text(key, "")
        if stated:
            known = _DTYPES.get(stated.removeprefix("torch."))
            if known is None:
                raise config.fail(key, f"{printable(repr(stated), 40)} is not a dtype kvplan knows")
            if known == "float32":
                outer.notes.append(f"the checkpoint is float32; a server's default dtype for it is {wide}")
                return wide
            return known
    return wide


# A config's words for layers -> caches. A layer without a cache of its own (shared) may have any name.
LAYER_WORDS: dict[str, tuple[type[LayerCache], ...]] = {
    "full_attention": (FullAttention, LatentAttention),
    "attention": (FullAttention, LatentAttention),
    "sliding_attention": (SlidingWindow,),
    "chunked_attention": (ChunkedAttention,),
    "linear_attention": (RecurrentState,),
    "mamba": (RecurrentState,),
    "conv": (RecurrentState,),
    "deepseek_sparse_attention": (LatentAttention,),
    "indexed_attention": (LatentAttention, FullAttention),
    "qwen_sparse_attention": (FullAttention,),
    "mlp": (),
}
# Types whose output head takes no quantization unless the config names it. Source: vLLM 0.33 model_executor/models
# (ParallelLMHead without quant_config).
PLAIN_HEADS = ("qwen3_next", "gpt_oss", "jamba", "falcon_h1", "mamba", "bloom", "opt")
WORDS_IGNORED = ("smollm3",)  # a server keeps all its layers in full, whatever layer_types says

LAST_IS_FULL = (
    "gemma4",
    "gemma4_text",
    "diffusion_gemma_text",
)  # transformers' class makes the last layer global, whatever layer_types says


def check_layer_types(inner: Config, draft: SpecDraft, model_type: str) -> None:
    """Reject a config whose `layer_types` the family's reader did not follow: it would be sized as something else."""
    types = inner.per_layer_names("layer_types", len(draft.layers))
    if types is None or model_type in WORDS_IGNORED:
        return
    if model_type in LAST_IS_FULL:
        types = [*types[:-1], "full_attention"]
    for i, (kind, caches) in enumerate(zip(types, draft.layers, strict=True)):
        if kind not in LAYER_WORDS:
            known = ", ".join(LAYER_WORDS)
            raise inner.fail(
                "layer_types", f"layer {i} is {printable(repr(kind), 60)}, not one of {known}", "not modeled"
            )
        if caches and not any(isinstance(cache, LAYER_WORDS[kind]) for cache in caches):
            cache_kinds = " and ".join(type(cache).__name__ for cache in caches)
            raise inner.fail(
                "layer_types",
                f"layer {i} is {kind!r}, but its other keys say it keeps {cache_kinds}",
                "correct the config",
            )


def is_head(values: Mapping[str, Any]) -> bool:
    """True if a config is that of a speculative head, by its architecture."""
    names = values.get("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and any(mark in name for mark in HEAD_MARKS) for name in names
    )


HEAD_MARKS = ("Eagle3", "DFlash", "DSpark")


def is_latent_head(values: Mapping[str, Any]) -> bool:
    """True for an EAGLE-3 head with DeepSeek's attention."""
    names = values.get("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and name.startswith("Eagle3Deepseek") for name in names
    )


def check_size(draft: SpecDraft, where: str) -> None:
    """Reject dimensions whose product cannot fit on any machine."""
    largest = max((w.num_params for layer in unique(draft.layer_weights) for w in layer), default=0)
    if largest * len(draft.layers) > 2**63:
        raise InvalidInputError(where, "the dimensions multiply to more than 2^63 parameters", "correct the config")


def as_published(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A config in transformers' form: the speculators library has its own, and a latent head's layers are all dense."""
    if SPECULATORS_KIND in values:
        from kvplan.models.families.speculators import flattened

        values = flattened(values, where)
    if is_latent_head(values):
        values = {**values, "first_k_dense_replace": values.get("num_hidden_layers", 1)}
    return values


class Reading(TypedDict, total=False):
    """How a config is read.

    assume_dense  an unknown type as Llama's, unless it is evidently not dense
    by_class      an unknown type from transformers' class of that type
    text_only     without the towers, as if the config were only the language model's
    """

    assume_dense: bool
    by_class: bool
    text_only: bool


def reader_for(outer: Config, inner: Config, *, assume_dense: bool, by_class: bool) -> tuple[Reader, str]:
    """The config's reader, or for an unknown type the one asked for."""
    try:
        return find_reader(outer, inner)
    except UnsupportedModelError:
        if by_class and isinstance(kind := inner.values.get("model_type"), str):
            own: Reader = import_module("kvplan.models.by_class").read
            return own, kind
        if not assume_dense or outer.values.get("model_type") in ENCODERS:
            raise
    check_dense(inner)
    named = outer.values.get("model_type")
    outer.notes.append(Oddity(f"model_type {named!r} is unknown: sized as a plain dense transformer"))
    return reader_of("llama"), "llama"


def check_shared(outer: Config, inner: Config, draft: SpecDraft) -> None:
    """Reject layers that all read another's cache, as only those of a Gemma 4 assistant do: its target's."""
    shared = inner.values.get("num_kv_shared_layers")
    if shared and not any(draft.layers) and outer.values.get("model_type") not in ASSISTANTS:
        raise inner.fail(
            "num_kv_shared_layers", f"leaves none of {len(draft.layers)} layers a cache", "correct the config"
        )


def read_config(
    values: Mapping[str, Any], where: str, name: str, *, source: str = "", **reading: Unpack[Reading]
) -> ModelSpec:
    """Read the facts of one config.

    where  name of the file in error messages
    Raise InvalidInputError for a damaged config, UnsupportedModelError for a model kvplan will not guess.
    """
    values = as_published(values, where)
    outer = Config(values, where)
    inner = inner_config(outer)
    text_only = reading.get("text_only", False)
    dense, by_class = reading.get("assume_dense", False), reading.get("by_class", False)
    reader, model_type = reader_for(outer, inner, assume_dense=dense, by_class=by_class)
    draft = reader(inner, model_type)
    draft.layer_weights = list(interned(draft.layer_weights))  # each kind is sized once (kvplan.sizing.weights.equals)
    check_size(draft, where)
    check_shared(outer, inner, draft)
    if not is_head(values):  # whose layers are read together with its target
        check_layer_types(inner, draft, model_type)
    draft.other_weights = [placed(weight, model_type) for weight in draft.other_weights]
    multimodal = is_multimodal(outer)
    left_out = text_only and multimodal
    if multimodal and not text_only:
        from kvplan.models.families import towers  # of such a model

        draft.other_weights += towers.weights(outer)
    quantization = read_quantization(outer, inner)
    if quantization is not None and model_type in PLAIN_HEADS:
        quantization = replace(quantization, head=None)
    architectures = outer.names("architectures") or [""]
    spec = ModelSpec(
        name=name + TEXT_ONLY if left_out else name,
        model_type=model_type,
        architecture=architectures[0],
        dtype=model_dtype(outer, inner, "bfloat16" if any(draft.layers) or model_type in BFLOAT16 else "float16"),
        hidden_size=draft.hidden_size,
        num_heads=draft.num_heads,
        vocab_size=draft.vocab_size,
        max_model_len=draft.context.default,
        context_limit=draft.context.limit,
        layers=tuple(draft.layers),
        layer_weights=tuple(draft.layer_weights),
        other_weights=tuple(draft.other_weights),
        ropes=draft.ropes,
        quantization=quantization,
        tied=draft.tied,
        experts_per_token=draft.experts_per_token,
        multimodal=draft.multimodal or (multimodal and not left_out),
        text_only=left_out,
        widest_mlp=draft.widest_mlp,
        item_tokens=draft.item_tokens,
        notes=tuple(dict.fromkeys(outer.notes)),
        source=source or where,
        read_decoder=partial(_decoder, inner, model_type, where),  # not a lambda: a plan can be pickled
        config=values,
        lengths=draft.context.lengths,
    )
    problem = list_problem(spec)
    return replace(spec, quantization=replace(quantization, problem=problem)) if quantization and problem else spec


def _decoder(inner: Config, model_type: str, where: str) -> Decoder:
    """Read how the model computes; the module is imported here because only the engine needs it."""
    read_decoder: Callable[[Config, str, str], Decoder] = import_module("kvplan.models.families.decoder").read_decoder
    return read_decoder(inner, model_type, where)


def folder_of(path: Path) -> Path | None:
    """The folder that a server loads a model from: `path`, or that of its config.json; None for any other file.

    Raise InvalidInputError for a path that cannot be looked up.
    """
    try:
        if path.is_dir():
            return path
    except OSError as error:  # too long a name, or a folder without permission
        raise os_problem(path, error) from error
    return path.parent if path.name == FILE_NAME else None


def load_spec(path: Path, *, name: str | None = None, **reading: Unpack[Reading]) -> ModelSpec:
    """Read a model folder, which its config.json names, too; of any other file the config alone."""
    folder = folder_of(path)
    file = path if folder is None else folder / FILE_NAME
    values = load_json(file)
    if folder is not None:
        values = with_side_file(values, folder)
        if values.get("model_type") in MODULES["encoders"]:
            from kvplan.models.processor import with_sentence_length  # only for folders of encoders

            values = with_sentence_length(values, folder)
    called = name or printable(file.resolve().parent.name)
    spec = read_config(values, printable(str(file)), called, **reading)
    if not spec.multimodal or folder is None:
        return spec
    from kvplan.models.processor import settings_of  # only for folders of models with towers

    return replace(spec, processor=settings_of(folder))
