"""Flags that published results ran with but do not state: those of InferenceX's scripts, by server, model and GPU.

Source: SemiAnalysisAI/InferenceX (InferenceMAX until 2026), benchmarks/single_node, 2025-11 to 2026-04.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.timing.facts import Fact, name_of

SOURCES = ("inferencex", "inferencemax")
BLACKWELL = ("b200", "b300", "gb200", "gb300")


class Recipe(NamedTuple):
    """Flags of a script; gpus: all if empty.

    seqs, tokens   the most sequences and tokens of a step; 0 sequences: as many as users
    poll           decode steps between looks at new requests (SGLang's --scheduler-recv-interval), from 16 users on
    stream         tokens that are sent together (SGLang's --stream-interval; the first waits for the rest)
    memory         percent of the memory for weights and cache (SGLang's --mem-fraction-static)
    is_async       vLLM's --async-scheduling, where it is not the default yet
    is_narrow      experts in mxfp4 get inputs in mxfp8 (VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8)
    """

    engine: str
    model: str
    gpus: tuple[str, ...] = ()
    kv: str = "auto"
    seqs: int | None = None
    tokens: int | None = None
    poll: int = 1
    stream: int = 1
    memory: int | None = None
    is_async: bool = False
    is_narrow: bool = False


RECIPES = (
    Recipe("vllm", "llama-3.1-70b", ("b200",), "fp8", 512, 8192),
    Recipe("vllm", "llama-3.1-70b", (), "fp8", 0, 8192),
    Recipe("vllm", "gpt-oss-120b", ("b200",), "fp8", 512, 8192, is_async=True, is_narrow=True),
    Recipe("vllm", "gpt-oss-120b", ("h100-80g", "h200"), "auto", 0, 8192, is_async=True),
    Recipe("vllm", "kimi-k2.5", (), "auto", 0),
    Recipe("vllm", "minimax-m2.5", ("b200", "b300"), "fp8"),
    Recipe("vllm", "minimax-m2.5", (), "auto", 256),
    Recipe("sglang", "deepseek-v3.1-nvfp4", (), "fp8", 256, 16_384, 30, 10, 85),
    Recipe("sglang", "deepseek-r1", ("h200",), "auto", 256, 32_768, 1, 10, 82),
    Recipe("sglang", "deepseek-r1", BLACKWELL, "fp8", 128, 32_768, 30, 30, 82),
    Recipe("sglang", "qwen3.5-397b-a17b-nvfp4", (), "fp8", 128, 32_768, 30, 30, 85),
    Recipe("sglang", "qwen3.5-397b-a17b", ("h200",), "fp8", 128, 16_384, 1, 50, 80),
    Recipe("sglang", "qwen3.5-397b-a17b", (), "fp8", 128, 32_768, 30, 30, 82),
    Recipe("sglang", "glm-5", ("h200",), memory=85),
    Recipe("sglang", "glm-5-nvfp4", (), "fp8", None, 32_768, 1, 30, 90),
    Recipe("sglang", "glm-5", (), "fp8", 0, 32_768, 1, 30, 85),
)


def recipe_of(fact: Fact) -> Recipe | None:
    """The first recipe of a fact's server, model and GPU, if its source used one."""
    if fact.src not in SOURCES:
        return None
    name = re.sub(r"^.*--", "", name_of(fact))
    fits = (
        row
        for row in RECIPES
        if row.engine == fact.engine and name.startswith(row.model) and (not row.gpus or fact.gpu in row.gpus)
    )
    return next(fits, None)


def with_recipe(fact: Fact) -> Fact:
    """A fact with the flags that its source's script set and the result does not state."""
    recipe = recipe_of(fact)
    if recipe is None:
        return fact
    users = fact.users or 1
    flags: dict[str, Any] = {
        "max_num_seqs": recipe.seqs if recipe.seqs != 0 else users,
        "max_num_batched_tokens": recipe.tokens,
        "recv_interval": None if recipe.poll == 1 else (recipe.poll if users >= 16 else 10),
        "stream_interval": recipe.stream,
        "memory_percent": recipe.memory,
        "async_scheduling": int(recipe.is_async) or None,
        "narrow_inputs": int(recipe.is_narrow) or None,
    }
    if fact.engine == "sglang" and fact.tp == 4 and "deepseek-r1" in fact.model:  # the script's own case
        flags |= {"max_num_seqs": 32, "max_num_batched_tokens": 8192, "recv_interval": 10, "memory_percent": 95}
    limits: Mapping[str, int] = {name: value for name, value in flags.items() if value is not None} | fact.limits
    return replace(fact, limits=limits, kv_dtype=recipe.kv if fact.kv_dtype in ("", "auto") else fact.kv_dtype)
