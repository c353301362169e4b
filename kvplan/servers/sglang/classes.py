"""Model classes of SGLang, one row each: how a class is placed, attends, caches and reads its config.

SGLang decides by the first entry of `architectures`; what it decides by model_type, or what was compared by it, is in
`TYPES`. A class without a row has every default. Source: sglang 0.5.23 srt/configs/model_config.py, srt/models,
srt/arg_groups/overrides.py and model_overrides, and where a field names another.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from kvplan.core.records import dataclass
from kvplan.models.hf_config import TIED, text_of
from kvplan.models.spec import FullAttention, LatentAttention, ModelSpec, SlidingWindow
from kvplan.servers.plans.plan import Refusal, Request, unsupported
from kvplan.servers.releases import names_in
from kvplan.servers.words.arguments import EngineArgs

REGISTRY: Final = Path(__file__).with_name("registry.txt")  # names in 0.5.23's registry, by benchmarks/registries.py


@dataclass(frozen=True, slots=True)
class ModelClass:
    """What SGLang's class of an architecture does; 10.x and the like are compute capabilities."""

    absent: bool = False  # no release has it, nor does Transformers run it in its place
    unmodeled: str = ""  # what its pool keeps, if kvplan does not size that
    fails: str = ""  # why it builds no model
    needs: str = ""  # a key of the language model's config without which it builds none
    refuses: str = ""  # one that must not be set
    stages: bool = True  # it passes hidden states on, so that pipeline stages start
    window_pool: bool = False  # for its sliding-window layers; else they keep all tokens (is_hybrid_swa_model)
    whole_windows: bool = False  # else they count less the current token: 127 of 128
    backends: tuple[str, ...] = ()  # attention backends that it runs with; empty: any
    not_backend: str = ""  # one that it does not run with
    blackwell: str = ""  # backend on 10.x, if not the usual one (trtllm_mha; flashinfer for MLA)
    chosen_alone: bool = False  # that is, if neither phase's backend is given (is_attention_backend_not_set)
    blackwell_paged: bool = False  # it selects trtllm_mha on 10.x itself, with drafts or without
    page_by_backend: bool = False  # Qwen's hybrids: on 10.x backend and page follow the states, whatever is requested
    caches_states: bool = False  # the prefix cache keeps its states
    tracked: bool = True  # in extra buffers, too
    images_on_request: bool = False  # it takes images only with --enable-multimodal
    text_only: bool = False  # it takes none, whatever its config has
    captured_with_images: bool = False  # its prefill is captured nevertheless
    captured_with_kda: bool = False
    largest_prefill: int = 0  # tokens of its largest prefill graph, if not those of a chunk
    captured: bool = True  # its prefill, unless one of the above says otherwise
    page: int = 0  # tokens of a page on 9.x and 10.x unless stated
    requests: int = 0  # the most that run, unless stated; 0: those that the pool holds
    window_ratio: float = 0.0  # tokens of its windows' pool to those of the other, unless stated; 0: the usual one
    runs_as: str = ""  # the registered class that runs it
    dtype: str = ""  # of its weights, whatever is stated
    both_ways: bool = False  # prompts are attended in both directions: no chunks, prefix cache or graphs
    latent: bool = False  # it keeps MLA's latents, where other servers keep heads
    one_shape: bool = False  # it reads no config whose layers have heads of several shapes
    layer_names: tuple[str, ...] = ()  # those that layers_block_type may have; empty: any
    reads_method: bool = False  # of the checkpoint's quantization, on 10.x, before kernels of experts are checked
    unchecked: tuple[str, ...] = ()  # weights created without a check of their blocks (skip_block_quant_check)
    own_head: bool = False  # its own draft head is loaded, and counted, if no draft is named
    draft_numbers: tuple[int, int, int] = (3, 1, 4)  # default steps, branches, verified tokens (speculative_hook.py)
    nested_head: bool = False  # adapters find no head where it is tied (lora/lora_manager.py)


