"""Rotary tables and a model's context: the lengths that its config states, with its family's default.

A config may state several lengths, and servers read them in different orders: `Context.lengths` has them all.

A server keeps cos and sin for every position of the config, whatever context is served: `positions x dim` elements.
Source: vLLM 0.33 model_executor/layers/rotary_embedding.
"""

from collections.abc import Mapping
from typing import Final

from kvplan.core.records import dataclass
from kvplan.models.families.config import Config
from kvplan.models.spec import Rope

MAX_FACTOR = 4096  # far above any published scaling


def scaling(config: Config) -> Config:
    """The rope settings: `rope_parameters` in newer configs, `rope_scaling` in older ones."""
    return config.sub("rope_parameters" if "rope_parameters" in config else "rope_scaling")


TYPES = (
    "default", "linear", "dynamic", "yarn", "deepseek_yarn", "longrope", "su", "llama3", "llama4", "mrope", "ntk",
    "proportional", "deepseek_llama_scaling",
)  # fmt: skip


def rope_type(settings: Config) -> str:
    """Type of position scaling; an unknown type is rejected, as it may change the context."""
    kind = settings.text("rope_type", settings.text("type", "default"))
    if kind not in TYPES:
        raise settings.fail("rope_type", f"{kind!r:.40} is unknown to kvplan ({', '.join(TYPES)})")
    return kind


def scalings(config: Config) -> list[Config]:
    """The rope settings of each kind of layer, if they are listed by kind, else the one for all."""
    settings = scaling(config)
    kinds = [kind for kind, value in settings.values.items() if isinstance(value, dict)]
    return [settings.sub(kind) for kind in kinds] or [settings]


def table_rows(config: Config, positions: int) -> int:
    """Rows of the rotary table for a config with so many positions: more with linear, dynamic and YaRN scaling."""
    settings = scaling(config)
    kind = rope_type(settings)
    factor = settings.ratio("factor", 1.0, MAX_FACTOR)
    if kind in ("yarn", "deepseek_yarn"):
        original = settings.maybe_count("original_max_position_embeddings")
        return int(original * factor) if original else positions
    return max(1, int(positions * factor)) if kind in ("linear", "dynamic") else positions


def tables(config: Config, head_dim: int, positions: int) -> tuple[Rope, ...]:
    """The rotary table of a model with one rope: the rotated part of a head, for a config's positions."""
    fraction = config.ratio("partial_rotary_factor", scaling(config).ratio("partial_rotary_factor", 1.0, 1), 1)
    return (Rope(int(head_dim * fraction), table_rows(config, positions)),)


# --- context ------------------------------------------------------------------------------------------------------

# Keys that vLLM 0.33 (transformers_utils/model_arch_config_convertor.py, derive_max_model_len_and_key) and SGLang
# 0.5.23 (utils/hf_transformers/common.py, CONTEXT_LENGTH_KEYS) read from the language model's part of a config.
KEYS: Final = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
POSITIONS: Final = "max_position_embeddings"
# Its other name in a family's class; beside it in another's, the class's default counts, too.
ALIASES: Final = {"gpt2": "n_positions", "gpt_bigcode": "n_positions", "gptj": "n_positions", "dbrx": "max_seq_len"}
WINS: Final = "model_max_length"
DEFAULT: Final = 2048  # every server's if a config names no length (Mamba)
# Value of `max_position_embeddings` where a config lacks it -> model types. Source: the classes of transformers 5.23,
# with which a test compares them; what it lacks is read from vLLM 0.33's answers (mimo, nemotron-nas); both servers
# read deepseek_v32 and kimi_k2 with the class of deepseek_v3.
DEFAULTS_OF: Final[Mapping[int, tuple[str, ...]]] = {
    512: ("bert", "roberta", "xlm-roberta"),
    1024: ("gpt2", "gpt_bigcode"),
    2048: ("llama", "granite", "olmo2", "olmo3", "exaone4", "opt", "falcon", "phi", "gpt_neox", "gptj", "dbrx", "llava",
           "granitemoe", "granitemoehybrid", "deepseek_v2", "aria_text", "exaone_moe", "granitemoeshared",
           "granitemoe_swa", "hyperclovax", "hrm_text"),
    4096: ("phi3", "starcoder2", "stablelm", "olmoe", "deepseek_v3", "nemotron_h",
           "deepseek_v32", "kimi_k2", "arcee", "nemotron", "zamba2"),
    8192: ("gemma", "gemma2", "cohere", "cohere2", "falcon_h1", "modernbert", "jais2", "granite_swa", "cohere2_moe",
           "beam", "dory"),
    16_384: ("afmoe",),
    32_768: ("internlm3", "mimo", "smollm3", "qwen2", "qwen2_5_vl", "qwen2_5_omni_text", "qwen2_vl", "qwen3",
             "glm4v_text", "qwen2_moe", "qwen3_moe", "qwen3_omni_moe_text", "qwen3_next", "qwen3_5_text",
             "qwen3_5_moe_text", "gemma3n_text", "axk1", "minicpm3", "qwen4_exp_text", "qwen4_exp"),
    36_864: ("molmo2", "molmo2_text"),
    65_536: ("glm4v_moe_text", "apertus", "olmo_hybrid"),
    128_000: ("qwen3_vl_text", "qwen3_vl_moe_text", "lfm2", "step3p5", "lfm2_moe"),
    131_072: ("mistral", "nemotron-nas", "gemma3_text", "glm", "glm4", "glm_ocr_text", "mllama", "mllama_text_model",
              "mixtral", "phimoe", "gpt_oss", "llama4_text", "glm4_moe", "mimo_v2_flash", "laguna", "gemma4_text",
              "minimax", "cwm", "ernie4_5", "ernie4_5_moe", "paddleocr_vl_text", "hy_v3", "longcat_flash",
              "cosmos3_edge_text", "muse_glimmer_text", "diffusion_gemma_text"),
    196_608: ("minimax_m2",),
    202_752: ("glm_moe_dsa", "glm4_moe_lite"),
    262_144: ("ministral3", "jamba", "flint", "bailing_hybrid", "hy_v4"),
    524_288: ("seed_oss", "minimax_m3_vl"),
    1_048_576: ("mistral4", "deepseek_v4", "deepseek_v41_text", "deepseek_v41", "glm5_next_text", "glm5_next"),
}  # fmt: skip
DEFAULT_OF: Final = {kind: length for length, kinds in DEFAULTS_OF.items() for kind in kinds}
ORIGINAL: Final = "original_max_position_embeddings"
ORIGINAL_OF: Final = {"phi3": 4096}  # its class has one
# Their length is already scaled. Source: vLLM 0.33 config/model.py (_get_and_verify_max_len).
SCALED_TYPES: Final = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
SCALED_FAMILY: Final = "gemma3"
FLAT: Final = ("qwen2_vl", "qwen2_5_vl")  # their class moves the language model's own keys to a part, and no others
COHERE: Final = ("cohere", "cohere2")  # their tables are made for model_max_length (model_executor/models/commandr.py)


