"""Rotary tables and a server's default context.

A server keeps cos and sin for every position of the config, whatever context is served: `positions x dim` elements.
Source: vLLM 0.33 model_executor/layers/rotary_embedding and config/model.py (_get_and_verify_max_len).
"""

from kvplan.models.families.config import Config
from kvplan.models.spec import Rope

MAX_FACTOR = 4096  # far above any published scaling
DEFAULT_CONTEXT = 2048  # vLLM's default if a config names no context (Mamba)


def scaling(config: Config) -> Config:
    """The rope settings: `rope_parameters` in newer configs, `rope_scaling` in older ones."""
    return config.sub("rope_parameters" if "rope_parameters" in config else "rope_scaling")


TYPES = (
    "default", "linear", "dynamic", "yarn", "deepseek_yarn", "longrope", "su", "llama3", "llama4", "mrope", "ntk",
    "proportional", "deepseek_llama_scaling",
)  # fmt: skip


def rope_type(config: Config) -> str:
    """Type of position scaling; an unknown type is rejected, as it may change the context."""
    settings = scaling(config)
    kind = settings.text("rope_type", settings.text("type", "default"))
    if kind not in TYPES:
        raise settings.fail("rope_type", f"{kind!r:.40} is unknown to kvplan ({', '.join(TYPES)})")
    return kind


def context(config: Config, default: int | None = None, *, scaled: bool = True) -> tuple[int, int]:
    """(default context, largest accepted context).

    longrope models default to their original context though they accept the long one; linear and dynamic scaling
    multiply it; `model_max_length` in the config wins. Source: vLLM 0.33's results on real configs.
    """
    keys = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
    limit = config.count(*keys, default=default or DEFAULT_CONTEXT)
    if default is None and config.first(keys)[1] is None and "model_max_length" not in config:
        config.notes.append(f"the config names no context: {DEFAULT_CONTEXT:,} tokens, as vLLM takes then")
    stated_or_limit = limit
    settings = scaling(config)
    match rope_type(config):
        case "longrope" | "su":
            key = "original_max_position_embeddings"
            stated_or_limit = settings.count(key, default=config.count(key, default=limit))
        case "linear" | "dynamic" if scaled:
            stated_or_limit = limit = max(1, int(limit * settings.ratio("factor", 1.0, MAX_FACTOR)))
    stated = config.maybe_count("model_max_length")
    return (stated, max(stated, limit)) if stated else (stated_or_limit, limit)


def tables(config: Config, head_dim: int, limit: int) -> tuple[Rope, ...]:
    """The rotary table of a model with one rope: `limit` positions of the rotated part of a head."""
    fraction = config.ratio("partial_rotary_factor", scaling(config).ratio("partial_rotary_factor", 1.0, 1), 1)
    settings = scaling(config)
    positions = limit
    settings.ratio("factor", 1.0, MAX_FACTOR)
    if rope_type(config) in ("yarn", "deepseek_yarn"):
        original = settings.maybe_count("original_max_position_embeddings")
        positions = int(original * settings.ratio("factor", 1.0, MAX_FACTOR)) if original else limit
    return (Rope(int(head_dim * fraction), positions),)