@dataclass(frozen=True, slots=True)
class ModelType:
    """What goes by the model_type of the language model."""

    absent: bool = False  # no release has a class for it
    window_pool: bool = False  # of a config without `architectures`
    ignores: tuple[str, ...] = ()  # keys of the config without an effect
    needs: str = ""  # a key without which its class of config does not start
    loops: str = ""  # key of the times that its layers run, by which their number is multiplied once more
    # Its language model is built from its own part of a config with towers: whether its head is tied without a key
    # there; None: the outer config decides.
    tied_inside: bool | None = None
    by_interval: bool = False  # full layers are those of full_attention_interval (or 4), whatever layer_types says
    own_rope: bool = False  # SGLang's own config, which does not state the original length of a scaled rope
    rope_per_kind: bool = False  # it lists ropes by kind of layer, where SGLang finds no factor
    uncounted: str = ""  # kind of states that it keeps beside its pools, in what the fraction leaves
    tables_on_host: str = ""  # dtype in which its n-gram tables are kept in host memory (--ple-offload-embedding)
    shares_caches: bool = False  # layers without a cache read an earlier layer's
    own_head: bool = True  # False: its own draft head was not compared
    adapters: bool = False  # their slots were compared (tests/facts/adapters_sglang.jsonl)
    no_head: bool = False  # logits come from the embedding
    # What follows goes by the model_type of the whole config.
    dtype: str = ""  # of weights, if the config states none
    stages: bool = False  # compared (tests/facts/stages_sglang.jsonl): embedding first, final norm and head last
    # What each stage holds; a class with "lm_head" lacks a tied one on its last stage.
    everywhere: Literal["", "lm_head", "embedding", "all"] = ""
    # "whole": on each rank, with a shard as the last stage's head; "whole by rank": with DP attention.
    embedding: Literal["", "whole", "whole by rank"] = ""
    # In float32, and so a table used for both; apart although tied; two of them unless tied.
    head: Literal["", "wide", "twice", "doubled"] = ""
    dp_attention: bool | None = None  # whether its class supports it, compared with its parameters
    dp_heads: tuple[str | None, ...] = ()  # quantization of checkpoints whose head was compared with it
    offload: bool | None = None  # whether its layers are built with make_layers, compared; else nothing is offloaded
    experts_apart: bool = False  # it names the experts that --offload-group-size fetches
    gate_behind: bool = False  # its gate is built after the experts
    tower: Literal["by data", "split"] | None = None  # whether it reads --mm-enable-dp-encoder; None: not read
    tower_size: tuple[int, int] | None = None  # layers, width if vision_config omits them (Transformers 5, srt/configs)
    tower_keys: tuple[str, str] = ("num_hidden_layers", "hidden_size")  # where it has them; `depth` does not count
    tower_kept: bool = True  # False: its class of config has the tower under another name, and nothing is kept for it
    tower_read: bool = True  # False: its class leaves the tower's config a dict (srt/configs/minimax_vl.py)
    tower_place: Literal["", "first", "on request", "whole"] = ""  # with --enable-multimodal; Transformers' own tower


