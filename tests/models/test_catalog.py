"""The catalog: its layout, that every model in it can be read, and that what is read agrees with published totals."""

import json
import re
from collections import Counter
from typing import Any

import pytest
import yaml

from kvplan.core import entries
from kvplan.core.errors import UsageError
from kvplan.models import catalog
from kvplan.models.spec import HeadAttention, LatentHeads, ModelSpec, Scheme
from kvplan.sizing import weights
from tests import oracles
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture
from tests.support.oracle_data import DATA, needs_oracle_data

NAMES = catalog.model_names()
MODELS = DATA / "models"

# What the catalog must know: one model at least of every family that people serve.
FAMILIES = """
    llama-2-7b llama-3-8b llama-3.1-8b llama-3.1-70b llama-3.1-405b llama-3.2-3b llama-3.3-70b llama-4-scout
    llama-4-maverick mistral-7b mixtral-8x7b mistral-nemo-12b mistral-small-24b mistral-large-2407 qwen2-7b qwen2.5-7b
    qwen3-32b qwen3-30b-a3b qwen3-235b-a22b qwen3-next-80b-a3b qwen3.5-27b qwen3.6-27b gemma-2-9b gemma-3-27b
    gemma-3n-e4b gemma-4-31b phi-3-mini-4k phi-4 deepseek-v2 deepseek-v3 deepseek-r1 deepseek-v3.1 deepseek-v3.2
    deepseek-r1-distill-llama-70b deepseek-r1-distill-qwen-32b gpt-oss-20b gpt-oss-120b glm-4-9b glm-4.5 glm-4.6 glm-4.7
    glm-5 kimi-k2 minimax-m2.5 command-r-35b command-a falcon-7b falcon-40b opt-6.7b gpt2 tinyllama-1.1b smollm2-1.7b
    granite-3.3-8b olmo-2-7b starcoder2-15b yi-1.5-9b internlm2.5-7b nemotron-h-8b nemotron-nano-9b-v2
    nemotron-super-49b jamba-1.5-mini mamba-2.8b falcon-h1-7b bloom-176b mpt-7b
"""


def lookup_names(name: str) -> list[str]:
    facts = catalog.facts(name)
    return [name, facts["id"], *facts.get("aliases", [])]


def oracle_rows(file_name: str) -> dict[str, dict[str, Any]]:
    """Rows of an oracle file by lower-case model id; none where the data is not there."""
    path = MODELS / file_name
    if not path.is_file():
        return {}
    return {row["model"].lower(): row for row in map(json.loads, path.read_text().splitlines())}


def rows_of_catalog(file_name: str) -> list[tuple[str, dict[str, Any]]]:
    """(model, row) for each row whose id is a model's id or alias."""
    matches = ((catalog.find(model), row) for model, row in oracle_rows(file_name).items())
    return [(name, row) for name, row in matches if name is not None]


def exact_rows() -> list[tuple[str, dict[str, Any]]]:
    """Those that the published total confirms to the parameter."""
    return [(name, row) for name, row in rows_of_catalog("params.jsonl") if row.get("check") == "exact"]


# --- layout: what kvplan/core/entries.py relies on -----------------------------------------------------------------


def test_the_whole_file_is_yaml_and_has_the_sections_that_the_quick_look_up_finds() -> None:
    parsed = yaml.safe_load(catalog.path().read_text(encoding="utf-8"))
    assert list(parsed) == NAMES
    assert len(set(NAMES)) == len(NAMES)
    for name in NAMES:
        assert parsed[name] == catalog.facts(name)


def test_everything_of_an_entry_is_indented() -> None:
    for line in catalog.path().read_text(encoding="utf-8").splitlines():
        assert not line or line[0] in " #" or line.rstrip(":") in NAMES, line


def test_aliases_stand_on_one_line_and_all_of_them_are_found() -> None:
    for name in NAMES:
        assert [catalog.find(known) for known in lookup_names(name)] == [name] * len(lookup_names(name))


def test_no_name_id_or_alias_is_used_twice() -> None:
    counts = Counter(known.lower() for name in NAMES for known in lookup_names(name))
    assert [known for known, count in counts.items() if count > 1] == []


def test_an_entry_has_only_the_documented_keys() -> None:
    for name in NAMES:
        facts = catalog.facts(name)
        assert {"id", "source", "config"} <= set(facts) <= {"id", "aliases", "source", "note", "parameters", "config"}
        assert "/" in facts["id"]
        assert facts["source"]


# --- names --------------------------------------------------------------------------------------------------------


