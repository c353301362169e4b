"""The route without a reader (`--reader server`) against the readers, and by itself.

transformers' classes count their own parameters and write their own caches; a family's reader must come to the same for
the class's default config. facts/by_class.jsonl has vLLM 0.33's own answers for types without a reader.
"""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.errors import KvplanError
from kvplan.models.hf_config import MODULE_OF, MODULES, read_config
from kvplan.models.spec import SlidingWindow
from kvplan.sizing.weights import Layout, total_weights
from tests import oracles

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")


def defaults(model_type: str) -> dict[str, Any] | None:
    """The default config of a causal language model's class; None if transformers has no such class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if model_type not in CAUSAL:
        return None
    values: dict[str, Any] = json.loads(transformers.AutoConfig.for_model(model_type).to_json_string(use_diff=False))
    values.pop("time_step_limit", None)  # infinity, which JSON has no number for
    return values


def parameters(values: dict[str, Any]) -> int:
    from kvplan.models.by_class import asked_of
    from kvplan.models.families.config import Config

    shapes = asked_of(Config(values, "config.json"), values["model_type"]).shapes
    return sum(math.prod(shape) for shape in shapes.values())


# Where vLLM 0.33's class, which the reader follows, differs from transformers': a third norm in the dense layer, too;
# norms of queries and keys only where `qk_norm` says so; sinks; a head's bias.
OTHERWISE = {"axk1": 7168, "hy_v3": -80 * 256, "hy_v4": 8448, "phimoe": 32_064}


@pytest.mark.parametrize(
    "model_type", sorted({*MODULE_OF} - {*MODULES["encoders"]} - {"mllama", "whisper", "longcat_flash"})
)
def test_a_reader_counts_what_transformers_own_class_has(model_type: str) -> None:
    values = defaults(model_type)
    if values is None:
        pytest.skip(f"transformers has no causal language model of type {model_type}")
    try:
        spec, counted = read_config(values, "config.json", model_type), parameters(values)
    except KvplanError as error:
        pytest.skip(f"its defaults are no model's: {error}")
    own = sum(weight.num_params for weight in spec.weights)
    assert own == counted + OTHERWISE.get(model_type, 0)


WIDER = {"cohere2_moe": 1}  # vLLM 0.33's class of Cohere 2 adds a token to the window (tests/models: its own answers)


@pytest.mark.parametrize("model_type", sorted({*MODULE_OF} - {*MODULES["encoders"]} - {"mllama", "whisper"}))
def test_a_reader_has_the_caches_that_the_class_writes(model_type: str) -> None:
    """Where a class writes no more than keys and values; servers keep latents and states otherwise."""
    from kvplan.models.by_class import read
    from kvplan.models.families.config import Config

    values = defaults(model_type)
    if values is None:
        pytest.skip(f"transformers has no causal language model of type {model_type}")
    try:
        spec, draft = read_config(values, "config.json", model_type), read(Config(values, "config.json"), model_type)
    except KvplanError as error:
        pytest.skip(f"not by both routes: {error}")
    wider = WIDER.get(model_type, 0)
    written = [
        replace(cache, window=cache.window + wider) if isinstance(cache, SlidingWindow) else cache
        for caches in draft.layers for cache in caches
    ]  # fmt: skip
    assert written == [cache for caches in spec.layers for cache in caches]


ROWS = [json.loads(line) for line in (Path(__file__).parents[1] / "facts" / "by_class.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['inputs']['model']} on {row['inputs']['tp']}")
def test_types_without_a_reader_have_the_servers_weights_and_blocks(
    row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 runs these by transformers' classes; its parameters and blocks are its own code's."""
    model_type = row["inputs"]["model"]
    values = defaults(model_type)
    if values is None:
        pytest.skip(f"this transformers has no class of type {model_type}")
    spec = read_config(values, "config.json", model_type, by_class=True)
    monkeypatch.setattr(oracles, "spec_in", lambda folder: spec)
    assert oracles.compare_case(row) == (oracles.EQUAL, [])


@pytest.mark.parametrize(
    ("model_type", "problem"),
    [
        ("recurrent_gemma", "keeps no keys and values"),  # 18 of its 26 layers keep a state alone
        ("lfm3", "--reader server cannot size"),
        ("youtu", "kv_lora_rank: servers keep latents"),
        ("bart", "is_encoder_decoder"),
    ],
)
def test_a_class_that_keeps_anything_else_is_refused_by_name(model_type: str, problem: str) -> None:
    values = defaults(model_type)
    if values is None:
        pytest.skip(f"this transformers has no class of type {model_type}")
    with pytest.raises(KvplanError, match=problem):
        read_config(values, "config.json", model_type, by_class=True)


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "olmoe",
        "ernie4_5",
        "exaone4",
        "apertus",
        "arcee",
        "gemma2",
        "glm4",
        "granite",
    ],
)
def test_both_routes_give_ranks_the_same_bytes_and_layers_the_same_caches(model_type: str) -> None:
    from kvplan.models.by_class import read
    from kvplan.models.families.config import Config

    values = defaults(model_type)
    assert values is not None
    spec, draft = read_config(values, "config.json", model_type), read(Config(values, "config.json"), model_type)
    own = replace(spec, layer_weights=tuple(draft.layer_weights), other_weights=tuple(draft.other_weights))
    assert tuple(draft.layers) == spec.layers
    for ranks in (1, 2, 4):
        assert total_weights(own, Layout(tp=ranks)) == total_weights(spec, Layout(tp=ranks))


def test_a_class_with_latents_is_refused_by_the_key_that_says_so() -> None:
    values = {**(defaults("llama") or {}), "model_type": "unheard", "kv_lora_rank": 512}
    with pytest.raises(KvplanError, match="kv_lora_rank"):
        read_config(values, "config.json", "model", by_class=True)


def test_without_transformers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**(defaults("llama") or {}), "model_type": "unheard"}
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(KvplanError, match=r"--reader server: transformers is not installed; pip install transformers"):
        read_config(values, "config.json", "model", by_class=True)