CLASSES: Final[Mapping[str, ModelClass]] = {
    **dict.fromkeys((
        "BertModel", "ChatGLMModel", "Cohere2ForCausalLM", "CohereForCausalLM", "DbrxForCausalLM",
        "GPT2LMHeadModel", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3nForConditionalGeneration",
        "GemmaForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM", "InternLM2ForCausalLM",
        "KimiVLForConditionalGeneration", "LlavaLlamaForCausalLM", "MambaForCausalLM", "MiMoForCausalLM",
        "MllamaForConditionalGeneration", "Olmo3ForCausalLM", "OlmoeForCausalLM", "OrionForCausalLM",
        "Phi4MMForCausalLM", "PhiForCausalLM", "PhiMoEForCausalLM", "QWenLMHeadModel",
        "Qwen2AudioForConditionalGeneration", "Qwen2VLForConditionalGeneration", "StableLmForCausalLM",
        "Starcoder2ForCausalLM", "VoxtralForConditionalGeneration", "XverseForCausalLM", "XverseMoeForCausalLM"
    ), ModelClass(stages=False)),
    **dict.fromkeys(("ChatGLMForConditionalGeneration", "NemotronHModel", "Qwen2_5OmniModel"), ModelClass(absent=True)),
    **dict.fromkeys(("MuseSparkForConditionalGeneration", "PaddleOCRVLForConditionalGeneration"),
        ModelClass(captured_with_images=True)),
    "Cohere2VisionForConditionalGeneration": ModelClass(needs="num_experts", captured_with_images=True),
    "InternS1ProForConditionalGeneration": ModelClass(fails="its layers take no start_layer, which it passes on"),
    "K2HorizonForCausalLM": ModelClass(refuses="query_key_norm"),
    **dict.fromkeys((
        "TransformersMultiModalEmbeddingModel", "TransformersMultiModalForCausalLM",
        "TransformersMultiModalForSequenceClassification", "TransformersMultiModalMoEEmbeddingModel",
        "TransformersMultiModalMoEForCausalLM", "TransformersMultiModalMoEForSequenceClassification"
    ), ModelClass(unmodeled="a model with Transformers' own tower")),
    **dict.fromkeys(("LlavaVidForCausalLM", "YiVLForCausalLM"), ModelClass(unmodeled="a model in LLaVA's own layout")),
    **dict.fromkeys(("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
        ModelClass(captured_with_images=True, page=128, blackwell="fa4", chosen_alone=True)),
    **dict.fromkeys(("DeepseekV32ForCausalLM", "Glm4MoeForCausalLM", "GlmMoeDsaForCausalLM"),
        ModelClass(reads_method=True, own_head=True)),
    **dict.fromkeys(("BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
        ModelClass(caches_states=True, captured_with_kda=True)),
    "BeamForCausalLM": ModelClass(window_pool=True, page=64),
    "DeepseekV3ForCausalLM": ModelClass(blackwell="trtllm_mla", chosen_alone=True, reads_method=True, own_head=True),
    "DeepseekV41ForCausalLM": ModelClass(runs_as="DeepseekV4ForCausalLM", window_pool=True, whole_windows=True,
        captured=False, requests=256),
    "DeepseekV4ForCausalLM": ModelClass(window_pool=True, whole_windows=True, captured=False, requests=256,
        window_ratio=0.1, own_head=True),
    "Glm4MoeLiteForCausalLM": ModelClass(own_head=True),
    **dict.fromkeys((
        "Dots3NoteForCausalLM", "HYV4ForCausalLM", "LongcatFlashForCausalLM"
    ), ModelClass(blackwell="trtllm_mla", chosen_alone=True, reads_method=True)),
    **dict.fromkeys(("MistralLarge3ForCausalLM", "PixtralForConditionalGeneration"),
        ModelClass(dtype="bfloat16", blackwell="trtllm_mla", chosen_alone=True, reads_method=True)),
    "DiffusionGemmaForBlockDiffusion": ModelClass(window_pool=True, blackwell="triton"),
    "Exaone4ForCausalLM": ModelClass(blackwell_paged=True),
    "FalconH1ForCausalLM": ModelClass(stages=False, blackwell="triton", caches_states=True),
    "Gemma3ForConditionalGeneration": ModelClass(stages=False, images_on_request=True, nested_head=True),
    **dict.fromkeys(("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"),
        ModelClass(window_pool=True, backends=("trtllm_mha", "triton", "fa4"), blackwell_paged=True)),
    "Gemma4ForCausalLM": ModelClass(window_pool=True, one_shape=True, backends=("trtllm_mha", "triton", "fa4"),
        blackwell_paged=True),
    "Glm5NextForConditionalGeneration": ModelClass(caches_states=True, captured_with_images=True,
        captured_with_kda=True, reads_method=True),
    "GptOssForCausalLM": ModelClass(window_pool=True, backends=("triton", "trtllm_mha", "fa3", "fa4"),
        blackwell_paged=True),
    "GraniteMoeHybridForCausalLM": ModelClass(blackwell="flashinfer", caches_states=True),
    **dict.fromkeys((
        "GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM", "IQuestQ1ForCausalLM", "MellumForCausalLM"
    ), ModelClass(window_pool=True)),
    "HrmTextForCausalLM": ModelClass(both_ways=True),
    **dict.fromkeys(("InklingForConditionalGeneration", "Step3VLForConditionalGeneration"),
        ModelClass(images_on_request=True)),
    "InternS2MobiusForConditionalGeneration": ModelClass(page_by_backend=True, caches_states=True, tracked=False,
        captured_with_images=True),
    "InternS2PreviewForConditionalGeneration": ModelClass(page_by_backend=True, caches_states=True,
        reads_method=True),
    **dict.fromkeys(("JetNemotronForCausalLM", "JetVLMForConditionalGeneration"), ModelClass(blackwell="triton")),
    "KimiK25ForConditionalGeneration": ModelClass(blackwell="trtllm_mla", chosen_alone=True,
        captured_with_images=True, reads_method=True),
    "MiniCPM3ForCausalLM": ModelClass(latent=True),
    **dict.fromkeys(("MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration"),
        ModelClass(blackwell="triton", caches_states=True)),
    "KimiK3ForConditionalGeneration": ModelClass(blackwell="trtllm_mla", chosen_alone=True, caches_states=True,
        captured_with_images=True),
    **dict.fromkeys((
        "KimiLinearForCausalLM", "NemotronH_Omni_Reasoning_V3", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
    ), ModelClass(caches_states=True)),
    **dict.fromkeys(("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"),
        ModelClass(caches_states=True, layer_names=("mamba", "attention", "mlp", "moe"))),
    **dict.fromkeys(("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2"),
        ModelClass(layer_names=("mamba", "attention", "mlp", "moe"))),
    "LagunaForCausalLM": ModelClass(window_pool=True, whole_windows=True),
    **dict.fromkeys(("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
        ModelClass(stages=False, not_backend="triton", blackwell="flashinfer", caches_states=True, tracked=False)),
    "Llama4ForCausalLM": ModelClass(backends=("fa3", "triton", "trtllm_mha"), blackwell_paged=True),
    "Llama4ForConditionalGeneration": ModelClass(stages=False, window_pool=True, whole_windows=True, backends=("fa3",
        "triton", "trtllm_mha"), blackwell_paged=True, images_on_request=True),
    "LlamaForCausalLM": ModelClass(draft_numbers=(5, 4, 8)),
    **dict.fromkeys(("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
        ModelClass(window_pool=True, whole_windows=True, blackwell="fa4", chosen_alone=True,
        unchecked=("self_attn.qkv_proj",))),
    "Mistral3ForConditionalGeneration": ModelClass(nested_head=True),
    "MuseGlimmerForCausalLM": ModelClass(window_pool=True, text_only=True, largest_prefill=512),
    "MuseGlimmerForConditionalGeneration": ModelClass(window_pool=True, captured_with_images=True,
        largest_prefill=512),
    "Olmo2ForCausalLM": ModelClass(stages=False, not_backend="flashinfer", blackwell_paged=True),
    **dict.fromkeys(("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        ModelClass(page_by_backend=True, caches_states=True, captured_with_images=True, reads_method=True)),
    **dict.fromkeys(("Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"), ModelClass(reads_method=True)),
    "Qwen3NextForCausalLM": ModelClass(stages=False, page_by_backend=True, caches_states=True, reads_method=True),
    "Qwen4ExpForConditionalGeneration": ModelClass(page_by_backend=True, caches_states=True,
        captured_with_images=True, reads_method=True),
    **dict.fromkeys(("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
        ModelClass(window_pool=True, whole_windows=True, blackwell="fa4", chosen_alone=True)),
}  # fmt: skip
TYPES: Final[Mapping[str, ModelType]] = {
    "beam": ModelType(dtype="bfloat16"),
    "blip-2": ModelType(tower_place="whole"),
    "chatglm": ModelType(needs="multi_query_attention"),
    **dict.fromkeys(("bloom", "falcon", "jamba", "minimax", "minimax_m1", "minimax_text_01", "mpt"),
        ModelType(absent=True)),
    "cohere": ModelType(dp_attention=False, no_head=True, offload=False),
    **dict.fromkeys(("cohere2", "gemma"), ModelType(dp_attention=False, adapters=True, no_head=True, offload=False)),
    **dict.fromkeys(("dbrx", "gpt2"), ModelType(dp_attention=False, offload=False)),
    **dict.fromkeys(("deepseek_v2", "kimi_k2"),
        ModelType(stages=True, dp_attention=True, adapters=True, offload=True, experts_apart=True)),
    "deepseek_v41": ModelType(tower_kept=False),
    "deepseek_v3": ModelType(stages=True, dp_attention=True, dp_heads=("fp8",), adapters=True, offload=True,
        experts_apart=True),
    "deepseek_v32": ModelType(stages=True, dp_attention=True, adapters=True),
    "dots_ocr": ModelType(head="doubled"),
    "falcon_h1": ModelType(head="wide"),
    "gemma2": ModelType(dp_attention=False, adapters=True, no_head=True, offload=True),
    "gemma3": ModelType(embedding="whole", offload=True, tower="split", tower_size=(12, 768)),
    "gemma3_text": ModelType(tied_inside=True, rope_per_kind=True, embedding="whole", adapters=True),
    "gemma3n": ModelType(embedding="whole", tower_size=(24, 2048)),
    "gemma3n_text": ModelType(embedding="whole", rope_per_kind=True, shares_caches=True),
    "gemma4": ModelType(stages=True, embedding="whole", dp_attention=False, tower="split", tower_size=(16, 768),
        tower_place="first"),
    "gemma4_text": ModelType(window_pool=True, tied_inside=True, shares_caches=True),
    "gemma4_unified": ModelType(tower_size=(16, 768)),
    **dict.fromkeys(("glm4", "qwen2"), ModelType(stages=True, dp_attention=False, adapters=True, offload=True)),
    "glm4_moe": ModelType(stages=True, everywhere="lm_head", dp_attention=True, dp_heads=(None, "compressed-tensors"),
        adapters=True, offload=True),
    "glm4_moe_lite": ModelType(stages=True, everywhere="lm_head", dp_attention=True, adapters=True, offload=True),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr"), ModelType(stages=True, tower="by data")),
    **dict.fromkeys(("glm_moe_dsa", "qwen3"), ModelType(stages=True, dp_attention=True, adapters=True, offload=True)),
    **dict.fromkeys(("glm_ocr_text", "mimo", "minimax_m3"), ModelType(own_head=False)),
    "gpt_oss": ModelType(window_pool=True, stages=True, everywhere="lm_head", dp_attention=True, adapters=True),
    "granite": ModelType(dp_attention=False, adapters=True, offload=False),
    **dict.fromkeys(("granitemoehybrid", "mamba"), ModelType(dp_attention=False)),
    "internlm2": ModelType(no_head=True),
    "interns2_mobius": ModelType(dtype="bfloat16"),
    **dict.fromkeys(("internvl", "llava_next", "llava_onevision"), ModelType(stages=True, tower_place="whole")),
    "kimi_k25": ModelType(stages=True, dp_attention=True, offload=True, tower="by data", tower_size=(27, 1152)),
    "kimi_k3": ModelType(tower_size=(27, 1024), tower_keys=("vt_num_hidden_layers", "vt_hidden_size")),
    "kimi_vl": ModelType(tower="by data"),
    "iquestloopcoder": ModelType(loops="loop_num"),
    "laguna": ModelType(window_pool=True, stages=True),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm2_vl"), ModelType(head="twice")),
    "glmasr": ModelType(head="twice", tower_place="whole"),
    "unlimited-ocr": ModelType(tower_place="whole"),
    **dict.fromkeys(("llama", "mixtral", "phi3"),
        ModelType(stages=True, everywhere="lm_head", dp_attention=False, adapters=True, offload=True)),
    "llama4": ModelType(dp_attention=True, offload=True, tower="split", tower_size=(34, 768), tower_place="on request"),
    "llama4_text": ModelType(window_pool=True, tied_inside=False),
    "llava": ModelType(dp_attention=False, tower_size=(12, 768)),
    "longcat_flash": ModelType(dtype="bfloat16"),
    "mimo_v2_flash": ModelType(window_pool=True),
    "minimax_m2": ModelType(stages=True, everywhere="embedding", dp_attention=True, adapters=True),
    "minimax_m3_vl": ModelType(own_head=False, tower_read=False),
    "ministral3": ModelType(tied_inside=False, adapters=True),
    "mistral": ModelType(tied_inside=False, stages=True, everywhere="lm_head", dp_attention=False, adapters=True,
        offload=True),
    "mistral3": ModelType(stages=True, everywhere="lm_head", offload=True, tower="split", tower_size=(24, 1024)),
    "mllama": ModelType(offload=False, tower="split", tower_size=(32, 1280)),
    "nemotron_h": ModelType(dp_attention=True),
    **dict.fromkeys(("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2"), ModelType(tower_kept=False)),
    **dict.fromkeys(("olmo2", "starcoder2"), ModelType(dp_attention=False, adapters=True, offload=True)),
    "opt": ModelType(stages=True, everywhere="all", offload=True),
    "phi": ModelType(dp_attention=False, offload=True),
    "pixtral": ModelType(tower_read=False),
    "qwen2_5_vl": ModelType(ignores=("head_dim",), stages=True, adapters=True, offload=True, tower="by data",
        tower_size=(24, 3584)),
    "qwen2_moe": ModelType(stages=True, everywhere="lm_head"),
    "qwen2_vl": ModelType(ignores=("head_dim",), tower_size=(24, 3584)),
    "qwen3_5": ModelType(stages=True, embedding="whole by rank", dp_attention=True, dp_heads=(None,), offload=True,
        tower="by data", tower_size=(24, 1152)),
    "qwen3_5_moe": ModelType(stages=True, embedding="whole by rank", dp_attention=True, dp_heads=(None,),
        offload=True, gate_behind=True, tower="by data", tower_size=(24, 1152)),
    "qwen3_5_moe_text": ModelType(by_interval=True, needs="full_attention_interval", own_rope=True, stages=True,
        embedding="whole by rank", dp_attention=True, dp_heads=(None,), gate_behind=True),
    "qwen3_5_text": ModelType(by_interval=True, needs="full_attention_interval", own_rope=True),
    "qwen3_asr": ModelType(needs="thinker_config"),
    "qwen3_next": ModelType(by_interval=True, needs="full_attention_interval", own_rope=True),
    "qwen4_exp_text": ModelType(uncounted="short_conv", tables_on_host="bfloat16"),
    "qwen3_moe": ModelType(stages=True, everywhere="lm_head", dp_attention=True, adapters=True, offload=True,
        gate_behind=True),
    "qwen3_omni_moe": ModelType(stages=True, tower="split"),
    "qwen3_vl": ModelType(stages=True, dp_attention=True, offload=True, tower="by data", tower_size=(24, 1152)),
    "qwen3_vl_moe": ModelType(stages=True, dp_attention=True, offload=True, gate_behind=True, tower="by data",
        tower_size=(24, 1152)),
    "qwen3_vl_moe_text": ModelType(adapters=True, gate_behind=True),
    "qwen3_vl_text": ModelType(adapters=True),
    "smollm3": ModelType(stages=True),
}  # fmt: skip
BLOCKS: Final = 512, 2048  # of pooled keys that its kernel picks (layers/attention/qsa/config.py)
NO_CLASS: Final = ModelClass()
NO_TYPE: Final = ModelType()


def class_of(spec: ModelSpec) -> ModelClass:
    return CLASSES.get(spec.architecture, NO_CLASS)


def type_of(spec: ModelSpec) -> ModelType:
    """The row of the language model's type."""
    return TYPES.get(spec.model_type, NO_TYPE)


def outer_type(spec: ModelSpec) -> str:
    """The model_type of the whole config, which its inner language model's may differ from."""
    return str(spec.config.get("model_type", spec.model_type))


def outer_of(spec: ModelSpec) -> ModelType:
    """The row of the whole config's type."""
    return TYPES.get(outer_type(spec), NO_TYPE)


def standing(request: Request) -> Refusal | str:
    """A refusal of a model without a class, or a note on one that was not compared; empty for most."""
    names = names_in(REGISTRY)
    if names.get(request.spec.architecture, "").startswith("compared"):
        return ""
    from kvplan.servers.plans import model_classes  # few models need it

    row = class_of(request.spec)
    absent = row.absent or type_of(request.spec).absent
    return model_classes.standing(request, names, [row.runs_as] if row.runs_as else (), absent=absent)


def unread(spec: ModelSpec) -> Refusal | None:
    """Return a refusal of a config that SGLang's class of it does not read."""
    text, row = text_of(spec.config), class_of(spec)
    if row.fails or (row.refuses and text.get(row.refuses)):
        return unsupported(f"its {spec.architecture} builds no model: {row.fails or f'{row.refuses} is set'}")
    for needed, values in ((row.needs, text), (type_of(spec).needs, text), (outer_of(spec).needs, spec.config)):
        if needed and not values.get(needed):
            return unsupported(f"its class of {outer_type(spec)} reads {needed}, which the config lacks")
    listed = text.get("layers_block_type") if row.layer_names else ()
    others = sorted({str(name) for name in listed or ()} - {*row.layer_names})
    if others:
        return unsupported(f"layers_block_type: it knows {', '.join(row.layer_names)}, not {others[0]}")
    ratio, budget = text.get("indexer_compress_ratio"), text.get("indexer_budget")
    if spec.is_pooled and isinstance(ratio, int) and budget and budget not in [ratio * count for count in BLOCKS]:
        return unsupported(f"indexer_budget must be {BLOCKS[0]} or {BLOCKS[1]} times indexer_compress_ratio, {ratio}")
    kinds = FullAttention | SlidingWindow
    shapes = {(c.num_kv_heads, c.head_dim) for caches in spec.layers for c in caches if isinstance(c, kinds)}
    if row.one_shape and len(shapes) > 1:
        return unsupported(f"its class of {outer_type(spec)} reads no layers with heads of several shapes")
    return None


def notes(request: Request) -> list[str]:
    answer = standing(request)
    return [answer] if answer and isinstance(answer, str) else []


def as_read(spec: ModelSpec, args: EngineArgs) -> ModelSpec:
    """The model as SGLang reads its config: usually as it is."""
    if args.hf_overrides is not None:
        from kvplan.servers.sglang import config_overrides  # only if the config is changed

        spec = config_overrides.applied(spec, args.hf_overrides)
    if class_of(spec).latent:
        text = text_of(spec.config)
        latents = LatentAttention(int(text["kv_lora_rank"]), int(text["qk_rope_head_dim"]), False)
        spec = replace(spec, layers=((latents,),) * spec.num_layers)
    changes = by_class(spec)
    if changes:
        from kvplan.servers.plans.overrides import changed

        spec = changed(spec, changes)
    return spec


def lists_others(text: Mapping[str, Any]) -> bool:
    """True if the listed layers are not those of the interval."""
    every, listed = text.get("full_attention_interval", 4), text.get("layer_types")
    if not isinstance(listed, list) or not isinstance(every, int) or every < 1:
        return False
    return [kind == "full_attention" for kind in listed] != [(i + 1) % every == 0 for i in range(len(listed))]


def by_class(spec: ModelSpec) -> dict[str, bool | None]:
    """Keys of the config that the model's class reads otherwise: None if it ignores them."""
    text, row = text_of(spec.config), type_of(spec)
    changes: dict[str, bool | None] = {key: None for key in row.ignores if text.get(key)}
    if row.by_interval and lists_others(text):
        changes["layer_types"] = None
    if row.tied_inside is not None and text is not spec.config:
        tied = bool(text.get(TIED, row.tied_inside))
        changes |= {TIED: tied} if tied != spec.tied else {}
    return changes