@dataclass(frozen=True, slots=True)
class Context:
    """Lengths of a config in tokens.

    default    what a server takes by default; limit: the largest that it accepts
    positions  what rotary tables are made for, before scaling
    lengths    by the config's key, with the family's default for a missing `max_position_embeddings`
    """

    default: int
    limit: int
    positions: int
    lengths: Mapping[str, int]

    @classmethod
    def of(cls, positions: int) -> "Context":
        """The context of a model whose learned positions limit it."""
        return cls(positions, positions, positions, {POSITIONS: positions})


def lengths_of(config: Config) -> dict[str, int]:
    """Every length that a config states, with its family's default."""
    family = str(config.values.get("model_type"))
    stated = {key: config.count(key) for key in KEYS if key in config and (key == POSITIONS or family not in FLAT)}
    default = DEFAULT_OF.get(family)
    if default is not None and not stated.keys() & {POSITIONS, ALIASES.get(family)}:
        stated[POSITIONS] = default
        config.notes.append(f"the config names no {POSITIONS}: {default:,}, its family's default")
    return stated


def check_factors(config: Config, settings: Config) -> None:
    """Reject longrope whose lists of factors do not have a number for each pair of a head's rotated values."""
    if "hidden_size" not in config or "num_attention_heads" not in config or "qk_rope_head_dim" in config:
        return
    head_dim = config.count("head_dim", default=config.count("hidden_size") // config.count("num_attention_heads"))
    pairs = tables(config, head_dim, 1)[0].dim // 2
    for key in ("short_factor", "long_factor"):
        factors = settings.values.get(key)
        if isinstance(factors, list) and len(factors) not in (1, pairs):
            raise settings.fail(key, f"has {len(factors)} factors for {pairs} pairs of rotated values", "correct it")


def context_of(config: Config) -> Context:
    """The published context: the smallest length, unless `model_max_length` states one.

    longrope models default to their original context though they accept the long one; linear and dynamic scaling
    multiply it. Source: vLLM 0.33 config/model.py (_get_and_verify_max_len).
    """
    lengths = lengths_of(config)
    if not lengths:
        config.notes.append(f"the config names no context: {DEFAULT:,} tokens, as vLLM takes then")
    limit = lengths.get(WINS) or min(lengths.values(), default=DEFAULT)
    settings, family = scalings(config), str(config.values.get("model_type"))
    kinds = [rope_type(kind) for kind in settings]
    if family in ORIGINAL_OF and "yarn" in kinds and "rope_scaling" in config and "long_factor" not in settings[0]:
        raise config.fail("rope_scaling", "names yarn, which Phi-3's class reads as longrope", "correct the config")
    if not family.startswith(SCALED_FAMILY):
        factors = [
            kind.ratio("factor", 1.0, MAX_FACTOR)
            for kind, name in zip(settings, kinds, strict=True)
            if name not in SCALED_TYPES
        ]
        limit = max(1, int(limit * (factors or [1.0])[-1]))
    default = limit
    for part, name in zip(settings, kinds, strict=True):
        if name in ("longrope", "su"):
            check_factors(config, part)
    if "longrope" in kinds or "su" in kinds:
        default = limit if family in FLAT else config.count(ORIGINAL, default=ORIGINAL_OF.get(family, limit))
    positions = next((lengths[key] for key in KEYS if key in lengths), DEFAULT)
    return Context(default, limit, lengths.get(WINS, positions) if family in COHERE else positions, lengths)