def test_at_least_120_models_and_every_family_people_serve() -> None:
    assert len(NAMES) >= 120
    assert [name for name in FAMILIES.split() if name not in NAMES] == []


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "LLAMA-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/llama-3.1-8b"]
)
def test_a_model_answers_to_its_name_its_aliases_and_hub_ids_whatever_their_case(name: str) -> None:
    assert catalog.find(name) == "llama-3.1-8b"
    assert catalog.load(name).name == "llama-3.1-8b"


def test_a_name_may_be_written_as_it_is_said() -> None:
    assert catalog.find("Qwen3 8B") == "qwen3-8b"
    assert catalog.find("GPT OSS 120B") == "gpt-oss-120b"


def test_an_unknown_name_is_refused_with_near_misses() -> None:
    assert catalog.find("lama-3.1-8b") is None
    for ask in (catalog.load, catalog.facts):
        with pytest.raises(UsageError, match=r"model 'lama-3.1-8b': not in the catalog; did you mean .*llama-3.1-8b"):
            ask("lama-3.1-8b")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwen3.8-flash-next", "qwen4_exp"),
        ("deepseek-ai/DeepSeek-V4-Pro-0813", "no copy of its published config"),
    ],
)
def test_a_model_that_is_known_to_be_missing_says_why(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"not in the catalog: .*{re.escape(why)}"):
        catalog.load(name)


def test_a_missing_model_by_its_hub_id_says_why_too(run: Run) -> None:
    line = refused(run("estimate", "Qwen/Qwen3.8-Flash-Next", "--gpu", "b200", "--offline"), 3)
    assert "qwen4_exp" in line


@pytest.mark.parametrize("names", ["llama-3.1-8b,qwen3-8b", "llama-3.1-8b, Qwen/Qwen3-8B"])
def test_several_names_in_one_are_told_apart(names: str) -> None:
    remedy = "several names, not one; name one; `kvplan sweep` takes several, separated by spaces"
    with pytest.raises(UsageError, match=f"model '{names}': {remedy}"):
        catalog.load(names)


def test_no_model_of_the_catalog_is_called_missing() -> None:
    known = [word.lower().rpartition("/")[2] for name in NAMES for word in lookup_names(name)]
    assert not [word for word in known for missing in catalog.MISSING if f"{word}-".startswith(f"{missing}-")]


def test_a_name_like_nothing_known_says_where_the_names_are() -> None:
    with pytest.raises(UsageError, match="`kvplan models` lists the known ones"):
        catalog.load("zzzzzzzzzzzz")


# --- the shorthand for long lists ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ([{"repeat": ["a", "b"], "times": 2}, "c"], ["a", "b", "a", "b", "c"]),
        ([{"repeat": [{"repeat": [0], "times": 2}, 1], "times": 2}], [0, 0, 1, 0, 0, 1]),
        ({"x": {"y": [{"repeat": [{"no_op": True}], "times": 2}]}}, {"x": {"y": [{"no_op": True}, {"no_op": True}]}}),
        ([{"repeat": [1], "times": 2, "other": 3}], [{"repeat": [1], "times": 2, "other": 3}]),
        ({"repeat": [1], "times": 2}, {"repeat": [1], "times": 2}),  # only inside a list
    ],
)
def test_repeat_stands_for_copies_inside_a_list(written: Any, meant: Any) -> None:
    assert catalog.expand(written) == meant


# --- facts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_model_is_read_and_has_the_parameters_that_are_published(name: str) -> None:
    """`parameters` is the published total or what the transformers classes count; kvplan did not compute it."""
    spec = catalog.load(name)
    assert spec.source == catalog.facts(name)["source"]
    assert spec.num_layers > 0
    expected = catalog.facts(name).get("parameters")
    if expected is not None:
        assert oracles.total_params(spec) == expected


# From the models' own announcements or Hub pages, so that a wrong `parameters` cannot confirm itself.
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.3-70b", 70_553_706_496),
        ("mistral-7b", 7_248_023_552),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-3-27b", 27_432_406_640),  # tower included
        ("llama-4-scout", 108_641_793_536),  # tower included
        ("phi-4", 14_659_507_200),
        ("jamba-1.5-mini", 51_570_323_328),
        ("bloom-176b", 176_247_271_424),
        ("deepseek-v3", 684_531_386_000 - 13_463_426_048 - 41_540_496 - 59 * 256),  # less MTP block, scales, biases
        ("kimi-k3", 2_779_931_837_184 - 92 * 896 - 69 * 32),  # less biases of routers, and A_log of 128 for 96 heads
        ("falcon-40b", 41_835_970_560 - 65_024 * 8_192),  # the tied head is stored twice
    ],
)
def test_totals_published_on_the_hub(name: str, published: int) -> None:
    assert oracles.total_params(catalog.load(name)) == published


