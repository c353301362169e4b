"""vLLM's --speculative-config: which of its keys choose what is sized, and which are rejected.

Source: vLLM 0.33 config/speculative.py (SpeculativeConfig).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.servers.words.argument_values import MOST_JSON, read_argument
from kvplan.servers.words.arguments import METHODS, NO_DRAFT, NO_DRAFT_NAMES, RANKS, REFUSED_KEYS, plain_method

SIZED: Final = ("method", "model", "num_speculative_tokens", RANKS)
# Keys that move no memory of the GPU, and those of earlier releases (vLLM 0.6 to 0.20).
OTHERS: Final = (
    "enforce_eager", "moe_backend", "max_model_len", "revision", "code_revision", "index_share_for_mtp_iteration",
    "disable_padded_drafter_batch", "disable_eagle_block_drop", "disable_lookahead_block_hashes",
    "use_local_argmax_reduction", "prompt_lookup_max", "prompt_lookup_min", "parallel_drafting",
    "num_speculative_tokens_per_batch_size", "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob", "draft_load_config",
    "rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length",
    "enable_adaptive_verification", "draft_sample_method", "dspark_draft_topk", "xpress_topc", "fly_window_size",
    "fly_entropy_threshold", "fly_entropy_top_k", "acceptance_method", "disable_by_batch_size",
    "disable_logprobs", "disable_mqa_scorer", "posterior_alpha", "posterior_threshold", "speculative_token_tree",
    "synthetic_acceptance_rate",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The parts that are sized; None: not given.

    ranks    draft_tensor_parallel_size: a draft is split over its target's ranks all the same
    unsized  other stated keys and their values, which move no memory
    """

    method: str | None
    model: str | None
    tokens: int | None
    ranks: int | None
    unsized: Mapping[str, Any] = field(default_factory=dict)

    def check_ranks(self, tensor_parallel_size: int, option: str) -> None:
        """Reject a number of ranks that vLLM refuses: it takes 1 or its target's."""
        if self.ranks not in (None, 1, tensor_parallel_size):
            problem = f"{RANKS} {self.ranks} is refused by vLLM with {tensor_parallel_size} of the model"
            raise UsageError(option, problem, f"write {tensor_parallel_size}, or remove it")


def read_config(text: str, option: str) -> SpeculativeConfig:
    """Parse the option's JSON; UsageError if it is no object, or has neither a method nor a draft."""
    try:
        stated = json.loads(text) if len(text) <= MOST_JSON else None
    except (ValueError, RecursionError):
        stated = None
    example = """write '{"method": "mtp", "num_speculative_tokens": 1}'"""
    if not isinstance(stated, dict):
        raise UsageError(option, f"is not a JSON object ({printable(text, 60)!r})", example)
    config = parse_config(stated, option)
    if config.method is None and config.model is None:
        raise UsageError(option, "has neither a method nor a model", example)
    return config


def parse_config(stated: Mapping[str, Any], option: str) -> SpeculativeConfig:
    """Parse a speculative config. Raise UsageError for what vLLM would reject, UnsupportedModelError for a method or a
    key whose effect on memory is not sized.
    """
    config = {key.replace("-", "_"): value for key, value in stated.items()}
    for key in config:
        if key not in (*SIZED, *OTHERS, *REFUSED_KEYS):
            raise unknown_key(key, option)
    method, model = config.get("method"), config.get("model")
    if model is not None and not isinstance(model, str):
        raise UsageError(option, "its speculative model is not a name", "write its id")
    if method is not None and not isinstance(method, str):
        raise UsageError(option, "its speculative method is not a name", f"use one of {', '.join(METHODS)}")
    if method is None and model in NO_DRAFT_NAMES:
        method = model
    if method is not None:
        method = plain_method(method)
        if method not in METHODS:
            raise unknown_method(method, option)
    for key, what in REFUSED_KEYS.items():
        if config.get(key) not in (None, False, "auto"):
            raise UnsupportedModelError(option, f"{key} of the speculative config {what}, which is not modeled")
    if config.get("draft_sample_method") not in (None, "greedy"):
        raise UnsupportedModelError(option, "draft_sample_method keeps the draft's logits, which is not modeled")
    tokens = count_of(config, "num_speculative_tokens", option)
    ranks = count_of(config, RANKS, option)
    unsized = {key: value for key, value in config.items() if key in (*OTHERS, RANKS) and value is not None}
    draft = None if method in NO_DRAFT else model
    return SpeculativeConfig(method, draft, tokens, ranks, unsized)


def count_of(config: Mapping[str, Any], key: str, option: str) -> int | None:
    if config.get(key) is None:
        return None
    name = key.removeprefix("draft_")  # a draft has at most as many ranks
    count: int = read_argument(name, str(config[key]), f"{option} {key}")
    return count


def unknown_key(key: str, option: str) -> UsageError:
    from kvplan.core.near import meant, near_names

    near = meant(near_names(key, {*SIZED, *OTHERS}), f"it has {', '.join(SIZED[:3])}")
    return UsageError(option, f"has no key {printable(key, 40)!r}", near)


def unknown_method(method: str, option: str) -> UnsupportedModelError:
    from kvplan.core.near import meant, near_names

    near = meant(near_names(method, METHODS), f"remove it, or use one of {', '.join(METHODS)}")
    return UnsupportedModelError(option, f"speculative method {printable(method, 40)!r} is not modeled", near)


def with_model(text: str, place: Callable[[str], str]) -> str:
    """The config with its draft's name as `place` gives it; text without a draft, or invalid, as it is."""
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return text
    model = config.get("model") if isinstance(config, dict) else None
    placed = place(model) if isinstance(model, str) else model
    return text if placed == model else json.dumps(config | {"model": placed})