@needs_oracle_data
@pytest.mark.parametrize(("name", "row"), exact_rows(), ids=lambda value: value if isinstance(value, str) else "")
def test_parameters_equal_what_transformers_counts(name: str, row: dict[str, Any]) -> None:
    spec = catalog.load(name)
    assert (oracles.total_params(spec), oracles.text_params(spec)) == (row["total_params"], row["text_params"])


@needs_oracle_data
@pytest.mark.parametrize(
    ("name", "row"), rows_of_catalog("kv_geometry.jsonl"), ids=lambda value: value if isinstance(value, str) else ""
)
def test_kv_geometry_equals_what_transformers_caches(name: str, row: dict[str, Any]) -> None:
    assert oracles.geometry(catalog.load(name)) == oracles.expected_geometry(row)


def published_scales(spec: ModelSpec) -> int:
    """Scales that the checkpoint stores: one per block, per output, or (weight and input) per matrix."""
    total = 0
    for layer, layer_weights in enumerate(spec.layer_weights):
        for weight in layer_weights:
            scheme = weights.scheme_for(spec, weight, layer, None)
            copies = max(1, weight.experts)
            match scheme:
                case Scheme(kind="fp8_block", block=(rows, columns)):
                    blocks = sum(-(-part.size // rows) for part in weight.parts) * -(-weight.inputs // columns)
                    total += copies * blocks
                case Scheme(kind="fp8_channel" | "int8_channel"):
                    total += copies * weight.outputs
                case Scheme(kind="fp8_tensor", static=True):
                    total += copies * 2 * max(1, len(weight.sources))
                case _:
                    assert scheme is None
    return total


# The Hub's totals count the scales as elements: they tell which layers a checkpoint quantises, and how.
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen3-8b-fp8", 8_191_159_296),
        ("qwen3-32b-fp8", 32_764_027_904),
        ("qwen3-30b-a3b-2507-fp8", 30_533_947_392),
        ("qwen3-235b-a22b-fp8", 235_107_904_512),
        ("minimax-m2.5", 228_703_644_928 - 62 * 256),  # less the routing biases
        ("llama-3.1-8b-fp8", 8_030_261_696),
        ("llama-3.1-8b-fp8-dynamic", 8_031_637_504),
        ("llama-3.1-8b-w8a8", 8_031_637_504),
        ("llama-3.1-405b-fp8", 405_868_625_920),
        ("llama-3.3-70b-fp8-dynamic", 70_560_423_936),
        ("mistral-small-24b-fp8-dynamic", 23_575_680_000),
        ("qwen3-32b-fp8-dynamic", 32_766_710_784),
    ],
)
def test_quantised_checkpoints_have_the_scales_that_their_published_totals_count(name: str, published: int) -> None:
    spec = catalog.load(name)
    assert oracles.total_params(spec) + published_scales(spec) == published


def test_a_name_that_says_quantised_is_quantised() -> None:
    named = [name for name in NAMES if re.search(r"-(fp8|awq|gptq|w8a8)|gpt-oss", name)]
    assert len(named) >= 20
    assert [name for name in named if catalog.load(name).quantization is None] == []


# --- light --------------------------------------------------------------------------------------------------------


def test_reading_one_model_parses_one_entry() -> None:
    entries.entry.cache_clear()
    catalog._read.cache_clear()
    catalog.load("llama-3.1-8b")
    assert entries.entry.cache_info().currsize == 1


LLAMA_3_ROPE = [
    name for name in NAMES if (config := catalog.expand(catalog.facts(name)["config"]))["model_type"] == "llama"
    and (config.get("rope_scaling") or {}).get("rope_type") == "llama3"
]  # fmt: skip


@pytest.mark.parametrize("name", LLAMA_3_ROPE)
def test_llama_3s_rope_turns_as_transformers_turns_it(name: str) -> None:
    """The published configs name two frequencies, for which transformers has no default."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from engine.rotary import frequencies

    spec = catalog.load(name)
    attentions = [layer.attention for layer in spec.decoder.layers]
    ropes = {attention.rotary for attention in attentions if isinstance(attention, HeadAttention | LatentHeads)}
    (rope,) = filter(None, ropes)
    config = catalog.expand(catalog.facts(name)["config"])
    config_keys = (
        "hidden_size",
        "num_attention_heads",
        "head_dim",
        "max_position_embeddings",
        "rope_theta",
        "rope_scaling",
    )
    own = config.get("text_config", config)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](
        LlamaConfig(**{key: own[key] for key in config_keys if key in own}), torch.device("cpu")
    )
    assert frequencies(rope, 1).tolist() == pytest.approx(theirs.tolist(), rel=1e-5)
